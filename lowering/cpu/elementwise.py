"""Elementwise operations on values in register form: arithmetic, comparisons, bits, rounding, selection, math.

bfloat16, float16 and the 8- and 4-bit floats are computed in float and rounded back after every operation, so that
results are those of an operation of that dtype (float has more than 2 p + 2 bits for each of them, so the two
roundings of + - * / sqrt equal one).
"""

from __future__ import annotations

from collections.abc import Callable

from jtile import ir

from . import math as cpu_math
from .convert import (
    INT_BITS,
    SMALL_FLOATS,
    from_memory,
    is_float,
    is_narrow,
    is_signed,
    round_to_dtype,
    to_memory,
    wrap,
)
from .isa import Isa
from .llvm import Code, Val, intrinsic_suffix
from .math_expr import X, ceil, floor, has_fma, pow2, round_even

COMPARISONS = {
    "eq": ("oeq", "eq", "eq"),
    "ne": ("une", "ne", "ne"),
    "lt": ("olt", "slt", "ult"),
    "le": ("ole", "sle", "ule"),
    "gt": ("ogt", "sgt", "ugt"),
    "ge": ("oge", "sge", "uge"),
}
# Float functions whose result is a value of the dtype when the arguments are: no rounding.
EXACT = {"neg", "abs", "sign", "max", "min", "clamp", "select", "floor", "ceil", "round", "round_away", "rem"}


def emit_elementwise(code: Code, isa: Isa, fn: str, args: list[Val], dtype: str) -> Val:
    """Apply `fn` to register values of dtype (the dtype of the arguments; for `select` of the two choices).

    Comparisons and `is_finite` give i1, everything else a value of dtype. Raises `ValueError` for a function that
    the dtype does not have.
    """
    xs = [X(code, isa, a) for a in args]
    if fn == "select":
        return code.select(*args)
    if fn in COMPARISONS:
        a, b = xs
        kind = 0 if is_float(dtype) else 1 if is_signed(dtype) else 2
        return a.cmp(COMPARISONS[fn][kind], b).v
    if fn not in functions(dtype):
        raise ValueError(f"no elementwise function {fn!r} for dtype {dtype}")
    if is_float(dtype):
        return _emit_float(xs, fn, dtype).v
    if dtype == "bool":
        return _BOOL[fn](*xs).v
    return wrap(_INT[fn](dtype, *xs), dtype).v


def functions(dtype: str) -> frozenset[str]:
    """The names that `emit_elementwise` takes for dtype."""
    table = _FLOAT if is_float(dtype) else _BOOL if dtype == "bool" else _INT
    names = frozenset(table) | frozenset(COMPARISONS) | {"select"}
    return names - {"mulhi"} if INT_BITS.get(dtype) in (2, 4, 64) else names


# -- floats -----------------------------------------------------------------------------------------------------------
def _emit_float(xs: list[X], fn: str, dtype: str) -> X:
    if fn == "nextafter":
        return _next_after(xs[0], xs[1], dtype)
    y = _FLOAT[fn](*xs)
    # The dtypes named here lack a sign, a zero or a NaN that the result may need.
    whole = dtype not in ("float8_e8m0fnu", "float4_e2m1fn", *ir.FNUZ)
    if fn == "is_finite" or (fn in EXACT and whole):
        return y
    return round_to_dtype(y, dtype)


def _float_max(a: X, b: X) -> X:
    # On x86 the sign of zero is given up for `maxps`, which gives b when either is NaN; a NaN in a is passed on. (If
    # this were spelled as two selects, LLVM would merge their conditions and no longer see the maximum.)
    flags = "" if a.isa.arch == "aarch64" else "nsz"
    return a.new(a.code.intrinsic("maximum", a.ty, a.v, b.v, flags=flags))


def _float_min(a: X, b: X) -> X:
    flags = "" if a.isa.arch == "aarch64" else "nsz"
    return a.new(a.code.intrinsic("minimum", a.ty, a.v, b.v, flags=flags))


def _float_sign(x: X) -> X:
    return (x > 0.0).where(1.0, (x < 0.0).where(-1.0, x))


def _round_away(x: X) -> X:
    a = x.abs()
    t = floor(a)
    return ((a - t) >= 0.5).where(t + 1.0, t).copysign(x)


def _float_rem(x: X, y: X) -> X:
    """C's fmod, exact. A quotient of fewer bits than a mantissa has is rounded to the right integer or to the next one,
    and what an integer times y leaves of x is a number of x's type; other lanes (rare) go the long way."""
    if not has_fma(x.isa):
        return _long_rem(x, y)
    a, b = x.abs(), y.abs()
    quotient = a / b
    near = (quotient < 2.0**x.fmt.mantissa) & (b < float("inf"))
    r = (-floor(quotient)).fma(b, a)
    r = (r < 0.0).where(r + b, r).copysign(x)
    slot = x.code.var(r.ty, r.v)
    with x.code.when((~near).any()):
        x.code.store(near.where(r, _long_rem(x, y)).v, slot)
    return x.new(x.code.load(r.ty, slot))


