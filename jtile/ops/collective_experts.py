"""Tokens on their way to the devices that have their experts, and back, with counts that stay on the devices.

Each device sorts its tokens by expert and sends each peer the rows of that peer's experts in one piece, and how many of
them each expert has. It puts the rows that it receives in the order of its experts, as `ops.grouped_matmul` takes them.
The way back is the transpose of the way there.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelValueError
from jtile.ops._shapes import check_float, check_int, check_rank, check_shape, fit
from jtile.ops.collective_parts import programs_at_most, varying_together
from jtile.ops.dispatch import small_tiles
from jtile.ops.routing import route

ROWS, COLUMNS = 8, 1024  # of a block that a program copies at a time, at most, on targets with small tiles


class Routes(NamedTuple):
    """What `combine` needs of a `dispatch`, all int32: `place` [tokens, k], where each of them stands among the rows
    that this device sends, or -1; `counts` [devices, experts of a device], the rows that it sends to each expert;
    `received`, likewise, those that its own experts get from each device."""

    place: jax.Array
    counts: jax.Array
    received: jax.Array


def dispatch(
    x: jax.Array, experts: jax.Array, axis: str, *, count: int, capacity: int | None = None
) -> tuple[jax.Array, jax.Array, Routes]:
    """Sends the tokens of all devices along an axis to the devices of their experts, of which device r has those from
    r * e on, with e = count / devices, rounded up. Differentiable in x.

    Args:
      x: float array [tokens, hidden], this device's tokens; every device has as many.
      experts: int [tokens, k]: the experts of each token, from 0 to count - 1; it does not go to others.
      axis: an axis of the mesh.
      count: the number of all experts.
      capacity: at most so many of a device's tokens go to an expert, the first ones; the others go nowhere, and come
        back as zeros. None: all, for which there is memory on each device.
    Returns:
      rows [devices * m, hidden], those of this device's experts one behind the other, within an expert in the order of
      devices and of tokens, and zeros behind them; m is tokens * k, or e * capacity if that is less.
      sizes int32 [e], how many rows each of its experts has.
      routes, which `combine` takes.
    Raises:
      KernelTypeError, KernelValueError: dtypes, shapes or options that do not fit, no such axis, or outside of
      `shard_map`.
    """
    x, experts = jnp.asarray(x), jnp.asarray(experts)
    n = jt.axis_size(axis)
    e, bound = _sizes(x, experts, count, capacity, n)
    x, experts = varying_together(axis, x, experts)
    if 0 in (x.size, experts.size):
        place, counts = _plan(experts.astype(jnp.int32), n, e, capacity)
        empty = varying_together(axis, jnp.zeros((n * bound, x.shape[1]), x.dtype), jnp.zeros_like(counts))
        return empty[0], empty[1][0], Routes(place, counts, empty[1])
    ordered, place, counts = _ordered(x, experts, n, e, capacity)
    rows, received = send_rows(ordered, counts, **_options(axis, bound, place.size, x.shape[1]))
    return rows, received.sum(0), Routes(place, counts, received)


def combine(y: jax.Array, routes: Routes, axis: str, *, weights: jax.Array | None = None) -> jax.Array:
    """Brings rows back to the tokens that `dispatch` sent, and adds up those of each token. Differentiable in y and
    weights.

    Args:
      y: float array [devices * m, hidden], in the places of the rows of `dispatch`; hidden and dtype may be others.
      routes: the `Routes` that this `dispatch` gave.
      axis: the axis of the mesh that `dispatch` was given.
      weights: float32 [tokens, k], what each token's rows are multiplied with; ones by default.
    Returns:
      [tokens, hidden] of y's dtype, summed in float32.
    Raises:
      KernelTypeError, KernelValueError: dtypes or shapes that do not fit, no such axis, or outside of `shard_map`.
    """
    y = jnp.asarray(y)
    _check_rows(y, routes, jt.axis_size(axis), weights)
    y, routes, weights = varying_together(axis, y, routes, weights)
    if 0 in (y.size, routes.place.size):
        none = varying_together(axis, jnp.zeros((routes.place.size, y.shape[1]), y.dtype))[0]
        return _added(none, routes.place, weights)
    if weights is None:
        weights = varying_together(axis, jnp.ones(routes.place.shape, jnp.float32))[0]
    options = _options(axis, y.shape[0] // jt.axis_size(axis), routes.place.size, y.shape[1])
    return _combine(tuple(options.items()), y, weights.astype(jnp.float32), routes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(options: tuple, y, weights, routes: Routes):
    return return_sums(y, routes.counts, routes.received, routes.place, weights, **dict(options))


def _combined(options: tuple, y, weights, routes: Routes):
    """`_combine` with the rows themselves, which the cotangent of the weights is made of; and its reverse mode."""

    def run(y, weights):
        return _added(return_rows(y, routes.counts, routes.received, **dict(options)), routes.place, weights)

    return jax.vjp(run, y, weights)


_combine.defvjp(_combined, lambda options, pull, ct: (*pull(ct), None))


def dispatch_reference(x, experts, axis, *, count, capacity=None):
    """`dispatch` by XLA, which brings the tokens of all devices to each. Arguments and result are those of
    `dispatch`.
    """
    n = jt.axis_size(axis)
    e, bound = _sizes(x, experts, count, capacity, n)
    x, experts = varying_together(axis, x, experts)
    place, counts = _plan(experts.astype(jnp.int32), n, e, capacity)
    received = jax.lax.all_to_all(counts, axis, 0, 0, tiled=True)
    everywhere = functools.partial(jax.lax.all_gather, axis_name=axis)
    sent, tables = everywhere(_in_order(x, place)), everywhere(counts)
    at = _places(tables, jax.lax.axis_index(axis), sent.shape[1], n * bound)
    rows = (
        jnp.zeros((n * bound, x.shape[1]), x.dtype)
        .at[at.reshape(-1)]
        .set(sent.reshape(-1, x.shape[1]), mode="drop", unique_indices=False)
    )
    return rows, received.sum(0), Routes(place, counts, received)


def combine_reference(y, routes, axis, *, weights=None):
    """`combine` by XLA, which brings the rows of all devices to each. Arguments and result are those of `combine`."""
    y, routes, weights = varying_together(axis, y, routes, weights)
    everywhere = functools.partial(jax.lax.all_gather, axis_name=axis)
    rows, tables, me = everywhere(y), everywhere(routes.counts), jax.lax.axis_index(axis)
    back = jnp.zeros((routes.place.size, y.shape[1]), y.dtype)
    for d in range(jt.axis_size(axis)):
        at = jnp.take(_places(tables, d, len(back), len(y)), me, axis=0)
        back = back + rows[d].at[at].get(mode="fill", fill_value=0)
    return _added(back, routes.place, weights)


def _places(tables, d, sent: int, rows: int):
    """Where the rows that each device sends stand on device d: int32 [devices, sent], `rows` for those that do not go
    there. tables [devices, devices, e]: the counts of each device."""
    n, _, e = tables.shape
    ends = jnp.cumsum(tables.reshape(n, -1), 1, dtype=jnp.int32)
    mine = jnp.take(tables, d, axis=1)
    total = mine.sum(0)
    base = (jnp.cumsum(total) - total)[None, :] + jnp.cumsum(mine, 0) - mine  # [devices, e]
    i = jnp.arange(sent, dtype=jnp.int32)
    found = (ends[:, None, :] <= i[None, :, None]).sum(2, dtype=jnp.int32)  # the expert of each row
    start = jnp.take_along_axis(jnp.pad(ends, ((0, 0), (1, 0))), found, axis=1)
    own = jnp.take_along_axis(base, jnp.clip(found - d * e, 0, e - 1), axis=1)
    there = (found >= d * e) & (found < (d + 1) * e)
    return jnp.where(there, own + i[None, :] - start, rows)


def _sizes(x, experts, count: int, capacity: int | None, n: int) -> tuple[int, int]:
    """(experts of a device, the most rows that it gets from one device)."""
    check_float("dispatch", x=x)
    check_int("dispatch", experts=experts)
    check_rank("dispatch", "x", x, 2, "[tokens, hidden]")
    check_rank("dispatch", "experts", experts, 2, "[tokens, k]")
    check_shape("dispatch", "experts", experts, (x.shape[0], experts.shape[1]))
    if count < 1:
        raise KernelValueError(f"dispatch: there is at least one expert, got count={count}")
    if capacity is not None and capacity < 1:
        raise KernelValueError(f"dispatch: capacity is at least 1, or None for all tokens, got {capacity}")
    e, most = jt.cdiv(count, n), experts.size
    return e, most if capacity is None else min(most, e * capacity)


def _check_rows(y, routes: Routes, n: int, weights) -> None:
    check_float("combine", y=y, weights=weights)
    check_rank("combine", "y", y, 2, "[devices * m, hidden]")
    if routes.counts.shape[0] != n or y.shape[0] % n:
        raise KernelValueError(
            f"combine: {y.shape[0]} rows and routes of {routes.counts.shape[0]} devices are not those of a dispatch "
            f"over the {n} devices of this axis"
        )
    if weights is not None:
        check_shape("combine", "weights", weights, routes.place.shape)


def _options(axis: str, bound: int, sent: int, width: int) -> dict:
    """The options of the kernels. On GPUs a block of rows has enough loads under way for a multiprocessor."""
    programs = max(1, min(programs_at_most(), bound))
    rows = max(1, min(ROWS, jt.next_power_of_2(jt.cdiv(bound, programs)))) if small_tiles() else 1
    return dict(
        axis=axis,
        bound=bound,
        sent=sent,
        programs=programs,
        rows=rows,
        bn=fit(width, COLUMNS if small_tiles() else width),
    )


def _plan(experts, n: int, e: int, capacity: int | None):
    """Where each of experts [tokens, k] stands among the rows that are sent, and the counts [n, e]; see `Routes`."""
    of = experts.reshape(-1)
    of = jnp.where((of >= 0) & (of < n * e), of, n * e)
    order = jnp.argsort(of, stable=True)
    every = jnp.zeros((n * e + 1,), jnp.int32).at[of].add(1)
    first = jnp.cumsum(every) - every
    place = jnp.zeros_like(of).at[order].set(jnp.arange(of.size, dtype=jnp.int32), unique_indices=True)
    rank = place - first[of]
    counts = every[:-1] if capacity is None else jnp.minimum(every[:-1], capacity)
    start = jnp.pad(jnp.cumsum(counts) - counts, (0, 1))
    kept = (of < n * e) & (rank < jnp.pad(counts, (0, 1))[of])
    return jnp.where(kept, start[of] + rank, -1).reshape(experts.shape), counts.reshape(n, e)


def _ordered(x, experts, n: int, e: int, capacity: int | None):
    """The rows that are sent, in the order of experts, and what `_plan` gives."""
    if capacity is not None:
        place, counts = _plan(experts.astype(jnp.int32), n, e, capacity)
        return _in_order(x, place), place, counts
    rows, place, counts = route(x, experts, n * e)
    return rows, jnp.where(place < counts.sum(), place, -1), counts.reshape(n, e)


def _in_order(x, place):
    """The rows that are sent: row place[t, j] is x[t]; rows to which no token is sent are zero."""
    tokens, k = place.shape
    at = jnp.where(place < 0, tokens * k, place).reshape(-1)
    source = (
        jnp.full((tokens * k,), tokens, jnp.int32).at[at].set(jnp.arange(tokens * k, dtype=jnp.int32) // k, mode="drop")
    )
    return x.at[source].get(mode="fill", fill_value=0)


def _added(back, place, weights):
    """The sum over j of back[place[t, j]], times weights."""
    rows = jnp.where((place >= 0)[..., None], back[jnp.maximum(place, 0)], 0).astype(jnp.float32)
    rows = rows if weights is None else rows * weights.astype(jnp.float32)[..., None]
    return rows.sum(1).astype(back.dtype)


@jt.function
def _blocks(count, programs, rows, move):
    """Call `move(i, used)` for this program's blocks of `rows` numbers i below count; used: which of them are below."""
    for first in jt.range(jt.program_id(0) * rows, count, programs * rows):
        i = first + jt.arange(rows)
        move(i, i < count)


