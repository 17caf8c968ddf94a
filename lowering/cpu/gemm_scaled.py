"""Block-scaled products of integers: C = sum over blocks of (the sum of a b in a block, an integer) times both scales.

A holds int16 rows, B rows of bytes, or of 4-bit codes as GGUF packs them: byte j of a block of 32 has the codes j and
j + 16. Sixteen rows of B are the lanes of a vector. Few rows of A meet B as it comes from memory (`scaled_columns`);
for more rows B is first brought to a panel, which stays in a cache. Machines with matrix tiles multiply
by them then (`scaled_tiles`).

The sum of a block is exact, and the sum over blocks has one order, so that a row of C has the same bits in any company.
Scales are multiplied with each other first: sums of large rows times their scales alone can be too large for float32.
"""

from __future__ import annotations

from typing import NamedTuple

from . import scaled_columns as columns
from . import scaled_digits, scaled_tiles, tiles
from .gemm_plan import split_rows
from .gemm_vector import ATTRIBUTES, call, load_part, offset, store_part, zeros
from .isa import Isa
from .llvm import Code, Module, Val, i64, vec
from .scaled_columns import BLOCK, FEW, LANES, PAIRS, WORDS, ScaledSpec

_MOST_ROWS = 12  # rows of a kernel, whose sums are in registers, as integers and as floats
_FLOATS = vec(LANES, "float")


def fits(isa: Isa) -> bool:
    """Whether this instruction set has the vectors that the kernels here are made of."""
    return isa.arch == "x86_64" and isa.vector_bits == 512 and isa.has("avx512bw")


class _Operands(NamedTuple):
    """Pointers to A, its scales and sums, B, its scales and lows, and C, and the distances of their rows in bytes."""

    a: Val
    a_row: Val
    sa: Val
    sa_row: Val
    sums: Val
    sums_row: Val
    b: Val
    b_row: Val
    sb: Val
    sb_row: Val
    low: Val
    low_row: Val
    c: Val
    c_row: Val

    @classmethod
    def params(cls) -> _Operands:
        return cls(*(Val("i64" if name.endswith("_row") else "ptr", f"%{name}") for name in cls._fields))


_WORK = Val("ptr", "%work")


