"""What differs between the supported JAX versions, and what JAX keeps private: the only file that may know either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.effects import Effect as Effect  # jax.extend.core has it, and costs 20 ms more
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


def need_devices(primitive: Any) -> None:
    """Let the lowering of a primitive know the devices and the mesh of its program, which custom_partitioning needs."""
    from jax._src import dispatch

    dispatch.prim_requires_devices_during_lowering.add(primitive)


def is_eager_shard_map() -> bool:
    """Whether operations run at once, each as a program of its own, in a `jax.shard_map` without `jax.jit`."""
    from jax._src import core
    from jax._src.interpreters import partial_eval
    from jax._src.shard_map import ShardMapTrace

    trace: Any = core.trace_ctx.trace
    while trace is not None and not isinstance(trace, ShardMapTrace | partial_eval.DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return isinstance(trace, ShardMapTrace)


def is_staged(x: Any) -> bool:
    """Whether a value is one of a program that is being traced to be compiled, and nothing else: no derivative or lane
    of it."""
    from jax._src.interpreters import partial_eval

    return isinstance(x, partial_eval.DynamicJaxprTracer)


def trace_context() -> Any:
    """What traces depend on besides the types of arguments: JAX's options and contexts."""
    from jax._src import config

    return config.trace_context()


def make_jaxpr(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.make_jaxpr` of what runs in a kernel: also in `jax.ensure_compile_time_eval()` nothing of it runs at once,
    the primitives without operands, such as the number of a program, included."""
    from jax._src import config

    def trace(*args: Any) -> Any:
        with config.eager_constant_folding(False):
            return jax.make_jaxpr(fn)(*args)

    return trace


def clear_with_jax(cache: Any) -> None:
    """Let `jax.clear_caches()` call the `cache_clear()` of a cache too; the cache is held weakly."""
    from jax._src import util

    util.register_cache(cache, "jtile")


def held_weakly[T: type](parameter: T) -> T:
    """Decorates the class of a parameter of a primitive, so that JAX's cache of result types, which keeps the last 2048
    calls of all primitives, does not keep it alive."""
    from jax._src import util

    util.weakref_cache_key_types.add(parameter)
    return parameter


def like(aval: Any) -> Any:
    """A `jax.ShapeDtypeStruct` of the type of a value, which says over which axes of `shard_map` it varies, too."""
    import jax

    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, manual_axis_type=aval.manual_axis_type)


def without_axis(aval: Any, axis: str) -> Any:
    """The type of a value that is the same on all devices along an axis of the mesh, inside of `shard_map`."""
    m = aval.manual_axis_type
    same = type(m)(varying=m.varying - {axis}, unreduced=m.unreduced, reduced=m.reduced)
    return aval.update(manual_axis_type=same)


def is_partitioned(ctx: Any) -> bool:
    """Whether XLA will split the program that is being lowered over the devices of a mesh.

    Not so on one device, inside of `shard_map`, for `jax.export` (a partitioning callback lives in this process only),
    and where the shardings name no mesh.
    """
    module = ctx.module_context
    axes = module.axis_context  # a ShardingContext, or a class without these attributes
    mesh = getattr(axes, "abstract_mesh", None)
    several = (getattr(axes, "num_devices", None) or 1) > 1 and getattr(axes, "device_assignment", None) is not None
    return several and mesh is not None and not mesh.empty and not is_exported(ctx)


def mesh_of(ctx: Any) -> Any:
    """The mesh, with its devices, of the `shard_map` whose body is being lowered; None in an export, and outside."""
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    return None if is_exported(ctx) or not hasattr(mesh, "devices") else mesh


def platforms_of(ctx: Any) -> tuple[str, ...]:
    """The platforms that the program is being lowered for: several where `jax.export` was asked for several."""
    return tuple(ctx.module_context.platforms)


def is_exported(ctx: Any) -> bool:
    """Whether the program that is being lowered is for `jax.export`."""
    return ctx.module_context.lowering_parameters.for_export


def is_symbolic(size: Any) -> bool:
    """Whether the size of a dimension is one of JAX's symbolic expressions, not a number."""
    if size is None or isinstance(size, int | float | str):
        return False
    from jax.export import is_symbolic_dim  # not loaded by `import jax`

    return is_symbolic_dim(size)


def special_function(name: str) -> Callable[..., Any]:
    """What JAX computes a special function by, in terms of other primitives: `fn(*args, dtype=)` of float32 or float64
    arrays."""
    from jax._src.lax import special

    return getattr(special, name + "_impl")


def batch_jaxpr(closed: Any, axis: Any, batched: Sequence[bool], instantiate: Any) -> tuple[Any, Sequence[bool]]:
    """A jaxpr under one more vmap, and which of its results have the axis; `axis` is what a batching rule is given."""
    from jax._src.interpreters import batching

    return batching.batch_jaxpr(closed, axis, batched, instantiate)


def random_gamma(key: Any, a: Any, log_space: bool) -> Any:
    """What the primitive `random_gamma` means, all elements at once: every one has its own rounds of rejection."""
    from jax._src.random import core

    return core._gamma_impl(key, a, log_space=log_space, use_vmap=True)


def random_gamma_p() -> Any:
    """JAX's primitive `random_gamma` itself."""
    from jax._src.random import core

    return core.random_gamma_p


def closed_over(traced: Any) -> Sequence[Any]:
    """What `jax.jit(f).trace` made operands of, in front of those of the call: tracers that f closes over, and all else
    where there is one."""
    return getattr(traced, "_consts", ())


def resized(aval: Any, shape: Sequence[Any]) -> Any:
    """A `jax.ShapeDtypeStruct` of the type of a value, but of this shape."""
    weak, varying = getattr(aval, "weak_type", False), getattr(aval, "manual_axis_type", None)
    manual = varying is not None and not varying.empty  # of a mesh, which the type's sharding names
    sharding = aval.sharding if manual else None
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=weak, manual_axis_type=varying, sharding=sharding)
