"""The measured search: candidates of one call are pruned, compiled, checked against the default, timed by halves."""

from __future__ import annotations

import dataclasses
import datetime
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from jtile import _cache
from jtile.primitive.lowering import pieces_of
from jtile.tune import device, measure, prune
from jtile.tune.space import Call
from jtile.tune.store import Entry, store

WORSE = 4.0  # how many times the best predicted time a candidate may take
MOST = 128  # candidates that are compiled
WORTH = 0.02  # a winner that gains less over the default is noise
TRACING = 0.3  # share of a time limit after which no further candidate is traced
COMPILING = 0.6  # share of a time limit after which nothing more is compiled, so that the rest is measured
ROUNDS = 7  # samples of those that are left in the end
Progress = Callable[[str, int, int], None]  # (what, done, of how many)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One point of the space, and what became of it.

    Attributes:
      config: the values that it sets; empty for the default.
      state: `measured`, `pruned`, `same` (as another, compiled), `failed`, `wrong` (it differs from the default's
        result), `late` (the time was up).
      time_us: microseconds of one call, where it was measured.
      detail: why it was not measured.
    """

    config: dict[str, Any]
    state: str
    time_us: float = math.inf
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a search found: the entry that was stored (None: not even the default ran), and every candidate."""

    call: Call
    entry: Entry | None
    candidates: tuple[Candidate, ...]


def search(call: Call, *, time_limit: float | None = None, progress: Progress | None = None) -> Result:
    """Find and store the best candidate of a call. What was found before a KeyboardInterrupt is stored too."""
    run = _Search(call, time.monotonic() + (math.inf if time_limit is None else time_limit), progress or _silent)
    try:
        run.prepare()
        run.compile()
        run.check()
        run.race()
    finally:
        entry = run.finish()
    return Result(call, entry, tuple(run.candidates()))


def _silent(what: str, done: int, total: int) -> None:
    pass


