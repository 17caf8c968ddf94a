"""Functions of real numbers: computed in f64, rounded once; conversions to floats of 8 bits as hardware does them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.special as sp

from jtile.lowering.triton.math import EXP

from .ops_arith import odd, rounded, signed, unsigned
from .parse import Stmt
from .table import Types, arity, arrow, demand, first_arrow, one, op, same
from .types import Type, garbage, width

UNARY = {
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2, "log10": np.log10,
    "log1p": np.log1p, "sin": np.sin, "cos": np.cos, "tan": np.tan, "tanh": np.tanh, "sinh": np.sinh, "cosh": np.cosh,
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "asinh": np.arcsinh, "acosh": np.arccosh,
    "atanh": np.arctanh, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": np.cbrt, "erf": sp.erf,
    "erfc": sp.erfc, "erfinv": lambda x: np.where(x == 0, x, sp.erfinv(x)), "erfcinv": sp.erfcinv,
    "lgamma": lambda x: sp.gammaln(np.where(x == -np.inf, np.inf, x)), "tgamma": sp.gamma,
    "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "round": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x),
    "roundeven": np.rint, "rint": np.rint, "nearbyint": np.rint, "absf": np.abs, "fabs": np.abs, "j0": sp.j0,
    "exp10": lambda x: 10.0**x, "normcdf": sp.ndtr, "rcp": np.reciprocal,
    "sinpi": lambda x: np.sin(np.pi * (x - 2 * np.rint(x / 2))),
    "cospi": lambda x: np.cos(np.pi * (x - 2 * np.rint(x / 2))),
}  # fmt: skip
BINARY = {
    "powf": np.power, "pow": np.power, "atan2": np.arctan2, "fmod": np.fmod, "copysign": np.copysign,
    "hypot": np.hypot, "fmin": np.fmin, "fmax": np.fmax, "fdim": lambda a, b: np.where(a > b, a - b, 0 * (a + b)),
    "remainder": lambda a, b: np.vectorize(_remainder, otypes=[np.float64])(a, b),
}  # fmt: skip


def _remainder(a: float, b: float) -> float:
    bad = math.isnan(a) or math.isnan(b) or math.isinf(a) or b == 0
    return math.nan if bad else math.remainder(a, b)


def in_double(fn, dtype: np.dtype, *args: np.ndarray) -> np.ndarray:
    return rounded(np.asarray(fn(*(a.astype(np.float64) for a in args)), np.float64), dtype)


_MATH_UNARY = ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "tanh", "sinh", "cosh",
               "asin", "acos", "atan", "asinh", "acosh", "atanh", "sqrt", "rsqrt", "cbrt", "erf", "erfc", "floor",
               "ceil", "trunc", "round", "roundeven", "absf")  # fmt: skip


@op(*(f"math.{n}" for n in _MATH_UNARY), "tt.precise_sqrt", rule=same(1, floats=True), form=one)
def _unary(m, s: Stmt, a):
    name = s.name.rpartition(".")[2].removeprefix("precise_")
    return in_double(UNARY[name], a.dtype, a)


@op("math.powf", "math.atan2", "math.copysign", rule=same(2, floats=True), form=one)
def _binary(m, s: Stmt, a, b):
    return in_double(BINARY[s.name[5:]], a.dtype, a, b)


@op("math.fma", rule=same(3, floats=True), form=one)
def _fma(m, s: Stmt, a, b, c):
    if a.dtype.itemsize <= 2:
        return in_double(lambda x, y, z: x * y + z, a.dtype, a, b, c)
    wide = np.longdouble  # 64 bits of significand: products of f32 are exact, of f64 nearly
    out = a.astype(wide) * b.astype(wide) + c.astype(wide)
    return out.astype(a.dtype)


@op("tt.clampf", rule=same(3, floats=True), form=one)
def _clamp(m, s: Stmt, x, low, high):
    if s.attrs.get("propagateNan") == "all":
        return np.minimum(np.maximum(x, low), high)
    return np.fmin(np.fmax(x, low), high)


@op("math.absi", rule=same(1, ints=True), form=one)
def _absi(m, s: Stmt, a):
    return np.abs(a)


def _bit_count(x: np.ndarray) -> np.ndarray:
    return np.bitwise_count(unsigned(x)).astype(x.dtype)


@op("math.ctpop", "math.ctlz", "math.cttz", rule=same(1, ints=True), form=one)
def _count(m, s: Stmt, a):
    bits = a.dtype.itemsize * 8
    x = unsigned(a)
    if s.name == "math.ctpop":
        return _bit_count(a)
    if s.name == "math.cttz":
        return _bit_count(signed(~x & (x - x.dtype.type(1))))
    shift = 1
    while shift < bits:
        x = x | (x >> x.dtype.type(shift))
        shift *= 2
    return (bits - _bit_count(signed(x))).astype(a.dtype)


# -- libdevice, ocml ---------------------------------------------------------------------------------------------------

_BITS = {"clz": "math.ctlz", "popc": "math.ctpop", "ffs": "", "clzll": "math.ctlz", "popcll": "math.ctpop"}


def _extern_rule(stmt: Stmt, args: list[Type]) -> Types:
    demand(stmt, all(a.shape == stmt.outs[0].shape for a in args), "shapes of an extern function")
    demand(stmt, isinstance(stmt.attrs.get("symbol"), str), "an extern function needs its symbol")
    return stmt.outs


def function_name(stmt: Stmt) -> str:
    """`tanh` of `__nv_tanhf` and `__ocml_tanh_f32`; the element types must be what the symbol says."""
    symbol, elem = stmt.attrs["symbol"], stmt.arg_types[0].elem
    if symbol.startswith("__nv_"):
        demand(stmt, elem in ("f32", "f64", "i32", "i64"), f"{symbol} of {elem}")
        name = symbol[len("__nv_") :]
        known = name[:-1] if elem == "f32" and name.endswith("f") and name[:-1] in KNOWN else name
        demand(
            stmt, elem != "f32" or known != name or not name.endswith(tuple(KNOWN)), f"{symbol} is of f64, not {elem}"
        )
        demand(stmt, elem != "f64" or name in KNOWN, f"no function {symbol} of f64")
        return known
    name, _, suffix = symbol.removeprefix("__ocml_").rpartition("_")
    demand(stmt, suffix == elem, f"{symbol} of {elem}")
    return name


@op("tt.extern_elementwise", rule=_extern_rule, form=arrow)
def _extern(m, s: Stmt, *args):
    name, dtype = function_name(s), s.types[0].numpy
    if name in _FIELDS:
        return _FIELDS[name](*args).astype(dtype)
    fn = KNOWN.get(name)
    if fn is None:
        raise s.error(f"the evaluator knows no function {name!r}")
    return in_double(fn, dtype, *args)


def _nextafter(a, b):
    return np.nextafter(a, b)


_FIELDS = {
    "nextafter": _nextafter, "isnan": lambda a: np.isnan(a), "isnanf": lambda a: np.isnan(a),
    "isinf": lambda a: np.isinf(a), "ilogb": lambda a: np.frexp(a)[1] - 1, "ldexp": np.ldexp,
    "fma": lambda a, b, c: (a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)),
    "copysign": np.copysign, "signbit": np.signbit, "finitef": np.isfinite, "isfinited": np.isfinite,
}  # fmt: skip
KNOWN = UNARY | BINARY | dict.fromkeys(_FIELDS)  # type: ignore[dict-item]


# -- inline PTX: by its text -------------------------------------------------------------------------------------------


def flushed(fn):
    """A function of f32 whose subnormal operands and results are zero."""
    tiny = np.float32(np.finfo(np.float32).tiny)
    flush = lambda x: np.where(np.abs(x) < tiny, np.copysign(np.float32(0), x), x)
    return lambda x: flush(in_double(fn, x.dtype, flush(x)))


NOTHING = ""  # see Emitter.kept


def _exp(x):
    """e^x in the steps of its PTX; float64 holds every sum and product of two floats closely enough."""
    wide = x.astype(np.float64)
    n = np.floor(252 * np.nan_to_num(np.clip((wide * np.float32(0.00572498)).astype(np.float32) + 0.5, 0, 1))) - 126
    fma = lambda a, b, c: (a * np.float64(np.float32(b)) + c).astype(np.float32)
    r = fma(wide, 1.925963033500011079e-08, fma(wide, 1.4426950216293334961, -n).astype(np.float64))
    return flushed(np.exp2)(r) * np.exp2(n).astype(np.float32)


PTX = {
    EXP: _exp,
    "ex2.approx.ftz.f32 $0, $1;": flushed(np.exp2), "lg2.approx.ftz.f32 $0, $1;": flushed(np.log2),
    "tanh.approx.f32 $0, $1;": lambda x: in_double(np.tanh, x.dtype, x),
    "rcp.approx.ftz.f32 $0, $1;": flushed(np.reciprocal),
    "rsqrt.approx.f32 $0, $1;": lambda x: in_double(UNARY["rsqrt"], x.dtype, x),
    NOTHING: lambda x: x,
}  # fmt: skip


# PTX that does more than to compute a number: the elements of its operands, and `(machine, *operands) -> i32`. Other
# files put it here.
ACTS: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {}
GIVES: dict[str, str] = {}  # the element of their results where it is no i32


def _asm_rule(stmt: Stmt, args: list[Type]) -> Types:
    text = stmt.words[0][1:-1]
    demand(stmt, text in PTX or text in ACTS, "the evaluator does not know this PTX")
    demand(stmt, stmt.attrs.get("packed_element") == 1, "one element at a time")
    if text in ACTS:
        demand(stmt, [a.elem for a in args] == [*ACTS[text][0]], f"operands of {ACTS[text][0]}")
        shape = args[0].shape if args else ()
        demand(stmt, all(a.shape == shape for a in args), "operands of one shape")
        demand(stmt, [str(t) for t in stmt.outs] == [str(Type(shape, GIVES.get(text, "i32")))], "one result")
        demand(stmt, "pure = false" in stmt.text, "effects")
        return stmt.outs
    kinds = ("i32", "i64") if text == NOTHING else ("f32",)
    demand(stmt, args == stmt.outs and args[0].elem in kinds, f"an operand and a result of {' or '.join(kinds)}")
    return stmt.outs


@op("tt.elementwise_inline_asm", rule=_asm_rule, form=arrow)
def _asm(m, s: Stmt, *args):
    text = s.words[0][1:-1]
    return np.asarray(ACTS[text][1](m, *args), s.types[0].numpy) if text in ACTS else PTX[text](*args)


# -- floats of 8 bits --------------------------------------------------------------------------------------------------


def _fp_rule(stmt: Stmt, args: list[Type]) -> Types:
    arity(stmt, args, 1)
    a, r = args[0], stmt.outs[0]
    demand(stmt, a.shape == r.shape and a.is_float and r.is_float, f"{stmt.name} from {a} to {r}")
    narrow = width(r.elem) < width(a.elem)
    demand(stmt, not narrow or "rounding" in stmt.attrs, "a conversion to fewer bits says its rounding")
    demand(stmt, width(a.elem) != width(r.elem), f"{stmt.name} from {a} to {r}")
    return [r]


@op("tt.fp_to_fp", rule=_fp_rule, form=first_arrow)
def _fp_to_fp(m, s: Stmt, a):
    r = s.types[0]
    if width(r.elem) > 8:
        if s.attrs.get("rounding") == "rtz":
            return _toward_zero(a, r.numpy)
        return rounded(a, r.numpy)
    demand(s, s.attrs.get("rounding") == "rtne", "rounding to floats of 8 bits")
    return saturated(a, r.numpy)


def _toward_zero(a: np.ndarray, dtype: np.dtype) -> np.ndarray:
    y = rounded(a, dtype)
    over = np.abs(y.astype(np.float64)) > np.abs(a.astype(np.float64))
    bits = y.view(np.dtype(f"i{dtype.itemsize}"))
    return np.where(over, bits - bits.dtype.type(1), bits).astype(bits.dtype).view(dtype)


def saturated(a: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """As `cvt.rn.satfinite` does: beyond the largest number, that number; NaN stays."""
    import ml_dtypes

    top = float(ml_dtypes.finfo(dtype).max)
    x = odd(a) if a.dtype == np.float64 else a.astype(np.float32)
    return np.clip(x, -top, top).astype(dtype)


__all__ = ["garbage", "saturated"]
