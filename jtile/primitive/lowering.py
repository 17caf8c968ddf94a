"""How a `Program` gets into an XLA program: as a typed FFI custom call that carries its compiled object, or as the
interpreter behind a host callback."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.experimental import io_callback
from jax.interpreters import mlir

from jtile import ir
from jtile._compat import is_exported, is_symbolic, platforms_of
from jtile._config import config, current
from jtile._errors import TransformError, UnsupportedError
from jtile._memo import memo
from jtile.passes.accumulate import Pieces, accumulate
from jtile.passes.handed_on import handed_on
from jtile.passes.overhang import terms_inside
from jtile.primitive import complexes, counted, partition
from jtile.primitive.devices import gathered, groups, own_part, place
from jtile.primitive.program import Program, for_target
from jtile.primitive.sizes import evaluate_expression, sized, symbol_values

if TYPE_CHECKING:
    from jtile.lowering.artifact import Artifact
    from jtile.lowering.platforms import Platform
    from jtile.lowering.targets import Target

# -- the interpreter ------------------------------------------------------------------------------------------------


def interpreted(program: Program) -> bool:
    asked = program.options.interpret
    return current().interpret if asked is None else asked


def run_interpreter(program: Program, operands: Sequence[Any], seed: int | None = None) -> list[np.ndarray]:
    """Run a program in the reference interpreter on the host; raises its typed errors."""
    from jtile.interpret import interpret, interpret_devices

    seed = current().seed if seed is None else seed
    if program.alone:
        outs = [x[0] for x in interpret_devices(program.kernel, [np.asarray(x)[None] for x in operands], seed=seed)]
    else:
        kernel = terms_inside(program.kernel) if program.spec.linear else program.kernel
        outs = interpret(kernel, [np.asarray(x) for x in operands], seed=seed)
    return [np.asarray(x).astype(o.dtype) for x, o in zip(outs, program.out_avals, strict=True)]


def _host_call(*operands: Any, program: Program) -> Sequence[Any]:
    """The interpreter behind a host callback, for use inside jit."""
    narrow = _callback_dtype
    results = program.results([x.shape for x in operands])
    outs = [jax.ShapeDtypeStruct(o.shape, narrow(o.dtype)) for o in results]

    def callback(*arrays):
        if program.devices:
            run, arrays = functools.partial(own_part, program, arrays[-1]), arrays[:-1]
        else:
            run = functools.partial(run_interpreter, program)
        arrays = [np.asarray(a).astype(v.type.info.numpy) for a, v in zip(arrays, program.kernel.inputs)]
        return [np.asarray(x).astype(o.dtype) for x, o in zip(run(arrays), outs)]

    args = [x.astype(narrow(x.dtype)) for x in operands]
    if program.devices:
        args = gathered(program, args)
    if program.effect:
        results = io_callback(callback, outs, *args, ordered=False)
    else:
        results = jax.pure_callback(callback, outs, *args)
    return [r.astype(o.dtype) for r, o in zip(results, program.out_avals)]


def _callback_dtype(dtype: Any) -> np.dtype:
    """The dtype that carries `dtype` through a host callback: XLA's callbacks know none narrower than a byte."""
    info = ir.dtype_info(dtype)
    if info.bits >= 8:
        return info.numpy
    return np.dtype({"i": "int8", "u": "uint8", "f": "float32"}[info.kind])


# -- lowering -------------------------------------------------------------------------------------------------------


def lowering_for(host: str) -> Callable[..., Sequence[Any]]:
    """The lowering rule of `jtile_call` for a platform of XLA."""
    return functools.partial(_lower, host)


def _lower(host: str, ctx: mlir.LoweringRuleContext, *operands: Any, program: Program) -> Sequence[Any]:
    if _without_work(ctx, program):
        return mlir.lower_fun(_without_programs, multiple_results=True)(ctx, *operands, program=program)
    if interpreted(program):
        return _lower_on_host(ctx, operands, program)
    platform = _platform(host, ctx, program)
    try:
        if program.choice is not None:  # only here is the target known for certain
            program = for_target(program, platform.here())
        if program.block:  # before XLA cuts the program: a callback into the interpreter cannot run in its shards
            _check_target(platform.here(), program)
        whole = partition.lower(ctx, operands, program)
        if whole is None and current().cost_analysis and counted.can_be(program, ctx.avals_in):
            return _lower_counted(ctx, operands, program)
        return _custom_calls(platform, ctx, operands, program) if whole is None else whole
    except UnsupportedError:
        if (program.options.fallback or current().fallback) != "interpret":
            raise
        return _lower_on_host(ctx, operands, program)


