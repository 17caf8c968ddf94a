"""Kernels that JAX takes for linear: in rules of `jax.custom_jvp`, `jax.linear_transpose` and iterative solvers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile import ops
from jtile.errors import TransformError

pytestmark = pytest.mark.usefixtures("by_numpy")


@jt.kernel(
    out_type=lambda a, b: jt.like(a, shape=(a.shape[0], b.shape[1])),
    grid=lambda a, b: (jt.cdiv(a.shape[0], 4), jt.cdiv(b.shape[1], 4)),
)
def product(a, b, o):
    i, j = jt.program_id(0), jt.program_id(1)
    acc = jt.zeros((4, 4), jnp.float32)
    for k in jt.range(jt.cdiv(a.shape[1], 4)):
        acc = jt.dot(a.tiles(4, 4)[i, k], b.tiles(4, 4)[k, j], acc)
    o.tiles(4, 4)[i, j] = acc


@jt.kernel(out_type=lambda x: (jt.like(x), jt.like(x)))
def twice_and_sums(x, o, p):
    o[...] = x[...] * 2
    p[...] = jnp.cumsum(x[...])


@jt.kernel(out_type=lambda x: jt.like(x), alias={"x": "o"})
def tripled(x, o):
    o[...] = o[...] * 3


@jt.kernel(out_type=lambda x, y: jt.like(y), alias={"y": "o"})
def added(x, y, o):
    o[...] = o[...] + 2 * x[...]


@jt.kernel(out_type=lambda x: jt.like(x), init=0)
def three_times(x, o):
    for _ in jt.range(3):
        o[...] = o[...] + x[...]


@jt.kernel(out_type=lambda x: jt.like(x), init=0)
def three_squares(x, o):
    for _ in jt.range(3):
        o[...] = o[...] + x[...] * x[...]


@jt.kernel(out_type=lambda y: jt.like(y), alias={"y": "o"})
def squared_in_place(y, o):
    o[...] = o[...] * o[...]


@jt.kernel(out_type=lambda x: jt.like(x))
def rectified(x, o):
    o[...] = x[...]
    o[...] = jnp.where(o[...] > 0, o[...], 0)


@jt.kernel(out_type=lambda x: jt.like(x))
def exponential(x, o):
    o[...] = jnp.exp(x[...])


def normal(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


A, B, G = normal(9, 7), normal(7, 5), normal(9, 5)
close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.fixture(params=[product, ops.matmul], ids=["automatic", "with a rule of its own"])
def mm(request):
    return request.param


def test_each_operand(mm):
    (da,) = jax.linear_transpose(lambda a: mm(a, B), A)(G)
    close(da, G @ B.T)
    (db,) = jax.jit(jax.linear_transpose(lambda b: mm(A, b), B))(G)
    close(db, A.T @ G)


def test_the_transpose_of_the_transpose_is_the_map(mm):
    back = lambda g: jax.linear_transpose(lambda a: mm(a, B), A)(g)[0]
    close(jax.linear_transpose(back, G)(A)[0], A @ B)


def test_under_vmap(mm):
    x, g = normal(3, 9, 7), normal(3, 9, 5)
    one = lambda g: jax.linear_transpose(lambda a: mm(a, B), A)(g)[0]
    close(jax.vmap(one)(g), g @ B.T)
    (db,) = jax.linear_transpose(lambda b: jax.vmap(lambda a: mm(a, b))(x), B)(g)
    close(db, jnp.einsum("xij,xik->jk", x, g))


def test_a_kernel_on_the_tangents_of_a_rule(mm):
    @jax.custom_jvp
    def f(x):
        return jnp.sin(mm(x, B))

    f.defjvp(lambda p, t: (f(*p), jnp.cos(mm(p[0], B)) * mm(t[0], B)))
    close(jax.grad(lambda x: f(x).sum())(A), jax.grad(lambda x: jnp.sin(x @ B).sum())(A))


def test_gradient_of_a_solver(mm):
    matrix, v = normal(6, 6) + 6 * jnp.eye(6), normal(6)
    solve = lambda m, v: jax.scipy.sparse.linalg.gmres(lambda x: mm(m, x[:, None])[:, 0], v, tol=1e-6)[0].sum()
    got = jax.grad(solve, (0, 1))(matrix, v)
    want = jax.grad(lambda m, v: jnp.linalg.solve(m, v).sum(), (0, 1))(matrix, v)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


def test_some_results_and_a_shared_buffer():
    x, one = normal(4), jnp.ones(4)
    close(jax.linear_transpose(lambda x: twice_and_sums(x)[1], x)(one)[0], [4, 3, 2, 1])
    close(jax.linear_transpose(twice_and_sums, x)((one, one))[0], [6, 5, 4, 3])
    close(jax.linear_transpose(tripled, x)(one)[0], 3 * one)


def test_a_kernel_that_reads_back_its_output():
    x, y, one = normal(4), normal(4) + 1, jnp.ones(4)
    for got, want in zip(jax.linear_transpose(added, x, y)(one), (2 * one, one), strict=True):
        close(got, want)
    close(jax.linear_transpose(lambda x: added(x, jnp.zeros(4)), x)(one)[0], 2 * one)
    close(jax.linear_transpose(three_times, x)(one)[0], 3 * one)


@pytest.mark.parametrize("kernel", [three_squares, squared_in_place, rectified], ids=lambda k: k.name)
def test_one_that_is_not_linear_in_what_it_reads_back_is_refused(kernel):
    with pytest.raises(TransformError, match=f"kernel {kernel.name} is not linear in"):
        jax.linear_transpose(kernel, normal(4))(jnp.ones(4))


def test_only_the_cotangent_that_is_asked_for_is_computed(mm):
    calls = lambda f, like: str(jax.make_jaxpr(jax.linear_transpose(f, like))(G)).count(" = jtile_call[")
    assert calls(lambda a: mm(a, B), A) == 1
    assert calls(lambda b: mm(A, b), B) == 1


def test_what_is_not_linear_is_refused(mm):
    with pytest.raises(TransformError, match="is not linear in a, b, so it cannot be transposed"):
        jax.linear_transpose(lambda a: mm(a, a), normal(5, 5))(normal(5, 5))
    with pytest.raises(TransformError, match="kernel exponential is not linear in x"):
        jax.linear_transpose(exponential, normal(4))(normal(4))
