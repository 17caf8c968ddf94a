"""Attention of one new token over few keys with heads of 128 numbers, in parts that only the product behind it puts
together, on Hopper at the block level.

As in `hopper_parts`, but between products that come from memory for some microseconds (`hopper_gemv`): each part has
its scores in one batch, takes the new token in registers, and leaves room beside it for a block of either product.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles, hopper_gemv, hopper_held
from jtile.ops.attention_windows import LOG2_E
from jtile.ops.dispatch import first_unmet
from jtile.ops.hopper_parts import _copies, _turned, _types
from jtile.ops.hopper_step import QUERIES, UNIT, _zero_behind
from jtile.ops.online_softmax import NOTHING
from jtile.ops.operands import Weight

UNITS, MOST = 2, 8  # units of a part, of 64 KiB of keys and values; parts, which each program behind reads
_REGISTERS = 104  # of a thread: they leave enough for a product beside it


@dataclasses.dataclass(frozen=True)
class _Work:
    """What the roles of a program know.

    Attributes:
      head, part: which kv head, and which part of its keys.
      Q, P: queries, and weights of units of keys; own: the scores of the new key; K, V: units of keys and values.
      full: a unit of keys, or of values, has come.
    """

    head: jax.Array
    part: jax.Array
    Q: jt.Shared
    P: jt.Shared
    own: jt.Shared
    K: list
    V: list
    full: jt.Barrier

    @property
    def units(self) -> int:
        """The units of a part."""
        return len(self.K)


@jt.function
def _attend(w: _Work, qkv, cos, sin, lengths, new_keys, new_values, o, lse, heads: int, scale: float):
    """The role that does everything but the copies."""
    # Sᵀ = K Qᵀ     pᵀ_ji = 2^(sᵀ_ji - m_i)     Oᵀ = Vᵀ Pᵀ / l     l_i = sum_j pᵀ_ji     u: a unit of keys
    _, slots, kvs, d = new_keys.shape
    half, dtype, group = d // 2, qkv.dtype, heads // kvs
    c, n = cos[0, :], sin[0, :]
    units = len(w.K)
    length, first = jnp.clip(lengths[0], 0, slots), w.part * (units * UNIT)
    # the part that has read the unit in which the new key stands
    mine = (w.part == jax.lax.div(length, jnp.int32(units * UNIT))) & (lengths[0] >= 0) & (lengths[0] < slots)
    for u in range(units):
        w.full[u].wait(0)
        w.full[units + u].wait(0)
        _zero_behind(w.V[u], first + u * UNIT, length)
    jt.wait_for_kernels()
    there = lambda count: jnp.broadcast_to(jt.arange(QUERIES)[:, None] < count, (QUERIES, half))
    row, column = jnp.broadcast_to(heads + w.head, (QUERIES, half)), jnp.broadcast_to(jt.arange(half), (QUERIES, half))
    q = [jt.load(qkv, (0, jt.ds(w.head * group, QUERIES), jt.ds(i * half, half)), mask=there(group)) for i in range(2)]
    k = [jt.load(qkv, (0, row, column + i * half)) for i in range(2)]  # in each row, so that it stays with the thread
    v = qkv[0, heads + kvs + w.head, :]
    q, k = _turned(q, c, n), _turned(k, c, n)
    for i, x in enumerate(q):
        w.Q[:, i * half : (i + 1) * half].store(x)
    w.own.store(sum(x.astype(jnp.float32) * y.astype(jnp.float32) for x, y in zip(q, k)).sum(1))
    jt.fence_shared()
    jt.role_barrier()
    scores = [jt.dot_async(keys, w.Q.T) for keys in w.K]
    own = jnp.where(mine, w.own.load() * (scale * LOG2_E), NOTHING)
    scores = jt.dot_wait(*scores, pending=0)
    place = jnp.broadcast_to(jt.arange(UNIT)[:, None], (UNIT, QUERIES))
    inside = [place < length - (first + u * UNIT) for u in range(units)]
    scores = [jnp.where(of, x, NOTHING) for x, of in zip(scores, inside)]
    top = jnp.maximum(functools.reduce(jnp.maximum, scores).max(0) * (scale * LOG2_E), own)
    weights = [jnp.where(of, jnp.exp2(x * (scale * LOG2_E) - top[None]), 0.0) for x, of in zip(scores, inside)]
    for u, x in enumerate(weights):
        w.P[u].store(x.astype(dtype).T)
    jt.fence_shared()
    jt.role_barrier()
    of_own = jnp.where(mine, jnp.exp2(own - top), 0.0)
    acc = jnp.broadcast_to(v.astype(jnp.float32)[:, None], (d, QUERIES)) * of_own[None]
    for u, values in enumerate(w.V):
        acc = jt.dot_async(values.T, w.P[u].T, acc)
    total = functools.reduce(jnp.add, weights).sum(0) + of_own
    lse.tiles(None, None, QUERIES)[w.part, w.head, 0] = top + jnp.log2(jnp.where(total > 0, total, 1.0))
    acc = jt.dot_wait(acc, pending=0) * jnp.where(total > 0, 1.0 / total, 0.0)[None]
    o.tiles(None, None, QUERIES, d)[w.part, w.head, 0, 0] = acc.T.astype(o.dtype)
    one = there(mine.astype(jnp.int32))
    for i, x in enumerate(k):
        jt.store(new_keys, (0, jt.ds(length, QUERIES), w.head, jt.ds(i * half, half)), x, mask=one)
    if mine:
        new_values[0, length, w.head, :] = v


@jt.kernel(
    out_type=_types,
    grid=lambda qkv, cos, sin, lengths, keys, *_, parts, **__: (keys.shape[2], parts),
    alias={"keys": "new_keys", "values": "new_values"},
)
def hopper_spread(
    qkv, cos, sin, lengths, keys, values, o, lse, new_keys, new_values, *, heads: int, scale: float, parts: int
):
    """qkv [1, heads + 2 kv heads, d]; cos, sin float32 [1, d / 2]; keys, values [1, slots, kv heads, d]; lengths int32
    [1], without the new token. o [parts, kv heads, group, d]: the output of each part of the keys; lse float32 [parts,
    kv heads, group]: the logarithms, to the base 2, of its sums of weights."""
    d, dtype = qkv.shape[2], qkv.dtype
    K, V = (jt.alloc((UNIT, d), dtype, slots=UNITS) for _ in range(2))
    w = _Work(
        head=jt.program_id(0), part=jt.program_id(1), Q=jt.alloc((QUERIES, d), dtype),
        P=jt.alloc((QUERIES, UNIT), dtype, slots=UNITS), own=jt.alloc((QUERIES,), jnp.float32),
        K=[K[u] for u in range(UNITS)], V=[V[u] for u in range(UNITS)], full=jt.barrier(2 * UNITS),
    )  # fmt: skip
    with jt.role("attention", warps=4, registers=_REGISTERS, early=True):
        _attend(w, qkv, cos, sin, lengths, new_keys, new_values, o, lse, heads, scale)
    with jt.role("copies", warps=1, registers=24, early=True):
        _copies(w, keys, values)


def choice(qkv, lengths, keys, weight: Weight, kind: str, heads: int, scale: float) -> dict | None:
    """How the two kernels compute a step's attention and the product behind it; None where they do not."""
    if misfit(qkv, lengths, keys, heads, scale) is not None:
        return None
    x = jax.ShapeDtypeStruct((1, heads * keys.shape[3]), qkv.dtype)
    if hopper_gemv.misfit(x, weight, kind) is not None or hopper_held.choice(x, (weight,), kind) is not None:
        return None
    return {"parts": jt.cdiv(jt.cdiv(keys.shape[1], UNIT), UNITS)}


