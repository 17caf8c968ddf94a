"""Bytes and operations counted from Tile IR, and what `jt.explain` makes of them; pruning."""

import jax
import jax.numpy as jnp
import pytest
import tunable as kernels
from products import tiled_matmul

import jtile as jt
from benchmarks.gpu import tutorial
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.tune import cost, host, prune
from jtile.tune.advice import advice
from jtile.tune.cost import work
from jtile.tune.programs import trace

S = jax.ShapeDtypeStruct
BF16 = jnp.bfloat16
matmul = tiled_matmul(64, 32, 16, stages=3)


@jt.kernel(out_type=lambda a, b: jt.like(a, shape=(64, 64)), grid=1)
def unrolled_product(a, b, o):
    acc = jt.zeros((64, 64), jnp.float32)
    for k in range(a.shape[1] // 16):
        acc = jt.dot(a.tiles(64, 16)[0, k], b.tiles(16, 64)[k, 0], acc)
    o[...] = acc.astype(o.dtype)


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: jt.cdiv(x.shape[0], 8), dynamic={"x": 0})
def sines(x, o):
    at = jt.program_id(0), 0
    o.tiles(8, 64)[at] = jnp.sin(x.tiles(8, 64)[at]) * 2


def test_a_matrix_product():
    m, n, k = 256, 96, 128
    w = work(matmul.lower(S((m, k), BF16), S((k, n), BF16)).kernel)
    assert w.products == {"bfloat16": 2 * m * n * k}
    assert (w.read, w.written) == (2 * (m * k + k * n), 2 * m * n)
    assert (w.loaded, w.stored) == (2 * (m * k * (n // 32) + k * n * (m // 64)), 2 * m * n)
    assert (w.programs, w.exact, w.special) == (12, True, 0)


def test_a_matrix_product_that_hangs_over_counts_bytes_inside():
    m, n, k = 100, 50, 40
    w = work(matmul.lower(S((m, k), BF16), S((k, n), BF16)).kernel)
    assert (w.read, w.written) == (2 * (m * k + k * n), 2 * m * n)
    assert w.stored == 2 * m * n
    assert w.products == {"bfloat16": 2 * 128 * 64 * 48}


@pytest.mark.parametrize("step", [tutorial.producer, tutorial.overlapped], ids=lambda step: step.name)
def test_a_schedule_moves_and_computes_what_the_kernel_at_tile_level_does(step):
    a, b = S((512, 320), BF16), S((320, 768), BF16)
    got = work(step.lower(a, b).kernel)
    want = work(tutorial.tile_level.lower(a, b, bn=128 if step is tutorial.producer else 256).kernel)
    assert got.exact and got == want


def test_softmax():
    rows, n = 64, 128
    (program,) = trace(ops.softmax, S((rows, n), jnp.float32))[0]
    w = work(program.kernel)
    assert (w.read, w.written, w.loaded, w.stored) == (4 * rows * n,) * 4
    assert w.elements == 5 * rows * n + rows  # max, subtract, exp, sum, multiply; a division a row
    assert w.special == rows * n
    assert w.exact


def test_loops_and_conditions_that_follow_from_the_program():
    @jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0])
    def triangle(x, y):
        i = jt.program_id(0)
        t = x[i, :]
        for j in jt.range(i):
            t = t + x[j, :]
        if i >= 2:
            t = t + x[0, :]
        y[i, :] = t

    n = 8
    w = work(triangle.lower(S((n, 16), jnp.float32)).kernel)
    assert w.exact
    assert w.loaded == (n + n * (n - 1) // 2 + n - 2) * 64
    assert (w.read, w.written) == (n * 64, n * 64)


def test_a_loop_as_long_as_data_says_is_a_guess():
    @jt.kernel(out_type=lambda x, n: jt.like(x), grid=())
    def sums(x, n, y):
        t = x[...]
        for _ in jt.range(n[...]):
            t = t * 1.5
        y[...] = t

    w = work(sums.lower(S((16,), jnp.float32), S((), jnp.int32)).kernel)
    assert not w.exact
    assert w.elements == 16 * cost.TRIPS


def test_a_gather_reads_no_more_than_it_takes():
    @jt.kernel(out_type=lambda t, i: jt.like(t, shape=(i.shape[0], t.shape[1])), grid=())
    def rows(t, i, y):
        y[...] = t[i[...], :]

    w = work(rows.lower(S((1000, 8), jnp.float32), S((10,), jnp.int32)).kernel)
    assert (w.read, w.written) == (10 * 8 * 4 + 40, 10 * 8 * 4)


def test_a_large_grid_is_sampled():
    double = kernels.double_kernel()
    w = work(double.lower(S((1 << 20,), jnp.float32), bm=2).kernel)
    assert (w.programs, w.read, w.elements) == (1 << 19, 4 << 20, 2 << 20)  # a product and a sum


def test_a_large_grid_with_triangular_loops_is_counted_exactly():
    q = S((4, 1024, 8, 64), BF16)
    (program,) = trace(lambda q: ops.attention(q, q, q, causal=True), q)[0]
    bq, bk = (dict(program.meta)[k] for k in ("bq", "bk"))
    blocks = sum(-(-(i + 1) * bq // bk) for i in range(1024 // bq))
    w = work(program.kernel)
    assert (w.programs, w.exact) == (4 * 8 * (1024 // bq), True)
    assert w.products == {"bfloat16": 32 * blocks * 4 * bq * bk * 64}


def test_explain_counts_calls_and_bounds():
    rates = {"memory": 1e9, "float32": 1e12}
    x = S((64, 128), jnp.float32)
    f = lambda x: jax.lax.scan(lambda c, _: (ops.softmax(c), None), x, length=3)[0]
    found = jt.explain(f, x, rates=rates, run=False)
    (line,) = found.kernels
    assert (line.calls, line.work.bytes, line.time_us, line.achieved) == (3, 65536, None, None)
    assert line.limits["memory"] == pytest.approx(65.536)
    assert line.bound_us == pytest.approx(65.536)
    assert line.limit == "memory"
    assert "65.5k" in str(found)


@pytest.mark.parametrize("rates", [{"memry": 1e9}, {"memory": -1}, {"memory": 0}, {"float32": "fast"}, [1e9]])
def test_rates_that_say_nothing_are_refused(rates):
    with pytest.raises(KernelValueError, match="expected 'memory'"):
        jt.explain(kernels.double_kernel(), kernels.X, rates=rates)


@pytest.mark.parametrize("call", [jt.explain, lambda f, x: jt.profile(f, x, interpret=True)])
def test_what_is_no_function_is_refused(call):
    with pytest.raises(KernelTypeError, match="take a function and its arguments, got None"):
        call(None, kernels.X)


def test_explain_measures_on_this_device():
    (line,) = jt.explain(kernels.double_kernel(), kernels.X, rates={"memory": 1e15}).kernels
    assert line.time_us > 0
    assert 0 < line.achieved < 1


def test_explain_has_a_roofline_on_cpus():
    """That of this machine is measured; of another instruction set nothing is known."""
    (line,) = jt.explain(kernels.double_kernel(), kernels.X, run=False).kernels
    assert {"memory", "elements"} <= set(line.limits)
    assert line.bound_us > 0
    assert line.limit in ("memory", "arithmetic on elements")
    with jt.config(isa="sse2"):
        unknown = jt.explain(kernels.double_kernel(), kernels.X, run=False)
    assert unknown.kernels[0].bound_us == 0 and unknown.kernels[0].limit.startswith("unknown: jtile knows no rates")


def test_only_rates_that_a_bound_takes_are_measured(monkeypatch):
    asked = []
    monkeypatch.setattr(host, "rates", lambda size, wanted: asked.append(wanted) or dict.fromkeys(wanted, 1e9))
    for rates in (None, {"memory": 1e9}):
        jt.explain(kernels.double_kernel(), kernels.X, run=False, rates=rates)
    with jt.config(isa="sse2"):
        jt.explain(kernels.double_kernel(), kernels.X, run=False)
    assert asked == [["memory", "float32"], ["float32"]]


def test_explain_counts_dynamic_sizes_apart():
    """One program, for each shapes of its operands; its time is that of these."""
    x = jnp.ones((64, 64))
    found = jt.explain(lambda x: (sines(x), sines(x[:8]), sines(x[8:16])), x, rates={"memory": 1e9})
    assert [(k.calls, k.grid, k.work.bytes) for k in found.kernels] == [(1, (8,), 2 * 16384), (2, (1,), 2 * 2048)]
    assert all(k.time_us > 0 for k in found.kernels)


def test_explain_on_a_target_without_the_device():
    a = S((4096, 4096), BF16)
    with jt.config(arch="sm_90"):
        (line,) = jt.explain(matmul, a, a, run=False).kernels
    assert line.limits["products"] == pytest.approx(2 * 4096**3 / 989e12 * 1e6)
    assert line.limits["memory"] == pytest.approx(3 * 4096**2 * 2 / 4.8e12 * 1e6)
    assert line.limit == "tensor cores"
    assert line.resources[0]["registers"] > 32


def test_explain_says_what_to_try():
    """Of a loop that Python unrolls, of too few programs and of registers that are spilled."""
    a, b = S((64, 160), BF16), S((160, 64), BF16)
    kernel = unrolled_product.lower(a, b).kernel
    found = advice(kernel, work(kernel), h200(), [{"spills": 24}], "tile level: no loop loads\n")
    unrolled, spilled, few, roles = found
    assert "test_cost.py:" in unrolled and "stands 10 times" in unrolled
    assert (
        "24 bytes" in spilled and "1 programs leave at least half of 132" in few and roles.endswith(": no loop loads")
    )
    good = matmul.lower(S((4096, 160), BF16), S((160, 4096), BF16)).kernel
    assert advice(good, work(good), h200(), [{"spills": 0}], "block level: 2 consumers\n") == ()
    with jt.config(arch="sm_90"):
        (line,) = (explained := jt.explain(unrolled_product, a, b, run=False)).kernels
    assert unrolled in line.advice and f"unrolled_product: {unrolled}" in str(explained)


# -- pruning --------------------------------------------------------------------------------------------------------


def h200():
    from jtile.lowering import targets

    return targets.resolve("cuda:sm_90")


def test_accumulators_and_stages_that_cannot_fit_are_pruned():
    a = S((4096, 4096), BF16)
    kernel = lambda **meta: matmul.lower(a, a, target="cuda:sm_90", **meta).kernel
    assert prune.unfit(kernel(bm=128, bn=256, bk=64), h200(), {"num_warps": 8}) == ""
    assert "registers" in prune.unfit(kernel(bm=256, bn=512, bk=16), h200(), {"num_warps": 4})
    assert "shared memory" in prune.unfit(kernel(bm=256, bn=256, bk=512), h200(), {})
    assert "shared memory" in prune.unfit(kernel(bm=128, bn=256, bk=64), h200(), {"num_warps": 8, "num_stages": 9})


def test_one_warp_never_sorts_many_lanes():
    @jt.kernel(out_type=lambda x: jt.like(x), grid=())
    def ordered(x, y):
        y[...] = jnp.sort(x[...])

    kernel = lambda n: ordered.lower(S((n,), jnp.float32)).kernel
    assert "one warp" in prune.unfit(kernel(1024), h200(), {"num_warps": 1})
    assert prune.unfit(kernel(1024), h200(), {"num_warps": 2}) == ""
    assert prune.unfit(kernel(256), h200(), {"num_warps": 1}) == ""


def test_predictions_prefer_what_reads_less_and_fills_the_machine():
    a = S((4096, 4096), BF16)
    us = lambda **meta: prune.predicted_us(matmul.lower(a, a, target="cuda:sm_90", **meta).kernel, h200())
    assert us(bm=128, bn=128, bk=64) < us(bm=16, bn=16, bk=64) / 4
    assert us(bm=128, bn=128, bk=64) < us(bm=2048, bn=2048, bk=64) / 4


def test_the_predicted_worst_are_not_compiled(monkeypatch):
    monkeypatch.setattr("jtile.tune.search.prune.predicted_us", lambda kernel, target: float(kernel.grid[0]))
    (found,) = jt.tune(kernels.double_kernel(), kernels.X, progress=False, time_limit=600.0).kernels
    states = {c.config.get("bm"): c.state for c in found.candidates}  # 1, 4 and 16 programs; the default has 32
    assert states == {None: "measured", 64: "measured", 16: "measured", 4: "pruned"}


def test_ops_know_their_functions():
    from jtile.ir.elementwise import ELEMENTWISE

    assert set(ELEMENTWISE) >= cost.SPECIAL
