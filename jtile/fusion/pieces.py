"""Concatenations of parts of one array, which GPUs read by one load whose numbers along one dimension differ by the
part: shifts around the end (`jnp.roll`), and borders that repeat an edge, wrap around or reflect.

Parts that are loaded each, with masks, and chosen between are as many loads and tests for every element of a tile. The
numbers are those of a vector along one side of it, or a scalar.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jtile as jt

from .layout import Layout
from .steps import MOVES, Step, Value
from .windows import Along, Needs, Place, Read, reads


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Elements along a dimension, which lie elsewhere for each part of a concatenation.

    Attributes:
      axis: the axis of the group along which the parts are put together.
      parts: where the elements of each part lie, the place in the part, and the part's length: the part is that one in
        which the place is 0 to its length - 1.
    """

    axis: int
    parts: tuple[tuple[Along | int, Along, int], ...]


def pieced(step: Step, place: Place, made: Mapping[Value, Step]) -> Read | None:
    """The one read that gives a concatenation at a place, on a GPU; None if its parts are not of one input array, or
    differ in more than one dimension."""
    if step.name != "concatenate" or "warps" not in jt.target().features:
        return None
    found = reads(step, place)
    ends = [_end(read, made) for read in found]
    if len(found) < 2 or None in ends:
        return None
    value, first = ends[0]  # type: ignore[misc]
    if any(end[0] != value for end in ends):  # type: ignore[index]
        return None
    places = [end[1] for end in ends]  # type: ignore[index]
    different = [k for k in range(len(first)) if any(p[k] != first[k] for p in places)]
    axis = found[0].inside[0][0].axis
    if len(different) != 1:
        return None
    (k,) = different
    if not all(isinstance(p[k], int) or (isinstance(p[k], Along) and p[k].axis == axis) for p in places):  # type: ignore[union-attr]
        return None
    parts = tuple((p[k], *read.inside[0]) for p, read in zip(places, found, strict=True))
    return Read(value, (*first[:k], Pieces(axis, parts), *first[k + 1 :]))  # type: ignore[arg-type]


def _end(read: Read, made: Mapping[Value, Step]) -> tuple[Value, Place] | None:
    """The input, and the place in it, that a read of parts and moves of it ends at; None if something is computed."""
    value, place = read.operand, read.place
    while isinstance(value, Value) and (step := made.get(value)) is not None:
        found = reads(step, place) if step.name in MOVES or step.name in ("slice", "rev") else []
        if len(found) != 1:
            return None
        value, place = found[0].operand, found[0].place
    return (value, place) if isinstance(value, Value) else None


class NeedsInPieces(Needs):
    """What a group needs where no window leaves its array. Along axes of which a program has one element (`alone`),
    concatenations of parts of one array have no ends: the number is a scalar.

    Attributes:
      apart: whether other concatenations of several parts do.
    """

    apart = False

    def __init__(self, steps: Sequence[Step], layout: Layout, roots: Sequence[Value], alone: frozenset[int]):
        self._alone = alone
        super().__init__(steps, layout, roots, within=True)

    def _reads_within(self, step: Step, place: Place) -> list[Read]:
        if step.name == "concatenate":
            whole = pieced(step, place, self.made) if self._alone else None
            if whole is not None and any(isinstance(at, Pieces) and at.axis in self._alone for at in whole.place):
                return [whole]
            self.apart = self.apart or len(reads(step, place)) > 1
        return super()._reads_within(step, place)
