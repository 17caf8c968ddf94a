"""Casts between all dtypes of the language, and between the form of a value in memory and in registers.

Register form: float32 -> float, float64 -> double; float16, bfloat16 and the 8- and 4-bit floats -> a float that
holds exactly a value of that dtype; integers -> iN, those of 2 and 4 bits an i8 with the value; bool -> i1.
Everything is exact integer or float arithmetic on every instruction set; no conversion becomes a library call.
"""

from __future__ import annotations

from typing import NamedTuple

from .isa import Isa
from .llvm import Code, Val, intrinsic_suffix, like, scalar_of, vec
from .math_expr import X


class SmallFloat(NamedTuple):
    """A float format that is computed in float32: mantissa bits, exponent bias, largest finite value, overflow."""

    storage: int  # bits of the memory element
    sign_bit: int
    mantissa: int
    bias: int
    largest: float
    overflow: float  # what a rounded value above `largest` becomes
    nan: float  # what NaN becomes
    unsigned_zero: bool = False  # its only zero is 0, and NaN has the code of -0


_INF, _NAN = float("inf"), float("nan")
SMALL_FLOATS = {
    "float16": SmallFloat(16, 15, 10, 15, 65504.0, _INF, _NAN),
    "bfloat16": SmallFloat(16, 15, 7, 127, 3.3895313892515355e38, _INF, _NAN),
    "float8_e5m2": SmallFloat(8, 7, 2, 15, 57344.0, _INF, _NAN),
    "float8_e4m3fn": SmallFloat(8, 7, 3, 7, 448.0, _NAN, _NAN),
    "float8_e4m3": SmallFloat(8, 7, 3, 7, 240.0, _INF, _NAN),
    "float8_e3m4": SmallFloat(8, 7, 4, 3, 15.5, _INF, _NAN),
    "float8_e4m3fnuz": SmallFloat(8, 7, 3, 8, 240.0, _NAN, _NAN, True),
    "float8_e5m2fnuz": SmallFloat(8, 7, 2, 16, 57344.0, _NAN, _NAN, True),
    "float8_e4m3b11fnuz": SmallFloat(8, 7, 3, 11, 30.0, _NAN, _NAN, True),
    "float4_e2m1fn": SmallFloat(8, 3, 1, 1, 6.0, 6.0, -0.0),
    "float8_e8m0fnu": SmallFloat(8, 8, 0, 127, 2.0**127, _NAN, _NAN),
}
INT_BITS = {f"{u}int{n}": n for u in ("", "u") for n in (2, 4, 8, 16, 32, 64)}
_FLOATS = {"float32": "float", "float64": "double"}


def is_float(dtype: str) -> bool:
    return dtype in _FLOATS or dtype in SMALL_FLOATS


def is_signed(dtype: str) -> bool:
    return dtype.startswith("int")


def is_narrow(dtype: str) -> bool:
    """Whether values of dtype are integers of less than a byte."""
    return INT_BITS.get(dtype, 8) < 8


def register_type(dtype: str, lanes: int) -> str:
    """The LLVM type in which `lanes` values of dtype are computed."""
    if dtype in SMALL_FLOATS:
        return vec(lanes, "float")
    if dtype == "bool":
        return vec(lanes, "i1")
    return vec(lanes, _FLOATS.get(dtype) or f"i{max(8, INT_BITS[dtype])}")


def memory_type(dtype: str) -> str:
    """The LLVM type of one element in memory; bool is an i8 of 0 or 1, types of less than 8 bits take a byte
    (unpacked) each."""
    if dtype in SMALL_FLOATS:
        return f"i{SMALL_FLOATS[dtype].storage}"
    return "i8" if dtype == "bool" else register_type(dtype, 1)


def from_memory(code: Code, isa: Isa, x: Val, dtype: str) -> Val:
    """Memory element (or vector of them) -> register form; only the bits of a 2- or 4-bit value in its byte count."""
    e = X(code, isa, x)
    if dtype == "bool":
        return e.ne(0).v
    if is_narrow(dtype):
        return wrap(e, dtype).v
    if dtype not in SMALL_FLOATS:
        return x
    return _decode(e, dtype).v


def to_memory(code: Code, isa: Isa, x: Val, dtype: str) -> Val:
    """Register form -> memory element; a 4-bit value comes back in the low bits of its byte (int4 sign-extended)."""
    e = X(code, isa, x)
    if dtype == "bool":
        return e.cast("zext", "i8").v
    if dtype not in SMALL_FLOATS:
        return x
    return _encode(e, dtype).v


