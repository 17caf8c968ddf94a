"""Products of narrow numbers with scales, as training and inference in 8 bits use them: one scale for an array, or
scales for 1 x 128 activations and 128 x 128 weights (DeepSeek-V3, 2024)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import gpu_tiles
from jtile.ops._shapes import check_float, check_rank, known, machine, tuned
from jtile.ops.epilogues import ACTIVATIONS
from jtile.ops.matmul import tiles


def _out_type(a, b, *scales, out_dtype, tb, **_):
    return jax.ShapeDtypeStruct((a.shape[0], b.shape[0 if tb else 1]), out_dtype)


def _grid(a, b, *scales, tb, bm, bn, **_):
    return jt.cdiv(a.shape[0], bm), jt.cdiv(b.shape[0 if tb else 1], bn)


@jt.kernel(out_type=_out_type, grid=_grid)
def products_times(a, b, scale, y, *, tb: bool, out_dtype, precision=None, bm: int, bn: int, bk: int, stages: int = 4):
    """a [m, k], b [k, n] (`tb`: [n, k]), scale f32 [] -> y [m, n]."""
    # y_ij = scale sum_t a_it b_tj
    i, j = jt.program_id(0), jt.program_id(1)
    A, B = a.tiles(bm, bk), b.tiles(bn, bk) if tb else b.tiles(bk, bn)
    acc = jt.zeros((bm, bn), jnp.float32)
    for p in jt.range(A.shape[1], stages=stages):
        acc = jt.dot(A[i, p], B[j, p].T if tb else B[p, j], acc, precision=precision)
    y.tiles(bm, bn)[i, j] = (acc * scale[...]).astype(out_dtype)


@jt.kernel(out_type=_out_type, grid=_grid)
def scaled_products(
    a, b, sa, sb, y, *, tb: bool, out_dtype, precision=None, block: int, bm: int, bn: int, bk: int, stages: int = 4
):
    """a [m, k], b [k, n] (`tb`: [n, k]), sa f32 [k / block, m], sb f32 [k / block, n / block] (`tb`: the other way)
    -> y [m, n].

    `bk` divides `block`; `bn` divides `block`, or is a multiple of it.
    """
    # y_ij = sum_q sa_qi sb_qj sum over the terms t of block q of a_it b_tj
    i, j = jt.program_id(0), jt.program_id(1)
    A, B = a.tiles(bm, bk), b.tiles(bn, bk) if tb else b.tiles(bk, bn)
    rows = sa.tiles(None, bm)
    scale = lambda q, c: sb[c, q] if tb else sb[q, c]
    acc = jt.zeros((bm, bn), jnp.float32)
    for p in jt.range(A.shape[1], stages=stages):
        q = p // (block // bk)
        product = jt.dot(A[i, p], B[j, p].T if tb else B[p, j], precision=precision)
        if block % bn == 0:
            s = (rows[q, i] * scale(q, j // (block // bn)))[:, None]
        else:
            s = rows[q, i][:, None] * scale(q, (j * bn + jt.arange(bn)) // block)[None, :]
        acc = acc + product * s
    y.tiles(bm, bn)[i, j] = acc.astype(out_dtype)


@jt.kernel(out_type=_out_type, grid=_grid)
def products_of_rows(a, b, rows, columns, y, *, tb: bool, out_dtype, bm: int, bn: int, bk: int, stages: int = 4):
    """a [m, k], b [n, k], rows f32 [m], columns f32 [n] -> y [m, n]."""
    # y_ij = rows_i columns_j sum_t a_it b_jt
    i, j = jt.program_id(0), jt.program_id(1)
    A, B = a.tiles(bm, bk), b.tiles(bn, bk)
    acc = jt.zeros((bm, bn), jnp.float32)
    for p in jt.range(A.shape[1], stages=stages):
        acc = jt.dot(A[i, p], B[j, p].T, acc, precision="fast")
    acc = acc * rows.tiles(bm)[i][:, None] * columns.tiles(bn)[j][None, :]
    y.tiles(bm, bn)[i, j] = acc.astype(out_dtype)


@jt.kernel(out_type=_out_type, grid=_grid)
def gated_products_of_rows(
    a, gate, rows, columns, up, up_columns, y,
    *, activation: str, tb: bool, out_dtype, bm: int, bn: int, bk: int, stages: int = 4,
):  # fmt: skip
    """a [m, k], gate and up [n, k], rows f32 [m], columns and up_columns f32 [n] -> y [m, n]."""
    # Y = act(G) * U     g_ij = rows_i columns_j sum_t a_it gate_jt, and U likewise
    # A, B, C: tiles of a, gate and up; R: scales of the rows
    i, j = jt.program_id(0), jt.program_id(1)
    A, B, C = a.tiles(bm, bk), gate.tiles(bn, bk), up.tiles(bn, bk)
    G = U = jt.zeros((bm, bn), jnp.float32)
    for p in jt.range(A.shape[1], stages=stages):
        A_p = A[i, p]
        G = jt.dot(A_p, B[j, p].T, G, precision="fast")
        U = jt.dot(A_p, C[j, p].T, U, precision="fast")
    R = rows.tiles(bm)[i][:, None]
    G, U = G * R * columns.tiles(bn)[j][None, :], U * R * up_columns.tiles(bn)[j][None, :]
    y.tiles(bm, bn)[i, j] = (ACTIVATIONS[activation](G) * U).astype(out_dtype)


def _tiles(m: int, n: int, k: int, itemsize: int, block: int | None, **of) -> dict[str, int]:
    """The tile sizes of a product with scales for blocks, or, with `block` None, with one scale; `of`: see
    `matmul.tiles`."""
    if block is None:
        return tiles(m, n, k, itemsize, **of) | {"bk": _tiles(m, n, k, itemsize, 128)["bk"]}
    side = lambda most: next(d for d in (128, 64, 32, 16, 8, 4, 2, 1) if d <= most and block % d == 0)
    m, n = known(m), known(n)
    if machine().whole:
        return {"bm": min(m, 64), "bn": min(n, side(128)), "bk": side(128)}
    bn = side(128) if side(128) >= 16 else 64
    bm = 128 if m > 64 and itemsize <= 2 and jt.cdiv(m, 128) * jt.cdiv(n, bn) > gpu_tiles.processors() // 2 else 64
    bk = side(max(128 // itemsize, 1))
    return {"bm": min(bm, jt.next_power_of_2(m)), "bn": min(bn, jt.next_power_of_2(n)), "bk": bk}


def scaled_matmul(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *,
    block: int = 128,
    transpose_b: bool = False,
    out_dtype=jnp.bfloat16,
    precision: str | None = None,
) -> jax.Array:
    """`(a * a_scale) @ (b * b_scale)`, each scale repeated over its block; sums in float32.

    Args:
      a: float [m, k], mostly float8_e4m3fn.
      b: float [k, n]; [n, k] with `transpose_b`.
      a_scale: float32, a scalar or [m, ceil(k / block)]: one for `block` terms of a row.
      b_scale: float32, a scalar or [ceil(k / block), ceil(n / block)]: one for a square of `block`; with `transpose_b`
        [ceil(n / block), ceil(k / block)].
      out_dtype: dtype of the result.
      precision: as in `jt.dot`: "fast" leaves the sums of 8-bit floats (with scales: of a block) to the tensor cores.

    Returns:
      [m, n].

    Raises:
      KernelTypeError, KernelValueError: dtypes or shapes that do not fit.
    """
    a, b, sa, sb = map(jnp.asarray, (a, b, a_scale, b_scale))
    check_float("scaled_matmul", a=a, b=b)
    check_rank("scaled_matmul", "a", a, 2, "[m, k]")
    check_rank("scaled_matmul", "b", b, 2, "[n, k]" if transpose_b else "[k, n]")
    (m, k), (k2, n) = a.shape, b.shape[::-1] if transpose_b else b.shape
    if k != k2:
        raise KernelValueError(f"scaled_matmul cannot contract {a.shape} with {b.shape} (transpose_b={transpose_b})")
    if not isinstance(block, int) or block < 1:
        raise KernelValueError(f"scaled_matmul: block is a Python int of at least 1, got {block!r}")
    parts, columns = jt.cdiv(k, block), jt.cdiv(n, block)
    _check_scale("a_scale", sa, (m, parts))
    _check_scale("b_scale", sb, (columns, parts) if transpose_b else (parts, columns))
    options = {"tb": transpose_b, "out_dtype": jnp.dtype(out_dtype).name, "precision": precision}
    if 0 in (m, n, k):
        return jnp.zeros((m, n), out_dtype)
    if sa.ndim == sb.ndim == 0:
        sides = _tiles(m, n, k, a.dtype.itemsize, None, transposed=transpose_b, fast=precision == "fast")
        return _run(products_times, a, b, sa * sb, **options, **sides)
    # The scales of a tile's rows lie together: of a column they would take the bandwidth of eight rows from products.
    sa = jnp.broadcast_to(sa.T, (parts, m))
    sb = jnp.broadcast_to(sb, (columns, parts) if transpose_b else (parts, columns))
    sides = _tiles(m, n, k, a.dtype.itemsize, block)
    return _run(scaled_products, a, b, sa, sb, block=block, **options, **sides)


def row_products(a, b, rows, columns, *, out_dtype) -> jax.Array:
    """`(a * rows[:, None]) @ (b * columns[:, None]).T` of 8-bit floats a [m, k] and b [n, k]; the sums are left to the
    tensor cores. Scales are float32 [m] and [n]; gives [m, n]."""
    sides = _tiles(a.shape[0], b.shape[0], a.shape[1], a.dtype.itemsize, None, transposed=True, fast=True)
    options = dict(tb=True, out_dtype=jnp.dtype(out_dtype).name)
    return _run(products_of_rows, a, b, rows, columns, **options, **sides)


def gated_row_products(a, gate, up, rows, columns, up_columns, *, activation: str, out_dtype) -> jax.Array:
    """`activation(g) * u`, in float32, of the `row_products` g and u of a with gate and up, both [n, k]."""
    of = dict(gates=2, transposed=True, fast=True)
    sides = _tiles(a.shape[0], gate.shape[0], a.shape[1], a.dtype.itemsize, None, **of)
    options = dict(activation=activation, tb=True, out_dtype=jnp.dtype(out_dtype).name)
    return _run(gated_products_of_rows, a, gate, rows, columns, up, up_columns, gates=2, **options, **sides)


def _run(kernel, a, *args, bm: int, bn: int, gates: int = 1, **meta):
    options = gpu_tiles.product_options(bm, bn, a.dtype.itemsize, gates)
    return tuned(kernel, **options)(a, *args, bm=bm, bn=bn, **meta)


def _check_scale(name: str, x, shape: tuple[int, int]) -> None:
    if x.dtype != jnp.float32:
        raise KernelTypeError(f"scaled_matmul: {name} is float32, got {x.dtype.name}; cast it")
    if x.shape not in ((), shape):
        raise KernelValueError(f"scaled_matmul: {name} is a scalar or has shape {shape}, got {x.shape}")


def scaled_matmul_reference(
    a, b, a_scale, b_scale, *, block: int = 128, transpose_b: bool = False, out_dtype=jnp.bfloat16
) -> jax.Array:
    """`scaled_matmul` in `jnp`, at the highest precision."""

    def spread(x, scale, *sides: int):
        for axis, side in enumerate(sides if scale.ndim else ()):
            scale = jnp.repeat(scale, side, axis)
        return x.astype(jnp.float32) * (scale[: x.shape[0], : x.shape[1]] if scale.ndim else scale)

    b = spread(b, b_scale, block, block)
    return jnp.matmul(spread(a, a_scale, 1, block), b.T if transpose_b else b, precision="highest").astype(out_dtype)
