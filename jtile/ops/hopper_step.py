"""Attention of one new token a row over few keys, on Hopper at the block level, with what stands in front of it.

Queries and keys leave the projection, are normalised and turned, and keys and values go into the cache. Those of the
tokens before come into shared memory while the projection is still made. The new token's are in registers: the program
that has the last keys of a row begins its sums with them, and writes them to the cache when its copies are there.
Scores are made as Sᵀ = K Qᵀ, whose tiles are as narrow as a kv head has queries, so that a block takes a fifth of a
multiprocessor, and the product behind it fills its ring beside.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.attention_windows import LOG2_E
from jtile.ops.dispatch import first_unmet
from jtile.ops.hopper_shares import Units, part_types, parts_of, place_of_part, put_together, row_of, share_of
from jtile.ops.online_softmax import NOTHING

QUERIES = 8  # queries of a tile: those of the heads of a group
UNIT = 64  # keys of a unit
_SIDE = 12  # parts that are put together at a time
_MOST = 4  # units of a program, at most: with more, the kernel whose products overlap is sooner done
_REGISTERS = 104  # registers of a thread that multiplies: they leave enough for a product beside it


@dataclasses.dataclass(frozen=True)
class _Work:
    """What all roles of a program know. In their loops r is a row-and-head, u a unit of its keys, and c counts units:
    the names are those of `hopper_shares`.

    Attributes:
      qkv, cos, ..., table: the operands of `hopper_step`.
      units, parts, heads, eps: its meta-parameters.
      N: for each norm the halves of its weights. Q, P: a tile of queries, and of weights of a unit of keys; K, V:
        rings of units of keys and of values.
      k_full, k_empty, ...: a slot of K or V has come; has been read.
    """

    qkv: jt.Ref
    cos: jt.Ref
    sin: jt.Ref
    lengths: jt.Ref
    keys: jt.Ref
    values: jt.Ref
    norms: tuple
    table: jt.Ref | None
    units: Units
    parts: int
    heads: int
    eps: float
    N: tuple
    Q: jt.Shared
    P: jt.Shared
    K: jt.Shared
    V: jt.Shared
    k_full: jt.Barrier
    k_empty: jt.Barrier
    v_full: jt.Barrier
    v_empty: jt.Barrier

    def share(self):
        """This program's share of all keys; see `share_of`."""
        return share_of(self.lengths, jt.program_id(0), self.parts, self.units)

    def length(self, r):
        """The length of row-and-head r, without the new token; behind the last one, that of the last row."""
        last = self.lengths.shape[0] - 1
        return jnp.minimum(self.lengths[jnp.minimum(row_of(r, self.units), last)], self.units.slots)

    def place(self, b, block):
        """Where the keys of a block of `UNIT` of row b lie: the row or page, and which block of it."""
        if self.table is None:
            return b, block
        of_page = jnp.int32(self.keys.shape[1] // UNIT)
        block = jnp.minimum(block, self.table.shape[1] * of_page - 1)
        page = self.table[b, jax.lax.div(block, of_page)]
        return jnp.clip(page, 0, self.keys.shape[0] - 1), jax.lax.rem(block, of_page)

    def queries(self, b, head, count: int, norm):
        """The `count` queries of head `head` of row b, normalised and turned: halves [`QUERIES`, d / 2]. norm: the
        halves of the weights of their norm, or None."""
        half = self.qkv.shape[2] // 2
        there = jnp.broadcast_to(jt.arange(QUERIES)[:, None] < count, (QUERIES, half))
        halves = [
            jt.load(self.qkv, (b, jt.ds(head * count, QUERIES), jt.ds(i, half)), mask=there).astype(jnp.float32)
            for i in (0, half)
        ]
        return self._turned(b, halves, norm)

    def key(self, b, head, norm):
        """The new key of head `head` of row b, likewise: halves [d / 2]."""
        half = self.qkv.shape[2] // 2
        halves = [self.qkv[b, self.heads + head, i : i + half].astype(jnp.float32) for i in (0, half)]
        return self._turned(b, halves, norm)

    def _turned(self, b, halves, norm):
        like = lambda x: x[None] if halves[0].ndim == 2 else x
        low, high = halves
        if norm is not None:
            squares = (low * low + high * high).sum(-1, keepdims=True)
            unit = jax.lax.rsqrt(squares * (0.5 / low.shape[-1]) + self.eps)
            low, high = (part * unit * like(kept.load()) for part, kept in zip((low, high), norm))
        cos, sin = like(self.cos[b, :]), like(self.sin[b, :])
        return low * cos - high * sin, high * cos + low * sin


@jt.function
def _copies(w: _Work):
    """The role that copies keys and values of tokens before."""
    heads, d = w.units.heads, w.keys.shape[3]
    begin, end, r, start, _ = w.share()
    c = jnp.int32(0)
    while start < end:
        b, n = row_of(r, w.units), w.units.of(w.length(r))
        for u in jt.range(jnp.maximum(begin, start), jnp.minimum(end, start + n)):
            row, block = w.place(b, u - start)
            for x, ring, empty, full in ((w.keys, w.K, w.k_empty, w.k_full), (w.values, w.V, w.v_empty, w.v_full)):
                empty.at(c).wait(before=True)
                full.at(c).expect(ring.nbytes)
                unit = x.tiles(None, UNIT, None, d).at[row, block, r - b * heads, 0]
                jt.async_copy(unit, ring.at(c), full.at(c), evict="first")
            c = c + 1
        r, start = r + 1, start + n


@jt.function
def _zero_behind(buffer, key, length):
    """Store zeros behind the length: memory there may hold NaN, and 0 times NaN is NaN."""
    if key + UNIT > length:
        inside = key + jnp.broadcast_to(jt.arange(UNIT)[:, None], (UNIT, 64)) < length
        for i in range(0, buffer.shape[1], 64):
            piece = buffer[:, i : i + 64]
            piece.store(jnp.where(inside, piece.load(), jnp.zeros((), buffer.dtype)))


@jt.function
def _attend(w: _Work, o, new_keys, new_values, o_part, lse_part, *, scale: float):
    """The role that does everything but the copies."""
    d, dtype, kvs = w.qkv.shape[2], w.qkv.dtype, w.units.heads
    group, half = w.heads // kvs, d // 2
    norms = w.N or (None, None)
    for norm, kept in zip(w.norms, w.N):  # they come from memory before the wait
        for i, part in enumerate(kept):
            part.store(norm[i * half : (i + 1) * half])
    begin, end, r, start, size = w.share()
    c, length = jnp.int32(0), w.length(r)
    jt.wait_for_kernels()
    if w.N:
        jt.role_barrier()
    while start < end:
        b, ahead = row_of(r, w.units), w.length(r + 1)
        head, n = r - b * kvs, w.units.of(length)
        lo, hi = jnp.maximum(begin, start), jnp.minimum(end, start + n)
        whole, there = (lo == start) & (hi == start + n), (length >= 0) & (length < w.units.slots)
        mine = (hi == start + n) & there
        q = [x.astype(dtype) for x in w.queries(b, head, group, norms[0])]
        k = [x.astype(dtype) for x in w.key(b, head, norms[1])]
        w.Q.store(jnp.concatenate(q, axis=1))
        own = sum(x.astype(jnp.float32) * y.astype(jnp.float32)[None] for x, y in zip(q, k)).sum(1)
        v = w.qkv[b, w.heads + kvs + head, :]
        m = jnp.where(mine, own * (scale * LOG2_E), NOTHING)
        l = jnp.where(mine, jt.full((QUERIES,), 1.0, jnp.float32), 0.0)
        acc = jnp.where(mine, jnp.broadcast_to(v.astype(jnp.float32)[:, None], (d, QUERIES)), 0.0)
        jt.fence_shared()
        jt.role_barrier()
        for u in jt.range(lo, hi):
            key = (u - start) * UNIT
            w.k_full.at(c).wait()
            s = jt.dot_wait(jt.dot_async(w.K.at(c), w.Q.T), pending=0)
            w.k_empty.at(c).arrive()
            # compared in the shape of the scores: a mask of one column would go to all threads through shared memory
            row = jnp.broadcast_to(jt.arange(UNIT)[:, None], (UNIT, QUERIES))
            s = jnp.where(key + row < length, s, -math.inf)
            top = jnp.maximum(m, s.max(0) * (scale * LOG2_E))
            p, fade = jnp.exp2(s * (scale * LOG2_E) - top[None]), jnp.exp2(m - top)
            w.P.store(p.astype(dtype).T)
            w.v_full.at(c).wait()
            _zero_behind(w.V.at(c), key, length)
            jt.fence_shared()
            jt.role_barrier()
            acc = jt.dot_async(w.V.at(c).T, w.P.T, acc * fade[None])
            m, l = top, l * fade + p.sum(0)
            acc = jt.dot_wait(acc, pending=0)
            w.v_empty.at(c).arrive()
            jt.role_barrier()
            c = c + 1
        acc = acc * jnp.where(l > 0, 1.0 / l, 0.0)[None]
        if whole:
            o.tiles(None, QUERIES, d)[r, 0, 0] = acc.T.astype(o.dtype)
        else:
            at = place_of_part(jt.program_id(0), lo == start)
            o_part.tiles(None, QUERIES, d)[at, 0, 0] = acc.T
            lse_part.tiles(None, QUERIES)[at, 0] = m + jnp.log2(jnp.where(l > 0, l, 1.0))
            _meet(r, *parts_of(start, n, size), o, o_part, lse_part)
        if mine:
            _append(w, b, head, length, k, v, new_keys, new_values)
        r, start, length = r + 1, start + n, ahead


@jt.function
def _append(w: _Work, b, head, length, k, v, new_keys, new_values):
    """Writes the new token's key and value to its slot."""
    half, slots = w.qkv.shape[2] // 2, jnp.int32(w.keys.shape[1])
    row, at, there = b, length, length < slots
    if w.table is not None:
        block, last = jax.lax.div(length, slots), w.table.shape[1] - 1
        page = w.table[b, jnp.minimum(block, last)]
        row, at, there = jnp.maximum(page, 0), jax.lax.rem(length, slots), (block <= last) & (page >= 0)
    if there:
        for i, x in enumerate(k):
            new_keys[row, at, head, i * half : (i + 1) * half] = x
        new_values[row, at, head, :] = v


@jt.function
def _meet(r, first, last, o, o_part, lse_part):
    """The last to come of the programs that have keys of a row puts together what they gave."""
    _, queries, d = o.shape
    if jt.arrive(jt.counters("rows", o.shape[0]), r, last - first + 1):
        n = jt.next_power_of_2(queries)
        whole = put_together(o_part, lse_part, first, last, 0, n, _SIDE)
        o.tiles(None, n, d)[r, 0, 0] = whole.astype(o.dtype)


def _types(qkv, cos, sin, lengths, keys, values, norms, table, *, heads, parts, **_):
    rows, group, d = qkv.shape[0] * keys.shape[2], heads // keys.shape[2], qkv.shape[2]
    whole = jax.ShapeDtypeStruct((rows, group, d), qkv.dtype)
    return whole, jt.like(keys), jt.like(values), *part_types(group, d, parts)


@jt.kernel(
    out_type=_types,
    grid=lambda *_, parts, **__: parts,
    alias={"keys": "new_keys", "values": "new_values"},
)
def hopper_step(
    qkv, cos, sin, lengths, keys, values, norms, table, o, new_keys, new_values, o_part, lse_part,
    *, heads: int, eps: float, scale: float, units: Units, parts: int, slots: int,
):  # fmt: skip
    """qkv [batch, heads + 2 kv heads, d]; cos, sin float32 [batch, d / 2]; norms: () or the weights [d] of the RMS
    norms of queries and keys; keys, values [batch, slots, kv heads, d], or [pages, slots of a page, kv heads, d] and
    table [batch, pages of a row], else None; lengths int32 [batch], without the new token. o: [batch * kv heads, group,
    d]."""
    # Sᵀ = K Qᵀ     pᵀ_ji = 2^(sᵀ_ji - m_i)     Oᵀ = Vᵀ Pᵀ / l     l_i = sum_j pᵀ_ji
    d, dtype = qkv.shape[2], qkv.dtype
    N = tuple(tuple(jt.alloc((d // 2,), jnp.float32) for _ in range(2)) for _ in norms)
    Q, P = jt.alloc((QUERIES, d), dtype), jt.alloc((QUERIES, UNIT), dtype)
    K, V = (jt.alloc((UNIT, d), dtype, slots=slots) for _ in range(2))
    k_full, k_empty, v_full, v_empty = (jt.barrier(slots) for _ in range(4))
    w = _Work(qkv, cos, sin, lengths, keys, values, norms, table, units, parts, heads, eps, N, Q, P, K, V,
              k_full, k_empty, v_full, v_empty)  # fmt: skip
    with jt.role("attention", warps=4, registers=_REGISTERS, early=True):
        _attend(w, o, new_keys, new_values, o_part, lse_part, scale=scale)
    with jt.role("copies", warps=1, registers=24, early=True):
        _copies(w)


def misfit(qkv, cos, sin, lengths, keys, values, norms, table, *, heads: int, scale: float, **_) -> str | None:
    """Why `step` cannot run this call, None where it can."""
    arrays = (qkv, keys) if table is None else (qkv, keys, table)
    if not all(isinstance(n, int) for x in arrays for n in x.shape):
        return "sizes are not known"
    (rows, _, d), (_, page, kvs, _) = qkv.shape, keys.shape
    most = _most(lengths.shape[0], keys, table)
    return first_unmet(
        (gpu_tiles.overlaps(), "kernels do not overlap"),
        (gpu_tiles.on_one_device(), "rows may be shared out among several devices"),
        (rows == lengths.shape[0], "rows have several new tokens"),
        (most > 0, "there are no rows, or no slots"),
        (qkv.dtype in (jnp.bfloat16, jnp.float16), f"the projection is {qkv.dtype.name}, not 16-bit floats"),
        (qkv.dtype == keys.dtype == values.dtype, f"the cache is {keys.dtype.name}, the projection {qkv.dtype.name}"),
        (scale > 0, f"the scale is {scale}"),
        (d in (64, 128), f"heads have {d} features, not 64 or 128"),
        (heads // kvs <= QUERIES, f"{heads // kvs} queries share a head of keys, more than {QUERIES}"),
        (table is None or page % UNIT == 0, f"pages have {page} slots, not a multiple of {UNIT}"),
        (most <= _MOST, f"a program has up to {most} units of keys, more than {_MOST}"),
    )


def _most(rows: int, keys, table) -> int:
    """The most units of keys that a program has."""
    slots = keys.shape[1] * (1 if table is None else table.shape[1])
    return jt.cdiv(rows * keys.shape[2] * jt.cdiv(slots, UNIT), gpu_tiles.processors())


def step(qkv, cos, sin, lengths, keys, values, norms, table, *, heads: int, eps: float, scale: float):
    """The result of `step_attention`; `norms`: two weights or ()."""
    slots = keys.shape[1] * (1 if table is None else table.shape[1])
    o, keys, values, _, _ = hopper_step(
        qkv, cos, sin, lengths, keys, values, norms, table, heads=heads, eps=eps, scale=scale,
        units=Units(slots=slots, size=UNIT, heads=keys.shape[2]), parts=gpu_tiles.processors(),
        slots=min(_most(lengths.shape[0], keys, table), 2),
    )  # fmt: skip
    return o.reshape(lengths.shape[0], heads, -1), keys, values
