"""The machine that HIVM text runs on, as far as order goes: cores with pipes that take their work in sequence, flags
between the pipes of a core, and flags between cores.

The scalar pipe S reads the text and hands each op to its pipe. A pipe begins an op when the one before it has begun,
and may still be busy with earlier ones; what is known to be done are counts: `_known[p][q]` ops of pipe q before the
next op of pipe p begins. Knowledge comes with flags, barriers, and from S with every op that it hands on.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from .effects import PIPES
from .memory import Memory
from .read import Op
from .regions import Region

ORDERED = ("S", "M", "MTE1")  # pipes whose ops never overlap earlier ones of the same pipe, or write nothing


@dataclasses.dataclass(frozen=True)
class Event:
    """What the scalar pipe hands to a pipe.

    Attributes:
      kind: "op", "set", "wait", "barrier", "all" (a barrier of all pipes), "announce" and "await" (between cores).
      flag: (from pipe, to pipe, number) of a "set" or "wait"; the number of an "announce" or "await".
      accesses: for each access of an "op", in order: (region, whether it is written, or "temporary").
    """

    kind: str
    pipe: str
    op: Op
    flag: Any = None
    accesses: tuple[tuple[Region, bool | str], ...] = ()


class Core:
    """One core: `kind` is "aic" or "aiv"; `steps` yields its events in the sequence of the text."""

    def __init__(self, number: int, name: str, kind: str, steps: Iterator[Event]):
        self.number, self.name, self.kind, self.steps = number, name, kind, steps
        self.queues: dict[str, collections.deque] = {p: collections.deque() for p in PIPES}
        self.over = False

    def pipe(self, name: str) -> int:
        return self.number * len(PIPES) + PIPES.index(name)


class Machine:
    """Runs cores to their end, or until none of them can go on; `report` takes (kind, message)."""

    def __init__(self, cores: list[Core], report: Callable[[str, str], None]):
        self.cores, self._report = cores, report
        count = len(cores) * len(PIPES)
        self._known = [[0] * count for _ in range(count)]
        self._begun = [0] * count
        self._flags: dict[Any, collections.deque] = collections.defaultdict(collections.deque)
        self._memory = Memory(report, self._name)

    def _name(self, pipe: int) -> str:
        core = self.cores[pipe // len(PIPES)]
        name = f"PIPE_{PIPES[pipe % len(PIPES)]}"
        return f"{name} of {core.name}" if len(self.cores) > 1 else name

    def run(self) -> None:
        live = list(self.cores)
        while live:
            moved = False
            for core in live:
                moved |= self._advance(core)
            live = [c for c in live if not (c.over and not any(c.queues.values()))]
            if live and not moved:
                self._stuck(live)
                return
        for (core, *flag), sets in self._flags.items():
            if sets and len(flag) == 3:
                op = sets[-1][1]
                self._report("flag", f"{op} sets a flag of {self.cores[core].name} that nobody waits for")

    def _advance(self, core: Core) -> bool:
        """Let one core go as far as it can; returns whether it went at all."""
        moved = self._drain(core)
        while not core.queues["S"] and not core.over:
            event = next(core.steps, None)
            if event is None:
                core.over = True
                break
            handed = list(self._known[core.pipe("S")])
            handed[core.pipe("S")] = 0  # what S itself stores is there when a flag from S says so
            core.queues[event.pipe].append((event, handed))
            moved = True
            self._drain(core)
        return moved

    def _drain(self, core: Core) -> bool:
        moved, again = False, True
        while again:
            again = False
            for name, queue in core.queues.items():
                while queue and self._ready(core, queue[0][0]):
                    event, known = queue.popleft()
                    self._do(core, core.pipe(name), event, known)
                    moved = again = True
        return moved

    def _ready(self, core: Core, event: Event) -> bool:
        if event.kind in ("wait", "await"):
            return bool(self._flags[self._key(core, event)])
        return event.kind != "all" or not any(q for p, q in core.queues.items() if p != event.pipe)

    def _key(self, core: Core, event: Event) -> Any:
        return (core.number, "await", event.flag) if event.kind == "await" else (core.number, *event.flag)

    def _do(self, core: Core, pipe: int, event: Event, handed: list[int]) -> None:
        known = self._known[pipe] = list(map(max, self._known[pipe], handed))
        getattr(self, f"_{event.kind}")(core, pipe, event, known)

    def _op(self, core: Core, pipe: int, event: Event, known: list[int]) -> None:
        self._begun[pipe] += 1
        before = list(known)
        if PIPES[pipe % len(PIPES)] in ORDERED:
            before[pipe] = known[pipe] = self._begun[pipe]
        for region, write in event.accesses:
            self._memory.access(core.name, region, write, pipe, self._begun[pipe], before, event.op)

    def _set(self, core: Core, pipe: int, event: Event, known: list[int]) -> None:
        sets = self._flags[self._key(core, event)]
        if sets:
            self._report("flag", f"{event.op} sets a flag that {sets[0][1]} has set and nobody has waited for: "
                                 "a second set is lost")  # fmt: skip
            return
        sets.append((self._told(pipe, known), event.op))

    def _told(self, pipe: int, known: list[int]) -> list[int]:
        told = list(known)
        told[pipe] = self._begun[pipe]
        return told

    def _wait(self, core: Core, pipe: int, event: Event, known: list[int]) -> None:
        told, _ = self._flags[self._key(core, event)].popleft()
        known[:] = map(max, known, told)

    def _await(self, core: Core, pipe: int, event: Event, known: list[int]) -> None:
        self._wait(core, pipe, event, known)

    def _barrier(self, core: Core, pipe: int, event: Event, known: list[int]) -> None:
        known[pipe] = self._begun[pipe]

    def _all(self, core: Core, pipe: int, event: Event, known: list[int]) -> None:
        for name in PIPES:
            other = core.pipe(name)
            known[:] = map(max, known, self._known[other])
            known[other] = self._begun[other]

    def _announce(self, core: Core, pipe: int, event: Event, known: list[int]) -> None:
        """A cube core tells all vector cores beside it; these tell it when all of them have."""
        told = self._told(pipe, known)
        if core.kind == "aic":
            for other in self.cores:
                if other.kind != "aic":
                    self._flags[(other.number, "await", event.flag)].append((told, event.op))
            return
        vectors = [c for c in self.cores if c.kind != "aic"]
        self._flags[(core.number, "said", event.flag, "")].append((told, event.op))
        said = [self._flags[(c.number, "said", event.flag, "")] for c in vectors]
        if all(said):
            firsts = [s.popleft()[0] for s in said]
            merged = [max(column) for column in zip(*firsts, strict=True)]
            for other in self.cores:
                if other.kind == "aic":
                    self._flags[(other.number, "await", event.flag)].append((merged, event.op))

    def _stuck(self, live: list[Core]) -> None:
        waits = [
            f"{q[0][0].op} on PIPE_{p} of {c.name}"
            for c in live
            for p, q in c.queues.items()
            if q and q[0][0].kind in ("wait", "await")
        ]
        self._report("deadlock", "no pipe can go on: " + "; ".join(waits) + ", for a flag that nobody sets")
