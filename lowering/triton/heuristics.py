"""How many warps and pipeline stages a kernel gets where its options do not say."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jtile import ir
from jtile._errors import KernelValueError

from .emitter import padded
from .features import Features

ACCUMULATORS = 128 * 128  # elements of products alive at once that 128 threads no longer hold in registers
GATHERED = 512  # lanes of a gather that one warp alone would make by shuffles, which takes minutes to compile
_GATHER = re.compile(r"tt\.gather .* : \(tensor<(\d+)x")
HELD = (
    1 << 16
)  # elements of a tile that the registers of 16 warps hold; of more, 32 spill half as much and compile faster
ELEMENTS = 16  # elements of a tile for each thread: several loads of 16 bytes are in flight


@dataclasses.dataclass(frozen=True)
class Choice:
    """Options of the compiler.

    Attributes:
      fixed: names of the options that the user gave, which are not lowered on lack of memory.
      registers: registers of a thread, at most, so that two blocks share a multiprocessor; 0: no limit.
      evict: (position of a parameter, "first" or "last") of tensor maps; see `ptx.py`.
      columns: (columns of an instruction as triton writes it, those that it is to have); see `ptx.py`.
      blocks: blocks of a cluster, each of which runs a program of its own; see `clusters.py`.
    """

    num_warps: int
    num_stages: int
    num_ctas: int = 1
    fixed: tuple[str, ...] = ()
    registers: int = 0
    evict: tuple[tuple[int, str], ...] = ()
    columns: tuple[tuple[int, int], ...] = ()
    blocks: int = 1


def choose(kernel: ir.Kernel, f: Features, options: Mapping[str, Any]) -> Choice:
    """The options of a kernel: what is given, and defaults from its tiles for the rest.

    Raises:
      KernelValueError: `num_warps` is no power of two, or more threads than a block may have; `num_ctas` where there
        are no clusters.
    """
    given = {k: int(v) for k, v in options.items() if v is not None}
    warps = given.get("num_warps") or _warps(kernel, f)
    if warps & (warps - 1) or not 1 <= warps * f.lanes <= f.max_threads:
        most = f.max_threads // f.lanes
        raise KernelValueError(f"num_warps is a power of two from 1 to {most} on {f.arch}, got {warps}")
    if given.get("num_ctas", 1) > 1 and not f.clusters:
        raise KernelValueError(f"num_ctas is 1 on {f.arch}: sm_90 and newer have clusters of blocks")
    stages = given.get("num_stages") or _stages(kernel, f)
    return Choice(warps, stages, given.get("num_ctas", 1), tuple(given), _registers(kernel, f, warps))


def _warps(kernel: ir.Kernel, f: Features) -> int:
    wide = f.lanes // 32  # AMD's wavefronts of 64 do the work of two warps
    products = max((sum(map(_lanes, dots)) for dots in _products(kernel)), default=0)
    widest = max((_lanes(op) for op in kernel.body.walk() if _has_tile(op)), default=1)
    if products:
        return (8 if products >= ACCUMULATORS else 4 if widest >= 1024 else 2) // wide
    least = min(4, max(widest // 32, 1))
    most = 16 if widest <= HELD else 32
    return max(min(max(widest // (ELEMENTS * 32), least), most) // wide, 1)


def _registers(kernel: ir.Kernel, f: Features, warps: int) -> int:
    """The limit on the registers of a thread; 0: none. Products in a chain leave the matrix units idle between them,
    unless a second block fills the gaps, and one register too many keeps that out. The compiler is held to half of the
    registers where products and their operands leave a fourth of these; with less left it spills (attention of 128
    queries, 64 keys, 128 channels: 112 of 128 held)."""
    if not f.warpgroup_products or warps != 8:
        return 0
    half = f.registers // (2 * warps * f.lanes)
    chains = [dots for dots in _products(kernel) if len(dots) == 2]  # blocks with more products spill
    held = max((sum(map(_words, dots)) for dots in chains), default=0) // (warps * f.lanes)
    return half if half // 2 < held <= half * 3 // 4 else 0


def _words(op: ir.Op) -> int:
    """Registers of all threads that hold a product, and its left operand where that is computed."""
    a = op.operands()[0]
    made = isinstance(a.op, ir.Map | ir.Cast | ir.Select)
    return _lanes(op) + (math.prod(padded(a.shape)) * ir.DTYPES[a.dtype].bits // 32 if made else 0)


def _products(kernel: ir.Kernel) -> Iterator[list[ir.Op]]:
    """The matrix products of each block of ops: their results are alive at about the same time."""
    blocks = [kernel.body, *(b for op in kernel.body.walk() for b in op.blocks())]
    return ([op for op in b.ops if isinstance(op, ir.Dot | ir.DotScaled)] for b in blocks)


def check_gathers(kernel: ir.Kernel, text: str, choice: Choice) -> None:
    """KernelValueError where one warp alone would gather from many elements.

    This never happens by default: tiles of so many elements get more warps.
    """
    most = max((int(n) for n in _GATHER.findall(text)), default=0)
    if choice.num_warps == 1 and most > GATHERED:
        raise KernelValueError(
            f"kernel {kernel.name}: a sort or gather of {most} elements in one warp takes minutes to compile; "
            "use num_warps=2 or more, or tiles of at most 512 elements",
            (kernel.loc.file, kernel.loc.line) if kernel.loc.file else None,
        )


def check_clusters(kernel: ir.Kernel, text: str, choice: Choice) -> None:
    """KernelValueError where the blocks of a cluster would have to wait for each other: a barrier holds the threads of
    one block, and each block has a part of a tile that is stored, and read in another layout."""
    if choice.num_ctas > 1 and "gpu.barrier" in text:
        raise KernelValueError(
            f"kernel {kernel.name}: num_ctas={choice.num_ctas} shares a program among several blocks, which cannot "
            "wait for each other, and it reads what it has written (scratch, aliased outputs) or stores repeated "
            "indices: use num_ctas=1",
            (kernel.loc.file, kernel.loc.line) if kernel.loc.file else None,
        )


def _has_tile(op: ir.Op) -> bool:
    return any(isinstance(r.type, ir.TileType) for r in op.results)


def _lanes(op: ir.Op) -> int:
    """Elements of the largest tile that an op makes."""
    return max(math.prod(padded(r.shape)) for r in op.results if isinstance(r.type, ir.TileType))


def _stages(kernel: ir.Kernel, f: Features) -> int:
    asked = max((op.stages or 0 for op in kernel.body.walk() if isinstance(op, ir.For)), default=0)
    return min(asked or 3, f.stages)
