"""`jt.profile_program`: where the time of a whole compiled program goes, kernel by kernel, by XLA's own profiler."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import os
import re
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jtile import _cache
from jtile._errors import KernelTypeError, KernelValueError
from jtile.tune import device, measure

_MARK = "jtile.profile_program"
_PREFIX = "jtile_"  # prefix of the names of kernels on a GPU
_CALL = re.compile(
    r'^\s*(?:ROOT )?%?(\S+) = .*?custom-call\(.*custom_call_target="jtile_\w+".*\bname = "([^"]+)"', re.MULTILINE
)


@dataclasses.dataclass(frozen=True)
class Part:
    """A kernel of jtile, or an op of XLA.

    Attributes:
      name: the name of the kernel, or of the op in XLA's program.
      kind: `kernel` or `xla`.
      runs: how often the part runs in one call of the program.
      time_us: in one call of the program, without what runs inside of it. Of kernels that overlap on a GPU, what they
        share counts for the one that began first.
    """

    name: str
    kind: str
    runs: float
    time_us: float


@dataclasses.dataclass(frozen=True)
class ProgramProfile:
    """Where the time of a program goes; prints as a table.

    All times are means over the middle half of the calls by their length. So they add up, and a call that something
    else held up does not count.

    Attributes:
      device: the device on which the program ran.
      calls: how many calls were watched.
      time_us: microseconds of one call, as the host sees it, the profiler's own costs included.
      parts: kernels and ops, those that take longest first.
      gaps_us: in one call between its first op and its last one, while no op ran.
      outside_us: in one call before the first op and after the last one: the host's part.
      events: in the Trace Event Format: those of XLA's profiler, where jtile's kernels have their names, and lanes of
        kernels and gaps beside them.
    """

    device: str
    calls: int
    time_us: float
    parts: tuple[Part, ...]
    gaps_us: float
    outside_us: float
    events: Sequence[Mapping[str, Any]] = dataclasses.field(repr=False, default=())

    @property
    def kernels_us(self) -> float:
        """Microseconds of jtile's kernels in one call."""
        return sum(p.time_us for p in self.parts if p.kind == "kernel")

    def __str__(self) -> str:
        rows = [(p.name, "jtile" if p.kind == "kernel" else "XLA", f"{p.runs:g}", p.time_us) for p in self.parts]
        rows += [("gaps between them", "", "", self.gaps_us), ("before and after", "host", "", self.outside_us)]
        total = self.time_us or 1.0
        table = [("part", "of", "runs", "time", "share")]
        table += [(name, of, runs, f"{us:,.1f} us", f"{us / total:.0%}") for name, of, runs, us in rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = (
            "  ".join(c.ljust(w) if k < 2 else c.rjust(w) for k, (c, w) in enumerate(zip(r, widths))) for r in table
        )
        head = (
            f"on {self.device}: {self.time_us:,.1f} us a call, {self.kernels_us / total:.0%} of it in jtile's kernels"
        )
        return "\n".join([head, *lines])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace for https://ui.perfetto.dev: JSON, compressed if the name ends in .gz.

        Raises:
          KernelValueError: the file cannot be written.
        """
        data = json.dumps({"traceEvents": list(self.events), "displayTimeUnit": "ns"}).encode()
        try:
            packed = gzip.compress(data) if os.fspath(path).endswith(".gz") else data
            _cache.write(Path(path), packed, _cache.PUBLIC)
        except OSError as e:
            raise KernelValueError(f"the trace cannot be written to {os.fspath(path)!r}: {e}") from e


def profile_program(f: Callable[..., Any], *args: Any, calls: int = 10) -> ProgramProfile:
    """Compile `f(*args)` as one program, run it under XLA's profiler, and say where its time goes.

    It works on CPUs and GPUs, for programs with and without kernels of jtile. A call begins when the one before it has
    ended.

    Args:
      f: a JAX function, jitted or not.
      args: its arguments: arrays, numbers and trees of them; a `jax.ShapeDtypeStruct` stands for random data.
      calls: how many calls are recorded.

    Returns:
      A `ProgramProfile`, which prints as a table; `save(path)` writes a trace for Perfetto.

    Raises:
      KernelTypeError: called inside of a trace, or `f` is no function. KernelValueError: `calls` is below 1, or another
      profile is being made.
    """
    if not callable(f) or any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
        raise KernelTypeError(f"jt.profile_program takes a function and arrays outside of jax.jit, got {f!r}")
    if isinstance(calls, bool) or not isinstance(calls, int) or calls < 1:
        raise KernelValueError(f"jt.profile_program: calls is a Python int of at least 1, got {calls!r}")
    leaves, tree = jax.tree.flatten(args)
    given = [measure.random_array(x, k) if isinstance(x, jax.ShapeDtypeStruct) else x for k, x in enumerate(leaves)]
    arrays = jax.tree.unflatten(tree, given)
    jitted = f if hasattr(f, "lower") and hasattr(f, "trace") else jax.jit(lambda *xs: f(*xs))
    run = jitted.lower(*arrays).compile()
    for _ in range(2):
        jax.block_until_ready(run(*arrays))
    return of_trace(_traced(run, arrays, calls), run.as_text() or "", device.kind())


def _traced(run: Callable[..., Any], arrays: Any, calls: int) -> list[dict[str, Any]]:
    """The events of XLA's profiler over some calls."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            with jax.profiler.trace(folder, profiler_options=options):
                for k in range(calls):
                    with jax.profiler.TraceAnnotation(f"{_MARK} {k}"):
                        jax.block_until_ready(run(*arrays))
        except RuntimeError as e:
            raise KernelValueError(f"XLA's profiler does not start, perhaps because it is already running: {e}") from e
        (path,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        return [e for e in events if "name" in e]  # the last event of the file is empty


Span = tuple[float, float, str]  # start, end, name


def of_trace(events: Sequence[dict[str, Any]], text: str, kind: str) -> ProgramProfile:
    """The profile behind the events of the profiler.

    Args:
      events: in the Trace Event Format; calls are marked by `jtile.profile_program`.
      text: the text of the compiled program, which says what kernels its calls are.
      kind: the kind of the device.
    """
    names = dict(_CALL.findall(text))
    found = re.match(r"HloModule ([^\s,]+)", text)
    module = found[1] if found else ""
    spans = [e for e in events if e.get("ph") == "X"]
    windows = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if str(e.get("name", "")).startswith(_MARK))
    on_devices = _on_devices(events, names)
    ops = on_devices or [
        e for e in spans if "hlo_op" in e.get("args", {}) and e["args"].get("hlo_module", module) == module
    ]
    label = lambda op: f"{names[op]} ({op})" if names[op] != op else op
    shown = [e if (op := e.get("args", {}).get("hlo_op")) not in names else {**e, "name": label(op)} for e in events]
    each, gaps, outside, lanes = [], [], [], []
    for start, end in windows:
        own = [e for e in ops if start <= e["ts"] < end]
        busy = _union((e["ts"], e["ts"] + e["dur"]) for e in own)
        holes = [(a[1], b[0]) for a, b in itertools.pairwise(busy)]
        each.append(_times_in_line(own) if on_devices else _own_times(own))
        gaps.append(sum(b - a for a, b in holes))
        outside.append(end - start - (busy[-1][1] - busy[0][0] if busy else 0.0))
        lanes += [(a, b, "gap") for a, b in holes]
        lanes += [(e["ts"], e["ts"] + e["dur"], names.get(e["args"]["hlo_op"], e["args"]["hlo_op"])) for e in own]
    merged: dict[tuple[str, str], list[str]] = {}
    for op in dict.fromkeys(op for one in each for op in one):
        merged.setdefault((names.get(op, op), "kernel" if op in names else "xla"), []).append(op)
    lengths = [end - start for start, end in windows]
    kept = sorted(range(len(windows)), key=lengths.__getitem__)[len(windows) // 4 : len(windows) - len(windows) // 4]
    middle = lambda values: statistics.fmean(values[k] for k in kept) if kept else 0.0
    parts = [
        Part(
            name, what, sum(len(one.get(op, ())) for one in each for op in ops_) / max(len(each), 1),
            middle([sum(sum(one.get(op, ())) for op in ops_) for one in each]),
        )
        for (name, what), ops_ in merged.items()
    ]  # fmt: skip
    parts.sort(key=lambda p: -p.time_us)
    return ProgramProfile(
        kind,
        len(windows),
        middle(lengths),
        tuple(parts),
        middle(gaps),
        middle(outside),
        [*shown, *_lanes(lanes, names)],
    )


def _on_devices(events: Sequence[dict[str, Any]], names: dict[str, str]) -> list[dict[str, Any]]:
    """What ran on the streams of GPUs; nothing where there is none. A graph that XLA has recorded is one op to it, so
    that what runs in it goes by its own name, which of jtile's kernels begins with `jtile_`."""
    about = [e for e in events if e.get("ph") == "M"]
    title = lambda e: str(e.get("args", {}).get("name", ""))
    pids = {e["pid"] for e in about if e.get("name") == "process_name" and "/device:GPU" in title(e)}
    streams = {(e["pid"], e["tid"]) for e in about if e.get("name") == "thread_name" and title(e).startswith("Stream")}
    found = []
    for e in events:
        if e.get("ph") != "X" or e["pid"] not in pids or (e["pid"], e["tid"]) not in streams:
            continue
        op = e.get("args", {}).get("hlo_op") or "command_buffer"
        if e["name"].startswith(_PREFIX):
            op = e["name"]
            names[op] = op.removeprefix(_PREFIX)
        elif op.startswith("command_buffer"):
            op = e["name"]
        found.append({**e, "args": {**e.get("args", {}), "hlo_op": op}})
    return found


def _times_in_line(events: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Microseconds of each run of an op on a device. Kernels that overlap wait for each other for the most part: what
    two of them share counts for the one that began first."""
    out: dict[str, list[float]] = {}
    until = float("-inf")
    for e in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        end = e["ts"] + e["dur"]
        out.setdefault(e["args"]["hlo_op"], []).append(max(end - max(e["ts"], until), 0.0))
        until = max(until, end)
    return out


def _own_times(events: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Microseconds of each run of an op, without the ops inside of it, such as those of a loop."""
    out: dict[str, list[float]] = {}
    open_: dict[Any, list[tuple[float, str, int]]] = {}  # for each thread: end, op, place of its time
    for e in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        stack, op, end = open_.setdefault((e.get("pid"), e.get("tid")), []), e["args"]["hlo_op"], e["ts"] + e["dur"]
        while stack and stack[-1][0] <= e["ts"]:
            stack.pop()
        if stack:
            out[stack[-1][1]][stack[-1][2]] -= e["dur"]
        times = out.setdefault(op, [])
        times.append(e["dur"])
        stack.append((end, op, len(times) - 1))
    return out


def _union(parts: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for start, end in sorted(parts):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


def _lanes(spans: Sequence[Span], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """A process of its own in the trace: a lane of jtile's kernels, one of XLA's ops and one of gaps."""
    pid, kernels = 1 << 20, set(names.values())
    titles = ("jtile's kernels", "XLA's ops", "gaps")
    out: list[dict[str, Any]] = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": "the program"}}]
    for tid, title in enumerate(titles):
        out.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": title}})
    for start, end, name in spans:
        tid = 2 if name == "gap" else 0 if name in kernels else 1
        out.append({"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": end - start, "name": name})
    return out