def emit_cast(code: Code, isa: Isa, x: Val, src: str, dst: str) -> Val:
    """Convert a register value from dtype `src` to `dst`: the value semantics of `jnp.ndarray.astype`.

    Float to integer truncates and saturates (NaN gives 0), integers wrap, floats round to nearest even, `bool` is
    `x != 0`, and what overflows becomes infinite, or NaN where the format has no infinity (float4_e2m1fn saturates).
    float64 and the wide integers go to the floats below 32 bits through float32, as the interpreter and XLA do.
    """
    if src == dst:
        return x
    e = X(code, isa, x)
    if dst == "bool":
        return e.ne(0.0 if is_float(src) else 0).v
    if is_float(src):
        return (_float_to_float(e, dst) if is_float(dst) else _float_to_int(e, dst)).v
    extend = "sext" if is_signed(src) else "zext"
    if is_float(dst):
        if src == "bool" or INT_BITS[src] < 32:
            e = e.cast(extend, "i32")
        op = "sitofp" if is_signed(src) or (e.scalar == "i32" and src != "uint32") else "uitofp"
        return _round_small(e.cast(op, "double" if dst == "float64" else "float"), dst).v
    have, want = (1 if src == "bool" else int(e.scalar[1:])), max(8, INT_BITS[dst])
    if have != want:
        e = e.cast(extend if have < want else "trunc", f"i{want}")
    return wrap(e, dst).v


def wrap(x: X, dtype: str) -> X:
    """Bring an i8 back into the range of an integer of 2 or 4 bits; other dtypes are left alone."""
    if not is_narrow(dtype):
        return x
    rest = 8 - INT_BITS[dtype]
    return (x << rest) >> rest if is_signed(dtype) else x & 255 >> rest


def round_to_dtype(x: X, dtype: str) -> X:
    """Round a float to a value of dtype, to nearest even; float32 and float64 are left alone."""
    return _round_small(x, dtype)


# -- float to integer and float to float ------------------------------------------------------------------------------
def _float_to_int(x: X, dst: str) -> X:
    signed, bits = is_signed(dst), INT_BITS[dst]
    ty = like(x.ty, f"i{max(8, bits)}")
    if x.isa.arch == "aarch64" and not is_narrow(dst):  # an instruction of its own
        suffix = f"{intrinsic_suffix(ty)}.{intrinsic_suffix(x.ty)}"
        return x.new(x.code.intrinsic("fptosi.sat" if signed else "fptoui.sat", ty, x.v, suffix=suffix))
    # x86 has no conversion that saturates, and LLVM takes vectors of `llvm.fptosi.sat` apart into elements.
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    spare = bits - signed - (24 if x.scalar == "float" else 53)  # bits of the integer behind those of the float
    top = high + 1 - (1 << spare) if spare > 0 else high  # the largest float that is in range
    inside = (x > low).where(x, low)  # a NaN, too
    inside = (inside < top).where(inside, top)
    whole = inside.cast("fptosi" if signed or bits < 32 else "fptoui", f"i{max(32, bits)}")
    if top != high:
        whole = (x > top).where(high if signed else -1, whole)
    whole = x.is_nan().where(0, whole)
    return whole.cast("trunc", scalar_of(ty)) if bits < 32 else whole


def _float_to_float(x: X, dst: str) -> X:
    if dst == "float64":
        return x.to("double")
    # By integers from float64: LLVM makes one conversion of two instructions, a function that is in no library here.
    return _round_small(x.cast("fptrunc", "float"), dst, native=x.scalar != "double")


# -- small floats -----------------------------------------------------------------------------------------------------
def _native_half(isa: Isa) -> bool:
    return isa.arch == "aarch64" or isa.has("f16c") or isa.has("avx512f")


def _round_small(x: X, dtype: str, native: bool = True) -> X:
    if dtype not in SMALL_FLOATS:
        return x
    if dtype == "bfloat16":
        return _round_bfloat16(x)
    if dtype == "float8_e8m0fnu":
        return _round_power_of_two(x)
    if dtype == "float16" and native and _native_half(x.isa):
        return x.cast("fptrunc", "half").cast("fpext", "float")
    fmt = SMALL_FLOATS[dtype]
    a = x.abs()
    drop = 23 - fmt.mantissa
    bits = a.bits()
    nearest = (bits + ((1 << (drop - 1)) - 1) + (bits.lshr(drop) & 1)) & -(1 << drop)
    # Below the normal range the spacing is fixed: adding this power of two rounds at the spacing's place.
    magic = 2.0 ** (1 - fmt.bias - fmt.mantissa + 23)
    y = (a < 2.0 ** (1 - fmt.bias)).where(a + magic - magic, nearest.as_float())
    y = (y > fmt.largest).where(fmt.overflow, y)
    # For a format without NaN, ml_dtypes converts NaN to a zero with the sign flipped.
    nan = y.const(fmt.nan) if fmt.nan != fmt.nan else y.const(fmt.nan).xor_sign(x)
    signed = y.copysign(x)
    if fmt.unsigned_zero:
        signed = signed + 0.0  # -0 becomes 0
    return x.is_nan().where(nan, signed)


