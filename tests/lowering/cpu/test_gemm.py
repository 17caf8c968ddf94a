"""The matmul generator against NumPy: every dtype, layout and strategy, with poison around every buffer."""

from __future__ import annotations

import ctypes
import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import llvmlite.binding as llvm
import ml_dtypes
import numpy as np
import pytest
from draws import draws, thorough
from gemm_products import Products, check, numpy_dtype, random_matrix

from jtile.lowering.cpu import tiles
from jtile.lowering.cpu.compile import assemble, new_machine
from jtile.lowering.cpu.gemm import GemmSpec, emit_gemm
from jtile.lowering.cpu.gemm_modes import choose_mode
from jtile.lowering.cpu.gemm_plan import make_plan
from jtile.lowering.cpu.isa import ISAS, host_isa
from jtile.lowering.cpu.llvm import Code, Module, Val

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FLOATS = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
BYTES = ["int8", "uint8"]
INTS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"]
SIZES = [
    (1, 1, 1), (1, 100, 130), (3, 33, 65), (8, 70, 40), (5, 16, 7),  # direct, dot
    (17, 1, 70), (40, 3, 67), (19, 4, 31),  # narrow
    (13, 5, 33), (33, 47, 19), (64, 64, 64), (31, 65, 129),  # packed
]  # fmt: skip
LAYOUTS = list(itertools.product((False, True), repeat=2))


def specs(a: str, b: str, acc: str, sizes=SIZES) -> list[GemmSpec]:
    turn = itertools.cycle((False, True, True))
    return [GemmSpec(*size, a, b, acc, ta, tb, next(turn)) for size in sizes for ta, tb in LAYOUTS]


OTHERS = [
    ("float64", "float64", "float64"), ("float32", "float64", "float64"), ("bfloat16", "float32", "float32"),
    ("float16", "bfloat16", "float32"), ("float8_e4m3fn", "bfloat16", "float32"), ("int16", "int16", "int32"),
    ("int8", "int16", "int32"), ("uint16", "int32", "int32"), ("int32", "int32", "int32"),
    ("int64", "int8", "int32"),
    ("int64", "int32", "int64"), ("bool", "bool", "int32"), ("float8_e8m0fnu", "float4_e2m1fn", "float32"),
]  # fmt: skip
KINDS = [*((d, d, "float32") for d in FLOATS), *((a, b, "int32") for a in BYTES for b in BYTES), *OTHERS]


