"""The description of a benchmark, its measurement, and the record that is kept of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from benchmarks.gpu.programs import without_names
from jtile.testing import Timing, relative_error, time_alternating


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison: functions of the same `args` that give the same result up to rounding.

    Attributes:
      workload, config, dtype: what the record says; `config` is the size.
      ours: the kernel. peers: name -> the same work by others. All are jitted, `args` are arguments, not constants.
      args: the arguments of `ours` and, unless `peer_args` has the peer's name, of the peers.
      bytes: bytes that must be read and written at least; flops: operations that must be done at least.
      unit: which peak rate of the roofline the operations have (`"f32"`, `"bf16"`, `"int8"`).
      reference: what the errors are measured against; without it the first peer.
      tolerance: the largest relative error that counts as right; a larger one ends the benchmark.
    """

    workload: str
    config: str
    dtype: str
    ours: Callable
    peers: Mapping[str, Callable]
    args: tuple[Any, ...]
    bytes: int = 0
    flops: int = 0
    unit: str = "f32"
    peer_args: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    reference: Callable | None = None
    tolerance: float = 1e-5


@dataclasses.dataclass(frozen=True)
class Record:
    """One line of the results, as `--json` writes it. Times are medians in microseconds; `ratio` is the best peer's
    time over ours; `bound_us` is what the roofline allows, `bound_frac` how much of that we reach; `error` is the
    relative error against the reference; `timed` says how XLA ran the calls of one program, where that matters, and
    which peer's program ours is. For language models `peer_error` is the error of a peer of the same dtypes, and
    `kernels` the time of each kernel: by runner and name how often it runs, and its microseconds in all."""

    workload: str
    config: str
    dtype: str
    device: str
    ours_us: float
    peers: dict[str, float]
    ratio: float | None
    bound_us: float | None
    bound_frac: float | None
    error: float | None
    timed: str | None = None
    peer_error: float | None = None
    kernels: dict[str, dict[str, list[float]]] | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """A record, and the ratio of the smallest times, which a busy machine disturbs less."""

    record: Record
    min_ratio: float | None = None


class WrongResultError(AssertionError):
    """A kernel under test that is further from its reference than its case allows."""


def measure(case: Case, roofline: Any, *, repeats: int) -> Result:
    """Checks `case` against its reference, then time ours and the peers in turns. A peer that lowers to our program is
    not timed: it has our time, since two lines of samples of one program differ by noise alone."""
    functions = {"ours": case.ours, **case.peers}
    args = {name: case.peer_args.get(name, case.args) for name in functions}
    jitted = {name: jax.jit(function) for name, function in functions.items()}
    first = next(iter(case.peers))
    expected = jax.jit(case.reference)(*case.args) if case.reference else jitted[first](*args[first])
    error = relative_error(jitted["ours"](*args["ours"]), expected)
    if not error <= case.tolerance:
        raise WrongResultError(f"{case.workload} {case.config} {case.dtype}: relative error {error:.2g}")
    del expected
    texts = {name: without_names(f.lower(*args[name]).as_text()) for name, f in jitted.items()}
    same = [name for name in case.peers if texts[name] == texts["ours"] and args[name] is args["ours"]]
    calls = {name: lambda f=f, a=args[name]: f(*a) for name, f in jitted.items() if name not in same}
    times = time_alternating(calls, repeats=repeats)
    times |= dict.fromkeys(same, times["ours"])
    how = {"bound_us": roofline.bound_us(case.bytes, case.flops, case.unit), "error": error}
    timed = f"ours is the program of {', '.join(same)}" if same else None
    return result(case.workload, case.config, case.dtype, roofline.device, times, timed=timed, **how)


def result(
    workload: str, config: str, dtype: str, device: str, times: Mapping[str, Timing], *, bound_us=None, error=None,
    timed: str | None = None, peer_error=None, kernels=None,
) -> Result:  # fmt: skip
    """The result of `times`, in which the entry "ours" is ours and every other a peer."""
    ours = times["ours"]
    peers = {name: t for name, t in times.items() if name != "ours"}
    best = min((t.median_us for t in peers.values()), default=None)
    best_min = min((t.min_us for t in peers.values()), default=None)
    record = Record(
        workload=workload,
        config=config,
        dtype=dtype,
        device=device,
        ours_us=_digits(ours.median_us),
        peers={name: _digits(t.median_us) for name, t in peers.items()},
        ratio=None if best is None else _digits(best / ours.median_us),
        bound_us=None if not bound_us else _digits(bound_us),
        bound_frac=None if not bound_us else _digits(bound_us / ours.median_us),
        error=None if error is None else _digits(error),
        timed=timed,
        peer_error=None if peer_error is None else _digits(peer_error),
        kernels=kernels,
    )
    return Result(record, None if best_min is None else _digits(best_min / ours.min_us))


def run(workloads: Mapping[str, Any], roofline: Any, *, repeats: int) -> Iterator[Result]:
    """The results of workload modules, one after the other: each has `cases()`, or `results(roofline, repeats)`."""
    for module in workloads.values():
        if hasattr(module, "results"):
            yield from module.results(roofline, repeats)
        else:
            for case in module.cases():
                yield measure(case, roofline, repeats=repeats)


def _digits(x: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{x:.4g}")
