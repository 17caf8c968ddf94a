"""Embedding lookup: rows of a float or of a quantised table."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelTypeError
from jtile.ops._shapes import check_int, check_rank, fit, machine
from jtile.ops.operands import Weight
from jtile.ops.quantized_tensor import BLOCK, QuantizedTensor
from jtile.ops.segments import sums_of_rows


def _grid(table, ids, *, bn, **_):
    return jt.cdiv(ids.shape[0], bn)


@jt.kernel(out_type=lambda t, ids, *, dtype, **_: jax.ShapeDtypeStruct((ids.shape[0], t.shape[1]), dtype), grid=_grid)
def embedding_rows(table, ids, y, *, bn: int, dtype: str):
    """y [n, features]: rows `ids` of table [vocab, features]; rows outside the table are zeros."""
    rows = jt.ds(jt.program_id(0) * bn, bn)
    y[rows, :] = table[ids[rows], :].astype(y.dtype)


def _forward(table, ids, **meta):
    return embedding_rows(table, ids, **meta), (table, ids)


def _backward(residuals, g, **_):
    table, ids = residuals
    return sums_of_rows(g, ids, table.shape[0]).astype(table.dtype), None


embedding_rows.defvjp(_forward, _backward)


def _blocks_type(table, ids, *, dtype, **_):
    """The type of the rows, [n, blocks, halves, weights]: a byte of a 4-bit block holds one weight of either half."""
    codes = table.codes.shape
    shape = (codes[1], 2, codes[2]) if table.codes.dtype == jnp.uint8 else (codes[1], 1, codes[2])
    return jax.ShapeDtypeStruct((ids.shape[0], *shape), dtype)


def _of_blocks(numbers, shared: int):
    """Numbers [n, groups] repeated for blocks, `shared` of which are a group: [n, blocks, 1]."""
    if shared > 1:
        numbers = jnp.broadcast_to(numbers[..., None], (*numbers.shape, shared)).reshape(numbers.shape[0], -1)
    return numbers[..., None]


@jt.kernel(out_type=_blocks_type, grid=_grid)
def embedding_blocks(table: Weight, ids, y, *, bn: int, dtype: str):
    """y: rows `ids` of a quantised table: codes [vocab, blocks, stored], scale, minimum [vocab, groups]. The formulas
    are in quantized_tensor.py."""
    rows, shared = jt.ds(jt.program_id(0) * bn, bn), table.shared_by(table.codes.shape[1])
    row = ids[rows]
    of_blocks = lambda a: _of_blocks(a[row].astype(jnp.float32), shared)
    codes, scale = table.codes[row], of_blocks(table.scale)
    halves = (codes & jnp.uint8(15), codes >> jnp.uint8(4)) if codes.dtype == jnp.uint8 else (codes,)
    for k, half in enumerate(halves):
        w = half.astype(jnp.float32)
        if table.minimum is not None:
            w = w * scale + of_blocks(table.minimum)
        else:
            w = (w - 8.0) * scale if len(halves) == 2 else w * scale
        y[rows, :, k, :] = w.astype(y.dtype)


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def embedding(table: jax.Array | QuantizedTensor, ids: jax.Array, *, dtype=None) -> jax.Array:
    """Rows `ids` of a table.

    Differentiable in a float table, not in ids; a quantised table is frozen.

    Args:
      table: array [vocab, features], or a `QuantizedTensor` of that shape.
      ids: int array of any shape; ids outside [0, vocab) give zeros.
      dtype: of the result; default the table's, float32 for a quantised one.
    Returns:
      [*ids.shape, features].
    Raises:
      KernelTypeError: ids are no integers, or the table is of complex numbers. KernelValueError: the table is no
      matrix.
    """
    check_int("embedding", ids=ids)
    quantized = isinstance(table, QuantizedTensor)
    if not quantized and jnp.issubdtype(table.dtype, jnp.complexfloating):
        raise KernelTypeError(f"embedding: table is a real array, got {table.dtype.name}; look both parts up")
    check_rank("embedding", "table", table, 2, "[vocab, features]")
    if dtype is None:
        dtype = jnp.float32 if quantized else table.dtype
    if not jnp.issubdtype(dtype, jnp.floating) and quantized:
        raise KernelTypeError(f"embedding: a quantised table gives floats, not {jnp.dtype(dtype).name}")
    features = table.shape[1]
    shape = (*ids.shape, features)
    if ids.size == 0 or 0 in table.shape:
        return jnp.zeros(shape, dtype)
    flat = ids.reshape(-1)
    meta = {"bn": fit(flat.shape[0], max(1, machine().tile // features)), "dtype": jnp.dtype(dtype).name}
    if not quantized:
        return embedding_rows(table, flat, **meta).reshape(shape)
    if table.is_super or table.kind == "mxfp4":
        rows = jnp.clip(flat, 0, table.shape[0] - 1)
        found = jax.lax.stop_gradient(table).rows(rows).dequantize(dtype)
        return jnp.where((rows == flat)[:, None], found, jnp.zeros((), dtype)).reshape(shape)
    if table.is_packed:  # only the rows that are asked for are unpacked
        rows = jnp.where((flat >= 0) & (flat < table.shape[0]), flat, 0)
        table, flat = table.rows(rows).unpacked(), jnp.where(rows == flat, jnp.arange(flat.shape[0]), -1)
    vocab, blocks = table.shape[0], features // BLOCK
    arrays = Weight(table.codes, table.scale, table.minimum)
    blocks = 1 if arrays.scaled_last(table.kind) else blocks
    arrays = arrays._replace(codes=arrays.codes.reshape(vocab, blocks, -1))
    return embedding_blocks(jax.lax.stop_gradient(arrays), flat, **meta).reshape(shape)  # quantised weights are frozen


def embedding_reference(table, ids, *, dtype=None):
    """`embedding` in jnp."""
    dense = table.dequantize() if isinstance(table, QuantizedTensor) else table
    rows = jnp.take(dense, ids, axis=0, mode="clip")
    inside = (ids >= 0) & (ids < dense.shape[0])
    return jnp.where(inside[..., None], rows, jnp.zeros((), rows.dtype)).astype(dense.dtype if dtype is None else dtype)
