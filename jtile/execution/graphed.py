"""`jt.graph`, and the explanation and the timeline of what it runs."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np

from jtile._compat import like
from jtile._errors import KernelTypeError, KernelValueError, UnsupportedError
from jtile.fusion.fused import evaluate as fused
from jtile.fusion.groups import plan_of
from jtile.fusion.steps import Constant, Step, program_of
from jtile.lowering.here import target, tile_level

from . import primitive
from .devices import is_sum
from .interpret import interpret_region
from .primitive import Options
from .regions import Cut, Region, cut, is_kernel, is_view
from .schedule import Schedule
from .tasks import TaskGraph
from .timeline import GraphTimeline


class Graphed:
    """A function whose kernels run as one execution graph; `jt.graph` makes one. It is called as the function is."""

    def __init__(
        self,
        fun: Callable[..., Any],
        static_argnums: tuple[int, ...],
        static_argnames: tuple[str, ...],
        options: Options,
    ):
        self._fun, self._numbers, self._names, self._options = fun, static_argnums, static_argnames, options
        functools.update_wrapper(self, fun)

        def run(*args, **kwargs):
            primitive.check_target(target())
            closed, tree, leaves = self._traced(args, kwargs)
            return jax.tree.unflatten(tree, _differentiable(closed, options, leaves))

        run.__name__ = f"graph_{getattr(fun, '__name__', 'function')}"
        self._run = jax.jit(run, static_argnums=static_argnums, static_argnames=static_argnames)

    def __call__(self, *args, **kwargs):
        return self._run(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<jtile.Graphed {getattr(self._fun, '__name__', self._fun)}>"

    def explain(self, *args, **kwargs) -> GraphExplanation:
        """The tasks of each launch for these arguments (arrays, or `jax.ShapeDtypeStruct`s), their edges, their cores,
        the predicted timeline, and what stays XLA's. It compiles the kernels, and runs nothing."""
        primitive.check_target(target())
        found = _cut(self._traced(args, kwargs)[0])
        schedules = [primitive.scheduled(region, self._options)[1] for region in found.regions]
        return GraphExplanation(found, tuple(schedules))

    def timeline(self, *args, **kwargs) -> list[GraphTimeline]:
        """Runs the function and gives what the cores did, a timeline for each launch in order. The first run of it
        warms up; the second is written down."""
        primitive.check_target(target())
        closed, _, leaves = self._traced(args, kwargs)
        found, options = _cut(closed), dataclasses.replace(self._options, traced=True)
        rows: list[Any] = []

        def run(region: Region, values: Sequence[Any]) -> Sequence[Any]:
            *outs, row = primitive.bind(region, values, options)
            rows.append(row)
            return outs

        def whole(*leaves):
            rows.clear()
            evaluate(found, leaves, run)
            return list(rows)

        call = jax.jit(whole)
        jax.block_until_ready(call(*leaves))
        measured = call(*leaves)
        schedules = [primitive.scheduled(region, options)[1] for region in found.regions]
        return [primitive.timeline_of(s, np.asarray(row)) for s, row in zip(schedules, measured, strict=True)]

    def interpret(
        self,
        *args,
        seed: int = 0,
        change: Callable[[TaskGraph], TaskGraph] | None = None,
        devices: Mapping[str, int] | None = None,
        **kwargs,
    ) -> Any:
        """The result by the reference interpreter, which runs programs of bands that may overlap in an order that
        `seed` decides, and checks that edges order what touches one element.

        Args:
          change: makes another graph of each graph, such as one without an edge, for tests.
          devices: for a function of `shard_map` that talks to other devices the axes of the mesh and their sizes. Every
            array, and every result, then has one more axis in front, which counts all devices, the last axis of the
            mesh fastest; `change` gets the graph of all devices.
        Raises:
          RaceError: no edge orders two bands that touch one element, which one of them writes.
          UnsupportedError: another operation than a task talks to other devices.
        """
        primitive.check_target(target())
        if devices:
            return self._interpret_world(args, kwargs, dict(devices), seed, change)
        closed, tree, leaves = self._traced(args, kwargs)
        cores, options = primitive.cores_of(target(), self._options), primitive.bands_for(target())

        def run(region: Region, values: Sequence[Any]) -> Sequence[Any]:
            arrays = [np.asarray(x) for x in values]
            return interpret_region(region, arrays, target(), cores, seed, change, **options)

        return jax.tree.unflatten(tree, evaluate(_cut(closed), leaves, run))

    def _interpret_world(self, args: tuple, kwargs: dict, devices: dict[str, int], seed: int, change: Any) -> Any:
        one = lambda x: jax.ShapeDtypeStruct(np.shape(x)[1:], jax.dtypes.canonicalize_dtype(np.asarray(x).dtype))
        shapes = jax.tree.map(one, (args, kwargs))
        closed, tree, _ = self._traced(*shapes, devices)
        cores, options = primitive.cores_of(target(), self._options), primitive.bands_for(target())

        def run(region: Region, values: Sequence[Any]) -> Sequence[Any]:
            return interpret_region(region, values, target(), cores, seed, change, **options)

        leaves = [np.asarray(x) for x in jax.tree.leaves((args, kwargs))]
        return jax.tree.unflatten(tree, evaluate_world(_cut(closed, devices), leaves, run, devices))

    def _traced(self, args: tuple, kwargs: dict, devices: Mapping[str, int] | None = None) -> tuple[Any, Any, list]:
        """(the jaxpr of a call, the structure of its result, the arrays of its arguments). `devices`: along the axes of
        a mesh that is not there."""
        fixed = {i % len(args) for i in self._numbers if -len(args) <= i < len(args)} if args else set()
        given = {i: x for i, x in enumerate(args) if i not in fixed}
        named = {name: x for name, x in kwargs.items() if name not in self._names}

        def of_arrays(given, named):
            whole = [given.get(i, x) for i, x in enumerate(args)]
            return self._fun(*whole, **{**kwargs, **named})

        with tile_level():
            closed, shapes = jax.make_jaxpr(of_arrays, return_shape=True, axis_env=_env(devices))(given, named)
        return closed, jax.tree.structure(shapes), jax.tree.leaves((given, named))


