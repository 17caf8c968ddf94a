"""Atomics as TTIR against the interpreter: every function and dtype, lanes that meet, masks, private memory."""

from __future__ import annotations

import numpy as np
import pytest
from device import run_device
from draws import thorough
from machines import card
from ttir import run_ttir

from jtile import ir
from jtile.interpret import interpret
from jtile.lowering.triton.compile import compile_kernel, emit_kernel
from jtile.lowering.triton.features import features

pytestmark = pytest.mark.usefixtures("garbage")

DEVICE = "device"  # in the place of an architecture: that of this machine's GPU
EVERYWHERE = [pytest.param((), id="ttir"), pytest.param((DEVICE,), id="device", marks=pytest.mark.gpu)]
DTYPES = [
    "bool", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16",
    "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2",
    "float8_e8m0fnu", "float4_e2m1fn",
]  # fmt: skip
CASES = [
    (fn, dtype) for fn in ir.ATOMICS for dtype in DTYPES
    if not (ir.DTYPES[dtype].kind == "f" and fn in ("and", "or", "xor"))
]  # fmt: skip


def array(shape, dtype: str, seed: int = 0) -> np.ndarray:
    """Small numbers, so that sums of few are exact in every dtype, and comparisons often find equals."""
    info = ir.DTYPES[dtype]
    low = 0 if info.kind in "ub" else -4
    return np.random.default_rng(seed).integers(low, 2 if info.kind == "b" else 4, shape).astype(info.numpy)


class Body:
    """A kernel over whole arrays."""

    def __init__(self, *inputs: np.ndarray):
        self.b, self.inputs = ir.Builder(), inputs
        self.params = [ir.Value(ir.RefType(x.shape, x.dtype.name, "in"), f"x{k}") for k, x in enumerate(inputs)]
        self.outs: list[ir.Value] = []
        self.inits: list = []

    def whole(self, shape) -> ir.Index:
        return tuple(ir.Span(self.b.index(0), n) for n in shape)

    def load(self, k: int) -> ir.Value:
        return self.b.value(ir.Load(self.params[k], self.whole(self.params[k].shape)))

    def out(self, shape, dtype: str, init=None) -> ir.Value:
        self.outs.append(ir.Value(ir.RefType(tuple(shape), dtype, "out"), f"o{len(self.outs)}"))
        self.inits.append(init)
        return self.outs[-1]

    def store(self, v: ir.Value) -> None:
        self.b.add(ir.Store(self.out(v.shape, v.dtype), self.whole(v.shape), v))

    def kernel(self) -> ir.Kernel:
        return ir.Kernel("k", (*self.params, *self.outs), (), self.b.block, (), tuple(self.inits))


def check(body: Body, arch: str = "sm_90", seeds=(0,)) -> None:
    """The same bits as the interpreter."""
    kernel = body.kernel()
    expected = interpret(kernel, list(body.inputs))
    for seed in seeds:
        if arch == DEVICE:
            outputs = run_device(kernel, list(body.inputs))
        else:
            outputs = run_ttir(kernel, list(body.inputs), arch=arch, seed=seed)
        for got, want in zip(outputs, expected, strict=True):
            same(got, want)


def same(got: np.ndarray, want: np.ndarray) -> None:
    wide = np.float64 if ir.DTYPES[want.dtype.name].kind == "f" else want.dtype  # NumPy finds no NaN in narrow floats
    np.testing.assert_array_equal(got.astype(wide), want.astype(wide))


def scatter(fn: str, dtype: str, index: np.ndarray, *, used: bool, masked: bool = False, side: int = 18) -> Body:
    """`o[index] fn= value`, on an array that starts with ones."""
    n = index.shape
    body = Body(array(n, dtype), index, *([np.random.default_rng(3).random(n) < 0.7] if masked else []))
    value, at = body.load(0), body.load(1)
    mask = body.load(2) if masked else None
    compare = body.b.full(1, n, dtype) if fn == "cas" else None
    o = body.out((side,), dtype, 1)
    old = body.b.value(ir.Atomic(fn, o, (ir.Take(at),), value, compare, mask))
    if used:
        body.store(old)
    return body


