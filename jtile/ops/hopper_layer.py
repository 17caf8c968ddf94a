"""One layer of a decoder for one new token of one row, in one kernel, on Hopper at the block level.

Where a layer is so small that its matrices are read in a microsecond or two, a step waits for latencies: those of
kernels that begin and end, and of attention whose parts meet. Here programs hand over numbers by `jt.post` and
`jt.receive`, which takes half of what a kernel's end and start take. Each program has some rows of all five matrices,
which it loads before the numbers are there that they are multiplied with: the first while the layer in front still
runs. A few programs have the keys and values of a head, too, and pass attention on in parts; whoever multiplies with
the output matrix puts the parts together, and begins with their sums, which come before the parts do.

How rows of a matrix are held and multiplied is said in `hopper_held`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.attention_windows import LOG2_E
from jtile.ops.dispatch import first_unmet
from jtile.ops.epilogues import ACTIVATIONS
from jtile.ops.flash_attention import NOTHING
from jtile.ops.hopper_held import WARPS, _load, _made, _numbers
from jtile.ops.hopper_step import QUERIES, UNIT, _zero_behind
from jtile.ops.operands import Norm, Weight
from jtile.ops.streamed_numbers import EIGHT, LANES, bits_of, field_planes, float_sums
from jtile.ops.streamed_operands import PIECE, Rows, by_block, of_piece

ROWS, FEW = 8, 4  # rows of a matrix that a program takes at a time; those of two matrices
KEY, VALUE, HEADS = QUERIES, 2 * QUERIES, 4 * QUERIES  # what a kv head's part of the projection has, behind queries
_REGISTERS = 232


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a layer: `heads` queries and `kvs` keys of `d` numbers; attention in `parts` of `units` units; and
    the number of programs."""

    heads: int
    kvs: int
    d: int
    parts: int
    units: int
    programs: int

    @property
    def group(self) -> int:
        return self.heads // self.kvs

    def lines(self, mem: _Memory) -> int:
        """The lines of a head's output."""
        return self.d // (mem.mixed.shape[2] * EIGHT)


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Shared memory of a program, and what programs hand over.

    Attributes:
      B: a kv head's part of the projection; Q, P: queries, and weights of keys; K, V: units of keys and values; new_k,
        new_v: of the new token, in the first row.
      full: a unit of keys, or of values, has come.
      heads, sums, mixed, delta, hidden: the projection by kv head; the logarithms of sums, and the output, of parts of
        attention; the output of attention, and the gated product.
    """

    B: jt.Shared
    Q: jt.Shared
    P: jt.Shared
    K: jt.Shared
    V: jt.Shared
    new_k: jt.Shared
    new_v: jt.Shared
    full: jt.Barrier
    heads: jt.Ref
    sums: jt.Ref
    mixed: jt.Ref
    delta: jt.Ref
    hidden: jt.Ref


def _line(box, row, count: int):
    """Where rows from `row` on, `count` of them, stand in a box [in / n, n / 8, 8]."""
    n = jnp.int32(box.shape[-2] * EIGHT)
    rem = jax.lax.rem(row, n)
    last = jt.ds(jax.lax.rem(row, jnp.int32(EIGHT)), count) if count < EIGHT else slice(None)
    return jax.lax.div(row, n), jax.lax.div(rem, jnp.int32(EIGHT)), last


def _eights(tile, pieces: int) -> list[list]:
    """What was received, [rows, n / 8, 8], as the pieces of a row, each in four tiles [lanes, `EIGHT`]."""
    groups, eights, out = PIECE // (tile.shape[1] * EIGHT) // LANES, tile.shape[1], []
    for at in range(pieces):
        places = [(at * groups + group, k) for group in range(groups) for k in range(eights)]
        cut = lambda g, k: jax.lax.slice(tile, (g * LANES, k, 0), ((g + 1) * LANES, k + 1, EIGHT))
        out.append([cut(g, k).reshape(LANES, EIGHT).astype(jnp.float32) for g, k in places])
    return out


def _lines(inner: int, kind: str) -> int:
    """The lines of a box that are received, of a row of `inner` numbers."""
    return jt.next_power_of_2(jt.cdiv(inner, PIECE)) * PIECE * bits_of(kind) // 128


def _received(box, inner: int, kind: str) -> list[list]:
    tile = jt.receive(box, (jt.ds(0, _lines(inner, kind)), slice(None), slice(None)))
    return _eights(tile, jt.cdiv(inner, PIECE))


def _sums(numbers, parts, kind: str):
    """The products of the rows of `numbers` with a row of x in parts."""
    planes = [field_planes(of, kind) for of in parts]
    return functools.reduce(jnp.add, [float_sums(w, p) for w, p in zip(numbers, planes)]).sum(1)


def _squares(parts):
    """For each lane the sum of the squares of a row."""
    return functools.reduce(jnp.add, [part * part for of in parts for part in of]).sum(1)


NO_NORM = [None] * 4


@jt.function
def _project(mem: _Memory, s: Sizes, x: Rows, held, tile, kind: str):
    """Rows of queries, keys and values, to their heads."""
    parts = [x.parts(0, at, True) for at in range(x.pieces)]
    out = _sums(held, parts, kind) * x.scale([_squares(parts)])
    row, d = tile * ROWS, jnp.int32(s.d)
    head = jax.lax.div(row, d)
    group = jnp.int32(s.group)
    kv = jnp.where(head < s.heads, jax.lax.div(head, group), jax.lax.rem(head - s.heads, jnp.int32(s.kvs)))
    new = jnp.where(head < s.heads + s.kvs, KEY, VALUE)
    slot = jnp.where(head < s.heads, jax.lax.rem(head, group), new)
    at, half = jax.lax.rem(row, d), jnp.int32(s.d // 2)
    line = jax.lax.div(at, half) * HEADS + slot
    jt.post(mem.heads, (kv, line, jt.ds(jax.lax.rem(at, half), ROWS)), out.astype(mem.heads.dtype))


@jt.function
def _attend(mem: _Memory, s: Sizes, cos, sin, lengths, new_keys, new_values, head, part, scale: float):
    """Attention of the queries of a kv head to a part of its keys; where it stands among them, with the new one."""
    # Sᵀ = K Qᵀ     pᵀ_ji = 2^(sᵀ_ji - m_i)     Oᵀ = Vᵀ Pᵀ / l     l_i = sum_j pᵀ_ji     u: a unit of keys
    half, dtype, group = s.d // 2, mem.B.dtype, s.group
    length, first = jnp.minimum(lengths[0], new_keys.shape[1]), part * (s.units * UNIT)
    # the part that has read the unit in which the new key stands
    mine = (part == jax.lax.div(length, jnp.int32(s.units * UNIT))) & (lengths[0] < new_keys.shape[1])
    for u in range(s.units):
        mem.full[u].wait(0)
        mem.full[s.units + u].wait(0)
        _zero_behind(mem.V[u], first + u * UNIT, length)
    for buffer in (mem.new_k, mem.new_v):
        buffer.store(jnp.zeros((UNIT, s.d), dtype))
    c, n = cos[0, :], sin[0, :]
    slot = jt.arange(2 * HEADS)[:, None] % HEADS
    there = jnp.broadcast_to((slot < group) | (slot == KEY) | (slot == VALUE), (2 * HEADS, half))
    mem.B.store(jt.receive(mem.heads, (head, jt.ds(0, 2 * HEADS), slice(None)), there))
    jt.role_barrier()
    half_of = lambda first: mem.B[first : first + QUERIES, :].load()
    load = lambda slot: [half_of(slot), half_of(HEADS + slot)]
    keep = lambda buffer, x: buffer.store(jnp.concatenate(x, axis=1))
    keep(mem.Q, _turned(load(0), c, n))
    k, v = _turned(load(KEY), c, n), load(VALUE)  # of both the first row, behind which there are zeros
    keep(mem.new_k[0:QUERIES, :], k)
    keep(mem.new_v[0:QUERIES, :], v)
    jt.fence_shared()
    jt.role_barrier()
    scores = [jt.dot_async(keys, mem.Q.T) for keys in (*(mem.K[u] for u in range(s.units)), mem.new_k)]
    scores = [jt.dot_wait(x, pending=0) for x in scores]
    row = jnp.broadcast_to(jt.arange(UNIT)[:, None], (UNIT, QUERIES))
    inside = [row < length - (first + u * UNIT) for u in range(s.units)] + [row < mine.astype(jnp.int32)]
    scores = [jnp.where(there, x * (scale * LOG2_E), NOTHING) for x, there in zip(scores, inside)]
    top = functools.reduce(jnp.maximum, scores).max(0)
    weights = [jnp.where(there, jnp.exp2(x - top[None]), 0.0) for x, there in zip(scores, inside)]
    for u, x in enumerate(weights):
        mem.P[u].store(x.astype(dtype).T)
    jt.fence_shared()
    jt.role_barrier()
    acc = None
    for u, values in enumerate((*(mem.V[u] for u in range(s.units)), mem.new_v)):
        acc = jt.dot_async(values.T, mem.P[u].T, acc)
    total = functools.reduce(jnp.add, weights).sum(0)
    _post_sums(mem, s, top + jnp.log2(jnp.where(total > 0, total, 1.0)), head, part)
    acc = jt.dot_wait(acc, pending=0) * jnp.where(total > 0, 1.0 / total, 0.0)[None]
    lines, eights = s.lines(mem), mem.mixed.shape[2]
    out = acc.T.astype(dtype).reshape(QUERIES * lines, eights, EIGHT)
    own = jnp.broadcast_to(jt.arange(QUERIES * lines)[:, None, None] < group * lines, out.shape)
    jt.post(mem.mixed, (part, jt.ds(head * (group * lines), QUERIES * lines), slice(None), slice(None)), out, own)
    one = jnp.broadcast_to(jt.arange(QUERIES)[:, None] < mine.astype(jnp.int32), (QUERIES, half))
    for i in range(2):
        at = 0, jt.ds(length, QUERIES), head, jt.ds(i * half, half)
        jt.store(new_keys, at, k[i], mask=one)
        jt.store(new_values, at, v[i], mask=one)


def _turned(halves: list, cos, sin) -> list:
    """Rows of queries or keys, in halves, turned."""
    (low, high), c, n = (x.astype(jnp.float32) for x in halves), cos[None], sin[None]
    return [x.astype(halves[0].dtype) for x in (low * c - high * n, high * c + low * n)]


def _post_sums(mem: _Memory, s: Sizes, sums, head, part):
    """The logarithms of the sums of a kv head's queries, four times for each line of their output."""
    lines, group = s.lines(mem), s.group
    count = QUERIES * lines
    tile = jnp.broadcast_to(sums[:, None, None], (QUERIES, lines, 4)).reshape(count, 4)
    own = jnp.broadcast_to(jt.arange(count)[:, None] < group * lines, (count, 4))
    jt.post(mem.sums, (part, jt.ds(head * (group * lines), count), slice(None)), tile, own)


