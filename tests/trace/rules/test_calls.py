from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jtile.errors import UnsupportedError

V = np.random.default_rng(0).standard_normal(5).astype("f")


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -1, 1)


clipped.defvjp(lambda x: (clipped(x), None), lambda _, g: (g,))


@jax.custom_batching.custom_vmap
def doubled(x):
    return x * 2


doubled.def_vmap(lambda size, batched, x: (x * 2, True))


def test_inlined(check):
    check(lambda x: jax.jit(lambda y: y * 2)(x), V)
    check(lambda x: jax.checkpoint(jnp.sin)(x), V)
    check(lambda x: (clipped(x), jax.nn.relu(x), jax.nn.silu(x), doubled(x)), V)
    check(lambda x: (lax.stop_gradient(x), lax.optimization_barrier((x, x + 1))), V)
    check(lambda x: jax.vmap(lambda a: jax.nn.softmax(a * x))(x), V)


def test_no_calls_remain(lower):
    def kernel(x, o):
        o[...] = jax.jit(jax.jit(jnp.sin))(x[...])

    ops = [op.mnemonic for op in lower(kernel, [V], [jax.ShapeDtypeStruct((5,), np.float32)]).body.walk()]
    assert set(ops) == {"full", "load", "map", "store"}


def test_callbacks_are_refused(lower):
    def kernel(x, o):
        o[...] = jax.pure_callback(np.sin, jax.ShapeDtypeStruct((5,), np.float32), x[...])

    with pytest.raises(UnsupportedError, match="call out to the host"):
        lower(kernel, [V], [jax.ShapeDtypeStruct((5,), np.float32)])


def test_routines_are_refused(lower):
    def kernel(x, o):
        o[...] = jnp.linalg.cholesky(x[...])

    with pytest.raises(UnsupportedError, match=r"outside of the kernel[\s\S]*cholesky"):
        lower(kernel, [np.eye(3, dtype="f")], [jax.ShapeDtypeStruct((3, 3), np.float32)])


def test_lines_of_cached_functions(lower):
    """`jnp.where` is traced once for all its callers: each still gets its own line."""

    def kernel(x, o):
        first = jnp.where(x[...] > 0, x[...], 0.0)
        second = jnp.where(x[...] > 0, x[...], 0.0)
        o[...] = first + second

    out = jax.ShapeDtypeStruct((5,), np.float32)
    selects = [op.loc.line for op in lower(kernel, [V], [out]).body.walk() if op.mnemonic == "select"]
    line = kernel.__code__.co_firstlineno
    assert selects == [line + 1, line + 2]
