"""Random K-quants: any bytes are a block of a file, but for its floats."""

from __future__ import annotations

import numpy as np

from jtile.ops import QuantizedTensor
from jtile.ops.super_blocks import LAYOUTS, SUPER


def random_blocks(kind: str, out: int, inner: int, seed: int = 0) -> np.ndarray:
    """uint8 [out, super blocks, bytes] of weights [out, inner]."""
    rng, layout, blocks = np.random.default_rng(seed), LAYOUTS[kind], inner // SUPER
    raw = rng.integers(0, 256, (out, blocks, layout.block_bytes), np.uint8)
    for name in ("scale", "minimum"):
        if name in layout.places:
            first, end = layout.places[name]
            floats = (rng.standard_normal((out, blocks)) / 64).astype(np.float16)
            raw[..., first:end] = floats.view(np.uint8).reshape(out, blocks, 2)
    return raw


def random_tensor(kind: str, out: int, inner: int, seed: int = 0) -> QuantizedTensor:
    return QuantizedTensor.from_gguf_blocks(random_blocks(kind, out, inner, seed), kind, (out, inner))
