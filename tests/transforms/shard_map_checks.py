"""`shard_map` of kernels on eight devices; run by test_shard_map.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharded import MESH, array, equal, grad, matmul, mesh_of, normal, rms_norm, scale, squares

from jtile.testing.evaluate import evaluated

LINE = mesh_of(8)
X, W = array(16, 8), array(8, seed=1)
A, B = array(32, 16), array(16, 16, seed=1)
WRAPS = (lambda f: f, jax.jit)


def shard(f, mesh=MESH, **kw):
    return jax.shard_map(f, mesh=mesh, **kw)


def check_rows_on_a_line_and_on_a_grid():
    for mesh, rows in ((LINE, "x"), (MESH, "x"), (MESH, ("x", "y"))):
        for vma in (True, False):
            f = shard(scale, mesh, in_specs=(P(rows), P()), out_specs=P(rows), check_vma=vma)
            for wrap in WRAPS:
                equal(wrap(f)(X, W), X * W[None])


def check_two_axes_of_a_product():
    f = shard(matmul, in_specs=(P("x"), P(None, "y")), out_specs=P("x", "y"))
    equal(jax.jit(f)(A, B), A @ B)


def check_psum_after_a_kernel():
    def f(a, b):
        return jax.lax.psum(matmul(a, b), "x")

    for vma in (True, False):
        g = shard(f, in_specs=(P(None, "x"), P("x")), out_specs=P(), check_vma=vma)
        equal(jax.jit(g)(A, B), A @ B)


def check_all_gather_before_a_kernel():
    def f(a, b):
        return matmul(a, jax.lax.all_gather(b, "y", axis=1, tiled=True))

    g = shard(f, in_specs=(P("x"), P(None, "y")), out_specs=P("x"), check_vma=False)
    equal(jax.jit(g)(A, B), A @ B)


def check_reduce_scatter_and_permute_around_kernels():
    def f(a, b):
        y = jax.lax.psum_scatter(matmul(a, b), "x", scatter_dimension=0, tiled=True)
        turned = jax.lax.ppermute(y, "x", [(k, (k + 1) % 4) for k in range(4)])
        return scale(turned, jnp.ones(y.shape[1:], y.dtype))

    got = jax.jit(shard(f, in_specs=(P(None, "x"), P("x")), out_specs=P("x")))(A, B)
    equal(got, np.roll(A @ B, 8, axis=0))


def check_gradients_of_replicated_weights_are_summed():
    want = evaluated(grad(lambda x, w: x * w[None], 0, 1))(X, W)
    for rows in ("x", ("x", "y")):
        f = shard(scale, in_specs=(P(rows), P()), out_specs=P(rows))
        for wrap in WRAPS:
            equal(wrap(grad(f, 0, 1))(X, W), want)


def check_gradients_without_vma():
    f = shard(scale, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False)
    equal(jax.jit(grad(f, 0, 1))(X, W), evaluated(grad(lambda x, w: x * w[None], 0, 1))(X, W))


def check_gradient_inside_of_shard_map():
    """The loss of a shard: jax.grad within sums the weight's cotangents over the axes it is replicated on."""

    def step(x, w):
        return jax.grad(squares(scale), 1)(x, w)

    want = evaluated(jax.grad(squares(lambda x, w: x * w[None]), 1))(X, W)
    equal(jax.jit(shard(step, in_specs=(P("x"), P()), out_specs=P()))(X, W), want)


def check_gradient_of_a_norm():
    x, w = normal(32, 24), normal(24, seed=1)

    def plain(x, w):
        return x * jax.lax.rsqrt((x * x).mean(1, keepdims=True) + 1e-6) * w[None]

    f = shard(rms_norm, in_specs=(P(("x", "y")), P()), out_specs=P(("x", "y")))
    equal(jax.jit(grad(f, 0, 1))(x, w), evaluated(grad(plain, 0, 1))(x, w), 1e-4)


def check_gradient_of_a_product_that_is_cut_everywhere():
    def f(a, b):
        return jax.lax.psum(matmul(a, b), "y")

    g = shard(f, in_specs=(P("x", "y"), P("y")), out_specs=P("x"))
    equal(jax.jit(grad(g, 0, 1))(A, B), evaluated(grad(lambda a, b: a @ b, 0, 1))(A, B))


def check_several_kernels_and_both_weights():
    """A two-layer network, tensor-parallel: rows over x, the hidden units over y."""
    v = array(16, 8, seed=2)

    def f(a, b, v):
        return jax.lax.psum(matmul(jnp.maximum(matmul(a, b), 0.0), v), "y")

    def plain(a, b, v):
        return jnp.maximum(a @ b, 0.0) @ v

    g = shard(f, in_specs=(P("x"), P(None, "y"), P("y")), out_specs=P("x"))
    equal(jax.jit(g)(A, B, v), evaluated(plain)(A, B, v))
    equal(jax.jit(grad(g, 0, 1, 2))(A, B, v), evaluated(grad(plain, 0, 1, 2))(A, B, v), 1e-6)


def check_scan_inside():
    def f(x, w):
        return jax.lax.scan(lambda c, _: (scale(c, w), None), x, None, length=3)[0]

    g = shard(f, in_specs=(P("x"), P()), out_specs=P("x"))
    want = lambda x, w: x * (w**3)[None]
    equal(jax.jit(g)(X, W), evaluated(want)(X, W))
    equal(jax.jit(grad(g, 0, 1))(X, W), evaluated(grad(want, 0, 1))(X, W), 1e-6)


