"""Reverse mode of attention with heads of up to 256 features for Hopper: the gradients of keys and values at the block
level. Registers of one role do not hold both beside the products that they are made of, so that each has a role.

    p_ij = 2^(unit q_i . k_j - lse_i)   ds_ij = p_ij (g_i . v_j - delta_i)
    dv_j = sum_i p_ij g_i   dk_j = scale sum_i ds_ij q_i        tiles are transposed: [keys, queries]
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops.attention_windows import LOG2_E, Window, query_blocks, tanh, visible
from jtile.ops.hopper_backward_roles import HIDDEN

SIDE = 64  # keys of a program, and queries of a round


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Buffers and barriers of a program.

    Attributes:
      K, V: its keys and values. Q, G, LSE, DELTA: queries and cotangents of a round, and their numbers. P: weights,
        times the derivative of the cap of scores.
      k_full, v_full, q_full, g_full: have come; q_empty, g_empty: both roles have read; p_full: weights are stored;
      p_empty: they have been read.
    """

    K: jt.Shared
    V: jt.Shared
    Q: jt.Shared
    G: jt.Shared
    LSE: jt.Shared
    DELTA: jt.Shared
    P: jt.Shared
    k_full: jt.Barrier
    v_full: jt.Barrier
    q_full: jt.Barrier
    g_full: jt.Barrier
    p_full: jt.Barrier
    q_empty: jt.Barrier
    g_empty: jt.Barrier
    p_empty: jt.Barrier


def _memory(d: int, dtype) -> _Memory:
    K, V = (jt.alloc((SIDE, d), dtype) for _ in range(2))
    Q, G = (jt.alloc((SIDE, d), dtype, slots=2) for _ in range(2))
    LSE, DELTA = (jt.alloc((SIDE,), jnp.float32, slots=2) for _ in range(2))
    P = jt.alloc((SIDE, SIDE), dtype, slots=2)
    barriers = jt.barrier(1), jt.barrier(1), jt.barrier(2), jt.barrier(2), jt.barrier(2)
    empty = jt.barrier(2, arrivals=2), jt.barrier(2, arrivals=2), jt.barrier(2)
    return _Memory(K, V, Q, G, LSE, DELTA, P, *barriers, *empty)


@dataclasses.dataclass(frozen=True)
class _Work:
    """Block j of the keys of row b and head kv: `length` of them count, and queries begin at `offset`. The blocks of
    queries from lo to hi see any of them, those from inner_lo to inner_hi all."""

    b: jax.Array
    kv: jax.Array
    j: jax.Array
    group: int
    window: Window
    counted: bool
    length: jax.Array | int
    offset: jax.Array | int
    lo: jax.Array
    inner_lo: jax.Array
    inner_hi: jax.Array
    hi: jax.Array

    @property
    def keys(self):
        """The numbers of the keys, [keys, 1]."""
        return self.j * SIDE + jt.arange(SIDE)[:, None]

    def behind(self, head, i):
        """(head, block of queries) of the round behind that of these; behind the last one comes the first again."""
        end, over = i + 1 >= self.hi, head + 1 >= self.group
        return jnp.where(end, jnp.where(over, 0, head + 1), head), jnp.where(end, self.lo, i + 1)


def _work(q, k, lengths, offsets, window: Window, counted: bool) -> _Work:
    (t, kvs, group), keys = q.shape[1:4], k.shape[1]
    row, j = jnp.divmod(jt.program_id(0), jt.cdiv(keys, SIDE))
    b, kv = jnp.divmod(row, kvs)
    length = jnp.minimum(lengths[b], keys) if counted else keys
    offset = offsets[b] if counted else 0
    bounds = query_blocks(j * SIDE, SIDE, SIDE, t, offset, length, window)
    return _Work(b, kv, j, group, window, counted, length, offset, *bounds)


def _columns(numbers):
    """Numbers of queries, repeated in the row of every key."""
    return jnp.broadcast_to(numbers.load()[None, :], (SIDE, SIDE))


