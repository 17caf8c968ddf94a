"""`jtile_graph`, the primitive of a region: one custom call that runs the kernels of it as an execution graph."""

from __future__ import annotations

import contextvars
import dataclasses
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.extend.core as jexc
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

from jtile._compat import is_partitioned, mesh_of, need_devices
from jtile._config import current
from jtile._cores import cores_here
from jtile._errors import UnsupportedError
from jtile.fusion.steps import Constant, Value
from jtile.ir.types import DTYPES
from jtile.lowering import platforms
from jtile.lowering.here import target as here
from jtile.lowering.platforms import Platform, milliseconds
from jtile.lowering.targets import Target
from jtile.primitive.devices import can_talk, device_groups, place_along
from jtile.primitive.jtile_call import joint_varying, typed
from jtile.primitive.lowering import behind_barrier, filled

from .build import Piece, Wired, compiled, wire
from .devices import Sum
from .encode import encode
from .persistent import attributes as persistent_attributes
from .persistent import launched, predicted, spread
from .regions import Region, refusal
from .schedule import Schedule, simulate
from .timeline import Entry, GraphTimeline

_TRACED = 6  # int32 numbers of a band in a trace: halves of three int64


@dataclasses.dataclass(frozen=True)
class Options:
    """How a graph is run.

    Attributes:
      cores: the number of cores that bands are cut and ordered for; None: that of this process.
      static: see `encode.encode`.
      traced: the call has one more result, int32 [bands, 6], three int64 in two halves each: start, end (nanoseconds)
        and worker of each band, in the order of the schedule.
    """

    cores: int | None = None
    static: bool = False
    traced: bool = False


def persistent(target: Target) -> bool:
    """Whether a target runs a graph as one launch of one image, whose blocks have bands of their own."""
    return platforms.named(target.platform).compile_graph is not None


def cores_of(target: Target, options: Options) -> int:
    """How many cores a graph is made for: of a CPU those of this process, of a GPU its multiprocessors."""
    return options.cores or (target.units("device") if persistent(target) else None) or cores_here()


def bands_for(target: Target) -> dict[str, Any]:
    """The arguments of `wire` that say how programs are cut into bands, and what they cost."""
    return {"split": spread, "cost": predicted, "apart": True} if persistent(target) else {}


def check_target(target: Target) -> None:
    """Raise UnsupportedError if a target runs no execution graphs."""
    if platforms.named(target.platform).graph_call is None:
        raise UnsupportedError(
            f"jt.graph: target {target.name!r} runs no execution graphs, only CPUs and NVIDIA's GPUs do: call "
            "the function itself, whose kernels run one after another, or run it on a CPU: "
            "jax.default_device(jax.devices('cpu')[0])"
        )


# -- the primitive ----------------------------------------------------------------------------------------------------

jtile_graph_p = jexc.Primitive("jtile_graph")
jtile_graph_p.multiple_results = True
need_devices(jtile_graph_p)


def bind(region: Region, operands: Sequence[Any], options: Options) -> list[Any]:
    """The outputs of a region for its inputs. Those whose types say how they are cut over devices go through kernels
    one after another, which know how each of them is cut."""
    if any(axis is not None for x in operands for axis in jax.typeof(x).sharding.spec) and not options.traced:
        return one_after_another(region, operands)
    return jtile_graph_p.bind(*joint_varying(operands), region=region, options=options)


def one_after_another(region: Region, operands: Sequence[Any]) -> list[Any]:
    """The outputs of a region for its inputs, by separate calls of its kernels."""
    have: dict[Any, Any] = dict(zip(region.inputs, operands, strict=True))
    for step in region.steps:
        args = [x.value if isinstance(x, Constant) else have[x] for x in step.ins]
        have.update(zip(step.outs, step.run(args), strict=True))
    return [have[v] for v in region.outputs]


@jtile_graph_p.def_abstract_eval
def _(*avals: Any, region: Region, options: Options) -> list[ShapedArray]:
    outs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in region.outputs]
    if options.traced:
        wired = _wired(region, options, here())
        outs.append(jax.ShapeDtypeStruct((len(wired.graph.bands), _TRACED), np.int32))
    found = typed(avals, outs, [PartitionSpec(*(None,) * len(o.shape)) for o in outs])
    # A sum over devices is the same on all of them, and its type says so.
    return [*(v.aval for v in region.outputs), *found[len(region.outputs) :]] if region.axes else found


