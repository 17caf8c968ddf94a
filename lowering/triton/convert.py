"""Conversions between all dtypes of the language, in the register forms of `emitter.elem_of`.

Floats of 8 and 4 bits are codes in an i8. Hardware converts them where `features.fp8` lists the dtype; elsewhere they
take few integer operations, exact for every code. The rules are those of `ir.elementwise.convert`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from jtile import ir

from .emit_basics import code_of
from .emitter import elem_of
from .features import Features
from .math_expr import X
from .ttir import FLOATS, Code, Val
from .versions import converts_fp8


class Small(NamedTuple):
    """A float format of at most 8 bits: mantissa bits, exponent bias, largest finite code, codes beyond it."""

    width: int
    mantissa: int
    bias: int
    largest: int
    overflow: int
    nan: int
    elem: str = ""  # triton's type for a format that hardware converts
    unsigned_zero: bool = False  # its only zero is 0, and NaN has the code of -0

    @property
    def sign(self) -> int:
        return 1 << (self.width - 1)


SMALL = {
    "float8_e4m3fn": Small(8, 3, 7, 0x7E, 0x7F, 0x7F, "f8E4M3FN"),
    "float8_e5m2": Small(8, 2, 15, 0x7B, 0x7C, 0x7E, "f8E5M2"),
    "float8_e4m3": Small(8, 3, 7, 0x77, 0x78, 0x7C),
    "float8_e3m4": Small(8, 4, 3, 0x6F, 0x70, 0x78),
    "float8_e4m3fnuz": Small(8, 3, 8, 0x7F, 0x80, 0x80, unsigned_zero=True),
    "float8_e5m2fnuz": Small(8, 2, 16, 0x7F, 0x80, 0x80, unsigned_zero=True),
    "float8_e4m3b11fnuz": Small(8, 3, 11, 0x7F, 0x80, 0x80, unsigned_zero=True),
    "float4_e2m1fn": Small(4, 1, 1, 7, 7, 8),  # without NaN: ml_dtypes makes it zero with the sign flipped
}
WIDE = ("float16", "bfloat16", "float32", "float64")
CODES = (*SMALL, "float8_e8m0fnu")


def is_float(dtype: str) -> bool:
    return ir.DTYPES[dtype].kind == "f"


def is_signed(dtype: str) -> bool:
    return ir.DTYPES[dtype].kind == "i"


def convert(code: Code, f: Features, v: Val, src: str, dst: str) -> Val:
    """A value of dtype `src` as `dst`: what `Cast` means. `Val.fill` is kept where it stays true."""
    if src == dst:
        return v
    x = X(code, v)
    if dst == "bool":
        exact = v if not is_float(src) or src == "float64" else to_f32(code, f, v, src)
        y = X(code, exact).ne(0)
    elif is_float(src):
        y = _from_float(x, f, src, dst)
    elif is_float(dst):
        y = _int_to_float(x, f, src, dst)
    else:
        y = wrap(x.to_int(elem_of(dst), signed=is_signed(src)), dst)
    return _filled(y.v, v.fill, src, dst)


def _from_float(x: X, f: Features, src: str, dst: str) -> X:
    if not is_float(dst):
        wide = x if src == "float64" else X(x.code, to_f32(x.code, f, x.v, src))
        return _float_to_int(wide, dst)
    if src == "float64":
        return X(x.code, from_f32(x.code, f, x.to_float("f32").v, dst))
    return X(x.code, from_f32(x.code, f, to_f32(x.code, f, x.v, src), dst))


def _filled(y: Val, fill, src: str, dst: str) -> Val:
    """A converted value with what is known of its fill: zero stays zero, but in e8m0, which has none; infinities stay
    where both floats have them."""
    if fill is None or src in CODES or dst == "float8_e8m0fnu":
        return y
    if fill != 0:
        kept = src in WIDE and dst in WIDE and fill in (float("inf"), float("-inf"))
        return dataclasses.replace(y, fill=fill) if kept else y
    zero = False if dst == "bool" else 0.0 if dst in WIDE else 0
    return dataclasses.replace(y, fill=zero)


def wrap(x: X, dtype: str) -> X:
    """An i8 brought back into the range of an integer of 2 or 4 bits; values of other dtypes as they are."""
    info = ir.DTYPES[dtype]
    if info.kind == "f" or info.bits >= 8:
        return x
    rest = 8 - info.bits
    return (x << rest) >> rest if info.kind == "i" else x & 255 >> rest


def own_bits(dtype: str, x: X) -> X:
    """An integer below 8 bits whose i8 has zeros, instead of copies of the sign, in the bits beyond its width."""
    info = ir.DTYPES[dtype]
    return x & (1 << info.bits) - 1 if info.kind == "i" and info.bits < 8 else x


# -- integers and floats ----------------------------------------------------------------------------------------------


def _int_to_float(x: X, f: Features, src: str, dst: str) -> X:
    """An integer as a float: rounded once to f32 (f64), and from there to narrower dtypes."""
    if src == "bool":
        return x.where(code_of(1.0, dst), code_of(0.0, dst), elem_of(dst))
    if dst == "float64":
        return x.cast("sitofp" if is_signed(src) else "uitofp", "f64")
    if f.backend == "nvidia" and ir.DTYPES[src].bits <= {"bfloat16": 4, "float16": 8}.get(dst, 0):
        return _by_mantissa(x, src, elem_of(dst))
    if f.backend == "nvidia" and x.width <= 16:
        y = _by_mantissa(x, src, "f32")
    else:
        y = x.cast("sitofp" if is_signed(src) else "uitofp", "f32")
    return X(x.code, from_f32(x.code, f, y.v, dst))


def _by_mantissa(x: X, src: str, elem: str) -> X:
    """A small integer as the mantissa of a float whose last place is 1, less that float: full-rate instructions, of
    two lanes each in 16 bits, where NVIDIA's cvt runs at a quarter of the rate or less."""
    one = {"bf16": 0x4300, "f16": 0x6400, "f32": 0x4B000000}[elem]  # 2^7, 2^10, 2^23
    low = 0
    if src in ("int2", "int4"):
        x, low = (x & 15) ^ 8, 8  # bit operations, not x + 8: LLVM sees through the sign extension before them
    elif is_signed(src):
        low = x.sign_mask()
        x = x ^ low
    y = x.to_int(f"i{FLOATS[elem]}", signed=False) | one
    return y.as_float(elem) - float((1 << {"bf16": 7, "f16": 10, "f32": 23}[elem]) + low)