@functools.cache
def wanted(isa: str, a: str, b: str, acc: str) -> list[GemmSpec]:
    """The products of these dtypes that tests compile: two layouts of each size for the main dtypes on this machine,
    else a choice that goes through sizes and layouts; `make test-all` takes all of them, or a denser choice."""
    everything = specs(a, b, acc)
    main = isa == "host" and a == b and a in ("float32", "bfloat16")
    if thorough():
        return everything[:: 1 if main else 2 if isa == "host" and a in BYTES and b in BYTES else 3]
    if main:
        return [spec for k, spec in enumerate(everything) if (k // len(LAYOUTS) + spec.trans_a + spec.trans_b) % 2 == 0]
    return everything[KINDS.index((a, b, acc)) % 7 :: 7]


@pytest.fixture(scope="session")
def compiled(undefined):
    """The products of `wanted`, compiled once for all tests of values."""
    isas = ISAS | {"host": host_isa()}
    return functools.cache(lambda isa, *dtypes: Products(isas[isa], wanted(isa, *dtypes), undefined))


def check_infinities(products: Products) -> None:
    """NaN and infinity stay in their row and column."""
    for spec in products.products:
        m, n, k = spec.m, spec.n, spec.k
        a, b = np.ones((m, k), numpy_dtype(spec.a)), np.ones((k, n), numpy_dtype(spec.b))
        a[m - 1, k - 1] = np.inf
        b[k - 1, n - 1] = np.nan
        want = np.full((m, n), float(k))
        want[m - 1], want[:, n - 1] = np.inf, np.nan
        got = products.run(spec, a, b, np.zeros((m, n), spec.acc), slack=1)
        np.testing.assert_array_equal(got, want, err_msg=str(spec))


def check_extremes(products: Products) -> None:
    """The largest magnitudes: nothing saturates, sums wrap modulo 2**32."""
    for spec in products.products:
        for low_a, low_b in LAYOUTS:
            x, y = (getattr(np.iinfo(d), "min" if low else "max") for d, low in ((spec.a, low_a), (spec.b, low_b)))
            zero = np.zeros((spec.m, spec.n), np.int32)
            got = products.run(spec, np.full((spec.m, spec.k), x, spec.a), np.full((spec.k, spec.n), y, spec.b), zero)
            want = (int(x) * int(y) * spec.k + 2**31) % 2**32 - 2**31
            assert (got == want).all(), spec


@pytest.mark.parametrize("dtype", FLOATS)
def test_float_products(native_isa, dtype, compiled):
    """Sizes for every strategy, odd and even, in every layout; the main dtypes in more combinations."""
    products = compiled(native_isa, dtype, dtype, "float32")
    for i, spec in enumerate(products.products):
        check(products, spec, i)
    if dtype != "float8_e4m3fn":  # which has no infinity
        check_infinities(products)


@pytest.mark.parametrize(("a", "b"), list(itertools.product(BYTES, BYTES)))
def test_byte_products(native_isa, a, b, compiled):
    products = compiled(native_isa, a, b, "int32")
    for i, spec in enumerate(products.products):
        check(products, spec, i)
    check_extremes(products)


@pytest.mark.parametrize(("a", "b", "acc"), OTHERS)
def test_other_dtypes(a, b, acc, compiled):
    """Wide, narrow and mixed operands on this machine."""
    products = compiled("host", a, b, acc)
    for i, spec in enumerate(products.products):
        check(products, spec, i)
    if a == b == "float64":
        check_infinities(products)


@pytest.mark.parametrize(("a", "acc"), [("float32", "float32"), ("bfloat16", "float32"), ("int8", "int32")])
def test_blocked_products(a, acc, undefined):
    """More rows, columns and k than one cache block holds, with tails in each."""
    sizes = [(300, 70, 70), (20, 40, 5001), (3, 300, 5003), (2, 3000, 230), (300, 2, 3001)]
    wanted = specs(a, a, acc, sizes)[:: 1 if a == "int8" and thorough() else 3]
    products = Products(host_isa(), wanted, undefined)
    for i, spec in enumerate(wanted):
        check(products, spec, i)


@pytest.mark.parametrize(
    "dtypes", [("bfloat16", "bfloat16"), ("float8_e5m2", "bfloat16"), *itertools.product(BYTES, BYTES)]
)
def test_products_on_tiles(dtypes, undefined):
    """Blocks of every kind (one tile to four, whole and cut on each side), and k that does not fill its last tile.

    Machines without tile registers compile them only.
    """
    sizes = [(32, 32, 64), (9, 100, 128), (49, 16, 96), (100, 50, 80), (70, 7, 1100), (300, 33, 33), (20, 70, 47)]
    floats = dtypes[1] == "bfloat16"
    wanted = specs(*dtypes, "float32" if floats else "int32", sizes)[:: 1 if thorough() else 3]
    products = Products(ISAS["amx"], wanted, undefined)
    assert all(make_plan(choose_mode(ISAS["amx"], s.a, s.b, s.acc), s.m, s.n, s.k, s.trans_a, s.trans_b).mode.tiles
               for s in wanted)  # fmt: skip
    for i, spec in enumerate(products.products):
        check(products, spec, i)
    (check_infinities if floats else check_extremes)(products)


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_wide_numbers_on_every_instruction_set(native_isa, dtype, undefined):
    """A vector may hold two of them, fewer than a thin product has columns. Sizes and layouts add and overwrite."""
    isa = host_isa() if native_isa == "host" else ISAS[native_isa]
    sizes = [(3, 3, 3), (1, 3, 2), (5, 4, 9), (2, 9, 8), (17, 3, 40)]
    wanted = [
        GemmSpec(*size, dtype, dtype, dtype, ta, tb, add)
        for (k, size), ta, tb in itertools.product(enumerate(sizes), (False, True), (False, True))
        for add in ((False, True) if thorough() else ((k + ta + tb) % 2 == 1,))
    ]
    products = Products(isa, wanted, undefined)
    for k, spec in enumerate(wanted):
        check(products, spec, k)


def test_empty_products(undefined):
    """Without terms C becomes zero, or stays when accumulating; without elements nothing is touched."""
    sizes = [(0, 3, 5), (3, 0, 5), (0, 0, 0), (4, 37, 0), (1, 1, 0)]
    wanted = [GemmSpec(*size, "bfloat16", "bfloat16", "float32", False, True, add) for size in sizes for add in (0, 1)]
    products = Products(host_isa(), wanted, undefined)
    rng = np.random.default_rng(0)
    for spec in wanted:
        a, b, c = (random_matrix(rng, (spec.m, spec.k), spec.a), random_matrix(rng, (spec.k, spec.n), spec.b),
                   random_matrix(rng, (spec.m, spec.n), "float32"))  # fmt: skip
        want = c if spec.accumulate else np.zeros_like(c)
        np.testing.assert_array_equal(products.run(spec, a, b, c, slack=2), want, err_msg=str(spec))


DTYPE_PAIRS = st.one_of(
    st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS), st.just("float32")),
    st.tuples(st.sampled_from([*FLOATS, "float64"]), st.sampled_from([*FLOATS, "float64"]), st.just("float64")),
    st.tuples(st.sampled_from(INTS), st.sampled_from(INTS), st.sampled_from(["int32", "int64"])),
)
SIZE = st.one_of(st.integers(0, 20), st.sampled_from([31, 32, 33, 64, 100, 127, 257]))


