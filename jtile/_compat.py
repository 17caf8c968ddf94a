"""What differs between the supported JAX versions, and what JAX keeps private: the only file that may know either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import partial_eval as pe

JAX_VERSION: tuple[int, ...] = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdecimal())


def register_dce(primitive: Any, rule: Callable[[Sequence[bool], Any], tuple[list[bool], Any]]) -> None:
    """Register dead-code elimination: `rule(used_outputs, eqn)` gives (used inputs, the smaller equation or None)."""
    rules: dict[Any, Any] = pe.dce_rules
    if JAX_VERSION < (0, 12):
        rules[primitive] = rule
    else:
        # 0.12 also passes the inputs that something else keeps alive; a rule that ignores them is still right.
        rules[primitive] = lambda used_outputs, live_inputs, eqn: rule(used_outputs, eqn)


def allow_effect_everywhere(effect_type: type) -> None:
    """Let an effect class stand inside `jax.checkpoint` and custom derivatives; loops and lowering have public sets of
    their own."""
    from jax._src import effects

    effects.remat_allowed_effects.add_type(effect_type)
    effects.custom_derivatives_allowed_effects.add_type(effect_type)
