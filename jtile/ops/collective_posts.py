"""Collectives of few bytes whose elements say themselves that they have come (`jt.post`, `jt.receive`): no fence waits
until what was stored has come to where it goes, and nothing is loaded behind a wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops.collective_parts import UNROLLED, accumulator, others, programs_at_most
from jtile.ops.dispatch import first_unmet


def not_posted(x, axis: str) -> str | None:
    """Why elements of x cannot be posted to the devices along an axis."""
    with jt.config() as now:
        peers = now.gpu_peers
    return first_unmet(
        (all(isinstance(s, int) for s in x.shape), "sizes are not known"),
        (bool(peers) and jax.process_count() == 1, "the devices do not reach each other's memory"),
        (x.dtype.name in ("bfloat16", "float16", "float32"), "elements are no floats of 16 or 32 bits"),
        (jt.axis_size(axis) <= UNROLLED, "there are many devices"),
    )


WIDEST = 16384  # numbers of a row that a program of eight warps has in registers
SHORTEST = 64  # bytes: of shorter rows of 16 bits a thread would have single numbers


def not_in_rows(x, axis: str) -> str | None:
    """Why rows of x [rows, n], one in each program, are not posted."""
    return not_posted(x, axis) or first_unmet(
        (x.shape[0] <= programs_at_most(), "there are many rows"),
        (x.shape[1] <= WIDEST and x.shape[1] % 8 == 0, "rows are long, or no whole lines"),
        (x.shape[1] * x.dtype.itemsize > SHORTEST, "rows are short"),
    )


@jt.function
def post_to_others(box, place, own, axis: str):
    """Post a tile as that of this device, (its number, *place) of `box`, to all others, beginning with the next."""
    for d in others(axis):
        jt.post(box.on(axis, d), (jt.axis_index(axis), *place), own)


@jt.function
def receive_terms(box, place, own, axis: str, mask=None):
    """The tiles that all devices have posted at `place`, in the order of the devices; own: that of this one; mask: the
    elements that are received, see `jt.receive`."""
    n, me = jt.axis_size(axis), jt.axis_index(axis)
    if n == 2:
        other = jt.receive(box, (1 - me, *place), mask)
        return [jnp.where(me == 0, own, other), jnp.where(me == 0, other, own)]
    # this device has posted nothing to itself: what is received in its place is not used
    came = [jt.receive(box, (jnp.where(d == me, (me + 1) % n, d), *place), mask) for d in range(n)]
    return [jnp.where(d == me, own, came[d]) for d in range(n)]


@jt.function
def posted_to_all(box, place, own, axis: str):
    """`post_to_others`, and what `receive_terms` gives."""
    post_to_others(box, place, own, axis)
    return receive_terms(box, place, own, axis)


def row_boxes(x, *_, axis: str, **__):
    """Where rows of x [rows, n] are posted, each by a program: with as many numbers as a tile has."""
    return [jt.symmetric((jt.axis_size(axis), x.shape[0], jt.next_power_of_2(x.shape[1])), x.dtype)]


def columns_of(x, box):
    """(The columns of a tile that is posted to `box`, which of them x [rows, n] has, or None for all; `load(ref,
    *index)`: a row of numbers at them)."""
    columns, n = jt.arange(box.shape[-1]), x.shape[1]
    inside = None if box.shape[-1] == n else columns < n
    load = lambda ref, *index: jt.load(ref, (*index, columns), mask=inside, other=None if inside is None else 0)
    return columns, inside, load


# -- parts of arrays, a tile in each program --------------------------------------------------------------------------

SIDE, LEAST = 8192, 1024  # numbers of a tile at most, and at least: a program of eight warps has one for each device

MOST = 1 << 20  # bytes of a part: larger ones have not been timed


def tile_of(size: int) -> int:
    """Numbers of a tile of which programs that run at once have one each."""
    return min(SIDE, max(LEAST, jt.next_power_of_2(jt.cdiv(size, programs_at_most()))))


def not_in_posts(x, *, axis: str) -> str | None:
    """Why parts [..., size] of an array are not posted."""
    return not_posted(x, axis) or first_unmet(
        (x.shape[-1] * x.dtype.itemsize <= MOST, "there are many bytes"),
        (x.shape[-1] <= SIDE * programs_at_most(), "there are many numbers"),
        (jt.axis_size(axis) * tile_of(x.shape[-1]) <= 4 * SIDE, "tiles of all devices are large"),
    )


def in_posts(kernel: jt.Kernel) -> Callable[..., jax.Array]:
    """`run(x, axis=...)`: a kernel of this module with tiles that suit x."""
    return lambda x, *, axis: kernel(x, axis=axis, bn=tile_of(x.shape[-1]))


def _boxes(x, *, axis: str, bn: int):
    return [jt.symmetric((jt.axis_size(axis), jt.cdiv(x.shape[-1], bn), bn), x.dtype)]


def _grid(x, *, bn: int, **_):
    return jt.cdiv(x.shape[-1], bn)


@jt.kernel(
    out_type=lambda x, *, axis, **_: jt.like(x, shape=(jt.axis_size(axis), *x.shape)), grid=_grid, scratch=_boxes
)
def gather_posts(x, o, box, *, axis: str, bn: int):
    """x [size] of all devices: o [devices, size]."""
    # o_d = x of device d
    me, p, O = jt.axis_index(axis), jt.program_id(0), o.tiles(None, bn)
    with jt.role("tile", warps=8, early=True):
        jt.wait_for_kernels()
        own = x.tiles(bn)[p]
        post_to_others(box, (p, slice(None)), own, axis)
        O[me, p] = own
        for d in others(axis):
            O[d, p] = jt.receive(box, (d, p, slice(None)))


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=_grid, scratch=_boxes)
def exchange_posts(x, o, box, *, axis: str, bn: int):
    """x [devices, size], a part for each device: o [devices, size], the part of each for this one."""
    # o_d = x_me of device d
    me, p, peers = jt.axis_index(axis), jt.program_id(0), others(axis)
    X, O = x.tiles(None, bn), o.tiles(None, bn)
    with jt.role("tile", warps=8, early=True):
        jt.wait_for_kernels()
        parts, own = [X[d, p] for d in peers], X[me, p]
        for d, part in zip(peers, parts):
            jt.post(box.on(axis, d), (me, p, slice(None)), part)
        O[me, p] = own
        for d in peers:
            O[d, p] = jt.receive(box, (d, p, slice(None)))


@jt.kernel(out_type=lambda x, **_: jt.like(x, shape=x.shape[1:]), grid=_grid, scratch=_boxes)
def sum_posts(x, o, box, *, axis: str, bn: int):
    """x [devices, size], a part for each device: o [size], the sum of the parts for this one."""
    # o = sum over d of x_me of device d
    me, p, peers = jt.axis_index(axis), jt.program_id(0), others(axis)
    X, wide = x.tiles(None, bn), accumulator(x.dtype)
    with jt.role("tile", warps=8, early=True):
        jt.wait_for_kernels()
        parts, own = [X[d, p] for d in peers], X[me, p]
        for d, part in zip(peers, parts):
            jt.post(box.on(axis, d), (me, p, slice(None)), part)
        terms = receive_terms(box, (p, slice(None)), own, axis)
        o.tiles(bn)[p] = functools.reduce(jnp.add, [term.astype(wide) for term in terms]).astype(o.dtype)


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=_grid, scratch=_boxes)
def sum_all_posts(x, o, box, *, axis: str, bn: int):
    """x [size]: o [size], its sum over all devices, which each of them adds up."""
    # o = sum over d of x of device d
    p, wide = jt.program_id(0), accumulator(x.dtype)
    with jt.role("tile", warps=8, early=True):
        jt.wait_for_kernels()
        terms = posted_to_all(box, (p, slice(None)), x.tiles(bn)[p], axis)
        o.tiles(bn)[p] = functools.reduce(jnp.add, [term.astype(wide) for term in terms]).astype(o.dtype)