@jt.function
def _each(move, counts, base, programs, rows):
    """Call `move(i, r, used)` for this program's rows i of a piece in the order of experts: r is where each of them
    stands among rows of which those of expert e begin at base[e].

    Args:
      counts, base: int32 [experts].
    """
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    shift = (base - (ends - counts))[None, :]
    lanes = jt.arange(counts.shape[0])[None, :]

    def place(i, used):
        expert = (ends[None, :] <= i[:, None]).sum(1, dtype=jnp.int32)
        move(i, jnp.where(lanes == expert[:, None], shift, 0).sum(1, dtype=jnp.int32) + i, used)

    _blocks(counts.sum(dtype=jnp.int32), programs, rows, place)


@jt.function
def _copy(to, at, of, place, used, bn):
    """Copy rows, `bn` columns at a time, so that many loads are under way at once.

    Args:
      to, of: Refs [..., rows, width].
      at, place: indices of the rows, int32 [rows], behind those of the leading dimensions. Rows of `to` follow each
        other: else they would be stored one after the other.
      used: bool [rows], which of them are copied.
    """
    for c in range(jt.cdiv(of.shape[-1], bn)):
        columns = (c * bn + jt.arange(bn))[None, :]
        tile = jt.load(of, (*place[:-1], place[-1][:, None], columns), mask=used[:, None])
        jt.store(to, (*at[:-1], at[-1][:, None], columns), tile, mask=used[:, None])


