"""Convolutions by NumPy: one product of matrices for each place of the filter."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def convolved(x: np.ndarray, w: np.ndarray, dtype: Any, **params: Any) -> np.ndarray:
    """What `jax.lax.conv_general_dilated` computes.

    Args:
      x: the array, its axes as the dimension numbers have them.
      w: the filter, likewise.
      dtype: what products are added up in, which is the result's.
      **params: those of JAX's primitive.
    Returns:
      The result, its axes as the dimension numbers have them.
    """
    numbers, groups, batches = params["dimension_numbers"], params["feature_group_count"], params["batch_group_count"]
    x, w = x.astype(dtype).transpose(numbers.lhs_spec), w.astype(dtype).transpose(numbers.rhs_spec)
    x = _padded(x, params["lhs_dilation"], params["padding"])
    strides, apart = params["window_strides"], params["rhs_dilation"]
    reach = [(k - 1) * d for k, d in zip(w.shape[2:], apart, strict=True)]
    sides = [max(0, (n - r - 1) // s + 1) for n, r, s in zip(x.shape[2:], reach, strides, strict=True)]
    # Groups of features, or of the batch, are in front: x [group, batch, inner, ...], w [group, out, inner, ...].
    count, by_batch = max(groups, batches), batches > 1
    n, inner = x.shape[0] // batches, x.shape[1] // groups
    x = x.reshape(batches, n, *x.shape[1:]) if by_batch else x.reshape(n, groups, inner, *x.shape[2:]).swapaxes(0, 1)
    w = w.reshape(count, w.shape[0] // count, *w.shape[1:])
    places = math.prod(sides)
    out = np.zeros((count, n, w.shape[1], places), x.dtype)
    for place in np.ndindex(w.shape[3:]):
        starts = [p * d for p, d in zip(place, apart, strict=True)]
        window = tuple(slice(b, b + s * m, s) for b, s, m in zip(starts, strides, sides, strict=True))
        part = x[(..., *window)].reshape(count, n, inner, places)
        out += w[(slice(None), slice(None), slice(None), *place)][:, None] @ part
    found = out.swapaxes(0, 1).reshape(n, count * w.shape[1], *sides)
    return found.transpose(np.argsort(numbers.out_spec))


def _padded(x: np.ndarray, apart: Any, padding: Any) -> np.ndarray:
    """x [batch, features, ...] with zeros between its elements and around them; cut where the padding is negative."""
    for axis, (d, (low, high)) in enumerate(zip(apart, padding, strict=True), 2):
        side = max(0, (x.shape[axis] - 1) * d + 1)
        spread = np.zeros((*x.shape[:axis], side, *x.shape[axis + 1 :]), x.dtype)
        spread[(slice(None),) * axis + (slice(None, None, d),)] = x
        more = [(0, 0)] * x.ndim
        more[axis] = (max(low, 0), max(high, 0))
        kept = slice(max(-low, 0), side - max(-high, 0))
        x = np.pad(spread[(slice(None),) * axis + (kept,)], more)
    return x