@draws(40)
@hypothesis.given(m=SIZE, n=SIZE, k=SIZE, dtypes=DTYPE_PAIRS, ta=st.booleans(), tb=st.booleans(), add=st.booleans())
def test_random_products(undefined, m, n, k, dtypes, ta, tb, add):
    spec = GemmSpec(m, n, k, *dtypes, ta, tb, add)
    check(Products(host_isa(), [spec], undefined), spec, m + n + k)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float16", "bfloat16"])
def test_every_value_survives_widening(native_isa, dtype, undefined):
    """Times one, each bit pattern gives its value exactly; NaN stays NaN. Through all three strategies and packers."""
    isa = host_isa() if native_isa == "host" else ISAS[native_isa]
    kind = numpy_dtype(dtype)
    count = 2 ** min(8 * kind.itemsize, 10)
    step = 2 ** (8 * kind.itemsize) // count
    values = (np.arange(count) * step + step // 3).astype(f"u{kind.itemsize}").view(kind)
    if dtype == "bfloat16":
        values = values[(np.abs(values.astype(np.float32)) >= 2.0**-126) | (values.astype(np.float32) == 0)]
    k, n = 1, len(values)
    # With one term, only the layout of the operand of `dtype` matters.
    few = lambda size: LAYOUTS if thorough() else [(False, False), (True, True)] if 1 in size else LAYOUTS[1:3]
    wanted = [GemmSpec(*s, k, "float32", dtype, "float32", *t) for s in ((1, n), (20, n)) for t in few(s)]
    wanted += [GemmSpec(*s, k, dtype, "float32", "float32", *t) for s in ((n, 1), (n, 20)) for t in few(s)]
    wanted += [GemmSpec(1, n, k, "bfloat16", dtype, "float32", *t) for t in few((1, n))] if kind.itemsize == 1 else []
    products = Products(isa, wanted, undefined)
    expected = values.astype(np.float32)
    for spec in wanted:
        one = np.ones
        if spec.b == dtype and spec.n == n:
            got = products.run(spec, one((spec.m, 1), numpy_dtype(spec.a)), values[None], np.zeros((spec.m, n), "f4"))
            np.testing.assert_array_equal(got, np.broadcast_to(expected, got.shape), err_msg=str(spec))
        else:
            got = products.run(spec, values[:, None], one((1, spec.n), "f4"), np.zeros((n, spec.n), "f4"))
            np.testing.assert_array_equal(got, np.broadcast_to(expected[:, None], got.shape), err_msg=str(spec))


@pytest.mark.parametrize("dtype", ["int16", "int32"])
def test_wider_integers_wrap(native_isa, dtype, compiled):
    """Those of bytes are tested with their products."""
    check_extremes(compiled(native_isa, dtype, dtype, "int32"))


@pytest.mark.parametrize("isa", sorted(ISAS))
@pytest.mark.parametrize(
    "dtypes",
    [(d, d, "float32") for d in FLOATS] + [("float64",) * 3, ("int8", "int8", "int32"), ("uint8", "int8", "int32")],
)
def test_objects_for_every_instruction_set(isa, dtypes, undefined, compiled_isas):
    """Valid text and an object without undefined symbols, for machines that are not this one."""
    if isa in compiled_isas:
        return  # by the tests of values
    Products(ISAS[isa], specs(*dtypes, [(3, 33, 35), (21, 37, 35)])[::3], undefined)


def test_each_spec_is_emitted_once_and_alike():
    """Text depends on the specs alone; a second request adds nothing and gives the same answer."""
    wanted = [
        GemmSpec(300, 40, 50, "int8", "int8", "int32", True, True),
        GemmSpec(12, 2, 50, "bfloat16", "bfloat16", "float32", True),
    ]
    texts = []
    for _ in range(2):
        module = Module(host_isa().triple)
        first = [emit_gemm(module, host_isa(), spec) for spec in wanted]
        text = module.text()
        assert [emit_gemm(module, host_isa(), spec) for spec in wanted] == first
        assert module.text() == text
        texts.append(text)
    assert texts[0] == texts[1]
    assert all(gemm.workspace % 64 == 0 for gemm in first)


@pytest.mark.parametrize(
    ("a", "b", "acc"),
    [
        ("float32", "int8", "float32"),
        ("float64", "float64", "float32"),
        ("int4", "int8", "int32"),
        ("int8", "int8", "float32"),
        ("float32", "float32", "bfloat16"),
    ],
)
def test_dtypes_that_do_not_go_together_are_refused(a, b, acc):
    with pytest.raises(ValueError, match=f"no matmul of {a} and {b} with a {acc} accumulator"):
        emit_gemm(Module(host_isa().triple), host_isa(), GemmSpec(4, 4, 4, a, b, acc))


@pytest.mark.parametrize("isa", ["host", "avx2", "sse2"])
def test_a_row_times_a_computed_matrix_has_the_same_bits_among_others(isa, undefined):
    """Servers of quantised models count on it: any number of rows, and of columns."""
    isa, rng = host_isa() if isa == "host" else ISAS[isa], np.random.default_rng(0)
    rows = (1, 3, 8, 13, 41)
    for n, k in ((21, 200), (4, 64), (33, 1100)):
        wanted = [GemmSpec(m, n, k, "float32", "float32", "float32", False, True, made=True) for m in rows]
        products = Products(isa, wanted, undefined)
        if not products.products:
            continue
        a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows[-1], k), (k, n)))
        all_rows = products.run(wanted[-1], a, b, np.zeros((rows[-1], n), np.float32))
        for spec in wanted:
            check(products, spec)
            one = products.run(spec, a[-spec.m :], b, np.zeros((spec.m, n), np.float32), slack=3)
            np.testing.assert_array_equal(one, all_rows[-spec.m :], err_msg=str(spec))