def graph(
    fun: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    cores: int | None = None,
    assign: str = "dynamic",
) -> Any:
    """Runs the tile kernels of a function in one launch.

    The kernels that the function calls, and those that `jt.fuse` makes of its array programs, become tasks. The
    programs of a task are cut into bands. A band starts as soon as the bands that it reads from are over, not the
    whole kernels, and a core that waits fetches the weights of its next band. What no kernel computes stays XLA's,
    before, between or behind such launches (`Graphed.explain` says what).
    The result is compiled as `jax.jit` does it, and composes with jit, grad, vmap and shard_map: derivatives and vmaps
    are those of the function, whose kernels run one after another. In one launch they run as
    `jt.graph(jax.grad(f))` and `jt.graph(jax.vmap(f))`.

    Args:
      fun: a function of arrays, and pytrees of them, as `jax.jit` takes it.
      static_argnums, static_argnames: its arguments that are no arrays, as for `jax.jit`.
      cores: how many cores the graph is made for; default: those of this process. It runs on any number. On a GPU the
        blocks of the launch, by default one for each multiprocessor; the device must have room for all at once.
      assign: `"dynamic"`: a core takes the next band in the order of their predicted starts; `"static"`: every core has
        the bands of its own that the predicted timeline gives it, and takes others where their core has not come. On a
        GPU every block has the bands that the predicted timeline gives it, and takes no others.
    Returns:
      A `Graphed`, called as `fun`. Without `fun`, a decorator.
    Raises:
      KernelTypeError: `fun` is no function.
      KernelValueError: `cores` is no number of cores, or `assign` neither of the two.
      UnsupportedError, when it is called: the target runs no execution graphs; CPUs and NVIDIA's GPUs do.
    """
    numbers = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    if assign not in ("dynamic", "static"):
        raise KernelValueError(f"jt.graph: assign is 'dynamic' or 'static', got {assign!r}")
    if cores is not None and (isinstance(cores, bool) or not isinstance(cores, int) or cores < 1):
        raise KernelValueError(
            f"jt.graph: cores is an int of at least 1, or None for those of this process; got {cores!r}"
        )
    if fun is None:
        return functools.partial(graph, static_argnums=numbers, static_argnames=names, cores=cores, assign=assign)
    if not callable(fun):
        raise KernelTypeError(f"jt.graph takes a function of arrays, got {fun!r}")
    return Graphed(fun, numbers, names, Options(cores, assign == "static"))


# -- running ----------------------------------------------------------------------------------------------------------


def _env(devices: Mapping[str, int] | None) -> list[tuple[str, int]] | None:
    return list(devices.items()) if devices else None


def _cut(closed: Any, devices: Mapping[str, int] | None = None) -> Cut:
    """The regions of a program after `jt.fuse`. `devices`: along the axes of a mesh that is not there."""
    with tile_level():
        plan = plan_of(program_of(closed))
        if plan.has_kernels:
            types = [like(v.aval) for v in plan.program.inputs]
            closed = jax.make_jaxpr(lambda *xs: fused(plan, xs), axis_env=_env(devices))(*types)
    return cut(closed, target(), devices)


