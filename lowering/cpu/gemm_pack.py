"""Packing of matmul operands: the layouts that the micro-kernels read with unit stride.

Two layouts, both of *units* (`gemm_modes`): a **panel** is [steps][width], the lanes of one k step side by side;
**rows** are [rows][steps] padded with zeros to whole vectors. Lanes and k elements that do not exist are written as
zeros on the side of B (and of A for floats), so that no stray value meets them in a multiplication.

Every function takes a byte stride `ld` of the source's outer axis and the number `kc` of k elements of this block; `kc`
is a whole number of vectors, or that plus the static tail `k_tail` (the last block).
"""

from __future__ import annotations

from .gemm_modes import BYTES, STORAGE, Mode
from .gemm_vector import ATTRIBUTES, interleave, load_part, offset, transpose, zeros
from .llvm import Code, Module, Val, i64, vec

_I64 = "i64"


def panel_from_lanes(module: Module, mode: Mode, dtype: str, k_tail: int, width: int, count: int, side: str) -> str:
    """Source [k][lanes]: `void(ptr src, i64 ld, ptr dst, i64 kc[, ptr sums])` writes one panel.

    The panel has `width` lanes of which `count` are real; for tiles, zeros complete its steps to a multiple of
    `mode.lanes`. Where the mode flips signs, side "a" is flipped and side "b" leaves in `sums[width]` what
    `Mode.corrected` needs.
    """
    tail, ragged = k_tail % mode.group, mode.tiles and k_tail % (mode.lanes * mode.group) != 0
    name = f"pack_lanes_{mode.tag}_{dtype}_{width}_{count}_{tail}" + "_ragged" * ragged + _side_tag(mode, side)
    if name in module.functions:
        return name
    with_sums = mode.flip and side == "b"
    params = [Val("ptr", "%src"), Val(_I64, "%ld"), Val("ptr", "%dst"), Val(_I64, "%kc"), Val("ptr", "%sums")]
    c = Code(module, name, params if with_sums else params[:4], attributes=ATTRIBUTES)
    src, ld, dst, kc = params[:4]
    chunk = min(width, mode.lanes)
    slots = (
        [c.var(vec(chunk, mode.unit), zeros(vec(chunk, mode.unit))) for _ in range(0, width, chunk)]
        if with_sums
        else []
    )
    size = BYTES[STORAGE[dtype]]

    def step(at: Val, rows: int) -> None:
        for v, lane in enumerate(range(0, width, chunk)):
            ptr = offset(c, c.gep("i8", src, c.mul(c.mul(at, mode.group), ld)), lane, size)
            units = _enter(c, mode, side, lanes_step(c, mode, dtype, ptr, ld, rows, chunk, count - lane))
            c.store(
                units, offset(c, dst, c.add(c.mul(at, width), lane), mode.unit_bytes), align=chunk * mode.unit_bytes
            )
            if with_sums:
                c.store(mode.column_sum(c, c.load(units.ty, slots[v]), units), slots[v])

    steps = c.binary("sdiv", kc, Val(_I64, str(mode.group))) if mode.group > 1 else kc
    with c.loop(0, steps) as at:
        step(at, mode.group)
    if tail:
        with c.when(c.cmp("icmp", "ne", c.mul(steps, mode.group), kc)):
            step(steps, tail)
    if ragged:
        done = c.binary("sdiv", c.add(kc, mode.group - 1), i64(mode.group))
        with c.loop(done, c.binary("and", c.add(done, mode.lanes - 1), i64(-mode.lanes))) as at:
            for lane in range(0, width, chunk):
                to = offset(c, dst, c.add(c.mul(at, width), lane), mode.unit_bytes)
                c.store(zeros(vec(chunk, mode.unit)), to, align=chunk * mode.unit_bytes)
    for v, slot in enumerate(slots):
        total = c.load(vec(chunk, mode.unit), slot)
        c.store(total, offset(c, params[4], v * chunk, mode.unit_bytes), align=4)
    c.finish()
    return name


def _side_tag(mode: Mode, side: str) -> str:
    return f"_{side}" if mode.flip else ""


def _enter(c: Code, mode: Mode, side: str, units: Val) -> Val:
    return mode.enter_a(c, units) if side == "a" else units


def lanes_step(c: Code, mode: Mode, dtype: str, ptr: Val, ld: Val, rows: int, lanes: int, count: int) -> Val:
    """One step from memory as units: `rows` <= group source rows of `lanes` elements, `count` of them real."""
    elem = STORAGE[dtype]
    if count <= 0:
        return zeros(vec(lanes, mode.unit))
    count = min(count, lanes)
    group = [load_part(c, mode.isa, elem, c.gep("i8", ptr, c.mul(ld, r)), lanes, count) for r in range(rows)]
    group += [zeros(vec(lanes, elem))] * (mode.group - rows)
    # Interleaved before widening: one wide conversion instead of one a row.
    return c.cast("bitcast", mode.widen(c, interleave(c, group), dtype), vec(lanes, mode.unit))


