"""MLA's decode attention for Hopper, at the block level: an entry of the cache is fetched once for both products.

A program takes 64 queries and a share of all keys of the batch, whichever rows they belong to; what a row's keys give
in several programs is put together at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.attention_windows import LOG2_E
from jtile.ops.dispatch import first_unmet
from jtile.ops.hopper_shares import (
    Units,
    as_rows,
    combined,
    logs_of_rows,
    of_calls,
    part_types,
    place_of_part,
    place_of_row,
    share_of,
)
from jtile.ops.online_softmax import NOTHING

ROWS = 64  # queries of a program
KEYS = 64  # keys of one role in a round; a unit of keys has those of both roles
UNIT, ROPE = 2 * KEYS, 64


def _types(q, cache, lengths, table, *, parts: int, rank: int, logs: bool = False, **_):
    """The types of the output, and of the parts of rows that several programs share."""
    batch, rows, _ = q.shape
    tiles = jt.cdiv(rows, ROWS) * ROWS
    return jt.like(q, shape=(batch, rows, rank)), *part_types(tiles, rank, parts, batch if logs else 0)


@dataclasses.dataclass(frozen=True)
class _Work:
    """What all roles of a program know. In their loops u is a unit of a row's keys, and c counts units, as in
    `hopper_shares`; x is the role, and h a half of the columns. z is 0, which the compiler does not know (`_scores`).

    Attributes:
      q, cache, lengths, table: the operands of `hopper_mla`.
      units, parts, heads, rank, scale, logs: its meta-parameters.
      Q, QR: the tile of queries, as halves of the latent part, and its rotary part.
      C: slot 2 x + h holds columns [h rank / 2, ...) of the latent vectors of the keys of role x.
      R: slot x holds their rotary part; when it is used up, the weights of these keys.
      M, L: running maxima and sums of the roles.
      S: this program's share of all keys (see `share_of`), which the role that copies works out for all roles.
      full, empty: a slot of C has come; has been read. A slot of R comes with the half of C that the other role owns.
      q_full, q_empty: the queries have come; have been read.
      maximum, weights, sums: role x has put its slot of M, R (as weights), L.
      known: S has been worked out.
    """

    q: jt.Ref
    cache: jt.Ref
    lengths: jt.Ref
    table: jt.Ref | None
    units: Units
    parts: int
    heads: int
    rank: int
    scale: float
    logs: bool
    Q: jt.Shared
    QR: jt.Shared
    C: jt.Shared
    R: jt.Shared
    M: jt.Shared
    L: jt.Shared
    S: jt.Shared
    full: jt.Barrier
    empty: jt.Barrier
    q_full: jt.Barrier
    q_empty: jt.Barrier
    maximum: jt.Barrier
    weights: jt.Barrier
    sums: jt.Barrier
    known: jt.Barrier

    @property
    def t(self) -> int:
        return self.q.shape[1] // self.heads

    def here(self):
        """The part and the tile of queries of this program."""
        tiles = jnp.int32(jt.cdiv(self.q.shape[1], ROWS))
        return jax.lax.div(jt.program_id(0), tiles), jax.lax.rem(jt.program_id(0), tiles)

    def share(self):
        return share_of(self.lengths, self.here()[0], self.parts, self.units)

    def place(self, b, k, last):
        """Row, or page, and block of keys there, of block k of row b, whose last block is `last`."""
        if self.table is None:
            return b, k
        inside, of_page = jnp.minimum(k, last), jnp.int32(self.cache.shape[1] // KEYS)
        page = jnp.clip(self.table[b, jax.lax.div(inside, of_page)], 0, self.cache.shape[0] - 1)
        return page, jax.lax.rem(inside, of_page)


def _fetch(w: _Work, c, row, k, x: int, h: int):
    """Copy half h of the keys of role x; the rotary part comes with the half that the other role owns."""
    i, (_, keys, half) = 2 * x + h, (None, *w.C.shape)
    w.empty[i].wait((c & 1) ^ 1)
    w.full[i].expect(w.C.nbytes if x == h else w.C.nbytes + w.R.nbytes)
    jt.async_copy(w.cache.tiles(None, keys, half).at[row, k, h], w.C[i], w.full[i])
    if x != h:
        jt.async_copy(w.cache.tiles(None, keys, ROPE).at[row, k, w.rank // ROPE], w.R[x], w.full[i])


def _fetch_queries(w: _Work, turn, b):
    half, (_, tile) = w.C.shape[1], w.here()
    w.q_empty[0].wait((turn & 1) ^ 1)
    w.q_full[0].expect(2 * w.Q.nbytes + w.QR.nbytes)
    for h in range(2):
        jt.async_copy(w.q.tiles(None, ROWS, half).at[b, tile, h], w.Q[h], w.q_full[0])
    jt.async_copy(w.q.tiles(None, ROWS, ROPE).at[b, tile, w.rank // ROPE], w.QR[0], w.q_full[0])


@jt.function
def _copies(w: _Work):
    """The role that copies."""
    begin, end, b, start = share = w.share()[:4]
    for i in range(4):
        w.S[i].store(jnp.full((1,), share[i], jnp.int32))
    w.known[0].arrive()
    c, turn = jnp.int32(0), jnp.int32(0)
    while start < end:
        length = jnp.clip(w.lengths[b], 0, w.units.slots)
        n, last = w.units.of(length), jnp.maximum(jt.cdiv(length, KEYS) - 1, 0)
        lo, hi = jnp.maximum(begin, start), jnp.minimum(end, start + n)
        ahead = [w.place(b, 2 * (lo - start) + x, last) for x in range(2)]
        for u in jt.range(lo, hi):
            places, ahead = ahead, [w.place(b, 2 * (u + 1 - start) + x, last) for x in range(2)]  # a round early
            for x, h in ((0, 0), (1, 1), (1, 0), (0, 1)):  # in the order in which slots become free
                _fetch(w, c, *places[x], x, h)
            if u == lo:
                _fetch_queries(w, turn, b)
            c = c + 1
        b, start, turn = b + 1, start + n, turn + 1


@jt.function
def _scores(w: _Work, x: int, c):
    """The scores of a unit's keys of role x. One code for both halves of the entries: a sixth of the instructions."""
    z = c >> 30  # 0, which the compiler does not know: else it moves addresses out of the loop, and registers run out
    s = jt.zeros((ROWS, KEYS), jnp.float32)
    for i in jt.range(2):
        h = x ^ i  # the half of the other role brings the rotary part
        w.full[2 * x + h].wait(c & 1)
        s = jt.dot_async(w.Q[h], w.C[2 * x + h].T, s)
    return jt.dot_wait(jt.dot_async(w.QR[z], w.R[x + z].T, s), pending=0)


