"""AMD's targets: the numbers of one common card for each architecture. Use `dataclasses.replace` for another.

Sources: AMD's data sheets (MI250X, one die; MI300X; MI355X; RX 7900 XTX; RX 9070 XT).
"""

from __future__ import annotations

import functools
from typing import Any

from ..targets import Target
from ..triton.features import Features
from ..triton.targets import Card, Shape, device_number, target_of
from .features import FEATURES

_CARDS = {
    "gfx90a": Card(110, 8 << 20, 64 << 30, 1638e9, 23.9e12, 191.5e12, int8=191.5e12, f64=47.9e12),
    "gfx942": Card(304, 256 << 20, 192 << 30, 5300e9, 163.4e12, 1307e12, fp8=2615e12, int8=2615e12, f64=163e12),
    "gfx950": Card(256, 256 << 20, 288 << 30, 8000e9, 157.3e12, 2516e12, fp8=5033e12, int8=5033e12, f64=78.6e12),
    "gfx1100": Card(96, 96 << 20, 24 << 30, 960e9, 61.4e12, 122.8e12, int8=122.8e12, f64=1.9e12),
    "gfx1201": Card(64, 64 << 20, 16 << 30, 640e9, 48.7e12, 195e12, fp8=389e12, int8=389e12, f64=0.8e12),
}


@functools.cache
def amd_target(arch: str) -> Target:
    """The target of an architecture, `"gfx942"`, with the numbers of its common card."""
    return _target(FEATURES[arch], _CARDS[arch])


def device_target(arch: str, device: Any) -> Target:
    """The target of an architecture with the number of compute units that a device of JAX tells."""
    card, units = _CARDS[arch], device_number(device, "core_count")
    return _target(FEATURES[arch], card.with_units(units) if units and units != card.units else card)


def _target(f: Features, card: Card) -> Target:
    return target_of("rocm", f, card, _matrix_shapes(f))


def _matrix_shapes(f: Features) -> tuple[Shape, ...]:
    """What one matrix instruction multiplies: the widest of each dtype."""
    if f.lanes == 64:
        shapes = [(32, 32, 8, "bfloat16"), (32, 32, 8, "float16"), (32, 32, 16, "int8"), (16, 16, 4, "float64")]
        return (*shapes, *((32, 32, 16, d) for d in f.fp8))
    shapes = [(16, 16, 16, "bfloat16"), (16, 16, 16, "float16"), (16, 16, 16, "int8")]
    return (*shapes, *((16, 16, 16, d) for d in f.fp8))