@pytest.mark.parametrize("arch", EVERYWHERE)
@pytest.mark.parametrize(("fn", "dtype"), CASES)
def test_elements_that_differ(fn, dtype, arch):
    """Indices outside the array, masked lanes, a tile that is no power of two; on one with and one without hardware."""
    index = np.random.default_rng(0).permutation(np.arange(-3, 20))[:13].astype(np.int32)
    check(scatter(fn, dtype, index, used=True, masked=True), *arch)
    check(scatter(fn, dtype, index, used=False), *(arch or ["gfx942" if dtype != "bfloat16" else "sm_80"]))


@pytest.mark.parametrize("arch", EVERYWHERE)
@pytest.mark.parametrize(("fn", "dtype"), CASES)
def test_lanes_that_meet(fn, dtype, arch):
    """Old values, and what `xchg` and `cas` leave, are those of row-major order."""
    index = np.random.default_rng(1).integers(-2, 7, 13).astype(np.int32)
    check(scatter(fn, dtype, index, used=True, masked=True), *arch, seeds=(0, 1) if thorough() else (0,))
    check(scatter(fn, dtype, index, used=False), *arch, seeds=(0, 1) if thorough() else (1,))


@pytest.mark.parametrize("arch", EVERYWHERE)
def test_many_lanes_that_meet(arch):
    """More pairs of lanes than one step compares."""
    index = np.random.default_rng(1).integers(0, 150, 300).astype(np.int32)
    check(scatter("xchg", "int32", index, used=False, side=150), *arch)
    check(scatter("add", "int32", index.reshape(3, 100), used=True, side=150), *arch)


@pytest.mark.parametrize("arch", EVERYWHERE)
@pytest.mark.parametrize("fn", ["add", "xchg"])
@pytest.mark.parametrize("dtype", ["int32", "int8"])
def test_gathers_between_other_dimensions(fn, dtype, arch):
    """Two gathered axes, a span on each side, one fixed element."""
    rows = np.array([[0, 2, 0], [4, 2, 2]], np.int32)
    columns = np.array([[1, 1, 1], [0, 1, 1]], np.uint8)
    body = Body(array((3, 2, 3, 5), dtype), rows, columns)
    value, r, c = (body.load(k) for k in range(3))
    o = body.out((3, 5, 2, 2, 6), dtype, 2)
    index = (ir.Span(body.b.index(0), 3), ir.Take(r), ir.Take(c), ir.At(body.b.index(1)), ir.Span(body.b.index(1), 5))
    body.store(body.b.value(ir.Atomic(fn, o, index, value)))
    check(body, *arch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "bool", "int64"])
