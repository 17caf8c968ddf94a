"""Elementwise functions, conversions and literal tiles: the text that is emitted, evaluated, against the op cards."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import numpy as np
import op_matrix
import pytest
from device import run_device
from draws import thorough
from machines import card
from sharp import sharp
from ttir import evaluate, run_ttir

from jtile import ir
from jtile.errors import UnsupportedError
from jtile.ir.elementwise import ELEMENTWISE
from jtile.lowering.literals import as_inputs
from jtile.lowering.triton.compile import compile_kernel, emit_kernel
from jtile.lowering.triton.features import features
from jtile.lowering.triton.math import ULP_BOUNDS
from jtile.passes import TILE, run_pipeline

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ARCHS = ("sm_80", "sm_90", "gfx942")  # without and with conversions of fp8 in hardware, and the other vendor
EVERYWHERE = (*ARCHS, pytest.param("device", marks=pytest.mark.gpu))
ONE = ("sm_90", EVERYWHERE[-1])
DOCS = Path(__file__).parents[3] / "docs" / "gpu.md"
NIBBLES = ("int4", "uint4", "float4_e2m1fn")
EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, 1e-3, 100.0, -100.0, 448.0, 464.0, 465.0, 6e4, 6.2e4,
         7e4, 1e-8, 1e-40, -1e-40, 3.3e38, np.inf, -np.inf, np.nan]  # fmt: skip


@functools.cache
def values(dtype: str, n: int = 200, seed: int = 0) -> np.ndarray:
    """All values of the narrow dtypes, in random order; of the wide ones edges and random numbers."""
    rng = np.random.default_rng(seed)
    info = ir.DTYPES[dtype]
    if info.kind == "b":
        return rng.integers(0, 2, n).astype(bool)
    if info.bits < 8:
        codes = np.arange(1 << info.bits, dtype=np.uint8)
        x = (
            codes.view(info.numpy)
            if info.kind == "f"
            else (codes.astype(np.int8) - codes.size // 2 * (info.kind == "i"))
        )
        return rng.permutation(np.resize(x.astype(info.numpy), n))
    if info.bits == 8:
        return rng.permutation(np.resize(np.arange(256, dtype=np.uint8), n)).view(info.numpy)
    if info.kind == "f":
        x = np.concatenate([EDGES, rng.normal(size=n), 10 ** rng.uniform(-6, 6, n) * rng.choice([-1, 1], n)])
        return rng.permutation(x)[:n].astype(info.numpy)
    low, high = np.iinfo(info.numpy).min, np.iinfo(info.numpy).max
    edges = np.array([low, high, 0, 1, 2, 3, high - 1, high // 2, info.bits - 1, info.bits, *[high] * (low < 0)])
    edges = np.concatenate([edges.astype(info.numpy), np.array([-1]).astype(info.numpy)])
    scale = rng.integers(0, info.bits, n)
    return rng.permutation(np.concatenate([edges, rng.integers(low, high, n, info.numpy) >> scale.astype(info.numpy)]))[
        :n
    ]


class Bench(op_matrix.Bench):
    """The results of some ops on whole vectors, with what they should be."""

    def __init__(self, *inputs: np.ndarray):
        super().__init__(*inputs)
        self.xs = self.loads()
        self.ops: list[tuple[ir.Op, tuple[np.ndarray, ...]]] = []

    def add(self, op: ir.Op, *arrays: np.ndarray) -> None:
        """An op on loaded tiles, stored; `arrays` is what its reference takes."""
        self.value(op)
        self.ops.append((op, arrays))

    @property
    def kernel(self) -> ir.Kernel:
        return self.case().kernel

    def run(self, arch: str) -> list[tuple[ir.Op, np.ndarray, np.ndarray]]:
        """(op, got, wanted), by the evaluator; or by the GPU of this machine."""
        if arch == "device":
            outputs = run_device(self.kernel, self.inputs)
        else:
            text, record = emit_kernel(self.kernel, features(arch))
            outputs = evaluate(text, record, self.kernel, self.inputs).outputs
        return [(op, y, op.reference(*a)) for y, (op, a) in zip(outputs, self.ops, strict=True)]


def same(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Lanes that agree: also in the sign of zero; every NaN is like every other."""
    if ir.DTYPES[want.dtype.name].kind != "f":
        return got == want
    a, b = got.astype(np.float64), want.astype(np.float64)
    return (np.isnan(a) & np.isnan(b)) | ((a == b) & (np.signbit(a) == np.signbit(b)))


