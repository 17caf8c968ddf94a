"""Math functions against float64 references, over all exponents, on every instruction set this machine can run."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jtile.lowering.cpu.isa import ISAS
from jtile.lowering.cpu.math import BINARY, ULP_BOUNDS, UNARY

INF, NAN = np.inf, np.nan
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def _each(fn, *dtypes):
    return np.vectorize(fn, otypes=[np.float64])


def _digamma(x):
    if not math.isfinite(x):
        return INF if x == INF else NAN
    if x == 0:
        return math.copysign(INF, -x)
    if x < 0.5:
        if x == math.floor(x):
            return NAN
        f = x - round(x)
        return _digamma(1 - x) - math.pi / math.tan(math.pi * f)
    total = 0.0
    while x < 20:
        total -= 1 / x
        x += 1
    i = 1 / (x * x)
    return total + math.log(x) - 0.5 / x - i * (1 / 12 - i * (1 / 120 - i * (1 / 252 - i / 240)))


def _erf_inv(x):
    """Bisection on the bits would be slow: Newton on erf from a rough start, in float64."""
    if abs(x) >= 1 or x != x:
        return math.copysign(INF, x) if abs(x) == 1 else NAN
    a = abs(x)
    w = -math.log((1 - a) * (1 + a)) if a > 1e-8 else 0.0
    y = a * 0.886226925452758 if a < 0.5 else math.sqrt(max(w - 0.5 * math.log(max(w, 1.0) * math.pi), 0.1))
    for _ in range(60):
        error = (math.erf(y) - a) if a < 0.5 else ((1 - a) - math.erfc(y))
        step = error / (2 / math.sqrt(math.pi) * math.exp(-y * y))
        y -= max(min(step, 0.25), -0.25)
        if abs(step) <= 1e-16 * y:
            break
    return math.copysign(y, x)


def _logistic(x):
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1.0) / (1 + e)


def _lgamma(x):
    pole = x == -INF or (x <= 0 and x == math.floor(x))
    return INF if pole or x > 2.5e305 else math.lgamma(x)


REFERENCE = {
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2, "log1p": np.log1p,
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": np.cbrt, "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "logistic": _logistic, "erf": _each(math.erf),
    "erfc": _each(math.erfc), "erf_inv": _each(_erf_inv), "lgamma": _each(_lgamma), "digamma": _each(_digamma),
    "pow": np.power, "atan2": np.arctan2,
}  # fmt: skip


def sweep(dtype: str, count: int, seed: int) -> np.ndarray:
    """All bit patterns alike, log-spaced, the usual ranges, around 1, and the edges."""
    rng = np.random.default_rng(seed)
    width = 32 if dtype == "float32" else 64
    patterns = rng.integers(0, 2**width, count, dtype=f"uint{width}").view(dtype)
    spaced = rng.choice([-1.0, 1.0], count) * 10.0 ** rng.uniform(-8, 3, count)
    near = [rng.uniform(-1.2, 1.2, count), rng.uniform(-30, 30, count), rng.uniform(-110, 110, count // 4)]
    one = 1 + rng.choice([-1.0, 1.0], count // 4) * 10.0 ** rng.uniform(-7, -1, count // 4)
    info = np.finfo(dtype)
    edges = [0.0, 1, 2, 3, 0.5, 0.25, INF, info.max, info.tiny, info.smallest_subnormal, 1e22, 1e30, np.pi, np.pi / 2]
    limits = [88.72, 88.73, 103.9, 104.1, 127.99, 128, 149, 150, 709.78, 709.79, 745.1, 745.2, 1023.9, 1074, 1076]
    edges = np.array([*edges, *limits, *(-e for e in (*edges, *limits)), NAN])
    return np.concatenate([patterns, *(a.astype(dtype) for a in (spaced, *near, one, edges))])


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """|got - want| in units of the last place of `got`'s dtype at `want` (float64); 0 for equal specials."""
    info = np.finfo(got.dtype)
    rounded = want.astype(got.dtype)
    exponent = np.maximum(np.frexp(np.abs(want))[1] - 1, info.minexp) - info.nmant
    distance = np.abs(got.astype(np.float64) - want) / np.ldexp(1.0, exponent)
    special = ~(np.isfinite(got) & np.isfinite(rounded))
    agree = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
    edge = (np.abs(want) > 0.9999999 * info.max) & (np.abs(got) > 0.9999999 * info.max)  # which side of overflow
    return np.where(special, np.where(agree | edge, 0.0, INF), distance)


def _check(got, want, bound, inputs):
    error = ulps(got, want)
    worst = int(np.argmax(error))
    place = [float(x[worst]) for x in inputs]
    assert error[worst] <= bound, f"{error[worst]:.3g} ulp at {place}: got {got[worst]!r}, expected {want[worst]!r}"


@pytest.mark.parametrize("fn", sorted(UNARY))
def test_float32_is_within_its_bound(elementwise, native_isa, fn):
    slow = fn in ("erf_inv", "digamma")
    x = sweep("float32", 2000 if slow else 20000, seed=len(fn))
    got = elementwise.run(native_isa, fn, ("float32",), "float32", x)
    _check(got, REFERENCE[fn](x.astype(np.float64)), ULP_BOUNDS[fn], [x])


@pytest.mark.parametrize("fn", sorted(BINARY))
def test_float32_binary_is_within_its_bound(elementwise, native_isa, fn):
    x, y = sweep("float32", 20000, 1), np.random.default_rng(2).permutation(sweep("float32", 20000, 3))
    got = elementwise.run(native_isa, fn, ("float32", "float32"), "float32", x, y)
    want = REFERENCE[fn](x.astype(np.float64), y.astype(np.float64))
    _check(got, want, ULP_BOUNDS[fn], [x, y])
    exact = (got == 0) & (want == 0) & ~np.isnan(got)
    assert np.array_equal(np.signbit(got[exact]), np.signbit(want[exact]))


