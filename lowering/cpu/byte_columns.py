"""Columns of products of two digits (`byte_digits`): sixteen of them as tiles of bytes [steps, h and l, 16, 64].

A row of a tile has four neighbouring terms of each column. Words of panels (`scaled_columns`) have such, or eight codes
of 4 bits. Weights are rounded to integers 256 h + l of which the largest is about 2**15, whose bound the scales say.
Columns that are in digits already are brought to the order of tiles.
"""

from __future__ import annotations

import dataclasses
import itertools

from . import scaled_columns as columns
from . import tiles
from .gemm_vector import ATTRIBUTES, interleave, offset, transpose, zeros
from .llvm import Code, Module, Val, const, i64, vec
from .math_expr import literal
from .scaled_columns import BLOCK, LANES, SCALES, WORDS

ROWS, STEP = tiles.ROWS, 64  # rows of a tile of A, and terms of a tile
B_STEP = 2 * tiles.TILE_BYTES
_FLOATS, _HALVES = vec(LANES, "float"), vec(2 * LANES, "i16")
# The largest weight of a column as an integer, and how many parts of one the factor of a code has. The instruction
# that multiplies codes takes both as int16: 2 * 8 * 30000 / 15 and 128 * 32512 / 128 fit.
_LARGEST, _PARTS = {True: 30000, False: 32512}, {True: 8, False: 128}
# Steps that are multiplied in one go, if these are all or a part: both digits of 32 columns stay in the first-level
# cache so, or most of them. For a part sums come and go, too.
_ALL, _PART = 12, 8
_LEAST = float(2.0**-100)  # of the largest weight of a column


