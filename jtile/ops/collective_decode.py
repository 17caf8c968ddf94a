"""Decode attention over a cache whose tokens devices share: each attends to its own, and the parts are put together.

A device sends to all others, for each query, the sum of its values, weighted by its softmax, with the maximum and the
sum of that softmax. A device receives little: a vector for each head, however long the rows are.

On Hopper a device attends to latent vectors by the kernel of one device, which gives the logarithm of each sum, too.
Devices gather these logarithms, so that each knows by how much its part counts, and the parts are summed up as any
array is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelValueError
from jtile.ops import exchanged_parts, hopper_mla, latent_attention, split_attention
from jtile.ops._shapes import sums_in
from jtile.ops.butterflies import divisor
from jtile.ops.collective_parts import ONE_SHOT, programs_at_most, varying_together
from jtile.ops.dispatch import BLOCK_LEVEL, Implementation, Op
from jtile.ops.flash_attention import check_sinks

PIECE = 8192  # numbers of a piece that one program puts together at a time, at most


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    axis: str,
    *,
    pages: jax.Array | None = None,
    scales: tuple[jax.Array, jax.Array] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    splits: int | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """`ops.decode_attention` of the newest token of each row over the keys that all devices along an axis hold. It does
    not matter which of them has which key. Differentiable as that is, backwards with the whole matrix of scores.

    Args:
      q: float array [batch, heads, d], the same on all devices.
      k, v, pages, scales: this device's part of the cache, see `ops.decode_attention`; any number of slots.
      lengths: int [batch], slots in use on this device, which may be 0; the new token counts where it has been written.
      axis: an axis of the mesh.
      scale, softcap, splits, sinks: see `ops.decode_attention`; the sinks are the same on all devices.
    Returns:
      An array like `q`, the same on all devices along the axis.
    Raises:
      KernelTypeError, KernelValueError: dtypes, shapes or options that do not fit, no such axis, or outside of
      `shard_map`.
    """
    _check_rank("decode_attention", q)
    split_attention.check_decode(q[:, None], k, v, lengths, pages, scales, softcap, splits)
    if sinks is not None:
        check_sinks("decode_attention", q[:, None], sinks)
    options = {"scale": q.shape[2] ** -0.5 if scale is None else float(scale), "softcap": softcap, "splits": splits}
    if jt.axis_size(axis) == 1:
        return split_attention.decode_attention(q, k, v, lengths, pages=pages, scales=scales, sinks=sinks, **options)
    if q.size == 0 or k.size == 0:
        return decode_attention_reference(q, k, v, lengths, axis, pages=pages, scales=scales, sinks=sinks, **options)
    return _decode(axis, tuple(options.items()), *varying_together(axis, q, k, v, lengths, pages, scales, sinks))


def decode_attention_reference(
    q, k, v, lengths, axis, *, pages=None, scales=None, scale=None, softcap=None, splits=None, sinks=None
):
    """`decode_attention` by XLA's collectives, with the whole matrix of scores. Arguments and result are those of
    `decode_attention`.
    """
    del splits
    q, k, v, lengths, pages, scales, sinks = varying_together(axis, q, k, v, lengths, pages, scales, sinks)
    if scales is not None:
        k, v = (split_attention.dequantized(x, of, q.dtype) for x, of in zip((k, v), scales, strict=True))
    k, v = (split_attention.in_one_piece(x, pages) for x in (k, v))
    (batch, heads, d), groups, wide = q.shape, k.shape[2], sums_in(q)
    grouped = q.reshape(batch, groups, heads // groups, d).astype(wide)
    s = jnp.einsum("bghd,bsgd->bghs", grouped, k.astype(wide), precision="highest")
    s = s * (d**-0.5 if scale is None else scale)
    s = s if softcap is None else softcap * jnp.tanh(s / softcap)
    sunk = None if sinks is None else sinks.astype(wide).reshape(1, groups, -1)
    sums = functools.partial(jnp.einsum, "bghs,bsgd->bghd", precision="highest")
    return _softmax_over(axis, s, v.astype(wide), lengths, sums, sunk).reshape(q.shape).astype(q.dtype)


def mla_decode(
    q: jax.Array,
    cache: jax.Array,
    lengths: jax.Array,
    axis: str,
    *,
    rank: int = 512,
    pages: jax.Array | None = None,
    scales: jax.Array | None = None,
    scale: float | None = None,
    splits: int | None = None,
) -> jax.Array:
    """`ops.mla_decode` of the newest token of each row over the entries that all devices along an axis hold. It does
    not matter which of them has which. Differentiable as that is, backwards with the whole matrix of scores.

    Args:
      q: float array [batch, heads, rank + rope], the same on all devices.
      cache, pages, scales: this device's part of the cache, see `ops.mla_decode`; any number of slots.
      lengths: int [batch], slots in use on this device, which may be 0; the new token counts where it has been written.
      axis: an axis of the mesh.
      rank, scale, splits: see `ops.mla_decode`.
    Returns:
      [batch, heads, rank] of q's dtype, the same on all devices along the axis.
    Raises:
      KernelTypeError, KernelValueError: dtypes, shapes or options that do not fit, no such axis, or outside of
      `shard_map`.
    """
    _check_rank("mla_decode", q)
    latent_attention.check_decode(q[:, None], cache, lengths, pages, scales, rank, splits)
    options = {"rank": rank, "scale": q.shape[2] ** -0.5 if scale is None else float(scale), "splits": splits}
    if jt.axis_size(axis) == 1:
        return latent_attention.mla_decode(q, cache, lengths, pages=pages, scales=scales, **options)
    if q.size == 0 or cache.size == 0:
        return mla_decode_reference(q, cache, lengths, axis, pages=pages, scales=scales, **options)
    return _mla(axis, tuple(options.items()), *varying_together(axis, q, cache, lengths, pages, scales))


def mla_decode_reference(q, cache, lengths, axis, *, rank=512, pages=None, scales=None, scale=None, splits=None):
    """`mla_decode` by XLA's collectives, with the whole matrix of scores. Arguments and result are those of
    `mla_decode`.
    """
    del splits
    q, cache, lengths, pages, scales = varying_together(axis, q, cache, lengths, pages, scales)
    if scales is not None:
        cache = (cache.astype(jnp.float32) * scales[..., None]).astype(q.dtype)
    cache, wide = split_attention.in_one_piece(cache, pages).astype(sums_in(q)), sums_in(q)
    s = jnp.einsum("bhd,bsd->bhs", q.astype(wide), cache, precision="highest")
    s = s * (q.shape[2] ** -0.5 if scale is None else scale)
    sums = functools.partial(jnp.einsum, "bhs,bsr->bhr", precision="highest")
    return _softmax_over(axis, s, cache[..., :rank], lengths, sums).astype(q.dtype)


def _softmax_over(axis: str, s, values, lengths, sums: Callable, sinks=None):
    """The mean of the values [batch, slots, ...] of all devices by the softmax of scores s [batch, ..., slots]."""
    column = jnp.arange(s.shape[-1], dtype=jnp.int32)
    seen = column[None, :] < lengths.astype(jnp.int32)[:, None]
    s = jnp.where(jnp.expand_dims(seen, tuple(range(1, s.ndim - 1))), s, -jnp.inf)
    values = jnp.where(jnp.expand_dims(seen, tuple(range(2, values.ndim))), values, 0)
    top = jnp.maximum(jnp.max(jax.lax.stop_gradient(s), -1, initial=-jnp.inf), -1e30)
    if sinks is not None:
        top = jnp.maximum(top, jax.lax.stop_gradient(sinks))
    top = jax.lax.pmax(top, axis)
    p = jnp.exp(s - top[..., None])
    total, y = jax.lax.psum(p.sum(-1), axis), jax.lax.psum(sums(p, values), axis)
    if sinks is not None:
        first = jax.lax.axis_index(axis) == 0
        total = total + jax.lax.psum(jnp.where(first, jnp.exp(sinks - top), 0), axis)
    return y * jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))[..., None]


def _check_rank(name: str, q) -> None:
    if q.ndim != 3:
        raise KernelValueError(
            f"collectives.{name} takes one token a row, q [batch, heads, width], got {tuple(q.shape)}: a cache in "
            "parts does not say which of several tokens stands before which"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _decode(axis: str, options: tuple, q, k, v, lengths, pages, scales, sinks):
    more = dict(options)
    table = None if pages is None else pages.astype(jnp.int32)
    parts = split_attention.parts_of_keys(q[:, None], k, v, lengths.astype(jnp.int32), table, scales or (), **more)
    if sinks is not None:
        parts = split_attention.with_sinks(*parts, sinks, counts=jax.lax.axis_index(axis) == 0)
    return jt.same_along(_together(axis, parts, q.dtype), axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mla(axis: str, options: tuple, q, cache, lengths, pages, scales):
    table = None if pages is None else pages.astype(jnp.int32)
    operands = q[:, None], cache, lengths.astype(jnp.int32), table, scales
    return jt.same_along(_mla_over(*operands, axis=axis, **dict(options)), axis)


def _mla_in_splits(q, cache, lengths, table, scales, *, axis: str, **options):
    return _together(axis, latent_attention.parts_of_entries(q, cache, lengths, table, scales, **options), q.dtype)


def _mla_in_shares(q, cache, lengths, table, scales, *, axis: str, rank: int, scale: float, splits):
    del scales, splits
    return _weighed(axis, *hopper_mla.decode_with_logs(q, cache, lengths, table, rank=rank, scale=scale))


def _misfit_of_mla(q, cache, lengths, table, scales, *, axis: str, **options) -> str | None:
    del axis
    return hopper_mla.misfit(q, cache, lengths, table, scales, **options)


# On four H200s 64 rows of 4096 entries a device take 204 us in shares and 499 in splits, one row 35 and 68, one row of
# 1024 31 and 66; `decode_attention` of 64 rows, 32 heads over 8 of keys, would take 290 and 284, one row 24.7 and 22.2.
_mla_over = Op(
    "mla_decode over devices",
    Implementation("shares of all keys, summed", _mla_in_shares, _misfit_of_mla, BLOCK_LEVEL, portable=False),
    Implementation("splits of each row's keys, put together", _mla_in_splits),
)


def _weighed(axis: str, o, logs) -> jax.Array:
    """The means of all devices' keys [batch, heads, d], of the means o [batch, 1, heads, d] of each device's keys and
    the logarithms to base 2 of the sums that these were divided by, [batch, 1, heads]. Each part is rounded to the
    dtype of the result when it has been weighed."""
    # o = sum_n w_n o_n     w_n = 2^(x_n - M) / sum_k 2^(x_k - M)     M = max_n x_n, x: logs
    from jtile.ops import collectives  # that module has these functions too

    o, logs = o[:, 0], logs[:, 0]
    of_all = exchanged_parts.gather(logs.reshape(-1), axis).reshape(-1, *logs.shape)
    top = of_all.max(0)
    weight = jnp.exp2(logs - top) / jnp.exp2(of_all - top[None]).sum(0)
    return collectives.sum_of((o.astype(jnp.float32) * weight[..., None]).astype(o.dtype), axis)


def _together(axis: str, parts, dtype) -> jax.Array:
    acc, m, l = parts
    batch, groups, _, _, group, d = acc.shape
    heads = divisor(group, max(1, PIECE // d))
    sent = (jt.axis_size(axis) - 2) * batch * groups * group * d * acc.dtype.itemsize
    merge = merge_shares if sent > ONE_SHOT else merge_parts
    programs = min(programs_at_most(), batch * groups * (group // heads))
    return merge(acc, m, l, axis=axis, dtype=dtype.name, heads=heads, programs=programs)


def _gradient_by(reference: Callable, arrays: int) -> Callable[..., Any]:
    """The reverse mode of a call, computed as that of its reference, whose first `arrays` operands and whose scales and
    sinks have cotangents."""

    def backward(axis, options, operands, ct):
        moving = [jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(operands)]
        leaves, tree = jax.tree.flatten(operands)
        names = ("pages", "scales", "sinks")[: len(operands) - arrays - 1]

        def run(given):
            rest = iter(given)
            whole = jax.tree.unflatten(tree, [next(rest) if f else x for x, f in zip(leaves, moving, strict=True)])
            more = dict(zip(names, whole[arrays + 1 :], strict=True))
            return reference(*whole[: arrays + 1], axis, **more, **dict(options))

        _, pull = jax.vjp(run, [x for x, f in zip(leaves, moving, strict=True) if f])
        found = iter(pull(ct)[0])
        return tuple(jax.tree.unflatten(tree, [next(found) if f else None for f in moving]))

    return backward


_decode.defvjp(
    lambda axis, options, *operands: (_decode(axis, options, *operands), operands),
    _gradient_by(decode_attention_reference, 3),
)
_mla.defvjp(
    lambda axis, options, *operands: (_mla(axis, options, *operands), operands), _gradient_by(mla_decode_reference, 2)
)


def _boxes(acc, m, l, *, axis: str, programs: int, **_):
    """Memory for what each device sends for each query: a sum of values, and the maximum and total of its softmax."""
    n, (batch, groups, _, _, group, d) = jt.axis_size(axis), acc.shape
    rows = (n, batch, groups, group)
    return [jt.symmetric((*rows, d), acc.dtype), jt.symmetric((*rows, 2), acc.dtype), jt.signals((programs, n))]


def _like_queries(acc, m, l, *, dtype: str, **_):
    batch, groups, _, _, group, d = acc.shape
    return jax.ShapeDtypeStruct((batch, groups * group, d), dtype)


def _pieces(acc, heads: int):
    """How many pieces there are, some heads of one group and row each; where piece t lies in what the devices send,
    (row, group, heads), and in the output, (row, heads)."""
    batch, groups, _, _, group, _ = acc.shape
    cuts = group // heads

    def at(t):
        first, c = jax.lax.div(t, jnp.int32(cuts)), jax.lax.rem(t, jnp.int32(cuts)) * heads
        b, g = jax.lax.div(first, jnp.int32(groups)), jax.lax.rem(first, jnp.int32(groups))
        return (b, g, jt.ds(c, heads)), (b, jt.ds(g * group + c, heads))

    return batch * groups * cuts, at


@jt.function
def _put_own(box, weights, me, acc, m, l, at):
    """Store what this device found for a piece, all its splits, as part `me` of memory that may be another device's."""
    b, g, h = at
    splits = acc.shape[2]
    top = m[b, g, 0, 0, h]
    for s in jt.range(1, splits):
        top = jnp.maximum(top, m[b, g, s, 0, h])
    w = jnp.exp2(m[b, g, 0, 0, h] - top)
    total, y = w * l[b, g, 0, 0, h], w[:, None] * acc[b, g, 0, 0, h, :]
    for s in jt.range(1, splits):
        w = jnp.exp2(m[b, g, s, 0, h] - top)
        total, y = total + w * l[b, g, s, 0, h], y + w[:, None] * acc[b, g, s, 0, h, :]
    box[me, b, g, h, :] = y
    weights[me, b, g, h, 0] = top
    weights[me, b, g, h, 1] = total