def functions(dtype: str) -> list[str]:
    return [n for n, f in ELEMENTWISE.items() if ir.DTYPES[dtype].kind in f.kinds]


def elementwise(dtype: str, fns: list[str], n: int = 200) -> Bench:
    xs = [values(dtype, n, seed=k) for k in range(3)]
    bench = Bench(*xs)
    for fn in fns:
        n = ELEMENTWISE[fn].arity
        bench.add(ir.Map(fn, tuple(bench.xs[:n])), *xs[:n])
    return bench


def near(got: np.ndarray, want: np.ndarray, ulps: float) -> np.ndarray:
    """Within so many units in the last place; zero counts as every subnormal number of f32."""
    with np.errstate(all="ignore"):
        gap = np.maximum(np.spacing(np.abs(want)), np.finfo(np.float32).tiny * (want.dtype == np.float32))
        return same(got, want) | (np.abs(got.astype(np.float64) - want.astype(np.float64)) <= ulps * gap)


def _everywhere(dtypes: list[str]) -> list:
    """Floats on every architecture; integers, for which the text is nearly the same, on one in turn."""
    turn = lambda k, d: ir.DTYPES[d].kind == "f" or ARCHS[k % len(ARCHS)]
    out = [pytest.param(a, d, marks=[pytest.mark.slow] * (turn(k, d) not in (True, a)))
           for a in ARCHS for k, d in enumerate(dtypes)]  # fmt: skip
    return [*out, *(pytest.param("device", d, marks=pytest.mark.gpu) for d in dtypes)]


@pytest.mark.parametrize(("arch", "dtype"), _everywhere([d for d in ir.DTYPES if d not in op_matrix.ALIKE]))
def test_functions(arch, dtype):
    for op, got, want in elementwise(dtype, functions(dtype)).run(arch):
        exact = ELEMENTWISE[op.fn].exact or op.fn not in ULP_BOUNDS
        zeros = op.fn in ("max", "min", "clamp")  # of two zeros either may come out
        good = same(got, want) | (zeros & (got == want))
        if dtype == "float4_e2m1fn":  # NaN becomes a zero of either sign
            good |= got == want
        if dtype == "float64":
            want = sharp(op.fn, values(dtype), want).astype(dtype)
        if not exact and dtype in ("float32", "float64"):
            good |= near(got, want, ULP_BOUNDS[op.fn][dtype == "float64"])
            if op.fn in ("lgamma", "digamma"):  # near zeros: absolute
                good |= np.abs(got - want) <= (2e-6 if dtype == "float32" else 2e-14) * np.maximum(1, np.abs(want))
        elif not exact:  # one code away at a tie
            carrier = f"i{max(ir.DTYPES[dtype].bits, 8) // 8}"
            close = np.abs(got.view(carrier).astype(int) - want.view(carrier).astype(int)) <= 1
            good |= close & (np.mean(same(got, want)) > 0.97)
        bad = np.flatnonzero(~good)
        args = [x[bad[:3]] for x in (values(dtype, seed=k) for k in range(ELEMENTWISE[op.fn].arity))]
        assert bad.size == 0, f"{op.fn}{args}: got {got[bad[:3]]}, expected {want[bad[:3]]} ({bad.size} lanes)"


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("arch", EVERYWHERE)
def test_functions_that_are_rounded(arch, half):
    """Results of float32 that only a cast to a half sees come from short forms: rounded right but near ties."""
    xs = [np.concatenate([values("float32", 400, seed=k), np.linspace(-10, 10, 1000, dtype="f4")]) for k in range(2)]
    bench = Bench(*xs)
    for fn in ("erfc", "logistic", "exp", "tanh"):
        n = ELEMENTWISE[fn].arity
        y = bench.b.value(ir.Map(fn, tuple(bench.xs[:n])))
        bench.add(ir.Cast(y, half), y.op.reference(*xs[:n]))
    for op, got, want in bench.run(arch):
        close = np.abs(got.view("i2").astype(int) - want.view("i2").astype(int)) <= 1
        gap = 2.0**-15 * np.abs(want.astype(np.float64)) + float(np.finfo(np.float32).tiny)  # flushed to zero
        exact = np.abs(got.astype(np.float64) - op.x.op.reference(*xs[: len(op.x.op.args)])) <= gap
        good = same(got, want) | close | exact
        assert good.all() and np.mean(same(got, want)) > 0.97, f"{op.x.op.fn}: {np.flatnonzero(~good)[:5]}"


