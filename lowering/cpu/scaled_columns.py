"""The columns of a block-scaled product of integers (`gemm_scaled`): 16 rows of B as the lanes of vectors, and what the
rows of A are to meet them.

A block of 32 columns becomes 8 vectors of four neighbouring bytes a lane. Two instructions multiply such with the low
and the high bytes of a row of A (*digits*). For more than a few rows it is better to widen the vectors to 16 of two
int16 a lane (*pairs*), which one instruction multiplies.
"""

from __future__ import annotations

import dataclasses

from . import gemm_pack
from .gemm_modes import Mode
from .gemm_vector import ATTRIBUTES, offset, prefetch, zeros
from .isa import Isa
from .llvm import Code, Module, Val, const, i64, shuffle, vec

SCALES = "scales"
BLOCK = 32  # elements along k with one scale of A
LANES = 16
PAIRS = BLOCK // 2
FEW = 8  # up to so many rows, B is read as it is: a panel of it would not be read again
WORDS = vec(LANES, "i32")
_BYTES, _HALVES, _FLOATS = vec(4 * LANES, "i8"), vec(2 * LANES, "i16"), vec(LANES, "float")
_FEW_DIGITS = 8  # rows for which two instructions of four products are better than widening B
_BOTH_DIGITS = 6  # rows whose digits are summed at a time
_FOUR_CHAINS = 2  # rows of whose digits both halves of a block are summed at a time
# Bytes of panels that the second-level cache is asked for before they are read. It has several times as many lines on
# their way as the first one: a core got 18 GB/s of weights so, 15 through the first level, and 9 without asking.
_AHEAD = 8192
_SCALES_AHEAD = 1024


@dataclasses.dataclass(frozen=True)
class ScaledSpec:
    """C[m, n] (+)= A[m, k] . B[n, k]ᵀ with scales of A for blocks of 32, float32 [m, k / 32], and of B for groups of
    32 * `shared`, [n, k / 32 / shared]. With lows [n, groups], sums float32 [m, groups] . lowsᵀ is added.

    Attributes:
      b: "int8" or "uint8"; nibbles: B is [n, k / 2], two codes a byte.
      panels: the words of four bytes of 16 rows of B stand as [words of a row, 16].
      panels_of_scales: the scales and lows of 16 rows of B stand as [groups, 16].
      scale, low: the dtypes of B's scales, and of lows; None: there are none, or `SCALES`: they are the scales.
      accumulate: add to C instead of overwriting it.
    """

    m: int
    n: int
    k: int
    b: str
    nibbles: bool
    scale: str
    low: str | None
    shared: int
    accumulate: bool
    panels: bool = False
    panels_of_scales: bool = False

    @property
    def stored(self) -> str:
        """How B is stored."""
        return f"{'panels_' * self.panels}{'nibbles' if self.nibbles else self.b}"

    @property
    def kind(self) -> str:
        low = "" if self.low is None else f"_{self.low}"
        scales = f"{'panels_' * self.panels_of_scales}{self.scale}{low}"
        return f"{self.stored}_{scales}_{self.shared}{'_add' * self.accumulate}"

    @property
    def name(self) -> str:
        return f"gemm_scaled_{self.m}x{self.n}x{self.k}_{self.kind}"

    @property
    def blocks(self) -> int:
        return self.k // BLOCK

    @property
    def packs_lows(self) -> bool:
        """Whether lows have a panel of their own."""
        return self.low not in (None, SCALES)

    @property
    def reads_scales(self) -> bool:
        """Whether vectors of scales and lows are read as they are stored: a panel of them would be read once."""
        return self.panels_of_scales and self.m <= FEW

    @property
    def groups(self) -> int:
        """How many scales a row of B has."""
        return self.blocks // self.shared


def by_digits(isa: Isa, spec: ScaledSpec) -> bool:
    """Whether A is taken apart into bytes. One of two bytes that an instruction multiplies is signed."""
    return spec.m <= _FEW_DIGITS and isa.has("avx512vnni") and (spec.nibbles or spec.b == "int8")


