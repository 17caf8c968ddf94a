"""Arithmetic, comparisons and bit operations of every dtype against Python integers and NumPy."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from draws import thorough
from op_matrix import ALIKE

from jtile.ir.elementwise import ELEMENTWISE, compute
from jtile.ir.types import DTYPES
from jtile.lowering.cpu.elementwise import emit_elementwise, functions
from jtile.lowering.cpu.isa import ISAS
from jtile.lowering.cpu.llvm import Code, Val
from jtile.lowering.cpu.math import BINARY, UNARY

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INTS = [f"{u}int{n}" for n in (2, 4, 8, 16, 32, 64) for u in ("", "u")]
SMALL = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]
COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
           "ge": np.greater_equal}  # fmt: skip


# -- integers ---------------------------------------------------------------------------------------------------------
def _bits(dtype: str) -> int:
    return int(dtype.lstrip("uint"))


def _range(dtype: str) -> tuple[int, int]:
    n = _bits(dtype)
    return (0, 2**n - 1) if dtype.startswith("u") else (-(2 ** (n - 1)), 2 ** (n - 1) - 1)


def _truncated(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


INT_REFERENCE = {  # n: bits, m: the mask of them
    "add": lambda x, y, n, m: x + y,
    "sub": lambda x, y, n, m: x - y,
    "mul": lambda x, y, n, m: x * y,
    "div": lambda x, y, n, m: -1 if y == 0 else _truncated(x, y),
    "rem": lambda x, y, n, m: x if y == 0 else x - y * _truncated(x, y),
    "max": lambda x, y, n, m: max(x, y),
    "min": lambda x, y, n, m: min(x, y),
    "and": lambda x, y, n, m: x & y,
    "or": lambda x, y, n, m: x | y,
    "xor": lambda x, y, n, m: x ^ y,
    "shl": lambda x, y, n, m: x << (y & m) if (y & m) < n else 0,
    "shr": lambda x, y, n, m: x >> min(y & m, n),
    "shr_logical": lambda x, y, n, m: (x & m) >> (y & m) if (y & m) < n else 0,
    "mulhi": lambda x, y, n, m: (x * y) >> n,
    "neg": lambda x, n, m: -x,
    "abs": lambda x, n, m: abs(x),
    "sign": lambda x, n, m: (x > 0) - (x < 0),
    "square": lambda x, n, m: x * x,
    "not": lambda x, n, m: ~x,
    "popcount": lambda x, n, m: (x & m).bit_count(),
    "clz": lambda x, n, m: n - (x & m).bit_length(),
    "clamp": lambda lo, x, hi, n, m: min(max(lo, x), hi),
}
ARITY = {fn: f.__code__.co_argcount - 2 for fn, f in INT_REFERENCE.items()}


def int_pairs(dtype: str, numpy_dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Every pair up to 8 bits (a third of them for speed of the reference), chosen and random values above."""
    lo, hi = _range(dtype)
    n = _bits(dtype)
    rng = np.random.default_rng(n)
    if n <= 4:
        values = list(range(lo, hi + 1))
    else:
        chosen = [lo, lo + 1, hi, hi - 1, 0, 1, 2, 3, 7, n - 1, n, n + 1, *(v for v in (-1, -2, -3, -7) if v >= lo)]
        powers = [2**k + d for k in range(0, n, 5) for d in (-1, 0)]
        random = rng.integers(lo, hi, 20, dtype=numpy_dtype, endpoint=True).tolist()
        values = sorted({v for v in (*chosen, *powers, *random) if lo <= v <= hi})
    x, y = np.meshgrid(np.array(values, numpy_dtype), np.array(values, numpy_dtype))
    return x.ravel(), y.ravel()


@functools.cache
def _expected(fn: str, dtype: str, numpy_dtype: np.dtype) -> tuple[list[np.ndarray], list[int]]:
    """Operands and results; once for all instruction sets."""
    x, y = int_pairs(dtype, numpy_dtype)
    columns = [x, y, np.roll(y, 3)][: ARITY[fn]]
    n = _bits(dtype)
    m = 2**n - 1
    lo, _ = _range(dtype)
    raw = [INT_REFERENCE[fn](*row, n, m) & m for row in zip(*(c.tolist() for c in columns), strict=True)]
    return columns, [v - 2**n if lo < 0 and v >> (n - 1) else v for v in raw]


