"""How many warps and pipeline stages a kernel gets where its options do not say."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jtile import ir
from jtile.lowering.triton.emitter import padded
from jtile.lowering.triton.features import Features


@dataclasses.dataclass(frozen=True)
class Choice:
    """Options of the compiler; `fixed`: names of those that the user gave, which are not lowered on lack of memory."""

    num_warps: int
    num_stages: int
    num_ctas: int = 1
    fixed: tuple[str, ...] = ()


def choose(kernel: ir.Kernel, f: Features, options: Mapping[str, Any]) -> Choice:
    """The options of a kernel: what is given, and defaults from its tiles for the rest."""
    given = {k: int(v) for k, v in options.items() if v is not None}
    warps = given.get("num_warps", _warps(kernel, f))
    stages = given.get("num_stages", _stages(kernel))
    return Choice(warps, stages, given.get("num_ctas", 1), tuple(given))


def _warps(kernel: ir.Kernel, f: Features) -> int:
    dots = [op for op in kernel.body.walk() if isinstance(op, ir.Dot | ir.DotScaled)]
    if dots:
        side = max(math.prod(padded(op.result.shape)) for op in dots)
        return 8 if side >= 128 * 128 else 4
    widest = max((math.prod(padded(r.shape)) for op in kernel.body.walk() for r in op.results
                  if isinstance(r.type, ir.TileType)), default=1)  # fmt: skip
    threads = widest // 16  # 16 elements a thread keep several loads in flight
    return min(max(1 << max(threads // f.lanes, 1).bit_length() - 1, 4), 16 if f.lanes == 32 else 8)


def _stages(kernel: ir.Kernel) -> int:
    asked = [op.stages for op in kernel.body.walk() if isinstance(op, ir.For) and op.stages]
    return max(asked, default=3)
