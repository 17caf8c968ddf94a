"""Layouts in which triton 3.6 to 3.8 fold the wrong threads.

Their `tt.reduce` exchanges values between lanes whose numbers differ in neighbouring bits, beginning with the first one
that moves along the axis. After a reshape the lanes of an axis may be the bits 0, 1 and 4 of a lane's number: the code
then folds lanes 0, 1 and 2 and gives wrong numbers, without a word. What the compiler chose is read from its TTGIR.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_LINEAR = re.compile(r"^(#\w+) = #ttg\.linear<\{(.*)\}>", re.M)
_REDUCE = re.compile(r'"tt\.reduce"\([^)]*\) <\{axis = (\d+) : i32\}>.*?\n\s*\}\) : \(tensor<[^,]*, ([^()]*)', re.S)
_PLACE = re.compile(r"((?:#ttg\.slice<\{dim = \d+, parent = )*)(#\w+)")


class ScatteredLanesError(Exception):
    """A reduction of a module would fold the wrong threads."""


def check(ttgir: str) -> None:
    """Raises ScatteredLanesError where a reduction's lanes or warps along an axis are not neighbours."""
    layouts = {name: {d: _bases(body, d) for d in ("lane", "warp")} for name, body in _LINEAR.findall(ttgir)}
    for axis, kind in _REDUCE.findall(ttgir) if layouts else ():
        slices, name = _PLACE.match(kind).groups()  # type: ignore[union-attr]
        gone = [int(d) for d in re.findall(r"dim = (\d+)", slices)]
        if name in layouts and not all(in_order(b, gone) for b in layouts[name].values()):
            raise ScatteredLanesError(f"reduction along {axis} of {kind}")


def _bases(body: str, dim: str) -> list[list[int]]:
    """How far each bit of a lane's or a warp's number moves along each axis."""
    text = re.search(rf"{dim} = \[((?:\[[^\]]*\](?:, )?)*)\]", body)
    return [[int(x) for x in b.split(",")] for b in re.findall(r"\[([^\]]*)\]", text[1])] if text else []


def in_order(bases: Sequence[Sequence[int]], gone: Sequence[int] = ()) -> bool:
    """Whether each bit moves along one axis at most, and the bits of one axis stand together. The axes `gone`, which
    slices take away (the last one taken first), do not count."""
    seen: list[int] = []
    for base in bases:
        for dim in reversed(gone):
            base = [*base[:dim], *base[dim + 1 :]]
        moved = [k for k, x in enumerate(base) if x] or [-1]
        if len(moved) > 1 or (moved[0] in seen and seen[-1] != moved[0] and moved[0] >= 0):
            return False
        seen.append(moved[0])
    return True