def _lower_counted(ctx: mlir.LoweringRuleContext, operands: Sequence[Any], program: Program) -> Sequence[Any]:
    from jtile.primitive.jtile_call import jtile_call_p

    run = functools.partial(counted.call, functools.partial(jtile_call_p.bind, program=program), program)
    with config(cost_analysis=False):  # the call inside is as it would be otherwise
        return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def _platform(host: str, ctx: mlir.LoweringRuleContext, program: Program) -> Platform:
    """Where a program that is lowered for a platform of XLA runs. In an export for several, a branch for one is lowered
    for all of them, which do not take it: one at the block level comes to the platform that has it."""
    from jtile.lowering import platforms

    exported = is_exported(ctx)
    found = platforms.on(host, own=exported)
    if not program.block or found.block_level:
        return found
    others = [platforms.on(other, own=exported) for other in platforms_of(ctx) if other in platforms.hosts()]
    return next((p for p in others if p.block_level), found)


def _lower_on_host(ctx: mlir.LoweringRuleContext, operands: Sequence[Any], program: Program) -> Sequence[Any]:
    if is_exported(ctx):
        raise TransformError(
            f"kernel {program.name} runs in the interpreter, a callback into this Python process, which jax.export "
            "cannot store: export it without interpret=True (or JTILE_INTERPRET) and without fallback='interpret'",
            program.where,
        )
    return mlir.lower_fun(_host_call, multiple_results=True)(ctx, *operands, program=program)