def test_who_sees_a_function_decides_its_form():
    """Through products and moves to casts: short. With any other use: all digits."""
    x = values("float32", 128)

    def instructions(*uses, fn="erfc") -> int:
        bench = Bench(x)
        y = bench.b.value(ir.Map(fn, (bench.xs[0],)))
        for use in uses:
            bench.value(use(bench.b, y, bench.xs[0]))
        return emit_kernel(bench.kernel, features("sm_90"))[0].count("rcp.approx")

    scaled = lambda b, y, x: ir.Cast(b.map("mul", x, b.map("neg", y)), "bfloat16")
    cast, sum_ = (lambda b, y, x: ir.Cast(y, "float16")), (lambda b, y, x: ir.Map("add", (y, x)))
    assert instructions(cast) == instructions(scaled) == instructions(cast, scaled) == 1
    assert instructions(sum_) == instructions(cast, sum_) == instructions(lambda b, y, x: ir.Cast(y, "int8")) == 0
    added = lambda b, y, x: ir.Cast(b.map("add", x, y), "bfloat16")
    assert instructions(added) == instructions(sum_, fn="tanh") == 0
    assert instructions(added, fn="tanh") == 1  # its short form has digits to spare


@pytest.mark.parametrize("arch", EVERYWHERE)
def test_tangents_that_are_added_to_one_are_short(arch):
    """Where no small one counts, and no result has more than 16 bits: no other form is computed for small ones."""
    x = np.concatenate([values("float32", 400), np.linspace(-12, 12, 1000, dtype="f4")])

    def bench(*uses) -> Bench:
        made = Bench(x)
        t = made.b.value(ir.Map("tanh", (made.xs[0],)))
        one, half = (made.b.full(n, x.shape, "float32") for n in (1.0, 0.5))
        for use in uses:
            made.value(ir.Cast(use(made.b, t, one, half), "bfloat16"))
        return made

    near_one = lambda b, t, one, half: b.map("mul", b.map("add", t, one), half)
    derivative = lambda b, t, one, half: b.map("sub", one, b.map("square", t))
    short = lambda *uses: "arith.cmpf" not in emit_kernel(bench(*uses).kernel, features("sm_90"))[0]
    assert short(near_one, derivative)
    assert not short(near_one, lambda b, t, one, half: b.map("mul", t, half))
    assert not short(lambda b, t, one, half: b.map("add", t, half))
    both = bench(near_one, derivative)
    if arch == "device":
        got = run_device(both.kernel, both.inputs)
    else:
        got = evaluate(*emit_kernel(both.kernel, features(arch)), both.kernel, both.inputs).outputs
    t = np.tanh(x.astype(np.float64))
    for y, want in zip(got, ((t + 1) / 2, 1 - t * t), strict=True):
        error = np.abs(np.asarray(y, np.float64) - want)
        assert np.all((error <= 2.0**-8 * want + 2.0**-21) | np.isnan(x)), x[np.nanargmax(error)]
        assert np.array_equal(np.isnan(np.asarray(y, np.float64)), np.isnan(x))


