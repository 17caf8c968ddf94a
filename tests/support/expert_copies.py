"""Rows of experts that are shared out among devices, and the sums that each device keeps."""

import numpy as np


def of_devices(n: int, count: int = 2, k: int = 3, width: int = 5) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Operands of a sum of experts over `n` devices with 2 rows and `count` experts each, `k` of them for a row, and
    the sums. Copies that belong to no expert of a device are NaN: they must not be read."""
    rng = np.random.default_rng(n)
    chosen = np.stack([rng.permutation(n * count)[:k] for _ in range(2 * n)]).astype(np.int32)
    weights = rng.integers(-4, 5, (2 * n, k)).astype(np.float32)
    y = rng.integers(-4, 5, (n, chosen.size + 1, width)).astype(np.float32)
    y[:, -1] = np.nan
    own = chosen[None] // count == np.arange(n)[:, None, None]
    places = np.where(own, np.arange(chosen.size, dtype=np.int32).reshape(chosen.shape), chosen.size)
    by_device = lambda v: np.broadcast_to(v, (n, *v.shape)).reshape(n, n, 2, k)
    want = sum(np.where(own[d][..., None], y[d][places[d]], 0) * weights[..., None] for d in range(n)).sum(1)
    operands = y, places.astype(np.int32).reshape(n, n, 2, k), by_device(chosen), by_device(weights)
    return operands, want.reshape(n, 2, width)
