"""How a `Program` gets into an XLA program: as a typed FFI custom call that carries its compiled object, or as the
interpreter behind a host callback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.experimental import io_callback
from jax.interpreters import mlir

from jtile import _partition, ir
from jtile._config import current
from jtile._errors import UnsupportedError
from jtile._program import Program

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


def lower_cpu(ctx: mlir.LoweringRuleContext, *operands: Any, program: Program) -> Sequence[Any]:
    if not program.programs:
        return mlir.lower_fun(_without_programs, multiple_results=True)(ctx, *operands, program=program)
    on_host = mlir.lower_fun(_host_call, multiple_results=True)
    if interpreted(program):
        return on_host(ctx, *operands, program=program)
    try:
        whole = _partition.lower(ctx, operands, program)
        return _custom_call(ctx, operands, program) if whole is None else whole
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


def lower_elsewhere(ctx: mlir.LoweringRuleContext, *operands: Any, program: Program) -> Sequence[Any]:
    asked = ", ".join(ctx.module_context.platforms)
    raise UnsupportedError(
        f"kernel {program.name} cannot run on platform {asked!r}: this release compiles kernels for 'cpu' only; "
        "move the arrays with jax.device_put(x, jax.devices('cpu')[0]), or run it with interpret=True",
        program.where,
    )
