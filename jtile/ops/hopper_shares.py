"""Attention of few queries over the keys of many rows, in equal shares (stream-K): a program takes some units of keys,
whichever rows they belong to, and what a row's keys give in several programs is put together at the end.

Nothing is planned ahead: every program finds its share from the lengths. Keys are counted in units, in the order of
the rows, and within a row once for each of its `heads`; a row of no length has a unit too, which writes its zeros.

Loops over a share have the same names in all of these kernels. r is the row-and-head that the program is at, of row b;
its n units begin at `start`, and those from `lo` to `hi` are the program's; u is one of them. c counts the units that
the program has had, which are slots of rings, and `turn` the rows.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import tuned
from jtile.ops.online_softmax import NOTHING

_ROWS = 128  # rows whose lengths are looked at together
_PROGRAMS = 1056  # programs that put parts together, at most
_TILE = 4096  # numbers of a part that one of these programs holds at a time
_LAST = 160 << 10  # bytes of a row's parts that one program reads as fast as many do after another launch


@dataclasses.dataclass(frozen=True)
class Units:
    """How keys are counted: a row has `slots` of them at most, a unit `size`, and each row counts `heads` times. A copy
    brings `piece` keys of a unit, by default all; pieces behind the length of a row do not come from memory. evict: how
    soon caches forget them, see `jt.async_copy`."""

    slots: int
    size: int
    heads: int = 1
    piece: int | None = None
    evict: str | None = None

    def of(self, length):
        """The units of a row and head, for a row of this length."""
        return jnp.maximum(jt.cdiv(jnp.clip(length, 0, self.slots), self.size), 1)

    def of_rows(self, lengths, k):
        """Block k of the rows: their numbers, and the units of all of their heads, both int32 [rows]."""
        n = min(max(jt.next_power_of_2(lengths.shape[0]), 32), _ROWS)
        row, rows = k * n + jt.arange(n), lengths.shape[0]
        return row, jnp.where(row < rows, self.of(lengths[jnp.minimum(row, rows - 1)]) * self.heads, 0)


def _sum(x):
    """The sum of int32 numbers, in int32: `jnp.sum` gives 64 bits where they are enabled."""
    return jnp.sum(x, dtype=jnp.int32)


def _sums(lengths, one, count: int):
    """The sums of `one(k, sums)`, `count` numbers, over the blocks k of the rows; `sums`: those of the
    blocks before."""
    blocks = jt.cdiv(lengths.shape[0], _ROWS)
    sums = (jnp.int32(0),) * count
    return one(0, sums) if blocks == 1 else _fold(blocks, one, sums)


@jt.function
def _fold(blocks: int, one, sums):
    for k in jt.range(blocks):
        sums = tuple(a + b for a, b in zip(sums, one(k, sums), strict=True))
    return sums


def share_of(lengths, part, parts: int, units: Units):
    """Where a part begins and ends, the row times heads that it begins in, where that begins, and how large parts are;
    all in units."""
    (total,) = _sums(lengths, lambda k, _: (_sum(units.of_rows(lengths, k)[1]),), 1)
    size = jt.cdiv(total, parts)
    begin = jnp.minimum(part * size, total)

    def before(k, sums):  # units, rows and their units that lie in front of the part
        _, n = units.of_rows(lengths, k)
        inside = sums[0] + jnp.cumsum(n, dtype=jnp.int32) <= begin
        return _sum(n), _sum(inside & (n > 0)), _sum(jnp.where(inside, n, 0))

    _, row, start = _sums(lengths, before, 3)
    first = row * units.heads
    if units.heads > 1:
        n = units.of(lengths[jnp.minimum(row, lengths.shape[0] - 1)])
        head = jax.lax.div(begin - start, n)
        first, start = first + head, start + head * n
    return begin, jnp.minimum(begin + size, total), first, start, size


def parts_of(start, n, size):
    """The first and the last part that have units of a row which begins at `start` and has n."""
    return jax.lax.div(start, size), jax.lax.div(start + n - 1, size)


def parts_of_row(lengths, row_and_head, parts: int, units: Units):
    """The first and the last of the parts that have units of a row-and-head."""
    row = row_of(row_and_head, units)

    def count(k, _):
        rows, size = units.of_rows(lengths, k)
        return _sum(size), _sum(jnp.where(rows < row, size, 0))

    total, begin = _sums(lengths, count, 2)
    of_row = units.of(lengths[row])
    return parts_of(begin + (row_and_head - row * units.heads) * of_row, of_row, jt.cdiv(total, parts))


def row_of(row_and_head, units: Units):
    """The row that a row-and-head belongs to."""
    return row_and_head if units.heads == 1 else jax.lax.div(row_and_head, jnp.int32(units.heads))


def part_types(rows: int, d: int, parts: int, whole: int = 0) -> list[jax.ShapeDtypeStruct]:
    """The types of outputs and logarithms of sums of rows that several parts share. Each part has two: of the row that
    ends or goes on in it, and of the row that begins in it and goes on behind it. Behind these there is room for the
    logarithms of `whole` rows, see `place_of_row`."""
    return [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2 * parts, rows, d), (2 * parts + whole, rows))]


def place_of_part(part, begins):
    """Where a part writes a row that it shares; `begins`: the row begins in it."""
    return 2 * part + begins.astype(jnp.int32)


def place_of_row(row_and_head, parts: int):
    """Where the logarithms of a row that one part has are written."""
    return 2 * parts + row_and_head


@jt.function
def put_together(o_part, lse_part, first, last, query, n: int, side: int):
    """What the parts from `first` to `last` gave one row, put together for the `n` queries from `query` on: [n, d];
    `side` parts are taken at a time."""
    # o = sum_p 2^(lse_p - M) o_p / sum_p 2^(lse_p - M)     M = max_p lse_p     c: `side` parts p; x: their lse
    d = o_part.shape[2]
    m, l, acc = jt.full((n,), 2 * NOTHING, jnp.float32), jt.zeros((n,), jnp.float32), jt.zeros((n, d), jnp.float32)
    for c in jt.range(jt.cdiv(last + 1 - first, side)):
        x, o_p = [], []
        for p in (first + c * side + k for k in range(side)):  # one tile each: threads keep what they load
            at, there = place_of_part(p, p == first), p <= last
            x.append(jt.load(lse_part, (at, jt.ds(query, n)), mask=there, other=2 * NOTHING))
            o_p.append(jt.load(o_part, (at, jt.ds(query, n), jt.ds(0, d)), mask=there))
        top = functools.reduce(jnp.maximum, x, m)
        fade = jnp.exp2(m - top)
        acc, l, m = acc * fade[:, None], l * fade, top
        for x_p, part in zip(x, o_p, strict=True):
            w = jnp.exp2(x_p - top)  # the weight is 0 behind the last part
            acc, l = acc + w[:, None] * part, l + w
    return acc * (1.0 / l)[:, None]


def side_of(queries: int, d: int) -> int:
    """The parts of a row that `put_together` takes at a time for so many queries: as many as registers hold."""
    return min(max(2 * _TILE // (jt.next_power_of_2(queries) * d), 1), 16)


def by_the_last(rows: int, queries: int, d: int, parts: int) -> bool:
    """Whether the last program that has units of a row puts its parts together, instead of a kernel behind: one
    multiprocessor reads them, which is soon done where they are few bytes."""
    return queries * d * 4 * (jt.cdiv(parts, rows) + 1) <= _LAST


@jt.kernel(
    out_type=lambda whole, *_, **__: jt.like(whole),
    grid=lambda whole, *_, n, **__: (whole.shape[0], jt.cdiv(whole.shape[1], n)),
    alias={"whole": "o"},
)
def combine_shares(whole, o_part, lse_part, lengths, o, *, units: Units, n: int):
    """The output [rows times heads, queries, d] of rows that several parts share, over those that one part gave: `n`
    queries in a program."""
    b, d = jt.program_id(0), whole.shape[2]
    first, last = parts_of_row(lengths, b, o_part.shape[0] // 2, units)
    if last > first:
        found = put_together(o_part, lse_part, first, last, jt.program_id(1) * n, n, side_of(n, d))
        o.tiles(None, n, d)[b, jt.program_id(1), 0] = found.astype(o.dtype)


def combined(whole, o_part, lse_part, lengths, units: Units):
    """The output: the rows that one part gave, and those of several parts put together."""
    rows, queries, d = whole.shape
    if units.slots <= units.size or o_part.shape[0] == 2:  # a row is one unit, or there is one part: no row is shared
        return whole
    most = max(min(rows * queries // _PROGRAMS, _TILE // d, queries), 1)  # a loop over queries would wait for each
    n = 1 << (most.bit_length() - 1)
    return tuned(combine_shares, num_warps=4)(whole, o_part, lse_part, lengths, units=units, n=n)


def as_rows(size: int, batched, operands):
    """Operands (q, caches ..., lengths, table or None) of a batch of calls as those of one, whose rows are those of
    all; batched: which of them have the axis of the batch."""
    q, *caches, lengths, table = operands
    wide = lambda x, there: x if there else jnp.broadcast_to(x, (size, *x.shape))
    fold = lambda x, there: wide(x, there).reshape(size * x.shape[bool(there)], *x.shape[1 + bool(there) :])
    cached = any(batched[1:-2])
    if table is not None and cached:  # pools of pages, one behind the other
        pages = caches[0].shape[1] if batched[1] else caches[0].shape[0]
        table = wide(table, batched[-1]) + pages * jnp.arange(size, dtype=jnp.int32)[:, None, None]
    if table is None or cached:
        caches = [fold(x, there) for x, there in zip(caches, batched[1:-2], strict=True)]
    if table is not None:
        table = fold(table, batched[-1] or cached)
    return fold(q, batched[0]), *caches, fold(lengths, batched[-2]), table


def of_calls(size: int, found):
    """What the call of `as_rows` gave, as that of each of the batch; and that all of it has the batch's axis."""
    return jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), found), jax.tree.map(lambda _: True, found)