@jt.function
def _edge(w: _Work, x: int, s, key, length, query):
    """The scores of the keys of role x, from `key` on, of the queries from `query` on: -inf where a query does not see
    a key. Entries behind the length become zeros: memory there may hold NaN, and 0 times NaN is NaN.

    One branch in the loop does both, behind the scores, where it costs nothing: among the weights it would keep their
    exponentials and the sums' rescaling apart."""
    if key + KEYS > length - w.t + 1:
        seen = length - w.t + (query + jt.arange(ROWS)[:, None]) // w.heads
        s = jnp.where(key + jt.arange(KEYS)[None, :] <= seen, s, -math.inf)
        inside = key + jt.arange(KEYS)[:, None] < length
        for h in jt.range(2):
            for k in range(0, w.C.shape[1], 64):
                piece = w.C[2 * x + h][:, k : k + 64]
                piece.store(jnp.where(inside, piece.load(), jnp.zeros((), w.C.dtype)))
        jt.fence_shared()
    return s


def _first(w: _Work, c, s, acc, l, m):
    """The weights of role 0 and their product with its own keys; its maximum goes to role 1 and comes back."""
    unit, z, dtype = w.scale * LOG2_E, c >> 30, w.q.dtype
    mine = jnp.maximum(m, s.max(1) * unit)
    w.M[0].store(mine)
    w.maximum[0].arrive()
    p, fade = jnp.exp2(s * unit - mine[:, None]), jnp.exp2(m - mine)
    l = l * fade + p.sum(1)
    acc = jt.dot_async(p.astype(dtype), w.C[z], acc * fade[:, None])
    w.maximum[1].wait(c & 1)
    m = w.M[1].load()
    fade = jnp.exp2(mine - m)
    w.R[0].store((p * fade[:, None]).astype(dtype))
    jt.fence_shared()
    w.weights[0].arrive()
    acc = jt.dot_wait(acc, pending=0) * fade[:, None]
    w.empty[0].arrive()
    return acc, l * fade, m


