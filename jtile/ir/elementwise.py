"""Elementwise functions of Tile IR, their NumPy meaning, and the cards `Map`, `Cast`, `Bitcast`.

Floats narrower than 32 bits are computed in f32 and rounded to nearest even after every function; f32 functions other
than the IEEE basic ones are computed in f64 and rounded, so that the reference is correct to half an ulp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from .core import Op, Value, tile
from .types import BY_NUMPY, DTYPES, TileType

NUMERIC, FLOAT, INT, BITS, ANY = "fiu", "f", "iu", "iub", "fiub"


@dataclasses.dataclass(frozen=True)
class Function:
    """One elementwise function: arity, the dtype kinds it takes, whether it yields bool, and its NumPy form.

    `exact` marks functions that IEEE rounds correctly in the argument type itself.
    """

    name: str
    arity: int
    kinds: str
    numpy: Callable[..., np.ndarray]
    predicate: bool = False
    exact: bool = False


ELEMENTWISE: dict[str, Function] = {}


def _add(name: str, arity: int, kinds: str, fn, predicate: bool = False, exact: bool = False) -> None:
    ELEMENTWISE[name] = Function(name, arity, kinds, fn, predicate, exact)


def _is_int(x) -> bool:
    return BY_NUMPY[x.dtype].kind in "iu"


def _div(a, b):
    """C division for ints: truncates; x / 0 = -1 (all ones); the most negative number / -1 is itself."""
    if not _is_int(a):
        return np.divide(a, b)
    x, y = _wide(a), _wide(b)
    by = np.where(y == 0, y.dtype.type(1), y)
    return _wrap(np.where(y == 0, ~np.zeros_like(x), (x - np.fmod(x, by)) // by), a.dtype)


def _rem(a, b):
    """Remainder with the sign of the dividend; x rem 0 = x for ints, NaN for floats."""
    if not _is_int(a):
        return np.fmod(a, b)
    x, y = _wide(a), _wide(b)
    return _wrap(np.where(y == 0, x, np.fmod(x, np.where(y == 0, y.dtype.type(1), y))), a.dtype)


def _wide(x: np.ndarray) -> np.ndarray:
    """Ints widened to 64 bits, signed or not as they are."""
    return x.astype(np.int64 if BY_NUMPY[x.dtype].kind == "i" else np.uint64)


def _bits(x: np.ndarray) -> np.ndarray:
    """The bits of ints, as numbers of 64 bits that are not negative."""
    return _wide(x).astype(np.uint64) & np.uint64((1 << BY_NUMPY[x.dtype].bits) - 1)


def _wrap(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Ints of 64 bits converted to `dtype`, modulo its width."""
    info = BY_NUMPY[dtype]
    unsigned = x.astype(np.uint64) & np.uint64((1 << info.bits) - 1)
    if info.kind == "u":
        return unsigned.astype(dtype)
    up = np.int64(64 - info.bits)  # the sign bit is moved to the top, and back with its copies
    return (unsigned.astype(np.int64) << up >> up).astype(dtype)


def _shift(kind: str):
    def run(a, b):
        bits, by = BY_NUMPY[a.dtype].bits, _wide(b)
        over = (by < 0) | (by >= bits)
        x = _bits(a) if kind == "shr_logical" else _wide(a)
        n = np.where(over, by.dtype.type(0), by).astype(x.dtype)
        beyond = -(x < 0).astype(x.dtype) if kind == "shr" else np.zeros_like(x)
        return _wrap(np.where(over, beyond, x << n if kind == "shl" else x >> n), a.dtype)

    return run


def _popcount(a):
    return np.bitwise_count(_bits(a)).astype(a.dtype)


def _clz(a):
    x = _bits(a)
    for n in (1, 2, 4, 8, 16, 32):  # every bit below the highest one is set
        x = x | x >> np.uint64(n)
    return (BY_NUMPY[a.dtype].bits - np.bitwise_count(x).astype(np.int64)).astype(a.dtype)


def _special(name: str):
    def run(*args):
        import scipy.special

        return getattr(scipy.special, name)(*args)

    return run


def _sign(x):
    return np.where(np.isnan(x) | (x == 0), x, np.sign(x)) if BY_NUMPY[x.dtype].kind == "f" else np.sign(x)


def _logic(bitwise, logical):
    return lambda *a: logical(*a) if a[0].dtype == np.bool_ else bitwise(*a)


def _round_away(x):
    # floor(|x| + 0.5) would be wrong: the sum rounds up just below a half, and where floats are a whole number apart.
    m = np.abs(x)
    whole = np.floor(m)
    return np.copysign(whole + (m - whole >= 0.5), x)


