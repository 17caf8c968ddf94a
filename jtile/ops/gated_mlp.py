"""The gated half of a transformer's MLP in one kernel: y = act(x Wg) * (x Wu) (GLU variants, Shazeer 2020)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import dispatch, gpu_tiles, hopper_gemv, hopper_rows, hopper_wide, quantized, spaces
from jtile.ops._shapes import sums_in, tuned
from jtile.ops.dispatch import BLOCK_LEVEL, Implementation, Op, first_unmet
from jtile.ops.epilogues import ACTIVATIONS, check_activation, gate_derivative
from jtile.ops.matmul import in_parts, product, tiles
from jtile.ops.operands import Weight
from jtile.ops.quantized_tensor import QuantizedTensor


def gated_mlp(x, gate, up, *, activation: str = "silu", transpose: bool = False, out_dtype=None) -> jax.Array:
    """`activation(x @ gate) * (x @ up)`: SwiGLU with "silu", GeGLU with "gelu"; sums and products in float32.

    Differentiable in x, and in gate and up where they are float: quantised weights are frozen.

    Args:
      x: float [..., k].
      gate, up: two weights of one kind: float [k, n] ([n, k] with `transpose`), or `QuantizedTensor` [n, k].
      activation: "silu", "gelu" (erf), "gelu_tanh", "relu".
      out_dtype: dtype of the result; by default that of x, and float32 for quantised weights.

    Returns:
      [..., n].

    Raises:
      KernelTypeError: one dense and one quantised weight.
      KernelValueError: shapes that do not fit, or an unknown activation.
    """
    x = jnp.asarray(x)
    check_activation("gated_mlp", activation)
    many = isinstance(gate, QuantizedTensor), isinstance(up, QuantizedTensor)
    if many[0] != many[1] or (many[0] and gate.kind != up.kind):
        raise jt.errors.KernelTypeError("gated_mlp takes two dense weights, or two quantised ones of one kind")
    if many[0]:
        return quantized.quantized_gated(x, gate, up, activation=activation, out_dtype=out_dtype or jnp.float32)
    gate, up = jnp.asarray(gate), jnp.asarray(up)
    n, k = gate.shape if transpose else gate.shape[::-1]
    if gate.shape != up.shape or x.shape[-1:] != (k,):
        raise jt.errors.KernelValueError(
            f"gated_mlp: x {tuple(x.shape)}, gate {tuple(gate.shape)} and up {tuple(up.shape)} do not fit "
            f"(transpose={transpose})"
        )
    rows = x.reshape(math.prod(x.shape[:-1]), k)
    y = _gated_product(rows, gate, up, activation=activation, tb=transpose)
    return y.reshape(*x.shape[:-1], n).astype(out_dtype or x.dtype)


def gated_mlp_reference(x, gate, up, *, activation: str = "silu", transpose: bool = False) -> jax.Array:
    """`gated_mlp` in `jnp`, at the highest precision."""
    if isinstance(gate, QuantizedTensor):
        gate, up, transpose = gate.dequantize(), up.dequantize(), True
        x = x.astype(jnp.float32)
    wide = [w.astype(jnp.float32).T if transpose else w.astype(jnp.float32) for w in (gate, up)]
    g, u = (jnp.matmul(x.astype(jnp.float32), w, precision="highest") for w in wide)
    return (ACTIVATIONS[activation](g) * u).astype(x.dtype)


def _types(x, gate, *_, tb, save, **__):
    y = jt.like(x, shape=(x.shape[0], gate.shape[0 if tb else 1]))
    return (y, y, y) if save else y


def _grid(x, gate, *_, tb, bm, bn, **__):
    return jt.cdiv(x.shape[0], bm), jt.cdiv(gate.shape[0 if tb else 1], bn)


def _tile(x, gate, up, y, gates=None, ups=None, *, activation, tb, bm, bn, bk=0, stages=3, save=False):
    # Y = act(G) * U     G = X Wg     U = X Wu, outputs too with `save`; `bk` terms of a sum at a time, all for 0
    i, j = jt.program_id(0), jt.program_id(1)
    k = x.shape[1]
    bk = bk or k
    X = x.tiles(bm, bk)
    W = lambda w, p: (w.tiles(bn, bk)[j, p].T if tb else w.tiles(bk, bn)[p, j]).astype(x.dtype)
    G = U = jnp.zeros((bm, bn), sums_in(x))
    if bk >= k:
        G, U = jt.dot(X[i, 0], W(gate, 0)), jt.dot(X[i, 0], W(up, 0))
    else:
        for p in jt.range(X.shape[1], stages=stages):
            X_p = X[i, p]
            G, U = jt.dot(X_p, W(gate, p), G), jt.dot(X_p, W(up, p), U)
    if gates is not None and ups is not None:
        gates.tiles(bm, bn)[i, j] = G.astype(gates.dtype)
        ups.tiles(bm, bn)[i, j] = U.astype(ups.dtype)
    y.tiles(bm, bn)[i, j] = (ACTIVATIONS[activation](G) * U).astype(y.dtype)


_gated = jt.kernel(out_type=_types, grid=_grid, name="gated_mlp")(_tile)
_gated = _gated.autotune(space=spaces.gated_products, key=spaces.GATED, override=True)


def _run(x, gate, up, *, tb, bm, bn, bk, save=False, **meta):
    """Run the kernel with these tiles."""
    kernel = _gated
    if dispatch.has(jt.target(), "warps"):
        kernel = tuned(kernel, **gpu_tiles.product_options(bm, bn, x.dtype.itemsize, gates=2))
    return kernel(x, gate, up, tb=tb, bm=bm, bn=bn, bk=bk, save=save, **meta)


def _in_tiles(x, gate, up, *, activation: str, tb: bool):
    (m, k), n = x.shape, gate.shape[0 if tb else 1]
    sizes = tiles(m, n, k, x.dtype.itemsize, gates=2, transposed=tb, parts=in_parts(x, gate, m, n, k))
    return _run(x, gate, up, activation=activation, tb=tb, **sizes)


def _streamed(x, gate, up, *, activation: str, tb: bool):
    """The result for one or two rows of x; both matrices are read once."""
    del tb
    options = dict(kind=x.dtype.name, activation=activation, out_dtype=x.dtype)
    return hopper_gemv.product(x, (Weight(gate), Weight(up)), **options)


def _not_alike(gate, up, tb: bool) -> str | None:
    return first_unmet(
        (tb, "the matrices do not lie in memory as [n, k]"),
        (gate.dtype == up.dtype, f"the matrices are {gate.dtype.name} and {up.dtype.name}"),
    )


def _not_streamed(x, gate, up, *, activation: str, tb: bool) -> str | None:
    return _not_alike(gate, up, tb) or hopper_gemv.misfit(x, Weight(gate), x.dtype.name, gated=True)


def _few_rows(x, gate, up, *, activation: str, tb: bool):
    """The result for few rows of x, more than two; both matrices are read once."""
    del tb
    return hopper_rows.product(x, (gate, up), activation=activation, out_dtype=x.dtype)


def _not_few_rows(x, gate, up, *, activation: str, tb: bool) -> str | None:
    return _not_alike(gate, up, tb) or hopper_rows.misfit(x, (gate, up))


# act(x gate) * (x up) of x [m, k] and two matrices
def _wide_tiles(x, gate, up, *, activation: str, tb: bool):
    """The result for up to 64 rows of x; both matrices are read once."""
    del tb
    return hopper_wide.product(x, (gate, up), activation=activation)


def _not_wide_tiles(x, gate, up, *, activation: str, tb: bool) -> str | None:
    return _not_alike(gate, up, tb) or hopper_wide.misfit(x, (gate, up))


_gated_product = Op(
    "gated_mlp",
    Implementation("rows against a stream of the matrices", _streamed, _not_streamed, BLOCK_LEVEL, portable=False),
    Implementation("few rows against it, by tensor cores", _few_rows, _not_few_rows, BLOCK_LEVEL, portable=False),
    Implementation("rows against it, in wide tiles", _wide_tiles, _not_wide_tiles, BLOCK_LEVEL, portable=False),
    Implementation("tiles", _in_tiles),
)


def _forward(x, gate, up, *, save, **meta):
    y, g, u = _run(x, gate, up, save=True, **meta)
    return (y, g, u) if save else y, (x, gate, up, g, u)


def _backward(residuals, ct, *, activation, tb, save, **_):
    x, gate, up, g, u = residuals
    dg, du = gate_derivative(g, u, ct[0] if save else ct, activation)
    dg, du = (dg + ct[1], du + ct[2]) if save else (dg, du)
    parts = (product(d[None], w[None], sums_in(x), tb=not tb)[0] for d, w in ((dg, gate), (du, up)))
    dx = sum(parts).astype(x.dtype)
    weight = lambda d, w: (
        product(d[None], x[None], w.dtype, ta=True) if tb else product(x[None], d[None], w.dtype, ta=True)
    )[0]
    return dx, weight(dg, gate), weight(du, up)


_gated.defvjp(_forward, _backward)
