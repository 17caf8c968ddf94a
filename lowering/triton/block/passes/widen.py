"""Gives tiles with a side that is no power of two the next power of two, where it is a whole side of their arrays.

Threads hold tiles whose sides are powers of two. A tile that covers a dimension of 96 elements may as well have 128:
what hangs over the array reads as zeros and is not written. After arithmetic the lanes that were added may hold
anything: no maximum may go over them, and sums only where they are still zeros.
"""

from __future__ import annotations

import collections
import dataclasses
import math

from jtile.ir import (
    At,
    Bitcast,
    Block,
    Broadcast,
    Cast,
    Dim,
    Dot,
    For,
    Full,
    If,
    Iota,
    Kernel,
    Load,
    Map,
    Op,
    Reduce,
    Reshape,
    Select,
    Span,
    Store,
    Take,
    Tile,
    TileType,
    Transpose,
    Type,
    Value,
    dim_value,
)
from jtile.ir.builder import build
from jtile.passes.fold import number
from jtile.passes.pipeline import Pass
from jtile.passes.rewrite import Copier

from .plan import Refusal, refuse

ROWS = 192  # tiles with a multiple of these rows are shared by three consumers: their rows stay
Axes = frozenset[int]


def run(kernel: Kernel) -> Kernel:
    """The kernel with wide tiles, or, where it would compute something else, as it is."""
    dots = [op for op in kernel.body.walk() if isinstance(op, Dot)]
    kept = {n for d in dots if (n := d.result.shape[-2]) % ROWS == 0}
    tiles = [r.type for op in kernel.body.walk() for r in op.results if isinstance(r.type, TileType)]
    if all(_side(n, kept) == n for t in tiles for n in t.shape):
        return kernel
    try:
        return _Wide(kept).whole(kernel)
    except Refusal:
        return kernel


def _side(n: int, kept: set[int]) -> int:
    return n if n in kept or n == 0 else 1 << (n - 1).bit_length()


class _Wide(Copier):
    """Copies a kernel. `zeros`: the axes of each new tile along which the lanes that were added are zeros."""

    def __init__(self, kept: set[int]):
        super().__init__()
        self.kept = kept
        self.zeros: dict[Value, Axes] = collections.defaultdict(frozenset)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(_side(n, self.kept) for n in shape)

    def type(self, t: Type) -> Type:
        return TileType(self.shape(t.shape), t.dtype) if isinstance(t, TileType) else t

    def grown(self, v: Value) -> Axes:
        """The axes of an old tile that are longer in the new one."""
        t = v.type
        return frozenset(k for k, n in enumerate(t.shape) if _side(n, self.kept) != n) if _is_tile(v) else frozenset()

    def block(self, old: Block) -> Block:
        with self.b.region([self.type(p.type) for p in old.params], tuple(p.name for p in old.params)) as new:
            self.replace(old.params, new.params)
            for op in old.ops:
                self.op(op)
            new.yields = tuple(map(self.look, old.yields))
        return new

    def put(self, op: Op) -> Op:
        self.b.loc = op.loc
        new = op.clone(self.look, self.block)
        zeros = frozenset()
        if any(map(self.grown, [*op.operands(), *op.results])):
            zeros = self.widen(op, new)
        build(new, op.loc, tuple(r.name for r in op.results))
        self.b.block.ops.append(new)
        self.zeros.update(dict.fromkeys(new.results, zeros))
        self.replace(op.results, new.results)
        return new

    def widen(self, old: Op, new: Op) -> Axes:
        """Give a copy its wide shape; returns the axes along which its new lanes are zeros.

        Raises:
          Refusal: lanes that were added would be seen.
        """
        match new:
            case Load() if new.mask is None and new.pad == 0 and math.copysign(1, new.pad) > 0:
                self.access(old, new)
                return self.grown(old.result)
            case Store():
                self.access(old, new)
            case Dot():
                self.product(old)
            case Full() | Iota():
                new.shape = self.shape(new.shape)
                return self.grown(old.result) if isinstance(new, Full) and new.value == 0 else frozenset()
            case Broadcast():
                new.shape = self.shape(new.shape)
            case Reshape() if _long(old.x.shape) == _long(new.shape):  # type: ignore[attr-defined]
                new.shape = self.shape(new.shape)
            case Transpose(x, perm):
                return frozenset(k for k, p in enumerate(perm) if p in self.zeros[x])
            case Reduce(x, fn, axes):
                seen = self.grown(old.x) & set(axes)  # type: ignore[attr-defined]
                if seen and (fn != "sum" or not seen <= self.zeros[x]):
                    refuse("a reduction would see lanes that were added", old)
            case Map(fn, args):
                return self.arithmetic(fn, args)
            case Cast(x):
                return self.zeros[x]
            case Select() | Bitcast() | For() | If():
                pass
            case _:
                refuse(f"{old.mnemonic} would see lanes that were added", old)
        return frozenset()

    def arithmetic(self, fn: str, args: tuple[Value, ...]) -> Axes:
        """The axes along which the new lanes of an elementwise result are zeros: scaled or added zeros stay zeros."""
        if fn == "mul" and any(_finite(x) for x in args):
            return frozenset().union(*(self.zeros[x] for x in args if not _finite(x)))
        if fn in ("add", "sub"):
            return frozenset.intersection(*(self.zeros[x] for x in args))
        return frozenset()

    def product(self, old: Op) -> None:
        assert isinstance(old, Dot)
        last = len(old.result.shape) - 1
        sums = [(old.a, last - old.trans_a), (old.b, last - 1 + old.trans_b)]
        if any(axis in self.grown(v) and axis not in self.zeros[self.look(v)] for v, axis in sums):
            refuse("a product would sum over lanes that were added", old)

    def access(self, old: Op, new: Load | Store) -> None:
        """Widen a load or store: a box that covers its array along all axes that grow then hangs over the array."""
        assert isinstance(old, Load | Store)
        if any(isinstance(d, Take) for d in old.index):
            refuse("a gather would see lanes that were added", old)
        grown = self.grown(old.result if isinstance(old, Load) else old.value)
        axis, index = 0, list(new.index)
        for k, d in enumerate(old.index):
            if axis in grown and not isinstance(d, At):
                index[k] = _whole(old, new.index[k], k, _side(_size(d), self.kept))
            axis += not isinstance(d, At)
        new.index, new.checked = tuple(index), True


def _is_tile(v: Value) -> bool:
    return isinstance(v.type, TileType)


def _long(shape: tuple[int, ...]) -> list[int]:
    """The sides of more than one element."""
    return [n for n in shape if n != 1]


def _finite(v: Value) -> bool:
    """Whether all elements are one known, finite number."""
    while isinstance(v.op, Broadcast | Reshape | Cast):
        v = v.op.x
    return isinstance(v.op, Full) and math.isfinite(v.op.value)


def _size(d: Dim) -> int:
    return d.size if isinstance(d, Tile | Span) else 0


def _whole(op: Load | Store, d: Dim, k: int, side: int) -> Dim:
    """Dimension `k` of an access, which starts where the array does and reaches to its end, with a longer side."""
    length = op.ref.shape[k]
    covers = isinstance(length, int) and length <= _size(d) and number(dim_value(d)) == 0
    if covers and (isinstance(d, Tile) or (isinstance(d, Span) and d.stride == 1)):
        return dataclasses.replace(d, size=side)
    refuse("a side that is no power of two is a part of its array", op)


widen = Pass("widen", "Sides of tiles that are whole sides of arrays are powers of two, where nobody sees it.", run)
