"""Asynchronous copies between arrays and shared memory, through tensor maps."""

from __future__ import annotations

import dataclasses
import math

from jtile import ir

from .. import tma, versions
from ..addresses import lines
from ..ttir import bits
from .code import Mem
from .emit_devices import devices
from .emit_shared import slot
from .emitter import BlockEmitter, emits
from .layouts import Swizzled

BOX = 1 << 20  # elements along an axis: larger boxes than a map can say are split into several copies
REDUCED = {"add": ("float16", "bfloat16", "float32", "int32", "uint32", "int64", "uint64")}
REDUCED |= dict.fromkeys(("min", "max"), ("float16", "bfloat16", "int32", "int64"))


@emits(ir.AsyncLoad)
def _async_load(em: BlockEmitter, op: ir.AsyncLoad) -> None:
    nan = op.checked and isinstance(op.pad, float) and math.isnan(op.pad)
    if op.checked and not nan and (op.pad != 0 or math.copysign(1.0, op.pad) < 0):
        em.refuse(op, f"asynchronous loads with zeros or NaN outside the array, not {op.pad}")
    if op.ref.type.role == "symmetric":  # type: ignore[union-attr]
        (((handle, _),), where) = _boxes_of_devices(em, op, nan=nan)
    elif em.cluster is not None and op in em.cluster.loads:
        return _shared_load(em, op, nan)
    else:
        handle, where = _box(em, op, nan=nan)
    m, ring = _in_box(em, op), em.env[op.barrier]
    b = slot(em, ring, em.env[op.at])
    go = em.code.const(True, "i1") if op.when is None else em.env[op.when]
    names = f"{handle.name}[{where}] {m.name}, {b.name}, {go.name}"
    em.code.do(f"ttng.async_tma_copy_global_to_local {names} : {handle.elem}, {b.type} -> {m.type}")


def _shared_load(em: BlockEmitter, op: ir.AsyncLoad, nan: bool) -> None:
    """A copy that all blocks of a cluster make alike: each brings a part of it to all of them."""
    assert em.cluster is not None
    code, (axis, size) = em.code, em.cluster.loads[op]
    m, b = em.env[op.buffer], slot(em, em.env[op.barrier], em.env[op.at])
    place = code.op("arith.remui", code.let("tt.get_program_id x : i32", (), "i32"), code.i32(em.cluster.blocks))
    shape = tuple(size if k == axis else n for k, n in enumerate(m.shape))
    axes = _axes(em, op, em.refs[op.ref].param is not None)
    along = len(axes) - 2 + axis
    if axes[along].box != m.shape[axis]:
        em.refuse(op, "copies that a cluster shares of two axes that are those of their buffer")
    axes[along] = dataclasses.replace(axes[along], box=size)
    layout = _layout(em, op, m, len(axes))
    how = f"blocks {em.cluster.blocks}"
    handle = tma.descriptor(em, em.refs[op.ref], axes, m.elem, nan=nan, layout=layout, evict=how)
    if handle is None:
        em.refuse(op, f"at most {tma.MAPS} tensor maps, one for each array and shape of box that is copied")
    handle, first = em.use(handle), [tma.coordinate(em, a, op.checked) for a in axes]
    for block in range(em.cluster.blocks):
        part = dataclasses.replace(m, name=code.name(), shape=shape, whole=m.whole or m.shape)
        starts = ", ".join(str(block * size if k == axis else 0) for k in range(2))
        code.do(f"{part.name} = ttg.memdesc_subslice {m.name}[{starts}] : {m.type} -> {part.type}")
        where = [code.add(v, code.i32(block * size)) if k == along else v for k, v in enumerate(first)]
        go = code.cmp("eq", place, code.i32(block))
        names = f"{handle.name}[{', '.join(v.name for v in where)}] {part.name}, {b.name}, {go.name}"
        code.do(f"ttng.async_tma_copy_global_to_local {names} : {handle.elem}, {b.type} -> {part.type}")


@emits(ir.Prefetch)
def _prefetch(em: BlockEmitter, op: ir.Prefetch) -> None:
    """A copy by a tensor map of its own, of which `ptx.py` makes an instruction without buffer and barrier."""
    rings = [other.result for other in em.kernel.body.ops if isinstance(other, ir.AllocBarriers)]
    if op.ref.type.role == "symmetric" or not rings:  # type: ignore[union-attr]
        return
    handle, where = _box(em, op, nan=False)
    m, b = _in_box(em, op), slot(em, em.env[rings[0]], em.code.i32(0))
    go = em.code.const(True, "i1") if op.when is None else em.env[op.when]
    names = f"{handle.name}[{where}] {m.name}, {b.name}, {go.name}"
    em.code.do(f"ttng.async_tma_copy_global_to_local {names} : {handle.elem}, {b.type} -> {m.type}")