@pytest.mark.parametrize("dtype", INTS)
def test_integers(elementwise, native_isa, dtype):
    x, y = int_pairs(dtype, elementwise.numpy_dtype(dtype))
    names = {fn: arity for fn, arity in ARITY.items() if fn in functions(dtype)}
    wanted = [(fn, (dtype,) * arity, dtype) for fn, arity in names.items()]
    elementwise.prepare(native_isa, wanted + [(fn, (dtype, dtype), "bool") for fn in COMPARE])
    for fn, arity in names.items():
        columns, want = _expected(fn, dtype, elementwise.numpy_dtype(dtype))
        got = elementwise.run(native_isa, fn, (dtype,) * arity, dtype, *columns).tolist()
        wrong = [i for i, (g, w) in enumerate(zip(got, want, strict=True)) if g != w]
        assert not wrong, (fn, dtype, [c[wrong[0]] for c in columns], got[wrong[0]], want[wrong[0]])
    for fn, compare in COMPARE.items():
        assert np.array_equal(elementwise.run(native_isa, fn, (dtype, dtype), "bool", x, y), compare(x, y)), fn


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_8_bit_division_of_every_pair(elementwise, native_isa, dtype):
    values = np.arange(256, dtype=np.uint8).view(dtype)
    x, y = (v.ravel() for v in np.meshgrid(values, values))
    wide_x, wide_y = x.astype(np.int32), y.astype(np.int32)
    safe = np.where(wide_y == 0, 1, wide_y)
    quotient = np.trunc(wide_x / safe).astype(np.int32)
    want = np.where(wide_y == 0, -1, quotient).astype(dtype)
    rest = np.where(wide_y == 0, wide_x, wide_x - safe * quotient).astype(dtype)
    elementwise.prepare(native_isa, [(fn, (dtype, dtype), dtype) for fn in ("div", "rem")])
    assert np.array_equal(elementwise.run(native_isa, "div", (dtype, dtype), dtype, x, y), want)
    assert np.array_equal(elementwise.run(native_isa, "rem", (dtype, dtype), dtype, x, y), rest)


@pytest.mark.parametrize("dtype", ["int16", "uint16", "int32", "uint32"])
def test_vector_division_of_random_values(elementwise, native_isa, dtype):
    rng = np.random.default_rng(0)
    info = np.iinfo(dtype)
    x = rng.integers(info.min, info.max, 100_000, dtype=dtype, endpoint=True)
    y = (
        rng.integers(info.min, info.max, x.size, dtype=dtype, endpoint=True) >> rng.integers(0, info.bits, x.size)
    ).astype(dtype)
    y[y == 0] = 3
    near = (x // y * y).astype(dtype)  # quotients that are whole, and one less
    x = np.concatenate([x, near, near - np.array(1, dtype)])
    y = np.concatenate([y, y, y])
    ok = ~((x == info.min) & (y.astype(np.int64) == -1))
    x, y = x[ok], y[ok]
    remainder = np.fmod(x, y)
    want = (x.astype(np.int64) - remainder.astype(np.int64)) // y.astype(np.int64)
    elementwise.prepare(native_isa, [(fn, (dtype, dtype), dtype) for fn in ("div", "rem")])
    assert np.array_equal(elementwise.run(native_isa, "div", (dtype, dtype), dtype, x, y), want.astype(dtype))
    assert np.array_equal(elementwise.run(native_isa, "rem", (dtype, dtype), dtype, x, y), remainder)


def test_bool(elementwise, native_isa):
    x, y = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    reference = {"add": x | y, "mul": x & y, "max": x | y, "min": x & y, "and": x & y, "or": x | y, "xor": x ^ y}
    reference |= {fn: compare(x, y) for fn, compare in COMPARE.items()}
    elementwise.prepare(native_isa, [(fn, ("bool", "bool"), "bool") for fn in reference] + [("not", ("bool",), "bool")])
    for fn, want in reference.items():
        assert np.array_equal(elementwise.run(native_isa, fn, ("bool", "bool"), "bool", x, y), want), fn
    assert np.array_equal(elementwise.run(native_isa, "not", ("bool",), "bool", x), ~x)


# -- floats -----------------------------------------------------------------------------------------------------------
def floats(dtype: str, numpy_dtype: np.dtype, count: int = 4000) -> np.ndarray:
    if dtype == "float4_e2m1fn":
        return np.arange(16, dtype=np.uint8).view(numpy_dtype)
    width = numpy_dtype.itemsize * 8
    if width == 8:
        return np.arange(256, dtype=np.uint8).view(numpy_dtype)
    rng = np.random.default_rng(width)
    patterns = rng.integers(0, 2**width, count, dtype=f"uint{width}").view(numpy_dtype)
    plain = (rng.choice([-1, 1], count) * 2.0 ** rng.uniform(-12, 12, count)).astype(numpy_dtype)
    halves = (rng.integers(-60, 60, count) / 2).astype(numpy_dtype)
    big = np.array([2.0**22 + 0.5, 2.0**23 - 0.5, 2.0**23 + 1, 2.0**52 - 0.5, 2.0**31, 0.49999997, 0.49999999999999994])
    edges = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 0.5, -0.5, 1.5, -1.5, 2.5])
    return np.concatenate([patterns, plain, halves, big.astype(numpy_dtype), edges.astype(numpy_dtype)])


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64 if x.dtype == np.float64 else np.float32)


