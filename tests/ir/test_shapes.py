"""The NumPy meaning of the cards that make and move elements, against jnp and plain loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import thorough
from jax import lax

from jtile.ir import (
    Broadcast,
    Concat,
    Dense,
    DynamicSlice,
    DynamicUpdate,
    Full,
    Gather,
    Iota,
    Pad,
    Reshape,
    Reverse,
    Scatter,
    Slice,
    Transpose,
    Value,
)
from jtile.ir.types import DTYPES, TileType
from jtile.testing.evaluate import evaluated

pytestmark = pytest.mark.usefixtures("by_numpy")

ALL = [d.name for d in DTYPES.values()]
# XLA's compiler for CPUs aborts the process for a concatenation of 2-bit integers.
IN_JAX = [d for d in ALL if 2 < DTYPES[d].bits <= 32 and d != "float4_e2m1fn"]
RNG = np.random.default_rng(0)


def value(x: np.ndarray) -> Value:
    return Value(TileType(x.shape, x.dtype.name))


def sample(shape, dtype: str) -> np.ndarray:
    return RNG.choice([1, 2, 4, 0.5] if DTYPES[dtype].kind == "f" else [0, 1, 2, 3], shape).astype(DTYPES[dtype].numpy)


def run(op, *arrays) -> np.ndarray:
    (t,) = op.infer()
    out = op.reference(*arrays)
    assert (out.shape, out.dtype) == (t.shape, DTYPES[t.dtype].numpy)
    return out


def bits(x) -> list[bytes]:
    x = np.asarray(x)
    return [x.shape, [v.tobytes() for v in x.reshape(-1)]]


@pytest.mark.parametrize("dtype", IN_JAX)
def test_moves_of_every_dtype(dtype):
    x = sample((3, 4, 2), dtype)
    moves = {
        Reshape(value(x), (6, 4)): lambda j: lax.reshape(j, (6, 4)),
        Transpose(value(x), (2, 0, 1)): lambda j: lax.transpose(j, (2, 0, 1)),
        Slice(value(x), (0, 1, 0), (3, 4, 2), (2, 2, 1)): lambda j: lax.slice(j, (0, 1, 0), (3, 4, 2), (2, 2, 1)),
        Reverse(value(x), (0, 2)): lambda j: lax.rev(j, (0, 2)),
        Broadcast(value(x), (3, 5, 4, 2), (0, 2, 3)): lambda j: lax.broadcast_in_dim(j, (3, 5, 4, 2), (0, 2, 3)),
        Concat((value(x), value(x[:1])), 0): lambda j: lax.concatenate([j, j[:1]], 0),
    }
    wide = thorough() or dtype in ("float32", "bfloat16", "int4", "bool")  # the same program for each width
    wanted = (jax.jit if wide else evaluated)(lambda j: [move(j) for move in moves.values()])(jnp.asarray(x))
    for op, want in zip(moves, wanted, strict=True):
        assert bits(run(op, *([x, x[:1]] if isinstance(op, Concat) else [x]))) == bits(want), op.mnemonic


@pytest.mark.parametrize("dtype", ALL)
def test_constants_of_every_dtype(dtype):
    for n in (1, 0) if dtype != "float8_e8m0fnu" else (1,):
        x = run(Full(n, (2, 3), dtype))
        assert x.astype(np.float32).tolist() == [[n] * 3] * 2
    assert (
        run(Dense((1, 2, 1, 2) if dtype != "bool" else (True, False, True, False), (2, 2), dtype)).astype(np.float32)[
            0, 0
        ]
        == 1
    )
    if dtype not in ("bool", "float8_e8m0fnu", "float4_e2m1fn"):
        wraps = {"int2": [0, 1, -2, -1, 0], "uint2": [0, 1, 2, 3, 0]}
        x = run(Iota((2, 5), 1, dtype))
        assert x.astype(np.float32).tolist() == [wraps.get(dtype, [0, 1, 2, 3, 4])] * 2
        assert run(Iota((2, 5), 0, dtype)).astype(np.float32).tolist() == [[0] * 5, [1] * 5]


def test_constants_keep_every_bit():
    big = (1 << 64) - 1
    assert int(run(Full(big, (), "uint64"))) == int(run(Dense((big,), (1,), "uint64"))[0]) == big
    assert int(run(Dense((-(1 << 63),), (1,), "int64"))[0]) == -(1 << 63)
    assert np.signbit(run(Full(-0.0, (), "float32"))) and np.isnan(run(Full(float("nan"), (), "bfloat16")))
    assert float(run(Full(1e-45, (), "float32"))) > 0
    with pytest.raises(OverflowError):
        Full(256, (), "uint8").reference()
    with pytest.raises(ValueError, match="dense"):
        Dense((1, 2), (3,), "int32").infer()


@pytest.mark.parametrize(
    ("shape", "to", "dims"),
    [((), (2, 3), ()), ((1, 3), (2, 3), (0, 1)), ((3,), (3, 4), (0,)), ((1,), (0, 4), (1,)), ((0,), (2, 0), (1,))],
)
def test_broadcast(shape, to, dims):
    x = RNG.standard_normal(shape).astype(np.float32)
    np.testing.assert_array_equal(run(Broadcast(value(x), to, dims), x), lax.broadcast_in_dim(x, to, dims))


@pytest.mark.parametrize(
    "op",
    [
        lambda x: Broadcast(x, (4, 5), (0, 1)),
        lambda x: Broadcast(x, (4, 3, 2), (1, 0)),
        lambda x: Reshape(x, (7,)),
        lambda x: Transpose(x, (0, 0)),
        lambda x: Slice(x, (0, 0), (4, 2), (1, 1)),
        lambda x: Slice(x, (0, 0), (3, 2), (0, 1)),
        lambda x: Reverse(x, (2,)),
        lambda x: Reverse(x, (0, 0)),
        lambda x: Concat((x, Value(TileType((3, 3), "float32"))), 0),
        lambda x: Concat((x, Value(TileType((3, 2), "int32"))), 0),
        lambda x: Concat((x, x), 2),
        lambda x: DynamicSlice(x, (Value(TileType((), "int32")),) * 2, (4, 1)),
        lambda x: Gather(x, Value(TileType((3, 2), "float32")), 0),
        lambda x: Gather(x, Value(TileType((3, 2), "int32")), -1),
        lambda x: Pad(x, Value(TileType((), "float32")), (-1, 0), (0, 0), (0, 0)),
        lambda x: Iota((2,), 1, "int32"),
    ],
)
def test_what_does_not_fit(op):
    with pytest.raises((TypeError, ValueError), match=r"\w+ .*\w"):
        op(Value(TileType((3, 2), "float32"))).infer()


@pytest.mark.parametrize(
    ("low", "high", "interior"), [((1, 0), (0, 2), (0, 0)), ((0, 0), (0, 0), (2, 1)), ((2, 1), (1, 1), (1, 3))]
)
@pytest.mark.parametrize("shape", [(3, 2), (0, 2), (1, 1)])
def test_pad(low, high, interior, shape):
    x, v = RNG.standard_normal(shape).astype(np.float32), np.float32(7)
    op = Pad(value(x), Value(TileType((), "float32")), low, high, interior)
    want = lax.pad(x, v, list(zip(low, high, interior)))
    np.testing.assert_array_equal(run(op, x, np.asarray(v)), want)


@pytest.mark.parametrize("starts", [(0, 0), (1, 2), (-5, 9), (9, -9)])
def test_dynamic_slices_clamp(starts):
    x, u = RNG.standard_normal((4, 5)).astype(np.float32), RNG.standard_normal((2, 3)).astype(np.float32)
    s = [np.asarray(i, np.int32) for i in starts]
    scalars = (Value(TileType((), "int32")),) * 2
    np.testing.assert_array_equal(run(DynamicSlice(value(x), scalars, (2, 3)), x, *s), lax.dynamic_slice(x, s, (2, 3)))
    before = x.copy()
    np.testing.assert_array_equal(
        run(DynamicUpdate(value(x), value(u), scalars), x, u, *s), lax.dynamic_update_slice(x, u, s)
    )
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("index", ["int8", "int32", "uint8", "int64"])
def test_gather(axis, index):
    x = RNG.standard_normal((4, 5)).astype(np.float32)
    shape = (7, 5) if axis == 0 else (4, 7)
    i = RNG.integers(0, 4, shape).astype(index)
    got = run(Gather(value(x), value(i), axis), x, i)
    for r, c in np.ndindex(shape):
        assert got[r, c] == (x[i[r, c], c] if axis == 0 else x[r, i[r, c]])


@pytest.mark.parametrize("fn", ["set", "add", "mul", "min", "max"])
@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16", "uint8"])
def test_scatter_in_order(fn, dtype):
    x, u = sample((5,), dtype), sample((8,), dtype)
    i = np.array([0, 3, 3, -1, 5, 2, 3, 99], np.int32)
    got = run(Scatter(value(x), value(i), value(u), fn), x, i, u)
    want = [float(v) for v in x]
    for k, v in zip(i.tolist(), u.tolist()):
        if 0 <= k < 5:
            old, v = want[k], float(v)
            want[k] = {"set": v, "add": old + v, "mul": old * v, "min": min(old, v), "max": max(old, v)}[fn]
    assert got.astype(np.float64).tolist() == want
