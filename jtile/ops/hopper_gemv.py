"""One or two rows of x times a matrix in memory, on Hopper at the block level: yᵀ = W xᵀ, W read once.

Such a product is as fast as W comes from memory. So as many blocks as there are multiprocessors stay, each with a deep
ring of rows of W that tensor maps fill, and four roles of a warp for each quarter of a processor empty it: a lane has
16 bytes of a row, a warp 512, and x lies in registers for all rows. Lanes' sums go through shared memory to a role that
adds them up and writes y.

Codes of quantised weights become float32 without a conversion, as the bits of subnormal numbers: an and-instruction and
a multiply-add for each, and hardly a shift. x is brought to the range of these numbers by powers of two, which are
exact.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.epilogues import ACTIVATIONS
from jtile.ops.quantized_tensor import BLOCK

FOUR_BIT = ("q4_0", "q4_1")
LANES = 32
PIECE = 1024  # weights of a row, of a role, of a round
_SHARED = 227 << 10  # bytes; of those 2 KiB for each row of x are left to barriers and exchanges between warps
_UP, _DOWN = 2.0**126, 2.0**23  # x in [1, 2) times that, times an integer's bits as a float32, is a normal number
_ZERO = {"q4_0": 8.0, "q8_0": 128.0, "int8": 128.0}  # the field of a word that says 0
_KEY = ("x", "refs", "kind", "gated", "has_bias", "activation", "out_dtype")  # what tuning depends on
_SHIFTS = {4: (0, 4, 8, 12, 16, 20, 0, 4), 8: (0, 8, 16, 0)}  # where the fields of a word lie when they are taken


def bits_of(kind: str) -> int:
    """Of a weight in memory; `kind`: that of a quantised weight, or the dtype of a plain one."""
    return 4 if kind in FOUR_BIT else 8 if kind in ("q8_0", "int8") else 16


def _groups(kind: str) -> int:
    """512-byte pieces that hold 1024 weights."""
    return bits_of(kind) // 4


def _real(x) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.float32)


@jt.function
def _exponent(x, i: int, j: int, roles: int, chunks: int):
    """The power of two, as bits, of the largest |x| of row i in role j's part, within those that have an inverse."""
    view = x.tiles(None, PIECE // x.shape[2], x.shape[2])
    top = jnp.zeros((PIECE // x.shape[2], x.shape[2]), jnp.float32)
    for c in jt.range(chunks):
        top = jnp.maximum(top, abs(view[i, c * roles + j, 0].astype(jnp.float32)))
    e = jax.lax.bitcast_convert_type(top.max(), jnp.uint32) & np.uint32(0x7F800000)
    return jnp.minimum(jnp.maximum(e, np.uint32(1 << 23)), np.uint32(253 << 23))


def _planes(x, kind: str):
    """x [lanes * groups, of a lane] as [8, lanes, 4]: for each word of a lane's 16 bytes what its fields are multiplied
    with."""
    bits = bits_of(kind)
    if bits < 16:
        at = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        at = (at >> 3 & 1) + 2 * (at & 1) if bits == 8 else (at >> 3 & 3) + 4 * (at & 1)  # of s, h, t, e: h, s and e
        x = x * _choose(at, [_UP * 2.0**-shift for shift in _SHIFTS[bits]])
    if bits == 4:  # of a block: s, h, t, e, see `QuantizedTensor.packed`
        x = x.reshape(LANES, 2, 2, 4, 2).transpose(4, 1, 2, 0, 3)
    elif bits == 8:
        x = x.reshape(2, LANES, 2, 4, 2).transpose(0, 4, 2, 1, 3)
    else:
        x = x.reshape(4, LANES, 2, 4).transpose(0, 2, 1, 3)
    return x.reshape(8, LANES, 4)


def _choose(at, values: list[float]):
    """values[at], for tiles of numbers from 0 on."""
    if len(set(values)) == 1:
        return jnp.full(at.shape, values[0], jnp.float32)
    half = len(values) // 2
    return jnp.where(at >= half, _choose(at - half, values[half:]), _choose(at, values[:half]))


def _fields(q, kind: str) -> list:
    """What 512 bytes of each of some rows hold, as float32 [rows, lanes, 4], for four words of a lane: 2^-149 times the
    bits of a field where it lies, or 24 bits further down (of 4 bits the last is the two highest together); or the
    weights, four at a time."""
    rows, bits = q.shape[0], bits_of(kind)
    if bits == 16:
        return [t.astype(jnp.float32) for t in _along(q.reshape(rows, LANES, 2, 4), 2)]
    w = q.reshape(rows, LANES, 4)
    top = w >> np.uint32(24)
    fields = [_real(w & np.uint32(((1 << bits) - 1) << k)) for k in range(0, 24, bits)]
    return [*fields, _real(top)] if bits == 8 else [*fields, _real(top & np.uint32(15)), _real(top)]


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """x of one role and round, in registers: for each row of x its planes [lanes, 4]; and its sums [lanes] by group."""

    planes: list
    totals: list


def _numbers(planes, totals, kind: str) -> _Numbers:
    found = [_along(x.load(), 0) for x in planes]
    if bits_of(kind) == 4:  # the last field of a word is the one before, plus 16 times its own
        found = [[*p[:6], p[6] - p[7], p[7]] for p in found]
    return _Numbers(found, [_along(x.load(), 0) for x in totals])


def _along(t, axis: int) -> list:
    """The tile cut along an axis, which goes; halves of halves, as registers are told apart."""
    if t.shape[axis] == 1:
        return [t.reshape(*t.shape[:axis], *t.shape[axis + 1 :])]
    half = t.shape[axis] // 2
    cut = lambda first: jax.lax.slice_in_dim(t, first, first + half, axis=axis)
    return [*_along(cut(0), axis), *_along(cut(half), axis)]


def _sums(qs, scales, x: _Numbers, kind: str):
    """What one round adds to the products of rows of W, the 512 bytes of `qs`, with each row of x: [rows, lanes]."""
    out: list = [None] * len(x.planes)
    for g, q in enumerate(qs):
        fields = _fields(q, kind)
        for i, planes in enumerate(x.planes):
            own = planes[g * len(fields) : (g + 1) * len(fields)]
            t = functools.reduce(jnp.add, [field * plane[None] for field, plane in zip(fields, own)])
            t = functools.reduce(jnp.add, _along(t, 2))
            t = t + (x.totals[i][g] * jnp.float32(-_ZERO[kind]))[None] if kind in _ZERO else t
            t = t * scales[0][g] if scales else t
            t = t + x.totals[i][g][None] * scales[1][g] if kind == "q4_1" else t
            out[i] = t if out[i] is None else out[i] + t
    return out


def _spread(t, rows: int):
    """Scales [rows, blocks] in the lanes that have weights of these blocks."""
    n = LANES // t.shape[1]
    t = t.astype(jnp.float32)
    return t if n == 1 else jnp.broadcast_to(t[:, :, None], (rows, t.shape[1], n)).reshape(rows, LANES)


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Buffers and barriers of a program. By role, `words` and `scales`: of each weight rings of 512 bytes of some rows,
    and of what belongs to them; `planes` and `totals`: of each row of x what `_planes` says, a slot for each round of a
    row; `sums`: by weight and row of x."""

    words: list
    scales: list
    planes: list
    totals: list
    sums: list
    full: Any
    empty: Any
    done: Any
    taken: Any


def _memory(x, weights, kind: str, *, rows: int, roles: int, chunks: int, slots: int) -> _Memory:
    m, each, groups = range(x.shape[0]), range(roles), range(_groups(kind))
    ring = lambda shape, dtype, n=slots: jt.alloc(shape, dtype, slots=n)
    wide = 512 // jnp.dtype(weights[0][0].dtype).itemsize
    block = (rows, LANES // len(groups))
    totals = m if bits_of(kind) < 16 else ()
    return _Memory(
        words=[[[ring((rows, wide), w[0].dtype) for _ in groups] for w in weights] for _ in each],
        scales=[[[[ring(block, a.dtype) for _ in groups] for a in w[1:]] for w in weights] for _ in each],
        planes=[[ring((8, LANES, 4), jnp.float32, chunks) for _ in m] for _ in each],
        totals=[[ring((len(groups), LANES), jnp.float32, chunks) for _ in totals] for _ in each],
        sums=[[[ring((rows, LANES), jnp.float32, 2) for _ in m] for _ in weights] for _ in each],
        full=jt.barrier(slots),
        empty=jt.barrier(slots, arrivals=roles),
        done=jt.barrier(2, arrivals=roles),
        taken=jt.barrier(2),
    )


def _prepare(x, mem: _Memory, j: int, kind: str, roles: int, chunks: int) -> list:
    """Puts role j's part of x into shared memory as its rounds take it; gives what brings sums back, by row of x."""
    back = []
    for i, ring in enumerate(mem.planes[j]):
        e = _exponent(x, i, j, roles, chunks) if bits_of(kind) < 16 else None
        back += [] if e is None else [_real(e)]
        for c in range(chunks):
            t = x.tiles(None, PIECE // x.shape[2], x.shape[2])[i, c * roles + j, 0].astype(jnp.float32)
            t = t if e is None else t * _real(np.uint32(254 << 23) - e)
            ring.at(c).store(_planes(t, kind))
            if e is not None:
                sums = t.sum(1).reshape(_groups(kind), LANES) * jnp.float32(1 / _DOWN)
                mem.totals[j][i].at(c).store(sums)
    jt.role_barrier()
    return back


@jt.function
def _consume(mem, j: int, kind: str, rows: int, chunks: int, tiles, back):
    """Role j: the sums of its lanes of each tile of rows; `back`: see `_prepare`."""
    words, scales, planes, totals = mem.words[j], mem.scales[j], mem.planes[j], mem.totals[j]
    at = lambda rings, k: [r.at(k) for r in rings]
    x = _numbers(at(planes, 0), at(totals, 0), kind) if chunks == 1 else None
    zero = lambda: jnp.zeros((rows, LANES), jnp.float32)
    for n in jt.range(tiles):
        sums = tuple(zero() for _ in words for _ in planes)
        for c in jt.range(chunks):
            k = n * chunks + c
            mem.full.at(k).wait()
            qs = [[r.at(k).load() for r in w] for w in words]
            ds = [[[_spread(r.at(k).load(), rows) for r in a] for a in w] for w in scales]
            mem.empty.at(k).arrive()
            now = _numbers(at(planes, c), at(totals, c), kind) if x is None else x
            found = [t for q, d in zip(qs, ds) for t in _sums(q, d, now, kind)]
            sums = tuple(a + b for a, b in zip(sums, found))
        mem.taken.at(n).wait(before=True)
        for ring, t, e in zip([r for w in mem.sums[j] for r in w], sums, (back or [None]) * len(sums)):
            ring.at(n).store(t if e is None else t * e)
        mem.done.at(n).arrive()


@jt.function
def _produce(mem, weights, rows: int, roles: int, chunks: int, tiles, first, programs):
    """Fills the rings, a round of all roles at a time."""
    buffers = [r for part in (mem.words, mem.scales) for r in jax.tree.leaves(part, is_leaf=lambda r: hasattr(r, "at"))]
    for k in jt.range(tiles * chunks):
        n, c = first + k // chunks * programs, k % chunks
        mem.empty.at(k).wait(before=True)
        mem.full.at(k).expect(sum(r.nbytes for r in buffers))
        for j in range(roles):
            for w, words, scales in zip(weights, mem.words[j], mem.scales[j]):
                for a, rings in zip(w, (words, *scales)):
                    for g, ring in enumerate(rings):
                        place = a.tiles(*ring.shape).at[n, (c * roles + j) * len(rings) + g]
                        jt.async_copy(place, ring.at(k), mem.full.at(k))


def _outputs(x, *refs, kind, gated, has_bias, activation, out_dtype, **_):
    return jax.ShapeDtypeStruct((x.shape[0], refs[0].shape[0]), jnp.dtype(out_dtype))


def _body(x, *refs, kind: str, gated: bool, has_bias: bool, activation, out_dtype: str, rows: int, roles: int,
          slots: int):  # fmt: skip
    """y [m, out] of x [m, in / n, n], n weights to a lane.

    Of each weight codes [out, words] or W [out, in], scale [out, in / 32 or 1] and, for Q4_1, minimum. `gated`: of two,
    y = act(x Gᵀ) * (x Uᵀ). Behind them bias [1, out] and residual [m, out], if any.

    A program takes every `programs`-th tile of `rows` rows, a role 1024 of every `roles` times 1024 weights of a row.
    """
    # y_r = sum_b d_rb (sum_j q_rbj x_bj) + sum_b m_rb (sum_j x_bj)
    *refs, y = refs
    each = {"q4_1": 3}.get(kind, 1 if bits_of(kind) == 16 else 2)
    weights = [refs[k * each : (k + 1) * each] for k in range(1 + gated)]
    copied = [w[:1] if kind == "int8" else w for w in weights]
    extra = list(refs[each * (1 + gated) :])
    first, programs, m = jt.program_id(0), jt.num_programs(0), x.shape[0]
    tiles = (jt.cdiv(y.shape[1], rows) - first + programs - 1) // programs
    chunks = jt.cdiv(x.shape[1] * x.shape[2], PIECE * roles)
    mem = _memory(x, copied, kind, rows=rows, roles=roles, chunks=chunks, slots=slots)
    for j in range(roles):
        with jt.role(f"consumer{j}", warps=4):
            back = _prepare(x, mem, j, kind, roles, chunks)
            _consume(mem, j, kind, rows, chunks, tiles, back)
    with jt.role("producer", warps=1, registers=24):
        _produce(mem, copied, rows, roles, chunks, tiles, first, programs)
    with jt.role("writer", warps=2):
        for n in jt.range(tiles):
            t = first + n * programs
            factor = [w[1].tiles(rows, 1)[t, 0][:, 0] for w in weights] if kind == "int8" else [1.0] * len(weights)
            bias = extra[0].tiles(None, rows)[0, t].astype(jnp.float32) if has_bias else None
            mem.done.at(n).wait()
            found = [[functools.reduce(jnp.add, [mem.sums[j][w][i].at(n).load() for j in range(roles)])
                      for i in range(m)] for w in range(1 + gated)]  # fmt: skip
            mem.taken.at(n).arrive()
            for i in range(m):
                Y = [s[i].sum(1) for s in found]
                if bits_of(kind) < 16:  # not both factors in one: a number has less range than that
                    Y = [t * jnp.float32(_DOWN) * f for t, f in zip(Y, factor)]
                Z = ACTIVATIONS[activation](Y[0] if bias is None else Y[0] + bias)
                Z = Z * Y[1] if gated else Z
                Z = Z + extra[-1].tiles(None, rows)[i, t].astype(jnp.float32) if len(extra) > has_bias else Z
                y.tiles(None, rows)[i, t] = Z.astype(y.dtype)


@functools.cache
def kernel(arrays: int, has_bias: bool, has_residual: bool) -> jt.Kernel:
    """The kernel for so many arrays of weights."""
    specs = ["m _ _", *["o _"] * arrays, *["_ o"] * has_bias, *["m o"] * has_residual]
    made = jt.kernel(
        out_type=_outputs,
        grid=lambda x, w, *_, rows, **__: min(gpu_tiles.PROCESSORS, jt.cdiv(w.shape[0], rows)),
        sharding=f"{', '.join(specs)} -> m o",
        name="hopper_gemv",
    )(_body)
    return made.autotune(space=_points, key=_KEY, override=True)


@functools.lru_cache(maxsize=1024)
def choices(m: int, inner: int, kind: str, gated: bool = False) -> list[dict[str, int]]:
    """Meta-parameters that fit, the best first: of tall tiles (of 4 bits 8 rows, the last of which is sooner done), as
    many on their way as there is room for, at least three."""
    roles = min(4, jt.next_power_of_2(jt.cdiv(inner, PIECE)))
    chunks = jt.cdiv(inner, PIECE * roles)
    numbers = m * chunks * roles * (PIECE + (LANES * _groups(kind) if bits_of(kind) < 16 else 0)) * 4
    row = roles * 512 * _groups(kind) * (1 + gated)
    row += {"q4_1": 2, "q4_0": 1, "q8_0": 1}.get(kind, 0) * roles * 2 * LANES * (1 + gated)
    out = []
    for rows in (8, 16, 4) if bits_of(kind) == 4 else (16, 8, 4):
        sums = 2 * roles * (1 + gated) * m * rows * LANES * 4
        slots = (_SHARED - 2048 * m - numbers - sums) // (row * rows)
        if slots >= 3:
            out.append(dict(rows=rows, roles=roles, slots=min(slots, 16)))
    return out


def _points(x, *_, kind: str, gated: bool, **__) -> list[dict[str, int]]:
    """For the tuner."""
    return choices(x.shape[0], x.shape[1] * x.shape[2], kind, gated)


def takes(x, weight, kind: str, gated: bool = False) -> bool:
    """Whether the kernel computes x [m, in] times this: packed codes, or a matrix of x's own dtype, [out, in]."""
    m, inner = x.shape
    if not gpu_tiles.warpgroups() or not all(isinstance(n, int) and n > 0 for n in (m, inner, *weight.shape)) or m > 2:
        return False
    if bits_of(kind) == 16:
        fits = weight.dtype == x.dtype and x.dtype in (jnp.bfloat16, jnp.float16) and inner % 8 == 0
    else:
        fits = weight.dtype == jnp.uint32 and inner % (BLOCK if kind == "int8" else 8 * BLOCK) == 0
    return fits and bool(choices(m, inner, kind, gated))


def product(
    x, arrays, extra=(), *, kind: str, activation=None, has_bias=False, gated=False, out_dtype=jnp.float32
) -> jax.Array:
    """[m, out] of x [m, in] and the arrays of one weight or of two; `extra`: bias [1, out] and residual [m, out]."""
    meta = choices(*x.shape, kind, gated)[0]
    x = x if x.dtype in (jnp.bfloat16, jnp.float16) else x.astype(jnp.float32)
    n = 128 // bits_of(kind)
    made = kernel(len(arrays), has_bias, len(extra) > has_bias)
    options = dict(kind=kind, activation=activation, has_bias=has_bias, gated=gated)
    x = x.reshape(x.shape[0], x.shape[1] // n, n)
    return made(x, *arrays, *extra, **options, out_dtype=jnp.dtype(out_dtype).name, **meta)