@jt.function
def _zeros_behind(to, total, programs, rows, bn):
    """Zeros in the tiles of `rows` rows that have none of the first `total` ones."""
    TO = to.tiles(rows, bn)
    for b in jt.range(jt.program_id(0), TO.shape[0], programs):
        if b * rows >= total:
            for c in range(TO.shape[1]):
                TO[b, c] = jt.zeros((rows, bn), to.dtype)


@jt.function
def _collect(to, box, table, lanes, programs, rows, bn):
    """The rows that devices sent, in the order of experts and within an expert in that of devices: row r of `to` is row
    i of what device d sent, which holds its rows for all experts one behind the other. Zeros behind them, up to the end
    of a tile.

    Args:
      box: [devices, rows, width]; table: the counts, int32 [devices, experts]; lanes: at least as many as experts.
    """
    TO, n, e = to.tiles(rows, bn), *table.shape
    expert, of = jt.arange(lanes)[:, None], jt.arange(jt.next_power_of_2(n))[None, :]
    counts = jt.load(table, (of, expert), mask=(of < n) & (expert < e))
    sent = jnp.cumsum(counts, 0, dtype=jnp.int32) - counts
    pieces = counts.reshape(-1)  # one of each expert and device
    end = jnp.cumsum(pieces, dtype=jnp.int32)
    begin, sender = end - pieces, jnp.broadcast_to(of, counts.shape).reshape(-1)
    shift = sent.reshape(-1) - begin
    for b in jt.range(jt.program_id(0), jt.cdiv(pieces.sum(dtype=jnp.int32), rows), programs):
        r = (b * rows + jt.arange(rows))[:, None]
        here = (begin[None, :] <= r) & (r < end[None, :])
        device = jnp.where(here, sender[None, :], 0).sum(1, dtype=jnp.int32)
        i = jnp.where(here, r + shift[None, :] + 1, 0).sum(1, dtype=jnp.int32) - 1  # -1: no row
        for c in range(TO.shape[1]):
            columns = (c * bn + jt.arange(bn))[None, :]
            TO[b, c] = jt.load(box, (device[:, None], jnp.maximum(i, 0)[:, None], columns), mask=(i >= 0)[:, None])


