"""Rows and tiles of quantised weights as kernels for CPUs compute with them; quantized.py has the formulas."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jtile.ops.operands import Weight
from jtile.ops.weight_codes import BLOCK, FOUR_BIT, float4_numbers

HALF = BLOCK // 2


def _codes(codes, r, rows: int, kind: str, lead: tuple[int, ...], c=0, chunks: int = 1):
    """The codes of a tile as float32 parts, [rows, *lead, width] each, and where each part stands in its block.

    The columns are those of chunk c of `chunks`, whose groups `lead` describes. For 4-bit codes, whose blocks have two
    parts, it is (groups,) of one block, or (groups, blocks of a group).
    """
    stored = codes.shape[1] // chunks
    q = codes.tiles(rows, stored)[r, c].reshape(rows, *lead, stored // math.prod(lead))
    if kind in ("int8", "q8_0", "fp8"):
        return [q.astype(jnp.float32)]
    number = float4_numbers if kind == "mxfp4" else lambda codes: codes.astype(jnp.float32)
    parts = [number(q & np.uint8(15)), number(q >> np.uint8(4))]
    return [p - np.float32(8) for p in parts] if kind == "q4_0" else parts


def _lead(weight: Weight, kind: str, groups: int, inner: int) -> tuple[int, ...]:
    """The `lead` of `_codes` for `groups` groups; `inner`: the columns of the whole weight."""
    blocks = weight.shared_by(inner // BLOCK) if kind in FOUR_BIT else 1
    return (groups,) if blocks == 1 else (groups, blocks)


def row_of(x, i, weight: Weight, kind: str):
    """Row i of x as [*lead, parts, width], as codes of W stand."""
    lead = _lead(weight, kind, weight.scale.shape[1], x.shape[1])
    return x[i, :].reshape(*lead, 2 if kind in FOUR_BIT else 1, -1)


def row_product(weight: Weight, X, r, rows: int, kind: str):
    """Y [rows] = W x for one row of x, X as `row_of` gives it; nothing of W is stored."""
    groups, lead = weight.scale.shape[1], X.shape[:-2]
    parts = _codes(weight.codes, r, rows, kind, lead)
    scale = weight.scale.tiles(rows, groups)[r, 0].astype(jnp.float32)
    dot = parts[0] * X[None, ..., 0, :]
    for k, part in enumerate(parts[1:], 1):
        dot = dot + part * X[None, ..., k, :]
    Y = jnp.sum(_beside(scale, lead) * dot, axis=tuple(range(1, dot.ndim)))
    if weight.minimum is None:
        return Y
    low = weight.minimum.tiles(rows, groups)[r, 0].astype(jnp.float32)
    return Y + jnp.sum(low * jnp.sum(X, axis=tuple(range(1, X.ndim)))[None, :], axis=1)


def _steady_product(weight: Weight, X, r, rows: int, kind: str):
    """`row_product` with the terms of a product with `dequantized_tile` in their order, so that a row has the same bits
    alone and among others; X [groups, ..., parts, 16]: parts of 16 columns, for 4-bit codes those of a block."""
    groups, lead = weight.scale.shape[1], X.shape[:-1]
    of_group = lambda a: _beside(a.tiles(rows, groups)[r, 0].astype(jnp.float32), lead)
    W = of_group(weight.scale) * _numbers(weight.codes, r, rows, kind, X.shape)
    W = W if weight.minimum is None else W + of_group(weight.minimum)
    return jnp.sum(W * X[None], axis=tuple(range(1, W.ndim)))


def product_of_row(x, i, weight: Weight, r, rows: int, kind: str, steady: bool):
    """Y [rows] of row i of x; steady: see `Config`."""
    if not steady:
        return row_product(weight, row_of(x, i, weight, kind), r, rows, kind)
    lead = _lead(weight, kind, weight.scale.shape[1], x.shape[1])
    of_group = x.shape[1] // max(math.prod(lead), 1)
    width = of_group if of_group % HALF else HALF
    return _steady_product(weight, x[i, :].reshape(*lead, of_group // max(width, 1), width), r, rows, kind)


def _numbers(codes, r, rows: int, kind: str, shape: tuple[int, ...]):
    """The codes of some rows of W as float32 [rows, *shape], in the order of columns."""
    q = codes.tiles(rows, codes.shape[1])[r, 0]
    if kind not in FOUR_BIT:
        return q.reshape(rows, *shape).astype(jnp.float32)
    # A byte has a column of each half of its block.
    q = jnp.broadcast_to(q.reshape(rows, *shape[:-2], 1, HALF), (rows, *shape))
    q = q if kind == "mxfp4" else q.astype(jnp.int32)
    shift = jax.lax.broadcasted_iota(q.dtype, q.shape, q.ndim - 2) * q.dtype.type(4)
    q = (q >> shift) & q.dtype.type(15)
    number = float4_numbers(q) if kind == "mxfp4" else q.astype(jnp.float32)
    return number - np.float32(8) if kind == "q4_0" else number


def _beside(numbers, lead: tuple[int, ...]):
    """Scales or minima [rows, groups], shaped to meet the parts that `_codes` gives."""
    return numbers.reshape(*numbers.shape, *(1,) * len(lead))


def dequantized_tile(weight: Weight, r, rows: int, kind: str, inner: int, c=0, chunks: int = 1):
    """W [rows, inner / chunks] of one tile in float32: chunk c of its columns."""
    last = weight.scaled_last(kind)  # a row has one scale, which every chunk shares
    groups = 1 if last else weight.scale.shape[1] // chunks
    at, lead = 0 if last else c, _lead(weight, kind, groups, inner)
    scale = _beside(weight.scale.tiles(rows, groups)[r, at].astype(jnp.float32), lead)
    W = [scale * q for q in _codes(weight.codes, r, rows, kind, lead, c, chunks)]
    if weight.minimum is not None:
        low = _beside(weight.minimum.tiles(rows, groups)[r, at].astype(jnp.float32), lead)
        W = [w + low for w in W]
    return jnp.concatenate(W, axis=-1).reshape(rows, inner // chunks)