@jt.function
def _zero_behind(work: _Work, tile) -> None:
    """Zeros in the place of keys, or values, behind the length, which may hold anything, NaN too."""
    if (work.j + 1) * SIDE > work.length:
        tile.store(jnp.where(work.keys < work.length, tile.load(), jnp.zeros((), tile.dtype)))
        jt.fence_shared()
    jt.role_barrier()


@jt.function
def _seen(work: _Work, i, x, other: float):
    """x of block i of queries, and `other` where a query does not see a key."""
    if (i < work.inner_lo) | (i >= work.inner_hi):
        queries = work.offset + i * SIDE + jt.arange(SIDE)[None, :]
        x = jnp.where(visible(queries, work.keys, work.length, work.window), x, other)
    return x


@jt.function
def _weights(work: _Work, mem: _Memory, s, rounds, i, scale: float, softcap: float | None):
    """The weights of finished products s of block i of queries. The other role gets them times the derivative of the
    cap."""
    if softcap is None:
        p = _seen(work, i, jnp.exp2(s * (scale * LOG2_E) - _columns(mem.LSE.at(rounds))), 0.0)
        p = changing = p.astype(mem.P.dtype)
    else:
        s = _seen(work, i, tanh(s, scale / softcap), -HIDDEN / softcap)
        p = jnp.exp2(s * (softcap * LOG2_E) - _columns(mem.LSE.at(rounds)))
        changing, p = (p * (1.0 - s * s)).astype(mem.P.dtype), p.astype(mem.P.dtype)
    mem.p_empty.at(rounds).wait(before=True)
    mem.P.at(rounds).store(changing)
    jt.fence_shared()
    mem.p_full.at(rounds).arrive()
    return p


@jt.function
def _of_values(work: _Work, mem: _Memory, dv, scale: float, softcap: float | None) -> None:
    """The role of the gradients of values, whose products find the weights."""
    rounds, d = jnp.int32(0), mem.V.shape[1]
    total = jt.zeros((SIDE, d), jnp.float32)
    mem.k_full[0].wait(0)
    if work.counted:
        _zero_behind(work, mem.K)
    mem.q_full[0].wait(0)
    s = jt.dot_wait(jt.dot_async(mem.K, mem.Q.at(rounds).T), pending=0)
    p = _weights(work, mem, s, rounds, work.lo, scale, softcap)
    mem.q_empty.at(rounds).arrive()
    for head in jt.range(work.group):
        for i in jt.range(work.lo, work.hi):
            behind = rounds + 1
            mem.g_full.at(rounds).wait()
            total = jt.dot_async(p, mem.G.at(rounds), total)
            mem.q_full.at(behind).wait()
            s = jt.dot_async(mem.K, mem.Q.at(behind).T)
            total = jt.dot_wait(total, pending=1)
            mem.g_empty.at(rounds).arrive()
            s = jt.dot_wait(s, pending=0)
            p = _weights(work, mem, s, behind, work.behind(head, i)[1], scale, softcap)
            mem.q_empty.at(behind).arrive()
            rounds = behind
    dv.tiles(None, SIDE, None, d)[work.b, work.j, work.kv, 0] = total.astype(dv.dtype)


@jt.function
def _changes(mem: _Memory, dp, rounds):
    """How much the result changes with the products of a round, from the finished products dp of its cotangents."""
    mem.p_full.at(rounds).wait()
    ds = (mem.P.at(rounds).load().astype(jnp.float32) * (dp - _columns(mem.DELTA.at(rounds)))).astype(mem.P.dtype)
    mem.p_empty.at(rounds).arrive()
    mem.g_empty.at(rounds).arrive()
    return ds


