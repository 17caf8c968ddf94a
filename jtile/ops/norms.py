"""Layer norm (Ba, Kiros and Hinton 2016) and RMS norm (Zhang and Sennrich 2019) over the last axis."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax

import jtile as jt
from jtile.ops import gpu_tiles, spaces
from jtile.ops._shapes import (
    as_rows,
    check_axis,
    check_float,
    check_shape,
    known,
    machine,
    of_rows,
    tuned,
    weighted_rows,
    wide,
)
from jtile.ops.dispatch import WARPS, Implementation, Op, first_unmet
from jtile.ops.norms_backward import Cotangents, norm_backward
from jtile.ops.operands import Shaped


class Affine[T: Shaped](NamedTuple):
    """What follows a layer norm, t w + b: the weight [n] and the bias [n], either or both None."""

    weight: T | None = None
    bias: T | None = None

    def each(self, part) -> Affine:
        """`part` of the weight and of the bias."""
        return Affine(*(None if x is None else part(x) for x in self))

    def of(self, t):
        """t w + b for a tile t, with w and b as tiles."""
        t = t if self.weight is None else t * self.weight.astype(t.dtype)
        return t if self.bias is None else t + self.bias.astype(t.dtype)


@jt.autotune(space=spaces.rows, override=True)
@jt.kernel(out_type=lambda x, params, **_: jt.like(x), grid=lambda x, params, *, br, **_: jt.cdiv(x.shape[0], br))
def layer_norm_rows(x, params: Affine, y, *, br: int, eps: float):
    """Rows of x [rows, n], `br` of them in a program."""
    # y = (x - mean) / sqrt(var + eps) * w + b
    i, n = jt.program_id(0), x.shape[1]
    X, Y = x.tiles(br, n), y.tiles(br, n)
    t = wide(X[i, 0])
    centred = t - t.sum(1, keepdims=True) * (1.0 / n)
    variance = (centred * centred).sum(1, keepdims=True) * (1.0 / n)
    out = centred * jax.lax.rsqrt(variance + eps)
    Y[i, 0] = params.each(lambda ref: ref[...][None, :]).of(out).astype(y.dtype)


@jt.kernel(out_type=lambda x, params, **_: jt.like(x), grid=lambda x, params, **_: x.shape[0])
def layer_norm_long_rows(x, params: Affine, y, *, bn: int, eps: float):
    """`layer_norm_rows`, one row in a program: held for its sums, and read again, in blocks of `bn`, for its result.

    The second time the row comes from the cache: the registers of the first time are free then, and further rows are on
    their way.
    """
    i, n = jt.program_id(0), x.shape[1]
    t = wide(x.tiles(None, n)[i, 0])
    mean = t.sum() * (1.0 / n)
    centred = t - mean
    scale = jax.lax.rsqrt((centred * centred).sum() * (1.0 / n) + eps)
    X, Y, P = x.tiles(None, bn), y.tiles(None, bn), params.each(lambda ref: ref.tiles(bn))
    for j in jt.range(X.shape[1]):
        out = (wide(X[i, j]) - mean) * scale
        Y[i, j] = P.each(lambda view, j=j: view[j]).of(out).astype(y.dtype)


def rms(t, w, eps: float, offset: float):
    """In a kernel, the RMS norm of rows t [rows, n] with a weight w [n]."""
    # y = x / sqrt(mean(x^2) + eps) * (w + offset)
    mean = (t * t).sum(1, keepdims=True) * (1.0 / t.shape[1])
    w = w.astype(t.dtype)
    return t * jax.lax.rsqrt(mean + eps) * (w + offset if offset else w)[None, :]


@jt.autotune(space=spaces.rows, override=True)
@jt.kernel(out_type=lambda x, w, **_: jt.like(x), grid=lambda x, w, *, br, **_: jt.cdiv(x.shape[0], br))
def rms_norm_rows(x, w, y, *, br: int, eps: float, offset: float):
    """Rows of x [rows, n], `br` of them in a program."""
    i, n = jt.program_id(0), x.shape[1]
    X, Y = x.tiles(br, n), y.tiles(br, n)
    Y[i, 0] = rms(wide(X[i, 0]), w[...], eps, offset).astype(y.dtype)


@jt.autotune(space=spaces.rows, override=True)
@jt.kernel(
    out_type=lambda x, r, w, **_: (jt.like(x), jt.like(r)), grid=lambda x, r, w, *, br, **_: jt.cdiv(x.shape[0], br)
)
def rms_norm_residual_rows(x, r, w, y, s, *, br: int, eps: float, offset: float):
    """s = x + r, y = rms_norm(s): the two steps between the blocks of a transformer in one pass over memory."""
    i, n = jt.program_id(0), x.shape[1]
    X, R, Y, S = (ref.tiles(br, n) for ref in (x, r, y, s))
    t = wide(X[i, 0])
    t = t + R[i, 0].astype(t.dtype)
    S[i, 0] = t.astype(s.dtype)
    Y[i, 0] = rms(t, w[...], eps, offset).astype(y.dtype)


def _long_rows(x, params, *, eps: float):
    how = gpu_tiles.long_rows(known(x.shape[1]), x.dtype.itemsize)
    assert how is not None
    return tuned(layer_norm_long_rows, **how.options)(x, params, **how.tiles, eps=eps)


def _not_long_rows(x, *_, **__) -> str | None:
    suits = gpu_tiles.long_rows(known(x.shape[1]), x.dtype.itemsize) is not None
    return first_unmet((suits, f"rows of {x.shape[1]} {x.dtype.name} are as quick when they are held"))


def _held_rows(x, params, *, eps: float):
    br = weighted_rows(*x.shape)
    return of_rows(layer_norm_rows, x, br, weighted=True, centred=True)(x, params, br=br, eps=eps)


# The layer norm of x [rows, n], by the kernel that suits the length of the rows.
_layer = Op(
    "rows of layer_norm",
    Implementation("rows read twice", _long_rows, _not_long_rows, WARPS),
    Implementation("rows held", _held_rows),
)


def _layer_forward(x, params, *, eps: float, **_):
    return _layer(x, params, eps=eps), (x, params)


def _layer_backward(residuals, g, *, eps: float, **_):
    x, params = residuals
    sums = int(params.weight is not None) if params.bias is None else 2  # gradients of w, and then of the bias
    (dx,), gradients = norm_backward((x,), params.weight, Cotangents(g), sums=sums, centre=True, eps=eps)
    of = lambda p, k: None if p is None else gradients[k].astype(p.dtype)
    return dx, Affine(of(params.weight, 0), of(params.bias, 1))


def _rms_forward(x, w, **meta):
    return of_rows(rms_norm_rows, x, meta["br"], weighted=True)(x, w, **meta), (x, w)


def _rms_backward(residuals, g, *, eps: float, offset: float, **_):
    x, w = residuals
    (dx,), (dw,) = norm_backward((x,), w, Cotangents(g), sums=1, centre=False, eps=eps, offset=offset)
    return dx, dw.astype(w.dtype)


def _rms_residual_forward(x, r, w, **meta):
    return of_rows(rms_norm_residual_rows, x, meta["br"], weighted=True)(x, r, w, **meta), (x, r, w)


def _rms_residual_backward(residuals, cts, *, eps: float, offset: float, **_):
    x, r, w = residuals
    (dx, dr), (dw,) = norm_backward((x, r), w, Cotangents(*cts), sums=1, centre=False, eps=eps, offset=offset)
    return dx, dr, dw.astype(w.dtype)


def _not_left_to_xla(x, *_, **__) -> str | None:
    """Why XLA does not compute the norm, None where it does: several programs should share a row longer than a GPU's
    program holds, as XLA's do."""
    return first_unmet((known(x.shape[-1]) > machine().one_tile, f"a program holds rows of {x.shape[-1]}"))


