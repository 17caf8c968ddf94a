"""Block-scaled matrix products: by hardware where it has the formats, else decoded in the kernel.

Decoding never rounds an element times a scale to less than float32: scales that are powers of two go into bfloat16
elements, one scale a row goes behind the product, and others make float32 products.
"""

from __future__ import annotations

import dataclasses

from jtile import ir

from .convert import convert
from .emit_dot import FP8, NARROW, Form, check_size, cut, form_of, multiply_add, product, swapped
from .emitter import Emitter, emits, padded
from .moves import gather
from .ttir import Code, Val, spell

POWER = "float8_e8m0fnu"
FORMATS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float4_e2m1fn": "e2m1"}
BLOCK = 32  # elements of k that share a scale in the formats of the Open Compute Project (MX)


@dataclasses.dataclass(frozen=True)
class Side:
    """One operand with its scales; `axis`: the one of k, `blocks`: how many scales there are along it."""

    x: ir.Value
    s: ir.Value | None
    axis: int

    @property
    def blocks(self) -> int:
        return 1 if self.s is None else self.s.shape[self.axis]

    @property
    def k(self) -> int:
        return self.x.shape[self.axis]


@emits(ir.DotScaled)
def _dot_scaled(em: Emitter, op: ir.DotScaled) -> Val:
    check_size(em, op)
    a, b = Side(op.a, op.sa, 1), Side(op.b, op.sb, 0)
    acc = None if op.acc is None else em.val(op.acc)
    if _in_hardware(em, a, b):
        return _hardware(em, a, b, acc)
    if a.blocks == b.blocks == 1 and not (a.s is b.s is None):
        return _scaled_after(em, a, b, acc)
    form = form_of(em.features, _decoded(a), _decoded(b), "f32")
    return _multiply(em, form, _applied(em, a, form.a), _applied(em, b, form.b), acc)


def _multiply(em: Emitter, form: Form, a: Val, b: Val, acc: Val | None) -> Val:
    one = min(a.shape[0], b.shape[1], a.shape[1]) == 1
    if one or not form.how:
        a, b = (convert(em.code, em.features, v, d, "float32") for v, d in ((a, form.a), (b, form.b)))
        return multiply_add(em.code, a, b, acc, False, False)
    a, b = (em.code.bitcast(v, FP8.get(d, v.elem)) for v, d in ((a, form.a), (b, form.b)))
    return product(em, form, a, b, acc)


def _decoded(side: Side) -> str:
    """The dtype of an operand times its scales: one that holds the products of both precisions."""
    x, s = side.x.dtype, None if side.s is None else side.s.dtype
    if ir.DTYPES[x].kind != "f":
        x = "float16" if ir.DTYPES[x].bits <= 8 and s is None else "float32"
    if s is None:
        return x if x != "float64" else "float32"
    return "bfloat16" if s == POWER and x in (*NARROW, "bfloat16", POWER) else "float32"


def _applied(em: Emitter, side: Side, dtype: str) -> Val:
    """An operand with its scales multiplied in, zero beyond k."""
    code, f = em.code, em.features
    if side.s is None:
        v = convert(code, f, em.val(side.x), side.x.dtype, dtype)
        return cut(code, v, side.k, side.axis)
    wide = dtype if dtype in ("bfloat16", "float32") else "float32"
    v = convert(code, f, em.val(side.x), side.x.dtype, wide)
    s = convert(code, f, em.val(side.s), side.s.dtype, wide)
    v = code.op("arith.mulf", v, _spread(code, s, side, v.shape))
    return cut(code, convert(code, f, v, wide, dtype), side.k, side.axis)


def _spread(code: Code, s: Val, side: Side, shape: tuple[int, ...]) -> Val:
    """Scales repeated along k, each over its block."""
    axis, k = side.axis, shape[side.axis]
    size = side.k // side.blocks
    if s.shape[axis] * size != k and side.blocks > 1:
        at = code.op("arith.divui", code.arange(k), code.const(size, "i32", (k,)))
        at = code.op("arith.minui", at, code.const(side.blocks - 1, "i32", (k,)))
        at = code.along(at, axis, shape)
        return gather(code, s, at, axis)
    wide = code.expand_dims(s, axis + 1)
    times = k // s.shape[axis]
    return code.reshape(code.broadcast(wide, (*s.shape[: axis + 1], times, *s.shape[axis + 1 :])), shape)


def _scaled_after(em: Emitter, a: Side, b: Side, acc: Val | None) -> Val:
    """A product with one scale a row and a column: it is made first, in the elements' own dtypes, and scaled after."""
    code, f = em.code, em.features
    plain = [dataclasses.replace(side, s=None) for side in (a, b)]
    form = form_of(f, _decoded(plain[0]), _decoded(plain[1]), "f32")
    v = _multiply(em, form, _applied(em, plain[0], form.a), _applied(em, plain[1], form.b), None)
    for side in (a, b):
        if side.s is not None:
            s = convert(code, f, em.val(side.s), side.s.dtype, "float32")
            v = code.op("arith.mulf", v, code.broadcast(s, v.shape))
    return v if acc is None else code.op("arith.addf", acc, v)


# ---- hardware -------------------------------------------------------------------------------------------------------


def _in_hardware(em: Emitter, a: Side, b: Side) -> bool:
    full = all(padded(s.x.shape) == s.x.shape and s.x.shape[s.axis] >= 2 * BLOCK for s in (a, b))
    sides = all(s.x.dtype in FORMATS and s.s is not None and s.s.dtype == POWER for s in (a, b))
    sizes = full and a.x.shape[0] >= 32 and b.x.shape[1] >= 32
    return em.features.scaled and sides and sizes and a.k // a.blocks == b.k // b.blocks == BLOCK


def _hardware(em: Emitter, a: Side, b: Side, acc: Val | None) -> Val:
    code = em.code
    shape = (a.x.shape[0], b.x.shape[1])
    x, y = _codes(em, a), _codes(em, b)
    sa, sb = em.val(a.s), swapped(code, em.val(b.s))  # type: ignore[arg-type]
    acc = acc or code.const(0, "f32", shape)
    formats = f"lhs = {FORMATS[a.x.dtype]} rhs = {FORMATS[b.x.dtype]} {{fastMath = false}}"
    types = f"{x.type}, {sa.type} * {y.type}, {sb.type} -> {acc.type}"
    right = f"tt.dot_scaled {x.name} scale {sa.name}, {y.name} scale {sb.name}, {acc.name} {formats} : {types}"
    return code.let(right, shape, "f32")


def _codes(em: Emitter, side: Side) -> Val:
    """The codes of an operand as hardware takes them: fp8, or two 4-bit floats a byte along k."""
    code, t = em.code, em.val(side.x)
    if side.x.dtype in FP8:
        return code.bitcast(t, FP8[side.x.dtype])
    t = t if side.axis == 1 else swapped(code, t)
    pairs = code.reshape(t, (t.shape[0], t.shape[1] // 2, 2))
    half = pairs.shape[:2]
    low, high = code.let_many(f"tt.split {pairs.name} : {pairs.type} -> {spell(half, 'i8')}", [(half, "i8")] * 2)
    low = code.op("arith.andi", low, code.const(15, "i8", half))
    packed = code.op("arith.ori", low, code.op("arith.shli", high, code.const(4, "i8", half)))
    return packed if side.axis == 1 else swapped(code, packed)
