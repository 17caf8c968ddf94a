"""Every op card on the CPU back end against its NumPy meaning, over dtypes, odd shapes and both vector directions."""

from __future__ import annotations

import numpy as np
import pytest
from native import run_native

from jtile import ir
from jtile.interpret import interpret
from jtile.lowering.cpu import compile_kernel
from jtile.lowering.cpu.isa import ISAS

FLOATS = ["float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
INTS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
NIBBLES = ["int4", "uint4"]
DTYPES = [*FLOATS, *INTS, *NIBBLES, "bool"]
TOLERANCE = {
    "float64": 1e-12,
    "float32": 2e-6,
    "float16": 2e-3,
    "bfloat16": 1.6e-2,
    "float8_e4m3fn": 0.13,
    "float8_e5m2": 0.26,
}


def array(shape, dtype: str, seed: int = 0, low: float = -3.0, high: float = 3.0) -> np.ndarray:
    """Random data that spreads over the values of the dtype."""
    rng = np.random.default_rng(seed)
    info = ir.DTYPES[dtype]
    if info.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if info.kind == "f":
        return rng.uniform(low, high, shape).astype(np.float32).astype(info.numpy)
    lo, hi = (
        (-8, 8) if dtype == "int4" else (0, 16) if dtype == "uint4" else (-100, 100) if info.kind == "i" else (0, 200)
    )
    return rng.integers(lo, hi, shape).astype(info.numpy)


class Bench:
    """A kernel with whole-array inputs and outputs around a few ops."""

    def __init__(self, *inputs: np.ndarray):
        self.inputs = inputs
        self.b = ir.Builder()
        self.params = [ir.Value(ir.RefType(x.shape, x.dtype.name, "in"), f"x{k}") for k, x in enumerate(inputs)]
        self.outs: list[ir.Value] = []

    def whole(self, shape) -> tuple[ir.Dim, ...]:
        zero = self.b.index(0)
        return tuple(ir.Span(zero, n) for n in shape)

    def loads(self) -> list[ir.Value]:
        return [self.b.value(ir.Load(p, self.whole(p.shape))) for p in self.params]

    def store(self, v: ir.Value) -> None:
        o = ir.Value(ir.RefType(v.shape, v.dtype, "out"), f"o{len(self.outs)}")
        self.outs.append(o)
        self.b.add(ir.Store(o, self.whole(v.shape), v))

    def kernel(self, grid=()) -> ir.Kernel:
        inits = (None,) * len(self.outs)
        return ir.Kernel("bench", (*self.params, *self.outs), grid, self.b.block, (), inits)


def check(bench: Bench, grid=(), tolerance: float | None = None, inits=None) -> None:
    k = bench.kernel(grid)
    k.inits = inits or k.inits
    expected = interpret(k, list(bench.inputs))
    for got, want in zip(run_native(k, bench.inputs), expected, strict=True):
        close(got, want, tolerance)


def close(got: np.ndarray, want: np.ndarray, tolerance: float | None = None) -> None:
    info = ir.DTYPES[want.dtype.name]
    if info.kind != "f":
        np.testing.assert_array_equal(got, want)
        return
    tol = TOLERANCE[want.dtype.name] if tolerance is None else tolerance
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=tol, atol=tol)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy(dtype):
    b = Bench(array((3, 37), dtype))
    b.store(b.loads()[0])
    check(b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_elementwise(dtype):
    b = Bench(array((5, 19), dtype), array((5, 19), dtype, 1))
    args = b.loads()
    for fn in ("add", "mul", "max", "lt", "and", "neg", "exp"):
        f = ir.ELEMENTWISE[fn]
        if ir.DTYPES[dtype].kind in f.kinds:
            b.store(b.b.map(fn, *args[: f.arity]))
    check(b, tolerance=2 * TOLERANCE.get(dtype, 0))


SHAPES = [
    ("transpose", (7, 18), lambda x: ir.Transpose(x, (1, 0))),
    ("transpose3", (3, 5, 20), lambda x: ir.Transpose(x, (2, 0, 1))),
    ("split", (6, 40), lambda x: ir.Reshape(x, (6, 5, 8))),
    ("merge", (6, 5, 8), lambda x: ir.Reshape(x, (30, 8))),
    ("merge_lanes", (6, 5, 8), lambda x: ir.Reshape(x, (6, 40))),
    ("regroup", (6, 10), lambda x: ir.Reshape(x, (4, 15))),
    ("slice", (9, 40), lambda x: ir.Slice(x, (1, 3), (8, 40), (2, 3))),
    ("reverse", (4, 33), lambda x: ir.Reverse(x, (0, 1))),
    ("broadcast", (5, 1), lambda x: ir.Broadcast(x, (2, 5, 17), (1, 2))),
    ("newaxis", (17,), lambda x: ir.Broadcast(x, (17, 6), (0,))),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "int4"])
