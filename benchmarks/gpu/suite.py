"""All workloads in one run, within a time limit; each record is written as it comes."""

from __future__ import annotations

import dataclasses
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import report
from benchmarks.gpu import WORKLOADS, torch_peers
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.machine import measure as measure_machine
from benchmarks.gpu.measure import Options, compiled_ahead, measure, short
from benchmarks.harness import Result

SLOWER = 0.97  # ratios below are named: more than two runs of one program are apart
RECORDS = Path(__file__).resolve().parents[1] / "records"


def main(arguments: Any) -> None:
    """Runs what the command line asks for; `arguments` are those of `python -m benchmarks`."""
    if not arguments.tiny and jax.default_backend() == "cpu":
        sys.exit("python -m benchmarks gpu: JAX sees no GPU here (--tiny tries the code on the CPU)")
    began = time.monotonic()
    machine = measure_machine(arguments.tiny)
    rates = ", ".join(f"{unit} {rate / 1e12:.0f} TFLOP/s" for unit, rate in machine.peaks.items())
    say(f"{machine.device}, jax {jax.__version__}: copies {machine.copy_rate / 1e9:.0f} GB/s, {rates}")
    options = Options(
        arguments.repeats, arguments.budget, tuple(arguments.without), match=tuple(arguments.match),
        profile=arguments.profile,
    )  # fmt: skip
    if arguments.tiny:
        without = ("torch", "cublas", *options.without)
        options = dataclasses.replace(options, repeats=2, budget_s=0.1, without=without, cold_bytes=1 << 16)
    folder = RECORDS / machine.device
    json_file = arguments.json or (None if arguments.tiny else folder / "records.json")
    plot_file = arguments.plot or (None if arguments.tiny or arguments.json else folder / "ratios.png")
    suite = Suite(machine, options, arguments.tiny, deadline=began + arguments.limit)
    done: list[Result] = []
    for name in arguments.only or WORKLOADS:
        try:
            module = importlib.import_module(f"benchmarks.gpu.{name}")
        except ImportError as missing:  # models need flax, which a machine for kernels may lack
            say(f"{name} is left out: {missing}")
            continue
        for got in suite.run(module):
            done.append(got)
            if json_file:
                report.merge([got], json_file)
        if json_file:
            report.merge([], json_file, without=suite.failed)
    if sys.stdout.isatty():
        report.table(done)
    else:
        print("\n".join(map(summary, done)))  # short, for logs that keep only their end
    for text in means(done):
        print(text)
    for key in suite.failed:
        say(f"FAILED: {' '.join(key)}")
    for key in suite.skipped:
        say(f"left out, no time: {' '.join(key)}")
    if json_file and plot_file and done:
        report.plot_file(json_file, plot_file)
    say(f"{len(done)} records in {time.monotonic() - began:.0f} s, {json_file or 'not kept'}")
    if arguments.match and not (done or suite.failed or suite.skipped):
        sys.exit(f"no line has one of {', '.join(map(repr, arguments.match))} in its size and dtype")
    if suite.failed:
        sys.exit(1)


class Suite:
    """Runs workload modules; a case that fails is reported, and the others go on.

    Attributes:
      failed: keys of the records of cases that raised or were wrong. skipped: keys of those that the deadline left out.
    """

    def __init__(
        self, machine: Machine, options: Options, tiny: bool, deadline: float, *,
        clock: Callable[[], float] = time.monotonic, measure: Callable = measure,
    ):  # fmt: skip
        self._machine, self._options, self._tiny, self._deadline = machine, options, tiny, deadline
        self._clock, self._measure = clock, measure
        self.failed: list[tuple[str, str, str]] = []
        self.skipped: list[tuple[str, str, str]] = []

    def run(self, module: Any) -> Iterator[Result]:
        """The results of one module that are asked for: those of its `cases(tiny)`, then those of its `results(...)`.
        The deadline does not separate lines of one measurement, which follow a size for which `half_told` is true."""
        cases = module.cases(self._tiny) if hasattr(module, "cases") else ()
        cases = (case for case in cases if self._options.takes(case.config, case.dtype))
        ready = {}
        if getattr(module, "AHEAD", False):
            cases = [*cases]
            ready = compiled_ahead(cases, self._machine, self._options, say)
        for case in cases:
            if self._late():
                self.skipped.append(case.key)
                continue
            try:
                ahead = (ready.pop(case.key),) if case.key in ready else ()
                yield self._measure(case, self._machine, self._options, say, *ahead)
            except Exception as error:
                self.failed.append(case.key)
                say(f"{' '.join(case.key)}: FAILED, {short(error, 1500)}")
            torch_peers.free()
        if not hasattr(module, "results"):
            return
        if self._late():
            self.skipped.append((module.__name__, "", ""))
            return
        half_told = getattr(module, "half_told", lambda config: False)
        try:
            for got in module.results(self._machine, self._options, say, self._tiny):
                if self._options.takes(got.record.config, got.record.dtype):
                    yield got
                if self._late() and not half_told(got.record.config):
                    self.skipped.append((module.__name__, "what comes behind", got.record.config))
                    break
        except Exception as error:
            self.failed.append((module.__name__, "", ""))
            say(f"{module.__name__}: FAILED, {short(error, 1500)}")

    def _late(self) -> bool:
        return self._clock() > self._deadline


def summary(result: Result) -> str:
    """One short line of a result."""
    r = result.record
    text = f"{r.workload} {r.config} {r.dtype}: {report.number(r.ours_us)} us"
    if r.peers:
        text += f", ratio {r.ratio:.3g} to {min(r.peers, key=lambda name: r.peers[name])}"
    return text + (f", {100 * r.bound_frac:.0f} % of bound" if r.bound_frac else "")


def means(results: Sequence[Result]) -> Iterator[str]:
    """Of each workload that has several ratios a line with their geometric mean, and with those that are below 0.97."""
    for name in dict.fromkeys(r.record.workload for r in results):
        ratios = {r.record.config: r.record.ratio for r in results if r.record.workload == name and r.record.ratio}
        if len(ratios) > 1:
            slow = ", ".join(f"{config} {ratio:.3g}" for config, ratio in ratios.items() if ratio < SLOWER)
            text = f"{name}: geometric mean of {len(ratios)} ratios {statistics.geometric_mean(ratios.values()):.3f}"
            yield text + (f"; below {SLOWER}: {slow}" if slow else f", none below {SLOWER}")


def say(text: str) -> None:
    """Prints one line of progress."""
    print(text, file=sys.stderr, flush=True)