def _second(w: _Work, c, s, acc, l, m):
    """The weights of role 1, by the maximum of both, and their product with its own keys."""
    unit, z, dtype = w.scale * LOG2_E, c >> 30, w.q.dtype
    top = s.max(1) * unit
    w.maximum[0].wait(c & 1)
    mine = jnp.maximum(w.M[0].load(), top)
    w.M[1].store(mine)
    w.maximum[1].arrive()
    p, fade = jnp.exp2(s * unit - mine[:, None]), jnp.exp2(m - mine)
    l = l * fade + p.sum(1)
    w.R[1].store(p.astype(dtype))
    jt.fence_shared()
    w.weights[1].arrive()
    acc = jt.dot_wait(jt.dot_async(p.astype(dtype), w.C[3 + z], acc * fade[:, None]), pending=0)
    w.empty[3].arrive()
    return acc, l, mine


def _step(w: _Work, x: int, c, key, length, acc, l, m):
    """Role x takes a unit of keys from `key` on: (acc, l, m) behind it."""
    other, z = 2 - x, c >> 30  # the slot of the other role's keys with this role's columns
    s = _edge(w, x, _scores(w, x, c), key + x * KEYS, length, w.here()[1] * ROWS + z)
    acc, l, m = (_first, _second)[x](w, c, s, acc, l, m)
    w.weights[1 - x].wait(c & 1)
    acc = jt.dot_wait(jt.dot_async(w.R[1 - x + z], w.C[other + z], acc), pending=0)
    w.empty[other].arrive()  # before the next scores: a copy takes a quarter of a unit's time, and roles wait for it
    return acc, l, m


@jt.function
def _give(w: _Work, x: int, b, turn, begins, ends, acc, l, m, o, o_part, lse_part):
    """Write what the keys of this part gave a row that begins in it, ends in it, both or neither."""
    half, (part, tile) = w.C.shape[1], w.here()
    w.L[x].store(l)
    w.sums[x].arrive()
    w.sums[1 - x].wait(turn & 1)
    l = l + w.L[1 - x].load()
    acc = acc * jnp.where(l > 0, 1.0 / l, 0.0)[:, None]
    log = lambda: m + jnp.log2(jnp.where(l > 0, l, 1.0))
    if begins & ends:
        w.Q[x].store(acc.astype(o.dtype))
        jt.fence_shared()
        jt.role_barrier()
        jt.async_copy(w.Q[x], o.tiles(None, ROWS, half).at[b, tile, x])
        if w.logs and x == 0:
            lse_part.tiles(None, ROWS)[place_of_row(b, w.parts), tile] = log()
        jt.store_wait(0)
        w.q_empty[0].arrive()
    else:
        at = place_of_part(part, begins)
        o_part.tiles(None, ROWS, half)[at, tile, x] = acc
        if x == 0:
            lse_part.tiles(None, ROWS)[at, tile] = log()


@jt.function
def _values(w: _Work, x: int, o, o_part, lse_part):
    """Role x: it makes scores of keys [64 x, 64 x + 64) of a unit, and columns [x rank / 2, ...) of all outputs."""
    w.known[0].wait(0)
    begin, end, b, start = (w.S[i].load().reshape(()) for i in range(4))
    c, turn = jnp.int32(0), jnp.int32(0)
    while start < end:
        length = jnp.clip(w.lengths[b], 0, w.units.slots)
        n = w.units.of(length)
        lo, hi = jnp.maximum(begin, start), jnp.minimum(end, start + n)
        w.q_full[0].wait(turn & 1)
        acc = jt.zeros((ROWS, w.C.shape[1]), jnp.float32)
        l, m = jt.zeros((ROWS,), jnp.float32), jt.full((ROWS,), NOTHING, jnp.float32)
        for u in jt.range(lo, hi):
            acc, l, m = _step(w, x, c, (u - start) * UNIT, length, acc, l, m)
            c = c + 1
        begins, ends = lo == start, hi == start + n
        w.q_empty[0].arrive(when=~(begins & ends))  # a whole row's output goes to the queries' place first
        _give(w, x, b, turn, begins, ends, acc, l, m, o, o_part, lse_part)
        b, start, turn = b + 1, start + n, turn + 1