def splitter(module: Module, spec: ScaledSpec) -> str:
    """`void(ptr a, i64 a_row, ptr digits)`: of the rows of A first all low bytes [m, k], then all high ones, which
    stand 128 too high where the bytes of B are signed."""
    name = f"digits_{spec.m}x{spec.k}{'' if spec.nibbles else '_raised'}"
    if name in module.functions:
        return name
    a, a_row, digits = params = [Val("ptr", "%a"), Val("i64", "%a_row"), Val("ptr", "%digits")]
    c = Code(module, name, params, attributes=ATTRIBUTES)
    half = vec(BLOCK, "i8")
    with c.loop(0, spec.m) as r, c.loop(0, spec.k, BLOCK) as k:
        x = c.load(vec(BLOCK, "i16"), offset(c, c.gep("i8", a, c.mul(r, a_row)), k, 2), align=2)
        high = c.cast("trunc", c.binary("lshr", x, const(x.ty, "8")), half)
        high = high if spec.nibbles else c.binary("xor", high, const(half, "-128"))
        out = c.gep("i8", digits, c.add(c.mul(r, spec.k), k))
        c.store(c.cast("trunc", x, half), out, align=BLOCK)
        c.store(high, c.gep("i8", out, spec.m * spec.k), align=BLOCK)
    c.finish()
    return name


