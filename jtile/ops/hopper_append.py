"""Attention of one new token a row over many keys, on Hopper at the block level, with what stands in front of it.

It is `hopper_decode`, whose consumer takes queries, key and value of the new token from the projection: it turns them,
adds what the token gives itself to the sums of the row's last keys, and writes key and value to the cache. So steps
have one kernel where they had two.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.attention_windows import LOG2_E
from jtile.ops.dispatch import first_unmet
from jtile.ops.hopper_decode import RING, ROWS, Work, copies, meet, sums_of_row, units_of
from jtile.ops.hopper_shares import Units, by_the_last, part_types, parts_of, place_of_part, row_of
from jtile.ops.hopper_step import QUERIES, append, turned, unfit


@dataclasses.dataclass(frozen=True)
class _Work(Work):
    """`Work` whose `lengths` are without the new token, and whose queries come from a projection.

    Attributes:
      qkv, cos, sin, norms, heads, eps: the operands and meta-parameters of `hopper_append`.
    """

    qkv: jt.Ref
    cos: jt.Ref
    sin: jt.Ref
    norms: tuple
    heads: int
    eps: float

    @property
    def keys(self) -> jt.Ref:
        """The cache of keys."""
        return self.k

    def positions(self, rows: int, length):
        """All queries see all tokens before."""
        return jt.full((rows, 1), 0, jnp.int32) + (length - 1)

    def fetch_queries(self, r, b, head, turn):
        """The consumer makes them."""


def _own_scores(w: _Work, k):
    """The scores of all queries for the new token, whose key is in the first row of the halves k."""
    half = w.qkv.shape[2] // 2
    total = jt.zeros((ROWS,), jnp.float32)
    for i, x in enumerate(k):
        query = w.Q[:, i * half : (i + 1) * half].load().astype(jnp.float32)
        total = total + (query * x.astype(jnp.float32).sum(0)[None]).sum(1)
    return total


@jt.function
def _attend(w: _Work, o, new_keys, new_values, o_part, lse_part, *, scale: float):
    """The role that does everything but the copies."""
    d, kvs = w.qkv.shape[2], w.units.heads
    group, norms, half = w.heads // kvs, w.norms or (None, None), w.qkv.shape[2] // 2
    begin, end, r, start, size = w.share()
    c, turn, ahead = jnp.int32(0), jnp.int32(0), w.length(r)
    w.Q.store(jnp.zeros((ROWS, d), w.qkv.dtype))
    while start < end:
        length, ahead = ahead, w.length(r + 1)
        b = row_of(r, w.units)
        head, n = r - b * kvs, w.units.of(length)
        lo, hi = w.inside(begin, end, start, n)
        q = [x.astype(w.qkv.dtype) for x in turned(w, b, head * group, group, norms[0])]
        jt.role_barrier()
        for i, x in enumerate(q):
            w.Q[:QUERIES, i * half : (i + 1) * half].store(x)
        jt.fence_shared()
        jt.role_barrier()
        k = [x.astype(w.qkv.dtype) for x in turned(w, b, w.heads + head, 1, norms[1])]
        own = _own_scores(w, k) * (scale * LOG2_E)  # before the sums, for which registers are needed
        w.q_full.at(turn).arrive()
        acc, m, l, c = sums_of_row(w, 0, c, turn, lo, hi, start, length, scale=scale, softcap=None)
        there = (w.lengths[jnp.minimum(b, w.lengths.shape[0] - 1)] >= 0) & (length < w.units.slots)
        if (hi == start + n) & there:
            v = w.qkv[b, w.heads + kvs + head, :]
            top = jnp.maximum(m, own)
            fade, weight = jnp.exp2(m - top), jnp.exp2(own - top)
            acc = acc * fade[:, None] + weight[:, None] * v.astype(jnp.float32)[None]
            m, l = top, l * fade + weight
            append(w, b, head, length, k, v, new_keys, new_values)
        acc = acc * jnp.where(l > 0, 1.0 / l, 0.0)[:, None]
        if (lo == start) & (hi == start + n):
            o.tiles(None, ROWS, d)[r, 0, 0] = acc.astype(o.dtype)
        else:
            at = place_of_part(jt.program_id(0), lo == start)
            o_part.tiles(None, ROWS, d)[at, 0, 0] = acc
            lse_part.tiles(None, ROWS)[at, 0] = m + jnp.log2(jnp.where(l > 0, l, 1.0))
            meet(w, r, *parts_of(start, n, size), o, o_part, lse_part)
        r, start, turn = r + 1, start + n, turn + 1


def _types(qkv, cos, sin, lengths, keys, values, norms, table, *, heads, parts, **_):
    rows, group, d = qkv.shape[0] * keys.shape[2], heads // keys.shape[2], qkv.shape[2]
    whole = jax.ShapeDtypeStruct((rows, group, d), qkv.dtype)
    return whole, jt.like(keys), jt.like(values), *part_types(group, d, parts)


@jt.kernel(
    out_type=_types,
    grid=lambda *_, parts, **__: parts,
    alias={"keys": "new_keys", "values": "new_values"},
)
def hopper_append(
    qkv, cos, sin, lengths, keys, values, norms, table, o, new_keys, new_values, o_part, lse_part,
    *, heads: int, eps: float, scale: float, units: Units, parts: int,
):  # fmt: skip
    """Operands and results of `hopper_step`."""
    # s_ij = q_i . k_j     p_ij = 2^(s_ij - m_i)     o_i = sum_j p_ij v_j / l_i     l_i = sum_j p_ij
    d, dtype = qkv.shape[2], qkv.dtype
    slots = RING // (units.size * d * dtype.itemsize)
    Q = jt.alloc((ROWS, d), dtype)
    K, V = (jt.alloc((units.size, d), dtype, slots=slots) for _ in range(2))
    q_full, q_empty = jt.barrier(1), jt.barrier(1)
    k_full, k_empty, v_full, v_empty = (jt.barrier(slots) for _ in range(4))
    w = _Work(qkv, keys, values, lengths, table, units, parts, 1, False, Q, K, V, q_full, q_empty, k_full, k_empty,
              v_full, v_empty, qkv, cos, sin, norms, heads, eps)  # fmt: skip
    with jt.role("products", warps=4):
        _attend(w, o, new_keys, new_values, o_part, lse_part, scale=scale)
    with jt.role("copies", warps=1, registers=40):
        copies(w)


def misfit(qkv, cos, sin, lengths, keys, values, norms, table, *, heads: int, scale: float, **_) -> str | None:
    """Why `step` cannot run this call, None where it can."""
    why = unfit(qkv, lengths, keys, values, table, heads, scale)
    if why is not None:
        return why
    rows, group, d = lengths.shape[0] * keys.shape[2], heads // keys.shape[2], qkv.shape[2]
    return first_unmet(
        (rows > 0 and keys.shape[1] > 0, "there are no rows, or no slots"),
        (by_the_last(rows, group, d, gpu_tiles.processors()), "parts of a row are many bytes"),
    )


def step(qkv, cos, sin, lengths, keys, values, norms, table, *, heads: int, eps: float, scale: float):
    """The result of `step_attention`; `norms`: two weights or ()."""
    o, keys, values, _, _ = hopper_append(
        qkv, cos, sin, lengths, keys, values, norms, table, heads=heads, eps=eps, scale=scale,
        units=units_of(keys, table), parts=gpu_tiles.processors(),
    )  # fmt: skip
    return o.reshape(lengths.shape[0], heads, -1), keys, values
