"""Which keys attention's queries see, block by block, and scores in powers of two."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

import jtile as jt

LOG2_E = math.log2(math.e)
Window = tuple[int | None, int | None]  # keys that a query sees to its left and to its right, None: all


def scores(s, unit: float, softcap: float | None, short: bool = False):
    """Scores in powers of two, so that the softmax takes exp2 (softcap: `c tanh(s / c)`, Gemma 2).

    `short`: the scores are products of 16-bit operands, which are less exact than a tanh in few instructions: that one
    is right to 1e-6 of its largest value. These scores lack `lacking`: a product alone, of which a maximum and
    the differences to it take one instruction each.
    """
    if softcap is not None and short:
        return _half(s, unit / softcap) * (2 * softcap * LOG2_E)
    if softcap is not None:
        return jnp.tanh(s * (unit / softcap)) * (softcap * LOG2_E)
    return s if unit == 1.0 else s * unit


def lacking(softcap: float | None, short: bool) -> float:
    """What must be added to `scores`."""
    return -softcap * LOG2_E if softcap is not None and short else 0.0


def _half(s, unit: float):
    """(1 + tanh x) / 2 = 1 / (1 + e^-2x) of x = unit s, in few instructions."""
    root = jax.lax.rsqrt(1.0 + jnp.exp2(s * (-2 * LOG2_E * unit)))
    return root * root


def tanh(s, unit: float):
    """The tanh of unit s in few instructions, right to 1e-6."""
    return 2.0 * _half(s, unit) - 1.0


def weights(s, lse, scale: float, softcap: float | None, short: bool = False):
    """The weights 2^(score - lse) of plain products s, and the derivative of the cap, None where there is no cap.
    `short`: as for `scores`."""
    if softcap is None:
        return jnp.exp2(s * (scale * LOG2_E) - lse), None
    capped = tanh(s, scale / softcap) if short else jnp.tanh(s * (scale / softcap))
    return jnp.exp2(capped * (softcap * LOG2_E) - lse), 1.0 - capped * capped


def visible(rows, columns, length, window: Window):
    """bool: which keys `columns` the queries at `rows` see; [bq, 1] and [1, bk] give [bq, bk], or the other way."""
    left, right = window
    seen = columns < length
    seen = seen if right is None else seen & (columns <= rows + right)
    seen = seen if left is None else seen & (columns >= rows - left)
    return jnp.broadcast_to(seen, jnp.broadcast_shapes(rows.shape, columns.shape))


def at_edge(s, v, first, rows, length, window: Window, *, cut: bool):
    """A block with an edge: scores s [bq, bk] of the queries at `rows` [bq, 1] and the keys from `first` on, -inf where
    a query does not see a key; and the values v [bk, d] of these keys, with `cut` zeros behind the length, where
    memory may hold anything."""
    columns = first + jt.arange(s.shape[1])[None, :]
    s = jnp.where(visible(rows, columns, length, window), s, -math.inf)
    return s, jnp.where(length > columns.T, v, jnp.zeros((), v.dtype)) if cut else v


def blocks(first, bq: int, bk: int, length, window: Window):
    """Bounds of the key blocks that queries `first .. first + bq` see: `lo <= inner_lo <= inner_hi <= hi`.

    Every query sees all of the blocks [inner_lo, inner_hi); some queries see some of [lo, inner_lo) and [inner_hi, hi).
    """
    left, right = window
    last = first + bq - 1
    end, inner_end = length, length
    if right is not None:
        end = jnp.clip(last + right + 1, 0, length)
        inner_end = jnp.clip(first + right + 1, 0, length)
    hi, inner_hi = jt.cdiv(end, bk), floordiv(inner_end, bk)
    if left is None:
        return 0, 0, inner_hi, hi
    lo = jnp.minimum(floordiv(jnp.maximum(first - left, 0), bk), hi)
    inner_lo = jnp.clip(jt.cdiv(jnp.maximum(last - left, 0), bk), lo, hi)
    return lo, inner_lo, jnp.maximum(inner_lo, inner_hi), hi


def floordiv(a, b: int):
    """`a // b` for a >= 0, without the correction for negative numbers."""
    return jax.lax.div(a, jnp.asarray(b, a.dtype)) if hasattr(a, "dtype") else a // b


def query_blocks(first, bk: int, bq: int, t: int, offset, length, window: Window):
    """Bounds of the query blocks that see keys `first .. first + bk`: `lo <= inner_lo <= inner_hi <= hi`.

    All queries of the blocks [inner_lo, inner_hi) see all of the keys; those outside of [lo, hi) see none.
    """
    left, right = window
    last = first + bk - 1
    inside = lambda row: jnp.clip(row - offset, 0, t)
    down = lambda row: jax.lax.div(row, jnp.asarray(bq, row.dtype))
    begin = jnp.int32(0) if right is None else inside(first - right)
    end = jnp.int32(t) if left is None else inside(last + left + 1)
    end = jnp.where(first < length, end, begin)
    lo, hi = down(begin), jt.cdiv(end, bq)
    hi = jnp.where(begin < end, hi, lo)
    inner_lo = lo if right is None else jt.cdiv(inside(last - right), bq)
    inner_hi = hi if left is None else down(inside(first + left + 1))
    inner_lo = jnp.where(last < length, jnp.clip(inner_lo, lo, hi), hi)
    return lo, inner_lo, jnp.clip(inner_hi, inner_lo, hi), hi