# The reference is NumPy's or math's own float64, so that the bound is ours plus one ulp of theirs.
FLOAT64_LOOSE = {"digamma", "lgamma", "erf_inv", "logistic", "rsqrt"}


@pytest.mark.parametrize("fn", sorted(set(UNARY) - FLOAT64_LOOSE))
def test_float64_is_within_its_bound(elementwise, native_isa, fn):
    x = sweep("float64", 2000, seed=len(fn))
    got = elementwise.run(native_isa, fn, ("float64",), "float64", x)
    _check(got, REFERENCE[fn](x), ULP_BOUNDS[fn] + 1, [x])


@pytest.mark.parametrize("fn", sorted(FLOAT64_LOOSE))
def test_float64_where_the_reference_is_not_exact(elementwise, native_isa, fn):
    """Relative error 1e-14, or 4e-15 absolute near the zeros of the gamma functions."""
    x = sweep("float64", 1000, seed=len(fn))
    if fn in ("digamma", "lgamma"):
        x = x[~((x < -0.4) & (np.abs(x - np.rint(x)) < 1e-3)) & ~(x < -300)]  # poles: x itself decides
    got = elementwise.run(native_isa, fn, ("float64",), "float64", x)
    want = REFERENCE[fn](x)
    assert np.array_equal(np.isfinite(got), np.isfinite(want))
    ok = np.isfinite(want)
    np.testing.assert_allclose(got[ok], want[ok], rtol=2e-14, atol=2e-14 if fn in ("digamma", "lgamma") else 0)


@pytest.mark.parametrize("fn", sorted(BINARY))
def test_float64_binary(elementwise, native_isa, fn):
    rng = np.random.default_rng(7)
    x = np.concatenate([sweep("float64", 2000, 1), 10.0 ** rng.uniform(-300, 300, 3000), rng.uniform(0, 2, 3000)])
    y = np.concatenate(
        [rng.permutation(sweep("float64", 2000, 3)), rng.uniform(-1, 1, 3000), rng.uniform(0, 900, 3000)]
    )
    got = elementwise.run(native_isa, fn, ("float64", "float64"), "float64", x, y)
    _check(got, REFERENCE[fn](x, y), ULP_BOUNDS[fn] + 1, [x, y])


def test_signed_zero_is_kept_by_odd_functions(elementwise, native_isa):
    zero = np.array([-0.0, 0.0], np.float32)
    for fn in ("expm1", "log1p", "sqrt", "cbrt", "sin", "tan", "asin", "atan", "sinh", "tanh", "asinh", "atanh", "erf",
               "erf_inv"):  # fmt: skip
        for dtype in ("float32", "float64"):
            got = elementwise.run(native_isa, fn, (dtype,), dtype, zero.astype(dtype))
            assert np.array_equal(np.signbit(got), [True, False]), (fn, dtype)


def test_sin_and_cos_of_the_hardest_float64(elementwise, native_isa):
    # The double that is nearest to a multiple of pi/2: cos of it is -4.687165924254624e-19.
    x = np.array([6381956970095103.0 * 2.0**797])
    assert elementwise.run(native_isa, "cos", ("float64",), "float64", x)[0] == pytest.approx(
        -4.687165924254627e-19, rel=1e-14
    )


def test_half_types_are_rounded_float32_results(elementwise, native_isa):
    for dtype in ("bfloat16", "float16"):
        bits = np.arange(65536, dtype=np.uint16)
        x = bits.view(elementwise.numpy_dtype(dtype))
        for fn in ("exp", "tanh", "log", "sin"):
            wide = elementwise.run(native_isa, fn, ("float32",), "float32", x.astype(np.float32))
            got = elementwise.run(native_isa, fn, (dtype,), dtype, x)
            want = wide.astype(x.dtype)
            assert np.array_equal(got.astype(np.float32), want.astype(np.float32), equal_nan=True), (dtype, fn)


@pytest.mark.parametrize("lanes", [1, 3, 24])
def test_any_number_of_lanes_gives_the_same_bits(elementwise, native_isa, lanes):
    for dtype in ("float32", "float64"):
        x = sweep(dtype, 500, 11)
        for fn in ("exp", "erfc", "sin", "log"):
            want = elementwise.run(native_isa, fn, (dtype,), dtype, x)
            got = elementwise.run(native_isa, fn, (dtype,), dtype, x, lanes=lanes)
            assert np.array_equal(got, want, equal_nan=True), (fn, dtype)


def test_three_full_vectors_give_the_same_bits(elementwise):
    for dtype, lanes in (("float32", 48), ("float64", 40)):
        x = sweep(dtype, 500, 12)
        want = elementwise.run("host", "exp", (dtype,), dtype, x)
        assert np.array_equal(elementwise.run("host", "exp", (dtype,), dtype, x, lanes=lanes), want, equal_nan=True)


@pytest.mark.parametrize("any_isa", sorted(ISAS))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_objects_have_no_undefined_symbols(elementwise, any_isa, dtype):
    isa = ISAS[any_isa]
    for lanes in (1, isa.lanes(32)):
        module = elementwise.module(isa)
        for fn in [*UNARY, *BINARY]:
            count = 2 if fn in BINARY else 1
            elementwise.emit(module, isa, f"k_{fn}", fn, (dtype,) * count, dtype, lanes)
        elementwise.compile(module, isa, optimise=False)


def test_every_function_has_a_bound():
    assert set(ULP_BOUNDS) == set(UNARY) | set(BINARY)
