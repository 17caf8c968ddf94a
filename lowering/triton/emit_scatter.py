"""Scatter into a tile: TTIR has no such op, so every slot looks for its own updates."""

from __future__ import annotations

from jtile import ir

from . import moves
from .emit_sort import network
from .emitter import Emitter, emits
from .lanes import fold
from .ttir import Val

COMPARED = 16384  # lanes of the matrix updates x slots that is compared at a time
SORTED = 1 << 17  # lanes of the whole matrix from which on the updates are sorted by their slots
NONE = 2**31 - 1  # stands for the number of an update where there is none
_BOOL = {"add": "or", "max": "or", "mul": "and", "min": "and"}


@emits(ir.Scatter)
def _scatter(em: Emitter, op: ir.Scatter) -> Val:
    """Slots take their updates in rounds, in each round the next one of their own, to keep the order of updates."""
    x = em.val(op.x)
    if 0 in op.x.shape or 0 in op.updates.shape:
        return x
    slots = _slots(em, op)
    search = _Compared(em, slots, x.size) if x.size * slots.size <= SORTED else _Sorted(em, slots, x.size)
    if op.fn == "set":
        return _apply(em, op, search.last(), x)
    if slots.size == 1:
        return _apply(em, op, search.find(search.start), x)
    return _rounds(em, op, search)


def _slots(em: Emitter, op: ir.Scatter) -> Val:
    """The slot of each update as i32; -1 for an update outside the tile."""
    code, info = em.code, ir.DTYPES[op.indices.dtype]
    wide = em.integer(op.indices, "i64" if info.bits == 64 else "i32")
    inside = code.cmp("ult", wide, code.const(op.x.shape[0], wide.elem, wide.shape))
    inside = code.both(inside, em.valid(op.indices.shape))
    if inside is None:
        raise AssertionError("a comparison is a mask")
    slots = code.to_int(wide, "i32")
    return code.select(inside, slots, code.const(-1, "i32", slots.shape))


def _rounds(em: Emitter, op: ir.Scatter, search: _Compared | _Sorted) -> Val:
    """The loop of rounds: as many as the most updates that one slot gets."""
    code, start = em.code, search.start
    carried = [start, search.find(start), em.val(op.x)]
    kinds = [(v.shape, v.elem) for v in carried]
    types = ", ".join(v.type for v in carried)
    fresh = lambda: [Val(code.name(), *kind) for kind in kinds]
    state, found, old = before = fresh()
    carry = ", ".join(f"{v.name} = {start.name}" for v, start in zip(before, carried, strict=True))
    result = code.let_many(f"scf.while ({carry}) : ({types}) -> ({types}) {{", kinds)[2]
    with code.region():
        more = code.cmp("slt", _reduce(em, found, 0, "minsi"), code.i32(NONE))
        code.do(f"scf.condition({more.name}) {', '.join(v.name for v in before)} : {types}")
    code.do("} do {")
    state, found, old = after = fresh()
    code.do(f"^bb0({', '.join(f'{v.name}: {v.type}' for v in after)}):")
    with code.region():
        new, state = _apply(em, op, found, old), search.behind(found, state)
        code.do(f"scf.yield {state.name}, {search.find(state).name}, {new.name} : {types}")
    code.do("}")
    return result


def _apply(em: Emitter, op: ir.Scatter, at: Val, old: Val) -> Val:
    """The slots after each has taken the update with the number in `at`, where there is one."""
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


