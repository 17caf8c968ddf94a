"""Elements that programs hand over one by one: `jt.post` and `jt.receive`.

A word of memory is zero until it has been posted: its bits come inverted, and the one NaN that would be zero so becomes
another. So the element itself says that it is there, and whoever waits for it has it as soon as its load shows it:
there is neither a fence nor a counter, and no further load behind a wait. Each thread waits for its own elements.

Words go to another device as they do to this one: whoever waits polls its own memory. A call has one of four sets, and
clears that of the next call but one, as it does with signals: nobody posts to that yet.
"""

from __future__ import annotations

import dataclasses
import math

from jtile import ir

from .. import addresses, versions
from ..emit_devices import CLAIMED, FAULT, FAULTS, REPORT, TIMEOUT
from ..emitter import elem_of
from ..ttir import Val, bits
from .analysis import POINTWISE
from .emit_devices import BlockDevices, devices
from .emitter import BlockEmitter, emits
from .layouts import Blocked, Linear, blocked
from .linear import in_vectors, linear

VECTOR = 16  # bytes that a thread loads at once
TURNS = 256  # after which a thread looks at the clock, and whether another program has failed
STORES = 16  # of a program that clears without a loop
ABSENT = -1  # the offset of a lane that is not waited for


def _layout(em: BlockEmitter, v: ir.Value) -> Linear:
    """The layout of a tile, with neighbours of a thread side by side."""
    assert em.homes is not None
    layout = in_vectors(linear(em.homes[v], v.shape))
    assert isinstance(layout, Linear)
    return layout


def _neighbours(layout: Linear) -> int:
    """How many elements along the last axis a thread has side by side."""
    rank, count = len(layout.lane[0]), 1
    for b in layout.register:
        if b != (*(0,) * (rank - 1), count):
            break
        count *= 2
    return count


@emits(ir.Post)
def _post(em: BlockEmitter, op: ir.Post) -> None:
    code, buf = em.code, em.refs[op.ref]
    if not op.value.shape:
        em.refuse(op, "a tile, got a scalar: post a tile of one element")
    layout = _layout(em, op.value)
    with code.within({len(op.value.shape): layout}):
        places = addresses.resolve(em, buf, addresses.lines(em, buf, op.index), ir.index_shape(op.index))
        v = em.val(op.value)
        word = f"i{bits(v.elem)}"
        where = addresses.pointers(em, code.bitcast(buf.pointer, f"!tt.ptr<{word}>"), places)
        v = code.op("arith.xori", code.bitcast(v, word), code.const(-1, word, v.shape))
        v = code.op("arith.maxui", v, code.const(1, word, v.shape))
        mask = code.both(places.mask, em.mask(op))  # type: ignore[arg-type]
        operands = [where, v] + ([] if mask is None else [mask])
        # written through: a plain store may wait until something orders it
        code.do(f"tt.store {', '.join(x.name for x in operands)}{versions.modifier('wt')} : {where.type}")


