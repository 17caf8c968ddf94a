"""The NumPy meaning of reductions, scans, sorts and products, against formulations made another way."""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from jtile.ir import REDUCERS, ArgReduce, Cumulative, Dot, DotScaled, Reduce, Sort, Value, identity
from jtile.ir.types import DTYPES, TileType

FLOATS = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]
INTS = [d.name for d in DTYPES.values() if d.kind in "iu"]
RNG = np.random.default_rng(0)


def value(x: np.ndarray) -> Value:
    return Value(TileType(x.shape, x.dtype.name))


def run(op, *arrays):
    """The card's reference, after its type check."""
    types = op.infer()
    out = op.reference(*arrays)
    out = out if isinstance(out, tuple) else (out,)
    assert [(o.shape, o.dtype) for o in out] == [(t.shape, DTYPES[t.dtype].numpy) for t in types]
    return out if len(out) > 1 else out[0]


def sample(shape, dtype: str, scale: float = 4.0) -> np.ndarray:
    d = DTYPES[dtype]
    if d.kind == "b":
        return RNG.random(shape) < 0.5
    if d.kind == "f":
        return RNG.uniform(-scale, scale, shape).astype(d.numpy)
    lo = -(1 << (d.bits - 1)) if d.kind == "i" else 0
    carrier = np.int64 if d.kind == "i" else np.uint64
    return RNG.integers(lo, lo + (1 << d.bits) - 1, shape, dtype=carrier, endpoint=True).astype(d.numpy)


def wrap(n: int, dtype: str) -> int:
    d = DTYPES[dtype]
    lo = -(1 << (d.bits - 1)) if d.kind == "i" else 0
    return (n - lo) % (1 << d.bits) + lo


PYTHON = {
    "sum": lambda a, b: a + b, "prod": lambda a, b: a * b, "max": max, "min": min,
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
}  # fmt: skip


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize("fn", sorted(REDUCERS))
def test_int_reductions_wrap(fn, dtype):
    x = sample((3, 5, 2), dtype)
    for axes in [(0,), (1,), (2,), (0, 2), (0, 1, 2), ()]:
        got = run(Reduce(value(x), fn, axes), x)
        keep = [k for k in range(3) if k not in axes]
        rows = x.transpose(*keep, *axes).reshape(*got.shape, -1)
        for i in np.ndindex(got.shape):
            assert int(got[i]) == wrap(functools.reduce(PYTHON[fn], (int(v) for v in rows[i])), dtype)


@pytest.mark.parametrize("fn", ["and", "or", "xor", "max", "min"])
def test_bool_reductions(fn):
    for bits in itertools.product([False, True], repeat=3):
        x = np.array(bits)
        assert bool(run(Reduce(value(x), fn, (0,)), x)) == functools.reduce(PYTHON[fn], bits)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fn", ["sum", "prod", "max", "min"])
def test_float_reductions(fn, dtype):
    x = sample((4, 6), dtype, 1.5)
    for axes in [(0,), (1,), (0, 1), ()]:
        got = run(Reduce(value(x), fn, axes), x)
        w = x.astype(np.float64)
        exact = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}[fn](w, axis=axes)
        info = ml_dtypes.finfo(x.dtype)
        half = float(info.eps) * 0.51 + 1e-7 * (dtype != "float64")
        np.testing.assert_allclose(got.astype(np.float64), exact, rtol=half, atol=float(info.smallest_subnormal))


def test_a_float16_sum_may_pass_through_numbers_beyond_its_range():
    x = np.array([60000, 60000, -60000, -60000, 1], np.float16)
    assert run(Reduce(value(x), "sum", (0,)), x) == 1


@pytest.mark.parametrize("fn", ["max", "min", "sum"])
def test_nan_wins(fn):
    x = np.array([[1, np.nan, 3], [4, 5, 6]], np.float32)
    got = run(Reduce(value(x), fn, (1,)), x)
    assert np.isnan(got).tolist() == [True, False]


