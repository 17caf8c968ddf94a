"""Activation functions that the last step of a kernel may apply, by name."""

from __future__ import annotations

import functools
import math

import jax

import jtile as jt
from jtile.ops._shapes import as_rows, fit, machine, rows_per_tile, wide
from jtile.ops.operands import Epilogue


def _gelu_tanh(y):
    # y (1 + tanh(u)) / 2 = y / (1 + exp(-2 u))     u = sqrt(2 / pi) (y + 0.044715 y^3)
    # The second form takes fewer operations, and loses no digits where tanh(u) is close to -1.
    return y * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (y + 0.044715 * y * y * y))


ACTIVATIONS = {
    None: lambda y: y,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": _gelu_tanh,
}


def check_activation(op: str, name: str | None) -> None:
    """KernelValueError unless `name` is a key of `ACTIVATIONS`."""
    if name not in ACTIVATIONS:
        known = ", ".join(str(a) for a in ACTIVATIONS)
        raise jt.errors.KernelValueError(f"{op}: unknown activation {name!r}; expected one of {known}")


def finished(products, epilogue: Epilogue, activation: str | None, i, r, bm: int, rows: int):
    """In a kernel, tile (i, r) [bm, rows] of a result from that of its product: with bias, activation and residual. A
    second product, of a gated layer, is multiplied with what the activation makes of the first."""
    first, *more = products
    y = first if epilogue.bias is None else first + epilogue.bias.tiles(1, rows)[0, r]
    y = ACTIVATIONS[activation](y)
    y = y * more[0] if more else y
    return y if epilogue.residual is None else y + epilogue.residual.tiles(bm, rows)[i, r]


@jt.kernel(
    out_type=lambda z, g, **_: jt.like(g),
    grid=lambda z, g, *, br, bn, **_: (jt.cdiv(z.shape[0], br), jt.cdiv(z.shape[1], bn)),
)
def activation_derivative_tiles(z, g, dz, *, br: int, bn: int, activation: str):
    """Tiles [br, bn] of z, g, dz [rows, n]."""
    # dz = act'(z) g
    i, j = jt.program_id(0), jt.program_id(1)
    Z, G, DZ = (x.tiles(br, bn) for x in (z, g, dz))
    t = wide(Z[i, j])
    DZ[i, j] = jax.vjp(ACTIVATIONS[activation], t)[1](G[i, j].astype(t.dtype))[0].astype(dz.dtype)


def activation_derivative(z, g, activation: str):
    """The cotangent of z [..., n] for g, that of `activation(z)`, in the dtype of g."""
    if z.size == 0:
        return g
    rows = as_rows(z)
    bn = fit(rows.shape[1], machine().tile)
    meta = {"br": rows_per_tile(rows.shape[0], bn, machine().tile), "bn": bn, "activation": activation}
    return activation_derivative_tiles(rows, as_rows(g), **meta).reshape(g.shape)


@jt.kernel(
    out_type=lambda g, u, ct, **_: (jt.like(g), jt.like(u)),
    grid=lambda g, u, ct, *, br, bn, **_: (jt.cdiv(g.shape[0], br), jt.cdiv(g.shape[1], bn)),
)
def gate_derivative_tiles(g, u, ct, dg, du, *, br: int, bn: int, activation: str):
    """The cotangents of g and u [rows, n] for that of act(g) * u."""
    # dG = dY * U * act'(G)     dU = dY * act(G)
    i, j = jt.program_id(0), jt.program_id(1)
    G, U, CT = (wide(ref.tiles(br, bn)[i, j]) for ref in (g, u, ct))
    A, pull = jax.vjp(ACTIVATIONS[activation], G)
    dg.tiles(br, bn)[i, j] = pull(CT * U)[0].astype(dg.dtype)
    du.tiles(br, bn)[i, j] = (CT * A).astype(du.dtype)


def gate_derivative(g, u, ct, activation: str):
    """(dg, du) for the cotangent `ct` of activation(g) * u, all [rows, n]."""
    bn = fit(g.shape[1], machine().tile)
    meta = {"br": rows_per_tile(g.shape[0], bn, machine().tile), "bn": bn, "activation": activation}
    return gate_derivative_tiles(g, u, ct, **meta)
