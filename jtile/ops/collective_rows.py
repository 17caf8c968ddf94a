"""What a mixture of experts over devices does with few rows: every device takes the rows of all, normed, and adds what
its own experts make of them where the rows belong. Two kernels, so that little stands between layers.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelValueError
from jtile.ops import collective_row_posts as posts
from jtile.ops._shapes import check_float, check_int, check_rank, check_shape, tuned
from jtile.ops.collective_parts import UNROLLED, programs_at_most, signal_others, varying_together
from jtile.ops.dispatch import BLOCK_LEVEL, Implementation, Op, small_tiles
from jtile.ops.norms import rms_norm, rms_norm_reference

POSTED, SIGNALLED = "rows that are posted", "rows that are signalled"
COLUMNS, WARPS = 512, 2  # numbers of a row that a program adds up at a time; a thread has 16 bytes of each expert's


def all_gather_rms_norm(
    x: jax.Array, weight: jax.Array, axis: str, *, residual: jax.Array, eps: float = 1e-6
) -> tuple[jax.Array, jax.Array]:
    """`all_gather(rms_norm(x + residual))`, and this device's x + residual, in one kernel. Differentiable in x, weight
    and residual.

    Args:
      x: floats [rows, n] of this device.
      weight: [n].
      axis: an axis of the mesh.
      residual: like x.
      eps: added to the mean of squares.
    Returns:
      The norm of the rows of all devices [devices * rows, n], the same on all of them, and the sum [rows, n].
    Raises:
      KernelTypeError, KernelValueError: dtypes or shapes that do not fit, no such axis, or outside of `shard_map`.
    """
    x, weight, residual = map(jnp.asarray, (x, weight, residual))
    check_float("all_gather_rms_norm", x=x, weight=weight, residual=residual)
    check_rank("all_gather_rms_norm", "x", x, 2, "[rows, n]")
    check_shape("all_gather_rms_norm", "weight", weight, x.shape[-1:])
    check_shape("all_gather_rms_norm", "residual", residual, x.shape)
    n = jt.axis_size(axis)
    if n == 1 or x.size == 0:
        y, total = rms_norm(x, weight, residual=residual, eps=eps)
        return jnp.tile(y, (n, 1)), total
    y, total = _gathered(axis, float(eps), *varying_together(axis, x, residual.astype(x.dtype), weight))
    return y.reshape(n * x.shape[0], x.shape[1]), total


def all_gather_rms_norm_reference(x, weight, axis, *, residual, eps=1e-6):
    """`all_gather_rms_norm` by XLA's collectives. Arguments and result are those of `all_gather_rms_norm`."""
    y, total = rms_norm_reference(x, weight, residual=residual, eps=eps)
    return jax.lax.all_gather(y, axis, tiled=True), total


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(axis: str, eps: float, x, residual, weight):
    return _gathered_rows(x, residual, weight, axis=axis, eps=eps)


def _gathered_by_signals(x, residual, weight, *, axis: str, eps: float):
    programs = min(programs_at_most(), x.shape[0])
    return gathered_norms(x, residual, weight, axis=axis, eps=eps, programs=programs)


_gathered_rows = Op(
    "norms of the rows of all devices",
    Implementation(POSTED, posts.gathered, posts.not_gathered, BLOCK_LEVEL, portable=False),
    Implementation(SIGNALLED, _gathered_by_signals),
)


def _gathered_backward(axis, eps, residuals, cts):
    from jtile.ops.collectives import reduce_scatter

    total, weight = residuals
    _, pull = jax.vjp(lambda s, w: rms_norm(s, w, eps=eps), total, weight)
    of_rows = reduce_scatter(cts[0].reshape(-1, total.shape[1]), axis)
    gradient, of_weight = pull(of_rows)
    gradient = gradient + cts[1]
    return gradient, gradient, of_weight


def _gathered_forward(axis, eps, x, residual, weight):
    y, total = _gathered(axis, eps, x, residual, weight)
    return (y, total), (total, weight)


_gathered.defvjp(_gathered_forward, _gathered_backward)


