"""Products fused with a collective: a device multiplies what has come while the rest is on its way.

Tiles of the output are shared out to programs, those of the next device first; a tile waits for what it needs, one
block of rows after another. Parts of sums are rounded to the dtype of the result before they are sent, as those of XLA,
and added up in float32 in the order of the devices.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import exchanged_parts, exchanged_products, hopper_gathered, hopper_summed, hopper_travelling
from jtile.ops.collective_parts import accumulator, summed_cotangent, varying_together
from jtile.ops.dispatch import BLOCK_LEVEL, Implementation, Op, small_tiles
from jtile.ops.matmul import matmul

PROGRAMS = 4  # programs on a CPU, where each is a thread


def all_gather_matmul(x: jax.Array, w: jax.Array, axis: str) -> jax.Array:
    """`all_gather(x) @ w`: the rows of all devices along an axis, times the matrix of this one. Differentiable.

    Args:
      x: floats [m, k], this device's rows.
      w: [k, n] of the same dtype.
      axis: an axis of the mesh.
    Returns:
      [devices * m, n].
    Raises:
      KernelTypeError, KernelValueError: dtypes or shapes that do not fit, no such axis, or outside of `shard_map`.
    """
    x, w = _checked("all_gather_matmul", x, w)
    n = jt.axis_size(axis)
    if n == 1 or 0 in (x.size, w.size):
        return matmul(_collectives().all_gather(x, axis), w)
    return _gathered(axis, *varying_together(axis, x, w)).reshape(n * x.shape[0], w.shape[1])


def all_gather_matmul_reference(x, w, axis):
    """`all_gather_matmul` by XLA's collectives. Arguments and result are those of `all_gather_matmul`."""
    return _product(jax.lax.all_gather(x, axis, tiled=True), w)


def matmul_reduce_scatter(x: jax.Array, w: jax.Array, axis: str) -> jax.Array:
    """`reduce_scatter(x @ w)`: each device keeps its share of the rows of the sum. Differentiable.

    Args:
      x: floats [devices * m, k].
      w: [k, n] of the same dtype.
      axis: an axis of the mesh.
    Returns:
      [m, n].
    Raises:
      KernelTypeError, KernelValueError: dtypes or shapes that do not fit, no such axis, or outside of `shard_map`.
    """
    x, w = _checked("matmul_reduce_scatter", x, w)
    n = jt.axis_size(axis)
    m, rest = divmod(x.shape[0], n)
    if rest:
        raise KernelValueError(
            f"matmul_reduce_scatter: {x.shape[0]} rows are shared out to {n} devices, which is no multiple; pad x to "
            f"{math.ceil(x.shape[0] / n) * n} rows"
        )
    if n == 1 or 0 in (x.size, w.size):
        return _collectives().reduce_scatter(matmul(x, w), axis)
    x, w = varying_together(axis, x, w)
    return _scattered(axis, x.reshape(n, m, -1), w)


def matmul_reduce_scatter_reference(x, w, axis):
    """`matmul_reduce_scatter` by XLA's collectives. Arguments and result are those of `matmul_reduce_scatter`."""
    return jax.lax.psum_scatter(_product(x, w), axis, tiled=True)


def matmul_all_reduce(x: jax.Array, w: jax.Array, axis: str, *, transpose_b: bool = False) -> jax.Array:
    """`all_reduce(x @ w)`: the sum over the devices along an axis, which all of them get. Differentiable.

    Args:
      x: floats [m, k].
      w: [k, n] of the same dtype; [n, k] with `transpose_b`.
      axis: an axis of the mesh.
      transpose_b: w is transposed.
    Returns:
      [m, n], the same on all devices along the axis.
    Raises:
      KernelTypeError, KernelValueError: dtypes or shapes that do not fit, no such axis, or outside of `shard_map`.
    """
    x, w = _checked("matmul_all_reduce", x, w, transpose_b)
    n = jt.axis_size(axis)
    if n == 1 or 0 in (x.size, w.size):
        return _collectives().all_reduce(matmul(x, w, transpose_b=transpose_b), axis)
    x, w = (jax.lax.pcast(v, axis, to="varying") if _same(v, axis) else v for v in (x, w))
    return _all_reduced(axis, bool(transpose_b), x, w)


