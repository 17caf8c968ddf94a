"""A mixture of experts against a loop over tokens: uneven and empty groups, gradients, 16-bit weights."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stateless
from draws import thorough
from k_quants import random_tensor

from jtile.models import Decoder, experts
from jtile.models.families import read_config
from jtile.ops import QuantizedTensor, quantize
from jtile.ops.quantized_tensor import K_KINDS
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

pytestmark = pytest.mark.usefixtures("by_numpy")

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
    gradient = normal(7, HIDDEN, seed=5)

    def total(run):
        return lambda x, share, *w: (run(x, chosen, share, *w) * gradient).sum()

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


def test_quantised_experts_keep_their_bits():
    kind = "fp8"
    drawn = {
        f"m.{e}.{n}_proj.weight": normal(32, 32, seed=3 * e + k)
        for e in range(2)
        for k, n in enumerate(["gate", "up", "down"])
    }
    source = {name: quantize(x, kind) for name, x in drawn.items()}
    held = experts.Experts(lambda name, shape: source[name], "m.", 2, 32, 32)
    gate_up, down = held.gate_up.get_value(), held.down.get_value()
    assert (gate_up.kind, gate_up.shape, down.shape) == (kind, (2, 64, 32), (2, 32, 32))
    assert gate_up.nbytes + down.nbytes == sum(w.nbytes for w in source.values())
    of = lambda *names: np.concatenate([source[f"m.1.{n}_proj.weight"].dequantize() for n in names])
    np.testing.assert_array_equal(gate_up.dequantize()[1], of("gate", "up"))
    np.testing.assert_array_equal(down.dequantize()[1], of("down"))


def test_experts_that_are_stored_in_several_ways():
    x = normal(32, 32, seed=0)
    q4, q8 = quantize(x, "q4_0"), quantize(x, "q8_0")
    of = lambda *parts: experts.Experts(
        lambda name, shape: parts[["gate", "up", "down"].index(name.split(".")[2][:-5])], "m.", 2, 32, 32
    )
    held = of(q4, q8, q4)  # gates in another way than what they gate
    gate, up = held.gate_up.get_value()
    assert (gate.kind, up.kind, gate.shape) == ("q4_0", "q8_0", (2, 32, 32))
    y, chosen = normal(2, 32, seed=1), np.array([[0, 1], [1, 0]], np.int32)
    share = np.ones((2, 2), np.float32)
    got = evaluated(lambda x: held(x, chosen, share))(y)
    dense = [jnp.stack([w.dequantize()] * 2) for w in (q4, q8, q4)]
    want = evaluated(lambda x: experts.mixture(x, chosen, share, jnp.concatenate(dense[:2], axis=1), dense[2]))(y)
    assert relative_error(got, want) < 2e-6
    assert of(q4, jnp.asarray(x), q4).gate_up.get_value().dtype == jnp.float32  # of bfloat16 and float32
    some = experts.stacked([q4, q4.with_minima()])
    assert some.kind == "q4_1" and some.shape == (2, 32, 32)
    mixed = experts.stacked([q4, q8])
    np.testing.assert_array_equal(mixed[1], q8.dequantize(jnp.bfloat16))


def quantised_weights(kinds, rng):
    """Two sources of random weights, the second of which has floats in place of quantised ones; `kinds`: by a part of
    the name the kind, the first that fits."""
    made = {}

    def weight(name, shape):
        if name not in made:
            x = rng.standard_normal(shape).astype(np.float32) / np.sqrt(shape[-1])
            kind = next((kind for part, kind in kinds.items() if part in name and len(shape) == 2), None)
            if kind in K_KINDS:
                made[name] = random_tensor(kind, *shape, seed=len(made))
            else:
                made[name] = quantize(x, kind) if kind else jnp.asarray(x + (len(shape) == 1))
        return made[name]

    def floats(name, shape):
        found = weight(name, shape)
        dtype = jnp.bfloat16 if "kv_b" in name else jnp.float32
        return found.dequantize(dtype) if isinstance(found, QuantizedTensor) else found

    return weight, floats


FAMILIES = {  # sizes, the kinds of matrices
    "mixtral": (dict(hidden_size=256, intermediate_size=256), {"w2": "q6_k", ".experts.": "q4_k"}),
    "qwen3_moe": (dict(hidden_size=256, moe_intermediate_size=64), {"down": "fp8", ".experts.": "q4_k"}),
    "deepseek_v3": (dict(first_k_dense_replace=0, kv_lora_rank=32), {"o_proj": None, "_proj": "q4_1"}),
}


# Mixtral's experts are Qwen3's with other names
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "mixtral" or thorough()])
def test_logits_are_those_of_the_dequantised_model(data, name):
    sizes, kinds = FAMILIES[name]
    entries = json.loads((data / name / "config.json").read_text()) | {"num_hidden_layers": 1} | sizes
    config = read_config(entries, name)
    quantised, floats = (
        Decoder(config, weight, tied=False) for weight in quantised_weights(kinds, np.random.default_rng(0))
    )
    ids = np.array([[1, 5, 2, 9, 9, 3, 7, 1, 0]], np.int32)
    got, want = (stateless.run(lambda model, ids: model(ids), model, ids) for model in (quantised, floats))
    assert relative_error(got, want) < (1e-2 if name == "deepseek_v3" else 2e-5)  # whose expansion is in bfloat16
    held = quantised.blocks[0].mlp.experts
    bits = {"q4_1": 6, "fp8": 8 + 32 / 64, "q4_k": 4.625, "q6_k": 6.5625}
    for part in (held.gate_up, held.down):
        w = part.get_value()
        assert w.nbytes * 8 <= bits[w.kind] * math.prod(w.shape)
    if name == "deepseek_v3":
        attention = quantised.blocks[0].attention
        assert {attention.down.get_value().kind, attention.query.get_value().kind} == {"q4_1"}
        assert attention.key.get_value().dtype == jnp.bfloat16