def test_shapes(dtype):
    b = Bench(*[array(shape, dtype, seed) for seed, (_, shape, _) in enumerate(SHAPES)])
    for x, (_, _, make) in zip(b.loads(), SHAPES, strict=True):
        b.store(b.b.value(make(x)))
    check(b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_concat_pad_update(dtype):
    b = Bench(array((3, 10), dtype), array((3, 21), dtype, 1))
    x, y = b.loads()
    both = b.b.value(ir.Concat((x, y, x), 1))
    b.store(both)
    b.store(b.b.value(ir.Pad(x, b.b.full(1, (), dtype), (1, 2), (0, 3), (1, 2))))
    b.store(b.b.value(ir.DynamicUpdate(y, x, (b.b.index(0), b.b.index(5)))))
    b.store(b.b.value(ir.DynamicSlice(y, (b.b.index(1), b.b.index(19)), (2, 10))))
    check(b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1), ()])
def test_reduce(axes, dtype):
    kind = ir.DTYPES[dtype].kind
    b = Bench(array((6, 35), dtype), array((6, 35), dtype, low=0.8, high=1.2))
    x, near_one = b.loads()
    for fn in ("sum", "prod", "max", "min", "and", "or", "xor"):
        if (fn in ("and", "or", "xor") and kind == "f") or (fn in ("sum", "prod") and kind == "b"):
            continue
        b.store(b.b.value(ir.Reduce(near_one if fn == "prod" else x, fn, axes)))
    check(b, tolerance={"float32": 3e-5}.get(dtype))


@pytest.mark.parametrize("shape", [(3, 5, 33), (4, 1, 16), (2, 7, 1), (9, 64, 4), (1, 1, 1), (2, 0, 3)])
def test_reduce_shapes(shape):
    b = Bench(array(shape, "float32"))
    (x,) = b.loads()
    for axes in [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)]:
        b.store(b.b.value(ir.Reduce(x, "sum", axes)))
    check(b, tolerance=3e-5)


