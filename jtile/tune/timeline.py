"""What the roles of a block-level kernel did when: the spans behind what `stamps.py` of the block level stores."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jtile import _cache
from jtile.lowering.triton.block.passes.stamps import BEGIN, END, PHASES, SLOT, Site


@dataclasses.dataclass(frozen=True)
class Span:
    """What one role of one program did from `start` to `end` (equal: a moment), in the timeline's unit.

    Attributes:
      slot: which barrier of its ring it concerns.
      number: that of its last stamp, in the order in which the role made them: a clock may not tell two of them apart.
    """

    program: int
    site: Site
    start: int
    end: int
    slot: int = 0
    number: int = 0


@dataclasses.dataclass(frozen=True)
class Stage:
    """One filling of a slot of a ring: asked for at `asked`, there and waited for at `read`, given back at `freed`."""

    barrier: str
    slot: int
    asked: int
    read: int
    freed: int


@dataclasses.dataclass(frozen=True)
class RoleShare:
    """How a role spent its time, over the programs that were stamped.

    Attributes:
      name: the name of the role.
      total: its time in all of these programs, in the timeline's unit.
      waits: what it waited for -> share of its time.
      products: share of its time in which a product that it had started was under way: from its start to the end of
        the wait that says that it has ended.
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
      kernel: the name of the kernel.
      unit: `ns` on a device, `steps` in the interpreter.
      spans: in order of program, role and start; the first of a role is the whole of it.
      dropped: whether a role had more stamps than there was room for. The timeline of its program then ends, for all
        roles, at the last stamp for which there was room.
    """

    kernel: str
    unit: str
    spans: tuple[Span, ...]
    dropped: bool = False

    @property
    def programs(self) -> tuple[int, ...]:
        """The numbers of the programs that were watched."""
        return tuple(sorted({s.program for s in self.spans}))

    def roles(self) -> tuple[RoleShare, ...]:
        """How each role spent its time."""
        numbers = sorted({s.site.role for s in self.spans})
        return tuple(_share([s for s in self.spans if s.site.role == n]) for n in numbers)

    def products(self, program: int) -> list[tuple[int, int]]:
        """When a product of any role of a program was under way, as disjoint intervals: what the tensor cores had to
        do. A role learns that a product has ended by a wait, so an end may be noted late."""
        own = [s for s in self.spans if s.program == program]
        roles = {s.site.role for s in own}
        return _union([p for role in roles for p in _running([s for s in own if s.site.role == role])])

    def busy(self) -> float:
        """Share of the time of a program in which a product of any role was under way."""
        total = sum(self.length(p) for p in self.programs)
        return sum(map(_length, map(self.products, self.programs))) / total if total else 0.0

    def length(self, program: int) -> int:
        """How long a program ran, in the timeline's unit."""
        own = [s for s in self.spans if s.program == program]
        return max(s.end for s in own) - min(s.start for s in own)

    def rate(self) -> float:
        """Operations of products in a unit of time of one program (of nanoseconds: GFLOP/s of a block)."""
        total = sum(self.length(p) for p in self.programs)
        return 2 * sum(s.site.amount for s in self.spans if s.site.kind == "product") / total if total else 0.0

    def stages(self, program: int) -> list[Stage]:
        """The fillings of the slots of a program's rings, in order of time."""
        return _stages([s for s in self.spans if s.program == program])

    def __str__(self) -> str:
        rate = f", {self.rate() / 1e3:.2f} TFLOP/s a block" if self.unit == "ns" else ""
        dropped = " (until there was no more room for stamps; the rest is dropped)" * self.dropped
        blocks = len(self.programs)
        lines = [f"{self.kernel}: products are under way {self.busy():.0%} of the time{rate}{dropped}"]
        for r in self.roles():
            waits = ", ".join(f"{what} {share:.0%}" for what, share in sorted(r.waits.items(), key=lambda x: -x[1]))
            total = f"{r.total // blocks} {self.unit} a block"
            lines.append(f"  {r.name}: {total}; waits: {waits or 'none'}; products {r.products:.0%}")
        return "\n".join(lines)

    def trace_events(self) -> list[dict[str, Any]]:
        """The spans in the Trace Event Format, which Perfetto and chrome://tracing read: a process a program, a thread
        a role, one for the products under way and one a slot of a ring; times in microseconds (of the interpreter: one
        a step)."""
        scale = 1e-3 if self.unit == "ns" else 1.0
        zero = min((s.start for s in self.spans), default=0)
        out: list[dict[str, Any]] = []
        for program, role, name in sorted({(s.program, s.site.role, s.site.name) for s in self.spans}):
            out += _thread(program, role, name, f"{self.kernel} program {program}")
        for s in self.spans:
            place = {"pid": s.program, "tid": s.site.role, "ts": (s.start - zero) * scale}
            kind = {"ph": "X", "dur": (s.end - s.start) * scale} if s.end > s.start else {"ph": "i", "s": "t"}
            args = {"source": str(s.site.loc), "amount": s.site.amount, "slot": s.slot}
            out.append({**place, **kind, "name": title(s.site), "cat": s.site.kind, "args": args})
        for program in self.programs:
            lanes = [("products under way", self.products(program), "products")]
            rings = self.stages(program)
            for ring in sorted({(x.barrier, x.slot) for x in rings}):
                own = [x for x in rings if (x.barrier, x.slot) == ring]
                parts = [(x.asked, x.read) for x in own], [(x.read, x.freed) for x in own]
                lanes += [(f"{ring[0]}[{ring[1]}]", p, what) for p, what in zip(parts, (COPIED, READ), strict=True)]
            numbers = {name: 100 + k for k, name in enumerate(dict.fromkeys(name for name, _, _ in lanes))}
            for name, number in numbers.items():
                out += _thread(program, number, name)
            for name, parts, what in lanes:
                place = {"pid": program, "tid": numbers[name], "ph": "X", "name": what, "cat": "stage"}
                out += [{**place, "ts": (a - zero) * scale, "dur": (b - a) * scale} for a, b in parts]
        return out

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON for https://ui.perfetto.dev, whole or not at all."""
        text = json.dumps({"traceEvents": self.trace_events(), "displayTimeUnit": "ns"})
        target = Path(path)
        _cache.write(target, text.encode(), _cache.PUBLIC)

    def picture(
        self,
        path: str | os.PathLike[str],
        program: int | None = None,
        window: tuple[float, float] | None = None,
    ) -> None:
        """Draw one program (PNG, SVG, PDF): what each role waits for, products under way, slots of rings.

        Args:
          program: its number; default: the first.
          window: from when to when, in the timeline's unit after the start of the program; default: all of it.

        Raises:
          KernelValueError: matplotlib is not installed, the program has no stamps, or the window is empty.
        """
        from jtile.tune.picture import draw

        draw(self, path, program, window)