@jt.function
def _joined(mem: _Memory, s: Sizes, kind: str):
    """The output of attention, put together of its parts: the pieces of a row."""
    # o = sum_p 2^(lse_p - M) o_p / sum_p 2^(lse_p - M)     M = max_p lse_p
    rows, lines = s.heads * s.d, _lines(s.heads * s.d, kind)
    of = lambda t, p: jax.lax.slice_in_dim(t, p, p + 1, axis=0).reshape(t.shape[1:])
    sums = jt.receive(mem.sums, (jt.ds(0, s.parts), jt.ds(0, lines), slice(None)))
    lse = [of(sums, p) for p in range(s.parts)]
    top = functools.reduce(jnp.maximum, lse)
    shares = [jnp.exp2(x - top) for x in lse]
    unit = 1.0 / functools.reduce(jnp.add, shares)
    shares = [(x * unit)[:, None, :] for x in shares]  # the same four times a line
    tile = jt.receive(mem.mixed, (jt.ds(0, s.parts), jt.ds(0, lines), slice(None), slice(None)))
    fours = [of(tile, p).astype(jnp.float32).reshape(lines, -1, 4) * share for p, share in enumerate(shares)]
    return _eights(functools.reduce(jnp.add, fours).reshape(lines, -1, EIGHT), jt.cdiv(rows, PIECE))


