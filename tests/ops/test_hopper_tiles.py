"""Which tiles products get on a GPU with warpgroup products."""

import dataclasses
import importlib
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal

import jtile as jt
from jtile import ops, passes
from jtile.lowering import targets
from jtile.lowering.triton.block import passes as block
from jtile.lowering.triton.block.passes import hanging
from jtile.ops import gpu_tiles, hopper_tiles, spaces
from jtile.ops.hopper_tiles import TILES, Form, Product, candidates, extended, parts_of_product, predicted_us, tiles
from jtile.primitive.lowering import compile_piece, pieces_of
from jtile.tune import device
from jtile.tune.programs import trace

untuned = importlib.import_module("jtile.ops.matmul")._untuned
LARGE = [(8192, 8192, 8192), (4096, 4096, 4096), (2048, 2048, 2048), (8192, 28672, 4096), (8192, 4096, 14336)]


@pytest.mark.parametrize("sizes", LARGE, ids=str)
def test_large_products_take_the_largest_tiles(sizes):
    assert tiles(Product(*sizes)) == {"bm": 128, "bn": 256, "bk": 64}
    assert parts_of_product(Product(*sizes))[0] == 1


@pytest.mark.parametrize("sizes", [(300, 504, 704), (1000, 1000, 1000), (100, 20000, 512), (70, 64, 70000)], ids=str)
def test_the_choice_has_the_shortest_predicted_time(sizes):
    p = Product(*sizes)
    best = tiles(p)
    assert (best["bm"], best["bn"]) in candidates(p)
    times = [predicted_us(p, Form(1, *s)) for s in candidates(p)]
    assert predicted_us(p, Form(1, best["bm"], best["bn"])) == min(times) > 0


def test_few_tiles_and_long_sums_are_made_in_parts():
    p = Product(256, 1024, 16384)
    parts, sides = parts_of_product(p)
    assert 2 <= parts * p.tiles(sides["bm"], sides["bn"]) <= hopper_tiles.processors()
    assert parts_of_product(Product(256, 1024, 4096)) == (1, {})
    assert parts_of_product(Product(512, 2048, 8192, 4)) is None  # as on other GPUs


def test_rows_in_memory_that_start_inside_of_lines_cost_more():
    """Then what is read once for many products is worth more: larger tiles."""
    side = lambda **of: math.prod(tiles(Product(3008, 3008, 3000, **of))[x] for x in ("bm", "bn"))
    assert side() >= side(left=True, transposed=False) >= side(left=True, transposed=True)
    times = [predicted_us(Product(3000, n, n), Form(1, 64, 128)) for n in (3008, 3000)]
    assert times[1] > 1.3 * times[0]


def test_rows_that_hang_over_are_counted_as_the_compiler_does():
    assert hopper_tiles.HANGING == hanging.LEAST


def measured(name):
    """The share of the speed of the best tile that the choice for each shape has: on the H200, of times in a record."""
    record = json.loads((Path(__file__).parents[2] / "benchmarks/records/h200/tiles.json").read_text())
    for key, of in (record if name == "times" else record[name])["times"].items():
        sizes, order, dtype = [*key.split(), *("NN", "bfloat16")[len(key.split()) - 1 :]]
        left, right = (letter == "T" for letter in order)
        itemsize = jnp.dtype(dtype).itemsize
        p = Product(*map(int, sizes.split("x")), itemsize, left=left, transposed=right, fast=dtype == "int8")
        if p.m <= hopper_tiles.FEW and -p.m % 64 >= hopper_tiles.HANGING:
            continue  # times from when rows outside of an array were brought, see `passes/hanging.py`
        parts, sides = (parts_of_product(p) if name == "third" else None) or (1, {})
        best = sides or tiles(p)
        tile = f"{f'{parts} parts ' if parts > 1 else ''}{best['bm']}x{best['bn']}"
        yield min(of.values()) / of.get(f"{tile} k {best['bk']}", of[tile])


@pytest.mark.parametrize(("name", "close", "least"), [("times", 13, 0.92), ("later", 22, 0.92), ("third", 26, 0.92)])
def test_choices_are_close_to_the_best_that_was_measured(name, close, least):
    """The model follows the times that its numbers are fitted to: most choices are the best ones, none is far off."""
    shares = list(measured(name))
    assert min(shares) > least
    assert sum(s >= 0.95 for s in shares) >= close
    assert sum(shares) / len(shares) > 0.98


