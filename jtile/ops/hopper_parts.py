"""Attention of one new token over few keys in two parts, and the product behind it, which puts the parts together, on
Hopper at the block level.

Where the matrices of a layer are so small that a product takes a microsecond (`hopper_held`), attention in
`hopper_step` takes five: its programs have a unit of keys each, and the last of them to come reads what all have left.
Here a program has all keys of a kv head in a part, up to `MOST` units, whose products are one behind the other with two
barriers in all. It leaves its part to the product behind it, whose programs read all parts in place of a row, so that
no program waits for another.

Keys and values come into shared memory early, all slots of a part, as their number is no matter then. The new token is
a unit of its own, of one row.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles, hopper_held
from jtile.ops.attention_windows import LOG2_E
from jtile.ops.dispatch import first_unmet
from jtile.ops.held_rows import Rows, made
from jtile.ops.hopper_held import WARPS
from jtile.ops.hopper_step import QUERIES, UNIT, _zero_behind
from jtile.ops.online_softmax import NOTHING
from jtile.ops.operands import Weight
from jtile.ops.streamed_numbers import bits_of
from jtile.ops.streamed_operands import shares_of_parts

MOST = 6  # units of a part: 96 KB of keys and values of 64 numbers
PARTS = (1, 2, 4)
_REGISTERS = 128, 200  # of a thread: of attention; of the product


@dataclasses.dataclass(frozen=True)
class _Work:
    """What the roles of a program of attention know.

    Attributes:
      head, part: which kv head, and which part of its keys, of `units` units.
      Q, P: queries, and weights of units of keys; K, V: units of keys and values, the last of the new token.
      full: a unit of keys, or of values, has come.
    """

    head: jax.Array
    part: jax.Array
    units: int
    Q: jt.Shared
    P: jt.Shared
    K: list
    V: list
    full: jt.Barrier


@jt.function
def _copies(w: _Work, keys, values):
    """The role that copies keys and values of tokens before."""
    for k, (x, buffers) in enumerate(((keys, w.K), (values, w.V))):
        for u in range(w.units):
            bar = w.full[k * w.units + u]
            bar.expect(buffers[u].nbytes)
            unit = x.tiles(None, UNIT, None, x.shape[3]).at[0, w.part * w.units + u, w.head, 0]
            jt.async_copy(unit, buffers[u], bar, evict="first")


def _turned(halves: list, cos, sin) -> list:
    """Rows of queries or keys, in halves, turned."""
    (low, high), c, n = (x.astype(jnp.float32) for x in halves), cos[None], sin[None]
    return [x.astype(halves[0].dtype) for x in (low * c - high * n, high * c + low * n)]


@jt.function
def _attend(w: _Work, qkv, cos, sin, lengths, new_keys, new_values, o, lse, heads: int, scale: float):
    """The role that does everything but the copies."""
    # Sᵀ = K Qᵀ     pᵀ_ji = 2^(sᵀ_ji - m_i)     Oᵀ = Vᵀ Pᵀ / l     l_i = sum_j pᵀ_ji     u: a unit of keys
    _, slots, kvs, d = new_keys.shape
    half, dtype, group = d // 2, qkv.dtype, heads // kvs
    for buffer in (w.K[-1], w.V[-1]):
        buffer.store(jnp.zeros((UNIT, d), dtype))
    c, n = cos[0, :], sin[0, :]
    length, first = jnp.clip(lengths[0], 0, slots), w.part * (w.units * UNIT)
    # the part that has read the unit in which the new key stands
    mine = (w.part == jax.lax.div(length, jnp.int32(w.units * UNIT))) & (lengths[0] >= 0) & (lengths[0] < slots)
    for u in range(w.units):
        w.full[u].wait(0)
        w.full[w.units + u].wait(0)
        _zero_behind(w.V[u], first + u * UNIT, length)
    jt.role_barrier()  # the last unit is zero
    jt.wait_for_kernels()
    there = lambda count: jnp.broadcast_to(jt.arange(QUERIES)[:, None] < count, (QUERIES, half))
    load = lambda row, count: [
        jt.load(qkv, (0, jt.ds(row, QUERIES), jt.ds(i * half, half)), mask=there(count)) for i in range(2)
    ]
    q, k, v = load(w.head * group, group), load(heads + w.head, 1), load(heads + kvs + w.head, 1)
    q, k = _turned(q, c, n), _turned(k, c, n)
    for buffer, x in ((w.Q, q), (w.K[-1][0:QUERIES, :], k), (w.V[-1][0:QUERIES, :], v)):
        buffer.store(jnp.concatenate(x, axis=1))
    jt.fence_shared()
    jt.role_barrier()
    scores = [jt.dot_async(keys, w.Q.T) for keys in w.K]
    scores = [jt.dot_wait(x, pending=0) for x in scores]
    row = jnp.broadcast_to(jt.arange(UNIT)[:, None], (UNIT, QUERIES))
    inside = [row < length - (first + u * UNIT) for u in range(w.units)] + [row < mine.astype(jnp.int32)]
    scores = [jnp.where(of, x, NOTHING) for x, of in zip(scores, inside)]
    top = functools.reduce(jnp.maximum, scores).max(0) * (scale * LOG2_E)
    weights = [jnp.where(of, jnp.exp2(x * (scale * LOG2_E) - top[None]), 0.0) for x, of in zip(scores, inside)]
    for u, x in enumerate(weights):
        w.P[u].store(x.astype(dtype).T)
    jt.fence_shared()
    jt.role_barrier()
    acc = None
    for u, values in enumerate(w.V):
        acc = jt.dot_async(values.T, w.P[u].T, acc)
    total = functools.reduce(jnp.add, weights).sum(0)
    lse.tiles(None, None, QUERIES)[w.part, w.head, 0] = top + jnp.log2(jnp.where(total > 0, total, 1.0))
    acc = jt.dot_wait(acc, pending=0) * jnp.where(total > 0, 1.0 / total, 0.0)[None]
    o.tiles(None, None, QUERIES, d)[w.part, w.head, 0, 0] = acc.T.astype(o.dtype)
    one = there(mine.astype(jnp.int32))
    for i in range(2):
        at = 0, jt.ds(length, QUERIES), w.head, jt.ds(i * half, half)
        jt.store(new_keys, at, k[i], mask=one)
        jt.store(new_values, at, v[i], mask=one)


def _types(qkv, cos, sin, lengths, keys, values, *, heads: int, parts: int, **_):
    kvs, d = keys.shape[2:]
    of = lambda dtype, *more: jax.ShapeDtypeStruct((parts, kvs, heads // kvs, *more), dtype)
    return of(qkv.dtype, d), of(jnp.float32), jt.like(keys), jt.like(values)


@jt.kernel(
    out_type=_types,
    grid=lambda qkv, cos, sin, lengths, keys, *_, parts, **__: (keys.shape[2], parts),
    alias={"keys": "new_keys", "values": "new_values"},
)
def hopper_parts(
    qkv, cos, sin, lengths, keys, values, o, lse, new_keys, new_values,
    *, heads: int, scale: float, units: int, parts: int,
):  # fmt: skip
    """qkv [1, heads + 2 kv heads, d]; cos, sin float32 [1, d / 2]; keys, values [1, slots, kv heads, d]; lengths int32
    [1], without the new token. o [parts, kv heads, group, d]: the output of each part of the keys; lse float32 [parts,
    kv heads, group]: the logarithms, to the base 2, of its sums of weights."""
    d, dtype = qkv.shape[2], qkv.dtype
    K, V = (jt.alloc((UNIT, d), dtype, slots=units + 1) for _ in range(2))
    w = _Work(
        head=jt.program_id(0), part=jt.program_id(1), units=units, Q=jt.alloc((QUERIES, d), dtype),
        P=jt.alloc((QUERIES, UNIT), dtype, slots=units + 1), K=[K[u] for u in range(units + 1)],
        V=[V[u] for u in range(units + 1)], full=jt.barrier(2 * units),
    )  # fmt: skip
    with jt.role("attention", warps=4, registers=_REGISTERS[0], early=True):
        _attend(w, qkv, cos, sin, lengths, new_keys, new_values, o, lse, heads, scale)
    with jt.role("copies", warps=1, registers=24, early=True):
        _copies(w, keys, values)


# -- the product behind it --------------------------------------------------------------------------------------------


def _joined(form: Rows, o, lse, d: int) -> list[list]:
    """The output of attention, put together of its parts: the tiles of a row."""
    each, side = range(o.shape[0]), form.side
    head = lambda k: jnp.minimum((k * side + jt.arange(side)) // (d // o.shape[2]), lse.shape[1] - 1)
    sums = [[lse[p, head(places[0][0])] for p in each] for places in form.places]
    tiles = [form.of(o, p) for p in each]
    whole = []
    for of_strip, *of_parts in zip(sums, *tiles):
        shares = [share[:, None] for share in shares_of_parts(of_strip)]
        whole.append([functools.reduce(jnp.add, [x * share for x, share in zip(of, shares)]) for of in zip(*of_parts)])
    return whole


@jt.kernel(
    out_type=lambda o, lse, weight, *_, out_dtype, **__: jax.ShapeDtypeStruct((1, weight.codes.shape[0]), out_dtype),
    grid=lambda o, lse, weight, *_, rows, **__: jt.cdiv(weight.codes.shape[0], rows),
)
def hopper_joined(o, lse, weight: Weight, residual, y, *, kind: str, d: int, rows: int, out_dtype: str):
    """`hopper_held` of the parts o [parts, in / n, n] of attention, n weights to a lane, and their lse float32 [parts,
    heads]; heads of d numbers. residual: [1, out], which is added, or None."""
    tile, form = jt.program_id(0), Rows(kind, o.shape[1] * o.shape[2], rows)
    last = form.packed and weight.scaled_last(kind)
    with jt.role("rows", warps=WARPS, registers=_REGISTERS[1], early=True):
        stored = [form.load(weight, tile)]
        of_rows = [weight.scale.tiles(form.each, 1)[k, 0][:, 0] if last else None for k in form.at(tile)]
        (numbers,) = made(form, stored, None)
        jt.wait_for_kernels()
        planes = form.planes(_joined(form, o, lse, d))
        for k, of, scale in zip(form.at(tile), numbers, of_rows):
            out = form.sums(of, planes)
            out = out if scale is None else out * scale
            out = out if residual is None else out + residual.tiles(None, form.each)[0, k].astype(jnp.float32)
            y.tiles(None, form.each)[0, k] = out.astype(y.dtype)


def choice(qkv, lengths, keys, weight: Weight, kind: str, heads: int, scale: float) -> dict | None:
    """How the two kernels compute a step's attention and the product behind it; None where they do not."""
    if misfit(qkv, lengths, keys, heads, scale) is not None:
        return None
    x = jax.ShapeDtypeStruct((1, heads * keys.shape[3]), qkv.dtype)
    rows = hopper_held.choice(x, (weight,), kind)
    units = jt.cdiv(keys.shape[1], UNIT)
    parts = next(n for n in PARTS if jt.cdiv(units, n) <= MOST and (n > 1 or units <= MOST // 2))
    return None if rows is None else {"rows": rows, "units": jt.cdiv(units, parts), "parts": parts}


def misfit(qkv, lengths, keys, heads: int, scale: float) -> str | None:
    """Why `hopper_parts` does not run this call, None where it does."""
    if not all(isinstance(n, int) for x in (qkv, keys) for n in x.shape):
        return "sizes are not known"
    (rows, _, d), (batch, slots, kvs, _) = qkv.shape, keys.shape
    return first_unmet(
        (gpu_tiles.overlaps(), "kernels do not overlap"),
        (gpu_tiles.on_one_device(), "rows may be shared out among several devices"),
        (rows == batch == lengths.shape[0] == 1, f"there are {rows} rows, not one"),
        (qkv.dtype == keys.dtype and qkv.dtype in (jnp.bfloat16, jnp.float16), "not 16-bit floats alike"),
        (scale > 0, f"the scale is {scale}"),
        (d == 64 and heads // kvs <= QUERIES, f"heads of {d} features, {heads // kvs} to a head of keys"),
        (0 < slots <= UNIT * MOST * PARTS[-1], f"there are {slots} slots"),
    )


def step(qkv, cos, sin, lengths, keys, values, weight: Weight, residual=None, *, heads: int, scale: float, kind: str,
         rows: int, units: int, parts: int):  # fmt: skip
    """(the product [1, out] of the attention of a new token, to which a residual is added, keys, values), by what
    `choice` gives."""
    o, lse, keys, values = hopper_parts(
        qkv, cos, sin, lengths.astype(jnp.int32), keys, values, heads=heads, scale=scale, units=units, parts=parts
    )
    n, d = 128 // bits_of(kind), qkv.shape[2]
    o, lse = o.reshape(parts, heads * d // n, n), lse.reshape(parts, heads)
    y = hopper_joined(o, lse, weight, residual, kind=kind, d=d, rows=rows, out_dtype=qkv.dtype.name)
    return y, keys, values