def _long_rem(x: X, y: X) -> X:
    """C's fmod, exact: the mantissas divided as integers, the exponent difference worked off in steps."""
    fmt, code = x.fmt, x.code
    mx, ex = _mantissa(x.abs())
    my, ey = _mantissa(y.abs())
    my = my.eq(0).where(1, my)
    n = ex - ey
    step = 63 - fmt.mantissa
    r = mx.binary("urem", my)
    rest, left = code.var(r.ty, r.v), code.var(n.ty, n.v)
    head, body, done = code.label("head"), code.label("body"), code.label("done")
    code.br(head)
    code.place(head)
    r, k = x.new(code.load(r.ty, rest)), x.new(code.load(n.ty, left))
    code.cond_br((k > 0).any(), body, done)
    code.place(body)
    shift = (k > step).where(step, (k > 0).where(k, 0))
    code.store((r << shift).binary("urem", my).v, rest)
    code.store((k - shift).v, left)
    code.br(head)
    code.place(done)
    if x.scalar == "float":
        r, ey = r.cast("trunc", "i32"), ey.cast("trunc", "i32")
    y0 = r.cast("sitofp", x.scalar)
    power = ey - (fmt.bias + fmt.mantissa)
    half = power >> 1
    y0 = (y0 * pow2(half) * pow2(power - half)).copysign(x)
    y0 = (x.abs() < y.abs()).where(x, y0)
    bad = x.abs().eq(float("inf")) | y.eq(0.0) | x.is_nan() | y.is_nan()
    return bad.where(float("nan"), y0)


def _mantissa(a: X) -> tuple[X, X]:
    """A non-negative float as mantissa * 2^(exponent - bias - mantissa bits), both i64."""
    fmt = a.fmt
    bits = a.bits().cast("zext", "i64")
    exponent = bits.lshr(fmt.mantissa)
    fraction = bits & ((1 << fmt.mantissa) - 1)
    subnormal = exponent.eq(0)
    return subnormal.where(fraction, fraction | (1 << fmt.mantissa)), subnormal.where(1, exponent)


def _next_after(x: X, y: X, dtype: str) -> X:
    """The neighbour of x towards y, by counting in the bits of the dtype itself."""
    small = dtype in SMALL_FLOATS
    if small:
        bits = x.new(to_memory(x.code, x.isa, x.v, dtype))
        one = bits.const(1)
    else:
        bits = x.bits()
        one = bits.const(1)
    sign = 1 << (SMALL_FLOATS[dtype].sign_bit if small else x.fmt.bits - 1)
    away = ((x < y) & (x > 0.0)) | ((y < x) & (x < 0.0))
    moved = away.where(bits + 1, bits - 1)
    moved = x.eq(0.0).where((y < 0.0).where(one | sign, one), moved)
    if dtype in ir.FNUZ:
        moved = moved.eq(sign).where(0, moved)  # behind the least negative number comes 0
    z = x.new(from_memory(x.code, x.isa, moved.v, dtype)) if small else moved.as_float()
    z = x.eq(y).where(y, z)
    return (x.is_nan() | y.is_nan()).where(float("nan"), z)


_FLOAT: dict[str, Callable[..., X]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "rem": _float_rem,
    "max": _float_max,
    "min": _float_min,
    "neg": lambda a: -a,
    "abs": lambda a: a.abs(),
    "sign": _float_sign,
    "square": lambda a: a * a,
    "fma": lambda a, b, c: a.fma(b, c),
    "round": round_even,
    "round_away": _round_away,
    "floor": floor,
    "ceil": ceil,
    "is_finite": lambda a: a.abs() < float("inf"),
    "clamp": lambda lo, x, hi: _float_min(_float_max(lo, x), hi),
    "nextafter": _next_after,
    **cpu_math.UNARY,
    **cpu_math.BINARY,
}


# -- integers ---------------------------------------------------------------------------------------------------------
def _divide(dtype: str, a: X, b: X) -> tuple[X, X, X]:
    """(quotient, remainder, b == 0), truncating; the divisor is guarded, so that nothing traps."""
    zero = b.eq(0)
    signed = is_signed(dtype)
    constant = not b.v.name.startswith("%")  # LLVM turns divisions by constants into multiplications
    guard = zero
    if signed:
        overflow = a.eq(-(1 << (int(a.scalar[1:]) - 1))) & b.eq(-1)
        guard = guard | overflow
    b = guard.where(1, b)
    bits = int(a.scalar[1:])
    if a.lanes == 1 or bits == 64 or constant:
        q = a.binary("sdiv" if signed else "udiv", b)
    else:
        # LLVM divides vectors lane by lane; a float of more than twice the bits has the exact truncated quotient.
        convert, back = ("sitofp", "fptosi") if signed or bits < 32 else ("uitofp", "fptoui")
        num, den = (_widen(v, signed).cast(convert, "float" if bits <= 16 else "double") for v in (a, b))
        q = (num / den).cast(back, "i32")
        q = q if bits == 32 else q.cast("trunc", a.scalar)
    return q, a - q * b, zero


