"""What a tensor map can say: a box of an array that hardware copies to or from shared memory, bounds included."""

from __future__ import annotations

import math

from jtile.ir import At, Broadcast, Index, Kernel, Load, Reshape, Span, Store, Take, Tile, Value
from jtile.ir.core import index_shape
from jtile.ir.types import DTYPES
from jtile.passes.rewrite import buffers, written

KINDS = ("float16", "bfloat16", "float32", "int8", "uint8", "int32", "float8_e4m3fn", "float8_e5m2")
BOX, RANK = 256, 5  # elements along an axis of a box, axes of a map
LINE = 16  # bytes: the least of a row of a box, and strides are multiples of them
BIG = 2**31
FEW = 1024  # lanes, at most, of a mask that is tested at run time for whether it holds for all


def load_obstacle(kernel: Kernel, op: Load) -> str | None:
    """Why no tensor map gives what a load reads; None: one does."""
    roots = buffers(kernel)
    name = op.ref.name or "its array"
    if op.ref in kernel.scratch or roots.get(op.ref, op.ref) in written(kernel.body, roots):
        return f"the kernel writes {name}, and asynchronous copies would not see it"
    if op.mask is not None:
        return f"the load of {name} has a mask"
    nan = math.isnan(op.pad) and DTYPES[op.ref.dtype].bits > 8
    zero = op.pad == 0 and math.copysign(1.0, op.pad) > 0
    if op.checked and not zero and not nan:
        return f"the load of {name} gives {op.pad!r} outside of the array: a tensor map gives 0 (or nan)"
    return box_obstacle(op.ref, op.index)


def store_obstacle(kernel: Kernel, op: Store) -> str | None:
    """Why a store goes through pointers; None: a tensor map can say it (where its mask, of few lanes, holds for all),
    and nothing else touches the array."""
    roots = buffers(kernel)
    root = roots.get(op.ref, op.ref)
    same = [x for x in kernel.body.walk() if hasattr(x, "ref") and roots.get(x.ref, x.ref) is root]
    if len(same) > 1:
        return "something else touches the array"
    if op.mask is not None and unspread(op.mask).type.size > FEW:  # type: ignore[union-attr]
        return "it has a mask"
    return box_obstacle(op.ref, op.index) or _rest(root)


def _rest(ref: Value) -> str | None:
    """Why no tensor map may store to the end of an array: a map writes whole lines, and bytes of the last line that lie
    behind an array of one axis become 0 (seen on an H200). Rows of arrays with more axes have whole lines."""
    length = ref.shape[0] * DTYPES[ref.dtype].bits // 8 if len(ref.shape) == 1 else 0
    return f"{ref.name or 'the array'} has {length} bytes, not whole lines of {LINE}" if length % LINE else None


def unspread(v: Value) -> Value:
    """A tile before its elements were repeated."""
    while isinstance(v.op, Broadcast | Reshape):
        v = v.op.x
    return v


def box_obstacle(ref: Value, index: Index) -> str | None:
    """Why the lanes of an access are no box of a tensor map; None: they are."""
    name, shape = ref.name or "the array", ref.shape
    if not all(isinstance(n, int) for n in shape):
        return f"the sizes of {name} are known only when the kernel runs"
    if ref.dtype not in KINDS:
        return f"{name} holds {ref.dtype}, which tensor maps do not know"
    if any(isinstance(d, Take) for d in index):
        return f"the access to {name} is a gather"
    if any(isinstance(d, Span) and d.stride != 1 for d in index):
        return f"the access to {name} leaves out elements"
    if not index or isinstance(index[-1], At):
        return f"the rows of the tile do not lie together in {name}"
    return _limit(ref, index)


def _limit(ref: Value, index: Index) -> str | None:
    """Which limit of a map an access exceeds: axes, sides of the box, bytes of a row, or strides; None: no limit."""
    name, shape, width = ref.name or "the array", ref.shape, DTYPES[ref.dtype].bits // 8
    sides = index_shape(index)
    if len(index) > RANK:
        return f"{name} has {len(index)} axes, a tensor map at most {RANK}"
    if any(n > BOX for n in sides):
        return f"the tile of {name} is {max(sides)} long along an axis, a box at most {BOX}"
    if 0 in sides or 0 in shape:
        return f"the tile of {name} has no elements"
    if sides[-1] * width < LINE:
        return f"a row of the tile of {name} has {sides[-1] * width} bytes, of a box at least {LINE}"
    stride = width
    for n in reversed(shape[1:]):
        stride *= n
        if stride % LINE:
            return f"rows of {name} are {stride} bytes apart, for a tensor map a multiple of {LINE}"
    reach = [n + (d.size + d.step if isinstance(d, Tile) else 0) for n, d in zip(shape, index, strict=True)]
    return f"{name} is too long for a tensor map" if max(reach) >= BIG else None