def rows_step(c: Code, mode: Mode, dtype: str, ptr: Val, count: int) -> Val:
    """`lanes` units that follow each other along k in memory, of which `count` elements (not units) are real."""
    elements = mode.lanes * mode.group
    x = load_part(c, mode.isa, STORAGE[dtype], ptr, elements, min(count, elements))
    return c.cast("bitcast", mode.widen(c, x, dtype), vec(mode.lanes, mode.unit))


def split_k(c: Code, kc: Val, block: int, k_tail: int) -> tuple[Val, Val | None]:
    """The part of kc that is whole blocks, and the condition that a tail follows (None: never)."""
    if k_tail % block == 0:
        return kc, None
    whole = c.binary("and", kc, Val(_I64, str(-block)))
    return whole, c.cmp("icmp", "ne", whole, kc)


def panel_from_rows(module: Module, mode: Mode, dtype: str, k_tail: int, width: int) -> str:
    """B from source [lanes][k]: `void(ptr src, i64 ld, ptr dst, i64 kc, i64 count[, ptr sums])`.

    Writes `mode.lanes` lanes of a panel, `count` of them real. Blocks that lack lanes or k elements are completed with
    zeros in a stack buffer first, so that there is one body of transposing code; the panel has room for whole blocks.
    Dtypes that need widening always take that way: a loop over the rows has one conversion, not one a row.
    """
    block = mode.lanes * mode.group
    tail, elem = k_tail % block, STORAGE[dtype]
    name = f"pack_rows_{mode.tag}_{dtype}_{width}_{tail}"
    if name in module.functions:
        return name
    src, ld, dst, kc, count, sums = params = [
        Val("ptr", "%src"), Val(_I64, "%ld"), Val("ptr", "%dst"), Val(_I64, "%kc"), Val(_I64, "%count"),
        Val("ptr", "%sums"),
    ]  # fmt: skip
    c = Code(module, name, params if mode.flip else params[:5], attributes=ATTRIBUTES)
    ty, line = vec(mode.lanes, mode.unit), vec(block, mode.packed)
    slot = c.var(ty, zeros(ty)) if mode.flip else None
    stage = c.var(line, count=mode.lanes, align=64)
    with c.loop(0, mode.lanes) as r:
        c.store(zeros(line), c.gep(line, stage, r), align=BYTES[mode.packed])
    few = c.cmp("icmp", "slt", count, Val(_I64, str(mode.lanes)))
    with c.loop(0, kc, block) as k0:
        here = offset(c, src, k0, BYTES[elem])
        short = c.cmp("icmp", "slt", c.sub(kc, k0), Val(_I64, str(block))) if tail else Val("i1", "false")
        staged = c.binary("or", few, short) if mode.is_native(dtype) else Val("i1", "true")
        with c.when(staged):
            _stage_rows(c, mode, dtype, here, ld, stage, count, short, tail)
        base = c.select(staged, stage, here)
        stride = c.select(staged, Val(_I64, str(block * BYTES[mode.packed])), ld)
        rows = [c.load(ty, c.gep("i8", base, c.mul(stride, r)), align=BYTES[mode.packed]) for r in range(mode.lanes)]
        step = c.binary("lshr", k0, Val(_I64, str(mode.group.bit_length() - 1)))
        for i, column in enumerate(transpose(c, rows)):
            target = offset(c, dst, c.mul(c.add(step, i), width), mode.unit_bytes)
            c.store(column, target, align=mode.lanes * mode.unit_bytes)
            if slot:
                c.store(mode.column_sum(c, c.load(ty, slot), column), slot)
    if slot:
        c.store(c.load(ty, slot), sums, align=4)
    c.finish()
    return name


def _stage_rows(
    c: Code, mode: Mode, dtype: str, src: Val, ld: Val, stage: Val, count: Val, short: Val, tail: int
) -> None:
    """Widen `count` rows of a block (of `tail` elements where `short`) into the zeroed stage; a short block is last."""
    block = mode.lanes * mode.group

    def copy(valid: int) -> None:
        with c.loop(0, count) as r:
            x = rows_step(c, mode, dtype, c.gep("i8", src, c.mul(r, ld)), valid)
            c.store(x, c.gep(x.ty, stage, r), align=BYTES[mode.packed])

    if not tail:
        copy(block)
        return
    with c.when(short):
        copy(tail)
    with c.when(c.binary("xor", short, Val("i1", "true"))):
        copy(block)