@jt.kernel(
    out_type=lambda x, r, w, *, axis, **_: (jt.like(x, shape=(jt.axis_size(axis), *x.shape)), jt.like(x)),
    grid=lambda x, r, w, *, programs, **_: programs,
    scratch=lambda x, r, w, *, axis, programs, **_: [
        jt.symmetric((jt.axis_size(axis), *x.shape), x.dtype),
        jt.signals((programs, jt.axis_size(axis))),
    ],
)
def gathered_norms(x, r, w, y, s, box, came, *, axis: str, eps: float, programs: int):
    """x, r [rows, n], w [n]: y [devices, rows, n], s [rows, n]. Program p of P has rows p, p + P, ..."""
    # s = x + r;  y_d = s_d / sqrt(mean(s_d^2) + eps) w
    n, me, p = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0)
    rows = lambda: jt.range(p, x.shape[0], programs)
    weight = w[...].astype(jnp.float32)
    for i in rows():
        total = r[i].astype(jnp.float32) + x[i].astype(jnp.float32)
        scale = jax.lax.rsqrt((total * total).sum() * (1.0 / x.shape[1]) + eps)
        row = (total * scale * weight).astype(y.dtype)
        for k in jt.range(n - 1):
            box.on(axis, (me + 1 + k) % n)[me, i] = row
        y[me, i] = row
        s[i] = total.astype(s.dtype)
    signal_others(came, p, axis)
    for k in jt.range(n - 1):
        d = (me + 1 + k) % n
        jt.wait(came[p, d])
        for i in rows():
            y[d, i] = box[d, i]


def chosen_sums(
    y: jax.Array, places: jax.Array, chosen: jax.Array, weights: jax.Array, axis: str, *, count: int
) -> jax.Array:
    """The sums of what the experts of all devices along an axis make of this device's rows, in one kernel.

    Device d has the experts from d * count to (d + 1) * count, and has put all rows through those of them that rows
    have chosen. Sums are in float32: over the experts of a device, then over the devices. Differentiable in y and
    weights.

    Args:
      y: float [copies, n], what this device's experts give; rows that no place names may be anything.
      places: int32 [devices * rows, k], where in y a row's result of each of its experts is; of other devices' experts
        any number.
      chosen: int32 [devices * rows, k], the experts of the rows of all devices, the same on all of them.
      weights: float32 [devices * rows, k], the same on all devices.
      axis: an axis of the mesh.
      count: the experts of a device.
    Returns:
      This device's rows of the sum, [rows, n] of y's dtype.
    Raises:
      KernelTypeError, KernelValueError: dtypes or shapes that do not fit, no such axis, or outside of `shard_map`.
    """
    y, places, chosen, weights = map(jnp.asarray, (y, places, chosen, weights))
    check_float("chosen_sums", y=y, weights=weights)
    check_int("chosen_sums", places=places, chosen=chosen)
    check_rank("chosen_sums", "chosen", chosen, 2, "[devices * rows, k]")
    check_shape("chosen_sums", "places", places, chosen.shape)
    check_shape("chosen_sums", "weights", weights, chosen.shape)
    n = jt.axis_size(axis)
    rows, rest = divmod(chosen.shape[0], n)
    if rest:
        raise KernelValueError(f"chosen_sums: {chosen.shape[0]} rows are no multiple of the {n} devices along {axis!r}")
    if n == 1 or 0 in (y.size, chosen.size):
        return _apart(axis, count, y, places, chosen, weights)
    y, *others = varying_together(axis, y, *(v.reshape(n, rows, -1) for v in (places, chosen, weights)))
    return _summed(axis, count, y, *others)


def chosen_sums_reference(y, places, chosen, weights, axis, *, count):
    """`chosen_sums` by XLA's collectives. Arguments and result are those of `chosen_sums`."""
    return jax.lax.psum_scatter(_own(axis, count, y, places, chosen, weights), axis, tiled=True).astype(y.dtype)


def _own(axis: str, count: int, y, places, chosen, weights):
    """What the experts of this device add to the rows of all: float32 [devices * rows, n]."""
    own = chosen - count * jax.lax.axis_index(axis)
    here = (own >= 0) & (own < count)
    shares = jnp.where(here[..., None], y[jnp.where(here, places, 0)], 0).astype(jnp.float32)
    return (shares * weights[..., None].astype(jnp.float32)).sum(1)