def _stored(weight: Weight, tile, rows: int, inner: int, kind: str):
    return _load(weight, tile, rows, kind, inner, jt.cdiv(inner, PIECE))


@jt.function
def _behind_attention(mem: _Memory, s: Sizes, held, tile, kind: str):
    """Rows of the product with the output matrix."""
    row = tile * ROWS
    out = _sums(held, _joined(mem, s, kind), kind)
    jt.post(mem.delta, _line(mem.delta, row, ROWS), out.astype(mem.delta.dtype))


@jt.function
def _gated(mem: _Memory, x: Rows, before, stored, norm, total, tiles, first, kind: str, activation: str):
    """Rows of the gated product behind the norm of x + delta, with weights as they are stored."""
    inner = x.x.shape[1] * x.x.shape[2]
    parts = [[a + b for a, b in zip(*of)] for of in zip(before, _received(mem.delta, inner, kind))]
    for at, of in enumerate(parts):
        if jt.program_id(0) == at:
            for place, part in zip(x.eights(at), of):
                total.tiles(None, LANES, EIGHT)[0, *place] = part.astype(total.dtype)
    unit = x.scale([_squares(parts)])
    parts = [[part * w.astype(jnp.float32) for part, w in zip(*of)] for of in zip(parts, norm)]
    for k, of_tile in enumerate(stored):
        gate, up = (_sums(one, parts, kind) * unit for one in _numbers(of_tile, [NO_NORM for _ in parts], kind))
        out = ACTIVATIONS[activation](gate) * up
        if first + k < tiles:
            jt.post(mem.hidden, _line(mem.hidden, (first + k) * FEW, FEW), out.astype(mem.hidden.dtype))