def test_few_rows_that_hang_over_come_in_lines_that_boxes_can_leave_out():
    """Those of 256 bytes are two boxes each already."""
    assert tiles(Product(96, 4096, 4096, transposed=True)) == {"bm": 64, "bn": 64, "bk": 64}
    assert tiles(Product(128, 4096, 4096, transposed=True)) == {"bm": 64, "bn": 64, "bk": 128}


def test_power_lowers_the_clock_where_all_blocks_work():
    """Half of the blocks are idle: they take no power, and the others are quicker."""
    few, many = (predicted_us(Product(64 * count, 256, 4096), Form(1, 64, 256)) for count in (66, 132))
    assert many > 1.1 * few


def test_a_last_round_of_few_tiles_reads_little():
    """What the first round reads, it reads at the memory's rate, however quick the last one is."""
    one, two = (predicted_us(Product(128, 128 * count, 8192), Form(1, 128, 128)) for count in (132, 133))
    bytes_of_one = 2 * 8192 * 128 * 133
    assert one > bytes_of_one / hopper_tiles.READ
    assert two - one > 0.9 * 128 * TILES[128, 128][0]


@pytest.mark.parametrize(
    ("why", "sizes", "of"),
    [
        ("few rows", (64, 512, 512, 2), {}),
        ("few columns", (512, 32, 512, 2), {}),
        ("few terms", (512, 512, 64, 2), {}),
        ("wide elements", (512, 512, 512, 4), {}),
        ("rows of b of no whole 16 bytes", (512, 500, 512, 2), {}),
        ("rows of b of no whole 16 bytes", (512, 512, 500, 2), {"transposed": True}),
        ("rows of a of no whole 16 bytes", (512, 512, 500, 2), {}),
        ("rows of a of no whole 16 bytes", (500, 512, 512, 2), {"left": True}),
        ("bytes in the wrong order", (512, 512, 512, 1), {}),
    ],
)
def test_what_stays_at_tile_level(why, sizes, of):
    assert tiles(Product(*sizes, **of)) is None, why
    assert not candidates(Product(*sizes, **of))


@pytest.mark.parametrize(
    ("sizes", "of"),
    [
        ((512, 500, 512), {"transposed": True}),  # the words of a vocabulary
        ((500, 512, 256), {}),  # of more terms it would be a product in one round of tiles
        ((512, 512, 500), {"left": True}),  # sums over tokens
    ],
)
def test_only_the_rows_of_operands_count(sizes, of):
    """A block stores rows of the result, however they lie."""
    pytest.importorskip("triton")
    best = tiles(Product(*sizes, **of))
    (m, n, k), left, right = sizes, of.get("left", False), of.get("transposed", False)
    shapes = (1, k, m) if left else (1, m, k), (1, n, k) if right else (1, k, n)
    a, b = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)
    with jt.config(arch="sm_90"):
        (program,) = trace(lambda a, b: ops.matmul(a, b, transpose_a=left, transpose_b=right), a, b)[0]
        assert best.items() <= dict(program.meta).items()
        assert compile_piece(program, 0, device.target()).launch["level"] == "block"


def test_rows_of_no_whole_16_bytes_are_copied_where_that_costs_less_than_it_saves():
    assert extended(Product(4001, 3001, 2001)) == (4001, 3008, 2008)
    assert extended(Product(4001, 3001, 2001, transposed=True)) == (4001, 3001, 2008)
    assert extended(Product(4001, 3001, 2001, left=True)) == (4008, 3008, 2001)
    assert extended(Product(3000, 3001, 3003, 1, transposed=True)) == (3000, 3001, 3008)
    for same in ((4000, 3000, 2000, 2), (301, 203, 105, 2), (4001, 3001, 2001, 4), (64, 3001, 2001, 2)):
        assert extended(Product(*same)) == same[:3]
    assert extended(Product(4001, 3001, 2000, transposed=True)) == (
        4001,
        3001,
        2000,
    )  # the result has any rows