@pytest.mark.parametrize("dtype", ["bool", *INTS, *FLOATS])
@pytest.mark.parametrize("fn", sorted(REDUCERS))
def test_empty_axis_gives_the_identity(fn, dtype):
    x = np.zeros((2, 0, 3), DTYPES[dtype].numpy)
    kind = DTYPES[dtype].kind
    if (kind == "f" and fn in ("and", "or", "xor")) or (kind == "b" and fn in ("sum", "prod")):
        with pytest.raises(TypeError, match="not defined"):
            Reduce(value(x), fn, (1,)).infer()
        return
    got = run(Reduce(value(x), fn, (1,)), x)
    unit = np.float64(identity(fn, dtype)) if kind == "f" else identity(fn, dtype)
    if dtype == "float8_e4m3fn" and fn in ("max", "min"):
        return  # has no infinity
    assert got.tolist() == np.full((2, 3), unit).tolist()
    # the identity changes nothing
    if kind != "f":
        one = sample((2,), dtype)
        start = np.full((2,), int(unit), object)
        both = [PYTHON[fn](int(a), int(b)) for a, b in zip(start, one)]
        assert [bool(v) if kind == "b" else wrap(v, dtype) for v in both] == one.tolist()


@pytest.mark.parametrize("dtype", ["bool", *INTS, *FLOATS])
@pytest.mark.parametrize("fn", ["max", "min"])
def test_arg_reduce_takes_the_first(fn, dtype):
    x = sample((3, 9), dtype)
    x[1, 2] = x[1, 7]
    x[2, :] = x[2, 0]
    got = run(ArgReduce(value(x), fn, 1, "int32"), x)
    for row, i in zip(x.tolist(), got.tolist()):
        best = max(map(float, row)) if fn == "max" else min(map(float, row))
        # 64-bit integers may be equal as floats
        first = [float(v) for v in row].index(best)
        assert i == first if DTYPES[dtype].bits < 64 else row[i] == (max if fn == "max" else min)(row)


def test_arg_reduce_of_nan():
    x = np.array([3, np.nan, 9, np.nan], np.float32)
    assert run(ArgReduce(value(x), "max", 0, "int32"), x) == run(ArgReduce(value(x), "min", 0, "int32"), x) == 1
    with pytest.raises(ValueError, match="argmax"):
        ArgReduce(Value(TileType((2, 0), "float32")), "max", 1, "int32").infer()


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize("fn", ["sum", "prod", "max", "min"])
def test_int_scans_wrap(fn, dtype):
    x = sample((2, 7), dtype)
    for reverse in (False, True):
        got = run(Cumulative(value(x), fn, 1, reverse), x)
        rows = x[:, ::-1] if reverse else x
        for row, out in zip(rows, got[:, ::-1] if reverse else got):
            want = [wrap(v, dtype) for v in itertools.accumulate((int(v) for v in row), PYTHON[fn])]
            assert [int(v) for v in out] == want


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fn", ["sum", "prod", "max", "min", "logsumexp"])
def test_float_scans(fn, dtype):
    x = sample((6, 3), dtype, 1.2)
    w = x.astype(np.float64)
    logsumexp = lambda v, axis: np.log(np.exp(v).sum(axis))
    step = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min, "logsumexp": logsumexp}[fn]
    for reverse in (False, True):
        got = run(Cumulative(value(x), fn, 0, reverse), x)
        want = np.stack([step(w[k:] if reverse else w[: k + 1], axis=0) for k in range(6)])
        eps = float(ml_dtypes.finfo(x.dtype).eps)
        tiny = float(ml_dtypes.finfo(x.dtype).smallest_subnormal)
        np.testing.assert_allclose(
            got.astype(np.float64), want, rtol=eps * 0.52 + 1e-7 * (dtype != "float64"), atol=tiny + 1e-15
        )


