"""MLA's decode attention for Hopper, at the block level: an entry of the cache is fetched once for both products.

A program takes 64 queries and a share of all keys of the batch, whichever rows they belong to; what a row's keys give
in several programs is put together at the end.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import tuned
from jtile.ops.attention_windows import LOG2_E
from jtile.ops.flash_attention import NOTHING
from jtile.ops.hopper_tiles import PROCESSORS

ROWS = 64  # queries of a program
KEYS = 64  # of one role in a round; a unit of keys is those of both roles
UNIT, ROPE = 2 * KEYS, 64
_SEARCHED = 8192  # comparisons of the schedule at a time


def _tables(lengths, *, slots: int, parts: int):
    return tuple(jax.ShapeDtypeStruct(s, jnp.int32) for s in ((lengths.shape[0] + 1,), (parts, 2)))


@jt.kernel(out_type=_tables, grid=1)
def schedule(lengths, ends, shares, *, slots: int, parts: int):
    """Equal shares of the units of all rows: where each row's units begin, int32 [batch + 1], and the rows from and to
    which each of the `parts` goes, int32 [parts, 2]. A row of no length has a unit too, which writes its zeros."""
    batch = lengths.shape[0]
    n = jt.next_power_of_2(batch)
    some = max(1, min(jt.next_power_of_2(parts), _SEARCHED // n))
    row = jt.arange(n)
    units = jnp.maximum(jt.cdiv(jnp.clip(lengths.tiles(n)[0], 0, slots), UNIT), 1)
    of_row = jnp.cumsum(jnp.where(row < batch, units, 0))
    total = of_row.max()
    ends[0] = jnp.int32(0)
    jt.store(ends, (row + 1,), of_row)
    share = jt.cdiv(total, parts)
    row_of = lambda unit: (of_row[None, :] <= unit[:, None]).astype(jnp.int32).sum(1)
    for p in jt.range(jt.cdiv(parts, some)):
        begin = jnp.minimum((p * some + jt.arange(some)) * share, total)
        end = jnp.minimum(begin + share, total)
        first = row_of(begin)
        shares.tiles(some, 1)[p, 0] = first[:, None]
        shares.tiles(some, 1)[p, 1] = jnp.where(end > begin, row_of(end - 1) + 1, first)[:, None]


def _types(q, cache, lengths, ends, shares, table, *, rank: int, **_):
    """The output, and of rows that several programs share their outputs and logarithms of sums, two for a part: of the
    row that ends or goes on in it, and of the one that begins in it and goes on behind it."""
    (batch, rows, _), parts = q.shape, 2 * shares.shape[0]
    padded = jt.cdiv(rows, ROWS) * ROWS
    part = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((parts, padded, rank), (parts, padded))]
    return jt.like(q, shape=(batch, rows, rank)), *part


def _share(ends, shares, part):
    """Of a part: its rows from and to, its units from and to."""
    total = ends[ends.shape[0] - 1]
    size = jt.cdiv(total, shares.shape[0])
    begin = jnp.minimum(part * size, total)
    return shares[part, 0], shares[part, 1], begin, jnp.minimum(begin + size, total)


@jt.function
def _seen(s, key, length, t: int, query, heads: int):
    """The scores of the keys from `key` on and the queries from `query` on, -inf where a query does not see a key."""
    if key + KEYS > length - t + 1:
        position = length - t + (query + jt.arange(ROWS)[:, None]) // heads
        s = jnp.where(key + jt.arange(KEYS)[None, :] <= position, s, -math.inf)
    return s


@jt.function
def _zero_behind(buffer, key, length):
    """What stands behind the length may be anything, and 0 times it too: zeros instead."""
    if key + KEYS > length:
        inside = key + jt.arange(KEYS)[:, None] < length
        for k in range(0, buffer.shape[1], 64):
            piece = buffer[:, k : k + 64]
            piece.store(jnp.where(inside, piece.load(), jnp.zeros((), buffer.dtype)))
        jt.fence_shared()


@jt.kernel(
    out_type=_types, grid=lambda q, cache, lengths, ends, shares, *_, **__: shares.shape[0] * jt.cdiv(q.shape[1], ROWS)
)
def hopper_mla(
    q, cache, lengths, ends, shares, table, o, o_part, lse_part, *, heads: int, rank: int, scale: float
):  # fmt: skip
    """q [batch, t * heads, rank + 64]; cache, lengths and table as in `mla_splits`; ends and shares: `schedule`."""
    # s_ij = q_i . c_j     p_ij = 2^(s_ij - m_i)     o_i = sum_j p_ij c_j[:rank] / l_i     l_i = sum_j p_ij
    # Role w: the scores of keys [64 w, 64 w + 64) of a unit, columns [w rank / 2, ...) of the outputs of all its keys.
    tiles, half, dtype = jt.cdiv(q.shape[1], ROWS), rank // 2, q.dtype
    part, tile = jax.lax.div(jt.program_id(0), tiles), jax.lax.rem(jt.program_id(0), tiles)
    t, slots = q.shape[1] // heads, cache.shape[1] * (table[0].shape[1] if table else 1)
    Q, QR = jt.alloc((ROWS, half), dtype, slots=2), jt.alloc((ROWS, ROPE), dtype, slots=1)
    C = jt.alloc((KEYS, half), dtype, slots=4)  # 2 x + h: columns [h rank / 2, ...) of the keys of role x
    R = jt.alloc((KEYS, ROPE), dtype, slots=2)  # their rotary part; when it is used up, the weights of these keys
    M, L = jt.alloc((ROWS,), jnp.float32, slots=2), jt.alloc((ROWS,), jnp.float32, slots=2)
    full, empty, q_full, q_empty = jt.barrier(4), jt.barrier(4), jt.barrier(1), jt.barrier(1, arrivals=2)
    maximum, weights, sums = jt.barrier(2), jt.barrier(2), jt.barrier(2)

    def fetch(c, b, k, x, h):
        """Half h of the keys of role x, which are block k of row b; with those that the other role owns, the rotary
        part."""
        row, at, i = b, k, 2 * x + h
        if table:
            inside = jnp.minimum(k, jnp.maximum(jt.cdiv(jnp.minimum(lengths[b], slots), KEYS) - 1, 0))
            of_page = jnp.int32(cache.shape[1] // KEYS)
            row = jnp.clip(table[0][b, jax.lax.div(inside, of_page)], 0, cache.shape[0] - 1)
            at = jax.lax.rem(inside, of_page)
        empty[i].wait((c & 1) ^ 1)
        full[i].expect(C.nbytes if x == h else C.nbytes + R.nbytes)
        jt.async_copy(cache.tiles(None, KEYS, half).at[row, at, h], C[i], full[i])
        if x != h:
            jt.async_copy(cache.tiles(None, KEYS, ROPE).at[row, at, rank // ROPE], R[x], full[i])

    def fetch_queries(turn, b):
        q_empty[0].wait((turn & 1) ^ 1)
        q_full[0].expect(2 * Q.nbytes + QR.nbytes)
        for h in range(2):
            jt.async_copy(q.tiles(None, ROWS, half).at[b, tile, h], Q[h], q_full[0])
        jt.async_copy(q.tiles(None, ROWS, ROPE).at[b, tile, rank // ROPE], QR[0], q_full[0])

    with jt.role(
        "copies", warps=4, registers=24
    ):  # the first role: the others address buffers cheaper where they are not
        first, last, begin, end = _share(ends, shares, part)
        c = jnp.int32(0)
        for b in jt.range(first, last):
            lo, hi = jnp.maximum(begin, ends[b]), jnp.minimum(end, ends[b + 1])
            for u in jt.range(lo, hi):
                for x, h in ((0, 0), (1, 1), (1, 0), (0, 1)):  # as they become free
                    fetch(c, b, 2 * (u - ends[b]) + x, x, h)
                if u == lo:
                    fetch_queries(b - first, b)
                c = c + 1

    def scores(w, c, h, s=None):
        """The scores' part from half h of the entries, in flight; the half of the other role brings the rotary part."""
        z = c >> 30  # 0, but nobody knows: else addresses move out of the loop, and there are not registers for all
        full[2 * w + h].wait(c & 1)
        s = jt.dot_async(Q[h + z], C[2 * w + h + z].T, s)
        return s if h == w else jt.dot_async(QR[z], R[w + z].T, s)

    def step(w, c, key, length, s, o_i, l, m, last: bool):
        """A unit of keys from `key` on; s: its finished scores. Gives the next unit's too, but for the last one."""
        own, other, z = 3 * w, 2 - w, c >> 30  # of this role's columns: its keys, the other role's
        if last or t > 1:
            s = _seen(s, key + w * KEYS, length, t, tile * ROWS, heads)
        top = s.max(1) * (scale * LOG2_E)
        if w == 1:
            maximum[0].wait(c & 1)
        m_w = jnp.maximum(m if w == 0 else M[0].load(), top)
        M[w].store(m_w)
        maximum[w].arrive()
        p, fade = jnp.exp2(s * (scale * LOG2_E) - m_w[:, None]), jnp.exp2(m - m_w)
        l, m = l * fade + p.sum(1), m_w
        if last:
            _zero_behind(C[own], key + w * KEYS, length)
        if w == 0:
            o_i = jt.dot_async(p.astype(dtype), C[own + z], o_i * fade[:, None])
            maximum[1].wait(c & 1)
            m = M[1].load()
            fade = jnp.exp2(m_w - m)
            R[0].store((p * fade[:, None]).astype(dtype))
            jt.fence_shared()
            weights[0].arrive()
            l = l * fade
            o_i = jt.dot_wait(o_i, pending=0) * fade[:, None]
            empty[own].arrive()
        else:
            R[1].store(p.astype(dtype))
            jt.fence_shared()
            weights[1].arrive()
            o_i = jt.dot_async(p.astype(dtype), C[own + z], o_i * fade[:, None])
        weights[1 - w].wait(c & 1)
        if last:
            _zero_behind(C[other], key + (1 - w) * KEYS, length)
        o_i = jt.dot_async(R[1 - w + z], C[other + z], o_i)
        if last:
            o_i = jt.dot_wait(o_i, pending=0)
            for i in (other, own)[: 1 + w]:
                empty[i].arrive()
            return s, o_i, l, m
        if w == 1:
            o_i = jt.dot_wait(o_i, pending=1)
            empty[own].arrive()
        s = scores(w, c + 1, w)
        o_i = jt.dot_wait(o_i, pending=1)
        empty[other].arrive()
        return jt.dot_wait(scores(w, c + 1, 1 - w, s), pending=0), o_i, l, m

    def give(w, b, turn, lo, hi, o_i, l, m):
        L[w].store(l)
        sums[w].arrive()
        sums[1 - w].wait(turn & 1)
        l = l + L[1 - w].load()
        o_i = o_i * jnp.where(l > 0, 1.0 / l, 0.0)[:, None]
        if (lo == ends[b]) & (hi == ends[b + 1]):
            Q[w].store(o_i.astype(dtype))
            jt.fence_shared()
            jt.role_barrier()
            jt.async_copy(Q[w], o.tiles(None, ROWS, half).at[b, tile, w])
            jt.store_wait(0)
        else:
            at = 2 * part + (lo == ends[b]).astype(jnp.int32)
            o_part.tiles(None, ROWS, half)[at, tile, w] = o_i
            if w == 0:
                lse_part.tiles(None, ROWS)[at, tile] = m + jnp.log2(jnp.where(l > 0, l, 1.0))
        q_empty[0].arrive()

    for w in range(2):
        with jt.role(f"values_{w}", warps=4, registers=240):
            first, last, begin, end = _share(ends, shares, part)
            c = jnp.int32(0)
            for b in jt.range(first, last):
                lo, hi, turn = jnp.maximum(begin, ends[b]), jnp.minimum(end, ends[b + 1]), b - first
                length = jnp.clip(lengths[b], 0, slots)
                q_full[0].wait(turn & 1)
                s = jt.dot_wait(scores(w, c, 1 - w, scores(w, c, w)), pending=0)
                o_i = jt.zeros((ROWS, half), jnp.float32)
                l, m = jt.zeros((ROWS,), jnp.float32), jt.full((ROWS,), NOTHING, jnp.float32)
                for u in jt.range(lo, hi - 1):
                    s, o_i, l, m = step(w, c, (u - ends[b]) * UNIT, length, s, o_i, l, m, last=False)
                    c = c + 1
                s, o_i, l, m = step(w, c, (hi - 1 - ends[b]) * UNIT, length, s, o_i, l, m, last=True)
                c = c + 1
                give(w, b, turn, lo, hi, o_i, l, m)


