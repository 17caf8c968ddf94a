"""`jtile tune`, `jtile bench` and `jtile explain`."""

import sys
from pathlib import Path

import pytest

import jtile as jt
from jtile.errors import KernelValueError
from jtile.tools import tuning
from jtile.tools.cli import main
from jtile.tune import device
from jtile.tune.store import Entry, read, store, write

KERNELS = Path(__file__).parents[1] / "support" / "tunable.py"
FILE = """
import sys
sys.path.insert(0, {folder!r})
import tunable
double = tunable.double_kernel()
run = lambda x: double(x)
plain = lambda x: x + 1
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "mine_tuned.py").write_text(FILE.format(folder=str(KERNELS.parent)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with jt.config(cache_dir=str(tmp_path / "cache")):
        store.forget()
        yield tmp_path
    store.forget()
    sys.modules.pop("mine_tuned", None)


def run(*argv):
    with pytest.raises(SystemExit) as stop:
        main(list(argv))
    return stop.value.code


def test_tune_show_and_merge(here, capsys):
    search = ("tune", "mine_tuned.py:double", "--time-limit", "5")
    assert run(*search, "--args", "f32[64]", "--out", "a.json") == 0
    assert "speedup" in capsys.readouterr().out
    assert run(*search, "--args", "f32[32]", "-o", "b.json") == 0
    kind = device.kind()
    (first,), (second,) = (read(here / name)[1] for name in ("a.json", "b.json"))
    assert ("float32[64]" in first, "float32[32]" in second) == (True, True)
    assert run("tune", "merge", "a.json", "b.json", "-o", "c.json") == 0
    assert set(read(here / "c.json")[1]) == {first, second}
    capsys.readouterr()
    assert run("tune", "show") == 0
    shown = capsys.readouterr().out
    assert f"2 entries for {kind}" in shown
    assert first in shown
    assert run("tune", "show", "a.json") == 0


def test_bench(here, capsys):
    command = ("bench", "mine_tuned.py:double", "--args", "f32[64]", "--rounds", "2")
    assert run(*command, "--peer", "mine_tuned.py:plain") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["on", "function", "mine_tuned.py:double", "mine_tuned.py:plain"]
    assert "the sum" not in lines and "no module" in run(*command, "--peer", "nowhere_tuned:plain").lower()


def test_no_time_at_all(here, capsys):
    assert run("tune", "mine_tuned.py:double", "--args", "f32[64]", "--time-limit", "0") == 0
    said = capsys.readouterr().out
    assert "time was up: double#" in said
    assert "kept for" not in said


@pytest.mark.parametrize("where", ["/proc/none/a.json", "."])
def test_a_file_that_cannot_be_written_is_known_before_the_search(here, where, monkeypatch):
    monkeypatch.setattr(tuning, "tune", lambda *_, **__: pytest.fail("it searched"))
    assert "the tuning file" in run("tune", "mine_tuned.py:double", "--args", "f32[64]", "--out", where)
    write(here / "a.json", "d", {"x": Entry({}, 1.0, 1.0)})
    assert "the tuning file" in run("tune", "merge", "a.json", "-o", where)


@pytest.mark.parametrize("option", ["--trace", "--picture"])
def test_a_folder_that_is_not_there_is_known_before_the_profile(here, option, monkeypatch):
    monkeypatch.setattr(tuning, "profile", lambda *_, **__: pytest.fail("it ran"))
    message = run("profile", "mine_tuned.py:double", "--args", "f32[64]", "--interpret", option, "none/x.svg")
    assert "none/x.svg cannot be written: there is no folder none" in message


def test_an_interrupt_says_what_is_kept(here, monkeypatch, capsys):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "tune", stopped)
    assert run("tune", "mine_tuned.py:double", "--args", "f32[64]") == 130
    assert "nothing was found yet" in capsys.readouterr().err


def test_explain(here, capsys):
    assert run("explain", "mine_tuned.py:double", "--args", "f32[64]", "--meta", "bm=4") == 0
    assert "double" in capsys.readouterr().out
    assert run("explain", "jtile.ops:matmul", "--args", "f32[64,64],f32[64,64]") == 0
    assert "\nmatmul on cpu: " in capsys.readouterr().out


def test_explain_says_what_fuse_decided(here, capsys):
    body = "def f(x, axis=0):\n    return jax.nn.softmax(x, axis=axis) @ x.T\n"
    (here / "mine_fused.py").write_text(f"import jax, jtile as jt\n\n@jt.fuse(static_argnames='axis')\n{body}")
    assert run("explain", "mine_fused.py:f", "--args", "f32[64,128]", "--meta", "axis=1") == 0
    printed = capsys.readouterr().out
    assert "kernel fused_max_stop_gradient_sub_exp: " in printed
    assert "jt.fuse makes no kernels of dot_general" in printed


def test_explain_and_inspect_show_an_execution_graph_and_its_kernels(here, capsys):
    body = "def g(x, w):\n    return jt.ops.matmul(jt.ops.rms_norm(x, w), x.T)\n"
    (here / "mine_graph.py").write_text(f"import jtile as jt\n\n@jt.graph\n{body}")
    assert run("explain", "mine_graph.py:g", "--args", "f32[64,128],f32[128]") == 0
    printed = capsys.readouterr().out
    for text in ("launch: 2 tasks, ", "  task 1: matmul", "XLA: float32[128,64] = transpose", "\nrms_norm_rows  "):
        assert text in printed
    assert run("inspect", "mine_graph.py:g", "--args", "f32[64,128],f32[128]") == 0
    printed = capsys.readouterr().out
    assert "rms_norm_rows: llvm" in printed and "matmul: tile_ir" in printed


def test_files_of_different_devices_are_not_merged(here):
    for name in ("a", "b"):
        write(here / f"{name}.json", name, {"x": Entry({}, 1.0, 1.0)})
    with pytest.raises(KernelValueError, match="different devices"):
        tuning.run("merge", ["a.json", "b.json"], args="", meta=[], time_limit=None, out="c.json")
    with pytest.raises(KernelValueError, match="where to write"):
        tuning.run("merge", ["a.json"], args="", meta=[], time_limit=None, out=None)


def test_a_missing_file_and_an_empty_cache(here, capsys, monkeypatch):
    monkeypatch.setattr("jtile.tools.tuning.RECORDS", here)  # this machine may be one that records are shipped for
    assert "cannot be read" in run("tune", "show", "none.json")
    assert run("tune", "show") == 0
    assert "nothing is kept" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["tune", "explain", "profile"])
def test_arguments_that_do_not_fit(here, command):
    message = "mine_tuned.py:run does not take the arguments (): missing a required argument: 'x'"
    assert message in run(command, "mine_tuned.py:run", "--args", "")


@pytest.mark.parametrize("command", ["tune", "explain"])
def test_a_function_without_a_kernel(here, command):
    assert "mine_tuned.py:plain calls no kernel" in run(command, "mine_tuned.py:plain", "--args", "f32[3]")
