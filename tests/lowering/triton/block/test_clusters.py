"""Copies that the blocks of a cluster share."""

import json
import re

import pytest
import tile_kernels as tk
from machines import card, machine

from jtile import ir
from jtile.lowering.triton import clusters
from jtile.lowering.triton.block.alike import _Alike, shared
from jtile.lowering.triton.block.passes import steps
from jtile.lowering.triton.compile import compile_kernel


def planned(kernel):
    return steps(kernel, machine(), {}).kernel


def parts(kernel, blocks):
    """Name of an array -> (axis, elements) of the part of a copy of it that each block makes."""
    found = shared(planned(kernel), blocks)
    return found and {op.ref.name: part for op, part in found.loads.items()}


@pytest.mark.parametrize(
    ("kernel", "blocks", "expected"),
    [
        (tk.matmul(512, 512, 256, tile=(64, 128, 64)), 2, {"b": (1, 64)}),
        (tk.matmul(512, 512, 256, tile=(64, 128, 64)), 4, {"b": (0, 16)}),
        (tk.matmul(512, 512, 256, tile=(64, 64, 64)), 2, {"b": (0, 32)}),
        (tk.matmul(192, 256, 256, tile=(64, 128, 64)), 2, None),  # neighbours are of two columns of tiles
        (tk.matmul(64, 128, 256, tile=(64, 128, 64)), 2, None),  # one block
        (tk.matmul(8192, 8192, 256, tile=(128, 128, 64)), 2, None),  # blocks that take several tiles
    ],
)  # fmt: skip
def test_neighbours_share_the_columns_of_their_tiles(kernel, blocks, expected):
    assert parts(kernel, blocks) == expected


CARRIED = """kernel @carried(%x: ref<64x64xbf16>) grid(4) {
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c8 = full 8 : i32
  %block = program_id 0 : i32
  %last, %twice = for %k in %c0..%c8 step %c1 carry (%at = %c0, %before = %c0) {
    %double = add %at, %at : i32
    %next = add %at, %block : i32
    yield %next, %double
  }
}"""


def test_what_follows_from_a_carry_that_differs_differs():
    kernel = ir.parse_kernel(CARRIED)
    loop = next(op for op in kernel.body.walk() if isinstance(op, ir.For))
    for order in (loop.results, loop.results[::-1]):
        found = _Alike(kernel, 2)
        assert [found.alike(v) for v in order] == [False, False]
    assert _Alike(kernel, 2).alike(loop.body.params[0])


def test_the_machine_code_says_it():
    kernel = tk.matmul(512, 512, 2048, tile=(64, 128, 64))
    alone, found = (compile_kernel(kernel, card("sm_90"), {"multicast": n}, texts=True) for n in (None, 2))
    ptx, records = found.texts["ptx"], [json.loads(a.launch["record"]) for a in (alone, found)]
    assert [(r["cluster"], r["grid"]) for r in records] == [(1, 32), (2, 16)]
    assert len(re.findall(r"multicast::cluster .*, %cluster_blocks;", ptx)) == 2
    assert len(re.findall(r"mapa\.shared::cluster\.u32 %there, %r\d+, [01];", ptx)) == 4  # in the loop, and behind it
    assert len(re.findall(r"mbarrier\.init\S+ \[%r\d+\], 2;", ptx)) == len(
        re.findall(r"mbarrier\.init\S+ \[%r\d+\], 1;", ptx)
    )
    assert not re.search(r"multicast|mapa|%cluster|barrier\.cluster", alone.texts["ptx"])  # Triton 3.6: shared::cluster


READY, ARRIVE = (f"\tmov.b32 %r1, 0; {clusters.MARK} {what}" for what in (clusters.READY, clusters.ARRIVE))
ARRIVAL = "\t@%p1 mbarrier.arrive.shared::cta.b64 _, [%r2], 2;"


def text(*lines):
    return "\n".join((".reqntid 256", "{", f"\tcopy{clusters.SHARED}[%r1];", *lines, "\tret;", "}"))


def test_arrivals_go_to_all_blocks():
    found = clusters.met(text(READY, ARRIVE, ARRIVAL), 2, 4)
    assert found.count("@%p1 mbarrier.arrive.shared::cluster.b64 _, [%there], 2;") == 2
    assert found.count("barrier.cluster.wait") == 2
    assert "mbarrier.arrive.shared::cta" not in found


@pytest.mark.parametrize(
    "lines", [(READY, ARRIVE), (READY, ARRIVE, "$L__BB0_1:", ARRIVAL), (ARRIVE, ARRIVAL), (READY, READY)]
)
def test_what_is_not_understood_is_refused(lines):
    with pytest.raises(ValueError, match="cluster"):
        clusters.met(text(*lines), 2, 4)
