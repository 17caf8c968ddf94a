"""Products with quantised weights on GPUs; the formulas and the public functions are in quantized.py.

One or two rows of x: each thread multiplies a few codes of several rows of W with x in registers and keeps sums of its
own to the end. Codes become float32 without a conversion, as the bits of subnormal numbers, with x scaled up.

More rows: blocks of W are dequantised between memory and the matrix units. In float32 where x is; for a 16-bit x as the
sum of two bfloat16, which holds 16 bits of a weight: all of them for int8 and Q4_0.
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


def _bits(codes):
    """Non-negative int32 codes as float32 without a conversion: the subnormal numbers codes 2^-149."""
    return jax.lax.bitcast_convert_type(codes, jnp.float32)


def _halves(x, i: int, c, kind: str, blocks: int):
    """Chunk c of row i of x, in the parts that codes of one byte are multiplied with: [blocks, width] each."""
    if kind in FOUR_BIT:
        X = x.tiles(None, blocks, None, HALF)
        return X[i, c, 0, 0].astype(jnp.float32), X[i, c, 1, 0].astype(jnp.float32)
    return (x.tiles(None, blocks, BLOCK)[i, c, 0].astype(jnp.float32),)


def _terms(weight, row, c, kind: str, blocks: int, xs):
    """What chunk c of a row of W adds to its products with the rows of x, as tiles [blocks, width] to be summed."""
    codes, scale, *low = weight
    width = codes.shape[3]
    q = codes.tiles(None, None, blocks, width)[*row, c, 0]
    d = None if kind == "int8" else scale.tiles(None, None, blocks)[*row, c].astype(jnp.float32)[:, None]
    if kind not in FOUR_BIT:  # q = (q + 128) - 128
        bits = _bits(jax.lax.bitcast_convert_type(q, jnp.uint8).astype(jnp.int32) ^ np.int32(128))
        terms = [x * (-128 / _DOWN) + x * _UP * bits for (x,) in xs]
        return terms if d is None else [d * t for t in terms]
    q = q.astype(jnp.int32)  # a byte: first + 16 second; a first + b second = b / 16 byte + (a - b / 16) first
    byte, first = _bits(q), _bits(q & np.int32(15))
    sums = [(b * (_UP / 16)) * byte + (a * _UP - b * (_UP / 16)) * first for a, b in xs]
    if kind == "q4_0":
        return [d * ((a + b) * (-8 / _DOWN) + t) for (a, b), t in zip(xs, sums)]
    m = low[0].tiles(None, None, blocks)[*row, c].astype(jnp.float32)[:, None] * (1 / _DOWN)
    return [d * t + m * (a + b) for (a, b), t in zip(xs, sums)]


@jt.kernel(
    out_type=lambda x, codes, *_, **__: jax.ShapeDtypeStruct((x.shape[0], *codes.shape[:2]), jnp.float32),
    grid=lambda x, codes, *_, **__: codes.shape[0],
    name="quantized_gemv_lanes",
)
def quantized_gemv_lanes(x, *refs, kind: str, activation, has_bias: bool, gated: bool, rows: int, blocks: int):
    """`rows` rows of W in a program, `blocks` blocks of 32 weights at a time.

    x [m, blocks, 2, 16] for 4-bit codes [groups, rows, blocks, 16], [m, blocks, 32] for others [groups, rows, blocks,
    32], groups * rows = out; scale (and minimum) [groups, rows, blocks or 1]. `gated`: a second weight, y = act(x Gᵀ) *
    (x Uᵀ). Then bias [1, groups, rows], residual [m, groups, rows], as y.
    """
    # y_r = sum_b d_rb (sum_j q_rbj x_bj) + sum_b m_rb (sum_j x_bj)
    # One dimension walks with the grid and one is counted out: `groups` can be cut over devices.
    *refs, y = refs
    arrays, m, r = 3 if kind == "q4_1" else 2, x.shape[0], jt.program_id(0)
    weights = [refs[k * arrays : (k + 1) * arrays] for k in range(1 + gated)]
    extra = list(refs[arrays * (1 + gated) :])
    tile, chunks = (blocks, weights[0][0].shape[3]), jt.cdiv(weights[0][0].shape[2], blocks)
    none = tuple(jnp.zeros(tile, jnp.float32) for _ in range(m * rows * len(weights)))

    def added(terms, sums, c, xs):
        parts = [t for w in weights for k in range(rows) for t in terms(w, (r, k), c, kind, blocks, xs)]
        return tuple(s + t for s, t in zip(sums, parts))

    sums, top = none, jnp.zeros(tile, jnp.float32)
    for c in jt.range(chunks, unroll=2):
        xs = [_halves(x, i, c, kind, blocks) for i in range(m)]
        top = functools.reduce(jnp.maximum, [abs(t) for row_of_x in xs for t in row_of_x], top)
        sums = added(_terms, sums, c, xs)
    peak = top.max()
    back = jnp.float32(_DOWN)
    if (peak >= _LARGE) | ((peak > 0) & (peak < _SMALL)):  # out of the range of the scaled numbers: once more
        back, sums = jnp.float32(1.0), none
        for c in jt.range(chunks):
            sums = added(_plain_terms, sums, c, [_halves(x, i, c, kind, blocks) for i in range(m)])
    for k in range(rows):
        for i in range(m):
            Y = [sums[(n * rows + k) * m + i].sum() * back for n in range(len(weights))]
            Y = [t * w[1][r, k, 0] for t, w in zip(Y, weights)] if kind == "int8" else Y
            Y[0] = Y[0] + extra[0][0, r, k] if has_bias else Y[0]
            out = ACTIVATIONS[activation](Y[0]) * (Y[1] if gated else 1.0)
            y[i, r, k] = out + extra[-1][i, r, k] if len(extra) > has_bias else out


def _plain_terms(weight, row, c, kind: str, blocks: int, xs):
    """The same as `_terms` for x of any size, unscaled: codes are converted."""
    codes, scale, *low = weight
    q = codes.tiles(None, None, blocks, codes.shape[3])[*row, c, 0]
    parts = (q & np.uint8(15), q >> np.uint8(4)) if kind in FOUR_BIT else (q,)
    parts = [t.astype(jnp.float32) - (8.0 if kind == "q4_0" else 0.0) for t in parts]
    terms = [functools.reduce(jnp.add, [x * t for x, t in zip(row_of_x, parts)]) for row_of_x in xs]
    if kind == "int8":
        return terms
    d = scale.tiles(None, None, blocks)[*row, c].astype(jnp.float32)[:, None]
    terms = [d * t for t in terms]
    if not low:
        return terms
    m = low[0].tiles(None, None, blocks)[*row, c].astype(jnp.float32)[:, None]
    return [t + m * (a + b) for t, (a, b) in zip(terms, xs)]


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


@functools.cache
def gemv_choice(m: int, out: int, nb: int, kind: str, gated: bool) -> tuple[dict[str, int], int]:
    """Meta-parameters and warps of the kernel for few rows."""
    four = kind in FOUR_BIT
    rows = next(r for r in ((4, 2, 1) if four and m == 1 and not gated else (2, 1)) if out % r == 0)
    return {"rows": rows, "blocks": min(8, jt.next_power_of_2(nb))}, 1


def product(x, arrays, extra, *, kind: str, activation, has_bias: bool = False, gated: bool = False) -> jax.Array:
    """float32 [m, out] of x [m, in] and the arrays of one weight or of two; `extra`: bias and residual, if any."""
    m, inner = x.shape
    out, blocks = arrays[0].shape[0], jt.cdiv(inner, BLOCK)
    per = len(arrays) // (1 + gated)
    if inner % BLOCK:  # int8 takes any size
        more = ((0, 0), (0, blocks * BLOCK - inner))
        x, arrays = jnp.pad(x, more), [jnp.pad(a, more) if k % per == 0 else a for k, a in enumerate(arrays)]
    width = HALF if kind in FOUR_BIT else BLOCK
    arrays = [a.reshape(out, blocks, width) if k % per == 0 else a for k, a in enumerate(arrays)]
    options = {"kind": kind, "activation": activation, "has_bias": has_bias, "gated": gated}
    shape = (m, blocks, 2, HALF) if kind in FOUR_BIT else (m, blocks, BLOCK)
    if isinstance(m, int) and m <= 2:
        tiles, warps = gemv_choice(m, out, blocks, kind, gated)
        kernel = tuned(quantized_gemv_lanes, num_warps=warps)
        x = x if x.dtype in (jnp.bfloat16, jnp.float16) else x.astype(jnp.float32)
        grouped = [_grouped(a, tiles["rows"]) for a in arrays], [_grouped(a, tiles["rows"], 1) for a in extra]
        return kernel(x.reshape(shape), *grouped[0], *grouped[1], **options, **tiles).reshape(m, out)
    x = x if x.dtype == jnp.bfloat16 else x.astype(jnp.float32)
    wide = x.dtype == jnp.float32
    tiles = {"rows": _side(out, 64), "bm": _side(known(m), 64 if wide or gated else 128), "blocks": 1 if wide else 2}
    return quantized_gemm_lanes(x.reshape(shape), *arrays, *extra, **options, **tiles)