@dataclasses.dataclass(frozen=True)
class DigitSpec:
    """C[m, n] (+)= A[m, k] . B, with m and n multiples of 16 and k of 64.

    Attributes:
      b: how B is stored: "codes" of 4 bits or "bytes" in panels, [n, k]; or in digits as A is, in "rows" [n, k] with a
        scale each, or none, or in "lanes" [k, n].
      scale: the dtype of B's scales, in panels for groups of 32 `shared` weights of a column.
      low: the dtype of what is added to each weight of a group; None: nothing; `SCALES`: -8 times the scale.
      accumulate: add to C instead of overwriting it; fade: to C times a number for each row.
    """

    m: int
    n: int
    k: int
    b: str
    scale: str | None
    low: str | None = None
    shared: int = 1
    accumulate: bool = False
    fade: bool = False

    @property
    def name(self) -> str:
        kind = f"{self.b}_{self.scale or 'plain'}_{self.low or 'plain'}_{self.shared}"
        kind += "_add" * self.accumulate + "_fade" * self.fade
        return f"byte_digits_{self.m}x{self.n}x{self.k}_{kind}"

    @property
    def four(self) -> bool:
        return self.b == "codes"

    @property
    def steps(self) -> int:
        return self.k // STEP

    @property
    def parts(self) -> list[tuple[int, int]]:
        """(the first step, how many) of each part of k."""
        count = 1 if self.steps <= _ALL else -(-self.steps // _PART)
        ends = [self.steps * i // count for i in range(count + 1)]
        return [(a, b - a) for a, b in itertools.pairwise(ends)]

    @property
    def groups(self) -> int:
        return self.k // BLOCK // self.shared

    @property
    def words(self) -> int:
        """Words of a block of a column."""
        return BLOCK // (8 if self.four else 4)

    @property
    def of_b(self) -> list[Val]:
        """What a product takes of B: its words, scales and lows; or both digits and scales, each with the distance of
        its rows in bytes."""
        if self.b in ("codes", "bytes"):
            return [Val("ptr", "%b"), Val("ptr", "%scales"), Val("ptr", "%lows")]
        names = "%b_high", "%b_low", "%b_scales"
        return [x for name in names for x in (Val("ptr", name), Val("i64", f"{name}_row"))]

    def panel(self, c: Code, v: Val) -> list[Val]:
        """`of_b` of the 16 columns numbered v."""
        if self.b in ("codes", "bytes"):
            return self._stored_panel(c, v)
        places = [(LANES if self.b == "lanes" else c.mul(row, LANES)) for row in self.of_b[1:4:2]]
        places.append(c.mul(self.of_b[5], LANES))
        starts = [c.gep("i8", ptr, c.mul(v, far)) for ptr, far in zip(self.of_b[::2], places, strict=True)]
        return [x for pair in zip(starts, self.of_b[1::2], strict=True) for x in pair]

    def _stored_panel(self, c: Code, v: Val) -> list[Val]:
        size = lambda dtype: 4 if dtype == "float32" else 2
        numbers = self.groups * LANES
        low = numbers * size(self.low) if self.low not in (None, SCALES) else 0
        sizes = self.k // BLOCK * self.words * LANES * 4, numbers * size(self.scale), low
        return [c.gep("i8", ptr, c.mul(v, n)) for ptr, n in zip(self.of_b, sizes, strict=True)]


def packer(module: Module, spec: DigitSpec) -> str:
    """`void(*spec.of_b, ptr panel, ptr factors)`: the tiles of 16 columns, and what the sums are to be multiplied with
    beside the scales of rows, float32 [16]."""
    if spec.b in ("codes", "bytes"):
        return _weights_packer(module, spec)
    return _digits_packer(module, spec)


_PANEL, _FACTORS = Val("ptr", "%panel"), Val("ptr", "%factors")


def _digits_packer(module: Module, spec: DigitSpec) -> str:
    """`packer` for columns in digits: four bytes of each of 16 columns come side by side."""
    name = f"{spec.name}_pack"
    c = Code(module, name, [*spec.of_b, _PANEL, _FACTORS], attributes=ATTRIBUTES)
    *digits, scale, scale_row = spec.of_b
    for r in range(LANES):
        x = const("float", "256.0")
        if spec.scale is not None:
            x = c.binary("fmul", c.load("float", c.gep("i8", scale, c.mul(scale_row, r)), align=4), x)
        c.store(x, c.gep("i8", _FACTORS, 4 * r), align=4)
    with c.loop(0, spec.k // STEP) as step:
        for n, (ptr, row) in enumerate(zip(digits[::2], digits[1::2], strict=True)):
            tile = c.gep("i8", offset(c, _PANEL, step, B_STEP), n * tiles.TILE_BYTES)
            if spec.b == "rows":
                at = offset(c, ptr, step, STEP)
                rows = [c.load(WORDS, c.gep("i8", at, c.mul(row, r)), align=1) for r in range(LANES)]
                for r, words in enumerate(transpose(c, rows)):
                    c.store(words, c.gep("i8", tile, r * tiles.ROW_BYTES), align=64)
                continue
            with c.loop(0, STEP // 4) as r:
                at = c.gep("i8", ptr, c.mul(c.add(c.mul(step, STEP), c.mul(r, 4)), row))
                four = [c.load(vec(LANES, "i8"), c.gep("i8", at, c.mul(row, i)), align=1) for i in range(4)]
                c.store(interleave(c, four), offset(c, tile, r, tiles.ROW_BYTES), align=64)
    c.finish()
    return name


def _weights_packer(module: Module, spec: DigitSpec) -> str:
    """`packer` for weights in panels."""
    name = f"{spec.name}_pack"
    c = Code(module, name, [*spec.of_b, _PANEL, _FACTORS], attributes=ATTRIBUTES)
    largest = _largest(c, spec)
    to_integers = c.binary("fdiv", const(_FLOATS, f"{_LARGEST[spec.four]}.0"), largest)
    c.store(c.binary("fmul", largest, const(_FLOATS, literal("float", 256 / _LARGEST[spec.four]))), _FACTORS, align=64)
    with c.loop(0, spec.groups) as group:
        factor, added = _of_group(c, spec, group, to_integers)
        with c.loop(0, spec.shared) as i:
            block = c.add(c.mul(group, spec.shared), i)
            words = offset(c, spec.of_b[0], c.mul(block, spec.words), LANES * 4)
            columns.ask_ahead(c, words, spec.words * LANES * 4)
            at = c.add(c.mul(c.binary("lshr", block, i64(1)), B_STEP),
                       c.mul(c.binary("and", block, i64(1)), tiles.TILE_BYTES // 2))  # fmt: skip
            at = c.gep("i8", _PANEL, at)
            for row, (even, odd) in _numbers(c, spec, words, factor, added):
                for digit, both in enumerate(_digits(c, even, odd)):
                    c.store(both, c.gep("i8", at, digit * tiles.TILE_BYTES + row * tiles.ROW_BYTES), align=64)
    c.finish()
    return name


def _largest(c: Code, spec: DigitSpec) -> Val:
    """A bound of the magnitudes of the weights of each column, from their scales and lows alone."""
    slot = c.var(_FLOATS, const(_FLOATS, literal("float", _LEAST)))
    with c.loop(0, spec.groups) as group:
        d, low = _scale_and_low(c, spec, group)
        ends = [c.binary("fmul", d, const(_FLOATS, "8.0" if spec.four else "128.0"))]
        if low is not None:
            ends = [low, c.intrinsic("fma", _FLOATS, d, const(_FLOATS, "15.0"), low)]
        for end in ends:
            c.store(c.intrinsic("maxnum", _FLOATS, c.load(_FLOATS, slot), c.intrinsic("fabs", _FLOATS, end)), slot)
    return c.load(_FLOATS, slot)


def _scale_and_low(c: Code, spec: DigitSpec, group: Val) -> tuple[Val, Val | None]:
    at = lambda ptr, dtype: offset(c, ptr, c.mul(group, LANES), 4 if dtype == "float32" else 2)
    d = columns.floats(c, spec.scale, at(spec.of_b[1], spec.scale))
    if spec.low in (None, SCALES):
        return d, None
    return d, columns.floats(c, spec.low, at(spec.of_b[2], spec.low))


def _of_group(c: Code, spec: DigitSpec, group: Val, to_integers: Val) -> tuple[Val, Val]:
    """What the codes of a group are multiplied with, in parts of an integer, and what is added; both twice a lane."""
    d, low = _scale_and_low(c, spec, group)
    factor = c.binary("fmul", c.binary("fmul", d, to_integers), const(_FLOATS, f"{_PARTS[spec.four]}.0"))
    half = const(WORDS, "128")  # digits have signs: see `_digits`
    if low is not None:  # codes are taken less 8
        middle = c.intrinsic("fma", _FLOATS, d, const(_FLOATS, "8.0"), low)
        half = c.binary("add", _whole(c, c.binary("fmul", middle, to_integers)), half)
    return _twice(c, _whole(c, factor)), _twice(c, half)


def _whole(c: Code, x: Val) -> Val:
    """The nearest integers; what is no number becomes the least."""
    every = Val("i16", "-1"), Val("i32", "4")  # all lanes, in the rounding mode at hand: to the nearest
    return c.intrinsic("x86.avx512.mask.cvtps2dq", WORDS, x, zeros(WORDS), *every, suffix="512")


def _twice(c: Code, x: Val) -> Val:
    """The low halves of lanes in both halves."""
    low = c.binary("and", x, const(WORDS, "65535"))
    return c.cast("bitcast", c.binary("or", low, c.binary("shl", x, const(WORDS, "16"))), _HALVES)


def _numbers(c: Code, spec: DigitSpec, words: Val, factor: Val, added: Val):
    """(a row of a tile, (the first and the third, the second and the fourth weight of each column there, as integers
    that are 128 too high)) of a block."""
    half = lambda n: const(_HALVES, str(n))
    shifted = lambda x, n: c.binary("shl", x, half(n)) if n else x
    top = lambda x: c.binary("and", x, half(-4096))

    def times(x: Val) -> Val:
        return c.binary("add", c.intrinsic("x86.avx512.pmul.hr.sw.512", _HALVES, x, factor, suffix=""), added)

    for s in range(spec.words):
        x = c.cast("bitcast", c.load(WORDS, offset(c, words, s, LANES * 4), align=4), _HALVES)
        if not spec.four:
            yield s, (times(shifted(x, 8)), times(c.binary("and", x, half(-256))))
            continue
        x = c.binary("xor", x, half(-30584))  # 0x8888: codes less 8 have their sign in the first bit
        codes = [times(shifted(x, 12)), *(times(top(shifted(x, n))) for n in (8, 4, 0))]
        yield s, (codes[0], codes[2])
        yield spec.words + s, (codes[1], codes[3])


def _digits(c: Code, even: Val, odd: Val) -> tuple[Val, Val]:
    """The high and the low bytes of integers x + 128: x = 256 h + l with -128 <= l < 128."""
    eight = const(_HALVES, "8")
    highs = _either_byte(c, odd, c.binary("lshr", even, eight))
    lows = _either_byte(c, c.binary("shl", odd, eight), even)
    return highs, c.binary("xor", lows, const(_HALVES, "-32640"))  # 0x8080


def _either_byte(c: Code, high: Val, low: Val) -> Val:
    """The high bytes of one and the low bytes of another. Spelt out, since LLVM takes a shuffle of bytes for shifts and
    masks, which is three instructions where this is one."""
    words = (c.cast("bitcast", x, WORDS) for x in (high, low, const(_HALVES, "-256")))
    by_third = Val("i32", str(0xF0 & 0xAA | 0xCC & ~0xAA))  # of the bits of three: the first's where the last's are set
    chosen = c.intrinsic("x86.avx512.pternlog.d.512", WORDS, *words, by_third, suffix="")
    return c.cast("bitcast", chosen, _HALVES)
