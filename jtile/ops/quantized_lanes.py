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
from jtile.ops import dispatch
from jtile.ops._shapes import known, tuned
from jtile.ops.epilogues import ACTIVATIONS, finished
from jtile.ops.operands import NO_EPILOGUE, Epilogue, Weight
from jtile.ops.weight_codes import BLOCK, FOUR_BIT

HALF = BLOCK // 2

UP = 2.0**76  # x times that, times an integer's bits as a float32, is a normal number for 2^-53 < |x| < 2^51
DOWN = 2.0**73  # this and UP bring x q back: the bits of an integer q are the number q 2^-149
# The largest |x| of a row for which nothing overflows, and the smallest for which nothing that counts is lost.
LARGE, SMALL = 2.0**51, 2.0**-29
# The field of a word that stands for the weight 0.
_ZERO = {"q4_0": 8.0, "q4_1": 0.0, "q8_0": 128.0, "int8": 128.0, "fp8": 0.0, "mxfp4": 0.0}

# Axes that a block of x is split into, in the order in which words hold its codes, by (4-bit codes, packed words). With
# packed words (`QuantizedTensor.packed`) they are s, h, t, e of a weight's number 16 s + 8 h + 2 t + e in its block.
_VIEWS = {(True, False): (2, 4, 4), (True, True): (2, 2, 4, 2), (False, False): (8, 4), (False, True): (2, 2, 4, 2)}


def _planes(x, i: int, chunk, four: bool, packed: bool, blocks: int):
    """A chunk of row i of x, as the numbers that the fields of words are multiplied with, lowest field first: each
    [blocks, words of a block]."""
    numbers = x.tiles(None, blocks * BLOCK)[i, chunk].astype(jnp.float32).reshape(blocks, *_VIEWS[four, packed])
    if four:
        if packed:
            return [numbers[:, s, h, :, e] for e in range(2) for s in range(2) for h in range(2)]
        return [numbers[:, half, :, byte] for byte in range(4) for half in range(2)]
    if packed:
        return [numbers[:, :, h, :, e].reshape(blocks, 8) for e in range(2) for h in range(2)]
    return [numbers[:, :, byte] for byte in range(4)]


def _words(codes, group, chunk, kind: str, blocks: int):
    """A chunk of a group of rows of W: uint32 [rows, blocks, words of a block]; fields of 8 bits are codes plus 128."""
    # Tiles of rows in memory, then reshaped: what lies in a row side by side is then what a thread or a warp has.
    rows, words = codes.shape[1], 4 if kind in FOUR_BIT else 8
    if codes.dtype == jnp.uint32:
        return codes.tiles(None, rows, blocks * words)[group, 0, chunk].reshape(rows, blocks, words)
    bytes_ = codes.tiles(None, rows, blocks * words * 4)[group, 0, chunk].reshape(rows, blocks, words, 4)
    bytes_ = jax.lax.bitcast_convert_type(bytes_, jnp.uint8).astype(jnp.uint32)
    whole = functools.reduce(jnp.bitwise_or, [bytes_[:, :, :, k] << np.uint32(8 * k) for k in range(4)])
    return whole ^ np.uint32(0x80808080) if kind in ("q8_0", "int8") else whole


def float8_fields(words) -> list:
    """The four e4m3 numbers of words, from the low bits on, as float32, times 2^-120: their bits where float32 has
    them, of which the exponents differ by 120. (The code of no number counts as 480.)"""
    tops = [words << np.uint32(24), words << np.uint32(16), words << np.uint32(8), words]
    # the sign fills what is free
    signed = [jax.lax.bitcast_convert_type(top, jnp.int32) >> np.int32(4) for top in tops]
    return [jax.lax.bitcast_convert_type(bits & np.int32(0x87F00000 - (1 << 32)), jnp.float32) for bits in signed]


def float4_fields(words) -> list:
    """The eight e2m1 numbers of words, from the low bits on, as float32, times 2^-126: their exponents
    differ from those of float32 by 126."""
    return [_highest_float4(words << np.uint32(28 - 4 * k)) for k in range(8)]


def _highest_float4(words):
    """The e2m1 number in the four highest bits of words, as float32, times 2^-126."""
    signed = jax.lax.bitcast_convert_type(words, jnp.int32) >> np.int32(6)
    return jax.lax.bitcast_convert_type(signed & np.int32(0x81C00000 - (1 << 32)), jnp.float32)


