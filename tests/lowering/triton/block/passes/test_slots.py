"""Loops that take several slots of a ring in a round, or keep one while others go around: no role waits for ever.

The rounds are numbers that the kernel loads: the verifier does not know them, and would let a kernel that hangs pass.
"""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import thorough
from machines import machine

import jtile as jt
from jtile import passes
from jtile._errors import VerificationError
from jtile.interpret import interpret
from jtile.lowering.triton.block.passes import NoPlan, steps
from jtile.primitive import lowering

N = 64  # sides of all tiles


def kernel(f):
    return jt.kernel(out_type=jax.ShapeDtypeStruct((N, N), jnp.float32), grid=1)(f)


def zero():
    return jt.zeros((N, N), jnp.float32)


@kernel
def two_sums_in_a_round(a, b, c, n, o):
    A, B = a.tiles(N, N), b.tiles(N, N)
    acc = zero()
    for k in jt.range(n[0]):
        acc = jt.dot(A[0, 2 * k], B[2 * k, 0], acc)
        acc = jt.dot(A[0, 2 * k + 1], B[2 * k + 1, 0], acc)
    o.tiles(N, N)[0, 0] = acc


@kernel
def two_folded_in_a_round(a, b, c, n, o):
    A, B = a.tiles(N, N), b.tiles(N, N)
    acc = zero()
    for k in jt.range(n[0]):
        acc = acc + 2 * jt.dot(A[0, 2 * k], B[2 * k, 0])
        acc = acc - jt.dot(A[0, 2 * k + 1], B[2 * k + 1, 0])
    o.tiles(N, N)[0, 0] = acc


@kernel
def two_chains_in_a_round(a, b, c, n, o):
    A, B, C = a.tiles(N, N), b.tiles(N, N), c.tiles(N, N)
    acc, x = zero(), A[0, 0]
    for k in jt.range(n[0]):
        for half in range(2):
            p = jt.dot(x, B[2 * k + half, 0])
            acc = jt.dot(jnp.clip(p, -2, 2).astype(jnp.bfloat16), C[2 * k + half, 0], acc)
    o.tiles(N, N)[0, 0] = acc


@kernel
def a_tile_kept_for_an_inner_loop(a, b, c, n, o):
    A, B, C = a.tiles(N, N), b.tiles(N, N), c.tiles(N, N)
    acc = zero()
    for k in jt.range(n[0]):
        x = A[0, k]
        acc = jt.dot(x, B[k, 0], acc)
        for j in jt.range(n[1]):
            y = A[0, j]
            acc = jt.dot(y, B[j, 0], acc)
            acc = jt.dot(y, C[j, 0], acc)
        acc = jt.dot(x, C[k, 0], acc)
    o.tiles(N, N)[0, 0] = acc


@kernel
def tiles_kept_for_branches(a, b, c, n, o):
    A, B = a.tiles(N, N), b.tiles(N, N)
    acc = zero()
    for k in jt.range(n[0]):
        x = A[0, k]
        acc = jt.dot(x, B[k, 0], acc)
        if k != n[1]:
            y = A[0, k + 1]
            acc = jt.dot(y, B[k + 1, 0], acc)
            if k != 1:
                acc = jt.dot(A[0, k + 2], B[k + 2, 0], acc)
            acc = acc + y.astype(jnp.float32)
        acc = acc + x.astype(jnp.float32)
    o.tiles(N, N)[0, 0] = acc


@kernel
def three_tiles_at_a_time(a, b, c, n, o):
    A, B = a.tiles(N, N), b.tiles(N, N)
    acc = zero()
    for k in jt.range(n[0]):
        x = [A[0, k + i] for i in range(3)]
        for i in range(3):
            acc = jt.dot(x[i], B[k + i, 0], acc)
        acc = acc + x[0].astype(jnp.float32)
    o.tiles(N, N)[0, 0] = acc


KERNELS = [
    two_sums_in_a_round, two_folded_in_a_round, two_chains_in_a_round, a_tile_kept_for_an_inner_loop,
    tiles_kept_for_branches, three_tiles_at_a_time,
]  # fmt: skip


def planned_of(of, inputs, **options):
    (piece,) = lowering.pieces_of(of.lower(*inputs).program).kernels
    return steps(passes.run_pipeline(piece, passes.TILE), machine(), options)


def operands(*rounds):
    draw = lambda shape, seed: np.random.default_rng(seed).integers(-2, 3, shape).astype(jnp.bfloat16)
    return [draw((N, 10 * N), 0), draw((10 * N, N), 1), draw((10 * N, N), 2), np.array(rounds, np.int32)]


@functools.cache
def wanted(of, rounds):
    return of.interpret(*operands(*rounds))


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("of", KERNELS, ids=lambda k: k.name)
def test_no_role_waits_for_ever(of, slots):
    some = ((3, 5), (1, 1), (0, 2))
    planned = planned_of(of, operands(*some[0]), num_stages=max(slots, 3 * (of is three_tiles_at_a_time)))
    assert not isinstance(planned, NoPlan), str(planned)
    for k, rounds in enumerate(some):
        for seed in range(2) if thorough() else [(k + slots) % 2]:
            got = interpret(planned.kernel, operands(*rounds), seed=seed)[0]
            np.testing.assert_array_equal(got, wanted(of, rounds))


def test_more_tiles_at_a_time_than_slots():
    planned = planned_of(three_tiles_at_a_time, operands(1, 1), num_stages=2)
    assert isinstance(planned, NoPlan)
    assert planned.reason == "it needs 3 tiles of one array at a time, and its rings have 2 slots"


@jt.kernel(out_type=jax.ShapeDtypeStruct((N, N), jnp.float32), grid=1)
def masked_and_then_hanging_over(a, b, w, o):
    A, B, W = a.tiles(N, N), b.tiles(N, N), w.tiles(N)
    acc, i = zero(), jnp.arange(N)
    for k in jt.range(2):
        s = jt.dot(A[0, 0], B[k, 0]) * W[k][None, :]
        acc = acc + jnp.where(i[:, None] >= i[None, :] + k, s, 0)
    for k in jt.range(2, 4):
        acc = acc + jt.dot(A[0, 0], B[k, 0]) * W[k][None, :]
    o.tiles(N, N)[0, 0] = acc


def test_merged_loops_keep_the_bounds_of_all():
    """The loop with the mask stays inside its arrays, the other does not."""
    a, b, *_ = operands()
    inputs = [a, b[:220], np.arange(220, dtype=np.float32)]
    planned = planned_of(masked_and_then_hanging_over, inputs)
    assert not isinstance(planned, NoPlan), str(planned)
    want = masked_and_then_hanging_over.interpret(*inputs)
    np.testing.assert_array_equal(interpret(planned.kernel, inputs)[0], want)


def test_what_would_wait_for_ever_is_found(monkeypatch):
    """A step of the pipeline that gives slots back too late is a defect that is found, though the rounds are loaded."""
    monkeypatch.setattr(
        importlib.import_module("jtile.lowering.triton.block.passes.overlap"), "rounds_held", lambda op, body: 2
    )
    with pytest.raises(VerificationError, match="consumer0: waits for ever at %a_full"):
        planned_of(two_sums_in_a_round, operands(3), num_stages=2)
