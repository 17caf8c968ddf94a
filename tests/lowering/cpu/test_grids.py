"""Small programs that run as one on CPUs: fewer of them, and not a bit of what they compute is another one."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import draws
from hypothesis import given
from native import run_artifact
from random_kernels import Case, kernels
from small_tiles import (
    attention,
    backwards,
    histogram,
    layer,
    log_sum_exp,
    look_up,
    lower_triangle,
    matmul,
    normalise,
    row_maxima,
    row_sums,
    running_sums,
)

import jtile as jt
from jtile import ir
from jtile.lowering.cpu import compile_kernel, grids
from jtile.lowering.cpu.grids import OPS, coarse_grid
from jtile.lowering.cpu.isa import ISAS, host_isa
from jtile.passes import TILE, run_pipeline

HOST = host_isa()
RUNNABLE = {"host": HOST} | {
    name: isa for name, isa in ISAS.items() if isa.arch == HOST.arch and set(isa.features) <= set(HOST.features)
}


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def small(*shape: int, below: int, dtype=np.int32) -> np.ndarray:
    return np.random.default_rng(3).integers(0, below, shape).astype(dtype)


CASES = [
    (lower_triangle, draw(130, 126)),
    (layer, draw(130, 126), draw(250, 126), draw(250)),
    (log_sum_exp, draw(113, 29)),
    (log_sum_exp, draw(128, 64)),
    (backwards, draw(777)),
    (look_up, draw(128, 8), small(200, below=128)),
    (row_maxima, draw(113, 29)),
    (histogram, small(770, below=10)),
    (matmul, draw(130, 126), draw(126, 250)),
    (matmul, draw(64, 64), draw(64, 300)),
    (matmul, small(64, 64, below=100, dtype=np.int8), small(64, 300, below=100, dtype=np.int8)),
    (attention, draw(130, 16), draw(130, 16), draw(130, 16)),
    (normalise, draw(113, 16)),
    (normalise, draw(113, 13)),
    (row_sums, draw(113, 16)),
    (row_sums, draw(113, 100)),
    (running_sums, draw(113, 29)),
]


@pytest.mark.parametrize("isa", RUNNABLE)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0].name}-{'-'.join(str(x.shape) for x in c[1:])}")
def test_bits_are_those_of_small_programs(case, isa):
    kernel, *args = case
    plain = kernel.lower(*map(jnp.asarray, args), target="cpu").kernel
    inputs = [*args, *(np.zeros(v.shape, v.type.info.numpy) for v in plain.inputs[len(args) :])]
    alone = run_artifact(compile_kernel(plain, RUNNABLE[isa], coarse=False), plain, inputs)
    together = run_artifact(compile_kernel(plain, RUNNABLE[isa]), plain, inputs)
    assert [x.tobytes() for x in together] == [x.tobytes() for x in alone]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0].name}-{'-'.join(str(x.shape) for x in c[1:])}")
def test_there_are_fewer_programs(case):
    kernel, *args = case
    plain = kernel.lower(*map(jnp.asarray, args), target="cpu:avx512").kernel
    artifact = compile_kernel(plain, ISAS["avx512"])
    alone = kernel is attention or (kernel is row_sums and args[0].shape[1] > 32)  # whose sums are long, or tiles large
    assert artifact.launch["programs"] <= math.prod(plain.grid) / (1 if alone else 4)
    assert compile_kernel(plain, ISAS["avx512"], coarse=False).launch["programs"] == math.prod(plain.grid)


def test_random_kernels(monkeypatch):
    made = []
    for name, value in {"FEWEST": 2, "SMALL": 10_000, "MANY": 1}.items():
        monkeypatch.setattr(grids, name, value)

    @draws(60, quick=16)
    @given(kernels())
    def run(case: Case):
        kernel = run_pipeline(case.kernel, TILE)
        if coarse_grid(kernel, HOST)[0] is kernel:
            return
        made.append(kernel)
        alone = run_artifact(compile_kernel(kernel, HOST, coarse=False), kernel, case.inputs)
        for a, b in zip(alone, run_artifact(compile_kernel(kernel, HOST), kernel, case.inputs), strict=True):
            assert a.tobytes() == b.tobytes()

    run()
    assert made


def test_rows_of_a_product_have_the_same_bits_among_others():
    a, b = draw(256, 64), draw(64, 128)
    whole = np.asarray(matmul(jnp.asarray(a), jnp.asarray(b)))
    part = np.asarray(matmul(jnp.asarray(a[:8]), jnp.asarray(b)))
    assert whole[:8].tobytes() == part.tobytes()


def test_tasks_of_execution_graphs_keep_their_programs():
    x = jnp.asarray(draw(512, 64))

    def f(x):
        return row_maxima(lower_triangle(x))

    want = f(x)
    assert np.asarray(jax.jit(jt.graph(f))(x)).tobytes() == np.asarray(want).tobytes()


def test_gradients_run_as_few_programs_too():
    x, w, b = map(jnp.asarray, (draw(64, 64), draw(64, 64), draw(64)))
    got = jax.grad(lambda *args: (layer(*args) ** 2).sum(), (0, 1, 2))(x, w, b)
    want = jax.grad(lambda x, w, b: (jax.nn.relu(x @ w.T + b[None]) ** 2).sum(), (0, 1, 2))(x, w, b)
    for g, v in zip(got, want, strict=True):
        np.testing.assert_allclose(g, v, rtol=1e-4, atol=1e-4)


def test_a_grid_of_few_programs_or_of_large_ones_stays():
    for side in (8, 16):
        kernel = lower_triangle.lower(jnp.zeros((side, side)), target="cpu:avx512").kernel
        assert (coarse_grid(kernel, ISAS["avx512"])[0] is kernel) == (side == 8)
    kernel = normalise.lower(jnp.zeros((512, 256)), target="cpu:avx512").kernel
    assert coarse_grid(kernel, ISAS["avx512"])[0] is kernel


@jt.kernel(out_type=lambda x, y: (jt.like(x), jt.like(x)), grid=lambda x, y: x.shape[0])
def products_and_sums(x, y, o, p):
    i = jt.program_id(0)
    product = x[i] * y[i]
    o[i], p[i] = product, product + x[i]


def test_products_that_others_read_too_are_added_up_as_they_were():
    x, y = map(jnp.asarray, (draw(300), draw(300, seed=1)))
    kernel = products_and_sums.lower(x, y, target="cpu:avx512").kernel
    assert coarse_grid(kernel, ISAS["avx512"])[0] is not kernel
    few = map(np.asarray, products_and_sums(x[:8], y[:8]))
    assert [t.tobytes() for t in few] == [np.asarray(t)[:8].tobytes() for t in products_and_sums(x, y)]


@jt.kernel(out_type=lambda x, y: (jt.like(x), jt.like(y)), grid=lambda x, y: jt.cdiv(x.shape[0], 2))
def rows_and_their_squares(x, y, o, p):
    i, n = jt.program_id(0), x.shape[1]
    o.tiles(2, n)[i, 0] = x.tiles(2, n)[i, 0]
    t = y.tiles(2)[i]
    p.tiles(2)[i] = t * t + t


@jt.kernel(out_type=lambda x, y: jt.like(x), grid=lambda x, y: x.shape[0])
def choices(x, y, o):
    i = jt.program_id(0)
    t = jnp.where(i % 3 == 0, x[i] * y[0] + y[i], x[i] + y[0])
    o[i] = x[i] - t * t


@jt.kernel(out_type=lambda x, y: jt.like(x), grid=lambda x, y: (jt.cdiv(x.shape[0], 2), jt.cdiv(x.shape[1], 3)))
def two_products(x, y, o):
    i, j = jt.program_id(0), jt.program_id(1)
    t = x.tiles(2, 3)[i, j]
    o.tiles(2, 3)[i, j] = y.tiles(2)[i][:, None] * t + t * t


@pytest.mark.parametrize(
    ("kernel", "shapes"),
    [(rows_and_their_squares, ((33, 16), (33,))), (choices, ((64,), (64,))), (two_products, ((48, 7), (48,)))],
    ids=lambda v: getattr(v, "name", ""),
)
def test_products_and_sums_round_as_they_did(kernel, shapes):
    """LLVM contracts a product and a sum or not by the loop that both are in, which the length of a tile decides."""
    args = [draw(*shape, seed=k) for k, shape in enumerate(shapes)]
    plain = kernel.lower(*map(jnp.asarray, args), target="cpu").kernel
    artifacts = [compile_kernel(plain, HOST, coarse=coarse) for coarse in (False, True)]
    assert artifacts[1].launch["programs"] < artifacts[0].launch["programs"]
    alone, together = ([x.tobytes() for x in run_artifact(a, plain, args)] for a in artifacts)
    assert together == alone


@jt.kernel(out_type=lambda x, ids: jt.like(x, shape=(10,)), grid=lambda x, ids: x.shape[1], init=0)
def sums_of_columns(x, ids, o):
    i = jt.program_id(0)
    jt.atomic_add(o, ids.tiles(8, None)[0, i], x.tiles(8, None)[0, i])


def test_floats_are_added_in_the_order_of_their_programs():
    kernel = sums_of_columns.lower(draw(8, 300), small(8, 300, below=10), target="cpu:avx512").kernel
    assert coarse_grid(kernel, ISAS["avx512"])[0] is kernel


def test_a_carry_that_is_clamped():
    @jt.kernel(out_type=lambda x: jt.like(x, shape=x.shape[:1]), grid=lambda x: x.shape[0])
    def clamped(x, o):
        i, most = jt.program_id(0), 0.0
        for k in jt.range(x.tiles(None, 8).shape[1]):
            most = jax.lax.clamp(x.tiles(None, 8)[i, k].max(), most, 2.0)
        o[i] = most

    x = draw(64, 32)
    np.testing.assert_array_equal(clamped(jnp.asarray(x)), np.minimum(np.maximum(x.max(1), 0), 2))


def test_integers_that_hundreds_of_operations_make_compile():
    @jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0])
    def hashed(x, o):
        i = jt.program_id(0)
        h = i.astype(jnp.uint32)
        for k in range(400):
            h = (h ^ (h >> 3)) + jnp.uint32(k)
        o[i] = x[i] + (h & 7).astype(jnp.float32)

    kernel = hashed.lower(draw(200), target="cpu:avx512").kernel
    assert compile_kernel(kernel, ISAS["avx512"]).launch["programs"] == 200


LARGE = 50_000_000  # elements of an array of which cores get no copies of their own to add to


@jt.kernel(out_type=lambda x, ids: jt.like(x, shape=(LARGE,)), grid=lambda x, ids: x.shape[0], init=0)
def sums_in_two_places(x, ids, o):
    i = jt.program_id(0)
    jt.atomic_add(o, ids[i], x[i])
    jt.atomic_add(o, 9 - ids[i], x[i] * 3)


@jt.kernel(out_type=lambda x, ids: jt.like(x, shape=(LARGE,)), grid=lambda x, ids: x.shape[0], init=0)
def sums_in_a_loop(x, ids, o):
    i = jt.program_id(0)
    for k in jt.range(3):
        jt.atomic_add(o, ids[i] + k, x[i])


@pytest.mark.parametrize("sums", [sums_in_two_places, sums_in_a_loop])
def test_additions_of_floats_stay_in_the_order_of_programs(sums):
    kernel = sums.lower(draw(300), small(300, below=10), target="cpu:avx512").kernel
    assert any(isinstance(op, ir.Atomic) for op in kernel.body.walk())
    assert coarse_grid(kernel, ISAS["avx512"])[0] is kernel


def test_programs_of_many_operations_are_not_small():
    @jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0])
    def chain(x, o):
        y = x[jt.program_id(0)]
        for k in range(OPS):
            y = y * 0.5 + k
        o[jt.program_id(0)] = y

    kernel = chain.lower(draw(200), target="cpu:avx512").kernel
    assert coarse_grid(kernel, ISAS["avx512"])[0] is kernel