def test_strategy_follows_shape():
    """Few rows stream B, few columns stream A, the rest is packed."""
    mode = choose_mode(ISAS["avx512"], "float32", "float32", "float32")
    chosen = {
        (*size, ta, tb): make_plan(mode, *size, ta, tb).strategy
        for size in ((1, 512, 512), (512, 1, 512), (64, 64, 64), (8, 64, 64))
        for ta, tb in LAYOUTS
    }
    assert chosen[1, 512, 512, False, False] == "direct" and chosen[1, 512, 512, False, True] == "dot"
    assert chosen[512, 1, 512, False, False] == "dot" and chosen[8, 64, 64, False, False] == "direct"
    assert all(chosen[64, 64, 64, ta, tb] == "packed" for ta, tb in LAYOUTS)


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 5), ("float8_e5m2", 5), ("int8", 8)])
def test_few_rows_beside_tiles(dtype, most):
    """Few rows read B in place; a short k, of which tiles would be mostly zeros, never comes to tiles."""
    acc = "int32" if dtype == "int8" else "float32"
    for isa, last in (("amx", most), ("avx512bf16", 8)):
        mode = choose_mode(ISAS[isa], dtype, dtype, acc)
        plans = {
            (m, k, tb): make_plan(mode, m, 256, k, False, tb)
            for m in (last, last + 1)
            for k in (8, 512)
            for tb in (False, True)
        }
        assert [plans[last, 512, tb].strategy for tb in (False, True)] == ["direct", "dot"]
        for tb in (False, True):
            plan = plans[last + 1, 512, tb]
            assert (plan.strategy, plan.mode.tiles) == ("packed", isa == "amx")
        assert not any(plan.mode.tiles for (_, k, _), plan in plans.items() if k == 8)


