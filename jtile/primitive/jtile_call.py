"""`jtile_call`, the one JAX primitive behind every kernel, and its rules.

It takes and returns arrays, never Refs. Its only parameter is a `Program`. Equal programs hash equal, so that JAX's
caches see one kernel where there is one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
from jax.core import ShapedArray, Tracer
from jax.extend import source_info_util
from jax.interpreters import mlir
from jax.sharding import NamedSharding

from jtile._compat import need_devices
from jtile._effect import KERNEL_EFFECT
from jtile._errors import KernelAssertionError
from jtile._memo import JITTED, memo
from jtile.lowering import platforms
from jtile.primitive import batching, dce
from jtile.primitive.lowering import interpreted, lower_elsewhere, lowering_for, run_interpreter
from jtile.primitive.partition import result_specs
from jtile.primitive.program import Program

# -- binding and abstract evaluation --------------------------------------------------------------------------------

# The line that profilers and tracebacks of XLA show for a kernel is the caller's, not one of these files.
_jtile = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
for _folder in ("primitive", "calls"):
    source_info_util.register_exclusion(os.path.join(_jtile, _folder) + os.sep)

jtile_call_p = jexc.Primitive("jtile_call")
jtile_call_p.multiple_results = True
need_devices(jtile_call_p)  # automatic partitioning asks for the mesh


def bind(program: Program, operands: Sequence[Any]) -> list[Any]:
    """Call a program on arrays or tracers; results in the order of its output Refs."""
    if any(isinstance(x, Tracer) for x in operands):
        operands = joint_varying(operands, program)
        with jax.named_scope(program.name):
            return jtile_call_p.bind(*operands, program=program)
    return jtile_call_p.bind(*operands, program=program)


def joint_varying(operands: Sequence[Any], program: Program | None = None) -> Sequence[Any]:
    """Under `shard_map`, cast every operand to the mesh axes that any of them varies over, and to those along which the
    program talks to other devices.

    Without this the transpose of an operand that varies less misses its psum, and the gradient is silently wrong.
    """
    sets = [jax.typeof(x).manual_axis_type.varying for x in operands]
    axes = [jax.lax.axis_index(axis) for axis, _ in program.devices] if program is not None else ()
    joint = frozenset().union(*sets, *(jax.typeof(i).manual_axis_type.varying for i in axes))
    if all(s == joint for s in sets):
        return operands
    missing = [tuple(sorted(joint - s, key=str)) for s in sets]
    return [jax.lax.pcast(x, m, to="varying") if m else x for x, m in zip(operands, missing)]


@jtile_call_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, program: Program):
    _register_hosts()
    effects = {KERNEL_EFFECT} if program.effect else jexc.no_effects
    return result_types(avals, program), effects


def result_types(avals: Sequence[Any], program: Program) -> list[ShapedArray]:
    """Types of the results of a program on operands of types `avals`."""
    outs = program.results([a.shape for a in avals])
    return typed(avals, outs, result_specs(program, [a.sharding for a in avals]))


def typed(avals: Sequence[Any], outs: Sequence[Any], specs: Sequence[Any]) -> list[ShapedArray]:
    """Types of results of these shapes and dtypes, sharded by `specs`, of a call on operands of types `avals`."""
    if not avals:
        return [ShapedArray(o.shape, o.dtype) for o in outs]
    # An update of an operand's type keeps what shard_map tracks: which mesh axes the value varies over.
    like = max(avals, key=lambda a: len(a.manual_axis_type.varying))
    return [
        like.update(shape=o.shape, dtype=o.dtype, weak_type=False, sharding=NamedSharding(like.sharding.mesh, s))
        for o, s in zip(outs, specs, strict=True)
    ]


# -- eager calls ----------------------------------------------------------------------------------------------------


@jtile_call_p.def_impl
def _impl(*operands: Any, program: Program) -> Sequence[Any]:
    if interpreted(program):
        return jax.device_put(run_interpreter(program, operands))  # jnp.asarray would compile a copy for each shape
    if jax.config.jax_disable_jit:
        with jax.disable_jit(False):
            return _jitted(program)(*operands)
    if program.io:
        return _checked_call(program, operands)
    return _jitted(program)(*operands)


@memo(entries=JITTED)
def _jitted(program: Program) -> Callable[..., Sequence[Any]]:
    """One jit for every eager call of a program: a new jit per call would cost milliseconds."""

    def call(*operands):
        return jtile_call_p.bind(*operands, program=program)

    call.__name__ = call.__qualname__ = program.name
    call._apply_primitive = True  # jax_debug_nans: running the body op by op, to find the NaN's op, would be this again
    return jax.jit(call)


def _checked_call(program: Program, operands: Sequence[Any]) -> Sequence[Any]:
    """Wait for a kernel that asserts, so that its failure is raised here and with our own type."""
    try:
        return jax.block_until_ready(_jitted(program)(*operands))
    except jax.errors.JaxRuntimeError as e:
        _, found, text = str(e).partition("FAILED_PRECONDITION: ")
        if not found or "assertion failed" not in text:
            raise
        message, _, place = text.partition("\n  at ")
        place = re.sub(r" \[executable_name=.*", "", place.split("\n")[0])  # what XLA's GPU runtime appends
        file, _, line = place.rpartition(":")
        raise KernelAssertionError(message, (file, int(line)) if line.isdecimal() else None) from None


mlir.register_lowering(jtile_call_p, lower_elsewhere)


@functools.cache
def _register_hosts() -> None:
    """Make JAX know the rules for the platforms of programs. This loads the packages that bring platforms, so it waits
    for the first call of a kernel: these packages may define kernels of their own while they are imported."""
    for host in platforms.hosts():
        with contextlib.suppress(NotImplementedError):  # JAX does not know it: see `lower_elsewhere`
            mlir.register_lowering(jtile_call_p, lowering_for(host), platform=host)


batching.register(jtile_call_p)
dce.register(jtile_call_p)
