"""The roles of a program of attention's gradient on Hopper: two of 64 keys each, and one that copies.

dk and dv stay in registers. dS goes through shared memory, so that each role makes half of every tile of dq, which
asynchronous copies add up in float32.

    p_ij = 2^(unit s_ij)   s_ij = q_i . k_j + s0_i   dp_ij = g_i . v_j + dp0_i   ds_ij = p_ij dp_ij
    dv_j = sum_i p_ij g_i   dk_j = scale sum_i ds_ij q_i   dq_i = sum_j ds_ij k_j     tiles are transposed: [keys, bq]

Where z_ij is 0 for a weight that is dropped, else 1: ds_ij = z_ij p_ij g_i . v_j + p_ij dp0_i,
dv_j = factor sum_i z_ij p_ij g_i and dk_j = factor scale sum_i ds_ij q_i.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import dropouts, flex_lists
from jtile.ops.attention_windows import LOG2_E, Window, query_blocks, tanh, visible

Function = Callable[..., Any] | None
KEYS = 64  # keys of one role; a program has two such roles
HIDDEN = 1e9  # minus this is a score whose weight is 0, with a square that is no infinity
LEAST = 1e-6  # caps of scores are not smaller
NEAR = 32 << 20  # bytes of queries, cotangents and gradients that the second cache holds beside keys and values


@dataclasses.dataclass(frozen=True)
class Masks:
    """Which queries see which keys, and what scores are.

    Attributes:
      window, score, mask: as in `flash_attention` and `flex_attention`; counted: rows have lengths and offsets.
      softcap: that of `flash_attention`, where there is no score.
      extras: the operands of score and mask. lists, counts: those of `hopper_flex_backward`, else None.
      rows, heads: the numbers of rows of the batch, and of heads [kv heads, group], which score and mask get where they
        are not those of a shard; else None.
    """

    window: Window
    counted: bool = False
    softcap: float | None = None
    score: Function = None
    mask: Function = None
    extras: tuple[jt.Ref, ...] = ()
    lists: jt.Ref | None = None
    counts: jt.Ref | None = None
    rows: jt.Ref | None = None
    heads: jt.Ref | None = None

    def row(self, b):
        """The number of row b for score and mask."""
        return b if self.rows is None else self.rows[b]

    def head(self, kv, member, group: int):
        """That of a member of the group of heads that share kv."""
        return kv * group + member if self.heads is None else self.heads[kv, member]

    def block(self, b, h, j, n):
        """The n-th block of queries that see block j of keys."""
        assert self.lists is not None
        some, heads, _, last = self.lists.shape
        return self.lists[b if some > 1 else 0, h if heads > 1 else 0, j, jnp.minimum(n, last - 1)]

    def count(self, b, h, j, n: int):
        """How many of these see all keys of block j, n = 0, or any, n = 1."""
        assert self.counts is not None
        some, heads = self.counts.shape[:2]
        return self.counts[b if some > 1 else 0, h if heads > 1 else 0, j, n]

    def seen(self, b, kv, i, j, keys: int, hangs: bool):
        """Which of the keys j [keys, 1] the queries i [1, bq] see; `hangs`: whether j may be behind the keys.
        Heads that share keys have one mask."""
        h = self.head(kv, 0, 1)
        return flex_lists.seen(
            self.row(b), h, i, j, self.extras, mask=self.mask, window=self.window, s=keys, hangs=hangs
        )

    def scored(self, s, b, h, i, j):
        """The scores of products s [keys, bq], and their derivatives; h: what `head` gives."""
        score, b = self.score, self.row(b)
        assert score is not None
        return jax.jvp(lambda s: score(s, b, h, i, j, *self.extras), (s,), (jnp.ones_like(s),))


def _place(q, k, window: Window, several: int):
    """Row, kv head and first block of keys of this program. Programs that run at one time share what they read."""
    (batch, t, kvs, group, d), keys = q.shape, k.shape[1]
    program, blocks = jt.program_id(0), jt.cdiv(keys, 2 * KEYS * several)
    near = 1  # heads whose blocks run side by side: the first block of keys has the most queries, the last the fewest
    if window[0] is None and window[1] is not None:
        held = max(1, NEAR // (t * group * d * (2 * q.dtype.itemsize + 4)))
        near = max(n for n in range(1, min(batch * kvs, held) + 1) if batch * kvs % n == 0)
    together, side = jnp.divmod(program, near)
    first, block = jnp.divmod(together, blocks)
    b, kv = jnp.divmod(first * near + side, kvs)
    return b, kv, block if several == 1 else block * several


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Buffers and barriers of a program.

    Attributes:
      K, V: keys and values of both roles; Q, G: queries and the cotangents of their results; S0, DP0: what the sums of
        their products start from. DS: of each role and each of two rounds; DQ, OUT: results on their way.
      k_full, v_full, q_full, g_full: have come; k_empty, v_empty, q_empty, g_empty: have been read.
      clean: keys and values behind the length are zeros. shared: both roles have stored dS.
    """

    K: jt.Shared
    V: jt.Shared
    Q: jt.Shared
    G: jt.Shared
    S0: jt.Shared
    DP0: jt.Shared
    DS: jt.Shared
    DQ: jt.Shared
    OUT: jt.Shared
    k_full: jt.Barrier
    v_full: jt.Barrier
    q_full: jt.Barrier
    g_full: jt.Barrier
    k_empty: jt.Barrier
    v_empty: jt.Barrier
    q_empty: jt.Barrier
    g_empty: jt.Barrier
    clean: jt.Barrier
    shared: jt.Barrier