@pytest.mark.parametrize(
    ("left", "right"),
    [(False, False), *(pytest.param(*order, marks=pytest.mark.slow) for order in [(False, True), (True, False)])],
)
def test_a_product_of_copied_rows(left, right):
    """The kernel has the longer rows; the result, and what flows back, have the sizes of the call."""
    m, n, k = 1601, 1203, 1805
    shapes = (k, m) if left else (m, k), (n, k) if right else (k, n), (n,)
    f = lambda a, b, c: ops.matmul(a, b, bias=c, activation="silu", transpose_a=left, transpose_b=right)
    types = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    with jt.config(arch="sm_90"):
        (program,) = trace(f, *types)[0]
        wide = extended(Product(m, n, k, left=left, transposed=right))
        assert wide != (m, n, k) and program.out_avals[0].shape == (1, *wide[:2])
        assert compile_piece(program, 0, device.target()).launch["level"] == "block"
        assert jax.eval_shape(f, *types).shape == (m, n)
        back = jax.eval_shape(jax.grad(lambda *args: f(*args).astype(jnp.float32).sum(), (0, 1, 2)), *types)
    assert [x.shape for x in back] == list(shapes)


def test_bytes():
    """Sums that leave the tensor cores take registers of their own."""
    exact, fast = (candidates(Product(4096, 4096, 4096, 1, transposed=True, fast=f)) for f in (False, True))
    assert max(bm * bn for bm, bn in exact) == 128 * 128 < max(bm * bn for bm, bn in fast)
    assert tiles(Product(4096, 4096, 4096, 1, transposed=True))["bk"] == 128


def test_gates_share_the_registers():
    assert max(bm * bn for bm, bn in candidates(Product(4096, 4096, 4096, gates=2))) == 192 * 128
    of_two = {form: predicted_us(Product(512, 14336, 4096, gates=2), Form(1, *form)) for form in ((128, 64), (64, 64))}
    of_one = {form: predicted_us(Product(512, 28672, 4096), Form(1, form[0], 2 * form[1])) for form in of_two}
    assert of_two == of_one


