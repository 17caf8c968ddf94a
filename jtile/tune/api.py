"""`jt.autotune` and `jt.tune`: give a kernel a search space, and search for the kernels of a function."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import time
from collections.abc import Callable, Mapping
from typing import Any

from jtile._errors import KernelTypeError, KernelValueError
from jtile.tune import device
from jtile.tune.programs import searches_of
from jtile.tune.progress import bar
from jtile.tune.search import Candidate, search
from jtile.tune.store import Entry, new_generation, user_path

CUTTING = 0.4  # share of a time limit in which the cuts of programs are searched


def autotune(
    *, space: Any, key: Any = None, data: Callable[..., Any] | None = None, override: bool = False
) -> Callable[[Any], Any]:
    """Give a kernel a search space: `@jt.autotune(space={"bm": [64, 128], "num_warps": [4, 8]})` above `@jt.kernel`.

    A call that leaves out a parameter of the space takes it from the entry that `jt.tune` (or a record shipped with
    jtile) has for the device and the call's types; without one, the default. With `JTILE_AUTOTUNE=1` the first such
    call searches. A parameter that is given at the call, or by `with_options`, is not tuned.

    Args:
      space: a dict from names of meta-parameters and options of the compiler (`num_warps`, `num_stages`, `consumers`,
        ...) to lists of values; a list of dicts; or a function of the abstract inputs and meta-parameters that gives
        one of these.
      key: what the choice depends on: names of inputs (their shapes and dtypes) and of meta-parameters, or a function
        of the abstract inputs and meta-parameters to something printable. Default: all inputs, and all meta-parameters
        that are not tuned.
      data: a function of the abstract inputs and meta-parameters to the arrays to measure with, of the inputs' types.
        Default: floats of a normal distribution and integers from 0 to 7.
      override: an entry goes before what a call gives, too, which is then a default: for kernels that only a function
        with a heuristic calls.
    Returns:
      A decorator of kernels.
    Raises:
      KernelTypeError, KernelValueError: a space or key that does not fit the kernel.
    """

    def decorate(kernel: Any) -> Any:
        if not hasattr(kernel, "autotune"):
            raise KernelTypeError(
                f"jt.autotune decorates a kernel, got {kernel!r}; write it above @jt.kernel(out_type=...)"
            )
        return kernel.autotune(space=space, key=key, data=data, override=override)

    return decorate


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What a search found for one kernel and the types of its arguments.

    Attributes:
      kernel, name: the kernel, and what its entry is stored under.
      best: the entry; None where nothing was measured.
      candidates: every point of the space, the default first, with its time or the reason why it has none.
    """

    kernel: str
    name: str
    best: Entry | None
    candidates: tuple[Candidate, ...]

    @property
    def speedup(self) -> float:
        """How many times as fast as the default the winner is."""
        return self.best.speedup if self.best else 1.0


@dataclasses.dataclass(frozen=True)
class Report:
    """What `jt.tune` did; prints as a table.

    Attributes:
      device: the device kind that the entries are for, and `path` the file that holds them (None: memory only).
      kernels: one for each tunable kernel and types of arguments.
      fixed: names of the kernels that have no search space.
      skipped: entries that were not searched for, since the time was up.
    """

    device: str
    path: str | None
    kernels: tuple[Tuned, ...]
    fixed: tuple[str, ...]
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [("kernel", "default", "best", "speedup", "tried", "choice"), *map(_row, self.kernels)]
        widths = [max(len(r[k]) for r in rows) for k in range(5)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(r, [*widths, 0])).rstrip() for r in rows]
        lines += [f"no search space: {', '.join(self.fixed)}"] if self.fixed else []
        lines += [f"time was up: {name}" for name in self.skipped]
        if any(t.best for t in self.kernels):
            lines.append(f"kept for {self.device}" + (f" in {self.path}" if self.path else ""))
        return "\n".join(lines)


def _row(t: Tuned) -> tuple[str, ...]:
    measured = sum(c.state == "measured" for c in t.candidates)
    tried = f"{measured}/{len(t.candidates)}"
    if t.best is None:
        return t.kernel, "-", "-", "-", tried, ""
    choice = " ".join(f"{k}={v}" for k, v in t.best.config.items())
    return t.kernel, f"{t.best.default_us:.1f} us", f"{t.best.time_us:.1f} us", f"{t.speedup:.2f}", tried, choice


def tune(f: Callable[..., Any], *args: Any, time_limit: float | None = None, progress: bool = True) -> Report:
    """Search for the best parameters of every kernel that `f(*args)` calls, and keep them; see `jt.autotune`. Of what
    `jt.fuse` makes first the cut is searched, which groups are kernels, and then their tiles.

    `f`, and every other jitted function, is traced anew at its next call and takes the winners.

    Args:
      f: a JAX function, jitted or not; also a derivative, such as `jax.grad(loss)`.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`: kernels are measured on data of their own.
      time_limit: seconds for the whole search; a search that ends early keeps the best so far.
      progress: show a progress bar, if standard error is a terminal and the package rich is installed.

    Returns:
      A `Report`, which prints as a table of the kernels, their best parameters and the gain.

    Raises:
      KernelTypeError, KernelValueError: `f` is no function, `time_limit` no number of seconds, or this machine does not
        have the device that kernels are compiled for. After a KeyboardInterrupt the winners so far are kept.
    """
    if time_limit is not None and (not isinstance(time_limit, numbers.Real) or not time_limit >= 0):
        raise KernelValueError(f"time_limit is a number of seconds, at least 0, or None; got {time_limit!r}")
    if not device.is_here():
        raise KernelValueError(
            f"jt.tune cannot measure on {device.kind()!r}, which this machine does not have: unset the option arch"
        )
    programs, calls, cuts = searches_of(f, *args)
    deadline = math.inf if time_limit is None else time.monotonic() + time_limit
    done: list[Tuned] = []
    skipped: list[str] = []
    path = user_path(device.kind())
    try:
        with bar(enabled=progress) as show:
            if cuts:
                _each(cuts, deadline, show, done, skipped, share=CUTTING)
                programs, calls, _ = searches_of(f, *args)
            searches = {call.name: functools.partial(_search, call) for call in calls}
            _each(searches, deadline, show, done, skipped)
    finally:
        new_generation()
    tunable = {call.kernel.name for call in calls}
    fixed = dict.fromkeys(p.name for p in programs if p.name not in tunable)
    return Report(device.kind(), path and str(path), tuple(done), tuple(fixed), tuple(skipped))


def _search(call: Any, **options: Any) -> Tuned:
    found = search(call, **options)
    return Tuned(call.kernel.name, call.name, found.entry, found.candidates)


def _each(
    searches: Mapping[str, Callable[..., Tuned]],
    deadline: float,
    show: Callable[..., None],
    done: list[Tuned],
    skipped: list[str],
    share: float = 1.0,
) -> None:
    """Runs searches one after another, each with its part of the time that is left, or of a share of it."""
    end = deadline if math.isinf(deadline) else time.monotonic() + share * (deadline - time.monotonic())
    for k, (name, run) in enumerate(searches.items()):
        left = end - time.monotonic()
        if left <= 0:
            skipped.append(name)
            continue
        label = f"{name.split('#')[0]} ({k + 1}/{len(searches)})"
        limit = None if math.isinf(left) else left / (len(searches) - k)
        found = run(time_limit=limit, progress=lambda *at, label=label: show(label, *at))
        if found.candidates:
            done.append(found)
