"""The NumPy meaning of every elementwise function, cast and bitcast, against formulations made another way."""

from __future__ import annotations

import math
import operator
from fractions import Fraction

import jax.numpy as jnp
import jax.scipy.special as jsp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from jtile.ir import Bitcast, Cast, Map, Select, Value
from jtile.ir.elementwise import ELEMENTWISE
from jtile.ir.types import DTYPES, TileType

FLOATS = [d.name for d in DTYPES.values() if d.kind == "f"]
INTS = [d.name for d in DTYPES.values() if d.kind in "iu"]
SCALES = ("float8_e8m0fnu", "float4_e2m1fn")  # storage formats: no arithmetic is promised beyond casts
ARITHMETIC = [d for d in FLOATS if d not in SCALES]


def value(shape, dtype: str) -> Value:
    return Value(TileType(tuple(shape), dtype))


def apply(fn: str, *arrays: np.ndarray) -> np.ndarray:
    """The card's reference, after its type check."""
    op = Map(fn, tuple(value(a.shape, a.dtype.name) for a in arrays))
    (t,) = op.infer()
    out = np.asarray(op.reference(*arrays))
    assert (out.shape, out.dtype) == (t.shape, DTYPES[t.dtype].numpy)
    return out


def same(a: np.ndarray, b: np.ndarray) -> None:
    """Equal bits, but for the payload of NaNs."""
    a, b = np.asarray(a), np.asarray(b)
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    wide = (lambda x: x.astype(np.float64)) if DTYPES[a.dtype.name].kind == "f" else (lambda x: x.astype(object))
    np.testing.assert_array_equal(wide(a), wide(b))
    if DTYPES[a.dtype.name].kind == "f":
        number = ~np.isnan(wide(a))
        np.testing.assert_array_equal(np.signbit(wide(a))[number], np.signbit(wide(b))[number])


def limits(dtype: str) -> tuple[int, int]:
    d = DTYPES[dtype]
    lo = -(1 << (d.bits - 1)) if d.kind == "i" else 0
    return lo, lo + (1 << d.bits) - 1


def int_samples(dtype: str) -> np.ndarray:
    lo, hi = limits(dtype)
    wanted = (lo, lo + 1, lo // 2, -7, -3, -2, -1, 0, 1, 2, 3, 5, 7, hi // 3, hi - 1, hi)
    picks = sorted({n for n in wanted if lo <= n <= hi})
    carrier = np.uint64 if DTYPES[dtype].kind == "u" else np.int64
    return np.array(picks, carrier).astype(DTYPES[dtype].numpy)


def float_samples(dtype: str) -> np.ndarray:
    info = ml_dtypes.finfo(DTYPES[dtype].numpy)
    big, tiny, small = float(info.max), float(info.tiny), float(info.smallest_subnormal)
    x = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, -2.5, 3.0, 0.1, -0.3, 7.0, np.inf, -np.inf, np.nan]
    return np.array([*x, big, -big, tiny, -tiny, small, big / 3]).astype(DTYPES[dtype].numpy)