class _Compared:
    """Slots find their updates by comparing each with all, some at a time; the state is the last one that it took."""

    def __init__(self, em: Emitter, slots: Val, n: int):
        self.em, self.slots, self.n = em, slots, n
        self.start = em.code.const(-1, "i32", (n,))

    def last(self) -> Val:
        """The number of the last update of each slot, or -1."""
        return self._search(None)

    def find(self, state: Val) -> Val:
        """The number of the next update of each slot, or NONE."""
        return self._search(state)

    def behind(self, at: Val, state: Val) -> Val:
        """The state when the update `at` is taken."""
        return at

    def _search(self, done: Val | None) -> Val:
        code, m, n = self.em.code, self.slots.size, self.n
        chunk = max(1, min(m, COMPARED // n))
        if chunk == m:
            return self._among(self.slots, code.arange(m), done)
        none = code.const(-1 if done is None else NONE, "i32", (n,))
        first, best = Val(code.name(), (), "i32"), Val(code.name(), (n,), "i32")
        head = f"scf.for {first.name} = {code.i32(0).name} to {code.i32(m).name} step {code.i32(chunk).name}"
        result = code.let(f"{head} iter_args({best.name} = {none.name}) -> ({none.type}) : i32 {{", (n,), "i32")
        with code.region():
            numbers = code.add(code.splat(first, (chunk,)), code.arange(chunk))
            found = self._among(moves.gather(code, self.slots, numbers), numbers, done)
            better = code.op("arith.maxsi" if done is None else "arith.minsi", best, found)
            code.do(f"scf.yield {better.name} : {better.type}")
        code.do("}")
        return result

    def _among(self, slots: Val, numbers: Val, done: Val | None) -> Val:
        """The last update of each slot among some (-1: none), or the first one behind `done` (NONE)."""
        code, shape = self.em.code, (slots.size, self.n)  # threads lie along the slots: they reduce their own lanes
        number = code.along(numbers, 0, shape)
        mine = code.cmp("eq", code.along(slots, 0, shape), code.along(code.arange(self.n), 1, shape))
        if done is not None:
            mine = code.op("arith.andi", mine, code.cmp("sgt", number, code.along(done, 1, shape)))
        found = code.select(mine, number, code.const(-1 if done is None else NONE, "i32", shape))
        return _reduce(self.em, found, 0, "maxsi" if done is None else "minsi")


class _Sorted:
    """Updates sorted by slot, then number: a slot's own are a run, found by bisection; the state is a place in it."""

    def __init__(self, em: Emitter, slots: Val, n: int):
        code, m = em.code, slots.size
        self.em, self.n, self.m = em, n, m
        self.elem = "i32" if (n + 1) * m < 2**31 else "i64"
        # updates without a slot come behind all others
        some = code.cmp("sge", slots, code.const(0, "i32", (m,)))
        slots = code.to_int(code.select(some, slots, code.const(n, "i32", (m,))), self.elem)
        numbers = code.to_int(code.arange(m), self.elem)
        self.keys = network(em, code.add(code.scale(slots, m), numbers), m)
        self.slot = code.to_int(code.arange(n), self.elem)

    @property
    def start(self) -> Val:
        """The first place of each slot's run."""
        return self._below(self.em.code.scale(self.slot, self.m))

    def last(self) -> Val:
        """The number of the last update of each slot, or NONE."""
        end = self._below(self.em.code.scale(self.em.code.shift(self.slot, 1), self.m))
        return self.find(self.em.code.shift(end, -1))

    def find(self, state: Val) -> Val:
        """The number of the next update of each slot, or NONE."""
        code = self.em.code
        inside = code.cmp("ult", state, code.const(self.m, "i32", state.shape))
        key = moves.pick(self.em, self.keys, moves.low_bits(code, state, self.m))
        own = code.cmp("eq", moves.shifted_right(code, key, self.m), self.slot)
        number = code.to_int(moves.low_bits(code, key, self.m), "i32")
        return code.select(code.op("arith.andi", inside, own), number, code.const(NONE, "i32", state.shape))

    def behind(self, at: Val, state: Val) -> Val:
        """The state when the update `at` is taken: slots without a further update stay behind their runs."""
        return self.em.code.shift(state, 1)

    def _below(self, bound: Val) -> Val:
        """How many keys are less than a bound, for each slot."""
        code, step = self.em.code, self.m // 2
        count = code.const(0, "i32", (self.n,))
        for by in [*(step >> k for k in range(step.bit_length())), 1]:
            key = moves.pick(self.em, self.keys, code.shift(count, by - 1))
            less = code.cmp("slt", key, bound)
            count = code.select(less, code.shift(count, by), count)
        return count


def _reduce(em: Emitter, v: Val, axis: int, fn: str) -> Val:
    if v.shape[axis] == 1:
        return em.code.reshape(v, (*v.shape[:axis], *v.shape[axis + 1 :]))
    return fold(em.code, v, f"arith.{fn}", axis)
