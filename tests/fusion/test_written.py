"""The jaxprs of kernels that are written without tracing, and calls in programs that are being traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile import trace
from jtile.fusion.bodies import GroupKernel
from jtile.fusion.fused import Fused
from jtile.fusion.units import Group
from jtile.fusion.written import jaxpr_of

pytestmark = pytest.mark.usefixtures("any_size", "by_numpy")
F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32


def of(shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


FUNCTIONS = {
    "chain": (lambda x, y: jnp.tanh(2 * x + 1) * jnp.where(x > y, x, y), of((300, 40)), of((300, 40))),
    "broadcasts": (lambda x, y: jnp.exp(-((x[:, None] - y[None, :]) ** 2)), of((300,)), of((70,))),
    "numbers": (lambda x, a: jnp.exp(x * a) + a, of((100, 64)), of(())),
    "softmax": (jax.nn.softmax, of((128, 100))),
    "columns": (lambda x: x / jnp.sqrt((x * x).sum(0, keepdims=True)), of((64, 128))),
    "variance": (lambda x: (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True)), of((64, 96))),
    "transpose": (lambda x, y: jnp.exp(x.T) * y, of((96, 64)), of((64, 96))),
    "three axes": (lambda x: jnp.exp(x - x.max((0, 2), keepdims=True)), of((8, 64, 32))),
    "short floats": (lambda x, y: jax.nn.silu(x) * y, of((64, 128), BF16), of((64, 128), BF16)),
    "integers": (lambda x: jnp.where(x % 7 == 3, x // 2, x * x) << 1, of((64, 128), I32)),
    "bools": (lambda x, y: (jnp.sin(x) > y).any(1), of((128, 64)), of((128, 64))),
    "several": (lambda x: (x.sum(1), jnp.exp(x).max(1), jnp.log(x)), of((128, 64))),
    "distances": (lambda x, y: jnp.sqrt(((x[:, None] - y[None]) ** 2).sum(-1)), of((100, 4)), of((120, 4))),
    "relu": (lambda x: jax.nn.relu(jnp.sin(x)) + jnp.clip(x, -1, 1) ** 3, of((128, 64))),
    "weak": (lambda x: jnp.exp(x) * (jnp.full_like(x, 2) + 1.0), of((64, 96))),
}


def kernels_of(fun, *types):
    plan, _, _ = Fused(fun, (), ()).planned(types, {})
    return [GroupKernel(unit) for unit in plan.units if isinstance(unit, Group)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_what_tracing_gives(name):
    kernels = kernels_of(*FUNCTIONS[name])
    assert kernels
    for made in kernels:
        types = [jax.ShapeDtypeStruct(s, v.dtype) for v, s in zip(made.group.read, made.shapes, strict=True)]
        tiling = made.tiling
        written = jaxpr_of(made.group, tiling, [*types, *made.types])
        traced = trace.trace(
            lambda *refs, made=made, tiling=tiling: made._body(tiling, refs), types, made.types, grid=tiling.grid
        )
        assert written is not None
        assert str(written) == str(traced)
        for mine, other in zip(written.jaxpr.eqns, traced.jaxpr.eqns, strict=True):
            assert [v.aval for v in mine.outvars] == [v.aval for v in other.outvars]
            assert mine.params == other.params and mine.effects == other.effects
        assert written.jaxpr.effects == traced.jaxpr.effects


def test_steps_whose_types_are_not_known_are_traced():
    for fun, *types in [
        (lambda x: jnp.exp(x) + jnp.arange(96.0)[None], of((64, 96))),
        (lambda x: jnp.argmax(jnp.sin(x), 1), of((128, 64))),
    ]:
        (made,) = kernels_of(fun, *types)
        assert jaxpr_of(made.group, made.tiling, []) is None


def test_errors_and_lines_of_a_written_kernel_are_the_users():
    (made,) = kernels_of(lambda x: jnp.tanh(x) * jnp.exp(x), of((64, 96)))
    written = jaxpr_of(made.group, made.tiling, [of((64, 96)), of((64, 96))])
    places = {jax.extend.source_info_util.summarize(eqn.source_info) for eqn in written.jaxpr.eqns}
    assert any(__file__ in place for place in places)


def test_it_has_derivatives_and_lanes():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 100)), jnp.float32)
    f = lambda x: (jnp.exp(x - x.max(1, keepdims=True)) ** 2).sum(1)
    fused = jt.fuse(f)
    np.testing.assert_allclose(jax.grad(lambda x: fused(x).sum())(x), jax.grad(lambda x: f(x).sum())(x), rtol=1e-4)
    np.testing.assert_allclose(jax.vmap(fused)(x[None]), f(x)[None], rtol=1e-5)
    forward = lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x)[1]
    np.testing.assert_allclose(forward(fused), forward(f), rtol=1e-4, atol=1e-5)


def test_a_call_in_a_program_is_cut_once():
    cuts = []

    def layer(x):
        cuts.append(x.shape)
        return x + jnp.tanh(x) * jnp.exp(-x)

    fused = jt.fuse(layer)
    x = jnp.ones((64, 128))
    program = jax.jit(lambda x: fused(fused(fused(x))))
    np.testing.assert_allclose(program(x), layer(layer(layer(x))), rtol=1e-5)
    assert len(cuts) == 1 + 3
    with jax.default_matmul_precision("bfloat16"):  # what a trace depends on is another
        jax.jit(lambda x: fused(x) + 1)(x)
    assert len(cuts) == 1 + 3 + 1


def test_what_a_function_closes_over_is_that_of_each_call():
    def program(x, a):
        fused = jt.fuse(lambda x: jnp.exp(x) * a + jnp.sin(x))
        return fused(x) + fused(2 * x)

    x = jnp.ones((64, 128))
    found = [jax.jit(program)(x, a) for a in (1.0, 2.0)]
    for a, y in zip((1.0, 2.0), found, strict=True):
        np.testing.assert_allclose(y, np.exp(1) * a + np.sin(1) + np.exp(2) * a + np.sin(2), rtol=1e-5)
    held = []
    fused = jt.fuse(lambda x: jnp.exp(x) * held[0] + jnp.sin(x))

    def other(x, a):
        held[:] = [a]
        return fused(x)

    for a in (1.0, 2.0):
        np.testing.assert_allclose(jax.jit(other)(x, jnp.full((), a)), np.exp(1) * a + np.sin(1), rtol=1e-5)


def test_static_arguments_in_a_program():
    fused = jt.fuse(
        lambda x, n, scale=1.0: jnp.exp(x) * n + jnp.sin(x) * scale, static_argnums=1, static_argnames="scale"
    )
    x = jnp.ones((64, 128))
    for n, scale in [(2, 3.0), (4, 3.0), (2, 5.0)]:
        y = jax.jit(lambda x, n=n, scale=scale: fused(x, n, scale=scale))(x)
        np.testing.assert_allclose(y, np.exp(1) * n + np.sin(1) * scale, rtol=1e-5)
    with pytest.raises(ValueError, match="hash"):
        jax.jit(lambda x: fused(x, [2]))(x)
