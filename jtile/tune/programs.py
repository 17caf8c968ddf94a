"""The kernels that a function calls, found by tracing it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jtile import ir
from jtile._errors import KernelTypeError
from jtile.language._equations import bind
from jtile.lowering.here import platform
from jtile.primitive.lowering import pieces_of
from jtile.tune.space import Call, Recorder, recorder
from jtile.tune.store import retracing


class Sized(NamedTuple):
    """A `Program` with the shapes of its operands, which say what dynamic sizes are."""

    program: Any
    shapes: tuple[tuple[int, ...], ...]

    def kernel(self) -> ir.Kernel:
        """The kernel of the program, of static sizes."""
        return self._concrete(self.program.kernel)

    def pieces(self, target: Any = None) -> list[ir.Kernel]:
        """The kernels that run for it, of static sizes; on a target, where it is given."""
        return [self._concrete(k) for k in pieces_of(self.program, target).kernels]

    def _concrete(self, kernel: ir.Kernel) -> ir.Kernel:
        values = self.program.sizes(self.shapes)
        return ir.concrete(kernel, values) if values else kernel


def trace(f: Callable[..., Any], *args: Any) -> tuple[Counter[Any], list[Call]]:
    """How often `f(*args)` calls each `Program`, in order of the first call, and the calls of tunable kernels.

    The body of a `scan` counts as often as it runs, that of a `while` and the branches of a `cond` once; of what is
    different on each platform, that of the platform at hand (`jt.platform()`); kernels that only other platforms run
    are not among the calls.

    Raises:
      KernelTypeError: called inside of a trace, or `f` is no function.
    """
    programs, calls, _ = searches_of(f, *args)
    return programs, calls


def searches_of(f: Callable[..., Any], *args: Any) -> tuple[Counter[Any], list[Call], dict[str, Callable[..., Any]]]:
    """The result of `trace`, and of every program that `jt.fuse` cuts the search for another cut."""
    found, calls, cuts = _trace_sizes(f, *args)
    programs: Counter[Any] = Counter()
    for one, times in found.items():
        programs[one.program] += times
    return programs, calls, cuts


def trace_sizes(f: Callable[..., Any], *args: Any) -> tuple[Counter[Sized], list[Call]]:
    """The result of `trace`, where a program with dynamic sizes counts apart for all shapes of its operands."""
    return _trace_sizes(f, *args)[:2]


def _trace_sizes(f: Callable[..., Any], *args: Any) -> tuple[Counter[Sized], list[Call], dict[str, Callable[..., Any]]]:
    jaxpr, found = traced(f, args)
    programs = counted_calls(jaxpr)
    every = {p.program.name for p, _ in _programs(jaxpr, 1, lambda _: None)}
    elsewhere = every - {p.program.name for p in programs}
    calls = [call for call in found.calls.values() if call.kernel.name not in elsewhere]
    return programs, calls, found.programs


def counted_calls(jaxpr: Any) -> Counter[Sized]:
    """How often a jaxpr calls each program, see `trace`."""
    programs: Counter[Sized] = Counter()
    for program, times in _programs(jaxpr, 1):
        programs[program] += times
    return programs


def operands(f: Callable[..., Any], *args: Any) -> dict[Any, list[Any]]:
    """What each `Program` that `f(*args)` calls is given in its first call outside of loops: lengths, sizes of groups.

    No kernel is run: what one gives counts as zeros. Nothing where an argument is a type alone.
    """
    leaves = jax.tree.leaves(args)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        return {}
    jaxpr, _ = traced(f, args)
    found: dict[Any, list[Any]] = {}
    _evaluated(jaxpr, [jnp.asarray(x, a.dtype) for x, a in zip(leaves, jaxpr.in_avals, strict=True)], found)
    return found


def traced(f: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Recorder]:
    """The closed jaxpr of `f(*args)`, and the calls of tunable kernels in it; raises KernelTypeError as `trace`."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
        raise KernelTypeError(
            "jt.tune, jt.bench, jt.explain and jt.cost look at a function from outside: call them outside of jax.jit "
            "and other transforms"
        )
    if not callable(f):
        raise KernelTypeError(
            f"jt.tune, jt.bench, jt.explain, jt.cost and jt.profile take a function and its arguments, got {f!r}"
        )
    found = Recorder()
    token = recorder.set(found)
    try:
        with retracing():
            return jax.make_jaxpr(lambda *args: f(*args))(*args), found
    finally:
        recorder.reset(token)


def _programs(jaxpr: Any, times: int, branch: Callable[..., Any] | None = None) -> Iterator[tuple[Sized, int]]:
    """Each program, and how often it is called; `branch`: of the parameters of an equation, which branch counts, None
    for all. Default: that of the platform at hand."""
    from jax.extend.core import jaxprs_in_params

    for eqn in jaxpr.eqns:
        tasks = [step.eqn for step in eqn.params["region"].kernels] if eqn.primitive.name == "jtile_graph" else [eqn]
        for one in tasks:
            if one.primitive.name == "jtile_call":
                yield Sized(one.params["program"], tuple(tuple(v.aval.shape) for v in one.invars)), times
        inside = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        here = (branch or chosen_branch)(eqn.params)
        for inner in [here.jaxpr] if here else jaxprs_in_params(eqn.params):
            yield from _programs(inner, inside, branch)


def chosen_branch(params: Mapping[str, Any]) -> Any:
    """The branch of `lax.platform_dependent` for the platform at hand, a closed jaxpr; None for other equations."""
    here = platform()
    branches = zip(params.get("branches", ()), params.get("branches_platforms") or (), strict=False)
    return next((b for b, names in branches if names is None or here in names), None)


def _evaluated(closed: Any, args: Sequence[Any], found: dict[Any, list[Any]]) -> list[Any]:
    env = dict(zip((*closed.jaxpr.constvars, *closed.jaxpr.invars), (*closed.consts, *args), strict=True))
    read = lambda v: v.val if hasattr(v, "val") else env[v]
    for eqn in closed.jaxpr.eqns:
        env |= zip(eqn.outvars, _results(eqn, [read(v) for v in eqn.invars], found), strict=True)
    return [read(v) for v in closed.jaxpr.outvars]


def _results(eqn: Any, values: list[Any], found: dict[Any, list[Any]]) -> list[Any]:
    from jax.extend.core import ClosedJaxpr, jaxprs_in_params

    zeros = lambda: [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    if eqn.primitive.name == "jtile_call":
        found.setdefault(eqn.params["program"], values)
        return zeros()
    if not any(True for inner in jaxprs_in_params(eqn.params) for _ in _programs(inner, 1)):
        return bind(eqn, values)
    here = chosen_branch(eqn.params)
    if here is not None:
        return _evaluated(here, values[1:], found)
    inner = next((eqn.params[name] for name in _CALLED if name in eqn.params), None)
    if eqn.primitive.name in _LOOPS or inner is None:
        return zeros()
    return _evaluated(inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ()), values, found)


# What `jit`, `remat`, partitioned functions, and rules of the user's for derivatives and vmap call their body.
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
_LOOPS = ("scan", "while", "cond")
