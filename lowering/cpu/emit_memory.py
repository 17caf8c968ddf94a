"""Loads, stores and atomics on Refs: the one bounds rule as native code.

A plain load reads the Ref in place. Only where a tile may hang over the edge, and a reader looks there, a run-time test
sends it through a padded copy, so that the readers never test anything. Masked loads and gathers are evaluated lane by
lane where they are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

from jtile import ir

from . import access, overhang, pairs, plan, together, told
from .access import Lanes, const_value
from .convert import memory_type, to_memory
from .emitter import Emitter, emits
from .evaluate import Point
from .indexing import Axis, affine_axes
from .lane_loads import Spot, locate
from .llvm import Val, i64, lanes_of
from .nest import Bounds, emit_nest, vector_axis
from .packed import bytes_of, in_byte, is_packed, own_bits
from .values import Buffer, dense_strides


def sub_buffer(em: Emitter, ref: Buffer, axes: list[Axis], shape: tuple[int, ...]) -> Buffer:
    """The accessed box of a Ref as a buffer with the tile's shape."""
    base: Val = i64(0)
    strides: list = [0] * len(shape)
    for a, s in zip(axes, ref.strides, strict=True):
        base = em.code.add(base, em.code.mul(a.start, s))
        if a.axis is not None:
            strides[a.axis] = s * a.stride if isinstance(s, int) else em.code.mul(s, a.stride)
    ptr = em.code.gep(memory_type(ref.dtype), ref.ptr, base)
    return Buffer(ptr, shape, tuple(strides), ref.dtype, ref.alloc, owned=False)


def _is_outside(a: Axis) -> bool:
    """Whether a dimension is known to leave its array: a padded copy would be made by all programs."""
    first, known = a.start.name, isinstance(a.limit, int)
    return known and first.lstrip("-").isdigit() and not 0 <= int(first) <= a.limit - 1 - (a.size - 1) * a.stride


def inside(em: Emitter, a: Axis) -> Val:
    """i1: the whole dimension lies in the array."""
    if isinstance(a.limit, Val):
        ends = em.code.sub(a.limit, (a.size - 1) * a.stride)
        return em.code.cmp("icmp", "ult", a.start, em.code.intrinsic("smax", "i64", ends, i64(0)))
    last = a.limit - (a.size - 1) * a.stride
    if last <= 0:
        return Val("i1", "false")
    return em.code.cmp("icmp", "ult", a.start, i64(last))


def clipped(em: Emitter, a: Axis) -> tuple[Val, Val]:
    """[lo, hi): the part of the tile axis that lies in the array."""
    c = em.code
    lo = c.intrinsic("smax", "i64", _ceil_div(em, c.sub(0, a.start), a.stride), i64(0))
    hi = c.intrinsic("smin", "i64", _ceil_div(em, c.sub(a.limit, a.start), a.stride), i64(a.size))
    lo = c.intrinsic("smin", "i64", lo, i64(a.size))
    return lo, c.intrinsic("smax", "i64", hi, lo)


def _ceil_div(em: Emitter, x: Val, d: int) -> Val:
    if d == 1:
        return x
    y = em.code.add(x, d - 1)
    q = em.code.let("i64", f"sdiv {y}, {d}")
    return em.code.intrinsic("smax", "i64", q, i64(0)) if d > 1 else q


def box(em: Emitter, axes: list[Axis]) -> tuple[Bounds, Val | None]:
    """Loop bounds of the dimensions that may leave the array, and the condition of the dropped ones (None: always)."""
    bounds: Bounds = {}
    cond: Val | None = None
    for a in axes:
        if not a.checked:
            continue
        if a.axis is not None:
            bounds[a.axis] = clipped(em, a)
        else:
            ok = inside(em, a)
            cond = ok if cond is None else em.code.binary("and", cond, ok)
    return bounds, cond


# -- loads ---------------------------------------------------------------------------------------------------------


