"""Lines of levels lead back to lines of the source, at every level of every back end."""

from __future__ import annotations

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.explorer import links
from jtile.explorer.emitted import linked
from jtile.ir import NOWHERE, Loc
from jtile.lowering import targets
from jtile.lowering.cpu.compile import SHORT, compile_kernel, emit_kernel
from jtile.lowering.cpu.isa import host_isa
from jtile.lowering.cpu.located import located_levels
from jtile.lowering.emitting import Marks
from jtile.lowering.triton.compile import emit_kernel as emit_ttir
from jtile.lowering.triton.features import features


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, *, rows, **_: jt.cdiv(x.shape[0], rows))
def scaled(x, o, *, rows=4):
    i = jt.program_id(0)
    tile = x.tiles(rows, x.shape[1])[i, 0]
    top = jnp.exp(tile - tile.max(1, keepdims=True))
    o.tiles(rows, x.shape[1])[i, 0] = top


X = np.ones((10, 32), np.float32)


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, *, rows, **_: jt.cdiv(x.shape[0], rows))
def strided(x, o, *, rows=4):
    """Of a length at which the debug information alone would make it a long one, with a division in its loop."""
    i = jt.program_id(0)
    for k in jt.range(4):
        o[jt.ds(i * rows, rows), :] = x[jt.ds(i - k, rows, stride=3), :] + x[jt.ds(i + k, rows, stride=2), :]


@pytest.fixture(scope="module")
def lowered():
    return scaled.lower(X, target="cpu")


@pytest.fixture(scope="module")
def shorter():
    return strided.lower(X, target="cpu")


def lines_of(linked, word):
    return {place.line for line, place in zip(linked.lines, linked.places, strict=True) if word in line}


def line_with(word):
    """The line of this file that has a word first: one of the kernel."""
    return next(k for k, text in enumerate(Path(__file__).read_text().splitlines(), 1) if word in text)


EXP, STORE = line_with("jnp.exp(tile"), line_with("[i, 0] = top")


def test_jaxpr(lowered):
    found = links.jaxpr(lowered.program.jaxpr)
    assert lines_of(found, " = exp") == {EXP}
    assert lines_of(found, "jtile_store") == {STORE} and STORE in lines_of(found, "masked=False")
    assert not any("#" in line for line in found.lines)


def test_tile_ir(lowered):
    found = links.tile_ir(lowered.kernel)
    assert "\n".join(found.lines) + "\n" == jt.ir.print_kernel(lowered.kernel)
    assert lines_of(found, "store ") == {STORE}
    assert lines_of(found, " = exp ") == {EXP}
    assert found.places[0].file == __file__ and found.places[-1] == NOWHERE


def test_marks_change_nothing_but_comments(lowered):
    """The text that compilers get has the same lines with marks and without, on CPUs and GPUs."""
    for comment, emit in (
        (";", lambda marks: emit_kernel(lowered.kernel, host_isa(), marks)[0]),
        ("//", lambda marks: emit_ttir(lowered.kernel, features("sm_90"), marks=marks)[0]),
    ):
        marks = Marks(comment)
        plain, marked = emit(None).splitlines(), emit(marks).splitlines()
        assert plain != marked
        assert plain == [line.rpartition(f" {comment} @")[0] or line for line in marked]
        places = marks.places("\n".join(marked))
        assert {p.line for p in places if p.file} >= {EXP, STORE}


def test_cpu_levels_are_those_that_run(lowered):
    """Optimised IR and machine code with lines are the same code as without."""
    made, places = located_levels(lowered.kernel, host_isa())
    plain = compile_kernel(lowered.kernel, texts=True).texts
    assert made["llvm"] == plain["llvm"]
    assert "dbg" in made["llvm_opt"] and "dbg" not in "\n".join(links.llvm(made["llvm_opt"], places).lines)
    code = lambda linked: [x for x in linked.lines if x.startswith("\t") and not x.startswith("\t.")]
    found = links.assembly(made["asm"], places)
    assert code(found) == code(links.assembly(plain["asm"], []))
    for one in (links.llvm(made["llvm_opt"], places), found):
        assert {p.line for p in one.places if p.file} >= {EXP, STORE}


