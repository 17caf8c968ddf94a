"""Matrix products: operands stand in memory (often the Ref itself), the product is a packed micro-kernel of
`gemm.py`."""

from __future__ import annotations

import dataclasses
import math

from jtile import ir

from . import bfloat_parts, byte_digits, gemm_scaled, nibbles, plan, scaled_digits
from .access import elem_bytes
from .convert import is_narrow, is_signed, memory_type
from .digit_products import Digits
from .emit_memory import sub_buffer
from .emitter import Emitter, emits
from .gemm import GemmSpec, emit_gemm, order_of
from .gemm_modes import STORAGE
from .indexing import affine_axes
from .llvm import Val, i64
from .scaled_columns import FEW, SCALES, ScaledSpec, ask_first
from .values import Buffer, Lazy

# A product is summed in its Ref only while those rows stay in the second-level cache and its TLB: at 2048 x 2048,
# summing in the arena and copying once is a quarter faster.
DIRECT_BYTES = 1 << 20


@emits(ir.Dot)
def _dot(em: Emitter, op: ir.Dot) -> None:
    if op in em.digits:
        em.orders.add(None)
        _product_of_digits(em, op, em.digits[op])
        return
    batch, m, n, k = op.sizes()
    _unpack(em, op.b)
    narrow = lambda v: bfloat_parts.narrow(v) if isinstance(em.rep(v), Lazy) else v
    operands = narrow(op.a), narrow(op.b)
    in_parts = bfloat_parts.spec_of(em.isa, op, (operands[0].dtype, operands[1].dtype))
    if in_parts is not None:
        em.orders.add(None)
        _product_in_parts(em, op, operands, in_parts)
        return
    a, ta = matrix(em, operand(em, op.a), op.trans_a)
    b, tb = matrix(em, operand(em, op.b), op.trans_b)
    target = _store_target(em, op)
    out, accumulate = (target, False) if target is not None else _output(em, op)
    terms = em.order.terms if k > em.order.terms > 0 == k % em.order.terms else 0
    spec = GemmSpec(m, n, k, stored(a.dtype), stored(b.dtype), op.result.dtype, ta, tb, accumulate, _is_made(op.b))
    spec = dataclasses.replace(spec, banks=em.order.banks, terms=terms)
    em.orders.add(order_of(em.isa, spec))
    gemm = emit_gemm(em.module, em.isa, spec)
    ws = _scratch(em, gemm.workspace)
    _batch(
        em, batch, (a, b, out), lambda pa, pb, pc: _call(em, gemm.name, (pa, a, ta), (pb, b, tb), (pc, out, False), ws)
    )
    for buf in (a, b, out):
        em.arena.touch(buf.alloc)
    em.set_buffer(op.result, out)


def _unpack(em: Emitter, v: ir.Value) -> None:
    """Bring numbers of panels that nobody has unpacked to memory in rows."""
    while isinstance(v.op, ir.Transpose | ir.Cast) and isinstance(em.rep(v), Lazy):
        v = v.op.x
    if isinstance(em.rep(v), Lazy) and nibbles.panel_numbers(v) is not None:
        em.materialise_reshape(v.op)


def _is_made(v: ir.Value) -> bool:
    """Whether a tile is computed from others, and not only read, converted or seen in another shape."""
    while isinstance(v.op, ir.Transpose | ir.Reshape | ir.Cast | ir.Slice | ir.Broadcast):
        v = v.op.x
    return isinstance(v.op, ir.Map | ir.Concat)