def _memory(d: int, dtype, bq: int) -> _Memory:
    Q, G = jt.alloc((bq, d), dtype, slots=2), jt.alloc((bq, d), dtype, slots=2)
    S0, DP0 = jt.alloc((bq,), jnp.float32, slots=2), jt.alloc((bq,), jnp.float32, slots=2)
    K, V = jt.alloc((2 * KEYS, d), dtype), jt.alloc((2 * KEYS, d), dtype)
    DS, DQ = jt.alloc((KEYS, bq), dtype, slots=4), jt.alloc((64, 64), jnp.float32, slots=2)
    OUT = jt.alloc((KEYS, d), dtype, slots=2)
    k_empty, v_empty = jt.barrier(1, arrivals=2), jt.barrier(1, arrivals=2)
    k_full, v_full, clean, shared = jt.barrier(1), jt.barrier(1), jt.barrier(1, arrivals=2), jt.barrier(1, arrivals=2)
    q_full, g_full = jt.barrier(2), jt.barrier(2)
    q_empty, g_empty = jt.barrier(2, arrivals=2), jt.barrier(2, arrivals=2)
    full, empty = (k_full, v_full, q_full, g_full), (k_empty, v_empty, q_empty, g_empty)
    return _Memory(K, V, Q, G, S0, DP0, DS, DQ, OUT, *full, *empty, clean, shared)


@dataclasses.dataclass(frozen=True)
class _Work:
    """What a program works on: row b of the batch, head kv of keys and the group of its heads of queries.

    Attributes:
      t, group, d, keys: sizes. bq: queries of a block.
      masks, lengths, offsets, scale, dropout: as `program` takes them.
    """

    b: jax.Array
    kv: jax.Array
    t: int
    group: int
    d: int
    keys: int
    bq: int
    masks: Masks
    lengths: jt.Ref | None
    offsets: jt.Ref | None
    scale: float
    dropout: float

    @property
    def listed(self) -> bool:
        return self.masks.lists is not None

    @property
    def hangs(self) -> bool:
        """Whether the last block of keys is not whole."""
        return self.keys % (2 * KEYS) != 0

    @property
    def masked(self) -> bool:
        return self.listed or self.masks.counted or self.masks.window != (None, None) or self.hangs

    def bounds(self, j):
        """(length, offset, first block of queries, first and end of those that see all keys of block j, end)."""
        if self.listed:
            whole, end = (self.masks.count(self.b, self.kv, j, n) for n in range(2))
            whole = jnp.where((j + 1) * 2 * KEYS > self.keys, 0, whole) if self.hangs else whole
            return self.keys, 0, jnp.int32(0), whole, end, end
        counted = self.masks.counted
        length = jnp.minimum(self.lengths[self.b], self.keys) if counted else self.keys
        offset = self.offsets[self.b] if counted else 0
        return length, offset, *query_blocks(j * 2 * KEYS, 2 * KEYS, self.bq, self.t, offset, length, self.masks.window)

    def nth(self, j, n):
        """The block of queries of round n."""
        return self.masks.block(self.b, self.kv, j, n) if self.listed else n

    def queries(self, i):
        """The numbers of the queries of block i, [1, bq]."""
        return i * self.bq + jt.arange(self.bq)[None, :]

    def kept(self, w: int, j, i, seed):
        """Which weights are not dropped."""
        columns = dropouts.places(i * self.bq, self.bq, 1)
        return dropouts.kept(seed, columns, dropouts.places((2 * j + w) * KEYS, KEYS, 0), self.dropout)


