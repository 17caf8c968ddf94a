"""A timeline as a picture: a row a role, one for products under way, one a slot of a ring."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jtile._errors import KernelValueError
from jtile.tune.timeline import COPIED, READ, Span, Timeline, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORKS, PRODUCTS = "#4c956c", "#1d3557"
_SLOTS = {COPIED: "#a8dadc", READ: "#457b9d"}
_WAITS = ("#d9d9d9", "#f4a259", "#bc4b51", "#8e7dbe", "#f2cc8f", "#81523f", "#e5989b", "#9a9a9a")
_MOMENTS = {"product": ("|", "black"), "load": ("v", "#1d3557"), "store": ("^", "#bc4b51")}
Part = tuple[float, float]  # the start of a bar, and its width


def draw(line: Timeline, path: str | os.PathLike[str], program: int | None, window: tuple[float, float] | None) -> None:
    """Draw a timeline into a file; see `Timeline.picture`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise KernelValueError("a picture needs matplotlib: pip install matplotlib") from e
    if not line.programs or (program is not None and program not in line.programs):
        raise KernelValueError(f"the timeline of {line.kernel} has no program {program}; it has {list(line.programs)}")
    chosen = line.programs[0] if program is None else program
    spans = [s for s in line.spans if s.program == chosen]
    zero, length = min(s.start for s in spans), line.length(chosen)
    low, high = window or (0, length)
    if not 0 <= low < high:
        raise KernelValueError(f"a window is (start, end) with 0 <= start < end, got {window}")
    rows = _rows(line, spans, chosen, zero)
    figure = Figure(figsize=(15, 1.6 + sum(height for _, height, _, _ in rows) * 0.55))
    axes: Axes = figure.add_subplot()
    ticks, y = [], 0.0
    for _, height, bars, moments in rows:
        ticks.append(y + height / 2)
        for colour, parts in bars.items():
            axes.broken_barh(_inside(parts, low, high), (y + 0.1, height - 0.2), facecolors=colour)
        for (marker, colour), at in moments.items():
            shown = [t for t in at if low <= t <= high]
            axes.plot(shown, [y + height / 2] * len(shown), marker, color=colour, markersize=5)
        y += height
    axes.set_yticks(ticks, [name for name, *_ in rows])
    axes.set_ylim(y, 0)
    axes.set_xlim(low, min(high, length))
    axes.set_xlabel("steps of the interpreter" if line.unit == "steps" else line.unit)
    share = sum(b - a for a, b in line.products(chosen)) / length if length else 0.0
    axes.set_title(f"{line.kernel}, program {chosen}: {length} {line.unit}, products under way {share:.0%}", loc="left")
    _legend(axes, spans)
    figure.tight_layout()
    ending, known = Path(path).suffix[1:].lower(), figure.canvas.get_supported_filetypes()
    if ending and ending not in known:
        raise KernelValueError(f"a picture is written as one of {', '.join(sorted(known))}, got {os.fspath(path)!r}")
    figure.savefig(path)


Row = tuple[str, float, dict[str, list[Part]], dict[tuple[str, str], list[float]]]  # label, height, bars, moments


def _rows(line: Timeline, spans: Sequence[Span], program: int, zero: int) -> list[Row]:
    bar = lambda a, b: (a - zero, b - a)
    colours = _wait_colours(spans)
    out: list[Row] = []
    for role, name in sorted({(s.site.role, s.site.name) for s in spans}):
        own = [s for s in spans if s.site.role == role]
        bars: dict[str, list[Part]] = {WORKS: [bar(s.start, s.end) for s in own if s.site.kind == "role"]}
        for s in own:
            if title(s.site) in colours:
                bars.setdefault(colours[title(s.site)], []).append(bar(s.start, s.end))
        moments = {look: [s.start - zero for s in own if s.site.kind == kind] for kind, look in _MOMENTS.items()}
        whole = sum(w for _, w in bars[WORKS]) or 1
        waits = sum(s.end - s.start for s in own if s.site.kind.startswith("wait")) / whole
        out.append((f"{name}\nwaits {waits:.0%}", 1.0, bars, moments))
    products = [bar(a, b) for a, b in line.products(program)]
    if products:
        out.append(("products under way", 0.7, {PRODUCTS: products}, {}))
    stages = line.stages(program)
    for ring in sorted({(x.barrier, x.slot) for x in stages}):
        own = [x for x in stages if (x.barrier, x.slot) == ring]
        bars = {_SLOTS[COPIED]: [bar(x.asked, x.read) for x in own], _SLOTS[READ]: [bar(x.read, x.freed) for x in own]}
        out.append((f"{ring[0]}[{ring[1]}]", 0.5, bars, {}))
    return out


def _wait_colours(spans: Sequence[Span]) -> dict[str, str]:
    """A colour for each thing that is waited for."""
    names = dict.fromkeys(title(s.site) for s in spans if s.site.kind.startswith("wait"))
    return dict(zip(names, itertools.cycle(_WAITS)))


def _inside(parts: Sequence[Part], low: float, high: float) -> list[Part]:
    return [p for p in parts if p[0] <= high and p[0] + p[1] >= low]


def _legend(axes: Any, spans: Sequence[Span]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    bars = {"works": WORKS, **_wait_colours(spans)}
    if any(s.site.kind == "product" for s in spans):
        bars["products under way"] = PRODUCTS
    if any(s.site.kind == "expect" for s in spans):
        bars |= {f"slot {what}": colour for what, colour in _SLOTS.items()}
    handles: list[Any] = [Patch(color=colour, label=name) for name, colour in bars.items()]
    for kind, (marker, colour) in _MOMENTS.items():
        if any(s.site.kind == kind for s in spans):
            handles.append(Line2D([], [], linestyle="", marker=marker, color=colour, label=f"starts a {kind}"))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.005, 1), fontsize=8, frameon=False)
