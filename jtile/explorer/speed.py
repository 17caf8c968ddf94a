"""How fast a kernel can be on its target, how fast it is, and what to try, by the numbers of `jt.explain`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jtile import ir
from jtile.explorer.record import Speed
from jtile.lowering import targets
from jtile.tune import device, prune
from jtile.tune.advice import advice
from jtile.tune.cost import work
from jtile.tune.roofline import explain, machine_rates

_WORDS = {"memory": "memory", "products": "matrix products", "elements": "arithmetic on elements"}


@dataclasses.dataclass(frozen=True)
class Timed:
    """What was measured.

    Attributes:
      run: whether this machine may be measured.
      kernels: microseconds and limit by the name of a kernel.
    """

    run: bool
    kernels: Mapping[str, tuple[float, str]]


def times(f: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any], target: str) -> Timed:
    """The times of a function's kernels on this machine; none where the target is another one."""
    here = device.is_here() and targets.resolve(target) == device.target()
    if not here:
        return Timed(False, {})
    found = explain(lambda *args: f(*args, **options), *args)
    return Timed(True, {k.name: (k.time_us, k.limit) for k in found.kernels if k.time_us})


def speed(kernel: ir.Kernel, target: Any, artifact: Any, timed: Timed) -> Speed | None:
    """The roofline of a kernel of static sizes, its resources, and advice."""
    if ir.is_dynamic(kernel):
        return None
    w = work(kernel)
    measured = dict(machine_rates(target, w, {})) if timed.run else {}
    rates = {**dict(target.rates), **{k: v for k, v in measured.items() if k != "memory"}}
    limits = {k: v for k, v in prune.bound_us(w, target, measured).items() if v}
    resources = dict(artifact.launch.get("resources") or {})
    gpu = [resources] if "spills" in resources else []
    time_us, limit = timed.kernels.get(kernel.name, (None, ""))
    most = _WORDS[max(limits, key=limits.__getitem__)] if limits else ""
    return Speed(
        read=w.read,
        written=w.written,
        traffic=w.traffic,
        products=dict(w.products),
        elements=w.elements,
        special=w.special,
        exact=w.exact,
        limits=limits,
        memory=prune.bandwidth(target, measured),
        peaks=rates,
        measured=bool(measured),
        time_us=time_us,
        limit=limit or most,
        advice=[*advice(kernel, w, target, gpu, artifact.texts.get("schedule", ""))],
        resources=resources,
    )
