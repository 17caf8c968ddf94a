"""`jtile_call`, the one JAX primitive behind every kernel, and its rules.

It takes and returns arrays, never Refs. Its only parameter is a `Program`: a kernel whose shapes, grid and
meta-parameters are fixed. Equal programs hash equal, so that JAX's caches see one kernel where there is one.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.experimental import hijax, io_callback
from jax.extend import source_info_util
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from jtile import ir
from jtile._compat import allow_effect_everywhere
from jtile._config import current
from jtile._errors import KernelAssertionError, TransformError, UnsupportedError
from jtile._signature import Options


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A kernel with everything fixed: the one parameter of `jtile_call`.

    Attributes:
      name: what profilers show.
      jaxpr: the kernel's body over flat Refs (inputs, outputs, scratch): what the transforms work on.
      kernel: the same in Tile IR, before any pass: what the compiler works on.
      out_avals: shape and dtype of each result.
      meta: the meta-parameters, sorted by name.
      options: see `Options`.
      io: the kernel prints or asserts, so that it may not be removed.
      fingerprint: sha256 of the Tile IR text and the options; what equality and hashing go by.
    """

    name: str
    jaxpr: Any
    kernel: ir.Kernel
    out_avals: tuple[jax.ShapeDtypeStruct, ...]
    meta: tuple[tuple[str, Any], ...]
    options: Options
    io: bool
    fingerprint: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"{self.name}{self.kernel.grid}#{self.fingerprint[:8]}"

    @property
    def where(self) -> tuple[str, int] | None:
        loc = self.kernel.loc
        return (loc.file, loc.line) if loc.file else None

    @property
    def programs(self) -> int:
        """Number of programs of the grid."""
        return math.prod(self.kernel.grid)


def make_program(jaxpr: Any, kernel: ir.Kernel, meta: dict[str, Any], options: Options) -> Program:
    """A `Program` from a traced kernel; derives results, effects and the fingerprint."""
    outs = tuple(jax.ShapeDtypeStruct(v.shape, ir_dtype(v)) for v in kernel.outputs)
    io = any(op.effect == "io" for op in kernel.body.walk())
    text = "\n".join([canonical_text(kernel), str(options)])
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    return Program(kernel.name, jaxpr, kernel, outs, tuple(sorted(meta.items())), options, io, fingerprint)


def ir_dtype(v: ir.Value) -> np.dtype:
    return v.type.info.numpy


def canonical_text(kernel: ir.Kernel) -> str:
    """Text that is equal for equal kernels: source places stand in it only where compiled code shows them."""
    sites = [f"; {op.mnemonic} {op.loc}" for op in kernel.body.walk() if op.effect == "io"]
    return "\n".join([ir.print_kernel(kernel), *sites])


# -- binding and abstract evaluation --------------------------------------------------------------------------------

# The line that profilers and tracebacks of XLA show for a kernel is the caller's, not one of these files.
for _name in ("_primitive.py", "_kernel.py"):
    source_info_util.register_exclusion(os.path.join(os.path.dirname(os.path.abspath(__file__)), _name))

jtile_call_p = jexc.Primitive("jtile_call")
jtile_call_p.multiple_results = True


class KernelEffect(jexc.Effect):
    """Of a kernel that prints or asserts: its call may not be removed, nor merged with another."""

    def __str__(self) -> str:
        return "jtile_io"


_KERNEL_EFFECT = KernelEffect()
hijax.control_flow_allowed_effects.add_type(KernelEffect)
mlir.lowerable_effects.add_type(KernelEffect)
allow_effect_everywhere(KernelEffect)


def bind(program: Program, operands: Sequence[Any]) -> list[Any]:
    """Call a program on arrays or tracers; results in the order of its output Refs."""
    if any(isinstance(x, Tracer) for x in operands):
        operands = _joint_varying(operands)
        with jax.named_scope(program.name):
            return jtile_call_p.bind(*operands, program=program)
    return jtile_call_p.bind(*operands, program=program)