def _half(w: int) -> slice:
    """The keys of role w."""
    return slice(w * KEYS, (w + 1) * KEYS)


def _of_keys(w: int, j):
    """The numbers of the keys of role w, [KEYS, 1]."""
    return (2 * j + w) * KEYS + jt.arange(KEYS)[:, None]


def _rows(starts, bq: int):
    """Numbers of queries, repeated in the row of every key."""
    return jnp.broadcast_to(starts.load()[None, :], (KEYS, bq))


def _first(work: _Work, mem: _Memory, slot) -> list:
    """What the sums of products start from."""
    return [_rows(mem.S0[slot], work.bq)] if work.masks.score is None and work.masks.softcap is None else []


@jt.function
def _zero_behind(work: _Work, mem: _Memory, w: int, j, length) -> None:
    """Zeros in the place of keys and values behind the length, which may hold anything, NaN too."""
    if (j + 1) * 2 * KEYS > length:
        for tile in (mem.K, mem.V):
            own = tile[_half(w)]
            own.store(jnp.where(_of_keys(w, j) < length, own.load(), jnp.zeros((), tile.dtype)))
        jt.fence_shared()
        mem.clean[0].arrive()
        mem.clean[0].wait(0)


@jt.function
def _seen(work: _Work, w: int, j, n, i, p, other, length, offset, inner_lo, inner_hi):
    """p, and `other` where a query does not see a key."""
    if work.listed:
        if n >= inner_lo:
            p = jnp.where(
                work.masks.seen(work.b, work.kv, work.queries(i), _of_keys(w, j), work.keys, work.hangs), p, other
            )
        return p
    window = work.masks.window
    if i < inner_lo if window[0] is None else (i < inner_lo) | (i >= inner_hi):
        queries = offset + i * work.bq + jt.arange(work.bq)[None, :]
        p = jnp.where(visible(queries, _of_keys(w, j), length, window), p, other)
    return p


def _product_of_dq(work: _Work, mem: _Memory, h: int, w: int, rounds):
    """By the keys of role h, half w of dq: of its columns, or, of short heads, of its queries."""
    ds, k_h, part = mem.DS[(rounds & 1) * 2 + h], mem.K[_half(h)], slice(w * 64, w * 64 + 64)
    return (ds.T, k_h[:, part]) if work.d == 128 else (ds[:, part].T, k_h)


def _weights(work: _Work, mem: _Memory, w: int, j, head, n, i, s, slot, edges):
    """p, and how much a score changes with its product, None for the scale itself."""
    seen = lambda x, other: _seen(work, w, j, n, i, x, other, *edges) if work.masked else x
    if (cap := work.masks.softcap) is not None:  # masked before: registers do not hold both results until then
        s = seen(tanh(s, work.scale / cap), -HIDDEN / cap)
        return jnp.exp2(s * (cap * LOG2_E) + _rows(mem.S0[slot], work.bq)), 1.0 - s * s
    if work.masks.score is None:
        return seen(jnp.exp2(s * (work.scale * LOG2_E)), 0.0), None
    queries, columns, h = work.queries(i), _of_keys(w, j), work.masks.head(work.kv, head, work.group)
    s, gradient = work.masks.scored(s * work.scale, work.b, h, queries, columns)
    return seen(jnp.exp2(s * LOG2_E + _rows(mem.S0[slot], work.bq)), 0.0), gradient


def _times(p, gradient):
    return p if gradient is None else p * gradient


