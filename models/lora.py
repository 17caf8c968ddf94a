"""LoRA: fine-tuning by low-rank updates of frozen weights (Hu et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jtile._errors import ModelError
from jtile.ops import QuantizedTensor

from . import layers
from .decoder import Decoder

TARGETS = ("qkv", "output", "gate", "up", "down")


class LoRA(nnx.Module):
    """A frozen weight W [out, in] and its update: together W + scale B A, with A [rank, in] and B [out, rank].

    Stands where the weight's `nnx.Param` stood. `nnx.LoRAParam` is the type of the trained parts (a, b), and so the
    filter for `nnx.DiffState` and `nnx.Optimizer`.
    """

    def __init__(self, base: nnx.Param, a: jax.Array, b: jax.Array, scale: float):
        self.base, self.scale = base, scale
        self.a, self.b = nnx.LoRAParam(a), nnx.LoRAParam(b)

    def get_value(self) -> layers.Adapted:
        return layers.Adapted(self.base.get_value(), self.a.get_value(), self.b.get_value(), self.scale)


def add_lora(
    model: Decoder,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Sequence[str] = ("qkv", "output"),
    key: jax.Array | None = None,
) -> Decoder:
    """Gives `targets` of every block an update of rank `rank`, scaled by alpha / rank; until it is trained, the update
    is zero.

    Weights may be quantised: they stay so, and gradients flow through them to the layers before.

    Args:
      model: the model, which is changed in place.
      targets: some of "qkv" (query, key and value are one matrix), "output", "gate", "up", "down".
      key: the key of the random A; by default `jax.random.key(0)`.
    Returns:
      The model.
    Raises:
      ModelError: a target is unknown, the rank is below 1, or a block lacks the weight or has an update of it already.
    """
    unknown = [name for name in targets if name not in TARGETS]
    if unknown or not targets:
        raise ModelError(f"LoRA takes targets of {', '.join(TARGETS)}; got {', '.join(unknown) or 'none'}")
    if rank < 1:
        raise ModelError(f"LoRA needs a rank of at least 1, got {rank}")
    places = [
        (place_of(model, i, name, free=True), name) for i in range(len(model.blocks)) for name in dict.fromkeys(targets)
    ]
    key = jax.random.key(0) if key is None else key
    for k, (holder, name) in zip(jax.random.split(key, len(places)), places, strict=True):
        base = getattr(holder, name)
        out, inner = shape_of(base.get_value())
        # With B = 0 the model starts unchanged. A has the variance 1 / in, so that A x is as large as x.
        a = jax.random.normal(k, (rank, inner), jnp.float32) * inner**-0.5
        setattr(holder, name, LoRA(base, a, jnp.zeros((out, rank), jnp.float32), alpha / rank))
    return model


def place_of(model: Decoder, block: int, target: str, free: bool = False) -> nnx.Module:
    """The module of a block that has the weight `target`; `free`: refuse a weight that has an update already.

    Raises:
      ModelError: the block has no such weight of its own, or it has an update.
    """
    here = model.blocks[block]
    for holder in (here.attention, here.mlp):
        if hasattr(holder, target):
            if free and isinstance(getattr(holder, target), LoRA):
                raise ModelError(
                    f"the weights {target!r} have a LoRA update already; load the model anew, or train that one"
                )
            return holder
    raise ModelError(
        f"block {block} has no weights {target!r} of its own ({type(here.attention).__name__} and "
        f"{type(here.mlp).__name__}); leave them out of the targets"
    )


def shape_of(weight: layers.Weight) -> tuple[int, int]:
    """[out, in] of a weight.

    Raises:
      ModelError: it is no matrix.
    """
    if isinstance(weight, tuple):
        shapes = [shape_of(part) for part in weight]
        return sum(out for out, _ in shapes), shapes[0][1]
    if isinstance(weight, (jax.Array, jax.ShapeDtypeStruct, QuantizedTensor)):
        return weight.shape[0], weight.shape[1]
    raise ModelError(f"LoRA updates matrices, got {type(weight).__name__}")
