"""The decoding step of SmolLM2-135M on this CPU, as separate kernels and as an execution graph, one after the other.

The cache is that of a prompt of 16 tokens, and begins again every 200 steps; both forms must give the same tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
import jtile.models
from jtile.models import cache as kv
from jtile.models import programs
from jtile.models.load import default_model

SLOTS = 256
ROUND = 200  # steps from the prompt on
WARM = 20  # steps that are compared, and do not count


def main(options: argparse.Namespace) -> None:
    """Prints the least time and the median of each form, over `options.steps` steps."""
    took = times(options.steps)
    least, median = ({name: 1e3 * of(t) for name, t in took.items()} for of in (min, statistics.median))
    for name in took:
        print(f"{name:8} least {least[name]:.2f} ms, median {median[name]:.2f} ms")
    ratios = [of["kernels"] / of["graph"] for of in (least, median)]
    print(f"the graph is {ratios[0]:.3f} times as fast (least), {ratios[1]:.3f} (median), with the same tokens")


def times(steps: int) -> dict[str, list[float]]:
    """Seconds of each step, by form."""
    lm = jtile.models.load(str(default_model()))
    structure, weights = lm._structure, lm._weights
    ids, lengths = np.arange(100, 116, dtype=np.int32)[None], jnp.asarray([16], jnp.int32)

    def start(weights: Any) -> Any:
        model = programs.merge(structure, weights)
        _, entries = model.prefill(ids, lengths, at=lengths - 1)
        return kv.from_prefill(entries, lengths, kv.Layout(SLOTS))

    def step(weights: Any, tokens: Any, cache: Any) -> Any:
        logits: Any
        logits, cache = programs.merge(structure, weights).step(tokens, cache)
        return logits.argmax(-1).astype(jnp.int32), cache

    first = jnp.asarray([7], jnp.int32), jax.jit(start)(weights)
    forms = {"kernels": jax.jit(step), "graph": jax.jit(jt.graph(step))}
    state, took = dict.fromkeys(forms, first), {name: [] for name in forms}
    for k in range(WARM + steps):
        if k % ROUND == 0:
            state = dict.fromkeys(forms, first)
        for name, run in forms.items():
            begun = time.perf_counter()
            state[name] = jax.block_until_ready(run(weights, *state[name]))
            if k >= WARM:
                took[name].append(time.perf_counter() - begun)
        tokens = {int(tokens[0]) for tokens, _ in state.values()}
        if k < WARM and len(tokens) > 1:
            raise SystemExit(f"step {k}: the forms give different tokens, {tokens}")
    return took
