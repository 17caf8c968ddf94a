"""The command line as a user meets it: in a process of its own."""

import json
import subprocess
import sys
import time

import pytest

from jtile._config import config
from jtile.tools import cachedir, cli


@pytest.fixture
def jtile(subprocess_env):
    def call(*args, **env):
        command = [sys.executable, "-m", "jtile.tools.cli", *args]
        environment = subprocess_env | {"COLUMNS": "120"} | env
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    return call


def test_help_is_quick_and_lists_the_commands(jtile):
    start = time.perf_counter()
    done = jtile("--help")
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stderr
    for command in ("info", "generate", "inspect", "cache", "demo"):
        assert command in done.stdout
    assert seconds < 2, "jtile --help must not import jax"


def test_info(jtile):
    done = jtile("info")
    assert done.returncode == 0, done.stderr
    assert "jaxlib" in done.stdout
    page = json.loads(jtile("info", "--json").stdout)
    assert page["versions"]["jax"] and page["devices"]
    assert page["cpu"]["vector_bits"] in (128, 256, 512)


def test_errors_are_one_message_without_a_traceback(jtile):
    done = jtile("inspect", "nothing", "--args", "f32[1]")
    assert done.returncode == 1
    assert done.stderr == "jtile: 'nothing' names no kernel: write module:kernel, such as jtile.ops:softmax\n"


def test_debug_shows_the_traceback(jtile):
    assert "Traceback" in jtile("inspect", "nothing", "--args", "f32[1]", JTILE_DEBUG="1").stderr


def test_a_bad_environment_is_named(jtile):
    done = jtile("info", JTILE_SEED="many")
    assert done.returncode == 1
    assert done.stderr.strip() == "jtile: JTILE_SEED='many': expected a whole number"


def test_cache_off_and_absent(tmp_path):
    with config(cache_dir=""):
        assert cachedir.usage().files == 0
        assert cachedir.describe(cachedir.usage()).startswith("off")
    with config(cache_dir=str(tmp_path / "absent")):
        assert cachedir.usage().files == 0


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KB"), (5 << 20, "5.0 MB"), (3 << 30, "3.0 GB")]
)
def test_sizes(size, text):
    assert cachedir.human(size) == text


def test_generate_passes_its_options_on(monkeypatch):
    seen = {}
    monkeypatch.setattr("jtile.models.run_generate", lambda prompt, **options: seen.update(options, prompt=prompt) or 7)
    with pytest.raises(SystemExit) as exit_status:
        cli.main(["generate", "hello", "-n", "5", "--top-k", "3", "--raw", "--json", "--temperature", "0.5"])
    assert exit_status.value.code == 7
    wanted = {"prompt": "hello", "max_new_tokens": 5, "top_k": 3, "chat": False, "json": True, "temperature": 0.5}
    assert {name: seen[name] for name in wanted} == wanted


def test_generate_without_a_model(jtile):
    done = jtile("generate", "hello", "--model", "/no/such/model.gguf")
    assert done.returncode == 1
    assert done.stderr.startswith("jtile: there is no model at /no/such/model.gguf")