def sums_by_digits(
    c: Code, spec: ScaledSpec, digits: Val, b: Val, b_row: Val, block: Val, rows: int, width: int
) -> list[Val]:
    """The sums of a block for each row of A, whose digits `splitter` has made. Of a few rows both digits are summed at
    a time, so that fewer instructions wait for each other; of more, one after the other in the same registers."""
    found = [c.cast("bitcast", x, WORDS) for x in quads(c, spec, b, b_row, block, width)]
    zero = zeros(WORDS)

    def summed(sums: list[Val], digit: int, part: slice = slice(None)) -> list[Val]:
        for s, y in list(enumerate(found))[part]:
            at = c.gep("i8", digits, c.add(c.mul(block, BLOCK), 4 * s + digit * spec.m * spec.k))
            x = [c.splat(c.load("i32", c.gep("i8", at, r * spec.k), align=4), LANES) for r in range(rows)]
            pairs = [(y, of_row) if digit and spec.nibbles else (of_row, y) for of_row in x]
            sums = [_multiplied(c, acc, *pair) for acc, pair in zip(sums, pairs, strict=True)]
        return sums

    shifted = lambda sums, bits: [c.binary("shl", x, const(WORDS, str(bits))) for x in sums]
    added = lambda xs, ys: [c.binary("add", x, y) for x, y in zip(xs, ys, strict=True)]
    if rows > _BOTH_DIGITS:
        sums = summed(shifted(summed([zero] * rows, 1), 8), 0)
    elif rows > _FOUR_CHAINS:
        sums = added(shifted(summed([zero] * rows, 1), 8), summed([zero] * rows, 0))
    else:
        halves = slice(None, len(found) // 2), slice(len(found) // 2, None)
        high, low = (added(*(summed([zero] * rows, digit, half) for half in halves)) for digit in (1, 0))
        sums = added(shifted(high, 8), low)
    if spec.nibbles:
        return sums
    total = zero
    for y in found:
        total = _multiplied(c, total, const(WORDS, str(0x01010101)), y)
    (total,) = shifted([total], 15)  # high digits stand 128 too high
    return [c.binary("sub", x, total) for x in sums]


def _multiplied(c: Code, acc: Val, unsigned: Val, signed: Val) -> Val:
    """acc + unsigned . signed for four bytes in each lane."""
    return c.intrinsic("x86.avx512.vpdpbusd", WORDS, acc, unsigned, signed, suffix="512")


def packer(module: Module, spec: ScaledSpec, width: int) -> str:
    """`void(ptr b, i64 b_row, ptr panel)`: the pairs of all blocks, for `width` rows of B."""
    name = f"pack_scaled_{spec.stored}_{width}x{spec.blocks}"
    if name in module.functions:
        return name
    b, b_row, panel = params = [Val("ptr", "%b"), Val("i64", "%b_row"), Val("ptr", "%panel")]
    c = Code(module, name, params, attributes=ATTRIBUTES)
    with c.loop(0, spec.blocks) as block:
        at = offset(c, panel, c.mul(block, PAIRS), LANES * 4)
        for s, x in enumerate(pairs(c, spec, b, b_row, block, width)):
            c.store(x, offset(c, at, s, LANES * 4), align=64)
    c.finish()
    return name


def pairs(c: Code, spec: ScaledSpec, b: Val, b_row: Val, block: Val, width: int) -> list[Val]:
    """The 32 columns of a block of B as pairs of int16; lanes behind `width` repeat the last row."""
    signed = spec.b == "int8" and not spec.nibbles
    return [x for quad in quads(c, spec, b, b_row, block, width) for x in _widened(c, quad, signed)]


def quads(c: Code, spec: ScaledSpec, b: Val, b_row: Val, block: Val, width: int) -> list[Val]:
    """The 32 columns of a block of B as vectors of four neighbouring bytes a lane."""
    found = [c.cast("bitcast", x, _BYTES) for x in codes_in_words(c, spec, b, b_row, block, width)]
    if not spec.nibbles:
        return found
    low = const(_BYTES, "15")
    shifted = [c.binary("lshr", c.cast("bitcast", x, _HALVES), const(_HALVES, "4")) for x in found]
    codes = [*found, *(c.cast("bitcast", x, _BYTES) for x in shifted)]
    return [c.binary("and", x, low) for x in codes]


def codes_in_words(c: Code, spec: ScaledSpec, b: Val, b_row: Val, block: Val, width: int) -> list[Val]:
    """A block of B as it is stored: vectors of four neighbouring bytes a lane; lanes behind `width` repeat the last
    row."""
    each = LANES if spec.nibbles else BLOCK
    if spec.panels:
        at = offset(c, b, c.mul(block, each), LANES)
        ask_ahead(c, at, each * LANES)
        return [c.load(WORDS, offset(c, at, s, LANES * 4), align=4) for s in range(each // 4)]
    _ask_next_rows(c, spec, b, b_row, block)
    found = []
    for half in range(each // LANES):
        at = c.gep("i8", b, c.add(c.mul(block, each), LANES * half))
        found += _turned(c, [c.gep("i8", at, c.mul(b_row, min(r, width - 1))) for r in range(LANES)])
    return found


def ask_first(c: Code, spec: ScaledSpec, b: Val) -> None:
    """Asks the cache for the first bytes of panels, which no block asks for ahead."""
    with c.loop(0, min(_AHEAD, spec.n * spec.k // (2 if spec.nibbles else 1)), 64) as at:
        _ask(c, c.gep("i8", b, at), 64, 2)


def ask_ahead(c: Code, at: Val, size: int) -> None:
    """Asks the second-level cache for so many bytes that stand `_AHEAD` bytes behind a part of a panel."""
    _ask(c, c.gep("i8", at, _AHEAD), size, 2)


def _ask_next_rows(c: Code, spec: ScaledSpec, b: Val, b_row: Val, block: Val) -> None:
    """Asks the cache for a part of the next 16 rows of B, as large as a block of these. Sixteen rows at once are more
    streams than the hardware follows: a step of SmolLM2 waited for most of its head."""
    size = LANES * (BLOCK // 2 if spec.nibbles else BLOCK)
    _ask(c, c.gep("i8", c.gep("i8", b, c.mul(b_row, LANES)), c.mul(block, size)), size)


def _ask(c: Code, at: Val, size: int, level: int = 1) -> None:
    """Asks the cache of a level for so many bytes."""
    for line in range(0, size, 64):
        prefetch(c, c.gep("i8", at, line), level)


def _turned(c: Code, rows: list[Val]) -> list[Val]:
    """Sixteen bytes of each of 16 rows, as 4 vectors whose lane r has four neighbouring bytes of row r."""
    quarter = vec(4, "i32")
    parts = []
    for j in range(4):  # part j has the rows j, 4 + j, 8 + j and 12 + j
        ends = [c.load(quarter, rows[4 * n + j], align=1) for n in range(4)]
        halves = [shuffle(c, x, y, list(range(8))) for x, y in (ends[:2], ends[2:])]
        parts.append(shuffle(c, *halves, list(range(16))))
    each = lambda order: [4 * n + i if i < 4 else 12 + 4 * n + i for n in range(4) for i in order]
    low, high = each((0, 4, 1, 5)), each((2, 6, 3, 7))
    a, b = (shuffle(c, *parts[:2], order) for order in (low, high))
    x, y = (shuffle(c, *parts[2:], order) for order in (low, high))
    first, last = each((0, 1, 4, 5)), each((2, 3, 6, 7))
    return [shuffle(c, a, x, first), shuffle(c, a, x, last), shuffle(c, b, y, first), shuffle(c, b, y, last)]


def _widened(c: Code, x: Val, signed: bool) -> list[Val]:
    """Lanes of four bytes as two vectors whose lanes have two int16 each."""
    out = []
    for half in range(2):
        where = [4 * lane + 2 * half + i for lane in range(LANES) for i in range(2)]
        order = [k for at in where for k in ((4 * LANES, at) if signed else (at, 4 * LANES))]
        wide = c.cast("bitcast", shuffle(c, x, zeros(_BYTES), order), _HALVES)
        wide = c.binary("ashr", wide, const(_HALVES, "8")) if signed else wide
        out.append(c.cast("bitcast", wide, WORDS))
    return out


def scale_bytes(spec: ScaledSpec) -> int:
    """Bytes of a panel of scales: whole vectors of each group, and for `gemm_pack` whole blocks of groups."""
    return -(-spec.groups // LANES) * LANES * LANES * 4


def scale_packer(module: Module, isa: Isa, spec: ScaledSpec, dtype: str, width: int) -> str:
    """`void(ptr src, i64 row, ptr panel)`: scales or lows [width, groups] of a dtype as float32 [groups, 16]."""
    name = f"pack_scales_{'panels_' * spec.panels_of_scales}{dtype}_{width}x{spec.groups}"
    if name in module.functions:
        return name
    src, row, panel = params = [Val("ptr", "%src"), Val("i64", "%row"), Val("ptr", "%panel")]
    c = Code(module, name, params, attributes=ATTRIBUTES)
    size = LANES * spec.groups * (4 if dtype == "float32" else 2)
    if spec.panels_of_scales:
        ask_for_scales(c, spec, src, dtype)
    else:
        _ask(c, c.gep("i8", src, c.mul(row, LANES)), min(size, 2048))
    if spec.panels_of_scales:
        with c.loop(0, spec.groups) as group:
            at = c.mul(group, LANES)
            x = floats(c, dtype, offset(c, src, at, 4 if dtype == "float32" else 2))
            c.store(x, offset(c, panel, at, 4), align=64)
    elif spec.groups < 8 or dtype == "float32":
        mode = Mode(isa, "fma", dtype, dtype, "float", 1, "float")
        inner = gemm_pack.panel_from_rows(module, mode, dtype, spec.groups, LANES)
        c.do(f"call void @{inner}({src}, {row}, {panel}, {i64(spec.groups)}, {i64(width)})")
    else:  # eight groups at a time, the last ones once more where they are fewer
        whole = spec.groups // 8 * 8
        with c.loop(0, whole, 8) as group:
            _pack_eight(c, dtype, src, row, panel, group, width)
        if whole < spec.groups:
            _pack_eight(c, dtype, src, row, panel, i64(spec.groups - 8), width)
    c.finish()
    return name


def ask_for_scales(c: Code, spec: ScaledSpec, src: Val, dtype: str) -> None:
    """Asks the second-level cache for as many scales or lows as a panel has, some way behind one."""
    _ask(c, c.gep("i8", src, _SCALES_AHEAD), LANES * spec.groups * (4 if dtype == "float32" else 2), 2)


def scales_of(c: Code, spec: ScaledSpec, panel: Val, group: Val, dtype: str) -> Val:
    """The scales or lows of a group, of a panel as it is stored, or in float32 as `scale_packer` makes it."""
    at = c.mul(group, LANES)
    if spec.reads_scales:
        return floats(c, dtype, offset(c, panel, at, 4 if dtype == "float32" else 2))
    return c.load(_FLOATS, offset(c, panel, at, 4), align=64)


def floats(c: Code, dtype: str, at: Val) -> Val:
    """Sixteen neighbouring floats of a dtype as float32."""
    if dtype == "float32":
        return c.load(_FLOATS, at, align=4)
    if dtype == "float16":
        return c.cast("fpext", c.load(vec(LANES, "half"), at, align=2), _FLOATS)
    bits = c.cast("zext", c.load(vec(LANES, "i16"), at, align=2), WORDS)
    return c.cast("bitcast", c.binary("shl", bits, const(WORDS, "16")), _FLOATS)


def _pack_eight(c: Code, dtype: str, src: Val, row: Val, panel: Val, group: Val, width: int) -> None:
    """Eight groups of 16-bit floats of 16 rows as float32 [8, 16]."""
    at = offset(c, src, group, 2)
    turned = _turned(c, [c.gep("i8", at, c.mul(row, min(r, width - 1))) for r in range(LANES)])
    for i, x in enumerate(turned):
        for half in range(2):
            if dtype == "bfloat16":
                bits = c.binary("and", x, const(WORDS, str(-65536))) if half else c.binary("shl", x, const(WORDS, "16"))
                wide = c.cast("bitcast", bits, _FLOATS)
            else:
                bits = c.binary("lshr", x, const(WORDS, "16")) if half else x
                short = c.cast("bitcast", c.cast("trunc", bits, vec(LANES, "i16")), vec(LANES, "half"))
                wide = c.cast("fpext", short, _FLOATS)
            out = offset(c, panel, c.mul(c.add(group, 2 * i + half), LANES), 4)
            c.store(wide, out, align=64)
