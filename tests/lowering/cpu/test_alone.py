"""Atomic operations of a thread that runs all programs of a grid are plain ones, and give the same."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from native import run_artifact
from small_tiles import histogram

import jtile as jt
from jtile.lowering.cpu import compile_kernel


def updates(fn: str, dtype):
    """A kernel that updates places several times and writes down the old elements."""
    atomic = getattr(jt, f"atomic_{fn}")

    @jt.kernel(
        out_type=lambda x, at: (jt.like(x, shape=(8,)), jt.like(x)), grid=lambda x, at: x.shape[0] // 8, init=(0, None)
    )
    def kernel(x, at, o, old):
        i = jt.program_id(0)
        places = at.tiles(8)[i]
        extra = (jnp.zeros(8, dtype),) if fn == "cas" else ()
        old.tiles(8)[i] = atomic(o, places, *extra, x.tiles(8)[i], mask=places != 3)

    x = jnp.asarray(np.random.default_rng(0).integers(0, 9, 64), dtype)
    at = jnp.asarray(np.random.default_rng(1).integers(0, 9, 64), jnp.int32)  # 8 lies outside
    return kernel.lower(x, at, target="cpu").kernel, [np.asarray(x), np.asarray(at)]


def one_by_one(fn: str, x: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The places and the old elements after all updates in the order of the grid; masked ones and those outside: 0."""
    places, old = np.zeros(8, x.dtype), np.zeros_like(x)
    update = {"add": np.add, "max": np.maximum, "min": np.minimum, "xchg": lambda _, y: y}
    update["cas"] = lambda a, y: y if a == 0 else a
    for k, place in enumerate(at):
        if place < 8 and place != 3:
            old[k] = places[place]
            places[place] = update[fn](places[place], x[k])
    return places, old


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32, jnp.uint8, jnp.bfloat16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("fn", ["add", "max", "min", "xchg", "cas"])
def test_one_thread_updates_in_the_order_of_the_grid(fn, dtype):
    kernel, args = updates(fn, dtype)
    inputs = [*args, *(np.zeros(v.shape, v.type.info.numpy) for v in kernel.inputs[2:])]
    got = run_artifact(compile_kernel(kernel), kernel, inputs, threads=1)
    for a, b in zip(got, one_by_one(fn, *args), strict=True):
        np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))


def test_many_threads_count_as_one_does():
    ids = np.random.default_rng(0).integers(0, 10, 400_000).astype(np.int32)
    kernel = histogram.lower(jnp.asarray(ids), target="cpu").kernel
    inputs = [ids, *(np.zeros(v.shape, v.type.info.numpy) for v in kernel.inputs[1:])]
    artifact = compile_kernel(kernel, texts=True)
    for threads in (1, 4):
        (found,) = run_artifact(artifact, kernel, inputs, threads=threads)
        np.testing.assert_array_equal(found, np.bincount(ids, minlength=10))
    assert artifact.texts["llvm"].count("atomicrmw") == 1