def _joint_varying(operands: Sequence[Any]) -> Sequence[Any]:
    """Under `shard_map`, cast every operand to the mesh axes that any of them varies over.

    Without this the transpose of an operand that varies less misses its psum, and the gradient is silently wrong.
    """
    sets = [jax.typeof(x).manual_axis_type.varying for x in operands]
    joint = frozenset().union(*sets)
    if all(s == joint for s in sets):
        return operands
    missing = [tuple(sorted(joint - s, key=str)) for s in sets]
    return [jax.lax.pcast(x, m, to="varying") if m else x for x, m in zip(operands, missing)]


@jtile_call_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, program: Program):
    effects = {_KERNEL_EFFECT} if program.io else jexc.no_effects
    if not avals:
        return [ShapedArray(o.shape, o.dtype) for o in program.out_avals], effects
    # An update of an operand's type keeps what shard_map tracks: which mesh axes the value varies over.
    like = max(avals, key=lambda a: len(a.manual_axis_type.varying))
    replicated = NamedSharding(like.sharding.mesh, PartitionSpec())
    outs = [like.update(shape=o.shape, dtype=o.dtype, weak_type=False, sharding=replicated) for o in program.out_avals]
    return outs, effects


# -- eager calls ----------------------------------------------------------------------------------------------------


@jtile_call_p.def_impl
def _impl(*operands: Any, program: Program) -> Sequence[Any]:
    if interpreted(program):
        return [jnp.asarray(x) for x in run_interpreter(program, operands)]
    if jax.config.jax_disable_jit:
        with jax.disable_jit(False):
            return _jitted(program)(*operands)
    if program.io:
        return _checked_call(program, operands)
    return _jitted(program)(*operands)


@functools.lru_cache(maxsize=4096)
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
        file, _, line = place.split("\n")[0].rpartition(":")
        raise KernelAssertionError(message, (file, int(line)) if line.isdecimal() else None) from None


# -- the interpreter ------------------------------------------------------------------------------------------------


def interpreted(program: Program) -> bool:
    asked = program.options.interpret
    return current().interpret if asked is None else asked


def run_interpreter(program: Program, operands: Sequence[Any], seed: int | None = None) -> list[np.ndarray]:
    """Run a program in the reference interpreter on the host; raises its typed errors."""
    from jtile.interpret import interpret

    seed = current().seed if seed is None else seed
    return interpret(program.kernel, [np.asarray(x) for x in operands], seed=seed)


def _host_call(*operands: Any, program: Program) -> Sequence[Any]:
    """The interpreter behind a host callback, for use inside jit."""
    narrow = _callback_dtype
    outs = [jax.ShapeDtypeStruct(o.shape, narrow(o.dtype)) for o in program.out_avals]

    def callback(*arrays):
        arrays = [np.asarray(a).astype(v.type.info.numpy) for a, v in zip(arrays, program.kernel.inputs)]
        return [np.asarray(x).astype(o.dtype) for x, o in zip(run_interpreter(program, arrays), outs)]

    args = [x.astype(narrow(x.dtype)) for x in operands]
    if program.io:
        results = io_callback(callback, outs, *args, ordered=False)
    else:
        results = jax.pure_callback(callback, outs, *args)
    return [r.astype(o.dtype) for r, o in zip(results, program.out_avals)]


def _callback_dtype(dtype: Any) -> np.dtype:
    """What carries `dtype` through a host callback: XLA's callbacks know no dtype narrower than a byte."""
    info = ir.dtype_info(dtype)
    if info.bits >= 8:
        return info.numpy
    return np.dtype({"i": "int8", "u": "uint8", "f": "float32"}[info.kind])


# -- lowering -------------------------------------------------------------------------------------------------------


def _lower_cpu(ctx: mlir.LoweringRuleContext, *operands: Any, program: Program) -> Sequence[Any]:
    if not program.programs:
        return mlir.lower_fun(_without_programs, multiple_results=True)(ctx, *operands, program=program)
    on_host = mlir.lower_fun(_host_call, multiple_results=True)
    if interpreted(program):
        return on_host(ctx, *operands, program=program)
    try:
        return _custom_call(ctx, operands, program)
    except UnsupportedError:
        if (program.options.fallback or current().fallback) != "interpret":
            raise
        return on_host(ctx, *operands, program=program)