def _lanes(counts) -> int:
    return jt.next_power_of_2(counts.shape[1])


@jt.kernel(
    out_type=lambda x, counts, *, axis, bound, **_: (
        jt.like(x, shape=(jt.axis_size(axis) * bound, x.shape[1])), jt.like(counts),
    ),
    grid=lambda x, counts, *, programs, **_: programs,
    scratch=lambda x, counts, *, bound, **_: [
        jt.symmetric((counts.shape[0], bound, x.shape[1]), x.dtype), jt.signals(counts.shape[:1]),
        jt.symmetric(counts.shape, counts.dtype), jt.signals(counts.shape[:1]),
    ],
)  # fmt: skip
def send_rows(
    x, counts, y, received, box, came, table, told,
    *, axis: str, bound: int, sent: int, programs: int, rows: int, bn: int,
):  # fmt: skip
    """x [sent, hidden] in the order of experts, counts int32 [devices, e]: y [devices * bound, hidden] in the order of
    this device's experts, received int32 [devices, e], the counts of each device for these. A program copies `rows`
    rows at a time."""
    n, me, p = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0)
    COUNTS, TABLE = (r.tiles(None, _lanes(counts)) for r in (counts, table))
    if p == 0:
        for k in jt.range(n):
            d = (me + 1 + k) % n
            table.on(axis, d)[me] = counts[d]
            jt.signal(told.on(axis, d)[me])
    for k in jt.range(n):
        d = (me + 1 + k) % n
        there, start = box.on(axis, d), jnp.int32(0)
        for before in jt.range(d):
            start = start + COUNTS[before, 0].sum(dtype=jnp.int32)

        def send(i, used, there=there, start=start):
            _copy(there, (me, i), x, (start + i,), used, bn)

        _blocks(COUNTS[d, 0].sum(dtype=jnp.int32), programs, rows, send)
        jt.signal(came.on(axis, d)[me])
    total = jt.zeros((_lanes(counts),), jnp.int32)
    for d in jt.range(n):
        jt.wait(told[d])
        total = total + TABLE[d, 0]
        if p == 0:
            received[d] = table[d]
    _zeros_behind(y, total.sum(dtype=jnp.int32), programs, rows, bn)
    for d in jt.range(n):
        jt.wait(came[d], programs)  # rows of any program may be wanted
    _collect(y, box, table, _lanes(counts), programs, rows, bn)