@jt.function
def _step(work: _Work, mem: _Memory, dq, w: int, j, rounds, head, n, s, dk_j, dv_j, edges, seed):
    """A round of role w: its n-th query block, of a head of the group; s: its products, finished. Gives those of the
    next round too."""
    slot, i, dtype = rounds & 1, work.nth(j, n), mem.Q.dtype
    mem.g_full.at(rounds).wait()
    dp = jt.dot_async(mem.V[_half(w)], mem.G[slot].T, *([] if seed else [_rows(mem.DP0[slot], work.bq)]))
    p, gradient = _weights(work, mem, w, j, head, n, i, s, slot, edges)
    if seed:  # both at once: registers do not hold p, with and without what is dropped, beside dp
        stays, dp = work.kept(w, j, i, seed), jt.dot_wait(dp, pending=0)
        ds = (_times(p, gradient) * (jnp.where(stays, dp, 0.0) + _rows(mem.DP0[slot], work.bq))).astype(dtype)
        dv_j = jt.dot_async(jnp.where(stays, p, 0.0).astype(dtype), mem.G[slot], dv_j)
    else:
        dv_j = jt.dot_async(p.astype(dtype), mem.G[slot], dv_j)
        ds = (_times(p, gradient) * jt.dot_wait(dp, pending=1)).astype(dtype)
    dk_j = jt.dot_async(ds, mem.Q[slot], dk_j)
    mem.DS[slot * 2 + w].store(ds)
    jt.fence_shared()
    mem.shared[0].arrive()
    dv_j = jt.dot_wait(dv_j, pending=1)
    mem.g_empty[slot].arrive()
    dq_i = jt.dot_async(*_product_of_dq(work, mem, w, w, rounds))
    mem.shared[0].wait(slot)
    dq_i = jt.dot_async(*_product_of_dq(work, mem, 1 - w, w, rounds), dq_i)
    dk_j = jt.dot_wait(dk_j, pending=2)
    mem.q_empty[slot].arrive()
    mem.q_full.at(rounds + 1).wait()
    s = jt.dot_async(mem.K[_half(w)], mem.Q[slot ^ 1].T, *_first(work, mem, slot ^ 1))
    dq_i = jt.dot_wait(dq_i, pending=1)
    jt.store_wait(0)
    mem.DQ[w].store(dq_i)
    jt.fence_shared()
    jt.role_barrier()
    row, column = (i, w) if work.d == 128 else (2 * i + w, 0)
    jt.async_copy(mem.DQ[w], dq.tiles(None, 64, None, None, 64).at[work.b, row, work.kv, head, column], fn="add")
    return jt.dot_wait(s, pending=0), dk_j, dv_j


@jt.function
def _give(work: _Work, mem: _Memory, w: int, j, sums, out) -> None:
    jt.store_wait(0)
    mem.OUT[w].store(sums.astype(out.dtype))
    jt.fence_shared()
    jt.role_barrier()
    jt.async_copy(mem.OUT[w], out.tiles(None, KEYS, None, work.d).at[work.b, 2 * j + w, work.kv, 0])


@jt.function
def _sum(work: _Work, mem: _Memory, seeds, dq, dk, dv, w: int, block, several: int) -> None:
    """Role w: the gradients of its half of the keys of so many blocks, and its part of those of the queries."""
    rounds, factor = jnp.int32(0), dropouts.factor(work.dropout)
    for x in range(several):
        j = block + x
        length, offset, lo, inner_lo, inner_hi, hi = work.bounds(j)
        dk_j, dv_j = jt.zeros((KEYS, work.d), jnp.float32), jt.zeros((KEYS, work.d), jnp.float32)
        mem.k_full[0].wait(x & 1)
        if work.masks.counted:
            mem.v_full[0].wait(0)
            _zero_behind(work, mem, w, j, length)
        if x == 0:  # those of the next block of keys have been waited for
            mem.q_full[0].wait(0)
        s = jt.dot_async(mem.K[_half(w)], mem.Q.at(rounds).T, *_first(work, mem, rounds & 1))
        s = jt.dot_wait(s, pending=0)
        mem.v_full[0].wait(x & 1)
        for head in jt.range(work.group):
            seed = (seeds[work.b, work.kv, head, 0], seeds[work.b, work.kv, head, 1]) if work.dropout else None
            edges = length, offset, inner_lo, inner_hi
            for n in jt.range(lo, hi):
                s, dk_j, dv_j = _step(work, mem, dq, w, j, rounds, head, n, s, dk_j, dv_j, edges, seed)
                rounds = rounds + 1
        if x + 1 < several:
            mem.k_empty[0].arrive()
            mem.v_empty[0].arrive()
        _give(work, mem, w, j, dv_j * factor if work.dropout else dv_j, dv)
        _give(work, mem, w, j, dk_j * (work.scale * factor), dk)
    jt.store_wait(0)