def _float_to_int(x: X, dst: str) -> X:
    """A float as an integer: truncated and saturated, NaN as 0. `x` is f32 or f64."""
    if not x.v.shape and x.code.lifts_scalars:
        code = x.code
        return X(code, code.unsplat(_float_to_int(X(code, code.splat(x.v, (1,))), dst).v))
    info = ir.DTYPES[dst]
    signed = is_signed(dst)
    low = -(1 << (info.bits - 1)) if signed else 0
    high = (1 << (info.bits - signed)) - 1
    if info.bits <= (16 if x.elem == "f32" else 32):  # floats of x's type hold both limits of the integer
        y = x.is_nan().where(0.0, x)
        y = y.binary("arith.maxnumf", float(low)).binary("arith.minnumf", float(high))
        if info.bits == 32:
            return y.cast("fptosi" if signed else "fptoui", "i32")
        return y.cast("fptosi", "i32").to_int(elem_of(dst))
    above = x.ge(float(high + 1))
    limit, below = (float(low), "lt") if signed else (-1.0, "le")
    outside = above | x.cmp(f"u{below}", limit)  # the unordered comparison includes NaN
    y = outside.where(0.0, x).cast("fptosi" if signed else "fptoui", elem_of(dst))
    return above.where(high, x.cmp(f"o{below}", limit).where(low, y))


# -- floats -----------------------------------------------------------------------------------------------------------


def to_f32(code: Code, f: Features, v: Val, dtype: str) -> Val:
    """A float of any dtype as f32: exact, but for float64, which is rounded."""
    x = X(code, v)
    if dtype in WIDE:
        return x.to_float("f32").v
    if _hardware(f, dtype, v):
        fp8 = code.bitcast(v, SMALL[dtype].elem)
        return code.cast("tt.fp_to_fp", fp8, "f32")
    return _decode(x, dtype).v


def from_f32(code: Code, f: Features, v: Val, dtype: str) -> Val:
    """An f32 as a float of any dtype, rounded to nearest even."""
    x = X(code, v)
    if dtype in WIDE:
        return x.to_float(elem_of(dtype)).v
    if dtype == "float8_e8m0fnu":
        return _encode_power(x).v
    if _hardware(f, dtype, v):
        return _encode_hardware(x, SMALL[dtype]).v
    return _encode(x, SMALL[dtype]).v


def _hardware(f: Features, dtype: str, v: Val) -> bool:
    """Whether an instruction converts a tensor of an fp8 dtype."""
    return dtype in f.fp8 and bool(v.shape) and converts_fp8(f)


