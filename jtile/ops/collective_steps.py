"""Sums of large arrays over devices, [size] of a device or [devices, size], as those of `collective_parts`, but in
steps: while one tile of a program travels, the program adds up what came a tile before, so that links and memory work
at the same time. The signals of a program count steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import tuned
from jtile.ops.collective_parts import accumulator, everywhere, others, programs_at_most, signal_others
from jtile.ops.dispatch import first_unmet

LEAST, WIDE = 8 << 20, 24 << 20  # bytes of an array that is worth steps, or from where on tiles are large
TILE = 64 << 10  # bytes, of large tiles on two devices: a program sends as many tiles in a step as there are others
DEVICES = 16  # at most: a program holds a tile of each
WARPS = 16
MOST = 512 << 20  # bytes of an array on more than two devices: engines need no memory of a call site


def steps_meta(x: jax.Array, devices: int) -> dict[str, int]:
    """Tile and number of programs for parts [..., size] of an array."""
    large = math.prod(x.shape) * x.dtype.itemsize >= WIDE
    bn = 2 * (TILE if large else TILE // 2) // jt.next_power_of_2(devices) // x.dtype.itemsize
    return dict(bn=bn, programs=max(1, min(programs_at_most(), jt.cdiv(x.shape[-1], bn))))


def in_steps(kernel: jt.Kernel) -> Callable[..., jax.Array]:
    """`run(x, axis=...)`: a kernel of this module with tiles that suit x."""

    def run(x, *, axis: str):
        return tuned(kernel, num_warps=WARPS)(x, axis=axis, **steps_meta(x, jt.axis_size(axis)))

    return run


def few_bytes(x, *, axis: str) -> str | None:
    """Why an array is not for steps."""
    if not all(isinstance(s, int) for s in x.shape):
        return "sizes are not known"
    size, n = math.prod(x.shape) * x.dtype.itemsize, jt.axis_size(axis)
    return first_unmet(
        (n <= DEVICES, "there are many devices"),
        (size >= LEAST, "there are few bytes"),
        (n == 2 or size <= MOST, "it takes much memory"),
    )


# Parts for each device: bytes of an array that kernels in steps move sooner than engines for copies, on two devices. On
# two H200s 58.7 MB take 97.4 us in tiles of 32 KiB with 128 programs, and 100.6 by engines, 470 MB 850 and 670; on four
# engines are sooner.
EXCHANGED, EXCHANGED_TILE = (40 << 20, 80 << 20), 32 << 10


def exchanged_in_steps(x, *, axis: str):
    """The parts [devices, size] that all devices have for this one."""
    bn = EXCHANGED_TILE // x.dtype.itemsize
    programs = max(1, min(programs_at_most(), jt.cdiv(x.shape[-1], bn)))
    return tuned(exchange_in_steps, num_warps=WARPS)(x, axis=axis, bn=bn, programs=programs)


def not_exchanged_in_steps(x, *, axis: str) -> str | None:
    """Why parts for each device do not travel in steps."""
    if not all(isinstance(s, int) for s in x.shape):
        return "sizes are not known"
    size, n = math.prod(x.shape) * x.dtype.itemsize, jt.axis_size(axis)
    least, most = EXCHANGED
    return first_unmet(
        (n == 2, "there are more than two devices"), (least <= size <= most, "there are few bytes, or many")
    )


@jt.function
def _send(to, axis, t, tiles):
    """Store tiles, one for each other device beginning with the next, as tile t of the part of this device there.

    Args:
      to: `to(device)`: the tile view of the memory of a device, [devices, tiles].
    """
    for k, d in enumerate(others(axis)):
        to(d)[jt.axis_index(axis), t] = tiles[k]


@jt.function
def _arrived(came, axis, count):
    """Wait until all other devices have signalled `count` steps to this program."""
    for d in others(axis):
        jt.wait(came[jt.program_id(0), d], count)


@jt.function
def _total(own, B, t, axis, dtype):
    """The sum of `own` and tile t of all other devices, in the order of the devices."""
    n, me = jt.axis_size(axis), jt.axis_index(axis)
    wide = accumulator(dtype)
    if n == 2:  # two numbers have the same sum in either order
        return (own.astype(wide) + B[1 - me, t].astype(wide)).astype(dtype)
    # of this device nothing has come: what is loaded in its place is not used
    parts = [jnp.where(d == me, own, B[jnp.where(d == me, (me + 1) % n, d), t]) for d in range(n)]
    return functools.reduce(lambda acc, x: acc + x.astype(wide), parts[1:], parts[0].astype(wide)).astype(dtype)


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, *, programs, **_: programs, scratch=everywhere)
def sum_all_in_steps(x, o, box, came, *, axis: str, bn: int, programs: int):
    """x [size]: o [size], its sum over all devices, which each of them adds up."""
    # o = sum over d of x of device d
    n, p = jt.axis_size(axis), jt.program_id(0)
    X, B, O = x.tiles(bn), box.tiles(None, bn), o.tiles(bn)
    tiles = (X.shape[0] - 1 - p) // programs + 1
    for s in jt.range(tiles + 1):
        if s < tiles:
            t = p + s * programs
            _send(lambda d: box.on(axis, d).tiles(None, bn), axis, t, [X[t]] * (n - 1))
            signal_others(came, p, axis)
        if s > 0:
            t = p + (s - 1) * programs
            _arrived(came, axis, s)
            O[t] = _total(X[t], B, t, axis, x.dtype)


@jt.kernel(
    out_type=lambda x, **_: jt.like(x),
    grid=lambda x, *, programs, **_: programs,
    scratch=lambda x, **options: [everywhere(x, **options)[0], *everywhere(x, **options)],
)
def sum_all_in_two_steps(x, o, box, whole, came, *, axis: str, bn: int, programs: int):
    """x [devices, size]: o [devices, size], its sum over all devices: device d adds up part d, and sends it to all.

    One signal a step says that all has come which was sent in the step before. It is sent when the loads of the next
    step are under way, so that nobody waits for what still travels: on four H200s 64 MiB take 327 us so, and 361 with a
    signal behind each tile.
    """
    # o_d = sum over e of x_d of device e
    n, p, me = jt.axis_size(axis), jt.program_id(0), jt.axis_index(axis)
    X, B, W, O = (r.tiles(None, bn) for r in (x, box, whole, o))
    tiles = (X.shape[1] - 1 - p) // programs + 1
    for s in jt.range(tiles + 2):
        t, before, first = (p + (s - k) * programs for k in range(3))
        if s < tiles:
            terms = [X[d, t] for d in others(axis)]
            if s > 0:
                signal_others(came, p, axis)
            _send(lambda d: box.on(axis, d).tiles(None, bn), axis, t, terms)
        else:
            signal_others(came, p, axis)
        if s > 0:
            _arrived(came, axis, s)
        if (s > 0) & (s <= tiles):
            tile = _total(X[me, before], B, before, axis, x.dtype)
            _send(lambda d: whole.on(axis, d).tiles(None, bn), axis, before, [tile] * (n - 1))
            O[me, before] = tile
        if s > 1:
            sums = [W[d, first] for d in others(axis)]
            for k, d in enumerate(others(axis)):
                O[d, first] = sums[k]


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, *, programs, **_: programs, scratch=everywhere)
def exchange_in_steps(x, o, box, came, *, axis: str, bn: int, programs: int):
    """x [devices, size], a part for each device: o [devices, size], the part of each for this one. One signal a step,
    as in `sum_all_in_two_steps`."""
    # o_d = x_me of device d
    p, me = jt.program_id(0), jt.axis_index(axis)
    X, B, O = (r.tiles(None, bn) for r in (x, box, o))
    tiles = (X.shape[1] - 1 - p) // programs + 1
    for s in jt.range(tiles + 1):
        t, before = p + s * programs, p + (s - 1) * programs
        if s < tiles:
            own, parts = X[me, t], [X[d, t] for d in others(axis)]
            if s > 0:
                signal_others(came, p, axis)
            _send(lambda d: box.on(axis, d).tiles(None, bn), axis, t, parts)
            O[me, t] = own
        else:
            signal_others(came, p, axis)
        if s > 0:
            _arrived(came, axis, s)
            got = [B[d, before] for d in others(axis)]
            for k, d in enumerate(others(axis)):
                O[d, before] = got[k]
