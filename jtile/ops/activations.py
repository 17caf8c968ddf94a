"""The gate of a gated MLP (Shazeer 2020): swiglu and geglu, on two arrays or on the halves of one."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelValueError
from jtile.ops._shapes import as_rows, check_float, check_shape, fit, machine, rows_per_tile, wide
from jtile.ops.epilogues import ACTIVATIONS


def _type(gate, up, **_):
    return jt.like(gate, shape=(gate.shape[0], gate.shape[1] // (2 if up is None else 1)))


def _grid(gate, up, *, br, bn, **_):
    return tuple(map(jt.cdiv, _type(gate, up).shape, (br, bn)))


@jt.kernel(out_type=_type, grid=_grid)
def gated(gate, up, y, *, br: int, bn: int, activation: str):
    """Tiles [br, bn] of y [rows, n]; `up` is None where the gate's columns [n, 2n) are the other factor."""
    # y = act(g) * u, g and u tiles of gate and up
    i, j, n = jt.program_id(0), jt.program_id(1), y.shape[1]
    rows = jt.ds(i * br, br)
    g = wide(gate[rows, jt.ds(j * bn, bn)])
    u = gate[rows, jt.ds(n + j * bn, bn)] if up is None else up[rows, jt.ds(j * bn, bn)]
    y[rows, jt.ds(j * bn, bn)] = (ACTIVATIONS[activation](g) * u.astype(g.dtype)).astype(y.dtype)


def _apply(op: str, activation: str, gate, up):
    check_float(op, gate=gate, up=up)
    if up is not None:
        check_shape(op, "up", up, gate.shape)
    elif gate.ndim == 0 or gate.shape[-1] % 2:
        raise KernelValueError(f"{op}: without up, gate is [..., 2n] with both factors, got shape {gate.shape}")
    n = gate.shape[-1] if up is not None else gate.shape[-1] // 2
    shape = (*gate.shape[:-1], n)
    if gate.size == 0:
        return jnp.zeros(shape, gate.dtype)
    rows = as_rows(gate)
    bn = fit(n, machine().tile)
    br = rows_per_tile(rows.shape[0], bn)
    up = None if up is None else as_rows(up)
    return gated(rows, up, br=br, bn=bn, activation=activation).reshape(shape)


@functools.partial(jax.jit, inline=True)
def swiglu(gate: jax.Array, up: jax.Array | None = None) -> jax.Array:
    """`silu(gate) * up`, computed in float32.

    Differentiable in gate and up.

    Args:
      gate: float array [..., n]; without `up` [..., 2n]: the gate, then the other factor.
      up: float array of gate's shape, or None.
    Returns:
      [..., n] of gate's dtype.
    Raises:
      KernelTypeError: an array is not of a float dtype. KernelValueError: shapes that do not fit.
    """
    return _apply("swiglu", "silu", gate, up)


@functools.partial(jax.jit, static_argnames="approximate", inline=True)
def geglu(gate: jax.Array, up: jax.Array | None = None, *, approximate: bool = True) -> jax.Array:
    """`gelu(gate) * up`, computed in float32.

    Args:
      gate, up: as in `swiglu`, and so are the errors.
      approximate: use the tanh form of gelu.

    Returns:
      An array like `up`. Differentiable in gate and up.
    """
    return _apply("geglu", "gelu_tanh" if approximate else "gelu", gate, up)


def _reference(activation: Literal["silu", "gelu_tanh", "gelu"], gate, up):
    gate, up = jnp.split(gate, 2, axis=-1) if up is None else (gate, up)
    return (ACTIVATIONS[activation](wide(gate)) * wide(up)).astype(gate.dtype)


def swiglu_reference(gate, up=None):
    """`swiglu` in jnp."""
    return _reference("silu", gate, up)


def geglu_reference(gate, up=None, *, approximate: bool = True):
    """`geglu` in jnp."""
    return _reference("gelu_tanh" if approximate else "gelu", gate, up)