def misfit(qkv, lengths, keys, heads: int, scale: float) -> str | None:
    """Why `hopper_spread` does not run this call, None where it does."""
    if not all(isinstance(n, int) for x in (qkv, keys) for n in x.shape):
        return "sizes are not known"
    (rows, _, d), (batch, slots, kvs, _) = qkv.shape, keys.shape
    return first_unmet(
        (gpu_tiles.overlaps(), "kernels do not overlap"),
        (gpu_tiles.on_one_device(), "rows may be shared out among several devices"),
        (rows == batch == lengths.shape[0] == 1, f"there are {rows} rows, not one"),
        (qkv.dtype == keys.dtype and qkv.dtype == jnp.bfloat16, "not bfloat16 alike"),
        (scale > 0, f"the scale is {scale}"),
        (d == 128 and heads // kvs <= QUERIES, f"heads of {d} features, {heads // kvs} to a head of keys"),
        (0 < slots <= UNIT * UNITS * MOST, f"there are {slots} slots"),
    )


def step(qkv, cos, sin, lengths, keys, values, weight: Weight, residual=None, *, heads: int, scale: float, kind: str,
         parts: int):  # fmt: skip
    """(the product [1, out] of the attention of a new token, to which a residual is added, keys, values)."""
    o, lse, keys, values = hopper_spread(
        qkv, cos, sin, lengths.astype(jnp.int32), keys, values, heads=heads, scale=scale, parts=parts
    )
    o, lse = o.reshape(parts, -1), lse.reshape(parts, heads)
    y = hopper_gemv.joined_product(o, lse, weight, residual, kind=kind, out_dtype=qkv.dtype)
    return y, keys, values
