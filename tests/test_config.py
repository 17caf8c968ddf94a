"""Options: keyword, environment and context manager, their checks, and their part in jit's cache key."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jtile._config import Config, config, configure, current, from_environment
from jtile._errors import KernelValueError


@pytest.fixture
def environment(monkeypatch):
    """Sets JTILE_ variables and reads them afresh, whatever the suite itself has set."""

    def read(**variables):
        for name in ("JTILE_POISON", "JTILE_VERIFY", "JTILE_CACHE_DIR", "JTILE_OPTIMIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return from_environment.__wrapped__()

    return read


@pytest.fixture
def process_options():
    before = current()
    yield
    configure(**{name: getattr(before, name) for name in ("verify", "poison", "seed")})


def test_context_manager_nests_and_restores():
    base = current()
    with config(poison=False, seed=3) as c:
        assert current() is c
        assert (c.poison, c.seed) == (False, 3)
        with config(seed=4):
            assert (current().poison, current().seed) == (False, 4)
        assert current() is c
    assert current() == base


def test_context_manager_restores_after_an_error():
    base = current()
    with pytest.raises(ZeroDivisionError), config(seed=9):
        _ = 1 / 0
    assert current() == base


def test_configure_reaches_other_threads_and_config_does_not(process_options):
    seen = []
    configure(seed=11)
    with config(seed=12):
        thread = threading.Thread(target=lambda: seen.append(current().seed))
        thread.start()
        thread.join()
    assert seen == [11]


@pytest.mark.parametrize("value", [True, False])
def test_options_that_change_code_are_part_of_the_jit_cache_key(value):
    traces = []
    with config(poison=not current().poison):  # the first change in a process makes every jitted function trace again
        pass

    @jax.jit
    def f(x):
        traces.append(current().poison)
        return x + 1

    x = jnp.float32(1)
    with config(poison=value):
        f(x)
        f(x)
    with config(poison=not value):
        f(x)
        f(x)
    assert traces == [value, not value]
    with config(poison=value, verify=not current().verify):
        f(x)
    assert traces == [value, not value], "an option that leaves the code alone must not trace again"


def test_configure_is_part_of_the_jit_cache_key(process_options):
    traces = []
    f = jax.jit(lambda x: traces.append(current().seed) or x)
    for seed in (101, 102, 101):
        configure(seed=seed)
        f(jnp.float32(1))
    assert traces == [101, 102]


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("4096", 4096), ("512M", 512 << 20), ("2g", 2 << 30), ("1KB", 1024), (" 7K ", 7168)]
)
def test_environment_sizes(environment, text, size):
    assert environment(JTILE_CACHE_SIZE=text).cache_size == size


@pytest.mark.parametrize(
    ("text", "flag"), [("1", True), ("true", True), ("ON", True), ("0", False), ("", False), ("no", False)]
)
def test_environment_flags(environment, text, flag):
    assert environment(JTILE_INTERPRET=text).interpret is flag
    assert environment(JTILE_OVERLAP=text).overlap is flag


def test_environment_texts(environment):
    got = environment(JTILE_DUMP="", JTILE_ISA="avx2", JTILE_FALLBACK="interpret", JTILE_CACHE_DIR="/x", JTILE_SEED="5")
    assert got == Config(cache_dir="/x", dump=None, isa="avx2", fallback="interpret", seed=5)


@pytest.mark.parametrize("name", ["cache_dir", "dump"])
def test_folders_of_the_environment_stay_where_they_are(environment, monkeypatch, tmp_path, name):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for text, path in (("here", tmp_path / "here"), ("~/there", tmp_path / "home" / "there"), ("", "")):
        assert (getattr(environment(**{f"JTILE_{name.upper()}": text}), name) or "") == str(path)


def test_default_cache_folder_follows_xdg(environment):
    assert environment(XDG_CACHE_HOME="/somewhere").cache_dir == "/somewhere/jtile"


@pytest.mark.parametrize("text", ["", "relative", "./x"])
def test_a_relative_xdg_folder_is_ignored(environment, monkeypatch, text):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert environment(XDG_CACHE_HOME=text).cache_dir == "/home/somebody/.cache/jtile"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("JTILE_VERIFY", "maybe", "JTILE_VERIFY='maybe': expected 1 or 0"),
        ("JTILE_OVERLAP", "maybe", "JTILE_OVERLAP='maybe': expected 1 or 0"),
        ("JTILE_SEED", "x", "JTILE_SEED='x': expected a whole number"),
        ("JTILE_SEED", "1K", "JTILE_SEED='1K': expected a whole number"),
        ("JTILE_CACHE_SIZE", "-1", "JTILE_CACHE_SIZE='-1': expected bytes"),
        ("JTILE_FALLBACK", "guess", "option fallback='guess': expected one of 'raise', 'interpret'"),
        ("JTILE_VERFIY", "1", "JTILE_VERFIY is set, but jtile has no such option; did you mean JTILE_VERIFY?"),
    ],
)
def test_bad_environment(environment, variable, value, message):
    with pytest.raises(KernelValueError) as error:
        environment(**{variable: value})
    assert message in str(error.value)


@pytest.mark.parametrize("variable", ["JTILE_TRITON_ADAPTER", "JTILE_BISHENGIR"])
def test_variables_of_platforms_are_no_options(environment, variable):
    assert environment(**{variable: "/a/tool"}) == environment()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"posion": True}, "no option 'posion'; did you mean poison?"),
        ({"poison": 1}, "option poison=1: expected bool"),
        ({"seed": True}, "option seed=True: expected int"),
        ({"seed": -1}, "expected a number that is not negative"),
        ({"dump": 3}, "option dump=3: expected str or None"),
        ({"fallback": "warn"}, "expected one of 'raise', 'interpret'"),
        ({"arch": "hopper"}, "option arch='hopper': expected an architecture, such as 'sm_90'"),
        ({"arch": "sm_1"}, "option arch='sm_1': expected an architecture, such as 'sm_90'"),
        ({"arch": "sm_90,gfx9"}, "gfx942, gfx950, gfx1100, gfx1201, 910b1, 910b2"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(KernelValueError) as error, config(**options):
        pass
    assert message in str(error.value)
    with pytest.raises(KernelValueError):
        configure(**options)


def test_paths_are_kept_as_text(tmp_path):
    with config(dump=tmp_path, cache_dir=tmp_path) as c:
        assert c.dump == c.cache_dir == str(tmp_path)


@pytest.mark.parametrize("name", ["cache_dir", "dump"])
@pytest.mark.parametrize("kind", [str, Path])
def test_folders_that_are_set_stay_where_they_are(monkeypatch, tmp_path, name, kind):
    monkeypatch.chdir(tmp_path)
    with config(**{name: kind("here")}) as c:
        assert getattr(c, name) == str(tmp_path / "here")
    with config(cache_dir="") as c:
        assert c.cache_dir == ""


def test_import_leaves_jax_alone(subprocess_env):
    code = "import jtile._config as c; c.current(); assert c._new_jit_context.cache_info().currsize == 0"
    subprocess.run([sys.executable, "-c", code], check=True, env=subprocess_env)


def test_a_checkout_that_is_not_installed_says_so(subprocess_env):
    """-S reads no .pth file, so that the installation which maps the folders is not there."""
    env = subprocess_env | {"PYTHONPATH": os.path.dirname(os.path.dirname(jax.__file__))}
    root = Path(__file__).parents[1]
    if (root / "jtile" / "lowering").exists():
        pytest.skip("this checkout is importable where it lies: .ci/on-gpu links its folders")
    run = [sys.executable, "-S", "-c", "import jtile"]
    done = subprocess.run(run, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith(
        "ImportError: jtile is imported from a checkout that is not installed"
    )
    assert "pip install -e ." in done.stderr
