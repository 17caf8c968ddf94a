from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

RNG = np.random.default_rng(0)


def f(*shape):
    return RNG.standard_normal(shape).astype("f")


def test_layout(check):
    check(lambda x: (x.reshape(3, 8), x.T, x[None], x.reshape(-1)), f(4, 6))
    check(lambda x: (jnp.moveaxis(x, 0, 2), jnp.broadcast_to(x[:, :1], (2, 5, 4)), jnp.swapaxes(x, 1, 2)), f(2, 3, 4))
    check(lambda x: (jnp.squeeze(x, 1), lax.expand_dims(x, (0, 3)), lax.reshape(x, (4, 2), (1, 2, 0))), f(2, 1, 4))


def test_joining(check):
    check(lambda x, y: jnp.concatenate([x, y], 1), f(2, 3), f(2, 5))
    check(lambda x, y: (jnp.stack([x, y], 1), jnp.stack([x, y]), jnp.stack([x])), f(2, 3), f(2, 3))
    check(lambda x: (jnp.split(x, [2, 3], axis=1), jnp.unstack(x, axis=0)), f(3, 7))
    check(lambda x: (jnp.tile(x, (2, 3)), jnp.repeat(x, 3, axis=1), jnp.roll(x, 2, 1), jnp.flip(x)), f(3, 4))
    check(lambda x, k: jnp.roll(x, k, 1), f(3, 7), np.int32(3))


@pytest.mark.parametrize("mode", ["edge", "reflect", "wrap", "symmetric"])
def test_pad_modes(check, mode):
    check(lambda x: jnp.pad(x, ((1, 2), (2, 1)), mode=mode), f(3, 4))


@pytest.mark.parametrize(
    "config", [((1, 2, 0), (0, 3, 0)), ((-1, 2, 1), (3, -2, 0)), ((-5, 0, 0), (0, -4, 0)), ((0, 0, 3), (-2, -2, 2))]
)
def test_lax_pad(check, config):
    check(lambda x: lax.pad(x, np.float32(7), config), f(5, 4))


def test_slices(check):
    check(lambda x: (x[1:7:2, ::-1, None], x[-2], x[..., 1:], x[3, 2]), f(8, 5))
    check(lambda x: (jnp.tril(x), jnp.diag(x), jnp.rot90(x), jnp.trace(x)), f(5, 5))


@pytest.mark.parametrize("k", [-3, 0, 2, 9])
def test_dynamic(check, k):
    k = np.int32(k)
    check(lambda x, k: lax.dynamic_slice(x, (k, k), (2, 3)), f(5, 6), k)
    check(lambda x, u, k: lax.dynamic_update_slice(x, u, (k, k)), f(5, 6), f(2, 2), k)
    check(lambda x, k: (lax.dynamic_index_in_dim(x, k, 1), lax.dynamic_slice_in_dim(x, k, 3, 1)), f(5, 6), k)


def test_constants(check):
    x = f(5)
    check(
        lambda x: (x + jnp.arange(5, dtype=x.dtype), x + jnp.eye(5, dtype=x.dtype)[2], x + np.arange(5, dtype="f")), x
    )
    check(
        lambda x: (
            jnp.zeros_like(x),
            jnp.full_like(x, jnp.nan),
            x + jnp.linspace(0, 1, 5, dtype=x.dtype),
            jnp.empty((2,)),
        ),
        x,
    )


def test_zero_size(check):
    check(lambda x: (x * 2, x.sum(0), x.sum(1), x.T, jnp.concatenate([x, x]), x @ x.T), f(0, 4))


def test_uniform_constant_is_full(lower):
    def kernel(o):
        o[...] = jnp.zeros((4, 4)) + np.full((4, 4), 2.0, "f")

    ops = [op.mnemonic for op in lower(kernel, [], [jax.ShapeDtypeStruct((4, 4), np.float32)]).body.walk()]
    assert "dense" not in ops
    assert "broadcast" not in ops
