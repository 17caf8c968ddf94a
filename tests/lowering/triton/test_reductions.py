"""Reductions, scans and sorts as TTIR: against the interpreter, with garbage in the lanes beyond every tile."""

from __future__ import annotations

import re

import numpy as np
import op_matrix
import pytest
from device import run_device
from machines import card
from op_matrix import Bench, array
from ttir import run_ttir

from jtile import ir
from jtile._errors import UnsupportedError
from jtile.lowering.triton.compile import compile_kernel, emit_kernel
from jtile.lowering.triton.features import features
from jtile.lowering.triton.user_functions import commutes, neutral
from jtile.passes import TILE, run_pipeline

RUNNERS = [pytest.param(run_ttir, id="ttir"), pytest.param(run_device, id="device", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.usefixtures("garbage")


def check(case: op_matrix.Case, run=run_ttir) -> None:
    op_matrix.check(case, lambda kernel, inputs: run(run_pipeline(kernel, TILE), inputs))


# -- functions of the kernel -------------------------------------------------------------------------------------------


def region(b: ir.Builder, dtypes, fn) -> ir.Block:
    """The combiner `fn(builder, a..., b...) -> values`."""
    with b.region([ir.TileType((), d) for d in dtypes] * 2) as block:
        block.yields = tuple(fn(b, *block.params))
    return block


def affine(b: ir.Builder, m, c, n, d):
    """y -> m y + c, then y -> n y + d: associative, and the order matters."""
    return b.map("mul", m, n), b.map("add", b.map("mul", c, n), d)


def first_largest(b: ir.Builder, x, i, y, j):
    """Of equal numbers the former: the order matters, but for numbers that differ."""
    former = b.map("ge", x, y)
    return b.value(ir.Select(former, x, y)), b.value(ir.Select(former, i, j))


def smallest_index(b: ir.Builder, x, i, y, j):
    same = b.map("and", b.map("eq", x, y), b.map("lt", i, j))
    former = b.map("or", b.map("gt", x, y), same)
    return b.value(ir.Select(former, x, y)), b.value(ir.Select(former, i, j))


def counted(b: ir.Builder, x, p, y, q):
    """A bool among the values, and constants in the function."""
    one, true = b.value(ir.Full(1, (), "int32")), b.value(ir.Full(True, (), "bool"))
    return b.map("add", b.map("add", x, y), one), b.map("xor", b.map("xor", p, q), true)


FUNCTIONS = {
    "affine": (affine, ("int32", "int32"), (1, 0)),
    "affine_float": (affine, ("float32", "float32"), (1.0, 0.0)),
    "affine_start": (affine, ("int32", "int32"), (3, 5)),
    "first_largest": (first_largest, ("int8", "int32"), (-128, 0)),
    "smallest_index": (smallest_index, ("int8", "int32"), (-128, 2**31 - 1)),
    "counted": (counted, ("int32", "bool"), (4, False)),
}


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("axes", [(0,), (2,), (0, 2), (1, 2), (0, 1, 2), ()], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_user_reduce(name, axes, run):
    fn, dtypes, inits = FUNCTIONS[name]
    bench = Bench(*(array((3, 5, 6), d, seed, 0.5, 1.5) for seed, d in enumerate(dtypes)))
    b, xs = bench.b, tuple(bench.loads())
    starts = tuple(b.value(ir.Full(i, (), d)) for d, i in zip(dtypes, inits, strict=True))
    for r in b.add(ir.UserReduce(xs, starts, axes, region(b, dtypes, fn))).results:
        bench.store(r)
    check(bench.case(1e-4), run)


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["affine", "affine_float", "first_largest", "counted"])
def test_user_scan(name, axis, reverse, run):
    fn, dtypes, _ = FUNCTIONS[name]
    bench = Bench(*(array((5, 7), d, seed, 0.5, 1.5) for seed, d in enumerate(dtypes)))
    b, xs = bench.b, tuple(bench.loads())
    for r in b.add(ir.UserScan(xs, axis, reverse, region(b, dtypes, fn))).results:
        bench.store(r)
    check(bench.case(1e-4), run)


def test_a_combiner_reads_scalars_from_outside_and_starts_from_a_value_that_only_the_kernel_knows():
    bench = Bench(array((6, 5), "int32"), array((), "int32", 1))
    b = bench.b
    x, start = bench.loads()
    scale = b.map("add", start, b.value(ir.Full(1, (), "int32")))
    body = region(b, ["int32"], lambda b, p, q: [b.map("max", p, b.map("max", q, scale))])
    bench.value(ir.UserReduce((x,), (start,), (1,), body))
    check(bench.case())


def test_user_reduce_of_nothing_gives_its_start():
    bench = Bench(array((0, 5), "int32"))
    b = bench.b
    start = b.value(ir.Full(9, (), "int32"))
    body = region(b, ["int32"], lambda b, p, q: [b.map("add", p, q)])
    bench.value(ir.UserReduce(tuple(bench.loads()), (start,), (0,), body))
    check(bench.case())


def test_a_combiner_with_more_than_elementwise_operations_is_refused():
    bench = Bench(array((4,), "int32"))
    b = bench.b
    start = b.value(ir.Full(0, (), "int32"))

    def indexed(b, p, q):
        return [b.map("add", p, b.value(ir.Reduce(q, "sum", ())))]

    bench.value(ir.UserReduce(tuple(bench.loads()), (start,), (0,), region(b, ["int32"], indexed)))
    with pytest.raises(UnsupportedError, match="elementwise"):
        emit_kernel(bench.case().kernel, features("sm_90"))


def test_what_is_found_out_about_functions():
    b = ir.Builder()
    blocks = {name: region(b, dtypes, fn) for name, (fn, dtypes, _) in FUNCTIONS.items()}
    assert [name for name, block in blocks.items() if commutes(block)] == ["smallest_index", "counted"]

    def is_neutral(name, inits):
        _, dtypes, _ = FUNCTIONS[name]
        xs = tuple(b.value(ir.Full(0, (4,), d)) for d in dtypes)
        starts = tuple(b.value(ir.Full(i, (), d)) for d, i in zip(dtypes, inits, strict=True))
        return neutral(b.add(ir.UserReduce(xs, starts, (0,), blocks[name])))

    assert is_neutral("affine", (1, 0)) and not is_neutral("affine", (3, 5))
    assert not is_neutral("smallest_index", (-127, 2**31 - 1)) and is_neutral("smallest_index", (-128, 2**31 - 1))
    assert is_neutral("counted", (-1, True)) and not is_neutral("first_largest", (-128, 0))


# -- built-in ----------------------------------------------------------------------------------------------------------

SPECIAL = [0.0, -0.0, np.nan, 1.0, -1.0, np.inf, -np.inf, -0.0, 2.0, np.nan, 0.0, -2.0, 1.0]


def numbers(dtype: str, n: int = 13) -> np.ndarray:
    """Ties, zeros of both signs, infinities, NaN; the ends of an integer's range."""
    info = ir.DTYPES[dtype]
    if info.kind == "f":
        return np.resize(np.asarray(SPECIAL, np.float32).astype(info.numpy), n)
    if info.kind == "b":
        return np.arange(n) % 3 == 1
    low, high = (-(1 << (info.bits - 1)), (1 << (info.bits - 1)) - 1) if info.kind == "i" else (0, (1 << info.bits) - 1)
    values = [1, high, low, 3, low, high, 0, high - 1, 2, 1, low + 1, 3, 7]
    return np.resize(np.array(values, np.uint64 if info.kind == "u" else np.int64).astype(info.numpy), n)


ALL = [*op_matrix.DTYPES, "float8_e8m0fnu", "float4_e2m1fn"]


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("dtype", ALL)
def test_extremes(dtype, run):
    """The first NaN wins; -0 and 0 are equal; the ends of an integer's range are numbers like others."""
    x = numbers(dtype)
    bench = Bench(x, x[3:9], np.stack([x, x[::-1]], 1))
    for v in bench.loads():
        for fn in ("max", "min"):
            bench.value(ir.ArgReduce(v, fn, 0, "int32"))
            if dtype not in ("float8_e8m0fnu", "float4_e2m1fn"):
                bench.value(ir.Reduce(v, fn, (0,)))
    check(bench.case(), run)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("reverse", [False, True])
def test_log_sum_exp_of_infinities(dtype, reverse):
    x = np.stack([numbers(dtype), np.full(13, -np.inf).astype(ir.DTYPES[dtype].numpy), array((13,), dtype)])
    bench = Bench(x, np.abs(x) * x.dtype.type(30))
    for v in bench.loads():
        bench.value(ir.Cumulative(v, "logsumexp", 1, reverse))
    check(bench.case(1e-2 if dtype == "bfloat16" else 1e-5))


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int16", "uint64", "float16"])
def test_cumulative_wraps(dtype):
    bench = Bench(array((3, 11), dtype))
    (x,) = bench.loads()
    for fn in ("sum", "prod", "max", "min"):
        if not (fn == "prod" and dtype == "float16"):
            bench.value(ir.Cumulative(x, fn, 1, True))
    check(bench.case(5e-3))


@pytest.mark.parametrize("dtype", op_matrix.DTYPES)
def test_empty(dtype):
    bench = Bench(array((3, 0), dtype), array((0, 2), dtype))
    for x in bench.loads():
        for fn in ("and", "or", "max", "min") if dtype == "bool" else ("sum", "prod", "max", "min"):
            for axis in (0, 1):
                bench.value(ir.Reduce(x, fn, (axis,)))
        bench.value(ir.Cumulative(x, "max", 1))
        bench.store(bench.b.add(ir.Sort((x,), 1)).results[0])
    check(bench.case())


# -- sorts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("dtype", ALL)
def test_sort_is_stable(dtype, run):
    """Long and short axes, last and first, up and down; the second operand shows the order of equal elements."""
    x = np.stack([numbers(dtype, 70), numbers(dtype, 70)[::-1]])
    for shape, axis, descending in [((2, 70), 1, True), ((20, 7), 0, False)]:
        bench = Bench(x.reshape(shape))
        (v,) = bench.loads()
        place = bench.b.value(ir.Iota(shape, axis, "int16"))
        for r in bench.b.add(ir.Sort((v, place), axis, 1, descending)).results:
            bench.store(r)
        if shape == (2, 70):
            bench.store(bench.b.add(ir.Sort((v,), axis, 1, descending)).results[0])
        check(bench.case(0.0), run)


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("n", [2, 33, 65])
def test_sort_by_several_keys(n, run):
    keys = [array((n, 3), "int8", 1) % 3, array((n, 3), "float32", 2).round(), array((n, 3), "int64", 3) << 40]
    bench = Bench(*keys, array((n, 3), "bfloat16", 4))
    xs = tuple(bench.loads())
    for count, descending in [(2, False), (3, True)]:
        for r in bench.b.add(ir.Sort(xs, 0, count, descending)).results:
            bench.store(r)
    check(bench.case(), run)


# -- code --------------------------------------------------------------------------------------------------------------


def softmax(n: int) -> ir.Kernel:
    bench = Bench(array((n,), "float32"))
    b = bench.b
    (x,) = bench.loads()
    top = b.value(ir.Broadcast(b.value(ir.Reduce(x, "max", (0,))), (n,), ()))
    e = b.map("exp", b.map("sub", x, top))
    bench.store(b.map("div", e, b.value(ir.Broadcast(b.value(ir.Reduce(e, "sum", (0,))), (n,), ()))))
    return bench.case().kernel


def test_text_of_a_reduction():
    bench = Bench(array((4, 6), "int8"))
    bench.value(ir.Reduce(bench.loads()[0], "sum", (1,)))
    text, _ = emit_kernel(bench.case().kernel, features("sm_90"))
    start = text.index('"tt.reduce"')
    body = text[start : text.index("tt.splat", start)].rpartition("%")[0]
    assert re.sub(r"%\d+", "%", body) == (
        '"tt.reduce"(%) <{axis = 1 : i32}> ({\n'
        "    ^bb0(%: i32, %: i32):\n"
        "      % = arith.addi %, % : i32\n"
        "      tt.reduce.return % : i32\n"
        "    }) : (tensor<4x8xi32>) -> tensor<4xi32>\n"
        "    % = arith.trunci % : tensor<4xi32> to tensor<4xi8>\n"
        "    "
    )


def test_a_row_is_folded_by_shuffles_and_one_exchange():
    ptx = compile_kernel(softmax(4096), card("sm_90"), {"num_warps": 4}, texts=True).texts["ptx"]
    # Two reductions: five steps in a warp, two for four warps, and barriers around one exchange (triton 3.6 has two).
    assert ptx.count("shfl.sync") == 14 and ptx.count("bar.sync") <= 5


def test_integers_are_folded_by_redux():
    bench = Bench(array((256,), "bfloat16"), array((256,), "bool"))
    x, flags = bench.loads()
    bench.value(ir.ArgReduce(x, "max", 0, "int32"))
    bench.value(ir.Reduce(flags, "or", (0,)))
    ptx = compile_kernel(bench.case().kernel, card("sm_80"), texts=True).texts["ptx"]
    assert "redux.sync.max" in ptx and "redux.sync.or" in ptx
    assert ptx.count("shfl.sync") <= 4  # triton 3.6 folds the four numbers of the warps by shuffles


def everything() -> ir.Kernel:
    """An op of each kind, a long and a short sort."""
    bench = Bench(array((2, 200), "float32"), array((8, 40), "int8"))
    b = bench.b
    x, y = bench.loads()
    bench.value(ir.Reduce(x, "min", (0, 1)))
    bench.value(ir.Cumulative(x, "logsumexp", 1, True))
    one = b.value(ir.Full(3, (), "int8"))
    place = b.value(ir.Iota((8, 40), 1, "int32"))
    init = b.value(ir.Full(0, (), "int32"))
    for fn in (first_largest, smallest_index):
        for r in b.add(ir.UserReduce((y, place), (one, init), (1,), region(b, ("int8", "int32"), fn))).results:
            bench.store(r)
    for r in b.add(ir.Sort((x, b.value(ir.Iota((2, 200), 1, "int32"))), 1, 1, True)).results:
        bench.store(r)
    bench.store(b.add(ir.Sort((y,), 1)).results[0])
    return bench.case().kernel


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "gfx942"])
def test_compiles(arch):
    assert compile_kernel(everything(), card(arch)).image
