"""Sums and exchanges of large arrays over devices, [size] of a device or [devices, size], by roles that post tiles one
behind the other. Nothing waits for a fence or a signal, and nobody waits but who needs what comes: meanwhile others
send, or add up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops.collective_parts import accumulator, others, programs_at_most
from jtile.ops.collective_posts import MOST as POSTED
from jtile.ops.collective_posts import not_posted
from jtile.ops.dispatch import first_unmet

TILES = 32 << 10  # bytes of the tiles of all devices that a role has in registers
SMALLEST = 2 << 10  # bytes of a tile: 16 for each thread of four warps
MOST = 64 << 20  # bytes of an array: larger ones have not been timed, and a call site has up to eight times as many
BOX = 7 * MOST  # bytes that all other devices post to one memory: `jt.receive` has to reach four sets of it by 32 bits
# Bytes that a device sends too many where everyone sums everything, and tiles are posted: on four H200s sums of 128 KiB
# take 5.4 us so and 5.9 in two turns, of 256 KiB 6.8 and 6.2, of 512 KiB 9.9 and 7.0.
POSTED_ONCE = 384 << 10
LANES = 2  # roles of a program that do the same: while one waits, the other sends
CLEARS = 4  # warps of the role that clears memory for calls to come, beside the others


# -- which tiles ------------------------------------------------------------------------------------------------------


def meta(x: jax.Array, devices: int) -> dict[str, int]:
    """Tile and number of programs for parts [..., size] of an array."""
    size, each = x.shape[-1], TILES // jt.next_power_of_2(devices) // x.dtype.itemsize
    bn = min(each, max(SMALLEST // x.dtype.itemsize, jt.next_power_of_2(jt.cdiv(size, programs_at_most()))))
    return dict(bn=bn, programs=min(programs_at_most(), jt.cdiv(size, bn)))


def not_exchanged_in_flows(x, *, axis: str) -> str | None:
    """Why parts [devices, size] for each device do not travel in this way. On two H200s 58.7 MB take 103 us so, and as
    long in steps; on four 147, by engines 157, and 470 MB 1,095, by engines 1,008."""
    return not_in_flows(x, axis=axis) or first_unmet(
        (jt.axis_size(axis) > 2, "there are two devices"),
        (x.shape[-1] * x.dtype.itemsize > POSTED, "there are few bytes"),
    )


def in_flows(kernel: jt.Kernel) -> Callable[..., jax.Array]:
    """`run(x, axis=...)`: a kernel of this module with tiles that suit x."""
    return lambda x, *, axis: kernel(x, axis=axis, **meta(x, jt.axis_size(axis)))


def not_in_flows(x, *, axis: str) -> str | None:
    """Why an array [size] of a device, or parts [devices, size] of one, are not summed in this way."""
    return not_posted(x, axis) or first_unmet(
        (math.prod(x.shape) * x.dtype.itemsize <= MOST, "it takes much memory"),
        ((jt.axis_size(axis) - 1) * x.shape[-1] * x.dtype.itemsize <= BOX, "what all devices post is too large"),
    )


# -- kernels ----------------------------------------------------------------------------------------------------------


def _box(x, *, axis: str, bn: int, **_):
    """Where the other devices post their tiles: of device d as number d, or d - 1 if it stands behind this one."""
    return [jt.symmetric((jt.axis_size(axis) - 1, jt.cdiv(x.shape[-1], bn), bn), x.dtype)]


def _grid(x, *, programs: int, **_):
    return programs


@jt.function
def _post(box, t, tiles, axis):
    """Post tiles, one for each other device beginning with the next, as tile t of this device there."""
    me = jt.axis_index(axis)
    for d, tile in zip(others(axis), tiles):
        jt.post(box.on(axis, d), (me - (d < me).astype(jnp.int32), t, slice(None)), tile)


@jt.function
def _take(box, t, O, axis):
    """What the other devices have posted as tile t, to tile t of their parts of O."""
    me = jt.axis_index(axis)
    for k, tile in enumerate(_came(box, t, axis)):
        O[k + (me <= k).astype(jnp.int32), t] = tile


@jt.function
def _came(box, t, axis):
    """What the other devices have posted as tile t, in their order."""
    return [jt.receive(box, (k, t, slice(None))) for k in range(jt.axis_size(axis) - 1)]


@jt.function
def _sum(box, t, own, axis):
    """The sum of `own` and what all other devices have posted as tile t, in the order of the devices."""
    n, me, came = jt.axis_size(axis), jt.axis_index(axis), _came(box, t, axis)
    terms = [own, *came]  # of two devices: their sum is the same in either order
    if n > 2:
        before = lambda d: came[d] if d == 0 else jnp.where(d < me, came[d], came[d - 1])
        terms = [jnp.where(me == d, own, before(d)) for d in range(n - 1)] + [jnp.where(me == n - 1, own, came[-1])]
    return functools.reduce(jnp.add, [term.astype(accumulator(own.dtype)) for term in terms]).astype(own.dtype)


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=_grid, scratch=_box)
def sum_all_flow(x, o, box, *, axis: str, bn: int, programs: int):
    """x [size]: o [size], its sum over all devices, which each of them adds up."""
    # o = sum over d of x of device d
    p, X, O = jt.program_id(0), x.tiles(bn), o.tiles(bn)
    with jt.role("send", warps=8, early=True):
        jt.wait_for_kernels()
        for t in jt.range(p, X.shape[0], programs):
            _post(box, t, [X[t]] * len(others(axis)), axis)
    with jt.role("add", warps=8, early=True):
        jt.wait_for_kernels()
        for t in jt.range(p, X.shape[0], programs):
            O[t] = _sum(box, t, X[t], axis)
    with jt.role("clear", warps=CLEARS, early=True):
        jt.wait_for_kernels()


@jt.function
def _flow(X, O, box, whole, axis, first, step):
    """Tiles first, first + step, ...: send the terms of one, add up those of the one before, and take the sums of the
    one before that, of which all have been sent."""
    me, peers = jt.axis_index(axis), others(axis)
    tiles = (X.shape[1] - 1 - first) // step + 1
    for s in jt.range(tiles + 2):
        t, before, last = (first + (s - k) * step for k in range(3))
        if s < tiles:
            _post(box, t, [X[d, t] for d in peers], axis)
        if (s > 0) & (s <= tiles):
            total = _sum(box, before, X[me, before], axis)
            _post(whole, before, [total] * len(peers), axis)
            O[me, before] = total
        if s > 1:
            _take(whole, last, O, axis)


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=_grid, scratch=lambda x, **options: _box(x, **options) * 2)
def sum_all_in_two_flow(x, o, box, whole, *, axis: str, bn: int, programs: int):
    """x [devices, size]: o [devices, size], its sum over all devices: device d adds up part d, and sends it to all."""
    # o_d = sum over e of x_d of device e
    p, X, O = jt.program_id(0), x.tiles(None, bn), o.tiles(None, bn)
    lanes = 1 if X.shape[1] <= programs else LANES
    for k in range(lanes):
        with jt.role(f"flow{k}", warps=8, early=True):
            jt.wait_for_kernels()
            _flow(X, O, box, whole, axis, p + k * programs, lanes * programs)
    with jt.role("clear", warps=CLEARS, early=True):
        jt.wait_for_kernels()


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=_grid, scratch=_box)
def exchange_flow(x, o, box, *, axis: str, bn: int, programs: int):
    """x [devices, size], a part for each device: o [devices, size], the part of each for this one.

    Half of the programs send and half take: what a multiprocessor loads waits behind what it stores to other devices.
    On four H200s 58.7 MB take 147 us so, and 167 where each program does both.
    """
    # o_d = x_me of device d
    p, me, peers, half = jt.program_id(0), jt.axis_index(axis), others(axis), programs // 2
    X, O = x.tiles(None, bn), o.tiles(None, bn)
    for k in range(LANES):
        with jt.role(f"flow{k}", warps=8, early=True):
            jt.wait_for_kernels()
            if p < half:
                for t in jt.range(p * LANES + k, X.shape[1], half * LANES):
                    _post(box, t, [X[d, t] for d in peers], axis)
            else:
                for t in jt.range((p - half) * LANES + k, X.shape[1], (programs - half) * LANES):
                    O[me, t] = X[me, t]
                    _take(box, t, O, axis)
    with jt.role("clear", warps=CLEARS, early=True):
        jt.wait_for_kernels()