def matmul_all_reduce_reference(x, w, axis, *, transpose_b=False):
    """`matmul_all_reduce` by XLA's collectives. Arguments and result are those of `matmul_all_reduce`."""
    return jax.lax.psum(_product(x, w.T if transpose_b else w), axis)


def _collectives():
    from jtile.ops import collectives  # that module has these functions too

    return collectives


def _same(x: jax.Array, axis: str) -> bool:
    """Whether JAX knows that a value is the same along an axis: then its cotangent is the same there, too."""
    varying = jax.typeof(jax.lax.axis_index(axis)).manual_axis_type.varying
    return axis in varying and axis not in jax.typeof(x).manual_axis_type.varying


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _all_reduced(axis: str, transposed: bool, x: jax.Array, w: jax.Array) -> jax.Array:
    products = _summed_transposed if transposed else _summed_products
    return jt.same_along(products(x, w, axis=axis), axis)


def _all_reduced_backward(axis, transposed, residuals, ct):
    x, w = residuals
    ct = summed_cotangent(ct, axis, lambda ct: _collectives().all_reduce(ct, axis))
    of_w = (ct, x) if transposed else (x, ct)
    return matmul(ct, w, transpose_b=not transposed), matmul(*of_w, transpose_a=True)


_all_reduced.defvjp(lambda axis, tb, x, w: (_all_reduced(axis, tb, x, w), (x, w)), _all_reduced_backward)


def _product(x, w):
    return jnp.matmul(x, w, preferred_element_type=accumulator(x.dtype), precision="highest").astype(x.dtype)


def _checked(name: str, x, w, transposed: bool = False) -> tuple[jax.Array, jax.Array]:
    x, w = jnp.asarray(x), jnp.asarray(w)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype != w.dtype:
        raise KernelTypeError(f"{name} takes two matrices of one float dtype, got {x.dtype} and {w.dtype}; cast one")
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1 if transposed else 0]:
        right = "[n, k]" if transposed else "[k, n]"
        raise KernelValueError(f"{name} cannot multiply {tuple(x.shape)} with {tuple(w.shape)}: [m, k] and {right}")
    return x, w


def _tiles(rows: int, m: int, w) -> dict[str, int]:
    """Tiles of a product of `rows` rows, `m` of them in one piece, and the number of programs."""
    k, n = w.shape
    power = lambda size, most: min(most, 1 << max(size - 1, 0).bit_length())
    bm, bn = power(m, 64), power(n, 64)
    count = math.ceil(rows / bm) * math.ceil(n / bn)
    return dict(bm=bm, bn=bn, bk=power(k, 256), programs=min(PROGRAMS if not small_tiles() else 64, count))


@jt.function
def _tile(rows, W, i, j, bm, bn, dtype):
    """Tile (i, j) of a product; `rows(i, k)` is a tile of its rows."""
    acc = jt.zeros((bm, bn), accumulator(dtype))
    for k in jt.range(W.shape[0]):
        acc = jt.dot(rows(i, k), W[k, j], acc)
    return acc


def _box(x, rows: int, w, axis: str, bm: int, bn: int) -> list:
    """Memory for products of `rows` rows that every device sends, and a signal for each of their tiles."""
    n, columns = jt.axis_size(axis), w.shape[1]
    return [jt.symmetric((n, rows, columns), x.dtype), jt.signals((jt.cdiv(rows, bm), jt.cdiv(columns, bn), n))]


@jt.function
def _add_up(parts, came, O, n, p, programs, bm, bn, dtype):
    """The tiles of O that are program p's, each the sum of those that n devices send."""
    columns = O.shape[1]
    for t in jt.range(p, O.shape[0] * columns, programs):
        i, j = t // columns, t % columns
        for d in jt.range(n):
            jt.wait(came[i, j, d])
        acc = jt.zeros((bm, bn), accumulator(dtype))
        for d in jt.range(n):
            acc = acc + parts[d, i, j].astype(acc.dtype)
        O[i, j] = acc.astype(dtype)


