"""digamma, which no vendor has: the recurrence, an asymptotic series, and reflection for negative arguments.

Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 6.3.5, 6.3.7 and 6.3.18.
"""

from __future__ import annotations

import math

from jtile.lowering.triton.math_expr import Formula, X, horner

# Of 1/x^2, 1/x^4, ...: B(2k) / (2k).
SERIES = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12, -3617 / 8160)
SHIFT = 10  # the argument from which the series is used
ROOT = (float.fromhex("0x1.762d86356be3fp+0"), float.fromhex("0x1.b86a722197829p-54"))  # of digamma, in two words
# digamma(x) / (x - ROOT) as a polynomial in x - 3/2, for x from 1 to 2; its error is 1.4e-17.
MIDDLE = (
    0.9510558760318328932, -0.4236274212814607058, 0.2405424842407738995, -0.1484049230538497879,
    0.09498872445498365892, -0.06192213327817977623, 0.0407608338102334965, -0.02697579655310841057,
    0.01790725249659973765, -0.01190822242978821126, 0.007926943789685051116, -0.005279906829281406708,
    0.003519014214410111162, -0.002345744420565322087, 0.001556587672402181731, -0.001035164788877504666,
    0.0007234768265550733193, -0.0004900600188349981691, 0.0002269498692380313052, -0.0001375001025654785631,
    0.0002599118665233225094, -0.0001837857729487465746,
)  # fmt: skip


def digamma(x: X, vendor: Formula) -> X:
    """In f64 for both widths; `vendor(name, ...)` gives functions of the device library. Poles give NaN, but zero an
    infinity of the sign that is not its own."""
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