@emits(ir.Receive)
def _receive(em: BlockEmitter, op: ir.Receive) -> Val:
    code, buf = em.code, em.refs[op.ref]
    out, homes = op.result, em.homes
    assert homes is not None
    if not out.shape:
        em.refuse(op, "a tile, got a scalar: receive a tile of one element")
    layout, size = _layout(em, out), ir.DTYPES[out.dtype].bits // 8
    if _neighbours(layout) * size < 4:  # there are more threads than words: some have the same
        few = blocked(out.shape, elem_of(out.dtype), 1)
        layout = linear(dataclasses.replace(few, warps=(em.warps, *few.warps[1:])), out.shape)
    side = min(_neighbours(layout), VECTOR // size) if _in_lines(op) and _of_lines(op.mask) else 1
    if size == 2 and side == 1:
        em.refuse(op, "whole lines of the last axis, of a multiple of 8 numbers, where these are of 16 bits, and masks "
                      "of whole lines")  # fmt: skip
    if devices(em).layout.end >= 1 << 31:
        em.refuse(op, "symmetric memory of less than 512 MiB, of which there are four sets")
    if em.memo.get("clear in front of") is op:
        clear(em, devices(em))
    with code.within({len(out.shape): layout}):
        places = addresses.resolve(em, buf, addresses.lines(em, buf, op.index), ir.index_shape(op.index))
        mask = code.both(places.mask, em.mask(op))  # type: ignore[arg-type]
        if side == out.shape[-1]:  # neighbours have the place of the first, so that they share its register
            kept = tuple((v, axis) for v, axis in places.lanes if axis < len(out.shape) - 1)
            places = dataclasses.replace(places, lanes=kept)
        far = code.scale(addresses.offsets(em, places), size)
        base = code.cast("tt.ptr_to_int", devices(em).base, "i64")
        start = code.to_int(code.sub(code.cast("tt.ptr_to_int", buf.pointer, "i64"), base), "i32")
        far = code.add(code.splat(start, far.shape), far)
        if mask is not None:
            far = code.select(mask, far, code.const(ABSENT, "i32", far.shape))
        found = _poll(em, op, far, code.splat(base, far.shape), side, size, 1 << len(layout.register))
        found = code.bitcast(found, elem_of(out.dtype))
        if mask is not None:
            found = code.select(mask, found, code.const(0.0, found.elem, found.shape))
    return code.convert(found, homes[out])


def _in_lines(op: ir.Receive) -> bool:
    """Whether an access takes whole lines of the last axis, each a multiple of `VECTOR` bytes."""
    side, last = op.ref.shape[-1], op.index[-1]
    whole = not isinstance(last, ir.At | ir.Take) and last.size == side and getattr(last, "stride", 1) == 1
    start = ir.dim_value(last).op if whole else None
    zero = isinstance(start, ir.Full) and start.value == 0
    return bool(zero and side * ir.DTYPES[op.ref.dtype].bits // 8 % VECTOR == 0)


def _of_lines(mask: ir.Value | None) -> bool:
    """Whether a mask is seen to be the same along the last axis: what one load brings is waited for together."""
    if mask is None or mask.shape[-1] == 1 or isinstance(mask.op, ir.Full):
        return True
    if isinstance(mask.op, ir.Broadcast):
        x, last = mask.op.x, len(mask.shape) - 1
        return last not in mask.op.dims or x.shape[-1] == 1 or _of_lines(x)
    return isinstance(mask.op, POINTWISE) and all(_of_lines(x) for x in mask.op.operands() if x.shape)


def _poll(em: BlockEmitter, op: ir.Receive, far: Val, base: Val, side: int, size: int, count: int) -> Val:
    """Loads words until none is zero; gives them inverted.

    Args:
      far: how far each element is from the beginning of the device's block, in bytes; `ABSENT`: it is not waited for.
      base: where that is.
      side: elements that stand side by side; count: of a thread.
    """
    d = devices(em)
    d.sites.append({"kind": "assert", "message": op.mnemonic, "where": str(op.loc), "args": [],
                    "axes": max(3, len(em.kernel.grid) - em.kernel.lanes), "lanes": em.kernel.lanes})  # fmt: skip
    words = count * size // 4
    scope = "gpu" if ir.alone(em.kernel) else "sys"
    text = _text(words, side * size // 4, side, count, size, len(d.sites) - 1, scope)
    ties = ",".join(["=r"] * words + ["r"] * count + ["l"] * count + ["~{memory}"])
    attributes = f'constraints = "{ties}", packed_element = {count} : i32, pure = false'
    kinds = f"{far.name}, {base.name} : {far.type}, {base.type}"
    elem = f"i{8 * size}"
    right = f'tt.elementwise_inline_asm "{text}" {{{attributes}}} {kinds} -> {em.code.spell(far.shape, elem)}'
    return em.code.let(right, far.shape, elem)


def _text(words: int, per: int, side: int, count: int, size: int, site: int, scope: str) -> str:
    """The loop of one thread, for `words` words in loads of `per`."""
    loads = words // per
    far, base = [f"${words + k * side}" for k in range(loads)], f"${words + count}"
    names = lambda kind, n: ", ".join(f"%j{kind}{k}" for k in range(n))
    lines = [
        f".reg .pred {names('p', loads)}, %jq, %jd; .reg .b64 {names('a', loads)}, %jb, %jn, %jt;",
        f".reg .b32 {names('w', words)}, %jm, %jk, %jf; mov.b32 %jk, 0; mov.b64 %jb, 0;",
    ]
    for k in range(loads):
        lines.append(f"setp.ne.s32 %jp{k}, {far[k]}, {ABSENT}; cvt.s64.s32 %ja{k}, {far[k]};")
        lines.append(f"add.s64 %ja{k}, %ja{k}, {base};")
    lines += [f"mov.b32 %jw{k}, -1;" for k in range(words)]
    kind, least = {1: "b32", 2: "v2.b32", 4: "v4.b32"}[per], "min.u16x2" if size == 2 else "min.u32"
    group = lambda k: ", ".join(f"%jw{k * per + i}" for i in range(per))
    into = lambda k: "{" + group(k) + "}" if per > 1 else group(k)
    polls = [f"@%jp{k} ld.relaxed.{scope}.global.{kind} {into(k)}, [%ja{k}];" for k in range(loads)]
    lines += ["JT_POLL: " + polls[0], *polls[1:], "mov.b32 %jm, %jw0;"]
    lines += [f"{least} %jm, %jm, %jw{k};" for k in range(1, words)]
    if size == 2:
        lines.append("and.b32 %jf, %jm, 65535; setp.eq.u32 %jq, %jf, 0; setp.lt.or.u32 %jq, %jm, 65536, %jq;")
    else:
        lines.append("setp.eq.u32 %jq, %jm, 0;")
    lines += [
        f"@!%jq bra JT_DONE; add.u32 %jk, %jk, 1; and.b32 %jf, %jk, {TURNS - 1};",
        "setp.ne.u32 %jd, %jf, 0; @%jd bra JT_POLL;",
        f"ld.relaxed.sys.global.b32 %jf, [{base}+{FAULT}]; setp.ne.u32 %jd, %jf, 0; @%jd bra JT_DONE;",
        "mov.u64 %jn, %globaltimer; setp.eq.u64 %jd, %jb, 0; @%jd mov.b64 %jb, %jn; sub.u64 %jn, %jn, %jb;",
        f"ld.global.b64 %jt, [{base}+{TIMEOUT}]; setp.lt.u64 %jd, %jn, %jt; @%jd bra JT_POLL;",
        f"atom.relaxed.gpu.global.exch.b32 %jf, [{base}+{CLAIMED}], 1; setp.ne.u32 %jd, %jf, 0; @%jd bra JT_FLAG;",
        f"ld.global.b64 %jt, [{base}+{REPORT}]; mov.b32 %jf, {site}; st.relaxed.sys.global.b32 [%jt+4], %jf;",
        "mov.u32 %jf, %ctaid.x; st.relaxed.sys.global.b32 [%jt+8], %jf; fence.acq_rel.sys;",
        f"mov.b32 %jf, {FAULTS.index('post')}; st.relaxed.sys.global.b32 [%jt], %jf;",
        f"JT_FLAG: red.relaxed.sys.global.or.b32 [{base}+{FAULT}], 1;",
        "JT_DONE: " + " ".join(f"not.b32 ${k}, %jw{k};" for k in range(words)),
    ]
    return "{ " + " ".join(lines) + " }"


def clear(em: BlockEmitter, d: BlockDevices) -> None:
    """Clear this program's part of the memory that is posted to in the next call but one."""
    code, at = em.code, d.layout
    lanes = em.warps * 32 * 4
    later = d.at(d.base, d.set_of(code.shift(d.epoch, 2), at.memory_sets, at.memory, at.memory_set), "i32")
    layout, first = Blocked((4,), (32,), (em.warps,), (0,)), code.scale(d.program, lanes)
    for ref in dict.fromkeys(ir.root(op.ref) for op in em.kernel.body.walk() if isinstance(op, ir.Post)):
        begin, size = at.first[ref] // 4, math.prod(ref.shape) * ir.DTYPES[ref.dtype].bits // 8
        end, step = begin + -(-size // 4), math.prod(em.kernel.grid) * lanes
        if end - begin <= STORES * step:
            for start in range(begin, end, step):
                _zeros(em, later, code.shift(first, start), end, lanes, layout)
        else:
            with d.loop(code.i32(begin), code.i32(end), code.i32(step)) as start:
                _zeros(em, later, code.add(first, start), end, lanes, layout)


def _zeros(em: BlockEmitter, later: Val, start: Val, end: int, lanes: int, layout: Blocked) -> None:
    """Clear words from `start` on, so many as there are lanes, that are in front of `end`."""
    code = em.code
    with code.within({1: layout}):
        number = code.add(code.splat(start, (lanes,)), code.arange(lanes))
        inside = code.cmp("slt", number, code.const(end, "i32", (lanes,)))
        many = code.splat(later, (lanes,))
        text = f"tt.addptr {many.name}, {number.name} : {many.type}, {number.type}"
        where = code.let(text, (lanes,), many.elem)
        zero = code.const(0, "i32", (lanes,))
        code.do(f"tt.store {where.name}, {zero.name}, {inside.name} : {where.type}")


def clearing_role(roles: ir.Roles) -> int:
    """The role that clears: the last one that waits for the kernels in front."""
    waits = [any(isinstance(op, ir.KernelsWait) for op in body.ops) for body in roles.bodies]
    ready = [k for k, early in enumerate(roles.early or [False] * len(waits)) if waits[k] or not early]
    return ready[-1]
