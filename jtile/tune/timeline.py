"""What the roles of a block-level kernel did when: the spans behind the stamps of `passes.block.stamps`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jtile._errors import KernelValueError
from jtile.passes.block.stamps import BEGIN, END, PHASES, Site


@dataclasses.dataclass(frozen=True)
class Span:
    """What one role of one program did from `start` to `end` (equal: a moment), in the timeline's unit."""

    program: int
    site: Site
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class RoleShare:
    """How a role spent its time, over the programs that were stamped.

    Attributes:
      name: of the role.
      total: its time, in the timeline's unit.
      waits: what it waited for -> share of its time.
      products: share of its time in which a product that it had started was not yet waited for.
      copied: bytes that its asynchronous copies moved.
      multiplied: multiply-adds of its products.
    """

    name: str
    total: int
    waits: dict[str, float]
    products: float
    copied: int
    multiplied: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The spans of one kernel.

    Attributes:
      kernel: its name.
      unit: `ns` on a device, `steps` in the interpreter.
      spans: in order of program, role and start; the first of a role is the whole of it.
      dropped: whether a role had more stamps than there was room for.
    """

    kernel: str
    unit: str
    spans: tuple[Span, ...]
    dropped: bool = False

    def roles(self) -> tuple[RoleShare, ...]:
        """How each role spent its time."""
        numbers = sorted({s.site.role for s in self.spans})
        return tuple(_share([s for s in self.spans if s.site.role == n]) for n in numbers)

    def busy(self) -> float:
        """Share of the time of a program in which a product of any role ran: what the tensor cores had to do."""
        busy = total = 0
        for program in sorted({s.program for s in self.spans}):
            own = [s for s in self.spans if s.program == program]
            total += max(s.end for s in own) - min(s.start for s in own)
            busy += _union([p for role in {s.site.role for s in own} for p in _running(_of(own, role))])
        return busy / total if total else 0.0

    def __str__(self) -> str:
        lines = [f"{self.kernel}: products run {self.busy():.0%} of the time" + " (stamps dropped)" * self.dropped]
        for r in self.roles():
            waits = ", ".join(f"{what} {share:.0%}" for what, share in sorted(r.waits.items(), key=lambda x: -x[1]))
            lines.append(f"  {r.name}: {r.total} {self.unit}; waits: {waits or 'none'}; products {r.products:.0%}")
        return "\n".join(lines)

    def trace_events(self) -> list[dict[str, Any]]:
        """The spans in the Trace Event Format, which Perfetto and chrome://tracing read: a process a program, a thread
        a role; times in microseconds (of the interpreter: one a step)."""
        scale = 1e-3 if self.unit == "ns" else 1.0
        zero = min((s.start for s in self.spans), default=0)
        out: list[dict[str, Any]] = []
        for program, role, name in sorted({(s.program, s.site.role, s.site.name) for s in self.spans}):
            who = {"pid": program, "tid": role, "ph": "M"}
            out.append({**who, "name": "process_name", "args": {"name": f"{self.kernel} program {program}"}})
            out.append({**who, "name": "thread_name", "args": {"name": name}})
        for s in self.spans:
            place = {"pid": s.program, "tid": s.site.role, "ts": (s.start - zero) * scale}
            kind = {"ph": "X", "dur": (s.end - s.start) * scale} if s.end > s.start else {"ph": "i", "s": "t"}
            args = {"source": str(s.site.loc), "amount": s.site.amount}
            out.append({**place, **kind, "name": title(s.site), "cat": s.site.kind, "args": args})
        return out

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON for https://ui.perfetto.dev, whole or not at all."""
        text = json.dumps({"traceEvents": self.trace_events(), "displayTimeUnit": "ns"})
        target = Path(path)
        handle, name = tempfile.mkstemp(dir=target.parent, suffix=".json")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, target)

    def picture(self, path: str | os.PathLike[str], program: int | None = None) -> None:
        """Draw the roles of one program (default: the first) as bars of waiting and working (PNG, SVG, PDF).

        Raises:
          KernelValueError: matplotlib is not installed, or the program has no stamps.
        """
        _draw(self, path, program)


