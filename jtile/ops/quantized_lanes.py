"""Products with quantised weights on GPUs; the formulas and the public functions are in quantized.py.

One or two rows of x: each thread loads 16 bytes of codes of several rows of W, takes them as four 32-bit words, and
multiplies them with x in registers. Fields of a word become float32 without a conversion, as the bits of subnormal
numbers, with x scaled up: an and-instruction and a multiply-add for each code, and no shift for most.

More rows: blocks of W are dequantised between memory and the matrix units. In float32 where x is; for a 16-bit x as the
sum of two bfloat16, which holds 16 bits of a weight: all of them for int8 and Q4_0. (On Hopper, packed weights take
another way: hopper_quantized.py.)
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.ops._shapes import known, tuned
from jtile.ops.epilogues import ACTIVATIONS
from jtile.ops.quantized_tensor import BLOCK

HALF = BLOCK // 2
FOUR_BIT = ("q4_0", "q4_1")


def _type(x, codes, *_, **__):
    return jax.ShapeDtypeStruct((x.shape[0], codes.shape[0]), jnp.float32)


_UP = 2.0**76  # x times that, times an integer's bits as a float32, is a normal number for 2^-53 < |x| < 2^51
_DOWN = 2.0**73  # both bring x q back to 1: the bits are q 2^-149
_LARGE, _SMALL = (
    2.0**51,
    2.0**-29,
)  # the largest |x| of a row for which nothing overflows, and nothing that counts is lost
_ZERO = {"q4_0": 8.0, "q4_1": 0.0, "q8_0": 128.0, "int8": 128.0}  # the field of a word that says 0

# x of a block as its words hold the codes: axes [blocks, *these] (True: packed words, see `QuantizedTensor.packed`)
_VIEWS = {(True, False): (2, 4, 4), (True, True): (2, 2, 4, 2), (False, False): (8, 4), (False, True): (2, 2, 4, 2)}


def _planes(x, i: int, c, four: bool, packed: bool, blocks: int):
    """Chunk c of row i of x, as the numbers that the fields of words are multiplied with, lowest field first: each
    [blocks, words of a block]."""
    t = x.tiles(None, blocks * BLOCK)[i, c].astype(jnp.float32).reshape(blocks, *_VIEWS[four, packed])
    if four:
        if packed:
            return [t[:, s, h, :, e] for e in range(2) for s in range(2) for h in range(2)]
        return [t[:, h, :, b] for b in range(4) for h in range(2)]
    if packed:
        return [t[:, :, h, :, e].reshape(blocks, 8) for e in range(2) for h in range(2)]
    return [t[:, :, b] for b in range(4)]


def _words(codes, r, c, kind: str, blocks: int):
    """Chunk c of some rows of W: uint32 [rows, blocks, words of a block]; fields of 8 bits are codes plus 128."""
    # Tiles of rows in memory, then reshaped: what lies in a row side by side is then what a thread or a warp has.
    rows, words = codes.shape[1], 4 if kind in FOUR_BIT else 8
    if codes.dtype == jnp.uint32:
        return codes.tiles(None, rows, blocks * words)[r, 0, c].reshape(rows, blocks, words)
    q = codes.tiles(None, rows, blocks * words * 4)[r, 0, c].reshape(rows, blocks, words, 4)
    q = jax.lax.bitcast_convert_type(q, jnp.uint8).astype(jnp.uint32)
    q = functools.reduce(jnp.bitwise_or, [q[:, :, :, b] << np.uint32(8 * b) for b in range(4)])
    return q if kind in FOUR_BIT else q ^ np.uint32(0x80808080)


def _scaled(planes, four: bool):
    """x for the numbers of `_scaled_fields`, and its sum over a word's fields in the same scale."""
    shifts = (0, 4, 8, 12, 16, 20, 0, 0) if four else (0, 8, 16, 0)
    out = [t * (_UP * 2.0**-s) for t, s in zip(planes, shifts)]
    if four:  # the two highest: first + 16 second, and first
        out[7] = out[7] * 2.0**-4
        out[6] = out[6] - out[7]
    return out, functools.reduce(jnp.add, planes) * (1 / _DOWN)


