"""Coarsening keeps what kernels compute and write, and makes of neighbouring programs what a user would write."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from draws import draws
from hypothesis import given
from random_kernels import Case, kernels
from small_tiles import backwards, histogram, layer, log_sum_exp, look_up, lower_triangle, row_maxima, shares

import jtile as jt
from jtile import ir
from jtile.interpret import interpret
from jtile.ir import Kernel, print_kernel, verify
from jtile.passes import TILE, run_pipeline
from jtile.passes.coarsen import coarsen, rounds


def loops(kernel: Kernel) -> list[ir.For]:
    return [op for op in kernel.body.walk() if isinstance(op, ir.For)]


def check(kernel: Kernel, new: Kernel, inputs, ragged: bool = False) -> None:
    verify(new)
    want, before = interpret(kernel, inputs, trace_accesses=True)
    got, later = interpret(new, inputs, trace_accesses=True)
    for v, a, b in zip(kernel.outputs, got, want, strict=True):
        a, b = (x.astype(np.float64) if v.type.info.kind == "f" else x for x in (a, b))
        np.testing.assert_array_equal(a, b, err_msg=repr(v))
    for k, v in enumerate(kernel.params):
        np.testing.assert_array_equal(later.written[k], before.written[k], err_msg=f"elements written of {v!r}")
        # a program that does not exist may read
        assert ragged or not (later.read[k] & ~before.read[k]).any(), f"elements of {v!r} are read that were not"


def test_random_kernels():
    made = []

    @draws(60, quick=14)
    @given(kernels())
    def run(case: Case):
        text = print_kernel(case.kernel)
        for kernel in (case.kernel, run_pipeline(case.kernel, TILE)):
            ways = [(a, n) for a, size in enumerate(kernel.grid) for n in range(2, size + 1)]
            ways += [(loop, n) for loop in loops(kernel) for n in range(2, rounds(loop) + 1)]
            for over, n in ways[:: max(len(ways) // 3, 1)]:
                new = coarsen(kernel, over, n)
                if new is not None:
                    made.append(over)
                    check(kernel, new, case.inputs, isinstance(over, int) and kernel.grid[over] % n > 0)
        assert print_kernel(case.kernel) == text, "a pass changed its argument"

    run()
    assert made


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(-8, 8, shape).astype(np.float32)


def lowered(kernel, *args) -> Kernel:
    return kernel.lower(*map(jnp.asarray, args), target="cpu:avx512").kernel


USERS = [
    (lower_triangle, (numbers(30, 26),)),
    (layer, (numbers(30, 26), numbers(50, 26), numbers(50))),
    (log_sum_exp, (numbers(13, 29),)),
    (backwards, (numbers(77),)),
    (look_up, (numbers(32, 8), np.arange(37, dtype=np.int32) * 7 % 32)),
    (row_maxima, (numbers(13, 29),)),
    (shares, (np.abs(numbers(75)) + 1,)),
    (histogram, (np.arange(77, dtype=np.int32) % 10,)),
]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(("kernel", "args"), USERS, ids=lambda x: getattr(x, "name", ""))
def test_kernels_of_users(kernel, args, count):
    plain = lowered(kernel, *args)
    inputs = [*args, *(np.zeros(v.shape, v.type.info.numpy) for v in plain.inputs[len(args) :])]
    for axis in range(len(plain.grid)):
        new = coarsen(plain, axis, count)
        assert new is not None
        assert new.grid[axis] == -(-plain.grid[axis] // count)
        check(plain, new, inputs, ragged=True)


def test_a_product_becomes_one_of_larger_tiles():
    plain = lowered(layer, numbers(32, 24), numbers(64, 24), numbers(64))
    new = coarsen(coarsen(plain, 1, 4), 0, 2)
    (dot,) = [op for op in new.body.walk() if isinstance(op, ir.Dot)]
    assert new.grid == (2, 2)
    assert (dot.a.shape, dot.b.shape, dot.trans_b) == ((16, 8), (32, 8), True)
    assert not any(isinstance(op, ir.Reshape | ir.Transpose) for op in new.body.walk())


def test_a_mask_is_computed_in_the_wider_tile():
    new = coarsen(lowered(lower_triangle, numbers(32, 32)), 1, 8)
    tiles = {op.result.shape for op in new.body.walk() if isinstance(op, ir.Map | ir.Select) and op.result.shape}
    assert tiles == {(4, 32)} | {t for t in tiles if 1 in t or len(t) == 1}
    assert not any(isinstance(op, ir.Map) and op.fn in ("div", "rem") for op in new.body.walk())


def test_rounds_of_a_product_and_of_a_maximum():
    for kernel, args in [(layer, (numbers(8, 64), numbers(8, 64), numbers(8))), (row_maxima, (numbers(3, 64),))]:
        plain = lowered(kernel, *args)
        new = coarsen(plain, *loops(plain), 4)
        assert [rounds(loop) for loop in loops(new)] == [2]
        check(plain, new, args)
        assert coarsen(plain, *loops(plain), 3) is None  # rounds would be left


@jt.kernel(out_type=lambda x: jt.like(x, dtype=jnp.uint32), grid=lambda x: x.shape[0])
def of_random_bits(x, o):
    i = jt.program_id(0)
    bits = i.astype(jnp.uint32) * jnp.uint32(747796405) + jnp.uint32(2891336453)
    o[i] = bits * jnp.uint32(277803737) + jnp.uint32(12345)


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: jt.cdiv(x.shape[0], 8))
def three_behind(x, o):
    i = jt.program_id(0)
    places = (i * 8 + jt.arange(8)).astype(jnp.uint32) - jnp.uint32(3)  # below 0 they are beyond the end
    o.tiles(8)[i] = jt.load(x, places, mask=places < x.shape[0], other=9)


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0])
def one_number_three_behind(x, o):
    i = jt.program_id(0)
    place = i.astype(jnp.uint32) - jnp.uint32(3)
    o[i] = jt.load(x, place, mask=place < x.shape[0], other=9)


@pytest.mark.parametrize("kernel", [of_random_bits, three_behind, one_number_three_behind], ids=lambda k: k.name)
def test_integers_that_wrap_around(kernel):
    plain = lowered(kernel, numbers(77))
    new = coarsen(plain, 0, 5)
    assert new is not None
    check(plain, new, (numbers(77),), ragged=True)


def test_integers_that_are_doubled_many_times_are_planned_at_once():
    @jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0])
    def doubled(x, o):
        i = jt.program_id(0)
        zero = i
        for _ in range(40):
            zero = zero + zero - i
        o[zero] = x[zero]

    plain = lowered(doubled, numbers(64))
    check(plain, coarsen(plain, 0, 4), (numbers(64),))


def refused(kernel, *args, over: int | ir.For | None = None) -> bool:
    plain = lowered(kernel, *args)
    return coarsen(plain, 0 if over is None else loops(plain)[0], 2) is None


def test_rounds_that_need_the_ones_before_are_no_longer_ones():
    x = numbers(4, 64)
    plain = lowered(log_sum_exp, x)
    assert coarsen(plain, *loops(plain), 2) is None


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: jt.cdiv(x.shape[0], 8))
def of_unequal_rounds(x, o):
    i = jt.program_id(0)
    t = x.tiles(8)[i]
    for _ in jt.range(i):
        t = t * 2
    o.tiles(8)[i] = t


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: jt.cdiv(x.shape[0], 8))
def with_a_branch(x, o):
    i = jt.program_id(0)
    t = x.tiles(8)[i]
    if i > 1:
        t = t.sum() + t
    o.tiles(8)[i] = t


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: jt.cdiv(x.shape[0], 8))
def with_a_halo(x, o):
    i = jt.program_id(0)
    t = jt.load(x, (jt.ds(i * 8, 10),))
    o.tiles(8)[i] = t[:8] + t[2:]


@jt.kernel(out_type=lambda x: jt.like(x, shape=(), dtype=jnp.int32), grid=lambda x: jt.cdiv(x.shape[0], 8), init=0)
def into_one_place(x, o):
    jt.atomic_add(o, (), x.tiles(8)[jt.program_id(0)].sum().astype(jnp.int32))


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: jt.cdiv(x.shape[0], 8))
def that_prints(x, o):
    i = jt.program_id(0)
    jt.print("{}", x.tiles(8)[i].sum())
    o.tiles(8)[i] = x.tiles(8)[i]


@jt.kernel(
    out_type=lambda x: (jt.like(x, shape=(jt.cdiv(x.shape[0], 8),)), jt.like(x, shape=())),
    grid=lambda x: jt.cdiv(x.shape[0], 8),
)
def that_counts_arrivals(x, parts, o):
    i = jt.program_id(0)
    parts[i] = x.tiles(8)[i].sum()
    if jt.arrive(jt.counters("done", ()), (), jt.num_programs(0)):
        o[...] = parts[...].sum()


@jt.kernel(out_type=lambda x: jt.like(x, dtype=jnp.int32), grid=lambda x: jt.cdiv(x.shape[0], 8), init=0)
def with_old_values(x, o):
    i = jt.program_id(0)
    old = jt.atomic_add(o, i * 8 + jt.arange(8), jt.ones(8, jnp.int32))
    o.tiles(8)[i] = old


REFUSED = [
    of_unequal_rounds, with_a_branch, with_a_halo, into_one_place, that_prints, that_counts_arrivals, with_old_values
]  # fmt: skip


@pytest.mark.parametrize("kernel", REFUSED, ids=lambda k: k.name)
def test_what_is_refused(kernel):
    assert refused(kernel, numbers(64))


def test_what_a_back_end_cannot_compute_alike_is_refused():
    plain = lowered(shares, np.abs(numbers(64)) + 1)
    assert coarsen(plain, 0, 2, lambda old, new: True) is not None
    assert coarsen(plain, 0, 2, lambda old, new: not isinstance(new, ir.Reduce)) is None
