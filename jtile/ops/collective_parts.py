"""Kernels of collectives on flat parts: [size] of a device, or [devices, size], one part for each.

Program p of P works on tiles p, p + P, ... of every part, with signals of its own: `came[p, d]` says that device d has
sent all of its tiles of program p. Devices send to the next one first, so that nobody is sent to by all at once. What a
device has for itself it does not send: a signal costs as much to one's own memory as to another's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops.dispatch import small_tiles

TILE = 4096  # elements of a tile
SMALL = 1024  # elements of a tile on targets with small tiles: 16 bytes of bfloat16 for each of 128 threads
PROGRAMS = 4  # programs on a CPU, where each is a thread
ONE_SHOT = 1 << 20  # bytes that a device sends too many where everyone sums everything: a second turn costs as much
UNROLLED = 16  # devices up to which a kernel signals them without a loop
MOST = 128  # programs elsewhere, at most: there are as many multiprocessors


def programs_at_most() -> int:
    """The most programs that a collective has: they wait for each other, so that all of them have to run at once."""
    if not small_tiles():
        return PROGRAMS
    resident = jt.target().limit("resident")
    return MOST if resident is None else min(MOST, resident)


def meta(size: int) -> dict[str, int]:
    """Tile and number of programs for parts of `size` elements: a tile for each program, if parts are small enough."""
    most, power = programs_at_most(), lambda n: 1 << max(n - 1, 0).bit_length()
    bn = power(size) if not small_tiles() else max(power(math.ceil(size / most)), min(SMALL, power(size)))
    bn = min(TILE, bn)
    return dict(bn=bn, programs=min(most, max(math.ceil(size / bn), 1)))


def summed_cotangent(ct: jax.Array, axis: str, total: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The cotangent of each device's term of a sum along an axis that all devices get, from that of the sum.

    Where JAX knows that the sum is the same everywhere, its cotangent is so, too, and is that of every term. Where it
    does not (`check_vma=False`), each device has a share of the cotangent, and `total` adds the shares.
    """
    if axis in jax.typeof(jax.lax.axis_index(axis)).manual_axis_type.varying:
        return jax.lax.pcast(ct, axis, to="varying")
    return total(ct)


def varying_together(axis: str, *arrays: Any) -> tuple[Any, ...]:
    """Arrays, or trees of them, as what varies over an axis and whatever any of them varies over: their cotangents have
    one type then."""
    of = lambda x: set(jax.typeof(x).manual_axis_type.varying)
    arrays = jax.tree.map(jnp.asarray, arrays)
    axes = of(jax.lax.axis_index(axis)).union(*map(of, jax.tree.leaves(arrays)))
    cast = lambda x: jax.lax.pcast(x, tuple(sorted(axes - of(x))), to="varying") if axes - of(x) else x
    return jax.tree.map(cast, arrays)


def accumulator(dtype) -> jnp.dtype:
    """The dtype in which numbers of `dtype` are summed."""
    wide = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if wide else jnp.dtype(dtype)


def everywhere(x, *, axis, programs, **_):
    """Memory on each device for the parts of all devices, and a signal for each program and sender."""
    n = jt.axis_size(axis)
    return [jt.symmetric((n, x.shape[-1]), x.dtype), jt.signals((programs, n))]


def others(axis: str) -> list:
    """The other devices, beginning with the next one."""
    n, me = jt.axis_size(axis), jt.axis_index(axis)
    return [(me + 1 + k) % n for k in range(n - 1)]


def signal_others(came, p, axis: str) -> None:
    """Raise `came[p, me]` of each other device: one signal behind the other, so that they share a fence."""
    n, me = jt.axis_size(axis), jt.axis_index(axis)
    for k in range(n - 1) if n <= UNROLLED else jt.range(n - 1):
        jt.signal(came.on(axis, (me + 1 + k) % n)[p, me])


@jt.function
def _send(to, came, axis, tile_of, count):
    """Store this program's tiles of a part into the part of this device on each other device, and signal each.

    Args:
      to: `to(device)`: the tile view of the memory of a device, [devices, tiles].
      tile_of: `tile_of(device, t)`: tile t of the part for a device.
      count: tiles of a part.
    """
    n, me, p = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0)
    for k in jt.range(n - 1):
        d = (me + 1 + k) % n
        there = to(d)
        for t in jt.range(p, count, jt.num_programs(0)):
            there[me, t] = tile_of(d, t)
    signal_others(came, p, axis)


@jt.function
def _take(O, B, own, came, axis):
    """O[d, t] = B[d, t] for this program's tiles of each other device d as they come; own(t) for this device."""
    n, me, p = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0)
    for t in jt.range(p, O.shape[1], jt.num_programs(0)):
        O[me, t] = own(t)
    for k in jt.range(n - 1):
        d = (me + 1 + k) % n
        jt.wait(came[p, d])
        for t in jt.range(p, O.shape[1], jt.num_programs(0)):
            O[d, t] = B[d, t]


