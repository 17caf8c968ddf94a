"""Gathers and scatters whose indices grow evenly are loads and stores of a box.

`bias[h, i, j]` with `i = a + arange(m)[:, None]` and `j = b + arange(n)[None, :]` is `bias[h, ds(a, m), ds(b, n)]`:
vectors of elements that lie side by side, where a gather reads them one by one. `i = a + 2 * arange(m)` takes every
second element.
"""

from __future__ import annotations

import dataclasses
import itertools

from jtile.ir import (
    At,
    Broadcast,
    Full,
    Index,
    Iota,
    Kernel,
    Load,
    Map,
    Reshape,
    Span,
    Store,
    Take,
    Value,
    index_shape,
)
from jtile.ir.types import DTYPES

from .rewrite import Rewriter, Rules

MOST = 1 << 16  # elements from one to the next
FAR = 64  # elements from one to the next of a row, which a gather reads as well

rules = Rules()


def spans(kernel: Kernel) -> Kernel:
    """The kernel, where gathers and scatters of elements equally far apart are loads and stores of a box, if these all
    lie in their arrays or a mask says which of them are read or written."""
    ops = (op for op in kernel.body.walk() if isinstance(op, Load | Store))
    gathers = (op for op in ops if any(isinstance(d, Take) for d in op.index))
    return Rewriter(kernel, rules).run() if any(_is_told(op) for op in gathers) else kernel


def _is_told(op: Load | Store) -> bool:
    return op.mask is not None or not op.checked


@dataclasses.dataclass(frozen=True)
class _Run:
    """Indices `start + stride * arange`, the numbers along one axis of their tile."""

    start: Value
    axis: int
    stride: int = 1


def _start(v: Value, rw: Rewriter) -> Value | None:
    """The scalar that a tile repeats."""
    while isinstance(v.op, Broadcast | Reshape) and v.shape:
        v = v.op.x
    if isinstance(v.op, Full) and v.shape:
        return rw.new(Full(v.op.value, (), v.op.dtype))
    return None if v.shape else v


def _counted(v: Value) -> int | None:
    """The axis along which a tile has the numbers 0, 1, 2, ..., all of them once; its other axes may repeat them."""
    if isinstance(v.op, Broadcast):
        inner = _counted(v.op.x)
        return None if inner is None or v.op.x.shape[inner] == 1 else v.op.dims[inner]
    if isinstance(v.op, Reshape) and isinstance(v.op.x.op, Iota) and len(v.op.x.shape) == 1:
        long = [k for k, n in enumerate(v.shape) if n > 1]
        return long[0] if len(long) == 1 else None
    return v.op.axis if isinstance(v.op, Iota) else None


def _run(v: Value, rw: Rewriter) -> _Run | None:
    """What an index tile counts."""
    info = DTYPES[v.dtype]
    if info.kind != "i" or info.bits < 32:
        return None  # these wrap around in kernels that are right
    axes = [*range(len(v.shape))]  # the axis of the index tile that each axis of `v` is
    while isinstance(v.op, Broadcast):
        axes = _inner_axes(v.op, axes)
        v = v.op.x
    whole = _counted(v)
    if whole is not None:
        return _Run(rw.new(Full(0, (), v.dtype)), axes[whole]) if axes[whole] >= 0 else None
    return _computed(v.op, axes, rw) if isinstance(v.op, Map) and len(v.op.args) == 2 else None


def _computed(op: Map, axes: list[int], rw: Rewriter) -> _Run | None:
    """What sums and multiples of a counted tile count; `axes`: where those of the op are in the index tile."""
    turned = [(op.args[1], op.args[0])] if op.fn in ("add", "mul") else []
    for x, y in (op.args, *turned):
        inner = _run(x, rw) if op.fn in ("add", "sub", "mul", "shl") else None
        if inner is None or axes[inner.axis] < 0 or (other := _start(y, rw)) is None:
            continue
        first = isinstance(inner.start.op, Full) and inner.start.op.value == 0
        stride = inner.stride
        if op.fn in ("mul", "shl"):
            if not isinstance(other.op, Full) or (factor := _factor(op.fn, int(other.op.value))) is None:
                return None
            stride *= factor
        if op.fn == "add":
            start = other if first else rw.new(Map("add", (inner.start, other)))
        else:
            start = inner.start if first and op.fn != "sub" else rw.new(Map(op.fn, (inner.start, other)))
        return _Run(start, axes[inner.axis], stride) if stride <= MOST else None
    return None


