"""A case on the device: checked against its reference, timed against its peers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.data import size
from benchmarks.gpu import timing, torch_peers
from benchmarks.gpu.case import Case, Torch
from benchmarks.gpu.machine import COLD_BYTES, Machine
from benchmarks.gpu.merged import shared_work
from benchmarks.gpu.programs import Programs, same_as, untuned
from benchmarks.harness import Result, WrongResultError, result
from benchmarks.report import number

_MOST_SETS = 16
_SET_BYTES = 24 << 30  # of all sets of arguments, where each is used once


@dataclasses.dataclass(frozen=True)
class Options:
    """`repeats` rounds of samples, at most `budget_s` seconds of them a case; peers whose name starts with one of
    `without` are left out; `cold_bytes` is what the arguments of cold calls exceed together; `match`: see `takes`;
    `profile`: whether language models say what their kernels take."""

    repeats: int = 15
    budget_s: float = 4.0
    without: tuple[str, ...] = ()
    cold_bytes: int = COLD_BYTES
    match: tuple[str, ...] = ()
    profile: bool = False

    def takes(self, config: str, dtype: str) -> bool:
        """Whether a line of this size and dtype is asked for: one of `match` is part of its name, if there are any."""
        return not self.match or any(text in f"{config} {dtype}" for text in self.match)


def set_count(case: Case, options: Options) -> int:
    """The number of sets of arguments: one if they stay warm, else so many that no L2 cache holds all."""
    one = size(jax.eval_shape(case.make, 0))
    return 1 if case.warm else max(1, min(_MOST_SETS, math.ceil(options.cold_bytes / one)))


class MergedCallsError(Exception):
    """XLA made one piece of work of several calls of a function, so that their time says nothing of one call."""


@dataclasses.dataclass(frozen=True)
class Ahead:
    """The programs of a case that compile while others do: of each function that of all calls, the reference, and what
    makes the arguments."""

    programs: Mapping[str, Future]
    reference: Future
    make: Future


def compiled_ahead(
    cases: Sequence[Case], machine: Machine, options: Options, say: Callable[[str], None] = print
) -> dict[tuple[str, str, str], Ahead]:
    """The programs of cases without peers in torch, compiled in as many threads as the machine has. Nothing else runs
    meanwhile, since XLA times its candidates."""
    found = {}
    with concurrent.futures.ThreadPoolExecutor(machine.threads) as pool:
        for case in cases:
            shapes = jax.eval_shape(case.make, 0)
            count = set_count(case, options)
            calls, many = _calls(case, machine, shapes, count), [shapes] * count
            own = Programs()
            programs = {
                name: pool.submit(own.compiled, timing.repeated(f, calls), many, tuned=name not in case.untuned)
                for name, f in _chosen(case, options, say).items()
                if not isinstance(f, Torch)
            }
            reference = pool.submit(untuned, case.reference, *shapes)
            found[case.key] = Ahead(programs, reference, pool.submit(Programs().compiled, jax.jit(case.make), 0))
    return found


def _calls(case: Case, machine: Machine, args: tuple, sets: int) -> int:
    """Of how many calls a program is."""
    bound = machine.bound_us(case.bytes, case.flops, case.unit)
    return timing.call_count(bound, sets, size(jax.eval_shape(case.reference, *args)), case.calls)


def measure(
    case: Case, machine: Machine, options: Options, say: Callable[[str], None] = print, ahead: Ahead | None = None
) -> Result:
    """The result of one case, whose programs may have been compiled `ahead`; a peer that fails or is wrong is left out,
    and `say` says why.

    Raises:
      WrongResultError: ours is wrong. Errors that ours raises pass through.
    """
    began = time.monotonic()
    bound = machine.bound_us(case.bytes, case.flops, case.unit)
    make = ahead.make.result() if ahead else case.make
    sets = [make(seed) for seed in range(set_count(case, options))]
    calls = _calls(case, machine, sets[0], len(sets))
    try:
        runners, reference = _runners(case, sets, calls, options, say, ahead)
    except MergedCallsError as merged:
        say(f"    {case.workload} {case.config}: {merged}: each set of arguments is used once")
        sets = _one_a_call(case, sets, calls, make)
        calls = len(sets)
        runners, reference = _runners(case, sets, calls, options, say, None)
    errors = _errors(case, reference(*sets[0]), runners, say)
    settling = _settling_us(case, machine)
    samplers = {name: timing.sampler(runner, settling) for name, runner in runners.items()}
    for sample in samplers.values():
        sample()  # after a pause a card is quicker than it stays
    budget = min(options.budget_s, case.budget_s)
    samples = timing.alternate(samplers, repeats=options.repeats, budget_s=budget)
    in_jax = {name: r.program for name, r in runners.items() if isinstance(r, timing.JaxRunner)}
    same = same_as(in_jax, in_jax)
    if same:  # one compiled program: what its two lines of samples differ by is noise
        samples["ours"] = samples[same] = [*samples["ours"], *samples[same]]
    times = timing.timings(samples)
    timed = timing.way(calls) + (f" behind {settling / 1e3:.0f} ms of them" if settling else "")
    timed += f"; ours is the program of {same}" if same else ""
    how = {"bound_us": bound, "error": errors["ours"], "timed": timed}
    got = result(*case.key, machine.device, times, **how)
    say(_line(case, got, samples, errors, time.monotonic() - began))
    return got


_POWER_US = 20.0  # of arithmetic in a call, from which on power counts


def _settling_us(case: Case, machine: Machine) -> float:
    """How long a function runs before its samples: where arithmetic takes a call's time, the card's power decides its
    clock, which follows what is drawn only within 0.2 s; in shorter turns, all functions have one clock, and that which
    draws the least pays for the others."""
    arithmetic = machine.bound_us(0, case.flops, case.unit)
    return timing.SETTLING_US if arithmetic > max(_POWER_US, machine.bound_us(case.bytes, 0, case.unit)) else 0.0


def _one_a_call(case: Case, sets: Sequence[tuple], calls: int, make: Callable) -> list[tuple]:
    """A set of arguments for each call, as far as there is room; the one that there is where all calls are warm."""
    room = _SET_BYTES // max(size(jax.eval_shape(case.make, 0)), 1)
    count = 1 if case.warm else max(len(sets), min(calls, _MOST_SETS, room))
    return [*sets, *(make(seed) for seed in range(len(sets), count))]


def _runners(
    case: Case, sets: Sequence[tuple], calls: int, options: Options, say: Callable, ahead: Ahead | None
) -> tuple[dict[str, Any], Callable]:
    """(the runners by name, compiled and run once; the reference, compiled).

    Programs of JAX compile side by side and nothing runs meanwhile: XLA times its candidates while it compiles. A peer
    whose program is ours runs the same compiled one.

    Raises:
      MergedCallsError: XLA merged calls of a function.
    """
    functions = _chosen(case, options, say)
    own: dict[str, Sequence[tuple]] = {}
    out: dict[str, Any] = {}
    for name in functions:
        with _left_out_on_error(case, name, say):
            own[name] = _prepared(case, name, sets)
    if ahead:
        programs, reference = ahead.programs, ahead.reference
    else:
        in_jax = {name: f for name in own if not isinstance(f := functions[name], Torch)}
        with concurrent.futures.ThreadPoolExecutor(len(in_jax) + 1) as pool:
            shared = Programs()
            compiled = lambda name, f: pool.submit(
                shared.compiled, timing.repeated(f, calls), own[name], tuned=name not in case.untuned
            )
            programs = {name: compiled(name, f) for name, f in in_jax.items()}
            reference = pool.submit(untuned, case.reference, *sets[0])
    for name, args in own.items():
        with _left_out_on_error(case, name, say, but=MergedCallsError):
            f = functions[name]
            if isinstance(f, Torch):
                out[name] = torch_peers.TorchRunner(f, args, calls)
            else:
                program = programs[name].result()
                _refuse_merged(name, program, calls, len(args))
                out[name] = timing.JaxRunner(program, args, calls)
    return out, reference.result()


def _refuse_merged(name: str, program: Any, calls: int, sets: int) -> None:
    """Raises MergedCallsError where the results of several calls need the same work. Calls that use a set of arguments
    each have none in common: where XLA makes one kernel of theirs, it only saves launches."""
    if calls > sets and (work := shared_work(program.as_text(), calls)):
        more = f" and {len(work) - 1} more" if work[1:] else ""
        raise MergedCallsError(f"XLA merged calls of {name} ({work[0]}{more})")


@contextlib.contextmanager
def _left_out_on_error(case: Case, name: str, say: Callable, *, but: Any = ()) -> Iterator[None]:
    """A block in which a peer may fail, which is then left out; errors of ours pass through, and errors `but`."""
    try:
        yield
    except but:
        raise
    except Exception as error:
        if name == "ours":
            raise
        say(f"    {case.workload} {case.config}: peer {name} is left out: {short(error)}")


def _chosen(case: Case, options: Options, say: Callable) -> dict[str, Callable | Torch]:
    """Ours, and the peers that are asked for and installed."""
    peers = {name: f for name, f in case.peers.items() if not name.startswith(options.without)}
    if any(isinstance(f, Torch) for f in peers.values()) and (reason := torch_peers.why_not()):
        peers = {name: f for name, f in peers.items() if not isinstance(f, Torch)}
        _say_once(say, f"peers in torch are left out: {reason}")
    return {"ours": case.ours, **peers}


def _prepared(case: Case, name: str, sets: Sequence[tuple]) -> Sequence[tuple]:
    """The sets of arguments for the function `name`."""
    prepare = case.prepare.get(name)
    return jax.block_until_ready([prepare(*args) for args in sets]) if prepare else sets


def _errors(case: Case, expected: Any, runners: dict[str, Any], say: Callable) -> dict[str, float]:
    """Relative errors by name; wrong peers are removed from `runners`."""
    errors = {}
    for name in list(runners):
        errors[name] = error = relative_error(runners[name].output, expected)
        runners[name].output = None
        if error <= case.tolerances.get(name, case.tolerance):
            continue
        if name == "ours":
            raise WrongResultError(f"{' '.join(case.key)}: relative error {error:.2g}")
        say(f"    {case.workload} {case.config}: peer {name} is left out: relative error {error:.2g}")
        del runners[name]
    return errors


def relative_error(got: Any, expected: Any) -> float:
    """Norm of the difference over the norm, over all leaves, computed on the device in float32; NaN is infinite."""
    a, b = jax.tree.leaves(got), jax.tree.leaves(expected)
    if [x.shape for x in a] != [x.shape for x in b]:
        raise ValueError(f"results of shapes {[x.shape for x in a]} where {[x.shape for x in b]} are expected")
    sums = [jax.device_get(_squares(x, y)) for x, y in zip(a, b)]
    difference, norm = (float(sum(s[i] for s in sums)) for i in range(2))
    if not (math.isfinite(difference) and math.isfinite(norm)):
        return math.inf
    return math.sqrt(difference / norm) if norm else (0.0 if difference == 0 else math.inf)


@jax.jit
def _squares(x: jax.Array, y: jax.Array):
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.sum((x - y) ** 2), jnp.sum(y * y)


def _line(case: Case, got: Result, samples: dict[str, list[float]], errors: dict[str, float], seconds: float) -> str:
    r = got.record
    rate = f"{case.bytes / r.ours_us / 1e3:.0f} GB/s" + (
        f", {case.flops / r.ours_us / 1e6:.0f} TFLOP/s" if case.flops else ""
    )
    peers = ", ".join(f"{n} {number(us)} (err {errors[n]:.0e})" for n, us in r.peers.items())
    text = f"{' '.join(case.key)}: {number(r.ours_us)} us, {rate}, {100 * (r.bound_frac or 0):.0f} % of bound, "
    text += f"err {errors['ours']:.1e}; {peers or 'no peer'}"
    if r.peers:
        best = min(r.peers, key=lambda n: r.peers[n])
        drift = samples[best][-1] / samples[best][0]
        text += f"; ratio {r.ratio:.3f} (of minima {got.min_ratio:.3f}; {best} at the end / start {drift:.2f})"
    if "the program of" in (r.timed or ""):
        text += f"; {(r.timed or '').split('; ')[1]}"
    if not case.warm and (r.bound_frac or 0) > 1.1:
        text += "; FASTER THAN THE BOUND: are calls merged, or arguments cached?"
    return f"{text} [{seconds:.1f} s]"


def short(error: BaseException, limit: int = 300) -> str:
    """An error in one line of at most `limit` characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:limit]}"


_said: set[str] = set()


def _say_once(say: Callable, text: str) -> None:
    if text not in _said:
        _said.add(text)
        say(text)