def _shapes(avals: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [a.shape for a in avals]


def _without_work(ctx: mlir.LoweringRuleContext, program: Program) -> bool:
    """Whether the grid is empty; one whose sizes are not known yet counts its programs when it runs."""
    values = program.sizes(_shapes(ctx.avals_in))
    sides = [sized(n, values) for n in program.kernel.grid]
    return 0 in [n for n in sides if not is_symbolic(n)]


@memo()
def pieces_of(program: Program, target: Target | None = None) -> Pieces:
    """The kernels that run for a program: one, or as many as its accumulated outputs are best computed by; on a target,
    where it is given, those of a derived program in tiles for it."""
    pieces = _pieces(program, target)
    if not program.spec.linear:
        return pieces
    n = len(program.kernel.inputs)
    kept = [[v for v, k in zip(p.inputs, of, strict=True) if k >= n] for p, of in zip(pieces.kernels, pieces.inputs)]
    return dataclasses.replace(pieces, kernels=tuple(map(terms_inside, pieces.kernels, kept)))


@memo()
def _pieces(program: Program, target: Target | None) -> Pieces:
    if target is None:
        return accumulate(program.kernel, program.narrow)
    if not program.spec.derived:
        return _pieces(program, None)
    from jtile.tune.derived_tiles import busy

    enough = busy(program.kernel, target)
    pieces = _pieces(program, None) if enough is None else accumulate(program.kernel, program.narrow, enough)
    return _in_other_tiles(pieces, target, program.options.compiler)


def _in_other_tiles(pieces: Pieces, target: Target, options: Mapping[str, Any]) -> Pieces:
    from jtile.tune.derived_tiles import tiled

    found = [tiled(k, target, options) for k in pieces.kernels]
    if not any(found):
        return pieces
    return dataclasses.replace(
        pieces, kernels=tuple(t.kernel if t else k for t, k in zip(found, pieces.kernels)),
        options=tuple(t.options if t else {} for t in found), why=tuple(t.why if t else "" for t in found),
    )  # fmt: skip


def _custom_calls(
    platform: Platform, ctx: mlir.LoweringRuleContext, operands: Sequence[Any], program: Program
) -> Sequence[Any]:
    """The kernels of a program as custom calls; partial sums are summed and wide ones rounded."""
    pieces = pieces_of(program, platform.here())
    _compiled_together(program, platform)
    values = program.sizes(_shapes(ctx.avals_in))
    found = []
    given, avals = [*operands], [*ctx.avals_in]
    for k, (kernel, inputs) in enumerate(zip(pieces.kernels, pieces.inputs, strict=True)):
        outs = [ShapedArray(_shape(v, values), v.type.info.numpy) for v in kernel.outputs]
        inner = ctx.replace(avals_in=tuple(avals[i] for i in inputs), avals_out=outs)
        if (source := _handed_on(program, kernel)) is not None:
            found.append((outs, [given[inputs[source]]]))
            continue
        found.append((outs, _custom_call(platform, inner, [given[i] for i in inputs], program, k, values)))
        passed = [r.output for r in pieces.between if r.piece == k]
        given += [found[-1][1][o] for o in passed]
        avals += [outs[o] for o in passed]
    chosen = [(found[r.piece][0][r.output], found[r.piece][1][r.output]) for r in pieces.results]
    if all(not r.partials and a.dtype == o.dtype for r, (a, _), o in zip(pieces.results, chosen, program.out_avals)):
        return [v for _, v in chosen]

    def finish(*values: Any) -> list[Any]:
        sums = [v.sum(tuple(range(r.partials))) for v, r in zip(values, pieces.results)]
        return [v.astype(o.dtype) for v, o in zip(sums, program.out_avals)]

    last = ctx.replace(avals_in=tuple(a for a, _ in chosen))
    return mlir.lower_fun(finish, multiple_results=True)(last, *[v for _, v in chosen])


def _handed_on(program: Program, kernel: ir.Kernel) -> int | None:
    """Which operand of a derived kernel is its result, so that it needs no call; None: it computes something."""
    spec = program.spec
    if not spec.derived or any((*spec.complex_inputs(), *spec.complex_outputs())):
        return None
    return handed_on(kernel)


def _compiled_together(program: Program, platform: Platform) -> None:
    """Compile the kernels of a program in as many threads: each is found in the caches then, which a dump passes by."""
    target = platform.here()
    kernels = pieces_of(program, target).kernels
    made = [k for k, kernel in enumerate(kernels) if _handed_on(program, kernel) is None]
    if len(made) < 2 or current().dump:
        return
    context = contextvars.copy_context()
    # All of it by the options in force here: a kernel completed by others would be kept under the key of these.
    one = lambda k: _compile(program, k, complete(kernels[k], platform), target)
    with ThreadPoolExecutor(len(made), thread_name_prefix="jtile-compile") as pool:
        for done in [pool.submit(context.copy().run, one, k) for k in made]:
            done.result()


def _shape(v: Any, values: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(sized(n, values) for n in v.shape)


def _custom_call(
    platform: Platform,
    ctx: mlir.LoweringRuleContext,
    operands: Sequence[Any],
    program: Program,
    piece: int,
    values: Mapping[str, Any],
) -> Sequence[Any]:
    """One of the kernels of a program as a typed FFI custom call that carries its compiled object."""
    from jtile.lowering.platforms import milliseconds

    kernel = pieces_of(program, platform.here()).kernels[piece]
    whole = complete(kernel, platform)
    artifact = _compile(program, piece, whole, platform.here())
    platform.register()
    starts = [dataclasses.replace(s, shape=_shape(s, values)) for s in whole.starts]
    avals = [ShapedArray(s.shape, s.dtype) for s in starts]
    started = _started(ctx.replace(avals_in=(), avals_out=avals), starts)
    numbers = symbol_values(kernel, values)
    sizes = [evaluate_expression(n, numbers) for n in artifact.launch.get("extra", ())]
    more = [ShapedArray((n,), np.dtype(np.uint8)) for n in sizes]
    avals += [ShapedArray(x.shape, x.dtype) for x in whole.tables]
    started = [*started, *map(mlir.ir_constant, whole.tables)]
    wide = ctx.replace(avals_in=(*ctx.avals_in, *avals), avals_out=(*ctx.avals_out, *more))
    attributes = platform.attributes(artifact, kernel, values) | _poison_attribute(platform, kernel)
    # The host waits for a kernel that prints or asserts, so that it cannot be part of a CUDA graph.
    name = (platform.io_call if program.io else None) or platform.call
    if kernel.devices:
        name = platform.devices_call or name
    if kernel.devices and platform.peers:
        name = (platform.io_call if current().debug else None) or name
        of_call = np.zeros(0, np.int64) if program.alone else groups(program, ctx)
        attributes |= {"groups": of_call, "timeout": milliseconds()}
    aliases = dict(whole.kernel.aliases)
    rule = jax.ffi.ffi_lowering(name, operand_output_aliases=aliases, has_side_effect=program.effect)
    ins, complex_outs = _complexes(program, piece, aliases)
    called, given = complexes.joined(wide, [*operands, *started], ins, complex_outs)
    if kernel.devices and not platform.peers:
        here = ShapedArray((1 + len(kernel.devices),), np.dtype(np.int32))
        inner = ctx.replace(avals_in=(), avals_out=(here,))
        given = [*given, *mlir.lower_fun(lambda: [place(program)], multiple_results=True)(inner)]
        called = called.replace(avals_in=(*called.avals_in, here))
    if platform.fuses_slices and aliases:
        given = map(functools.partial(behind_barrier, ctx), called.avals_in, given)
    results = rule(called, *given, **attributes)[: len(ctx.avals_out)]
    if platform.fuses_slices and aliases:
        results = [behind_barrier(ctx, a, x) for a, x in zip(called.avals_out, results)]
    return complexes.apart(ctx, results, complex_outs)


def _started(ctx: mlir.LoweringRuleContext, starts: Sequence[Any]) -> Sequence[Any]:
    """The arrays that outputs start from; JAX takes 0.4 ms to lower a function of none."""
    return mlir.lower_fun(lambda: filled(starts), multiple_results=True)(ctx) if starts else ()


def _poison_attribute(platform: Platform, kernel: ir.Kernel) -> dict[str, Any]:
    from jtile.lowering.starts import poison_bytes

    found = poison_bytes(kernel) if platform.fills and current().poison else None
    return {} if found is None else {"poison": np.asarray(found, np.int64)}


def _complexes(program: Program, piece: int, aliases: Mapping[int, int]) -> tuple[set[int], set[int]]:
    """The operands and results of a custom call that are complex arrays for XLA."""
    spec, pieces = program.spec, pieces_of(program)
    whole = [not r.partials and r.piece == piece for r in pieces.results]
    outs = {r.output for r, w, c in zip(pieces.results, whole, spec.complex_outputs()) if w and c}
    ins = {j for j, k in enumerate(pieces.inputs[piece]) if k < spec.n_in and spec.complex_inputs()[k]}
    shared = {i: o for i, o in aliases.items() if i in ins or o in outs}  # both ends of a buffer have one type
    return ins | shared.keys(), outs | set(shared.values())


def behind_barrier(ctx: mlir.LoweringRuleContext, aval: Any, value: Any) -> Any:
    """A value that XLA does not look through.

    Its GPU compiler fuses slices before a custom call, and updates of slices behind it, with the call
    (DynamicSliceFusion), and forgets that a result shares the buffer of an operand: it would start from anything.
    """
    inner = ctx.replace(avals_in=(aval,), avals_out=(aval,))
    (out,) = mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False)(inner, value)
    return out


def _check_target(target: Target, program: Program) -> None:
    from jtile.lowering import targets

    targets.check_capabilities(program.kernel, target)


def compile_piece(
    program: Program, piece: int, target: Target, *, texts: bool = False, bands: bool = False
) -> Artifact:
    """The `Artifact` of one of a program's kernels, from the caches where it is there; `texts` compiles anew, to show
    every level; `bands`: for an execution graph, in which each platform's kernels are images of their own."""
    from jtile.lowering import platforms

    whole = complete(pieces_of(program, target).kernels[piece], platforms.named(target.platform), bands)
    return _compile(program, piece, whole, target, texts=texts, bands=bands)


def _compile(
    program: Program, piece: int, whole: Complete, target: Target, *, texts: bool = False, bands: bool = False
) -> Artifact:
    from jtile.lowering import registry

    pieces = pieces_of(program, target)
    own = f"{program.fingerprint} piece={piece}" if len(pieces.kernels) > 1 else program.fingerprint
    own += f" {pieces.why[piece]}" if pieces.why else ""
    key = f"{own} poison={any(s.poison for s in whole.starts)} debug={current().debug}"
    options, overlap = compiler_options(program, piece, target), program.options.overlap and "warps" in target.features
    key += " overlap" if overlap else ""
    options = {**options, "bands": bands or None}
    with config(overlap=overlap or None) if overlap or current().overlap else contextlib.nullcontext():
        return registry.compile(whole.kernel, target, key=key, texts=texts, options=options)


def compiler_options(program: Program, piece: int, target: Target) -> dict[str, Any]:
    """What one of a program's kernels is compiled by: as the user said, or as its tiles were chosen."""
    given, pieces = program.options.compiler, pieces_of(program, target)
    more = {k: v for k, v in pieces.options[piece].items() if given[k] is None} if pieces.options else {}
    return given | more


@dataclasses.dataclass(frozen=True)
class Complete:
    """A kernel as it is compiled, with the inputs that it needs besides its operands.

    Attributes:
      starts: the numbers that outputs start from, for `filled`.
      tables: literals that images of the platform do not hold; they stand behind `starts`.
    """

    kernel: ir.Kernel
    starts: Sequence[Any]
    tables: Sequence[np.ndarray]


def complete(kernel: ir.Kernel, platform: Platform, bands: bool = False) -> Complete:
    """A kernel as it is compiled for a platform; `bands`: for an execution graph, whose calls do not fill results."""
    kernel, starts = with_starts(kernel, fills=platform.fills and not bands)
    kernel, tables = (kernel, ()) if platform.literals else with_tables(kernel)
    return Complete(kernel, starts, tables)


def with_starts(kernel: ir.Kernel, *, fills: bool = False) -> tuple[ir.Kernel, Sequence[Any]]:
    """The kernel with an input for each output that starts from a number; and these numbers, for `filled`. With `fills`
    poison is not among them."""
    from jtile.lowering import starts

    return starts.with_starts(kernel, poison=current().poison and not fills)


def with_tables(kernel: ir.Kernel) -> tuple[ir.Kernel, Sequence[np.ndarray]]:
    """The kernel with an input for each table of literals, and these tables."""
    from jtile.lowering import literals

    return literals.as_inputs(kernel)


def filled(starts: Sequence[Any]) -> list[Any]:
    """Arrays of the numbers that outputs start from."""
    return [_poison(s) if _is_little_poison(s) else jnp.full(s.shape, s.value, s.dtype) for s in starts]


_LITTLE = 1 << 19  # bytes of an array that is a constant of a program, at most


def _is_little_poison(s: Any) -> bool:
    if not s.poison or any(is_symbolic(n) for n in s.shape) or s.dtype == np.bool_:
        return False
    whole = ir.dtype_info(s.dtype).bits >= (16 if jnp.issubdtype(s.dtype, jnp.floating) else 8)  # float8: one NaN each
    return whole and s.dtype.itemsize * math.prod(s.shape) <= _LITTLE


def _poison(s: Any) -> np.ndarray:
    """The value everywhere, in the first element one of other bits: of equal elements XLA makes a loop, which it takes
    10 ms to compile, of others a constant. A NaN stays one."""
    out = np.full(s.shape, s.value, s.dtype)
    out.reshape(-1)[:1].view(np.uint8)[0] ^= 1
    return out


def call_as_is(platform: Platform, kernel: ir.Kernel, artifact: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """The outputs of a compiled kernel of static sizes, called as it is, beside its primitive; for use under jit.

    Args:
      kernel: what `artifact` was compiled from: its starts and tables are inputs.
    """
    platform.register()
    types = [jax.ShapeDtypeStruct(v.shape, v.type.info.numpy) for v in kernel.outputs]
    types += [jax.ShapeDtypeStruct((n,), np.uint8) for n in artifact.launch.get("extra", ())]
    call = jax.ffi.ffi_call(platform.call, types, input_output_aliases=dict(kernel.aliases))
    return call(*operands, **platform.attributes(artifact, kernel, {}))[: len(kernel.outputs)]


def _without_programs(*operands: Any, program: Program) -> Sequence[Any]:
    """The outputs of an empty grid: each is what it starts from; undefined ones are zero, or poisoned."""
    shapes = [x.shape for x in operands]
    values = program.sizes(shapes)
    kernel, extra = with_starts(program.kernel)
    inputs = [*operands, *filled([dataclasses.replace(s, shape=_shape(s, values)) for s in extra])]
    source = {o: inputs[i] for i, o in kernel.aliases}
    return [source.get(k, jnp.zeros(o.shape)).astype(o.dtype) for k, o in enumerate(program.results(shapes))]


def lower_elsewhere(ctx: mlir.LoweringRuleContext, *operands: Any, program: Program) -> Sequence[Any]:
    """The lowering rule for platforms that JAX knows of no rule for: those that an export names and JAX has not, such
    as `"ascend"`, are jtile's all the same."""
    from jtile.lowering import platforms

    names = ctx.platforms or ctx.module_context.platforms
    if len(names) == 1 and names[0] in platforms.hosts():
        return _lower(names[0], ctx, *operands, program=program)
    if interpreted(program):
        return _lower_on_host(ctx, operands, program)
    asked = ", ".join(names)
    instead = "move the arrays with jax.device_put(x, jax.devices('cpu')[0]), or run it with interpret=True"
    able = ", ".join(map(repr, platforms.hosts()))
    raise UnsupportedError(
        f"kernel {program.name} cannot run on platform {asked!r}: jtile compiles kernels for {able}; "
        + ("export it with platforms=['cpu']" if is_exported(ctx) else instead),
        program.where,
    )
