"""The step of a Llama that somebody writes in `jnp` for several devices: weights that lie cut along heads, features and
the vocabulary, and `jax.jit`, so that XLA cuts the work and puts in its own collectives (NCCL on GPUs).

A call makes one step, and takes the caches of the one before; the host is ahead of the devices. XLA's collectives are
no part of its command buffers, so that a loop of steps in one program is no quicker.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.gpu.models import DENSE, SCALE
from benchmarks.gpu.plain import norm, rotated


def _block(w, c: dict, x, cache, lengths):
    """One block for x [rows, hidden]; returns its output, and the keys and values with this token."""
    d = c["hidden_size"] // c["num_attention_heads"]
    frequencies = jnp.asarray(c["rope_theta"] ** (-np.arange(0, d, 2) / d), jnp.float32)
    angles = lengths.astype(jnp.float32)[:, None, None] * frequencies
    turn = jnp.cos(angles), jnp.sin(angles)
    y = norm(x, None, c["rms_norm_eps"])
    q, k, v = (jnp.einsum("ri,hdi->rhd", y, w[name]) for name in "qkv")
    rows = jnp.arange(len(x))
    keys, values = (
        a.at[rows, lengths].set(new) for a, new in zip(cache, (rotated(k, *turn), v), strict=True)
    )  # fmt: skip
    q = rotated(q, *turn)[:, None]
    mixed = jax.nn.dot_product_attention(q, keys, values, key_value_seq_lengths=lengths + 1)
    x = x + jnp.einsum("rhd,ohd->ro", mixed[:, 0], w["o"])
    y = norm(x, None, c["rms_norm_eps"])
    hidden = jax.nn.silu(jnp.einsum("ri,fi->rf", y, w["gate"])) * jnp.einsum("ri,fi->rf", y, w["up"])
    return x + jnp.einsum("rf,of->ro", hidden, w["down"]), (keys, values)


def _step(w, tokens, caches, lengths, *, c: dict):
    """The next tokens [rows] behind `tokens`, and the longer caches."""
    x, longer = jnp.take(w["embedding"], tokens, axis=0), []
    for block, cache in zip(w["blocks"], caches, strict=True):
        x, cache = _block(block, c, x, cache, lengths)
        longer.append(cache)
    logits = jnp.einsum("ri,vi->rv", norm(x, None, c["rms_norm_eps"]), w["head"], preferred_element_type=jnp.float32)
    return jnp.argmax(logits, -1).astype(jnp.int32), longer, lengths + 1


def shapes(c: dict) -> dict[str, tuple[tuple[int, ...], P]]:
    """The matrices of a block, and along which dimension each is cut."""
    hidden, features, heads, kv = (
        c[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    d = hidden // heads
    return {
        "q": ((heads, d, hidden), P("x")), "k": ((kv, d, hidden), P("x")), "v": ((kv, d, hidden), P("x")),
        "o": ((hidden, heads, d), P(None, "x")), "gate": ((features, hidden), P("x")),
        "up": ((features, hidden), P("x")), "down": ((hidden, features), P(None, "x")),
    }  # fmt: skip


class Plain:
    """Steps of a Llama of this configuration with random weights, cut over a mesh with the axis "x"."""

    def __init__(self, config: dict, mesh: Mesh):
        self.config, self.lies = config, lambda spec: NamedSharding(mesh, spec)
        table = (config["vocab_size"], config["hidden_size"])
        layers = config["num_hidden_layers"]
        self.weights = {
            "embedding": self._drawn(0, table, P()), "head": self._drawn(1, table, P("x")),
            "blocks": [
                {name: self._drawn(10 * i + k + 2, *of) for k, (name, of) in enumerate(shapes(config).items())}
                for i in range(layers)
            ],
        }  # fmt: skip

    def _drawn(self, seed: int, shape: tuple[int, ...], spec: P, scale: float = SCALE) -> jax.Array:
        return _drawn_as(self.lies(spec), shape, scale)(seed)

    def stepper(self, rows: int, context: int, slots: int) -> Any:
        """A function of a number of steps: the seconds that they take, behind `context` tokens."""
        c = self.config
        d = c["hidden_size"] // c["num_attention_heads"]
        entry, cut = (rows, slots, c["num_key_value_heads"], d), P(None, None, "x")
        fresh = [tuple(self._drawn(k, entry, cut, 1.0) for k in range(2)) for _ in range(c["num_hidden_layers"])]
        ids = np.random.default_rng(0).integers(0, c["vocab_size"], rows).astype(np.int32)
        state = [jax.device_put(ids, self.lies(P())), fresh,
                 jax.device_put(np.full(rows, context, np.int32), self.lies(P()))]  # fmt: skip
        same, cuts = self.lies(P()), [(self.lies(cut),) * 2] * c["num_hidden_layers"]
        run = jax.jit(functools.partial(_step, c=c), donate_argnums=2, out_shardings=(same, cuts, same))
        program = run.lower(self.weights, *state).compile()

        def seconds(steps: int) -> float:
            start = time.perf_counter()
            for _ in range(steps):
                state[:] = program(self.weights, *state)
            jax.block_until_ready(state[0])
            return time.perf_counter() - start

        return seconds


@functools.cache
def _drawn_as(sharding: NamedSharding, shape: tuple[int, ...], scale: float) -> Any:
    """A function of a seed: random numbers that lie so."""
    return jax.jit(
        lambda seed: scale * jax.random.normal(jax.random.key(seed), shape, jnp.dtype(DENSE)), out_shardings=sharding
    )
