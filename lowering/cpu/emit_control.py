"""Loops and branches. A carried tile lives in one buffer for the whole loop; a body that updates it in place moves
nothing."""

from __future__ import annotations

from jtile import ir

from . import access, digit_products
from .access import to_i64
from .convert import register_type
from .emitter import Emitter, Places, emits
from .llvm import Val, i64, scalar_of
from .nest import emit_nest
from .plan import LAZY_OPS, used_by
from .values import Buffer, Lazy

TURNS = 4  # of a short loop that are written one behind the other, so that counting and jumping cost a fourth
SHORT = 16  # ops of such a loop's body, and elements of its largest tile
_SHORT_OPS = (*LAZY_OPS, ir.Load, ir.Store)


class Carry:
    """The carried values of one loop: tiles in buffers, scalars in stack variables."""

    def __init__(self, em: Emitter, slots: list[Buffer | Val]):
        self.em, self.slots = em, slots

    @staticmethod
    def start(em: Emitter, op: ir.For | ir.While) -> Carry:
        """Copy the initial values, or take over the buffer of one that nobody else reads any more."""
        inner = {v for b in op.blocks() for o in b.ops for v in used_by(o)} | {v for b in op.blocks() for v in b.yields}
        slots: list[Buffer | Val] = []
        for v in op.inits:
            if v.type.rank == 0:
                slots.append(em.code.var(register_type(v.dtype, 1), em.scalar(v)))
            elif op.operands().count(v) == 1 and v not in inner and em.overwritable(v, None):
                slots.append(em.env.pop(v))
            else:
                slots.append(em.copy(v, em.new_buffer(v.shape, v.dtype)))
        return Carry(em, slots)

    def enter(self, params: tuple[ir.Value, ...]) -> None:
        """Bind the parameters of a region to the carry."""
        for p, slot in zip(params, self.slots, strict=True):
            self.em.env[p] = slot if isinstance(slot, Buffer) else self.em.code.load(register_type(p.dtype, 1), slot)

    def leave(self, yields: tuple[ir.Value, ...]) -> None:
        """Bring the yielded values into the carry; nothing is overwritten before all are computed."""
        em = self.em
        mine = [s.alloc for s in self.slots if isinstance(s, Buffer)]
        for v in yields:
            if v.type.rank and isinstance(em.rep(v), Lazy):
                em.materialise(v)
        moves = []
        for v, slot in zip(yields, self.slots, strict=True):
            if isinstance(slot, Val):
                moves.append((em.scalar(v), slot))
                continue
            src = em.rep(v)
            if src.ptr == slot.ptr:
                continue
            if src.alloc in mine:
                src = em.copy(v, em.new_buffer(v.shape, v.dtype))
            moves.append((src, slot))
        for src, slot in moves:
            if isinstance(src, Val):
                em.code.store(src, slot)
            else:
                copy_buffer(em, src, slot)

    def finish(self, results: tuple[ir.Value, ...]) -> None:
        for r, slot in zip(results, self.slots, strict=True):
            if isinstance(slot, Buffer):
                self.em.env[r] = slot
                self.em.arena.touch(slot.alloc)
            else:
                self.em.env[r] = self.em.code.load(register_type(r.dtype, 1), slot)


def copy_buffer(em: Emitter, src: Buffer, dst: Buffer) -> None:
    em.arena.touch(src.alloc)
    em.arena.touch(dst.alloc)

    def body(p) -> None:
        access.write(em.code, em.isa, dst, p.ix, access.read(em.code, em.isa, src, p.ix, p.lanes), p.lanes)

    emit_nest(em, dst.shape, max(ir.DTYPES[dst.dtype].bits, 8), body)


def settle(em: Emitter, op: ir.Op) -> None:
    """Compute the lazy outer values that a region reads, once, before it: the region may overwrite their operands."""
    for b in op.blocks():
        inner = [v for o in b.ops for v in digit_products.read(em.isa, o)] + list(b.yields)
        for v in dict.fromkeys(inner):
            if isinstance(em.env.get(v), Lazy) and not isinstance(v.op, ir.Full | ir.Iota):
                if isinstance(v.op, ir.Broadcast) and not v.op.x.type.rank:
                    continue
                em.materialise(v)


def carry_places(block: ir.Block, owners, slots) -> Places:
    """Results that become the next carry may be computed right there once the old value is dead.

    A value of an outer block may not be computed there: it lives on after this block.
    """
    own = {r for op in block.ops for r in op.results}
    places: Places = {}
    for v, owner, slot in zip(block.yields, owners, slots, strict=True):
        if isinstance(slot, Buffer) and v in own and block.yields.count(v) == 1:
            places[v] = (owner, slot)
    return places


@emits(ir.For)
def _for(em: Emitter, op: ir.For) -> None:
    code = em.code
    settle(em, op)
    lo, hi, step = (to_i64(code, em.scalar(v), v.dtype) for v in (op.lo, op.hi, op.step))
    carry = Carry.start(em, op)
    k, *params = op.body.params
    params = tuple(params)
    start = em.arena.tick()
    count = trip_count(em, lo, hi, step)
    outer = dict(em.env)

    def turn(t: Val) -> None:
        index = code.add(lo, code.mul(t, step))
        em.done -= {*op.body.ops}
        em.env[k] = index_value(em, index, k.dtype)
        carry.enter(params)
        em.block(op.body, prefer=carry_places(op.body, params, carry.slots))
        carry.leave(op.body.yields)
        em.leave()

    several = int(count.name) // TURNS * TURNS if _is_short(op, count) else 0
    if several:
        with code.loop(0, several, TURNS) as t:
            for n in range(TURNS):
                turn(code.add(t, n))
    if count.name != str(several) or not several:
        with code.loop(several, count) as t:
            turn(t)
    em.env = outer  # a body that never ran has computed none of the outer values that it would keep
    em.arena.tick()
    em.arena.close_loop(start)
    carry.finish(op.results)