@jt.function
def _send_back(y, received, box, came, axis, programs, rows, bn):
    """Send each device the rows y that it gets back, in the order in which it sent them, and raise `came(d)` there."""
    n, me = jt.axis_size(axis), jt.axis_index(axis)
    RECEIVED = received.tiles(None, _lanes(received))
    total = jt.zeros((_lanes(received),), jnp.int32)
    for d in jt.range(n):
        total = total + RECEIVED[d, 0]
    first = jnp.cumsum(total, dtype=jnp.int32) - total
    for k in jt.range(n):
        d = (me + 1 + k) % n
        there, base = box.on(axis, d), first
        for before in jt.range(d):
            base = base + RECEIVED[before, 0]

        def send(i, r, used, there=there):
            _copy(there, (me, i), y, (r,), used, bn)

        _each(send, RECEIVED[d, 0], base, programs, rows)
        jt.signal(came(d))


@jt.kernel(
    out_type=lambda y, *_, sent, **__: jt.like(y, shape=(sent, y.shape[1])),
    grid=lambda y, *_, programs, **__: programs,
    scratch=lambda y, counts, *_, bound, programs, **__: [
        jt.symmetric((counts.shape[0], bound, y.shape[1]), y.dtype), jt.signals((programs, counts.shape[0])),
    ],
)  # fmt: skip
def return_rows(
    y, counts, received, back, box, came,
    *, axis: str, bound: int, sent: int, programs: int, rows: int, bn: int,
):  # fmt: skip
    """y [devices * bound, hidden] in the places of the rows of `send_rows`: back [sent, hidden], in those of its x."""
    n, me, p = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0)
    COUNTS, start = counts.tiles(None, _lanes(counts)), jnp.int32(0)
    _send_back(y, received, box, lambda d: came.on(axis, d)[p, me], axis, programs, rows, bn)
    for d in jt.range(n):
        jt.wait(came[p, d])

        def put(i, used, d=d, start=start):
            _copy(back, (start + i,), box, (d, i), used, bn)

        size = COUNTS[d, 0].sum(dtype=jnp.int32)
        _blocks(size, programs, rows, put)
        start = start + size
    BACK = back.tiles(None, bn)
    for r in jt.range(start + p, back.shape[0], programs):  # of tokens that went nowhere
        for c in range(BACK.shape[1]):
            BACK[r, c] = jt.zeros((bn,), y.dtype)


