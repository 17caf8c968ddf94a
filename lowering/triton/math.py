"""The transcendental functions: which instruction, vendor function or formula computes each, and its error bound.

`ULP_BOUNDS` is in units in the last place of the result. Narrower floats than f32 use functions of f32 that are exact
to 2^-16 and are rounded, so that their error is that of one rounding, but for rare ties; so do f32 functions whose
results are only multiplied and then rounded to such floats (see `rounding.py`).
"""

from __future__ import annotations

from . import math_plain, math_special
from .features import Features
from .math_expr import Formula, X
from .ttir import Val

LOG2_E = 1.4426950408889634

# NVIDIA's libdevice has `__nv_tanhf` and `__nv_tanh`, AMD's ocml `__ocml_tanh_f32` and `__ocml_tanh_f64`.
VENDOR = {
    name: name
    for name in (
        "exp", "exp2", "expm1", "log", "log2", "log1p", "cbrt", "sin", "cos", "tan", "asin", "acos", "atan", "sinh",
        "cosh", "tanh", "asinh", "acosh", "atanh", "rsqrt", "erf", "erfc", "lgamma", "pow", "atan2",
    )
} | {"erf_inv": "erfinv", "rem": "fmod", "round": "rint"}  # fmt: skip

# (float32, float64), above what tests/lowering/triton/gpu_math.py measured on an H200; for lgamma and digamma away from
# their zeros; near these the error is absolute, 2e-6 and 2e-14.
ULP_BOUNDS: dict[str, tuple[float, float]] = {
    "exp": (2, 2),
    "exp2": (3, 2),
    "expm1": (2, 2),
    "log": (2, 2),
    "log2": (2, 2),
    "log1p": (2, 2),
    "sqrt": (0.5, 0.5),
    "rsqrt": (2, 2),
    "cbrt": (2, 2),
    "sin": (2, 2),
    "cos": (2, 2),
    "tan": (5, 3),
    "asin": (4, 3),
    "acos": (4, 3),
    "atan": (3, 3),
    "sinh": (4, 3),
    "cosh": (3, 2),
    "tanh": (3, 3),
    "asinh": (4, 4),
    "acosh": (5, 4),
    "atanh": (4, 4),
    "logistic": (5, 3),
    "erf": (3, 3),
    "erfc": (7, 6),
    "erf_inv": (4, 8),
    "lgamma": (8, 8),
    "digamma": (2, 24),
    "pow": (10, 3),
    "atan2": (4, 3),
}


def vendor(f: Features, name: str, *args: X) -> X:
    """A function of the vendor's device library on operands of type f32 or f64."""
    if f.npu:
        return math_plain.function(name, *args)
    x = args[0]
    if f.library == "libdevice":
        symbol = f"__nv_{name}{'f' if x.elem == 'f32' else ''}"
    else:
        symbol = f"__ocml_{name}_{x.elem}"
    operands = ", ".join(a.v.name for a in args)
    types = ", ".join(a.v.type for a in args)
    right = f'tt.extern_elementwise {operands} {{libname = "", libpath = "", pure = true, symbol = "{symbol}"}}'
    return x.new(x.code.let(f"{right} : ({types}) -> {x.v.type}", x.v.shape, x.elem))


def transcendental(f: Features, fn: str, xs: list[X], *, narrow: bool) -> X:
    """`fn` of f32 or f64 operands; `narrow`: the result is rounded to 16 bits or less: 2^-16 is exact enough."""
    if f.npu and fn in ("exp", "exp2"):
        return math_plain.exp(xs[0]) if fn == "exp" else math_plain.exp2(xs[0], narrow=narrow)
    if fn == "exp":
        return exp2(f, xs[0] * LOG2_E) if narrow else exp(f, xs[0])
    if fn == "logistic":
        return reciprocal(f, exp2(f, xs[0] * -LOG2_E) + 1.0) if narrow else _logistic(f, xs[0])
    if fn == "erfc" and narrow and xs[0].elem == "f32":
        return each(f, xs[0], lambda x: math_special.short_erfc(x, lambda y: exp2(f, y), lambda y: reciprocal(f, y)))
    if fn == "tanh" and narrow and xs[0].elem == "f32" and not f.npu:
        return math_special.short_tanh(xs[0], tanh_beside_one(f, xs[0]))
    if fn in _LONG and xs[0].elem == "f32":
        return each(f, xs[0], lambda x: _LONG[fn](x, lambda y: exp2(f, y)))
    if fn in _FORMULAS:
        return _FORMULAS[fn](f, *xs)
    return vendor(f, VENDOR[fn], *xs)


def names() -> set[str]:
    """The names of the functions that `transcendental` takes."""
    return set(VENDOR) | set(_FORMULAS) | {"logistic"}