def rows_from_rows(module: Module, mode: Mode, dtype: str, k_tail: int) -> str:
    """Source [rows][k]: `void(ptr src, i64 ld, ptr dst, i64 dst_row, i64 rows, i64 kc)` converts and pads A's rows."""
    block = mode.lanes * mode.group
    tail = k_tail % block
    name = f"convert_rows_{mode.tag}_{dtype}_{tail}"
    if name in module.functions:
        return name
    src, ld, dst, dst_row, rows, kc = params = [
        Val("ptr", "%src"), Val(_I64, "%ld"), Val("ptr", "%dst"), Val(_I64, "%dst_row"), Val(_I64, "%rows"),
        Val(_I64, "%kc"),
    ]  # fmt: skip
    c = Code(module, name, params, attributes=ATTRIBUTES)

    def piece(row: Val, k0: Val, valid: int) -> None:
        ptr = offset(c, c.gep("i8", src, c.mul(row, ld)), k0, BYTES[STORAGE[dtype]])
        out = offset(c, c.gep("i8", dst, c.mul(row, dst_row)), k0, BYTES[mode.packed])
        c.store(_enter(c, mode, "a", rows_step(c, mode, dtype, ptr, valid)), out, align=mode.lanes * mode.unit_bytes)

    with c.loop(0, rows) as row:
        whole, has_tail = split_k(c, kc, block, tail)
        with c.loop(0, whole, block) as k0:
            piece(row, k0, block)
        if has_tail:
            with c.when(has_tail):
                piece(row, whole, tail)
    c.finish()
    return name


def rows_from_lanes(module: Module, mode: Mode, dtype: str, k_tail: int) -> str:
    """Source [k][rows]: `void(ptr src, i64 ld, ptr dst, i64 dst_row, i64 rows, i64 kc)`, A, one element at a time.

    For the thin side of a product (a few rows) only: each source row gives a few elements.
    """
    block = mode.lanes * mode.group
    tail = k_tail % block
    name = f"gather_rows_{mode.tag}_{dtype}_{tail}"
    if name in module.functions:
        return name
    src, ld, dst, dst_row, rows, kc = params = [
        Val("ptr", "%src"), Val(_I64, "%ld"), Val("ptr", "%dst"), Val(_I64, "%dst_row"), Val(_I64, "%rows"),
        Val(_I64, "%kc"),
    ]  # fmt: skip
    c = Code(module, name, params, attributes=ATTRIBUTES)
    elem = STORAGE[dtype]
    with c.loop(0, rows) as row:
        out = c.gep("i8", dst, c.mul(row, dst_row))
        whole, has_tail = split_k(c, kc, block, tail)
        if has_tail:
            with c.when(has_tail):
                c.store(
                    zeros(vec(mode.lanes, mode.unit)),
                    offset(c, out, whole, BYTES[mode.packed]),
                    align=mode.lanes * mode.unit_bytes,
                )
        column = offset(c, src, row, BYTES[elem])
        with c.loop(0, kc) as k:
            x = mode.widen(c, c.load(elem, c.gep("i8", column, c.mul(k, ld)), align=BYTES[elem]), dtype)
            x = mode.enter_a(c, x)
            c.store(x, offset(c, out, k, BYTES[mode.packed]), align=BYTES[mode.packed])
    c.finish()
    return name


def turned_rows(module: Module, mode: Mode, dtype: str, k_tail: int, rows: int) -> str:
    """Source [k][rows]: `void(ptr src, i64 ld, ptr dst, i64 dst_row, i64 kc)`, A, in squares of `lanes` units."""
    n, size = mode.lanes, BYTES[STORAGE[dtype]]
    tail = k_tail % (n * mode.group)
    name = f"turn_rows_{mode.tag}_{dtype}_{rows}_{tail}"
    if name in module.functions:
        return name
    src, ld, dst, dst_row, kc = params = [
        Val("ptr", "%src"), Val(_I64, "%ld"), Val("ptr", "%dst"), Val(_I64, "%dst_row"), Val(_I64, "%kc"),
    ]  # fmt: skip
    c = Code(module, name, params, attributes=ATTRIBUTES)

    def square(k0: Val, valid: int, row: Val, count: int) -> None:
        steps = []
        for at in range(0, n * mode.group, mode.group):
            ptr = offset(c, c.gep("i8", src, c.mul(c.add(k0, at), ld)), row, size)
            there = min(mode.group, valid - at)
            steps.append(lanes_step(c, mode, dtype, ptr, ld, there, n, count if there > 0 else 0))
        for i, line in enumerate(transpose(c, steps)[:count]):
            to = offset(c, c.gep("i8", dst, c.mul(c.add(row, i), dst_row)), k0, BYTES[mode.packed])
            c.store(line, to, align=n * mode.unit_bytes)

    def band(k0: Val, valid: int) -> None:
        with c.loop(0, rows // n * n, n) as row:
            square(k0, valid, row, n)
        if rest := rows % n:
            square(k0, valid, i64(rows - rest), rest)

    whole, has_tail = split_k(c, kc, n * mode.group, tail)
    with c.loop(0, whole, n * mode.group) as k0:
        band(k0, n * mode.group)
    if has_tail:
        with c.when(has_tail):
            band(whole, tail)
    c.finish()
    return name