layer_norm_rows.defvjp(_layer_forward, _layer_backward)
layer_norm_long_rows.defvjp(_layer_forward, _layer_backward)
rms_norm_rows.defvjp(_rms_forward, _rms_backward)
rms_norm_residual_rows.defvjp(_rms_residual_forward, _rms_residual_backward)


@functools.partial(jax.jit, static_argnames=("eps",), inline=True)
def layer_norm(
    x: jax.Array, weight: jax.Array | None = None, bias: jax.Array | None = None, *, eps: float = 1e-5
) -> jax.Array:
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the last axis, computed in float32 without cancellation.

    Differentiable in x, weight and bias. On a GPU rows of more than 32768 elements are left to XLA.

    Args:
      x: float array [..., n].
      weight, bias: float arrays [n], or None for ones and zeros.
      eps: added to the variance.
    Returns:
      An array like `x`.
    Raises:
      KernelTypeError: an array is not of a float dtype. KernelValueError: a weight or bias does not fit.
    """
    check_float("layer_norm", x=x, weight=weight, bias=bias)
    check_axis(-1, x.ndim, "layer_norm")
    for name, p in (("weight", weight), ("bias", bias)):
        if p is not None:
            check_shape("layer_norm", name, p, x.shape[-1:])
    if x.size == 0:
        return x
    return _layer_norm(x, weight, bias, eps=float(eps))


@functools.partial(jax.jit, static_argnames=("eps", "weight_offset"), inline=True)
def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    *,
    eps: float = 1e-6,
    residual: jax.Array | None = None,
    weight_offset: float = 0.0,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`x / sqrt(mean(x^2) + eps) * (weight + weight_offset)` over the last axis, computed in float32.

    Differentiable in x, weight and residual. On a GPU rows of more than 32768 elements are left to XLA.

    Args:
      x: float array [..., n].
      weight: float array [n].
      eps: added to the mean square.
      residual: float array of x's shape; then the norm is that of `x + residual` (the sum is not rounded before it).
      weight_offset: 1.0 for models that store `weight - 1` (Gemma).
    Returns:
      An array like `x`; with `residual` the pair (that array, `x + residual` in the residual's dtype).
    Raises:
      KernelTypeError: an array is not of a float dtype. KernelValueError: weight or residual does not fit.
    """
    check_float("rms_norm", x=x, weight=weight, residual=residual)
    check_axis(-1, x.ndim, "rms_norm")
    check_shape("rms_norm", "weight", weight, x.shape[-1:])
    if residual is not None:
        check_shape("rms_norm", "residual", residual, x.shape)
    if x.size == 0:
        return x if residual is None else (x, residual)
    return _rms_norm(x, weight, residual, eps=float(eps), weight_offset=float(weight_offset))