@jt.kernel(
    out_type=lambda y, counts, received, place, *_, **__: jt.like(y, shape=(place.shape[0], y.shape[1])),
    grid=lambda y, *_, programs, **__: programs,
    scratch=lambda y, counts, *_, bound, **__: [
        jt.symmetric((counts.shape[0], bound, y.shape[1]), y.dtype), jt.signals(counts.shape[:1]),
    ],
)  # fmt: skip
def return_sums(
    y, counts, received, place, weights, o, box, came,
    *, axis: str, bound: int, sent: int, programs: int, rows: int, bn: int,
):  # fmt: skip
    """o [tokens, hidden]: the sums of the rows that `return_rows` gives, which stand at place int32 [tokens, k] or
    nowhere (-1), times weights float32 [tokens, k]."""
    # o_t = sum over j of weights_tj back_(place_tj)
    n, me, p = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0)
    COUNTS, O = counts.tiles(None, _lanes(counts)), o.tiles(None, bn)
    _send_back(y, received, box, lambda d: came.on(axis, d)[me], axis, programs, rows, bn)
    for d in jt.range(n):
        jt.wait(came[d], programs)  # rows of any program may be wanted
    for t in jt.range(p, place.shape[0], programs):
        at, weight = place[t, :], weights[t, :]
        device, i, end = jnp.zeros_like(at), at, jnp.int32(0)
        for d in jt.range(n):
            size = COUNTS[d, 0].sum(dtype=jnp.int32)
            end = end + size
            behind = at >= end  # rows for devices behind this one
            device, i = device + behind.astype(jnp.int32), i - jnp.where(behind, size, 0)
        used = (at >= 0)[:, None]
        for c in range(O.shape[1]):
            columns = (c * bn + jt.arange(bn))[None, :]
            back = jt.load(box, (device[:, None], jnp.maximum(i, 0)[:, None], columns), mask=used)
            O[t, c] = (back.astype(jnp.float32) * weight[:, None]).sum(0).astype(o.dtype)


def _sent_backward(residuals, cts, **options):
    return return_rows(cts[0], *residuals, **options), None


def _sent_forward(x, counts, **options):
    rows, received = send_rows(x, counts, **options)
    return (rows, received), (counts, received)


def _returned_backward(counts, ct, **options):
    return send_rows(ct, counts, **options)[0], None, None


send_rows.defvjp(_sent_forward, _sent_backward)
return_rows.defvjp(lambda y, counts, received, **o: (return_rows(y, counts, received, **o), counts), _returned_backward)
