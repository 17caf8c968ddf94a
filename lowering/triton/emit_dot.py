"""Matrix products: `tt.dot` where hardware multiplies matrices of the operands' dtypes, else multiply and add."""

from __future__ import annotations

import dataclasses
import math

from jtile import ir

from . import moves
from .convert import convert
from .emitter import PACKED, Emitter, elem_of, emits, memory_elem, padded
from .features import Features
from .ttir import Code, Val, bits, spell

# Dtypes whose every value is one of float16 and of bfloat16.
NARROW = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e3m4", "float4_e2m1fn", *ir.FNUZ)
PROMOTE = 128  # elements of k after which the short accumulators of Hopper's fp8 products go to f32, as in cuBLAS
ALWAYS = 2**30
PRODUCTS = 1 << 16  # elements of a tensor of products before they are summed, at most
FP8 = {"float8_e4m3fn": "f8E4M3FN", "float8_e5m2": "f8E5M2"}


@dataclasses.dataclass(frozen=True)
class Form:
    """How a product is computed.

    Attributes:
      a, b: dtypes that the operands are converted to.
      out: element type of the accumulator.
      how: the precision of `tt.dot`, or "" to multiply and add in the dtype of the accumulator.
      least: the smallest k of the instruction.
      fast: whether 8-bit floats stay in the accumulators of the tensor cores from step to step.
    """

    a: str
    b: str
    out: str
    how: str = "ieee"
    least: int = 1
    fast: bool = False


def _form(em: Emitter, op: ir.Dot) -> Form:
    """How this product is computed; an empty `how`: by multiply-adds, without the instructions for matrices."""
    _, m, n, k = op.sizes()
    out = elem_of(op.result.dtype)
    if min(m, n, k) == 1:  # matrix units would gain nothing: they compute padded rows and columns too
        wide = op.result.dtype if out != "f32" else "float32"
        return Form(wide, wide, out, "")
    # where loads are so narrow, no instruction at all multiplies f64: see `product`
    if out == "f64" and em.features.backend == "nvidia" and narrowest_load(em) <= 16:
        return Form("float64", "float64", out, "")
    form = form_of(em.features, op.a.dtype, op.b.dtype, out, op.precision)
    return dataclasses.replace(form, least=1) if em.features.npu else form  # the NPU's compiler pads operands


@emits(ir.Dot)
def _dot(em: Emitter, op: ir.Dot) -> Val:
    check_size(em, op)
    batch, _, _, k = op.sizes()
    form = _form(em, op)
    if form.how and not em.features.npu:
        check_operands(em, op, form)
    a = operand(em, em.val(op.a), op.a, form.a, len(batch) + (0 if op.trans_a else 1))
    b = operand(em, em.val(op.b), op.b, form.b, len(batch) + (1 if op.trans_b else 0))
    acc = None if op.acc is None else em.val(op.acc)
    many = math.prod(padded(batch))
    a, b = (stacked(em.code, x, many) for x in (a, b))
    acc = None if acc is None else stacked(em.code, acc, many)
    if not form.how:
        v = multiply_add(em.code, a, b, acc, op.trans_a, op.trans_b)
    else:
        a, b = (swapped(em.code, x) if t else x for x, t in ((a, op.trans_a), (b, op.trans_b)))
        unsigned = tuple(form.a == "int8" and v.dtype == "uint8" for v in (op.a, op.b))
        if em.features.tma:
            a, b = (veiled(em.code, x) if _is_reshaped(v) else x for x, v in ((a, op.a), (b, op.b)))
        v = batched(em, form, a, b, acc)
        if any(unsigned):
            v = shifted_back(em.code, v, a, b, unsigned, k)
    return em.code.reshape(v, padded(op.result.shape))