def _round_bfloat16(x: X) -> X:
    # Not `fptrunc`: VCVTNEPS2BF16 flushes subnormals, and elsewhere it is a call per element.
    bits = x.bits()
    nearest = bits + 0x7FFF + (bits.lshr(16) & 1)
    return (x.is_nan().where(bits | 0x00400000, nearest) & -0x10000).as_float()


def _round_power_of_two(x: X) -> X:
    """Round to float8_e8m0fnu, powers of two only: ties go up; zero, negative and too large values are NaN."""
    bits = x.bits()
    normal = (bits + 0x400000) & 0x7F800000
    low = (bits > 0x400000).where(normal.const(0x800000), 0x400000)  # ml_dtypes rounds up above the smallest
    y = (bits < 0x800000).where(low, normal)
    bad = (bits <= 0) | (bits >= 0x7F400000)
    return bad.where(y.const(0x7FC00000), y).as_float()


def _decode(x: X, dtype: str) -> X:
    if dtype == "bfloat16":
        return (x.cast("zext", "i32") << 16).as_float()
    if dtype == "float16" and _native_half(x.isa):
        return x.cast("bitcast", "half").cast("fpext", "float")
    u = x.cast("zext", "i32")
    if dtype == "float8_e8m0fnu":
        bits = u.eq(0).where(u.const(0x400000), u << 23)
        return u.eq(255).where(bits.const(0x7FC00000), bits).as_float()
    fmt = SMALL_FLOATS[dtype]
    magnitude = (u & ((1 << fmt.sign_bit) - 1)) << (23 - fmt.mantissa)
    rebias = (127 - fmt.bias) << 23
    bits = magnitude + rebias
    # Subnormals: put the mantissa under the smallest normal's exponent plus one, and take that power off again.
    smallest = ((128 - fmt.bias) << 23) if fmt.bias < 127 else 0
    subnormal = (magnitude + smallest).as_float() - 2.0 ** (1 - fmt.bias)
    y = (magnitude < (1 << 23)).where(subnormal, bits.as_float())
    if fmt.overflow == _INF:
        top = (127 - fmt.bias) << 23
        special = magnitude >= ((2 * fmt.bias + 1) << 23)
        y = special.where((bits + top).as_float(), y)
    elif fmt.unsigned_zero:
        y = u.eq(1 << fmt.sign_bit).where(_NAN, y)
    elif fmt.nan != fmt.nan:
        y = magnitude.eq(((1 << fmt.sign_bit) - 1) << (23 - fmt.mantissa)).where(_NAN, y)
    sign = (u & (1 << fmt.sign_bit)) << (31 - fmt.sign_bit)
    return (y.bits() | sign).as_float()


def _encode(x: X, dtype: str) -> X:
    bits = x.bits()
    if dtype == "bfloat16":
        return bits.lshr(16).cast("trunc", "i16")
    if dtype == "float16" and _native_half(x.isa):
        return x.cast("fptrunc", "half").cast("bitcast", "i16")
    fmt = SMALL_FLOATS[dtype]
    if dtype == "float8_e8m0fnu":
        return bits.lshr(23).cast("trunc", "i8")
    a = x.abs()
    drop = 23 - fmt.mantissa
    magic = 2.0 ** (1 - fmt.bias - fmt.mantissa + 23)
    normal = a.bits().lshr(drop) - ((127 - fmt.bias) << fmt.mantissa)
    subnormal = (a + magic).bits() - a.const(magic).bits()
    y = (a < 2.0 ** (1 - fmt.bias)).where(subnormal, normal)
    if fmt.overflow == _INF:
        infinity = (2 * fmt.bias + 1) << fmt.mantissa
        y = (a > fmt.largest).where(infinity, y)
        y = x.is_nan().where(infinity | 1 << (fmt.mantissa - 1), y)
    elif fmt.nan != fmt.nan and not fmt.unsigned_zero:
        y = x.is_nan().where((1 << fmt.sign_bit) - 1, y)
    y = y | (bits.lshr(31) << fmt.sign_bit)
    if fmt.unsigned_zero:
        y = x.is_nan().where(1 << fmt.sign_bit, a.eq(0.0).where(0, y))
    return y.cast("trunc", f"i{fmt.storage}")