def layer_norm_reference(x, weight=None, bias=None, *, eps: float = 1e-5):
    """`layer_norm` in jnp."""
    t = wide(x)
    centred = t - t.mean(-1, keepdims=True)
    out = centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + eps)
    lead = (1,) * (x.ndim - 1) + (-1,)
    out = out if weight is None else out * wide(weight).reshape(lead)
    return (out if bias is None else out + wide(bias).reshape(lead)).astype(x.dtype)


def rms_norm_reference(x, weight, *, eps: float = 1e-6, residual=None, weight_offset: float = 0.0):
    """`rms_norm` in jnp."""
    t = wide(x) if residual is None else wide(x) + wide(residual)
    scale = jax.lax.rsqrt((t * t).mean(-1, keepdims=True) + eps)
    y = (t * scale * (wide(weight) + weight_offset).reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)
    return y if residual is None else (y, t.astype(residual.dtype))


def _layer_in_rows(x, weight, bias, *, eps: float):
    return _layer(as_rows(x), Affine(weight, bias), eps=eps).reshape(x.shape)


def _rms_in_rows(x, weight, residual, *, eps: float, weight_offset: float):
    rows = as_rows(x)
    meta = {"br": weighted_rows(*rows.shape), "eps": eps, "offset": weight_offset}
    if residual is None:
        return of_rows(rms_norm_rows, rows, meta["br"], weighted=True)(rows, weight, **meta).reshape(x.shape)
    y, total = of_rows(rms_norm_residual_rows, rows, meta["br"], weighted=True)(rows, as_rows(residual), weight, **meta)
    return y.reshape(x.shape), total.reshape(x.shape)


def _rms_by_xla(x, weight, residual, **options):
    return rms_norm_reference(x, weight, residual=residual, **options)


_layer_norm = Op(
    "layer_norm",
    Implementation("XLA", layer_norm_reference, _not_left_to_xla, WARPS),
    Implementation("rows", _layer_in_rows),
)
_rms_norm = Op(
    "rms_norm", Implementation("XLA", _rms_by_xla, _not_left_to_xla, WARPS), Implementation("rows", _rms_in_rows)
)