def _product_of_digits(em: Emitter, op: ir.Dot, of: Digits) -> None:
    """The product by `byte_digits`."""
    row = lambda buf: em.code.mul(_leading(buf, False), elem_bytes(buf.dtype))
    buffers, args = [], []

    def with_row(buf: Buffer) -> tuple[Val, Val]:
        buffers.append(buf)
        return buf.ptr, row(buf)

    def with_rows(high: ir.Value, low: ir.Value, scale: ir.Value | None = None) -> list[Val]:
        found = *with_row(_rows(em, high)), *with_row(_rows(em, low))
        return [*found, *((found[0], i64(0)) if scale is None else with_row(_of_rows(em, scale)))]

    args += with_rows(*of.of_a)
    if of.spec.b in ("codes", "bytes"):
        panels = [_side_by_side(em, v, em.materialise(v)) for v in of.of_b]
        buffers += panels
        args += [buf.ptr for buf in (*panels, *panels[-1:] * (3 - len(panels)))]
    else:
        args += with_rows(*of.of_b)
    target = _store_target(em, op, most=math.inf)
    if of.fade is not None:
        out, accumulate, fade = _faded(em, op, of.fade[0]), True, with_row(_of_rows(em, of.fade[1]))
    else:
        out, accumulate = (target, False) if target is not None else _output(em, op)
        fade = (out.ptr, i64(0))
    spec = dataclasses.replace(of.spec, accumulate=accumulate, fade=of.fade is not None)
    name, workspace = byte_digits.emit_digits(em.module, em.isa, spec)
    ws = _scratch(em, workspace)
    args += [*with_row(out), *fade, ws]
    em.code.do(f"call void @{name}({', '.join(map(str, args))})")
    for buf in buffers:
        em.arena.touch(buf.alloc)
    em.set_buffer(op.result, out)


def _faded(em: Emitter, op: ir.Dot, x: ir.Value) -> Buffer:
    """Memory with x that the product is added to, after x has been multiplied: that of x if it dies here."""
    em.env.pop(op.acc)  # which nobody computes: it does not read x any more
    buf = em.materialise(x)
    return buf if em.overwritable(x, op.result) else em.copy(x, em.result_buffer(op.result))


def _of_rows(em: Emitter, scale: ir.Value) -> Buffer:
    """One number for all rows, or one for each, as a matrix [rows, 1] in memory."""
    if scale.type.rank == 0:
        buf = em.new_buffer((1,), scale.dtype)
        em.code.store(em.scalar(scale), buf.ptr, align=4)
        return dataclasses.replace(buf, shape=(2, 1), strides=(0, 1))
    buf = em.materialise(scale)
    return dataclasses.replace(buf, shape=(buf.shape[0], 1), strides=(buf.strides[0], 1))


def _product_in_parts(
    em: Emitter, op: ir.Dot, operands: tuple[ir.Value, ir.Value], spec: bfloat_parts.PartsSpec
) -> None:
    """The product by `bfloat_parts`, of operands that may be narrower than those of the op."""
    batch = op.sizes()[0]
    a, ta = matrix(em, operands[0], False)
    b, tb = matrix(em, operands[1], op.trans_b)
    if ta:
        a = em.copy(operands[0], em.new_buffer(operands[0].shape, operands[0].dtype))
    target = _store_target(em, op, most=math.inf)
    out, accumulate = (target, False) if target is not None else _output(em, op)
    spec = dataclasses.replace(spec, trans_b=tb, accumulate=accumulate)
    name, workspace = bfloat_parts.emit_parts(em.module, em.isa, spec)
    ws = _scratch(em, workspace)
    row = lambda buf, turned=False: em.code.mul(_leading(buf, turned), elem_bytes(buf.dtype))

    def run(pa: Val, pb: Val, pc: Val) -> None:
        args = pa, row(a), pb, row(b, tb), pc, row(out), ws
        em.code.do(f"call void @{name}({', '.join(map(str, args))})")

    _batch(em, batch, (a, b, out), run)
    for buf in (a, b, out):
        em.arena.touch(buf.alloc)
    em.set_buffer(op.result, out)


def _scratch(em: Emitter, size: int) -> Val:
    """So many bytes that a product has to itself while it is computed."""
    work = em.arena.new(size)
    return em.code.let("ptr", f"getelementptr i8, {em.workspace}, i64 {work.token}")


