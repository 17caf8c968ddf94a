"""Products with quantised weights: y = x Wᵀ where W [out, in] stays quantised in memory.

A block of 32 weights is w_j = d q_j + m (m = 0 but for Q4_1, and q - 8 for q in Q4_0), so a row of the product is

    y_r = sum_b d_rb (sum_j q_rbj x_bj) + sum_b m_rb (sum_j x_bj).

Few rows of x: the inner sums run over codes straight from memory (the product is bound by reading them). Many rows: a
  tile of
W is dequantised once and multiplied with all rows of x.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.ops import hopper_gemv, hopper_quantized, quantized_lanes
from jtile.ops._shapes import check_float, check_shape, fit, known, machine
from jtile.ops.epilogues import ACTIVATIONS, activation_slope, check_activation, gate_slope
from jtile.ops.platforms import on_cuda
from jtile.ops.quantized_tensor import BLOCK, QuantizedTensor, unpack_codes

HALF = BLOCK // 2


def quantized_matmul(
    x, weight: QuantizedTensor, *, bias=None, activation: str | None = None, residual=None, out_dtype=jnp.float32
) -> jax.Array:
    """`activation(x @ weight.T + bias) + residual`, with sums in float32.

    Differentiable in x, bias and residual; the weight is frozen.

    Args:
      x: float [..., in].
      weight: quantised [out, in], of any kind.
      bias: None or [out].
      activation: None, "relu", "silu", "gelu" (erf) or "gelu_tanh".
      residual: None or [..., out], added last.
      out_dtype: of the result, a float; bias, activation and residual come before it is rounded.

    Returns:
      [..., out].

    Raises:
      KernelTypeError: x is no float array, the weight not quantised, or out_dtype no float.
      KernelValueError: shapes that do not fit, or an unknown activation.
    """
    _check(x, weight, activation)
    out_dtype = jnp.dtype(out_dtype)
    if not jnp.issubdtype(out_dtype, jnp.floating):
        raise jt.errors.KernelTypeError(
            f"quantized_matmul: out_dtype {out_dtype.name}; expected a float, for instance {x.dtype.name}"
        )
    out, inner = weight.shape
    rows = x.reshape(math.prod(x.shape[:-1]), inner)
    m = rows.shape[0]
    extra = []
    for name, y, shape in (("bias", bias, (out,)), ("residual", residual, (*x.shape[:-1], out))):
        if y is not None:
            y = jnp.asarray(y, jnp.float32)
            check_shape("quantized_matmul", name, y, shape)
            extra.append(y.reshape(1 if name == "bias" else m, out))
    options = dict(kind=weight.kind, activation=activation, has_bias=bias is not None)
    if hopper_quantized.takes(rows, weight.codes, inner, weight.kind) and m > 1:
        y = _on_hopper(rows, weight, jnp.float32 if extra or activation else out_dtype)
        y = ACTIVATIONS[activation](y if bias is None else y + extra[0])
        y = y if residual is None else y + extra[-1]
    elif hopper_gemv.takes(rows, weight.codes, weight.kind):
        y = on_cuda(*_streamed(**options, out_dtype=out_dtype), (rows, extra), _arrays(weight, m))
    elif _in_lanes(m, out, inner):
        y = quantized_lanes.product(rows, _arrays(weight, m), extra, **options)
    else:
        kernel = _gemv if m <= 2 else _gemm
        y = kernel(rows.astype(jnp.float32), *_arrays(weight), *extra, **options, **_tiles(m, out, inner))
    return y.reshape(*x.shape[:-1], out).astype(out_dtype)


def quantized_matmul_reference(
    x, weight: QuantizedTensor, *, bias=None, activation=None, residual=None, out_dtype=jnp.float32
) -> jax.Array:
    """The same in `jnp`: the dequantised weights in a float32 product."""
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
    if x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise jt.errors.KernelValueError(
            f"quantized_matmul: x {tuple(x.shape)} does not fit weights [out, in] = {list(weight.shape)}; "
            "its last axis must be in"
        )
    check_activation("quantized_matmul", activation)


def _in_lanes(*sizes) -> bool:
    """Whether the kernels for GPUs take a product of these sizes: they know no empty ones."""
    return jt.platform() != "cpu" and all(known(n) for n in sizes)


def _tiles(m: int, out: int, inner: int) -> dict:
    """Rows of W a program takes: enough programs for the threads, tiles that stay in cache."""
    if m <= 2:
        budget = max(4, (64 << 10) // max(inner, 1))
        return {"rows": _divisor(out, budget)}
    return {"rows": _divisor(out, 64), "bm": m if m <= 512 else math.ceil(m / math.ceil(m / 512))}


@functools.lru_cache(maxsize=1024)
def _divisor(n: int, limit: int) -> int:
    """The largest divisor of n up to the limit; the limit itself if that is much smaller."""
    best = max((d for d in range(1, min(n, limit) + 1) if n % d == 0), default=1)
    return best if 2 * best >= min(n, limit) else max(1, min(n, limit))


def _epilogue(y, refs, r, rows: int, i, bm: int, *, activation, has_bias: bool):
    """Bias, activation and residual of one tile y [bm, rows] of the result."""
    refs = list(refs)
    if has_bias:
        y = y + refs.pop(0).tiles(1, rows)[0, r]
    y = ACTIVATIONS[activation](y)
    return y + refs.pop(0).tiles(bm, rows)[i, r] if refs else y


def _arrays(weight: QuantizedTensor, m: int = 0) -> list[jax.Array]:
    """The weight's arrays; nothing differentiates by them, forwards or backwards: quantised weights are frozen. Packed
    codes stay so for products of one or two rows on GPUs."""
    weight = weight if known(m) in (1, 2) else weight.unpacked()
    return [jax.lax.stop_gradient(x) for x in (weight.codes, weight.scale, weight.minimum) if x is not None]


def _on_hopper(rows, weight: QuantizedTensor, out_dtype: Any = jnp.float32):
    frozen = jax.lax.stop_gradient(weight)
    arrays = [x for x in (frozen.codes, frozen.scale, frozen.minimum) if x is not None]
    return on_cuda(*_many_rows(weight.kind, out_dtype), rows, arrays)


@functools.lru_cache(maxsize=128)
def _many_rows(kind: str, out_dtype):
    """For `on_cuda`: x, and the arrays of a packed weight."""
    plain = lambda arrays: [unpack_codes(arrays[0], kind), *arrays[1:]]
    lanes = functools.partial(quantized_lanes.product, kind=kind, activation=None)
    elsewhere = lambda x, arrays: lanes(x, plain(arrays), []).astype(out_dtype)
    return (lambda x, arrays: hopper_quantized.product(x, arrays, kind, out_dtype)), elsewhere


@functools.lru_cache(maxsize=128)
def _streamed(*, out_dtype=jnp.float32, **options):
    """For `on_cuda`: x and what stands behind the product, and the arrays of the weights."""
    here = functools.partial(hopper_gemv.product, out_dtype=out_dtype, **options)
    elsewhere = lambda *given: quantized_lanes.product(*given, **options).astype(out_dtype)
    call = lambda f: lambda moved, arrays: f(moved[0], arrays, moved[1])
    return call(here), call(elsewhere)


def _split(refs, kind: str):
    """The weight as (codes, scale, minimum or None), and the Refs behind it."""
    codes, scale, *rest = refs
    return ((codes, scale, rest[0]), rest[1:]) if kind == "q4_1" else ((codes, scale, None), rest)


def _codes(codes, r, rows: int, kind: str, blocks: int, c=0, chunks: int = 1):
    """The codes of a tile as float32 parts: [rows, blocks, width] each, and where each part stands in its block.

    Of the columns only those of chunk c of `chunks`, which holds `blocks` blocks.
    """
    stored = codes.shape[1] // chunks
    q = codes.tiles(rows, stored)[r, c].reshape(rows, blocks, stored // blocks)
    if kind in ("int8", "q8_0"):
        return [q.astype(jnp.float32)]
    parts = [(q & np.uint8(15)).astype(jnp.float32), (q >> np.uint8(4)).astype(jnp.float32)]
    return [p - np.float32(8) for p in parts] if kind == "q4_0" else parts


def _row_product(refs, X, r, rows: int, kind: str):
    """Y [rows] = W x for one row of x, X [blocks, parts, width]; nothing of W is stored."""
    codes, scale, low = refs
    blocks = scale.shape[1]
    parts = _codes(codes, r, rows, kind, blocks)
    d = scale.tiles(rows, blocks)[r, 0].astype(jnp.float32)
    dot = parts[0] * X[None, :, 0]
    for k, part in enumerate(parts[1:], 1):
        dot = dot + part * X[None, :, k]
    Y = jnp.sum(d[:, :, None] * dot, axis=(1, 2))
    if low is None:
        return Y
    m = low.tiles(rows, blocks)[r, 0].astype(jnp.float32)
    return Y + jnp.sum(m * jnp.sum(X, axis=(1, 2))[None, :], axis=1)


def _dequantized(refs, r, rows: int, kind: str, inner: int, c=0, chunks: int = 1):
    """W [rows, inner / chunks] of one tile in float32: chunk c of its columns."""
    codes, scale, low = refs
    blocks = 1 if kind == "int8" else scale.shape[1] // chunks  # int8: one scale for every chunk
    at = 0 if kind == "int8" else c
    d = scale.tiles(rows, blocks)[r, at].astype(jnp.float32)[:, :, None]
    W = [d * q for q in _codes(codes, r, rows, kind, blocks, c, chunks)]
    if low is not None:
        m = low.tiles(rows, blocks)[r, at].astype(jnp.float32)[:, :, None]
        W = [w + m for w in W]
    return jnp.concatenate(W, axis=2).reshape(rows, inner // chunks)


def _product_type(x, codes, *_, **__):
    return jax.ShapeDtypeStruct((x.shape[0], codes.shape[0]), jnp.float32)


def _parts(kind: str) -> int:
    return 2 if kind in ("q4_0", "q4_1") else 1


@jt.kernel(
    out_type=_product_type,
    grid=lambda x, codes, *_, rows, **__: (x.shape[0], jt.cdiv(codes.shape[0], rows)),
    name="quantized_gemv",
)
def _gemv(x, *refs, kind, activation, has_bias, rows):
    *refs, y = refs
    W, extra = _split(refs, kind)
    i, r = jt.program_id(0), jt.program_id(1)
    X = x[i, :].reshape(W[1].shape[1], _parts(kind), -1)
    Y = _row_product(W, X, r, rows, kind)
    y.tiles(1, rows)[i, r] = _epilogue(Y[None, :], extra, r, rows, i, 1, activation=activation, has_bias=has_bias)


@jt.kernel(
    out_type=_product_type,
    grid=lambda x, codes, *_, rows, bm, **__: (jt.cdiv(codes.shape[0], rows), jt.cdiv(x.shape[0], bm)),
    name="quantized_gemm",
)
def _gemm(x, *refs, kind, activation, has_bias, rows, bm):
    *refs, y = refs
    W, extra = _split(refs, kind)
    r, i = jt.program_id(0), jt.program_id(1)
    X = x.tiles(bm, x.shape[1])[i, 0]
    Y = jt.dot(X, _dequantized(W, r, rows, kind, x.shape[1]).T)
    y.tiles(bm, rows)[i, r] = _epilogue(Y, extra, r, rows, i, bm, activation=activation, has_bias=has_bias)


@jt.kernel(
    out_type=_product_type,
    grid=lambda x, codes, *_, rows, **__: (x.shape[0], jt.cdiv(codes.shape[0], rows)),
    name="quantized_gated_gemv",
)
def _gated_gemv(x, *refs, kind, activation, rows):
    # y = act(Wg x) * (Wu x)
    *refs, y = refs
    G, U = _split(refs[: len(refs) // 2], kind)[0], _split(refs[len(refs) // 2 :], kind)[0]
    i, r = jt.program_id(0), jt.program_id(1)
    X = x[i, :].reshape(G[1].shape[1], _parts(kind), -1)
    gate, up = _row_product(G, X, r, rows, kind), _row_product(U, X, r, rows, kind)
    y.tiles(1, rows)[i, r] = (ACTIVATIONS[activation](gate) * up)[None, :]


@jt.kernel(
    out_type=_product_type,
    grid=lambda x, codes, *_, rows, bm, **__: (jt.cdiv(codes.shape[0], rows), jt.cdiv(x.shape[0], bm)),
    name="quantized_gated_gemm",
)
def _gated_gemm(x, *refs, kind, activation, rows, bm):
    *refs, y = refs
    G, U = _split(refs[: len(refs) // 2], kind)[0], _split(refs[len(refs) // 2 :], kind)[0]
    r, i = jt.program_id(0), jt.program_id(1)
    X = x.tiles(bm, x.shape[1])[i, 0]
    gate, up = (jt.dot(X, _dequantized(W, r, rows, kind, x.shape[1]).T) for W in (G, U))
    y.tiles(bm, rows)[i, r] = ACTIVATIONS[activation](gate) * up


@jt.kernel(
    out_type=lambda g, *_, inner, **__: jax.ShapeDtypeStruct((g.shape[0], inner), jnp.float32),
    grid=lambda g, *_, chunks, bm, **__: (jt.cdiv(g.shape[0], bm), chunks),
)
def quantized_dx_tiles(g, *refs, kind: str, inner: int, rows: int, bm: int, chunks: int):
    """dx [m, in] for the cotangents g [m, out] of x Wᵀ: a chunk of W's columns in a program, `rows` rows at a time."""
    # dX = G W
    *refs, dx = refs
    W, _ = _split(refs, kind)
    i, c = jt.program_id(0), jt.program_id(1)
    G = g.tiles(bm, rows)
    acc = jt.zeros((bm, inner // chunks))
    for r in jt.range(G.shape[1]):
        acc = jt.dot(G[i, r], _dequantized(W, r, rows, kind, inner, c, chunks), acc)
    dx.tiles(bm, inner // chunks)[i, c] = acc


def _dx(g, arrays, kind: str, inner: int):
    arrays = [unpack_codes(arrays[0], kind), *arrays[1:]]
    units = inner if kind == "int8" else inner // BLOCK  # what a chunk is made of
    width, tall, rows = (512, 512, _divisor(g.shape[1], 64)) if machine().whole else (64, 64, 32)
    chunks = next(n for n in range(jt.cdiv(inner, width), units + 1) if units % n == 0) if units else 1
    bm = fit(g.shape[0], tall)
    return quantized_dx_tiles(g, *arrays, kind=kind, inner=inner, rows=rows, bm=bm, chunks=chunks)


def _forward(kernel, x, *refs, kind, activation, has_bias, **tiles):
    arrays, extra = _weights(refs, kind)
    bias, residual = (extra[:1], extra[1:]) if has_bias else ([], extra)
    z = kernel(x, *arrays, *bias, kind=kind, activation=None, has_bias=has_bias, **tiles)
    y = ACTIVATIONS[activation](z)
    return y + residual[0] if residual else y, (x, arrays, z if activation else None, (None,) * len(residual))


def _backward(residuals, g, *, kind, activation, has_bias, **_):
    x, arrays, z, others = residuals
    dz = g if activation is None else activation_slope(z, g, activation)
    bias = [dz.sum(0, keepdims=True)] if has_bias else []
    return _dx(dz, arrays, kind, x.shape[1]), *(None for _ in arrays), *bias, *(g for _ in others)


def _gated_forward(kernel, x, *refs, kind, activation, **tiles):
    gate, up = refs[: len(refs) // 2], refs[len(refs) // 2 :]
    single = _gemv if kernel is _gated_gemv else _gemm
    g, u = (single(x, *w, kind=kind, activation=None, has_bias=False, **tiles) for w in (gate, up))
    return ACTIVATIONS[activation](g) * u, (x, gate, up, g, u)


def _gated_backward(residuals, ct, *, kind, activation, **_):
    x, gate, up, g, u = residuals
    dg, du = gate_slope(g, u, ct, activation)
    dx = _dx(dg, gate, kind, x.shape[1]) + _dx(du, up, kind, x.shape[1])
    return dx, *(None for _ in (*gate, *up))


def _weights(arrays, kind: str):
    """The arrays of the weight, and those behind them."""
    n = 3 if kind == "q4_1" else 2
    return arrays[:n], arrays[n:]


def _lanes_flat(x, refs, kind: str):
    """x as [m, in] and codes as [out, stored], as the arrays of a weight stand."""
    n = 3 if kind == "q4_1" else 2
    return x.reshape(x.shape[0], -1), [a.reshape(a.shape[0], -1) if k % n == 0 else a for k, a in enumerate(refs)]


def _lanes_forward(x, *refs, kind, activation, has_bias, gated, **_):
    if gated:
        rows, arrays = _lanes_flat(x, refs, kind)
        halves = arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]
        g, u = (quantized_lanes.product(rows, w, [], kind=kind, activation=None) for w in halves)
        return ACTIVATIONS[activation](g) * u, (x, *halves, g, u)
    arrays, more = _weights(refs, kind)
    bias, residual = more[:has_bias], more[has_bias:]
    rows, arrays = _lanes_flat(x, arrays, kind)
    z = quantized_lanes.product(rows, arrays, bias, kind=kind, activation=None, has_bias=has_bias)
    y = ACTIVATIONS[activation](z)
    return y + residual[0] if residual else y, (x, arrays, z if activation else None, (None,) * len(residual))


def _lanes_backward(residuals, ct, *, gated, **meta):
    x, *rest = residuals
    flat = (x.reshape(x.shape[0], -1), *rest)
    dx, *more = _gated_backward(flat, ct, **meta) if gated else _backward(flat, ct, **meta)
    return dx.reshape(x.shape).astype(x.dtype), *more


def _grouped_forward(x, *refs, kind, has_bias, gated, **meta):
    """Of rows in groups: y [m, groups, rows]."""
    weights = (3 if kind == "q4_1" else 2) * (1 + gated)
    groups = refs[0].shape[:2]
    out = math.prod(groups)
    flat = [a.reshape(out, *a.shape[2:]) if k < weights else a.reshape(a.shape[0], out) for k, a in enumerate(refs)]
    y, residuals = _lanes_forward(x, *flat, kind=kind, has_bias=has_bias, gated=gated, **meta)
    return y.reshape(y.shape[0], *groups), residuals


def _grouped_backward(residuals, ct, **meta):
    grads = _lanes_backward(residuals, ct.reshape(ct.shape[0], math.prod(ct.shape[1:])), **meta)
    return grads[0], *(None if g is None else g.reshape(g.shape[0], *ct.shape[1:]) for g in grads[1:])


def _hopper_forward(x, codes, scale, minimum, **meta):
    y = hopper_quantized.hopper_quantized_product(x, codes, scale, minimum, **meta)
    return y, (x, codes, scale, minimum)


def _hopper_backward(residuals, ct, *, kind, **_):
    """All splits have the cotangent of their sum."""
    x, codes, scale, minimum = residuals
    dx = _dx(ct[0].astype(jnp.float32), [codes, scale, minimum] if kind == "q4_1" else [codes, scale], kind, x.shape[1])
    return dx.astype(x.dtype), None, None, None


hopper_quantized.hopper_quantized_product.defvjp(_hopper_forward, _hopper_backward)
quantized_lanes.quantized_gemv_lanes.defvjp(_grouped_forward, _grouped_backward)
quantized_lanes.quantized_gemm_lanes.defvjp(_lanes_forward, _lanes_backward)
for _kernel in (_gemv, _gemm):
    _kernel.defvjp(functools.partial(_forward, _kernel), _backward)
for _kernel in (_gated_gemv, _gated_gemm):
    _kernel.defvjp(functools.partial(_gated_forward, _kernel), _gated_backward)


def quantized_gated(x, gate: QuantizedTensor, up: QuantizedTensor, *, activation: str = "silu") -> jax.Array:
    """`activation(x @ gate.T) * (x @ up.T)` in float32; x [..., in], weights [out, in] of one kind; see `gated_mlp`."""
    for weight in (gate, up):
        _check(x, weight, activation)
    if gate.shape != up.shape:
        raise jt.errors.KernelValueError(f"gated_mlp: gate {list(gate.shape)} and up {list(up.shape)} differ")
    out, inner = gate.shape
    rows = x.reshape(math.prod(x.shape[:-1]), inner)
    m = rows.shape[0]
    if gate.is_packed != up.is_packed:
        gate, up = gate.unpacked(), up.unpacked()
    if hopper_quantized.takes(rows, gate.codes, inner, gate.kind) and m > 1:
        y = ACTIVATIONS[activation](_on_hopper(rows, gate)) * _on_hopper(rows, up)
        return y.reshape(*x.shape[:-1], out)
    options = dict(kind=gate.kind, activation=activation, gated=True)
    if hopper_gemv.takes(rows, gate.codes, gate.kind, gated=True):
        y = on_cuda(*_streamed(**options), (rows, []), [*_arrays(gate, m), *_arrays(up, m)])
        return y.reshape(*x.shape[:-1], out)
    if _in_lanes(m, out, inner):
        y = quantized_lanes.product(rows, [*_arrays(gate, m), *_arrays(up, m)], [], **options)
        return y.reshape(*x.shape[:-1], out)
    rows = rows.astype(jnp.float32)
    kernel = _gated_gemv if rows.shape[0] <= 2 else _gated_gemm
    y = kernel(
        rows, *_arrays(gate), *_arrays(up), kind=gate.kind, activation=activation, **_tiles(rows.shape[0], out, inner)
    )
    return y.reshape(*x.shape[:-1], out)