def _decode(x: X, dtype: str) -> X:
    if dtype == "float8_e8m0fnu":
        u = x.to_int("i32", signed=False)
        y = u.eq(0).where(0x400000, u << 23)
        return u.eq(255).where(0x7FC00000, y).as_float("f32")
    fmt = SMALL[dtype]
    if dtype == "float8_e5m2":  # the upper half of an f16
        return (x.to_int("i16", signed=False) << 8).as_float("f16").to_float("f32")
    # Exponent and mantissa in place, and the difference of the biases by a multiplication, which also normalises
    # subnormal numbers.
    u = x.to_int("i32", signed=False)
    magnitude = (u & (fmt.sign - 1)) << (23 - fmt.mantissa)
    sign = (u & fmt.sign) << (32 - fmt.width)
    y = (magnitude | sign).as_float("f32") * 2.0 ** (127 - fmt.bias)
    if fmt.unsigned_zero:
        return u.eq(0x80).where(math.nan, y)
    if dtype in ("float8_e4m3", "float8_e3m4"):
        code = u & (fmt.sign - 1)
        y = code.eq(fmt.overflow).where((sign | 0x7F800000).as_float("f32"), y)
        return code.gt(fmt.overflow).where(math.nan, y)
    if dtype == "float8_e4m3fn":
        y = (u & 0x7F).eq(0x7F).where((sign | 0x7FC00000).as_float("f32"), y)
    return y


def _encode(x: X, fmt: Small) -> X:
    bits = x.bits()
    a = x.abs()
    drop = 23 - fmt.mantissa
    half = (1 << (drop - 1)) - 1
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + half + (magnitude.lshr(drop) & 1)).lshr(drop) - ((127 - fmt.bias) << fmt.mantissa)
    # Below the normal range the spacing is fixed: adding this power of two rounds at the spacing's place.
    magic = a.const(2.0 ** (1 - fmt.bias - fmt.mantissa + 23))
    subnormal = (a + magic).bits() - magic.bits()
    y = a.lt(2.0 ** (1 - fmt.bias)).where(subnormal, normal)
    if fmt.unsigned_zero:
        none = x.is_nan() | y.gt(fmt.largest)
        return none.where(fmt.nan, y.eq(0).where(0, y | (bits.lshr(31) << 7))).to_int("i8")
    y = y.gt(fmt.largest).where(fmt.overflow, y)
    sign = bits.lshr(31) << (fmt.width - 1)
    if fmt.width == 4:
        return x.is_nan().where(sign ^ fmt.nan, y | sign).to_int("i8")
    return (x.is_nan().where(fmt.nan, y) | sign).to_int("i8")


def bounded_to_8_bits(code: Code, f: Features, v: Val, dtype: str) -> Val | None:
    """An f32 that a dtype of 8 bits with an instruction of its own has room for, or NaN, as that dtype; None where no
    instruction converts it. Without the numbers beyond the largest, a conversion takes a fifth of the instructions."""
    return _by_instruction(X(code, v), SMALL[dtype]).v if dtype in SMALL and _hardware(f, dtype, v) else None


def largest_of(dtype: str) -> float:
    """The largest finite number of a float of 8 bits for which there are instructions."""
    return 448.0 if SMALL[dtype].overflow == SMALL[dtype].nan else 57344.0


def _by_instruction(x: X, fmt: Small) -> X:
    """Encode by the instruction, which saturates."""
    spelled = x.code.spell(x.v.shape, fmt.elem)
    fp8 = x.code.let(f"tt.fp_to_fp {x.v.name}, rounding = rtne : {x.v.type} -> {spelled}", x.v.shape, fmt.elem)
    return x.new(x.code.bitcast(fp8, "i8"))


def _encode_hardware(x: X, fmt: Small) -> X:
    """Encode by the instruction: numbers that round beyond the largest become infinite, or NaN where the format has no
    infinity."""
    y = _by_instruction(x, fmt)
    sign = (x.bits().lshr(24) & 0x80).to_int("i8")
    # From here on (a half above the largest; ties go to the even neighbour) numbers round to more than the largest.
    if fmt.overflow == fmt.nan:
        return x.abs().cmp("ugt", 464.0).where(sign | fmt.nan, y)  # the unordered comparison includes NaN
    y = x.abs().cmp("oge", 61440.0).where(sign | fmt.overflow, y)
    return x.is_nan().where(sign | fmt.nan, y)


def _encode_power(x: X) -> X:
    """The code of a float8_e8m0fnu: ties go up; zero, negative and too large values are NaN."""
    bits = x.bits()
    low = bits.gt(0x400000).where(1, 0, "i32")  # ml_dtypes rounds up above the smallest
    y = bits.lt(0x800000).where(low, (bits + 0x400000).lshr(23))
    return (bits.le(0) | bits.ge(0x7F400000)).where(255, y).to_int("i8")


# -- bits -------------------------------------------------------------------------------------------------------------


def reinterpret(code: Code, v: Val, src: str, dst: str) -> Val:
    """The bits of a value as another dtype of the same width: what `Bitcast` means."""
    x = X(code, v)
    if src == "bool" or dst == "bool":
        return v if src == dst else (x.ne(0) if dst == "bool" else x.to_int("i8", signed=False)).v
    if ir.DTYPES[src].bits < 8 and not is_float(dst):
        return wrap(x, dst).v
    if ir.DTYPES[src].bits < 8:
        return (x & 15).v
    return code.bitcast(v, elem_of(dst))
