"""Softmax and log-softmax along one axis."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import spaces
from jtile.ops._shapes import as_rows, check_axis, check_float, fit, held, machine, of_rows, rows_per_tile, wide
from jtile.ops.dispatch import Implementation, Op, first_unmet

_BLOCKS_FROM, _BACKWARD_BLOCK = 512, 2048  # backwards, the first pass is a sum alone: blocks pay off sooner on a CPU
_AGAIN = 8192  # backwards, rows of 32 bits or more and at most this long start from x: exp costs no more than y's bytes


def _normalise(x, axis: int, log: bool):
    # softmax(x)_j = exp(x_j - m) / sum_k exp(x_k - m)      log_softmax(x)_j = x_j - m - log sum_k exp(x_k - m)
    x = wide(x)
    shifted = x - x.max(axis, keepdims=True)
    e = jnp.exp(shifted)
    total = e.sum(axis, keepdims=True)
    return shifted - jnp.log(total) if log else e * (1.0 / total)


@jt.autotune(space=spaces.rows, override=True)
@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, *, br, **_: jt.cdiv(x.shape[0], br))
def softmax_rows(x, y, *, br: int, log: bool = False):
    """Rows of x [rows, n], `br` of them in a program."""
    i, n = jt.program_id(0), x.shape[1]
    X, Y = x.tiles(br, n), y.tiles(br, n)
    Y[i, 0] = _normalise(X[i, 0], 1, log).astype(y.dtype)


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, *, bc, **_: (x.shape[0], jt.cdiv(x.shape[2], bc)))
def softmax_columns(x, y, *, bc: int, log: bool = False):
    """The softmax along the middle axis of x [outer, n, inner], `bc` columns in a program."""
    i, j, n = jt.program_id(0), jt.program_id(1), x.shape[1]
    X, Y = x.tiles(None, n, bc), y.tiles(None, n, bc)
    Y[i, 0, j] = _normalise(X[i, 0, j], 0, log).astype(y.dtype)


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, **_: x.shape[0])
def softmax_blocks(x, y, *, bn: int, log: bool = False):
    """The softmax of one row in a program, in blocks of `bn`: an online pass for m and the sum, then one to write."""
    i = jt.program_id(0)
    X, Y = x.tiles(None, bn, pad=-math.inf), y.tiles(None, bn)
    m, total = (wide(jnp.full((), v, x.dtype)) for v in (-math.inf, 0))
    for j in jt.range(X.shape[1]):
        t = wide(X[i, j])
        top = jnp.maximum(m, t.max())
        base = jnp.where(top == -math.inf, 0.0, top)  # nothing but -inf so far
        total = total * jnp.exp(m - base) + jnp.exp(t - base).sum()
        m = top
    for j in jt.range(X.shape[1]):
        t = wide(X[i, j]) - m
        Y[i, j] = (t - jnp.log(total) if log else jnp.exp(t) * (1.0 / total)).astype(y.dtype)


def _gradient(y, g, axis: int, log: bool):
    # softmax: dx_j = y_j (g_j - sum_k g_k y_k)      log_softmax: dx_j = g_j - exp(y_j) sum_k g_k
    y, g = wide(y), wide(g)
    if log:
        return g - jnp.exp(y) * g.sum(axis, keepdims=True)
    return y * (g - (y * g).sum(axis, keepdims=True))


@jt.kernel(out_type=lambda y, g, **_: jt.like(y), grid=lambda y, g, *, br, **_: jt.cdiv(y.shape[0], br))
def softmax_backward_rows(y, g, dx, *, br: int, log: bool = False):
    """dx for the results y and their cotangents g [rows, n]; the tiles are those of `softmax_rows`."""
    i, n = jt.program_id(0), y.shape[1]
    Y, G, DX = (ref.tiles(br, n) for ref in (y, g, dx))
    DX[i, 0] = _gradient(Y[i, 0], G[i, 0], 1, log).astype(dx.dtype)


@jt.kernel(out_type=lambda y, g, **_: jt.like(y), grid=lambda y, g, *, bc, **_: (y.shape[0], jt.cdiv(y.shape[2], bc)))
def softmax_backward_columns(y, g, dx, *, bc: int, log: bool = False):
    """dx for y, g [outer, n, inner]; the tiles are those of `softmax_columns`."""
    i, j, n = jt.program_id(0), jt.program_id(1), y.shape[1]
    Y, G, DX = (ref.tiles(None, n, bc) for ref in (y, g, dx))
    DX[i, 0, j] = _gradient(Y[i, 0, j], G[i, 0, j], 0, log).astype(dx.dtype)


@jt.kernel(out_type=lambda y, g, **_: jt.like(y), grid=lambda y, g, **_: y.shape[0])
def softmax_backward_blocks(y, g, dx, *, bn: int, log: bool = False):
    """dx for y, g [rows, n], a row in a program, in blocks of `bn`: one pass for the sum, then one to write."""
    # t, u: tiles of g and y
    i = jt.program_id(0)
    Y, G, DX = (ref.tiles(None, bn) for ref in (y, g, dx))
    total = wide(jnp.zeros((), y.dtype))
    for j in jt.range(Y.shape[1]):
        t = wide(G[i, j])
        total = total + (t if log else t * wide(Y[i, j])).sum()
    for j in jt.range(Y.shape[1]):
        t, u = wide(G[i, j]), wide(Y[i, j])
        DX[i, j] = (t - jnp.exp(u) * total if log else u * (t - total)).astype(dx.dtype)


@jt.kernel(out_type=lambda x, g: jt.like(x), grid=lambda x, g: x.shape[0])
def softmax_backward_again(x, g, dx):
    """dx of a softmax for x and the cotangents g of its results [rows, n], a row in a program."""
    # t, u: rows of x and g     e = exp(t - max t)     y = e r     r = 1 / sum e
    i, n = jt.program_id(0), x.shape[1]
    X, G, DX = (ref.tiles(None, n) for ref in (x, g, dx))
    t, u = wide(X[i, 0]), wide(G[i, 0])
    e = jnp.exp(t - t.max())
    r = 1.0 / e.sum()
    DX[i, 0] = (e * r * (u - (e * u).sum() * r)).astype(dx.dtype)


def _forward(kernel, x, **meta):
    y = kernel(x, **meta)
    return y, y


def _run(kernel, x, *more, **meta):
    """Run a kernel of rows with the warps that suit their length."""
    return of_rows(kernel, x, meta.get("br", 1), 1 + len(more))(x, *more, **meta)


def _is_again(rows, log: bool) -> bool:
    return not log and rows.dtype.itemsize >= 4 and held(rows.shape[1], _AGAIN)


def _rows_forward(kernel, x, *, log: bool = False, **meta):
    y = _run(kernel, x, log=log, **meta) if kernel is softmax_rows else kernel(x, log=log, **meta)
    return y, x if _is_again(x, log) else y


def _rows_backward(y, g, *, log: bool = False, br: int = 1, **_):
    return (_backward(y, g, log=log, br=br),)


def _backward_again(x, g, *, log: bool, br: int):
    return _run(softmax_backward_again, x, g)


def _not_again(x, *_, log: bool, **__) -> str | None:
    short = f"results are logarithms, or rows of {x.shape[1]} {x.dtype.name} cost less to read"
    return first_unmet((_is_again(x, log), short))


def _backward_rows(y, g, *, log: bool, br: int):
    return _run(softmax_backward_rows, y, g, br=br, log=log)


def _not_in_rows(y, *_, **__) -> str | None:
    longest = _BLOCKS_FROM - 1 if machine().whole else max(_BLOCKS_FROM - 1, machine().one_tile)
    return first_unmet((held(y.shape[1], longest), f"rows of {y.shape[1]} are longer than {longest}"))


def _backward_blocks(y, g, *, log: bool, br: int):
    block = _BACKWARD_BLOCK if machine().whole else machine().block // 2
    return softmax_backward_blocks(y, g, bn=fit(y.shape[1], block), log=log)


_backward = Op(
    "softmax backward",
    Implementation("rows, from x again", _backward_again, _not_again),
    Implementation("rows", _backward_rows, _not_in_rows),
    Implementation("blocks", _backward_blocks),
)


def _columns_backward(y, g, **meta):
    return (softmax_backward_columns(y, g, **meta),)


softmax_rows.defvjp(functools.partial(_rows_forward, softmax_rows), _rows_backward)
softmax_blocks.defvjp(functools.partial(_rows_forward, softmax_blocks), _rows_backward)
softmax_columns.defvjp(functools.partial(_forward, softmax_columns), _columns_backward)


def _apply(x, axis: int, log: bool):
    op = "log_softmax" if log else "softmax"
    check_float(op, x=x)
    axis = check_axis(axis, x.ndim, op)
    if x.size == 0:
        return x
    return _op(x, axis=axis, log=log)


def _in_columns(x, *, axis: int, log: bool):
    n, inner = x.shape[axis], math.prod(x.shape[axis + 1 :])
    bc = fit(inner, max(machine().columns, machine().tile // n))
    return softmax_columns(x.reshape(-1, n, inner), bc=bc, log=log).reshape(x.shape)


def _not_in_columns(x, *, axis: int, **_) -> str | None:
    return first_unmet(
        (math.prod(x.shape[axis + 1 :]) != 1, "the elements of a slice lie side by side"),
        (isinstance(x.shape[axis], int), "a slice has a dynamic length"),
    )


def _in_blocks(x, *, axis: int, log: bool):
    along = jnp.moveaxis(x, axis, -1)
    rows = as_rows(along)
    y = softmax_blocks(rows, bn=fit(rows.shape[1], machine().block), log=log).reshape(along.shape)
    return jnp.moveaxis(y, -1, axis)


def _not_in_blocks(x, *, axis: int, **_) -> str | None:
    n = x.shape[axis]
    return first_unmet((not held(n, machine().one_tile), f"a program holds rows of {n}"))


def _in_rows(x, *, axis: int, log: bool):
    rows = as_rows(x.reshape(x.shape[: axis + 1]))
    return _run(softmax_rows, rows, br=rows_per_tile(*rows.shape), log=log).reshape(x.shape)


_op = Op(
    "softmax",
    Implementation("columns", _in_columns, _not_in_columns),
    Implementation("blocks of long rows", _in_blocks, _not_in_blocks),
    Implementation("rows", _in_rows),
)


@functools.partial(jax.jit, static_argnames="axis", inline=True)
def softmax(x: jax.Array, axis: int = -1) -> jax.Array:
    """`exp(x) / sum(exp(x))` along `axis`, computed in float32 (float64 for float64).

    Differentiable in x.

    Args:
      x: float array of any shape and dtype.
      axis: the axis that sums to one.
    Returns:
      An array like `x`. A slice of nothing but -inf gives NaN.
    Raises:
      KernelTypeError: `x` is no float array. KernelValueError: no such axis.
    """
    return _apply(x, axis, log=False)


@functools.partial(jax.jit, static_argnames="axis", inline=True)
def log_softmax(x: jax.Array, axis: int = -1) -> jax.Array:
    """`x - log(sum(exp(x)))` along `axis`, computed in float32 (float64 for float64).

    Differentiable in x.

    Args:
      x: float array of any shape and dtype.
      axis: the axis along which the exponentials of the result sum to one.
    Returns:
      An array like `x`. A slice of nothing but -inf gives NaN.
    Raises:
      KernelTypeError: `x` is no float array. KernelValueError: no such axis.
    """
    return _apply(x, axis, log=True)


def softmax_reference(x: jax.Array, axis: int = -1) -> jax.Array:
    """`softmax` in jnp."""
    return jax.nn.softmax(wide(x), axis).astype(x.dtype)


def log_softmax_reference(x: jax.Array, axis: int = -1) -> jax.Array:
    """`log_softmax` in jnp."""
    return jax.nn.log_softmax(wide(x), axis).astype(x.dtype)