def scaled_planes(planes, kind: str = "q8_0"):
    """x for the numbers of `scaled_fields`, and its sum over a word's fields in the same scale."""
    if kind == "fp8":
        return [plane * (2.0**120 / DOWN) for plane in planes], None
    if kind == "mxfp4":
        return [plane * (2.0**126 / DOWN) for plane in planes], None
    four = kind in FOUR_BIT
    shifts = (0, 4, 8, 12, 16, 20, 0, 0) if four else (0, 8, 16, 0)
    out = [plane * (UP * 2.0**-shift) for plane, shift in zip(planes, shifts)]
    if four:  # the two highest: first + 16 second, and first
        out[7] = out[7] * 2.0**-4
        out[6] = out[6] - out[7]
    return out, functools.reduce(jnp.add, planes) * (1 / DOWN)


def scaled_fields(words, kind: str = "q8_0"):
    """The fields of words as float32, 2^-149 times their place in the word; the highest ones were moved down."""
    if kind == "fp8":
        return float8_fields(words)
    if kind == "mxfp4":
        return float4_fields(words)
    four = kind in FOUR_BIT
    top = words >> np.uint32(24)
    bits = 4 if four else 8
    fields = [words & np.uint32(((1 << bits) - 1) << shift) for shift in range(0, 24, bits)]
    fields += [top & np.uint32(15), top] if four else [top]
    return [jax.lax.bitcast_convert_type(field, jnp.float32) for field in fields]


def plain_planes(planes, kind: str = "q8_0"):
    """x and its sum over a word's fields, for the numbers of `plain_fields`."""
    del kind
    return planes, functools.reduce(jnp.add, planes)


def plain_fields(words, kind: str = "q8_0"):
    """The fields of words as numbers, converted."""
    if kind == "fp8":
        return [field * jnp.float32(2.0**120) for field in float8_fields(words)]
    if kind == "mxfp4":
        return [field * jnp.float32(2.0**126) for field in float4_fields(words)]
    bits = 4 if kind in FOUR_BIT else 8
    fields = [(words >> np.uint32(shift)) & np.uint32((1 << bits) - 1) for shift in range(0, 32, bits)]
    return [field.astype(jnp.int32).astype(jnp.float32) for field in fields]


