"""Products of sparse matrices with dense ones: rows of single numbers (CSR), or of blocks (BSR)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops._shapes import check_float, check_int, check_rank, check_shape, fit, machine, sums_in, tuned, wide


@jt.kernel(
    out_type=lambda data, columns, starts, b, **_: jt.like(b, shape=(starts.shape[0] - 1, b.shape[1])),
    grid=lambda data, columns, starts, b, *, bn, **_: (starts.shape[0] - 1, jt.cdiv(b.shape[1], bn)),
)
def csr_rows(data, columns, starts, b, y, *, be: int, bn: int):
    """data, columns [entries], starts [m + 1], b [k, n], y [m, n]; `be` entries of a row at a time."""
    # y_i = sum_{e of row i} data_e b_(columns_e)
    i, j = jt.program_id(0), jt.program_id(1)
    first, end = starts[i], starts[i + 1]
    if be == 1:
        B, total = b.tiles(None, bn), jt.zeros((bn,), sums_in(b))
        for e in jt.range(first, end):
            total = total + data[e].astype(total.dtype) * wide(B[jnp.clip(columns[e], 0, b.shape[0] - 1), j])
    else:
        parts = jt.zeros((be, bn), sums_in(b))
        for e in jt.range(first, end, be):
            here, mine = jt.ds(e, be), e + jt.arange(be) < end
            factors = jnp.where(mine, data[here].astype(parts.dtype), 0.0)
            row = jnp.where(mine, columns[here], 0)
            parts = parts + factors[:, None] * wide(b[row, jt.ds(j * bn, bn)])
        total = parts.sum(0)
    y.tiles(None, bn)[i, j] = total.astype(y.dtype)


@jt.kernel(
    out_type=lambda data, columns, starts, b, g, **_: jt.like(data), init=0,
    grid=lambda data, columns, starts, b, g, **_: starts.shape[0] - 1,
)  # fmt: skip
def csr_data_gradient(data, columns, starts, b, g, y, *, be: int, bn: int):
    """y [entries], the cotangent of data for that of the result, g [m, n]."""
    # y_e = sum_j g_ij b_(columns_e) j     e of row i
    i = jt.program_id(0)
    first, end = starts[i], starts[i + 1]
    for e in jt.range(first, end, be):
        here, mine = jt.ds(e, be), e + jt.arange(be) < end
        row, sums = jnp.where(mine, columns[here], 0), jt.zeros((be,), sums_in(b))
        for j in jt.range(jt.cdiv(b.shape[1], bn)):
            along = jt.ds(j * bn, bn)
            sums = sums + (wide(b[row, along]) * wide(g[i, along])[None, :]).sum(1)
        jt.store(y, here, sums.astype(y.dtype), mask=mine)


def _sides(entries: int, m: int, n: int) -> dict[str, int]:
    if machine().whole:
        return {"be": 1, "bn": fit(n, 512)}
    bn = fit(n, 128)
    return {"be": fit(jt.cdiv(max(entries, 1), max(m, 1)), max(1, 1024 // bn)), "bn": bn}


def _backward(residuals, g, **_):
    data, columns, starts, b = residuals
    sides = {"be": 16, "bn": fit(b.shape[1], 128 if machine().whole else 64)}
    cotangents = csr_data_gradient(data, columns, starts, b, g, **sides)
    order, rows, begins = _transposed(columns, starts, b.shape[0])
    return cotangents, None, None, _csr(data[order], rows[order], begins, g)


def _transposed(columns, starts, k: int):
    """The order of the entries by columns, the row of each entry, and where columns begin."""
    at = jnp.arange(columns.shape[0], dtype=jnp.int32)
    rows = (jnp.searchsorted(starts, at, side="right") - 1).astype(jnp.int32)
    order = jnp.argsort(columns, stable=True).astype(jnp.int32)
    begins = jnp.searchsorted(columns[order], jnp.arange(k + 1, dtype=jnp.int32)).astype(jnp.int32)
    return order, rows, begins


def _csr(data, columns, starts, b):
    return csr_rows(data, columns, starts, b, **_sides(data.shape[0], starts.shape[0] - 1, b.shape[1]))


csr_rows.defvjp(lambda *args, **meta: (csr_rows(*args, **meta), args), _backward)


@functools.partial(jax.jit, inline=True)
def csr_matmul(data: jax.Array, columns: jax.Array, starts: jax.Array, b: jax.Array) -> jax.Array:
    """`A @ b` of a sparse matrix A in compressed rows (CSR): row i has the numbers `data[starts[i] : starts[i + 1]]` in
    the columns `columns[starts[i] : starts[i + 1]]`. Sums are in float32 (float64 for float64), in their order.

    Differentiable in data and b, without atomic additions: the gradient of b is a product with the transposed matrix.

    Args:
      data: float array [entries]. columns: int [entries], in [0, k). starts: int [m + 1], from 0 to at most entries.
      b: float array [k, n] of data's dtype.
    Returns:
      [m, n] of b's dtype.
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes that do not fit.
    """
    op = "csr_matmul"
    _check(op, data, columns, starts, b, 1)
    if 0 in (data.size, b.size, starts.shape[0] - 1):
        return jnp.zeros((starts.shape[0] - 1, b.shape[1]), b.dtype)
    return _csr(data, columns.astype(jnp.int32), starts.astype(jnp.int32), b)


def _check(op: str, data, columns, starts, b, rank: int) -> None:
    check_float(op, data=data, b=b)
    check_int(op, columns=columns, starts=starts)
    check_rank(op, "data", data, rank, "[entries]" if rank == 1 else "[entries, rows, columns]")
    check_shape(op, "columns", columns, data.shape[:1])
    check_rank(op, "starts", starts, 1, "[m + 1]")
    check_rank(op, "b", b, 2, "[k, n]")
    if starts.shape[0] < 1:
        raise KernelValueError(f"{op}: starts has m + 1 numbers, got none")
    if data.dtype != b.dtype:
        raise KernelTypeError(f"{op}: data has dtype {data.dtype.name}, b {b.dtype.name}")


def csr_matmul_reference(data, columns, starts, b):
    """`csr_matmul` in jnp, by way of the dense matrix."""
    at = jnp.arange(data.shape[0], dtype=jnp.int32)
    rows = (starts[None, :] <= at[:, None]).sum(1) - 1
    dense = jnp.zeros((starts.shape[0] - 1, b.shape[0]), sums_in(b)).at[rows, columns].add(wide(data))
    return jnp.matmul(dense, wide(b), precision="highest").astype(b.dtype)


# -- blocks ------------------------------------------------------------------------------------------------------------


@jt.kernel(
    out_type=lambda data, columns, starts, b, *, turned, **_: jt.like(
        b, shape=((starts.shape[0] - 1) * data.shape[2 if turned else 1], b.shape[1])),
    grid=lambda data, columns, starts, b, *, bn, **_: (starts.shape[0] - 1, jt.cdiv(b.shape[1], bn)),
)  # fmt: skip
def bsr_rows(data, columns, starts, b, y, *, bn: int, turned: bool):
    """data [entries, r, c], b [k c, n], y [m r, n]; `turned`: whether blocks are transposed."""
    # Y_i = sum_{e of row i} data_e B_(columns_e)
    i, j = jt.program_id(0), jt.program_id(1)
    r, c = (data.shape[2], data.shape[1]) if turned else data.shape[1:]
    B, total = b.tiles(c, bn), jt.zeros((r, bn), sums_in(b))
    for e in jt.range(starts[i], starts[i + 1]):
        block = data[e, :, :]
        total = jt.dot(block.T if turned else block, B[jnp.clip(columns[e], 0, B.shape[0] - 1), j], total)
    y.tiles(r, bn)[i, j] = total.astype(y.dtype)


@jt.kernel(out_type=lambda data, *_, **__: jt.like(data), grid=lambda data, *_, **__: data.shape[0])
def bsr_data_gradient(data, rows, columns, b, g, y, *, bn: int):
    """y like data: the cotangent of a block is that of its row of blocks, times the transposed rows of b that the block
    was multiplied with."""
    # Y_e = G_(rows_e) B_(columns_e)^T
    e, (r, c) = jt.program_id(0), data.shape[1:]
    B, G, total = b.tiles(c, bn), g.tiles(r, bn), jt.zeros((r, c), sums_in(b))
    row, column = jnp.clip(rows[e], 0, G.shape[0] - 1), jnp.clip(columns[e], 0, B.shape[0] - 1)
    for j in jt.range(B.shape[1]):
        total = jt.dot(G[row, j], B[column, j].T, total)
    y[e, :, :] = total.astype(y.dtype)


def _bsr_backward(residuals, g, *, bn: int, turned: bool):
    data, columns, starts, b = residuals
    blocks = b.shape[0] // data.shape[1 if turned else 2]
    order, rows, begins = _transposed(columns, starts, blocks)
    sides = {"bn": fit(b.shape[1], 64)}
    used = (jnp.arange(data.shape[0]) < starts[-1])[:, None, None]
    if turned:
        cotangents = bsr_data_gradient(data, columns, rows, g, b, **sides)
    else:
        cotangents = bsr_data_gradient(data, rows, columns, b, g, **sides)
    back = bsr_rows(data[order], rows[order], begins, g, bn=bn, turned=not turned)
    return jnp.where(used, cotangents, 0), None, None, back


bsr_rows.defvjp(lambda *args, **meta: (bsr_rows(*args, **meta), args), _bsr_backward)


@functools.partial(jax.jit, inline=True)
def bsr_matmul(data: jax.Array, columns: jax.Array, starts: jax.Array, b: jax.Array) -> jax.Array:
    """`A @ b` of a matrix A of dense blocks, most of which are zero (BSR): row i of blocks has the blocks
    `data[starts[i] : starts[i + 1]]` in the columns of blocks `columns[starts[i] : starts[i + 1]]`.

    Products go through tensor cores where the target has them. Differentiable in data and b, without atomic additions.

    Args:
      data: float array [entries, r, c]; on GPUs r and c of 16 to 128 are quick.
      columns: int [entries], in [0, k). starts: int [m + 1], from 0 to at most entries.
      b: float array [k c, n] of data's dtype.
    Returns:
      [m r, n] of b's dtype, summed in float32 (float64 for float64).
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes that do not fit.
    """
    op = "bsr_matmul"
    _check(op, data, columns, starts, b, 3)
    _, r, c = data.shape
    if 0 in (r, c) or b.shape[0] % c:
        raise KernelValueError(f"{op}: b has a multiple of {c} rows, as blocks have columns, got {b.shape[0]}")
    if 0 in (data.size, b.size, starts.shape[0] - 1):
        return jnp.zeros(((starts.shape[0] - 1) * r, b.shape[1]), b.dtype)
    # Operands in float32 are cut in parts in registers. Programs of few columns hide each other's waits: blocks of 64
    # take 1382 us on an H200 in tiles of 32 columns, 1757 of 64, 2916 of 128 (torch 2116).
    small, single = max(r, c) <= 64, b.dtype == jnp.float32
    bn = fit(b.shape[1], 256 if machine().whole else 64 if not small else 32 if single else 128)
    run = tuned(bsr_rows, num_warps=4, num_stages=2, specialize=False) if small and single else bsr_rows
    return run(data, columns.astype(jnp.int32), starts.astype(jnp.int32), b, bn=bn, turned=False)


def bsr_matmul_reference(data, columns, starts, b):
    """`bsr_matmul` in jnp, by way of the dense matrix."""
    (entries, r, c), m = data.shape, starts.shape[0] - 1
    at = jnp.arange(entries, dtype=jnp.int32)
    rows = (starts[None, :] <= at[:, None]).sum(1) - 1
    dense = jnp.zeros((m, b.shape[0] // c, r, c), sums_in(b)).at[rows, columns].add(wide(data))
    dense = dense.swapaxes(1, 2).reshape(m * r, b.shape[0])
    return jnp.matmul(dense, wide(b), precision="highest").astype(b.dtype)