def _apart(axis: str, count: int, y, places, chosen, weights):
    from jtile.ops.collectives import reduce_scatter

    return reduce_scatter(_own(axis, count, y, places, chosen, weights), axis).astype(y.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed(axis: str, count: int, y, places, chosen, weights):
    """chosen_sums with places, chosen and weights [devices, rows, k]."""
    return _chosen(y, places, chosen, weights, axis=axis, count=count)


def _summed_by_signals(y, places, chosen, weights, *, axis: str, count: int):
    bn = min(jt.next_power_of_2(y.shape[1]), COLUMNS) if small_tiles() else y.shape[1]
    tiles = chosen.shape[1] * math.ceil(y.shape[1] / bn)
    options = dict(axis=axis, count=count, bn=bn, programs=min(programs_at_most(), tiles))
    return tuned(sent_sums, num_warps=WARPS)(y, places, chosen, weights, **options)


_chosen = Op(
    "sums of experts for the rows of each device",
    Implementation(POSTED, posts.summed, posts.not_summed, BLOCK_LEVEL, portable=False),
    Implementation(SIGNALLED, _summed_by_signals),
)


def _summed_backward(axis, count, operands, ct):
    y, places, chosen, weights = operands
    flat = lambda v: v.reshape(-1, v.shape[-1])
    run = lambda y, w: _apart(axis, count, y, flat(places), flat(chosen), flat(w))
    of_y, of_weights = jax.vjp(run, y, weights)[1](ct)
    return of_y, None, None, of_weights


_summed.defvjp(lambda axis, count, *operands: (_summed(axis, count, *operands), operands), _summed_backward)


@jt.kernel(
    out_type=lambda y, places, *_, **__: jt.like(y, shape=(places.shape[1], y.shape[1])),
    grid=lambda y, *_, programs, **__: programs,
    scratch=lambda y, places, *_, axis, programs, **__: [
        jt.symmetric((jt.axis_size(axis), places.shape[1], y.shape[1]), jnp.float32),
        jt.signals((programs, jt.axis_size(axis))),
    ],
)
def sent_sums(y, places, chosen, weights, o, box, came, *, axis: str, count: int, bn: int, programs: int):
    """y [copies, n]; places, chosen, weights [devices, rows, k]: o [rows, n]. Program p has tiles p, p + P, ..."""
    # o_i = sum over d of sum over j of w_dij y_(place_ij) of device d,  of those j that are experts of d
    n, me, p = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0)
    columns, width, parts, out = jt.cdiv(y.shape[1], bn), y.shape[1], box.tiles(None, None, bn), o.tiles(None, bn)
    tiles = lambda: jt.range(p, o.shape[0] * columns, programs)
    there = lambda d: box.on(axis, d).tiles(None, None, bn)

    def rows(d, i, c):
        """The numbers of tile c of row i of device d that the experts of this device give, and their weights."""
        at, found = c * bn + jt.arange(bn), []
        for j in range(chosen.shape[2]):
            expert = chosen[d, i, j] - me * count
            here = (expert >= 0) & (expert < count)
            tile = jt.load(y, (places[d, i, j], at), mask=here & (at < width), other=0)
            found.append((tile, weights[d, i, j]))
        return found

    def share(found):
        return functools.reduce(jnp.add, [x.astype(jnp.float32) * w.astype(jnp.float32) for x, w in found])

    if n <= UNROLLED and o.shape[0] * columns == programs:  # a program has one tile, whose rows are read at once
        i, c, others = p // columns, p % columns, [(me + 1 + step) % n for step in range(n - 1)]
        found = [rows(d, i, c) for d in [*others, me]]
        for d, of in zip(others, found):
            there(d)[me, i, c] = share(of)
        signal_others(came, p, axis)
        own = share(found[-1])
        for d in others:
            jt.wait(came[p, d])
        terms = [jnp.where(d == me, own, parts[jnp.where(d == me, (me + 1) % n, d), i, c]) for d in range(n)]
        out[i, c] = functools.reduce(jnp.add, terms).astype(o.dtype)
    else:
        for step in jt.range(n - 1):
            d = (me + 1 + step) % n
            for t in tiles():
                there(d)[me, t // columns, t % columns] = share(rows(d, t // columns, t % columns))
        signal_others(came, p, axis)
        for t in tiles():
            parts[me, t // columns, t % columns] = share(rows(me, t // columns, t % columns))
        for step in jt.range(n - 1):
            jt.wait(came[p, (me + 1 + step) % n])
        for t in tiles():
            total = jnp.zeros((bn,), jnp.float32)
            for d in jt.range(n):
                total = total + parts[d, t // columns, t % columns]
            out[t // columns, t % columns] = total.astype(o.dtype)
