"""Part of the columns of a tile, computed by itself: what is made element by element is made for that part alone, so
that a role holds few of its elements at a time."""

from __future__ import annotations

from collections.abc import Callable

from jtile.ir import (
    DTYPES,
    At,
    Broadcast,
    Builder,
    Cast,
    Dim,
    Full,
    Index,
    Iota,
    Load,
    Map,
    Reshape,
    Select,
    Slice,
    Span,
    Take,
    Tile,
    Value,
)


class Narrow:
    """Part number `k` of `n` equal parts along an axis of tiles; `read_only`: whether nobody writes what a load reads,
    so that it may be done again."""

    def __init__(self, b: Builder, k: int, n: int, read_only: Callable[[Load], bool]):
        self.b, self.k, self.n, self.read_only = b, k, n, read_only
        self.made: dict[tuple[Value, int], Value] = {}

    def __call__(self, v: Value, axis: int) -> Value:
        if (v, axis) not in self.made:
            self.made[v, axis] = self._part(v, axis) or self._cut(v, axis)
        return self.made[v, axis]

    def load(self, v: Value, axis: int) -> None:
        """Start the loads that the part is made of, so that they are under way while something else is computed."""
        match v.op:
            case Map(_, args) if all(x.shape == v.shape for x in args):
                for x in args:
                    self.load(x, axis)
            case Cast(x):
                self.load(x, axis)
            case Select(cond, x, y):
                for z in (cond, x, y):
                    if z.shape:
                        self.load(z, axis)
            case Broadcast(x, _, dims) if axis in dims and x.shape[dims.index(axis)] > 1:
                self.load(x, dims.index(axis))
            case Reshape(x) if (inner := _same_axis(x.shape, v.shape, axis)) is not None:
                self.load(x, inner)
            case Load():
                self(v, axis)

    def _part(self, v: Value, axis: int) -> Value | None:
        """The part of a value as computed from parts of its operands; None where it cannot be computed so."""
        b, op = self.b, v.op
        shape = tuple(m // self.n if a == axis else m for a, m in enumerate(v.shape))
        match op:
            case Map(fn, args) if all(x.shape == v.shape for x in args):
                return b.value(Map(fn, tuple(self(x, axis) for x in args)))
            case Cast(x, dtype):
                return b.value(Cast(self(x, axis), dtype))
            case Select(cond, x, y):
                return b.value(Select(self(cond, axis) if cond.shape else cond, self(x, axis), self(y, axis)))
            case Full(value, _, dtype):
                return b.value(Full(value, shape, dtype))
            case Iota(_, along, dtype) if DTYPES[dtype].kind in "iu":  # to cut one up takes a compiler long
                numbers = b.value(Iota(shape, along, dtype))
                first = _wrapped(self.k * shape[along], dtype) if along == axis else 0
                return b.value(Map("add", (numbers, b.value(Full(first, shape, dtype))))) if first else numbers
            case Broadcast(x, _, dims):
                own = dims.index(axis) if axis in dims else None
                wide = own is not None and x.shape[own] > 1
                return b.value(Broadcast(self(x, own) if wide else x, shape, dims))
            case Reshape(x):
                inner = _same_axis(x.shape, v.shape, axis)
                return None if inner is None else b.value(Reshape(self(x, inner), shape))
            case Load() if op.mask is None and self.read_only(op) and not any(isinstance(d, Take) for d in op.index):
                place = [i for i, d in enumerate(op.index) if not isinstance(d, At)][axis]
                index = tuple(part(b, d, self.k, self.n) if i == place else d for i, d in enumerate(op.index))
                return b.value(Load(op.ref, index, None, op.pad, op.checked))
        return None

    def _cut(self, v: Value, axis: int) -> Value:
        size = v.shape[axis] // self.n
        starts = tuple(self.k * size if a == axis else 0 for a in range(len(v.shape)))
        stops = tuple((self.k + 1) * size if a == axis else m for a, m in enumerate(v.shape))
        return self.b.value(Slice(v, starts, stops, (1,) * len(v.shape)))


def _same_axis(old: tuple[int, ...], new: tuple[int, ...], axis: int) -> int | None:
    """The axis of `old` that axis `axis` of `new` is, where a reshape adds and drops axes of length 1 only."""
    many = [[a for a, n in enumerate(s) if n != 1] for s in (old, new)]
    if [old[a] for a in many[0]] != [new[a] for a in many[1]] or axis not in many[1]:
        return None
    return many[0][many[1].index(axis)]


def part(b: Builder, d: Dim, k: int, n: int) -> Dim:
    """Part `k` of `n` of the elements of an index dimension."""
    match d:
        case Tile(v, size, step) if size == step:
            at = v if n == 1 else b.map("add", b.map("mul", v, b.index(n)), b.index(k))
            return Tile(at, size // n, size // n)
        case Tile(v, size, step):
            return Span(b.map("add", b.map("mul", v, b.index(step)), b.index(k * (size // n))), size // n)
        case Span(v, size, stride):
            return Span(b.map("add", v, b.index(k * (size // n) * stride)), size // n, stride)
    raise TypeError(f"an index dimension of {d} has no parts")


def narrowed(b: Builder, index: Index, k: int, n: int) -> Index:
    """An index whose last dimension is part `k` of `n`."""
    return (*index[:-1], part(b, index[-1], k, n))


def _wrapped(n: int, dtype: str) -> int:
    """A number as integers of a dtype have it, whose range it may leave."""
    info = DTYPES[dtype]
    n %= 1 << info.bits
    return n - (1 << info.bits) if info.kind == "i" and n >> (info.bits - 1) else n