def check_cond_and_remat_inside():
    def f(x, w):
        w = jax.lax.pcast(w, "x", to="varying")  # outside: its transpose, a sum over x, is no branch's of some devices
        y = jax.lax.cond(jax.lax.axis_index("x") % 2 == 0, lambda: scale(x, w), lambda: x)
        return jax.checkpoint(scale)(y, w)

    odd = (np.arange(16) // 4 % 2 == 1)[:, None]
    want = lambda x, w: jnp.where(odd, x, x * w[None]) * w[None]
    g = shard(f, in_specs=(P("x"), P()), out_specs=P("x"))
    equal(jax.jit(g)(X, W), evaluated(want)(X, W))
    equal(jax.jit(grad(g, 0, 1))(X, W), evaluated(grad(want, 0, 1))(X, W))


def check_jvp_and_linearize():
    f = shard(scale, in_specs=(P("x"), P()), out_specs=P("x"))
    plain = lambda x, w: x * w[None]
    primals = jax.device_put((X, W))  # shard_map takes no constants of NumPy
    tangents = jax.device_put((array(16, 8, seed=3), array(8, seed=4)))
    want = evaluated(lambda *t: jax.jvp(plain, primals, t))(*tangents)
    equal(jax.jit(lambda *t: jax.jvp(f, primals, t))(*tangents), want)
    equal(jax.linearize(f, *primals)[1](*tangents), want[1])
    # one operand alone moves
    by_weight = lambda g: lambda t: jax.jvp(lambda w: g(primals[0], w), primals[1:], (t,))
    equal(by_weight(f)(tangents[1]), evaluated(by_weight(plain))(tangents[1]))


def check_second_order():
    f, plain = shard(scale, in_specs=(P("x"), P()), out_specs=P("x")), lambda x, w: x * w[None]
    hvp = lambda g: lambda x, w: jax.jvp(lambda w: jax.grad(squares(g), 1)(x, w), (w,), (jax.device_put(W + 1),))[1]
    equal(jax.jit(hvp(f))(X, W), evaluated(hvp(plain))(X, W))


def check_vmap_of_shard_map():
    x = array(3, 16, 8)
    f, plain = shard(scale, in_specs=(P("x"), P()), out_specs=P("x")), lambda x, w: x * w[None]
    for wrap in WRAPS:
        equal(wrap(jax.vmap(f, in_axes=(0, None)))(x, W), evaluated(jax.vmap(plain, in_axes=(0, None)))(x, W))
    equal(
        jax.jit(grad(jax.vmap(f, in_axes=(0, None)), 0, 1))(x, W),
        evaluated(grad(jax.vmap(plain, in_axes=(0, None)), 0, 1))(x, W),
    )


def check_vmap_inside_and_over_a_mesh_axis():
    x, w = array(8, 16, 8), array(8, 8, seed=5)
    want = x * w[:, None]
    inside = shard(jax.vmap(scale), in_specs=(P("x"), P("x")), out_specs=P("x"))
    equal(jax.jit(inside)(x, w), want)
    rows = shard(scale, in_specs=(P("y"), P()), out_specs=P("y"))
    equal(jax.jit(jax.vmap(rows, spmd_axis_name="x"))(x, w), want)


def check_mixed_operands_vary_jointly():
    """Operands that vary over different axes: the result varies over both, and each cotangent is summed over what its
    operand lacks."""
    rows = np.concatenate([W, 2 * W]).reshape(2, 8)

    def f(x, w):
        return scale(x, w[0])

    def plain(x, w):
        return jnp.concatenate([x.reshape(4, 1, 4, 8) * w[None, :, None]], 0).reshape(32, 8)

    g = shard(f, in_specs=(P("x"), P("y")), out_specs=P(("x", "y")))
    equal(jax.jit(g)(X, rows), evaluated(plain)(X, rows))
    equal(jax.jit(grad(g, 0, 1))(X, rows), evaluated(grad(plain, 0, 1))(X, rows))


def check_results_that_vary_are_not_replicated():
    for spec in (P(), P("y")):
        with pytest.raises(ValueError, match="replication"):
            shard(scale, in_specs=(P("x"), P()), out_specs=spec)(X, W)


def check_some_axes_manual_others_automatic():
    f = shard(scale, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"})
    x = jax.device_put(X, jax.NamedSharding(MESH, P(None, "y")))
    equal(jax.jit(f)(x, W), X * W[None])
    equal(jax.jit(grad(f, 0, 1))(x, W), evaluated(grad(lambda x, w: x * w[None], 0, 1))(X, W))


def check_the_interpreter_under_shard_map():
    f = shard(scale.with_options(interpret=True), in_specs=(P("x"), P()), out_specs=P("x"))
    for wrap in WRAPS:
        equal(wrap(f)(X, W), X * W[None])


def check_constants_and_numpy_operands():
    w = np.asarray(W)
    f = shard(functools.partial(lambda x: scale(x, w)), in_specs=P("x"), out_specs=P("x"))
    equal(jax.jit(f)(X), X * W[None])
    equal(jax.jit(jax.grad(squares(f)))(X), evaluated(jax.grad(squares(lambda x: x * W[None])))(X))