def _store_target(em: Emitter, op: ir.Dot, most: float = DIRECT_BYTES) -> Buffer | None:
    """Where the only reader of the product is the store right behind it, of a tile inside its Ref: that Ref's memory,
    if its rows there take so many bytes at most."""
    uses = em.plan.uses.get(op.result, [])
    if not _starts_at_zero(op.acc) or uses != [em.pos + 1] or uses[0] >= len(em.plan.block.ops):
        return None
    store = em.plan.block.ops[uses[0]]
    if not isinstance(store, ir.Store) or store.mask is not None or store.ref in _operand_refs(em, op):
        return None
    if any(isinstance(d, ir.Take) for d in store.index) or op.result.type.rank != store.ref.type.rank - _dropped(store):
        return None
    axes = affine_axes(em, store)
    if any(a is None or a.checked for a in axes):
        return None
    target = sub_buffer(em, em.rep(store.ref), axes, op.result.shape)
    if (target.strides[-1] != 1 and op.result.shape[-1] > 1) or _spread(target) > most:
        return None
    em.done.add(store)
    return target


def _spread(buf: Buffer) -> float:
    """Bytes of address space between the first and the last row of a matrix in memory; infinite if not known."""
    rows = buf.strides[-2]
    return buf.shape[-2] * rows * elem_bytes(buf.dtype) if isinstance(rows, int) else math.inf


def _dropped(store: ir.Store) -> int:
    return sum(isinstance(d, ir.At) for d in store.index)


def _operand_refs(em: Emitter, op: ir.Dot) -> set[ir.Value]:
    """Refs that the operands may still read in place, and those that share their memory."""
    refs, todo, seen = set(), [op.a, op.b], {op.a, op.b}
    while todo:  # the search goes through views too: they have a buffer and yet read the Ref
        source = todo.pop().op
        if isinstance(source, ir.Load):
            refs.add(source.ref)
        elif plan.is_lazy(source):
            fresh = [v for v in source.operands() if v not in seen]
            seen.update(fresh)
            todo += fresh
    for i, o in em.kernel.aliases:
        pair = {em.kernel.inputs[i], em.kernel.outputs[o]}
        refs |= pair if pair & refs else set()
    return refs


def _starts_at_zero(acc: ir.Value | None) -> bool:
    if acc is not None and isinstance(acc.op, ir.Broadcast):
        acc = acc.op.x
    return acc is None or (isinstance(acc.op, ir.Full) and acc.op.value == 0)


def stored(dtype: str) -> str:
    """The dtype that `gemm.py` gets for a dtype: integers of less than a byte stand one a byte in our buffers."""
    return ("int8" if is_signed(dtype) else "uint8") if is_narrow(dtype) else dtype


def operand(em: Emitter, v: ir.Value) -> ir.Value:
    """The operand, widened to f32 first if it is a float that has no matrix form of its own."""
    if stored(v.dtype) in STORAGE:
        return v
    op = ir.build(ir.Cast(v, "float32"))
    em.lazy(op)
    return op.result


def _batch(em: Emitter, batch, buffers: tuple[Buffer, ...], run) -> None:
    """Run the product for every index of the batch axes."""
    code = em.code

    def go(depth: int, ptrs: list[Val]) -> None:
        if depth == len(batch):
            run(*ptrs)
            return
        with code.loop(0, batch[depth]) as i:
            moved = [
                code.gep(memory_type(b.dtype), p, code.mul(i, b.strides[depth]))
                for p, b in zip(ptrs, buffers, strict=True)
            ]
            go(depth + 1, moved)

    go(0, [b.ptr for b in buffers])


def _call(em: Emitter, name: str, *operands) -> None:
    (pa, a, ta), (pb, b, tb), (pc, c, _), ws = operands
    args = [pa, _leading(a, ta), pb, _leading(b, tb), pc, _leading(c, False), ws]
    em.code.do(f"call void @{name}({', '.join(map(str, args))})")


def _leading(buf: Buffer, _trans: bool) -> Val:
    """Distance of two rows as they are stored."""
    rows, cols = buf.strides[-2], buf.strides[-1]
    s = rows if cols == 1 or buf.shape[-1] == 1 else cols
    if buf.shape[-2] == 1 and buf.shape[-1] > 1 and cols == 1:
        s = buf.shape[-1]
    return i64(s) if isinstance(s, int) else s