@jt.kernel(
    out_type=lambda whole, *_, **__: jt.like(whole),
    grid=lambda whole, *_, n, **__: (whole.shape[0], jt.cdiv(whole.shape[1], n)),
    alias={"whole": "o"},
)
def combine_shares(whole, o_part, lse_part, ends, o, *, n: int):
    """The output [batch, rows, rank] of rows that several parts share, over those that one part gave, `n` of them in a
    program."""
    # o = sum_p 2^(lse_p - M) o_p / sum_p 2^(lse_p - M)     M = max_p lse_p
    b, i, parts = jt.program_id(0), jt.program_id(1), o_part.shape[0] // 2
    size = jt.cdiv(ends[whole.shape[0]], parts)
    first, last = jax.lax.div(ends[b], size), jax.lax.div(ends[b + 1] - 1, size)
    rank = whole.shape[2]
    if last > first:
        m, l = jt.full((n,), 2 * NOTHING, jnp.float32), jt.zeros((n,), jnp.float32)
        acc = jt.zeros((n, rank), jnp.float32)
        for p in jt.range(first, last + 1):
            at = 2 * p + (p == first).astype(jnp.int32)
            x = lse_part.tiles(None, n)[at, i]
            top = jnp.maximum(m, x)
            fade, w = jnp.exp2(m - top), jnp.exp2(x - top)
            acc = acc * fade[:, None] + w[:, None] * o_part.tiles(None, n, rank)[at, i, 0]
            l, m = l * fade + w, top
        o.tiles(None, n, rank)[b, i, 0] = (acc / l[:, None]).astype(o.dtype)