COPIED, READ = "asked for, not yet read", "being read"


def _thread(program: int, number: int, name: str, process: str = "") -> list[dict[str, Any]]:
    who = {"pid": program, "tid": number, "ph": "M"}
    out = [{**who, "name": "process_name", "args": {"name": process}}] if process else []
    return [
        *out,
        {**who, "name": "thread_name", "args": {"name": name}},
        {**who, "name": "thread_sort_index", "args": {"sort_index": number}},
    ]


def timeline(kernel: str, stamps: np.ndarray, sites: Sequence[Site], unit: str) -> Timeline:
    """The timeline behind the output `stamps` [programs, roles, capacity, 2] of a stamped kernel."""
    spans: list[Span] = []
    dropped = False
    for program, roles in enumerate(stamps):
        rows = [list(itertools.takewhile(lambda row: row[0], role.tolist())) for role in roles]
        until = min((row[-1][0] for row in rows if len(row) == stamps.shape[2]), default=None)
        dropped |= until is not None
        spans += [cut for row in rows for span in _spans(program, row, sites) for cut in _cut(span, until)]
    spans.sort(key=lambda s: (s.program, s.site.role, s.start, -s.end, s.number))
    return Timeline(kernel, unit, tuple(spans), dropped)


def _cut(span: Span, until: int | None) -> list[Span]:
    """The part of a span before `until`, after which it is not known what all roles of the program did."""
    if until is None or span.end <= until:
        return [span]
    return [dataclasses.replace(span, end=until)] if span.start < until else []


