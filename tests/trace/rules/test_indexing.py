from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jtile.errors import UnsupportedError

RNG = np.random.default_rng(0)
WILD = np.array([3, 0, -1, 7, 2], "i4")  # negative and outside
IN = np.array([3, 0, 1, 4, 2], "i4")


def f(*shape):
    return RNG.standard_normal(shape).astype("f")


def i(*shape):
    return RNG.integers(-50, 50, shape).astype("i4")


@pytest.mark.parametrize("mode", ["clip", "fill", "wrap"])
def test_take(check, mode):
    check(lambda x, k: (jnp.take(x, k, axis=0, mode=mode), jnp.take(x, k, axis=1, mode=mode)), f(4, 5), WILD)
    check(lambda x, k: jnp.take(x, k, axis=0, mode=mode), i(5), WILD)


def test_values_by_index(check):
    check(lambda x, k: x[k], f(5, 4), WILD)
    check(lambda x, k: x[k, :, k % 4], f(5, 3, 4), IN)
    check(lambda x, k: x[1:, k], f(5, 3, 4), np.array([[0, 1], [2, -1]], "i4"))
    check(lambda x, k: x.at[k].get(mode="fill", fill_value=9.0), f(5), WILD)
    check(lambda x, k: x[k], f(5, 4), np.int32(-2))
    check(lambda x, k: x[k], f(5, 4), np.array([1, 2], "u1"))
    check(lambda x, k: jnp.take(x, k, mode="fill", axis=0), f(5, 4), np.array([1, 2**32 - 1], "u4"))
    check(lambda x: x[jnp.triu_indices(4)], f(4, 4))


@pytest.mark.parametrize("mode", [None, "promise_in_bounds", "clip"])
def test_take_along_axis(check, mode):
    check(lambda x, k: jnp.take_along_axis(x, k, axis=1, mode=mode), f(4, 5), abs(i(4, 3)) % 5)
    check(lambda x, k: jnp.take_along_axis(x, k, axis=0, mode=mode), f(4, 5), abs(i(2, 5)) % 4)


def test_take_along_axis_is_one_gather(lower):
    def kernel(x, k, o):
        o[...] = jnp.take_along_axis(x[...], k[...], axis=1, mode="promise_in_bounds")

    ops = list(lower(kernel, [f(4, 5), abs(i(4, 3)) % 5], [jax.ShapeDtypeStruct((4, 3), np.float32)]).body.walk())
    (gather,) = [op for op in ops if op.mnemonic == "gather"]
    assert gather.axis == 1


@pytest.mark.parametrize("name", ["set", "add", "multiply", "min", "max", "subtract"])
def test_updates(check, name):
    update = lambda x, k, y: getattr(x.at[k], name)(y)
    check(update, f(5, 3), np.array([3, 0, 7, 2], "i4"), f(4, 3))
    check(lambda x, k, y: getattr(x.at[:, k], name)(y), f(5, 3), np.array([2, 0], "i4"), f(5, 2))


def test_repeated_updates(check):
    k = np.array([2, 0, 2, 0, 2], "i4")
    check(lambda x, k, y: (x.at[k].add(y), x.at[k].max(y), x.at[k].mul(y)), i(5), k, i(5))


def test_update_forms(check):
    check(lambda x, y: x.at[1:3, ::2].set(y), f(5, 4), f(2, 2))
    check(lambda x, k: x.at[k, 1].add(3.0), f(5, 4), np.int32(2))
    check(lambda x, k, y: x.at[k].add(y, mode="clip"), f(5), WILD, f(5))
    check(lambda x, k, y: x.at[k].add(y, mode="promise_in_bounds"), f(5), IN, f(5))
    check(lambda x, k, v: jnp.put_along_axis(x, k, v, axis=1, inplace=False), f(3, 4), abs(i(3, 1)) % 4, f(3, 1))
    check(lambda x, k: jax.ops.segment_sum(x, k, 4), f(9, 2), abs(i(9)) % 5)


def test_batched(check):
    k = abs(i(4, 3)) % 5
    check(lambda x, k: jax.vmap(lambda a, b: a[b])(x, k), f(4, 5), k)
    check(lambda x, k, y: jax.vmap(lambda a, b, c: a.at[b].add(c))(x, k, y), f(4, 5), k, f(4, 3))
    check(lambda x, k: jax.vmap(lambda a, b: lax.dynamic_slice(a, (b,), (2,)))(x, k), f(4, 5), i(4))


def test_made_of_scatters(check):
    check(lambda k: jax.nn.one_hot(k, 5), WILD)
    check(lambda x: jnp.bincount(x, length=5), abs(i(20)) % 5)
    check(lambda x: jnp.nonzero(x, size=4, fill_value=9), f(8) > 0)
    check(lambda x: jnp.histogram(x, bins=np.linspace(-2, 2, 5).astype("f"))[0], f(20))


def test_apply_is_refused(lower):
    def kernel(x, o):
        o[...] = x[...].at[np.array([0, 2])].apply(jnp.sin)

    with pytest.raises(UnsupportedError, match="apply"):
        lower(kernel, [f(5)], [jax.ShapeDtypeStruct((5,), np.float32)])