def _factor(fn: str, n: int) -> int | None:
    """The positive factor of a product, or of a shift by n bits."""
    if fn == "shl":
        return 1 << n if 0 <= n < 8 else None
    return n if n > 0 else None


def _box(op: Load | Store, rw: Rewriter) -> Index | None:
    """The index of an access whose gathered places are a box."""
    takes = [(k, d) for k, d in enumerate(op.index) if isinstance(d, Take)]
    if not takes or not _is_told(op):
        return None
    first, last = takes[0][0], takes[-1][0]
    if any(not isinstance(d, At | Take) for d in op.index[first : last + 1]):
        return None
    shape = takes[0][1].indices.shape
    runs = [_run(d.indices, rw) for _, d in takes]
    long = [a for a, n in enumerate(shape) if n != 1]
    if any(r is None for r in runs) or [r.axis for r in runs if r is not None] != long:
        return None
    if runs[-1].stride > FAR:
        return None
    spans = (Span(r.start, shape[r.axis], r.stride) for r in runs if r is not None)
    dims = dict(zip((k for k, _ in takes), spans, strict=True))
    return tuple(dims.get(k, d) for k, d in enumerate(op.index))


@rules(Load)
def _load(op: Load, rw: Rewriter):
    if (index := _box(op, rw)) is None:
        return None
    wanted, same = op.result.shape, tuple(index_shape(index)) == tuple(op.result.shape)
    if op.mask is not None and not same:
        return None
    mask = op.mask
    if mask is not None and any(isinstance(d, Span) and d.stride > 1 for d in index):  # of others the back end sees it
        mask = _Told(op, rw).rest(mask, [*range(len(wanted))])
    box = rw.new(Load(op.ref, index, mask, op.pad, op.checked))
    return box if same else rw.new(Reshape(box, wanted))


@rules(Store)
def _store(op: Store, rw: Rewriter):
    index = _box(op, rw)
    if index is None or tuple(index_shape(index)) != tuple(op.value.shape):
        return None
    return rw.emit(Store(op.ref, index, op.value, op.mask, op.checked))


class _Told:
    """What the bounds of a load say of its indices, so that its mask need not say it again: `(i >= 0) & (i < n)` of the
    indices i of a dimension of n elements."""

    def __init__(self, op: Load, rw: Rewriter):
        self.rw = rw
        before = itertools.takewhile(lambda d: not isinstance(d, Take), op.index)
        first = sum(not isinstance(d, At) for d in before)
        self.limits: dict[tuple[Value, tuple[int, ...]], int] = {}
        for d, n in zip(op.index, op.ref.shape, strict=True):
            if isinstance(d, Take) and isinstance(n, int):
                at = _without_copies(d.indices, [first + k for k in range(len(d.indices.shape))])
                self.limits[at] = min(n, self.limits.get(at, n))

    def rest(self, v: Value, axes: list[int]) -> Value | None:
        """A condition without the parts that hold wherever the load is in its array; None: nothing is left."""
        match v.op:
            case Broadcast(x, shape, dims):
                inner = self.rest(x, _inner_axes(v.op, axes))
                return v if inner is x else inner and self.rw.new(Broadcast(inner, shape, dims))
            case Map("and", (a, b)):
                left, right = self.rest(a, axes), self.rest(b, axes)
                if left is None or right is None:
                    return left or right
                return v if (left, right) == (a, b) else self.rw.new(Map("and", (left, right)))
            case Map(fn, (x, y)) if (bound := _start(y, self.rw)) is not None and isinstance(bound.op, Full):
                n = self.limits.get(_without_copies(x, axes))
                return None if n is not None and _holds(fn, bound.op.value, n) else v
        return v


def _holds(fn: str, bound: float, n: int) -> bool:
    """Whether a comparison with `bound` is true of 0 to n - 1."""
    match fn:
        case "ge" | "gt":
            return bound <= 0 if fn == "ge" else bound < 0
        case "lt" | "le":
            return bound >= n if fn == "lt" else bound >= n - 1
    return False


def _inner_axes(op: Broadcast, axes: list[int]) -> list[int]:
    return [axes[d] if n > 1 else -1 for d, n in zip(op.dims, op.x.shape, strict=True)]


def _without_copies(v: Value, axes: list[int]) -> tuple[Value, tuple[int, ...]]:
    """The tile that broadcasts repeat, and where its axes are."""
    while isinstance(v.op, Broadcast):
        axes = _inner_axes(v.op, axes)
        v = v.op.x
    return v, tuple(a if n > 1 else -1 for a, n in zip(axes, v.shape, strict=True))