@jt.function
def _fetch(work: _Work, rounds, head, i, array, ring, start, starts, full, empty) -> None:
    """Copy block i of a head's queries, or cotangents, and what their sums start from."""
    empty.at(rounds).wait(before=True)
    full.at(rounds).expect(ring.nbytes + starts.nbytes)
    tile = array.tiles(None, work.bq, None, None, work.d).at[work.b, i, work.kv, head, 0]
    jt.async_copy(tile, ring.at(rounds), full.at(rounds))
    jt.async_copy(
        start.tiles(None, None, None, work.bq).at[work.b, work.kv, head, i], starts.at(rounds), full.at(rounds)
    )


@jt.function
def _fetch_keys(work: _Work, x: int, j, array, buffer, full, empty) -> None:
    """Copy block j of keys, or values, the x-th of the program."""
    if x:
        empty[0].wait((x - 1) & 1)
    full[0].expect(buffer.nbytes)
    jt.async_copy(array.tiles(None, 2 * KEYS, None, work.d).at[work.b, j, work.kv, 0], buffer, full[0])


@jt.function
def _copy(work: _Work, mem: _Memory, q, k, v, g, s0, dp0, block, several: int) -> None:
    """The role that copies what the others multiply."""
    rounds = jnp.int32(0)
    queries, cotangents = (
        (q, mem.Q, s0, mem.S0, mem.q_full, mem.q_empty),
        (g, mem.G, dp0, mem.DP0, mem.g_full, mem.g_empty),
    )
    for x in range(several):
        j = block + x
        _, _, lo, _, _, hi = work.bounds(j)
        behind = work.nth(j, lo) if x + 1 == several else work.bounds(j + 1)[2]
        _fetch_keys(work, x, j, k, mem.K, mem.k_full, mem.k_empty)
        if x == 0:
            _fetch(work, rounds, 0, work.nth(j, lo), *queries)
        _fetch_keys(work, x, j, v, mem.V, mem.v_full, mem.v_empty)
        for head in jt.range(work.group):
            for n in jt.range(lo, hi):
                _fetch(work, rounds, head, work.nth(j, n), *cotangents)
                # Behind the last round comes the first of the next block of keys; behind those of the last block one
                # more block of queries is multiplied, which nobody uses.
                rounds, end, over = rounds + 1, n + 1 >= hi, head + 1 >= work.group
                heads = jnp.where(end, jnp.where(over, 0, head + 1), head)
                then = work.nth(j, jnp.where(end, lo, n + 1))
                _fetch(work, rounds, heads, jnp.where(end & over, behind, then), *queries)


def program(
    q, k, v, g, s0, dp0, lengths, offsets, seeds, dq, dk, dv,
    *, bq: int, scale: float, masks: Masks, dropout: float, several: int = 1,
):  # fmt: skip
    """The roles of one program of either kernel, for so many blocks of keys, one behind the other.

    Names in them: j, a block of keys, the x-th of the program; w, a role, which has half of its keys; head, a query
    head of the group; i, a block of queries; rounds, how many of those a role has had, over all heads.
    """
    b, kv, block = _place(q, k, masks.window, several)
    t, group, d, keys = q.shape[1], q.shape[3], q.shape[4], k.shape[1]
    work = _Work(b, kv, t, group, d, keys, bq, masks, lengths, offsets, scale, dropout)
    mem = _memory(d, q.dtype, bq)
    for w in range(2):
        with jt.role(f"keys_{w}", warps=4, registers=240):
            _sum(work, mem, seeds, dq, dk, dv, w, block, several)
    with jt.role("copies", warps=1, registers=24):
        _copy(work, mem, q, k, v, g, s0, dp0, block, several)
