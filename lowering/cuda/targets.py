"""NVIDIA's targets: the numbers of one common card for each architecture, and of the card at hand where it is known.
Use `dataclasses.replace` for another.

Sources: NVIDIA's data sheets (T4, A100 SXM, A10, L40S, H200 SXM, B200, RTX 5090; of boards, those of their names) and
the CUDA programming guide. Links are NVLink's, one way.
"""

from __future__ import annotations

import functools
from typing import Any

from ..targets import Target
from ..triton.features import Features
from ..triton.targets import Card, Shape, device_number, target_of
from .features import FEATURES

_CARDS = {
    "sm_75": Card(40, 4 << 20, 16 << 30, 320e9, 8.1e12, 65e12, int8=130e12, f64=0.25e12),
    "sm_80": Card(108, 40 << 20, 80 << 30, 2039e9, 19.5e12, 312e12, int8=624e12, f64=19.5e12, link=300e9),
    "sm_86": Card(72, 6 << 20, 24 << 30, 600e9, 31.2e12, 125e12, int8=250e12, f64=0.49e12),
    "sm_87": Card(16, 4 << 20, 64 << 30, 205e9, 5.3e12, 42e12, int8=85e12, f64=0.08e12),
    "sm_89": Card(142, 96 << 20, 48 << 30, 864e9, 91.6e12, 362e12, fp8=733e12, int8=733e12, f64=1.4e12),
    "sm_90": Card(132, 50 << 20, 141 << 30, 4800e9, 67e12, 989e12, fp8=1979e12, int8=1979e12, f64=67e12, link=450e9),
    "sm_100": Card(148, 126 << 20, 180 << 30, 8000e9, 75e12, 2250e12, fp8=4500e12, int8=4500e12, f64=37e12, link=900e9),
    "sm_103": Card(148, 126 << 20, 268 << 30, 8000e9, 77e12, 2500e12, fp8=5000e12, int8=165e12, f64=1.2e12, link=900e9),
    "sm_120": Card(170, 96 << 20, 32 << 30, 1792e9, 104.8e12, 209.5e12, fp8=419e12, int8=838e12, f64=1.6e12),
    "sm_121": Card(48, 24 << 20, 128 << 30, 273e9, 31e12, 62e12, fp8=124e12, int8=248e12, f64=0.5e12),
}
# Boards of which there are several of one architecture, by the name that the driver gives them.
_BOARDS = {
    "NVIDIA H100 80GB HBM3": Card(
        132, 50 << 20, 80 << 30, 3350e9, 67e12, 989e12, fp8=1979e12, int8=1979e12, f64=67e12, link=450e9
    ),
    "NVIDIA H100 PCIe": Card(114, 50 << 20, 80 << 30, 2039e9, 51e12, 756e12, fp8=1513e12, int8=1513e12, f64=51e12),
    "NVIDIA H100 NVL": Card(132, 50 << 20, 94 << 30, 3938e9, 60e12, 835e12, fp8=1671e12, int8=1671e12, f64=60e12),
    "NVIDIA GH200 480GB": Card(132, 50 << 20, 96 << 30, 4000e9, 67e12, 989e12, fp8=1979e12, int8=1979e12, f64=67e12),
    "NVIDIA A100-SXM4-40GB": Card(
        108, 40 << 20, 40 << 30, 1555e9, 19.5e12, 312e12, int8=624e12, f64=19.5e12, link=300e9
    ),
    "NVIDIA A100 80GB PCIe": Card(108, 40 << 20, 80 << 30, 1935e9, 19.5e12, 312e12, int8=624e12, f64=19.5e12),
    "NVIDIA L4": Card(58, 48 << 20, 24 << 30, 300e9, 30.3e12, 121e12, fp8=242e12, int8=242e12, f64=0.47e12),
}


@functools.cache
def nvidia_target(arch: str) -> Target:
    """The target of an architecture, `"sm_90"`, with the numbers of its common card."""
    return _target(FEATURES[arch], _CARDS[arch])


def device_target(arch: str, device: Any) -> Target:
    """The target of an architecture with what a device of JAX tells of itself: its board where that is known, else the
    number of its multiprocessors."""
    card = _BOARDS.get(device.device_kind, _CARDS[arch])
    units = device_number(device, "core_count")
    return _target(FEATURES[arch], card.with_units(units) if units and units != card.units else card)


def _target(f: Features, card: Card) -> Target:
    warpgroups = f.processor in (90, 100, 103)
    return target_of("cuda", f, card, _matrix_shapes(f), warpgroups=warpgroups, more=("measured warps",))


def _matrix_shapes(f: Features) -> tuple[Shape, ...]:
    """What one matrix instruction multiplies: the widest of each dtype."""
    if f.warpgroup_products:
        shapes = [(64, 256, 16, "bfloat16"), (64, 256, 16, "float16"), (64, 256, 32, "int8")]
        return (*shapes, *((64, 256, 32, d) for d in f.fp8))
    if f.tf32:
        shapes = [(16, 8, 16, "bfloat16"), (16, 8, 16, "float16"), (16, 8, 32, "int8"), (8, 8, 4, "float64")]
        return (*shapes, *((16, 8, 32, d) for d in f.fp8))
    return ((16, 8, 8, "float16"), (8, 8, 16, "int8"))