def test_scan_edges():
    assert run(Cumulative(Value(TileType((0, 3), "float32")), "sum", 0), np.zeros((0, 3), np.float32)).shape == (0, 3)
    x = np.full(3, -np.inf, np.float32)
    assert np.isneginf(run(Cumulative(value(x), "logsumexp", 0), x)).all()
    for fn, dtype in (("sum", "bool"), ("logsumexp", "int32")):
        with pytest.raises(TypeError, match="not defined"):
            Cumulative(Value(TileType((3,), dtype)), fn, 0).infer()


# -- sort -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bool", *INTS, *FLOATS])
@pytest.mark.parametrize("descending", [False, True])
def test_sort_is_stable(dtype, descending):
    x = sample((2, 40), dtype, 1.0)
    x[:, ::3] = x[:, :1]
    ids = np.broadcast_to(np.arange(40, dtype=np.int32), x.shape)
    keys, order = run(Sort((value(x), value(ids)), 1, 1, descending), x, ids)
    for row, k, o in zip(x.tolist(), keys.tolist(), order.tolist()):
        exact = [v if isinstance(v, int) else float(v) for v in row]
        want = sorted(range(40), key=lambda i: -exact[i] if descending else exact[i])
        assert (o, k) == (want, [row[i] for i in want])


def test_sort_nan_largest_and_zeros_equal():
    x = np.array([np.nan, -0.0, 1, 0.0, np.nan, -np.inf, np.inf], np.float32)
    ids = np.arange(7, dtype=np.int32)
    up = run(Sort((value(x), value(ids)), 0), x, ids)[1]
    down = run(Sort((value(x), value(ids)), 0, descending=True), x, ids)[1]
    assert (up.tolist(), down.tolist()) == ([5, 1, 3, 2, 6, 0, 4], [0, 4, 6, 2, 1, 3, 5])


def test_sort_by_two_keys_along_the_first_axis():
    a, b = np.int32([[2, 1], [1, 1], [2, 0], [1, 1]]), np.float32([[1, 3], [9, 2], [0, 7], [8, 1]])
    op = Sort((value(a), value(b)), 0, keys=2)
    x, y = run(op, a, b)
    for k in range(2):
        assert list(zip(x[:, k], y[:, k])) == sorted(zip(a[:, k], b[:, k]))
    want = lax.sort((jnp.asarray(a), jnp.asarray(b)), dimension=0, num_keys=2)
    np.testing.assert_array_equal(x, want[0])
    np.testing.assert_array_equal(y, want[1])


def test_sort_of_nothing():
    x = np.zeros((3, 0), np.float32)
    assert run(Sort((value(x),), 1), x).shape == (3, 0)


# -- products ---------------------------------------------------------------------------------------------------------

KINDS = [
    ("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32"), ("float64", "float32"),
    ("float8_e4m3fn", "bfloat16"), ("int8", "int8"), ("int8", "uint8"), ("uint8", "uint8"), ("int16", "int8"),
    ("int32", "int32"), ("int64", "int8"), ("int4", "int8"), ("uint4", "int4"),
]  # fmt: skip


@pytest.mark.parametrize(("da", "db"), KINDS)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("trans", [(False, False), (True, False), (False, True), (True, True)])
def test_dot(da, db, batch, trans):
    a, b = sample((*batch, 3, 5), da, 2.0), sample((*batch, 5, 4), db, 2.0)
    wide = {da, db} & {"float64", "int64"}
    out = wide.pop() if wide else "float32" if DTYPES[da].kind == "f" else "int32"
    acc = sample((*batch, 3, 4), out, 2.0)
    ta, tb = trans
    xa, xb = (a.swapaxes(-1, -2) if ta else a), (b.swapaxes(-1, -2) if tb else b)
    for c in (None, acc):
        op = Dot(value(xa), value(xb), None if c is None else value(c), ta, tb)
        got = run(op, *([xa, xb] if c is None else [xa, xb, c]))
        assert got.dtype == out
        for i in np.ndindex(got.shape):
            row, column = a[(*i[:-2], i[-2])], b[(*i[:-2], slice(None), i[-1])]
            terms = [(x.item(), y.item()) for x, y in zip(row, column)]
            start = 0 if c is None else c[i].item()
            if DTYPES[out].kind == "f":
                want = math.fsum([start, *(float(x) * float(y) for x, y in terms)])
                assert abs(float(got[i]) - want) <= abs(want) * 1e-7 + 1e-12
            else:
                assert int(got[i]) == wrap(start + sum(int(x) * int(y) for x, y in terms), out)