def _scaled_fields(w, four: bool):
    """The fields of words as float32, 2^-149 times their place in the word; the highest ones were moved down."""
    top = w >> np.uint32(24)
    bits = 4 if four else 8
    fields = [w & np.uint32(((1 << bits) - 1) << k) for k in range(0, 24, bits)]
    fields += [top & np.uint32(15), top] if four else [top]
    return [jax.lax.bitcast_convert_type(t, jnp.float32) for t in fields]


def _plain(planes, _):
    return planes, functools.reduce(jnp.add, planes)


def _plain_fields(w, four: bool):
    """The fields of words as numbers, converted."""
    bits = 4 if four else 8
    fields = [(w >> np.uint32(k)) & np.uint32((1 << bits) - 1) for k in range(0, 32, bits)]
    return [t.astype(jnp.int32).astype(jnp.float32) for t in fields]


def _terms(weight, r, c, kind: str, blocks: int, xs, fields_of):
    """What chunk c of rows of W adds to its products with the rows of x: tiles [rows, blocks, words of a block]."""
    codes, scale, *low = weight
    rows, four = codes.shape[1], kind in FOUR_BIT
    of_block = lambda a: a.tiles(None, rows, blocks)[r, 0, c].astype(jnp.float32)[:, :, None]
    fields = fields_of(_words(codes, r, c, kind, blocks), four)
    d = None if kind == "int8" else of_block(scale)
    m = of_block(low[0]) if low else None
    out = []
    for x, total in xs:
        t = fields[0] * x[0][None]
        t = t - (total * _ZERO[kind])[None] if _ZERO[kind] else t
        for a, b in zip(fields[1:], x[1:]):
            t = t + a * b[None]
        t = t if d is None else d * t
        out.append(t if m is None else t + m * total[None])
    return out