@jtile_graph_p.def_impl
def _impl(*operands: Any, region: Region, options: Options) -> Sequence[Any]:
    return jax.jit(lambda *xs: jtile_graph_p.bind(*xs, region=region, options=options))(*operands)


def _batch(operands: Sequence[Any], dims: Sequence[Any], *, region: Region, options: Options):
    """The batching rule: kernels under vmap are other kernels, which run one after another."""
    del options
    outs = jax.vmap(lambda *xs: one_after_another(region, xs), tuple(dims))(*operands)
    return outs, [0] * len(outs)


batching.primitive_batchers[jtile_graph_p] = _batch


# -- its lowering -----------------------------------------------------------------------------------------------------


def _wired(region: Region, options: Options, target: Target) -> Wired:
    """The graph of a region; with the costs of compiled kernels where these are images of their own."""
    cores = cores_of(target, options)
    if persistent(target):
        return wire(region, target, cores, **bands_for(target))
    _compile_together(region, target)
    return wire(region, target, cores, compiled)


def _compile_together(region: Region, target: Target) -> None:
    """Compile the kernels of a region in several threads: each is found in the caches then, which a dump passes by."""
    pieces: dict[Piece | Sum, None] = {}
    wire(
        region,
        target,
        1,
        lambda piece, kernel: pieces.setdefault(piece) or 1.0,
        split=lambda programs, *_: [(0, programs)],
    )
    if len(pieces) < 2 or current().dump:
        return
    context = contextvars.copy_context()
    with ThreadPoolExecutor(min(len(pieces), cores_here()), thread_name_prefix="jtile-compile") as pool:
        for done in [pool.submit(lambda p=piece: context.copy().run(lambda: p.artifact)) for piece in pieces]:
            done.result()


def scheduled(region: Region, options: Options, target: Target | None = None) -> tuple[Wired, Schedule]:
    wired = _wired(region, options, target or here())
    return wired, simulate(wired.graph)


def _lower_on(
    platform: Platform, ctx: mlir.LoweringRuleContext, *operands: Any, region: Region, options: Options
) -> Sequence[Any]:
    assert platform.graph_call is not None
    target = platform.here()
    alone = is_partitioned(ctx) or any(refusal(step, target, dict(region.axes)) for step in region.kernels)
    if alone or not _meet(region, platform, ctx):
        return mlir.lower_fun(lambda *xs: one_after_another(region, xs), multiple_results=True)(ctx, *operands)
    platform.register()
    wired, schedule = scheduled(region, options, target)
    given, avals = _operands(ctx, wired, operands, region)
    memories = sorted((m for m in wired.graph.memories if m.result is not None), key=lambda m: m.result or 0)
    aliases = {m.operand: m.result for m in memories if m.operand is not None}
    name = platform.graph_call
    if platform.compile_graph is not None:
        launch, artifact = launched(schedule, len(given), options.traced, target)
        groups = device_groups([axis for axis, _ in region.axes], ctx, "jt.graph", None) if launch.shape.far else None
        attributes, size = persistent_attributes(platform, artifact, groups), launch.inner
        given, avals = [*given, mlir.ir_constant(launch.plan)], [*avals, ShapedArray(launch.plan.shape, np.int32)]
        name = (platform.io_call if current().debug else None) or name
    else:
        attributes, size = attributes_of(schedule, options.static)
        numbers = {"operands": len(given), "results": len(memories), "traced": int(options.traced)}
        attributes |= {name: np.int64(n) for name, n in numbers.items()}
    if region.axes and platform.compile_graph is None:
        assert platform.graph_devices_call is not None
        name, here_aval = platform.graph_devices_call, ShapedArray((1 + len(region.axes),), np.dtype(np.int32))
        axes = [[axis, n] for axis, n in region.axes]
        attributes |= {"devices": json.dumps({"axes": axes, "signals": []}), "timeout": milliseconds()}
        inner = ctx.replace(avals_in=(), avals_out=(here_aval,))
        given += mlir.lower_fun(lambda: [place_along(region.axes)], multiple_results=True)(inner)
        avals.append(here_aval)
    outs = [ShapedArray(m.shape, DTYPES[m.dtype].numpy) for m in memories]
    outs.append(ShapedArray((max(size, 1),), np.dtype(np.uint8)))
    if options.traced:
        outs.append(ShapedArray((len(wired.graph.bands), _TRACED), np.dtype(np.int32)))
    rule = jax.ffi.ffi_lowering(name, operand_output_aliases=aliases)
    hidden = platform.fuses_slices and aliases
    if hidden:
        given = [behind_barrier(ctx, a, x) for a, x in zip(avals, given, strict=True)]
    found = rule(ctx.replace(avals_in=tuple(avals), avals_out=tuple(outs)), *given, **attributes)
    if hidden:
        found = [behind_barrier(ctx, a, x) for a, x in zip(outs, found, strict=True)]
    results = [_shaped(ctx, found[r], outs[r], v) for r, v in zip(wired.results, region.outputs, strict=True)]
    return [*results, *([found[-1]] if options.traced else [])]