# Rows, terms and columns of gated products, and tiles that took at most 1.04 of the time of the best on an H200 (mean
# of two runs for 512 rows).
def test_columns_of_a_tile_lie_in_several_places():
    """48 columns are tiles of 32 and of 16; some of the last programs have none of 16 left."""
    a, bias = normal(0, 1, 40, 64), normal(1, 1, 200)
    for n in (32, 49, 130, 200):
        b, more = normal(2, 1, 64, n), bias[:, :n]
        how = {"ta": False, "tb": False, "bm": 32, "bn": 48, "bk": 32, "cut": True, "save": True}
        y, sums = untuned.interpret(a, b, more, activation="relu", out_dtype="float32", **how)
        np.testing.assert_allclose(sums, a @ b + more[:, None], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(y, jnp.maximum(sums, 0))


def test_rounds_that_powers_of_two_leave_half_empty_have_columns_cut():
    """1100 x 4096 is 132 tiles of 192 x 192; a kernel that does not cut columns has none of them."""
    p = Product(1100, 4096, 4096, cut=True)
    assert tiles(p) == {"bm": 192, "bn": 192, "bk": 64}
    assert (192, 192) not in candidates(dataclasses.replace(p, cut=False))
    types = [jax.ShapeDtypeStruct((1, *s), jnp.bfloat16) for s in ((1100, 4096), (4096, 4096))]
    how = {"ta": False, "tb": False, "activation": None, "out_dtype": "bfloat16", "bm": 192, "bn": 192, "bk": 64}
    hopper = targets.resolve("cuda:sm_90")
    (kernel,) = pieces_of(untuned.lower(*types, None, **how, cut=True, target=hopper).program, hopper).kernels
    plan = block.steps(passes.run_pipeline(kernel, passes.TILE), block.Machine.of(hopper), {}).plan
    assert (plan.consumers, plan.blocks, plan.tiles) == (3, 132, 132)


GATED = [
    ((512, 4096, 14336), {(128, 64), (64, 128), (64, 64)}),
    ((128, 4096, 14336), {(128, 128)}),
    ((256, 4096, 14336), {(64, 64)}),
    ((1024, 4096, 14336), {(128, 128), (128, 64), (64, 128), (64, 64)}),
    ((384, 4096, 14336), {(128, 128), (128, 64), (192, 128), (192, 64)}),
    ((1536, 4096, 14336), {(192, 128)}),
    ((2048, 5120, 13824), {(192, 128)}),
    ((2048, 4096, 14336), {(128, 128), (128, 64), (192, 64)}),
    ((6144, 4096, 11008), {(192, 128), (128, 128), (192, 64), (128, 64)}),
    ((768, 2048, 6144), {(128, 64), (192, 64)}),
    ((8192, 1024, 4096), {(128, 64), (192, 64), (128, 128)}),
    ((3072, 4096, 14336), {(192, 128), (128, 128), (128, 64), (192, 64)}),
    ((4096, 4096, 14336), {(192, 128), (128, 128)}),
]


@pytest.mark.parametrize(("sizes", "best"), GATED, ids=[str(sizes) for sizes, _ in GATED])
def test_gates_take_tiles_near_the_best_that_was_measured(sizes, best):
    m, k, n = sizes
    chosen = tiles(Product(m, n, k, gates=2))
    assert (chosen["bm"], chosen["bn"]) in best


def space(m, n, k, dtype=jnp.bfloat16, **of):
    with jt.config(arch="sm_90"):
        a, b = (jax.ShapeDtypeStruct(s, dtype) for s in ((1, m, k), (1, n, k)))
        return spaces.products(a, b, ta=False, tb=True, bk=64)


@pytest.mark.parametrize("sizes", [(256, 384, 512), (4096, 4096, 4096), (100, 20000, 512)], ids=str)
def test_the_tuner_tries_what_is_near_the_choice(sizes):
    points = space(*sizes)
    p = Product(*sizes, transposed=True, cut=True)
    assert tiles(p) in points
    tried = {(point["bm"], point["bn"]) for point in points}
    times = {s: predicted_us(p, Form(1, *s)) for s in candidates(p)}
    left = min((t for s, t in times.items() if s not in tried), default=math.inf)
    assert max(times[s] for s in tried) <= left > hopper_tiles.NEAR * min(times.values())
    assert len(tried) >= min(hopper_tiles.ALWAYS, len(times))


def test_the_tuner_has_the_large_tiles_of_whole_sums_in_bytes():
    """Integers are exact in the accumulators of the tensor cores, 8-bit floats take registers besides."""
    largest = lambda dtype: max(p["bm"] * p["bn"] for p in space(4096, 4096, 4096, dtype))
    assert largest(jnp.int8) == 128 * 256
    assert largest(jnp.float8_e4m3fn) == 128 * 128


def test_few_rows_take_long_steps_where_all_blocks_run_at_once():
    """As measured in steps of Llama-3.1-8B with 16 rows and of Qwen3-30B-A3B with 32."""
    of = lambda m, n, k: tuple(gpu_tiles.product(m, n, k, 2, transposed=True)[side] for side in ("bm", "bn", "bk"))
    with jt.config(arch="sm_90"):
        assert (of(16, 4096, 4096), of(16, 4096, 14336), of(16, 6144, 4096)) == (
            (16, 32, 512), (16, 32, 512), (16, 32, 256),
        )  # fmt: skip
        assert (of(32, 2048, 4096), of(32, 5120, 2048), of(32, 5120, 1024)) == (
            (32, 16, 256), (32, 32, 256), (32, 32, 128),
        )  # fmt: skip
        assert gpu_tiles.few_rows(32, 16, 256, 2).tiles == {"stages": 6}
    with jt.config(arch="sm_80"):
        assert of(16, 4096, 14336) == (16, 32, 256)


def test_few_rows_leave_some_blocks_idle_for_wider_tiles():
    """40x12288x3072 took 21.5 us in 96 tiles of 128 columns and 26.3 in 192 of 64; 16 rows gain nothing by it."""
    assert gpu_tiles.product(40, 12288, 3072, 2, transposed=True)["bn"] == 128
    assert gpu_tiles.product(16, 6144, 4096, 2, transposed=True) == {"bm": 16, "bn": 32, "bk": 256}