def index_value(em: Emitter, index: Val, dtype: str) -> Val:
    """The number of a turn in its dtype, which holds it: as an i64 it is what it was before."""
    scalar = scalar_of(register_type(dtype, 1))
    if scalar == "i64" or index.name.lstrip("-").isdigit():
        return Val(scalar, index.name)
    narrow = em.code.cast("trunc", index, scalar)
    em.code.widened[narrow.name, dtype] = index
    return narrow


def _is_short(op: ir.For, count: Val) -> bool:
    """Whether a loop's body is a few instructions, and its turns are known to be many."""
    if not count.name.isdigit() or int(count.name) < 2 * TURNS or len(op.body.ops) > SHORT:
        return False
    values = [*op.inits, *(r for o in op.body.ops for r in o.results)]
    small = all(not isinstance(v.type, ir.TileType) or v.type.size <= SHORT for v in values)
    return small and all(v.type.rank == 0 for v in op.inits) and all(isinstance(o, _SHORT_OPS) for o in op.body.ops)


def trip_count(em: Emitter, lo: Val, hi: Val, step: Val) -> Val:
    """Iterations of `range(lo, hi, step)`; a step of 0 runs none."""
    code = em.code
    if step.name == "1":
        return code.sub(hi, lo)
    if all(v.name.lstrip("-").isdigit() for v in (lo, hi, step)):
        return i64(len(range(int(lo.name), int(hi.name), int(step.name))) if int(step.name) else 0)
    up = code.cmp("icmp", "sgt", step, i64(0))
    span = code.select(up, code.sub(hi, lo), code.sub(lo, hi))
    size = code.intrinsic("smax", "i64", code.select(up, step, code.sub(0, step)), i64(1))
    count = code.binary("sdiv", code.binary("add", span, code.binary("sub", size, i64(1))), size)
    count = code.intrinsic("smax", "i64", count, i64(0))
    positive = code.cmp("icmp", "sgt", span, i64(0))
    moves = code.cmp("icmp", "ne", step, i64(0))
    return code.select(code.binary("and", positive, moves), count, i64(0))


@emits(ir.While)
def _while(em: Emitter, op: ir.While) -> None:
    code = em.code
    settle(em, op)
    carry = Carry.start(em, op)
    start = em.arena.tick()
    outer = dict(em.env)
    head, body, done = code.label("while"), code.label("do"), code.label("done")
    code.br(head)
    code.place(head)
    carry.enter(op.cond.params)
    em.block(op.cond, kept=set(op.cond.params))  # the body, or the reader of the results, reads the carry again
    go = em.scalar(op.cond.yields[0])
    em.leave()
    code.cond_br(go, body, done)
    code.place(body)
    carry.enter(op.body.params)
    em.block(op.body, prefer=carry_places(op.body, op.body.params, carry.slots))
    carry.leave(op.body.yields)
    em.leave()
    code.br(head)
    code.place(done)
    em.env = outer
    em.arena.tick()
    em.arena.close_loop(start)
    carry.finish(op.results)


@emits(ir.If)
def _if(em: Emitter, op: ir.If) -> None:
    code = em.code
    settle(em, op)
    cond = em.scalar(op.cond)
    donors = [_donor(em, op, k) for k in range(len(op.results))]
    donors = [d if donors.index(d) == k else None for k, d in enumerate(donors)]
    slots: list[Buffer | Val] = []
    for r, donor in zip(op.results, donors, strict=True):
        if r.type.rank == 0:
            slots.append(code.var(register_type(r.dtype, 1)))
        else:
            slots.append(em.rep(donor) if donor is not None else em.new_buffer(r.shape, r.dtype))
    then, other, done = code.label("then"), code.label("else"), code.label("endif")
    code.cond_br(cond, then, other)
    for label, block in ((then, op.then), (other, op.orelse)):
        code.place(label)
        saved = dict(em.env)
        _branch(em, block, slots, donors)
        em.env = saved
        code.br(done)
    code.place(done)
    em.arena.tick()
    for r, slot in zip(op.results, slots, strict=True):
        if isinstance(slot, Buffer):
            em.env[r] = slot
            em.arena.touch(slot.alloc)
        else:
            em.env[r] = code.load(register_type(r.dtype, 1), slot)


def _donor(em: Emitter, op: ir.If, k: int) -> ir.Value | None:
    """An outer value that one branch passes through and that dies here: the other branch may update its buffer in
    place."""
    for block in (op.then, op.orelse):
        v = block.yields[k]
        if v.type.rank and isinstance(em.env.get(v), Buffer) and em.overwritable(v, op.results[k]):
            uses = [b.yields.count(v) for b in (op.then, op.orelse)]
            if max(uses) == 1:
                return v
    return None


def _branch(em: Emitter, block: ir.Block, slots, donors) -> None:
    """One branch; a donor may be overwritten in it unless the branch itself passes it through elsewhere."""
    donated = {d for k, d in enumerate(donors) if d is not None and block.yields.count(d) == 0}
    places = carry_places(block, donors, slots)
    places = {v: (donor, slot) for v, (donor, slot) in places.items() if donor is None or donor in donated}
    em.block(block, donated, prefer=places)
    Carry(em, slots).leave(block.yields)
    em.leave()
