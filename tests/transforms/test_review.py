"""Derivatives where an element is written twice, where order matters, and where nobody looks at what is written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functional import functional
from jax import lax

import jtile as jt
from jtile import testing
from jtile.testing.evaluate import evaluated

pytestmark = pytest.mark.usefixtures("by_numpy")

rng = np.random.default_rng(0)


def normal(*shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def check_gradient(kernel, x, *rest, tolerance=1e-5):
    """The gradient in the first operand against that of the kernel's functional form."""

    def loss(f):
        outs = lambda x: [o for o in jax.tree.leaves(f(x)) if jnp.issubdtype(o.dtype, jnp.floating)]
        return lambda x: sum(jnp.sum(jnp.sin(o)) for o in outs(x))

    got = jax.grad(loss(lambda x: kernel(x, *rest)))(x)
    with jax.default_device(jax.devices("cpu")[0]):  # a scatter of XLA's on a GPU keeps any of equal indices
        want = evaluated(jax.grad(loss(lambda x: functional(kernel, x, *rest))))(x)
    testing.assert_close(np.asarray(got), np.asarray(want), tolerance=tolerance)


# -- rounds that must run backwards from the last to the first -------------------------------------------------------


@jt.kernel(out_type=lambda x: jt.like(x, shape=()), grid=1, init=1.0)
def product_by_sums(x, o):
    for k in jt.range(x.shape[0]):
        v = o[...]
        jt.atomic_add(o, (), v * x[k])


@jt.kernel(out_type=lambda x: jt.like(x, shape=(2,)), grid=1)
def product_by_gathered_sums(x, o):
    s = jt.alloc((4,), jnp.float32)
    s[...] = jnp.ones((4,), jnp.float32)
    at = jnp.array([0, 2], jnp.int32)
    for k in jt.range(x.shape[0]):
        jt.atomic_add(s, (at,), s[at] * x[k])
    o[...] = s[at]


def test_rounds_that_read_what_they_add_to():
    x = normal(5)
    check_gradient(product_by_sums, x)
    check_gradient(product_by_gathered_sums, x)


# -- scatters that name an element twice -----------------------------------------------------------------------------


@jt.kernel(out_type=lambda x, at: jt.like(x, shape=(2, 5, 3)), grid=2, init=0)
def scatter_rows(x, at, o):
    p = jt.program_id(0)
    o[p, at[...], :] = x[...] ** 2 * (p + 1).astype(jnp.float32)


@jt.kernel(out_type=lambda x, at: jt.like(x, shape=(5, 3)), grid=1)
def scatter_again(x, at, o):
    v = x[...] ** 2
    o[...] = jnp.ones((5, 3), jnp.float32)
    o[at[...], :] = v
    for k in jt.range(2):
        jt.store(o, (at[...], jt.ds(k, 2)), jnp.sin(v[:, :2]), mask=v[:, :2] > 0.3)


def test_the_last_lane_of_a_scatter_gets_the_cotangent():
    x = normal(4, 3)
    for at in ([1, 1, 4, 7], [1, 1, 1, 1], [0, 3, 0, 2]):
        check_gradient(scatter_rows, x, np.array(at, np.int32))
        check_gradient(scatter_again, x, np.array(at, np.int32))


# -- outputs that have no cotangent ----------------------------------------------------------------------------------


@jt.kernel(out_type=lambda x: [jt.like(x), jt.like(x, dtype=jnp.int32), jt.like(x)], grid=4)
def bystanders(x, o, counts, copies):
    i = jt.program_id(0)
    v = jnp.sin(x[i])
    for k in jt.range(4):
        counts[k] = k * 2
        copies[k] = v
    if i > 1:
        counts[i] = i
    else:
        counts[i] = 0
    n = jnp.int32(0)
    while n * n < i:
        n = n + 1
        counts[i] = n
    o[i] = v * x[i]


def test_loops_and_branches_that_only_write_what_has_no_cotangent():
    x = normal(4)
    got = jax.grad(lambda x: bystanders(x)[0].sum())(x)
    testing.assert_close(np.asarray(got), np.cos(x) * x + np.sin(x), tolerance=1e-5)


# -- random keys in loops --------------------------------------------------------------------------------------------


@jt.kernel(out_type=lambda x: jt.like(x), grid=1)
def noisy(x, o):
    key, t = jax.random.key(3), x[...]
    for _ in jt.range(3):
        key, sub = jax.random.split(key)
        t = jnp.where(jax.random.bernoulli(sub, 0.5, t.shape), jnp.sin(t), t * t)

    def step(key, row):
        key, sub = jax.random.split(key)
        return key, (sub, row * row)

    _, (subs, rows) = lax.scan(step, key, t)
    o[...] = rows * jax.vmap(jax.random.uniform)(subs)


def test_keys_are_carried():
    check_gradient(noisy, normal(7))


# -- range -----------------------------------------------------------------------------------------------------------


@jt.kernel(out_type=lambda a, b: jt.like(a, shape=(a.shape[0], b.shape[1]), dtype=jnp.float32), grid=1)
def product(a, b, o):
    o[...] = jt.dot(a[...], b[...])


def test_cotangents_beyond_the_range_of_float16():
    a, b = normal(3, 4, dtype=np.float16), (normal(4, 5) * 1e-3).astype(np.float16)
    got = jax.grad(lambda a: product(a, b).sum() * 1e6)(a)
    want = (1e6 * np.ones((3, 5)) @ b.T.astype(np.float64)).astype(np.float16)
    testing.assert_close(np.asarray(got), want, tolerance=2e-3)


