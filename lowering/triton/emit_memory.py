"""Loads and stores of Refs."""

from __future__ import annotations

import contextlib
import dataclasses
import math

from jtile import ir
from jtile.ir.shapes import full_array

from . import task_pages, tma, versions
from .addresses import Line, addresses, lines, pointers, resolve, touches_nothing
from .emit_basics import code_of
from .emitter import PACKED, Buffer, Emitter, elem_of, emits, memory_elem, padded
from .eviction import CACHED, load_hints
from .hazards import PAIRS, last_lanes, meet, repeating_axes
from .packed import load_packed, store_packed
from .ttir import Number, Val, bits

__all__ = ["addresses", "from_memory", "meet", "to_memory"]


@emits(ir.Alloc)
def _alloc(em: Emitter, op: ir.Alloc) -> None:
    """Allocate nothing: private memory is part of the workspace, see `compile.py`."""


@emits(ir.Load)
def _load(em: Emitter, op: ir.Load) -> Val:
    code, buf = em.code, em.refs[op.ref]
    shape, pad = ir.index_shape(op.index), _pad(op)
    if touches_nothing(buf, op.index):
        return code.const(pad, elem_of(buf.dtype), padded(shape))
    if op in em.paged:
        return _from_pages(em, buf, op, pad)
    meet(em, op)
    through_map = tma.load(em, buf, op)
    if through_map is not None:
        return through_map
    found = lines(em, buf, op.index)
    if buf.dtype in PACKED:
        return load_packed(em, buf, found, op, int(pad))
    places = resolve(em, buf, found, shape, op.checked)
    where = pointers(em, buf.pointer, places)
    mask = code.both(places.mask, em.mask(op))
    elem, policy = memory_elem(buf.dtype), _policy(em, op)
    if mask is None:
        return from_memory(em, code.let(f"tt.load {where.name}{policy} : {where.type}", where.shape, elem), buf.dtype)
    other = code.const(pad, elem, where.shape)
    extended = _sign_extended(pad, elem)
    start = code.const(0, elem, where.shape) if extended else other
    operands = ", ".join(v.name for v in (where, mask, start))
    v = code.let(f"tt.load {operands}{policy} : {where.type}", where.shape, elem, pad)
    if extended:
        v = dataclasses.replace(code.select(mask, v, other), fill=pad)
    return from_memory(em, v, buf.dtype)


def _from_pages(em: Emitter, buf: Buffer, op: ir.Load, pad: Number) -> Val:
    """A tile that has come into the pages of an execution graph."""
    v = task_pages.load(em, *em.paged[op])
    mask = resolve(em, buf, lines(em, buf, op.index), ir.index_shape(op.index), op.checked).mask
    if mask is None or not op.checked:
        return v
    return dataclasses.replace(em.code.select(mask, v, em.code.const(pad, v.elem, v.shape)), fill=pad)


def _policy(em: Emitter, op: ir.Load) -> str:
    """When the cache should forget what is loaded, see `eviction.py`: empty for most."""
    if not em.features.cache_hints:
        return ""
    if "load_hints" not in em.memo:
        em.memo["load_hints"] = load_hints(em.kernel)
    hint = em.memo["load_hints"].get(op)
    if hint == CACHED:
        return versions.modifier(hint)
    return versions.eviction(hint) if hint else ""


def _sign_extended(pad: Number, elem: str) -> bool:
    """Whether triton 3.6 makes something else of a constant for the lanes that a load leaves out: it packs several
    short integers into a register, and lets the sign of the first run over the others."""
    if elem not in ("i8", "i16"):
        return False
    width = bits(elem)
    code = int(pad) & ((1 << width) - 1)
    return code >> (width - 1) == 1 and code != (1 << width) - 1


@emits(ir.Store)
def _store(em: Emitter, op: ir.Store) -> None:
    buf = em.refs[op.ref]
    if touches_nothing(buf, op.index):
        return
    meet(em, op)
    found = lines(em, buf, op.index)
    shape = ir.index_shape(op.index)
    axes = repeating_axes(op.index)
    if not axes:
        _write(em, buf, found, op, None)
        return
    lanes = math.prod(padded(next(line.first.shape for line in found if line.first.shape)))
    if lanes <= PAIRS and op.mask is None:
        _write(em, buf, found, op, last_lanes(em, found, shape))
        return
    with _in_turns(em, found, shape, axes) as chosen:
        _write(em, buf, found, op, chosen)


def _write(em: Emitter, buf: Buffer, found: list[Line], op: ir.Store, extra: Val | None) -> None:
    """Store the lanes of a tile that are inside, that its mask lets through, and `extra` too."""
    code = em.code
    if buf.dtype in PACKED:
        store_packed(em, buf, found, op, extra)
        return
    places = resolve(em, buf, found, ir.index_shape(op.index), op.checked)
    mask = code.both(code.both(places.mask, em.mask(op)), extra)
    operands = [pointers(em, buf.pointer, places), to_memory(em, em.val(op.value), buf.dtype)]
    operands += [] if mask is None else [mask]
    code.do(f"tt.store {', '.join(v.name for v in operands)} : {operands[0].type}")


@contextlib.contextmanager
def _in_turns(em: Emitter, found: list[Line], shape: tuple[int, ...], axes: list[int]):
    """A loop over the lanes of a gather along some of its axes, in row-major order; yields the mask of the lanes whose
    turn it is, all those along the other axes."""
    code = em.code
    take = next(line for line in found if line.first.shape)
    inner, full = take.first.shape, padded(shape)
    own = shape[take.axis : take.axis + len(inner)]
    number = code.const(0, "i32", full)
    for k in axes:
        place = code.along(code.arange(inner[k]), take.axis + k, full)
        number = code.add(code.scale(number, own[k]), place)
    turn = Val(code.name(), (), "i32")
    bounds = [code.i32(k).name for k in (0, math.prod(own[k] for k in axes), 1)]
    code.do(f"scf.for {turn.name} = {bounds[0]} to {bounds[1]} step {bounds[2]} : i32 {{")
    with code.region():
        yield code.cmp("eq", number, code.splat(turn, full))
        em.barrier()
    code.do("}")


def _pad(op: ir.Load) -> Number:
    """The number that lanes outside the array read, as registers hold it."""
    info = ir.DTYPES[op.ref.dtype]
    if info.kind == "f":
        return code_of(op.pad, info.name)
    return bool(op.pad) if info.kind == "b" else int(full_array(op.pad, (), info.name))


def from_memory(em: Emitter, v: Val, dtype: str) -> Val:
    """A loaded value, as registers hold it."""
    if dtype == "bool":
        out = em.code.cmp("ne", v, em.code.const(0, "i8", v.shape))
        return dataclasses.replace(out, fill=None if v.fill is None else bool(v.fill))
    return v


def to_memory(em: Emitter, v: Val, dtype: str) -> Val:
    """A value to store, as memory holds it."""
    return em.code.to_int(v, "i8", signed=False) if dtype == "bool" else v
