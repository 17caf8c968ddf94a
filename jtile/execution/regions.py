"""From a jaxpr to regions: kernels that one launch can run, and what XLA does before, between and behind them.

Calls of `jax.jit` are opened, and so are functions with derivative rules of their own in which kernels are: what is
differentiated is the function before (`graphed`), not what comes out here.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jtile._mesh import mesh_axes
from jtile.fusion.steps import OPENED, WITH_RULES, Constant, Operand, Step, Value
from jtile.language._equations import opened
from jtile.lowering import platforms
from jtile.lowering.targets import Target
from jtile.primitive.jtile_call import jtile_call_p
from jtile.primitive.lowering import interpreted, pieces_of
from jtile.primitive.program import Program, for_target

from .devices import axes_of, is_sum
from .devices import refusal as devices_refusal

LEAST = 2  # kernels of a region, at least
_IDENTITIES = frozenset(["stop_gradient", "name", "pvary", "pcast"])


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """Kernels of one launch.

    Attributes:
      steps: its kernels and the reshapes between them, in an order in which they may run.
      inputs, outputs: the values that it takes from outside, and those that are used there.
      axes: of the mesh, with their sizes: those along which its sums talk to other devices.
    """

    steps: tuple[Step, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    axes: tuple[tuple[str, int], ...] = ()

    @property
    def kernels(self) -> list[Step]:
        return [s for s in self.steps if is_kernel(s)]


@dataclasses.dataclass
class Cut:
    """A program: regions, and single equations of XLA, in the order in which they run.

    Attributes:
      why: for each kernel that is in no region the reason.
    """

    inputs: list[Value]
    constants: dict[Value, Any]
    outputs: list[Operand]
    order: list[Region | Step]
    why: dict[Step, str]

    @property
    def regions(self) -> list[Region]:
        return [u for u in self.order if isinstance(u, Region)]


def is_kernel(step: Step) -> bool:
    """Whether a step can be a task: a kernel, or a sum over devices."""
    return step.eqn.primitive is jtile_call_p or is_sum(step)


def is_view(step: Step) -> bool:
    """Whether a step gives the bytes of its operand under another shape."""
    if len(step.ins) != 1 or len(step.outs) != 1 or not isinstance(step.ins[0], Value):
        return False
    x, y = step.ins[0], step.outs[0]
    if not hasattr(x.aval, "shape") or x.dtype != y.dtype or not all(isinstance(n, int) for n in (*x.shape, *y.shape)):
        return False
    if step.name in ("squeeze", "expand_dims") or step.name in _IDENTITIES:
        return True
    if step.name == "reshape":
        return step.params.get("dimensions") is None
    if step.name == "transpose":  # axes of one element change places with others
        moved = [k for k in step.params["permutation"] if x.shape[k] != 1]
        return moved == sorted(moved)
    dims = step.params.get("broadcast_dimensions", ())
    return step.name == "broadcast_in_dim" and math.prod(x.shape) == math.prod(y.shape) and list(dims) == sorted(dims)


# -- equations --------------------------------------------------------------------------------------------------------


def _has_kernel(jaxpr: Any) -> bool:
    return any(
        eqn.primitive is jtile_call_p or any(_has_kernel(j) for j in _inside(eqn)) for eqn in opened(jaxpr)[0].eqns
    )


def _inside(eqn: Any) -> Iterator[Any]:
    """The closed jaxpr of a call that may be opened."""
    name = eqn.primitive.name
    if name in OPENED or name in WITH_RULES:
        inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
        if hasattr(inner, "consts"):
            yield inner


def steps_of(closed: Any) -> Cut:
    """The equations of a closed jaxpr, those of opened calls among them, without what nobody uses."""
    constants: dict[Value, Any] = {}
    steps: list[Step] = []

    def open_(closed: Any, names: dict[Any, Operand]) -> None:
        for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            names[var] = value = Value(var.aval)
            constants[value] = const
        for eqn in closed.jaxpr.eqns:
            ins = tuple(_operand(names, v) for v in eqn.invars)
            inner = next(_inside(eqn), None)
            if inner is not None and _opens(eqn, inner):
                own = dict(zip(inner.jaxpr.invars, ins, strict=True))
                open_(inner, own)
                names.update(zip(eqn.outvars, (_operand(own, v) for v in inner.jaxpr.outvars), strict=True))
                continue
            outs = tuple(Value(v.aval) for v in eqn.outvars)
            names.update(zip(eqn.outvars, outs, strict=True))
            steps.append(Step(eqn, ins, outs))

    names: dict[Any, Operand] = {var: Value(var.aval) for var in closed.jaxpr.invars}
    inputs = [v for v in names.values() if isinstance(v, Value)]
    open_(closed, names)
    outputs = [_operand(names, v) for v in closed.jaxpr.outvars]
    read, kept = {x for x in outputs if isinstance(x, Value)}, []
    for step in reversed(steps):
        if step.eqn.effects or any(v in read for v in step.outs):
            kept.append(step)
            read.update(x for x in step.ins if isinstance(x, Value))
    return Cut(inputs, constants, outputs, kept[::-1], {})


def _opens(eqn: Any, inner: Any) -> bool:
    """Whether a call with kernels is opened: of `jax.jit` that asks for nothing else, or of a function with a rule."""
    if any(eqn.params.get("donated_invars", ())) or not _has_kernel(inner):
        return False
    asked = [*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ())]
    return all(type(s).__name__ == "UnspecifiedValue" for s in asked)


def _operand(names: Mapping[Any, Operand], v: Any) -> Operand:
    return Constant(v.val, v.aval) if hasattr(v, "val") else names[v]


# -- which kernels take part ------------------------------------------------------------------------------------------


def program_for(step: Step, target: Target) -> Program:
    return for_target(step.params["program"], target)


def refusal(step: Step, target: Target, sizes: Mapping[str, int]) -> str | None:
    """Why a kernel is in no region, or None. `sizes`: devices along the axes of the mesh."""
    if is_sum(step):
        platform = platforms.named(target.platform)
        if platform.graph_devices_call is None and not (platform.compile_graph and platform.peers):
            return "it talks to other devices"
        return devices_refusal(step, sizes, platform.compile_graph is None)
    program = program_for(step, target)
    if program.devices:
        return "it talks to other devices"
    if program.effect:
        return "it prints or asserts"
    if program.dynamic or not all(isinstance(n, int) for v in (*step.ins, *step.outs) for n in v.shape):
        return "its sizes are known only when it runs"
    if interpreted(program):
        return "it runs in the interpreter"
    pieces = pieces_of(program, target)
    platform = platforms.named(target.platform)
    for kernel in pieces.kernels:
        if why := platform.graph_refusal(kernel, target):
            return why
    if any(not math.prod(k.grid) or any(0 in v.shape for v in k.params) for k in pieces.kernels):
        return "it has no elements"
    outs = [pieces.kernels[r.piece].outputs[r.output] for r in pieces.results]
    narrowed = any(v.type.info.numpy != np.dtype(o.dtype) for v, o in zip(outs, program.out_avals, strict=True))
    if narrowed or any(r.partials for r in pieces.results):
        return "its results are sums of partial ones, which XLA adds"
    return None


# -- regions ----------------------------------------------------------------------------------------------------------


class _Cutter:
    """Phases: kernels of a phase depend on equations of XLA of this phase and earlier ones, and these on kernels of
    earlier phases only."""

    def __init__(self, program: Cut, target: Target, sizes: Mapping[str, int]):
        self.program, self.target, self.sizes = program, target, sizes
        self.steps: list[Step] = [s for s in program.order if isinstance(s, Step)]
        self.maker = {v: k for k, s in enumerate(self.steps) for v in s.outs}
        self.why = {s: why for s in self.steps if is_kernel(s) and (why := refusal(s, target, sizes))}
        self.axes = next((axes_of(s) for s in self.steps if is_sum(s) and s not in self.why), ())
        for s in self.steps:
            if is_sum(s) and axes_of(s) != self.axes:
                self.why.setdefault(s, f"other sums are over {', '.join(self.axes)}, and a launch has one set of axes")
        self.results = {v for v in program.outputs if isinstance(v, Value)}
        self.users: dict[Value, list[int]] = {}
        for k, s in enumerate(self.steps):
            for v in dict.fromkeys(x for x in s.ins if isinstance(x, Value)):
                self.users.setdefault(v, []).append(k)

    def cut(self) -> Cut:
        """The program in regions; a kernel that cannot update its operand in place there is left out of them."""
        while True:
            inside, phase = self._phases()
            order: list[Region | Step] = []
            clash = None
            for p in range(max(phase, default=0) + 1):
                order += [s for k, s in enumerate(self.steps) if phase[k] == p and k not in inside]
                own = [k for k in range(len(self.steps)) if phase[k] == p and k in inside]
                found, clash = self._region(own)
                if clash is not None:
                    break
                order += found
            if clash is None:
                return dataclasses.replace(self.program, order=order, why=self.why)
            self.why[clash] = "it updates an operand in place that others read later, or it reads by another name"

    def _makers(self, k: int) -> list[int]:
        return [self.maker[x] for x in self.steps[k].ins if isinstance(x, Value) and x in self.maker]

    def _phases(self) -> tuple[set[int], list[int]]:
        """The steps that regions take, and the phase of each step."""
        inside: set[int] = set()
        phase: list[int] = []
        effects = 0  # the phase of the last effect: what is seen outside stays in its order
        for k, s in enumerate(self.steps):
            makers = self._makers(k)
            p = max((phase[m] for m in makers), default=0)
            if (is_kernel(s) and s not in self.why) or (is_view(s) and any(m in inside for m in makers)):
                inside.add(k)
            else:
                p = max((phase[m] + (m in inside) for m in makers), default=0)
                if s.eqn.effects:
                    p = effects = max(p, effects)
            phase.append(p)
        return inside, phase

    def _region(self, own: list[int]) -> tuple[list[Region | Step], Step | None]:
        """What a phase runs: a region, and the reshapes of its results that others need; or its steps as they are."""
        kernels = [k for k in own if is_kernel(self.steps[k])]
        if len(kernels) < LEAST:
            self.why.update((self.steps[k], "no other kernel can run beside it or behind it") for k in kernels)
            return [self.steps[k] for k in own], None
        ordered, clash = self._ordered(own)
        if clash is not None:
            return [], self.steps[clash]
        members = set(own)
        base = self._bases(ordered)
        needed = {v for k in own for v in self.steps[k].outs if self._needed(v, members)}
        outputs = [v for k in kernels for v in self.steps[k].outs if v in {base.get(w, w) for w in needed}]
        made = {v for k in own for v in self.steps[k].outs}
        steps = [self.steps[k] for k in ordered]
        inputs = dict.fromkeys(x for s in steps for x in s.ins if isinstance(x, Value) and x not in made)
        behind = self._views_of(needed - set(outputs))
        axes = tuple((a, self.sizes[a]) for a in self.axes) if any(is_sum(s) for s in steps) else ()
        return [Region(tuple(steps), tuple(inputs), tuple(dict.fromkeys(outputs)), axes), *behind], None

    def _needed(self, v: Value, members: set[int]) -> bool:
        return v in self.results or any(u not in members for u in self.users.get(v, ()))

    def _bases(self, ordered: Sequence[int]) -> dict[Value, Value]:
        """For what reshapes give, the value whose bytes it is."""
        base: dict[Value, Value] = {}
        for k in ordered:
            s = self.steps[k]
            if not is_kernel(s):
                x = s.ins[0]
                assert isinstance(x, Value)
                base[s.outs[0]] = base.get(x, x)
        return base

    def _views_of(self, values: set[Value]) -> list[Step]:
        """The reshapes that make values outside of the region again."""
        found: set[int] = set()
        todo = [self.maker[v] for v in values]
        while todo:
            k = todo.pop()
            if k not in found and not is_kernel(self.steps[k]):
                found.add(k)
                todo += self._makers(k)
        return [self.steps[k] for k in sorted(found)]

    def _ordered(self, own: Sequence[int]) -> tuple[list[int], int | None]:
        """An order of the steps of a region in which an operand that is updated in place is read before; or else the
        kernel that updates it."""
        members = set(own)
        base = self._bases(own)
        of = lambda x: base.get(x, x)
        readers: dict[Value, list[int]] = {}
        for k in own:
            for x in {of(x) for x in self.steps[k].ins if isinstance(x, Value)}:
                readers.setdefault(x, []).append(k)
        needs: dict[int, set[int]] = {k: {m for m in self._makers(k) if m in members} for k in own}
        above = self._above(own, needs)
        made = {v for k in own for v in self.steps[k].outs}
        updated: set[Value] = set()
        for k in own:
            mine = [of(x) for x in self.steps[k].ins if isinstance(x, Value)]
            for x in self._updates(k):
                x = of(x)
                others = [r for r in readers[x] if r != k and is_kernel(self.steps[r])]
                # Kernels that read a view read its memory, so `readers` knows them by the base of the view.
                seen = x in made and any(self._needed(v, members) for v in [x, *(w for w in base if base[w] is x)])
                twice = mine.count(x) > 1  # the kernel reads by one name what it writes by another
                if x in updated or seen or twice or any(above[r] >> k & 1 for r in others):
                    return [], k
                updated.add(x)
                needs[k] |= set(others)
        order = _sorted(own, needs)
        return (order, None) if order is not None else ([], next(k for k in own if [*self._updates(k)]))

    def _above(self, own: Sequence[int], needs: Mapping[int, set[int]]) -> dict[int, int]:
        above: dict[int, int] = {}
        for k in own:
            above[k] = functools.reduce(lambda bits, m: bits | above[m] | 1 << m, needs[k], 0)
        return above

    def _updates(self, k: int) -> Iterator[Value]:
        """The operands of a kernel that its results are written over."""
        step = self.steps[k]
        if is_kernel(step) and not is_sum(step):
            for i, _ in program_for(step, self.target).kernel.aliases:
                x = step.ins[i]
                if isinstance(x, Value):
                    yield x


def _sorted(own: Sequence[int], needs: Mapping[int, set[int]]) -> list[int] | None:
    """The steps, those that come first in the program first as far as `needs` lets them; None: it goes in a circle."""
    missing = {k: len(needs[k]) for k in own}
    after: dict[int, list[int]] = {k: [] for k in own}
    for k in own:
        for m in needs[k]:
            after[m].append(k)
    ready = [k for k in own if not missing[k]]
    order: list[int] = []
    while ready:
        k = heapq.heappop(ready)
        order.append(k)
        for late in after[k]:
            missing[late] -= 1
            if not missing[late]:
                heapq.heappush(ready, late)
    return order if len(order) == len(own) else None


def cut(closed: Any, target: Target, sizes: Mapping[str, int] | None = None) -> Cut:
    """The regions of a closed jaxpr. `sizes`: devices along the axes of the mesh; None: of the one around."""
    return _Cutter(steps_of(closed), target, mesh_axes() if sizes is None else sizes).cut()
