"""Products with few tiles and long sums (split-K): programs for parts of each sum, and a kernel that adds the parts up
in one order and applies what follows. Deterministic: no atomics."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import tuned
from jtile.ops.epilogues import ACTIVATIONS, activation_derivative
from jtile.ops.gpu_tiles import product_options

ELEMENTS, COLUMNS, WARPS = 2048, 512, 4  # a tile of the second kernel: small tiles fill the GPU


def product_in_parts(a, b, bias=None, *, parts: int, ta: bool, tb: bool, bm: int, bn: int, bk: int, **last):
    """`activation(op(a) op(b) + bias)` of a [1, m, k], b [1, k, n], bias [1, n] or None; `last`: see `sum_of_parts`.

    The sums of k terms are made in `parts`, in tiles of bm, bn, bk.
    """
    kernel = tuned(_products(ta, tb), **product_options(bm, bn, 2))
    z = kernel(a, b, parts=parts, bm=bm, bn=bn, bk=bk)
    columns = min(COLUMNS, jt.next_power_of_2(z.shape[2]))
    return tuned(sum_of_parts, num_warps=WARPS)(z, bias, br=ELEMENTS // columns, bn=columns, **last)


def panels(a, b, rows, columns, ta: bool, tb: bool, bm: int, bn: int, bk: int):
    """Functions of p: tile p of rows i of op(a[e]), rows = (e, i), and of columns j of op(b[e])."""
    (ea, i), (eb, j) = rows, columns
    A = lambda p: a.tiles(None, bk, bm)[ea, p, i].T if ta else a.tiles(None, bm, bk)[ea, i, p]
    B = lambda p: b.tiles(None, bn, bk)[eb, j, p].T if tb else b.tiles(None, bk, bn)[eb, p, j]
    return A, B


BLOCK = 256  # terms of a sum that are taken at a time, where their number is not known


@jt.function
def summed(A, B, terms, shape: tuple[int, int], dtype, bk: int):
    """`sum_p A(p) B(p)`, a tile; A and B are functions of p that give `bk` of the `terms` terms of a sum (0: all)."""
    total = jnp.zeros(shape, dtype)
    if isinstance(terms, int) and (bk == 0 or bk >= terms):
        return jt.dot(A(0), B(0), total)
    for p in jt.range(jt.cdiv(terms, bk or BLOCK), stages=3):
        total = jt.dot(A(p), B(p), total)
    return total


@functools.cache
def _products(ta: bool, tb: bool) -> jt.Kernel:
    """The kernel [1, m, k], [1, k, n] -> sums over equal parts of k, [parts, m, n]."""

    def part(a, b, y, *, parts, bm, bn, bk):
        # Y_s[i, j] = sum_p A[i, p] B[p, j] over part s of p; beyond the arrays all is 0
        s, i, j = jt.program_id(0), jt.program_id(1), jt.program_id(2)
        count = jt.cdiv(jt.cdiv(a.shape[1 if ta else 2], bk), parts)
        A, B = panels(a, b, (0, i), (0, j), ta, tb, bm, bn, bk)
        Y = jnp.zeros((bm, bn), jnp.float32)
        for p in jt.range(count, stages=3):
            Y = jt.dot(A(s * count + p), B(s * count + p), Y)
        y.tiles(None, bm, bn)[s, i, j] = Y

    sides = lambda a, b: (a.shape[2 if ta else 1], b.shape[1 if tb else 2])
    kernel = jt.kernel(
        out_type=lambda a, b, *, parts, **_: jax.ShapeDtypeStruct((parts, *sides(a, b)), jnp.float32),
        grid=lambda a, b, *, parts, bm, bn, **_: (parts, *map(jt.cdiv, sides(a, b), (bm, bn))),
        sharding=f"_ {'k m' if ta else 'm k'}, _ {'n k' if tb else 'k n'} -> _ m n",
        name="matmul_parts",
    )(part)

    def cotangents(residuals, ct, **_):
        from jtile.ops.matmul import cotangents  # imported here, since that module imports this one

        # The parts are added up at once, so that they all have one cotangent.
        return cotangents(*residuals, ct[:1], ta=ta, tb=tb)

    kernel.defvjp(lambda a, b, **meta: (kernel(a, b, **meta), (a, b)), cotangents)
    return kernel


def _sum_types(z, *_, out_dtype, save, **__):
    y = jax.ShapeDtypeStruct((1, *z.shape[1:]), jnp.dtype(out_dtype))
    return (y, jax.ShapeDtypeStruct(y.shape, z.dtype)) if save else y


@jt.kernel(
    out_type=_sum_types,
    grid=lambda z, *_, br, bn, **__: (jt.cdiv(z.shape[1], br), jt.cdiv(z.shape[2], bn)),
)
def sum_of_parts(z, bias, y, sums=None, *, activation, out_dtype, br, bn, save=False):
    """z [parts, m, n], bias [1, n] or None -> y [1, m, n], and with `save` also the sums."""
    # y = act(t)     t = sum_s z_s + bias
    i, j = jt.program_id(0), jt.program_id(1)
    Z = z.tiles(None, br, bn)
    total = Z[0, i, j]
    for s in range(1, z.shape[0]):
        total = total + Z[s, i, j]
    if bias is not None:
        total = total + bias.tiles(None, bn)[0, j][None, :].astype(total.dtype)
    if sums is not None:
        sums.tiles(None, br, bn)[0, i, j] = total
    y.tiles(None, br, bn)[0, i, j] = ACTIVATIONS[activation](total).astype(out_dtype)


def _forward(z, bias, *, activation, save, **meta):
    if activation is None and not save:
        return sum_of_parts(z, bias, activation=None, **meta), (z.shape, bias, None)
    y, sums = sum_of_parts(z, bias, activation=activation, save=True, **meta)
    return (y, sums) if save else y, (z.shape, bias, sums)


def _backward(residuals, ct, *, activation, save, **_):
    shape, bias, sums = residuals
    g = (ct[0] if save else ct).astype(jnp.float32)
    g = g if activation is None else activation_derivative(sums, g, activation)
    g = g + ct[1] if save else g
    dbias = None if bias is None else g.sum((0, 1))[None, :].astype(bias.dtype)
    return jnp.broadcast_to(g, shape), dbias


sum_of_parts.defvjp(_forward, _backward)