@jt.kernel(
    out_type=lambda x, w, *, axis, **_: jt.like(x, shape=(jt.axis_size(axis), x.shape[0], w.shape[1])),
    grid=lambda x, w, *, programs, **_: programs,
    scratch=lambda x, w, *, axis, bm, **_: [
        jt.symmetric((jt.axis_size(axis), *x.shape), x.dtype),
        jt.signals((jt.cdiv(x.shape[0], bm), jt.axis_size(axis))),
    ],
)
def gathered_product(x, w, o, box, came, *, axis: str, bm: int, bn: int, bk: int, programs: int):
    """x [m, k] of all devices, w [k, n]: o [devices, m, n]. A block of rows is sent to all by one program."""
    # o_d = (x of device d) w
    n, me, p = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0)
    X, W, B, O = x.tiles(bm, bk), w.tiles(bk, bn), box.tiles(None, bm, bk), o.tiles(None, bm, bn)
    for i in jt.range(p, X.shape[0], programs):
        for step in jt.range(n):
            d = (me + 1 + step) % n
            there = box.on(axis, d).tiles(None, bm, bk)
            for k in jt.range(X.shape[1]):
                there[me, i, k] = X[i, k]
            jt.signal(came.on(axis, d)[i, me])
    columns = W.shape[1]
    each = X.shape[0] * columns
    for t in jt.range(p, n * each, programs):
        d, i, j = (me + t // each) % n, t % each // columns, t % columns
        jt.wait(came[i, d])
        O[d, i, j] = _tile(lambda i, k, d=d: B[d, i, k], W, i, j, bm, bn, x.dtype).astype(o.dtype)


@jt.kernel(
    out_type=lambda x, w, **_: jt.like(x, shape=(x.shape[1], w.shape[1])),
    grid=lambda x, w, *, programs, **_: programs,
    scratch=lambda x, w, *, axis, bm, bn, **_: _box(x, x.shape[1], w, axis, bm, bn),
)
def scattered_product(x, w, o, box, came, *, axis: str, bm: int, bn: int, bk: int, programs: int):
    """x [devices, m, k], a share of rows for each device, w [k, n]: o [m, n], the sum of all products for this one."""
    # o = sum over d of x_me of device d, times its w
    n, me, p = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0)
    X, W, B, O = x.tiles(None, bm, bk), w.tiles(bk, bn), box.tiles(None, bm, bn), o.tiles(bm, bn)
    columns = W.shape[1]
    each = X.shape[1] * columns
    for t in jt.range(p, n * each, programs):
        d, i, j = (me + 1 + t // each) % n, t % each // columns, t % columns
        part = _tile(lambda i, k, d=d: X[d, i, k], W, i, j, bm, bn, x.dtype)
        box.on(axis, d).tiles(None, bm, bn)[me, i, j] = part.astype(x.dtype)
        jt.signal(came.on(axis, d)[i, j, me])
    _add_up(B, came, O, n, p, programs, bm, bn, o.dtype)


@jt.kernel(
    out_type=lambda x, w, **_: jt.like(x, shape=(x.shape[0], w.shape[1])),
    grid=lambda x, w, *, programs, **_: programs,
    scratch=lambda x, w, *, axis, bm, bn, **_: _box(x, x.shape[0], w, axis, bm, bn),
)
def summed_product(x, w, o, box, came, *, axis: str, bm: int, bn: int, bk: int, programs: int):
    """x [m, k], w [k, n]: o [m, n], the sum of the products of all devices, which each of them adds up."""
    # o = sum over d of (x w) of device d
    n, me, p = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0)
    X, W, B, O = x.tiles(bm, bk), w.tiles(bk, bn), box.tiles(None, bm, bn), o.tiles(bm, bn)
    columns = W.shape[1]
    for t in jt.range(p, X.shape[0] * columns, programs):
        i, j = t // columns, t % columns
        part = _tile(lambda i, k: X[i, k], W, i, j, bm, bn, x.dtype).astype(x.dtype)
        for step in jt.range(n):
            d = (me + 1 + step) % n
            box.on(axis, d).tiles(None, bm, bn)[me, i, j] = part
            jt.signal(came.on(axis, d)[i, j, me])
    _add_up(B, came, O, n, p, programs, bm, bn, o.dtype)


# -- which implementation, and derivatives --------------------------------------------------------------------------


def _gathered_by_tiles(x, w, *, axis: str):
    return gathered_product(x, w, axis=axis, **_tiles(jt.axis_size(axis) * x.shape[0], x.shape[0], w))


def _scattered_by_tiles(x, w, *, axis: str):
    return scattered_product(x, w, axis=axis, **_tiles(x.shape[0] * x.shape[1], x.shape[1], w))


def _summed_by_tiles(x, w, *, axis: str):
    return summed_product(x, w, axis=axis, **_tiles(x.shape[0], x.shape[0], w))