def _round_away(x):
    return np.copysign(np.floor(np.abs(x)) + (np.abs(x) - np.floor(np.abs(x)) >= 0.5), x)


FLOAT_UNARY = {
    "neg": np.negative, "abs": np.abs, "sign": np.sign, "square": np.square, "round": np.rint, "floor": np.floor,
    "ceil": np.ceil, "round_away": _round_away, "sqrt": np.sqrt,
}  # fmt: skip
FLOAT_BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "rem": np.fmod,
                "max": np.maximum, "min": np.minimum}  # fmt: skip


def _same(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    if got.tobytes() == want.tobytes():
        return np.ones(got.shape, bool)
    got, want = _wide(got), _wide(want)
    return (got == want) | (np.isnan(got) & np.isnan(want))


@functools.cache
def _operands(dtype: str, numpy_dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    x = floats(dtype, numpy_dtype)
    if x.size > 256:
        return x, np.random.default_rng(3).permutation(x)
    x, y = (v.ravel() for v in np.meshgrid(x.view(np.uint8), x.view(np.uint8)))
    return x.view(numpy_dtype), y.view(numpy_dtype)


@functools.cache
def _rounded(fn: str, dtype: str, numpy_dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The results, and which do not count: every value of float4_e2m1fn is a number, so that some have none there."""
    xs = [_wide(v) for v in _operands(dtype, numpy_dtype)]
    raw = FLOAT_UNARY[fn](xs[0]) if fn in FLOAT_UNARY else FLOAT_BINARY[fn](*xs)
    return raw.astype(numpy_dtype), (dtype == "float4_e2m1fn") & ~np.isfinite(raw)


@pytest.mark.parametrize("dtype", ["float32", "float64", *SMALL])
def test_floats_round_like_numpy(elementwise, native_isa, dtype):
    numpy_dtype = elementwise.numpy_dtype(dtype)
    x, y = _operands(dtype, numpy_dtype)
    wanted = [(fn, (dtype,), dtype) for fn in FLOAT_UNARY] + [(fn, (dtype, dtype), dtype) for fn in FLOAT_BINARY]
    predicates = [("is_finite", (dtype,), "bool"), *((fn, (dtype, dtype), "bool") for fn in COMPARE)]
    elementwise.prepare(native_isa, wanted + predicates)
    for fn, dtypes, _ in wanted:
        got = elementwise.run(native_isa, fn, dtypes, dtype, *(x, y)[: len(dtypes)])
        want, excused = _rounded(fn, dtype, numpy_dtype)
        ok = _same(got, want) | excused
        assert ok.all(), (fn, x[~ok][:3], y[~ok][:3], got[~ok][:3], want[~ok][:3])
    wide = _wide(x), _wide(y)
    for fn, compare in COMPARE.items():
        got = elementwise.run(native_isa, fn, (dtype, dtype), "bool", x, y)
        assert np.array_equal(got, compare(*wide)), fn
    assert np.array_equal(elementwise.run(native_isa, "is_finite", (dtype,), "bool", x), np.isfinite(wide[0]))


@pytest.mark.parametrize("fn", ["neg", "abs", "round", "floor", "ceil", "round_away"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rounding_keeps_the_sign_of_zero(elementwise, native_isa, fn, dtype):
    x = np.array([0.0, -0.0, 0.3, -0.3, 0.5, -0.5, 0.7, -0.7], dtype)
    got, want = elementwise.run(native_isa, fn, (dtype,), dtype, x), FLOAT_UNARY[fn](x)
    assert np.array_equal(got, want)
    assert np.array_equal(np.signbit(got), np.signbit(want))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_remainder_of_far_apart_exponents(elementwise, native_isa, dtype):
    info = np.finfo(dtype)
    low = info.smallest_subnormal
    x = np.array([info.max, info.max, 1e30, -1e30, info.tiny, 5.5, -5.5, low * 7], dtype)
    y = np.array([low, info.tiny * 3, 7, 0.3, low * 3, 2, 2, low * 2], dtype)
    got = elementwise.run(native_isa, "rem", (dtype, dtype), dtype, x, y)
    want = np.array([math.fmod(float(a), float(b)) for a, b in zip(x, y, strict=True)], dtype)
    assert np.array_equal(got, want)
    assert np.array_equal(np.signbit(got), np.signbit(want))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_remainder_beside_multiples(elementwise, native_isa, dtype):
    """Quotients that are rounded to an integer, or past one, up to as many bits as a mantissa has, and beyond."""
    rng = np.random.default_rng(0)
    y = rng.normal(size=4000).astype(dtype)
    x = (np.floor(2.0 ** rng.uniform(0, np.finfo(dtype).nmant + 2, 4000)) * y).astype(dtype)
    x = np.stack([np.nextafter(x, np.zeros_like(x)), x, np.nextafter(x, x * 2)]).ravel()
    y = np.tile(y, 3)
    got = elementwise.run(native_isa, "rem", (dtype, dtype), dtype, x, y)
    assert np.array_equal(got, np.fmod(x, y))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_nextafter(elementwise, native_isa, dtype):
    x = floats(dtype, np.dtype(dtype), 1000)
    y = np.random.default_rng(4).permutation(x)
    got = elementwise.run(native_isa, "nextafter", (dtype, dtype), dtype, x, y)
    want = np.nextafter(x, y)
    assert _same(got, want).all()
    assert np.array_equal(np.signbit(got[got == 0]), np.signbit(want[got == 0]))


def test_nextafter_of_bfloat16_counts_in_its_own_bits(elementwise, native_isa):
    x = np.arange(0, 0x7F80, dtype=np.uint16).view(elementwise.numpy_dtype("bfloat16"))
    up = elementwise.run(native_isa, "nextafter", ("bfloat16",) * 2, "bfloat16", x, np.full_like(x, np.inf))
    assert np.array_equal(up.view(np.uint16), x.view(np.uint16) + 1)
    down = elementwise.run(native_isa, "nextafter", ("bfloat16",) * 2, "bfloat16", x, np.full_like(x, -np.inf))
    assert np.array_equal(down.view(np.uint16)[1:], x.view(np.uint16)[1:] - 1)
    assert down.view(np.uint16)[0] == 0x8001


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int8", "uint32", "int4"])
def test_clamp_and_select(elementwise, native_isa, dtype):
    numpy_dtype = elementwise.numpy_dtype(dtype)
    x = np.array([-3, -2, -1, 0, 1, 2, 3, 4] if not dtype.startswith("u") else list(range(8))).astype(numpy_dtype)
    lo, hi = np.full_like(x, 1), np.full_like(x, 3)
    got = elementwise.run(native_isa, "clamp", (dtype,) * 3, dtype, lo, x, hi)
    assert np.array_equal(got.astype(np.float32), np.clip(x.astype(np.float32), 1, 3))
    mask = np.arange(8) % 3 == 0
    got = elementwise.run(native_isa, "select", ("bool", dtype, dtype), dtype, mask, x, hi)
    assert np.array_equal(got.astype(np.float32), np.where(mask, x, hi).astype(np.float32))


def test_clamp_keeps_nan(elementwise, native_isa):
    x, one = np.full(4, np.nan, np.float32), np.ones(4, np.float32)
    for columns in ((one, x, one), (x, one, one), (one, one, x)):
        assert np.isnan(elementwise.run(native_isa, "clamp", ("float32",) * 3, "float32", *columns)).all()


@pytest.mark.parametrize("any_isa", sorted(ISAS))
@pytest.mark.parametrize("dtype", [*INTS, "bool", "float32", "float64", *SMALL, "float8_e8m0fnu"])
def test_objects_have_no_undefined_symbols(elementwise, any_isa, dtype, compiled_isas):
    """Of an instruction set that runs here, what the tests above have not compiled."""
    isa = ISAS[any_isa]
    done = set()
    if any_isa in compiled_isas:
        done = {*COMPARE} | {*ARITY} if dtype in INTS else {*COMPARE, *FLOAT_UNARY, *FLOAT_BINARY, "is_finite"}
        done &= set() if dtype in ("bool", "float8_e8m0fnu") else done
    arity = {"clamp": 3, "fma": 3, "select": 3, "nextafter": 2}
    arity |= dict.fromkeys([*COMPARE, *FLOAT_BINARY, "and", "or", "xor", "shl", "shr", "shr_logical", "mulhi"], 2)
    module = elementwise.module(isa)
    left = sorted(functions(dtype) - set(UNARY) - set(BINARY) - done)  # the first two are in test_math.py
    for fn in left:
        inputs = ("bool", dtype, dtype) if fn == "select" else (dtype,) * arity.get(fn, 1)
        out = "bool" if fn in COMPARE or fn == "is_finite" else dtype
        elementwise.emit(module, isa, f"k_{fn}", fn, inputs, out, isa.lanes(32))
    elementwise.compile(module, isa, optimise=False)


def test_an_unknown_function_is_refused(elementwise):
    isa = ISAS["sse2"]
    code = Code(elementwise.module(isa), "k", [])
    with pytest.raises(ValueError, match="no elementwise function 'exp' for dtype int8"):
        emit_elementwise(code, isa, "exp", [Val("i8", "1")], "int8")


# -- the interpreter --------------------------------------------------------------------------------------------------
def _edge_values(dtype: str) -> np.ndarray:
    info = DTYPES[dtype]
    rng = np.random.default_rng(info.bits)
    if info.kind == "b":
        return np.array([False, True])
    if info.bits < 8 and info.kind != "f":
        return (np.arange(1 << info.bits) - (info.kind == "i") * (1 << info.bits) // 2).astype(info.numpy)
    if info.bits < 16:
        return np.arange(16 if info.bits == 4 else 256, dtype=np.uint8).view(info.numpy)[
            :: 1 if info.kind == "f" else 5
        ]
    if info.kind == "f":
        edges = [0.0, 1, 0.5, 1.5, 2.5, 3, np.inf, 1e-3, 30, 88, 100, 1e-40, 2e-38, np.nan]
        return np.concatenate(
            [np.array([*edges, *(-e for e in edges)], info.numpy), (20 * rng.normal(size=40)).astype(info.numpy)]
        )
    limits = np.iinfo(info.numpy)
    return np.concatenate(
        [
            rng.integers(limits.min, limits.max, 30, dtype=info.numpy),
            np.array([limits.min, limits.max, 0, 1, 7], info.numpy),
        ]
    )


@pytest.mark.parametrize("dtype", sorted({*DTYPES} - {*ALIKE}))
def test_every_function_means_what_the_interpreter_says(elementwise, dtype):
    kind, bits = DTYPES[dtype].kind, DTYPES[dtype].bits
    values = _edge_values(dtype)
    i, j = (v.ravel() for v in np.meshgrid(np.arange(values.size), np.arange(values.size)))
    x, y = values[i], values[j]
    columns = [x, y, np.roll(x, 7)]
    known = [f for f in ELEMENTWISE.values() if kind in f.kinds]
    assert {f.name for f in known} <= functions(dtype)
    if kind == "f" and bits <= 8 and not thorough():  # one third of the math, which is float32's: others have the rest
        known = [
            f
            for k, f in enumerate(known)
            if f.name not in (*UNARY, *BINARY) or (k + sorted(DTYPES).index(dtype)) % 3 == 0
        ]
    wanted = [(f.name, (dtype,) * f.arity, "bool" if f.predicate else dtype) for f in known]
    elementwise.prepare("host", wanted)
    last_place = {"float64": 1e-12, "float32": 4e-7, "float16": 2**-10, "bfloat16": 2**-7}.get(dtype, 0.25)
    for f, (fn, dtypes, out) in zip(known, wanted, strict=True):
        args = columns[: f.arity]
        want = compute(f, [a.copy() for a in args]).astype(elementwise.numpy_dtype(out))
        inputs = [a.astype(elementwise.numpy_dtype(dtype)) if bits == 4 and kind != "f" else a for a in args]
        got = elementwise.run("host", fn, dtypes, out, *inputs)
        ok = got == want
        if kind == "f" and not f.predicate:  # the references of float64 are SciPy's: they err and underflow themselves
            g, w = got.astype(np.float64), want.astype(np.float64)
            slack = 0.0 if f.exact else np.abs(w) * last_place + 1e-307 + (2e-14 if fn in ("lgamma", "digamma") else 0)
            ok = (g == w) | (np.isnan(g) & np.isnan(w)) | (np.abs(g - w) <= slack)
        assert ok.all(), (fn, dtype, [a[~ok][:3] for a in args], got[~ok][:3], want[~ok][:3])
