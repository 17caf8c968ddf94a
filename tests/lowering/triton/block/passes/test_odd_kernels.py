"""Kernels unlike those of the library, at the block level: what the CPU computes, in any order of roles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import thorough
from machines import machine

import jtile as jt
from jtile import passes
from jtile.interpret import interpret
from jtile.lowering.triton.block.passes import NoPlan, steps
from jtile.primitive import lowering

BF16 = jnp.bfloat16
N = 64  # sides of all tiles


def of_a_and_b(a, b, *_, **__):
    return jt.like(a, shape=(a.shape[0], b.shape[1]))


def kernel(body=None, *, out_type=of_a_and_b, **options):
    make = lambda f: jt.kernel(out_type=out_type, grid=(2, 2), **options)(f)
    return make if body is None else make(body)


@jt.function
def product(a, b, i, j, lo, hi, acc):
    for k in jt.range(lo, hi, stages=3):
        acc = jt.dot(a.tiles(N, N)[i, k], b.tiles(N, N)[k, j], acc)
    return acc


def zero():
    return jt.zeros((N, N), jnp.float32)


@kernel(out_type=lambda a, b: (of_a_and_b(a, b), jax.ShapeDtypeStruct((a.shape[0], 1), jnp.float32)))
def a_second_output_of_some_programs(a, b, o, s):
    i, j = jt.program_id(0), jt.program_id(1)
    acc = product(a, b, i, j, 0, 4, zero())
    o.tiles(N, N)[i, j] = acc.astype(o.dtype)
    if j == 1:
        s.tiles(N, 1)[i, 0] = acc.sum(1, keepdims=True)


@kernel
def loops_one_after_the_other(a, b, o):
    i, j = jt.program_id(0), jt.program_id(1)
    acc = jnp.maximum(product(a, b, i, j, 0, 3, zero()), 0)
    other = product(b, a, i, j, 0, 2, zero())
    o.tiles(N, N)[i, j] = (product(a, b, i, j, 3, 4, acc) + other).astype(o.dtype)


@kernel
def carries_that_are_no_sums(a, b, o):
    i, j = jt.program_id(0), jt.program_id(1)
    acc, top, count, last = zero(), jnp.full((N,), -jnp.inf, jnp.float32), 0, jt.zeros((N, N), a.dtype)
    for k in jt.range(4, stages=3):
        x = a.tiles(N, N)[i, k]
        acc = jt.dot(x, b.tiles(N, N)[k, j], acc)
        top, count, last = jnp.maximum(top, x.astype(jnp.float32).max(1)), count + k, x
    o.tiles(N, N)[i, j] = (
        acc + top[:, None] + count.astype(jnp.float32) + last.astype(jnp.float32).sum(1)[:, None]
    ).astype(o.dtype)


@kernel
def a_product_in_some_rounds(a, b, o):
    i, j = jt.program_id(0), jt.program_id(1)
    acc = zero()
    for k in jt.range(4, stages=3):
        if k != i:
            acc = jt.dot(a.tiles(N, N)[i, k], b.tiles(N, N)[k, j], acc)
    o.tiles(N, N)[i, j] = acc.astype(o.dtype)


@kernel
def backwards_by_twos(a, b, o):
    i, j = jt.program_id(0), jt.program_id(1)
    acc = zero()
    for k in jt.range(3, -1, -2, stages=10):
        acc = jt.dot(a.tiles(N, N)[i, k], b.tiles(N, N)[k, j], acc)
    o.tiles(N, N)[i, j] = acc.astype(o.dtype)


@kernel
def sums_of_sums(a, b, o):
    i, j = jt.program_id(0), jt.program_id(1)
    total = zero()
    for g in jt.range(2):
        total += jnp.maximum(product(a, b, i, j, 2 * g, 2 * g + 2, zero()), 0)
    o.tiles(N, N)[i, j] = total.astype(o.dtype)


@kernel
def a_store_in_each_round(a, b, o):
    i, j = jt.program_id(0), jt.program_id(1)
    acc = zero()
    for k in jt.range(4, stages=3):
        acc = jt.dot(a.tiles(N, N)[i, k], b.tiles(N, N)[k, j], acc)
        o.tiles(N, N)[i, j] = acc.astype(o.dtype)


@kernel
def loaded_bounds(a, b, n, o):
    i, j = jt.program_id(0), jt.program_id(1)
    o.tiles(N, N)[i, j] = product(a, b, i, j, n[i], n[i + 1], zero()).astype(o.dtype)


@kernel(out_type=lambda a, b, c: jt.like(c), alias={"c": "o"})
def in_place(a, b, c, o):
    i, j = jt.program_id(0), jt.program_id(1)
    acc = product(a, b, i, j, 0, 4, c.tiles(N, N)[i, j].astype(jnp.float32))
    o.tiles(N, N)[i, j] = acc.astype(o.dtype)


@kernel(init=0)
def added_to_what_is_there(a, b, o):
    i, j = jt.program_id(0), jt.program_id(1)
    o.tiles(N, N)[i, j] += product(a, b, i, j, 0, 4, zero()).astype(o.dtype)


def whole(*shape, seed=0, dtype=BF16):
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(dtype)


A, B = whole(100, 248), whole(248, 104, seed=1)
MORE = {
    loaded_bounds: [np.array([0, 0, 3], np.int32)],  # no rounds, then three
    in_place: [whole(100, 104, seed=2)],
}
KERNELS = [
    a_second_output_of_some_programs, loops_one_after_the_other, carries_that_are_no_sums, a_product_in_some_rounds,
    backwards_by_twos, sums_of_sums, a_store_in_each_round, loaded_bounds, in_place, added_to_what_is_there,
]  # fmt: skip


@pytest.mark.parametrize("odd", KERNELS, ids=lambda k: k.name)
def test_odd_kernels(odd):
    inputs = [A, B, *MORE.get(odd, [])]
    want = jax.tree.leaves(odd.interpret(*inputs))
    (piece,) = lowering.pieces_of(odd.lower(*inputs).program).kernels
    planned = steps(passes.run_pipeline(piece, passes.TILE), machine(processors=3), {})
    assert not isinstance(planned, NoPlan), str(planned)
    for seed in range(2) if thorough() else [KERNELS.index(odd) % 2]:
        for got, w in zip(interpret(planned.kernel, inputs, seed=seed), want, strict=True):
            np.testing.assert_array_equal(got, w)