def _widen(a: X, signed: bool) -> X:
    return a if a.scalar == "i32" else a.cast("sext" if signed else "zext", "i32")


def _int_div(dtype: str, a: X, b: X) -> X:
    q, _, zero = _divide(dtype, a, b)
    return zero.where(-1, q)


def _int_rem(dtype: str, a: X, b: X) -> X:
    _, r, zero = _divide(dtype, a, b)
    return zero.where(a, r)


def _int_max(dtype: str, a: X, b: X) -> X:
    return a.cmp("sgt" if is_signed(dtype) else "ugt", b).where(a, b)


def _int_min(dtype: str, a: X, b: X) -> X:
    return a.cmp("slt" if is_signed(dtype) else "ult", b).where(a, b)


def _int_abs(dtype: str, a: X) -> X:
    return (a < 0).where(-a, a) if is_signed(dtype) else a


def _int_sign(dtype: str, a: X) -> X:
    one = a.const(1)
    return (a > 0).where(one, (a < 0).where(one.const(-1), 0)) if is_signed(dtype) else a.ne(0).where(one, 0)


def _shift_left(dtype: str, a: X, s: X) -> X:
    fits = s.ult(INT_BITS[dtype])
    return fits.where(a << fits.where(s, 0), 0)


def _shift_right(dtype: str, a: X, s: X) -> X:
    last = INT_BITS[dtype] - 1
    s = s.ult(last).where(s, last)
    return a >> s


def _own_bits(dtype: str, a: X) -> X:
    """An integer whose register has zeros, instead of copies of the sign, in the bits beyond the dtype's width."""
    return a & (1 << INT_BITS[dtype]) - 1 if is_narrow(dtype) else a


def _shift_right_logical(dtype: str, a: X, s: X) -> X:
    fits = s.ult(INT_BITS[dtype])
    a = _own_bits(dtype, a)
    return fits.where(a.lshr(fits.where(s, 0)), 0)


def _popcount(dtype: str, a: X) -> X:
    a = _own_bits(dtype, a)
    return a.new(a.code.intrinsic("ctpop", a.ty, a.v))


def _count_leading_zeros(dtype: str, a: X) -> X:
    a = _own_bits(dtype, a)
    n = a.new(a.code.intrinsic("ctlz", a.ty, a.v, Val("i1", "false"), suffix=intrinsic_suffix(a.ty)))
    return n - (8 - INT_BITS[dtype]) if is_narrow(dtype) else n


def _multiply_high(dtype: str, a: X, b: X) -> X:
    """The upper half of the double-width product, 8 to 32 bits."""
    bits = INT_BITS[dtype]
    extend, wide = "sext" if is_signed(dtype) else "zext", f"i{2 * bits}"
    return (a.cast(extend, wide) * b.cast(extend, wide)).lshr(bits).cast("trunc", a.scalar)


_INT: dict[str, Callable[..., X]] = {
    "add": lambda _, a, b: a + b,
    "sub": lambda _, a, b: a - b,
    "mul": lambda _, a, b: a * b,
    "div": _int_div,
    "rem": _int_rem,
    "max": _int_max,
    "min": _int_min,
    "neg": lambda _, a: -a,
    "abs": _int_abs,
    "sign": _int_sign,
    "square": lambda _, a: a * a,
    "and": lambda _, a, b: a & b,
    "or": lambda _, a, b: a | b,
    "xor": lambda _, a, b: a ^ b,
    "not": lambda _, a: ~a,
    "shl": _shift_left,
    "shr": lambda d, a, s: (_shift_right if is_signed(d) else _shift_right_unsigned)(d, a, s),
    "shr_logical": _shift_right_logical,
    "popcount": _popcount,
    "clz": _count_leading_zeros,
    "mulhi": _multiply_high,
    "clamp": lambda d, lo, x, hi: _int_min(d, _int_max(d, lo, x), hi),
}


def _shift_right_unsigned(dtype: str, a: X, s: X) -> X:
    return _shift_right_logical(dtype, a, s)


# -- bool -------------------------------------------------------------------------------------------------------------
_BOOL: dict[str, Callable[..., X]] = {
    "add": lambda a, b: a | b,
    "mul": lambda a, b: a & b,
    "max": lambda a, b: a | b,
    "min": lambda a, b: a & b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "clamp": lambda lo, x, hi: (lo | x) & hi,
}
