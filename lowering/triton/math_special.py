"""Functions by formulas of our own: digamma, which no vendor has; erf and erfc, where the code of vendors branches.

digamma: the recurrence, an asymptotic series, and reflection for negative arguments. Source: Abramowitz and Stegun,
Handbook of Mathematical Functions, 6.3.5, 6.3.7 and 6.3.18.
"""

from __future__ import annotations

import math

from ..digamma import MIDDLE, ROOT, SERIES, SHIFT
from .math_expr import Formula, X, horner

# Minimax polynomials, fitted to math.erf: (erf(x) - x) / x in x^2 below NEAR, log2(erfc(x)) in x from there to FAR;
# erfc(x) exp(x^2) (1 + x) in (x - 2) / (x + 2) from 1/2 on, to where it leaves float32.
NEAR, FAR = 0.9375, 4.0
ERF_NEAR = (0.12837917, -0.37612632, 0.1128368, -0.026858497, 0.0051988298, -0.00081180735, 8.2674553e-05)
ERF_FAR = (
    0.00025865462, -1.6295774, -0.91366243, -0.15628533, 0.03628492, -0.006034706, 0.00063032465, -3.073821e-05,
)  # fmt: skip
ERFC = (
    0.76618703, -0.2599748, 0.037813697, 0.04253506, -0.025239246, -0.00050413603, 0.0039051558, 8.4155163e-05,
    -0.00060428484, -3.5039152e-05,
)  # fmt: skip
# erfc(x) exp(x^2) in u = 1 / (1 + SHORT x), without a constant term, for 0 <= x <= 9.4: relative error 7e-6.
SHORT = 0.425
ERFC_SHORT = (0.24059223709, 0.22765237010, 0.28938180777, -0.03445696517, 0.43201760821, -0.15518011395)
LOG2_E, LOG2_E_REST = 1.44269502162933349609375, 1.925963033500011e-08  # log2(e) as a float32, and the rest


def _near(x: X) -> X:
    return horner(x * x, ERF_NEAR).fma(x, x)


def erf(x: X, exp2: Formula) -> X:
    """erf in f32, to 1.7 ulp, without branches: with branches, a kernel that computes it for a hundred elements a
    thread would compile for ten seconds."""
    a, near = x.abs(), _near(x)
    far = 1.0 - exp2(horner(a.binary("arith.minimumf", FAR), ERF_FAR))
    return a.lt(NEAR).where(near, far.copysign(x))


def erfc(x: X, exp2: Formula) -> X:
    """erfc in f32, to 7 ulp, without branches. exp(-x^2) comes from x^2 in two parts, both times log2(e) in two parts;
    subnormal results are made of larger ones."""
    a = x.abs().binary("arith.minimumf", 10.1)
    square = a * a
    high = square.fma(-LOG2_E, 0.0)  # as a product, LLVM fuses it with `high + 64.0`, and `low` counts twice
    low = square.fma(-LOG2_E, -high)
    low = a.fma(a, -square).fma(-LOG2_E, square.fma(-LOG2_E_REST, low))
    tiny = high.lt(-100.0)
    y = exp2(tiny.where(high + 64.0, high)) * (horner((a - 2.0) / (a + 2.0), ERFC) / (a + 1.0))
    y = (y * math.log(2.0)).fma(low, y)
    y = tiny.where(y * 2.0**-64, y)
    return x.abs().lt(0.5).where(1.0 - _near(x), x.lt(0.0).where(2.0 - y, y))


def short_erfc(x: X, exp2: Formula, reciprocal: Formula) -> X:
    """erfc in f32 to 2^-16, for results that are rounded to 16 bits afterwards. The code of a product's epilogue has it
    for every element of a thread, and instructions that a loop does not repeat come from memory."""
    a = x.abs()
    u = reciprocal(a.fma(SHORT, 1.0))
    y = exp2(a * -LOG2_E * a) * (horner(u, ERFC_SHORT) * u)
    return x.lt(0.0).where(2.0 - y, y)


# tanh(x) / x - 1 is x^2 times this polynomial of x^2 for x below 0.3: a fit by least squares.
TANH_SHORT = (-0.33333258, 0.13323271, -0.0511344)


def short_tanh(x: X, beside_one: X) -> X:
    """tanh in f32 to 2^-20, for results that are rounded to 16 bits afterwards; `beside_one`: the function to an
    absolute error of 2^-22. The one of the libraries takes eight times as long in the epilogue of a product."""
    square = x * x
    near = horner(square, TANH_SHORT).fma(square, 1.0) * x  # -0 for -0
    return x.abs().lt(0.3).where(near, beside_one)


def digamma(x: X, vendor: Formula) -> X:
    """digamma, computed in f64 for both widths; `vendor(name, ...)` gives functions of the device library. Poles give
    NaN, but a zero gives an infinity of the opposite sign."""
    if x.elem == "f32":
        return digamma(x.to_float("f64"), vendor).to_float("f32")
    reflect = x.lt(0.5)
    z = reflect.where(1.0 - x, x)
    y = (z.ge(1.0) & z.le(2.0)).where(_middle(z), _series(z, vendor))
    # digamma(x) = digamma(1 - x) - pi / tan(pi x)
    f = x - vendor("rint", x)
    s, c = vendor("sinpi", f), vendor("cospi", f)
    y = reflect.where(y - math.pi * (c / s), y)
    pole = reflect & s.eq(0.0)
    infinity = x.const(math.inf).copysign(-x)
    return x.eq(0.0).where(infinity, pole.where(math.nan, y))


def _middle(z: X) -> X:
    return ((z - ROOT[0]) - ROOT[1]) * horner(z - 1.5, MIDDLE)


def _series(z: X, vendor: Formula) -> X:
    """The series at z, or for small z at z + SHIFT less the sum of 1 / (z + k), which is taken as one fraction."""
    small = z.lt(float(SHIFT))
    num, den = z.const(1.0), z
    for k in range(1, SHIFT):
        step = z + float(k)
        num, den = num.fma(step, den), den * step
    high = small.where(z + float(SHIFT), z)
    inverse = 1.0 / high
    square = inverse * inverse
    y = vendor("log", high) - 0.5 * inverse - square * horner(square, SERIES)
    return y - small.where(num / den, 0.0)