@emits(ir.Load)
def _load(em: Emitter, op: ir.Load) -> None:
    v = op.result
    frozen = op.ref not in em.written and op.ref.type.role == "in"
    simple = not any(isinstance(d, ir.Take) for d in op.index) and ir.DTYPES[op.ref.dtype].bits >= 8
    if 0 in v.shape:
        em.env[v] = em.new_buffer(v.shape, v.dtype)
        return
    if simple and told.by_bounds(em, op) and (frozen or _snapshot_safe(em, op)) and _in_place(em, op):
        return
    em.postpone(v)
    if isinstance(em.env[v], Buffer):
        return
    if v.type.rank == 0:
        em.env[v] = Point(em, (), (), Lanes(1), False).at(v, ())
    elif not frozen:
        em.materialise(v)
    elif _read_often(em.plan, v):
        em.flagged.add(v)


def _read_often(p: plan.BlockPlan, v: ir.Value) -> bool:
    """Whether several ops read the value, or one op that reads each element many times."""
    uses = p.uses.get(v, [])
    users = [p.block.ops[k] for k in uses if k < len(p.block.ops)]
    return len(uses) > 1 or any(plan.amplifies(u, v) or u.blocks() for u in users)


def _in_place(em: Emitter, op: ir.Load) -> bool:
    """Read the Ref's own memory; where the tile may hang over the edge, a padded copy is made at run time."""
    v = op.result
    axes = affine_axes(em, op)
    direct = sub_buffer(em, em.rep(op.ref), axes, v.shape)
    checked = [a for a in axes if a.checked]
    if not checked or (v.type.rank and overhang.unread(em, op, axes)):
        em.set_buffer(v, direct)
        return True
    if checked and (v.type.rank == 0 or any(_is_outside(a) for a in checked)):
        return False
    axis = vector_axis(v.shape)
    if axis is None or direct.strides[axis] != dense_strides(v.shape)[axis]:
        return False
    _padded(em, op, axes, direct, checked)
    return True


def _padded(em: Emitter, op: ir.Load, axes: list[Axis], direct: Buffer, checked: list[Axis]) -> None:
    code, v = em.code, op.result
    copy = em.new_buffer(v.shape, v.dtype)
    copy.alloc.beside = direct.alloc
    slot = code.var("ptr", direct.ptr)
    whole = inside(em, checked[0])
    for a in checked[1:]:
        whole = code.binary("and", whole, inside(em, a))
    with code.when(code.binary("xor", whole, Val("i1", "true"))):
        pad = const_value(op.pad, v.dtype)
        emit_nest(
            em, v.shape, plan.register_bits(v.dtype), lambda p: access.write(code, em.isa, copy, p.ix, pad, p.lanes)
        )
        bounds, cond = box(em, axes)

        def body(p: Point) -> None:
            access.write(code, em.isa, copy, p.ix, access.read(code, em.isa, direct, p.ix, p.lanes), p.lanes)

        if cond is None:
            emit_nest(em, v.shape, plan.register_bits(v.dtype), body, bounds=bounds)
        else:
            with code.when(cond):
                emit_nest(em, v.shape, plan.register_bits(v.dtype), body, bounds=bounds)
        code.store(copy.ptr, slot)
    strides = []
    for n, s, d in zip(v.shape, direct.strides, copy.strides, strict=True):
        same = s == d or n == 1
        strides.append(d if same else code.select(whole, code.mul(s, 1), i64(d)))
    em.env[v] = Buffer(code.load("ptr", slot), v.shape, tuple(strides), v.dtype, copy.alloc, owned=False)
    em.arena.touch(copy.alloc)


def _snapshot_safe(em: Emitter, op: ir.Load) -> bool:
    """Whether the value may be read from the Ref later: nothing writes the Ref before the last reader is done."""
    last = _last_read(em, op.result)
    group = plan.same_memory(em.kernel, op.ref)
    ops = em.plan.block.ops
    for k in range(em.pos + 1, min(last + 1, len(ops))):
        if _writes(ops[k], group) and not (k == last and _same_element(em, op, ops[k])):
            return False
    return last < len(ops)


