"""`Explanation.compare` and its picture, and `jtile explain --compare`."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jtile as jt
from jtile.errors import KernelValueError
from jtile.tools.cli import main

X = jax.ShapeDtypeStruct((64, 96), jnp.float32)
RATES = {"memory": 1e9, "float32": 1e9}
FILE = """import jtile as jt

@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, *, rows: jt.cdiv(x.shape[0], rows))
def doubled(x, o, *, rows=8):
    X, O = x.tiles(rows, x.shape[1]), o.tiles(rows, x.shape[1])
    O[jt.program_id(0), 0] = X[jt.program_id(0), 0] * 2
"""


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, *, rows: jt.cdiv(x.shape[0], rows))
def doubled(x, o, *, rows=8):
    X, O = x.tiles(rows, x.shape[1]), o.tiles(rows, x.shape[1])
    O[jt.program_id(0), 0] = X[jt.program_id(0), 0] * 2


def explained(**meta):
    return jt.explain(lambda x: doubled(x, **meta), X, run=False, rates=RATES)


def timed(found, *times):
    kernels = [dataclasses.replace(k, time_us=t) for k, t in zip(found.kernels, times, strict=True)]
    return dataclasses.replace(found, kernels=tuple(kernels))


def test_variants_stand_side_by_side():
    found = explained().compare(explained(rows=16), ("rows=8", "rows=16"))
    text = str(found)
    assert found.speed == 1 and text.endswith("alike (by their bounds, nothing was measured)")
    programs = next(line for line in text.splitlines() if line.startswith("  programs"))
    assert programs.split() == ["programs", "8", "4"]
    bound = next(line for line in text.splitlines() if line.startswith("  bound"))
    assert bound.split() == ["bound", "49.2", "us", "49.2", "us", "1.00"]
    faster = timed(explained(), 100.0).compare(timed(explained(rows=16), 50.0), ("small", "large"))
    assert faster.speed == 2 and "large is 2.00 times as fast (measured)" in str(faster)
    assert "small is 2.00 times" in str(timed(explained(), 50.0).compare(timed(explained(), 100.0), ("small", "large")))


def test_kernels_of_other_names_have_a_row_of_their_own():
    two = jt.explain(lambda x: jt.call(copy, out_type=X)(doubled(x)), X, run=False, rates=RATES)
    lines = [line.split("  ")[0] for line in str(explained().compare(two)).splitlines()]
    assert "doubled" in lines and "- / copy" in lines


def copy(x, o):
    o[...] = x[...]


def test_pictures(tmp_path):
    explained().compare(timed(explained(rows=16), 70.0)).picture(tmp_path / "two.svg")
    text = (tmp_path / "two.svg").read_text()
    assert text.count("49.2") == 2 and "70.0" in text
    explained().picture(tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 1000
    with pytest.raises(KernelValueError, match=r"one of .*png"):
        explained().picture(tmp_path / "one.txt")
    with pytest.raises(KernelValueError, match="no kernel to draw"):
        jt.explain(jnp.sin, X, run=False).picture(tmp_path / "none.png")


def test_two_devices_are_not_compared():
    with pytest.raises(KernelValueError, match="explanations of one device"):
        explained().compare(dataclasses.replace(explained(), device="another"))


def test_the_command(tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text(FILE)
    what = f"{tmp_path / 'mine.py'}:doubled"

    def command(*args):
        with pytest.raises(SystemExit) as status:
            main(["explain", what, "--args", "f32[64,96]", *args])
        return status.value.code

    assert not command("--compare", "rows=16", "--picture", str(tmp_path / "x.svg"))
    out = capsys.readouterr().out
    assert "default" in out and "rows=16" in out and (tmp_path / "x.svg").exists()
    assert not command("--meta", "rows=4", "--compare", "jtile.ops:softmax")
    assert "jtile.ops:softmax" in capsys.readouterr().out
    assert "there is no folder" in command("--picture", str(tmp_path / "none" / "x.svg"))
