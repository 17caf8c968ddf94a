"""Atomics: one instruction a lane where hardware has one, else compare-and-exchange of the word that holds the element.

All are relaxed: the language promises that nothing comes between the read and the write of one element, and programs
that tell each other more than that are races. Lanes of one tile meet in the same element only through a gathered index;
where their order can be seen (old values that are used, `xchg`, `cas`), such lanes take turns in row-major order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jtile import ir

from . import versions
from .addresses import addresses, lines, offsets, pointers, resolve, touches_nothing
from .emitter import Buffer, Emitter, elem_of, emits, padded
from .hazards import may_repeat, meet
from .lanes import fold
from .moves import gather
from .ttir import Val, bits

_BITWISE = ("and", "or", "xor")
_BOOL = {"add": "or", "max": "or", "min": "and"}
PAIRS = 1 << 13  # comparisons of one step when lanes look for others with their index


@emits(ir.Atomic)
def _atomic(em: Emitter, op: ir.Atomic) -> Val:
    buf = em.refs[op.ref]
    if touches_nothing(buf, op.index):
        return em.zeros(op.value)
    meet(em, op)
    used = _is_used(em, op.result)
    if em.features.npu and used:  # there the old value is read some time before the update
        em.refuse(op, f"no atomic {op.fn} whose old value is used: only the update is atomic")
    a = _Access.of(em, op, buf)
    ordered = may_repeat(op.index) and (used or op.fn in ("xchg", "cas"))
    return _in_turns(em, a, _ranks(em, op), used) if ordered else _once(em, a, a.mask)


def _is_used(em: Emitter, v: ir.Value) -> bool:
    ops = list(em.kernel.body.walk())
    return any(v in op.operands() or any(v in b.yields for b in op.blocks()) for op in ops)


@dataclasses.dataclass(frozen=True)
class _Access:
    """The elements that an atomic touches, and what it does to them.

    Attributes:
      fn: the op's function; bools know bitwise functions only.
      pointers: to the elements, or None where they are no words of 32 or 64 bits.
      offset: offsets of the elements from the start of the array.
      mask: the lanes that touch memory; None: all.
      value, compare: tiles as registers hold them.
    """

    op: ir.Atomic
    buf: Buffer
    fn: str
    pointers: Val
    offset: Val | None
    mask: Val | None
    value: Val
    compare: Val | None

    @property
    def dtype(self) -> str:
        return self.buf.dtype

    @property
    def bits(self) -> int:
        return ir.DTYPES[self.dtype].bits

    @property
    def kind(self) -> str:
        return ir.DTYPES[self.dtype].kind

    @classmethod
    def of(cls, em: Emitter, op: ir.Atomic, buf: Buffer) -> _Access:
        fn = _BOOL.get(op.fn, op.fn) if buf.dtype == "bool" else op.fn
        value, compare = em.val(op.value), None if op.compare is None else em.val(op.compare)
        a = cls(op, buf, fn, buf.pointer, None, None, value, compare)
        if em.features.npu:
            return _harmless(em, op, a)
        if _native(em, a):
            pointers, inside = addresses(em, buf, op.index)
            return dataclasses.replace(a, pointers=pointers, mask=em.code.both(inside, em.mask(op)))
        places = resolve(em, buf, lines(em, buf, op.index), ir.index_shape(op.index))
        return dataclasses.replace(a, offset=offsets(em, places), mask=em.code.both(places.mask, em.mask(op)))


def _harmless(em: Emitter, op: ir.Atomic, a: _Access) -> _Access:
    """An access for a compiler that forgets the mask of lanes with indices of their own: masked lanes apply the neutral
    operand, such as zero, to the first element. The compiler has no exchanges, and no functions of narrow elements."""
    code, fn = em.code, _native(em, a)
    if fn is None or fn == "exch":
        em.refuse(op, f"no atomic {op.fn} of {a.dtype}: add, max, min, and, or, xor of 32 bits, and add of float32")
    assert fn is not None
    places = resolve(em, a.buf, lines(em, a.buf, op.index), ir.index_shape(op.index))
    mask = code.both(places.mask, em.mask(op))
    if not any(isinstance(d, ir.Take) for d in op.index):
        return dataclasses.replace(a, pointers=pointers(em, a.buf.pointer, places), mask=mask)
    at = offsets(em, places)
    value = a.value
    if mask is not None:
        at = code.select(mask, at, code.const(0, at.elem, at.shape))
        value = code.select(mask, value, code.const(_neutral(fn, a.bits), value.elem, value.shape))
    base = code.splat(a.buf.pointer, at.shape)
    where = code.let(f"tt.addptr {base.name}, {at.name} : {base.type}, {at.type}", at.shape, base.elem)
    return dataclasses.replace(a, pointers=where, mask=mask, value=value)


def _neutral(fn: str, bits: int) -> int:
    """The operand that leaves an element as it is."""
    highest = (1 << (bits - 1)) - 1
    return {"and": -1, "max": -highest - 1, "min": highest, "umin": -1}.get(fn, 0)


def _native(em: Emitter, a: _Access) -> str | None:
    """The function of `tt.atomic_rmw` that does this on pointers to elements; None where there is none."""
    if a.bits == 16 and a.fn == "add" and a.kind == "f":
        return "fadd" if a.dtype in em.features.atomic_add else None
    if a.bits < 32 or a.fn == "cas":
        return None
    if a.fn == "xchg":
        # triton 3.6 cannot translate exchanges through buffer instructions of AMD
        return None if em.features.backend == "amd" else "exch"
    if a.kind == "f":
        return "fadd" if a.fn == "add" else None
    return f"u{a.fn}" if a.fn in ("max", "min") and a.kind == "u" else a.fn


def _once(em: Emitter, a: _Access, mask: Val | None) -> Val:
    """Apply the function once for each lane of `mask`, in any order; returns the old elements, 0 in other lanes."""
    code = em.code
    fn = _native(em, a)
    if fn is not None:
        pointers, value = a.pointers, a.value
        if fn == "exch":
            word = f"i{a.bits}"
            pointers, value = code.bitcast(pointers, f"!tt.ptr<{word}>"), code.bitcast(value, word)
        old = code.bitcast(_rmw(em, a.buf, fn, pointers, value, mask), a.value.elem)
    else:
        old = _on_words(em, a, mask)
    if mask is None:
        return old
    return code.select(mask, old, code.const(0, old.elem, old.shape))


def _rmw(em: Emitter, buf: Buffer, fn: str, pointers: Val, value: Val, mask: Val | None) -> Val:
    mask = mask or em.code.const(True, "i1", value.shape)
    kinds = f"({pointers.type}, {value.type}, {mask.type}) -> {value.type}"
    names = ", ".join(v.name for v in (pointers, value, mask))
    return em.code.let(f"tt.atomic_rmw {fn}, relaxed, {buf.scope}, {names} : {kinds}", value.shape, value.elem)


# ---- words ----------------------------------------------------------------------------------------------------------


def _on_words(em: Emitter, a: _Access, mask: Val | None) -> Val:
    """Atomics on the words of 32 or 64 bits that hold the elements; gives the old elements."""
    code = em.code
    word = "i64" if a.bits == 64 else "i32"
    each = max(1, 32 // a.bits)  # elements of a word
    at = a.offset
    assert at is not None
    if mask is not None:  # `tt.atomic_cas` has no mask: other lanes point to the first word, and leave it
        at = code.select(mask, at, code.const(0, at.elem, at.shape))
    shift = None
    if each > 1:
        shift = code.op("arith.andi", at, code.const(each - 1, at.elem, at.shape))
        shift = code.scale(code.to_int(shift, "i32"), a.bits)
        at = code.op("arith.shrui", at, code.const(each.bit_length() - 1, at.elem, at.shape))
    base = code.splat(code.bitcast(a.buf.pointer, f"!tt.ptr<{word}>"), at.shape)
    kind = f"{base.type}, {at.type}"
    pointers = code.let(f"tt.addptr {base.name}, {at.name} : {kind}", at.shape, base.elem)
    if a.fn in _BITWISE and shift is not None:
        old = _rmw(em, a.buf, a.fn, pointers, _operand(em, a, shift), mask)
    elif a.fn == "cas" and each == 1 and all(isinstance(n, int) for n in a.buf.shape):
        _check_lanes(em, a)
        old = _compare_and_swap(em, pointers, a, mask)
    else:
        _check_lanes(em, a)
        old = _exchange_loop(em, a.buf, pointers, mask, lambda seen: _updated(em, a, seen, shift))
    return _element(em, a, old, shift)


def _operand(em: Emitter, a: _Access, shift: Val) -> Val:
    """The operand of a bitwise function on a word, which leaves its other elements alone."""
    code = em.code
    x = code.op("arith.shli", _raw(em, a, a.value), shift)
    return code.op("arith.ori", x, _others(em, a, shift)) if a.fn == "and" else x


def _others(em: Emitter, a: _Access, shift: Val) -> Val:
    """A word with ones in all bits but those of the element."""
    code = em.code
    ones = code.const(2**a.bits - 1, "i32", shift.shape)
    return code.op("arith.xori", code.op("arith.shli", ones, shift), code.const(-1, "i32", shift.shape))


def _raw(em: Emitter, a: _Access, v: Val) -> Val:
    """The bits of an element as they lie in memory, extended by zeros to a word."""
    code = em.code
    v = v if v.elem == "i1" else code.bitcast(v, f"i{bits(v.elem)}")
    v = code.to_int(v, "i64" if a.bits == 64 else "i32", signed=False)
    return v if a.bits >= 8 else code.op("arith.andi", v, code.const((1 << a.bits) - 1, v.elem, v.shape))


def _element(em: Emitter, a: _Access, word: Val, shift: Val | None) -> Val:
    """The element that stands at `shift` in a word, as registers hold it."""
    code, elem = em.code, elem_of(a.dtype)
    if shift is not None:
        word = code.op("arith.shrui", word, shift)
    if a.dtype == "bool":
        byte = code.to_int(word, "i8")
        return code.cmp("ne", byte, code.const(0, "i8", byte.shape))
    v = code.to_int(word, f"i{max(a.bits, 8)}")
    if a.bits < 8:
        rest = code.const(8 - a.bits, "i8", v.shape)
        v = code.op("arith.shli", v, rest)
        v = code.op("arith.shrsi" if a.kind == "i" else "arith.shrui", v, rest)
    return code.bitcast(v, elem)


def _updated(em: Emitter, a: _Access, word: Val, shift: Val | None) -> Val:
    """The word after the function was applied to its element."""
    code = em.code
    old = _element(em, a, word, shift)
    new = _raw(em, a, _applied(em, a, old))
    if shift is None:
        return new
    rest = code.op("arith.andi", word, _others(em, a, shift))
    return code.op("arith.ori", rest, code.op("arith.shli", new, shift))


def _applied(em: Emitter, a: _Access, old: Val) -> Val:
    """The element after the function was applied. Functions of numbers are emitted as those of `ir.Map`, so that they
    mean the same everywhere."""
    code = em.code
    if a.fn == "xchg":
        return a.value
    if a.fn == "cas":
        assert a.compare is not None
        same = code.cmp("eq", _raw(em, a, old), _raw(em, a, a.compare))
        return code.select(same, a.value, old)
    if a.dtype == "bool":
        return code.op({"and": "arith.andi", "or": "arith.ori", "xor": "arith.xori"}[a.fn], old, a.value)
    before = ir.Value(a.op.value.type, "")
    em.env[before] = old
    op = ir.build(ir.Map(a.fn, (before, a.op.value)), a.op.loc)
    em.op(op)
    return em.val(op.result)


# ---- compare and exchange -------------------------------------------------------------------------------------------


def _compare_and_swap(em: Emitter, pointers: Val, a: _Access, mask: Val | None) -> Val:
    """One `cas` of whole words; lanes that are masked put back what they compare with."""
    assert a.compare is not None
    want, new = _raw(em, a, a.compare), _raw(em, a, a.value)
    return _cas(em, a.buf, pointers, want, new if mask is None else em.code.select(mask, new, want))


def _check_lanes(em: Emitter, a: _Access) -> None:
    """Refuse what triton before 3.9 cannot translate for AMD: several exchanges a thread."""
    f = em.features
    if f.backend == "amd" and a.value.size > f.lanes and versions.version() < (3, 9):
        what = f"no atomic {a.op.fn} of {a.dtype} on more than {f.lanes} lanes with this version of triton"
        em.refuse(a.op, f"{what}: take a smaller tile, or triton 3.9")


def _cas(em: Emitter, buf: Buffer, pointers: Val, want: Val, new: Val) -> Val:
    kinds = f"({pointers.type}, {want.type}, {new.type}) -> {want.type}"
    names = ", ".join(v.name for v in (pointers, want, new))
    return em.code.let(f"tt.atomic_cas relaxed, {buf.scope}, {names} : {kinds}", want.shape, want.elem)


def _exchange_loop(em: Emitter, buf: Buffer, pointers: Val, mask: Val | None, update: Callable[[Val], Val]) -> Val:
    """Compare and exchange until every lane has put its word where it had seen the old one; returns the old words.

    The first guess is zero: where it is wrong, the exchange fails and says what is there. A plain load would be a race,
    and caches could answer it. Lanes that are done, or masked, put back what they saw.
    """
    code = em.code
    word = pointers.elem.removeprefix("!tt.ptr<").removesuffix(">")
    todo = mask or code.const(True, "i1", pointers.shape)
    guess = code.const(0, word, pointers.shape)
    kinds = f"{guess.type}, {todo.type}"
    seen, left, seen2, left2 = (Val(code.name(), v.shape, v.elem) for v in (guess, todo, guess, todo))
    head = f"scf.while ({seen.name} = {guess.name}, {left.name} = {todo.name}) : ({kinds}) -> ({kinds}) {{"
    old, _ = code.let_many(head, [(v.shape, v.elem) for v in (guess, todo)])
    with code.region():
        go = fold(em.code, left, "arith.ori")
        code.do(f"scf.condition({go.name}) {seen.name}, {left.name} : {kinds}")
    code.do("} do {")
    code.do(f"^bb0({seen2.name}: {seen2.type}, {left2.name}: {left2.type}):")
    with code.region():
        now = _cas(em, buf, pointers, seen2, code.select(left2, update(seen2), seen2))
        failed = code.both(left2, code.cmp("ne", now, seen2))
        assert failed is not None
        now = code.select(left2, now, seen2)
        code.do(f"scf.yield {now.name}, {failed.name} : {kinds}")
    code.do("}")
    return old


# ---- lanes that meet in one element ---------------------------------------------------------------------------------


def _ranks(em: Emitter, op: ir.Atomic) -> Val:
    """For each lane, how many lanes before it may have the same element, as i32."""
    takes = [d.indices for d in op.index if isinstance(d, ir.Take)]
    code = em.code
    shape = takes[0].shape
    key: Val | None = None
    for v in takes:  # numbers outside the array may wrap around: lanes that only seem to meet wait without need
        index = em.integer(v)
        key = index if key is None else code.add(code.scale(key, 0x01000193), index)
    assert key is not None
    live = em.valid(shape)
    if op.mask is not None and op.mask.shape == shape:
        live = code.both(live, em.val(op.mask))
    if live is not None:
        live = code.reshape(code.to_int(live, "i32", signed=False), (key.size,))
    ranks = _count_before(em, code.reshape(key, (key.size,)), live)
    return _laid(em, code.reshape(ranks, key.shape), op.index)


def _count_before(em: Emitter, key: Val, live: Val | None) -> Val:
    """For each lane of a vector, how many lanes before it have its key (and 1 in `live`)."""
    code, n = em.code, key.size
    width = max(1, min(n, PAIRS // n))
    if width == n:
        return _pairs(em, key, live, code.arange(n), key, live)
    zero = code.const(0, "i32", (n,))
    first, acc = Val(code.name(), (), "i32"), Val(code.name(), (n,), "i32")
    bounds = f"{code.i32(0).name} to {code.i32(n).name} step {code.i32(width).name}"
    head = f"scf.for {first.name} = {bounds} iter_args({acc.name} = {zero.name}) -> ({acc.type}) : i32 {{"
    out = code.let(head, (n,), "i32")
    with code.region():
        others = code.add(code.splat(first, (width,)), code.arange(width))
        picked = [None if v is None else gather(code, v, others) for v in (key, live)]
        assert picked[0] is not None
        total = code.add(acc, _pairs(em, key, live, others, picked[0], picked[1]))
        code.do(f"scf.yield {total.name} : {total.type}")
    code.do("}")
    return out


def _pairs(em: Emitter, key: Val, live: Val | None, lanes: Val, keys: Val, lives: Val | None) -> Val:
    """For each lane of `key`, how many of the lanes numbered `lanes` come before it and have its key."""
    code = em.code
    shape = (key.size, lanes.size)
    same = code.cmp("eq", code.along(key, 0, shape), code.along(keys, 1, shape))
    before = code.cmp("slt", code.along(lanes, 1, shape), code.along(code.arange(key.size), 0, shape))
    hit = code.to_int(code.op("arith.andi", same, before), "i32", signed=False)
    if lives is not None:
        hit = code.op("arith.andi", hit, code.along(lives, 1, shape))
    return fold(em.code, hit, "arith.addi", 1)


def _laid(em: Emitter, ranks: Val, index: ir.Index) -> Val:
    """Ranks over the gathered axes, laid over the whole tensor of an access."""
    code, full = em.code, padded(ir.index_shape(index))
    place = 0
    for d in index:
        if isinstance(d, ir.Take):
            break
        place += not isinstance(d, ir.At)
    for k in range(place):
        ranks = code.expand_dims(ranks, k)
    while len(ranks.shape) < len(full):
        ranks = code.expand_dims(ranks, len(ranks.shape))
    return code.broadcast(ranks, full)


def _in_turns(em: Emitter, a: _Access, ranks: Val, used: bool) -> Val:
    """Apply the function for all lanes of one rank at a time; returns the old elements."""
    code = em.code
    live = ranks if a.mask is None else code.select(a.mask, ranks, code.const(-1, "i32", ranks.shape))
    turns = code.shift(fold(code, live, "arith.maxsi"), 1)
    zero = code.const(0, a.value.elem, a.value.shape)
    turn, acc = Val(code.name(), (), "i32"), Val(code.name(), zero.shape, zero.elem)
    head = f"scf.for {turn.name} = {code.i32(0).name} to {turns.name} step {code.i32(1).name}"
    carry = f" iter_args({acc.name} = {zero.name}) -> ({acc.type})" if used else ""
    head += f"{carry} : i32 {{"
    out = code.let(head, acc.shape, acc.elem) if used else zero
    if not used:
        code.do(head)
    with code.region():
        mine = code.cmp("eq", live, code.splat(turn, live.shape))
        old = _once(em, a, mine)
        em.barrier()
        if used:
            both = code.select(mine, old, acc)
            code.do(f"scf.yield {both.name} : {both.type}")
    code.do("}")
    return out