# -- batching ---------------------------------------------------------------------------------------------------------


@jt.kernel(out_type=lambda x, w: jt.like(x), grid=lambda x, w: jt.cdiv(x.shape[0], 4))
def scaled_sine(x, w, o):
    i, n = jt.program_id(0), x.shape[1]
    o.tiles(4, n)[i, 0] = jnp.sin(x.tiles(4, n)[i, 0]) * w[...][None, :]


def test_hessian_of_a_scan_of_checkpoints():
    """JAX batches the tangent of the round with no operand batched."""
    x, w = normal(6, 3), normal(3)

    def loss(f):
        return lambda w: jnp.sum(lax.scan(jax.checkpoint(lambda c, _: (f(c, w), None)), x, None, length=3)[0])

    got, want = (jax.hessian(loss(f))(w) for f in (scaled_sine, lambda x, w: jnp.sin(x) * w[None, :]))
    testing.assert_close(np.asarray(got), np.asarray(want), tolerance=1e-4)


# -- how many rounds a loop runs at most ------------------------------------------------------------------------------


@jt.kernel(out_type=lambda x: jt.like(x, shape=(4,)), grid=4)
def wrapping(x, o):
    i, t = jt.program_id(0), x[0]
    for _ in jt.range((i + 126).astype(jnp.int8).astype(jnp.int32), 3):  # 126, 127, -128, -127
        t = jnp.sin(t) + x[1]
    o[i] = t


@jt.kernel(out_type=lambda x, n: jt.like(x, shape=()), grid=1)
def from_data(x, n, o):
    t = x[0]
    for _ in jt.range(jnp.minimum(n[...], 3), 6):
        t = jnp.sin(t) + x[1]
    o[...] = t


def test_rounds_without_a_bound_are_refused():
    x = normal(4)
    for loss in (lambda x: wrapping(x).sum(), lambda x: from_data(x, np.int32(2))):
        with pytest.raises(jt.errors.TransformError, match=r"lo with jnp\.maximum"):
            jax.grad(loss)(x)


# -- order ------------------------------------------------------------------------------------------------------------


@jt.kernel(
    out_type=lambda x: [jt.like(x), jt.like(x), jt.like(x, shape=(), dtype=jnp.int32)],
    grid=lambda x: x.shape[0],
    init=0,
)
def compact(x, o, ranks, count):
    i = jt.program_id(0)
    at = jt.atomic_add(count, (), 1)
    o[at] = x[i] * 2.0
    ranks[i] = at.astype(jnp.float32)


@jt.kernel(out_type=lambda x: [jt.like(x), jt.like(x, shape=(), dtype=jnp.int32)], grid=lambda x: x.shape[0], init=0)
def ranked(x, ranks, count):
    i = jt.program_id(0)
    ranks[i] = jt.atomic_add(count, (), 1).astype(jnp.float32) + x[i] * 2.0


def test_tangents_of_what_the_order_decides_are_refused():
    x = normal(8)
    with pytest.raises(jt.errors.TransformError, match="the old value of atomic_add decides"):
        jax.jvp(compact, (x,), (x,))
    _, (tangent, _) = jax.jvp(ranked, (x,), (x,))  # the rank itself has no derivative
    testing.assert_close(np.asarray(tangent), 2 * x, tolerance=1e-6)


@jt.kernel(out_type=lambda x, at: jt.like(x), grid=1, init=0)
def scatter_some(x, at, o):
    v = x[jt.ds(0, at.shape[0]), :] ** 2
    o[at[...], :] = v
    jt.store(o, (at[...], jt.ds(1, 2)), jnp.sin(v[:, :2]), mask=v[:, :2] > 0.3)


def test_the_last_lane_of_a_scatter_into_a_dynamic_size():
    at = np.array([0, 2, 2, 9, 0], np.int32)
    for n in (5, 7):
        x = normal(n, 3)
        loss = lambda f: lambda y: jnp.sum(jnp.sin(f(y)))
        got = jax.grad(loss(lambda x: scatter_some(jt.dynamic(x, 0), at)))(x)
        with jax.default_device(jax.devices("cpu")[0]):  # as above
            want = jax.grad(loss(lambda x: functional(scatter_some, x, at)))(x)
        testing.assert_close(np.asarray(got), np.asarray(want), tolerance=1e-5)


@jt.kernel(out_type=lambda x, group, *, n: (jt.like(x, shape=(n, *x.shape)), jt.like(group, shape=(n,))), init=0)
def grouped(x, group, o, used, *, n=2):
    """Puts each number behind those of its group that came before, which a second output counts."""
    for k in jt.range(x.shape[0]):
        g = group[k]
        at = used[g]
        o[g, at] = x[k]
        used[g] = at + 1


def test_second_derivatives_of_what_is_linear_and_reads_its_own_counts():
    x, group = jnp.float32([1, 2, 3]), jnp.int32([1, 0, 1])
    weights = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
    pull = lambda x: jax.vjp(lambda x: grouped(x, group)[0], x)[1](weights)[0]
    cotangent, change = jax.jvp(pull, (x,), (x,))
    assert cotangent.tolist() == [3, 0, 4]
    assert change.tolist() == [0, 0, 0]