for _name, _fn in dict(add=np.add, sub=np.subtract, mul=np.multiply, div=_div).items():
    _add(_name, 2, NUMERIC, _fn, exact=True)
_add("rem", 2, NUMERIC, _rem, exact=True)
_add("max", 2, ANY, np.maximum, exact=True)
_add("min", 2, ANY, np.minimum, exact=True)
_add("pow", 2, FLOAT, np.power)
_add("atan2", 2, FLOAT, np.arctan2)
_add("nextafter", 2, FLOAT, np.nextafter, exact=True)
for _name, _fn in dict(
    eq=np.equal, ne=np.not_equal, lt=np.less, le=np.less_equal, gt=np.greater, ge=np.greater_equal
).items():
    _add(_name, 2, ANY, _fn, predicate=True, exact=True)
_add("and", 2, BITS, _logic(np.bitwise_and, np.logical_and), exact=True)
_add("or", 2, BITS, _logic(np.bitwise_or, np.logical_or), exact=True)
_add("xor", 2, BITS, _logic(np.bitwise_xor, np.logical_xor), exact=True)
_add("not", 1, BITS, _logic(np.bitwise_not, np.logical_not), exact=True)
for _name in ("shl", "shr", "shr_logical"):
    _add(_name, 2, INT, _shift(_name), exact=True)
_add("popcount", 1, INT, _popcount, exact=True)
_add("clz", 1, INT, _clz, exact=True)
_add("neg", 1, NUMERIC, np.negative, exact=True)
_add("abs", 1, NUMERIC, np.abs, exact=True)
_add("sign", 1, NUMERIC, _sign, exact=True)
_add("square", 1, NUMERIC, np.square, exact=True)
_add("sqrt", 1, FLOAT, np.sqrt, exact=True)
_add("floor", 1, FLOAT, np.floor, exact=True)
_add("ceil", 1, FLOAT, np.ceil, exact=True)
_add("round", 1, FLOAT, np.rint, exact=True)
_add("round_away", 1, FLOAT, _round_away)
_add("is_finite", 1, FLOAT, np.isfinite, predicate=True, exact=True)
_add("clamp", 3, NUMERIC, lambda lo, x, hi: np.minimum(np.maximum(x, lo), hi), exact=True)
for _name, _fn in dict(
    exp=np.exp, exp2=np.exp2, expm1=np.expm1, log=np.log, log2=np.log2, log1p=np.log1p, cbrt=np.cbrt, sin=np.sin,
    cos=np.cos,
    tan=np.tan, asin=np.arcsin, acos=np.arccos, atan=np.arctan, sinh=np.sinh, cosh=np.cosh, tanh=np.tanh,
    asinh=np.arcsinh,
    acosh=np.arccosh, atanh=np.arctanh,
).items():  # fmt: skip
    _add(_name, 1, FLOAT, _fn)
_add("rsqrt", 1, FLOAT, lambda x: 1.0 / np.sqrt(x))
for _name, _fn in dict(logistic="expit", erf="erf", erfc="erfc", digamma="digamma").items():
    _add(_name, 1, FLOAT, _special(_fn))
_add("lgamma", 1, FLOAT, lambda x: np.where(x == -np.inf, np.inf, _special("gammaln")(x)))  # as in C and JAX
_add("erf_inv", 1, FLOAT, lambda x: np.where(x == 0, x, _special("erfinv")(x)))  # scipy's makes 0 of -0


def compute(fn: Function, args: list[np.ndarray]) -> np.ndarray:
    """The reference value of `fn` on arrays of one dtype, rounded to that dtype."""
    dtype = args[0].dtype
    info = BY_NUMPY[dtype]
    if info.kind == "f":
        narrow = info.bits < 32
        wide = np.float32 if narrow and fn.exact else np.float64 if not fn.exact else dtype
        if fn.name == "nextafter":
            return _nextafter(*args)
        args = [a.astype(wide) for a in args]
    with np.errstate(all="ignore"):
        out = np.asarray(fn.numpy(*args))
        if fn.predicate:
            return out.astype(np.bool_)
        return out.astype(np.float32).astype(dtype) if _double_round(info, fn) else out.astype(dtype)


def _double_round(info, fn: Function) -> bool:
    """Whether a function is rounded twice: narrow floats go through f32, as every back end computes them."""
    return info.kind == "f" and info.bits < 32 and not fn.predicate