@jt.kernel(out_type=_types, grid=lambda q, *_, parts, **__: parts * jt.cdiv(q.shape[1], ROWS))
def hopper_mla(
    q, cache, lengths, table, o, o_part, lse_part,
    *, parts: int, units: Units, heads: int, rank: int, scale: float, logs: bool = False,
):  # fmt: skip
    """q [batch, t * heads, rank + 64]; cache, lengths and table as in `mla_splits`. logs: behind those of parts,
    `lse_part` has the logarithms of sums of rows that one part has."""
    # s_ij = q_i . c_j     p_ij = 2^(s_ij - m_i)     o_i = sum_j p_ij c_j[:rank] / l_i     l_i = sum_j p_ij
    half, dtype = rank // 2, q.dtype
    Q, QR = jt.alloc((ROWS, half), dtype, slots=2), jt.alloc((ROWS, ROPE), dtype, slots=1)
    C, R = jt.alloc((KEYS, half), dtype, slots=4), jt.alloc((KEYS, ROPE), dtype, slots=2)
    M, L = jt.alloc((ROWS,), jnp.float32, slots=2), jt.alloc((ROWS,), jnp.float32, slots=2)
    S, known = jt.alloc((1,), jnp.int32, slots=4), jt.barrier(1)
    full, empty, q_full, q_empty = jt.barrier(4), jt.barrier(4), jt.barrier(1), jt.barrier(1, arrivals=2)
    maximum, weights, sums = jt.barrier(2), jt.barrier(2), jt.barrier(2)
    w = _Work(
        q, cache, lengths, table, units, parts, heads, rank, scale, logs,
        Q, QR, C, R, M, L, S, full, empty, q_full, q_empty, maximum, weights, sums, known,
    )  # fmt: skip
    with jt.role("copies", warps=4, registers=24):  # the first: other roles address buffers cheaper if they are not
        _copies(w)
    for x in range(2):
        with jt.role(f"values_{x}", warps=4, registers=240):
            _values(w, x, o, o_part, lse_part)


def misfit(q, cache, lengths, table, scales, *, rank: int, scale: float, splits: int | None = None) -> str | None:
    """Why `decode` cannot run this call, None where it can: q [batch, t, heads, rank + rope]."""
    arrays = (q, cache) if table is None else (q, cache, table)
    if not all(isinstance(n, int) for x in arrays for n in x.shape):
        return "sizes are not known"
    return first_unmet(
        (splits is None, f"{splits} splits are asked for"),
        (scales is None, "entries have scales"),
        (rank in (128, 256, 512), f"{rank} elements of an entry are values, not 128, 256 or 512"),
        (q.shape[3] == rank + ROPE, f"the rotary part has {q.shape[3] - rank} elements, not {ROPE}"),
        (q.dtype in (jnp.bfloat16, jnp.float16), f"operands are {q.dtype.name}, not 16-bit floats"),
        (scale > 0, f"the scale is {scale}"),
        (table is None or cache.shape[1] % KEYS == 0, f"pages have {cache.shape[1]} slots, not a multiple of {KEYS}"),
    )


def decode(q, cache, lengths, table, scales=None, *, rank: int, scale: float):
    """The result of `mla_decode` for q [batch, t, heads, rank + 64], cache, lengths, and each row's pages or None."""
    del scales
    return mapped(rank, scale)(q, cache, lengths, table)


def decode_with_logs(q, cache, lengths, table, *, rank: int, scale: float):
    """The result of `decode`, and the logarithms to base 2 of its sums [batch, t, heads], for callers that know further
    keys; that of a row without keys is `NOTHING`."""
    return mapped(rank, scale, logs=True)(q, cache, lengths, table)


@functools.lru_cache(maxsize=128)
def mapped(rank: int, scale: float, logs: bool = False):
    """A `decode` that has a rule for vmap: batches become rows, whose keys are shared out together."""

    @jax.custom_batching.custom_vmap
    def run(q, cache, lengths, table):
        return of_batch(q, cache, lengths, table, rank=rank, scale=scale, logs=logs)

    @run.def_vmap
    def _(size: int, batched, *operands):
        return of_calls(size, run(*as_rows(size, batched, operands)))

    return run


def of_batch(q, cache, lengths, table, *, rank: int, scale: float, logs: bool = False):
    """The result of `decode`, or of `decode_with_logs`, without its rule for vmap."""
    batch, t, heads, width = q.shape
    rows, slots = t * heads, cache.shape[1] * (1 if table is None else table.shape[1])
    units, parts = Units(slots=slots, size=UNIT), max(1, gpu_tiles.processors() // jt.cdiv(rows, ROWS))
    options = {"parts": parts, "units": units, "heads": heads, "rank": rank, "scale": scale}
    options |= {"logs": True} if logs else {}
    whole, o_part, lse_part = hopper_mla(q.reshape(batch, rows, width), cache, lengths, table, **options)
    o = combined(whole, o_part, lse_part, lengths, units).reshape(batch, t, heads, rank)
    if not logs:
        return o
    return o, logs_of_rows(lse_part, lengths, parts=parts, units=units)[:, :rows].reshape(batch, t, heads)
