"""Models with mixtures of experts, block by block: one program serves all blocks that are alike."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jtile.models import LanguageModel
from jtile.models.experts import Mixture


def logits(lm: LanguageModel, ids, dtype: str) -> jax.Array:
    """The logits, float32 [rows, t, vocab], of ids [rows, t] with activations of a dtype."""
    model: Any = lm.model
    return model.head(_through(lm, ids, dtype)[0])


def touched(lm: LanguageModel, ids) -> float:
    """How many experts of a mixture the last tokens of the rows of ids, [rows, t], go through together: the mean over
    all mixtures."""
    rows, tokens = ids.shape
    _, found = _through(lm, ids, lm.dtype)
    return float(np.mean([np.unique(of.reshape(rows, tokens, -1)[:, -1]).size for of in found]))


def _through(lm: LanguageModel, ids, dtype: str) -> tuple[jax.Array, list[np.ndarray]]:
    """(the output of the last block, the experts that the tokens chose in each mixture, [rows * t, k])."""
    model: Any = lm.model
    model.dtype = dtype
    x, angles = model.enter(ids, jnp.arange(ids.shape[1], dtype=jnp.int32))
    found = []
    for block in model.blocks:
        graph, state = nnx.split(block)
        x, chosen = _block(graph, state, x, *angles[block.rope])
        found += [np.asarray(chosen)] if chosen is not None else []
    return x, found


@functools.partial(jax.jit, static_argnums=0)
def _block(graph, state, x, cos, sin):
    """(the output of a block for x, the experts that the tokens chose or None)."""
    block: Any = nnx.merge(graph, state)
    chosen = []
    if isinstance(block.mlp, Mixture):
        router = block.mlp.router

        def noted(rows):  # a function, so that no kernel takes the router and the experts together
            found, weights = router(rows)
            chosen.append(found)
            return found, weights

        setattr(block.mlp, "router", noted)  # noqa: B010
    return jnp.add(*block.prefill(x, None, cos, sin)[0]), chosen[0] if chosen else None