def _last_read(em: Emitter, v: ir.Value) -> int:
    """Position of the last op of this block that may evaluate `v`, through lazy readers."""
    best, todo, seen = em.pos, [v], {v}
    ops = em.plan.block.ops
    while todo:
        for k in em.plan.uses.get(todo.pop(), []):
            best = max(best, k)
            if k < len(ops) and (plan.is_lazy(ops[k]) or isinstance(ops[k], ir.Load)):
                fresh = [r for r in ops[k].results if r not in seen]
                seen.update(fresh)
                todo += fresh
    return best


def _writes(op: ir.Op, group: set[ir.Value]) -> bool:
    if isinstance(op, ir.Store | ir.Atomic):
        return ir.root(op.ref) in group
    # behind an op that meets other programs, their stores are seen, and they may overwrite what was read
    if isinstance(op, (ir.LastArrival, *ir.MEETING)):
        return True
    return any(_writes(inner, group) for b in op.blocks() for inner in b.ops)


def _same_element(em: Emitter, load: ir.Load, store: ir.Op) -> bool:
    """Whether the store writes each element of the load right when it has been read, and nothing else."""
    if not isinstance(store, ir.Store) or store.index != load.index or load.result.type.rank == 0:
        return False
    if store.mask is not None or any(isinstance(d, ir.Take) for d in store.index):
        return False
    todo, seen = [load.result], {load.result}
    while todo:  # every path from the load to the store is elementwise
        for k in em.plan.uses.get(todo.pop(), []):
            op = em.plan.block.ops[k] if k < len(em.plan.block.ops) else None
            if op is store:
                continue
            if not isinstance(op, ir.Map | ir.Select | ir.Cast | ir.Bitcast):
                return False
            if op.result not in seen:
                seen.add(op.result)
                todo.append(op.result)
    return True


# -- stores --------------------------------------------------------------------------------------------------------


@emits(ir.Store)
def _store(em: Emitter, op: ir.Store) -> None:
    shape = op.value.shape
    ref = em.rep(op.ref)
    em.arena.touch(ref.alloc)
    packed = is_packed(op.ref)
    if any(isinstance(d, ir.Take) for d in op.index) or packed:
        _scatter_store(em, op, packed)
        return
    mask = None if told.by_bounds(em, op) else op.mask
    roots = [op.value, *([mask] if mask is not None else [])]
    axes = affine_axes(em, op)
    pair = pairs.left_for(em, op)
    whole = not any(a.checked for a in axes)
    if whole and mask is None and pair is None and (others := _behind(em, op)):
        return _store_together(em, [(op, axes), *others])
    if pair is None:
        em.flagged -= together.kept_for_nobody(em, roots, [op])
        em.prepare(roots, shape if whole else ())
    target = sub_buffer(em, ref, axes, shape)
    bounds, cond = box(em, axes)
    if pair is not None:
        with em.code.when(cond) if cond is not None else contextlib.nullcontext():
            pairs.emit(em, pair, target, {**bounds, **(_all(shape) if cond is not None and not bounds else {})})
        return

    def body(p: Point) -> None:
        value = p.at(op.value, p.ix)
        if mask is None:
            access.write(em.code, em.isa, target, p.ix, value, p.lanes)
        else:
            _masked_write(p, target, value, p.at(mask, p.ix))

    if cond is None:
        emit_nest(em, shape, em.bits(roots), body, bounds=bounds, flat=em.is_short(roots))
    else:
        with em.code.when(cond):
            emit_nest(em, shape, em.bits(roots), body, bounds={**bounds, **({} if bounds else _all(shape))})


def _behind(em: Emitter, op: ir.Store) -> list[tuple[ir.Store, list[Axis]]]:
    """The stores that may come with this one, as far as they write whole tiles."""
    found = ((other, affine_axes(em, other)) for other in together.behind(em, op))
    return list(itertools.takewhile(lambda of: not any(a.checked for a in of[1]), found))


def _store_together(em: Emitter, stores: list[tuple[ir.Store, list[Axis]]]) -> None:
    """Stores of whole tiles of one shape in one nest: what they share is computed once and need not be kept."""
    ops, shape = [op for op, _ in stores], stores[0][0].value.shape
    roots = [op.value for op in ops]
    for op in ops:
        em.arena.touch(em.rep(op.ref).alloc)
    em.prepare(roots, shape)
    em.flagged -= together.alone(em, roots, ops, [])
    targets = [sub_buffer(em, em.rep(op.ref), axes, shape) for op, axes in stores]

    def body(p: Point) -> None:
        for root, target in zip(roots, targets, strict=True):
            access.write(em.code, em.isa, target, p.ix, p.at(root, p.ix), p.lanes)

    emit_nest(em, shape, em.bits(roots), body, flat=em.is_short(roots))
    em.done.update(ops)