def test_reductions_in_one_pass():
    b = Bench(array((7, 50), "float32"))
    (x,) = b.loads()
    mean = b.b.value(ir.Reduce(x, "sum", (1,)))
    square = b.b.value(ir.Reduce(b.b.map("mul", x, x), "sum", (1,)))
    top = b.b.value(ir.Reduce(x, "max", (1,)))
    spread = b.b.map("sub", x, b.b.value(ir.Broadcast(mean, (7, 50), (0,))))
    late = b.b.value(ir.Reduce(b.b.map("mul", spread, spread), "sum", (1,)))
    for v in (mean, square, top, late):
        b.store(v)
    check(b, tolerance=3e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arg_reduce(dtype):
    x = array((6, 35), dtype)
    if ir.DTYPES[dtype].kind == "f":
        x[2, 3] = x[2, 9] = np.nan
    b = Bench(x)
    (v,) = b.loads()
    for fn in ("max", "min"):
        for axis in (0, 1):
            b.store(b.b.value(ir.ArgReduce(v, fn, axis, "int32")))
    check(b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int32", "int8"])
@pytest.mark.parametrize(("axis", "reverse"), [(0, False), (1, False), (1, True)])
def test_cumulative(axis, reverse, dtype):
    floating = ir.DTYPES[dtype].kind == "f"
    b = Bench(array((5, 21), dtype, low=0.7, high=1.3) if floating else array((5, 21), dtype))
    (x,) = b.loads()
    for fn in ("sum", "prod", "max", "min", *(["logsumexp"] if floating else [])):
        b.store(b.b.value(ir.Cumulative(x, fn, axis, reverse)))
    check(b, tolerance={"float32": 2e-5, "bfloat16": 2e-2}.get(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sort(dtype):
    x = array((5, 40), dtype)
    if ir.DTYPES[dtype].kind == "f":
        x[1, 3] = np.nan
    b = Bench(x, array((5, 40), "int32", 1))
    args = tuple(b.loads())
    for axis, descending in [(0, False), (1, False), (1, True)]:
        for r in b.b.add(ir.Sort(args, axis, 1, descending)).results:
            b.store(r)
    check(b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int64", "bool"])
@pytest.mark.parametrize("axis", [0, 1])
def test_gather(axis, dtype):
    index = np.random.default_rng(0).integers(0, (6, 30)[axis], (6, 30) if axis else (9, 30)).astype(np.int32)
    b = Bench(array((6, 30), dtype), index)
    x, i = b.loads()
    b.store(b.b.value(ir.Gather(x, i, axis)))
    check(b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int64"])
def test_scatter(dtype):
    index = np.random.default_rng(0).integers(-3, 25, 30).astype(np.int32)
    b = Bench(array((20,), dtype), index, array((30,), dtype, 1))
    x, i, u = b.loads()
    for fn in ("set", "add", "mul", "min", "max"):
        b.store(b.b.value(ir.Scatter(x, i, u, fn)))
    check(b, tolerance={"bfloat16": 0.05, "float32": 1e-5}.get(dtype))


DOTS = ["float32", "float64", "bfloat16", "float16", "int8", "uint8", "int32", "float8_e4m3fn", "int4"]


@pytest.mark.parametrize("dtype", DOTS)
@pytest.mark.parametrize(("m", "n", "k"), [(5, 7, 9), (17, 33, 20), (1, 40, 16), (16, 1, 5), (8, 16, 0)])
def test_dot(m, n, k, dtype):
    trans_a, trans_b = (m + n) % 2 == 1, k % 4 == 0  # the transposes themselves: test_gemm.py
    a = array((2, k, m) if trans_a else (2, m, k), dtype)
    w = array((2, n, k) if trans_b else (2, k, n), dtype, 1)
    acc = ir.accumulator_dtype(dtype, dtype)
    b = Bench(a, w, array((2, m, n), acc, 2))
    x, y, c = b.loads()
    b.store(b.b.value(ir.Dot(x, y, None, trans_a, trans_b)))
    b.store(b.b.value(ir.Dot(x, y, c, trans_a, trans_b)))
    b.store(b.b.value(ir.Dot(x, y, b.b.map("mul", c, c), trans_a, trans_b)))
    check(b, tolerance={"float8_e4m3fn": 1e-5, "bfloat16": 1e-4}.get(dtype, 2e-5))


def test_dot_scaled():
    scales = array((5, 2), "float32", 1), array((4, 9), "float32", 3)
    b = Bench(array((5, 64), "float8_e4m3fn"), scales[0], array((64, 9), "bfloat16", 2), scales[1])
    a, sa, w, sb = b.loads()
    b.store(b.b.value(ir.DotScaled(a, sa, w, sb, None)))
    b.store(b.b.value(ir.DotScaled(a, None, w, sb, b.b.full(2.0, (5, 9), "float32"))))
    check(b, tolerance=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pad", [0, 1])
def test_overhang(dtype, pad):
    """Tiles over the edge read the pad and are not written."""
    x = array((10, 37), dtype)
    b = Bench(x)
    i, j = b.b.value(ir.ProgramId(0)), b.b.value(ir.ProgramId(1))
    o = ir.Value(ir.RefType((10, 37), dtype, "out"), "o")
    sums = ir.Value(ir.RefType((12, 48), dtype, "out"), "p")
    t = b.b.value(ir.Load(b.params[0], (ir.Tile(i, 4, 4), ir.Tile(j, 16, 16)), None, pad))
    b.b.add(ir.Store(o, (ir.Tile(i, 4, 4), ir.Tile(j, 16, 16)), t))
    b.b.add(ir.Store(sums, (ir.Tile(i, 4, 4), ir.Tile(j, 16, 16)), t))
    b.outs = [o, sums]
    check(b, grid=(3, 3))


@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16", "int4"])
def test_masks_and_gathers(dtype):
    """Masked loads and stores, gathered rows and scattered columns with indices outside."""
    rng = np.random.default_rng(0)
    rows, cols = (
        rng.permutation(np.arange(-2, 14))[:8].astype(np.int32),
        rng.permutation(np.arange(-3, 40))[:20].astype(np.int32),
    )
    b = Bench(array((12, 37), dtype), rows, cols, array((8, 20), "bool", 1))
    r, c, m = (b.b.value(ir.Load(p, b.whole(p.shape))) for p in b.params[1:])
    wide = lambda v, d: b.b.value(ir.Broadcast(v, (8, 20), (d,)))
    x = b.params[0]
    b.store(b.b.value(ir.Load(x, (ir.Take(wide(r, 0)), ir.Take(wide(c, 1))), None, 2)))
    b.store(b.b.value(ir.Load(x, (ir.Take(r), ir.Span(b.b.index(0), 37)), None, 1)))
    b.store(b.b.value(ir.Load(x, (ir.Span(b.b.index(4), 8), ir.Span(b.b.index(1), 20)), m, 1)))
    o = ir.Value(ir.RefType((12, 37), dtype, "out"), "o")
    value = b.b.value(ir.Load(x, (ir.Span(b.b.index(0), 8), ir.Span(b.b.index(0), 20))))
    b.b.add(ir.Store(o, (ir.Take(wide(r, 0)), ir.Take(wide(c, 1))), value, m))
    b.outs.append(o)
    check(b, inits=(None, None, None, 1))


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "bfloat16", "float16", "int8", "uint16", "int32", "int64", "bool", "int4"]
)
@pytest.mark.parametrize("fn", ir.ATOMICS)
def test_atomics(fn, dtype):
    kind = ir.DTYPES[dtype].kind
    if (kind == "f" and fn in ("and", "or", "xor")) or (kind == "b" and fn == "add"):
        pytest.skip(f"atomic {fn} is not defined for {dtype}")
    value = array((16,), dtype, low=0, high=2)
    index = np.random.default_rng(0).permutation(np.arange(-3, 20))[:16].astype(np.int32)
    b = Bench(value, index)
    v, i = b.loads()
    o = ir.Value(ir.RefType((18,), dtype, "out"), "o")
    compare = b.b.full(1, (16,), dtype) if fn == "cas" else None
    old = b.b.value(ir.Atomic(fn, o, (ir.Take(i),), v, compare))
    b.outs.append(o)
    b.store(old)
    k = b.kernel()
    k.inits = (1, None)
    for got, want in zip(run_native(k, b.inputs), interpret(k, list(b.inputs)), strict=True):
        close(got, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint16", "int64", "bool", "int4"])
@pytest.mark.parametrize("fn", ir.ATOMICS)
def test_atomics_on_scratch(fn, dtype):
    """Without atomic instructions, and with indices that are computed on the way and meet."""
    kind = ir.DTYPES[dtype].kind
    if (kind == "f" and fn in ("and", "or", "xor")) or (kind == "b" and fn == "add"):
        pytest.skip(f"atomic {fn} is not defined for {dtype}")
    index = np.random.default_rng(0).integers(-3, 14, 16).astype(np.int32)
    b = Bench(array((16,), dtype, low=0, high=2), index)
    v, i = b.loads()
    own = b.b.value(ir.Alloc((18,), dtype))
    everything = (ir.Span(b.b.index(0), 18),)
    b.b.add(ir.Store(own, everything, b.b.full(1, (18,), dtype), None))
    moved = b.b.map("max", b.b.map("mul", i, b.b.full(2, (16,), "int32")), i)
    compare = b.b.full(1, (16,), dtype) if fn == "cas" else None
    old = b.b.value(ir.Atomic(fn, own, (ir.Take(moved),), v, compare))
    b.store(old)
    b.store(b.b.value(ir.Load(own, everything)))
    check(b)


@pytest.mark.parametrize("isa", sorted(ISAS))
def test_text_for_every_isa(isa):
    """A kernel of every kind compiles for every instruction set, without an undefined symbol."""
    b = Bench(array((9, 33), "bfloat16"), array((33, 12), "float32"), array((9, 33), "int8"))
    x, y, z = b.loads()
    wide = b.b.cast(x, "float32")
    b.store(b.b.value(ir.Dot(wide, y, None)))
    b.store(b.b.cast(b.b.map("exp", wide), "bfloat16"))
    b.store(b.b.value(ir.Reduce(wide, "max", (1,))))
    b.store(b.b.value(ir.Sort((z,), 1)))
    art = compile_kernel(b.kernel(), ISAS[isa], texts=True)
    assert art.image[:4] == b"\x7fELF"
    assert "extern" not in art.texts["asm"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_constants_are_rounded(dtype):
    b = Bench(array((3, 20), dtype))
    b.loads()
    b.store(b.b.full(0.3, (3, 20), dtype))
    b.store(b.b.cast(b.b.full(0.3, (3, 20), dtype), "float32"))
    check(b, tolerance=0.0)
