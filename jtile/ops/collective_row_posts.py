"""The kernels of `collective_rows` by posts: rows that are normed and gathered, and sums of what experts give, whose
elements say themselves that they have come.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.collective_parts import others, programs_at_most
from jtile.ops.collective_posts import (
    columns_of,
    not_in_rows,
    not_posted,
    post_to_others,
    receive_terms,
    row_boxes,
)
from jtile.ops.dispatch import first_unmet

COLUMNS = 512  # numbers of a row that a program adds up


@jt.kernel(
    out_type=lambda x, r, w, *, axis, **_: (jt.like(x, shape=(jt.axis_size(axis), *x.shape)), jt.like(x)),
    grid=lambda x, r, w, **_: x.shape[0],
    scratch=row_boxes,
)
def norms_posted(x, r, w, y, s, box, *, axis: str, eps: float, ahead: bool = False):
    """x, r [rows, n], w [n]: y [devices, rows, n], s [rows, n]; ahead: the kernels in front do not make w."""
    # s = x + r;  y_d = s_d / sqrt(mean(s_d^2) + eps) w
    me, p = jt.axis_index(axis), jt.program_id(0)
    columns, inside, load = columns_of(x, box)
    with jt.role("row", warps=8, early=True):
        weight = load(w).astype(jnp.float32) if ahead else None
        jt.wait_for_kernels()
        terms = [load(ref, p).astype(jnp.float32) for ref in (r, x)]
        weight = load(w).astype(jnp.float32) if weight is None else weight
        total = terms[0] + terms[1]
        scale = jax.lax.rsqrt((total * total).sum() * (1.0 / x.shape[1]) + eps)
        row = (total * scale * weight).astype(y.dtype)
        post_to_others(box, (p, slice(None)), row, axis)
        jt.store(y, (me, p, columns), row, mask=inside)
        jt.store(s, (p, columns), total.astype(s.dtype), mask=inside)
        for d in others(axis):
            jt.store(y, (d, p, columns), jt.receive(box, (d, p, slice(None))), mask=inside)


def gathered(x, residual, weight, *, axis: str, eps: float):
    """The norms of the rows of all devices, and this one's sums."""
    return norms_posted(x, residual, weight, axis=axis, eps=eps, ahead=gpu_tiles.overlaps())


def not_gathered(x, residual, weight, *, axis: str, eps: float) -> str | None:
    """Why rows are not normed and posted."""
    return not_in_rows(x, axis)


@jt.kernel(
    out_type=lambda y, places, *_, **__: jt.like(y, shape=(places.shape[1], y.shape[1])),
    grid=lambda y, places, *_, bn, **__: places.shape[1] * jt.cdiv(y.shape[1], bn),
    scratch=lambda y, places, *_, axis, bn, **__: [
        jt.symmetric((jt.axis_size(axis), places.shape[1], jt.cdiv(y.shape[1], bn), bn), jnp.float32)
    ],
)
def sums_posted(y, places, chosen, weights, o, box, *, axis: str, count: int, bn: int):
    """y [copies, n]; places, chosen, weights [devices, rows, k]: o [rows, n]. A program has a tile of a row."""
    # o_i = sum over d of sum over j of w_dij y_(place_ij) of device d,  of those j that are experts of d
    me, columns = jt.axis_index(axis), jt.cdiv(y.shape[1], bn)
    i, c = jax.lax.div(jt.program_id(0), columns), jax.lax.rem(jt.program_id(0), columns)
    at = c * bn + jt.arange(bn)

    def share(d):
        """What the experts of this device add to tile c of row i of device d, whose rows are read at once."""
        found = []
        for j in range(chosen.shape[2]):
            expert = chosen[d, i, j] - me * count
            here = (expert >= 0) & (expert < count)
            tile = jt.load(y, (places[d, i, j], at), mask=here & (at < y.shape[1]), other=0)
            found.append((tile, weights[d, i, j]))
        return functools.reduce(jnp.add, [x.astype(jnp.float32) * w.astype(jnp.float32) for x, w in found])

    with jt.role("tile", warps=4, early=True):
        jt.wait_for_kernels()
        for d in others(axis):
            jt.post(box.on(axis, d), (me, i, c, slice(None)), share(d))
        terms = receive_terms(box, (i, c, slice(None)), share(me), axis)
        o.tiles(None, bn)[i, c] = functools.reduce(jnp.add, terms).astype(o.dtype)


def summed(y, places, chosen, weights, *, axis: str, count: int):
    """The sums [rows, n] of what the experts of all devices give."""
    return sums_posted(y, places, chosen, weights, axis=axis, count=count, bn=COLUMNS)


def not_summed(y, places, chosen, weights, *, axis: str, count: int) -> str | None:
    """Why sums of experts are not posted."""
    return not_posted(y, axis) or first_unmet(
        (places.shape[1] * jt.cdiv(y.shape[1], COLUMNS) <= programs_at_most(), "there are many rows"),
    )
