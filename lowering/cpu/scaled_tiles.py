"""Block-scaled products of integers (`gemm_scaled`) on matrix tiles.

A number of A is h + l, the multiples of 256 and the rest: both are bfloat16 numbers without error, as bytes are. With
codes of 4 bits no sum of a block is 2**24 or more, so that a float32 tile has it without rounding, in whatever order.
With bytes this holds for the sums of each digit, and a tile has one of them: both are added when they are scaled. So
results have the bits of the kernels without tiles.

A tile holds 16 rows of A, or 16 columns of B, of one block of 32. The sums of a block go to memory, since there is no
other way from tiles to vectors. They are scaled while the tiles of the block behind are multiplied.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence

from . import scaled_columns as columns
from . import tiles
from .gemm_vector import ATTRIBUTES, load_part, offset, store_part, zeros
from .isa import Isa
from .llvm import Code, Module, Val, const, i64, shuffle, vec
from .scaled_columns import BLOCK, LANES, ScaledSpec, scale_bytes

ROWS = tiles.ROWS
VECTORS = 2  # of 16 columns each, that meet a tile of A when it is loaded
_DIGITS = 2
_A_BLOCK = _DIGITS * tiles.TILE_BYTES
_FLOATS, _SHORTS, _BFLOATS = vec(LANES, "float"), vec(BLOCK, "i16"), vec(BLOCK, "bfloat")
# Where the codes of words of four bytes stand, shifted by 0, 4, 8 and 12 bits: in each half of a lane one, at 0 and 2.
_ORDER = [16 * (t & 1) + 4 * s + (t >> 1) + 2 * half for s in range(4) for t in range(4) for half in range(2)]
_CODES = [struct.unpack("<I", struct.pack("<f", code))[0] >> 16 for code in range(16)] * 2  # as bits of bfloat16


def fits(isa: Isa) -> bool:
    """Whether these kernels compute products of many rows."""
    return isa.has("amx-tile", "amx-bf16", "avx512bf16")


def row_bytes(spec: ScaledSpec) -> int:
    """Bytes of the digits of A."""
    return -(-spec.m // ROWS) * panel_bytes(spec)


def panel_bytes(spec: ScaledSpec) -> int:
    """Bytes of the digits of 16 rows of A."""
    return spec.blocks * _A_BLOCK


def splitter(module: Module, spec: ScaledSpec) -> str:
    """`void(ptr a, i64 a_row, ptr digits)`: rows of A as tiles [row panels, blocks, digits, 16, 32]. Rows of the last
    panel that do not exist stay as they are."""
    name = f"tiles_of_{spec.m}x{spec.k}{'_turned' * spec.nibbles}"
    if name in module.functions:
        return name
    a, a_row, digits = params = [Val("ptr", "%a"), Val("i64", "%a_row"), Val("ptr", "%digits")]
    c = Code(module, name, params, attributes=ATTRIBUTES)
    for start, count, rows in panels(spec.m):
        with c.loop(0, count) as p, c.loop(0, rows) as r, c.loop(0, spec.blocks) as block:
            row = c.add(c.mul(c.add(start, p), ROWS), r)
            x = c.load(_SHORTS, offset(c, c.gep("i8", a, c.mul(row, a_row)), c.mul(block, BLOCK), 2), align=2)
            x = shuffle(c, x, x, _ORDER) if spec.nibbles else x
            at = offset(c, digits, c.add(c.mul(c.add(start, p), spec.blocks), block), _A_BLOCK)
            at = offset(c, at, r, tiles.ROW_BYTES)
            for digit, mask in enumerate((-256, 255)):
                number = _as_bfloat(c, c.binary("and", x, const(_SHORTS, str(mask))))
                c.store(number, c.gep("i8", at, digit * tiles.TILE_BYTES), align=tiles.ROW_BYTES)
    c.finish()
    return name


def panels(m: int) -> list[tuple[int, int, int]]:
    """(the first panel, how many of them, their rows): panels of 16 rows, and one of the rest."""
    whole, rest = divmod(m, ROWS)
    return [part for part in ((0, whole, ROWS), (whole, int(rest > 0), rest)) if part[1]]


def _as_bfloat(c: Code, x: Val) -> Val:
    """Integers of 16 bits as bfloat16, without rounding if they have at most 8 bits between the first and the last."""
    return c.cast("fptrunc", c.cast("sitofp", x, vec(BLOCK, "float")), _BFLOATS)


def packer(module: Module, spec: ScaledSpec, width: int) -> str:
    """`void(ptr b, i64 b_row, ptr panel)`: the columns of all blocks as tiles [blocks, 16, 16 pairs], for `width` rows
    of B."""
    name = f"tiles_of_{spec.stored}_{width}x{spec.blocks}"
    if name in module.functions:
        return name
    b, b_row, panel = params = [Val("ptr", "%b"), Val("i64", "%b_row"), Val("ptr", "%panel")]
    c = Code(module, name, params, attributes=ATTRIBUTES)
    with c.loop(0, spec.blocks) as block:
        at = offset(c, panel, block, tiles.TILE_BYTES)
        for p, pairs in enumerate(_pairs(c, spec, b, b_row, block, width)):
            c.store(pairs, offset(c, at, p, tiles.ROW_BYTES), align=tiles.ROW_BYTES)
    c.finish()
    return name


def _pairs(c: Code, spec: ScaledSpec, b: Val, b_row: Val, block: Val, width: int) -> Iterator[Val]:
    """The 32 columns of a block of B as pairs of bfloat16, codes of 4 bits in the order of `_ORDER`."""
    if not spec.nibbles:
        for pair in columns.pairs(c, spec, b, b_row, block, width):
            yield _as_bfloat(c, c.cast("bitcast", pair, _SHORTS))
        return
    table = Val(_SHORTS, f"<{', '.join(f'i16 {bits}' for bits in _CODES)}>")
    for word in columns.codes_in_words(c, spec, b, b_row, block, width):
        word = c.cast("bitcast", word, _SHORTS)
        for t in range(4):
            shifted = c.binary("lshr", word, const(_SHORTS, str(4 * t))) if t else word
            yield c.intrinsic("x86.avx512.permvar.hi", _SHORTS, table, shifted, suffix="512")


_PARAMS = [
    Val("ptr", "%digits"), Val("ptr", "%sa"), Val("i64", "%sa_row"), Val("ptr", "%sums"), Val("i64", "%sums_row"),
    Val("ptr", "%b"), Val("ptr", "%scales"), Val("ptr", "%lows"), Val("ptr", "%c"), Val("i64", "%c_row"),
]  # fmt: skip


def kernel(module: Module, isa: Isa, spec: ScaledSpec, rows: int, widths: Sequence[int]) -> str:
    """A function of `_PARAMS` for `rows` rows of A, at most 16, and `widths` rows of B, at most 16 of a panel. Panels
    of B, of scales and of lows lie one behind the other."""
    name = f"scaled_tiles_{rows}x{'_'.join(map(str, widths))}x{spec.blocks}_{spec.kind}"
    if name in module.functions:
        return name
    c = Code(module, name, _PARAMS, attributes=ATTRIBUTES)
    k = _Kernel(c, isa, spec, rows, widths)
    k.begin()
    k.multiply(i64(0), i64(0), None)
    with c.loop(1, spec.blocks) as block:
        last = c.sub(block, 1)
        k.multiply(block, c.binary("and", block, i64(1)), last)
    k.scale(i64(spec.blocks - 1), range(rows))
    k.end()
    c.finish()
    return name


class _Kernel:
    """One kernel under construction: float sums of `rows` times `widths` in registers."""

    def __init__(self, c: Code, isa: Isa, spec: ScaledSpec, rows: int, widths: Sequence[int]):
        self.c, self.isa, self.spec, self.rows, self.widths = c, isa, spec, rows, widths
        (self.digits, self.sa, self.sa_row, self.sums, self.sums_row, self.b, self.scales, self.lows, self.out,
         self.out_row) = _PARAMS  # fmt: skip
        self.sums_of = [[v] if spec.nibbles else [v, v + VECTORS] for v in range(len(widths))]  # tiles of a vector
        self.size = sum(map(len, self.sums_of)) * tiles.TILE_BYTES
        self.scratch = c.var("i8", count=2 * self.size, align=tiles.ROW_BYTES)  # the sums of two blocks
        self.totals = [[c.var(_FLOATS, zeros(_FLOATS)) for _ in widths] for _ in range(rows)]

    def begin(self) -> None:
        """Load what is added to, and add the lows."""
        if self.spec.accumulate:
            self._each_part(
                lambda total, at, width: self.c.store(load_part(self.c, self.isa, "float", at, LANES, width), total)
            )
        if self.spec.low is not None:
            with self.c.loop(0, self.spec.groups) as group:
                lows = self._of_panels(self.lows, group)
                for r, totals in enumerate(self.totals):
                    of_row = self._in_all_lanes(self.sums, self.sums_row, r, group)
                    for total, low in zip(totals, lows, strict=True):
                        self._add(total, of_row, low)

    def end(self) -> None:
        self._each_part(lambda total, at, width: store_part(self.c, self.isa, self.c.load(_FLOATS, total), at, width))

    def multiply(self, block: Val, half: Val, before: Val | None) -> None:
        """The sums of a block go to one half of the scratch; meanwhile those of the block before are scaled."""
        c, count = self.c, len(self.widths)
        a = offset(c, self.digits, block, _A_BLOCK)
        at = offset(c, self.scratch, half, self.size)
        b = [offset(c, self.b, c.add(block, v * self.spec.blocks), tiles.TILE_BYTES) for v in range(count)]
        high, low, of_b = 4, 5, (6, 7)
        parts = iter(_shares(self.rows, 2 * count + 1))
        meanwhile = lambda: self.scale(before, next(parts)) if before is not None else None
        tiles.load(c, high, a)
        for v, sums in enumerate(self.sums_of):
            tiles.load(c, of_b[v], b[v])
            for tile in sums:
                tiles.clear(c, tile)
            tiles.multiply(c, "tdpbf16ps", sums[0], high, of_b[v])
            meanwhile()
        tiles.load(c, low, c.gep("i8", a, tiles.TILE_BYTES))
        for v, sums in enumerate(self.sums_of):
            tiles.multiply(c, "tdpbf16ps", sums[-1], low, of_b[v])
            meanwhile()
        for n, tile in enumerate(tile for sums in self.sums_of for tile in sums):
            tiles.store(c, tile, c.gep("i8", at, n * tiles.TILE_BYTES))
            if n == 0:
                meanwhile()

    def scale(self, block: Val, rows: range) -> None:
        """total += sums of a block * (scale of A * scale of B), for some rows."""
        c = self.c
        at = offset(c, self.scratch, c.binary("and", block, i64(1)), self.size)
        shared = self.spec.shared
        scales = self._of_panels(self.scales, c.binary("udiv", block, i64(shared)) if shared > 1 else block)
        for r in rows:
            of_row = self._in_all_lanes(self.sa, self.sa_row, r, block)
            for v, (total, scale) in enumerate(zip(self.totals[r], scales, strict=True)):
                self._add(total, self._sum(at, v, r), c.binary("fmul", of_row, scale))

    def _sum(self, at: Val, v: int, r: int) -> Val:
        """Row r of the sums of a vector of columns."""
        each = len(self.sums_of[v])
        places = [
            self.c.gep("i8", at, n * tiles.TILE_BYTES + r * tiles.ROW_BYTES) for n in range(v * each, (v + 1) * each)
        ]
        parts = [self.c.load(_FLOATS, place, align=tiles.ROW_BYTES) for place in places]
        return parts[0] if each == 1 else self.c.binary("fadd", *parts)

    def _add(self, total: Val, x: Val, y: Val) -> None:
        self.c.store(self.c.intrinsic("fma", _FLOATS, x, y, self.c.load(_FLOATS, total)), total)

    def _of_panels(self, panels: Val, group: Val) -> list[Val]:
        """The scales or lows of a group, for each vector of columns."""
        at = offset(self.c, panels, self.c.mul(group, LANES), 4)
        size = scale_bytes(self.spec)
        return [self.c.load(_FLOATS, self.c.gep("i8", at, v * size), align=64) for v in range(len(self.widths))]

    def _in_all_lanes(self, ptr: Val, distance: Val, r: int, at: Val) -> Val:
        row = self.c.gep("i8", ptr, self.c.mul(distance, r))
        return self.c.splat(self.c.load("float", offset(self.c, row, at, 4), align=4), LANES)

    def _each_part(self, action) -> None:
        for r, totals in enumerate(self.totals):
            line = self.c.gep("i8", self.out, self.c.mul(self.out_row, r))
            for v, total in enumerate(totals):
                action(total, self.c.gep("i8", line, v * LANES * 4), self.widths[v])


def _shares(rows: int, parts: int) -> list[range]:
    """The rows in so many nearly equal parts."""
    ends = [rows * i // parts for i in range(parts + 1)]
    return [range(*pair) for pair in itertools.pairwise(ends)]
