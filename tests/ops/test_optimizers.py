"""Adam and Muon's orthogonal matrices: against jnp, and optax where it is there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import agree, gradients_agree, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import optimizers
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated


def tree(seed, dtype="float32"):
    shapes = {"w": (5, 40), "b": (7,), "s": (), "e": (2, 0)}
    return {k: normal(seed + i, *shape, dtype=dtype) for i, (k, shape) in enumerate(shapes.items())}


def after(step, params, grads, dtype=None, **options):
    """Two steps from the start."""
    state = jax.tree.map(np.asarray, ops.adam_init(params, dtype=dtype))
    for scale in (1.0, -0.5):
        params, state = evaluated(
            lambda p, s, scale=scale: step(p, jax.tree.map(lambda g: scale * g, grads), s, **options)
        )(params, state)
    return params, state


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adamw(dtype):
    options = {"learning_rate": np.float32(0.01), "grad_scale": 0.5, "dtype": dtype}
    decay = {"w": 0.1, "b": 0.0, "s": 0.0, "e": 0.0}
    ours, theirs = (
        after(f, tree(0, dtype), tree(5, dtype), weight_decay=decay, **options)
        for f in (ops.adamw, optimizers.adamw_reference)
    )
    assert ours[1].count == 2
    assert ours[1].m["w"].dtype == ours[0]["w"].dtype == dtype
    assert relative_error(ours, theirs) < (1e-6 if dtype == "float32" else 2e-3)


def test_the_numbers_of_optax():
    optax = pytest.importorskip("optax")
    params, grads = tree(0), tree(5)
    rule = optax.adamw(0.01, weight_decay=0.1)
    state, theirs = rule.init(params), params
    for scale in (1.0, -0.5):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = evaluated(rule.update)(jax.tree.map(lambda g, s=scale: s * g, grads), state, theirs)
        theirs = jax.tree.map(np.add, theirs, updates)
    ours, _ = after(ops.adamw, params, grads, learning_rate=0.01, weight_decay=0.1)
    assert relative_error(ours, theirs) < 1e-6


def test_a_step_of_adam_is_differentiable_and_in_place():
    params, grads = ({"w": normal(s, 3, 4)} for s in (0, 5))
    state = ops.adam_init(params)
    stepped = lambda f, **o: lambda g: f(params, {"w": g}, state, learning_rate=0.1, eps=0.5, **o)[0]["w"]
    gradients_agree(stepped(ops.adam), stepped(optimizers.adamw_reference, weight_decay=0.0), grads["w"])
    with jt.config(interpret=True):
        assert relative_error(stepped(ops.adam)(grads["w"]), stepped(ops.adam)(grads["w"])) == 0
    step = jax.jit(lambda p, g, s: ops.adam(p, g, s, learning_rate=0.1), donate_argnums=(0, 2))
    text = step.lower(params, grads, state).as_text()
    assert text.count("tf.aliasing_output") == 4
    assert "output_operand_alias" in text


def test_errors_of_adam():
    params, grads = tree(0), tree(5)
    state = ops.adam_init(params)
    for error, match, args, kw in [
        (KernelValueError, "grads has the structure", (params, {"w": grads["w"]}, state), {}),
        (KernelValueError, "a gradient has shape", (params, grads | {"b": grads["w"]}, state), {}),
        (KernelValueError, "b1 and b2 are in", (params, grads, state), {"b1": 1.0}),
        (KernelTypeError, "a float array", (params, grads | {"b": np.zeros(7, np.int32)}, state), {}),
    ]:
        with pytest.raises(error, match=match):
            ops.adamw(*args, learning_rate=0.1, **kw)
    with pytest.raises(KernelTypeError, match="expected a float"):
        ops.adam_init(params, dtype="int8")


@pytest.mark.parametrize("shape", [(20, 33), (2, 17, 9)])
def test_newton_schulz(shape):
    agree(ops.newton_schulz, optimizers.newton_schulz_reference, normal(0, *shape), tolerance=1e-5, interpret=True)


def test_newton_schulz_with_tiles_of_a_gpu(monkeypatch):
    """Several tiles on and below the diagonal."""
    monkeypatch.setattr(optimizers, "tiles", lambda *_, **__: {"bm": 16, "bn": 16, "bk": 16})
    pair = (lambda x, f=f: f(x, steps=2) for f in (ops.newton_schulz, optimizers.newton_schulz_reference))
    op, reference = pair
    with jt.config(arch="sm_90"):
        agree(op, reference, normal(0, 40, 70), tolerance=1e-5)
        gradients_agree(op, reference, normal(0, 40, 70), tolerance=1e-4)


def test_newton_schulz_of_short_floats_and_what_it_is_for():
    x = normal(0, 24, 16)
    y = evaluated(lambda x: ops.newton_schulz(x, dtype="bfloat16"))(x)
    sizes = np.linalg.svd(np.asarray(y), compute_uv=False)
    assert y.dtype == jnp.float32
    assert ((sizes > 0.5) & (sizes < 1.4)).all()
    for error, match, kw in [
        (KernelTypeError, "steps is an int", {"steps": 1.5}),
        (KernelValueError, "0 or more", {"steps": -1}),
    ]:
        with pytest.raises(error, match=match):
            ops.newton_schulz(x, **kw)
    with pytest.raises(KernelValueError, match="x is"):
        ops.newton_schulz(x[0])
