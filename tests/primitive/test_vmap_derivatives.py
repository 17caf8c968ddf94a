"""vmap of derivatives and derivatives of vmap, against the `jnp` form; as many launches as without vmap, no loop."""

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
import pytest
from custom_calls import calls
from products import tiled_matmul

import jtile as jt
from jtile import ir
from jtile.primitive.lowering import pieces_of
from jtile.testing.evaluate import evaluated


def whole(seed, *shape):
    """Small whole numbers, so that sums are exact in any order."""
    x = (np.arange(np.prod(shape, dtype=int), dtype=np.float32) * 7 + seed) % 11 - 5
    return jnp.asarray(x.reshape(shape))


matmul = tiled_matmul(4, 3, 2)


@jt.kernel(out_type=lambda x, s: jt.like(x), grid=lambda x, s: x.shape[0])
def scale(x, s, o):
    i = jt.program_id(0)
    o[i, :] = x[i, :] * s[()]


@jt.kernel(out_type=lambda x, d: (jt.like(x), jt.like(d)), alias={"d": "total"}, grid=lambda x, d: x.shape[0])
def accumulate(x, d, y, total):
    i = jt.program_id(0)
    y[i, :] = x[i, :] * x[i, :]
    total[i, :] = total[i, :] * x[i, :]


@jt.kernel(out_type=lambda x, rows: jt.like(x, shape=(*rows.shape, x.shape[1])), grid=1)
def take_rows(x, rows, o):
    o[...] = x[rows[:], :]


@jt.kernel(out_type=lambda x, s: jt.like(x), grid=1)
def with_rule(x, s, o):
    o[...] = x[...] * s[()]


with_rule.defvjp(
    lambda x, s: (with_rule(x, s), (x, s)),
    lambda residuals, ct: (with_rule(ct, residuals[1]), (residuals[0] * ct).sum()),
)

ROWS = (jnp.arange(18, dtype=jnp.int32).reshape(3, 6) * 7 + 3) % 5
# name -> (kernel, reference, operands of three lanes)
KERNELS = {
    "matmul": (matmul, jnp.matmul, [whole(0, 3, 6, 4), whole(1, 3, 4, 7)]),
    "scalar": (scale, lambda x, s: x * s, [whole(0, 3, 4, 5), whole(2, 3)]),
    "alias": (accumulate, lambda x, d: (x * x, d * x), [whole(0, 3, 4, 5), whole(2, 3, 4, 5)]),
    "gather": (take_rows, lambda x, rows: x[rows], [whole(0, 3, 5, 4), ROWS]),
    "defvjp": (with_rule, lambda x, s: x * s, [whole(0, 3, 5, 4), whole(2, 3)]),
}
IN_AXES = [(0, 0), (0, None), (None, 0)]


def loss(f):
    return lambda *args: sum((y**2).sum() for y in jax.tree.leaves(f(*args)))


def derivatives(args):
    """Name -> what to compute of a function of one lane, for `in_axes`."""
    wanted = tuple(k for k, x in enumerate(args) if x.dtype == jnp.float32)

    def tangents(f, *xs):
        zero = lambda x: np.zeros(x.shape, jax.dtypes.float0)
        return jax.jvp(f, xs, tuple(x + 1 if x.dtype == jnp.float32 else zero(x) for x in xs))

    return {
        "vmap of grad": lambda f, axes: jax.vmap(jax.grad(loss(f), wanted), axes),
        "grad of vmap": lambda f, axes: jax.grad(loss(jax.vmap(f, axes)), wanted),
        "vmap of jvp": lambda f, axes: jax.vmap(lambda *xs: tangents(f, *xs), axes),
        "jvp of vmap": lambda f, axes: lambda *xs: tangents(jax.vmap(f, axes), *xs),
    }


def launches(f, *args):
    text = jax.jit(f).lower(*args).as_text()
    assert "while" not in text.replace("while_loop_", "")
    return calls(text)