def pairs(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.meshgrid(np.arange(len(x)), np.arange(len(x)), indexing="ij")
    return x[a], x[b]


# -- whole numbers, against Python's ----------------------------------------------------------------------------------


def wrap(n: int, dtype: str) -> int:
    lo, hi = limits(dtype)
    return (n - lo) % (hi - lo + 1) + lo


def bits_of(n: int, dtype: str) -> int:
    return n % (1 << DTYPES[dtype].bits)


def shift(fn: str, x: int, s: int, dtype: str) -> int:
    over = not 0 <= s < DTYPES[dtype].bits
    match fn:
        case "shl":
            return 0 if over else x << s
        case "shr_logical":
            return 0 if over else bits_of(x, dtype) >> s
    return (-1 if x < 0 else 0) if over else x >> s


def quotient(x: int, y: int) -> int:
    return -1 if y == 0 else math.trunc(Fraction(x, y))


BINARY_INT = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": quotient,
    "rem": lambda x, y: x if y == 0 else x - y * quotient(x, y),
    "max": max, "min": min, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
UNARY_INT = {
    "not": lambda x, d: ~x, "neg": lambda x, d: -x, "abs": lambda x, d: abs(x), "square": lambda x, d: x * x,
    "sign": lambda x, d: (x > 0) - (x < 0),
    "popcount": lambda x, d: bin(bits_of(x, d)).count("1"),
    "clz": lambda x, d: DTYPES[d].bits - bits_of(x, d).bit_length(),
}  # fmt: skip


@pytest.mark.parametrize("dtype", INTS)
def test_binary_int(dtype):
    a, b = pairs(int_samples(dtype))
    for fn, python in BINARY_INT.items():
        got = apply(fn, a, b)
        for i in np.ndindex(a.shape):
            want = python(int(a[i]), int(b[i]))
            assert int(got[i]) == (want if got.dtype == np.bool_ else wrap(want, dtype)), (fn, a[i], b[i])


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize("fn", ["shl", "shr", "shr_logical"])
def test_shifts(fn, dtype):
    lo, hi = limits(dtype)
    x = int_samples(dtype)
    bits = DTYPES[dtype].bits
    for s in [s for s in (-1, 0, 1, 2, 3, bits - 1, bits, 200) if lo <= s <= hi]:
        got = apply(fn, x, np.full(x.shape, s, np.int64).astype(x.dtype))
        assert [int(g) for g in got] == [wrap(shift(fn, int(v), s, dtype), dtype) for v in x], s


@pytest.mark.parametrize("dtype", INTS)
def test_unary_int(dtype):
    x = int_samples(dtype)
    for fn, python in UNARY_INT.items():
        assert [int(g) for g in apply(fn, x)] == [wrap(python(int(v), dtype), dtype) for v in x], fn


@pytest.mark.parametrize("dtype", INTS)
def test_clamp_int(dtype):
    a, b = pairs(int_samples(dtype))
    x = np.broadcast_to(int_samples(dtype)[len(a) // 2], a.shape)
    got = apply("clamp", a, x, b)
    want = [min(max(int(v), int(lo)), int(hi)) for lo, v, hi in zip(a.flat, x.flat, b.flat)]
    assert [int(g) for g in got.flat] == want


def test_bool():
    a, b = pairs(np.array([False, True]))
    table = {
        "and": a & b, "or": a | b, "xor": a ^ b, "max": a | b, "min": a & b,
        "eq": a == b, "ne": a != b, "lt": ~a & b, "le": ~a | b, "gt": a & ~b, "ge": a | ~b,
    }  # fmt: skip
    for fn, want in table.items():
        same(apply(fn, a, b), want)
    same(apply("not", a), ~a)


# -- floats -----------------------------------------------------------------------------------------------------------


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """A float64 result as `dtype`, rounded once."""
    with np.errstate(all="ignore"):
        return np.asarray(x, np.float64).astype(DTYPES[dtype].numpy)


@pytest.mark.parametrize("dtype", ARITHMETIC)
def test_arithmetic_is_rounded_once(dtype):
    """float64 holds sums and products of narrower floats (nearly) exactly: round it once."""
    a, b = pairs(float_samples(dtype))
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(all="ignore"):
        table = {"add": x + y, "sub": x - y, "mul": x * y, "div": x / y, "rem": np.fmod(x, y)}
    for fn, want in table.items():
        same(apply(fn, a, b), rounded(want, dtype))
    with np.errstate(all="ignore"):
        same(apply("sqrt", a), rounded(np.sqrt(x), dtype))
        same(apply("square", a), rounded(x * x, dtype))


@pytest.mark.parametrize("dtype", ARITHMETIC)
def test_comparisons_and_choices(dtype):
    a, b = pairs(float_samples(dtype))
    x, y = a.astype(np.float64), b.astype(np.float64)
    for fn, op in dict(eq="eq", ne="ne", lt="lt", le="le", gt="gt", ge="ge").items():
        same(apply(fn, a, b), getattr(operator, op)(x, y))
    nan = np.isnan(x) | np.isnan(y)
    distinct = nan | (x != y)  # of +0 and -0, either may come
    for fn, first in (("max", x > y), ("min", x < y)):
        want = np.where(nan, np.nan, np.where(first, x, y))
        np.testing.assert_array_equal(apply(fn, a, b).astype(np.float64)[distinct], want[distinct])
    same(apply("is_finite", a), np.isfinite(x))


@pytest.mark.parametrize("dtype", ARITHMETIC)
def test_exact_unary(dtype):
    x = float_samples(dtype)
    w = x.astype(np.float64)
    same(apply("neg", x), rounded(-w, dtype))
    same(apply("abs", x), rounded(np.abs(w), dtype))
    same(apply("sign", x), rounded(np.where(np.isnan(w) | (w == 0), w, np.copysign(1.0, w)), dtype))
    halves = (np.arange(-9, 10) / 2).astype(x.dtype)
    x = np.concatenate([x, halves])
    finite = [float(v) for v in x.astype(np.float64)]
    keep = lambda f, v: v if not math.isfinite(v) or v == 0 else math.copysign(f(v), v)
    same(apply("floor", x), rounded([keep(math.floor, v) for v in finite], dtype))
    same(apply("ceil", x), rounded([keep(math.ceil, v) for v in finite], dtype))
    same(apply("round", x), rounded([keep(round, v) for v in finite], dtype))
    away = lambda v: math.floor(abs(Fraction(v)) + Fraction(1, 2))
    same(apply("round_away", x), rounded([keep(away, v) for v in finite], dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_round_away_where_a_sum_would_round(dtype):
    x = np.array([0.49999999999999994, 0.49999997, 4503599627370497.0, 8388609.0, -4503599627370497.5])
    x = x.astype(DTYPES[dtype].numpy)
    away = [math.copysign(math.floor(abs(Fraction(float(v))) + Fraction(1, 2)), float(v)) for v in x]
    same(apply("round_away", x), rounded(away, dtype))


@pytest.mark.parametrize("dtype", ARITHMETIC)
def test_nextafter_steps_one_pattern(dtype):
    x = float_samples(dtype)
    x = x[np.isfinite(x.astype(np.float64))]
    up = apply("nextafter", x, np.full(x.shape, float(ml_dtypes.finfo(x.dtype).max)).astype(x.dtype))
    w, u = x.astype(np.float64), up.astype(np.float64)
    below = w < float(ml_dtypes.finfo(x.dtype).max)
    assert (u[below] > w[below]).all()
    unsigned = np.dtype(f"uint{DTYPES[dtype].bits}")
    steps = up.view(unsigned).astype(object) - x.view(unsigned).astype(object)
    assert all(abs(int(s)) == 1 for s, v in zip(steps[below], w[below]) if v != 0)
    same(apply("nextafter", x, x), x)


DOMAIN = {
    "log": (1e-3, 50), "log2": (1e-3, 50), "log1p": (-0.9, 50), "rsqrt": (1e-3, 50), "asin": (-1, 1), "acos": (-1, 1),
    "atanh": (-0.95, 0.95), "acosh": (1.01, 50), "erf_inv": (-0.95, 0.95), "lgamma": (0.1, 20), "digamma": (2.0, 20),
    "tan": (-1.4, 1.4),
    "erfc": (-3, 4), "exp": (-8, 4), "exp2": (-8, 4), "expm1": (-8, 4), "sinh": (-4, 4), "cosh": (-4, 4),
}  # fmt: skip
JNP = {
    "exp": jnp.exp, "exp2": jnp.exp2, "expm1": jnp.expm1, "log": jnp.log, "log2": jnp.log2, "log1p": jnp.log1p,
    "cbrt": jnp.cbrt, "sin": jnp.sin, "cos": jnp.cos, "tan": jnp.tan, "asin": jnp.arcsin, "acos": jnp.arccos,
    "atan": jnp.arctan, "sinh": jnp.sinh, "cosh": jnp.cosh, "tanh": jnp.tanh, "asinh": jnp.arcsinh,
    "acosh": jnp.arccosh, "atanh": jnp.arctanh, "rsqrt": lax.rsqrt, "logistic": lax.logistic, "erf": lax.erf,
    "erfc": lax.erfc, "erf_inv": lax.erf_inv, "lgamma": lax.lgamma, "digamma": jsp.digamma,
}  # fmt: skip


@pytest.mark.parametrize("fn", sorted(JNP))
def test_transcendental(fn):
    """float32 within what XLA's own polynomials err by; narrower floats within half a step of the float32 value."""
    lo, hi = DOMAIN.get(fn, (-6, 6))
    x = np.random.default_rng(0).uniform(lo, hi, 400).astype(np.float32)
    narrow = []
    for dtype in [d for d in ARITHMETIC if DTYPES[d].bits < 32]:
        y = x.astype(DTYPES[dtype].numpy)
        narrow.append(y[(y.astype(np.float32) >= lo) & (y.astype(np.float32) <= hi)])
    everything = [x, *(y.astype(np.float32) for y in narrow)]  # in one program
    want, *wants = np.split(
        np.asarray(JNP[fn](np.concatenate(everything))), np.cumsum([y.size for y in everything])[:-1]
    )
    got = apply(fn, x)
    near_zero = 2e-6 if fn in ("lgamma", "digamma", "erfc", "log", "log2") else 1e-7
    np.testing.assert_allclose(got, want, rtol=4e-6, atol=near_zero)
    for y, want in zip(narrow, wants, strict=True):
        step = float(ml_dtypes.finfo(y.dtype).eps)
        tiny = float(ml_dtypes.finfo(y.dtype).smallest_subnormal)
        fits = np.abs(want) < float(ml_dtypes.finfo(y.dtype).max)
        got_narrow = apply(fn, y).astype(np.float32)
        np.testing.assert_allclose(got_narrow[fits], want[fits], rtol=step / 2 * 1.01, atol=tiny + near_zero)
    wide = apply(fn, x.astype(np.float64))
    np.testing.assert_allclose(wide, got, rtol=1e-6, atol=near_zero)


@pytest.mark.parametrize("fn", ["pow", "atan2"])
def test_transcendental_of_two(fn):
    rng = np.random.default_rng(1)
    x, y = rng.uniform(0.1, 5, 300).astype(np.float32), rng.uniform(-3, 3, 300).astype(np.float32)
    want = [(math.pow if fn == "pow" else math.atan2)(float(a), float(b)) for a, b in zip(x, y)]
    np.testing.assert_allclose(apply(fn, x, y), np.float32(want), rtol=1e-7)
    for dtype in ("float16", "bfloat16"):
        a, b = x.astype(DTYPES[dtype].numpy), y.astype(DTYPES[dtype].numpy)
        want = [(math.pow if fn == "pow" else math.atan2)(float(p), float(q)) for p, q in zip(a, b)]
        eps = float(ml_dtypes.finfo(a.dtype).eps)
        np.testing.assert_allclose(apply(fn, a, b).astype(np.float64), want, rtol=eps * 0.51)


def test_every_function_is_tested():
    exact = {
        "add", "sub", "mul", "div", "rem", "max", "min", "nextafter", "eq", "ne", "lt", "le", "gt", "ge", "neg", "abs",
        "sign", "square", "sqrt", "floor", "ceil", "round", "round_away", "is_finite", "clamp", "pow", "atan2",
    }  # fmt: skip
    ints = {"shl", "shr", "shr_logical", "popcount", "clz", "and", "or", "xor", "not"}
    assert set(ELEMENTWISE) == exact | ints | set(JNP)


WRONG = [("add", "bool"), ("exp", "int32"), ("and", "float32"), ("shl", "bool"), ("sqrt", "int8")]


@pytest.mark.parametrize(("fn", "dtype"), WRONG)
def test_wrong_kind(fn, dtype):
    with pytest.raises(TypeError, match=fn):
        Map(fn, (value((2,), dtype),) * ELEMENTWISE[fn].arity).infer()


def test_select():
    c = np.array([True, False, True])
    for d in DTYPES.values():
        a, b = np.ones(3, np.float32).astype(d.numpy), np.full(3, 0.5 if d.kind == "f" else 0).astype(d.numpy)
        op = Select(value((3,), "bool"), value((3,), d.name), value((3,), d.name))
        assert op.infer() == (TileType((3,), d.name),)
        same(np.asarray(op.reference(c, a, b)), np.array([x if t else y for t, x, y in zip(c, a, b)], d.numpy))


# -- conversions ------------------------------------------------------------------------------------------------------


def cast(x: np.ndarray, dtype: str) -> np.ndarray:
    op = Cast(value(x.shape, x.dtype.name), dtype)
    assert op.infer() == (TileType(x.shape, dtype),)
    out = op.reference(x)
    assert out.dtype == DTYPES[dtype].numpy
    return out


@pytest.mark.parametrize("src", INTS)
@pytest.mark.parametrize("dst", INTS)
def test_int_to_int_wraps(src, dst):
    x = int_samples(src)
    assert [int(v) for v in cast(x, dst)] == [wrap(int(v), dst) for v in x]


@pytest.mark.parametrize("src", FLOATS)
@pytest.mark.parametrize("dst", INTS)
def test_float_to_int_truncates_and_saturates(src, dst):
    x = float_samples(src) if src not in SCALES else np.array([0.5, 1, 2, 4, 6, 1.5]).astype(DTYPES[src].numpy)
    lo, hi = limits(dst)
    with np.errstate(over="ignore"):
        more = np.array([lo, hi, hi + 1.0, lo - 1.0, lo - 0.5, hi + 0.5, 1.99, -1.99]).astype(DTYPES[src].numpy)
    x = np.concatenate([x, more])

    def want(v: float) -> int:
        if math.isnan(v):
            return 0
        return int(min(max(v, lo), hi)) if math.isinf(v) else min(max(math.trunc(v), lo), hi)

    want_list = [lo if v == -math.inf else hi if v == math.inf else want(v) for v in x.astype(np.float64).tolist()]
    assert [int(v) for v in cast(x, dst)] == want_list


@pytest.mark.parametrize("src", INTS)
@pytest.mark.parametrize("dst", ARITHMETIC)
def test_int_to_float(src, dst):
    """Rounded to nearest even; 32- and 64-bit integers pass through float32 on the way to narrower floats."""
    x = int_samples(src)
    exact = np.array([float(int(v)) for v in x])
    if DTYPES[dst].bits < 32 and DTYPES[src].bits >= 32:
        exact = np.array([np.float32(int(v)) for v in x], np.float32).astype(np.float64)
    with np.errstate(all="ignore"):
        want = exact.astype(np.float32).astype(DTYPES[dst].numpy) if DTYPES[dst].bits < 64 else exact
        direct = np.array([np.float32(int(v)) for v in x]) if dst == "float32" else want
    same(cast(x, dst), direct)


@pytest.mark.parametrize("src", FLOATS)
@pytest.mark.parametrize("dst", FLOATS)
def test_float_to_float(src, dst):
    x = float_samples(src) if src not in SCALES else np.array([0.5, 1, 2, 4, 6, 1.5]).astype(DTYPES[src].numpy)
    if dst == "float8_e8m0fnu":
        x = np.array([0.5, 1, 2, 4]).astype(DTYPES[src].numpy)
    if dst == "float4_e2m1fn":
        x = np.array([0.5, 1, 1.5, 4, 6]).astype(DTYPES[src].numpy)
    with np.errstate(all="ignore"):
        wide = x.astype(np.float32) if DTYPES[dst].bits < 32 else x
        same(cast(x, dst), wide.astype(DTYPES[dst].numpy))


@pytest.mark.parametrize("dtype", FLOATS + INTS)
def test_to_and_from_bool(dtype):
    bits = np.array([False, True])
    if dtype != "float8_e8m0fnu":  # has no zero
        ones = cast(bits, dtype)
        assert ones.astype(np.float64).tolist() == [0.0, 1.0]
        assert cast(ones, "bool").tolist() == [False, True]
    if dtype in ARITHMETIC:
        x = float_samples(dtype)
        assert cast(x, "bool").tolist() == [v != 0 for v in x.astype(np.float64).tolist()]


@pytest.mark.parametrize("bits", [4, 8, 16, 32, 64])
def test_bitcast_keeps_bits(bits):
    names = [d.name for d in DTYPES.values() if d.bits == bits and d.name != "bool"]
    for a in names:
        for b in names:
            x = int_samples(a) if a in INTS else np.array([1.0, 2.0, 4.0]).astype(DTYPES[a].numpy)
            op = Bitcast(value(x.shape, a), b)
            (t,) = op.infer()
            out = op.reference(x)
            assert (t.dtype, out.shape) == (b, x.shape)
            raw = lambda v: [int.from_bytes(e.tobytes(), "little") % (1 << bits) for e in v]
            assert raw(out) == raw(x)
    with pytest.raises(TypeError, match="width"):
        Bitcast(value((1,), "float32"), "int64").infer()