class _Search:
    """One search; the default is number -1, the points of the space count from 0."""

    def __init__(self, call: Call, deadline: float, progress: Progress):
        self.call, self.deadline, self.progress = call, deadline, progress
        self.start = time.monotonic()
        self.configs = {-1: {}, **dict(enumerate(call.candidates))}
        self.fate: dict[int, tuple[str, str]] = {}  # number -> (state, detail) of candidates that are out
        self.bound: dict[int, Any] = {}
        self.programs: dict[int, Any] = {}
        self.predicted_us = math.inf  # the time of the candidate that is best by the cost model
        self.runner: measure.Runner | None = None

    def prepare(self) -> None:
        """Trace every candidate; leave out equal ones and those that the cost model rules out."""
        target, seen, cost = device.target(), {}, {}
        tick = self._tick("trace", len(self.configs))
        for k, config in self.configs.items():
            tick()
            if k >= 0 and time.monotonic() > self.start + TRACING * (self.deadline - self.start):
                break  # the candidates that are left are `late`
            try:
                bound = self.call.bound(config)
                kernel, why = _kernel(bound), ""
                if bound.program in seen:
                    self.fate[k] = "same", f"as {seen[bound.program]}"
                    continue
                options = bound.program.options.compiler
                why = "" if k < 0 else prune.unfit(kernel, target, options)
                cost[k] = prune.predicted_us(kernel, target)
            except Exception as e:  # the kernel's own functions may raise anything: an assertion about its tiles, say
                self.fate[k] = "failed", getattr(e, "message", f"{type(e).__name__}: {e}")
                if k < 0:  # even the default fails: the call itself is wrong
                    raise
                continue
            seen[bound.program] = config or "the default"
            if why:
                self.fate[k] = "pruned", why
            else:
                self.bound[k] = bound
        best = self.predicted_us = min(cost[k] for k in self.bound)
        # What is predicted to be best is compiled first; of equals the later one, whose tiles are larger mostly.
        ranked = sorted(self.bound, key=lambda k: (k >= 0, cost[k], -k))
        for place, k in enumerate(ranked):
            bound = self.bound.pop(k)
            if k >= 0 and (cost[k] > WORSE * best or place >= MOST):
                self.fate[k] = "pruned", f"predicted {cost[k]:.1f} us, the best {best:.1f} us"
            else:
                self.bound[k] = bound

    def compile(self) -> None:
        """Compile in parallel: the default first, since nothing is compared without it."""
        first = self.bound[-1]
        outputs, cache = first.program.out_avals, prune.cache_bytes(device.target())
        sets = measure.argument_sets(self.call.types, outputs, cache, self.call.data())
        rounds = measure.rounds_of(sets, outputs, cache, self.predicted_us)
        self.runner = measure.Runner(sets, rounds)
        self.programs[-1] = measure.program_of(first, sets, rounds)
        jobs = {k: lambda b=b: measure.program_of(b, sets, rounds) for k, b in self.bound.items() if k >= 0}
        until = self.start + COMPILING * (self.deadline - self.start)
        for k, done in measure.compile_all(jobs, until, self._tick("compile", len(jobs))).items():
            if isinstance(done, Exception):
                self.fate[k] = "failed", f"{type(done).__name__}: {getattr(done, 'message', done)}"
            else:
                self.programs[k] = done

    def check(self) -> None:
        """Run each candidate once: one whose result differs from the default's is out."""
        assert self.runner is not None
        expected = self.call.compared(self.runner.warm(-1, self.programs[-1]))
        self.runner.round(-1, self.programs[-1])
        tick = self._tick("check", len(self.programs))
        for k, program in list(self.programs.items()):
            tick()
            if k < 0 or self._late():
                continue
            try:
                error = measure.difference(self.call.compared(self.runner.warm(k, program)), expected)
            except (RuntimeError, ValueError) as e:  # the launch has failed
                self.fate[k] = "failed", f"{type(e).__name__}: {str(e).splitlines()[0]}"
                continue
            if error > 1:
                self.fate[k] = "wrong", f"{error:.1f} times the tolerance from the default's result"
            else:
                self.runner.round(k, program)

    def race(self) -> None:
        """Sample those that are left, in turns, and drop the slower half after each round."""
        runner = self.runner
        assert runner is not None
        alive = [k for k in self.programs if k >= 0 and k in runner.samples]
        rounds = 1
        while alive and not self._late():
            last = len(alive) <= 2
            tick = self._tick("time", len(alive))
            for turn in range(ROUNDS if last else rounds):
                for k in (*alive[turn % len(alive) :], *alive[: turn % len(alive)], -1):
                    if not self._late():
                        runner.round(k, self.programs[k])
                tick()
            alive.sort(key=runner.time_us)
            if last:
                break
            alive, rounds = alive[: -(-len(alive) // 2)], rounds + 1

    def finish(self) -> Entry | None:
        """Store the best candidate so far, and return its entry."""
        if self.runner is None or -1 not in self.runner.samples or not self.call.name:
            return None
        times = {k: self.runner.time_us(k) for k in self.runner.samples}
        default = times[-1]
        most = max(map(len, self.runner.samples.values()))
        final = [k for k in times if len(self.runner.samples[k]) >= most / 2]  # candidates of the last rounds
        best = min(final, key=times.__getitem__)
        if times[best] > (1 - WORTH) * default:
            best = -1
        entry = Entry(
            self._full(best), round(times[best], 3), round(default, 3), len(times), len(self.call.candidates),
            _cache.version("jtile"), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )  # fmt: skip
        store.put(device.kind(), self.call.name, entry)
        return entry

    def candidates(self) -> Iterator[Candidate]:
        for k, config in self.configs.items():
            if self.runner is not None and k in self.runner.samples:
                yield Candidate(config, "measured", self.runner.time_us(k))
            else:
                state, detail = self.fate.get(k, ("late", "the time was up"))
                yield Candidate(config, state, detail=detail)

    def _full(self, k: int) -> dict[str, Any]:
        """A candidate's values, or those of the default for the names that are tuned."""
        if k >= 0:
            return self.configs[k]
        known = {**dict(self.bound[-1].program.meta), **self.bound[-1].program.options.compiler}
        return {name: known[name] for name in self.call.tuned if known.get(name) is not None}

    def _late(self) -> bool:
        return time.monotonic() > self.deadline

    def _tick(self, what: str, total: int) -> Callable[[], None]:
        done = iter(range(1, total + 1_000_000))
        return lambda: self.progress(what, min(next(done), total), total)


def _kernel(bound: Any) -> Any:
    """The largest kernel of a program, after the passes."""
    from jtile import passes

    return passes.run_pipeline(pieces_of(bound.program).kernels[0], passes.TILE)
