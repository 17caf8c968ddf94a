"""Decode attention for Hopper, at the block level: the cache streams through shared memory, in equal shares of all
rows' keys, or in shares of whole rows, whose sums then have an order that no other row changes. The queries that share
a kv head are rows of one tile."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.attention_windows import LOG2_E, scores
from jtile.ops.dispatch import first_unmet
from jtile.ops.hopper_shares import (
    Units,
    as_rows,
    by_the_last,
    combined,
    of_calls,
    part_types,
    parts_of,
    place_of_part,
    put_together,
    row_of,
    share_of,
    side_of,
)
from jtile.ops.online_softmax import NOTHING

ROWS = 64  # queries of a tile: those of the new tokens and of the heads of a group
_RING = 96 << 10  # bytes of keys that are on their way or looked at, and of values
# Bytes of queries, and tiles of them: keys of the next row do not come before its queries have a place, so that with
# one tile the memory waits for the products of the row in front.
_QUERIES, _AHEAD = 32 << 10, 2
# Keys of a copy where rows are short: eight layers of Llama-3.1-8B with 64 rows of 512 to 544 keys take 1680 us a step
# so, 1695 in pieces of 64, and 1743 in whole units of 128.
_PIECE = 32
# Units of keys of a program that the second-level cache is asked for while the kernel in front runs, where kernels
# overlap. No result depends on it, so that `lengths` may be made by any kernel in front.
_HINTS = 3
# Queries of a tile where they are the columns of products instead of rows, of which there are 64, most of them none:
# attention of 64 rows of 512 to 544 keys, 4 queries a head of keys, takes 40.5 us so on an H200, 42.5 with rows.
FEW = 8
# Bytes of a cache that is read so soon that the launch counts: programs start while the kernel in front ends.
_SOON = 64 << 20
_BESIDE = 216  # registers of a thread that multiplies, where the kernel in front is to find room beside it
_SHORT = 2048  # slots of rows that count as short; longer rows, of which the last unit is little, were not measured


def _types(q, k, v, lengths, table, *, parts: int, **_):
    (rows, queries, d), (o, lse) = q.shape, part_types(*q.shape[1:], parts)
    return jax.ShapeDtypeStruct((rows, queries, d), q.dtype), o, lse


@dataclasses.dataclass(frozen=True)
class Work:
    """What all roles of a program know. In their loops r is a row-and-head, u a unit of its keys, and c counts units:
    the names are those of `hopper_shares`.

    Attributes:
      q, k, v, lengths, table: the operands of `hopper_decode`.
      units, parts, t, whole: its meta-parameters.
      Q, K, V: rings of tiles of queries, and of units of keys and of values.
      P: weights of two units, transposed, where queries are columns, else None.
      q_full, q_empty, ...: a slot of Q, K or V has come; has been read.
    """

    q: jt.Ref
    k: jt.Ref
    v: jt.Ref
    lengths: jt.Ref
    table: jt.Ref | None
    units: Units
    parts: int
    t: int
    whole: bool
    Q: jt.Shared
    K: jt.Shared
    V: jt.Shared
    P: jt.Shared | None
    q_full: jt.Barrier
    q_empty: jt.Barrier
    k_full: jt.Barrier
    k_empty: jt.Barrier
    v_full: jt.Barrier
    v_empty: jt.Barrier

    def share(self):
        """This program's share, see `share_of`; of `whole` rows it has those that begin in the share."""
        begin, end, r, start, size = share_of(self.lengths, jt.program_id(0), self.parts, self.units)
        if self.whole:
            before, n = start < begin, self.count(self.length(r))
            r, start = jnp.where(before, r + 1, r), jnp.where(before, start + n, start)
        return begin, end, r, start, size

    def inside(self, begin, end, start, n):
        """Where this program's part of a row begins and ends, if the row begins at `start` and has n units."""
        return (start, start + n) if self.whole else (jnp.maximum(begin, start), jnp.minimum(end, start + n))

    def count(self, length):
        """The units of a row and head that has so many keys."""
        return jnp.maximum(jt.cdiv(length, self.units.size), 1)

    def length(self, r):
        """How many keys row-and-head r has; behind the last one, those of the last row."""
        last = self.lengths.shape[0] - 1
        return jnp.clip(self.lengths[jnp.minimum(row_of(r, self.units), last)], 0, self.units.slots)

    def positions(self, rows: int, length):
        """Where the queries of a tile stand among the keys: [rows, 1]."""
        return length - self.t + jt.arange(rows)[:, None] // (self.q.shape[1] // self.t)

    @property
    def side(self) -> int:
        """Keys of a copy: a unit or a piece of it, or a page where that is less."""
        side = self.units.piece or self.units.size
        return side if self.table is None else min(side, self.k.shape[1])

    def places(self, b, j, n, length):
        """Where the keys of unit j of the n of row b lie, copy by copy: the page, and which `side` keys of it. Instead
        of pieces behind the length the last one in front of it comes, which the second-level cache has."""
        if self.table is None and self.units.piece is None:
            return [(b, j)]
        if self.table is None:
            copies, last = self.units.size // self.side, jnp.maximum(jt.cdiv(length, self.side) - 1, 0)
            return [(b, jnp.minimum(j * copies + x, last)) for x in range(copies)]
        table, copies, inside = self.table, self.units.size // self.side, jnp.minimum(j, n - 1)
        of_page, last = jnp.int32(self.k.shape[1] // self.side), self.k.shape[0] - 1
        blocks = [jnp.minimum(inside * copies + x, table.shape[1] * of_page - 1) for x in range(copies)]
        page = lambda block: jnp.clip(table[b, jax.lax.div(block, of_page)], 0, last)
        return [(page(block), jax.lax.rem(block, of_page)) for block in blocks]

    def queries(self, one: int):
        """The ring of the queries of consumer `one`, and its barriers."""
        del one
        return self.Q, self.q_full, self.q_empty

    def fetch_queries(self, r, b, head, turn):
        """Start the copy of the queries of row-and-head r, of row b and this head."""
        del b, head
        self.q_empty.at(turn).wait(before=True)
        self.q_full.at(turn).expect(self.Q.nbytes)
        jt.async_copy(self.q.tiles(None, *self.Q.shape).at[r, 0, 0], self.Q.at(turn), self.q_full.at(turn))

    def clear(self, one: int, c, turn, key, length):
        """Make values behind the length zeros in round c, the last one of a row, before consumer `one` reads them."""
        del one, turn
        zero_behind(self.V.at(c), key, length)

    def fetch(self, x, places, head, buffer, full):
        """Start the copies of a unit of keys or values."""
        full.expect(buffer.nbytes)
        for i, (row, j) in enumerate(places):
            part = buffer if len(places) == 1 else buffer[i * self.side : (i + 1) * self.side, :]
            jt.async_copy(
                x.tiles(None, self.side, None, buffer.shape[1]).at[row, j, head, 0], part, full, evict=self.units.evict
            )


@jt.function
def hinted(w: Work, most: int):
    """The role that asks the second-level cache for the first units of keys and values of this program, while kernels
    in front still run. These may write the lengths: what it reads of them says what is asked for, and no more."""
    begin, end, r, start, _ = w.share()
    end = jnp.minimum(end, begin + most)
    while start < end:
        b, length = row_of(r, w.units), w.length(r)
        n, head = w.count(length), r - b * w.units.heads
        lo, hi = w.inside(begin, end, start, n)
        for u in jt.range(lo, hi):
            for x, ring in ((w.k, w.K), (w.v, w.V)):
                for i, (row, j) in enumerate(w.places(b, u - start, n, length)):
                    part = ring.at(jnp.int32(0))[i * w.side : (i + 1) * w.side, :]
                    jt.prefetch(x.tiles(None, w.side, None, ring.shape[1]).at[row, j, head, 0], part)
        r, start = r + 1, start + n


@jt.function
def copies(w: Work, early: bool = False):
    """The role that copies. Lengths and pages are read ahead: nothing waits for them. early: kernels in front may still
    run, until the first unit that has a new key, or does not find an empty slot."""
    heads = w.units.heads
    begin, end, r, start, _ = w.share()
    c, turn, length = jnp.int32(0), jnp.int32(0), w.length(r)
    if early:
        b, n = row_of(r, w.units), w.count(length)
        lo, hi = w.inside(begin, end, start, n)
        for u in jt.range(lo, jnp.minimum(jnp.minimum(hi, start + n - 1), lo + w.K.slots)):
            places = w.places(b, u - start, n, length)
            w.fetch(w.k, places, r - b * heads, w.K.at(c), w.k_full.at(c))
            w.fetch(w.v, places, r - b * heads, w.V.at(c), w.v_full.at(c))
            c = c + 1
        jt.wait_for_kernels()
    there = c
    while start < end:
        b, n, mine, length = row_of(r, w.units), w.count(length), length, w.length(r + 1)
        head = r - b * heads
        lo, hi = w.inside(begin, end, start, n)
        if early:
            lo, there = lo + there, jnp.int32(0)
            w.fetch_queries(r, b, head, turn)
        ahead = w.places(b, lo - start, n, mine)
        for u in jt.range(lo, hi):
            places, ahead = ahead, w.places(b, u + 1 - start, n, mine)
            w.k_empty.at(c).wait(before=True)
            w.fetch(w.k, places, head, w.K.at(c), w.k_full.at(c))
            if not early:
                if u == lo:
                    w.fetch_queries(r, b, head, turn)
            w.v_empty.at(c).wait(before=True)
            w.fetch(w.v, places, head, w.V.at(c), w.v_full.at(c))
            c = c + 1
        r, start, turn = r + 1, start + n, turn + 1


@jt.function
def _seen(s, key, length, w: Work):
    """The scores of the keys from `key` on, -inf where a query does not see a key."""
    rows, bk = s.shape
    if key + bk > length - w.t + 1:
        s = jnp.where(key + jt.arange(bk)[None, :] <= w.positions(rows, length), s, -math.inf)
    return s


@jt.function
def zero_behind(buffer, key, length):
    """Store zeros behind the length: memory there may hold NaN, and 0 times NaN is NaN."""
    bk, d = buffer.shape
    if key + bk > length:
        inside = key + jt.arange(bk)[:, None] < length
        for i in range(0, d, 64):
            piece = buffer[:, i : i + 64]
            piece.store(jnp.where(inside, piece.load(), jnp.zeros((), buffer.dtype)))
        jt.fence_shared()


def _weights(s, key, length, m, l, w: Work, scale: float, softcap: float | None):
    """The weights of finished scores s, in the dtype of the values; the new maxima and sums, and the factor that older
    sums fade by."""
    unit = scale * LOG2_E if softcap is None else 1.0
    s = _seen(s if softcap is None else scores(s, scale, softcap), key, length, w)
    top = jnp.maximum(m, s.max(1) * unit)
    p, fade = jnp.exp2(s * unit - top[:, None]), jnp.exp2(m - top)
    return p.astype(w.q.dtype), top, l * fade + p.sum(1), fade


@jt.function
def sums_of_row(w: Work, one: int, c, turn, lo, hi, start, length, *, scale: float, softcap: float | None):
    """What the units from `lo` to `hi` of a row that begins at `start` give the queries of consumer `one`: weighted
    values, maxima and sums, and the number of the next unit. The scores of a unit run beside the weighted values of the
    one before."""
    d, bk = w.V.shape[1], w.units.size
    ring, q_full, q_empty = w.queries(one)
    Q = ring.at(turn)
    q_full.at(turn).wait()
    w.k_full.at(c).wait()
    s = jt.dot_wait(jt.dot_async(Q, w.K.at(c).T), pending=0)
    w.k_empty.at(c).arrive()
    m, l = jt.full((ROWS,), NOTHING, jnp.float32), jt.zeros((ROWS,), jnp.float32)
    acc = jt.zeros((ROWS, d), jnp.float32)
    p, m, l, _ = _weights(s, (lo - start) * bk, length, m, l, w, scale, softcap)
    for u in jt.range(lo + 1, hi):
        w.k_full.at(c + 1).wait()
        s = jt.dot_async(Q, w.K.at(c + 1).T)
        w.v_full.at(c).wait()
        acc = jt.dot_async(p, w.V.at(c), acc)
        s = jt.dot_wait(s, pending=1)
        w.k_empty.at(c + 1).arrive()
        p_next, m, l, fade = _weights(s, (u - start) * bk, length, m, l, w, scale, softcap)
        acc = jt.dot_wait(acc, pending=0) * fade[:, None]
        w.v_empty.at(c).arrive()
        p, c = p_next, c + 1
    q_empty.at(turn).arrive()
    w.v_full.at(c).wait()
    w.clear(one, c, turn, (hi - 1 - start) * bk, length)
    acc = jt.dot_wait(jt.dot_async(p, w.V.at(c), acc), pending=0)
    w.v_empty.at(c).arrive()
    return acc, m, l, c + 1


@jt.function
def _columns_of_row(w: Work, c, turn, lo, hi, start, length, *, scale: float, softcap: float | None):
    """`sums_of_row` with the queries as columns: values [features, `FEW`], maxima and sums. A product has 64 rows at
    least, so that with queries as rows most of its scores, and of their weights, are those of none."""
    d, bk = w.V.shape[1], w.units.size
    unit = scale * LOG2_E if softcap is None else 1.0
    Q = w.Q.at(turn)

    def weights(s, key, m, l):
        s = s if softcap is None else scores(s, scale, softcap)
        s = jnp.where(key + jt.arange(bk)[:, None] < length, s, -math.inf)
        top = jnp.maximum(m, s.max(0) * unit)
        p, fade = jnp.exp2(s * unit - top[None]), jnp.exp2(m - top)
        return p, top, l * fade[None] + p, fade

    w.q_full.at(turn).wait()
    w.k_full.at(c).wait()
    s = jt.dot_wait(jt.dot_async(w.K.at(c), Q.T), pending=0)
    w.k_empty.at(c).arrive()
    m, l = jt.full((FEW,), NOTHING, jnp.float32), jt.zeros((bk, FEW), jnp.float32)
    acc = jt.zeros((d, FEW), jnp.float32)
    p, m, l, _ = weights(s, (lo - start) * bk, m, l)
    w.P.at(c).store(p.astype(w.q.dtype).T)
    jt.fence_shared()
    jt.role_barrier()
    for u in jt.range(lo + 1, hi):
        w.k_full.at(c + 1).wait()
        s = jt.dot_async(w.K.at(c + 1), Q.T)
        w.v_full.at(c).wait()
        acc = jt.dot_async(w.V.at(c).T, w.P.at(c).T, acc)
        s = jt.dot_wait(s, pending=1)
        w.k_empty.at(c + 1).arrive()
        p, m, l, fade = weights(s, (u - start) * bk, m, l)
        w.P.at(c + 1).store(p.astype(w.q.dtype).T)  # two rounds ago its products have been waited for
        acc = jt.dot_wait(acc, pending=0) * fade[None]
        w.v_empty.at(c).arrive()
        jt.fence_shared()
        jt.role_barrier()
        c = c + 1
    w.q_empty.at(turn).arrive()
    w.v_full.at(c).wait()
    zero_behind(w.V.at(c), (hi - 1 - start) * bk, length)
    jt.role_barrier()
    acc = jt.dot_wait(jt.dot_async(w.V.at(c).T, w.P.at(c).T, acc), pending=0)
    w.v_empty.at(c).arrive()
    return acc, m, l.sum(0), c + 1


@jt.function
def _products(w: Work, o, o_part, lse_part, *, scale: float, softcap: float | None, last: bool, early: bool):
    """The role that multiplies."""
    d = w.q.shape[2]
    begin, end, r, start, size = w.share()
    c, turn, ahead = jnp.int32(0), jnp.int32(0), w.length(r)
    if early:
        jt.wait_for_kernels(hold=True)  # lengths may be read early by what is behind, too
    while start < end:
        length, ahead = ahead, w.length(r + 1)
        n = w.count(length)
        lo, hi = w.inside(begin, end, start, n)
        if w.P is None:
            acc, m, l, c = sums_of_row(w, 0, c, turn, lo, hi, start, length, scale=scale, softcap=softcap)
        else:
            acc, m, l, c = _columns_of_row(w, c, turn, lo, hi, start, length, scale=scale, softcap=softcap)
            acc = acc.T
        rows = w.Q.shape[0]
        acc = acc * jnp.where(l > 0, 1.0 / l, 0.0)[:, None]
        if w.whole or (lo == start) & (hi == start + n):
            o.tiles(None, rows, d)[r, 0, 0] = acc.astype(o.dtype)
        else:
            at = place_of_part(jt.program_id(0), lo == start)
            o_part.tiles(None, rows, d)[at, 0, 0] = acc
            lse_part.tiles(None, rows)[at, 0] = m + jnp.log2(jnp.where(l > 0, l, 1.0))
            if last:
                _meet(w, r, *parts_of(start, n, size), o, o_part, lse_part)
        r, start, turn = r + 1, start + n, turn + 1


@jt.function
def _meet(w: Work, r, first, last, o, o_part, lse_part):
    """The last to come of the programs that have keys of a row puts together what they gave."""
    _, queries, d = o.shape
    if jt.arrive(jt.counters("rows", o.shape[0]), r, last - first + 1):
        n = jt.next_power_of_2(queries)
        whole = put_together(o_part, lse_part, first, last, 0, n, side_of(n, d))
        o.tiles(None, n, d)[r, 0, 0] = whole.astype(o.dtype)


@jt.kernel(out_type=_types, grid=lambda *_, parts, **__: parts)
def hopper_decode(
    q, k, v, lengths, table, o, o_part, lse_part,
    *, parts: int, units: Units, t: int, scale: float, softcap: float | None, last: bool,
    whole: bool = False, ahead: int = 1, turned: bool = False, hints: int = 0, early: bool = False, begun: bool = False,
):  # fmt: skip
    """Rows of several parts are whole where the `last` program puts them together, else those parts are results;
    with `whole` rows there are no parts. ahead: tiles of queries that there is room for. turned: the one token of a row
    has at most `FEW` queries, which are the columns of products. hints: units that the second-level cache is asked for
    while kernels in front run. early: these make neither `lengths` nor slots but the last of each row. begun: roles
    begin while kernels in front run, and wait for them.

    q [batch * kv heads, t * group, d]; k, v [batch, slots, kv heads, d], or [pages, slots of a page, kv heads, d]
    and table [batch, pages of a row], else None; lengths int32 [batch]."""
    # s_ij = q_i . k_j     p_ij = 2^(s_ij - m_i)     o_i = sum_j p_ij v_j / l_i     l_i = sum_j p_ij
    d, dtype = q.shape[2], q.dtype
    slots = _RING // (units.size * d * dtype.itemsize)
    Q = jt.alloc((FEW if turned else ROWS, d), dtype, slots=ahead)
    P = jt.alloc((FEW, units.size), dtype, slots=2) if turned else None
    K, V = (jt.alloc((units.size, d), dtype, slots=slots) for _ in range(2))
    q_full, q_empty = jt.barrier(ahead), jt.barrier(ahead)
    k_full, k_empty, v_full, v_empty = (jt.barrier(slots) for _ in range(4))
    barriers = q_full, q_empty, k_full, k_empty, v_full, v_empty
    w = Work(q, k, v, lengths, table, units, parts, t, whole, Q, K, V, P, *barriers)
    with jt.role("products", warps=4, registers=_BESIDE if hints else 0, early=early or begun):
        if begun:
            jt.wait_for_kernels()
        _products(w, o, o_part, lse_part, scale=scale, softcap=softcap, last=last, early=early)
    with jt.role("copies", warps=1, registers=40, early=early or begun):
        if begun:
            jt.wait_for_kernels()
        copies(w, early)
    if hints:
        with jt.role("hints", warps=1, registers=40, early=True):
            hinted(w, hints)


def misfit(
    q, k, v, lengths, table, scales, *, scale: float, window: int | None, splits: int | None = None, **_
) -> str | None:
    """Why `decode` cannot run this call, None where it can: q [batch, t, heads, d]."""
    arrays = (q, k) if table is None else (q, k, table)
    if not all(isinstance(n, int) for x in arrays for n in x.shape):
        return "sizes are not known"
    (_, t, heads, d), kvs = q.shape, k.shape[2]
    return first_unmet(
        (splits in (None, 1), f"{splits} splits are asked for"),
        (window is None, "there is a window"),
        (not scales, "keys and values have scales"),
        (scale > 0, f"the scale is {scale}"),
        (q.dtype in (jnp.bfloat16, jnp.float16), f"operands are {q.dtype.name}, not 16-bit floats"),
        (d in (64, 128, 256), f"heads have {d} features, not 64, 128 or 256"),
        (t * heads // kvs <= ROWS, f"{t * heads // kvs} queries share a head of keys, more than {ROWS}"),
        (table is None or k.shape[1] % 64 == 0, f"pages have {k.shape[1]} slots, not a multiple of 64"),
    )


def decode(
    q, k, v, lengths, table, scales=(),
    *, scale: float, softcap: float | None, window: None = None, splits: int | None = None,
):  # fmt: skip
    """The result of `decode_attention` for q [batch, t, heads, d], k, v, lengths, and the pages of each row or None."""
    del scales, window
    return mapped(scale, softcap, splits == 1)(q, k, v, lengths, table)


@functools.lru_cache(maxsize=128)
def mapped(scale: float, softcap: float | None, whole: bool = False):
    """A `decode` that has a rule for vmap: batches become rows, whose keys are shared out together."""

    @jax.custom_batching.custom_vmap
    def run(q, k, v, lengths, table):
        return of_batch(q, k, v, lengths, table, scale=scale, softcap=softcap, whole=whole)

    @run.def_vmap
    def _(size: int, batched, *operands):
        return of_calls(size, run(*as_rows(size, batched, operands)))

    return run


def units_of(k, table) -> Units:
    """How the keys of a cache are counted, in the order in which a program adds them up."""
    page, kvs, d = k.shape[1:]
    size = 128 if d < 256 and (table is None or page % 128 == 0) else 64
    slots = page * (1 if table is None else table.shape[1])
    piece = _PIECE if table is None and size == 128 and slots <= _SHORT else None
    return Units(slots=slots, size=size, heads=kvs, piece=piece)


def streams(units: Units) -> bool:
    """Whether the second-level cache forgets keys and values first, and is asked for some of them early: in steps whose
    kernels overlap, where it then keeps what kernels hand each other. With this, and weights that it forgets first,
    eight layers of Llama-3.1-8B with 64 rows take 1502 us a step, 1567 without (H200); with 16 rows, of which a program
    has one and one head, 1296, 1319 without. Rows that are longer were not compared.

    The lengths, and the first units of keys and values but the one with the new token, are read early then: 1533
    instead of 1547 us (least 1525 and 1536) for these eight layers."""
    return gpu_tiles.overlaps() and units.piece is not None


def of_batch(q, k, v, lengths, table, *, scale: float, softcap: float | None, whole: bool = False):
    """The result of `decode`, without its rule for vmap. q may have more rows than there are lengths; the first ones
    count, and the others of the output are not written. `whole`: a program takes all keys of a row and head, unit by
    unit, so that what a query gets depends neither on other rows nor on the tokens beside it."""
    (batch, t, heads, d), kvs = q.shape, k.shape[2]
    units, group, parts = units_of(k, table), heads // kvs, gpu_tiles.processors()
    # One row and head for each program, or less: 14.1 us instead of 15.1 for 16 rows of 8 heads of keys. With 64 rows,
    # 44.6 instead of 42.7.
    if units.piece is not None and batch * kvs <= parts and not whole:
        units = dataclasses.replace(units, size=units.size // 2)
    hints = {}
    if t == 1 and not whole and streams(units):
        units, hints = dataclasses.replace(units, evict="first"), {"hints": _HINTS, "early": not gpu_tiles.holds()}
    grouped = q.reshape(batch, t, kvs, group, d).swapaxes(1, 2).reshape(batch * kvs, t * group, d)
    last = whole or by_the_last(lengths.shape[0] * kvs, t * group, d, parts)
    options = {"parts": parts, "units": units, "t": t, "scale": scale, "softcap": softcap, "last": last, "whole": whole}
    options |= hints | {"ahead": min(_QUERIES // (ROWS * d * q.dtype.itemsize), _AHEAD)}
    options |= {"turned": True} if t == 1 and group <= FEW and d <= 128 and not whole else {}
    soon = 2 * batch * units.slots * kvs * d * k.dtype.itemsize <= _SOON
    options |= {"begun": True} if soon and not hints and not gpu_tiles.overlaps() else {}
    o, o_part, lse_part = hopper_decode(grouped, k, v, lengths, table, **options)
    o = o if last else combined(o, o_part, lse_part, lengths, units)
    return o.reshape(batch, kvs, t, group, d).swapaxes(1, 2).reshape(batch, t, heads, d)
