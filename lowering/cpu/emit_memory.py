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
from .access import Lanes, const_value, to_i64
from .convert import from_memory, memory_type, to_memory
from .emitter import Emitter, emits
from .evaluate import Index, Point, rule, scalar_i64
from .llvm import Val, i64, lanes_of
from .nest import Bounds, emit_nest, vector_axis
from .packed import bytes_of, extract, in_byte, is_packed, own_bits
from .values import Buffer, Ix, Lazy, dense_strides


@dataclasses.dataclass
class Axis:
    """One dimension of an access: element `start + i * stride` for i < size; `axis` is its axis in the tile (None:
    dropped)."""

    start: Val
    size: int
    stride: int
    limit: int | Val
    axis: int | None
    checked: bool


def affine_axes(em: Emitter, op: ir.Load | ir.Store | ir.Atomic) -> list[Axis | None]:
    """The dimensions of an access in order; None stands for a gathered one. Emits the start computations."""
    out: list[Axis | None] = []
    k, taken = 0, False
    for d, n in zip(op.index, op.ref.shape, strict=True):
        if isinstance(d, ir.Take):
            k += 0 if taken else d.indices.type.rank
            taken = True
            out.append(None)
            continue
        start = scalar_i64(em, ir.dim_value(d))
        size, stride, axis = 1, 1, None
        if isinstance(d, ir.Tile):
            start, size, axis = em.code.mul(start, d.step), d.size, k
        elif isinstance(d, ir.Span):
            size, stride, axis = d.size, d.stride, k
        k += axis is not None
        out.append(Axis(start, size, stride, em.size(n), axis, _may_leave(op, start, size, stride, n)))
    return out


def _may_leave(op, start: Val, size: int, stride: int, n: ir.Size) -> bool:
    if not getattr(op, "checked", True) or size == 0:
        return False
    if start.name.lstrip("-").isdigit():
        return int(start.name) < 0 or not ir.at_least(n, int(start.name) + 1 + (size - 1) * stride)
    return True


def take_axes(op) -> tuple[int, int]:
    """(first tile axis of the gathered indices, their rank)."""
    k = 0
    for d in op.index:
        if isinstance(d, ir.Take):
            return k, d.indices.type.rank
        k += not isinstance(d, ir.At)
    return 0, 0


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
    if v.type.rank == 0 and checked:
        return False
    if not checked or overhang.unread(em, op, axes):
        em.set_buffer(v, direct)
        return True
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


@dataclasses.dataclass
class Spot:
    """Where the lanes of one access stand: `linear` element index per lane (uniform or a vector), and which lanes are
    legal."""

    linear: Val
    ok: Val | None
    contiguous: bool


def locate(p: Point, op, ix: Index) -> Spot:
    """Element index and legality of every lane of an access at tile index `ix` (bounds, gathers and the user's
    mask)."""
    em, code = p.em, p.code
    ref = em.rep(op.ref)
    first, rank = take_axes(op)
    n = p.lanes.count if any(x.step for x in ix) else 1
    linear, ok = i64(0), None
    contiguous = n > 1
    for a, d, s, limit in zip(affine_axes(em, op), op.index, ref.strides, op.ref.shape, strict=True):
        if a is None:
            at = to_i64(code, p.at(d.indices, ix[first : first + rank]), d.indices.dtype)
            checked, varies = True, lanes_of(at.ty) > 1
        else:
            x = Ix(i64(0)) if a.axis is None else ix[a.axis]
            at = p.ints(Ix(code.add(a.start, code.mul(x.base, a.stride)), x.step * a.stride))
            checked, varies = a.checked, x.step != 0
        if varies and (a is None or not isinstance(s, int) or ix[a.axis].step * a.stride * s != 1):
            contiguous = False
        if checked:
            good = code.cmp("icmp", "ult", at, code.splat(code.mul(em.size(limit), 1), lanes_of(at.ty)))
            ok = good if ok is None else _wide(code, "and", ok, good)
        linear = _wide(code, "add", linear, _wide(code, "mul", at, code.mul(s, 1)))
    if op.mask is not None:
        good = p.at(op.mask, ix)
        ok = good if ok is None else _wide(code, "and", ok, good)
    return Spot(linear, ok, contiguous and lanes_of(linear.ty) > 1)


def _wide(code, op: str, a: Val, b: Val) -> Val:
    n = max(lanes_of(a.ty), lanes_of(b.ty))
    a, b = (x if lanes_of(x.ty) == n else code.splat(x, n) for x in (a, b))
    if n == 1 and a.ty == "i64" and op in ("add", "mul"):
        return code.add(a, b) if op == "add" else code.mul(a, b)
    return code.binary(op, a, b)


@rule(ir.Load)
def _lane_load(p: Point, op: ir.Load, ix: Index) -> Val:
    code, em = p.code, p.em
    ref = em.rep(op.ref)
    em.arena.touch(ref.alloc)
    spot = locate(p, op, ix)
    packed = is_packed(op.ref)
    n = lanes_of(spot.linear.ty)
    if n == 1 and spot.ok is not None and lanes_of(spot.ok.ty) > 1:
        n = lanes_of(spot.ok.ty)
        spot = Spot(code.splat(spot.linear, n), spot.ok, False)
    where = bytes_of(code, spot.linear, ref.dtype) if packed else spot.linear
    raw = _raw_load(p, ref, where, spot, n, packed)
    value = from_memory(code, em.isa, extract(code, raw, spot.linear, ref.dtype) if packed else raw, op.ref.dtype)
    if spot.ok is None or (op.pad == 0 and n > 1 and not packed and ir.DTYPES[op.ref.dtype].kind != "f"):
        return value
    pad = code.splat(const_value(op.pad, op.ref.dtype), n)
    ok = spot.ok if lanes_of(spot.ok.ty) == n else code.splat(spot.ok, n)
    return code.select(ok, value, pad)


def _raw_load(p: Point, ref: Buffer, where: Val, spot: Spot, n: int, packed: bool) -> Val:
    code = p.code
    ty = "i8" if packed else memory_type(ref.dtype)
    if n == 1:
        ptr = code.gep(ty, ref.ptr, where)
        if spot.ok is not None:
            ptr = code.select(spot.ok, ptr, code.var("i64", count=8, align=64))
        return code.load(ty, ptr, align=access._BYTES[ty])
    ok = spot.ok if spot.ok is None or lanes_of(spot.ok.ty) == n else code.splat(spot.ok, n)
    mask = ok if p.lanes.mask is None else p.lanes.mask if ok is None else code.binary("and", ok, p.lanes.mask)
    if spot.contiguous and not packed:
        first = code.let("i64", f"extractelement {where}, i64 0")
        return access.load_lanes(code, ty, code.gep(ty, ref.ptr, first), Lanes(n, mask))
    return access.gather_lanes(code, ty, ref.ptr, where, Lanes(n, mask))


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
    pair = pairs.parts(op.value.op) if isinstance(em.env.get(op.value), Lazy) else None  # a pair left for this store
    whole = not any(a.checked for a in axes)
    if whole and mask is None and pair is None and (others := _behind(em, op)):
        return _store_together(em, [(op, axes), *others])
    em.prepare([] if pair else roots, shape if whole else ())
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
            code.store(raw, code.gep(ty, ref.ptr, spot.linear), align=access._BYTES[ty])
        return
    ok = spot.ok if spot.ok is None or lanes_of(spot.ok.ty) == n else code.splat(spot.ok, n)
    mask = ok if p.lanes.mask is None else p.lanes.mask if ok is None else code.binary("and", ok, p.lanes.mask)
    if spot.contiguous:
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
