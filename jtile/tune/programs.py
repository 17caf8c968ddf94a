"""The kernels that a function calls, found by tracing it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jtile._errors import KernelTypeError
from jtile._platform import platform
from jtile.tune.space import Call, Recorder, recorder
from jtile.tune.store import retracing


def trace(f: Callable[..., Any], *args: Any) -> tuple[Counter[Any], list[Call]]:
    """How often `f(*args)` calls each `Program`, in order of the first call, and the calls of tunable kernels.

    The body of a `scan` counts as often as it runs, that of a `while` and the branches of a `cond` once; of what is
    different on each platform, that of the platform at hand (`jt.platform()`).

    Raises:
      KernelTypeError: called inside of a trace.
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
        raise KernelTypeError("jt.tune and jt.explain measure, so call them outside of jax.jit and other transforms")
    found = Recorder()
    token = recorder.set(found)
    try:
        with retracing():
            jaxpr = jax.make_jaxpr(lambda *args: f(*args))(*args)
    finally:
        recorder.reset(token)
    programs: Counter[Any] = Counter()
    for program, times in _programs(jaxpr, 1):
        programs[program] += times
    return programs, list(found.calls.values())


def _programs(jaxpr: Any, times: int) -> Iterator[tuple[Any, int]]:
    from jax.extend.core import jaxprs_in_params

    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "jtile_call":
            yield eqn.params["program"], times
        inside = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for inner in _here(eqn.params) or jaxprs_in_params(eqn.params):
            yield from _programs(inner, inside)


def _here(params: Mapping[str, Any]) -> list[Any]:
    """The branch of `lax.platform_dependent` for the platform at hand; nothing for other equations."""
    platforms = params.get("branches_platforms")
    if not platforms:
        return []
    here = platform()
    return [b.jaxpr for b, names in zip(params["branches"], platforms, strict=True) if names is None or here in names][
        :1
    ]
