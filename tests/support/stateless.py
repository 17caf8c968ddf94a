"""Flax models as functions of their weights, evaluated by NumPy around their kernels: a program of a whole model takes
XLA seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jtile.testing.evaluate import evaluated


def run(f: Callable[..., Any], model: nnx.Module, *args: Any) -> Any:
    """`f(model, *args)`."""
    graph, state = nnx.split(model)
    return evaluated(lambda state, *args: f(nnx.merge(graph, state), *args))(state, *args)


def gradients(f: Callable[..., Any], model: nnx.Module, *args: Any, of: Any = ...) -> tuple[Any, dict[str, Any]]:
    """(f(model, *args), its gradient by each of the weights that the filter `of` picks, by its name)."""
    graph, state, rest = nnx.split(model, of, ...)
    value = lambda state, rest, *args: f(nnx.merge(graph, state, rest), *args)
    found, pulled = evaluated(jax.value_and_grad(value))(state, rest, *args)
    return found, nnx.to_pure_dict(pulled)