def emit_scaled(module: Module, isa: Isa, spec: ScaledSpec) -> tuple[str, int]:
    """Add `void @name(operands of _Operands, ptr work)` to the module.

    Returns:
      Its name, and the bytes of 64-byte aligned scratch that it wants.
    """
    by_bytes = scaled_digits.fits(isa, spec)
    by_tiles = spec.m > FEW and scaled_tiles.fits(isa) and not by_bytes
    vectors = scaled_tiles.VECTORS if by_tiles else 1
    sizes = [0 if spec.m <= FEW or by_bytes else spec.k // 2 * LANES * 4 * vectors, _digit_bytes(isa, spec, by_tiles)]
    sizes += [columns.scale_bytes(spec) * vectors] * (1 + spec.packs_lows)
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    if spec.name not in module.functions:
        (_emit_by_tiles if by_tiles else _emit_by_bytes if by_bytes else _emit)(module, isa, spec, starts)
    return spec.name, starts[-1]


def _digit_bytes(isa: Isa, spec: ScaledSpec, by_tiles: bool) -> int:
    """Bytes of both digits of A, for products that take them apart."""
    if by_tiles:
        return scaled_tiles.row_bytes(spec)
    return 2 * spec.m * spec.k if columns.by_digits(isa, spec) or scaled_digits.fits(isa, spec) else 0


def _emit(module: Module, isa: Isa, spec: ScaledSpec, starts: list[int]) -> None:
    x = _Operands.params()
    c = Code(module, spec.name, [*x, _WORK], attributes=ATTRIBUTES)
    panel, digits, scales, *lows = (offset(c, _WORK, start, 1) for start in starts[:-1])
    whole, rest = divmod(spec.n, LANES)
    if columns.by_digits(isa, spec):
        call(c, columns.splitter(module, spec), x.a, x.a_row, digits)
    for start, count, width in ((0, whole, LANES), (whole * LANES, int(rest > 0), rest)):
        if not count:
            continue
        with c.loop(0, count) as p:
            first = c.add(start, c.mul(p, LANES))
            b, sb = (c.gep("i8", ptr, c.mul(first, row)) for ptr, row in ((x.b, x.b_row), (x.sb, x.sb_row)))
            if spec.m > FEW:
                call(c, columns.packer(module, spec, width), b, x.b_row, panel)
            of_b = x._replace(b=b if spec.m <= FEW else panel)
            if spec.reads_scales:
                of_b = _with_scales(c, spec, of_b, sb, first)
            else:
                of_b = of_b._replace(sb=scales, low=lows[0] if lows else scales)
                _pack_scales(c, isa, spec, x, of_b, first, 0, width)
            if columns.by_digits(isa, spec):
                of_b = of_b._replace(a=digits, a_row=i64(spec.k))
            _rows(c, isa, spec, of_b, first, width)
    c.finish()


def _with_scales(c: Code, spec: ScaledSpec, x: _Operands, sb: Val, first: Val) -> _Operands:
    """The operands with the scales `sb` and lows of a panel as they are stored; those of panels to come are asked
    for."""
    columns.ask_for_scales(c, spec, sb, spec.scale)
    if not spec.packs_lows:
        return x._replace(sb=sb, low=sb)
    low = c.gep("i8", x.low, c.mul(first, x.low_row))
    columns.ask_for_scales(c, spec, low, spec.low)
    return x._replace(sb=sb, low=low)


def _emit_by_bytes(module: Module, isa: Isa, spec: ScaledSpec, starts: list[int]) -> None:
    x = _Operands.params()
    c = Code(module, spec.name, [*x, _WORK], attributes=ATTRIBUTES)
    _, digits, scales, *lows = (offset(c, _WORK, start, 1) for start in starts[:-1])
    whole, rest = divmod(spec.n, LANES)
    call(c, scaled_digits.splitter(module, spec), x.a, x.a_row, digits)
    with tiles.kept(c):
        tiles.resize(c, scaled_digits.sizes(spec))
        for start, count, width in ((0, whole, LANES), (whole * LANES, int(rest > 0), rest)):
            if not count:
                continue
            with c.loop(0, count) as p:
                first = c.add(start, c.mul(p, LANES))
                panels = x._replace(sb=scales, low=lows[0] if lows else scales)
                _pack_scales(c, isa, spec, x, panels, first, 0, width)
                name = scaled_digits.kernel(module, isa, spec, width)
                call(c, name, digits, x.sa, x.sa_row, x.sums, x.sums_row, c.gep("i8", x.b, c.mul(first, x.b_row)),
                     panels.sb, panels.low, offset(c, x.c, first, 4), x.c_row)  # fmt: skip
    c.finish()


def _emit_by_tiles(module: Module, isa: Isa, spec: ScaledSpec, starts: list[int]) -> None:
    x = _Operands.params()
    c = Code(module, spec.name, [*x, _WORK], attributes=ATTRIBUTES)
    panels, digits, scales, *lows = (offset(c, _WORK, start, 1) for start in starts[:-1])
    size = LANES * scaled_tiles.VECTORS
    whole, rest = divmod(spec.n, size)
    widths = lambda count: [min(LANES, count - at) for at in range(0, count, LANES)]
    call(c, scaled_tiles.splitter(module, spec), x.a, x.a_row, digits)
    with tiles.kept(c):
        tiles.resize(c, tiles.WHOLE)
        for start, count, each in ((0, whole, size), (whole * size, int(rest > 0), rest)):
            if not count:
                continue
            with c.loop(0, count) as p:
                first = c.add(start, c.mul(p, size))
                of_b = x._replace(a=digits, b=panels, sb=scales, low=lows[0] if lows else scales)
                for v, width in enumerate(widths(each)):
                    _pack_columns(c, isa, spec, x, of_b, c.add(first, v * LANES), v, width)
                _rows_by_tiles(c, isa, spec, of_b, first, widths(each))
    c.finish()


def _pack_columns(
    c: Code, isa: Isa, spec: ScaledSpec, x: _Operands, panels: _Operands, first: Val, v: int, width: int
) -> None:
    """Bring `width` rows of B from `first` on, their scales and lows, to vector v of the panels."""
    _pack_scales(c, isa, spec, x, panels, first, v, width)
    panel = c.gep("i8", panels.b, v * spec.blocks * tiles.TILE_BYTES)
    b = c.gep("i8", x.b, c.mul(first, x.b_row))
    call(c, scaled_tiles.packer(c.module, spec, width), b, x.b_row, panel)


def _pack_scales(
    c: Code, isa: Isa, spec: ScaledSpec, x: _Operands, panels: _Operands, first: Val, v: int, width: int
) -> None:
    """Bring the scales and lows of `width` rows of B to vector v of the panels."""
    at = lambda ptr, row: c.gep("i8", ptr, c.mul(first, row))
    of = lambda panel: c.gep("i8", panel, v * columns.scale_bytes(spec))
    name = columns.scale_packer(c.module, isa, spec, spec.scale, width)
    call(c, name, at(x.sb, x.sb_row), x.sb_row, of(panels.sb))
    if spec.packs_lows:
        name = columns.scale_packer(c.module, isa, spec, spec.low, width)
        call(c, name, at(x.low, x.low_row), x.low_row, of(panels.low))


def _rows_by_tiles(c: Code, isa: Isa, spec: ScaledSpec, x: _Operands, first: Val, widths: list[int]) -> None:
    """Calls of the kernel for all rows of A and the rows of B that the panels hold."""
    for start, count, rows in scaled_tiles.panels(spec.m):
        name = scaled_tiles.kernel(c.module, isa, spec, rows, widths)
        with c.loop(0, count) as i:
            panel = c.add(start, i)
            row = c.mul(panel, scaled_tiles.ROWS)
            at = lambda ptr, distance, row=row: c.gep("i8", ptr, c.mul(row, distance))
            a = offset(c, x.a, panel, scaled_tiles.panel_bytes(spec))
            call(c, name, a, at(x.sa, x.sa_row), x.sa_row, at(x.sums, x.sums_row), x.sums_row, x.b, x.sb, x.low,
                 offset(c, at(x.c, x.c_row), first, 4), x.c_row)  # fmt: skip


def _rows(c: Code, isa: Isa, spec: ScaledSpec, x: _Operands, first: Val, width: int) -> None:
    """Calls of the kernel for all rows of A and the `width` rows of B from `first` on."""
    few = spec.m <= FEW
    for part in split_rows(spec.m, min(spec.m, FEW), FEW if few else _MOST_ROWS):
        name = _kernel(c.module, isa, spec, part.rows, width)
        with c.loop(0, part.count) as i:
            row = c.add(part.start, c.mul(i, part.rows))
            at = lambda ptr, distance, row=row: c.gep("i8", ptr, c.mul(row, distance))
            out = offset(c, at(x.c, x.c_row), first, 4)
            of_rows = dict(a=at(x.a, x.a_row), sa=at(x.sa, x.sa_row), sums=at(x.sums, x.sums_row), c=out)
            call(c, name, *x._replace(**of_rows))


def _kernel(module: Module, isa: Isa, spec: ScaledSpec, rows: int, width: int) -> str:
    """A function of `_Operands` for `rows` rows of A and `width` rows of B, whose scales and lows stand in panels."""
    digits = columns.by_digits(isa, spec)
    source = "digits" if digits else "direct" if spec.m <= FEW else "panel"
    name = f"scaled_{source}_{rows}x{width}x{spec.blocks}_{spec.kind}"
    if name in module.functions:
        return name
    x = _Operands.params()
    c = Code(module, name, list(x), attributes=ATTRIBUTES)
    totals = [c.var(_FLOATS, zeros(_FLOATS)) for _ in range(rows)]
    lines = [c.gep("i8", x.c, c.mul(x.c_row, r)) for r in range(rows)]
    if spec.accumulate:
        for line, total in zip(lines, totals, strict=True):
            c.store(load_part(c, isa, "float", line, LANES, width), total)
    if spec.low is not None:
        with c.loop(0, spec.groups) as group:
            low = columns.scales_of(c, spec, x.low, group, spec.low if spec.packs_lows else spec.scale)
            for r, total in enumerate(totals):
                _add(c, total, _in_all_lanes(c, x.sums, x.sums_row, r, group), low)
    with c.loop(0, spec.blocks) as block:
        if digits:
            sums = columns.sums_by_digits(c, spec, x.a, x.b, x.b_row, block, rows, width)
        else:
            right = columns.pairs(c, spec, x.b, x.b_row, block, width) if spec.m <= FEW else _of_panel(c, x.b, block)
            sums = _sums_of_pairs(c, isa, x, block, right, rows)
        group = c.binary("udiv", block, i64(spec.shared)) if spec.shared > 1 else block
        scale = columns.scales_of(c, spec, x.sb, group, spec.scale)
        for r, total in enumerate(totals):
            of_a = _in_all_lanes(c, x.sa, x.sa_row, r, block)
            _add(c, total, c.cast("sitofp", sums[r], _FLOATS), c.binary("fmul", of_a, scale))
    for line, total in zip(lines, totals, strict=True):
        store_part(c, isa, c.load(_FLOATS, total), line, width)
    c.finish()
    return name


def _add(c: Code, total: Val, x: Val, y: Val) -> None:
    c.store(c.intrinsic("fma", _FLOATS, x, y, c.load(_FLOATS, total)), total)


def _in_all_lanes(c: Code, ptr: Val, distance: Val, r: int, at: Val) -> Val:
    """The float numbered `at` of row r."""
    return c.splat(c.load("float", offset(c, c.gep("i8", ptr, c.mul(distance, r)), at, 4), align=4), LANES)


def _of_panel(c: Code, panel: Val, block: Val) -> list[Val]:
    at = offset(c, panel, c.mul(block, PAIRS), LANES * 4)
    return [c.load(WORDS, offset(c, at, s, LANES * 4), align=64) for s in range(PAIRS)]


def _sums_of_pairs(c: Code, isa: Isa, x: _Operands, block: Val, right: list[Val], rows: int) -> list[Val]:
    """The sums of a block for each row of A; `right` are the pairs of int16 of the columns."""
    left = offset(c, x.a, c.mul(block, BLOCK), 2)
    banks = 4 if rows == 1 else 2 if rows <= 3 else 1  # sums that do not wait for each other
    sums = [[zeros(WORDS)] * banks for _ in range(rows)]
    for s, y in enumerate(right):
        for r in range(rows):
            pair = c.load("i32", c.gep("i8", c.gep("i8", left, c.mul(x.a_row, r)), 4 * s), align=2)
            sums[r][s % banks] = _multiplied(c, isa, sums[r][s % banks], c.splat(pair, LANES), y)
    for of_row in sums:
        while len(of_row) > 1:
            of_row[:] = [c.binary("add", *of_row[i : i + 2]) for i in range(0, len(of_row), 2)]
    return [of_row[0] for of_row in sums]


def _multiplied(c: Code, isa: Isa, total: Val, x: Val, y: Val) -> Val:
    """total + x . y for pairs of int16 in each lane."""
    pair = vec(2 * LANES, "i16")
    x, y = c.cast("bitcast", x, pair), c.cast("bitcast", y, pair)
    if isa.has("avx512vnni"):
        return c.intrinsic("x86.avx512.vpdpwssd", WORDS, total, x, y, suffix="512")
    return c.binary("add", total, c.intrinsic("x86.avx512.pmaddw.d.512", WORDS, x, y, suffix=""))
