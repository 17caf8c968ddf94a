"""`jt.explain`: what the kernels of a function move and compute, how fast the device could do that, and how fast it
does."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jtile import passes
from jtile._errors import KernelValueError, UnsupportedError
from jtile.ir.types import DTYPES
from jtile.lowering import targets
from jtile.lowering.artifact import Artifact
from jtile.primitive.lowering import compile_piece
from jtile.tune import device, host, measure, prune, resolve
from jtile.tune.advice import advice
from jtile.tune.choose import lookup
from jtile.tune.cost import Work, together, work
from jtile.tune.programs import Sized, trace_sizes

if TYPE_CHECKING:
    from jtile.tune.compared import Comparison

LAUNCH_US = 4.0  # microseconds: a kernel that is done sooner spends its time on starting
CLOSE = 0.6  # share of a bound from which on it is what limits a kernel
FEW = 0.25  # occupancy below which waiting for memory is not hidden
_ROUNDS = 7
_LIMITS = {"memory": "memory", "products": "matrix products", "elements": "arithmetic on elements"}


@dataclasses.dataclass(frozen=True)
class KernelCost:
    """One kernel of a function.

    Attributes:
      name: the kernel's name, and `calls` how often the function calls it.
      grid: the number of its programs along each axis.
      work: bytes and operations of one call; see `jtile.tune.cost.Work`.
      limits: microseconds of one call that `memory`, `products` and `elements` take at least; none where the device's
        rates are not known.
      time_us: measured microseconds of one call; None where it was not measured.
      resources: registers, spills, shared memory and occupancy on a GPU, of each kernel that runs for it.
      limit: what limits the kernel, in words.
      choice: the values of meta-parameters that are `jt.auto`, and why, in a sentence; empty without any.
      advice: what to try, in sentences; see `jtile.tune.advice`.
    """

    name: str
    calls: int
    grid: tuple[int, ...]
    work: Work
    limits: Mapping[str, float]
    time_us: float | None
    resources: tuple[Mapping[str, Any], ...]
    limit: str
    choice: str = ""
    advice: tuple[str, ...] = ()

    @property
    def bound_us(self) -> float:
        """The roofline: microseconds that one call takes at least, 0 where nothing is known."""
        return max(self.limits.values(), default=0.0)

    @property
    def achieved(self) -> float | None:
        """The bound over the measured time: the share of the roofline that the kernel reaches."""
        return self.bound_us / self.time_us if self.time_us and self.bound_us else None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The kernels of a function on a device; prints as a table."""

    device: str
    kernels: tuple[KernelCost, ...]

    def compare(self, other: Explanation, names: tuple[str, str] = ("first", "second")) -> Comparison:
        """This explanation beside that of another variant, on the same device; `names`: what the table calls them.

        Raises:
          KernelValueError: they are of two devices.
        """
        from jtile.tune.compared import Comparison

        if self.device != other.device:
            raise KernelValueError(f"explanations of one device are compared, got {self.device} and {other.device}")
        return Comparison(names, self, other)

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Draw, for each kernel, what memory, products and arithmetic take at least, and the time that it takes.

        Args:
          path: a file that ends in .png, .svg or .pdf.

        Raises:
          KernelValueError: there is no kernel, no matplotlib, or the file's ending is another one.
        """
        from jtile.tune.compared import draw

        draw({"": self}, path)

    def __str__(self) -> str:
        head = ("kernel", "calls", "bytes", "traffic", "flops", "bound", "time", "achieved", "limited by")
        rows = [head, *map(_row, self.kernels)]
        widths = [max(len(r[k]) for r in rows) for k in range(len(head))]
        ranged = lambda r: [c.ljust(w) if k in (0, 8) else c.rjust(w) for k, (c, w) in enumerate(zip(r, widths))]
        below = [f"{k.name}: {text}" for k in self.kernels for text in (k.choice, *k.advice) if text]
        return "\n".join([f"on {self.device}", *("  ".join(ranged(r)).rstrip() for r in rows), *below])


def explain(
    f: Callable[..., Any], *args: Any, rates: Mapping[str, float] | None = None, run: bool = True
) -> Explanation:
    """Bytes, operations, roofline bound, time and bottleneck of every kernel that `f(*args)` calls.

    Args:
      f: a JAX function, jitted or not.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`. Kernels are measured on data of their own.
      rates: measured peaks, which override those of the target's data sheet: `"memory"` in bytes a second, and
        operations a second by dtype, such as `"bfloat16"`. Rates of this machine's CPUs that are not given are measured
        if a bound needs them, for as many bytes as a kernel moves.
      run: whether to measure the kernels, if the target is the device of this machine.

    Returns:
      An `Explanation`, which prints as a table with advice.

    Raises:
      KernelTypeError: called inside of a trace, or `f` is no function.
      KernelValueError: `rates` names neither memory nor a dtype, or a rate is no positive number.
    """
    _check(rates)
    programs, calls = trace_sizes(f, *args)
    target = device.target()
    given = {}
    for call in calls:
        entry = lookup(call)
        bound = call.bound(entry.config if entry else {})
        given[(resolve.tuned(call, bound, entry) if entry else bound).program] = call
    data = lambda program: given[program].data() if program in given else None
    kernels = [
        _cost(called, times, target, rates, data(called.program) if run else None, run and device.is_here())
        for called, times in programs.items()
    ]
    return Explanation(device.kind() if device.is_here() else target.name, tuple(kernels))


def _check(rates: Mapping[str, float] | None) -> None:
    good = lambda rate: isinstance(rate, int | float) and not isinstance(rate, bool) and rate > 0
    whole = rates is None or isinstance(rates, Mapping)
    if not whole or not all(name in ("memory", *DTYPES) and good(rate) for name, rate in (rates or {}).items()):
        raise KernelValueError(
            f"jt.explain: rates is {rates!r}; expected 'memory' (bytes a second) and dtypes (operations a second) with "
            "numbers above 0, such as {'memory': 3.3e12, 'bfloat16': 8e14}"
        )


def _cost(called: Sized, calls: int, target: Any, rates: Any, data: Any, run: bool) -> KernelCost:
    program, pieces = called.program, called.pieces(target)
    kernels = [passes.run_pipeline(piece, passes.TILE) for piece in pieces]
    total = together([work(k) for k in kernels])
    rates = {**machine_rates(target, total, rates or {}), **(rates or {})}
    limits = prune.bound_us(total, target, rates)
    limits = {k: v for k, v in limits.items() if v}
    time_us = _time(called, target, data) if run else None
    built = [_built(program, k, target) for k in range(len(pieces))]
    resources = tuple(found for a in built if a and (found := a.launch.get("resources")))
    limit = _limit(total, limits, time_us, resources, target, rates)
    why = program.choice.why if program.choice else ""
    schedules = [a.texts.get("schedule", "") if a else "" for a in built]
    more = [advice(k, work(k), target, resources, text) for k, text in zip(kernels, schedules, strict=True)]
    found = tuple(dict.fromkeys(text for texts in more for text in texts))
    return KernelCost(program.name, calls, called.kernel().grid, total, limits, time_us, resources, limit, why, found)


def machine_rates(target: Any, w: Work, given: Mapping[str, float]) -> Mapping[str, float]:
    """The rates of this machine's CPUs that a kernel's bound takes and nobody gives; a target that says its own, or is
    of another machine, keeps what it says."""
    if target.rates or target != targets.host_target():
        return {}
    return host.rates(w.bytes, [name for name in ("memory", "float32", *w.products) if name not in given])


def _built(program: Any, piece: int, target: Any) -> Artifact | None:
    """A kernel as its compiler made it, with what that tells of it; None where it tells nothing of registers."""
    if "warps" not in target.features:
        return None
    try:
        return compile_piece(program, piece, target, texts=True)
    except UnsupportedError:  # no compiler for the target here: the counts stand without
        return None


def _time(called: Sized, target: Any, data: Any) -> float:
    """Microseconds of one call, with a cold cache on a GPU."""
    from jtile.primitive.tangent import bind

    program = called.program
    types = [v.type.info.numpy for v in program.kernel.inputs]
    inputs = [_Type(shape, d) for shape, d in zip(called.shapes, types, strict=True)]
    results = program.results(called.shapes)
    cache = prune.cache_bytes(target)
    sets = measure.argument_sets(inputs, results, cache, data)
    rounds = measure.rounds_of(sets, results, cache, prune.predicted_us(called.kernel(), target))
    run = measure.program_of(_Run(lambda arrays: bind(program, arrays)), sets, rounds)
    runner = measure.Runner(sets, rounds)
    runner.warm(0, run)
    for _ in range(_ROUNDS):
        runner.round(0, run)
    return runner.time_us(0)


@dataclasses.dataclass(frozen=True)
class _Type:
    shape: tuple[int, ...]
    dtype: Any


@dataclasses.dataclass(frozen=True)
class _Run:
    run: Callable[[Sequence[Any]], Any]


def _limit(
    w: Work, limits: Mapping[str, float], time_us: float | None, resources: Sequence[Any], target: Any, rates: Any
) -> str:
    if not limits:
        return "unknown: jtile knows no rates of this target; give rates="
    name = max(limits, key=limits.__getitem__)
    threads = "warps" in target.features
    most = "tensor cores" if threads and name == "products" else _LIMITS[name]
    if time_us is None or limits[name] > CLOSE * time_us:
        return most
    spills = max((r["spills"] for r in resources), default=0)
    units = target.programs_at_once
    if spills:
        return f"registers: {spills} bytes spilled"
    if threads and time_us < LAUNCH_US:
        return "launch"
    if w.programs < units:
        return f"parallelism: {w.programs} program{'s' * (w.programs != 1)} for {units} units"
    occupancy = min((r["occupancy"] for r in resources), default=1.0)
    if occupancy < FEW and name == "memory":
        return f"occupancy: {occupancy:.0%}"
    speed = prune.bandwidth(target, rates)
    if speed and w.traffic / (prune.CACHE_RATE * speed) * 1e6 > max(limits[name], CLOSE * time_us):
        return "cache traffic"
    return f"latency: {limits[name] / time_us:.0%} of what {most} allows"


def _row(k: KernelCost) -> tuple[str, ...]:
    us = lambda t: f"{t:.1f} us" if t else "-"
    guess = "" if k.work.exact else "~"
    share = "-" if k.achieved is None else f"{k.achieved:.0%}"
    counts = [guess + _si(n) for n in (k.work.bytes, k.work.traffic, k.work.flops or k.work.elements)]
    return k.name, str(k.calls), *counts, us(k.bound_us), us(k.time_us), share, k.limit


def _si(n: float) -> str:
    """A number with an SI prefix: 1234567 becomes "1.23M"."""
    power = min(int(math.log10(max(n, 1)) // 3), 5)
    return f"{n / 1000**power:.3g}{['', 'k', 'M', 'G', 'T', 'P'][power]}"