def _all(shape) -> Bounds:
    """Run-time bounds of a whole shape; they tell the nest that it may not run, so that it keeps no values."""
    return {0: (i64(0), i64(shape[0]))} if shape else {}


def _masked_write(p: Point, target: Buffer, value: Val, mask: Val) -> None:
    code = p.code
    if p.lanes.count == 1:
        with code.when(mask):
            access.write(code, p.em.isa, target, p.ix, value, p.lanes)
        return
    mask = mask if lanes_of(mask.ty) == p.lanes.count else code.splat(mask, p.lanes.count)
    mask = mask if p.lanes.mask is None else code.binary("and", mask, p.lanes.mask)
    access.write(code, p.em.isa, target, p.ix, value, Lanes(p.lanes.count, mask))


def _scatter_store(em: Emitter, op: ir.Store, packed: bool) -> None:
    """Stores through gathered indices, or into packed arrays: every lane finds its own element."""
    ref = em.rep(op.ref)
    takes = [d.indices for d in op.index if isinstance(d, ir.Take)]
    roots = [op.value, *takes, *([op.mask] if op.mask is not None else [])]
    em.prepare(roots, ())

    def body(p: Point) -> None:
        spot = locate(p, op, p.ix)
        value = p.full(op.value, p.ix)
        if packed:
            _store_packed(p, ref, op, spot, value)
            return
        raw = to_memory(em.code, em.isa, value, op.ref.dtype)
        _raw_store(p, ref, spot, raw)

    emit_nest(em, op.value.shape, em.bits(roots), body, scalar=packed, bounds=_all(op.value.shape))


def _raw_store(p: Point, ref: Buffer, spot: Spot, raw: Val) -> None:
    code, n = p.code, p.lanes.count
    ty = memory_type(ref.dtype)
    if n == 1:
        with code.when(spot.ok if spot.ok is not None else Val("i1", "true")):
            code.store(raw, code.gep(ty, ref.ptr, spot.linear), align=access.BYTES[ty])
        return
    ok = spot.ok if spot.ok is None or lanes_of(spot.ok.ty) == n else code.splat(spot.ok, n)
    mask = ok if p.lanes.mask is None else p.lanes.mask if ok is None else code.binary("and", ok, p.lanes.mask)
    if spot.step == 1:
        first = code.let("i64", f"extractelement {spot.linear}, i64 0")
        access.store_lanes(code, p.em.isa, ty, raw, code.gep(ty, ref.ptr, first), Lanes(n, mask))
        return
    linear = spot.linear if lanes_of(spot.linear.ty) == n else code.splat(spot.linear, n)
    access.scatter_lanes(code, ty, raw, ref.ptr, linear, Lanes(n, mask))


def _store_packed(p: Point, ref: Buffer, op: ir.Store, spot: Spot, value: Val) -> None:
    """Store packed elements by two atomic steps that change only their bits: another program may own the others."""
    code = p.code
    with code.when(spot.ok if spot.ok is not None else Val("i1", "true")):
        ptr = code.gep("i8", ref.ptr, bytes_of(code, spot.linear, ref.dtype))
        raw = own_bits(code, to_memory(code, p.em.isa, value, op.ref.dtype), ref.dtype)
        shift, keep = in_byte(code, spot.linear, ref.dtype)
        code.let("i8", f"atomicrmw and {ptr}, {keep} monotonic")
        code.let("i8", f"atomicrmw or {ptr}, {code.binary('shl', raw, shift)} monotonic")


@emits(ir.Alloc)
def _alloc(em: Emitter, op: ir.Alloc) -> None:
    buf = em.new_buffer(op.shape, op.dtype)
    em.env[op.result] = dataclasses.replace(buf, owned=False)
