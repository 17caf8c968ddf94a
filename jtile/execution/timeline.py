"""What the cores of an execution graph do when: predicted by the model of time, or as a run wrote it down."""

from __future__ import annotations

import dataclasses
import json
import os
from html import escape
from pathlib import Path
from typing import Any

from jtile import _cache
from jtile._errors import KernelValueError

from .tasks import TaskGraph

_WIDTH, _LANE, _LEFT = 1200, 36, 70  # pixels: width of a picture, height of a lane, room for labels at the left
_NAMED = 16  # cores whose shares a text names one by one, at most
_COLOURS = (
    "#4c956c",
    "#457b9d",
    "#f4a259",
    "#bc4b51",
    "#8e7dbe",
    "#81523f",
    "#1d3557",
    "#e5989b",
    "#9a9a9a",
    "#f2cc8f",
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A core runs a band from `start` to `end`, in nanoseconds from the start of the graph."""

    band: int
    core: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class GraphTimeline:
    """The bands of a graph in time.

    Attributes:
      measured: whether it is of a run; otherwise it is predicted.
    """

    graph: TaskGraph
    entries: tuple[Entry, ...]
    measured: bool

    @property
    def length(self) -> float:
        """Nanoseconds from the start of the graph to the end of its last band."""
        return max((e.end for e in self.entries), default=0.0)

    def busy(self) -> dict[int, float]:
        """For each core the share of the time in which it runs a band."""
        cores = dict.fromkeys(sorted({*range(self.graph.cores), *(e.core for e in self.entries)}), 0.0)
        for e in self.entries:
            cores[e.core] += e.end - e.start
        return {c: t / self.length if self.length else 0.0 for c, t in cores.items()}

    def __str__(self) -> str:
        kind = "measured" if self.measured else "predicted"
        busy = self.busy()
        if len(busy) > _NAMED:
            shares = f"{len(busy)} cores, {sum(busy.values()) / len(busy):.0%} on average"
        else:
            shares = ", ".join(f"core {c} {share:.0%}" for c, share in busy.items())
        return f"{kind}: {self.length / 1e3:.1f} us, busy: {shares}"

    def trace_events(self) -> list[dict[str, Any]]:
        """The bands in the Trace Event Format, which Perfetto and chrome://tracing read: a thread a core; times in
        microseconds."""
        kind = "measured" if self.measured else "predicted"
        out: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": f"graph, {kind}"}}]
        for core in self.busy():
            out.append({"ph": "M", "pid": 0, "tid": core, "name": "thread_name", "args": {"name": f"core {core}"}})
        for e in self.entries:
            band = self.graph.bands[e.band]
            args = {
                "band": e.band,
                "task": band.task,
                "programs": f"{band.begin}:{band.end}",
                "behind": list(band.needs),
            }
            place = {"ph": "X", "pid": 0, "tid": e.core, "ts": e.start / 1e3, "dur": (e.end - e.start) / 1e3}
            out.append({**place, "name": self.graph.tasks[band.task].kernel.name, "cat": "band", "args": args})
        return out

    def svg(self) -> str:
        """A picture: a row a core, a bar a band, a colour for the tasks of one kernel."""
        names = list(dict.fromkeys(task.kernel.name for task in self.graph.tasks))
        colours = {name: _COLOURS[k % len(_COLOURS)] for k, name in enumerate(names)}
        cores = list(self.busy())
        scale = (_WIDTH - _LEFT - 10) / max(self.length, 1.0)
        bottom = 30 + _LANE * len(cores)
        height = bottom + 20 + 18 * len(names)
        out = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" '
            'font-size="12">',
            f'<text x="{_LEFT}" y="18">{escape(str(self))}</text>',
        ]
        for row, core in enumerate(cores):
            out.append(f'<text x="4" y="{30 + _LANE * row + 20}">core {core}</text>')
        for e in self.entries:
            band = self.graph.bands[e.band]
            x, y = _LEFT + e.start * scale, 30 + _LANE * cores.index(e.core)
            width = max((e.end - e.start) * scale, 0.5)
            colour = colours[self.graph.tasks[band.task].kernel.name]
            title = f"{self.graph.name(e.band)}: {e.start / 1e3:.2f} to {e.end / 1e3:.2f} us"
            out.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_LANE - 6}" fill="{colour}">'
                f"<title>{escape(title)}</title></rect>"
            )
        for k, (name, colour) in enumerate(colours.items()):
            y = bottom + 20 + 18 * k
            out.append(f'<rect x="{_LEFT}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
            out.append(f'<text x="{_LEFT + 18}" y="{y}">{escape(name)}</text>')
        return "\n".join([*out, "</svg>"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as a picture (a name that ends with `.svg`), or as JSON for https://ui.perfetto.dev (`.json`).

        Raises:
          KernelValueError: the name has another ending.
        """
        ending = Path(path).suffix.lower()
        if ending == ".svg":
            text = self.svg()
        elif ending == ".json":
            text = json.dumps({"traceEvents": self.trace_events(), "displayTimeUnit": "ns"})
        else:
            raise KernelValueError(f"a timeline is saved as .svg or .json, got {os.fspath(path)!r}")
        _cache.write(Path(path), text.encode(), _cache.PUBLIC)