@pytest.mark.parametrize("dtype", ["bool", "int4", "uint64", "bfloat16", "float32", "float8_e4m3fn"])
def test_scalars(dtype):
    """Rank 0 is no tensor: every op has a form for it."""
    pytest.importorskip("triton")
    xs = [values(dtype, seed=k)[5:6].reshape(()) for k in range(3)]
    bench = Bench(*xs)
    for fn in functions(dtype):
        n = ELEMENTWISE[fn].arity
        bench.add(ir.Map(fn, tuple(bench.xs[:n])), *xs[:n])
    for dst in ir.DTYPES:
        bench.add(ir.Cast(bench.xs[0], dst), xs[0])
    if thorough() or dtype in ("bool", "bfloat16", "float8_e4m3fn"):
        assert compile_kernel(bench.kernel, card("sm_90"), {"num_warps": 1}).image
    for op, got, want in bench.run("sm_90"):
        close = ir.DTYPES[got.dtype.name].kind == "f" and np.allclose(got.astype(float), want.astype(float), rtol=1e-2)
        assert close or same(got, want), f"{op}: got {got}, expected {want}"


# -- conversions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("src", list(ir.DTYPES))
@pytest.mark.parametrize("arch", EVERYWHERE)
def test_casts(arch, src):
    x = values(src, 256)
    bench = Bench(x)
    for dst in ir.DTYPES:
        bench.add(ir.Cast(bench.xs[0], dst), x)
    for op, got, want in bench.run(arch):
        good = same(got, want)
        if op.dtype == "float4_e2m1fn":  # a NaN becomes zero, of the sign of the NaN, which hardware does not keep
            good |= np.isnan(x.astype(np.float32)) & (got == want)
        bad = np.flatnonzero(~good)
        assert bad.size == 0, f"{src} {x[bad[:3]]} as {op.dtype}: got {got[bad[:3]]}, expected {want[bad[:3]]}"


@pytest.mark.parametrize(("dst", "most"), [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)])
def test_casts_of_clipped_numbers(dst, most):
    """An instruction converts them, and nothing checks whether they fit."""
    x = np.concatenate([values("float32", 250), np.float32([most, -most, 460, -np.inf, np.inf, np.nan])])
    bench = Bench(x)
    bound = lambda v: bench.b.value(ir.Full(v, x.shape, "float32"))
    low = bench.b.value(ir.Map("max", (bound(-most), bench.xs[0])))
    clipped = bench.b.value(ir.Map("min", (bound(most), low)))
    bench.add(ir.Cast(clipped, dst), np.clip(x, -most, most))
    ((_, got, want),) = bench.run("sm_90")
    assert same(got, want).all()
    pytest.importorskip("triton")
    compiled = compile_kernel(bench.kernel, card("sm_90"), {"num_warps": 1}, texts=True)
    assert "cmpf" not in compiled.texts["ttgir"]


def test_casts_of_numbers_clipped_to_what_is_beyond():
    x = np.float32([-500, -1, 0, 3, 500, np.nan])
    bench = Bench(x)
    bound = lambda v: bench.b.value(ir.Full(v, x.shape, "float32"))
    high = bench.b.value(ir.Map("min", (bound(448.0), bench.xs[0])))
    bench.add(ir.Cast(bench.b.value(ir.Map("max", (bound(1000.0), high))), "float8_e4m3fn"), np.maximum(x, 1000))
    ((_, got, want),) = bench.run("sm_90")
    assert same(got, want).all()


