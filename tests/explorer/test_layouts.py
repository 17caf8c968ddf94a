"""Layouts of a record: tiles, buffers and accesses of a TTGIR, and the vector registers of machine code."""

from __future__ import annotations

import pytest
from turned_ttgir import TTGIR

from jtile.explorer.layouts import layouts, title, types
from jtile.explorer.links import Linked
from jtile.explorer.places import Places
from jtile.explorer.vectors import vectors
from jtile.ir import NOWHERE, Loc
from jtile.lowering import targets


@pytest.fixture(scope="module")
def found():
    lines = TTGIR.split("\n")
    places = [Loc("kernel.py", k) if " = ttg.local_alloc %" in line else NOWHERE for k, line in enumerate(lines)]
    table = Places()
    return layouts({"ttgir": Linked(lines, places)}, targets.resolve("cuda:sm_90"), table)


def test_tiles(found):
    tiles = {(one["name"], *one["shape"]): one for one in found.tiles}
    assert {name: one["values"] for name, one in tiles.items()} == {
        ("#mma", 64, 64): 1, ("#blocked", 16, 64): 1, ("#ttg.odd", 64, 64): 1, ("#mma, without axis 1", 64): 1,
    }  # fmt: skip
    odd, blocked = tiles["#ttg.odd", 64, 64], tiles["#blocked", 16, 64]
    assert not odd["known"] and odd["lane"] == [] and odd["about"] == "A layout that the explorer does not know."
    assert blocked["lane"] == [[0, 4], [0, 8], [0, 16], [0, 32], [1, 0]]
    assert blocked["about"].startswith("Each thread has 1 × 4 neighbours; 2 × 16 threads make a warp, and 4 × 1 warps")
    assert [*found.tiles[0]["shape"]] == [64, 64] and found.lanes == 32


def test_buffers_and_accesses(found):
    """Each kind of access once, with how often it stands there; the write that turns the tile has conflicts."""
    buffers = {one["name"]: one for one in found.buffers}
    assert (buffers["#shared1"]["slots"], buffers["#shared1"]["bytes"]) == (3, 3 * 16 * 64 * 4)
    assert buffers["#shared1"]["shape"] == [16, 64] and buffers["#shared"]["slots"] == 1
    assert [(a["op"], a["how"], a["wavefronts"], a["least"], a["times"]) for a in found.accesses] == [
        ("ttg.async_copy_global_to_local", "vector", 4, 4, 1),
        ("ttg.local_alloc", "vector", 8, 1, 2),
        ("ttng.warp_group_dot", "rows", 1, 1, 1),
    ]
    write = found.accesses[1]
    assert found.tiles[write["tile"]]["name"] == "#blocked" and found.buffers[write["buffer"]]["name"] == "#shared"
    assert write["places"] == [1, 2] and len(write["offsets"]) == 32 and write["together"] == 32
    assert len(found.notes) == 1 and "moves it through shared memory" in found.notes[0]


def test_types_and_titles():
    line = "%a = x.y : tensor<4x!tt.ptr<f32>, #b> -> !ttg.memdesc<2x8xi8, #s, #smem, mutable, 4x8x8>"
    assert [(t.kind, t.shape, t.dtype, t.layout, t.whole) for t in types(line)] == [
        ("tensor", (4,), "!tt.ptr<f32>", "#b", (4,)), ("memdesc", (2, 8), "i8", "#s", (4, 8, 8)),
    ]  # fmt: skip
    assert [*types("%a = arith.addi %b, %c : tensor<8xi32>")] == []
    assert title("#ttg.dot_op<{opIdx = 1, parent = #mma, kWidth = 2}>") == "right operand of #mma"


def test_vectors():
    """Of each line how many instructions name which register, once each; the stack counts by its pointer."""
    at = Loc("kernel.py", 3)
    x86 = ["kernel:", "\tvmovups\t%ymm9, -96(%rsp)", "\tvaddps\t%ymm1, %ymm1, %ymm2", "\tmovss\t(%rdi), %xmm2", "\tret"]
    table = Places()
    found = vectors(Linked(x86, [NOWHERE, at, at, NOWHERE, at]), table).vectors
    assert {k: found[k] for k in ("name", "bytes", "count", "used", "stack")} == {
        "name": "ymm", "bytes": 32, "count": 16, "used": 3, "stack": 1,
    }  # fmt: skip
    none, own = found["rows"]
    assert (none["place"], none["instructions"], none["registers"][2]) == (0, 1, 1)
    assert own["place"] == 1 and own["registers"] == [0, 1, 1, *[0] * 6, 1, *[0] * 6]
    arm = ["\tfmla\tv0.4s, v1.4s, v31.s[0]", "\tstr\tq0, [sp, #16]"]
    found = vectors(Linked(arm, [NOWHERE] * 2), table).vectors
    assert (found["name"], found["count"], found["used"], found["stack"]) == ("v", 32, 3, 1)
    assert vectors(Linked(["\tret"], [NOWHERE]), table) is None
    assert layouts({"linalg": Linked([], [])}, targets.resolve("cpu"), table) is None
