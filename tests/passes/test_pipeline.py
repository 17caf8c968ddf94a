"""Pipelines: order, dumps, verification, determinism."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from jtile._config import config
from jtile._errors import KernelValueError, VerificationError
from jtile.ir import parse_kernel, print_kernel, verify
from jtile.passes import PIPELINES, TILE, Pass, canonicalise, dce, run_pipeline

TEXT = """kernel @"my kernel"(%x: ref<32xf32>, %o: ref<32xf32, out>, %acc: ref<8xf32, scratch>) grid(4) {
  %i = program_id 0 : i32
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c4 = full 4 : i32
  %z = full 0.0 : tile<8xf32>
  store %acc[%c0:+8], %z
  for %k in %c0..%c4 step %c1 {
    %s = full 2.0 : tile<8xf32>
    %a = load %x[tile(%k, 8)] : tile<8xf32>
    %b = mul %s, %a : tile<8xf32>
    %c = load %acc[%c0:+8] : tile<8xf32>
    %d = add %b, %c : tile<8xf32>
    store %acc[%c0:+8], %d
  }
  %r = load %acc[%c0:+8] : tile<8xf32>
  store %o[tile(%i, 8)], %r
}
"""
AFTER = """kernel @"my kernel"(%x: ref<32xf32>, %o: ref<32xf32, out>) grid(4) {
  %i = program_id 0 : i32
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c4 = full 4 : i32
  %z = full 0.0 : tile<8xf32>
  %acc = for %k in %c0..%c4 step %c1 carry (%acc_1 = %z) {
    %s = full 2.0 : tile<8xf32>
    %a = load %x[tile(%k, 8)] checked=false : tile<8xf32>
    %b = mul %a, %s : tile<8xf32>
    %d = add %b, %acc_1 : tile<8xf32>
    yield %d
  }
  store %o[tile(%i, 8)], %acc checked=false
}
"""


def test_the_tile_pipeline():
    kernel = parse_kernel(TEXT)
    after = run_pipeline(kernel, TILE)
    assert print_kernel(after) == AFTER
    assert print_kernel(run_pipeline(after, TILE)) == AFTER
    assert print_kernel(kernel) == TEXT
    verify(after)


def test_passes_are_named_values():
    assert PIPELINES["tile"] is TILE
    for p in TILE:
        assert isinstance(p, Pass)
        assert p.name.isidentifier()
        assert p.ensures.endswith(".")
        with pytest.raises(dataclasses.FrozenInstanceError):
            p.name = "other"  # type: ignore[misc]


def test_a_dump_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("no folder")
    refused = pytest.raises(KernelValueError, match=r"option dump=.* cannot be written")
    with config(dump=str(tmp_path / "file")), refused:
        run_pipeline(parse_kernel(TEXT), (dce,))


def test_dumps_are_numbered(tmp_path):
    with config(dump=str(tmp_path)):
        run_pipeline(parse_kernel(TEXT), (canonicalise, dce))
        run_pipeline(parse_kernel(TEXT), (canonicalise, dce))
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("my_kernel-")
    assert sorted(f.name for f in folder.iterdir()) == ["00_traced.tile", "01_canonicalise.tile", "02_dce.tile"]
    assert (folder / "00_traced.tile").read_text() == TEXT
    parse_kernel((folder / "02_dce.tile").read_text())


def test_another_kernel_of_the_same_name_gets_another_folder(tmp_path):
    with config(dump=str(tmp_path)):
        run_pipeline(parse_kernel(TEXT), ())
        run_pipeline(parse_kernel(TEXT.replace("2.0", "3.0")), ())
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_is_written_without_the_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with config(dump=None):
        run_pipeline(parse_kernel(TEXT), TILE)
    assert list(tmp_path.iterdir()) == []


def _break(kernel):
    kernel = canonicalise(kernel)
    kernel.body.ops.reverse()
    return kernel


def test_a_pass_that_breaks_the_ir_is_named():
    bad = Pass("bad", "Nothing holds.", _break)
    with config(verify=True), pytest.raises(VerificationError, match="after pass bad: kernel my kernel"):
        run_pipeline(parse_kernel(TEXT), (bad,))
    with config(verify=False):
        run_pipeline(parse_kernel(TEXT), (bad,))


def test_a_pass_that_breaks_the_ir_is_named_where_a_later_one_fails_over_it():
    def fails(kernel):
        verify(kernel)
        raise AssertionError

    passes = (Pass("bad", "Nothing holds.", _break), Pass("late", "Nothing is reached.", fails))
    with config(verify=True), pytest.raises(VerificationError, match="after pass bad: kernel my kernel"):
        run_pipeline(parse_kernel(TEXT), passes)


def test_the_kernel_itself_is_verified_first():
    kernel = parse_kernel(TEXT)
    kernel.body.ops.reverse()
    with config(verify=True), pytest.raises(VerificationError, match="not defined before"):
        run_pipeline(kernel, ())


def test_passes_do_not_depend_on_the_process(subprocess_env):
    """They give the same here, where hashes have another seed, and in a process of its own."""
    code = (
        "import sys; from jtile.ir import *; from jtile.passes import *\n"
        "sys.stdout.write(print_kernel(run_pipeline(parse_kernel(sys.stdin.read()), TILE)))"
    )
    run, env = [sys.executable, "-c", code], subprocess_env | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(run, input=TEXT, capture_output=True, text=True, env=env, check=True)
    assert done.stdout == print_kernel(run_pipeline(parse_kernel(TEXT), TILE)) == AFTER
