"""Tile loads through tensor maps (TMA): a thread asks for a whole box, and hardware finds the addresses and the bounds.

They pay where a pipelined loop feeds a matrix product: the operands land in shared memory without passing registers,
and nobody computes addresses. Elsewhere loads go through pointers, which need no trip through shared memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from jtile import ir

from . import versions
from .addresses import BIG, Line, first_element, lines
from .emitter import Buffer, Emitter, memory_elem, padded
from .hazards import changes
from .ttir import Val, bits, spell

DTYPES = ("float16", "bfloat16", "float32", "int8", "uint8", "float8_e4m3fn", "float8_e5m2")
FP8 = {"float8_e4m3fn": "f8E4M3FN", "float8_e5m2": "f8E5M2"}
# Boxes stand one behind the other in shared memory, where the copy wants multiples of 128 bytes (swizzled: 1024); small
# ones gain nothing besides.
SMALLEST = 2048
BOX, RANK = 256, 5  # the limits of a tensor map: elements along an axis of its box, and axes
MAPS = 32  # tensor maps of a kernel, at most: kMaxMaps of the launcher
_PATH = (ir.Cast, ir.Bitcast, ir.Transpose, ir.Reshape)  # ops that may stand between a load and the product it feeds


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of a tensor map, counted in elements: its length, the distance of its elements, the side of the box, and
    the dimensions of the access that it stands for."""

    size: int
    stride: int
    box: int
    lines: tuple[Line, ...]


def load(em: Emitter, buf: Buffer, op: ir.Load) -> Val | None:
    """The tile of a load through a tensor map; None where a map cannot say it, or would not pay."""
    if not em.features.tma or op not in _operands(em) or not _plain(em, buf, op):
        return None
    found = lines(em, buf, op.index)
    axes, width = axes_of(found, op.checked), bits(memory_elem(buf.dtype)) // 8
    if axes is None or obstacle(axes, width) or math.prod(a.box for a in axes) * width < SMALLEST:
        return None
    if not fits(axes, op.checked):
        return None
    # Codes of 8-bit floats come in their own type, so that nothing stands between shared memory and the product.
    own = FP8.get(buf.dtype) if buf.dtype in em.features.fp8 else None
    elem, full = own or memory_elem(buf.dtype), padded(op.result.shape)
    handle = descriptor(em, buf, axes, elem, nan=math.isnan(op.pad) and op.checked)
    if handle is None:
        return None
    where = ", ".join(coordinate(em, a, op.checked).name for a in axes)
    right = f"tt.descriptor_load {handle.name}[{where}] : {handle.elem} -> {spell(full, elem)}"
    return em.code.bitcast(em.code.let(right, full, elem), memory_elem(buf.dtype))


def _operands(em: Emitter) -> set[ir.Load]:
    """The loads of a kernel that feed a matrix product in the body of their loop."""
    if "operands" not in em.memo:
        users: dict[ir.Value, list[ir.Op]] = {}
        for op in em.kernel.body.walk():
            for v in op.operands():
                users.setdefault(v, []).append(op)
        loops = [op.body for op in em.kernel.body.walk() if isinstance(op, ir.For)]
        em.memo["operands"] = {op for b in loops for op in _fed(b, users)}
    return em.memo["operands"]


def _fed(body: ir.Block, users: dict[ir.Value, list[ir.Op]]) -> Iterator[ir.Load]:
    for op in body.ops:
        if not isinstance(op, ir.Load):
            continue
        todo = [op.result]
        while todo:
            for user in users.get(todo.pop(), []):
                if isinstance(user, ir.Dot | ir.DotScaled) and user in body.ops:
                    yield op
                    todo = []
                    break
                todo += [user.results[0]] if isinstance(user, _PATH) else []


