"""Typed random keys as arguments, results and scratch of kernels: the same bits as outside of one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ttir import run_ttir

import jtile as jt
from jtile.errors import KernelTypeError

pytestmark = pytest.mark.usefixtures("by_numpy")

KEY = jax.random.key(7)
KEYS = jax.random.split(KEY, (6, 3))
X = jnp.arange(16, dtype=jnp.float32).reshape(4, 4)


def equal(got, want) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v for v in (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-5)


@jt.kernel(out_type=lambda key, x: (jt.like(x), jt.like(key)), grid=lambda key, x: x.shape[0] // 2)
def noisy(key, x, o, last):
    i = jt.program_id(0)
    mine, other = jax.random.split(jax.random.fold_in(key[...], i))
    o.tiles(2, 4)[i, 0] = x.tiles(2, 4)[i, 0] * jax.random.normal(mine, (2, 4))
    if i == 1:
        last[...] = other


def noisy_reference(key, x):
    pairs = [jax.random.split(jax.random.fold_in(key, i)) for i in range(2)]
    rows = [x[2 * i : 2 * i + 2] * jax.random.normal(mine, (2, 4)) for i, (mine, _) in enumerate(pairs)]
    return jnp.concatenate(rows), pairs[1][1]


def test_a_key_is_an_argument_and_a_result():
    want = noisy_reference(KEY, X)
    equal(noisy(KEY, X), want)
    equal(noisy.interpret(KEY, X), want)
    tile_ir = noisy.lower(jax.ShapeDtypeStruct((), KEY.dtype), X, target="cuda:sm_90").kernel
    got = run_ttir(tile_ir, [np.asarray(jax.random.key_data(KEY)), np.asarray(X)])
    equal([jnp.asarray(got[0]), jax.random.wrap_key_data(jnp.asarray(got[1]))], want)


def test_transforms():
    many, axes = KEYS[0], (0, None)
    equal(jax.jit(jax.vmap(noisy, axes))(many, X), jax.vmap(noisy_reference, axes)(many, X))
    modes = [
        lambda f: jax.vmap(jax.grad(lambda key, x: (f(key, x)[0] ** 2).sum(), 1), axes)(many, X),
        lambda f: jax.lax.scan(lambda key, _: f(key, X)[::-1], KEY, None, length=2),
    ]
    for mode in modes:
        equal(mode(noisy), mode(noisy_reference))
    nothing = np.zeros((), jax.dtypes.float0)
    assert jax.vjp(noisy, KEY, X)[1]((X, nothing))[0].dtype == jax.dtypes.float0
    assert jax.jvp(noisy, (KEY, X), (nothing, X))[1][1].dtype == jax.dtypes.float0


@jt.kernel(
    out_type=lambda keys: (jt.like(keys, dtype=jnp.float32), jt.like(keys)),
    grid=lambda keys: (jt.cdiv(keys.shape[0], 4), keys.shape[1]),
)
def drawn(keys, o, split):
    i, j = jt.program_id(0), jt.program_id(1)
    mine = keys.tiles(4, None)[i, j]
    o.tiles(4, None)[i, j] = jax.vmap(jax.random.uniform)(mine)
    split.tiles(4, None)[i, j] = jax.vmap(lambda key: jax.random.split(key)[1])(mine)


def test_tiles_of_keys():
    each = lambda fn: jax.vmap(jax.vmap(fn))(KEYS)
    want = each(jax.random.uniform), each(lambda key: jax.random.split(key)[1])
    equal(drawn(KEYS), want)
    equal(drawn.interpret(KEYS), want)
    for target in ("cuda:sm_90", "rocm:gfx942"):
        assert drawn.lower(KEYS, target=target).image


SHAPES = ((3,), (2, 6), (6, 1, 3), (2, 3), (4,), (2,))


@jt.kernel(
    out_type=lambda keys, rows: [jt.like(keys, shape=s) for s in SHAPES], scratch=lambda keys, rows: jt.like(keys, (3,))
)
def indexed(keys, rows, a, b, c, d, e, f, own):
    own[...] = keys[1]
    a[...] = own[:]
    b[...] = keys[:, jt.ds(1, 2)].T
    c[...] = keys[:, None, ::-1]
    d[...] = keys[rows[...]]
    e[...] = jt.load(keys, (jt.ds(4, 4), 0), mask=jnp.arange(4) < 3, other=keys[0, 0])
    f[:] = keys[0, :2]
    jt.store(f, slice(None), keys[5, :2], mask=jnp.asarray([False, True]))


def test_every_index():
    rows = jnp.asarray([5, 2], jnp.int32)
    zero = jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32))
    want = [
        KEYS[1], KEYS[:, 1:3].T, KEYS[:, None, ::-1], KEYS[rows],
        jnp.stack([KEYS[4, 0], KEYS[5, 0], zero, KEYS[0, 0]]), jnp.stack([KEYS[0, 0], KEYS[5, 1]]),
    ]  # fmt: skip
    equal(indexed(KEYS, rows), want)
    equal(indexed.interpret(KEYS, rows), want)


def test_a_rule_of_the_users_gets_keys():
    @jt.kernel(out_type=lambda key, x: jt.like(x))
    def dropped(key, x, o):
        o[...] = jnp.where(jax.random.bernoulli(key[...], 0.5, x.shape), x[...], jnp.zeros_like(x[...]))

    def forward(key, x):
        return dropped(key, x), key

    def backward(key, g):
        return None, 3 * g * jax.random.bernoulli(key, 0.5, g.shape).astype(g.dtype)

    dropped.defvjp(forward, backward)
    kept = jax.random.bernoulli(KEY, 0.5, X.shape).astype(jnp.float32)
    equal(jax.grad(lambda x: dropped(KEY, x).sum())(X), 3 * kept)
    each = jax.vmap(jax.grad(lambda key, x: dropped(key, x).sum(), 1), (0, None))(KEYS[0], X)
    equal(each[1], 3 * jax.random.bernoulli(KEYS[0, 1], 0.5, X.shape).astype(jnp.float32))


def test_the_checker_takes_keys():
    jt.testing.check_kernel(noisy, noisy_reference, (KEY, X), only=("value", "jit", "interpreter", "vjp", "vmap"))


def _stores(value):
    def body(key, o):
        o[...] = value(key)

    return jt.call(body, out_type=jax.ShapeDtypeStruct((), KEY.dtype))


def test_what_keys_are_not():
    cases = {
        "generator threefry2x32": lambda: noisy(jax.random.key(0, impl="rbg"), X),
        "cannot start from the number 3": lambda: jt.call(lambda key, o: None, out_type=jt.like(KEY), init=3)(KEY),
        "int32 value; a random key is no number": lambda: _stores(lambda key: 3)(KEY),
        "atomic_add is for numbers": lambda: _stores(lambda key: jt.atomic_add(key, (), key[...]))(KEY),
        "jt.alloc: no memory of random keys": lambda: _stores(lambda key: jt.alloc(3, key.dtype)[...])(KEY),
        "other=4 cannot be a random key": lambda: _stores(lambda key: jt.load(key, (), other=4))(KEY),
    }
    for match, wrong in cases.items():
        with pytest.raises(KernelTypeError, match=match):
            wrong()