def test_cpu_levels_of_a_kernel_that_debug_information_makes_long(shorter):
    made, places = located_levels(shorter.kernel, host_isa())
    plain = compile_kernel(shorter.kernel, texts=True).texts
    assert made["llvm"] == plain["llvm"] and SHORT / 2 < plain["llvm"].count("\n") <= SHORT
    code = lambda linked: [x for x in linked.lines if x.startswith("\t") and not x.startswith("\t.")]
    assert code(links.assembly(made["asm"], places)) == code(links.assembly(plain["asm"], []))


PLACES = [NOWHERE, Loc("a.py", 2), Loc("a.py", 3)]


def test_mlir_locations():
    text = """#loc1 = loc("/tmp/k.ttir":2:5)
#loc2 = loc("k"(#loc1))
module {
  %0 = a loc(#loc1)
  %1 = b loc(#loc2)
  %2 = c loc("/tmp/k.ttir":3:1)
  %3 = d loc(unknown)
} loc(#loc)
#loc = loc("/tmp/k.ttir":9:1)"""
    found = links.mlir(text, PLACES)
    assert found.lines == ["module {", "  %0 = a", "  %1 = b", "  %2 = c", "  %3 = d", "}"]
    assert [p.line for p in found.places] == [0, 2, 2, 3, 0, 0]


def test_llvm_debug_information():
    text = """define void @f() !dbg !4 {
  %a = add i32 1, 2, !dbg !7
  ret void, !dbg !8
}

!llvm.dbg.cu = !{!0}
!7 = !DILocation(line: 2, column: 1, scope: !4)
!8 = distinct !DILocation(line: 99, scope: !4)
"""
    found = links.llvm(text, PLACES)
    assert found.lines == ["define void @f() {", "  %a = add i32 1, 2", "  ret void", "}"]
    assert [p.line for p in found.places] == [0, 2, 0, 0]


def test_assembly_and_machine_code():
    text = '\t.text\n\t.file\t1 "k"\nf:\n$L__tmp0:\n\t.loc\t1 2 3 // k:2:3\n\tadd r1, r2;\n\t.loc\t1 0 0\n\tret;\n'
    found = links.assembly(text + "\t.section\t.debug_abbrev\n\t.b8 1\n", PLACES)
    assert found.lines == ["\t.text", "f:", "\tadd r1, r2;", "\tret;"]
    assert [p.line for p in found.places] == [0, 0, 2, 0]
    text = '\t//## File "k", line 3\n        /*0000*/  MOV R1, R2 ;\n\t//## File "k", line 2 inlined at "k", line 1\n'
    found = links.sass(text + ".L_1:\n        /*0010*/  EXIT ;\n", PLACES)
    assert [p.line for p in found.places] == [3, 0, 2]


@pytest.mark.parametrize("target", ["cuda:sm_90", "rocm:gfx942"])
def test_gpu_levels_have_places(target):
    pytest.importorskip("triton", reason="triton is not installed")
    view = jt.view(scaled, X, target=target, gradient=False, run=False)
    (piece,) = view.record.pieces
    names = [level.name for level in piece.levels]
    machine = "sass" if target.startswith("cuda") else "amdgcn"
    assert names[:5] == ["jaxpr", "tile_ir", "tile_ir_opt", "ttir", "ttgir"] and names[-1] == machine
    wanted = {view.record.places.index([0, line]) for line in (EXP, STORE)}
    for level in piece.levels:
        assert level.linked and wanted <= set(level.body.places[::2]), level.name
        assert "loc(" not in level.body.text and not re.search(r"// @\d", level.body.text), level.name


def test_platforms_that_do_not_tell():
    target = targets.resolve("ascend:910b1")

    class Made:
        texts = {"hivm": "a\nb"}
        launch = {}

    assert linked(scaled.lower(X).kernel, target, {}, Made)["hivm"].places == [NOWHERE, NOWHERE]