def check_size(em: Emitter, op: ir.Dot | ir.DotScaled) -> None:
    """Refuse a product that the registers of several blocks would not hold: it compiles for minutes, in gigabytes. (The
    compiler of an NPU says by itself, and at once, what does not fit.)"""
    if em.features.npu:
        return
    most, size = 4 * em.features.registers, math.prod(padded(op.result.shape))
    if size > most:
        what = f"registers for products of at most {most} elements, and this one has {size}"
        em.refuse(op, f"{what} (sides count as powers of two): make the tiles of the kernel smaller")


def check_operands(em: Emitter, op: ir.Dot, form: Form) -> None:
    """Refuse a step of a sum that is far too long: matrix units take an operand from shared memory, and the compiler
    says only after minutes that it is not there. One of twice its size might go through it in parts."""
    batch, m, n, k = op.sizes()
    size = math.prod(padded((*batch, min(m, n), k))) * ir.DTYPES[form.b].bits // 8
    if size > 2 * em.features.shared:
        what = f"{em.features.shared} bytes of shared memory for operands of a product"
        em.refuse(op, f"{what}, and the smaller one of this takes {size}: sum over smaller tiles in a loop")


def form_of(f: Features, a: str, b: str, out: str, precision: str = "default") -> Form:
    """The form of a product of two dtypes."""
    if out[0] == "i":
        return _integer_form(f, a, b, out)
    if out == "f64":
        return Form("float64", "float64", out, least=16)
    if a in f.fp8 and b in f.fp8 and precision in ("fast", "default") and (f.mixed_fp8 or a == b):
        return Form(a, b, out, least=32, fast=precision == "fast")
    kinds = [{x} if x not in NARROW else {"float16", "bfloat16"} for x in _widened(a, b)]
    both = sorted(kinds[0] & kinds[1], reverse=True)
    if both and both[0] != "float32":
        return Form(both[0], both[0], out, least=16)
    if "float32" not in (a, b):  # tf32 holds every float16 and every bfloat16
        return Form("float32", "float32", out, "tf32" if f.tf32 else "ieee", least=8)
    # Three products of tf32 parts are as accurate as float32 sums of float32 products (errors of 2^-22, infinities
    # kept), run on the matrix units, and compile ten times faster than unrolled multiply-adds.
    if precision == "fast" and f.tf32:
        return Form("float32", "float32", out, "tf32", least=8)
    high = "tf32x3" if f.tf32 else "bf16x3" if f.float32_units and precision == "high" else "ieee"
    return Form("float32", "float32", out, "ieee" if precision == "highest" else high, least=8)


def _widened(a: str, b: str) -> tuple[str, str]:
    """Two dtypes with bfloat16 in place of float8_e8m0fnu: block scales are powers of two in the range of bfloat16."""
    return tuple("bfloat16" if x == "float8_e8m0fnu" else x for x in (a, b))  # type: ignore[return-value]


def _integer_form(f: Features, a: str, b: str, out: str) -> Form:
    if max(ir.DTYPES[a].bits, ir.DTYPES[b].bits) <= 8 and f.int8_units:
        return Form("int8", "int8", out, least=32)
    if out == "i64" or f.backend == "amd":  # the AMD back end multiplies wide integers as floats
        wide = "int64" if out == "i64" else "int32"
        return Form(wide, wide, out, "")
    return Form("int32", "int32", out)


# ---- operands -------------------------------------------------------------------------------------------------------


def operand(em: Emitter, t: Val, v: ir.Value, dtype: str, axis: int) -> Val:
    """A tile in the dtype of a form, with zeros beyond its size along `axis`, which is summed over."""
    if v.dtype == "uint8" and dtype == "int8":  # value - 128; see `shifted_back`
        t = em.code.op("arith.xori", t, em.code.const(128, "i8", t.shape))
    elif dtype not in FP8 or dtype != v.dtype:
        t = convert(em.code, em.features, t, v.dtype, dtype)
    t = cut(em.code, t, v.shape[axis], axis)
    return em.code.bitcast(t, FP8.get(dtype, t.elem))


