"""The table of math functions of the CPU back end, and the error each may have.

Every function takes and returns `X` values of type `float` or `double`; f16, bf16 and f8 are computed in float.
"""

from __future__ import annotations

from collections.abc import Callable

from . import math_exp, math_special, math_trig
from .math_expr import X

UNARY: dict[str, Callable[[X], X]] = {
    "exp": math_exp.exp,
    "exp2": math_exp.exp2,
    "expm1": math_exp.expm1,
    "log": math_exp.log,
    "log2": math_exp.log2,
    "log1p": math_exp.log1p,
    "sqrt": lambda x: x.sqrt(),
    "rsqrt": math_special.rsqrt,
    "cbrt": math_exp.cbrt,
    "sin": math_trig.sin,
    "cos": math_trig.cos,
    "tan": math_trig.tan,
    "asin": math_trig.asin,
    "acos": math_trig.acos,
    "atan": math_trig.atan,
    "sinh": math_exp.sinh,
    "cosh": math_exp.cosh,
    "tanh": math_exp.tanh,
    "asinh": math_exp.asinh,
    "acosh": math_exp.acosh,
    "atanh": math_exp.atanh,
    "logistic": math_exp.logistic,
    "erf": math_special.erf,
    "erfc": math_special.erfc,
    "erf_inv": math_special.erf_inv,
    "lgamma": math_special.lgamma,
    "digamma": math_special.digamma,
}

BINARY: dict[str, Callable[[X, X], X]] = {"pow": math_exp.pow_, "atan2": math_trig.atan2}

# Largest error, in units in the last place, of float32 and float64 results on every instruction set; tested.
# float64 exceptions: lgamma within 8 and digamma within 24 for positive arguments; for negative ones both within 2e-14
# (relative or absolute, whichever is larger), for their zeros there are not resolved.
ULP_BOUNDS: dict[str, float] = {
    "exp": 1.5,
    "exp2": 1.5,
    "expm1": 2.0,
    "log": 1.0,
    "log2": 2.0,
    "log1p": 2.0,
    "sqrt": 0.5,
    "rsqrt": 1.5,
    "cbrt": 1.0,
    "sin": 2.5,
    "cos": 2.5,
    "tan": 3.5,
    "asin": 3.0,
    "acos": 1.5,
    "atan": 3.0,
    "sinh": 3.0,
    "cosh": 2.0,
    "tanh": 3.0,
    "asinh": 3.0,
    "acosh": 3.0,
    "atanh": 3.0,
    "logistic": 2.5,
    "erf": 2.0,
    "erfc": 4.0,
    "erf_inv": 2.5,
    "lgamma": 4.0,
    "digamma": 4.0,
    "pow": 1.5,
    "atan2": 2.5,
}
