"""Block-scaled products of integers (`gemm_scaled`) of up to 16 rows with panels of B, by bytes on matrix tiles.

A row of A is taken apart into its low and high bytes, and a tile has the rows of A of one of them and one block. Words
of panels of B are a tile as they stand in memory, or, with codes of 4 bits, behind two instructions for each vector:
nothing is brought to a panel that would be read once only. Both tiles of sums go to memory, and are added and scaled
while the tiles of the block behind are multiplied. The sums are integers: rows have the bits that other kernels give
them.
"""

from __future__ import annotations

from . import scaled_columns as columns
from . import tiles
from .gemm_vector import ATTRIBUTES, load_part, offset, store_part, zeros
from .isa import Isa
from .llvm import Code, Module, Val, const, i64, vec
from .scaled_columns import BLOCK, LANES, WORDS, ScaledSpec

_LEAST_OF_CODES, _LEAST_OF_BYTES = 7, 5  # rows: fewer meet vectors sooner
_QUADS = BLOCK // 4  # rows of a tile of B
_FLOATS, _BYTES = vec(LANES, "float"), vec(BLOCK, "i8")
_LOW, _HIGH, _OF_B, _SUMS = 4, 5, 6, (0, 1)  # tiles; the sums are those of the low and of the high bytes


def fits(isa: Isa, spec: ScaledSpec) -> bool:
    """Whether these kernels compute a product."""
    least = _LEAST_OF_CODES if spec.nibbles else _LEAST_OF_BYTES
    return spec.panels and least <= spec.m <= tiles.ROWS and isa.has("amx-tile", "amx-int8")


def sizes(spec: ScaledSpec) -> dict[int, tuple[int, int]]:
    """The sizes of the tiles, as `tiles.resize` takes them."""
    of_a, of_b, sums = (spec.m, BLOCK), (_QUADS, tiles.ROW_BYTES), (spec.m, tiles.ROW_BYTES)
    return {_LOW: of_a, _HIGH: of_a, _OF_B: of_b} | dict.fromkeys(_SUMS, sums)


def splitter(module: Module, spec: ScaledSpec) -> str:
    """`void(ptr a, i64 a_row, ptr digits)`: the bytes of A as tiles [blocks, low and high, m, 32]."""
    name = f"byte_tiles_of_{spec.m}x{spec.k}"
    if name in module.functions:
        return name
    a, a_row, digits = params = [Val("ptr", "%a"), Val("i64", "%a_row"), Val("ptr", "%digits")]
    c = Code(module, name, params, attributes=ATTRIBUTES)
    with c.loop(0, spec.m) as r, c.loop(0, spec.blocks) as block:
        x = c.load(vec(BLOCK, "i16"), offset(c, c.gep("i8", a, c.mul(r, a_row)), c.mul(block, BLOCK), 2), align=2)
        out = offset(c, offset(c, digits, block, 2 * spec.m * BLOCK), r, BLOCK)
        c.store(c.cast("trunc", x, _BYTES), out, align=BLOCK)
        high = c.cast("trunc", c.binary("lshr", x, const(x.ty, "8")), _BYTES)
        c.store(high, c.gep("i8", out, spec.m * BLOCK), align=BLOCK)
    c.finish()
    return name


_PARAMS = [
    Val("ptr", "%digits"), Val("ptr", "%sa"), Val("i64", "%sa_row"), Val("ptr", "%sums"), Val("i64", "%sums_row"),
    Val("ptr", "%b"), Val("ptr", "%scales"), Val("ptr", "%lows"), Val("ptr", "%c"), Val("i64", "%c_row"),
]  # fmt: skip


def kernel(module: Module, isa: Isa, spec: ScaledSpec, width: int) -> str:
    """A function of `_PARAMS` for all rows of A and a panel of B, of which `width` rows are to be stored."""
    name = f"scaled_byte_tiles_{spec.m}x{width}x{spec.blocks}_{spec.kind}"
    if name in module.functions:
        return name
    c = Code(module, name, _PARAMS, attributes=ATTRIBUTES)
    k = _Kernel(c, isa, spec, width)
    k.begin()
    # What vectors store and tiles load, or the other way round, is loaded a block later: loads would wait for it.
    k.unpack(i64(0))
    if spec.blocks > 1:
        k.unpack(i64(1))
        k.multiply(i64(0))
        k.keep(i64(0))
    with c.loop(2, spec.blocks) as block:
        k.unpack(block)
        k.multiply(c.sub(block, 1))
        k.scale(c.sub(block, 2))
        k.keep(c.sub(block, 1))
    last = spec.blocks - 1
    k.multiply(i64(last))
    if last:
        k.scale(i64(last - 1))
    k.keep(i64(last))
    k.scale(i64(last))
    k.end()
    c.finish()
    return name


