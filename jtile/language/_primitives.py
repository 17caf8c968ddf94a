"""The primitives of the language: what a kernel body says that `lax` does not. All public functions bind these.

Operands of every primitive that touches a Ref: `(ref, *index values (one per dimension), value?, compare?, mask?)`;
everything static is a hashable parameter, so the rules of the transforms stay short.
"""

from __future__ import annotations

import functools

import numpy as np
from jax import core
from jax.extend import core as jexc
from jax.interpreters import mlir
from jax.ref import AbstractRef

from jtile._errors import KernelTypeError
from jtile._parts import is_complex
from jtile.ir.reductions import accumulator_dtype
from jtile.language._index import dims_shape
from jtile.language._place import user_place


class TileEffect(jexc.Effect):
    """What a kernel body does beyond computing values: reading or writing Refs, printing, asserting."""

    def __init__(self, name: str):
        self.name = name

    def __hash__(self) -> int:
        return hash((TileEffect, self.name))

    def __eq__(self, other) -> bool:
        return type(other) is TileEffect and other.name == self.name

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__


READ, WRITE, IO = TileEffect("jtile.read"), TileEffect("jtile.write"), TileEffect("jtile.io")


@functools.cache
def allow_effects() -> None:
    """Let the effects stand inside `lax` control flow, `jax.checkpoint` and custom derivatives, and tell JAX the
    primitives' derivatives and batching; once, before the first trace."""
    from jax.experimental import hijax

    from jtile import _compat
    from jtile.language import _derivatives

    hijax.control_flow_allowed_effects.add_type(TileEffect)
    mlir.lowerable_effects.add_type(TileEffect)
    _compat.allow_effect_everywhere(TileEffect)
    _derivatives.register()


def _primitive(name: str, multiple: bool = False, says: str = "") -> jexc.Primitive:
    p = jexc.Primitive("jtile_" + name)
    p.multiple_results = multiple

    def outside(*_, **__):
        raise KernelTypeError(f"jt.{says or name} means something only inside of a kernel", user_place())

    p.def_impl(outside)
    return p


def _aval(shape, dtype):
    return core.ShapedArray(tuple(shape), np.dtype(dtype))


load_p = _primitive("load")
store_p = _primitive("store", multiple=True)
atomic_p = _primitive("atomic")
last_arrival_p = _primitive("last_arrival", says="arrive")
axis_index_p = _primitive("axis_index")
on_p = _primitive("on", says="Ref.on")
signal_p = _primitive("signal", multiple=True)
wait_signal_p = _primitive("wait_signal", multiple=True, says="wait")
post_p = _primitive("post", multiple=True)
receive_p = _primitive("receive")
axis_barrier_p = _primitive("axis_barrier", multiple=True)
program_id_p = _primitive("program_id")
num_programs_p = _primitive("num_programs")
loop_hint_p = _primitive("loop_hint")
dot_p = _primitive("dot")
dot_scaled_p = _primitive("dot_scaled")
reduce_p = _primitive("reduce", multiple=True)
scan_p = _primitive("associative_scan", multiple=True)
print_p = _primitive("print", multiple=True)
assert_p = _primitive("assert_", multiple=True)
any_lane_p = _primitive("any_lane")
take_p = _primitive("take")
put_p = _primitive("put")


@load_p.def_effectful_abstract_eval
def _(ref, *rest, dims, pad, masked):
    """`(ref, *index, mask?) -> tile`; lanes outside and masked lanes give `pad`."""
    del masked, pad
    return _aval(dims_shape(dims, [v.shape for v in rest[: len(dims)]]), ref.dtype), {READ}


@store_p.def_effectful_abstract_eval
def _(ref, *rest, dims, masked):
    """`(ref, *index, value, mask?) -> ()`."""
    del ref, rest, dims, masked
    return [], {WRITE}


@atomic_p.def_effectful_abstract_eval
def _(ref, *rest, fn, dims, masked):
    """`(ref, *index, value, compare?, mask?) -> old values`."""
    del masked, fn
    return _aval(dims_shape(dims, [v.shape for v in rest[: len(dims)]]), ref.dtype), {READ, WRITE}