def each(f: Features, x: X, formula: Formula) -> X:
    """A formula on one element of a tensor after the other: done step by step on all of them, a long one holds several
    numbers for each in registers."""
    code = x.code
    if not x.v.shape or f.npu:
        return formula(x)
    one, out = Val(code.name(), (), x.elem), code.new(x.v.shape, x.elem)
    code.do(f'{out.name} = "tt.map_elementwise"({x.v.name}) <{{pack = 1 : i32}}> ({{')
    code.do(f"^bb0({one.name}: {one.elem}):")
    with code.region():
        y = formula(x.new(one))
        code.do(f"tt.map_elementwise.return {y.v.name} : {y.elem}")
    code.do(f"}}) : ({x.v.type}) -> {out.type}")
    return x.new(out)


# e^x = 2^n 2^r, n = floor(252 sat(x / (252 ln 2) + 1/2)) - 126, which fma.rm leaves in the lowest bits of a large
# float; r = x / ln 2 - n, whose product is exact to twice the bits.
EXP = (
    "{ .reg .b32 t, s, r; fma.rn.f32 t, $1, 0f3BBB989D, 0f3F000000; cvt.sat.f32.f32 t, t;"
    " fma.rm.f32 t, t, 0f437C0000, 0f4B400001; add.f32 s, t, 0fCB40007F; neg.f32 s, s;"
    " fma.rn.f32 r, $1, 0f3FB8AA3B, s; fma.rn.f32 r, $1, 0f32A57060, r; ex2.approx.ftz.f32 r, r;"
    " shl.b32 t, t, 23; mul.f32 $0, r, t; }"
)


def exp(f: Features, x: X) -> X:
    """e^x; in f32 on NVIDIA by the instructions of libdevice's function. That one asks for each element what happens to
    subnormal numbers, and LLVM takes seconds to make vectors of the answers of a large tile."""
    return _inline(x, EXP) if f.ptx and x.elem == "f32" else vendor(f, "exp", x)


def exp2(f: Features, x: X) -> X:
    """2^x: in f32 on NVIDIA one instruction, the form of `ex2` that gives zero for subnormal results. The other form
    takes three more instructions, and the softmax of attention consists of such powers."""
    if x.elem == "f64":
        return vendor(f, "exp2", x)
    if f.npu:
        return math_plain.exp2(x)
    return _instruction(x, "ex2.approx.ftz.f32") if f.ptx else x.unary("math.exp2")


def reciprocal(f: Features, x: X) -> X:
    """1 / x in f32 within 1 ulp; one instruction on NVIDIA, which takes subnormal numbers and results for zeros."""
    return _instruction(x, "rcp.approx.ftz.f32") if f.ptx and x.elem == "f32" else 1.0 / x


def _instruction(x: X, name: str) -> X:
    """An instruction of NVIDIA from f32 to f32."""
    return _inline(x, f"{name} $0, $1;")


def _inline(x: X, text: str) -> X:
    """PTX from f32 ($1) to f32 ($0)."""
    asm = f'"{text}" {{constraints = "=f,f", packed_element = 1 : i32, pure = true}}'
    return x.new(x.code.let(f"tt.elementwise_inline_asm {asm} {x.v.name} : {x.v.type} -> {x.v.type}", x.v.shape, "f32"))


def tanh_beside_one(f: Features, x: X) -> X:
    """tanh(x) = 1 - 2 / (exp(2 x) + 1) in f32, to an absolute error of 2^-22, which is large relative to small results.
    The function of the libraries takes three times as many instructions."""
    return 1.0 - reciprocal(f, exp2(f, x * (2.0 * LOG2_E)) + 1.0) * 2.0


def rsqrt(f: Features, x: X) -> X:
    """1 / sqrt(x); in f32 by the instruction that libdevice's function uses. The function itself tests for each element
    what happens to subnormal numbers: eight branches and blocks more that LLVM takes along up to its code generator."""
    return _instruction(x, "rsqrt.approx.f32") if f.ptx and x.elem == "f32" else vendor(f, "rsqrt", x)


def sqrt(_: Features, x: X) -> X:
    """The square root, rounded to nearest."""
    return x.unary("tt.precise_sqrt" if x.elem == "f32" else "math.sqrt")


def divide(x: X, y: X) -> X:
    """The quotient, rounded to nearest."""
    return x.binary("tt.precise_divf", y) if x.elem == "f32" else x / y


def _logistic(f: Features, x: X) -> X:
    """1 / (1 + exp(-x)), computed from exp(-|x|), which cannot overflow: for negative x as exp(x) / (1 + exp(x))."""
    e = transcendental(f, "exp", [-x.abs()], narrow=False)
    return x.lt(0.0).where(e, 1.0) / (e + 1.0)


_LONG: dict[str, Formula] = {"erf": math_special.erf, "erfc": math_special.erfc}  # for f32
_FORMULAS: dict[str, Formula] = {
    "exp2": exp2,
    "rsqrt": rsqrt,
    "sqrt": sqrt,
    "digamma": lambda f, x: math_special.digamma(x, lambda name, *a: vendor(f, name, *a)),
}
