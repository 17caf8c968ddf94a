"""Error functions, the gamma family and reciprocal square root, for float and double vectors."""

from __future__ import annotations

import math

from .. import digamma as psi
from . import math_tables as tables
from .math_exp import INF, NAN, exp_parts, log
from .math_expr import X, floor, horner, round_even, scale, two_product
from .math_trig import PI, sin_cos_kernel

TWO_BY_SQRT_PI = 2.0 / math.sqrt(math.pi)
ERFCX_CENTRE = {32: 2.0, 64: 3.0}
ERFC_ZERO = {32: 10.3, 64: 27.5}  # from here on erfc rounds to zero

# Coefficients of 1/x, 1/x^3, ... in Stirling's series: B(2k) / (2k (2k - 1)).
STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156, -3617 / 122400)
HALF_LOG_2PI = 0.91893853320467274178


def _erf_small(x: X) -> X:
    """erf for |x| <= 1."""
    return x + x * horner(x * x, tables.ERF[x.fmt.bits])


def erf(x: X) -> X:
    a = x.abs()
    if x.fmt.bits == 64:
        large = 1.0 - _erfc_positive(a.at_most(6.0))
    else:
        large = 1.0 - scale(*exp_parts(horner(a.at_most(4.05), tables.LOGERFC[32]), 0.0))
    return (a < 1.0).where(_erf_small(x), large.copysign(x))


def _erfc_positive(a: X) -> X:
    """erfc for 1/2 <= a: exp(-a^2) times a polynomial in (a - K) / (a + K), with a^2 in two words."""
    bits = a.fmt.bits
    a = a.at_most(ERFC_ZERO[bits])
    k = ERFCX_CENTRE[bits]
    g = horner((a - k) / (a + k), tables.ERFCX[bits]) / (a + a + 1.0)
    p, q = two_product(a, a)
    y, n, t = exp_parts(-p, -q)
    return scale(y * g, n, t)


def erfc(x: X) -> X:
    a = x.abs()
    tail = _erfc_positive(a)
    return (a < 0.5).where(1.0 - _erf_small(x), (x < 0.0).where(2.0 - tail, tail))


def erf_inv(x: X) -> X:
    if x.scalar == "float":
        y = _erf_inv_start(x.to("double")).to("float")
    else:
        y = _erf_inv_start(x)
        a, b = x.abs(), y.abs()
        # One Newton step on erf, or on erfc where erf is near 1.
        error = (a < 0.6).where(_erf_small(b) - a, (1.0 - a) - _erfc_positive(b))
        p, q = two_product(b, b)
        slope = scale(*exp_parts((-p).at_least(-700.0), -q)) * TWO_BY_SQRT_PI
        y = (b - error / slope).copysign(x)
    a = x.abs()
    y = a.eq(1.0).where(y.const(INF).copysign(x), y)
    y = x.eq(0.0).where(x, y)
    return (a > 1.0).where(NAN, x.is_nan().where(x, y))


def _erf_inv_start(x: X) -> X:
    """erf_inv to a relative error of 1e-9: x times a polynomial in w = -log(1 - x^2), or in sqrt(w) for the tail."""
    a = x.abs()
    w = -log((1.0 - a) * (1.0 + a))
    w = w.at_most(40.0).at_least(0.0)
    return x * (w < 6.25).where(horner(w - 3.0, tables.ERFINV_C[64]), horner(w.sqrt() - 4.0, tables.ERFINV_T[64]))


def rsqrt(x: X) -> X:
    return 1.0 / x.sqrt()


# -- gamma family, in double for both widths --------------------------------------------------------------------------
def _sin_cos_pi(x: X) -> tuple[X, X]:
    """sin and cos of pi x, both up to the common sign (-1)^round(x)."""
    f = x - round_even(x)
    a = f.abs()
    outer = a > 0.25
    r = outer.where(0.5 - a, a)
    s, c = sin_cos_kernel(r * PI, r * 1.2246467991473532e-16)
    return outer.where(c, s).copysign(f), outer.where(s, c)


def lgamma(x: X) -> X:
    if x.scalar == "float":
        return lgamma(x.to("double")).to("float")
    reflect = x < 0.5
    z = reflect.where(1.0 - x, x)
    # Below 6.5: lgamma(2 + u) = u P(u) with |u| <= 1/2, and z = 2 + u + n by the recurrence; above: Stirling's series
    # from 10 on. Either way at most four factors, whose logarithm is added or taken off.
    near = z < 6.5
    n = floor(z - 1.5)
    u = near.where(z - (n + 2.0), 0.0)
    base = near.where(u + 2.0, z)
    steps = near.where(n, (z < 10.0).where(z.const(4.0), 0.0))
    product = z.const(1.0)
    for k in range(4):
        product = (steps > float(k)).where(product * (base + float(k)), product)
    product = (steps < 0.0).where(z, product)
    log_product = log(product)
    high = near.where(10.0, z + steps)
    inverse = 1.0 / high
    series = inverse * horner(inverse * inverse, STIRLING)
    stirling = (high - 0.5) * (log(high) - 1.0) + (HALF_LOG_2PI - 0.5) + series - log_product
    by_fit = u * horner(u, tables.LGAMMA[64]) + (steps < 0.0).where(-log_product, log_product)
    y = near.where(by_fit, stirling)
    s, _ = _sin_cos_pi(x)
    tiny = x.abs() < 2.0**-1000  # for such x, sin(pi x) = pi x loses bits to the subnormals
    y = reflect.where(tiny.where(x.const(0.0), math.log(math.pi)) - log(tiny.where(x, s).abs()) - y, y)
    return x.abs().eq(INF).where(INF, y)


def digamma(x: X) -> X:
    if x.scalar == "float":
        return digamma(x.to("double")).to("float")
    reflect = x < 0.5
    z = reflect.where(1.0 - x, x)
    # Between 1 and 2 a polynomial times the distance to the root, which keeps the relative accuracy there.
    middle = (z >= 1.0) & (z <= 2.0)
    by_fit = ((z - psi.ROOT[0]) - psi.ROOT[1]) * horner(z - 1.5, psi.MIDDLE)
    # Elsewhere take the series at z + 10, less the sum of 1 / (z + k) as one fraction.
    small = z < float(psi.SHIFT)
    num, den = z.const(1.0), z
    for k in range(1, psi.SHIFT):
        step = z + float(k)
        num, den = num * step + den, den * step
    shift = small.where(num / den, 0.0)
    z = small.where(z + float(psi.SHIFT), z)
    inverse = 1.0 / z
    square = inverse * inverse
    y = log(z) - 0.5 * inverse - square * horner(square, psi.SERIES) - shift
    y = middle.where(by_fit, y)
    s, c = _sin_cos_pi(x)
    y = reflect.where(y - PI * (c / s), y)
    pole = (x < 0.5) & s.eq(0.0)
    return x.eq(0.0).where(x.const(INF).copysign(-x), pole.where(NAN, y))