@pytest.mark.parametrize("in_axes", IN_AXES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_first_order(name, in_axes):
    kernel, reference, lanes = KERNELS[name]
    args = [x if a == 0 else x[0] for x, a in zip(lanes, in_axes)]
    for order, what in derivatives(args).items():
        if "grad" in order or in_axes == (0, None):
            both = [evaluated(what(f, in_axes))(*args) for f in (kernel, reference)]
            jax.tree.map(np.testing.assert_array_equal, *both)


@pytest.mark.parametrize("name", KERNELS)
def test_no_more_launches_than_for_one_lane(name):
    kernel, _, lanes = KERNELS[name]
    one = launches(jax.grad(loss(kernel)), *[x[0] for x in lanes])
    assert launches(jax.vmap(jax.grad(loss(kernel))), *lanes) == one
    assert launches(jax.grad(loss(jax.vmap(kernel))), *lanes) == one


def test_second_order_and_nested_maps():
    a, b = whole(0, 3, 6, 4), whole(1, 4, 7)
    hessians = lambda f: jax.vmap(jax.hessian(lambda b, a: loss(f)(a, b)), (None, 0))
    np.testing.assert_array_equal(evaluated(hessians(matmul))(b, a), evaluated(hessians(jnp.matmul))(b, a))
    jacobian = lambda f: jax.jacrev(lambda a, b: jax.vmap(f, (0, None))(a, b), 1)
    np.testing.assert_array_equal(evaluated(jacobian(matmul))(a, b), evaluated(jacobian(jnp.matmul))(a, b))
    twice = lambda f: jax.grad(lambda a, b: jax.vmap(jax.grad(loss(f)), (0, None))(a, b).sum(), (0, 1))
    jax.tree.map(np.testing.assert_array_equal, evaluated(twice(matmul))(a, b), evaluated(twice(jnp.matmul))(a, b))
    x, s = whole(0, 2, 3, 5, 4), whole(2, 3)
    for kernel in (with_rule, scale):
        nested = lambda f: jax.grad(loss(jax.vmap(jax.vmap(f, (0, 0)), (0, None))), (0, 1))
        expected = evaluated(nested(lambda x, s: x * s))(x, s)
        jax.tree.map(np.testing.assert_array_equal, jax.jit(nested(kernel))(x, s), expected)


def test_a_rule_that_uses_the_mapped_axis():
    """Rules given by defvjp see the name of the axis that their call is mapped over."""

    @jt.kernel(out_type=lambda x: jt.like(x), grid=1)
    def copy(x, o):
        o[...] = x[...]

    copy.defvjp(lambda x: (copy(x), ()), lambda _, ct: (jax.lax.psum(ct, "i"),))
    x = whole(0, 3, 4)
    weights = whole(1, 3, 4)
    f = lambda x: (jax.vmap(copy, axis_name="i")(x) * weights).sum()
    np.testing.assert_array_equal(jax.grad(f)(x), jnp.tile(weights.sum(0), (3, 1)))
    g = jax.vmap(jax.grad(lambda x, w: (copy(x) * w).sum()), axis_name="i")
    np.testing.assert_array_equal(g(x, weights), jnp.tile(weights.sum(0), (3, 1)))


def programs(jaxpr):
    for eqn in jaxpr.eqns:
        if "program" in eqn.params:
            yield eqn.params["program"]
        for inner in jexc.jaxprs_in_params(eqn.params):
            yield from programs(inner)


def test_lanes_that_share_an_operand_sum_its_cotangent_without_atomics():
    """The lane is one more axis to sum over, and is nested into the kernel that makes the weight's cotangent."""
    a, b = whole(0, 16, 128, 64), whole(1, 64, 32)
    f = lambda a, b: matmul(a, b, bm=32, bn=32, bk=32)
    traced = jax.make_jaxpr(jax.grad(loss(jax.vmap(f, (0, None))), (0, 1)))(a, b)
    reverse = [p for p in programs(traced.jaxpr) if p.name == "matmul_vjp"]
    (pieces,) = [pieces_of(p) for p in reverse]
    assert [len(k.grid) for k in pieces.kernels] == [3, 1]  # lanes x rows x columns for a, a column of tiles for b
    assert not any("atomic" in ir.print_kernel(k) for k in pieces.kernels)
    assert [r.partials for r in pieces.results] == [0, 0]