def fits(q, cache, table, rank: int, scale: float) -> bool:
    """Whether `decode` can run this call: q [batch, t, heads, rank + rope]."""
    sizes = all(isinstance(n, int) for n in (*q.shape, *cache.shape, *(table[0].shape if table else ())))
    entry = rank in (128, 256, 512) and q.shape[3] == rank + ROPE and q.dtype in (jnp.bfloat16, jnp.float16)
    # Automatic partitioning cuts only kernels whose programs know which row of the batch is theirs.
    whole = jax.device_count() == 1 or bool(jax.sharding.get_abstract_mesh().manual_axes)
    return whole and sizes and entry and scale > 0 and (not table or cache.shape[1] % KEYS == 0)


@functools.cache
def decode(rank: int, scale: float):
    """A function as `mla_decode` of q [batch, t, heads, rank + 64], cache, lengths, and the pages of each row in a
    tuple, or (). Batches of vmap become rows, whose keys are shared out together."""

    @jax.custom_batching.custom_vmap
    def run(q, cache, lengths, table):
        return of_batch(q, cache, lengths, table, rank=rank, scale=scale)

    @run.def_vmap
    def _(size: int, batched, q, cache, lengths, table):
        wide = lambda x, there: x if there else jnp.broadcast_to(x, (size, *x.shape))
        fold = lambda x: x.reshape(size * x.shape[1], *x.shape[2:])
        table = tuple(map(wide, table, batched[3]))
        if table and batched[1]:  # pools of pages, one behind the other
            table = (table[0] + cache.shape[1] * jnp.arange(size, dtype=jnp.int32)[:, None, None],)
        if not table or batched[1]:
            cache = fold(wide(cache, batched[1]))
        o = run(fold(wide(q, batched[0])), cache, fold(wide(lengths, batched[2])), tuple(map(fold, table)))
        return o.reshape(size, -1, *o.shape[1:]), True

    return run


def of_batch(q, cache, lengths, table, *, rank: int, scale: float):
    """As `decode`, without its rule for vmap."""
    batch, t, heads, width = q.shape
    rows, slots = t * heads, cache.shape[1] * (table[0].shape[1] if table else 1)
    ends, shares = schedule(lengths, slots=slots, parts=max(1, PROCESSORS // jt.cdiv(rows, ROWS)))
    args = q.reshape(batch, rows, width), cache, lengths, ends, shares, table
    whole, o_part, lse_part = hopper_mla(*args, heads=heads, rank=rank, scale=scale)
    o = tuned(combine_shares, num_warps=4)(whole, o_part, lse_part, ends, n=4)
    return o.reshape(batch, t, heads, rank)