@jt.kernel(
    out_type=lambda x, codes, *_, **__: jax.ShapeDtypeStruct((x.shape[0], *codes.shape[:2]), jnp.float32),
    grid=lambda x, codes, *_, **__: codes.shape[0],
    name="quantized_gemv_lanes",
)
def quantized_gemv_lanes(x, *refs, kind: str, activation, has_bias: bool, gated: bool, blocks: int, stages: int):
    """A group of rows of W in a program, `blocks` blocks of 32 weights at a time.

    x [m, in], in a multiple of 32; codes [groups, rows, bytes or words], groups * rows = out; scale (and minimum)
    [groups, rows, blocks or 1]. `gated`: a second weight, y = act(x Gᵀ) * (x Uᵀ). Then bias [1, groups, rows], residual
    [m, groups, rows], as y.
    """
    # y_r = sum_b d_rb (sum_j q_rbj x_bj) + sum_b m_rb (sum_j x_bj)
    # One dimension walks with the grid and one is counted out: `groups` can be cut over devices.
    *refs, y = refs
    arrays, m, r = 3 if kind == "q4_1" else 2, x.shape[0], jt.program_id(0)
    weights = [refs[k * arrays : (k + 1) * arrays] for k in range(1 + gated)]
    extra = list(refs[arrays * (1 + gated) :])
    codes, four = weights[0][0], kind in FOUR_BIT
    packed, rows, words = codes.dtype == jnp.uint32, codes.shape[1], 4 if four else 8

    def summed(blocks, stages, scaled, fields_of):
        """For each weight and row of x its products with the rows of W, and the largest |x| in lanes."""
        sums = tuple(jnp.zeros((rows, blocks, words), jnp.float32) for _ in range(m * len(weights)))
        top = jnp.zeros((blocks, words), jnp.float32)
        for c in jt.range(jt.cdiv(x.shape[1], blocks * BLOCK), stages=stages):
            xs = [_planes(x, i, c, four, packed, blocks) for i in range(m)]
            top = functools.reduce(jnp.maximum, [abs(t) for row_of_x in xs for t in row_of_x], top)
            parts = [scaled(t, four) for t in xs]
            terms = [t for w in weights for t in _terms(w, r, c, kind, blocks, parts, fields_of)]
            sums = tuple(s + t for s, t in zip(sums, terms))
        return tuple(t.sum(axis=(1, 2)) for t in sums), top

    sums, top = summed(blocks, stages, _scaled, _scaled_fields)
    sums = tuple(t * jnp.float32(_DOWN) for t in sums)
    peak = top.max()
    if (peak >= _LARGE) | ((peak > 0) & (peak < _SMALL)):  # out of the range of the scaled numbers: once more
        sums, _ = summed(max(blocks // 4, 1), 1, _plain, _plain_fields)  # in tiles that take few registers
    for i in range(m):
        Y = [sums[n * m + i] for n in range(len(weights))]
        if kind == "int8":
            Y = [t * w[1].tiles(None, rows, 1)[r, 0, 0][:, 0] for t, w in zip(Y, weights)]
        Y[0] = Y[0] + extra[0].tiles(None, None, rows)[0, r, 0] if has_bias else Y[0]
        out = ACTIVATIONS[activation](Y[0]) * (Y[1] if gated else 1.0)
        place = (i, r, 0)
        y.tiles(None, None, rows)[place] = (
            out + extra[-1].tiles(None, None, rows)[place] if len(extra) > has_bias else out
        )


def _dequantized(weight, r, c, kind: str, rows: int, blocks: int, dtype):
    """The halves of chunk c of W as matrices [rows, blocks * width], each a list of terms of `dtype`."""
    codes, scale, *low = weight
    width = codes.shape[2]
    q = codes.tiles(rows, blocks, width)[r, c, 0]
    halves = (q & np.uint8(15), q >> np.uint8(4)) if kind in FOUR_BIT else (q,)
    halves = [h.astype(jnp.float32) for h in halves]
    if kind != "int8":
        d = scale.tiles(rows, blocks)[r, c].astype(jnp.float32)[:, :, None]
        halves = [d * (h - 8.0 if kind == "q4_0" else h) for h in halves]
    if low:
        m = low[0].tiles(rows, blocks)[r, c].astype(jnp.float32)[:, :, None]
        halves = [h + m for h in halves]
    out = []
    for w in (h.reshape(rows, blocks * width) for h in halves):
        top = w.astype(dtype)
        exact = dtype == jnp.float32 or kind == "int8"
        out.append([top] if exact else [top, (w - top.astype(jnp.float32)).astype(dtype)])
    return out


@jt.kernel(
    out_type=_type,
    grid=lambda x, codes, *_, rows, bm, **__: (jt.cdiv(codes.shape[0], rows), jt.cdiv(x.shape[0], bm)),
    name="quantized_gemm_lanes",
)
def quantized_gemm_lanes(
    x, *refs, kind: str, activation, has_bias: bool, gated: bool, rows: int, bm: int, blocks: int
):  # fmt: skip
    """`bm` rows of x, `rows` of W in a program; arguments as in `quantized_gemv_lanes`, x in the dtype it comes in."""
    # Y = X Wᵀ, a sum over the halves of the blocks and over the terms that W is split into
    *refs, y = refs
    arrays, r, i = 3 if kind == "q4_1" else 2, jt.program_id(0), jt.program_id(1)
    weights = [refs[k * arrays : (k + 1) * arrays] for k in range(1 + gated)]
    extra = list(refs[arrays * (1 + gated) :])
    four, nb = kind in FOUR_BIT, weights[0][0].shape[1]
    X = x.tiles(bm, blocks, None, HALF) if four else x.tiles(bm, blocks, BLOCK)
    sums = tuple(jnp.zeros((bm, rows), jnp.float32) for _ in weights)
    for c in jt.range(jt.cdiv(nb, blocks), stages=3):
        xs = [X[i, c, n, 0] for n in range(2)] if four else [X[i, c, 0]]
        xs = [t.reshape(bm, -1) for t in xs]
        found = []
        for w, total in zip(weights, sums):
            for a, terms in zip(xs, _dequantized(w, r, c, kind, rows, blocks, x.dtype)):
                for b in terms:
                    total = jt.dot(a, b.T, total)
            found.append(total)
        sums = tuple(found)
    if kind == "int8":
        sums = tuple(s * w[1].tiles(rows, 1)[r, 0][:, 0][None, :] for s, w in zip(sums, weights))
    Y = sums[0] + extra[0].tiles(1, rows)[0, r] if has_bias else sums[0]
    Y = ACTIVATIONS[activation](Y) * (sums[1] if gated else 1.0)
    y.tiles(bm, rows)[i, r] = Y + extra[-1].tiles(bm, rows)[i, r] if len(extra) > has_bias else Y


def _grouped(a, rows: int, axis: int = 0):
    """An array with its rows of W along `axis` in groups."""
    return a.reshape(*a.shape[:axis], a.shape[axis] // rows, rows, *a.shape[axis + 1 :])


def _side(n: int, limit: int) -> int:
    return min(max(jt.next_power_of_2(n), 16), limit)


@functools.lru_cache(maxsize=1024)
def gemv_choice(m: int, out: int, nb: int, kind: str, gated: bool) -> tuple[int, dict[str, int], int]:
    """Rows of W of a program, meta-parameters and warps of the kernel for few rows of x.

    A thread has 16 bytes of codes of each row: all of rows of 4096 is on its way at once, in registers.
    """
    four = kind in FOUR_BIT
    most = (8 if four else 4) // (m * (1 + gated))
    rows = next(r for r in (8, 4, 2, 1) if r <= max(most, 1) and out % r == 0)
    of_warp = 32 if four else 16
    warps = min(4 if four else 8, max(1, jt.next_power_of_2(nb) // of_warp))
    blocks = min(of_warp * warps, jt.next_power_of_2(nb))
    return rows, {"blocks": blocks, "stages": 2 if nb > blocks else 1}, warps


def product(x, arrays, extra, *, kind: str, activation, has_bias: bool = False, gated: bool = False) -> jax.Array:
    """float32 [m, out] of x [m, in] and the arrays of one weight or of two; `extra`: bias and residual, if any."""
    m, inner = x.shape
    out, blocks = arrays[0].shape[0], jt.cdiv(inner, BLOCK)
    per = len(arrays) // (1 + gated)
    if inner % BLOCK:  # int8 takes any size
        more = ((0, 0), (0, blocks * BLOCK - inner))
        x, arrays = jnp.pad(x, more), [jnp.pad(a, more) if k % per == 0 else a for k, a in enumerate(arrays)]
    options = {"kind": kind, "activation": activation, "has_bias": has_bias, "gated": gated}
    if isinstance(m, int) and m <= 2:
        rows, tiles, warps = gemv_choice(m, out, blocks, kind, gated)
        kernel = tuned(quantized_gemv_lanes, num_warps=warps)
        x = x if x.dtype in (jnp.bfloat16, jnp.float16) else x.astype(jnp.float32)
        grouped = [_grouped(a, rows) for a in arrays], [_grouped(a, rows, 1) for a in extra]
        return kernel(x, *grouped[0], *grouped[1], **options, **tiles).reshape(m, out)
    shape = (m, blocks, 2, HALF) if kind in FOUR_BIT else (m, blocks, BLOCK)
    arrays = [a.reshape(out, blocks, -1) if k % per == 0 else a for k, a in enumerate(arrays)]
    x = x if x.dtype == jnp.bfloat16 else x.astype(jnp.float32)
    wide = x.dtype == jnp.float32
    tiles = {"rows": _side(out, 64), "bm": _side(known(m), 64 if wide or gated else 128), "blocks": 1 if wide else 2}
    return quantized_gemm_lanes(x.reshape(shape), *arrays, *extra, **options, **tiles)
