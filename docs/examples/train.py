"""Trains a small Flax transformer on the bytes of a text, twice: on jtile's kernels and in plain jnp.

    python docs/examples/train.py --steps 200 --json build/training.json

Both runs start from the same weights and see the same batches; the loss of every step is compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jtile import ops

ROOT = Path(__file__).resolve().parent.parent.parent
VOCAB = 256  # a token is a byte
BATCH, LENGTH = 8, 128


# -- the layers: once as kernels, once in jnp --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layers:
    """What a model computes with; x [batch, length, width], heads [batch, length, heads, width / heads]."""

    embedding: Callable  # table [vocab, width], ids int32 [batch, length] -> x
    rms_norm: Callable  # x, weight [width] -> x
    linear: Callable  # x, weight [width, n] -> [batch, length, n]
    rope: Callable  # heads -> heads
    attention: Callable  # causal: q, k, v -> heads
    gated_mlp: Callable  # x, gate [width, n], up [width, n] -> [batch, length, n]
    cross_entropy: Callable  # logits [batch, length, vocab], ids -> [batch, length]


def _rms_norm(x, weight):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight[None, None, :]


def _rope(x):
    length, dim = x.shape[1], x.shape[3]
    frequencies = 10000.0 ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _attention(q, k, v):
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)


JTILE = Layers(
    embedding=ops.embedding,
    rms_norm=ops.rms_norm,
    linear=ops.matmul,
    rope=ops.rope,
    attention=lambda q, k, v: ops.attention(q, k, v, causal=True),
    gated_mlp=ops.gated_mlp,
    cross_entropy=ops.cross_entropy,
)
JNP = Layers(
    embedding=lambda table, ids: table[ids],
    rms_norm=_rms_norm,
    linear=jnp.matmul,
    rope=_rope,
    attention=_attention,
    gated_mlp=lambda x, gate, up: jax.nn.silu(x @ gate) * (x @ up),
    cross_entropy=optax.softmax_cross_entropy_with_integer_labels,
)


# -- the model ---------------------------------------------------------------------------------------------------------


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, layers: Layers, rngs: nnx.Rngs):
        self.heads, self.layers = heads, layers
        self.norms = nnx.Param(jnp.ones((2, width)))
        self.qkv, self.out = _weight(rngs, width, 3 * width), _weight(rngs, width, width)
        self.gate, self.up = _weight(rngs, width, 3 * width), _weight(rngs, width, 3 * width)
        self.down = _weight(rngs, 3 * width, width)

    def __call__(self, x):
        f = self.layers
        heads = (*x.shape[:2], 3, self.heads, -1)
        qkv = f.linear(f.rms_norm(x, self.norms[0]), self.qkv[...]).reshape(heads)
        mixed = f.attention(f.rope(qkv[:, :, 0]), f.rope(qkv[:, :, 1]), qkv[:, :, 2])
        x = x + f.linear(mixed.reshape(x.shape), self.out[...])
        hidden = f.gated_mlp(f.rms_norm(x, self.norms[1]), self.gate[...], self.up[...])
        return x + f.linear(hidden, self.down[...])


class Transformer(nnx.Module):
    """A decoder over bytes: ids int32 [batch, length] -> logits [batch, length, 256]."""

    def __init__(self, width: int, depth: int, heads: int, layers: Layers, rngs: nnx.Rngs):
        self.layers = layers
        self.table = nnx.Param(jax.random.normal(rngs(), (VOCAB, width)) * 0.02)
        self.blocks = nnx.List([Block(width, heads, layers, rngs) for _ in range(depth)])
        self.norm = nnx.Param(jnp.ones((width,)))
        self.head = _weight(rngs, width, VOCAB)

    def __call__(self, ids):
        x = self.layers.embedding(self.table[...], ids)
        for block in self.blocks:
            x = block(x)
        return self.layers.linear(self.layers.rms_norm(x, self.norm[...]), self.head[...])


def _weight(rngs: nnx.Rngs, rows: int, columns: int) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs(), (rows, columns)) * rows**-0.5)


# -- training ----------------------------------------------------------------------------------------------------------


def loss_of(model: Transformer, tokens) -> jax.Array:
    """The mean over tokens [batch, length + 1] of the loss of the next byte, in nats."""
    return model.layers.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean()


@nnx.jit
def train_step(model: Transformer, optimizer: nnx.Optimizer, tokens) -> jax.Array:
    loss, gradient = nnx.value_and_grad(loss_of)(model, tokens)
    optimizer.update(model, gradient)
    return loss


def batches(text: bytes, steps: int, batch: int, length: int, seed: int = 0):
    """`steps` times int32 [batch, length + 1]: windows of the text at random places."""
    bytes_, random = np.frombuffer(text, np.uint8).astype(np.int32), np.random.default_rng(seed)
    for start in random.integers(0, len(bytes_) - length, (steps, batch)):
        yield jnp.asarray(bytes_[start[:, None] + np.arange(length + 1)])


@dataclasses.dataclass
class Run:
    """A model in training, and what it has cost so far."""

    model: Transformer
    optimizer: nnx.Optimizer
    losses: list[float] = dataclasses.field(default_factory=list)  # nats a byte, before each step
    seconds: list[float] = dataclasses.field(default_factory=list)  # of each step; the first one compiles

    def step(self, tokens) -> None:
        start = time.perf_counter()
        self.losses.append(float(train_step(self.model, self.optimizer, tokens)))
        self.seconds.append(time.perf_counter() - start)

    def temporary_mib(self, tokens) -> float:
        """What XLA reserves for the arrays of a step beside weights and optimizer state."""
        compiled = train_step.lower(self.model, self.optimizer, tokens).compile().compiled
        return compiled.memory_analysis().temp_size_in_bytes / 2**20


def train(
    text: bytes, steps: int, *, width=256, depth=2, heads=4, batch=BATCH, length=LENGTH, rate=5e-4
) -> tuple[Run, Run]:
    """Both models, step by step in turn, so that whatever else the machine does slows both: (on jtile, in jnp)."""
    models = [Transformer(width, depth, heads, layers, nnx.Rngs(0)) for layers in (JTILE, JNP)]
    runs = [Run(model, nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)) for model in models]
    for tokens in batches(text, steps, batch, length):
        for run in runs:
            run.step(tokens)
    return runs[0], runs[1]


def largest_difference(ours: Run, plain: Run) -> float:
    """Of the losses of a step."""
    return float(np.abs(np.subtract(ours.losses, plain.losses)).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=ROOT / "LICENSE")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=5e-4, help="Adam's, per step")
    parser.add_argument("--json", type=Path, help="write the losses and times here")
    args = parser.parse_args()
    text = args.text.read_bytes()
    ours, plain = train(text, args.steps, rate=args.rate)
    for i in range(0, args.steps, max(1, args.steps // 10)):
        print(f"step {i:4d}   loss {ours.losses[i]:.5f}   in jnp {plain.losses[i]:.5f}")
    report = {"steps": args.steps, "largest_difference": largest_difference(ours, plain), "load": os.getloadavg()[0]}
    (tokens,) = batches(text, 1, BATCH, LENGTH)
    for name, run in (("jtile", ours), ("jnp", plain)):
        first, step, mib = run.seconds[0], float(np.median(run.seconds[1:])) * 1e3, run.temporary_mib(tokens)
        losses = [round(loss, 6) for loss in run.losses]
        report[name] = {"first_step_s": first, "step_ms": step, "temporary_mib": mib, "losses": losses}
        print(f"{name:5s}   first step {first:.1f} s   step {step:.0f} ms   temporaries {mib:.0f} MiB")
    print(f"last loss {ours.losses[-1]:.4f}   largest difference of a step {report['largest_difference']:.1e}")
    if args.json:
        args.json.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
