"""Decoders as functions to differentiate: gradients of every weight against the same model in jnp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from reference_layers import mean_loss, without_kernels
from stateless import gradients

from jtile.models import decoder
from jtile.testing import relative_error


@pytest.fixture
def ids(golden):
    return jnp.asarray(golden["input_ids"], jnp.int32)


def cross_entropy(logits, labels):
    """Of each row of logits [n, vocab], in float64."""
    top = logits.max(-1, keepdims=True).astype(np.float64)
    whole = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
    return whole - logits[np.arange(len(labels)), labels]


def test_gradients_of_every_weight(tiny, ids, monkeypatch):
    losses = decoder.Decoder.loss, lambda m, ids: m.loss(ids, remat=True)
    found = [gradients(loss, tiny.model, ids) for loss in losses]
    without_kernels(monkeypatch)
    loss, expected = gradients(mean_loss, tiny.model, ids)
    for got_loss, got in found:
        np.testing.assert_allclose(got_loss, loss, rtol=1e-6)
        errors = jax.tree.map(relative_error, got, expected)
        assert len(jax.tree.leaves(errors)) == 3 + 3 * 7  # embedding, norm and output; seven weights a block
        assert max(jax.tree.leaves(errors)) < 2e-5, errors


@pytest.mark.parametrize("name", ["gemma2", "mistral", "qwen3_moe"])
def test_gradients_of_every_weight_of_other_models(model, outputs, name, monkeypatch):
    net, ids = model(name).model, jnp.asarray(outputs(name)["input_ids"][:, :17], jnp.int32)
    got_loss, got = gradients(decoder.Decoder.loss, net, ids)
    without_kernels(monkeypatch)
    loss, expected = gradients(mean_loss, net, ids)
    np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
    errors = jax.tree.map(relative_error, got, expected)
    assert max(jax.tree.leaves(errors)) < 1e-4, errors


def test_padding_counts_for_nothing(tiny, golden, ids):
    loss = nnx.jit(lambda m, ids, n: nnx.value_and_grad(lambda m: m.loss(ids, n, remat=True))(m))
    lengths, padded = jnp.array([24, 9], jnp.int32), ids.at[1, 9:].set(7)
    value, gradient = loss(tiny.model, padded, lengths)
    rows = [cross_entropy(golden["logits"][b, : n - 1], ids[b, 1:n]) for b, n in ((0, 24), (1, 9))]
    np.testing.assert_allclose(value, np.concatenate(rows).mean(), rtol=1e-5)
    other, same = loss(tiny.model, ids.at[1, 9:].set(11), lengths)
    assert value == other
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(gradient), nnx.to_pure_dict(same))


def test_remat_keeps_one_input_a_block(tiny, ids):
    graph, params = nnx.split(tiny.model)

    def kept(remat):
        pull = jax.eval_shape(lambda p: jax.vjp(lambda p: nnx.merge(graph, p).loss(ids, remat=remat), p)[1], params)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull))

    x = ids[:, 1:].size * tiny.config.hidden_size * 4
    assert kept(True) < kept(False) - 3 * 8 * x  # three blocks: at least eight arrays of x's size each
