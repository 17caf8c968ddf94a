"""Fine-tunes SmolLM2-135M on one sentence by LoRA, and lets it go on from the sentence's first words.

    python docs/examples/lora.py --steps 12

The quantised weights stay as they are: the adapters' gradients pass through them.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jtile.models
from jtile.models import LanguageModel
from jtile.models.decoder import Decoder
from jtile.models.lora import add_lora


@nnx.jit
def train_step(model: Decoder, optimizer: nnx.Optimizer, ids) -> jax.Array:
    loss, gradient = nnx.value_and_grad(Decoder.loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, ids)
    optimizer.update(model, gradient)
    return loss


def tune(lm: LanguageModel, sentence: str, steps: int, rate: float = 1e-3) -> tuple[LanguageModel, list[float]]:
    """The model after so many steps on one sentence, and the loss before each of them, in nats a token."""
    model = add_lora(lm.model, rank=8, alpha=16.0, targets=("qkv", "output"))
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.LoRAParam)
    ids = jnp.asarray([lm.tokenizer.encode(sentence)], jnp.int32)
    losses = [float(train_step(model, optimizer, ids)) for _ in range(steps)]
    return LanguageModel(model, lm.tokenizer, lm.eos_ids), losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sentence", default="Tiles of arrays are what a kernel is made of.")
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    lm, losses = tune(jtile.models.load(), args.sentence, args.steps)
    for step, loss in enumerate(losses):
        print(f"step {step}   loss {loss:.4f}")
    start = lm.tokenizer.encode(args.sentence)[:4]
    print(lm.tokenizer.decode([*start, *lm.generate(start, max_new_tokens=16).tolist()]))


if __name__ == "__main__":
    main()