@pytest.mark.parametrize("arch", EVERYWHERE)
@pytest.mark.parametrize("narrow", ["float16", "bfloat16"])
def test_every_half(arch, narrow):
    """To f32 exact, and back to the same bits."""
    x = np.arange(1 << 16, dtype=np.uint16).view(ir.DTYPES[narrow].numpy)
    bench = Bench(x)
    wide = bench.b.value(ir.Cast(bench.xs[0], "float32"))
    bench.add(ir.Cast(bench.xs[0], "float32"), x)
    bench.add(ir.Cast(wide, narrow), x.astype(np.float32))
    for _, got, want in bench.run(arch):
        assert same(got, want).all()


@pytest.mark.parametrize("dtype", [d.name for d in ir.DTYPES.values() if d.kind == "f" and d.bits <= 8])
@pytest.mark.parametrize("arch", EVERYWHERE)
def test_rounding_to_codes(arch, dtype):
    """Every code, the middles between neighbours, and the floats next to those; NaN and infinities keep their signs."""
    info = ir.DTYPES[dtype]
    codes = np.arange(1 << info.bits, dtype=np.uint8).view(info.numpy).astype(np.float32)
    finite = np.unique(codes[np.isfinite(codes)])
    middle = (finite[1:] + finite[:-1]) / 2
    x = np.concatenate([codes, middle, np.nextafter(middle, np.float32(9e38)), np.nextafter(middle, np.float32(-9e38)),
                        np.array([*EDGES, -np.nan, 1e-45, 1.7e38, 2.5e38], np.float32)])  # fmt: skip
    bench = Bench(x)
    bench.add(ir.Cast(bench.xs[0], dtype), x)
    ((_, got, want),) = bench.run(arch)
    bad = np.flatnonzero((got.view(np.uint8) != want.view(np.uint8)) & ~np.isnan(x))
    assert bad.size == 0, f"{x[bad[:5]]}: got {got[bad[:5]]}, expected {want[bad[:5]]}"
    assert same(got, want).all()


@pytest.mark.parametrize("arch", ONE)
@pytest.mark.parametrize("src", ["float32", "float64"])
def test_saturation(arch, src):
    """At the limits of every integer dtype, and next to them."""
    powers = [2.0**k for k in (3, 4, 7, 8, 15, 16, 31, 32, 63, 64)]
    edges = [s * p + d for p in powers for s in (1, -1) for d in (0, 1, -1, 0.5, -0.5)]
    x = np.array([*edges, *(np.nextafter(s * p, t) for p in powers for s in (1, -1) for t in (0, s * 2 * p)), 1e30])
    x = np.concatenate([x, [-1e30, np.inf, -np.inf, np.nan, -0.99, -1.0]]).astype(src)
    bench = Bench(x)
    for dst in (d for d, info in ir.DTYPES.items() if info.kind in "iu"):
        bench.add(ir.Cast(bench.xs[0], dst), x)
    for op, got, want in bench.run(arch):
        bad = np.flatnonzero(got != want)
        assert bad.size == 0, f"{x[bad[:5]]} as {op.dtype}: got {got[bad[:5]]}, expected {want[bad[:5]]}"


@pytest.mark.parametrize("arch", ONE)
@pytest.mark.parametrize("src", list(ir.DTYPES))
def test_bitcasts(arch, src):
    x = values(src, 256)
    bench = Bench(x)
    for dst in (d for d, info in ir.DTYPES.items() if info.bits == ir.DTYPES[src].bits and info.bits >= 8):
        if dst != "bool":  # a byte that is neither 0 nor 1 has no meaning there
            bench.add(ir.Bitcast(bench.xs[0], dst), x)
    if ir.DTYPES[src].bits == 4:
        for dst in NIBBLES:
            bench.add(ir.Bitcast(bench.xs[0], dst), x)
        for _, got, _ in bench.run(arch):
            np.testing.assert_array_equal(got.view(np.uint8) & 15, x.view(np.uint8) & 15)
        return
    for op, got, want in bench.run(arch):
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8), err_msg=op.dtype)


