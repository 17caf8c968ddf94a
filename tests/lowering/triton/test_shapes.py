"""Ops that move elements, as TTIR: against their NumPy meaning, with garbage in the lanes beyond every tile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from machines import card
from ttir import evaluate, run_ttir

from jtile import ir
from jtile.interpret import interpret
from jtile.lowering.triton import emit_scatter
from jtile.lowering.triton.compile import compile_kernel, emit_kernel
from jtile.lowering.triton.features import features

DTYPES = [
    "bool", "int4", "uint4", "int8", "uint8", "int16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16",
    "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn",
]  # fmt: skip

pytestmark = pytest.mark.usefixtures("garbage")


def array(shape: Sequence[int], dtype: str = "int32", seed: int = 0) -> np.ndarray:
    """Elements of every bit pattern that is a number."""
    info = ir.DTYPES[dtype]
    bits = np.random.default_rng([seed, *shape]).integers(0, 256, (*shape, max(info.bits // 8, 1)), np.uint8)
    if info.kind == "b":
        return bits[..., 0] % 2 == 1
    if info.bits == 4:
        return (bits[..., 0] % 16).astype(np.float32).astype(info.numpy)
    x = np.asarray(bits.view(info.numpy)[..., 0])
    if info.kind == "f":
        with np.errstate(invalid="ignore"):  # signalling NaNs
            x[np.isnan(x.astype(np.float64))] = 1
    return x


Make = Callable[..., ir.Op]


def kernel_of(make: Make, *inputs: np.ndarray) -> ir.Kernel:
    """Loads whole arrays, makes an op of them, stores its result."""
    b = ir.Builder()
    params = [ir.Value(ir.RefType(x.shape, x.dtype.name, "in"), f"x{k}") for k, x in enumerate(inputs)]
    whole = lambda v: tuple(ir.Span(b.index(0), n) for n in v.shape)
    op = make(*(b.value(ir.Load(p, whole(p))) for p in params))
    ops = op if isinstance(op, tuple) else (op,)
    b.block.ops += [o if o.results else ir.build(o) for o in ops]
    out = ir.Value(ir.RefType(ops[-1].result.shape, ops[-1].result.dtype, "out"), "o")
    b.add(ir.Store(out, whole(out), ops[-1].result))
    return ir.Kernel("shapes", (*params, out), (1,), b.block, inits=(None,))


def check(make: Make, *inputs: np.ndarray, arch: str = "sm_90") -> ir.Kernel:
    """The TTIR of an op gives the bits that the interpreter gives."""
    kernel = kernel_of(make, *inputs)
    (want,) = interpret(kernel, inputs)
    (got,) = run_ttir(kernel, inputs, arch)
    assert got.dtype == want.dtype
    assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(want).tobytes()
    return kernel


def text_of(make: Make, *inputs: np.ndarray) -> str:
    return emit_kernel(kernel_of(make, *inputs), features("sm_90"))[0]


@pytest.mark.parametrize(("shape", "out", "dims"), [
    ((), (3, 5), ()), ((3,), (3, 5), (0,)), ((5,), (3, 5), (1,)), ((1, 5), (3, 5), (0, 1)), ((3, 1), (2, 3, 5), (1, 2)),
    ((1,), (0,), (0,)), ((3,), (3, 1, 2, 3), (0,)), ((1, 1), (4, 4), (0, 1)),
])  # fmt: skip
def test_broadcast(shape, out, dims):
    check(lambda x: ir.Broadcast(x, out, dims), array(shape))


@pytest.mark.parametrize(("shape", "out"), [
    ((8, 4), (2, 16)), ((3, 5), (15,)), ((15,), (5, 3)), ((3, 64), (192,)), ((6, 4), (3, 8)), ((3, 1, 5), (1, 3, 5)),
    ((5, 3, 2), (5, 6)), ((2, 3, 5), (6, 5)), ((4, 9, 5), (6, 6, 5)), ((1,), ()), ((), (1, 1)), ((0, 3), (3, 0, 2)),
    ((12, 5), (5, 3, 4)), ((3, 4, 1, 2, 3), (2, 36)),
])  # fmt: skip
def test_reshape(shape, out):
    check(lambda x: ir.Reshape(x, out), array(shape))


@pytest.mark.parametrize(("shape", "perm"), [((3, 5), (1, 0)), ((2, 3, 5), (2, 0, 1)), ((), ()), ((0, 4), (1, 0)),
                                         ((2, 1, 3, 2, 3), (4, 2, 0, 3, 1))])  # fmt: skip
def test_transpose(shape, perm):
    check(lambda x: ir.Transpose(x, perm), array(shape))


@pytest.mark.parametrize(("shape", "start", "stop", "stride"), [
    ((8,), (0,), (4,), (1,)), ((8,), (4,), (8,), (1,)), ((8,), (1,), (8,), (2,)), ((16,), (0,), (16,), (4,)),
    ((16,), (6,), (16,), (4,)), ((16,), (8,), (12,), (1,)), ((7,), (2,), (7,), (1,)), ((7,), (1,), (7,), (3,)),
    ((7,), (0,), (5,), (1,)), ((6, 10), (0, 5), (6, 10), (1, 1)), ((6, 10), (1, 0), (6, 9), (2, 3)),
    ((2,), (1,), (2,), (1,)), ((5, 3), (2, 0), (2, 3), (1, 1)), ((4, 8, 4), (0, 2, 0), (4, 8, 4), (1, 4, 1)),
    ((8, 32), (0, 16), (8, 32), (1, 2)), ((), (), (), ()), ((4,), (4,), (4,), (2,)),
])  # fmt: skip
def test_slice(shape, start, stop, stride):
    check(lambda x: ir.Slice(x, start, stop, stride), array(shape))


@pytest.mark.parametrize(("shape", "axes"), [
    ((8,), (0,)), ((7,), (0,)), ((3, 8), (1,)), ((3, 5), (0, 1)), ((2, 1, 6), (1, 2)), ((0,), (0,)), ((), ()),
    ((4, 3), (0,)),
])  # fmt: skip
def test_reverse(shape, axes):
    check(lambda x: ir.Reverse(x, axes), array(shape))


@pytest.mark.parametrize(("shape", "low", "high", "interior"), [
    ((4,), (0,), (4,), (0,)), ((4,), (4,), (0,), (0,)), ((4,), (0,), (1,), (1,)), ((4,), (1,), (0,), (1,)),
    ((3,), (0,), (1,), (0,)), ((3,), (0,), (5,), (0,)), ((3,), (1,), (2,), (0,)), ((3,), (4,), (1,), (0,)),
    ((3,), (0,), (6,), (1,)), ((3,), (2,), (3,), (2,)), ((5,), (0,), (0,), (3,)), ((1,), (1,), (0,), (5,)),
    ((0,), (2,), (3,), (4,)), ((3, 4), (1, 0), (0, 1), (0, 0)), ((4, 4), (0, 4), (4, 0), (0, 0)), ((), (), (), ()),
    ((2, 3, 2), (1, 2, 0), (0, 0, 0), (1, 0, 0)), ((5, 3), (0, 0), (0, 0), (0, 0)), ((3,), (1,), (40,), (0,)),
])  # fmt: skip
def test_pad(shape, low, high, interior):
    check(lambda x, value: ir.Pad(x, value, low, high, interior), array(shape), array((), seed=1))


@pytest.mark.parametrize(("shapes", "axis"), [
    ([(4,), (4,)], 0), ([(3,), (4,)], 0), ([(4,), (3,)], 0), ([(4,), (2,), (2,)], 0), ([(1,)] * 5, 0), ([(3,)] * 9, 0),
    ([(2, 4), (2, 4)], 1), ([(2, 3), (1, 3), (5, 3)], 0), ([(3, 4)] * 3, 1), ([(5, 1)] * 4, 1), ([(5, 1), (5, 6)], 1),
    ([(0,), (3,), (0,)], 0), ([(0, 2), (0, 2)], 0), ([(2, 3, 5), (2, 1, 5)], 1), ([(8,), (1,)], 0), ([(7,)], 0),
    ([(1, 3), (1, 3), (4, 3), (2, 3)], 0), ([(2, 4, 2)] * 4, 1),
])  # fmt: skip
def test_concat(shapes, axis):
    check(lambda *xs: ir.Concat(xs, axis), *(array(s, seed=k) for k, s in enumerate(shapes)))


@pytest.mark.parametrize(("n", "by"), [(8, 3), (7, 2), (7, 6), (16, 8)])
def test_roll(n, by):
    """`jnp.roll` is two slices and a concatenation: one gather."""

    def roll(x):
        a, b = (ir.build(ir.Slice(x, (0, s), (3, e), (1, 1))) for s, e in ((n - by, n), (0, n - by)))
        return a, b, ir.build(ir.Concat((a.result, b.result), 1))

    kernel = check(roll, array((3, n)))
    ttgir = compile_kernel(kernel, card("sm_80"), texts=True).texts["ttgir"]
    assert ttgir.count("tt.gather") == 1  # the slices alone are dead code


@pytest.mark.parametrize("stacked", [False, True])
def test_windows_of_one_tile(stacked):
    """Im2col: windows of a tile stacked, or one after the other."""

    def windows(x):
        ops = []
        for i, j in ((0, 0), (1, 2), (2, 1)):
            ops.append(ir.build(ir.Slice(x, (i, j), (i + 3, j + 5), (1, 2))))
            if stacked:
                ops.append(ir.build(ir.Reshape(ops[-1].result, (3, 1, 3))))
        return *ops, ir.build(ir.Concat(tuple(o.result for o in ops[stacked :: 1 + stacked]), 1))

    kernel = check(windows, array((6, 7)))
    assert compile_kernel(kernel, card("sm_80"), texts=True).texts["ttgir"].count("tt.gather") == 1


@pytest.mark.parametrize(("shape", "sizes"), [
    ((7,), (3,)), ((4, 6), (4, 2)), ((4, 6), (1, 6)), ((3, 5), (2, 3)), ((), ()), ((5,), (0,)), ((5, 3), (5, 3)),
    ((6,), (1,)),
])  # fmt: skip
@pytest.mark.parametrize(("at", "dtype"), [
    (-3, "int32"), (1, "int8"), (2, "uint8"), (2**31 + 5, "uint32"), (-1, "int64"), (2**40, "int64"),
])  # fmt: skip
def test_dynamic_slice_and_update(shape, sizes, at, dtype):
    starts = [np.asarray(at, dtype)] * len(shape)
    check(lambda x, *s: ir.DynamicSlice(x, s, sizes), array(shape), *starts)
    check(lambda x, u, *s: ir.DynamicUpdate(x, u, s), array(shape), array(sizes, seed=1), *starts)


@pytest.mark.parametrize(("shape", "m", "axis"), [
    ((7,), 3, 0), ((5,), 12, 0), ((3, 6), 6, 1), ((3, 6), 2, 1), ((3, 6), 9, 0), ((2, 5, 3), 4, 1), ((1,), 5, 0),
    ((4, 1), 1, 1), ((5,), 0, 0),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["int32", "uint8", "int64"])
def test_gather(shape, m, axis, dtype):
    indices = np.random.default_rng(0).integers(0, shape[axis], (*shape[:axis], m, *shape[axis + 1 :])).astype(dtype)
    check(lambda x, i: ir.Gather(x, i, axis), array(shape), indices)


@pytest.mark.parametrize("fn", ["set", "add", "mul", "min", "max"])
@pytest.mark.parametrize(("n", "m"), [(5, 7), (8, 8), (1, 3), (6, 1), (3, 0), (0, 3)])
def test_scatter(fn, n, m):
    indices = np.random.default_rng(n).integers(-1, n + 2, m).astype(np.int32)
    check(lambda x, i, u: ir.Scatter(x, i, u, fn), array((n,)), indices, array((m,), seed=1))


@pytest.mark.parametrize("fn", ["set", "add"])
@pytest.mark.parametrize(("n", "m"), [(5, 7), (8, 8), (1, 3), (6, 1), (3, 16)])
def test_scatter_of_sorted_updates(monkeypatch, fn, n, m):
    monkeypatch.setattr(emit_scatter, "SORTED", 0)
    test_scatter(fn, n, m)


@pytest.mark.parametrize("fn", ["set", "add"])
def test_scatter_of_many(fn):
    rng = np.random.default_rng(2)
    indices = rng.integers(-5, 2000, 130).astype(np.int16) // 8 * 8
    check(lambda x, i, u: ir.Scatter(x, i, u, fn), array((1990,)), indices, array((130,), seed=1))


@pytest.mark.parametrize("fn", ["set", "add"])
def test_scatter_in_parts(fn):
    """More slots times updates than are compared at a time."""
    indices = np.random.default_rng(0).integers(0, 300, 100).astype(np.int64) * 3
    indices[3] += 2**32
    check(lambda x, i, u: ir.Scatter(x, i, u, fn), array((900,)), indices, array((100,), seed=1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int8"])
@pytest.mark.parametrize("fn", ["add", "mul", "min", "max"])
def test_scatter_rounds_as_in_order(dtype, fn):
    rng = np.random.default_rng(1)
    value = lambda n: (rng.normal(size=n) > 0) if dtype == "bool" else rng.normal(0, 9, n).astype(dtype)
    indices = rng.integers(0, 4, 20).astype(np.uint8)
    x, updates = value(5), value(20)
    updates = updates.astype(ir.DTYPES[dtype].numpy)
    check(lambda x, i, u: ir.Scatter(x, i, u, fn), x.astype(ir.DTYPES[dtype].numpy), indices, updates)


OPS: dict[str, Make] = {
    "reshape": lambda x, i: ir.Reshape(x, (15,)),
    "slice": lambda x, i: ir.Slice(x, (1, 0), (3, 5), (1, 2)),
    "reverse": lambda x, i: ir.Reverse(x, (0, 1)),
    "concat": lambda x, i: ir.Concat((x, x, x), 0),
    "gather": lambda x, i: ir.Gather(x, i, 1),
    "broadcast": lambda x, i: ir.Broadcast(x, (2, 3, 5), (1, 2)),
    "transpose": lambda x, i: ir.Transpose(x, (1, 0)),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(op, dtype):
    check(OPS[op], array((3, 5), dtype), np.random.default_rng(0).integers(0, 5, (3, 4)).astype(np.int32))


def test_large_gathers_go_in_halves():
    """A gather whose source does not fit into shared memory moves half of the bits at a time."""
    x = array((15,), "float64")
    kernel = kernel_of(lambda x: ir.Reverse(x, (0,)), x)
    text, record = emit_kernel(kernel, dataclasses.replace(features("sm_90"), shared=32))
    assert text.count("tt.gather") == 4  # 16 lanes of 2 bytes
    assert (evaluate(text, record, kernel, [x]).outputs[0] == x[::-1]).all()


@pytest.mark.parametrize(("make", "inputs", "moves"), [
    (lambda x: ir.Reshape(x, (192,)), [(3, 64)], 0),
    (lambda x: ir.Reshape(x, (3, 5, 1)), [(3, 5)], 0),
    (lambda x: ir.Slice(x, (0, 64), (16, 128), (1, 1)), [(16, 128)], 0),
    (lambda x: ir.Slice(x, (0, 1), (16, 128), (1, 2)), [(16, 128)], 0),
    (lambda x: ir.Slice(x, (0, 0), (3, 6), (1, 1)), [(3, 8)], 0),
    (lambda x, y: ir.Concat((x, y), 1), [(3, 64), (3, 64)], 0),
    (lambda x, y: ir.Concat((x, y), 1), [(3, 6), (3, 6)], 1),
    (lambda x, y: ir.Concat((x, y), 1), [(3, 6), (3, 1)], 0),
    (lambda x, v: ir.Pad(x, v, (0, 0), (0, 64), (0, 0)), [(3, 64), ()], 0),
    (lambda x, v: ir.Pad(x, v, (0, 1), (0, 0), (0, 1)), [(3, 64), ()], 0),
    (lambda x: ir.Reverse(x, (0, 1)), [(3, 5)], 1),
    (lambda x: ir.Slice(x, (1, 1), (3, 5), (1, 1)), [(3, 5)], 1),
])  # fmt: skip
def test_what_goes_through_shared_memory(make, inputs, moves):
    assert text_of(make, *map(array, inputs)).count("tt.gather") == moves


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_compiles(arch):
    """One kernel with every form: gathers of i1 and f64, joins, splits, a scatter in rounds."""

    def everything(x, i, u):
        half = ir.build(ir.Slice(x, (0, 4), (3, 8), (1, 1)))
        odd = ir.build(ir.Slice(x, (0, 1), (3, 8), (1, 2)))
        both = ir.build(ir.Concat((half.result, odd.result), 1))
        turned = ir.build(ir.Reverse(both.result, (1,)))
        flat = ir.build(ir.Reshape(turned.result, (24,)))
        return half, odd, both, turned, flat, ir.build(ir.Scatter(flat.result, i, u, "add"))

    for dtype in ("bool", "float64"):
        kernel = kernel_of(everything, array((3, 8), dtype), array((7,)), array((7,), dtype, 1))
        assert compile_kernel(kernel, card(arch)).image
