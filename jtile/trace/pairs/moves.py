"""What moves complex numbers without looking at them, or does the same to both parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jtile._parts import is_complex, part_dtype
from jtile.trace.pairs.memory import both
from jtile.trace.pairs.walk import Pair, Value, Walk, bind_parts, rule

MOVES = """
    broadcast_in_dim broadcast_to reshape squeeze expand_dims transpose concatenate slice dynamic_slice pad
    dynamic_update_slice gather select_n rev copy copy_p split unstack stack tile optimization_barrier stop_gradient
    pvary pcast reshard sharding_constraint layout_constraint name device_put mesh_cast tie convert_weak_type dce_sink
"""
LINEAR = """
    add sub neg add_any reduce_sum cumsum reduce_window_sum scatter scatter-add scatter_add scatter-sub scatter_sub
    jtile_take jtile_put
"""


@rule(*MOVES.split(), *LINEAR.split())
def _(walk: Walk, eqn: Any, args: list[Value]) -> Sequence[Value]:
    return both(eqn, args)


@rule("convert_element_type")
def _(walk: Walk, eqn: Any, args: list[Value]) -> Sequence[Value]:
    (x,), new = args, eqn.params["new_dtype"]
    if not is_complex(new):  # JAX takes the real part first
        return [lax.convert_element_type(x.re, new)]
    part = part_dtype(new)
    cast = lambda p: p.astype(part) if not hasattr(p, "aval") else lax.convert_element_type(p, part)
    if isinstance(x, Pair):
        return [Pair(cast(x.re), cast(x.im), x.real)]
    re = lax.convert_element_type(x, part)
    return [Pair(re, jnp.zeros(re.shape, part), real=True)]


@rule("iota", "empty", "empty2")
def _(walk: Walk, eqn: Any, args: list[Value]) -> Sequence[Value]:
    (re,) = bind_parts(eqn, args, 0)
    return [Pair(re, jnp.zeros(re.shape, re.dtype), real=True)]


@rule("zeros_like")
def _(walk: Walk, eqn: Any, args: list[Value]) -> Sequence[Value]:
    return [Pair(jnp.zeros_like(args[0].re), jnp.zeros_like(args[0].im), real=True)]