@emits(ir.AsyncStore)
def _async_store(em: BlockEmitter, op: ir.AsyncStore) -> None:
    if op.fn != "set" and op.ref.dtype not in REDUCED[op.fn]:
        em.refuse(op, f"asynchronous stores with {op.fn} of {', '.join(REDUCED[op.fn])}, got {op.ref.dtype}")
    m = _in_box(em, op)
    kind = "copy_local_to_global" if op.fn == "set" else f"reduce {op.fn},"
    store = lambda handle, where: em.code.do(
        f"ttng.async_tma_{kind} {handle.name}[{where}] {m.name} : {handle.elem}, {m.type}"
    )
    if op.ref.type.role != "symmetric":  # type: ignore[union-attr]
        store(*_box(em, op, nan=False))
        return
    maps, where = _boxes_of_devices(em, op, nan=False)
    for handle, here in maps:
        if here is None:
            store(handle, where)
            continue
        em.code.do(f"scf.if {here.name} {{")
        with em.code.region():
            store(handle, where)
        em.code.do("}")


def _in_box(em: BlockEmitter, op: ir.AsyncLoad | ir.AsyncStore | ir.Prefetch) -> Mem:
    """The buffer of a copy, with the axes of the box: swizzles go by rows, whichever axes these are counted along."""
    m, box = em.env[op.buffer], ir.index_shape(op.index)
    if m.shape == box:
        return m
    if m.whole is not None or not isinstance(m.layout, Swizzled):
        em.refuse(op, f"a tile of {len(box)} axes comes to, or from, all of a buffer of rows, not a part of one")
    layout = dataclasses.replace(m.layout, rank=len(box))
    out = dataclasses.replace(m, name=em.code.name(), shape=box, layout=layout)
    em.code.do(f"{out.name} = ttg.memdesc_reinterpret {m.name} : {m.type} -> {out.type}")
    return out


@emits(ir.StoreWait)
def _store_wait(em: BlockEmitter, op: ir.StoreWait) -> None:
    em.code.do(versions.store_wait(op.pending))


def _box(em: BlockEmitter, op: ir.AsyncLoad | ir.AsyncStore | ir.Prefetch, *, nan: bool):
    """The tensor map of a copy, and where its box begins.

    Raises:
      UnsupportedError: no tensor map can describe the copy.
    """
    buf, m = em.refs[op.ref], em.env[op.buffer]
    axes = _axes(em, op, buf.param is not None)
    evict = op.evict if isinstance(op, ir.AsyncLoad) else "ahead" if isinstance(op, ir.Prefetch) else None
    handle = tma.descriptor(em, buf, axes, m.elem, nan=nan, layout=_layout(em, op, m, len(axes)), evict=evict)
    if handle is None:
        em.refuse(op, f"at most {tma.MAPS} tensor maps, one for each array and shape of box that is copied")
    where = ", ".join(tma.coordinate(em, a, op.checked).name for a in axes)
    return em.use(handle), where


def _boxes_of_devices(em: BlockEmitter, op: ir.AsyncLoad | ir.AsyncStore, *, nan: bool):
    """The tensor maps of a copy to or from symmetric memory, see `BlockDevices.maps`, and where the box begins. The
    outermost axis of the maps is that of the two sets of memory."""
    m, axes, on = em.env[op.buffer], _axes(em, op, True), devices(em)
    if len(axes) == tma.RANK:
        em.refuse(op, f"copies to symmetric memory of less than {tma.RANK} axes")
    maps = on.maps(op, axes, m.elem, _layout(em, op, m, len(axes) + 1), nan)
    where = ", ".join(v.name for v in (on.set(), *(tma.coordinate(em, a, op.checked) for a in axes)))
    return [(em.use(handle), here) for handle, here in maps], where


def _axes(em: BlockEmitter, op: ir.AsyncLoad | ir.AsyncStore | ir.Prefetch, mapped: bool) -> list[tma.Axis]:
    """The axes of the tensor map of a copy; `mapped`: whether there may be one for its array.

    Raises:
      UnsupportedError: no tensor map can describe the copy.
    """
    buf, m = em.refs[op.ref], em.env[op.buffer]
    what = "asynchronous copies through tensor maps only, and none can say this one:"
    if not mapped or not all(isinstance(n, int) for n in buf.shape):
        em.refuse(op, f"{what} the array has no static sizes; use plain loads and stores")
    if any(isinstance(d, ir.Take) for d in op.index):
        em.refuse(op, f"{what} it gathers; use plain loads and stores")
    axes = tma.axes_of(lines(em, buf, op.index), op.checked)
    width = bits(m.elem) // 8
    reason = "steps over elements" if axes is None else tma.obstacle(axes, width, box=BOX)
    if 0 in buf.shape and math.prod(em.kernel.grid):
        reason = "no elements"
    if axes is not None and not reason and not tma.fits(axes, op.checked):
        reason = "coordinates of more than 32 bits"
    if isinstance(op, ir.AsyncStore) and axes and axes[-1].size * width % 16:
        reason = "an axis that ends within 16 bytes, all of which such a store writes"  # seen on an H200
    if reason or axes is None:
        em.refuse(op, f"{what} it has {reason}; use plain loads and stores")
    return axes


def _layout(em: BlockEmitter, op: ir.AsyncLoad | ir.AsyncStore | ir.Prefetch, m: Mem, rank: int) -> Swizzled:
    if not isinstance(m.layout, Swizzled) or m.layout.transposed:
        em.refuse(
            op, f"no copy between an array and this view of {op.buffer.type}: take the buffer as it was allocated"
        )
    return Swizzled(m.layout.width, m.layout.elem_bits, rank)