def _differentiable(closed: Any, options: Options, leaves: Sequence[Any]) -> Sequence[Any]:
    """The results of a program: by launches, or, where derivatives are asked for, by the program itself."""
    consts = list(closed.consts)

    def itself(consts: Sequence[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        return jax.core.eval_jaxpr(closed.jaxpr, consts, *leaves)

    @jax.custom_jvp
    def call(consts: Sequence[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        found = _cut(jexc.ClosedJaxpr(closed.jaxpr, consts))
        return evaluate(found, leaves, lambda region, values: primitive.bind(region, values, options))

    @call.defjvp
    def _(primals, tangents):
        return jax.jvp(itself, primals, tangents)

    return call(consts, list(leaves))


def evaluate(program: Cut, args: Sequence[Any], run: Callable[[Region, Sequence[Any]], Sequence[Any]]) -> list[Any]:
    """The results of a program in regions; `run(region, arrays)`: how a region runs."""
    have: dict[Any, Any] = {**program.constants, **dict(zip(program.inputs, args, strict=True))}
    read = lambda x: x.value if isinstance(x, Constant) else have[x]
    for unit in program.order:
        if isinstance(unit, Region):
            have.update(zip(unit.outputs, run(unit, [have[v] for v in unit.inputs]), strict=True))
        else:
            have.update(zip(unit.outs, unit.run([read(x) for x in unit.ins]), strict=True))
    return [np.asarray(x.value, x.dtype) if isinstance(x, Constant) else have[x] for x in program.outputs]


def evaluate_world(program: Cut, args: Sequence[Any], run: Any, devices: Mapping[str, int]) -> list[Any]:
    """As `evaluate`, on all devices at once: arrays have one more axis in front. Equations of XLA run on one device
    after the other, and know which it is."""
    places = list(np.ndindex(*devices.values()))
    everywhere = lambda x: np.broadcast_to(np.asarray(x), (len(places), *np.shape(x)))
    have: dict[Any, Any] = {v: everywhere(x) for v, x in program.constants.items()}
    have |= dict(zip(program.inputs, args, strict=True))
    read = lambda x: everywhere(np.asarray(x.value, x.dtype)) if isinstance(x, Constant) else have[x]
    for unit in program.order:
        if isinstance(unit, Region):
            talks = bool(unit.axes)
            values = [np.asarray(have[v]) for v in unit.inputs]
            worlds = [values] if talks else [[x[d] for x in values] for d in range(len(places))]
            found = [run(unit, own) for own in worlds]
            outs = found[0] if talks else [np.stack(own) for own in zip(*found, strict=True)]
        elif unit.name == "axis_index":
            axis = list(devices).index(unit.params["axis_name"])
            outs = [np.asarray([place[axis] for place in places], np.int32)]
        elif "axes" in unit.params or "axis_name" in unit.params:
            raise UnsupportedError(f"jt.graph: {unit.name} talks to other devices, and is no task that is interpreted")
        else:
            each = [unit.run([jnp.asarray(read(x)[d]) for x in unit.ins]) for d in range(len(places))]
            outs = [np.stack(own) for own in zip(*each, strict=True)]
        have.update(zip(unit.outputs if isinstance(unit, Region) else unit.outs, outs, strict=True))
    return [np.asarray(read(x)) for x in program.outputs]


# -- explaining -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GraphExplanation:
    """What `Graphed.explain` found; its text says it.

    Attributes:
      cut: the launches, and the equations of XLA between them.
      schedules: for each launch the graph, and its predicted timeline.
    """

    cut: Cut
    schedules: tuple[Schedule, ...]

    @property
    def graphs(self) -> tuple[TaskGraph, ...]:
        return tuple(s.graph for s in self.schedules)

    def __str__(self) -> str:
        equations = [u for u in self.cut.order if isinstance(u, Step) and not is_view(u)]
        lines = [f"{len(self.schedules)} launches, {len(equations)} equations by XLA"]
        left = iter(self.schedules)
        for run in _runs(self.cut.order):
            if isinstance(run, Region):
                lines += ["", *_described(next(left))]
            elif run:
                lines.append("")
                counted = collections.Counter(map(self._named, run))
                lines += [f"XLA: {text}{f', {n} times' if n > 1 else ''}" for text, n in counted.items()]
        return "\n".join(lines)

    def _named(self, step: Step) -> str:
        why = f": {self.cut.why[step]}" if step in self.cut.why else ""
        if is_kernel(step) and not is_sum(step):
            return f"kernel {step.params['program'].name}{why}"
        return f"{', '.join(str(v.aval) for v in step.outs)} = {step.name}{why}"


def _runs(order: Sequence[Region | Step]) -> Iterator[Region | list[Step]]:
    """The regions, and the equations between two of them that are more than another shape of an array."""
    own: list[Step] = []
    for unit in order:
        if isinstance(unit, Region):
            yield own
            yield unit
            own = []
        elif not is_view(unit):
            own.append(unit)
    yield own


def _described(schedule: Schedule) -> list[str]:
    g, line = schedule.graph, schedule.timeline
    alone = sum(b.cost for b in g.bands)
    lines = [
        f"launch: {len(g.tasks)} tasks, {len(g.bands)} bands, {g.edges} edges, {g.cores} cores",
        f"  {line}; one core alone: {alone / 1e3:.1f} us",
    ]
    makers: dict[int, set[int]] = {}
    for band in g.bands:
        makers.setdefault(band.task, set()).update(g.bands[n].task for n in (*band.needs, *band.everywhere))
    for t, task in enumerate(g.tasks):
        bands = [b for b in g.bands if b.task == t]
        behind = f", behind {', '.join(map(str, sorted(makers[t])))}" if makers[t] else ""
        cost = sum(b.cost for b in bands) / 1e3
        lines.append(
            f"  {t}: {task.kernel.name}, {task.programs} programs in {len(bands)} bands, {cost:.1f} us{behind}"
        )
    return lines
