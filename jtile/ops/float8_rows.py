"""Products of many 16-bit rows with fp8 weights in 8 bits: rows are rounded to e4m3 as they come, with a scale for each
row or for each 128 numbers of it, as checkpoints say by "dynamic" activations. Tensor cores are twice as fast so."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import scaled_matmul
from jtile.ops.dispatch import first_unmet
from jtile.ops.operands import Norm, Weight
from jtile.ops.quantized_tensor import BLOCKS
from jtile.ops.weight_codes import FLOAT8

MANY = 128  # with so many rows, or more, a product is bound by the tensor cores, and not by reading the weights
_LARGEST = 448.0  # the largest number of e4m3
_SMALLEST = 2.0**-100  # rows of smaller numbers become zeros, lest the factor that makes them larger is infinite


def _rounded_types(x, *, groups, **_):
    m, blocks, width = x.shape
    return jax.ShapeDtypeStruct((m, blocks, width), FLOAT8), jax.ShapeDtypeStruct((m, groups), jnp.float32)


@jt.kernel(out_type=_rounded_types, grid=lambda x, **_: x.shape[0])
def rounded_rows(x, codes, scale, *, groups: int, packed: bool):
    """x [m, in / 128, 128] as e4m3 codes, in the order of packed weights if asked for, and scales [m, groups]: one for
    each row or for each 128 numbers."""
    i = jt.program_id(0)
    Q, S = _coded(x[i, :, :].astype(jnp.float32), groups, packed)
    scale[i, :] = S
    codes[i, :, :] = Q.astype(codes.dtype)


def _coded(X, groups: int, packed: bool):
    """A row X [in / 128, 128] as numbers of e4m3, not yet rounded, and its scales; see `rounded_rows`."""
    top = jnp.broadcast_to(abs(X).max(), (1,)) if groups == 1 else jnp.max(abs(X), axis=1)
    some = top >= jnp.float32(_SMALLEST)
    S = jnp.where(some, top / jnp.float32(_LARGEST), jnp.float32(1))
    # Products, for a division takes ten times as many instructions.
    Q = X * jnp.where(some, jnp.float32(_LARGEST) / top, jnp.float32(1))[:, None]
    if packed:  # from the order s, h, t, e (see `QuantizedTensor.packed`) to s, t, e, h
        Q = Q.reshape(X.shape[0], 8, 2, 4, 2).transpose(0, 1, 3, 4, 2).reshape(X.shape)
    # None is far beyond the largest number of e4m3; that it is known spares the checks of the conversion.
    return jnp.clip(Q, -_LARGEST, _LARGEST), S


def _normed_types(x, residual, weight, *, packed, **_):
    return *_rounded_types(x, groups=1), jt.like(residual)


@jt.kernel(out_type=_normed_types, grid=lambda x, *_, **__: x.shape[0])
def normed_rounded_rows(x, residual, weight, codes, scale, total, *, eps: float, packed: bool):
    """total = x + residual [m, in / 128, 128], and the rows of its RMS norm with weight [in / 128, 128] as those of
    `rounded_rows` with one scale."""
    i, (_, blocks, width) = jt.program_id(0), x.shape
    t = x[i, :, :].astype(jnp.float32) + residual[i, :, :].astype(jnp.float32)
    total[i, :, :] = t.astype(total.dtype)
    mean = (t * t).sum() * (1.0 / (blocks * width))
    Q, S = _coded(t * jax.lax.rsqrt(mean + eps) * weight[...].astype(jnp.float32), 1, packed)
    scale[i, :] = S
    codes[i, :, :] = Q.astype(codes.dtype)


def misfit(x, weight: Weight, *, activations: str, **_) -> str | None:
    """Why the product is not made in 8 bits, None where it is."""
    (m, inner), (out, groups) = x.shape, weight.scale.shape
    blocks = groups > 1 and inner // groups <= BLOCKS and out % BLOCKS == 0
    return first_unmet(
        (isinstance(m, int) and m >= MANY, f"fewer than {MANY} rows: they stay as they are"),
        (x.dtype in (jnp.bfloat16, jnp.float16), f"rows are {x.dtype.name}, not 16-bit floats"),
        (inner > 0 and inner % BLOCKS == 0 and out > 0, f"rows of {inner} are no multiple of {BLOCKS}"),
        (groups == 1 if activations == "rows" else blocks, f"scales [{out}, {groups}] are not those of {activations}"),
    )


def _rounded(x, weight: Weight, groups: int) -> tuple[jax.Array, jax.Array]:
    """(codes [m, in] of x [m, in], in the order of the weight's, their scales [m, groups])."""
    (m, inner), packed = x.shape, weight.codes.dtype == jnp.uint32
    codes, scale = rounded_rows(x.reshape(m, inner // BLOCKS, BLOCKS), groups=groups, packed=packed)
    return codes.reshape(m, inner), scale


def _codes(weight: Weight, inner: int) -> jax.Array:
    """The codes of a weight, [out, in]."""
    packed, out = weight.codes.dtype == jnp.uint32, weight.scale.shape[0]
    return jax.lax.bitcast_convert_type(weight.codes, FLOAT8).reshape(out, inner) if packed else weight.codes


def product(x, weight: Weight, *, activations: str, out_dtype, **_) -> jax.Array:
    """[m, out] of x [m, in] and an fp8 weight."""
    inner = x.shape[1]
    groups = 1 if activations == "rows" else inner // BLOCKS
    codes, scale = _rounded(x, weight, groups)
    b = _codes(weight, inner)
    if activations == "blocks":
        squares = weight.scale[::BLOCKS, :: weight.scale.shape[1] // groups]
        return scaled_matmul.scaled_matmul(
            codes, b, scale, squares, block=BLOCKS, transpose_b=True, out_dtype=out_dtype
        )
    return _by_rows(codes, scale, (weight,), None, out_dtype)


def gated(x, gate: Weight, up: Weight, *, activation: str, out_dtype) -> jax.Array:
    """`activation(g) * u` [m, out], of the products g and u of x [m, in] with two fp8 weights that have a scale a row:
    the sums of both stay in registers, where two products would write and read 8 bytes for each."""
    return _by_rows(*_rounded(x, gate, 1), (gate, up), activation, out_dtype)


def _by_rows(codes, scale, weights: tuple[Weight, ...], activation: str | None, out_dtype) -> jax.Array:
    """The product of rounded rows with a weight that has a scale a row, or the gated one with two."""
    matrices = (_codes(w, codes.shape[1]) for w in weights)
    scales = scale[:, 0], *(w.scale[:, 0] for w in weights)
    if activation is None:
        return scaled_matmul.row_products(codes, *matrices, *scales, out_dtype=out_dtype)
    return scaled_matmul.gated_row_products(codes, *matrices, *scales, activation=activation, out_dtype=out_dtype)


def normed_product(x, norm: Norm, weights: tuple[Weight, ...], *, eps: float, activation: str | None, out_dtype):
    """(the product [m, out] of the norm of x + residual, or the gated one with two weights, and that sum), for weights
    with a scale a row."""
    (m, inner), packed = x.shape, weights[0].codes.dtype == jnp.uint32
    blocks = inner // BLOCKS, BLOCKS
    rows = (y.reshape(m, *blocks) for y in (x, norm.residual))
    codes, scale, total = normed_rounded_rows(*rows, norm.weight.reshape(blocks), eps=eps, packed=packed)
    return _by_rows(codes.reshape(m, inner), scale, weights, activation, out_dtype), total.reshape(m, inner)