def _custom_call(ctx: mlir.LoweringRuleContext, operands: Sequence[Any], program: Program) -> Sequence[Any]:
    """The kernel as a typed FFI custom call that carries its compiled object."""
    from jtile import ffi
    from jtile.lowering import targets

    artifact = compile_program(program, targets.resolve(current().isa and f"cpu:{current().isa}"))
    kernel, extra = _with_starts(program)
    ffi.register("cpu")
    rule = jax.ffi.ffi_lowering(ffi.TARGET_CPU, operand_output_aliases=dict(kernel.aliases), has_side_effect=program.io)
    avals = [ShapedArray(s.shape, s.dtype) for s in extra]
    filled = mlir.lower_fun(lambda: _fill(extra), multiple_results=True)(ctx.replace(avals_in=(), avals_out=avals))
    wide = ctx.replace(avals_in=(*ctx.avals_in, *avals))
    return rule(wide, *operands, *filled, **_attributes(artifact.image, artifact.launch, program.programs))


def compile_program(program: Program, target: Any, *, texts: bool = False) -> Any:
    """The `Artifact` of a program, from the caches where it is there; `texts` compiles anew, to show every level."""
    from jtile.lowering import registry

    kernel, extra = _with_starts(program)
    key = f"{program.fingerprint} poison={current().poison and bool(extra)} debug={current().debug}"
    return registry.compile(kernel, target, key=key, texts=texts)


def _with_starts(program: Program) -> tuple[ir.Kernel, Sequence[Any]]:
    from jtile.lowering import starts

    return starts.with_starts(program.kernel, poison=current().poison)


def _fill(starts: Sequence[Any]) -> list[Any]:
    return [jnp.full(s.shape, s.value, s.dtype) for s in starts]


def _attributes(image: bytes, launch: dict[str, Any], programs: int) -> dict[str, Any]:
    """The attributes of the custom call, as the handler in ffi/csrc declares them."""
    numbers = {k: np.int64(launch[k]) for k in ("workspace", "cost")}
    texts = {k: str(launch[k]) for k in ("name", "isa", "sites")}
    return {"image": image, "programs": np.int64(programs), **numbers, **texts}


def _without_programs(*operands: Any, program: Program) -> Sequence[Any]:
    """An empty grid: outputs keep what they start from; undefined ones are zero, or poisoned."""
    kernel, extra = _with_starts(program)
    inputs = [*operands, *_fill(extra)]
    source = {o: inputs[i] for i, o in kernel.aliases}
    return [source.get(k, jnp.zeros(o.shape, o.dtype)) for k, o in enumerate(program.out_avals)]


def _lower_elsewhere(ctx: mlir.LoweringRuleContext, *operands: Any, program: Program) -> Sequence[Any]:
    asked = ", ".join(ctx.module_context.platforms)
    raise UnsupportedError(
        f"kernel {program.name} cannot run on platform {asked!r}: this release compiles kernels for 'cpu' only; "
        "move the arrays with jax.device_put(x, jax.devices('cpu')[0]), or run it with interpret=True",
        program.where,
    )


mlir.register_lowering(jtile_call_p, _lower_elsewhere)
mlir.register_lowering(jtile_call_p, _lower_cpu, platform="cpu")


# -- transformations that the next release brings ---------------------------------------------------------------------


def _refuse(what: str, instead: str) -> Callable[..., Any]:
    def rule(*args: Any, program: Program):
        raise TransformError(f"jtile kernels cannot be {what} yet; kernel {program.name}: {instead}", program.where)

    return rule


_not_differentiable = _refuse("differentiated", "wrap its call in a function with jax.custom_vjp")
ad.primitive_jvps[jtile_call_p] = _not_differentiable
ad.primitive_transposes[jtile_call_p] = _not_differentiable
batching.primitive_batchers[jtile_call_p] = _refuse("batched by jax.vmap", "map over it with jax.lax.map")
