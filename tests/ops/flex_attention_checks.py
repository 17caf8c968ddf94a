"""Gradients of attention with functions as on GPUs, on eight devices; run by test_flex_partition.py."""

import functools

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from sharded import check, grad, mesh_of, normal

import jtile as jt
from jtile import ops
from jtile.ops import gpu_tiles
from jtile.ops.flash_attention import attention_reference

SPEC, SMALL = P("x", None, "y"), mesh_of(2, 2)


def documents(b, h, i, j, segments):
    return (segments[b, i] == segments[b, j]) & (j <= i)


def alibi(s, b, h, i, j, slopes):
    return s + slopes[h] * (j - i).astype("float32")


def of_all(s, b, h, i, j, table):
    """Reads both numbers as they are."""
    return s + table[b, h] * (i - j).astype("float32") + 0.125 * (h + 2 * b).astype("float32")


def far(b, h, i, j, table):
    del table
    return (i - j + h) % 3 != 0


def segments(batch: int, t: int):
    return np.sort(np.random.default_rng(0).integers(0, 3, (batch, t), np.int32), axis=1)


def run(heads, groups, extras, of=(), **options):
    """A gradient on four devices against the definition; of: how extras are cut."""
    q, k, v = (normal(2, 72, n, 64, seed=s, dtype="bfloat16") for s, n in enumerate((heads, groups, groups)))
    f = lambda q, k, v, *x: ops.attention(q, k, v, extras=x, **options)
    plain = lambda q, k, v, *x: attention_reference(q, k, v, extras=x, **options)
    with jt.config(arch="sm_90"):
        assert not gpu_tiles.on_one_device()
        assert "hopper_flex_backward" in str(jax.make_jaxpr(grad(f, 0, 1, 2))(q, k, v, *extras))
        want = jax.jit(grad(plain, 0, 1, 2))(q, k, v, *extras)
        arrays = (q, SPEC), (k, SPEC), (v, SPEC), *zip(extras, of or [P()] * len(extras), strict=True)
        out = (SPEC,) * 3
        check(grad(f, 0, 1, 2), *arrays, want=want, out=out, tolerance=0.12, mesh=SMALL)


def check_arrays_of_rows():
    """Each device has the numbers of documents of its rows, wherever they come from."""
    run(4, 2, (segments(2, 72),), mask=documents)
    run(4, 2, (segments(2, 72),), (P("x"),), mask=documents)


def check_arrays_of_heads():
    run(2, 2, (-np.arange(1, 3, dtype=np.float32) / 9,), (P("y"),), score=alibi, causal=True)


def check_heads_that_share_keys():
    run(4, 2, (-np.arange(1, 5, dtype=np.float32) / 9,), score=alibi, causal=True)


def check_numbers_that_are_read_as_they_are():
    run(4, 4, (np.ones((2, 4), np.float32) / 9,), score=of_all, mask=far)


def check_with_dropout():
    q, k, v = (normal(2, 72, 2, 64, seed=s, dtype="bfloat16") for s in range(3))
    options = {"mask": documents, "extras": (segments(2, 72),), "dropout": 0.25, "key": np.array([3, 7], np.uint32)}
    f = functools.partial(ops.attention, **options)
    with jt.config(arch="sm_90"):
        want = jax.jit(grad(functools.partial(attention_reference, **options), 0, 1, 2))(q, k, v)
        check(grad(f, 0, 1, 2), (q, SPEC), (k, SPEC), (v, SPEC), want=want, out=(SPEC,) * 3, tolerance=0.2, mesh=SMALL)
