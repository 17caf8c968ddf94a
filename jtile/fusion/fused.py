"""`jt.fuse`, and the explanation of what it did."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import jaxpr_as_fun

from jtile._collector import paused
from jtile._compat import is_staged, trace_context
from jtile._errors import KernelTypeError
from jtile._memo import Recent

from .bodies import kernel_of
from .chains import Chain
from .costs import picks_well
from .gathers import is_gather
from .groups import plan_of
from .loops import Loop
from .row_scatters import RowScatter
from .steps import Constant, Node, Step, Value, program_of
from .units import Group, Plan, Product, Unit

PLANS = 64  # remembered types of arguments of a function, in programs around it


class Fused:
    """A function whose array program runs as tile kernels; `jt.fuse` makes one. It is called as the function is."""

    def __init__(self, fun: Callable[..., Any], static_argnums: tuple[int, ...], static_argnames: tuple[str, ...]):
        self._fun, self._numbers, self._names = fun, static_argnums, static_argnames
        self._staged: Recent[Any, tuple[Plan, Any]] = Recent(PLANS)
        functools.update_wrapper(self, fun)

    @functools.cached_property
    def _run(self) -> Callable[..., Any]:
        """The function as `jax.jit` makes it, which takes 0.35 ms, and is not needed in a program around it."""

        def run(*args, **kwargs):
            plan, tree, leaves = self.planned(args, kwargs)
            return jax.tree.unflatten(tree, evaluate(plan, leaves))

        run.__name__ = f"fuse_{getattr(self._fun, '__name__', 'function')}"
        return jax.jit(run, static_argnums=self._numbers, static_argnames=self._names, inline=True)

    def __call__(self, *args, **kwargs):
        given, named = self.arrays(args, kwargs)
        leaves, tree = jax.tree.flatten((given, named))
        if not leaves or not all(map(is_staged, leaves)):
            return self._run(*args, **kwargs)
        fixed = [x for i, x in enumerate(args) if i not in given]
        fixed += [(name, x) for name, x in kwargs.items() if name not in named]
        key = tree, tuple(map(jax.typeof, leaves)), tuple(fixed), trace_context()
        try:
            known = self._staged.get(key)
        except TypeError:  # a static argument that has no hash: JAX names it
            return self._run(*args, **kwargs)
        return self._in_program(key, known or self.planned(args, kwargs)[:2], leaves)

    def _in_program(self, key: Any, known: tuple[Plan, Any], leaves: Sequence[Any]) -> Any:
        """The result in a program that is being traced: its equations become that program's. A call of `jax.jit` around
        them, which it would inline, takes a millisecond."""
        plan, tree = known
        if not any(isinstance(x, jax.core.Tracer) for x in plan.program.constants.values()):
            self._staged.put(key, known)
        return jax.tree.unflatten(tree, evaluate(plan, leaves))

    def __repr__(self) -> str:
        return f"<jtile.Fused {getattr(self._fun, '__name__', self._fun)}>"

    def explain(self, *args, **kwargs) -> Explanation:
        """What becomes a kernel for these arguments (arrays, or `jax.ShapeDtypeStruct`s), what stays XLA's, and why."""
        return Explanation(self.planned(args, kwargs)[0])

    def planned(self, args: tuple, kwargs: dict, *, everything: bool = False) -> tuple[Plan, Any, list]:
        """(the plan of a call, the structure of its result, the arrays of its arguments). everything: see `plan_of`."""
        given, named = self.arrays(args, kwargs)

        def of_arrays(given, named):
            whole = [given.get(i, x) for i, x in enumerate(args)]
            return self._fun(*whole, **{**kwargs, **named})

        closed, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(given, named)
        with paused():
            plan = plan_of(program_of(closed), everything=everything)
        return plan, jax.tree.structure(shapes), jax.tree.leaves((given, named))

    def arrays(self, args: tuple, kwargs: dict) -> tuple[dict[int, Any], dict[str, Any]]:
        """The arguments that are not static: by their number, and by their name."""
        fixed = {i % len(args) for i in self._numbers if -len(args) <= i < len(args)} if args else set()
        given = {i: x for i, x in enumerate(args) if i not in fixed}
        return given, {name: x for name, x in kwargs.items() if name not in self._names}


