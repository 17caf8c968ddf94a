"""GPU targets: the numbers of one common card for each architecture. Use `dataclasses.replace` for another card.

Sources: NVIDIA's data sheets (A100 SXM, A10, L40S, H200 SXM, B200, RTX 5090) and CUDA programming guide, AMD's data
sheets (MI250X, one die; MI300X; MI355X; RX 7900 XTX; RX 9070 XT). Matrix rates are dense, without sparsity.
"""

from __future__ import annotations

import dataclasses
import functools

from jtile._errors import KernelValueError, UnsupportedError

from .targets import Gap, Memory, Scale, Target
from .triton.features import Features, architectures, features
from .triton.ttir import MAX_TILE


@dataclasses.dataclass(frozen=True)
class _Card:
    """`units`: multiprocessors or compute units; bytes and bytes a second; `rates`: FLOP/s (op/s) of matrix products
    by dtype, the first that of f32 arithmetic."""

    units: int
    l2: int
    dram: int
    bandwidth: float
    f32: float
    bf16: float
    fp8: float = 0.0
    int8: float = 0.0
    f64: float = 0.0


_CARDS = {
    "sm_75": _Card(40, 4 << 20, 16 << 30, 320e9, 8.1e12, 65e12, int8=130e12, f64=0.25e12),
    "sm_80": _Card(108, 40 << 20, 80 << 30, 2039e9, 19.5e12, 312e12, int8=624e12, f64=19.5e12),
    "sm_86": _Card(72, 6 << 20, 24 << 30, 600e9, 31.2e12, 125e12, int8=250e12, f64=0.49e12),
    "sm_87": _Card(16, 4 << 20, 64 << 30, 205e9, 5.3e12, 42e12, int8=85e12, f64=0.08e12),
    "sm_89": _Card(142, 96 << 20, 48 << 30, 864e9, 91.6e12, 362e12, fp8=733e12, int8=733e12, f64=1.4e12),
    "sm_90": _Card(132, 50 << 20, 141 << 30, 4800e9, 67e12, 989e12, fp8=1979e12, int8=1979e12, f64=67e12),
    "sm_100": _Card(148, 126 << 20, 180 << 30, 8000e9, 75e12, 2250e12, fp8=4500e12, int8=4500e12, f64=37e12),
    "sm_103": _Card(148, 126 << 20, 268 << 30, 8000e9, 77e12, 2500e12, fp8=5000e12, int8=165e12, f64=1.2e12),
    "sm_120": _Card(170, 96 << 20, 32 << 30, 1792e9, 104.8e12, 209.5e12, fp8=419e12, int8=838e12, f64=1.6e12),
    "sm_121": _Card(48, 24 << 20, 128 << 30, 273e9, 31e12, 62e12, fp8=124e12, int8=248e12, f64=0.5e12),
    "gfx90a": _Card(110, 8 << 20, 64 << 30, 1638e9, 23.9e12, 191.5e12, int8=191.5e12, f64=47.9e12),
    "gfx942": _Card(304, 256 << 20, 192 << 30, 5300e9, 163.4e12, 1307e12, fp8=2615e12, int8=2615e12, f64=163e12),
    "gfx950": _Card(256, 256 << 20, 288 << 30, 8000e9, 157.3e12, 2516e12, fp8=5033e12, int8=5033e12, f64=78.6e12),
    "gfx1100": _Card(96, 96 << 20, 24 << 30, 960e9, 61.4e12, 122.8e12, int8=122.8e12, f64=1.9e12),
    "gfx1201": _Card(64, 64 << 20, 16 << 30, 640e9, 48.7e12, 195e12, fp8=389e12, int8=389e12, f64=0.8e12),
}


@functools.cache
def gpu_target(arch: str) -> Target:
    """The target of an architecture, `"sm_90"` or `"gfx942"`; KernelValueError for one that is not known."""
    f = features(arch)
    card = _CARDS[f.arch]
    platform = "cuda" if f.cuda else "rocm"
    memories = (Memory("registers", f.registers * 4), Memory("shared", f.shared), Memory("l2", card.l2),
                Memory("dram", card.dram, card.bandwidth))  # fmt: skip
    scales = (
        Scale("thread", memory="registers"),
        Scale("warp", units=f.lanes),
        *([Scale("warpgroup", units=4)] if f.capability in (90, 100, 103) else []),
        Scale("block", units=f.max_threads // f.lanes // (4 if f.capability in (90, 100, 103) else 1), memory="shared"),
        *([Scale("cluster", units=8)] if f.capability >= 90 else []),
        Scale("device", units=card.units, memory="l2"),
        Scale("node", units=8, memory="dram"),
    )
    rates = {"float32": card.f32, "bfloat16": card.bf16, "float16": card.bf16, "float64": card.f64, "int8": card.int8}
    rates |= dict.fromkeys(f.fp8, card.fp8)
    return Target(
        name=f"{platform}:{f.arch}",
        platform=platform,
        arch=f.arch,
        scales=scales,
        memories=memories,
        matrix_shapes=_matrix_shapes(f),
        limits=(("programs", 2**62), ("tile", MAX_TILE)),
        gaps=tuple(_gaps(f)),
        rates=tuple(rates.items()),
        features=("warps", *(["warpgroup products"] if f.capability == 90 else [])),
    )


def names() -> list[str]:
    """The names of all GPU targets."""
    cuda, rocm = architectures()
    return [*(f"cuda:{a}" for a in cuda), *(f"rocm:{a}" for a in rocm)]


def resolve(name: str) -> Target:
    """The target of `"cuda:sm_90"`, `"rocm:gfx942"`."""
    platform, _, arch = name.partition(":")
    if not arch:
        some = "cuda:sm_90" if platform == "cuda" else "rocm:gfx942"
        raise UnsupportedError(f"target {name!r} names no architecture: write {some!r}, or another of {names()}")
    target = gpu_target(arch)
    if target.platform != platform:
        raise KernelValueError(f"target {name!r}: {arch} is an architecture of platform {target.platform!r}")
    return target


def _matrix_shapes(f: Features) -> tuple[tuple[int, int, int, str], ...]:
    """What one matrix instruction multiplies: the widest of each dtype."""
    if f.capability in (90,):
        shapes = [(64, 256, 16, "bfloat16"), (64, 256, 16, "float16"), (64, 256, 32, "int8")]
        return (*shapes, *((64, 256, 32, d) for d in f.fp8))
    if f.cuda and f.capability >= 80:
        shapes = [(16, 8, 16, "bfloat16"), (16, 8, 16, "float16"), (16, 8, 32, "int8"), (8, 8, 4, "float64")]
        return (*shapes, *((16, 8, 32, d) for d in f.fp8))
    if f.cuda:
        return ((16, 8, 8, "float16"), (8, 8, 16, "int8"))
    if f.lanes == 64:
        shapes = [(32, 32, 8, "bfloat16"), (32, 32, 8, "float16"), (32, 32, 16, "int8"), (16, 16, 4, "float64")]
        return (*shapes, *((32, 32, 16, d) for d in f.fp8))
    shapes = [(16, 16, 16, "bfloat16"), (16, 16, 16, "float16"), (16, 16, 16, "int8")]
    return (*shapes, *((16, 16, 16, d) for d in f.fp8))


def _gaps(f: Features) -> list[Gap]:
    wide = "cast the operands to bfloat16 or float16 first"
    return [Gap("dot", d, wide) for d in ("float8_e4m3fn", "float8_e5m2") if d not in f.fp8]