def _plain(em: Emitter, buf: Buffer, op: ir.Load) -> bool:
    """Whether a load reads an unmasked box of memory that nobody writes, with a dtype and a pad that maps know."""
    if changes(em, op.ref) or buf.param is None or buf.dtype not in DTYPES or op.mask is not None:
        return False
    if not all(isinstance(n, int) for n in buf.shape) or any(isinstance(d, ir.Take) for d in op.index):
        return False
    nan = math.isnan(op.pad) and ir.DTYPES[buf.dtype].bits > 8
    zero = op.pad == 0 and math.copysign(1.0, op.pad) > 0  # a map fills with zeros, not with -0
    return not op.checked or zero or nan


def axes_of(found: list[Line], checked: bool) -> list[Axis] | None:
    """The axes of a tensor map for an access; None where no map can have them.

    A single element of a dimension is a side of 1 of the box, or, where nothing can hang over, it is counted along the
    next axis, so that the map has no more axes than the tile.
    """
    out: list[Axis] = []
    waiting: list[Line] = []
    for line in found:
        side, stride = int(line.side), int(line.stride)  # type: ignore[arg-type]
        if line.step != 1 or (line.size == 0):
            return None
        if line.size is None and not checked:
            waiting.append(line)
            continue
        size = math.prod(int(w.side) for w in waiting) * side  # type: ignore[arg-type]
        out.append(Axis(size, stride, padded((line.size or 1,))[0], (*waiting, line)))
        waiting = []
    # Triton drops sides of 1 from a box only where they lead; the axes of a map may stand in any order.
    out.sort(key=lambda a: a.lines[-1].size is not None)
    return None if waiting or not out else out


def obstacle(axes: list[Axis], width: int, *, box: int = BOX) -> str:
    """Why a tensor map cannot say a box of elements of `width` bytes; "" where it can."""
    last = axes[-1]
    reasons = {
        f"more than {RANK} axes": len(axes) > RANK,
        "an innermost axis that is not contiguous": last.stride != 1 or last.lines[-1].size is None,
        "rows of less than 16 bytes": last.box * width < 16,
        f"more than {box} elements along an axis": any(a.box > box for a in axes),
        "an axis of 2^31 elements": any(a.size >= BIG for a in axes),
        "rows that are not whole multiples of 16 bytes apart": any(a.stride * width % 16 for a in axes[:-1]),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def fits(axes: list[Axis], checked: bool) -> bool:
    """Whether all coordinates of an access fit 32 bits."""
    every = [line for a in axes for line in a.lines]
    if not checked:
        return True
    return all(
        line.known is not None and line.known.lo * line.scale >= -BIG and line.known.hi * line.scale < BIG
        if line.size is None
        else int(line.side) + line.extent + line.scale < BIG  # type: ignore[arg-type]
        for line in every
    )


def coordinate(em: Emitter, axis: Axis, checked: bool) -> Val:
    """The first element of the box along an axis, as i32."""
    code, at = em.code, em.code.i32(0)
    for line in axis.lines:
        start = code.to_int(first_element(em, line, checked), "i32")
        scale = int(line.stride) // max(axis.stride, 1)  # type: ignore[arg-type] # an array without elements has steps of 0
        at = code.add(code.scale(start, scale), at)
    return at


def descriptor(
    em: Emitter, buf: Buffer, axes: list[Axis], elem: str, *, nan: bool, layout: Any = "", evict: str | None = None
) -> Val | None:
    """The tensor map of an array for boxes of a shape: a parameter of the kernel, one for all accesses that agree. None
    where the kernel has as many as it may. At the block level, `layout`: that of the boxes in shared memory;
    `evict`: see `ir.AsyncLoad`."""
    maps = em.memo.setdefault("maps", {})
    key = (buf.param, tuple((a.size, a.stride, a.box) for a in axes), nan, layout, evict)
    if key not in maps and len(maps) == MAPS:
        return None
    if key not in maps:
        width = bits(elem) // 8
        record = {
            "kind": "tensormap",
            "buffer": buf.param,
            "dims": [a.size for a in reversed(axes)],
            "strides": [a.stride * width for a in reversed(axes[:-1])],
            "fill": "nan" if nan else "zero",
        }
        if evict:
            em.record.evict[len(em.params)] = evict
        maps[key] = em.param(record, versions.tensordesc(tuple(a.box for a in axes), elem, layout))
    return maps[key]
