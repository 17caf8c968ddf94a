"""arith: integers wrap, floats round after every op; what LLVM calls poison is garbage here."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np

from .parse import Stmt
from .table import Types, arity, demand, first_arrow, one, op, same
from .types import INTS, Type, garbage, numpy_of, width

UNSIGNED = {np.dtype(f"i{n}"): np.dtype(f"u{n}") for n in (1, 2, 4, 8)}


def unsigned(x: np.ndarray) -> np.ndarray:
    return x if x.dtype == np.bool_ else x.view(UNSIGNED[x.dtype])


def signed(x: np.ndarray) -> np.ndarray:
    return x if x.dtype == np.bool_ else x.view(np.dtype(f"i{x.dtype.itemsize}"))


def poisoned(x: np.ndarray, bad: np.ndarray, elem: str) -> np.ndarray:
    """Garbage where an op has no defined result."""
    return np.where(bad, garbage(Type((), elem)), x) if np.any(bad) else x


# -- integers ----------------------------------------------------------------------------------------------------------

_WRAPPING = {"addi": np.add, "subi": np.subtract, "muli": np.multiply}
_BITS = {"andi": np.bitwise_and, "ori": np.bitwise_or, "xori": np.bitwise_xor}
_EXTREMA = {"maxsi": np.maximum, "minsi": np.minimum, "maxui": np.maximum, "minui": np.minimum}


def _bools(fn, a, b):
    """Arithmetic of i1: modulo 2, and true is -1 where signed."""
    return (fn(a.astype(np.int8), b.astype(np.int8)) & 1).astype(np.bool_)


@op(*(f"arith.{n}" for n in (*_WRAPPING, *_BITS, *_EXTREMA)), rule=same(2, ints=True), form=one)
def _integer(m, s: Stmt, a, b):
    name = s.name[6:]
    if name in _EXTREMA:
        if a.dtype == np.bool_:  # true is -1
            return (
                _EXTREMA[name](a, b)
                if name.endswith("ui")
                else _EXTREMA[name](-a.astype(np.int8), -b.astype(np.int8)) != 0
            )
        return signed(_EXTREMA[name](unsigned(a), unsigned(b))) if name.endswith("ui") else _EXTREMA[name](a, b)
    fn = _WRAPPING.get(name) or _BITS[name]
    return _bools(fn, a, b) if a.dtype == np.bool_ and name in _WRAPPING else fn(a, b)


def _floor_div(a, b):
    return a // b


def _trunc_div(a, b):
    q = a // b
    return q + ((a % b != 0) & ((a < 0) != (b < 0))).astype(a.dtype)


def _ceil_div(a, b):
    return a // b + (a % b != 0).astype(a.dtype)


_DIVISIONS = {
    "divsi": _trunc_div, "divui": _floor_div, "remsi": lambda a, b: a - _trunc_div(a, b) * b, "remui": np.mod,
    "ceildivsi": _ceil_div, "ceildivui": _ceil_div, "floordivsi": _floor_div,
}  # fmt: skip


@op(*(f"arith.{n}" for n in _DIVISIONS), rule=same(2, ints=True), form=one)
def _division(m, s: Stmt, a, b):
    name, dtype = s.name[6:], a.dtype
    demand(s, dtype != np.bool_, "division of i1")
    bad = b == 0
    if name.endswith("ui"):
        out = signed(_DIVISIONS[name](unsigned(a), unsigned(np.where(bad, dtype.type(1), b))))
    else:
        bad = bad | ((a == np.iinfo(dtype).min) & (b == -1))
        out = _DIVISIONS[name](a, np.where(bad, dtype.type(1), b))
    return poisoned(out, bad, s.arg_types[0].elem)


@op("arith.shli", "arith.shrsi", "arith.shrui", rule=same(2, ints=True), form=one)
def _shift(m, s: Stmt, a, b):
    demand(s, a.dtype != np.bool_, "a shift of i1")
    bad = unsigned(b) >= a.dtype.itemsize * 8
    k = np.where(bad, b.dtype.type(0), b)
    if s.name == "arith.shrui":
        out = signed(unsigned(a) >> unsigned(k))
    else:
        out = a << k if s.name == "arith.shli" else a >> k
    return poisoned(out, bad, s.arg_types[0].elem)


def _high(stmt: Stmt, args: list[Type]) -> Types:
    return [*same(2, ints=True)(stmt, args)] * 2


def wide_product(a, b, *, sign: bool) -> tuple[np.ndarray, np.ndarray]:
    """The low and high halves of products of integers."""
    bits = a.dtype.itemsize * 8
    convert = signed if sign else unsigned
    exact = convert(a).astype(object) * convert(b).astype(object)
    mask = (1 << bits) - 1
    dtype = UNSIGNED[a.dtype]
    pick = lambda shift: np.asarray(np.frompyfunc(lambda p: (p >> shift) & mask, 1, 1)(exact)).astype(dtype)
    return signed(pick(0)), signed(pick(bits))


@op("arith.mulsi_extended", "arith.mului_extended", rule=_high, form=one)
def _mul_extended(m, s: Stmt, a, b):
    return wide_product(a, b, sign="si" in s.name)


@op("tt.mulhiui", rule=same(2, ints=True), form=one)
def _mulhi(m, s: Stmt, a, b):
    return wide_product(a, b, sign=False)[1]


def _cmp(stmt: Stmt, args: list[Type]) -> Types:
    same(2, ints=stmt.name.endswith("i"), floats=stmt.name.endswith("f"))(stmt, args)
    return [args[0].of("i1")]


_COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
            "ge": np.greater_equal}  # fmt: skip


@op("arith.cmpi", rule=_cmp, form=one)
def _cmpi(m, s: Stmt, a, b):
    predicate = s.words[0]
    if predicate in ("eq", "ne"):
        return _COMPARE[predicate](a, b)
    fn = _COMPARE[predicate[1:]]
    if a.dtype == np.bool_:
        return fn(a, b) if predicate[0] == "u" else fn(-a.astype(np.int8), -b.astype(np.int8))
    return fn(unsigned(a), unsigned(b)) if predicate[0] == "u" else fn(a, b)


@op("arith.cmpf", rule=_cmp, form=one)
def _cmpf(m, s: Stmt, a, b):
    predicate = s.words[0]
    nan = np.isnan(a) | np.isnan(b)
    if predicate in ("ord", "uno"):
        return nan if predicate == "uno" else ~nan
    if predicate in ("true", "false"):
        return np.full(nan.shape, predicate == "true")
    out = _COMPARE[predicate[1:]](a, b)
    return out | nan if predicate[0] == "u" else out & ~nan


# -- floats ------------------------------------------------------------------------------------------------------------


def _zeros_apart(fn, a, b):
    """Maximum or minimum for which -0 is less than +0."""
    out = fn(a, b)
    both = (a == 0) & (b == 0)
    negative = np.signbit(a) & np.signbit(b) if fn in (np.maximum, np.fmax) else np.signbit(a) | np.signbit(b)
    zero = np.where(negative, -np.zeros((), a.dtype), np.zeros((), a.dtype)).astype(a.dtype)
    return np.where(both, zero, out)


_FLOATS = {
    "addf": np.add, "subf": np.subtract, "mulf": np.multiply, "divf": np.divide, "remf": np.fmod,
    "maximumf": lambda a, b: _zeros_apart(np.maximum, a, b), "minimumf": lambda a, b: _zeros_apart(np.minimum, a, b),
    "maxnumf": np.fmax, "minnumf": np.fmin,
}  # fmt: skip


@op(*(f"arith.{n}" for n in _FLOATS), rule=same(2, floats=True), form=one)
def _float(m, s: Stmt, a, b):
    return _FLOATS[s.name[6:]](a, b).astype(a.dtype)


@op("tt.precise_divf", rule=same(2, floats=True), form=one)
def _precise_div(m, s: Stmt, a, b):
    return np.divide(a, b)


@op("arith.negf", rule=same(1, floats=True), form=one)
def _neg(m, s: Stmt, a):
    return np.negative(a)


# -- constants, selection, casts ---------------------------------------------------------------------------------------


def _constant_type(stmt: Stmt, args: list[Type]) -> Types:
    t = stmt.outs[0]
    demand(stmt, stmt.head.startswith("dense<") == bool(t.shape), f"a constant {t} is spelled dense<..> iff a tensor")
    return [t]


def parse_number(text: str, elem: str) -> np.ndarray:
    """A literal as a rank-0 array; hexadecimal ones are the bits of a float."""
    dtype = numpy_of(elem)
    if elem == "i1":
        if text not in ("true", "false", "0", "1", "-1"):
            raise ValueError(text)
        return np.asarray(text in ("true", "1", "-1"))
    if elem in INTS:
        n, bits = int(text, 0), width(elem)
        if not -(1 << bits - 1) <= n < 1 << bits:
            raise ValueError(f"{text} does not fit {elem}")
        n &= (1 << bits) - 1
        return np.asarray(n - (1 << bits) if n >> (bits - 1) else n, dtype)
    if text.startswith("0x"):
        if len(text) != 2 + 2 * dtype.itemsize:
            raise ValueError(f"{text}: {dtype.itemsize * 2} digits for {elem}")
        return np.asarray(int(text, 16), np.dtype(f"u{dtype.itemsize}")).view(dtype)
    if not re.fullmatch(r"-?\d+\.\d*(?:[eE][-+]?\d+)?", text):
        raise ValueError(f"{text} is no float literal")
    return np.asarray(float(text)).astype(dtype)


@op("arith.constant", rule=_constant_type, form=lambda a, r: ((), r))
def _constant(m, s: Stmt):
    t = s.outs[0]
    text = s.head[len("dense<") : -1] if t.shape else s.head
    demand(s, not text.startswith("["), "triton lowers no constant tensor but splats")
    return np.full(t.shape, parse_number(text, t.elem))


def _select_type(stmt: Stmt, args: list[Type]) -> Types:
    arity(stmt, args, 3)
    c, a, b = args
    demand(stmt, a == b, f"select between {a} and {b}")
    demand(stmt, c.elem == "i1" and c.shape in ((), a.shape), f"select of {a} by {c}")
    return [a]


def _select_form(args: Types, results: Types) -> tuple[Types, Types]:
    return ([args[1]] if not args[0].shape else args[:2]), ()


@op("arith.select", rule=_select_type, form=_select_form)
def _select(m, s: Stmt, c, a, b):
    return np.where(c, a, b)


def _cast_rule(source: str, target: str, change: int):
    """From ints or floats to ints or floats, wider (1), narrower (-1) or of any width (0)."""

    def rule(stmt: Stmt, args: list[Type]) -> Types:
        arity(stmt, args, 1)
        demand(stmt, len(stmt.outs) == 1, "a cast spells one result")
        a, r = args[0], stmt.outs[0]
        is_kind = {"i": lambda t: t.is_int, "f": lambda t: t.is_float}
        demand(stmt, is_kind[source](a) and is_kind[target](r), f"{stmt.name} from {a} to {r}")
        demand(stmt, a.shape == r.shape, f"{stmt.name} changes the shape: {a} to {r}")
        delta = width(r.elem) - width(a.elem)
        demand(stmt, change == 0 or delta * change > 0, f"{stmt.name} from {a} to {r}: the wrong way")
        return [r]

    return rule


@op("arith.extsi", rule=_cast_rule("i", "i", 1), form=first_arrow)
def _extsi(m, s: Stmt, a):
    return -a.astype(s.types[0].numpy) if a.dtype == np.bool_ else a.astype(s.types[0].numpy)


@op("arith.extui", rule=_cast_rule("i", "i", 1), form=first_arrow)
def _extui(m, s: Stmt, a):
    return unsigned(a).astype(s.types[0].numpy)


@op("arith.trunci", rule=_cast_rule("i", "i", -1), form=first_arrow)
def _trunci(m, s: Stmt, a):
    return (a & 1).astype(np.bool_) if s.types[0].elem == "i1" else a.astype(s.types[0].numpy)


@op("arith.index_cast", rule=_cast_rule("i", "i", 0), form=first_arrow)
def _index_cast(m, s: Stmt, a):
    return a.astype(s.types[0].numpy)


@op("arith.sitofp", rule=_cast_rule("i", "f", 0), form=first_arrow)
def _sitofp(m, s: Stmt, a):
    return rounded(-a.astype(np.int8) if a.dtype == np.bool_ else a, s.types[0].numpy)


@op("arith.uitofp", rule=_cast_rule("i", "f", 0), form=first_arrow)
def _uitofp(m, s: Stmt, a):
    return rounded(unsigned(a), s.types[0].numpy)


@op("arith.fptosi", "arith.fptoui", rule=_cast_rule("f", "i", 0), form=first_arrow)
def _fptoi(m, s: Stmt, a):
    elem, wide = s.types[0].elem, np.trunc(a.astype(np.float64))
    bits, sign = width(elem), s.name == "arith.fptosi"
    low, high = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1)) if sign else (0.0, 2.0**bits)
    bad = ~((wide >= low) & (wide < high))
    kept = np.where(bad, 0.0, wide)
    if elem == "i1":
        out = kept != 0
    else:
        out = kept.astype(numpy_of(elem)) if sign else signed(kept.astype(UNSIGNED[numpy_of(elem)]))
    return poisoned(out, bad, elem)


@op("arith.extf", rule=_cast_rule("f", "f", 1), form=first_arrow)
def _extf(m, s: Stmt, a):
    return a.astype(s.types[0].numpy)


@op("arith.truncf", rule=_cast_rule("f", "f", -1), form=first_arrow)
def _truncf(m, s: Stmt, a):
    demand(s, width(s.types[0].elem) > 8, "floats of 8 bits are made by tt.fp_to_fp")
    return rounded(a, s.types[0].numpy)


def rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """To a float dtype, once: ml_dtypes goes through f32, which would round f64 and wide integers twice."""
    if dtype == ml_dtypes.bfloat16 and x.dtype.itemsize >= 4 and x.dtype != np.float32:
        return odd(x).astype(dtype)
    return x.astype(dtype)


def odd(x: np.ndarray) -> np.ndarray:
    """To f32, rounding to odd, so that a second rounding to fewer bits is right."""
    y = x.astype(np.float32)
    if x.dtype.kind == "f":
        exact, toward = y == x, np.where(np.abs(y.astype(np.float64)) > np.abs(x), -1, 0)
    else:
        wide = y.astype(np.float64)  # exact, and so is the comparison below: only of magnitudes that f32 rounds
        value = x.astype(np.longdouble)
        exact, toward = wide == value, np.where(np.abs(wide) > np.abs(value), -1, 0)
    bits = y.view(np.int32) + toward.astype(np.int32)
    return np.where(exact | ~np.isfinite(y), y, (bits | 1).view(np.float32))


@op("arith.bitcast", "tt.bitcast", rule=lambda s, a: _bitcast_rule(s, a), form=first_arrow)
def _bitcast(m, s: Stmt, a):
    return bits_as(a, s.types[0].numpy)


def bits_as(a: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return a if a.dtype == dtype else np.ascontiguousarray(a).view(dtype).reshape(a.shape)


def _bitcast_rule(stmt: Stmt, args: list[Type]) -> Types:
    arity(stmt, args, 1)
    a, r = args[0], stmt.outs[0]
    demand(stmt, a.shape == r.shape and width(a.elem) == width(r.elem), f"bitcast from {a} to {r}")
    demand(stmt, a.elem.startswith("!") == r.elem.startswith("!"), f"bitcast between pointers and numbers: {a}, {r}")
    demand(stmt, stmt.name == "tt.bitcast" or not a.elem.startswith("!"), "arith.bitcast of pointers")
    return [r]