@jt.kernel(
    out_type=lambda lse_part, _, *, parts, **__: jt.like(
        lse_part, shape=(lse_part.shape[0] - 2 * parts, lse_part.shape[1])
    ),
    grid=lambda lse_part, _, *, parts, **__: lse_part.shape[0] - 2 * parts,
)
def logs_of_rows(lse_part, lengths, o, *, parts: int, units: Units):
    """The logarithms of the sums of all keys of each row times head, [rows times heads, queries], where `lse_part` has
    those of whole rows, too."""
    # o = M + log2(sum_p 2^(lse_p - M))     M = max_p lse_p
    b, n = jt.program_id(0), jt.next_power_of_2(o.shape[1])
    first, last = parts_of_row(lengths, b, parts, units)
    shared, L, O = last > first, lse_part.tiles(None, n), o.tiles(None, n)
    m, l = (
        L[jnp.where(shared, place_of_part(first, shared), place_of_row(b, parts)), 0],
        jt.full((n,), 1.0, jnp.float32),
    )
    for p in jt.range(first + 1, last + 1):
        x = L[place_of_part(p, jnp.bool_(False)), 0]
        top = jnp.maximum(m, x)
        m, l = top, l * jnp.exp2(m - top) + jnp.exp2(x - top)
    O[b, 0] = m + jnp.log2(l)
