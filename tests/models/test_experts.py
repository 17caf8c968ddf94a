"""A mixture of experts against a loop over tokens: uneven and empty groups, gradients, 16-bit weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtile.models import experts
from jtile.ops import quantize
from jtile.testing.evaluate import evaluated

COUNT, FEATURES, HIDDEN = 5, 24, 40


def normal(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture
def weights():
    return normal(COUNT, 2 * FEATURES, HIDDEN, seed=1) / 6, normal(COUNT, HIDDEN, FEATURES, seed=2) / 5


@pytest.fixture
def routed():
    """x, chosen experts, weights: one expert has most tokens, one none, and a token may choose one twice."""
    chosen = np.array([[0, 3], [3, 0], [3, 3], [3, 1], [4, 3], [3, 0], [1, 3]], np.int32)
    return normal(7, HIDDEN, seed=3), chosen, normal(7, 2, seed=4)


def by_tokens(x, chosen, share, gate_up, down):
    rows = []
    for t in range(chosen.shape[0]):
        row = jnp.zeros((HIDDEN,), jnp.float32)
        for j in range(chosen.shape[1]):
            e = int(chosen[t, j])
            gate, up = jnp.split(gate_up[e].astype(jnp.float32) @ x[t], 2)
            row = row + share[t, j] * (down[e].astype(jnp.float32) @ (jax.nn.silu(gate) * up))
        rows.append(row)
    return jnp.stack(rows)


def of_tokens(x, chosen, *arrays):
    return evaluated(lambda x, *arrays: by_tokens(x, chosen, *arrays))(x, *arrays)


def test_mixture(routed, weights):
    got = jax.jit(experts.mixture)(*routed, *weights)
    np.testing.assert_allclose(got, of_tokens(*routed, *weights), atol=1e-5)


def test_mixture_of_bfloat16_weights(routed, weights):
    half = [jnp.asarray(w).astype(jnp.bfloat16) for w in weights]
    got = jax.jit(experts.mixture)(*routed, *half)
    expected = of_tokens(*routed, *half)
    assert got.dtype == jnp.float32
    assert np.linalg.norm(got - expected) < 1e-2 * np.linalg.norm(expected)


def test_gradients_of_mixture(routed, weights):
    x, chosen, share = routed
    slope = normal(7, HIDDEN, seed=5)

    def total(run):
        return lambda x, share, *w: (run(x, chosen, share, *w) * slope).sum()

    got, expected = (
        evaluated(jax.grad(total(run), range(4)))(x, share, *weights) for run in (experts.mixture, by_tokens)
    )
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)


def test_experts_are_read_in_order():
    source = {
        f"m.{e}.{name}_proj.weight": normal(2, 2, seed=3 * e + i)
        for e in range(3)
        for i, name in enumerate(("gate", "up", "down"))
    }
    held = experts.Experts(lambda name, shape: jnp.asarray(source[name].reshape(shape)), "m.", 3, 2, 2)
    gate_up, down = held.gate_up.get_value(), held.down.get_value()
    assert gate_up.shape == (3, 4, 2)
    for e in range(3):
        np.testing.assert_array_equal(
            gate_up[e], np.concatenate([source[f"m.{e}.{n}_proj.weight"] for n in ("gate", "up")])
        )
        np.testing.assert_array_equal(down[e], source[f"m.{e}.down_proj.weight"])


def test_quantised_experts_become_bfloat16():
    x = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32)
    for kind in ("q8_0", "fp8"):
        w = quantize(x, kind)
        held = experts.Experts(lambda *_, w=w: w, "m.", 1, 32, 32)
        np.testing.assert_array_equal(held.down.get_value()[0], w.dequantize(jnp.bfloat16))