@jt.function
def _await_others(B, own, came, axis):
    """Set B[me, t] = own(t) for this program's tiles, and wait until those of all other devices have come."""
    n, me, p = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0)
    for t in jt.range(p, B.shape[1], jt.num_programs(0)):
        B[me, t] = own(t)
    for k in jt.range(n - 1):
        jt.wait(came[p, (me + 1 + k) % n])


@jt.function
def _sum(parts, n, t, bn, dtype):
    """The sum of tile t of all parts, in the order of the devices."""
    acc = jt.zeros((bn,), accumulator(dtype))
    for d in jt.range(n):
        acc = acc + parts[d, t].astype(acc.dtype)
    return acc.astype(dtype)


@jt.kernel(
    out_type=lambda x, *, axis, **_: jt.like(x, shape=(jt.axis_size(axis), *x.shape)),
    grid=lambda x, *, programs, **_: programs,
    scratch=everywhere,
)
def gather_parts(x, o, box, came, *, axis: str, bn: int, programs: int):
    """x [size] of all devices: o [devices, size]."""
    # o_d = x of device d
    X, B, O = x.tiles(bn), box.tiles(None, bn), o.tiles(None, bn)
    _send(lambda d: box.on(axis, d).tiles(None, bn), came, axis, lambda _, t: X[t], X.shape[0])
    _take(O, B, lambda t: X[t], came, axis)


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, *, programs, **_: programs, scratch=everywhere)
def exchange_parts(x, o, box, came, *, axis: str, bn: int, programs: int):
    """x [devices, size], a part for each device: o [devices, size], the part of each for this one."""
    # o_d = x_me of device d
    X, B, O = x.tiles(None, bn), box.tiles(None, bn), o.tiles(None, bn)
    _send(lambda d: box.on(axis, d).tiles(None, bn), came, axis, lambda d, t: X[d, t], X.shape[1])
    _take(O, B, lambda t: X[jt.axis_index(axis), t], came, axis)


@jt.kernel(
    out_type=lambda x, **_: jt.like(x, shape=x.shape[1:]),
    grid=lambda x, *, programs, **_: programs,
    scratch=everywhere,
)
def sum_parts(x, o, box, came, *, axis: str, bn: int, programs: int):
    """x [devices, size], a part for each device: o [size], the sum of the parts for this one."""
    # o = sum over d of x_me of device d
    n, p = jt.axis_size(axis), jt.program_id(0)
    X, B, O = x.tiles(None, bn), box.tiles(None, bn), o.tiles(bn)
    _send(lambda d: box.on(axis, d).tiles(None, bn), came, axis, lambda d, t: X[d, t], X.shape[1])
    _await_others(B, lambda t: X[jt.axis_index(axis), t], came, axis)
    for t in jt.range(p, X.shape[1], programs):
        O[t] = _sum(B, n, t, bn, x.dtype)


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, *, programs, **_: programs, scratch=everywhere)
def sum_all(x, o, box, came, *, axis: str, bn: int, programs: int):
    """x [size]: o [size], its sum over all devices, which each of them adds up."""
    # o = sum over d of x of device d
    n, p = jt.axis_size(axis), jt.program_id(0)
    X, B, O = x.tiles(bn), box.tiles(None, bn), o.tiles(bn)
    _send(lambda d: box.on(axis, d).tiles(None, bn), came, axis, lambda _, t: X[t], X.shape[0])
    _await_others(B, lambda t: X[t], came, axis)
    for t in jt.range(p, X.shape[0], programs):
        O[t] = _sum(B, n, t, bn, x.dtype)


@jt.kernel(
    out_type=lambda x, **_: jt.like(x),
    grid=lambda x, *, programs, **_: programs,
    scratch=lambda x, **options: everywhere(x, **options) * 2,
)
def sum_all_in_two(x, o, box, came, whole, done, *, axis: str, bn: int, programs: int):
    """x [devices, size]: o [devices, size], its sum over all devices: device d adds up part d, and sends it to all."""
    # o_d = sum over e of x_d of device e
    n, p = jt.axis_size(axis), jt.program_id(0)
    X, B, W, O = (r.tiles(None, bn) for r in (x, box, whole, o))
    _send(lambda d: box.on(axis, d).tiles(None, bn), came, axis, lambda d, t: X[d, t], X.shape[1])
    _await_others(B, lambda t: X[jt.axis_index(axis), t], came, axis)
    # each tile of the share is added up once, and sent to all from the first of the places that it comes to
    me, mine = jt.axis_index(axis), whole.tiles(None, bn)
    for t in jt.range(p, X.shape[1], programs):
        mine[me, t] = _sum(B, n, t, bn, x.dtype)
    for k in jt.range(n - 1):
        d = (me + 1 + k) % n
        there = whole.on(axis, d).tiles(None, bn)
        for t in jt.range(p, X.shape[1], programs):
            there[me, t] = mine[me, t]
    signal_others(done, p, axis)
    for k in jt.range(n):
        d = (me + k) % n
        if k > 0:
            jt.wait(done[p, d])
        for t in jt.range(p, X.shape[1], programs):
            O[d, t] = W[d, t]
