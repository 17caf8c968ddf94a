"""Scatter into a tile: TTIR has no such op, so every slot looks for its own updates."""

from __future__ import annotations

from jtile import ir
from jtile.lowering.triton import moves
from jtile.lowering.triton.emitter import Emitter, emits
from jtile.lowering.triton.lanes import fold
from jtile.lowering.triton.ttir import Val

COMPARED = 8192  # lanes of the matrix slots x updates that is compared at a time
NONE = 2**31 - 1  # the number of an update that there is not
_BOOL = {"add": "or", "max": "or", "mul": "and", "min": "and"}


@emits(ir.Scatter)
def _scatter(em: Emitter, op: ir.Scatter) -> Val:
    """Slots take their updates in rounds, each the next one of its own: the order of the updates, whatever its cost."""
    code, x = em.code, em.val(op.x)
    if not op.x.type.size or not op.updates.type.size:
        return x
    slots = _slots(em, op)
    if op.fn == "set":
        return _apply(em, op, _last(em, slots, x.size), x)
    start = code.const(-1, "i32", x.shape)
    if slots.size == 1:
        return _apply(em, op, _next(em, slots, start), x)
    return _rounds(em, op, slots, start)


def _slots(em: Emitter, op: ir.Scatter) -> Val:
    """The slot of each update as i32; -1 where there is none."""
    code, info = em.code, ir.DTYPES[op.indices.dtype]
    wide = em.integer(op.indices, "i64" if info.bits == 64 else "i32")
    inside = code.cmp("ult", wide, code.const(op.x.shape[0], wide.elem, wide.shape))
    inside = code.both(inside, em.valid(op.indices.shape))
    if inside is None:
        raise AssertionError("a comparison is a mask")
    slots = code.to_int(wide, "i32")
    return code.select(inside, slots, code.const(-1, "i32", slots.shape))


def _rounds(em: Emitter, op: ir.Scatter, slots: Val, start: Val) -> Val:
    """As many rounds as the most updates that one slot gets."""
    code, x = em.code, em.val(op.x)
    done, old = Val(code.name(), start.shape, "i32"), Val(code.name(), x.shape, x.elem)
    types = f"{done.type}, {old.type}"
    head = f"scf.while ({done.name} = {start.name}, {old.name} = {x.name}) : ({types}) -> ({types}) {{"
    result = code.let_many(head, [(done.shape, done.elem), (old.shape, old.elem)])[1]
    with code.region():
        following = _next(em, slots, done)
        nearest = _reduce(em, following, 0, "minsi")
        more = code.cmp("slt", nearest, code.i32(NONE))
        code.do(f"scf.condition({more.name}) {following.name}, {old.name} : {types}")
    code.do("} do {")
    at, before = Val(code.name(), start.shape, "i32"), Val(code.name(), x.shape, x.elem)
    code.do(f"^bb0({at.name}: {at.type}, {before.name}: {before.type}):")
    with code.region():
        after = _apply(em, op, at, before)
        code.do(f"scf.yield {at.name}, {after.name} : {types}")
    code.do("}")
    return result


def _apply(em: Emitter, op: ir.Scatter, at: Val, old: Val) -> Val:
    """Each slot with the update of that number, where there is one."""
    code, updates = em.code, em.val(op.updates)
    some = code.cmp("ult", at, code.const(NONE, "i32", at.shape))
    some = code.both(some, code.cmp("sge", at, code.const(0, "i32", at.shape)))
    got = moves.pick(em, updates, moves.low_bits(code, at, updates.size))
    new = got if op.fn == "set" else _combine(em, op, old, got)
    return code.select(some, new, old)  # type: ignore[arg-type]


def _combine(em: Emitter, op: ir.Scatter, a: Val, b: Val) -> Val:
    """The elementwise function of the scatter, as the kernel's own code computes it."""
    dtype = op.x.dtype
    args = ir.Value(op.x.type), ir.Value(op.x.type)
    em.env.update(zip(args, (a, b), strict=True))
    fn = _BOOL[op.fn] if ir.DTYPES[dtype].kind == "b" else op.fn
    function = ir.build(ir.Map(fn, args), op.loc)
    em.op(function)
    return em.val(function.result)


# ---- which update is a slot's next ----------------------------------------------------------------------------------


def _next(em: Emitter, slots: Val, done: Val) -> Val:
    """The number of the first update of each slot behind `done`, or NONE."""
    return _search(em, slots, done.size, done)


def _last(em: Emitter, slots: Val, n: int) -> Val:
    """The number of the last update of each slot, or -1."""
    return _search(em, slots, n, None)


def _search(em: Emitter, slots: Val, n: int, done: Val | None) -> Val:
    """Compares all slots with some updates at a time."""
    code, m = em.code, slots.size
    chunk = max(1, min(m, COMPARED // n))
    if chunk == m:
        return _among(em, slots, code.arange(m), n, done)
    none = code.const(-1 if done is None else NONE, "i32", (n,))
    first, best = Val(code.name(), (), "i32"), Val(code.name(), (n,), "i32")
    head = f"scf.for {first.name} = {code.i32(0).name} to {code.i32(m).name} step {code.i32(chunk).name}"
    result = code.let(f"{head} iter_args({best.name} = {none.name}) -> ({none.type}) : i32 {{", (n,), "i32")
    with code.region():
        numbers = code.add(code.splat(first, (chunk,)), code.arange(chunk))
        found = _among(em, moves.gather(code, slots, numbers), numbers, n, done)
        better = code.op("arith.maxsi" if done is None else "arith.minsi", best, found)
        code.do(f"scf.yield {better.name} : {better.type}")
    code.do("}")
    return result


def _among(em: Emitter, slots: Val, numbers: Val, n: int, done: Val | None) -> Val:
    """The last update of each slot among some (-1: none), or the first one behind `done` (NONE)."""
    code, shape = em.code, (n, slots.size)
    number = code.along(numbers, 1, shape)
    mine = code.cmp("eq", code.along(slots, 1, shape), code.along(code.arange(n), 0, shape))
    if done is not None:
        mine = code.op("arith.andi", mine, code.cmp("sgt", number, code.along(done, 0, shape)))
    found = code.select(mine, number, code.const(-1 if done is None else NONE, "i32", shape))
    return _reduce(em, found, 1, "maxsi" if done is None else "minsi")


def _reduce(em: Emitter, v: Val, axis: int, fn: str) -> Val:
    if v.shape[axis] == 1:
        return em.code.reshape(v, (*v.shape[:axis], *v.shape[axis + 1 :]))
    return fold(em, v, f"arith.{fn}", axis)
