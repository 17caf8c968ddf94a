"""Sums of large arrays over devices, [size] of a device or [devices, size], as those of `collective_parts`, but in
steps: while one tile of a program travels, the program adds up what came a tile before, so that links and memory work
at the same time. The signals of a program count tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax

import jtile as jt
from jtile.ops._shapes import tuned
from jtile.ops.collective_parts import accumulator, everywhere, programs_at_most, signal_others
from jtile.ops.dispatch import first_unmet

# Bytes of an array that is worth steps on two devices, and on more, where less was not measured, or from where on tiles
# are large.
LEAST, WIDE = 8 << 20, 24 << 20
TILE = 64 << 10  # bytes, of large tiles on two devices: a program sends as many tiles in a step as there are others
WARPS = 16
MOST = 512 << 20  # bytes of an array on more than two devices: engines need no memory of a call site


def steps_meta(x: jax.Array, devices: int) -> dict[str, int]:
    """Tile and number of programs for parts [..., size] of an array."""
    large = math.prod(x.shape) * x.dtype.itemsize >= WIDE and devices == 2
    bn = (TILE if large else TILE // 2) // x.dtype.itemsize
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
    size, two = math.prod(x.shape) * x.dtype.itemsize, jt.axis_size(axis) == 2
    return first_unmet(
        (size >= (LEAST if two else WIDE), "there are few bytes"),
        (two or size <= MOST, "it takes much memory"),
    )


@jt.function
def _push(to, came, axis, t, tile_of):
    """Store tile t of a part into the part of this device on each other device, and signal each.

    Args:
      to: `to(device)`: the tile view of the memory of a device, [devices, tiles].
      tile_of: `tile_of(device, t)`: the tile for a device.
    """
    n, me, p = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0)
    for k in jt.range(n - 1):
        d = (me + 1 + k) % n
        to(d)[me, t] = tile_of(d, t)
    signal_others(came, p, axis)


@jt.function
def _push_all(to, came, axis, t, tile):
    """As `_push`, the same tile to all."""
    n, me, p = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0)
    for k in jt.range(n - 1):
        to((me + 1 + k) % n)[me, t] = tile
    signal_others(came, p, axis)


@jt.function
def _arrived(came, axis, count):
    """Wait until `count` tiles of this program have come from every other device."""
    n, me, p = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0)
    for k in jt.range(n - 1):
        jt.wait(came[p, (me + 1 + k) % n], count)


@jt.function
def _put(O, B, came, axis, t, count):
    """O[d, t] = B[d, t] of every other device d, when the `count`-th tile has come from it."""
    n, me, p = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0)
    for k in jt.range(n - 1):
        d = (me + 1 + k) % n
        jt.wait(came[p, d], count)
        O[d, t] = B[d, t]


@jt.function
def _total(own, B, axis, t, dtype):
    """The sum of `own` and tile t of all other devices, in the order of the devices."""
    n, me = jt.axis_size(axis), jt.axis_index(axis)
    wide = accumulator(dtype)
    if n == 2:  # two numbers have the same sum in either order
        return (own.astype(wide) + B[1 - me, t].astype(wide)).astype(dtype)
    B[me, t] = own
    acc = B[0, t].astype(wide)
    for d in jt.range(1, n):
        acc = acc + B[d, t].astype(wide)
    return acc.astype(dtype)


def _box(x, *, axis, programs, **_):
    """Memory on each device for the parts of all devices, and a signal for each program and sender."""
    return everywhere(x, axis=axis, programs=programs)


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, *, programs, **_: programs, scratch=_box)
def sum_all_in_steps(x, o, box, came, *, axis: str, bn: int, programs: int):
    """x [size]: o [size], its sum over all devices, which each of them adds up."""
    # o = sum over d of x of device d
    p = jt.program_id(0)
    X, B, O = x.tiles(bn), box.tiles(None, bn), o.tiles(bn)
    tiles = (X.shape[0] - 1 - p) // programs + 1
    for s in jt.range(tiles + 1):
        if s < tiles:
            t = p + s * programs
            tile = X[t]
            _push_all(lambda d: box.on(axis, d).tiles(None, bn), came, axis, t, tile)
        if s > 0:
            t = p + (s - 1) * programs
            _arrived(came, axis, s)
            O[t] = _total(X[t], B, axis, t, x.dtype)


@jt.kernel(
    out_type=lambda x, **_: jt.like(x),
    grid=lambda x, *, programs, **_: programs,
    scratch=lambda x, **options: _box(x, **options) * 2,
)
def sum_all_in_two_steps(x, o, box, came, whole, done, *, axis: str, bn: int, programs: int):
    """x [devices, size]: o [devices, size], its sum over all devices: device d adds up part d, and sends it to all."""
    # o_d = sum over e of x_d of device e
    p, me = jt.program_id(0), jt.axis_index(axis)
    X, B, W, O = (r.tiles(None, bn) for r in (x, box, whole, o))
    tiles = (X.shape[1] - 1 - p) // programs + 1
    for s in jt.range(tiles + 2):
        if s < tiles:
            t = p + s * programs
            _push(lambda d: box.on(axis, d).tiles(None, bn), came, axis, t, lambda d, t: X[d, t])
        if (s > 0) & (s <= tiles):
            t = p + (s - 1) * programs
            _arrived(came, axis, s)
            tile = _total(X[me, t], B, axis, t, x.dtype)
            _push_all(lambda d: whole.on(axis, d).tiles(None, bn), done, axis, t, tile)
            O[me, t] = tile
        if s > 1:
            _put(O, W, done, axis, p + (s - 2) * programs, s - 1)
