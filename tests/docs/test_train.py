"""The example of docs/training.md at reduced length."""

import collections
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from examples import FOLDER, example
from flax import nnx
from jax.extend.core import jaxprs_in_params

pytestmark = pytest.mark.usefixtures("by_numpy")

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "LICENSE").read_bytes()

# Steps of a transformer that must be kernels: what their formulas are made of in jnp.
INSIDE = {"dot_general", "gather", "scatter-add", "exp", "log", "rsqrt", "logistic", "tanh", "reduce_max"}


@pytest.fixture(scope="module")
def train():
    return example("train")


@pytest.mark.usefixtures("optimized")
def test_the_loss_curve_is_that_of_jnp(train):
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        ours, plain = train.train(TEXT, 12, batch=4, length=64)
    assert train.largest_difference(ours, plain) < 1e-4
    assert len(ours.losses) == 12
    assert ours.losses[0] > np.log(256)
    assert ours.losses[-1] < 3.5


def test_every_step_of_the_transformer_is_a_kernel(train):
    model = train.Transformer(64, 2, 4, train.JTILE, nnx.Rngs(0))
    graph, params = nnx.split(model)
    tokens = next(train.batches(TEXT, 1, 2, 16))
    found = jax.make_jaxpr(jax.grad(lambda p: train.loss_of(nnx.merge(graph, p), tokens)))(params)
    outside, kernels = collections.Counter(), collections.Counter()

    def count(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "jtile_call":
                kernels[eqn.params["program"].name] += 1
                continue
            outside[eqn.primitive.name] += 1
            for inner in jaxprs_in_params(eqn.params):
                count(inner)

    count(found.jaxpr)
    sorted_ids = (
        {"gather"} if jax.default_backend() == "gpu" else set()
    )  # the gradients of an embedding sort its ids first
    assert not (INSIDE - sorted_ids) & set(outside), outside
    assert kernels["flash_attention"] == 2
    assert kernels["flash_attention_backward"] + kernels["attention_gradient_of_keys"] == 2  # CPUs, GPUs
    assert kernels["matmul"] >= 7 + 2 * 7  # the products of the model, and two cotangents of each


def test_the_page_shows_the_code_that_runs():
    code = "".join(file.read_text() for file in FOLDER.glob("*.py"))
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    assert [block for block in blocks if block not in code] == []