def _spans(program: int, stamps: Sequence[Sequence[int]], sites: Sequence[Site]) -> Iterator[Span]:
    began: dict[int, int] = {}
    for number, (at, code) in enumerate(stamps):
        slot, rest = divmod(code, SLOT)
        site, phase = divmod(rest, PHASES)
        if phase == BEGIN:
            began[site] = at
        else:
            yield Span(program, sites[site], began.pop(site, at) if phase == END else at, at, slot, number)
    last = stamps[-1][0] if stamps else 0
    for site, at in began.items():  # the stamp of the span's end was dropped
        yield Span(program, sites[site], at, last, number=len(stamps))


def title(site: Site) -> str:
    """The title of a span, such as `wait full` or `product 64x256x64`."""
    return " ".join(filter(None, (site.kind, site.about)))


def _share(spans: Sequence[Span]) -> RoleShare:
    total = sum(s.end - s.start for s in spans if s.site.kind == "role") or 1
    waits: dict[str, float] = {}
    for s in spans:
        if s.site.kind.startswith("wait"):
            waits[title(s.site)] = waits.get(title(s.site), 0.0) + (s.end - s.start) / total
    running = sum(_length(_union(_running([s for s in spans if s.program == p]))) for p in {s.program for s in spans})
    amount = lambda *kinds: sum(s.site.amount for s in spans if s.site.kind in kinds)
    return RoleShare(spans[0].site.name, total, waits, running / total, amount("load", "store"), amount("product"))


def _running(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """The products of one role of a program, each from its start to the end of the wait that says that it has ended;
    products end in the order of their start, and a wait leaves the last few running."""
    out: list[tuple[int, int]] = []
    starts: list[int] = []
    for s in sorted(spans, key=lambda s: s.number):
        if s.site.kind == "product":
            starts.append(s.start)
        elif s.site.kind == "wait for products":
            ended = max(len(starts) - s.site.count, 0)
            out += [(start, s.end) for start in starts[:ended]]
            starts = starts[ended:]
    last = max((s.end for s in spans), default=0)
    return out + [(start, last) for start in starts]  # the stamps of these waits were dropped


def _union(parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The times of intervals that may overlap, as disjoint intervals."""
    out: list[tuple[int, int]] = []
    for lo, hi in sorted(parts):
        if out and lo <= out[-1][1]:
            out[-1] = out[-1][0], max(hi, out[-1][1])
        else:
            out.append((lo, hi))
    return out


def _length(parts: Sequence[tuple[int, int]]) -> int:
    return sum(hi - lo for lo, hi in parts)


def _stages(spans: Sequence[Span]) -> list[Stage]:
    """The stages of one program. An `expect` asks for a slot; another role reads it from the end of its first wait on;
    it is free at the last arrival before it is asked for again, at the barrier that its filler waits for."""
    out: list[Stage] = []
    end = max((s.end for s in spans), default=0)
    asked = [s for s in spans if s.site.kind == "expect"]
    for barrier, slot in sorted({(s.site.about, s.slot) for s in asked}):
        mine = sorted((s for s in asked if (s.site.about, s.slot) == (barrier, slot)), key=lambda s: s.start)
        back = _given_back(spans, mine)
        for k, s in enumerate(mine):
            until = mine[k + 1].start if k + 1 < len(mine) else end
            there = [
                w.end
                for w in spans
                if w.site.kind == "wait" and (w.site.about, w.slot) == (barrier, slot) and s.start <= w.end <= until
            ]
            read = min(there, default=until)
            freed = [t for t in back if read <= t <= until]
            out.append(Stage(barrier, slot, s.start, read, max(freed, default=until)))
    return sorted(out, key=lambda x: x.asked)


def _given_back(spans: Sequence[Span], asked: Sequence[Span]) -> list[int]:
    """When the slot that these `expect`s are for was given back: arrivals at the barrier that its filler waits for
    last before it asks."""
    role, slot = asked[0].site.role, asked[0].slot
    waits = [s for s in spans if s.site.role == role and s.site.kind == "wait" and s.number < asked[0].number]
    before = max(waits, key=lambda s: s.number, default=None)
    if before is None:
        return []
    empty = before.site.about
    return [s.end for s in spans if s.site.kind == "arrive" and (s.site.about, s.slot) == (empty, slot)]
