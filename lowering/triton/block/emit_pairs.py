"""Arithmetic of 16-bit floats in roles, two at a time, bfloat16 as float32, and 8-bit floats out of words.

What warpgroup products take from registers often comes out of few instructions an element: codes of quantised weights
that become numbers. Sums and products of float16 and bfloat16 are rounded once whether they are made in float32 or in
their own type, and neighbours in a register are one instruction. So is a product and a sum in float32 of bfloat16
numbers whose result is rounded to bfloat16: it is rounded once.

Instructions convert 8-bit floats two at a time, neighbours in half a word, to float16: of the two conversions of a half
that are written here, the assembler makes one.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jtile import ir

from ..ttir import Val
from ..versions import converts_fp8
from .emitter import BlockEmitter, emits
from .layouts import Blocked, Linear

_PAIRED = {"add": "add", "sub": "sub", "mul": "mul"}
_TYPES = {"bfloat16": "bf16x2", "float16": "f16x2"}


_HALF = {"float8_e4m3fn": "e4m3x2", "float8_e5m2": "e5m2x2"}


@emits(ir.Cast)
def _cast(em: BlockEmitter, op: ir.Cast) -> Val:
    if (terms := _product_and_sum(op)) is not None:
        return _fused(em, op, terms)
    if op.dtype == "float32" and op.x.dtype == "bfloat16" and _neighbours(em, op):
        return _wide(em, op)
    found = _byte(op.x)
    if op.dtype != "float32" or found is None or op.x.dtype not in em.features.fp8 or not converts_fp8(em.features):
        return em.as_tile(op)
    words, k = found
    assert em.homes is not None
    x = em.tile(words, em.homes[op.result])
    halves, parts = ("{h, _}", "{_, h}"), ("{l, _}", "{_, l}")
    text = (
        "{ .reg .b16 h, l; .reg .b32 p; "
        f"mov.b32 {halves[k // 2]}, $1; cvt.rn.f16x2.{_HALF[op.x.dtype]} p, h; "
        f"mov.b32 {parts[k % 2]}, p; cvt.f32.f16 $0, l; }}"
    )
    asm = f'"{text}" {{constraints = "=f,r", packed_element = 1 : i32, pure = true}}'
    with em.code.within({len(x.shape): x.layout}):
        out = em.code.spell(x.shape, "f32")
        return em.code.let(f"tt.elementwise_inline_asm {asm} {x.name} : {x.type} -> {out}", x.shape, "f32")


def _product_and_sum(op: ir.Cast) -> tuple[ir.Value | float, ...] | None:
    """For a b + c, made in float32 of bfloat16 numbers and rounded to bfloat16: a, b and c; None for others."""
    total = op.x.op
    if op.dtype != "bfloat16" or not op.x.shape or not isinstance(total, ir.Map) or total.fn != "add":
        return None
    product, c = total.args if _is_product(total.args[0]) else total.args[::-1]
    if not isinstance(product.op, ir.Map) or not _is_product(product):
        return None
    found = [_narrow(v) for v in (*product.op.args, c)]
    return None if None in found else tuple(v for v in found if v is not None)


def _is_product(v: ir.Value) -> bool:
    return isinstance(v.op, ir.Map) and v.op.fn == "mul" and v.dtype == "float32"


def _narrow(v: ir.Value) -> ir.Value | float | None:
    """The tile of bfloat16, or the number of that type, that a tile of float32 is; None for others."""
    if isinstance(v.op, ir.Cast) and v.op.x.dtype == "bfloat16":
        return v.op.x
    exact = isinstance(v.op, ir.Full) and int(np.float32(v.op.value).view(np.uint32)) % (1 << 16) == 0
    return float(v.op.value) if exact else None  # type: ignore[union-attr]


def _fused(em: BlockEmitter, op: ir.Cast, terms: tuple[ir.Value | float, ...]) -> Val:
    """a b + c, rounded once, of two elements by one instruction."""
    assert em.homes is not None
    layout, shape = em.homes[op.result], op.x.shape
    with em.code.within({len(shape): layout}):
        a, b, c = (em.tile(v, layout) if isinstance(v, ir.Value) else em.code.const(v, "bf16", shape) for v in terms)
        asm = '"fma.rn.bf16x2 $0, $1, $2, $3;" {constraints = "=r,r,r,r", packed_element = 2 : i32, pure = true}'
        types = f"{a.type}, {b.type}, {c.type} -> {a.type}"
        text = f"tt.elementwise_inline_asm {asm} {a.name}, {b.name}, {c.name} : {types}"
        return em.code.let(text, shape, "bf16")


def _neighbours(em: BlockEmitter, op: ir.Cast) -> bool:
    """Whether threads hold neighbours of the tile in pairs."""
    layout = em.homes[op.result] if em.homes is not None and op.x.shape else None
    if isinstance(layout, Blocked):
        return layout.per_thread[layout.order[0]] > 1
    return isinstance(layout, Linear) and layout.register[:1] == ((0,) * (len(op.x.shape) - 1) + (1,),)


def _wide(em: BlockEmitter, op: ir.Cast) -> Val:
    """bfloat16 as float32: one instruction for each of a pair, where the compiler takes two for the upper one."""
    assert em.homes is not None
    x = em.tile(op.x, em.homes[op.result])
    text = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    asm = f'"{text}" {{constraints = "=f,=f,r", packed_element = 2 : i32, pure = true}}'
    with em.code.within({len(x.shape): x.layout}):
        out = em.code.spell(x.shape, "f32")
        return em.code.let(f"tt.elementwise_inline_asm {asm} {x.name} : {x.type} -> {out}", x.shape, "f32")


def _byte(v: ir.Value) -> tuple[ir.Value, int] | None:
    """For a tile that holds one byte of each 32-bit word, as uint8 or bitcast to another 8-bit type: the words, and the
    number of the byte from the low bits on. None for other tiles."""
    byte = v.op.x.op if isinstance(v.op, ir.Bitcast) else v.op
    if not isinstance(byte, ir.Cast) or byte.dtype != "uint8" or byte.x.dtype != "uint32" or not v.shape:
        return None
    shift = byte.x.op
    if not isinstance(shift, ir.Map) or shift.fn != "shr_logical":
        return byte.x, 0
    by = shift.args[1].op
    return (shift.args[0], by.value // 8) if isinstance(by, ir.Full) and by.value in (8, 16, 24) else None


def _terms(v: ir.Value) -> list[ir.Value]:
    """The terms of a sum of int32; a tile that is no sum is its own term."""
    if isinstance(v.op, ir.Map) and v.op.fn == "add" and v.dtype == "int32":
        return [term for arg in v.op.args for term in _terms(arg)]
    return [v]


def _dot(v: ir.Value) -> tuple[ir.Value, ir.Value, str] | None:
    """For a sum of the products of all bytes of two words: the words, and the types of the bytes; None for others."""
    if not isinstance(v.op, ir.Map) or v.op.fn != "add" or v.dtype != "int32" or not v.shape:
        return None
    found = [_product(term) for term in _terms(v)]
    first = found[0]
    if first is None or sorted(k[1] if k else -1 for k in found) != [0, 1, 2, 3]:
        return None
    return first[0] if all(k is not None and k[0] == first[0] for k in found) else None


def _product(v: ir.Value) -> tuple[tuple[ir.Value, ir.Value, str], int] | None:
    """For the product of a byte of one word and the same byte of another: the words and types as `_dot` gives them, and
    the number of the byte. None for others."""
    if not isinstance(v.op, ir.Map) or v.op.fn != "mul":
        return None
    wide = [a.op for a in v.op.args]
    narrow = [op.x for op in wide if isinstance(op, ir.Cast)]
    bytes_ = [byte for byte in map(_byte, narrow) if byte is not None]
    if len(bytes_) != 2 or bytes_[0][1] != bytes_[1][1]:
        return None
    kinds = ".".join("u32" if x.dtype == "uint8" else "s32" for x in narrow)
    return (bytes_[0][0], bytes_[1][0], kinds), bytes_[0][1]


def _bytes_dot(em: BlockEmitter, op: ir.Map) -> Val | None:
    """The sum of the products of four bytes by one instruction, which can add another number, too."""
    if op.fn != "add" or op.result.dtype != "int32" or not op.result.shape:
        return None
    found, acc = _dot(op.result), None
    for which in (1, 0) if found is None else ():
        found = found or _dot(op.args[which])
        acc = op.args[1 - which] if acc is None and found is not None else acc
    if found is None:
        return None
    assert em.homes is not None
    layout, kinds = em.homes[op.result], found[2]
    a, b = em.tile(found[0], layout), em.tile(found[1], layout)
    with em.code.within({len(op.result.shape): layout}):
        c = em.code.const(0, "i32", op.result.shape) if acc is None else em.tile(acc, layout)
        asm = f'"dp4a.{kinds} $0, $1, $2, $3;" {{constraints = "=r,r,r,r", packed_element = 1 : i32, pure = true}}'
        types = f"{a.type}, {b.type}, {c.type} -> {c.type}"
        text = f"tt.elementwise_inline_asm {asm} {a.name}, {b.name}, {c.name} : {types}"
        return em.code.let(text, op.result.shape, "i32")


def _spread_bytes(em: BlockEmitter, op: ir.Map) -> Val | None:
    """Bytes 0 and 2, or 1 and 3, of words, each in a half of its own, by one instruction: the compiler, which sees
    halves, takes four for the latter."""
    if op.fn != "and" or op.result.dtype != "uint32" or not op.result.shape:
        return None
    word, mask = op.args
    shift = word.op
    if not isinstance(mask.op, ir.Full) or mask.op.value != 0x00FF00FF or not isinstance(shift, ir.Map):
        return None
    if shift.fn != "shr_logical" or not _zero_or_eight(shift.args[1]):
        return None
    assert em.homes is not None
    layout = em.homes[op.result]
    x, by = (em.tile(v, layout) for v in shift.args)
    text = (
        "{ .reg .b32 s; mul.lo.u32 s, $2, 0x101; shr.u32 s, s, 3; add.u32 s, s, 0x4240; "  # the bytes to take
        "prmt.b32 $0, $1, 0, s; }"
    )
    asm = f'"{text}" {{constraints = "=r,r,r", packed_element = 1 : i32, pure = true}}'
    out = dataclasses.replace(x, name=em.code.name(), fill=None, number=None)
    em.code.do(f"{out.name} = tt.elementwise_inline_asm {asm} {x.name}, {by.name} : {x.type}, {by.type} -> {x.type}")
    return out


def _zero_or_eight(v: ir.Value) -> bool:
    """Whether all of a tile is 0 or 8."""
    if isinstance(v.op, ir.Full):
        return v.op.value in (0, 8)
    if not isinstance(v.op, ir.Map) or v.op.fn != "mul":
        return False
    which, eight = (a.op for a in v.op.args)
    counts = isinstance(which, ir.Iota) and which.shape[which.axis] <= 2
    return counts and isinstance(eight, ir.Full) and eight.value == 8


@emits(ir.Map)
def _map(em: BlockEmitter, op: ir.Map) -> Val:
    dtype = op.args[0].dtype
    if (dot := _bytes_dot(em, op)) is not None:
        return dot
    if (halves := _spread_bytes(em, op)) is not None:
        return halves
    if op.fn not in _PAIRED or dtype not in _TYPES or not op.result.shape:
        return em.as_tile(op)
    assert em.homes is not None
    layout = em.homes[op.result]
    a, b = (em.tile(v, layout) for v in op.args)
    name = f"{_PAIRED[op.fn]}.rn.{_TYPES[dtype]}"
    asm = f'"{name} $0, $1, $2;" {{constraints = "=r,r,r", packed_element = 2 : i32, pure = true}}'
    out = dataclasses.replace(a, name=em.code.name(), fill=None, number=None)
    em.code.do(f"{out.name} = tt.elementwise_inline_asm {asm} {a.name}, {b.name} : {a.type}, {b.type} -> {out.type}")
    return out