def test_dot_with_an_empty_inner_axis():
    a, b = np.zeros((3, 0), np.float32), np.zeros((0, 4), np.float32)
    assert (run(Dot(value(a), value(b), None), a, b) == np.zeros((3, 4))).all()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (("float32", (3, 4)), ("float32", (3, 4))),
        (("float32", (3, 4)), ("int32", (4, 3))),
        (("bool", (3, 4)), ("bool", (4, 3))),
        (("float32", (4,)), ("float32", (4, 2))),
    ],
)
def test_dot_that_does_not_fit(a, b):
    with pytest.raises(TypeError, match="dot"):
        Dot(Value(TileType(a[1], a[0])), Value(TileType(b[1], b[0])), None).infer()


MX = [
    ("float8_e4m3fn", "float8_e8m0fnu"), ("float4_e2m1fn", "float8_e8m0fnu"), ("float4_e2m1fn", "float8_e4m3fn"),
    ("bfloat16", "float32"),
]  # fmt: skip


@pytest.mark.parametrize("formats", MX)
@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)])
def test_dot_scaled(formats, given):
    element, scale = (DTYPES[f].numpy for f in formats)
    a, b = (RNG.choice([0.5, 1, -1.5, 2, -3, 6], shape).astype(element) for shape in ((4, 64), (64, 3)))
    sa, sb = RNG.choice([0.5, 1, 2, 4], (4, 2)).astype(scale), RNG.choice([0.25, 1, 8], (4, 3)).astype(scale)
    acc = RNG.standard_normal((4, 3)).astype(np.float32)
    use_a, use_b = given
    op = DotScaled(value(a), value(sa) if use_a else None, value(b), value(sb) if use_b else None, value(acc))
    got = run(op, *[x for x, use in ((a, True), (sa, use_a), (b, True), (sb, use_b), (acc, True)) if use])
    for i, j in np.ndindex(4, 3):
        left = [float(a[i, k]) * (float(sa[i, k // 32]) if use_a else 1.0) for k in range(64)]
        right = [float(b[k, j]) * (float(sb[k // 16, j]) if use_b else 1.0) for k in range(64)]
        assert got[i, j] == np.float32(math.fsum([*(x * y for x, y in zip(left, right)), float(acc[i, j])]))


def test_against_jnp():
    """The same numbers as the array program that people would write."""
    x = RNG.standard_normal((8, 16)).astype(np.float32)
    np.testing.assert_allclose(run(Reduce(value(x), "sum", (0,)), x), jnp.sum(x, 0), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(run(Reduce(value(x), "max", (0, 1)), x), jnp.max(x))
    np.testing.assert_array_equal(run(ArgReduce(value(x), "min", 1, "int32"), x), jnp.argmin(x, 1))
    np.testing.assert_allclose(
        run(Cumulative(value(x), "logsumexp", 1), x), lax.cumlogsumexp(x, 1), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(
        run(Cumulative(value(x), "prod", 1, True), x), lax.cumprod(x, 1, reverse=True), rtol=1e-4
    )
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(run(Dot(value(x), value(x), None, False, True), x, x), x @ x.T, rtol=1e-5, atol=1e-5)
