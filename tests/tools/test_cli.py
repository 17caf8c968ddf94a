"""The command line as a user meets it: in a process of its own."""

import json
import subprocess
import sys

import forked
import pytest

import jtile as jt
from jtile import _cache
from jtile._config import config
from jtile._errors import CacheError
from jtile.tools import cachedir, cli


@pytest.fixture
def jtile(subprocess_env):
    def call(*args, **env):
        command = [sys.executable, "-m", "jtile.tools.cli", *args]
        environment = subprocess_env | {"COLUMNS": "120"} | env
        return forked.run(command, env=environment)

    return call


def run(*args):
    """The command in this process."""
    with pytest.raises(SystemExit) as status:
        cli.main(list(args))
    return status.value.code


def test_help_lists_the_commands(jtile):
    done = jtile("--help")
    assert done.returncode == 0, done.stderr
    for command in ("info", "generate", "quantize", "inspect", "cache", "demo"):
        assert command in done.stdout


def test_the_command_line_loads_nothing_before_a_command_runs(subprocess_env):
    late = {"flax", "llvmlite", "matplotlib", "tokenizers", "jtile.models", "jtile.ops", "jtile.lowering"}
    code = f"import sys; from jtile.tools import cli; print({late} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=subprocess_env, check=True)
    assert done.stdout == "set()\n"


def test_info(jtile):
    done = jtile("info")
    assert done.returncode == 0, done.stderr
    assert "jaxlib" in done.stdout
    page = json.loads(jtile("info", "--json").stdout)
    assert page["versions"]["jax"] and page["devices"]
    assert "float32" in page["targets"]["cpu"]["dtypes"]


def test_the_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"jtile {jt.__version__}\n"


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


def test_cache(tmp_path, capsys):
    with config(cache_dir=str(tmp_path / "absent")):
        run("cache", "info")
        _cache.put("ab", {}, bytes(3000))
        (tmp_path / "absent" / "kernels" / "notes.txt").write_text("not ours")
        run("cache", "clear")
        assert _cache.info().entries == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path}/absent: 0 kernels, 0 B of at most 1.0 GB"
    assert lines[1].startswith("removed 1 kernels (3.")
    assert (tmp_path / "absent" / "kernels" / "notes.txt").exists()


def test_a_cache_that_cannot_be_cleared(tmp_path, monkeypatch):
    with config(cache_dir=str(tmp_path)):
        _cache.put("ab", {}, bytes(3000))
        monkeypatch.setattr(_cache, "clear", lambda: None)  # what a read-only folder comes to, root or not
        with pytest.raises(CacheError, match=r"1 kernels .* cannot be deleted"):
            cachedir.clear()


def test_cache_switched_off():
    with config(cache_dir=""):
        assert cachedir.describe(_cache.info()).startswith("off")


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KB"), (5 << 20, "5.0 MB"), (3 << 30, "3.0 GB")]
)
def test_sizes(size, text):
    assert cachedir.human(size) == text


def test_generate_passes_its_options_on(monkeypatch):
    seen = {}
    monkeypatch.setattr("jtile.models.run_generate", lambda prompt, **options: seen.update(options, prompt=prompt) or 7)
    wanted = {"temperature": 0.5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": -0.5}
    wanted |= {"frequency_penalty": 0.2, "logit_bias": "3=-1", "top_k": 3, "draft": "ngram", "draft_tokens": 2}
    wanted |= {"dtype": "float32", "cache_dtype": "int8"}
    flags = [text for name, value in wanted.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    assert run("generate", "hello", "-n", "5", "--raw", "--json", *flags) == 7
    wanted |= {"prompt": "hello", "max_new_tokens": 5, "chat": False, "json": True}
    assert {name: seen[name] for name in wanted} == wanted


def test_generate_without_a_model(jtile):
    done = jtile("generate", "hello", "--model", "/no/such/model.gguf")
    assert done.returncode == 1
    assert done.stderr.startswith("jtile: there is no model at /no/such/model.gguf")