def _meet(region: Region, platform: Platform, ctx: mlir.LoweringRuleContext) -> bool:
    """Whether the devices that a region talks to reach each other's memory: else XLA adds up."""
    if not region.axes or platform.compile_graph is None:
        return True
    mesh = mesh_of(ctx)
    return mesh is not None and can_talk(mesh.devices.flat)


def _shaped(ctx: mlir.LoweringRuleContext, value: Any, aval: ShapedArray, v: Value) -> Any:
    """A result in the shape of the region's output: its memory has the shape of the first version."""
    if aval.shape == v.shape:
        return value
    inner = ctx.replace(avals_in=(aval,), avals_out=(ShapedArray(v.shape, v.dtype),))
    return mlir.lower_fun(lambda x: [x.reshape(v.shape)], multiple_results=True)(inner, value)[0]


def _operands(
    ctx: mlir.LoweringRuleContext, wired: Wired, operands: Sequence[Any], region: Region
) -> tuple[list[Any], list[Any]]:
    have = dict(zip(region.inputs, zip(operands, ctx.avals_in, strict=True), strict=True))
    given, avals = [], []
    for x in wired.operands:
        if isinstance(x, Value):
            value, aval = have[x]
        elif isinstance(x, Constant):
            value, aval = mlir.ir_constant(np.asarray(x.value, x.dtype)), ShapedArray(x.shape, x.dtype)
        elif isinstance(x, np.ndarray):
            value, aval = mlir.ir_constant(x), ShapedArray(x.shape, x.dtype)
        else:
            aval = ShapedArray(x.shape, x.dtype)
            made = mlir.lower_fun(lambda x=x: filled([x]), multiple_results=True)
            (value,) = made(ctx.replace(avals_in=(), avals_out=(aval,)))
        given.append(value)
        avals.append(aval)
    return given, avals


def attributes_of(schedule: Schedule, static: bool) -> tuple[dict[str, Any], int]:
    """(attributes of the call, bytes of the arena); as the handler in ffi/csrc/cpu.cc declares them."""
    number: dict[Piece | Sum, int] = {}
    kernels = [number.setdefault(task.source, len(number)) for task in schedule.graph.tasks]
    plan, size = encode(schedule, kernels, static)
    attributes: dict[str, Any] = {"plan": plan}
    numbers: list[int] = []
    tasks = {task.source: task for task in schedule.graph.tasks}
    for piece, k in number.items():
        artifact = piece.artifact
        attributes |= {f"{name}{k}": str(artifact.launch[name]) for name in ("name", "isa", "sites")}
        attributes[f"image{k}"] = artifact.image
        numbers += [tasks[piece].programs, int(artifact.launch["workspace"]), int(artifact.launch["cost"])]
    return attributes | {"kernels": np.asarray(numbers, np.int64)}, size


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, region: Region, options: Options) -> Sequence[Any]:
    names = ctx.platforms or ctx.module_context.platforms
    if len(names) == 1 and names[0] in platforms.hosts():
        platform = platforms.on(names[0], own=True)
        if platform.graph_call is not None:
            return _lower_on(platform, ctx, *operands, region=region, options=options)
    raise UnsupportedError(
        f"jt.graph: platform {', '.join(names)!r} runs no execution graphs, only CPUs and NVIDIA's GPUs do: "
        "call the function itself"
    )


mlir.register_lowering(jtile_graph_p, _lower)


def timeline_of(schedule: Schedule, rows: np.ndarray) -> GraphTimeline:
    """The timeline that a traced call wrote."""
    numbers = rows.view(np.int64)  # a GPU's clock began long before the graph
    numbers = numbers - np.asarray([[numbers[:, 0].min()] * 2 + [0]])
    entries = [
        Entry(b, int(worker), float(start), float(end))
        for b, (start, end, worker) in zip(schedule.order, numbers.tolist(), strict=True)
    ]
    return GraphTimeline(schedule.graph, tuple(entries), measured=True)
