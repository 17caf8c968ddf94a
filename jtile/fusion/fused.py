"""`fuse`, and what it says of itself."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util

from jtile._errors import KernelTypeError

from .bodies import GroupKernel
from .chains import Chain
from .groups import Group, Plan, plan_of
from .steps import Constant, Node, Value, program_of


class Fused:
    """A function whose array program runs as tile kernels; `jt.fuse` makes one. It is called as the function is."""

    def __init__(self, fun: Callable[..., Any], static_argnums: tuple[int, ...], static_argnames: tuple[str, ...]):
        self._fun, self._numbers, self._names = fun, static_argnums, static_argnames
        functools.update_wrapper(self, fun)

        def run(*args, **kwargs):
            plan, tree, leaves = self._planned(args, kwargs)
            return jax.tree.unflatten(tree, evaluate(plan, leaves))

        run.__name__ = f"fuse_{getattr(fun, '__name__', 'function')}"
        self._run = jax.jit(run, static_argnums=static_argnums, static_argnames=static_argnames)

    def __call__(self, *args, **kwargs):
        return self._run(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<jtile.Fused {getattr(self._fun, '__name__', self._fun)}>"

    def explain(self, *args, **kwargs) -> Explanation:
        """What becomes a kernel for these arguments (arrays, or `jax.ShapeDtypeStruct`s), what stays XLA's, and why."""
        return Explanation(self._planned(args, kwargs)[0])

    def _planned(self, args: tuple, kwargs: dict) -> tuple[Plan, Any, list]:
        """(the plan of a call, the structure of its result, the arrays of its arguments)."""
        fixed = {i % len(args) for i in self._numbers if -len(args) <= i < len(args)} if args else set()
        given = {i: x for i, x in enumerate(args) if i not in fixed}
        named = {name: x for name, x in kwargs.items() if name not in self._names}

        def of_arrays(given, named):
            whole = [given.get(i, x) for i, x in enumerate(args)]
            return self._fun(*whole, **{**kwargs, **named})

        closed, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(given, named)
        return plan_of(program_of(closed)), jax.tree.structure(shapes), jax.tree.leaves((given, named))


def fuse(
    fun: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> Any:
    """Makes tile kernels of a function of arrays.

    Chains of elementwise functions, broadcasts, and reductions along axes that a program can take whole (softmaxes,
    norms) become one kernel each, which reads its inputs once and writes its outputs once. A product, a softmax of what
    it gives, and a product with that become `jt.ops.attention`, which keeps no scores; a query whose scores are all
    -1e30 or less gives zeros there. Everything else stays what it is in XLA: other products, gathers, sorts, loops, and
    what is not worth a kernel (`Fused.explain` says which, and why).
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
    plan: Plan, args: Sequence[Any], run: Callable[[Group | Chain, Sequence[Any]], Sequence[Any]] | None = None
) -> list:
    """The results of a program for the arrays of its inputs; `run(unit, arrays)`: how a group or a chain runs."""
    program, run = plan.program, run or run_unit
    have: dict[Value, Any] = {**program.constants, **dict(zip(program.inputs, args, strict=True))}
    read = lambda x: np.asarray(x.value, x.dtype) if isinstance(x, Constant) else have[x]
    for unit in plan.order:
        if not isinstance(unit, int):
            have.update(zip(unit.outputs, run(unit, [have[v] for v in unit.inputs]), strict=True))
        else:
            have.update(_values(program.nodes[unit], have))
    return [read(x) for x in program.outputs]


def _values(node: Node, have: dict[Value, Any]) -> Iterable[tuple[Value, Any]]:
    args = [x.value if isinstance(x, Constant) else have[x] for x in node.ins]
    return zip(node.outs, node.run(args), strict=True)


def run_unit(unit: Group | Chain, args: Sequence[Any]) -> Sequence[Any]:
    """A group by its kernel, a chain by that of the library. Where functions have derivative rules of their own, the
    derivative is that of the equations themselves, by these rules; else it is the kernel's."""
    kernel = GroupKernel(unit) if isinstance(unit, Group) else unit
    if not unit.ruled:
        return kernel(args)

    @jax.custom_jvp
    def call(*args):
        return kernel(args)

    @call.defjvp
    def _(primals, tangents):
        return jax.jvp(lambda *xs: _by_equations(unit, xs), primals, tangents)

    return call(*args)


def _by_equations(unit: Group | Chain, args: Sequence[Any]) -> list:
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
        nodes = [node for node in self.plan.program.nodes if not node.free]
        kernels = [*self.plan.groups, *self.plan.chains]
        taken = sum(not node.free for group in kernels for node in group.nodes)
        lines = [f"{len(nodes)} equations: {taken} in {len(kernels)} kernels, {len(nodes) - taken} by XLA"]
        for unit in self.plan.order:
            if not isinstance(unit, int):
                lines += ["", *_lines_of(unit)]
            elif not self.plan.program.nodes[unit].free:
                lines += ["", f"XLA: {_equation(self.plan.program.nodes[unit])}", f"  {self._why(unit)}"]
        return "\n".join(lines)

    def _why(self, number: int) -> str:
        node = self.plan.program.nodes[number]
        if not node.steps:
            return f"jt.fuse makes no kernels of {node.name}"
        for first, members, why in self.plan.left:
            if number in members:
                return f"no kernel of its own: {why}" if first == number else "no kernel of its own, as above"
        return "its axes are not those of the kernels beside it, or a program has no room for what it sums"


def _arrays(values: Sequence[Value]) -> str:
    return ", ".join(f"{v.dtype.name}{list(v.shape)}" for v in values) or "nothing"


def _lines_of(unit: Group | Chain) -> list[str]:
    head = _head_of(unit) if isinstance(unit, Group) else _attention_of(unit)
    lines = [head, f"  reads {_arrays(unit.inputs)}", f"  writes {_arrays(unit.outputs)}"]
    if unit.ruled:
        lines.append("  its derivative is that of its equations, of which some have rules of their own")
    return lines + [f"    {_equation(node)}" for node in unit.nodes if not node.free]


def _attention_of(chain: Chain) -> str:
    between = "scores that a function of yours changes" if chain.score else f"scores times {chain.scale:.6g}"
    return f"jt.ops.attention: {between}{', causal' * chain.causal}; the scores are in no memory"


def _head_of(group: Group) -> str:
    kernel, layout = GroupKernel(group), group.layout
    tile = " x ".join(map(str, kernel.sides)) or "one element"
    whole = f", {layout.row} of them along axes that a program takes whole" if layout.whole else ""
    return f"kernel {kernel.kernel.name}: {kernel.programs} programs, each with tiles of {tile} elements{whole}"


def _equation(node: Node) -> str:
    out = ", ".join(f"{v.dtype}{list(v.shape)}" for v in node.outs if hasattr(v.aval, "shape"))
    return f"{out} = {node.name}  ({source_info_util.summarize(node.eqn.eqn.source_info)})"
