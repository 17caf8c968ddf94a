"""Exponentials, logarithms, powers and the hyperbolic functions, for float and double vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import math_tables as tables
from .math_expr import (
    X,
    estrin,
    exponent,
    fast_two_sum,
    floor,
    has_lookup,
    horner,
    lookup,
    magic_int,
    magic_round,
    mantissa,
    pow2,
    scale,
    splits,
    two_product,
    two_sum,
)

INF, NAN = float("inf"), float("nan")
LOG2E = float.fromhex("0x1.71547652b82fep+0")
LOG2E_LO = float.fromhex("0x1.777d0ffda0d24p-56")
LN2 = float.fromhex("0x1.62e42fefa39efp-1")
LN2_LO = float.fromhex("0x1.abc9e3b39803fp-56")

# ln2 in two parts; the first has so many zero bits at its end that a product with any exponent is exact.
LN2_PARTS = {
    32: (float.fromhex("0x1.62e4p-1"), float.fromhex("0x1.7f7d1cp-20")),
    64: (float.fromhex("0x1.62e42fefa38p-1"), float.fromhex("0x1.ef35793c76730p-45")),
}
# ln2 as a float, and what is missing: a fused multiply-add rounds no product, so that the first may have all its bits.
LN2_FLOAT, LN2_LESS = float.fromhex("0x1.62e43p-1"), float.fromhex("-0x1.05c610ca86c39p-29")
SIXTEENTHS = 1.5 * 2.0**19  # a sum with it is a multiple of 1/16, whose fraction is in its four low bits
# Below the first number of a pair every result is zero, above the second infinite.
EXP_RANGE = {32: (-104.0, 89.0), 64: (-746.0, 710.0)}
EXP2_RANGE = {32: (-151.0, 129.0), 64: (-1076.0, 1025.0)}
# A subnormal is multiplied by 2 to this power before its exponent is split off for a logarithm.
SUBNORMAL_SHIFT = {32: 24, 64: 54}
SQRT_HALF = 0.70710678118654752


def _reduce(x: X) -> tuple[X, X, X]:
    """x = n ln2 + r with |r| <= ln2/2; gives (r, n, t), (n, t) as `magic_round` does."""
    hi, lo = LN2_PARTS[x.fmt.bits]
    n, t = _round_product(x, LOG2E)
    r = (-n).fma(hi, x)
    return (-n).fma(lo, r), n, t


def _round_product(x: X, factor: float) -> tuple[X, X]:
    magic = 1.5 * 2.0**x.fmt.mantissa
    t = x.fma(factor, magic)
    return t - magic, t


def _exp_reduced(r: X) -> X:
    return (r * r).fma(horner(r, tables.EXP[r.fmt.bits]), r) + 1.0


def _clamp_exp(x: X) -> X:
    low, high = EXP_RANGE[x.fmt.bits]
    return x.at_most(high).at_least(low)


def exp(x: X) -> X:
    low, high = EXP_RANGE[x.fmt.bits]
    gone = x < low  # masks are full of what underflows
    x = x.at_most(high)
    if has_lookup(x):
        n, roots = _sixteenths(x.fma(LOG2E, SIXTEENTHS))
        r = (-n).fma(LN2_LESS, (-n).fma(LN2_FLOAT, x))
        near, square = tables.EXP_NEAR
        return scale(roots.fma((r * r).fma(r.fma(square, near), r), roots), n, magic_round(floor(n))[1], gone)
    r, n, t = _reduce(x)
    return scale(_exp_reduced(r), n, t, gone)


def _sixteenths(t: X) -> tuple[X, X]:
    """(n, 2^(n - floor(n))) of the sum t of `SIXTEENTHS` and a float: n is the float, rounded to sixteenths."""
    return t - SIXTEENTHS, lookup(tables.ROOTS, t.bits())


def exp_parts(x: X, lo: X | float) -> tuple[X, X, X]:
    """exp(x + lo) = y 2^n for a small correction lo and x in the range of `EXP_RANGE`: (y, n, t), for `scale`."""
    r, n, t = _reduce(x)
    return _exp_reduced(r + lo), n, t


def exp2(x: X) -> X:
    low, high = EXP2_RANGE[x.fmt.bits]
    gone = x < low  # as in `exp`
    x = x.at_most(high)
    if has_lookup(x):
        n, roots = _sixteenths(x + SIXTEENTHS)
        r = x - n
        return scale(roots.fma(r * horner(r, tables.EXP2_NEAR), roots), n, magic_round(floor(n))[1], gone)
    n, t = magic_round(x)
    r = x - n
    return scale(r.fma(horner(r, tables.EXP2[x.fmt.bits]), 1.0), n, t, gone)


def _expm1(x: X) -> X:
    """expm1 of x below the overflow of exp; a zero may lose its sign."""
    r, _, t = _reduce(x)
    p = (r * r).fma(horner(r, tables.EXP[x.fmt.bits]), r)
    # 2^n (p + 1) - 1 = 2 (2^(n-1) p + (2^(n-1) - 1/2)): n = 128 would overflow in the direct form.
    half = pow2(magic_int(t) - 1)
    y = half.fma(p, half - 0.5)
    return y + y


def expm1(x: X) -> X:
    low = -18.0 if x.fmt.bits == 32 else -38.0  # there the result rounds to -1
    clamped = x.at_most(EXP_RANGE[x.fmt.bits][1]).at_least(low)
    return _expm1(clamped).copysign(x)


def tanh(x: X) -> X:
    """-t / (t + 2) with t = expm1(-2 |x|): one polynomial, exact near zero, no overflow."""
    a = x.abs()
    t = _expm1((a * -2.0).at_least(-20.0 if x.fmt.bits == 32 else -40.0))
    return (t / (t + 2.0)).abs().copysign(x)


def logistic(x: X) -> X:
    """1 / (1 + e^-x), from e^-|x| so that the small side keeps its relative accuracy."""
    z = exp(-x.abs())
    return (x < 0.0).where(z, 1.0) / (z + 1.0)


# -- logarithms -------------------------------------------------------------------------------------------------------
def _split_exponent(x: X, least: float = SQRT_HALF) -> tuple[X, X]:
    """A positive normal x = 2^e (1 + f) with least <= 1 + f < 2 least; gives (f, e as a float)."""
    fmt = x.fmt
    base = x.const(least).bits()
    t = x.bits() - base
    e = t >> fmt.mantissa
    m = ((t & ((1 << fmt.mantissa) - 1)) + base).as_float()
    return m - 1.0, _int_to_float(e)


def _int_to_float(e: X) -> X:
    """A small signed integer as the float of its width, through 32 bits: a 64-bit conversion is slow before AVX-512."""
    if e.scalar == "i32":
        return e.cast("sitofp", "float")
    return e.cast("trunc", "i32").cast("sitofp", "double")


def _normalised(x: X, least: float = SQRT_HALF) -> tuple[X, X]:
    """The parts (f, e) that `_split_exponent` gives, also for subnormal x."""
    shift = SUBNORMAL_SHIFT[x.fmt.bits]
    tiny = x < 2.0 ** (1 - x.fmt.bias)
    f, e = _split_exponent(tiny.where(x * 2.0**shift, x), least)
    return f, e - tiny.where(x.const(shift), 0.0)


def _log1p_tail(f: X, table: Sequence[float] = tables.LOGS[64]) -> X:
    """log(1 + f) - f for 1 + f in [sqrt(1/2), sqrt(2)], or where the table is for."""
    if f.fmt.bits == 32:
        z = f * f
        return z.fma(-0.5, (f * z) * horner(f, tables.LOG[32]))
    half_square = f * f * 0.5
    s = f / (f + 2.0)
    z = s * s
    return s * (half_square + z * estrin(z, table)) - half_square


def _log_specials(x: X, y: X) -> X:
    y = (x < INF).where(y, x)  # infinity and NaN
    y = x.eq(0.0).where(-INF, y)
    return (x < 0.0).where(NAN, y)


def log(x: X) -> X:
    hi, lo = LN2_PARTS[x.fmt.bits]
    if splits(x):  # instructions know subnormal numbers, and zeros and infinity have infinite exponents
        m, e = mantissa(x), exponent(x)
        e, f = (m < 1.0).where(e + 1.0, e), m - 1.0
        return e.fma(hi, f + e.fma(lo, _log1p_tail(f, tables.LOGM)))
    if x.scalar == "double":
        f, e = _normalised(x, 0.75)
        return _log_specials(x, e.fma(hi, f + e.fma(lo, _log1p_tail(f, tables.LOGM))))
    f, e = _normalised(x)
    return _log_specials(x, e.fma(hi, f + e.fma(lo, _log1p_tail(f))))


def log2(x: X) -> X:
    f, e = _normalised(x)
    tail = _log1p_tail(f)
    if x.fmt.bits == 64:
        p, q = two_product(f, f.const(LOG2E))
        s, r = two_sum(e, p)
        return _log_specials(x, s + (r + (q + (f * LOG2E_LO + tail * LOG2E))))
    hi, lo = float.fromhex("0x1.714p+0"), float.fromhex("0x1.47652ap-12")
    return _log_specials(x, e + f.fma(hi, f.fma(lo, tail * LOG2E)))


def log1p(x: X) -> X:
    """log of u = 1 + x, with the rounding error of that sum put back behind the exponent split."""
    hi, lo = LN2_PARTS[x.fmt.bits]
    u = x + 1.0
    error = (x < 1.0).where(x - (u - 1.0), 1.0 - (u - x))
    f, e = _split_exponent(u)
    # 2^-e by bits; for a huge u the correction does not matter, and 2^-127 would not be a normal number.
    inverse = pow2(-_float_to_small_int(e.at_most(float(x.fmt.bias - 1))))
    f = f + error * inverse
    near = (x > SQRT_HALF - 1.0) & (x < 0.41421356)
    f, e = near.where(x, f), near.where(0.0, e)
    y = e.fma(hi, f + e.fma(lo, _log1p_tail(f)))
    y = (x < INF).where(y, x).copysign(x)
    y = x.eq(-1.0).where(-INF, y)
    return (x < -1.0).where(NAN, y)


def _float_to_small_int(e: X) -> X:
    """An integral float back to the integer of its width; |e| is small, so that the low bits of a magic sum hold it."""
    _, t = magic_round(e)
    return magic_int(t)


# -- powers -----------------------------------------------------------------------------------------------------------
def _log_double_word(x: X) -> tuple[X, X]:
    """log of a positive double as hi + lo, relative error about 2^-64: what x^y for a large result needs."""
    f, e = _normalised(x)
    # s = f / (2 + f) in two words.
    d, d_lo = fast_two_sum(f.const(2.0), f)
    s = f / d
    p, q = two_product(s, d)
    s_lo = ((f - p) - q - s * d_lo) / d
    # log(1 + f) = 2 s + 2/3 s^3 + s^5 R(s^2); the cubic term in two words too.
    z, z_lo = two_product(s, s)
    z_lo = z_lo + 2.0 * s * s_lo
    cube, cube_lo = two_product(z, s)
    cube_lo = cube_lo + z * s_lo + z_lo * s
    third, third_lo = two_product(cube, cube.const(2.0 / 3.0))
    third_lo = third_lo + cube_lo * (2.0 / 3.0) + cube * 3.700743415417188e-17
    tail = z * z * s * horner(z, tables.LOGT[64])
    hi, lo = two_product(e, e.const(LN2))
    lo = lo + e * LN2_LO
    hi, err = two_sum(hi, 2.0 * s)
    hi, err2 = two_sum(hi, third)
    return fast_two_sum(hi, err + err2 + (lo + 2.0 * s_lo + third_lo + tail))


def pow_(x: X, y: X) -> X:
    """x^y with C's special cases; floats are computed in double."""
    if x.scalar == "float":
        return pow_(x.to("double"), y.to("double")).to("float")
    a = x.abs()
    hi, lo = _log_double_word(a)
    p, q = two_product(hi, y)
    q = q + lo * y
    representable = p.abs() < 1000.0  # beyond, the clamp decides the result, and the error term must not change it
    r = scale(*exp_parts(_clamp_exp(p), representable.where(q, 0.0)))
    half = y * 0.5
    integer, odd = floor(y).eq(y), floor(half).ne(half)
    odd = odd & integer
    y_inf = y.abs().eq(INF)
    # Where |x| is 0 or infinite, or |y| infinite, the result is a limit that the signs choose.
    grows = (a > 1.0).where(y, -y) > 0.0
    extreme = a.eq(0.0) | a.eq(INF) | y_inf
    r = extreme.where(grows.where(x.const(INF), 0.0), r)
    negative = (x.bits() < 0) & odd & ~y_inf
    r = negative.where(-r, r)
    r = ((x < 0.0) & ~integer & ~a.eq(INF)).where(NAN, r)
    r = (a.eq(1.0) & (y_inf | (x > 0.0))).where(1.0, r)
    r = (x.is_nan() | y.is_nan()).where(NAN, r)
    return (y.eq(0.0) | x.eq(1.0)).where(1.0, r)