def _summed_behind(x, w, *, axis: str):
    """The product, and behind it the sum. On two H200s 64 rows times 7168x4096 take 25.5 us so, and 22.5 by
    `hopper_summed`, where XLA takes 48.0; 17 rows 29.1, 21.9 and 37.1."""
    return _collectives().sum_of(matmul(x, w), axis)


def _summed_behind_transposed(x, w, *, axis: str):
    return _collectives().sum_of(matmul(x, w, transpose_b=True), axis)


def _gathered_in_front(x, w, *, axis: str):
    """The product of rows that are gathered first. On two H200s 512 rows, 7168x4096, take 45 us so, and 64 with XLA."""
    rows = exchanged_parts.gather(x.reshape(-1), axis).reshape(-1, x.shape[1])
    return matmul(rows, w).reshape(jt.axis_size(axis), x.shape[0], -1)


def _scattered_behind(x, w, *, axis: str):
    """The product, and behind it the sums. On two H200s 512 rows, 7168x4096, take 41 us so, and 68 with XLA."""
    y = matmul(x.reshape(-1, x.shape[-1]), w)
    return exchanged_parts.add(y.reshape(x.shape[0], -1), axis).reshape(x.shape[1], w.shape[1])


def _op(name: str, shards, misfit, apart, by_tiles, *first: Implementation) -> Op:
    return Op(
        name,
        *first,
        Implementation("products of shards beside copies", shards, misfit, BLOCK_LEVEL),
        Implementation("a product and a collective", apart, None, BLOCK_LEVEL),
        Implementation("tiles that wait for what they need", by_tiles),
    )


_gathered_products = _op(
    "product of gathered rows",
    exchanged_products.gathered,
    exchanged_products.misfit_of_shard,
    _gathered_in_front,
    _gathered_by_tiles,
    Implementation(
        "few rows that are posted while the matrix comes",
        hopper_gathered.product,
        hopper_gathered.misfit,
        BLOCK_LEVEL,
        portable=False,
    ),
)
_scattered_products = _op(
    "product with scattered sums",
    exchanged_products.scattered,
    exchanged_products.misfit_of_shares,
    _scattered_behind,
    _scattered_by_tiles,
    Implementation(
        "tiles that travel while others are made",
        hopper_travelling.scattered_sums,
        hopper_travelling.misfit,
        BLOCK_LEVEL,
        portable=False,
    ),
)
_FEW_ROWS = "tiles of few rows that are posted as they are made"
_summed_products = _op(
    "product with sums everywhere",
    exchanged_products.summed,
    exchanged_products.misfit_of_sums,
    _summed_behind,
    _summed_by_tiles,
    Implementation(
        _FEW_ROWS,
        hopper_summed.sums,
        hopper_summed.misfit,
        BLOCK_LEVEL,
        portable=False,
    ),
)
_summed_transposed = Op(
    "product of a transposed matrix with sums everywhere",
    Implementation(
        _FEW_ROWS,
        functools.partial(hopper_summed.sums, tb=True),
        functools.partial(hopper_summed.misfit, tb=True),
        BLOCK_LEVEL,
        portable=False,
    ),
    Implementation("a product and a collective", _summed_behind_transposed),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(axis: str, x, w):
    """x [m, k], w [k, n]: [devices, m, n]."""
    return _gathered_products(x, w, axis=axis)


def _gathered_backward(axis, residuals, ct):
    x, w = residuals
    rows = ct.reshape(-1, ct.shape[-1])
    return matmul_reduce_scatter(rows, w.T, axis), matmul(_collectives().all_gather(x, axis), rows, transpose_a=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scattered(axis: str, x, w):
    """x [devices, m, k], w [k, n]: [m, n]."""
    return _scattered_products(x, w, axis=axis)


def _scattered_backward(axis, residuals, ct):
    x, w = residuals
    gradient = all_gather_matmul(ct, w.T, axis).reshape(x.shape)
    return gradient, matmul(x.reshape(-1, x.shape[-1]), _collectives().all_gather(ct, axis), transpose_a=True)


_gathered.defvjp(lambda axis, x, w: (_gathered(axis, x, w), (x, w)), _gathered_backward)
_scattered.defvjp(lambda axis, x, w: (_scattered(axis, x, w), (x, w)), _scattered_backward)