def matrix(em: Emitter, v: ir.Value, trans: bool) -> tuple[Buffer, bool]:
    """The operand in memory with one of its last two axes contiguous; a lazy transpose becomes a flag."""
    if isinstance(v.op, ir.Transpose) and not isinstance(em.rep(v), Buffer) and _swaps_last(v.op.perm):
        return matrix(em, v.op.x, not trans)
    buf = em.materialise(v)
    rows, cols = buf.strides[-2], buf.strides[-1]
    if cols == 1 or buf.shape[-1] == 1:
        if buf.shape[-1] == 1 and cols != 1 and rows != 1:
            return Buffer(buf.ptr, buf.shape, (*buf.strides[:-2], rows, 1), buf.dtype, buf.alloc, False), trans
        return buf, trans
    if rows == 1:
        shape = (*buf.shape[:-2], buf.shape[-1], buf.shape[-2])
        return Buffer(buf.ptr, shape, (*buf.strides[:-2], cols, rows), buf.dtype, buf.alloc, False), not trans
    return em.copy(v, em.new_buffer(v.shape, v.dtype)), trans


def _swaps_last(perm: tuple[int, ...]) -> bool:
    n = len(perm)
    return n >= 2 and perm == (*range(n - 2), n - 1, n - 2)


def _output(em: Emitter, op: ir.Dot | ir.DotScaled) -> tuple[Buffer, bool]:
    """Where the product goes, and whether it adds to what is there: the accumulator's own buffer if that dies here."""
    acc = op.acc
    if _starts_at_zero(acc):
        return em.result_buffer(op.result), False
    buf = em.materialise(acc)
    if op.operands().count(acc) == 1 and em.overwritable(acc, op.result):
        return buf, True
    return em.copy(acc, em.result_buffer(op.result)), True


@emits(ir.DotScaled)
def _dot_scaled(em: Emitter, op: ir.DotScaled) -> None:
    """Block scales are applied while the operands are widened to f32; then an ordinary product."""
    (m, k), n = op.a.shape, op.b.shape[1]
    if nibbles.in_integers(em.isa, op):
        _sum_of_integers(em, op)
        return
    a, b = _scaled(em, op.a, op.sa, 1), _scaled(em, op.b, op.sb, 0)
    out, accumulate = _output(em, op)
    gemm = emit_gemm(em.module, em.isa, GemmSpec(m, n, k, "float32", "float32", "float32", False, False, accumulate))
    ws = _scratch(em, gemm.workspace)
    _call(em, gemm.name, (a.ptr, a, False), (b.ptr, b, False), (out.ptr, out, False), ws)
    for buf in (a, b, out):
        em.arena.touch(buf.alloc)
    em.set_buffer(op.result, out)


def _sum_of_integers(em: Emitter, op: ir.DotScaled) -> None:
    """The product by `gemm_scaled`, together with one of floats behind it that adds to it only."""
    (m, k), n = op.a.shape, op.b.shape[1]
    added = _added(em, op)
    codes, in_panels = _codes(em, _turned(em, op.b))
    of_b = _turned(em, op.sb)
    low = None if not added else _low(em, added)
    together = SCALES if low is of_b else low.dtype if low else None
    of_b, low, turned = _in_one_form(em, of_b, low if low is not None else of_b)
    values = op.a, op.sa, added.a if added else op.sa, codes, of_b, low
    operands = [_rows(em, v) for v in values]
    for k_th, panels in ((3, in_panels), (4, turned), (5, turned)):
        operands[k_th] = _side_by_side(em, values[k_th], operands[k_th]) if panels else operands[k_th]
    out, accumulate = _output(em, op)
    shared = op.sa.shape[1] // op.sb.shape[0]
    four = codes.shape[1] * (4 if in_panels else 1) < k
    form = (in_panels, turned)
    spec = ScaledSpec(m, n, k, op.b.dtype, four, of_b.dtype, together, shared, accumulate, *form)
    name, workspace = gemm_scaled.emit_scaled(em.module, em.isa, spec)
    ws = _scratch(em, workspace)
    row = lambda buf: em.code.mul(_leading(buf, False), elem_bytes(buf.dtype))
    args = [arg for buf in (*operands, out) for arg in (buf.ptr, row(buf))]
    if in_panels and (m <= FEW or scaled_digits.fits(em.isa, spec)):
        with em.code.when(em.first()):  # programs that follow have asked for the next one's
            ask_first(em.code, spec, operands[3].ptr)
    em.code.do(f"call void @{name}({', '.join(map(str, (*args, ws)))})")
    for buf in (*operands, out):
        em.arena.touch(buf.alloc)
    em.set_buffer(op.result, out)
    if added:
        em.done.add(added)
        em.set_buffer(added.result, out)