def fuse(
    fun: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> Any:
    """Makes tile kernels of a function of arrays.

    Chains of elementwise functions, broadcasts, and reductions along axes that a program can take whole (softmaxes,
    norms) become one kernel each, which reads its inputs once and writes its outputs once; what an index picks along
    one axis of an array, and slices, pads and shifts of one, are loaded in the kernel that needs them; what is added to
    a small table by an index is added in the kernel that computes it, on CPUs. A product of 16-bit floats is one kernel
    with the elementwise functions behind it, and on CPUs one of few rows with those that compute its weights. A
    product, a softmax of what it gives, and a product with that become `jt.ops.attention`, which keeps no scores; a
    query whose scores are all -1e30 or less gives zeros there. Everything else stays what it is in XLA: other products,
    other scatters, sorts, loops, and what is not worth a kernel (`Fused.explain` says which, and why);
    `jt.tune(jt.fuse(f), *args)` measures what is.
    The result is compiled as `jax.jit` does it, and composes with jit, vmap, grad and shard_map. The gradient of a
    whole function is quickest as `jt.fuse(jax.grad(f))`.

    Args:
      fun: a function of arrays, and pytrees of them, as `jax.jit` takes it.
      static_argnums, static_argnames: its arguments that are no arrays, as for `jax.jit`.
    Returns:
      A `Fused`, called as `fun`. Without `fun`, a decorator.
    Raises:
      KernelTypeError: `fun` is no function.
    """
    numbers = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    if fun is None:
        return lambda fun: fuse(fun, static_argnums=numbers, static_argnames=names)
    if not callable(fun):
        raise KernelTypeError(f"jt.fuse takes a function of arrays, got {fun!r}")
    return Fused(fun, numbers, names)


def evaluate(
    plan: Plan, args: Sequence[Any], run: Callable[[Unit, Sequence[Any]], Sequence[Any]] | None = None
) -> list:
    """The results of a program for the arrays of its inputs; `run(unit, arrays)`: how a unit runs."""
    program, run = plan.program, run or functools.partial(run_unit, kernels=plan.kernels)
    if not plan.has_kernels:  # XLA gets the program as it is without jt.fuse
        return jaxpr_as_fun(program.closed)(*args)
    have: dict[Value, Any] = {**program.constants, **dict(zip(program.inputs, args, strict=True))}
    read = lambda x: np.asarray(x.value, x.dtype) if isinstance(x, Constant) else have[x]
    for unit in plan.order:
        if not isinstance(unit, int):
            have.update(zip(unit.outputs, run(unit, [have[v] for v in unit.inputs]), strict=True))
        else:
            params = _params(program.nodes[unit], plan.inside.get(unit, {}), run)
            have.update(_values(program.nodes[unit], have, **params))
    return [read(x) for x in program.outputs]


def _params(node: Node, inside: Mapping[str, Sequence[Plan]], run: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of an equation whose functions run as planned."""
    params = {}
    for name, plans in inside.items():
        made = [
            jax.make_jaxpr(lambda *xs, p=p: evaluate(p, xs, run))(*(v.aval for v in p.program.inputs)) for p in plans
        ]
        if not any(closed.consts for closed in made):
            params[name] = tuple(made) if isinstance(node.eqn.params[name], (tuple, list)) else made[0]
    return params


def _values(node: Node, have: dict[Value, Any], **params: Any) -> Iterable[tuple[Value, Any]]:
    args = [x.value if isinstance(x, Constant) else have[x] for x in node.ins]
    return zip(node.outs, node.eqn.run(args, **params), strict=True)


@paused()
def run_unit(unit: Unit, args: Sequence[Any], kernels: dict[Any, Any] | None = None) -> Sequence[Any]:
    """A unit by its kernel, one of `kernels` or a new one. Where functions have derivative rules of their own, or sums
    leave the kernel in parts, the derivative is that of the equations themselves; else it is the kernel's."""
    kernels = {} if kernels is None else kernels
    kernel = kernels.get(unit) or kernels.setdefault(unit, kernel_of(unit))
    if not unit.by_equations:
        return kernel(args)

    @jax.custom_jvp
    def call(*args):
        return kernel(args)

    @call.defjvp
    def _(primals, tangents):
        return jax.jvp(lambda *xs: _by_equations(unit, xs), primals, tangents)

    return call(*args)


def _by_equations(unit: Unit, args: Sequence[Any]) -> list:
    have: dict[Value, Any] = dict(zip(unit.inputs, args, strict=True))
    for node in unit.nodes:
        have.update(_values(node, have))
    return [have[v] for v in unit.outputs]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `Fused.explain` found; its text says it.

    Attributes:
      plan: the groups, and the order in which they and the other equations run.
    """

    plan: Plan

    def __str__(self) -> str:
        return "\n".join(_lines_of_plan(self.plan))


def _lines_of_plan(plan: Plan) -> list[str]:
    program = plan.program
    nodes = [node for node in program.nodes if not node.free]
    taken = sum(not node.free for unit in plan.units for node in unit.nodes)
    counts = f"{len(nodes)} equations: {taken} in {len(plan.units)} kernels, {len(nodes) - taken} by XLA"
    lines = [f"{counts}{plan.origin}"]
    for unit in plan.order:
        if not isinstance(unit, int):
            lines += ["", *_lines_of(unit)]
        elif not program.nodes[unit].free:
            lines += ["", f"XLA: {_equation(program.nodes[unit])}"]
            inner = [p for plans in plan.inside.get(unit, {}).values() for p in plans]
            for p in inner:
                lines += [f"  {line}".rstrip() for line in ("a function in it:", *_lines_of_plan(p))]
            if not inner:
                lines.append(f"  {_why(plan, unit)}")
    return lines


def _why(plan: Plan, number: int) -> str:
    """Why an equation is in no kernel."""
    node = plan.program.nodes[number]
    if node.name == "scan":
        return "not all of its body are steps of a kernel over axes that all of it has"
    if is_gather(node.eqn) and not picks_well(node.eqn):
        return "it picks whole rows or columns, which XLA's code for CPUs copies as quickly"
    if is_gather(node.eqn):
        return "no kernel alone needs what it picks"
    for first, members, why in plan.left:
        if number in members:
            return f"no kernel of its own: {why}" if first == number else "no kernel of its own, as above"
    if node.name.startswith("scatter"):
        return f"no kernel computes what {node.name} adds or writes, or XLA's code for tables of this size is as quick"
    if not node.steps:
        return f"jt.fuse makes no kernels of {node.name}"
    return "its axes are not those of the kernels beside it, or a program has no room for what it sums"


def _arrays(values: Sequence[Value]) -> str:
    return ", ".join(f"{v.dtype.name}{list(v.shape)}" for v in values) or "nothing"


def _lines_of(unit: Unit) -> list[str]:
    head = _attention_of(unit) if isinstance(unit, Chain) else _head_of(unit)
    lines = [head, f"  reads {_arrays(unit.inputs)}", f"  writes {_arrays(unit.outputs)}"]
    if unit.by_equations:
        lines.append("  its derivative is that of its equations, by XLA")
    steps = unit.steps if isinstance(unit, Loop) else [node.eqn for node in unit.nodes if not node.free]
    return lines + [f"    {_equation(step)}" for step in steps]


def _attention_of(chain: Chain) -> str:
    between = "scores that a function of yours changes" if chain.score else f"scores times {chain.scale:.6g}"
    return f"jt.ops.attention: {between}{', causal' * chain.causal}; the scores are in no memory"


def _head_of(unit: Group | Loop | Product | RowScatter) -> str:
    kernel = kernel_of(unit)
    if isinstance(unit, RowScatter):
        return f"kernel {kernel.kernel.name}: {kernel.programs} programs, {kernel.share}"
    tiling, origin = kernel.choice
    tile = " x ".join(map(str, tiling.sides)) or "one element"
    whole = f", {unit.layout.row} of them along axes that a program takes whole" if unit.layout.whole else ""
    rounds = f"; each runs all {unit.length} rounds" if isinstance(unit, Loop) else ""
    if isinstance(unit, Group) and unit.last:
        rounds = "; its programs share the axes that the last sums go along"
    if isinstance(unit, Product) and any(source.layout is not None for source in unit.sources):
        rounds = "; they compute operands of the product as they need them"
    programs = f"{tiling.programs} programs, each with tiles of {tile} elements{whole}{rounds}"
    return f"kernel {kernel.kernel.name}: {programs}{origin}"


def _equation(made: Node | Step) -> str:
    out = ", ".join(f"{v.dtype}{list(v.shape)}" for v in made.outs if hasattr(v.aval, "shape"))
    eqn = made.eqn.eqn if isinstance(made, Node) else made.eqn
    return f"{out} = {made.name}  ({source_info_util.summarize(eqn.source_info)})"
