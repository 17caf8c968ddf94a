"""AMD's architectures."""

from __future__ import annotations

from typing import Any

from ..triton.features import OCP, Features


def _features(arch: str, lanes: int, shared: int, **more: Any) -> Features:
    """A pipeline has one stage in registers and one in the small shared memory: two are the most."""
    return Features(
        arch=arch, backend="amd", processor=arch, lanes=lanes, shared=shared, library="ocml", stages=2, **more
    )


FEATURES = {
    f.arch: f
    for f in (
        _features("gfx90a", 64, 65536, registers=131072, warps=32, float32_units=True),
        _features("gfx942", 64, 65536, registers=131072, warps=32, float32_units=True),
        _features("gfx950", 64, 163840, registers=131072, warps=32, float32_units=True, fp8=OCP, scaled=True),
        _features("gfx1100", 32, 65536, registers=196608),
        _features("gfx1201", 32, 65536, registers=196608, fp8=OCP),
    )
}