def timeline(kernel: str, stamps: np.ndarray, sites: Sequence[Site], unit: str) -> Timeline:
    """The timeline behind the output `stamps` [programs, roles, capacity, 2] of a stamped kernel."""
    spans: list[Span] = []
    dropped = False
    for program, role in np.ndindex(*stamps.shape[:2]):
        rows = list(itertools.takewhile(lambda row: row[0], stamps[program, role].tolist()))
        dropped |= len(rows) == stamps.shape[2]
        spans += _spans(program, rows, sites)
    spans.sort(key=lambda s: (s.program, s.site.role, s.start, -s.end))
    return Timeline(kernel, unit, tuple(spans), dropped)


def _spans(program: int, stamps: Sequence[Sequence[int]], sites: Sequence[Site]) -> Iterator[Span]:
    began: dict[int, int] = {}
    for at, code in stamps:
        site, phase = divmod(code, PHASES)
        if phase == BEGIN:
            began[site] = at
        else:
            yield Span(program, sites[site], began.pop(site, at) if phase == END else at, at)
    last = stamps[-1][0] if stamps else 0
    for site, at in began.items():  # its end was dropped
        yield Span(program, sites[site], at, last)


def title(site: Site) -> str:
    """`wait full`, `product 64x256x64`."""
    return " ".join(filter(None, (site.kind, site.about)))


def _of(spans: Sequence[Span], role: int) -> list[Span]:
    return [s for s in spans if s.site.role == role]


def _share(spans: Sequence[Span]) -> RoleShare:
    total = sum(s.end - s.start for s in spans if s.site.kind == "role") or 1
    waits: dict[str, float] = {}
    for s in spans:
        if s.site.kind.startswith("wait"):
            waits[title(s.site)] = waits.get(title(s.site), 0.0) + (s.end - s.start) / total
    running = sum(_union(_running([s for s in spans if s.program == p])) for p in {s.program for s in spans})
    amount = lambda *kinds: sum(s.site.amount for s in spans if s.site.kind in kinds)
    return RoleShare(spans[0].site.name, total, waits, running / total, amount("load", "store"), amount("product"))


def _running(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Intervals from the start of a product to the end of the wait that follows, of one role of one program."""
    out: list[tuple[int, int]] = []
    start: int | None = None
    for s in sorted(spans, key=lambda s: s.end):
        if s.site.kind == "product":
            start = s.start if start is None else start
        elif s.site.kind == "wait for products" and start is not None:
            out.append((start, s.end))
            start = None
    return out


def _union(parts: Sequence[tuple[int, int]]) -> int:
    """Length of the union of intervals."""
    total, reached = 0, None
    for lo, hi in sorted(parts):
        lo = lo if reached is None else max(lo, reached)
        total += max(hi - lo, 0)
        reached = hi if reached is None else max(reached, hi)
    return total


_COLOURS = {"role": "#4c956c", "wait": "#d9d9d9", "wait for products": "#f4a259", "wait for stores": "#bc4b51"}


def _draw(line: Timeline, path: str | os.PathLike[str], program: int | None) -> None:
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as e:
        raise KernelValueError("a picture needs matplotlib: pip install matplotlib") from e
    programs = sorted({s.program for s in line.spans})
    chosen = programs[0] if program is None and programs else program
    spans = [s for s in line.spans if s.program == chosen]
    if not spans:
        raise KernelValueError(f"the timeline of {line.kernel} has no program {program}; it has {programs}")
    zero = min(s.start for s in spans)
    names = {s.site.role: s.site.name for s in spans}
    figure = Figure(figsize=(14, 1 + 0.8 * len(names)))
    axes = figure.add_subplot()
    for s in spans:
        if s.end > s.start:
            axes.barh(s.site.role, s.end - s.start, left=s.start - zero, color=_COLOURS[s.site.kind], height=0.7)
    for role in names:
        at = [s.start - zero for s in spans if s.site.role == role and s.site.kind == "product"]
        axes.plot(at, [role] * len(at), "|", color="black", markersize=10)
    axes.set_yticks(list(names), list(names.values()))
    axes.invert_yaxis()
    axes.set_xlabel(f"{line.unit} ({line.kernel}, program {chosen}; products run {line.busy():.0%} of the time)")
    labels = {"role": "works", **{k: k for k in list(_COLOURS)[1:]}}
    axes.legend(
        [Patch(color=_COLOURS[k]) for k in labels],
        list(labels.values()),
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=4,
    )
    figure.tight_layout()
    figure.savefig(path)