def _nextafter(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype in (np.float32, np.float64, np.float16):
        return np.nextafter(a, b)
    import ml_dtypes  # registers np.nextafter for its types

    del ml_dtypes
    return np.nextafter(a, b)


@dataclasses.dataclass(eq=False)
class Map(Op):
    """`fn` applied elementwise to tiles of one shape and dtype. Printed as `add %a, %b`."""

    fn: str
    args: tuple[Value, ...]

    mnemonic = "map"

    def infer(self):
        if self.fn not in ELEMENTWISE:
            raise ValueError(f"unknown elementwise function {self.fn!r}")
        f = ELEMENTWISE[self.fn]
        types = [tile(a) for a in self.args]
        if len(types) != f.arity:
            raise TypeError(f"{self.fn} takes {f.arity} operands, got {len(types)}")
        if any(t is not types[0] and t != types[0] for t in types):
            raise TypeError(f"{self.fn} takes operands of one type, got {', '.join(map(str, types))}")
        if types[0].info.kind not in f.kinds:
            raise TypeError(f"{self.fn} is not defined for {types[0].dtype}")
        return (types[0].with_dtype("bool") if f.predicate else types[0],)

    def reference(self, *arrays):
        return compute(ELEMENTWISE[self.fn], list(arrays))


@dataclasses.dataclass(eq=False)
class Select(Op):
    """`cond ? a : b` elementwise; `cond` is a bool tile of the same shape."""

    cond: Value
    a: Value
    b: Value

    mnemonic = "select"

    def infer(self):
        c, a, b = tile(self.cond), tile(self.a), tile(self.b)
        if a != b or c != a.with_dtype("bool"):
            raise TypeError(f"select takes bool, T, T of one shape, got {c}, {a}, {b}")
        return (a,)

    def reference(self, c, a, b):
        return np.where(c, a, b)


@dataclasses.dataclass(eq=False)
class Cast(Op):
    """Value conversion. Float to int truncates and saturates, NaN gives 0; int to int wraps; to bool is `x != 0`."""

    x: Value
    dtype: str

    mnemonic = "cast"

    def infer(self):
        return (tile(self.x).with_dtype(self.dtype),)

    def reference(self, x):
        return convert(x, self.dtype)


def convert(x: np.ndarray, dtype: str) -> np.ndarray:
    """`x` as `dtype`, with the language's conversion rules."""
    src, dst = BY_NUMPY[x.dtype], DTYPES[dtype]
    with np.errstate(all="ignore"):
        if dst.kind == "b":
            return np.asarray(x.astype(np.float32) != 0) if src.kind == "f" and src.bits < 32 else np.asarray(x != 0)
        if src.kind == "f" and dst.kind in "iu":
            return _saturate(x.astype(np.float64), dst)
        if src.kind in "iu" and dst.kind in "iu":
            return _int_to_int(x, dst)
        # float32 holds all narrower floats and integers; wider numbers are rounded to it first, as back ends do.
        narrow = dst.bits < 32 or src.bits < 8
        return (x.astype(np.float32) if narrow else x).astype(dst.numpy)


def _saturate(x: np.ndarray, dst) -> np.ndarray:
    lo = -(1 << (dst.bits - 1)) if dst.kind == "i" else 0
    hi = (1 << (dst.bits - (dst.kind == "i"))) - 1
    carrier = np.int64 if dst.kind == "i" else np.uint64
    inside = np.isfinite(x) & (x > lo - 1) & (x < hi)
    body = np.where(inside, x, 0).astype(carrier)
    body = np.where(np.isnan(x), carrier(0), np.where(inside, body, np.where(x >= hi, carrier(hi), carrier(lo))))
    return body.astype(dst.numpy)


def _int_to_int(x: np.ndarray, dst) -> np.ndarray:
    if dst.bits >= 8 and BY_NUMPY[x.dtype].bits >= 8:
        return x.astype(dst.numpy)
    return _wrap(_wide(x), dst.numpy)


@dataclasses.dataclass(eq=False)
class Bitcast(Op):
    """The same bits as another dtype of the same width."""

    x: Value
    dtype: str

    mnemonic = "bitcast"

    def infer(self):
        t = tile(self.x)
        if t.info.bits != DTYPES[self.dtype].bits:
            raise TypeError(f"bitcast keeps the width: got {t.dtype} to {self.dtype}")
        return (t.with_dtype(self.dtype),)

    def reference(self, x):
        return np.ascontiguousarray(x).view(DTYPES[self.dtype].numpy).reshape(x.shape)


def result_type(fn: str, t: TileType) -> TileType:
    return t.with_dtype("bool") if ELEMENTWISE[fn].predicate else t