@jt.function
def _merged(box, weights, n, at):
    """The mean of a piece from the parts of all devices, in their order."""
    b, g, h = at
    top = weights[0, b, g, h, 0]
    for k in jt.range(1, n):
        top = jnp.maximum(top, weights[k, b, g, h, 0])
    w = jnp.exp2(weights[0, b, g, h, 0] - top)
    total, y = w * weights[0, b, g, h, 1], w[:, None] * box[0, b, g, h, :]
    for k in jt.range(1, n):
        w = jnp.exp2(weights[k, b, g, h, 0] - top)
        total, y = total + w * weights[k, b, g, h, 1], y + w[:, None] * box[k, b, g, h, :]
    return y * jnp.where(total == 0, 0.0, 1.0 / total)[:, None]


@jt.kernel(out_type=_like_queries, grid=lambda acc, m, l, *, programs, **_: programs, scratch=_boxes)
def merge_parts(acc, m, l, o, box, weights, came, *, axis: str, dtype: str, heads: int, programs: int):
    """o [batch, groups * group, d] of the parts acc [batch, groups, splits, 1, group, d], m and l of all devices, each
    of which puts everything together; `heads` at a time, which divide a group."""
    # o = sum_n 2^(m_n - M) acc_n / sum_n 2^(m_n - M) l_n     M = max_n m_n, first over splits and then over devices
    n, me, p = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0)
    count, at = _pieces(acc, heads)
    for t in jt.range(p, count, programs):
        _put_own(box, weights, me, acc, m, l, at(t)[0])
    for k in jt.range(n - 1):
        to = (me + 1 + k) % n
        there, scale = box.on(axis, to), weights.on(axis, to)
        for t in jt.range(p, count, programs):
            b, g, h = at(t)[0]
            there[me, b, g, h, :] = box[me, b, g, h, :]
            scale[me, b, g, h, :] = weights[me, b, g, h, :]
        jt.signal(came.on(axis, to)[p, me])
    for k in jt.range(n - 1):
        jt.wait(came[p, (me + 1 + k) % n])
    for t in jt.range(p, count, programs):
        place, (b, h) = at(t)
        o[b, h, :] = _merged(box, weights, n, place).astype(dtype)