@last_arrival_p.def_effectful_abstract_eval
def _(index, count, *, counters, size):
    """`(index, count) -> bool`."""
    del index, count, counters, size
    return _aval((), np.bool_), {READ, WRITE}


@axis_index_p.def_abstract_eval
def _(*, axis, size):
    """`size`: how many devices are along the axis."""
    del axis, size
    return _aval((), np.int32)


@on_p.def_abstract_eval
def _(ref, index, *, axis, size):
    """`(ref, index) -> the same memory on another device`."""
    del index, axis, size
    return AbstractRef(_aval(ref.shape, ref.dtype))


@signal_p.def_effectful_abstract_eval
def _(ref, *rest, fn):
    """`(signals, *index, value) -> ()`."""
    del ref, rest, fn
    return [], {READ, WRITE}


@wait_signal_p.def_effectful_abstract_eval
def _(ref, *rest):
    """`(signals, *index, at least) -> ()`."""
    del ref, rest
    return [], {READ, WRITE}


@post_p.def_effectful_abstract_eval
def _(ref, *rest, dims, masked):
    """`(ref, *index, value, mask?) -> ()`."""
    del ref, rest, dims, masked
    return [], {READ, WRITE}


@receive_p.def_effectful_abstract_eval
def _(ref, *rest, dims, masked):
    """`(ref, *index, mask?) -> tile`."""
    del masked
    return _aval(dims_shape(dims, [v.shape for v in rest[: len(dims)]]), ref.dtype), {READ, WRITE}


@axis_barrier_p.def_effectful_abstract_eval
def _(*, axis, size):
    del axis, size
    return [], {READ, WRITE}


@program_id_p.def_abstract_eval
@num_programs_p.def_abstract_eval
def _(*, axis):
    del axis
    return _aval((), np.int32)


@loop_hint_p.def_abstract_eval
def _(k, *, stages, unroll):
    """The loop index, unchanged; carries what `jt.range` was told about the loop around it."""
    del stages, unroll
    return _aval(k.shape, k.dtype)


@any_lane_p.def_abstract_eval
def _(x):
    """A bool scalar, unchanged; under `jax.vmap` inside of the kernel, whether it is true in any lane."""
    return _aval((), x.dtype)


def sum_dtype(a, b) -> np.dtype:
    """The dtype in which the products of two tiles are summed."""
    return a.dtype if is_complex(a.dtype) else np.dtype(accumulator_dtype(a.dtype.name, b.dtype.name))


@dot_p.def_abstract_eval
def _(a, b, *acc, precision):
    """`(a, b, acc?)`: `acc + a @ b` over equal leading axes."""
    del acc, precision
    return _aval((*a.shape[:-1], b.shape[-1]), sum_dtype(a, b))


@dot_scaled_p.def_abstract_eval
def _(a, *rest, has):
    """`(a, sa?, b, sb?, acc?)`; `has` says which of the optional ones are there."""
    b = rest[1 if has[0] else 0]
    return _aval((a.shape[0], b.shape[1]), np.float32)


@reduce_p.def_abstract_eval
def _(*args, jaxpr, consts, axes):
    """`(*consts, *xs, *inits)`; `jaxpr` maps `(*consts, *acc, *x)` to the new `acc`, all scalars."""
    xs = args[consts : consts + (len(args) - consts) // 2]
    del jaxpr
    return [_aval([n for k, n in enumerate(x.shape) if k not in axes], x.dtype) for x in xs]


@scan_p.def_abstract_eval
def _(*args, jaxpr, consts, axis, reverse):
    """`(*consts, *xs)`; `jaxpr` as in `reduce_p`."""
    del jaxpr, axis, reverse
    return [_aval(x.shape, x.dtype) for x in args[consts:]]


@print_p.def_effectful_abstract_eval
def _(*args, format):
    del args, format
    return [], {IO}


@assert_p.def_effectful_abstract_eval
def _(cond, *, message):
    del cond, message
    return [], {IO}


@take_p.def_abstract_eval
def _(x, indices):
    """1-D `x[indices]` of values; every index is inside."""
    return _aval(indices.shape, x.dtype)


@put_p.def_abstract_eval
def _(x, indices, updates, *, fn):
    """1-D `x.at[indices].fn(updates)` in order; an index outside is dropped."""
    del indices, updates, fn
    return _aval(x.shape, x.dtype)
