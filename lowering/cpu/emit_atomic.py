"""Atomics: one read-modify-write a lane, in row-major order of the tile."""

from __future__ import annotations

from jtile import ir

from . import access, plan
from .access import Lanes, const_value
from .convert import from_memory, memory_type, to_memory
from .elementwise import emit_elementwise
from .emitter import Emitter, emits
from .evaluate import Point
from .lane_loads import Spot, locate
from .llvm import Val, i64
from .nest import emit_nest
from .packed import bytes_of, in_byte, is_packed, own_bits
from .values import Lazy

_NATIVE = {"add": "add", "and": "and", "or": "or", "xor": "xor", "xchg": "xchg"}
_WORD = {1: "i8", 2: "i16", 4: "i32", 8: "i64"}


@emits(ir.Atomic)
def _atomic(em: Emitter, op: ir.Atomic) -> None:
    used = op.result in em.plan.uses
    out = em.new_buffer(op.value.shape, op.value.dtype)
    shape = op.value.shape
    takes = [d.indices for d in op.index if isinstance(d, ir.Take)]
    roots = [op.value, *takes, *(v for v in (op.mask, op.compare) if v is not None)]
    em.prepare(roots, ())
    for v in roots:  # the update goes lane by lane below: compute its operands in vectors before
        if isinstance(em.rep(v), Lazy) and not isinstance(v.op, ir.Full | ir.Iota):
            em.materialise(v)
    em.arena.touch(em.rep(op.ref).alloc)
    if used:
        zero = const_value(0, op.value.dtype)
        emit_nest(
            em, shape, plan.register_bits(out.dtype), lambda p: access.write(em.code, em.isa, out, p.ix, zero, p.lanes)
        )

    def body(p: Point, alone: bool) -> None:
        spot = locate(p, op, p.ix)
        value = p.at(op.value, p.ix)
        compare = p.at(op.compare, p.ix) if op.compare is not None else None
        with em.code.when(spot.ok if spot.ok is not None else Val("i1", "true")):
            old = _one(em, op, spot, value, compare, alone)
            if used:
                access.write(em.code, em.isa, out, p.ix, old, Lanes(1))

    bounds = {0: (i64(0), i64(shape[0]))} if shape else {}
    update = lambda alone: emit_nest(em, shape, 32, lambda p: body(p, alone), scalar=True, bounds=bounds)
    if em.alone is None or is_packed(op.ref) or op.ref.type.role == "scratch":
        update(False)
    else:  # one thread runs all programs: a locked addition takes some twenty cycles, and waits for what is before it
        with em.code.when(em.alone):
            update(True)
        with em.code.when(em.code.binary("xor", em.alone, Val("i1", "true"))):
            update(False)
    em.set_buffer(op.result, out)


def _one(em: Emitter, op: ir.Atomic, spot: Spot, value: Val, compare: Val | None, alone: bool) -> Val:
    """Update one element; returns its old value in register form. `alone`: no other program runs meanwhile."""
    code, ref, dtype = em.code, em.rep(op.ref), op.ref.dtype
    info = ir.DTYPES[dtype]
    if is_packed(op.ref):
        return _packed_loop(em, op, spot, value, compare)
    ty = memory_type(dtype)
    ptr = code.gep(ty, ref.ptr, spot.linear)
    word = _WORD[access.BYTES[ty]]
    if alone or op.ref.type.role == "scratch":
        return _private(em, op, ptr, value, compare)
    if info.kind in "iu" and op.fn in (*_NATIVE, "max", "min"):
        name = _NATIVE.get(op.fn) or (op.fn if info.kind == "i" else "u" + op.fn)
        if info.bits >= 8:
            raw = to_memory(code, em.isa, value, dtype)
            return from_memory(code, em.isa, code.let(ty, f"atomicrmw {name} {ptr}, {raw} monotonic"), dtype)

    def update(old_bits: Val) -> Val:
        old = from_memory(code, em.isa, code.cast("bitcast", old_bits, ty), dtype)
        new = _apply(em, op.fn, old, value, compare, dtype, old_bits)
        return code.cast("bitcast", to_memory(code, em.isa, new, dtype), word)

    bits = exchange_loop(em, ptr, word, update)
    return from_memory(code, em.isa, code.cast("bitcast", bits, ty), dtype)


def _private(em: Emitter, op: ir.Atomic, ptr: Val, value: Val, compare: Val | None) -> Val:
    """Update an element that no other program sees: load, compute, store."""
    code, dtype = em.code, op.ref.dtype
    ty = memory_type(dtype)
    raw = code.load(ty, ptr, align=access.BYTES[ty])
    old = from_memory(code, em.isa, raw, dtype)
    bits = code.cast("bitcast", raw, _WORD[access.BYTES[ty]])
    new = _apply(em, op.fn, old, value, compare, dtype, bits)
    code.store(to_memory(code, em.isa, new, dtype), ptr, align=access.BYTES[ty])
    return old


def exchange_loop(em: Emitter, ptr: Val, word: str, update) -> Val:
    """Compare and exchange until no other program wrote between the read and the exchange; returns the old bits."""
    code = em.code
    size = int(word[1:]) // 8
    slot = code.var(word, code.let(word, f"load atomic {word}, {ptr} monotonic, align {size}"))
    head, done = code.label("cas"), code.label("casdone")
    code.br(head)
    code.place(head)
    old = code.load(word, slot)
    new = update(old)
    pair = code.let(f"{{ {word}, i1 }}", f"cmpxchg {ptr}, {old}, {new} monotonic monotonic")
    code.store(code.let(word, f"extractvalue {pair}, 0"), slot)
    code.cond_br(code.let("i1", f"extractvalue {pair}, 1"), done, head)
    code.place(done)
    return code.load(word, slot)


def _apply(em: Emitter, fn: str, old: Val, value: Val, compare: Val | None, dtype: str, old_bits: Val) -> Val:
    """The element that an atomic operation stores in place of the old one."""
    code = em.code
    if fn == "xchg":
        return value
    if fn == "cas":
        want = code.cast("bitcast", to_memory(code, em.isa, compare, dtype), old_bits.ty)
        return code.select(code.cmp("icmp", "eq", old_bits, want), value, old)
    if ir.DTYPES[dtype].kind == "b":
        return code.binary({"add": "or", "max": "or", "min": "and"}.get(fn, fn), old, value)
    return emit_elementwise(code, em.isa, fn, [old, value], dtype)


def _packed_loop(em: Emitter, op: ir.Atomic, spot: Spot, value: Val, compare: Val | None) -> Val:
    """Update a packed element by exchanging its whole byte."""
    code, ref, dtype = em.code, em.rep(op.ref), op.ref.dtype
    ptr = code.gep("i8", ref.ptr, bytes_of(code, spot.linear, dtype))
    shift, keep = in_byte(code, spot.linear, dtype)
    rest = Val("i8", str(8 - ir.DTYPES[dtype].bits))

    def element(byte: Val) -> Val:
        low = code.binary("shl", code.binary("lshr", byte, shift), rest)
        return code.binary("ashr" if ir.DTYPES[dtype].kind == "i" else "lshr", low, rest)

    def update(byte: Val) -> Val:
        old = from_memory(code, em.isa, element(byte), dtype)
        new = _apply(em, op.fn, old, value, compare, dtype, to_memory(code, em.isa, old, dtype))
        raw = own_bits(code, to_memory(code, em.isa, new, dtype), dtype)
        return code.binary("or", code.binary("and", byte, keep), code.binary("shl", raw, shift))

    byte = exchange_loop(em, ptr, "i8", update)
    return from_memory(code, em.isa, element(byte), dtype)