def _shares(acc, m, l, *, axis: str, programs: int, dtype: str, **options):
    """Memory for parts, and for what the devices put together of them."""
    whole = _like_queries(acc, m, l, dtype=dtype)
    return [
        *_boxes(acc, m, l, axis=axis, programs=programs, **options),
        jt.symmetric(whole.shape, whole.dtype),
        jt.signals((programs, jt.axis_size(axis))),
    ]


@jt.kernel(out_type=_like_queries, grid=lambda acc, m, l, *, programs, **_: programs, scratch=_shares)
def merge_shares(acc, m, l, o, box, weights, came, whole, done, *, axis: str, dtype: str, heads: int, programs: int):
    """`merge_parts` in two turns: of each program's pieces, device d puts every n-th from its d-th on together, and
    sends it to all."""
    n, me, p = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0)
    count, at = _pieces(acc, heads)
    pieces = lambda d: jt.range(p + d * programs, count, n * programs)
    for k in jt.range(n):
        to = (me + 1 + k) % n
        there, scale = box.on(axis, to), weights.on(axis, to)
        for t in pieces(to):
            _put_own(there, scale, me, acc, m, l, at(t)[0])
        if k < n - 1:
            jt.signal(came.on(axis, to)[p, me])
    for k in jt.range(n - 1):
        jt.wait(came[p, (me + 1 + k) % n])
    for t in pieces(me):
        place, (b, h) = at(t)
        whole[b, h, :] = _merged(box, weights, n, place).astype(dtype)
    for k in jt.range(n - 1):
        to = (me + 1 + k) % n
        there = whole.on(axis, to)
        for t in pieces(me):
            b, h = at(t)[1]
            there[b, h, :] = whole[b, h, :]
        jt.signal(done.on(axis, to)[p, me])
    for k in jt.range(n):
        d = (me + k) % n
        if k > 0:
            jt.wait(done[p, d])
        for t in pieces(d):
            b, h = at(t)[1]
            o[b, h, :] = whole[b, h, :]
