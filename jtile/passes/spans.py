"""Gathers and scatters whose indices are consecutive numbers are loads and stores of a box.

`bias[h, i, j]` with `i = a + arange(m)[:, None]` and `j = b + arange(n)[None, :]` is `bias[h, ds(a, m), ds(b, n)]`:
vectors of elements that lie side by side, where a gather reads them one by one.
"""

from __future__ import annotations

import dataclasses

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

from .rewrite import Rewriter, Rules

rules = Rules()


def spans(kernel: Kernel) -> Kernel:
    """The kernel, where gathers and scatters of consecutive elements are loads and stores of a box, if these all lie in
    their arrays or a mask says which of them are read or written."""
    ops = (op for op in kernel.body.walk() if isinstance(op, Load | Store))
    gathers = (op for op in ops if any(isinstance(d, Take) for d in op.index))
    return Rewriter(kernel, rules).run() if any(_is_told(op) for op in gathers) else kernel


def _is_told(op: Load | Store) -> bool:
    return op.mask is not None or not op.checked


@dataclasses.dataclass(frozen=True)
class _Run:
    """Indices `start + arange`, the numbers along one axis of their tile."""

    start: Value
    axis: int


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
    axes = [*range(len(v.shape))]  # the axis of the index tile that each axis of `v` is
    while isinstance(v.op, Broadcast):
        axes = [axes[d] if n > 1 else -1 for d, n in zip(v.op.dims, v.op.x.shape, strict=True)]
        v = v.op.x
    whole = _counted(v)
    if whole is not None:
        return _Run(rw.new(Full(0, (), v.dtype)), axes[whole]) if axes[whole] >= 0 else None
    if not isinstance(v.op, Map) or v.op.fn != "add":
        return None
    for x, y in (v.op.args, v.op.args[::-1]):
        inner = _run(x, rw)
        if inner is None or axes[inner.axis] < 0 or (start := _start(y, rw)) is None:
            continue
        first = isinstance(inner.start.op, Full) and inner.start.op.value == 0
        return _Run(start if first else rw.new(Map("add", (inner.start, start))), axes[inner.axis])
    return None


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
    dims = dict(zip((k for k, _ in takes), (Span(r.start, shape[r.axis]) for r in runs if r is not None), strict=True))
    return tuple(dims.get(k, d) for k, d in enumerate(op.index))


@rules(Load)
def _load(op: Load, rw: Rewriter):
    if (index := _box(op, rw)) is None:
        return None
    wanted, same = op.result.shape, tuple(index_shape(index)) == tuple(op.result.shape)
    if op.mask is not None and not same:
        return None
    box = rw.new(Load(op.ref, index, op.mask, op.pad, op.checked))
    return box if same else rw.new(Reshape(box, wanted))


@rules(Store)
def _store(op: Store, rw: Rewriter):
    index = _box(op, rw)
    if index is None or tuple(index_shape(index)) != tuple(op.value.shape):
        return None
    return rw.emit(Store(op.ref, index, op.value, op.mask, op.checked))
