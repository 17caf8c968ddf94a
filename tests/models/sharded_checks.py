"""Checks on eight devices: a decoder under automatic partitioning gives the logits that it gives on one."""

from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jtile.models

DATA = Path(__file__).resolve().parent.parent / "data"


def logits(name: str, rows: P, weight):
    """(the logits of two rows, those of transformers): rows of ids as `rows`, each weight x as `weight(x)` say."""
    mesh = jax.make_mesh((2, 4), ("rows", "parts"), axis_types=(AxisType.Auto,) * 2)
    golden = np.load(DATA / name / "io.npz")
    graph, state = nnx.split(jtile.models.load(DATA / name).model)
    state = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, weight(x))), state)
    ids = jax.device_put(golden["input_ids"].astype(np.int32), NamedSharding(mesh, rows))
    out = jax.jit(lambda state, ids: nnx.merge(graph, state)(ids))(state, ids)
    return out, golden["logits"]


def by_rows(name: str):
    out, expected = logits(name, P("rows"), lambda x: P())
    assert out.sharding.spec[0] == "rows", out.sharding
    np.testing.assert_allclose(out, expected, atol=1e-4)


def check_rows_of_llama():
    by_rows("llama")


def check_rows_of_a_mixture():
    by_rows("qwen3_moe")


def check_weights_in_parts():
    """Matrices cut along their outputs: features, heads and the vocabulary."""
    out, expected = logits("qwen3", P("rows"), lambda x: P("parts") if x.ndim == 2 else P())
    np.testing.assert_allclose(out, expected, atol=1e-4)


def check_experts_in_parts():
    """Every device holds the experts of its own."""
    out, expected = logits("qwen3_moe", P("rows"), lambda x: P("parts") if x.ndim == 3 else P())
    np.testing.assert_allclose(out, expected, atol=1e-4)
