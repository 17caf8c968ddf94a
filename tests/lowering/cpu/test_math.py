"""Math functions against float64 references, over all exponents, on every instruction set this machine can run."""

from __future__ import annotations

import functools
import math
import re

import numpy as np
import pytest

from jtile.lowering.cpu.isa import ISAS, host_isa
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


def _cbrt(x):
    """By long doubles: the C library's cbrt of doubles is off by up to three units in the last place somewhere."""
    return np.cbrt(np.asarray(x, np.longdouble)).astype(np.float64)


REFERENCE = {
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2, "log1p": np.log1p,
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": _cbrt, "sin": np.sin, "cos": np.cos, "tan": np.tan,
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


def _wrong(got, want, bound, inputs) -> list[str]:
    """What is wrong, if anything."""
    error = ulps(got, want)
    worst = int(np.argmax(error))
    if error[worst] <= bound:
        return []
    place = [float(x[worst]) for x in inputs]
    return [f"{error[worst]:.3g} ulp at {place}: got {got[worst]!r}, expected {want[worst]!r}"]


# The reference is NumPy's or math's own float64, so that the bound is ours plus one ulp of theirs.
FLOAT64_LOOSE = {"digamma", "lgamma", "erf_inv", "logistic", "rsqrt"}


@functools.cache
def points(fn: str, dtype: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Arguments, and the results in float64; once for all instruction sets."""
    if fn in BINARY and dtype == "float32":
        xs = [sweep("float32", 20000, 1), np.random.default_rng(2).permutation(sweep("float32", 20000, 3))]
    elif fn in BINARY:
        rng = np.random.default_rng(7)
        x = np.concatenate([sweep("float64", 2000, 1), 10.0 ** rng.uniform(-300, 300, 3000), rng.uniform(0, 2, 3000)])
        y = [rng.permutation(sweep("float64", 2000, 3)), rng.uniform(-1, 1, 3000), rng.uniform(0, 900, 3000)]
        xs = [x, np.concatenate(y)]
    elif dtype == "float32":
        xs = [sweep("float32", 2000 if fn in ("erf_inv", "digamma") else 20000, seed=len(fn))]
    else:
        x = sweep("float64", 1000 if fn in FLOAT64_LOOSE else 2000, seed=len(fn))
        if fn in ("digamma", "lgamma"):
            x = x[~((x < -0.4) & (np.abs(x - np.rint(x)) < 1e-3)) & ~(x < -300)]  # poles: x itself decides
        xs = [x]
    return xs, REFERENCE[fn](*(x.astype(np.float64) for x in xs))


def _prepare(elementwise, isa: str, dtypes, fns, lanes: int = 0) -> None:
    """One module of several functions: the fixed costs of a module are those of a function."""
    wanted = [(fn, (dtype,) * (2 if fn in BINARY else 1), dtype) for dtype in dtypes for fn in fns]
    elementwise.prepare(isa, wanted, lanes)


def _signs(got, want) -> list[str]:
    exact = (got == 0) & (want == 0) & ~np.isnan(got)
    return [] if np.array_equal(np.signbit(got[exact]), np.signbit(want[exact])) else ["zeros of the wrong sign"]


def test_float32_is_within_its_bound(elementwise, native_isa):
    _prepare(elementwise, native_isa, ["float32"], sorted([*UNARY, *BINARY]))
    faults = {}
    for fn in sorted([*UNARY, *BINARY]):
        xs, want = points(fn, "float32")
        got = elementwise.run(native_isa, fn, ("float32",) * len(xs), "float32", *xs)
        faults[fn] = _wrong(got, want, ULP_BOUNDS[fn], xs) + (_signs(got, want) if fn in BINARY else [])
    assert not any(faults.values()), {fn: fault for fn, fault in faults.items() if fault}


def test_float64_is_within_its_bound(elementwise, native_isa):
    """Where the reference is not exact: a relative error of 2e-14; absolute near zeros of the gamma functions."""
    _prepare(elementwise, native_isa, ["float64"], sorted([*UNARY, *BINARY]))
    faults = {}
    for fn in sorted([*UNARY, *BINARY]):
        xs, want = points(fn, "float64")
        got = elementwise.run(native_isa, fn, ("float64",) * len(xs), "float64", *xs)
        if fn not in FLOAT64_LOOSE:
            faults[fn] = _wrong(got, want, ULP_BOUNDS[fn] + 1, xs)
            continue
        ok = np.isfinite(want)
        slack = 2e-14 * np.abs(want[ok]) + (2e-14 if fn in ("digamma", "lgamma") else 0)
        bad = ~(np.isfinite(got[ok]) & (np.abs(got[ok] - want[ok]) <= slack))
        faults[fn] = [f"wrong at {xs[0][ok][bad][:3]}"] if bad.any() else []
        faults[fn] += [] if np.array_equal(np.isfinite(got), ok) else ["infinite elsewhere"]
    assert not any(faults.values()), {fn: fault for fn, fault in faults.items() if fault}


def test_signed_zero_is_kept_by_odd_functions(elementwise, native_isa):
    zero = np.array([-0.0, 0.0], np.float32)
    odd = ("expm1", "log1p", "sqrt", "cbrt", "sin", "tan", "asin", "atan", "sinh", "tanh", "asinh", "atanh", "erf",
           "erf_inv")  # fmt: skip
    _prepare(elementwise, native_isa, ["float32", "float64"], odd)
    for fn in odd:
        for dtype in ("float32", "float64"):
            got = elementwise.run(native_isa, fn, (dtype,), dtype, zero.astype(dtype))
            assert np.array_equal(np.signbit(got), [True, False]), (fn, dtype)


def test_sin_and_cos_of_the_hardest_float64(elementwise, native_isa):
    # The double that is nearest to a multiple of pi/2: cos of it is -4.687165924254624e-19.
    x = np.array([6381956970095103.0 * 2.0**797])
    assert elementwise.run(native_isa, "cos", ("float64",), "float64", x)[0] == pytest.approx(
        -4.687165924254627e-19, rel=1e-14
    )


def test_sin_and_cos_near_multiples_of_their_period(elementwise, native_isa):
    """Angles that the quick reduction of a float64 may take, that are too near to a zero for it, and too large."""
    rng = np.random.default_rng(5)
    k = np.concatenate([np.arange(-400, 400), rng.integers(-(2**21), 2**21, 1200)])
    x = k * (np.pi / 2) * (1 + rng.choice([0.0, 1e-16, 1e-12, 1e-9, 1e-6], k.size) * rng.normal(size=k.size))
    _prepare(elementwise, native_isa, ["float64"], ["sin", "cos"])
    for fn in ("sin", "cos"):
        got = elementwise.run(native_isa, fn, ("float64",), "float64", x)
        assert not _wrong(got, REFERENCE[fn](x), ULP_BOUNDS[fn] + 1, [x]), fn


def test_half_types_are_rounded_float32_results(elementwise, native_isa):
    fns = ("exp", "tanh", "log", "sin")
    _prepare(elementwise, native_isa, ["float32", "bfloat16", "float16"], fns)
    for dtype in ("bfloat16", "float16"):
        bits = np.arange(65536, dtype=np.uint16)
        x = bits.view(elementwise.numpy_dtype(dtype))
        for fn in fns:
            wide = elementwise.run(native_isa, fn, ("float32",), "float32", x.astype(np.float32))
            got = elementwise.run(native_isa, fn, (dtype,), dtype, x)
            want = wide.astype(x.dtype)
            assert np.array_equal(got.astype(np.float32), want.astype(np.float32), equal_nan=True), (dtype, fn)


@pytest.mark.parametrize("lanes", [1, 3, "more"], ids=str)
def test_any_number_of_lanes_gives_the_same_bits(elementwise, native_isa, lanes):
    """One lane, a part of a vector, one and a half vectors of float32."""
    isa = host_isa() if native_isa == "host" else ISAS[native_isa]
    lanes = isa.lanes(32) * 3 // 2 if lanes == "more" else lanes
    fns = ("exp", "erfc", "sin", "log")
    _prepare(elementwise, native_isa, ["float32", "float64"], fns)
    _prepare(elementwise, native_isa, ["float32", "float64"], fns, lanes)
    for dtype in ("float32", "float64"):
        x = sweep(dtype, 500, 11)
        for fn in fns:
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
def test_objects_have_no_undefined_symbols(elementwise, any_isa, dtype, compiled_isas):
    """In scalar code too; vectors of an instruction set that runs here have been looked at by the tests above."""
    isa, both = ISAS[any_isa], [*UNARY, *BINARY]
    for lanes in (1,) if any_isa in compiled_isas else (1, isa.lanes(32)):
        module = elementwise.module(isa)
        for fn in both:
            count = 2 if fn in BINARY else 1
            elementwise.emit(module, isa, f"k_{fn}", fn, (dtype,) * count, dtype, lanes)
        elementwise.compile(module, isa, optimise=False)


def test_every_function_has_a_bound():
    assert set(ULP_BOUNDS) == set(UNARY) | set(BINARY)


def test_what_underflows_is_left_out_by_a_mask(elementwise):
    """A lane whose exponential is zero costs nothing: its scaling would take an Intel core some hundred cycles."""
    for fn, out in (("exp", "float32"), ("exp2", "float32"), ("exp", "float64")):
        isa = ISAS["avx512"]
        module = elementwise.module(isa)
        elementwise.emit(module, isa, "f", fn, (out,), out, isa.lanes(32 if out == "float32" else 64))
        calls = re.findall(r"@llvm\.x86\.avx512\.mask\.scalef\.\w+\.512\(.*, (i\d+ [^,]+), i32 4\)", module.text())
        calls = [mask for mask in calls if "%" in mask]
        assert len(calls) == 1, (fn, out)
        assert ("permvar" in module.text()) == (out == "float32")
