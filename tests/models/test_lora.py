"""Low-rank updates: they start at zero, only they are trained, and their gradients pass through quantised weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from examples import example
from flax import nnx
from reference_layers import mean_loss, without_kernels
from stateless import gradients

import jtile.models
from jtile._errors import ModelError
from jtile.models import LanguageModel, decoder
from jtile.models.gguf_file import open_gguf
from jtile.models.lora import TARGETS, LoRA, add_lora
from jtile.ops import QuantizedTensor
from jtile.testing import relative_error

pytestmark = pytest.mark.usefixtures("by_numpy")


@nnx.jit
def train_step(model, optimizer, ids):
    loss, gradient = nnx.value_and_grad(decoder.Decoder.loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, ids)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        optimizer.update(model, gradient)
    return loss


def shortened(model):
    """Its first block alone: less to compile."""
    model.blocks = nnx.List([model.blocks[0]])
    return model


def frozen(model):
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Not(nnx.LoRAParam)))]


def perturbed(model):
    """The model with updates that do something."""
    for k, (_, b) in enumerate(nnx.iter_graph(model)):
        if isinstance(b, nnx.LoRAParam):
            b.set_value(jax.random.normal(jax.random.key(k), b.shape) * 0.1)
    return model


@pytest.fixture
def ids(golden):
    return jnp.asarray(golden["input_ids"][:, :13], jnp.int32)


@pytest.fixture
def quantised(write_gguf, tmp_path):
    """One block of the tiny Llama, its matrices in blocks of 4 bits."""
    return shortened(jtile.models.load(write_gguf(tmp_path / "model.gguf", "Q4_0"), dtype="float32").model)


def test_the_gradient_of_an_update(quantised, ids, monkeypatch):
    assert isinstance(quantised.blocks[0].mlp.gate.get_value(), QuantizedTensor)
    model = perturbed(add_lora(quantised, rank=4, targets=TARGETS))

    _, got = gradients(decoder.Decoder.loss, model, ids, of=nnx.LoRAParam)
    without_kernels(monkeypatch)
    _, expected = gradients(mean_loss, model, ids, of=nnx.LoRAParam)
    errors = jax.tree.map(relative_error, got, expected)
    assert len(jax.tree.leaves(errors)) == len(TARGETS) * 2
    assert max(jax.tree.leaves(errors)) < 5e-5, errors


def test_an_update_starts_at_zero_and_only_it_is_trained(tiny, golden, ids):
    model = add_lora(tiny.model, rank=2, alpha=8.0, targets=("qkv", "output", "down"))
    before = frozen(model)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
    losses = [float(train_step(model, optimizer, ids)) for _ in range(4)]
    logits = jax.nn.log_softmax(golden["logits"][:, : ids.shape[1] - 1])
    np.testing.assert_allclose(losses[0], -np.take_along_axis(logits, ids[:, 1:, None], 2).mean(), rtol=1e-5)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.1, losses
    for a, b in zip(frozen(model), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_tuned_model_generates(tiny, golden, ids):
    tuned = LanguageModel(perturbed(add_lora(tiny.model)), tiny.tokenizer, tiny.eos_ids)
    made = tuned.generate(ids, 6, eos=None)
    logits = np.asarray(tuned.logits(np.concatenate([ids, made], axis=1)))
    assert np.array_equal(logits.argmax(-1)[:, ids.shape[1] - 1 : -1], made)
    assert np.abs(logits[:, : ids.shape[1]] - golden["logits"][:, : ids.shape[1]]).max() > 0.1


def test_updates_that_it_cannot_make(tiny):
    for options, message in (
        (dict(targets=("qkv", "head")), "targets of qkv, output, gate, up, down; got head"),
        (dict(targets=()), "got none"),
        (dict(rank=0), "rank of at least 1, got 0"),
    ):
        with pytest.raises(ModelError, match=message):
            add_lora(tiny.model, **options)
    model = add_lora(tiny.model)
    with pytest.raises(ModelError, match="'output' have a LoRA update already"):
        add_lora(model, targets=("up", "output"))
    assert not any(isinstance(block.mlp.up, LoRA) for block in model.blocks)


def test_smollm2_learns_a_sentence(smollm2_path):
    """The first of its layers: all thirty are of one shape, and each takes as long to trace and compile."""
    checkpoint = open_gguf(smollm2_path)
    checkpoint = dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, num_layers=6))
    smollm2 = LanguageModel.from_checkpoint(checkpoint, dtype="float32")
    before = frozen(smollm2.model)
    with jax.numpy_dtype_promotion("standard"):
        tuned, losses = example("lora").tune(smollm2, "Tiles of arrays are what a kernel is made of.", 2)
    assert losses[1] < losses[0] - 0.1, losses
    assert all(np.array_equal(a, b) for a, b in zip(frozen(tuned.model), before, strict=True))