def odd_in_double(fn: Callable[[X], X], x: X) -> X:
    """An odd function of a float, by way of double.

    The sign is put back on the float: LLVM moves a later rounding to half past a copysign, and would then round the
    double of the sign to half by a library call.
    """
    return fn(x.abs().to("double")).to("float").copysign(x)


def cbrt(x: X) -> X:
    if x.scalar == "float":
        return odd_in_double(cbrt, x)
    a = x.abs()
    shift = SUBNORMAL_SHIFT[64]
    tiny = a < 2.0 ** (1 - x.fmt.bias)
    a = tiny.where(a * 2.0**shift, a)
    mask = (1 << 52) - 1
    m = ((a.bits() & mask) | a.const(1.0).bits()).as_float()
    e = _int_to_float(a.bits().lshr(52) - 1023)
    # a = m 2^(3 q + r), r in 0, 1, 2.
    q = floor((e + 0.5) * (1.0 / 3.0))
    r = e - 3.0 * q
    m = m * r.eq(1.0).where(m.const(2.0), r.eq(2.0).where(m.const(4.0), 1.0))
    root = r.eq(1.0).where(m.const(2.0 ** (1 / 3)), r.eq(2.0).where(m.const(2.0 ** (2 / 3)), 1.0))
    start = ((a.bits() & mask) | a.const(1.0).bits()).as_float()
    t = horner(start, tables.CBRT[64]) * root
    # One Halley step (1e-5 -> 1e-15), then a Newton step with the residual in two words.
    c = t * t * t
    t = t * (c + 2.0 * m) / (2.0 * c + m)
    sq, sq_lo = two_product(t, t)
    p, p_lo = two_product(sq, t)
    t = t - ((p - m) + (p_lo + sq_lo * t)) / (3.0 * sq)
    q = q - tiny.where(x.const(shift / 3), 0.0)
    t = (t * pow2(_float_to_small_int(q))).copysign(x)
    return (x.eq(0.0) | x.abs().eq(INF) | x.is_nan()).where(x, t)


