"""Products of many rows with packed quantised weights that no kernel multiplies as they are: rows of other lengths than
whole rounds of `hopper_quantized`. The weights are dequantised into an array of the rows' dtype, which is little beside
what many rows take, and multiplied as dense ones."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.ops.dispatch import first_unmet
from jtile.ops.matmul import matmul
from jtile.ops.operands import Epilogue, Weight
from jtile.ops.weight_codes import BLOCK, FLOAT8

MANY = 64  # rows from which on it pays
_FOUR = ("q4_0", "q4_1")
_ZERO = {"q4_0": 8, "q4_1": 0, "q8_0": 128, "int8": 128}  # the field of a word that stands for the weight 0
_TILE = 4096  # weights of a program


def _type(weights, *, dtype: str, **_):
    out, blocks, _ = weights[0].codes.shape
    return (jax.ShapeDtypeStruct((out, blocks, BLOCK), dtype),) * len(weights)


def _grid(weights, *, rows: int, blocks: int, **_):
    out, count, _ = weights[0].codes.shape
    return jt.cdiv(out, rows), jt.cdiv(count, blocks)


@functools.cache
def _kernel(count: int) -> jt.Kernel:
    """The kernel for so many weights of one shape."""
    body = _one if count == 1 else _two
    return jt.kernel(out_type=_type, grid=_grid, name="dequantized_blocks")(body)


def _one(weights: tuple[Weight], w, *, kind: str, dtype: str, rows: int, blocks: int):
    """w [out, in / 32, 32] of packed codes [out, in / 32, words] and scales (and minima) [out, groups of blocks]."""
    _write(weights[0], w, kind, dtype, rows, blocks)


def _two(weights: tuple[Weight, Weight], w, u, *, kind: str, dtype: str, rows: int, blocks: int):
    """The same of two weights: a launch less."""
    for weight, ref in zip(weights, (w, u)):
        _write(weight, ref, kind, dtype, rows, blocks)


def _write(weight: Weight, w, kind: str, dtype: str, rows: int, blocks: int) -> None:
    r, c, four = jt.program_id(0), jt.program_id(1), kind in _FOUR
    words = weight.codes.shape[2]
    # The axes of a block are s, h, t, e (see `QuantizedTensor.packed`): a word has one t, and of 8 bits one s.
    U = weight.codes.tiles(rows, blocks, words)[r, c, 0]
    shape = rows, blocks, 2, 2, 4, 2
    lead = (rows, blocks, 1, 1, 4, 1) if four else (rows, blocks, 2, 1, 4, 1)
    U = jnp.broadcast_to(U.reshape(lead), shape)
    s, h, e = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (2, 3, 5))
    place = e * np.uint32(16) + h * np.uint32(4) + s * np.uint32(8) if four else e * np.uint32(16) + h * np.uint32(8)
    field = (U >> place) & np.uint32(15 if four else 255)
    if kind == "fp8":
        W = jax.lax.bitcast_convert_type(field.astype(jnp.uint8), FLOAT8).astype(jnp.float32)
    else:
        W = (field.astype(jnp.int32) - np.int32(_ZERO[kind])).astype(jnp.float32)
    W = W.reshape(rows, blocks, BLOCK)
    W = W * _of_blocks(weight.scale, weight, r, c, rows, blocks)
    if kind == "q4_1":
        W = W + _of_blocks(weight.minimum, weight, r, c, rows, blocks)
    w.tiles(rows, blocks, BLOCK)[r, c, 0] = W.astype(dtype)


def _of_blocks(array, weight: Weight, r, c, rows: int, blocks: int):
    """The scales or minima of a tile, float32 [rows, blocks or 1, 1]."""
    count, groups = weight.codes.shape[1], array.shape[1]
    if groups == 1:
        return array.tiles(rows, 1)[r, 0].astype(jnp.float32)[:, :, None]
    shared = count // groups
    n = max(blocks // shared, 1)
    found = array.tiles(rows, n)[r, c if blocks >= shared else c // (shared // blocks)].astype(jnp.float32)
    return jnp.broadcast_to(found[:, :, None], (rows, n, blocks // n)).reshape(rows, blocks)[:, :, None]


def dequantized(weights: Sequence[Weight], kind: str, dtype) -> list[jax.Array]:
    """The matrices [out, in] of one packed weight, or of two of one shape."""
    words = 4 if kind in _FOUR else 8
    out, stored = weights[0].codes.shape
    blocks = min(jt.next_power_of_2(stored // words), 32)
    rows = min(max(_TILE // (blocks * BLOCK), 1), jt.next_power_of_2(out))
    packed = tuple(w._replace(codes=w.codes.reshape(out, stored // words, words)) for w in weights)
    found = _kernel(len(packed))(packed, kind=kind, dtype=jnp.dtype(dtype).name, rows=rows, blocks=blocks)
    return [w.reshape(out, stored // words * BLOCK) for w in found]


def misfit(x, weights: tuple[Weight, ...], epilogue: Epilogue, *, kind: str, **_) -> str | None:
    """Why a product is not made so, None where it is."""
    m, inner = x.shape
    return first_unmet(
        (kind in (*_ZERO, "fp8"), f"codes of {kind} are in another order"),
        (isinstance(m, int) and m >= MANY, f"fewer than {MANY} rows"),
        (x.dtype in (jnp.bfloat16, jnp.float16), f"rows are {x.dtype.name}, not 16-bit floats"),
        (all(w.codes.dtype == jnp.uint32 for w in weights), "codes are not packed words"),
        (inner > 0 and inner % BLOCK == 0 and weights[0].codes.shape[0] > 0, "an operand is empty, or ends in a block"),
        (all(_even(inner, a.shape[1]) for w in weights for a in w.of_blocks), "groups do not fit into tiles of blocks"),
        (len(weights) == 1 or not jax.tree.leaves(epilogue), "a gated product has an epilogue"),
    )


def _even(inner: int, groups: int) -> bool:
    """Whether a row has one group, or groups of 1, 2, 4 ... blocks."""
    return groups == 1 or (inner // BLOCK % groups == 0 and _power(inner // BLOCK // groups))


def _power(n: int) -> bool:
    return n & (n - 1) == 0


def product(x, weights: tuple[Weight, ...], epilogue: Epilogue, *, kind: str, activation, out_dtype) -> jax.Array:
    """The product [m, out] of x [m, in] and one weight, or the gated one of two; see `quantized_matmul`."""
    from jtile.ops.gated_mlp import gated_mlp  # imported here, since that module imports the one of quantised products

    matrices = dequantized(weights, kind, x.dtype)
    if len(matrices) > 1:
        return gated_mlp(x, *matrices, activation=activation, transpose=True, out_dtype=out_dtype)
    bias, residual = epilogue.bias, epilogue.residual
    options = {} if bias is None else {"bias": bias[0]}
    wide = out_dtype if residual is None else jnp.float32
    y = matmul(x, *matrices, transpose_b=True, activation=activation, out_dtype=wide, **options)
    return y if residual is None else (y + residual).astype(out_dtype)
