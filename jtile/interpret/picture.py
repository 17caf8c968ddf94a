"""A picture of an access to an array that went wrong: which of its elements, and what was wrong with them."""

from __future__ import annotations

import dataclasses
import html
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from jtile.ir import index_shape

from .memory import CONFLICTS, NOBODY, Buffer, Lanes, coordinates, index_values

if TYPE_CHECKING:
    from .machine import Machine

ROWS, COLUMNS = 24, 64  # cells of a picture at most
NEAR = 16  # elements that a picture shows outside of an array at most
CELL = 14  # pixels of the side of a cell
OUTSIDE, INSIDE, OTHERS, NAMED, WRONG = range(5)
_SIGNS = " .o#X"
_COLOURS = ("none", "#e9ecef", "#8ecae6", "#95d5b2", "#e63946")
Points = np.ndarray  # element indices along the axes that are drawn [n, 2]


@dataclasses.dataclass(frozen=True, eq=False)
class AccessPicture:
    """The elements that an access names; `str` of it is a drawing for a terminal, and a notebook shows `svg()`.

    Attributes:
      title: what was accessed, and by which program.
      wrong: what is wrong with the elements drawn as `X`.
      shape: the shape of the array along the axes that are drawn, rows and columns.
      axes: those axes of the array; the others are at the numbers that `title` gives.
      elements: what the access names, and `faults` those of them that are wrong: indices along `axes` [n, 2].
      others: elements of the program with which it races, and `other` the name of that.
    """

    title: str
    wrong: str
    shape: tuple[int, int]
    axes: tuple[int, ...]
    elements: Points
    faults: Points
    others: Points
    other: str = ""

    def __str__(self) -> str:
        rows, columns, cells = self._cells()
        last = columns.start + len(columns) * columns.step
        width = max(len(str(rows[-1])), 1)
        head = [" "] * (len(columns) + len(str(last)))
        for n in (columns.start, 0, self.shape[1]):  # the end is written last, over others: accesses mostly run over it
            if columns.start <= n <= last:
                at = (n - columns.start) // columns.step
                head[at : at + len(str(n))] = str(n)
        lines = [self.title, f"{'':{width}}  {''.join(head)}".rstrip()]
        lines += [f"{r:{width}}  {''.join(_SIGNS[c] for c in line)}".rstrip() for r, line in zip(rows, cells)]
        return "\n".join([*lines, *self._legend(rows.step, columns.step)])

    def _legend(self, height: int, width: int) -> list[str]:
        out = [". the array", "# what the access names", f"X {self.wrong}"]
        out += [f"o {self.other}"] if self.other else []
        out += [f"a character is {height} x {width} elements"] if height * width > 1 else []
        return [", ".join(out)]

    def svg(self) -> str:
        """The drawing as SVG."""
        rows, columns, cells = self._cells()
        left, top = 12 + 8 * len(str(rows[-1])), 40
        keys = [("the array", INSIDE), ("what the access names", NAMED), (self.wrong, WRONG)]
        keys += [(self.other, OTHERS)] if self.other else []
        shown = max(len(columns) * CELL, 7 * max(len(self.title), *(4 + len(text) for text, _ in keys)))
        bottom = top + len(rows) * CELL + 18
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + shown + 8}" height="{bottom + 18 * len(keys)}" '
            'font-family="sans-serif" font-size="12" role="img">',
            f"<title>{html.escape(self.title)}</title>",
            f'<text x="4" y="16" font-weight="bold" fill="currentColor">{html.escape(self.title)}</text>',
        ]
        for r, line in enumerate(cells):
            at = 0
            for state, group in itertools.groupby(line):
                n = len(list(group))
                if state != OUTSIDE:
                    parts.append(
                        f'<rect x="{left + at * CELL}" y="{top + r * CELL}" width="{n * CELL}" height="{CELL - 1}" '
                        f'fill="{_COLOURS[state]}"/>'
                    )
                at += n
        label = lambda x, y, text: f'<text x="{x}" y="{y}" fill="currentColor">{html.escape(str(text))}</text>'
        every = max(1, -(-len(rows) // 12))
        parts += [label(4, top + r * CELL + 11, rows[r]) for r in range(0, len(rows), every)]
        parts += [label(left, top - 6, columns.start)] if columns.start != self.shape[1] else []
        end = (self.shape[1] - columns.start) // columns.step
        parts += [label(left + end * CELL, top - 6, self.shape[1])] if 0 < end <= len(columns) else []
        for k, (text, state) in enumerate(keys):
            y = bottom + 18 * k
            parts.append(f'<rect x="{left}" y="{y - 11}" width="12" height="12" fill="{_COLOURS[state]}"/>')
            parts.append(label(left + 18, y, text))
        return "".join([*parts, "</svg>"])

    def _repr_html_(self) -> str:
        return self.svg()

    def _cells(self) -> tuple[range, range, list[list[int]]]:
        """Where the cells of each row and column start, and what stands in them."""
        rows, columns = (self._cut(k, n) for k, n in enumerate((ROWS, COLUMNS)))
        cells = np.full((len(rows), len(columns)), OUTSIDE)
        along = zip((rows, columns), self.shape)
        inside = [(np.array(a) < n) & (np.array(a) + a.step > 0) for a, n in along]
        cells[np.ix_(*inside)] = INSIDE
        for points, state in ((self.others, OTHERS), (self.elements, NAMED), (self.faults, WRONG)):
            at = (points - [rows.start, columns.start]) // [rows.step, columns.step]
            at = at[((at >= 0) & (at < cells.shape)).all(1)]
            cells[at[:, 0], at[:, 1]] = state
        return rows, columns, cells.tolist()

    def _cut(self, axis: int, most: int) -> range:
        """The starts of the cells along an axis: the array, and what is outside of it but near."""
        n, along = self.shape[axis], self.elements[:, axis]
        low = max(min(0, along.min(initial=0)), -NEAR)
        high = min(max(n, along.max(initial=0) + 1), n + NEAR)
        step = max(-(-(high - low) // most), 1)
        return range(int(low), max(int(high), int(low) + 1), int(step))


def picture(m: Machine, op: Any, buffer: Buffer, lanes: Lanes | np.ndarray | None, kind: str = "") -> AccessPicture:
    """The picture of an access that goes out of bounds (`lanes` is its mask then, or None), or that races with another
    one or reads what nobody wrote (`lanes` is what it touches, and `kind` how)."""
    shape, rank = index_shape(op.index), len(buffer.shape)
    along = coordinates(op.index, index_values(op.index, m.env), buffer.shape)
    named = np.stack([np.broadcast_to(i, shape).reshape(-1) for i in along], 1) if rank else np.zeros((1, 0), np.int64)
    others, other = np.zeros((0, rank), np.int64), ""
    if isinstance(lanes, Lanes):
        named = named[lanes.active]
        bad, wrong, others, other = _clash(m, buffer, lanes.elements, kind)
    else:
        named = named if lanes is None else named[lanes.reshape(-1)]
        bad, wrong = ((named < 0) | (named >= np.array(buffer.shape, np.int64))).any(1), "outside of the array"
    place = named[np.argmax(bad)] if bad.any() else named[0]
    outside = [k for k in range(rank) if not 0 <= place[k] < buffer.shape[k]]
    axes = tuple(sorted([*outside, *(k for k in reversed(range(rank)) if k not in outside)][:2]))
    fixed = [k for k in range(rank) if k not in axes]
    drawn = lambda points: _two(points[(points[:, fixed] == place[fixed]).all(1)][:, axes])
    size = tuple(buffer.shape[k] for k in axes)
    at = ", ".join(":" if k in axes else str(place[k]) for k in range(rank))
    name, dtype = op.ref.name or "a Ref", op.ref.dtype
    title = f"{op.mnemonic}, {name}{f'[{at}]' if fixed else ''} of {dtype}{list(buffer.shape)}, program "
    title += m.kernel.program_text(m.pid) + (f", {m.where}" if m.where else "")
    return AccessPicture(
        title, wrong, ((1, 1) if not size else (1, *size) if len(size) == 1 else size), axes,
        drawn(named), drawn(named[bad]), drawn(others), other,
    )  # fmt: skip


def _two(points: Points) -> Points:
    """Elements of an array of fewer axes, drawn as one row."""
    return np.concatenate([np.zeros((len(points), 2 - points.shape[1]), np.int64), points], 1)


def _clash(m: Machine, buffer: Buffer, at: np.ndarray, kind: str) -> tuple[np.ndarray, str, Points, str]:
    """Which of the elements `at` cannot be accessed, why, and what of the array the other program has touched."""
    bad, theirs, other = np.zeros(at.shape, np.bool_), np.zeros(buffer.data.shape, np.bool_), ""
    for name in CONFLICTS[kind]:
        owners: np.ndarray | None = getattr(buffer, name)
        if owners is None:
            continue
        of = owners[at]
        clash = (of != NOBODY) & (of != m.linear) if m.order is None else m.order.unknown(of)
        bad |= clash
        if m.order is None and clash.any():
            theirs |= owners == of[np.argmax(clash)]
            other = other or m.other_text(int(of[np.argmax(clash)]))
    points = lambda flat: (
        np.stack(np.unravel_index(flat, buffer.shape), 1) if buffer.shape else np.zeros((1, 0), np.int64)
    )
    if bad.any():
        return bad, "where they race", points(np.flatnonzero(theirs)), other
    return ~buffer.defined[at], "nobody wrote it", points(np.flatnonzero(theirs)), ""
