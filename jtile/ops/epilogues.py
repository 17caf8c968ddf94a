"""Activation functions that the last step of a kernel may apply, by name."""

from __future__ import annotations

import functools

import jax

import jtile as jt

ACTIVATIONS = {
    None: lambda y: y,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def check_activation(op: str, name: str | None) -> None:
    """KernelValueError unless `name` is a key of `ACTIVATIONS`."""
    if name not in ACTIVATIONS:
        known = ", ".join(str(a) for a in ACTIVATIONS)
        raise jt.errors.KernelValueError(f"{op}: unknown activation {name!r}; expected one of {known}")