@jt.function
def _rows_role(mem: _Memory, s: Sizes, x: Rows, second, weights, attention, outs, *, kind: str, activation: str,
               scale: float):  # fmt: skip
    qkv, o, gate, up, down = weights
    cos, sin, lengths = attention
    total, y, new_keys, new_values = outs
    p, programs = jt.program_id(0), jt.num_programs(0)
    inner, mixed, features = x.x.shape[1] * x.x.shape[2], s.heads * s.d, gate.codes.shape[0]
    pieces = lambda of: range(jt.cdiv(of, PIECE))
    many = qkv.codes.shape[0] // ROWS
    few = jt.cdiv(features // FEW, s.programs)
    stored = _stored(qkv, p, ROWS, inner, kind)
    norm = [x.weights(at, True) for at in pieces(inner)]
    behind = _stored(o, p, ROWS, mixed, kind)
    (held,) = _made([stored], norm, ROWS, kind)
    jt.wait_for_kernels()
    if p < many:
        _project(mem, s, x, held, p, kind)
    gated = [[_stored(w, p * few + k, FEW, inner, kind) for w in (gate, up)] for k in range(few)]
    norm = [second.weights(at, True) for at in pieces(inner)]
    at = p - (programs - s.kvs * s.parts)
    if at >= 0:
        head, part = jax.lax.div(at, jnp.int32(s.parts)), jax.lax.rem(at, jnp.int32(s.parts))
        _attend(mem, s, cos, sin, lengths, new_keys, new_values, head, part, scale)
    (held,) = _made([behind], [NO_NORM for _ in pieces(mixed)], ROWS, kind)
    if p < inner // ROWS:
        _behind_attention(mem, s, held, p, kind)
    last = _stored(down, p, ROWS, features, kind)
    before = [[part.astype(total.dtype).astype(jnp.float32) for part in x.parts(0, at, True)] for at in pieces(inner)]
    _gated(mem, x, before, gated, norm, total, features // FEW, p * few, kind, activation)
    (held,) = _made([last], [NO_NORM for _ in pieces(features)], ROWS, kind)
    if p < inner // ROWS:
        out = _sums(held, _received(mem.hidden, features, kind), kind)
        y.tiles(None, ROWS)[0, p] = out.astype(y.dtype)


@jt.function
def _copies(mem: _Memory, s: Sizes, keys, values):
    """Brings the keys and values of a part of attention, which no kernel in front makes."""
    at = jt.program_id(0) - (jt.num_programs(0) - s.kvs * s.parts)
    if at >= 0:
        head, part = jax.lax.div(at, jnp.int32(s.parts)), jax.lax.rem(at, jnp.int32(s.parts))
        for k, (x, ring) in enumerate(((keys, mem.K), (values, mem.V))):
            for u in range(s.units):
                mem.full[k * s.units + u].expect(ring.nbytes)
                unit = x.tiles(None, UNIT, None, s.d).at[0, part * s.units + u, head, 0]
                jt.async_copy(unit, ring[u], mem.full[k * s.units + u])


def _types(x, delta, norms, weights, cos, sin, lengths, keys, values, **_):
    return jt.like(x), jax.ShapeDtypeStruct((1, x.shape[1] * x.shape[2]), x.dtype), jt.like(keys), jt.like(values)


def _boxes(x, delta, norms, weights, *_, sizes: Sizes, **__):
    (lines, n), s, dtype = x.shape[1:], sizes, x.dtype
    eights, mixed, features = n // EIGHT, s.heads * s.d, weights[2].codes.shape[0]
    return [
        jt.symmetric((s.kvs, 2 * HEADS, s.d // 2), dtype),
        jt.symmetric((s.parts, mixed // n, 4), jnp.float32),
        jt.symmetric((s.parts, mixed // n, eights, EIGHT), dtype),
        jt.symmetric((lines, eights, EIGHT), dtype),
        jt.symmetric((features // n, eights, EIGHT), dtype),
    ]


@jt.kernel(
    out_type=_types,
    grid=lambda *_, sizes, **__: sizes.programs,
    scratch=_boxes,
    alias={"keys": "new_keys", "values": "new_values"},
)
def hopper_layer(
    x, delta, norms, weights, cos, sin, lengths, keys, values, total, y, new_keys, new_values,
    heads, sums, mixed, delta_box, hidden,
    *, kind: str, activation: str, eps: float, scale: float, sizes: Sizes,
):  # fmt: skip
    """x, delta [1, in / n, n], n weights to a lane, whose sum the layer takes; norms: two weights [in / n, n]; weights:
    of the projection, the output, gate, up and down; cos, sin float32 [1, d / 2]; lengths int32 [1], without the new
    token; keys, values [1, slots, kvs, d]. total, y [1, in]: two arrays whose sum the layer gives."""
    s, dtype = sizes, x.dtype
    mem = _Memory(
        B=jt.alloc((2 * HEADS, s.d // 2), dtype), Q=jt.alloc((QUERIES, s.d), dtype),
        P=jt.alloc((QUERIES, UNIT), dtype, slots=s.units + 1),
        K=jt.alloc((UNIT, s.d), dtype, slots=s.units), V=jt.alloc((UNIT, s.d), dtype, slots=s.units),
        new_k=jt.alloc((UNIT, s.d), dtype), new_v=jt.alloc((UNIT, s.d), dtype),
        full=jt.barrier(2 * s.units), heads=heads, sums=sums, mixed=mixed, delta=delta_box, hidden=hidden,
    )  # fmt: skip
    first, second = Rows(x, Norm(norms[0], delta), eps), Rows(x, Norm(norms[1], delta), eps)
    with jt.role("rows", warps=WARPS, registers=_REGISTERS, early=True):
        _rows_role(mem, s, first, second, weights, (cos, sin, lengths), (total, y, new_keys, new_values), kind=kind,
                   activation=activation, scale=scale)  # fmt: skip
    with jt.role("copies", warps=1, registers=24, early=True):
        _copies(mem, s, keys, values)
        jt.wait_for_kernels()


PARTS, MOST_UNITS = 2, 6  # of the keys of a head, and units of a part, at most
_WEIGHTS = 256  # of a thread in two matrices together


def misfit(x, delta, norms, kind: str, weights, lengths, keys, scale: float) -> str | None:
    """Why the kernel does not compute a layer, None where it does."""
    (rows, inner), (_, slots, kvs, d) = x.shape, keys.shape
    qkv, o, gate, *_ = weights
    heads, features, programs = o_columns(o, kind) // d, gate.codes.shape[0], gpu_tiles.processors()
    wide = lambda w: all(of_piece(a, o_columns(w, kind), kind) for a in by_block(w, kind))
    few = jt.cdiv(features // FEW, programs)
    return first_unmet(
        (gpu_tiles.overlaps(), "kernels do not overlap"),
        (gpu_tiles.on_one_device(), "rows may be shared out among several devices"),
        (rows == 1 and lengths.shape == (1,), f"there are {rows} rows, not one"),
        (x.dtype == keys.dtype == jnp.bfloat16, f"rows are {x.dtype.name}, the cache {keys.dtype.name}: not bfloat16"),
        (bits_of(kind) in (4, 16) and all(map(wide, weights)), f"weights of {kind}"),
        (d in (64, 128) and heads % kvs == 0 and heads // kvs <= QUERIES, "heads of other sizes"),
        (inner % ROWS == 0 and features % FEW == 0 and qkv.codes.shape[0] == (heads + 2 * kvs) * d, "odd sizes"),
        (max(inner, qkv.codes.shape[0]) <= ROWS * programs, "rows of matrices are many"),
        (2 * FEW * few * jt.cdiv(inner, PIECE) * PIECE <= _WEIGHTS * 32 * WARPS, "the gated product is large"),
        (ROWS * jt.cdiv(features, PIECE) * PIECE <= _WEIGHTS * 16 * WARPS, "the last product is large"),
        (jt.cdiv(slots, UNIT) <= PARTS * MOST_UNITS, f"there are {slots} slots of keys"),
        (kvs * PARTS <= programs and scale > 0, "heads are many"),
    )


def o_columns(w: Weight, kind: str) -> int:
    return w.codes.shape[1] * (32 // bits_of(kind) if bits_of(kind) < 16 else 1)


def layer(x, delta, norms, kind: str, weights, cos, sin, lengths, keys, values, *, eps: float, scale: float,
          activation: str):  # fmt: skip
    """x + delta [1, in] behind a layer: two arrays whose sum it is, and the keys and values with the new token."""
    n, (_, inner), d = 128 // bits_of(kind), x.shape, keys.shape[3]
    lines = lambda a: a.reshape(*a.shape[:-1], inner // n, n)
    units = jt.cdiv(jt.cdiv(keys.shape[1], UNIT), PARTS)
    sizes = Sizes(o_columns(weights[1], kind) // d, keys.shape[2], d, PARTS, units, gpu_tiles.processors())
    total, y, keys, values = hopper_layer(
        lines(x), lines(delta), tuple(map(lines, norms)), weights, cos, sin, lengths, keys, values, kind=kind,
        activation=activation, eps=eps, scale=scale, sizes=sizes,
    )  # fmt: skip
    return total.reshape(1, inner), y, keys, values