def _codes(em: Emitter, v: ir.Value) -> tuple[ir.Value, bool]:
    """The codes of a matrix as they are stored, where nobody has unpacked them; and whether these are words in
    panels."""
    if not isinstance(em.rep(v), Lazy):
        return v, False
    words = nibbles.panel_words(v)
    codes = nibbles.packed_codes(v) if words is None else words
    return (v if codes is None else codes), words is not None


def _in_one_form(em: Emitter, scales: ir.Value, lows: ir.Value) -> tuple[ir.Value, ir.Value, bool]:
    """Scales and lows, both as they are stored in panels, or both in rows; and whether they are in panels."""
    stored = [nibbles.panel_numbers(v) if isinstance(em.rep(v), Lazy) else None for v in (scales, lows)]
    if all(v is not None for v in stored):
        return *stored, True
    for v in (scales, lows):
        _unpack(em, v)
    return scales, lows, False


def _added(em: Emitter, op: ir.DotScaled) -> ir.Dot | None:
    """The product of floats [m, groups] and [groups, n] that is the only reader of `op`, and adds to it; None: there
    is none, or its operands are not there yet."""
    uses = em.plan.uses.get(op.result, [])
    ops = em.plan.block.ops
    dot = ops[uses[0]] if len(uses) == 1 and uses[0] < len(ops) else None
    if not isinstance(dot, ir.Dot) or dot.acc is not op.result or {dot.a.dtype, dot.b.dtype} != {"float32"}:
        return None
    turned = dot.trans_b or isinstance(dot.b.op, ir.Transpose)
    groups = op.sb.shape[0]
    fits = dot.a.type.rank == 2 and not dot.trans_a and turned and dot.a.shape[1] == groups
    return dot if fits and dot.a in em.env and dot.b in em.env else None


def _turned(em: Emitter, v: ir.Value) -> ir.Value:
    """The transpose of a transpose: what it was made from, unless it has memory of its own. Then that may be gone."""
    if isinstance(em.rep(v), Lazy):
        return v.op.x
    op = ir.build(ir.Transpose(v, (1, 0)))
    em.lazy(op)
    return op.result


def _low(em: Emitter, dot: ir.Dot) -> ir.Value:
    """The lows [n, groups] of a product of sums and lows, in the dtype that they are stored in."""
    low = dot.b if dot.trans_b else _turned(em, dot.b)
    stored = low.op.x if isinstance(low.op, ir.Cast) and isinstance(em.rep(low), Lazy) else low
    return stored if stored.dtype in ("float16", "bfloat16") else low


def _rows(em: Emitter, v: ir.Value) -> Buffer:
    """A matrix in memory whose last axis is contiguous."""
    buf = em.materialise(v)
    return buf if buf.strides[-1] == 1 else em.copy(v, em.new_buffer(v.shape, v.dtype))


def _side_by_side(em: Emitter, v: ir.Value, buf: Buffer) -> Buffer:
    """A matrix in memory whose rows stand one behind the other."""
    return buf if buf.contiguous() else em.copy(v, em.new_buffer(v.shape, v.dtype))


def _scaled(em: Emitter, x: ir.Value, s: ir.Value | None, axis: int) -> Buffer:
    """`x` times its block scales in f32, as Tile IR that the lazy evaluator runs."""
    b = ir.Builder()
    wide = b.cast(x, "float32")
    if s is not None:
        rows, cols = x.shape
        blocks = s.shape[axis]
        shape = (rows, blocks, cols // blocks) if axis else (blocks, rows // blocks, cols)
        dims = (0, 1) if axis else (0, 2)
        spread = b.value(ir.Broadcast(b.cast(s, "float32"), shape, dims))
        wide = b.map("mul", b.reshape(wide, shape), spread)
        wide = b.value(ir.Reshape(wide, x.shape)) if wide.shape != x.shape else wide
    for op in b.block.ops:
        em.lazy(op)
    return em.materialise(wide)