def _is_reshaped(v: ir.Value) -> bool:
    """Whether a tile comes from a reshape of one with a short last axis, as that of halves of bytes does."""
    while isinstance(v.op, ir.Cast | ir.Bitcast | ir.Transpose) and v.dtype not in PACKED:
        v = v.op.x
    short = isinstance(v.op, ir.Reshape) and v.op.x.shape[-1:] < (16,)
    return short or v.dtype in PACKED


def veiled(code: Code, t: Val) -> Val:
    """The tensor `t` behind a selection that only LLVM sees through. Triton puts a reshaped operand into shared memory
    as it was before, and fails where the last axis was shorter than 16 bytes (triton 3.6; of bytes 3.9 too)."""
    here = code.cmp("sge", code.let("tt.get_program_id x : i32", (), "i32"), code.i32(0))
    return code.select(here, t, code.const(0, t.elem, t.shape))


def cut(code: Code, t: Val, n: int, axis: int) -> Val:
    """A tensor with zeros from `n` on along an axis."""
    if t.shape[axis] == n or (t.fill is not None and t.fill == 0):
        return t
    side = t.shape[axis]
    inside = code.cmp("slt", code.arange(side), code.const(n, "i32", (side,)))
    return code.select(code.along(inside, axis, t.shape), t, code.const(0, t.elem, t.shape))


def stacked(code: Code, t: Val, many: int) -> Val:
    """A tensor whose batch axes are merged into one, or dropped where that would have length 1."""
    return code.reshape(t, ((many,) if many > 1 else ()) + t.shape[-2:])


def swapped(code: Code, t: Val) -> Val:
    """A tensor with its last two axes exchanged."""
    rank = len(t.shape)
    return code.transpose(t, [*range(rank - 2), rank - 1, rank - 2])


def interleaved(code: Code, t: Val, axis: int, times: int) -> Val:
    """A tensor with an axis made longer by zeros after each of its elements."""
    if times == 1:
        return t
    wide = code.expand_dims(t, axis + 1)
    shape = (*t.shape[: axis + 1], times, *t.shape[axis + 1 :])
    first = code.cmp("eq", code.arange(times), code.const(0, "i32", (times,)))
    wide = code.select(code.along(first, axis + 1, shape), code.broadcast(wide, shape), code.const(0, t.elem, shape))
    return code.reshape(wide, (*t.shape[:axis], t.shape[axis] * times, *t.shape[axis + 1 :]))


# ---- products -------------------------------------------------------------------------------------------------------


def batched(em: Emitter, form: Form, a: Val, b: Val, acc: Val | None) -> Val:
    """`product`, one matrix after the other where shared memory does not hold all of them: two words an element are
    what operands and their conversions take."""
    words = (a.size * bits(a.elem) + b.size * bits(b.elem)) // 8
    if len(a.shape) == 2 or 2 * words <= em.features.shared:
        return product(em, form, a, b, acc)
    parts = []
    for k in range(a.shape[0]):
        x, y, z = (v and moves.unstack(em.code, v, 0, k) for v in (a, b, acc))
        parts.append(product(em, form, x, y, z))  # type: ignore[arg-type]
    return moves.stack(em.code, parts, 0)


