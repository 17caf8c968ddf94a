"""Which candidates are not worth a measurement: a cost model over the target's numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jtile import ir
from jtile.lowering import platforms
from jtile.lowering.triton.features import features
from jtile.tune.cost import Work, work

REGISTERS = 255  # registers of a thread, on every GPU; wider accumulators go to memory
SPILLED = 1.5  # how many times as many an estimate may have: part of a tile may go out early
CACHE_RATE = 3.0  # bandwidth of the last cache over that of memory
CROWD = 512  # lanes that one warp still sorts and gathers in a compiler's reasonable time


def unfit(kernel: ir.Kernel, target: Any, options: Mapping[str, Any]) -> str:
    """Why a candidate cannot be good on a GPU, or an empty text."""
    if "warps" not in target.features:
        return ""
    warps = options.get("num_warps")
    threads = (warps or 4) * _lanes_of_warp(target)
    if warps == 1:
        wide = [op for op in kernel.body.walk() if isinstance(op, ir.Sort | ir.Gather) and _crowd(op) > CROWD]
        if wide:
            return f"one warp for a {wide[0].mnemonic} of {_crowd(wide[0])} lanes"
    held = max((_carried(op) for op in kernel.body.walk() if isinstance(op, ir.For)), default=0) // 4
    most = 32 * REGISTERS if warps is None else REGISTERS  # the heuristic takes as many warps as it needs
    if held > SPILLED * most * threads:
        return f"{held // threads} registers of accumulators a thread"
    shared = target.memory("block")
    need = max(
        (_staged(op, options, features(target.arch).stages) for op in kernel.body.walk() if isinstance(op, ir.For)),
        default=0,
    )
    if shared is not None and shared.size and need > shared.size:
        return f"{need} bytes of shared memory for its stages"
    return ""


def predicted_us(kernel: ir.Kernel, target: Any) -> float:
    """A rough time: the largest of what memory, cache and arithmetic take, over the share of the machine in use; 0
    where loops are as long as data says, or where the target's bandwidth is not known, so that nothing can be told."""
    own = platforms.named(target.platform).predicted_us
    if own is not None:
        return own(kernel)
    w = work(kernel)
    if not w.exact or not bandwidth(target):
        return 0.0
    limits = bound_us(w, target)
    cached = w.traffic / (CACHE_RATE * bandwidth(target)) * 1e6
    units = target.programs_at_once
    waves = -(-max(w.programs, 1) // units)
    return max(*limits.values(), cached) * waves * units / max(w.programs, 1)


def bound_us(w: Work, target: Any, rates: Mapping[str, float] | None = None) -> dict[str, float]:
    """Microseconds that a kernel takes at least, by what would be busy all of the time: `memory`, `products`,
    `elements`. Arithmetic on elements runs at half of the rate of float32 (no multiply-adds), exponentials and the like
    at an eighth of that. `rates` by dtype, and `memory` in bytes a second, go before the target's."""
    known = {**dict(target.rates), **(rates or {})}
    out = {"memory": _share(w.bytes, bandwidth(target, rates))}
    out["products"] = sum(_share(n, known.get(d) or known.get("float32")) for d, n in w.products.items())
    out["elements"] = _share(2 * (w.elements + 7 * w.special), known.get("float32"))
    return out


def bandwidth(target: Any, rates: Mapping[str, float] | None = None) -> float:
    """Bytes a second of the target's memory; 0 where it is not known."""
    given = (rates or {}).get("memory")
    return given or next((m.bandwidth for m in target.memories if m.name == "dram" and m.bandwidth), 0.0)


def cache_bytes(target: Any) -> int:
    """Size of the target's last cache that all of it shares; 0 where there is none, as on a CPU, whose callers
    keep it warm too."""
    shared = target.memory("device")
    return shared.size or 0 if shared is not None and shared.name == "l2" else 0


def _share(count: float, rate: float | None) -> float:
    return count / rate * 1e6 if rate else 0.0


def _lanes_of_warp(target: Any) -> int:
    return next((s.units for s in target.scales if s.name == "warp"), 32)


def _crowd(op: ir.Op) -> int:
    return max((v.type.size for v in op.operands() if isinstance(v.type, ir.TileType)), default=0)


def _carried(op: ir.For) -> int:
    """Bytes of the tiles that a loop carries."""
    return sum(v.type.size * max(v.type.info.bits, 32) // 8 for v in op.inits if isinstance(v.type, ir.TileType))


def _staged(op: ir.For, options: Mapping[str, Any], most: int) -> int:
    """Bytes of the operands of products that a loop's stages hold, but for the one that is being computed with."""
    loads = {
        v.op.result: v.op
        for dot in op.body.ops
        if isinstance(dot, ir.Dot | ir.DotScaled)
        for v in dot.operands()
        if isinstance(v.op, ir.Load)
    }
    stages = min(options.get("num_stages") or op.stages or 1, most)
    return sum(math.prod(v.shape) * v.type.info.bits // 8 for v in loads) * max(stages - 1, 1)
