"""Jumps under traced conditions and traced steps in machine code, against the interpreter."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device import run_device
from native import run_native
from ttir import run_ttir

import jtile as jt
from jtile.interpret import interpret
from jtile.ir import parse_kernel

RUNS = [run_native, run_ttir, pytest.param(run_device, marks=pytest.mark.gpu)]
X = np.arange(24, dtype="f").reshape(6, 4)
N = np.array([[0, 6, 2], [5, -1, -2], [3, 3, 1], [0, 6, 0]], "i4")
F32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)


@jt.function
def first_above(x, limit):
    for i in jt.range(x.shape[0]):
        for j in jt.range(4):
            if x[i, j] > limit:
                return i, x[i]
    return -1, jt.zeros(4)


@jt.kernel(out_type=(F32(6, 4), F32(6)), grid=8, init=0)
def jumps(x, n, o, p):
    """Early return, continue, break past the end of the array, a search, a loop without a condition."""
    i = jt.program_id(0)
    if i >= x.shape[0]:
        return
    for k in jt.range(100):
        if k == 1 or not 0 <= k - i + 3 < 9:
            continue
        if k >= x.shape[1] or x[i, k] > 18:
            break
        o[i, k] = x[i, k] + max(x[i, 0], 5.0)
    at, row = first_above(x, 4.0 * i.astype(x.dtype))
    while True:
        at = at + 2
        if at > 7:
            break
        row = row * 2
    match i:
        case 0 | 3:
            row = -row
        case 5 if at > 8:
            row = row + 1
    p[i] = row[1] + at.astype(x.dtype)


@jt.kernel(out_type=F32(4, 6), grid=2, init=0)
def steps(x, n, o):
    """A persistent loop of loops whose bounds and steps are read."""
    for r in jt.range(jt.program_id(0), 4, jt.num_programs(0)):
        for k in jt.range(n[r, 0], n[r, 1], n[r, 2]):
            o[r, k] = x[k, r] + 1.0


@jt.kernel(out_type=F32(4), grid=1)
def turns(x, n, o):
    """Bounds that the loop around carries: how many turns the next one takes is read at the end of each."""
    lo, hi, total = 0, n[1, 2] + 2, jt.zeros(())
    for r in jt.range(4):
        for k in jt.range(lo, hi):
            total = total + x[k, r]
        lo, hi = n[r, 0].astype(jnp.int32), n[r, 1].astype(jnp.int32)
        o[r] = total


KERNELS = (jumps, steps, turns)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("run", RUNS)
def test_like_the_interpreter(run, kernel):
    lowered = parse_kernel(kernel.lower(X, N).texts["tile_ir_opt"])
    want = interpret(lowered, [X, N])
    assert all(np.asarray(w).any() for w in want)
    for got, w in zip(run(lowered, [X, N]), want, strict=True):
        np.testing.assert_array_equal(got, w)


def test_what_the_steps_reach():
    """The interpreter itself, against NumPy."""
    want = np.zeros((4, 6), "f")
    for r, (lo, hi, step) in enumerate(N):
        for k in range(lo, hi, step) if step else ():
            want[r, k] = X[k, r] + 1
    np.testing.assert_array_equal(steps.interpret(X, N), want)


@pytest.mark.parametrize("target", ["cuda:sm_90", "rocm:gfx942"])
def test_compiled_for_gpus(target):
    assert jumps.lower(X, N, target=target).image


@pytest.mark.parametrize("target", ["cuda:sm_90", "rocm:gfx942"])
def test_carried_bounds_are_not_forgotten(target):
    """Triton 3.6 takes bounds for dead that only loops inside read: the loop around would carry the sum alone."""
    text = turns.lower(X, N, target=target).texts["ttgir"]
    assert re.search(r"scf\.yield .* : i32, i32, f32", text) and text.count("tt.load") == 4
