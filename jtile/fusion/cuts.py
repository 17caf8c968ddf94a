"""The cut of a program as `jt.tune` searches it: which groups are kernels, where the model would decide otherwise."""

from __future__ import annotations

import dataclasses
import datetime
import math
import time
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jtile import _cache
from jtile._errors import CacheWarning
from jtile.tune import device, measure, prune
from jtile.tune.api import Tuned
from jtile.tune.search import WORTH, Candidate
from jtile.tune.space import recorder
from jtile.tune.store import Entry, store

from .choices import digest
from .steps import Program
from .units import Plan

KIND = "cut#"  # what the names of such entries begin with
MOST = 24  # cuts that are compiled
LEAST_US = 5.0  # microseconds that a program is expected to take, at least
ROUNDS = 5  # samples of each
APART = (
    4.0  # how many times the tolerance of `measure` two cuts may be apart: XLA adds in one order, programs in others
)
WORTHWHILE = 1.01  # by what factor one change has to be faster to be tried with others


@dataclasses.dataclass(frozen=True)
class Cut:
    """What is decided otherwise than by the model. Groups and kernels are named by the number of their first node.

    Attributes:
      windows: whether kernels read slices, pads and shifts in place; None: as the model chooses.
      xla: kernels that stay XLA's. kernels: groups that are kernels though the model says that XLA is quicker.
      origin: what to say of it.
    """

    windows: bool | None = None
    xla: frozenset[int] = frozenset()
    kernels: frozenset[int] = frozenset()
    origin: str = ""

    @property
    def config(self) -> dict[str, Any]:
        """What an entry of the tuner holds."""
        return {"windows": self.windows, "xla": (*sorted(self.xla),), "kernels": (*sorted(self.kernels),)}

    def __or__(self, other: Cut) -> Cut:
        return Cut(self.windows, self.xla | other.xla, self.kernels | other.kernels)


MODELS = Cut()


def name_of(program: Program) -> str:
    """What the entry of a program is stored under."""
    results = ", ".join(f"{v.dtype}[{','.join(map(str, v.shape))}]" for v in program.outputs)
    return f"{KIND}{digest(str(program.closed.jaxpr))} {len(program.nodes)} equations, {results}"


def cut_of(program: Program) -> Cut:
    """The cut that the tuner has for a program on the device at hand; else the model's. While `jt.tune` looks for
    programs, it hears of this one."""
    found, entries = recorder.get(), store.entries(device.kind())
    if found is None and not any(name.startswith(KIND) for name in entries):
        return MODELS
    name = name_of(program)
    if found is not None:
        found.programs.setdefault(name, lambda **options: search(name, program, **options))
    entry = entries.get(name)
    if entry is None:
        return MODELS
    windows, *many = (entry.config.get(key) for key in ("windows", "xla", "kernels"))
    sound = all(isinstance(numbers, tuple) and all(isinstance(n, int) for n in numbers) for numbers in many)
    if not sound or not isinstance(windows, bool | None):
        message = f"the tuner's entry {name!r} is no cut of a program, the model's is taken: {dict(entry.config)}"
        warnings.warn(message, CacheWarning, stacklevel=2)
        return MODELS
    cut = Cut(windows, *map(frozenset, many))
    if cut == MODELS:
        return MODELS
    speed = f"; cut by jt.tune, {entry.speedup:.2f} times as fast as by the model"
    return dataclasses.replace(cut, origin=speed)


def changes_of(plan: Plan) -> list[Cut]:
    """What may be decided otherwise in a plan, one thing at a time."""
    windows = plan.windows
    kernels = [Cut(windows, xla=frozenset([first])) for first in plan.firsts]
    groups = [Cut(windows, kernels=frozenset([first])) for first, _, _ in plan.left]
    return [*kernels, *groups][: MOST - 3]


def search(
    name: str, program: Program, *, time_limit: float | None = None, progress: Callable[..., None] | None = None
) -> Tuned:
    """Times the cuts of a program against each other, on random arrays, and stores the best. Without an entry and
    candidates where there is nothing to choose."""
    from .groups import plan_of

    plan = plan_of(program, cut=MODELS)
    other = plan_of(program, cut=Cut(windows=not plan.windows))
    if not changes_of(plan) and other.windows == plan.windows:
        return Tuned(_kernel_name(program), name, None, ())
    run = _Search(program, math.inf if time_limit is None else time.monotonic() + time_limit, progress)
    return run.finish(name, run.best())


def _kernel_name(program: Program) -> str:
    return f"the cut of {len(program.nodes)} equations"


