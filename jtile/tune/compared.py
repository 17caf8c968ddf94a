"""Two explanations side by side, and explanations as a picture."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jtile._errors import KernelValueError

if TYPE_CHECKING:
    from jtile.tune.roofline import Explanation, KernelCost

_COLOURS = {"memory": "#457b9d", "products": "#4c956c", "elements": "#f4a259", "time": "#1d3557"}
_WORDS = {"memory": "memory", "products": "products", "elements": "elements", "time": "time"}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The explanations of two variants of a function; prints as a table.

    Attributes:
      names: the names of the variants.
      first, second: the explanations of the variants.
    """

    names: tuple[str, str]
    first: Explanation
    second: Explanation

    @property
    def speed(self) -> float | None:
        """The time of the first over that of the second, above 1 where the second is faster; of the bounds where the
        times were not measured; None where neither is known."""
        totals = [_total(e.kernels, "time") or _total(e.kernels, "bound") for e in (self.first, self.second)]
        return totals[0] / totals[1] if totals[0] and totals[1] else None

    def __str__(self) -> str:
        rows = [("", *self.names, "ratio"), *self._rows()]
        widths = [max(len(row[k]) for row in rows) for k in range(4)]
        lines = ("  ".join([r[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(r[1:], widths[1:]))]) for r in rows)
        return "\n".join([f"on {self.first.device}", *(line.rstrip() for line in lines), *self._sentences()])

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Draw the bounds and times of both; see `Explanation.picture`."""
        draw(dict(zip(self.names, (self.first, self.second), strict=True)), path)

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        for a, b in self._pairs():
            name = a.name if a and b and a.name == b.name else " / ".join(k.name if k else "-" for k in (a, b))
            grids = [" x ".join(map(str, k.grid)) if k else "-" for k in (a, b)]
            yield name, *(f"{k.calls} calls" if k else "-" for k in (a, b)), ""
            yield "  programs", *grids, ""
            for label, read, unit in _NUMBERS:
                values = [read(k) if k else None for k in (a, b)]
                if any(values):
                    yield f"  {label}", *(_shown(v, unit) for v in values), _ratio(*values)
            yield "  limited by", *(k.limit if k else "-" for k in (a, b)), ""

    def _pairs(self) -> list[tuple[KernelCost | None, KernelCost | None]]:
        """Pairs of kernels to compare: those of one name together, the others in their order."""
        left, right = list(self.first.kernels), list(self.second.kernels)
        out: list[tuple[KernelCost | None, KernelCost | None]] = []
        for one in [*left]:
            same = next((k for k in right if k.name == one.name), None)
            if same is not None:
                out.append((one, same))
                left.remove(one)
                right.remove(same)
        for k in range(max(len(left), len(right))):
            out.append((left[k] if k < len(left) else None, right[k] if k < len(right) else None))
        return out

    def _sentences(self) -> list[str]:
        out = []
        if self.speed is not None:
            measured = all(k.time_us for e in (self.first, self.second) for k in e.kernels)
            which = "measured" if measured else "by their bounds, nothing was measured"
            better, factor = (self.names[1], self.speed) if self.speed >= 1 else (self.names[0], 1 / self.speed)
            out.append(f"{better} is {factor:.2f} times as fast ({which})" if factor > 1.005 else f"alike ({which})")
        advice = [(name, k.name, text) for name, e in zip(self.names, (self.first, self.second)) for k in e.kernels
                  for text in k.advice]  # fmt: skip
        return out + [f"{name}, {kernel}: {text}" for name, kernel, text in advice]


_NUMBERS: Sequence[tuple[str, Any, str]] = (
    ("bytes", lambda k: k.work.bytes, ""),
    ("traffic", lambda k: k.work.traffic, ""),
    ("operations", lambda k: k.work.flops or k.work.elements, ""),
    ("bound", lambda k: k.bound_us, "us"),
    ("time", lambda k: k.time_us, "us"),
    ("registers", lambda k: max((r.get("registers", 0) for r in k.resources), default=0), ""),
    ("bytes spilled", lambda k: max((r.get("spills", 0) for r in k.resources), default=0), ""),
    ("shared memory", lambda k: max((r.get("shared", 0) for r in k.resources), default=0), ""),
    ("occupancy", lambda k: min((r.get("occupancy", 0) for r in k.resources), default=0), "%"),
)


def _shown(value: float | None, unit: str) -> str:
    if value is None or (not value and unit):
        return "-"
    if unit == "%":
        return f"{value:.0%}"
    return f"{value:,.1f} us" if unit else f"{value:,.0f}"


def _ratio(a: float | None, b: float | None) -> str:
    return f"{b / a:.2f}" if a and b else ""


def _total(kernels: Sequence[KernelCost], what: str) -> float:
    """Microseconds of all calls; 0 where a kernel has none."""
    times = [(k.time_us if what == "time" else k.bound_us) or 0.0 for k in kernels]
    return sum(t * k.calls for t, k in zip(times, kernels)) if all(times) else 0.0


def draw(found: Mapping[str, Explanation], path: str | os.PathLike[str]) -> None:
    """For each kernel of each explanation a bar for what memory, products and arithmetic take at least, and one for the
    time that was measured; the longest of the first three is the roofline."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as e:
        raise KernelValueError("a picture needs matplotlib: pip install matplotlib") from e
    groups = [(f"{name}\n{k.name}" if name else k.name, k) for name, e in found.items() for k in e.kernels]
    if not groups:
        raise KernelValueError("there is no kernel to draw")
    rows: list[tuple[str, str, float]] = []
    for label, k in groups:
        parts = {**k.limits, **({"time": k.time_us} if k.time_us else {})}
        rows += [(label if n == 0 else "", what, us) for n, (what, us) in enumerate(parts.items())] or [
            (label, "time", 0)
        ]
    figure = Figure(figsize=(9, 1.2 + 0.32 * len(rows)))
    axes = figure.add_subplot()
    for y, (_, what, us) in enumerate(rows):
        axes.barh(y, us, color=_COLOURS[what], height=0.8)
        axes.text(us, y, f" {us:,.1f}", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [label for label, *_ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("microseconds of one call")
    axes.set_title(f"on {next(iter(found.values())).device}: what each part takes at least, and the time", loc="left")
    used = dict.fromkeys(what for _, what, _ in rows)
    axes.legend(handles=[Patch(color=_COLOURS[w], label=_WORDS[w]) for w in used], fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    ending, known = Path(path).suffix[1:].lower(), figure.canvas.get_supported_filetypes()
    if ending not in known:
        raise KernelValueError(f"a picture is written as one of {', '.join(sorted(known))}, got {os.fspath(path)!r}")
    figure.savefig(path)