def test_tiles_have_the_sizes_that_others_gave_them():
    """A library that gives tile registers their sizes once a thread, as llama.cpp does, finds them behind a product."""
    isa = host_isa()
    if not isa.has("amx-bf16"):
        pytest.skip("this machine has no tile registers, or this process may not use them")
    module = Module(isa.triple, attributes=f'"prefer-vector-width"="{isa.vector_bits}"')
    spec = GemmSpec(32, 32, 64, "bfloat16", "bfloat16", "float32")
    name, out = emit_gemm(module, isa, spec), Val("ptr", "%out")
    for what in ("give", "look", "multiply"):
        params = [Val(t, f"%p{k}") for k, t in enumerate(["ptr", "i64"] * 3 + ["ptr"])]
        code = Code(
            module, what, [out] if what == "look" else params if what == "multiply" else [], linkage="dso_local"
        )
        if what == "give":
            tiles.resize(code, {0: (5, 20), 3: (16, 64)})
        elif what == "look":
            code.intrinsic("x86.sttilecfg", "void", out, suffix="")
        else:
            code.do(f"call void @{name.name}({', '.join(map(str, params))})")
        code.finish()
    image, _ = assemble(module.text(), isa)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), new_machine(isa, 2))
    engine.add_object_file(llvm.ObjectFileRef.from_data(image))
    engine.finalize_object()
    give, look, multiply = (engine.get_function_address(what) for what in ("give", "look", "multiply"))
    found = [np.zeros(64, np.uint8) for _ in range(4)]
    see = lambda i: ctypes.CFUNCTYPE(None, ctypes.c_void_p)(look)(found[i].ctypes.data)
    a, b, c = (
        np.ones((32, 64), ml_dtypes.bfloat16),
        np.ones((64, 32), ml_dtypes.bfloat16),
        np.zeros((32, 32), np.float32),
    )
    work = np.zeros(name.workspace + 64, np.uint8)
    args = [x for m in (a, b, c) for x in (m.ctypes.data, m.shape[1])] + [work.ctypes.data - work.ctypes.data % -64]
    run = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p, ctypes.c_int64] * 3, ctypes.c_void_p)(multiply)
    see(0), run(*args), see(1)
    ctypes.CFUNCTYPE(None)(give)()
    see(2), run(*args), see(3)
    assert (c == 64).all() and not found[0].any() and not found[1].any()
    assert found[2][0] == 1 and [found[2][48], found[2][51]] == [5, 16]
    np.testing.assert_array_equal(found[2], found[3])