class _Search:
    def __init__(self, program: Program, deadline: float, progress: Callable[..., None] | None):
        self.program, self.deadline = program, deadline
        self._progress = progress or (lambda *_: None)
        values = [*program.constants, *program.inputs]
        self._types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
        self._outputs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in program.outputs]
        cache = prune.cache_bytes(device.target())
        sets = measure.argument_sets(self._types, self._outputs, cache)
        moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*self._types, *self._outputs))
        least_us = moved / (prune.bandwidth(device.target()) or math.inf) * 1e6
        self._rounds = measure.rounds_of(sets, self._outputs, cache, max(least_us, LEAST_US))
        self.runner = measure.Runner(sets, self._rounds)
        self._first: Any = None
        self._programs: dict[Cut, Any] = {}
        self.fate: dict[Cut, tuple[str, str]] = {}

    def best(self) -> Cut:
        """The best cut: of single changes, and of all those together that are faster."""
        from .groups import plan_of

        plan = plan_of(self.program, cut=MODELS)
        self._try([MODELS])
        other = Cut(windows=not plan.windows)
        start = MODELS
        if plan_of(self.program, cut=other).windows != plan.windows:
            self._try([other])
            start = min((MODELS, other), key=self.runner.time_us)
            plan = plan if start is MODELS else plan_of(self.program, cut=other)
        changes = changes_of(plan)
        self._try(changes)
        before = self.runner.time_us(start)
        faster = [c for c in changes if self.runner.time_us(c) * WORTHWHILE < before]
        more = [Cut(plan.windows, xla=frozenset(plan.firsts))] if len(plan.firsts) > 1 else []
        if len(faster) > 1:
            more.append(sum_of(faster))
        self._try(more)
        return self._compared(min(self._programs, key=self.runner.time_us))

    def _compared(self, best: Cut) -> Cut:
        """The better of a cut and the model's, by samples in turns."""
        self._sample(dict.fromkeys([MODELS, best]), 2 * ROUNDS)
        return min((best, MODELS), key=self.runner.time_us)

    def _sample(self, cuts: Iterable[Cut], rounds: int) -> None:
        """Takes samples of cuts in turns, at least one of each."""
        for cut in cuts:
            self.runner.samples.pop(cut, None)
        for turn in range(rounds):
            if turn and time.monotonic() > self.deadline:
                break
            self._progress("time", turn, rounds)
            for cut in cuts:
                self.runner.round(cut, self._programs[cut])

    def finish(self, name: str, best: Cut) -> Tuned:
        """Stores the best cut, or the model's where it is hardly slower."""
        times = {cut: self.runner.time_us(cut) for cut in self._programs}
        default = times[MODELS]
        best = best if times[best] < (1 - WORTH) * default else MODELS
        entry = Entry(
            best.config, round(times[best], 3), round(default, 3), len(times), len(times) + len(self.fate),
            _cache.version("jtile"), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )  # fmt: skip
        store.put(device.kind(), name, entry)
        measured = [Candidate(cut.config, "measured", us) for cut, us in times.items()]
        dropped = [Candidate(cut.config, state, detail=why) for cut, (state, why) in self.fate.items()]
        return Tuned(_kernel_name(self.program), name, entry, (*measured, *dropped))

    def _try(self, cuts: Sequence[Cut]) -> None:
        """Compiles cuts, compares their results with the first one's, and takes samples of those that agree."""
        jobs = {cut: lambda cut=cut: self._compiled(cut) for cut in cuts if cut not in self._programs}
        first, made = self._first is None, {}
        until = math.inf if first else self.deadline
        for cut, done in measure.compile_all(jobs, until, lambda: self._progress("compile", 0, len(jobs))).items():
            if isinstance(done, Exception):
                if first:
                    raise done
                self.fate[cut] = "failed", f"{type(done).__name__}: {done}"
                continue
            result = self.runner.warm(cut, done)
            self._first = result if first else self._first
            error = measure.difference(result, self._first)
            if error > APART:
                self.fate[cut] = "wrong", f"{error:.1f} times the tolerance from the model's result"
            else:
                made[cut] = done
        self.fate |= {cut: ("late", "the time was up") for cut in jobs if cut not in made and cut not in self.fate}
        self._programs |= made
        self._sample({**dict.fromkeys([MODELS]), **made}, ROUNDS)

    def _compiled(self, cut: Cut) -> Any:
        from .fused import evaluate
        from .groups import plan_of

        count = len(self.program.constants)

        def run(arrays: Sequence[Any]) -> list[Any]:
            constants = dict(zip(self.program.constants, arrays[:count], strict=True))
            own = dataclasses.replace(self.program, constants=constants)
            return evaluate(plan_of(own, cut=cut), arrays[count:])

        return measure.program_of(types.SimpleNamespace(run=run), self.runner.sets, self._rounds)


def sum_of(cuts: Iterable[Cut]) -> Cut:
    first, *others = cuts
    for other in others:
        first = first | other
    return first
