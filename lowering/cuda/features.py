"""NVIDIA's architectures.

Bytes of shared memory of a block, warps of a multiprocessor: CUDA C programming guide, table of technical
specifications.
"""

from __future__ import annotations

from typing import Any

from ..triton.features import OCP, Features


def _features(capability: int, shared: int, **more: Any) -> Features:
    newer = capability >= 90
    return Features(
        arch=f"sm_{capability}",
        backend="nvidia",
        processor=capability,
        lanes=32,
        shared=shared,
        library="libdevice",
        reserved=1024,
        ptx=True,
        tma=newer,
        clusters=newer,
        warpgroup_products=capability == 90,
        tf32=capability >= 80,
        int8_units=capability > 75,
        fp8=OCP if capability >= 89 else (),
        mixed_fp8=True,
        scaled=capability >= 100,
        atomic_add=("float16", "bfloat16") if newer else ("float16",),
        cache_hints=True,
        dependents=newer,
        **more,
    )


FEATURES = {
    f.arch: f
    for f in (
        _features(75, 65536, warps=32),
        _features(80, 166912),
        _features(86, 101376, warps=48),
        _features(87, 166912),
        _features(89, 101376, warps=48),
        _features(90, 232448),
        _features(100, 232448),
        _features(103, 232448),
        _features(120, 101376, warps=48),
        _features(121, 101376, warps=48),
    )
}
