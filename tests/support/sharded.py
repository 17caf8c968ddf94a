"""Kernels, meshes and comparisons for checks on eight devices; imported in the child process of `devices` only."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from products import tiled_matmul

import jtile as jt
from jtile.testing.evaluate import evaluated

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def mesh_of(*shape, names=("x", "y"), kind=AxisType.Auto):
    return jax.make_mesh(shape, names[: len(shape)], axis_types=(kind,) * len(shape))


MESH = mesh_of(4, 2)


def array(*shape, seed=0, dtype="float32"):
    """Small whole numbers: sums of products of them are exact, so that sharded results are equal bit for bit.

    NumPy's, as all operands: to put an array of JAX over devices compiles a program for every place of it."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(jnp.dtype(dtype))


def normal(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def put(x, spec, mesh=MESH):
    return jax.device_put(x, NamedSharding(mesh, spec))


def collectives(compiled) -> set[str]:
    text = compiled.as_text()
    return {name for name in COLLECTIVES if re.search(rf" {name}(-start)?\(", text)}


def equal(got, want, tolerance=0.0):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype, (g, w)
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance)


def check(f, *args, want=None, allowed=(), out=None, tolerance=0.0, mesh=MESH):
    """`f` of sharded arrays (pairs of array and spec) equals `f` on one device, and no more than the `allowed`
    collectives stand in the compiled program.

    Args:
      out: the sharding that the results must have, as a spec or a tuple of them.
    """
    arrays = [a for a, _ in args]
    want = evaluated(f)(*arrays) if want is None else want
    there = [put(a, s, mesh) for a, s in args]
    compiled = jax.jit(f).lower(*there).compile()
    got = compiled(*there)
    equal(got, want, tolerance)
    assert collectives(compiled) <= set(allowed), collectives(compiled)
    if out is not None:
        specs = [out] if isinstance(out, P) else out
        for g, s in zip(jax.tree.leaves(got), specs, strict=True):
            assert g.sharding.is_equivalent_to(NamedSharding(mesh, s), g.ndim), (g.sharding, s)


def squares(f):
    """A loss whose gradient depends on the values of `f`."""
    return lambda *args: sum((y.astype(jnp.float32) ** 2).sum() for y in jax.tree.leaves(f(*args)))


def grad(f, *argnums):
    return jax.grad(squares(f), argnums=argnums)


matmul = tiled_matmul(16, 16, 8)


@jt.kernel(out_type=lambda x, w, **_: jt.like(x), grid=lambda x, w, *, br, **_: jt.cdiv(x.shape[0], br))
def rms_norm(x, w, y, *, br=4):
    i, n = jt.program_id(0), x.shape[1]
    t = x.tiles(br, n)[i, 0]
    y.tiles(br, n)[i, 0] = t * jax.lax.rsqrt((t * t).sum(1, keepdims=True) / n + 1e-6) * w[...][None, :]


@jt.kernel(out_type=lambda x, w: jt.like(x), grid=lambda x, w: x.shape[0])
def scale(x, w, y):
    i = jt.program_id(0)
    y[i, :] = x[i, :] * w[...]