class _Kernel:
    """One kernel under construction: a float vector of sums in registers for each row of A."""

    def __init__(self, c: Code, isa: Isa, spec: ScaledSpec, width: int):
        self.c, self.isa, self.spec, self.width = c, isa, spec, width
        (self.digits, self.sa, self.sa_row, self.sums, self.sums_row, self.b, self.scales, self.lows, self.out,
         self.out_row) = _PARAMS  # fmt: skip
        self.size = spec.m * tiles.ROW_BYTES  # of a tile of sums
        self.kept = c.var("i8", count=2 * len(_SUMS) * self.size, align=tiles.ROW_BYTES)  # those of two blocks
        self.codes = c.var("i8", count=2 * _QUADS * tiles.ROW_BYTES, align=tiles.ROW_BYTES)  # of two blocks, too
        self.totals = [c.var(_FLOATS, zeros(_FLOATS)) for _ in range(spec.m)]

    def begin(self) -> None:
        """Load what is added to, and add the lows."""
        c, spec = self.c, self.spec
        if spec.accumulate:
            for r, total in enumerate(self.totals):
                c.store(load_part(c, self.isa, "float", self._line(r), LANES, self.width), total)
        if spec.low is not None:
            with c.loop(0, spec.groups) as group:
                low = self._of_panel(self.lows, group)
                for r, total in enumerate(self.totals):
                    self._add(total, self._in_all_lanes(self.sums, self.sums_row, r, group), low)

    def end(self) -> None:
        for r, total in enumerate(self.totals):
            store_part(self.c, self.isa, self.c.load(_FLOATS, total), self._line(r), self.width)

    def multiply(self, block: Val) -> None:
        """The sums of a block, in tiles."""
        c, spec = self.c, self.spec
        a = offset(c, self.digits, block, 2 * spec.m * BLOCK)
        tiles.load(c, _OF_B, self._codes(block))
        signed = "s" if spec.b == "int8" and not spec.nibbles else "u"
        for n, (sums, of_a, kind) in enumerate(zip(_SUMS, (_LOW, _HIGH), "us", strict=True)):
            tiles.load(c, of_a, c.gep("i8", a, n * spec.m * BLOCK), BLOCK)
            tiles.clear(c, sums)
            tiles.multiply(c, f"tdpb{kind}{signed}d", sums, of_a, _OF_B)

    def unpack(self, block: Val) -> None:
        """Codes of 4 bits as bytes."""
        c, spec = self.c, self.spec
        quads = columns.quads(c, spec, self.b, i64(0), block, self.width)  # asks for blocks to come
        if spec.nibbles:
            for n, quad in enumerate(quads):
                c.store(quad, c.gep("i8", self._codes(block), n * tiles.ROW_BYTES), align=tiles.ROW_BYTES)

    def _codes(self, block: Val) -> Val:
        """Where a block of B stands as a tile."""
        if not self.spec.nibbles:
            return offset(self.c, self.b, self.c.mul(block, BLOCK), LANES)
        return offset(self.c, self.codes, self.c.binary("and", block, i64(1)), _QUADS * tiles.ROW_BYTES)

    def keep(self, block: Val) -> None:
        """The sums of a block go to memory, since there is no other way from tiles to vectors."""
        for n, tile in enumerate(_SUMS):
            tiles.store(self.c, tile, self.c.gep("i8", self._kept(block), n * self.size))

    def scale(self, block: Val) -> None:
        """total += sums of a block * (scale of A * scale of B), for each row."""
        c, spec = self.c, self.spec
        scale = self._of_panel(self.scales, c.binary("udiv", block, i64(spec.shared)) if spec.shared > 1 else block)
        at = self._kept(block)
        for r, total in enumerate(self.totals):
            low, high = (
                c.load(WORDS, c.gep("i8", at, n * self.size + r * tiles.ROW_BYTES), align=tiles.ROW_BYTES)
                for n in range(len(_SUMS))
            )
            x = c.cast("sitofp", c.binary("add", c.binary("shl", high, const(WORDS, "8")), low), _FLOATS)
            self._add(total, x, c.binary("fmul", self._in_all_lanes(self.sa, self.sa_row, r, block), scale))

    def _kept(self, block: Val) -> Val:
        return offset(self.c, self.kept, self.c.binary("and", block, i64(1)), len(_SUMS) * self.size)

    def _add(self, total: Val, x: Val, y: Val) -> None:
        self.c.store(self.c.intrinsic("fma", _FLOATS, x, y, self.c.load(_FLOATS, total)), total)

    def _of_panel(self, panel: Val, group: Val) -> Val:
        return self.c.load(_FLOATS, offset(self.c, panel, self.c.mul(group, LANES), 4), align=64)

    def _in_all_lanes(self, ptr: Val, distance: Val, r: int, at: Val) -> Val:
        row = self.c.gep("i8", ptr, self.c.mul(distance, r))
        return self.c.splat(self.c.load("float", offset(self.c, row, at, 4), align=4), LANES)

    def _line(self, r: int) -> Val:
        return self.c.gep("i8", self.out, self.c.mul(self.out_row, r))