def test_one_element(dtype):
    """Scalars, inside and outside."""
    body = Body(array((), dtype, 1))
    o = body.out((3,), dtype, 1)
    for at in (0, 2, 5):
        for fn in ("max", "xchg"):
            body.store(body.b.value(ir.Atomic(fn, o, (ir.At(body.b.index(at)),), body.load(0))))
    kernel = body.kernel()
    expected = interpret(kernel, list(body.inputs), check=False)
    for got, want in zip(run_ttir(kernel, list(body.inputs)), expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("arch", EVERYWHERE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("fn", ["max", "min"])
def test_largest_of_floats(fn, dtype, arch):
    """NaN of either sign wins, infinities count."""
    there = np.array([1, np.nan, -np.nan, -np.inf, np.inf, -2, 3], np.float32).astype(ir.DTYPES[dtype].numpy)
    there[2:3].view(np.uint8)[-1] |= 128
    value = np.array([np.nan, 5, -5, -1, -np.inf, -3, np.inf], np.float32).astype(there.dtype)
    body = Body(there, value)
    o = body.out((7,), dtype)
    body.b.add(ir.Store(o, body.whole((7,)), body.load(0)))
    body.store(body.b.value(ir.Atomic(fn, o, body.whole((7,)), body.load(1))))
    check(body, *arch)


@pytest.mark.parametrize("arch", EVERYWHERE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint16", "int64", "bool", "int4"])
@pytest.mark.parametrize("fn", ["max", "xchg", "cas"])
def test_private_memory(fn, dtype, arch):
    index = np.random.default_rng(0).integers(-3, 14, 12).astype(np.int32)
    body = Body(array((12,), dtype), index)
    b, v, i = body.b, body.load(0), body.load(1)
    own = b.value(ir.Alloc((18,), dtype))
    b.add(ir.Store(own, body.whole((18,)), b.full(1, (18,), dtype)))
    compare = b.full(1, (12,), dtype) if fn == "cas" else None
    body.store(b.value(ir.Atomic(fn, own, (ir.Take(i),), v, compare)))
    body.store(b.value(ir.Load(own, body.whole((18,)))))
    check(body, *arch)


@pytest.mark.parametrize(
    "run", [pytest.param(run_ttir, id="ttir"), pytest.param(run_device, id="device", marks=pytest.mark.gpu)]
)
def test_programs_add_up(run):
    """Every program of a grid, in a loop, into the same elements."""
    text = """kernel @k(%x: ref<7x10xbf16>, %o: ref<10xbf16, out>, %n: ref<i32, out>) grid(7) init(%o = 0, %n = 0) {
      %i = program_id 0 : i32
      %v = load %x[%i, tile(%c0, 10)] : tile<10xbf16>
      %one = full 1 : i32
      for %k in %c0..%c3 step %one {
        %a = atomic add %o[tile(%c0, 10)], %v : tile<10xbf16>
        %b = atomic add %n[], %one : i32
      }
    }"""
    text = text.replace("%v = load", "%c0 = full 0 : i32\n%c3 = full 3 : i32\n%v = load", 1)
    x = array((7, 10), "bfloat16")
    kernel = ir.parse_kernel(text)
    for got, want in zip(run(kernel, [x]), interpret(kernel, [x]), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("n", [0, 3, 20])
def test_dynamic_sizes(n):
    """An array without elements has no first word for lanes that do nothing."""
    text = """kernel @k(%x: ref<{n}xi32>, %i: ref<12xi32>, %o: ref<{n}xi32, out>, %old: ref<12xi32, out>) init(%o = 1) {
      %c0 = full 0 : i32
      %at = load %i[tile(%c0, 12)] : tile<12xi32>
      %one = full 1 : tile<12xi32>
      %was = atomic cas %o[take(%at)], %at compare=%one : tile<12xi32>
      store %old[tile(%c0, 12)], %was
    }"""
    kernel = ir.parse_kernel(text)
    index = np.array([0, 1, 0, 2, 2, 9, 17, 9, -1, 3, 5, 40], np.int32)
    inputs = [np.zeros(n, np.int32), index]
    for got, want in zip(run_ttir(kernel, inputs), interpret(kernel, inputs), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("shape", [(0,), (4,)])
def test_nothing_to_touch(shape):
    body = Body(array(shape, "int16"))
    o = body.out((0,), "int16", 0)
    body.store(body.b.value(ir.Atomic("add", o, body.whole(shape), body.load(0))))
    check(body)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942", "gfx1100"])
def test_compiles(arch):
    """One kernel with an atomic of each kind."""
    body = Body(np.zeros(30, np.int32))
    at = body.load(0)
    for fn, dtype in (("add", "float32"), ("max", "bfloat16"), ("cas", "int64"), ("xchg", "int8")):
        compare = body.b.full(1, (30,), dtype) if fn == "cas" else None
        value = body.b.cast(at, dtype)
        o = body.out((18,), dtype, 1)
        body.store(body.b.value(ir.Atomic(fn, o, (ir.Take(at),), value, compare)))
    assert compile_kernel(body.kernel(), card(arch)).image


def test_reductions_without_old_values():
    """What nobody reads is not brought back: a reduction in memory, without a loop."""
    body = Body(array((32, 64), "float32"))
    o = body.out((32, 64), "float32", 0)
    body.b.add(ir.Atomic("add", o, body.whole((32, 64)), body.load(0)))
    text, _ = emit_kernel(body.kernel(), features("sm_90"))
    assert text.count("tt.atomic_rmw fadd, relaxed, gpu") == 1
    assert "scf." not in text
    assert "atomic_cas" not in text