# -- selection, tiles of numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ONE)
@pytest.mark.parametrize("dtype", list(ir.DTYPES))
def test_select(arch, dtype):
    c, a, b = values("bool", 100), values(dtype, 100), values(dtype, 100, 1)
    bench = Bench(c, a, b)
    bench.add(ir.Select(*bench.xs), c, a, b)
    ((_, got, want),) = bench.run(arch)
    assert same(got, want).all()


@pytest.mark.parametrize("arch", ONE)
@pytest.mark.parametrize("dtype", list(ir.DTYPES))
def test_iota(arch, dtype):
    bench = Bench()
    for shape, axis in (((5,), 0), ((3, 40), 0), ((3, 40), 1), ((2, 1, 7), 1), ((300,), 0)):
        bench.add(ir.Iota(shape, axis, dtype))
    for op, got, want in bench.run(arch):
        assert same(got, np.asarray(want)).all(), f"{op.shape} along {op.axis}"


@pytest.mark.parametrize("arch", ONE)
@pytest.mark.parametrize("dtype", list(ir.DTYPES))
def test_dense(arch, dtype):
    rng = np.random.default_rng(3)
    bench = Bench()
    wide = float if ir.DTYPES[dtype].kind == "f" else bool if dtype == "bool" else int
    for shape in ((), (1,), (3, 5), (2, 3, 4), (256,) if dtype == "int32" else (7,), (0,)):
        n = int(np.prod(shape))
        x = values(dtype, max(n, 1))[:n]
        bench.add(ir.Dense(tuple((x.astype(float) if wide is float else x).tolist()), shape, dtype))
        bench.add(ir.Dense(tuple(wide(k % 2) for k in range(n)), shape, dtype))
        bench.add(ir.Dense(tuple(wide(rng.integers(0, 2)) for _ in range(n)), shape, dtype))
    for op, got, want in bench.run(arch):
        assert same(got, want).all(), f"{op.data[:8]} {op.shape}: got {got}"


def test_lines_are_arithmetic():
    bench = Bench()
    bench.add(ir.Dense(tuple(range(5, 205, 2)), (10, 10), "int32"))
    bench.add(ir.Dense(tuple(float(-k) if k else 0.0 for k in range(100)), (100,), "bfloat16"))
    text, _ = emit_kernel(bench.kernel, features("sm_80"))
    assert "arith.select" not in text
    for _, got, want in bench.run("sm_80"):
        assert same(got, want).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int4", "bool", "int16"])
def test_literals_of_many_numbers_are_operands(dtype):
    span = (0, 2) if dtype == "bool" else (-8, 8)
    x = np.random.default_rng(0).integers(*span, (3, 1000)).astype(ir.DTYPES[dtype].numpy)
    data = tuple(x.reshape(-1).astype({"f": float, "i": int, "b": bool}[ir.DTYPES[dtype].kind]).tolist())
    bench = Bench()
    for _ in range(2):
        bench.add(ir.Dense(data, x.shape, dtype))
    with pytest.raises(UnsupportedError, match="no literal tiles of 3000 different numbers"):
        emit_kernel(bench.kernel, features("sm_80"))
    kernel, tables = as_inputs(bench.kernel)
    ir.verify(kernel)
    assert len(tables) == 1 and tables[0].tobytes() == x.tobytes()  # equal ones share an operand
    for y in run_ttir(run_pipeline(kernel, TILE), tables, "sm_80"):
        assert same(y, x).all()


def test_lines_and_runs_are_no_operands():
    bench = Bench()
    bench.add(ir.Dense(tuple(range(5000)), (5000,), "int32"))
    bench.add(ir.Dense(tuple([1.5] * 4000 + [2.5] * 1000), (5000,), "float32"))
    kernel = bench.kernel
    assert as_inputs(kernel) == (kernel, ())


def test_bounds_are_in_the_docs():
    rows = re.findall(r"^\| (`[a-z0-9_`, ]+) \| ([0-9.]+) \| ([0-9.]+) \|", DOCS.read_text(), re.MULTILINE)
    said = {fn: (float(a), float(b)) for names, a, b in rows for fn in re.findall(r"`(\w+)`", names)}
    assert said == ULP_BOUNDS