def product(em: Emitter, form: Form, a: Val, b: Val, acc: Val | None) -> Val:
    """`acc + a @ b` of tensors of rank 2 or 3 by `tt.dot`.

    Sums of bytes that leave 32 bits wrap in wgmma, but saturate in the `mma.sync` that triton takes for small tiles.
    """
    code, rank = em.code, len(a.shape)
    shape = (*a.shape[:-1], b.shape[-1])
    # Where an operand comes from a load of narrower elements, if only in its address, triton orders k by words of
    # these: it takes so many steps of an instruction at once, and is wrong, without a word, of fewer (triton 3.6).
    steps = (
        bits(a.elem) // min(narrowest_load(em), bits(a.elem))
        if em.features.backend == "nvidia" and a.is_float and form.a not in FP8
        else 1
    )
    times = max(form.least * steps // a.shape[-1], 1)
    a, b = interleaved(code, a, rank - 1, times), interleaved(code, b, rank - 2, times)
    rows, columns = (_unit_sides(em.features, form) // n for n in shape[-2:])
    if max(rows, columns) > 1:
        a, b = interleaved(code, a, rank - 2, max(rows, 1)), interleaved(code, b, rank - 1, max(columns, 1))
        v = product(em, form, a, b, None)
        v = picked(code, picked(code, v, rank - 1, max(columns, 1)), rank - 2, max(rows, 1))
        return v if acc is None else code.op("arith.addf" if v.is_float else "arith.addi", acc, v)
    acc = acc or code.const(0, form.out, shape)
    kind = f", inputPrecision = {form.how}" if form.how != "ieee" else ""
    if form.a in FP8:
        kind += f" {{maxNumImpreciseAcc = {ALWAYS if form.fast else min(PROMOTE, a.shape[-1])} : i32}}"
    right = f"tt.dot {a.name}, {b.name}, {acc.name}{kind} : {a.type} * {b.type} -> {spell(shape, form.out)}"
    return code.let(right, shape, form.out)


def _unit_sides(f: Features, form: Form) -> int:
    """The least sides of a product in AMD's matrix units, where triton multiplies smaller ones without them; else 0."""
    units = form.a in ("float16", "bfloat16", "int8", *f.fp8) or (form.a == "float32" and f.float32_units)
    return 16 if f.backend == "amd" and units else 0


def picked(code: Code, t: Val, axis: int, times: int) -> Val:
    """The first of every `times` elements along an axis: what `interleaved` put there."""
    if times == 1:
        return t
    wide = (*t.shape[:axis], t.shape[axis] // times, times, *t.shape[axis + 1 :])
    first = code.cmp("eq", code.arange(times), code.const(0, "i32", (times,)))
    kept = code.select(code.along(first, axis + 1, wide), code.reshape(t, wide), code.const(0, t.elem, wide))
    return total(code, kept, axis + 1)


def narrowest_load(em: Emitter) -> int:
    """Bits of the narrowest elements that a kernel loads, as they lie in memory."""
    if "narrowest" not in em.memo:
        loads = (op for op in em.kernel.body.walk() if isinstance(op, ir.Load))
        em.memo["narrowest"] = min((bits(memory_elem(op.ref.dtype)) for op in loads), default=64)
    return em.memo["narrowest"]


def shifted_back(code: Code, v: Val, a: Val, b: Val, unsigned: tuple[bool, ...], k: int) -> Val:
    """The product of unsigned bytes from that of the bytes less 128, which the matrix units know: both were shifted."""
    rank = len(v.shape)
    if unsigned[0]:
        row = code.expand_dims(total(code, code.to_int(b, "i32"), rank - 2), rank - 2)
        v = code.add(v, code.broadcast(code.scale(row, 128), v.shape))
    if unsigned[1]:
        column = code.expand_dims(total(code, code.to_int(a, "i32"), rank - 1), rank - 1)
        v = code.add(v, code.broadcast(code.scale(column, 128), v.shape))
    return code.shift(v, 128 * 128 * k) if all(unsigned) else v


def total(code: Code, v: Val, axis: int) -> Val:
    """The sum of a tensor along an axis; for a vector a scalar."""
    shape = (*v.shape[:axis], *v.shape[axis + 1 :])
    add = "arith.addf" if v.is_float else "arith.addi"
    v = code.isolated(v)
    x, y, z = (code.name() for _ in range(3))
    out = code.let(f'"tt.reduce"({v.name}) <{{axis = {axis} : i32}}> ({{', shape, v.elem)
    code.do(f"^bb0({x}: {v.elem}, {y}: {v.elem}):")
    code.do(f"  {z} = {add} {x}, {y} : {v.elem}")
    code.do(f"  tt.reduce.return {z} : {v.elem}")
    code.do(f"}}) : ({v.type}) -> {out.type}")
    return out


# ---- multiply and add -----------------------------------------------------------------------------------------------


def multiply_add(code: Code, a: Val, b: Val, acc: Val | None, trans_a: bool, trans_b: bool) -> Val:
    """`acc + a @ b` of tensors of rank 2 or 3 as the sum of a tensor of products, with no axis of length 1 in it."""
    if trans_a and trans_b:
        a, trans_a = swapped(code, a), False
    n, k = b.shape[-2 if trans_b else -1], a.shape[-2 if trans_a else -1]
    parts = max(1, min(k, math.prod(a.shape) * n // PRODUCTS))
    if trans_b and parts > 1 and min(a.shape[-2], n) > 1:  # with k last, AMD's compiler (of triton 3.9) took 32 s
        b, trans_b = swapped(code, b), False
    axes_a, axes_b = ("B" * (len(a.shape) - 2) + s for s in ("km" if trans_a else "mk", "nk" if trans_b else "kn"))
    sides = dict(zip(axes_a, a.shape, strict=True)) | dict(zip(axes_b, b.shape, strict=True))
    shape = tuple(sides[x] for x in "Bmn" if x in sides)
    order = "Bkmn" if trans_a else "Bmnk" if trans_b else "Bmkn"
    order = "".join(x for x in order if x == "k" or sides.get(x, 1) > 1)
    if parts == 1:
        v = _sum_of_products(code, _laid(code, a, axes_a, order, sides), _laid(code, b, axes_b, order, sides), order)
        v = code.reshape(v, shape)
        return v if acc is None else code.op("arith.addf" if v.is_float else "arith.addi", acc, v)
    return _in_parts(code, (a, axes_a), (b, axes_b), acc or code.const(0, a.elem, shape), parts, order, sides)


def _laid(code: Code, t: Val, axes: str, order: str, sides: dict[str, int]) -> Val:
    """A tensor over the axes `order`, of length 1 where it has none of them."""
    return code.reshape(t, tuple(sides[x] if x in axes else 1 for x in order))


def _sum_of_products(code: Code, a: Val, b: Val, order: str) -> Val:
    shape = tuple(max(x, y) for x, y in zip(a.shape, b.shape, strict=True))
    a, b = code.broadcast(a, shape), code.broadcast(b, shape)
    return total(code, code.op("arith.mulf" if a.is_float else "arith.muli", a, b), order.index("k"))


def _in_parts(code: Code, a, b, acc: Val, parts: int, order: str, sides: dict[str, int]) -> Val:
    """A loop over parts of k: what a part needs is taken from the operands by a sum that has one term for it."""
    small = sides | {"k": sides["k"] // parts}
    t, carry = Val(code.name(), (), "i32"), Val(code.name(), acc.shape, acc.elem)
    zero, one, end = (code.i32(n) for n in (0, 1, parts))
    head = f"scf.for {t.name} = {zero.name} to {end.name} step {one.name}"
    out = code.let(f"{head} iter_args({carry.name} = {acc.name}) -> ({acc.type}) : i32 {{", acc.shape, acc.elem)
    with code.region():
        x, y = (_laid(code, _part(code, v, axes, t, parts), axes, order, small) for v, axes in (a, b))
        v = code.reshape(_sum_of_products(code, x, y, order), acc.shape)
        v = code.op("arith.addf" if v.is_float else "arith.addi", carry, v)
        code.do(f"scf.yield {v.name} : {v.type}")
    code.do("}")
    return out


def _part(code: Code, v: Val, axes: str, t: Val, parts: int) -> Val:
    k = axes.index("k")
    shape = (*v.shape[:k], parts, v.shape[k] // parts, *v.shape[k + 1 :])
    this = code.cmp("eq", code.arange(parts), code.splat(t, (parts,)))
    wide = code.select(code.along(this, k, shape), code.reshape(v, shape), code.const(0, v.elem, shape))
    return total(code, wide, k)