def _of_blocks(load, chunk, blocks: int, shared: int):
    """The scales of a chunk of `blocks` blocks of rows, `shared` of which have one scale: float32 [rows, blocks, 1].
    `load(n, k)` gives the k-th n scales of the rows."""
    if shared == 1:
        return load(blocks, chunk).astype(jnp.float32)[:, :, None]
    n = max(blocks // shared, 1)
    found = load(n, chunk if blocks >= shared else chunk // (shared // blocks)).astype(jnp.float32)
    return jnp.broadcast_to(found[:, :, None], (*found.shape, blocks // n)).reshape(found.shape[0], blocks, 1)


def _terms(weight: Weight, group, chunk, kind: str, blocks: int, shared: int, xs, fields_of):
    """What a chunk of rows of W adds to its products with the rows of x: tiles [rows, blocks, words of a block].

    shared: how many blocks have one scale. xs: for each row of x its planes, and their sum.
    """
    rows = weight.codes.shape[1]
    of_block = lambda a: _of_blocks(lambda n, k: a.tiles(None, rows, n)[group, 0, k], chunk, blocks, shared)
    fields = fields_of(_words(weight.codes, group, chunk, kind, blocks), kind)
    scale = None if weight.scaled_last(kind) else of_block(weight.scale)
    low = None if weight.minimum is None else of_block(weight.minimum)
    out = []
    for planes, total in xs:
        term = fields[0] * planes[0][None]
        term = term - (total * _ZERO[kind])[None] if _ZERO[kind] else term
        for field, plane in zip(fields[1:], planes[1:]):
            term = term + field * plane[None]
        term = term if scale is None else scale * term
        out.append(term if low is None else term + low * total[None])
    return out


@jt.function
def lane_products(x, of, weights, group, kind: str, blocks: int, stages: int):
    """For each weight, and for each row `of` x, the products with a group of rows of W: float32 [rows]. Operands as
    those of `quantized_gemv_lanes`."""
    m, four, codes = len(of), kind in FOUR_BIT, weights[0].codes
    packed, rows, words = codes.dtype == jnp.uint32, codes.shape[1], 4 if four else 8
    shared = weights[0].shared_by(x.shape[1] // BLOCK)

    def summed(blocks, stages, scaled, fields_of):
        """For each weight and row of x its products with the rows of W, and the largest |x| in lanes."""
        sums = tuple(jnp.zeros((rows, blocks, words), jnp.float32) for _ in range(m * len(weights)))
        top = jnp.zeros((blocks, words), jnp.float32)
        for chunk in jt.range(jt.cdiv(x.shape[1], blocks * BLOCK), stages=stages):
            xs = [_planes(x, i, chunk, four, packed, blocks) for i in of]
            top = functools.reduce(jnp.maximum, [abs(plane) for of_row in xs for plane in of_row], top)
            parts = [scaled(of_row, kind) for of_row in xs]
            terms = [t for w in weights for t in _terms(w, group, chunk, kind, blocks, shared, parts, fields_of)]
            sums = tuple(total + term for total, term in zip(sums, terms))
        return tuple(total.sum(axis=(1, 2)) for total in sums), top

    sums, top = summed(blocks, stages, scaled_planes, scaled_fields)
    sums = tuple(total * jnp.float32(DOWN) for total in sums)
    peak = top.max()
    if (peak >= LARGE) | ((peak > 0) & (peak < SMALL)):  # x is out of the scaled numbers' range: sum once more
        sums, _ = summed(max(blocks // 4, 1), 1, plain_planes, plain_fields)  # small tiles take few registers
    if not weights[0].scaled_last(kind):
        return sums
    scales = [w.scale.tiles(None, rows, 1)[group, 0, 0][:, 0] for w in weights]
    return tuple(total * scales[n // m] for n, total in enumerate(sums))


@jt.kernel(
    out_type=lambda x, weights, *_, **__: jax.ShapeDtypeStruct((x.shape[0], *weights[0].codes.shape[:2]), jnp.float32),
    grid=lambda x, weights, *_, **__: weights[0].codes.shape[0],
    name="quantized_gemv_lanes",
)
def quantized_gemv_lanes(
    x, weights: tuple[Weight, ...], epilogue: Epilogue, y, *, kind: str, activation, blocks: int, stages: int
):
    """The products with a group of rows of W in a program, `blocks` blocks of 32 weights at a time.

    x [m, in], in a multiple of 32; codes [groups, rows, bytes or words], groups * rows = out; scale (and minimum)
    [groups, rows, scales of a row]. With a second weight y = act(x Gᵀ) * (x Uᵀ). Bias [1, groups, rows], residual
    [m, groups, rows], as y.
    """
    # y_r = sum_b d_rb (sum_j q_rbj x_bj) + sum_b m_rb (sum_j x_bj)
    # One dimension walks with the grid and one is counted out: `groups` can be cut over devices.
    m, group, rows = x.shape[0], jt.program_id(0), weights[0].codes.shape[1]
    sums = lane_products(x, range(m), weights, group, kind, blocks, stages)
    of_rows = lambda ref, i: ref.tiles(None, None, rows)[i, group, 0]
    for i in range(m):
        found = [sums[n * m + i] for n in range(len(weights))]
        first = found[0] if epilogue.bias is None else found[0] + of_rows(epilogue.bias, 0)
        out = ACTIVATIONS[activation](first) * (found[1] if len(found) > 1 else 1.0)
        out = out if epilogue.residual is None else out + of_rows(epilogue.residual, i)
        y.tiles(None, None, rows)[i, group, 0] = out


def dequantized_halves(weight: Weight, r, chunk, kind: str, rows: int, blocks: int, dtype):
    """The halves of a chunk of W as matrices [rows, blocks * width], each a list of terms of `dtype`."""
    width, shared = weight.codes.shape[2], weight.shared_by(weight.codes.shape[1])
    codes = weight.codes.tiles(rows, blocks, width)[r, chunk, 0]
    of_block = lambda a: _of_blocks(lambda n, k: a.tiles(rows, n)[r, k], chunk, blocks, shared)
    if kind == "mxfp4":
        halves = [_highest_float4(codes.astype(jnp.uint32) << np.uint32(shift)) for shift in (28, 24)]
        halves = [half * jnp.float32(2.0**126) for half in halves]
    else:
        halves = (codes & np.uint8(15), codes >> np.uint8(4)) if kind in FOUR_BIT else (codes,)
        halves = [half.astype(jnp.float32) for half in halves]
    last = weight.scaled_last(kind)
    if not last:
        scale = of_block(weight.scale)
        halves = [scale * (half - 8.0 if kind == "q4_0" else half) for half in halves]
    if weight.minimum is not None:
        low = of_block(weight.minimum)
        halves = [half + low for half in halves]
    out = []
    for half in (half.reshape(rows, blocks * width) for half in halves):
        top = half.astype(dtype)
        exact = dtype == jnp.float32 or last
        out.append([top] if exact else [top, (half - top.astype(jnp.float32)).astype(dtype)])
    return out


@jt.kernel(
    out_type=lambda x, weights, *_, **__: jax.ShapeDtypeStruct((x.shape[0], weights[0].codes.shape[0]), jnp.float32),
    grid=lambda x, weights, *_, rows, bm, **__: (jt.cdiv(weights[0].codes.shape[0], rows), jt.cdiv(x.shape[0], bm)),
    name="quantized_gemm_lanes",
)
def quantized_gemm_lanes(
    x, weights: tuple[Weight, ...], epilogue: Epilogue, y, *, kind: str, activation, rows: int, bm: int, blocks: int
):
    """The products of `bm` rows of x with `rows` rows of W in a program.

    x [m, blocks, 32] (of 4-bit codes [m, blocks, 2, 16]) in the dtype it comes in; codes [out, blocks, stored], scale
    (and minimum) [out, scales of a row]; bias [1, out], residual [m, out]; two weights as in `quantized_gemv_lanes`.
    """
    # Y = X Wᵀ, a sum over the halves of the blocks and over the terms that W is split into
    r, i, four = jt.program_id(0), jt.program_id(1), kind in FOUR_BIT
    X = x.tiles(bm, blocks, None, HALF) if four else x.tiles(bm, blocks, BLOCK)
    sums = tuple(jnp.zeros((bm, rows), jnp.float32) for _ in weights)
    for chunk in jt.range(jt.cdiv(weights[0].codes.shape[1], blocks), stages=3):
        halves = [X[i, chunk, n, 0] for n in range(2)] if four else [X[i, chunk, 0]]
        halves = [half.reshape(bm, -1) for half in halves]
        found = []
        for weight, total in zip(weights, sums):
            for half, terms in zip(halves, dequantized_halves(weight, r, chunk, kind, rows, blocks, x.dtype)):
                for term in terms:
                    total = jt.dot(half, term.T, total)
            found.append(total)
        sums = tuple(found)
    if weights[0].scaled_last(kind):
        sums = tuple(total * w.scale.tiles(rows, 1)[r, 0][:, 0][None, :] for total, w in zip(sums, weights))
    y.tiles(bm, rows)[i, r] = finished(sums, epilogue, activation, i, r, bm, rows)


def in_groups(array, rows: int, axis: int = 0):
    """An array with its rows of W along `axis` in groups."""
    return array.reshape(*array.shape[:axis], array.shape[axis] // rows, rows, *array.shape[axis + 1 :])


def side(n: int, limit: int) -> int:
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


def product(
    x, weights: tuple[Weight, ...], epilogue: Epilogue = NO_EPILOGUE, *, kind: str, activation=None
) -> jax.Array:
    """The product, float32 [m, out], of x [m, in] and one weight, or the gated one of two; bias [1, out], residual
    [m, out]."""
    inner = x.shape[1]
    if inner % BLOCK:  # a row has one scale, and any length
        more = ((0, 0), (0, -inner % BLOCK))
        x, weights = jnp.pad(x, more), tuple(w._replace(codes=jnp.pad(w.codes, more)) for w in weights)
    return _product(x, weights, epilogue, kind=kind, activation=activation)


def _in_words(x, weights: tuple[Weight, ...], epilogue: Epilogue, *, kind: str, activation):
    (m, inner), out = x.shape, weights[0].codes.shape[0]
    rows, tiles, warps = gemv_choice(m, out, inner // BLOCK, kind, len(weights) > 1)
    kernel = tuned(quantized_gemv_lanes, num_warps=warps)
    x = x if x.dtype in (jnp.bfloat16, jnp.float16) else x.astype(jnp.float32)
    weights = jax.tree.map(lambda a: in_groups(a, rows), weights)
    epilogue = jax.tree.map(lambda a: in_groups(a, rows, 1), epilogue)
    return kernel(x, weights, epilogue, kind=kind, activation=activation, **tiles).reshape(m, out)


def _not_in_words(x, *_, **__) -> str | None:
    # An NPU's vector cores pad the last axis to 32 bytes: words of a block would take all of their memory.
    return dispatch.first_unmet(
        (isinstance(x.shape[0], int) and x.shape[0] <= 2, f"there are {x.shape[0]} rows"),
        (not dispatch.vector_cores(), "words of a block leave no room in the memory of a vector core"),
    )


def _in_blocks(x, weights: tuple[Weight, ...], epilogue: Epilogue, *, kind: str, activation):
    (m, inner), out = x.shape, weights[0].codes.shape[0]
    blocks = inner // BLOCK
    shape = (m, blocks, 2, HALF) if kind in FOUR_BIT else (m, blocks, BLOCK)
    weights = tuple(w._replace(codes=w.codes.reshape(out, blocks, -1)) for w in weights)
    x = x if x.dtype == jnp.bfloat16 else x.astype(jnp.float32)
    wide = x.dtype == jnp.float32
    most = 64 if wide or len(weights) > 1 else 128
    tiles = {"rows": side(out, 64), "bm": side(known(m), most), "blocks": 1 if wide else 2}
    return quantized_gemm_lanes(x.reshape(shape), weights, epilogue, kind=kind, activation=activation, **tiles)


_product = dispatch.Op(
    "product with quantised weights, in lanes",
    dispatch.Implementation("words of codes", _in_words, _not_in_words),
    dispatch.Implementation("blocks, dequantised", _in_blocks),
)