# -- by triton --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_products_are_rounded_before_sums(arch, dtype):
    pytest.importorskip("triton")
    bench = Bench(*(values(dtype, seed=k) for k in range(3)))
    product = bench.b.value(ir.Map("mul", tuple(bench.xs[:2])))
    bench.value(ir.Map("sub", (product, bench.xs[2])))
    texts = compile_kernel(bench.kernel, card(arch), {"num_warps": 4}, texts=True).texts
    if arch == "sm_80":  # where a product of bf16 is a fused multiply-add with zero
        assert "sub.f32" in texts["ptx"] or "sub.rn.f32" in texts["ptx"]
    else:
        code = texts.get("ptx") or texts["amdgcn"]  # v_fma_mix_f32 is the sum: one factor is 1
        assert not re.search(r"\bfma\.rn\.b?f16|v_(pk_)?fma(c|_f16)", code) and re.search(
            r"mul\.b?f16|mul_f(16|32)", code
        )


@pytest.mark.gpu
def test_narrow_products_are_rounded_before_sums_on_the_device():
    for dtype in ("bfloat16", "float16"):
        xs = [np.random.default_rng(k).normal(size=4096).astype(ir.DTYPES[dtype].numpy) for k in range(3)]
        bench = Bench(*xs)
        product = bench.b.value(ir.Map("mul", tuple(bench.xs[:2])))
        bench.value(ir.Map("add", (product, bench.xs[2])))
        (got,) = run_device(bench.kernel, xs)
        want = ir.Map("add", (product, bench.xs[2])).reference(
            ir.Map("mul", tuple(bench.xs[:2])).reference(*xs[:2]), xs[2]
        )
        assert same(got, want).all()


COMPILED = [("sm_80", "bfloat16"), ("sm_90", "float32"), ("gfx942", "float32"), ("gfx1100", "float64"),
            ("gfx90a", "int64"), ("sm_90", "int4"), ("sm_90", "bool")]  # fmt: skip


@pytest.mark.parametrize(("arch", "dtype"), COMPILED)
def test_compiles(arch, dtype):
    pytest.importorskip("triton")
    kernel = elementwise(dtype, functions(dtype), 32 if ir.DTYPES[dtype].bits >= 32 else 64).kernel
    assert compile_kernel(kernel, card(arch), {"num_warps": 1}).image


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "gfx950"])
def test_conversions_compile(arch):
    pytest.importorskip("triton")
    x = values("float32", 64)
    bench = Bench(x)
    for dtype in (d.name for d in ir.DTYPES.values() if d.kind == "f" and d.bits <= 8):
        narrow = bench.b.value(ir.Cast(bench.xs[0], dtype))
        bench.add(ir.Cast(narrow, "bfloat16"), x)
    assert compile_kernel(bench.kernel, card(arch), {"num_warps": 1}).image


def test_fast_paths():
    """One instruction for exp2 and for rsqrt, without libdevice's branches up to the code generator; integers of 8 bits
    to bf16 without the slow conversion instruction."""
    pytest.importorskip("triton")
    x = values("int8", 256)
    bench = Bench(x, values("float32", 256))
    bench.add(ir.Cast(bench.xs[0], "bfloat16"), x)
    bench.add(ir.Map("exp2", (bench.xs[1],)))
    bench.add(ir.Map("rsqrt", (bench.xs[1],)))
    texts = compile_kernel(bench.kernel, card("sm_90"), {"num_warps": 4}, texts=True).texts
    ptx = texts["ptx"]
    assert "rsqrt.approx.f32" in ptx and "br " not in texts["llir"]
    assert "cvt.rn.f32.s" not in ptx and "cvt.rn.bf16.s" not in ptx and "cvt.rn.bf16x2.f32" in ptx
    assert "ex2.approx.ftz.f32" in ptx
