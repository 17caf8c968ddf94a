"""Functions inside of equations: branches, and the bodies of loops and of functions with derivative rules, are cut as
the program is."""

from __future__ import annotations

from typing import Any

from .steps import Node

# The parameters of each primitive that hold functions of its operands.
FUNCTIONS = {
    "scan": ("jaxpr",),
    "while": ("body_jaxpr",),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
}


def functions_of(node: Node) -> dict[str, tuple[Any, ...]]:
    """The closed jaxprs in the parameters of an equation, by the parameter's name."""
    found = {}
    for name in FUNCTIONS.get(node.name, ()):
        given = node.eqn.params[name]
        parts = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        if all(hasattr(part, "consts") and not part.consts for part in parts):
            found[name] = parts
    return found