# -- hyperbolic functions ---------------------------------------------------------------------------------------------
def _half_exp(a: X) -> X:
    """e^a / 2 without overflow where the result has none; a >= 0."""
    a = a.at_most(EXP_RANGE[a.fmt.bits][1] + 1.0)
    r, n, t = _reduce(a)
    return scale(_exp_reduced(r), n - 1.0, t - 1.0)


def cosh(x: X) -> X:
    h = _half_exp(x.abs())
    return h + 0.25 / h


def sinh(x: X) -> X:
    a = x.abs()
    t = _expm1(a.at_most(1.0))
    small = (t + t / (t + 1.0)) * 0.5
    h = _half_exp(a)
    return (a < 1.0).where(small, h - 0.25 / h).copysign(x)


def asinh(x: X) -> X:
    if x.scalar == "float":
        return odd_in_double(asinh, x)
    a = x.abs()
    z = a * a
    big = a > 2.0**500  # the square overflows
    y = log1p(big.where(a, a + z / ((z + 1.0).sqrt() + 1.0)))
    return big.where(y + LN2, y).copysign(x)


def acosh(x: X) -> X:
    if x.scalar == "float":
        return acosh(x.to("double")).to("float")
    t = x - 1.0
    big = x > 2.0**500
    y = log1p(big.where(x, t + (t * (x + 1.0)).sqrt()))
    return (x < 1.0).where(NAN, big.where(y + LN2, y))


def atanh(x: X) -> X:
    if x.scalar == "float":
        return odd_in_double(atanh, x)
    a = x.abs()
    return (log1p(2.0 * a / (1.0 - a)) * 0.5).copysign(x)
