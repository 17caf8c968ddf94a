"""Products with quantised weights: y = x Wᵀ where W [out, in] stays quantised in memory.

A group of weights is w_j = d q_j + m (m = 0 but for Q4_1, and q - 8 for q in Q4_0), so a row of the product is

    y_r = sum_b d_rb (sum_j q_rbj x_bj) + sum_b m_rb (sum_j x_bj).

Few rows of x: the inner sums run over codes straight from memory (the product is bound by reading them). Many rows: a
tile of W is dequantised once and multiplied with all rows of x.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import (
    dequantized,
    digit_rows,
    float8_rows,
    hopper_gemv,
    hopper_quantized,
    hopper_quantized_shares,
    k_products,
    quantized_lanes,
    quantized_rows,
    rounded_rows,
)
from jtile.ops._shapes import check_float, check_shape, fit, float_dtype, known, machine
from jtile.ops.dispatch import BLOCK_LEVEL, WARPS, Implementation, Op, first_unmet
from jtile.ops.epilogues import ACTIVATIONS, check_activation, finished
from jtile.ops.frozen import gradients, saving
from jtile.ops.operands import NO_EPILOGUE, Epilogue, Weight
from jtile.ops.quantized_rows import dequantized_tile
from jtile.ops.quantized_tensor import QuantizedTensor
from jtile.ops.weight_codes import BLOCK, in_rows, unpack_codes

HALF = BLOCK // 2


def quantized_matmul(
    x, weight: QuantizedTensor, *, bias=None, activation: str | None = None, residual=None, out_dtype=jnp.float32,
) -> jax.Array:  # fmt: skip
    """`activation(x @ weight.T + bias) + residual`, with sums in float32.

    Differentiable in x, bias and residual; the weight is frozen.

    Args:
      x: float [..., in].
      weight: quantised [out, in], of any kind.
      bias: None or [out].
      activation: None, "relu", "silu", "gelu" (erf) or "gelu_tanh".
      residual: None or [..., out], added last.
      out_dtype: dtype of the result, a float; bias, activation and residual come before it is rounded.

    Returns:
      [..., out].

    Raises:
      KernelTypeError: x is no float array, the weight not quantised, or out_dtype no float.
      KernelValueError: shapes that do not fit, or an unknown activation.
    """
    _check(x, weight, activation)
    out_dtype = float_dtype("quantized_matmul", out_dtype, x.dtype)
    out, inner = weight.shape
    rows = x.reshape(math.prod(x.shape[:-1]), inner)
    given = {}
    for name, y, shape in (("bias", bias, (out,)), ("residual", residual, (*x.shape[:-1], out))):
        if y is not None:
            y = jnp.asarray(y, jnp.float32)
            check_shape("quantized_matmul", name, y, shape)
            given[name] = y.reshape(1 if name == "bias" else rows.shape[0], out)
    if out == 0:  # no kernel has tiles for it, and packed codes of no rows do not say how long these are
        return jnp.zeros((*x.shape[:-1], out), out_dtype)
    options = dict(kind=weight.kind, activation=activation, out_dtype=out_dtype.name)
    y = _multiplied(rows, (weight,), Epilogue(**given), **options)
    return y.reshape(*x.shape[:-1], out)


def quantized_matmul_reference(
    x, weight: QuantizedTensor, *, bias=None, activation=None, residual=None, out_dtype=jnp.float32
) -> jax.Array:
    """`quantized_matmul` in `jnp`: the dequantised weights in a float32 product."""
    y = jnp.matmul(x.astype(jnp.float32), weight.dequantize().T, precision="highest")
    y = y if bias is None else y + jnp.asarray(bias).reshape((1,) * (y.ndim - 1) + (-1,))
    y = ACTIVATIONS[activation](y)
    return (y if residual is None else y + residual).astype(out_dtype)


def _check(x, weight: QuantizedTensor, activation) -> None:
    if not isinstance(weight, QuantizedTensor):
        raise jt.errors.KernelTypeError(
            f"quantized_matmul takes a QuantizedTensor as weight, got {type(weight).__name__}"
        )
    check_float("quantized_matmul", x=x)
    if weight.ndim != 2:
        raise jt.errors.KernelValueError(
            f"quantized_matmul takes one weight [out, in], got a stack {list(weight.shape)}; grouped_matmul takes it"
        )
    if x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise jt.errors.KernelValueError(
            f"quantized_matmul: x {tuple(x.shape)} does not fit weights [out, in] = {list(weight.shape)}; "
            f"its last axis must have {weight.shape[1]} elements"
        )
    check_activation("quantized_matmul", activation)


def tiles(m: int, out: int, inner: int) -> dict:
    """The rows of W that a program takes: programs are enough for the threads, and tiles stay in cache."""
    if m <= 1:
        return {"rows": _divisor(out, max(4, (64 << 10) // max(inner, 1)))}
    few = max(8, (4 << 10) // max(inner, 1))  # so many in float32 stay in the first-level cache
    return {"rows": _divisor(out, 64 if m > 32 else few), "bm": m if m <= 512 else math.ceil(m / math.ceil(m / 512))}


@functools.lru_cache(maxsize=1024)
def _divisor(n: int, limit: int) -> int:
    """The largest divisor of n up to the limit; the limit itself if that is much smaller."""
    best = max((d for d in range(1, min(n, limit) + 1) if n % d == 0), default=1)
    return best if 2 * best >= min(n, limit) else max(1, min(n, limit))


def _multiplied(x, weights: tuple[QuantizedTensor, ...], epilogue: Epilogue, **options) -> jax.Array:
    """The product by the op for weights of this kind. Nothing differentiates by their arrays, forwards or backwards:
    quantised weights are frozen."""
    if weights[0].is_super:
        return k_products.product(x, jax.lax.stop_gradient(tuple(w.super_blocks for w in weights)), epilogue, **options)
    arrays = tuple(Weight(w.codes, w.scale, w.minimum) for w in weights)
    ways = {w.activations for w in weights}
    product = _rounded(*ways) if len(ways) == 1 and None not in ways else _exact
    return product(x, jax.lax.stop_gradient(arrays), epilogue, **options)


def _plain(weights: tuple[Weight, ...], kind: str) -> tuple[Weight, ...]:
    """The weights with codes that are not packed, in rows."""
    weights = tuple(in_rows(w, kind) for w in weights)
    return tuple(w._replace(codes=unpack_codes(w.codes, kind)) for w in weights)


def _type(x, weights, *_, **__):
    return jax.ShapeDtypeStruct((x.shape[0], weights[0].codes.shape[0]), jnp.float32)


def _grid_of_rows(x, weights, *_, rows, **__):
    return x.shape[0], jt.cdiv(weights[0].codes.shape[0], rows)


def _grid_of_tiles(x, weights, *_, rows, bm, **__):
    return jt.cdiv(weights[0].codes.shape[0], rows), jt.cdiv(x.shape[0], bm)


@jt.kernel(out_type=_type, grid=_grid_of_rows, name="quantized_gemv")
def _gemv(x, weights: tuple[Weight], epilogue: Epilogue, y, *, kind, activation, rows, steady):
    (weight,), i, r = weights, jt.program_id(0), jt.program_id(1)
    Y = quantized_rows.product_of_row(x, i, weight, r, rows, kind, steady)
    y.tiles(1, rows)[i, r] = finished([Y[None, :]], epilogue, activation, i, r, 1, rows)


@jt.kernel(out_type=_type, grid=_grid_of_tiles, name="quantized_gemm")
def _gemm(x, weights: tuple[Weight], epilogue: Epilogue, y, *, kind, activation, rows, bm):
    (weight,), r, i = weights, jt.program_id(0), jt.program_id(1)
    X = x.tiles(bm, x.shape[1])[i, 0]
    Y = jt.dot(X, dequantized_tile(weight, r, rows, kind, x.shape[1]).T)
    y.tiles(bm, rows)[i, r] = finished([Y], epilogue, activation, i, r, bm, rows)


@jt.kernel(out_type=_type, grid=_grid_of_rows, name="quantized_gated_gemv")
def _gated_gemv(x, weights: tuple[Weight, Weight], y, *, kind, activation, rows, steady):
    # y = act(Wg x) * (Wu x)
    i, r = jt.program_id(0), jt.program_id(1)
    gate, up = (quantized_rows.product_of_row(x, i, w, r, rows, kind, steady) for w in weights)
    y.tiles(1, rows)[i, r] = (ACTIVATIONS[activation](gate) * up)[None, :]


@jt.kernel(out_type=_type, grid=_grid_of_tiles, name="quantized_gated_gemm")
def _gated_gemm(x, weights: tuple[Weight, Weight], y, *, kind, activation, rows, bm):
    r, i = jt.program_id(0), jt.program_id(1)
    X = x.tiles(bm, x.shape[1])[i, 0]
    gate, up = (jt.dot(X, dequantized_tile(w, r, rows, kind, x.shape[1]).T) for w in weights)
    y.tiles(bm, rows)[i, r] = ACTIVATIONS[activation](gate) * up


@jt.kernel(
    out_type=lambda g, *_, inner, **__: jax.ShapeDtypeStruct((g.shape[0], inner), jnp.float32),
    grid=lambda g, *_, chunks, bm, **__: (jt.cdiv(g.shape[0], bm), chunks),
)
def quantized_dx_tiles(g, weight: Weight, dx, *, kind: str, inner: int, rows: int, bm: int, chunks: int):
    """dx [m, in] for the cotangents g [m, out] of x Wᵀ: a chunk of W's columns in a program, `rows` rows at a time."""
    # dX = G W
    i, c = jt.program_id(0), jt.program_id(1)
    G = g.tiles(bm, rows)
    acc = jt.zeros((bm, inner // chunks))
    for r in jt.range(G.shape[1]):
        acc = jt.dot(G[i, r], dequantized_tile(weight, r, rows, kind, inner, c, chunks), acc)
    dx.tiles(bm, inner // chunks)[i, c] = acc


def _dx(g, weight: Weight, kind: str, inner: int):
    weight, sides = in_chunks(weight, kind, inner, known(g.shape[1]))
    bm = fit(g.shape[0], 512 if machine().whole else 64)
    return quantized_dx_tiles(g, weight, kind=kind, inner=inner, bm=bm, **sides)


def in_chunks(weight: Weight, kind: str, inner: int, out: int) -> tuple[Weight, dict[str, int]]:
    """A weight [.., out, in] with codes that are not packed and groups no larger than the columns that a program of the
    reverse mode takes; and how many `rows` at a time it does, and the `chunks` of columns that there are."""
    (weight,) = _plain((weight,), kind)
    width, rows = (512, _divisor(out, 64)) if machine().whole else (64, 32)
    last = weight.scaled_last(kind)
    if not last and (times := inner // max(weight.scale.shape[-1], 1) // width) > 1:
        wide = lambda a: None if a is None else jnp.repeat(a, times, axis=-1)
        weight = weight._replace(scale=wide(weight.scale), minimum=wide(weight.minimum))
    units = inner if last else weight.scale.shape[-1]  # a chunk is made of whole units: weights, or groups
    chunks = next(n for n in range(jt.cdiv(inner, width), units + 1) if units % n == 0) if units else 1
    return weight, {"rows": rows, "chunks": chunks}


# -- rules: what forward passes save, and cotangents; those of weights are None: they are frozen ----------------------


def _of_x(kind: str, inner: int):
    """A function (g, weight) that gives the cotangent of x."""
    return lambda g, weight: _dx(g, weight, kind, inner)


def _forward(kernel, x, weights, *epilogue, kind, activation, **tiles):
    """The forward rule of the kernels for CPUs, by the one for one weight; gated kernels have no epilogue."""
    one = functools.partial(kernel, kind=kind, activation=None, **tiles)
    y, saved = saving(one, x, weights, epilogue[0] if epilogue else NO_EPILOGUE, activation)
    return y, (x, weights, epilogue, saved)


def _backward(residuals, g, *, kind, activation, **_):
    x, weights, epilogue, saved = residuals
    dx, depilogue = gradients(
        weights, epilogue[0] if epilogue else NO_EPILOGUE, saved, g, activation, _of_x(kind, x.shape[1])
    )
    return (dx, None, depilogue) if epilogue else (dx, None)


def _lanes_forward(x, weights, epilogue: Epilogue, *, kind, activation, **_):
    """The forward rule of kernels whose arrays are in groups or blocks; saved are x [m, in] and codes [out, stored]."""
    flat = tuple(w._replace(codes=_flat(w.codes)) for w in weights)
    one = functools.partial(quantized_lanes.product, kind=kind)
    y, saved = saving(one, _flat(x), flat, epilogue, activation)
    return y, (x, flat, epilogue, saved)


def _lanes_backward(residuals, g, *, kind, activation, **_):
    x, weights, epilogue, saved = residuals
    inner = math.prod(x.shape[1:])
    dx, depilogue = gradients(weights, epilogue, saved, g, activation, _of_x(kind, inner))
    return dx.reshape(x.shape).astype(x.dtype), None, depilogue


def _grouped_forward(x, weights, epilogue: Epilogue, **meta):
    """The forward rule of the kernel whose rows of W are in groups: y [m, groups, rows]."""
    groups = weights[0].codes.shape[:2]
    flat = jax.tree.map(lambda a: a.reshape(math.prod(groups), *a.shape[2:]), weights)
    y, residuals = _lanes_forward(x, flat, jax.tree.map(_flat, epilogue), **meta)
    return y.reshape(y.shape[0], *groups), residuals


def _grouped_backward(residuals, g, **meta):
    dx, _, depilogue = _lanes_backward(residuals, _flat(g), **meta)
    return dx, None, jax.tree.map(lambda d: d.reshape(d.shape[0], *g.shape[1:]), depilogue)


def _flat(x):
    """[rows, ...] as a matrix."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


def _hopper_forward(x, weight: Weight, **meta):
    return hopper_quantized.hopper_quantized_product(x, weight, **meta), (x, weight)


def _hopper_backward(residuals, ct, *, kind, **_):
    """The rule of reverse mode: all splits have one cotangent, that of their sum."""
    x, weight = residuals
    weight = weight if kind == "q4_1" else weight._replace(minimum=None)
    return _dx(ct[0].astype(jnp.float32), weight, kind, x.shape[1]).astype(x.dtype), None


def _shares_forward(x, weight: Weight, **meta):
    return hopper_quantized_shares.hopper_quantized_shares(x, weight, **meta), (x, weight)


def _shares_backward(residuals, ct, **meta):
    return _hopper_backward(residuals, ct[None], **meta)


hopper_quantized.hopper_quantized_product.defvjp(_hopper_forward, _hopper_backward)
hopper_quantized_shares.hopper_quantized_shares.defvjp(_shares_forward, _shares_backward)
quantized_lanes.quantized_gemv_lanes.defvjp(_grouped_forward, _grouped_backward)
quantized_lanes.quantized_gemm_lanes.defvjp(_lanes_forward, _lanes_backward)
for _kernel, _single in ((_gemv, _gemv), (_gemm, _gemm), (_gated_gemv, _gemv), (_gated_gemm, _gemm)):
    _kernel.defvjp(functools.partial(_forward, _single), _backward)


# -- implementations: x [m, in], a weight or two of a gated product, and the epilogue ---------------------------------


def _in_lanes(x, weights, epilogue, *, kind, activation, out_dtype):
    """The product in lanes; codes that are packed stay packed for one or two rows of x, else they are unpacked."""
    weights = weights if known(x.shape[0]) in (1, 2) else _plain(weights, kind)
    return quantized_lanes.product(x, weights, epilogue, kind=kind, activation=activation).astype(out_dtype)


def _not_in_lanes(x, weights, epilogue, **_) -> str | None:
    sizes = (*x.shape, weights[0].codes.shape[0])
    return first_unmet((all(known(n) for n in sizes), "an operand is empty"))


def _not_streamed(x, weights, epilogue, *, kind, **_) -> str | None:
    return hopper_gemv.misfit(x, weights[0], kind, gated=len(weights) > 1)


def _many_rows_in_lanes(x, weight, *, kind, out_dtype):
    return quantized_lanes.product(x, _plain((weight,), kind), kind=kind).astype(out_dtype)


def _not_on_warpgroups(x, weight, *, kind, **_) -> str | None:
    return hopper_quantized.misfit(x, weight, kind)


# The product with one packed weight, without an epilogue.
_packed_product = Op(
    "product with a packed weight",
    Implementation("warpgroups", hopper_quantized_shares.product, _not_on_warpgroups, BLOCK_LEVEL, portable=False),
    Implementation("dequantised halves in lanes", _many_rows_in_lanes),
)


def _by_packed_products(x, weights, epilogue, *, kind, activation, out_dtype):
    product = functools.partial(_packed_product, kind=kind)
    return _one_by_one(product, x, weights, epilogue, activation=activation, out_dtype=out_dtype)


def _one_by_one(product, x, weights, epilogue, *, activation, out_dtype):
    """Products with one weight each; the epilogue is left to XLA, as the product is bound by the tensor cores."""
    alone = len(weights) == 1 and activation is None and not jax.tree.leaves(epilogue)
    inner = out_dtype if alone else "float32"
    y, *more = (product(x, w, out_dtype=inner) for w in weights)
    y = ACTIVATIONS[activation](y if epilogue.bias is None else y + epilogue.bias)
    y = y * more[0] if more else y
    return (y if epilogue.residual is None else y + epilogue.residual).astype(out_dtype)


def _not_by_packed_products(x, weights, epilogue, *, kind, **_) -> str | None:
    why = hopper_quantized.misfit(x, weights[0], kind)
    return why or first_unmet((x.shape[0] > 1, "one row needs no tensor cores"))


def _on_cpu(x, weights, epilogue, *, kind, activation, out_dtype):
    """The product on CPUs: one row of x meets codes as they are, more rows meet dequantised tiles of W."""
    weights, x = _plain(weights, kind), x.astype(jnp.float32)
    m, inner = known(x.shape[0]), x.shape[1]
    options = dict(kind=kind, activation=activation, **tiles(m, weights[0].codes.shape[0], inner))
    if m <= 1:
        with jt.config() as now:
            options["steady"] = now.steady
    if len(weights) > 1:
        return (_gated_gemv if m <= 1 else _gated_gemm)(x, weights, **options).astype(out_dtype)
    return (_gemv if m <= 1 else _gemm)(x, weights, epilogue, **options).astype(out_dtype)


_product = Op(
    "quantized_matmul",
    Implementation("tensor cores", _by_packed_products, _not_by_packed_products, BLOCK_LEVEL),
    Implementation("rows against a stream of codes", hopper_gemv.product, _not_streamed, BLOCK_LEVEL, portable=False),
    Implementation("dequantised, then dense", dequantized.product, dequantized.misfit, BLOCK_LEVEL, portable=False),
    Implementation("codes in lanes", _in_lanes, _not_in_lanes, WARPS),
    Implementation("rows of codes", _on_cpu),
)


def _exact(x, weights, epilogue, *, kind, **options):
    """The product without rounding, which takes no panels."""
    weights = tuple(in_rows(w, kind) for w in weights)
    return _product(x, weights, epilogue, kind=kind, **options)


def _as_it_is(x, weights, epilogue, *, activations, **options):
    del activations
    return _exact(x, weights, epilogue, **options)


def _in_8_bits(x, weights, epilogue, *, kind, activation, activations, out_dtype):
    if len(weights) == 2 and activations == "rows":
        return float8_rows.gated(x, *weights, activation=activation, out_dtype=out_dtype)
    product = functools.partial(float8_rows.product, activations=activations)
    return _one_by_one(product, x, weights, epilogue, activation=activation, out_dtype=out_dtype)


def _not_in_8_bits(x, weights, epilogue, *, activations, **_) -> str | None:
    if activations == rounded_rows.INTEGERS:
        return "rows may be rounded to integers of 16 bits only"
    return float8_rows.misfit(x, weights[0], activations=activations)


def not_in_bytes(x, weights, epilogue, *, kind, **options) -> str | None:
    """Why rows that may be rounded to integers of 16 bits are not multiplied as two bytes each; None if they are."""
    return rounded_rows.misfit(x, weights, epilogue, kind=kind, **options) or digit_rows.misfit(x, weights, kind=kind)


# The product with weights that say how rows may be rounded; its derivative is that without rounding.
_rounded_product = Op(
    "product with rounded rows",
    Implementation("rows in 8 bits", _in_8_bits, _not_in_8_bits, BLOCK_LEVEL, portable=False),
    Implementation("rows in bytes", digit_rows.product, not_in_bytes, ("byte tiles",), portable=False),
    Implementation("rows in integers", rounded_rows.product, rounded_rows.misfit, ("int16 products",), portable=False),
    Implementation("rows as they are", _as_it_is),
)


@functools.cache
def _rounded(activations: str):
    return functools.partial(_rounded_product, activations=activations)


def quantized_gated(
    x, gate: QuantizedTensor, up: QuantizedTensor, *, activation: str = "silu", out_dtype=jnp.float32
) -> jax.Array:
    """`activation(x @ gate.T) * (x @ up.T)`, computed in float32; x [..., in], weights [out, in] of one kind; see
    `gated_mlp`."""
    for weight in (gate, up):
        _check(x, weight, activation)
    if gate.shape != up.shape:
        raise jt.errors.KernelValueError(f"gated_mlp: gate {list(gate.shape)} and up {list(up.shape)} differ")
    out, inner = gate.shape
    if gate.is_packed != up.is_packed:
        gate, up = gate.unpacked(), up.unpacked()
    rows = x.reshape(math.prod(x.shape[:-1]), inner)
    options = dict(kind=gate.kind, activation=activation, out_dtype=jnp.dtype(out_dtype).name)
    y = _multiplied(rows, (gate, up), NO_EPILOGUE, **options)
    return y.reshape(*x.shape[:-1], out)