@jt.function
def _of_keys(work: _Work, mem: _Memory, dk, scale: float) -> None:
    """The role of the gradients of keys."""
    rounds, d = jnp.int32(0), mem.K.shape[1]
    total = jt.zeros((SIDE, d), jnp.float32)
    mem.v_full[0].wait(0)
    if work.counted:
        _zero_behind(work, mem.V)
    mem.g_full[0].wait(0)
    ds = _changes(mem, jt.dot_wait(jt.dot_async(mem.V, mem.G.at(rounds).T), pending=0), rounds)
    for _ in jt.range(work.group):
        for _ in jt.range(work.lo, work.hi):
            behind = rounds + 1
            mem.q_full.at(rounds).wait()
            total = jt.dot_async(ds, mem.Q.at(rounds), total)
            mem.g_full.at(behind).wait()
            dp = jt.dot_async(mem.V, mem.G.at(behind).T)
            total = jt.dot_wait(total, pending=1)
            mem.q_empty.at(rounds).arrive()
            ds = _changes(mem, jt.dot_wait(dp, pending=0), behind)
            rounds = behind
    dk.tiles(None, SIDE, None, d)[work.b, work.j, work.kv, 0] = (total * scale).astype(dk.dtype)


@jt.function
def _copy(work: _Work, mem: _Memory, q, k, v, g, lse, delta) -> None:
    """The role that copies what the others multiply."""
    d = q.shape[4]
    rings = (q, mem.Q, lse, mem.LSE, mem.q_full, mem.q_empty), (g, mem.G, delta, mem.DELTA, mem.g_full, mem.g_empty)
    for (x, own, full), (y, ring, numbers, of, full_y, _) in zip(
        ((k, mem.K, mem.k_full), (v, mem.V, mem.v_full)), rings, strict=True
    ):
        full[0].expect(own.nbytes)
        jt.async_copy(x.tiles(None, SIDE, None, d).at[work.b, work.j, work.kv, 0], own, full[0])
        full_y[0].expect(ring.nbytes + of.nbytes)
        at = y.tiles(None, SIDE, None, None, d).at[work.b, work.lo, work.kv, 0, 0]
        jt.async_copy(at, ring.at(jnp.int32(0)), full_y[0])
        at = numbers.tiles(None, None, None, SIDE).at[work.b, work.kv, 0, work.lo]
        jt.async_copy(at, of.at(jnp.int32(0)), full_y[0])
    rounds = jnp.int32(0)
    for head in jt.range(work.group):
        for i in jt.range(work.lo, work.hi):
            rounds = rounds + 1
            then, block = work.behind(head, i)
            for y, ring, numbers, of, full, empty in rings:
                empty.at(rounds).wait(before=True)
                full.at(rounds).expect(ring.nbytes + of.nbytes)
                at = y.tiles(None, SIDE, None, None, d).at[work.b, block, work.kv, then, 0]
                jt.async_copy(at, ring.at(rounds), full.at(rounds))
                at = numbers.tiles(None, None, None, SIDE).at[work.b, work.kv, then, block]
                jt.async_copy(at, of.at(rounds), full.at(rounds))


@jt.kernel(
    out_type=lambda q, k, v, *_, **__: (jt.like(k), jt.like(v)),
    grid=lambda q, k, *_, **__: k.shape[0] * k.shape[2] * jt.cdiv(k.shape[1], SIDE),
    sharding="b _ h n _, b _ h _, b _ h _, b _ h n _, b h n _, b h n _, b, b -> b _ h _, b _ h _",
)
def hopper_wide_keys(
    q, k, v, g, lse, delta, lengths, offsets, dk, dv,
    *, scale: float, softcap: float | None = None, window: Window, counted: bool,
):  # fmt: skip
    """A program: 64 keys of one row and kv head, against all queries that see them.

    q, g [batch, t, kv heads, group, d]; k, v [batch, keys, kv heads, d]; lse, in powers of two, and delta as
    `attention_delta_tiles` gives it, [batch, kv heads, group, t]; lengths, offsets [batch], as in `flash_attention` if
    `counted`.
    """
    mem, work = _memory(q.shape[4], q.dtype), functools.partial(_work, q, k, lengths, offsets, window, counted)
    with jt.role("values", warps=4, registers=240):
        _of_values(work(), mem, dv, scale, softcap)
    with jt.role("keys", warps=4, registers=240):
        _of_keys(work(), mem, dk, scale)
    with jt.role("copies", warps=1, registers=24):
        _copy(work(), mem, q, k, v, g, lse, delta)
