"""Sums of padded tiles that nowhere meet are tiles put together.

The derivative of `a, b = x[:, :n], x[:, n:]` is the sum of two tiles, each padded with zeros where the other one
stands: a concatenation. That of `x[:, ::2], x[:, 1::2]` puts the elements of two tiles in turns. Each pad would fill
memory with zeros, and each sum read both.
"""

from __future__ import annotations

import dataclasses

from jtile.ir import Concat, Full, Kernel, Map, Op, Pad, Reshape, Value
from jtile.ir.types import DTYPES

from . import dce
from .fold import number
from .rewrite import Rewriter, Rules

MOST = 32  # tiles that are put together


@dataclasses.dataclass(frozen=True)
class Patches:
    """Tiles that stand along an axis of `size` elements between zeros, each element `stride` behind the one before.

    Attributes:
      tiles: the first place of each, and the tile.
      summed: whether a zero was added to each of them, which makes 0.0 of -0.0.
    """

    axis: int
    size: int
    stride: int
    tiles: tuple[tuple[int, Value], ...]
    summed: bool = False

    def places(self) -> list[int]:
        rows = (range(at, at + self.stride * x.shape[self.axis], self.stride) for at, x in self.tiles)
        return [k for row in rows for k in row]

    def meets(self, other: Patches) -> bool:
        """Whether the tiles cannot be put together with those of another sum."""
        alike = (self.axis, self.stride) == (other.axis, other.stride) and len(self.tiles) + len(other.tiles) <= MOST
        return not alike or not set(self.places()).isdisjoint(other.places())


def patches(kernel: Kernel) -> Kernel:
    """The kernel, where tiles that are padded to different places and added up are put together."""
    pads = sum(isinstance(op, Pad) for op in kernel.body.walk())
    if pads < 2:
        return kernel
    rewriter = Rewriter(kernel, _rules())
    made = rewriter.run()
    return dce.run(made) if rewriter.changed else kernel


def _rules() -> Rules:
    rules = Rules()
    found: dict[Value, Patches] = {}

    @rules(Map)
    def _sum(op: Map, rw: Rewriter):
        if op.fn != "add":
            return None
        a, b = (found.get(x) or _padded(x.op) for x in op.args)
        if a is None or b is None or a.meets(b) or any(rw.uses(x) != 1 for x in op.args):
            return None
        tiles = tuple((at, x if p.summed else _with_zero(x, rw)) for p in (a, b) for at, x in p.tiles)
        both = dataclasses.replace(a, tiles=tiles, summed=True)
        out = _together(both, op.result, rw)
        if out is not None:
            found[out] = both
        return out

    return rules


def _padded(op: Op | None) -> Patches | None:
    """The one tile that a pad puts between zeros."""
    if not isinstance(op, Pad) or number(op.value) != 0:
        return None
    axes = [k for k, (n, m) in enumerate(zip(op.x.shape, op.result.shape, strict=True)) if n != m]
    if len(axes) != 1 or op.x.shape[axes[0]] == 0:
        return None
    axis = axes[0]
    stride = op.interior[axis] + 1 if op.x.shape[axis] > 1 else 1
    return Patches(axis, op.result.shape[axis], stride, ((op.low[axis], op.x),))


def _with_zero(x: Value, rw: Rewriter) -> Value:
    if DTYPES[x.dtype].kind != "f":
        return x
    return rw.new(Map("add", (x, rw.new(Full(0.0, x.shape, x.dtype)))))


def _together(p: Patches, like: Value, rw: Rewriter) -> Value | None:
    """The tiles and the zeros between them; None: elements of other tiles in turns, but not each once a round."""
    zeros = lambda shape: rw.new(Full(0.0 if DTYPES[like.dtype].kind == "f" else 0, tuple(shape), like.dtype))
    before, behind = like.shape[: p.axis], like.shape[p.axis + 1 :]
    if p.stride == 1:
        parts, at = [], 0
        for first, x in sorted(p.tiles, key=lambda tile: tile[0]):
            if first > at:
                parts.append(zeros((*before, first - at, *behind)))
            parts.append(x)
            at = first + x.shape[p.axis]
        if at < p.size:
            parts.append(zeros((*before, p.size - at, *behind)))
        return rw.new(Concat(tuple(parts), p.axis))
    rounds, rest = divmod(p.size, p.stride)
    turns = {at: x for at, x in p.tiles if at < p.stride and x.shape[p.axis] == rounds}
    if rest or len(turns) < len(p.tiles):
        return None
    shape = (*before, rounds, 1, *behind)
    parts = [rw.new(Reshape(turns[k], shape)) if k in turns else zeros(shape) for k in range(p.stride)]
    return rw.new(Reshape(rw.new(Concat(tuple(parts), p.axis + 1)), like.shape))
