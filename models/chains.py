"""Steps of one row whose products between two attentions are one kernel; see `jtile.ops.chained_products`.

`enter` makes the projection of the first block, and each chain that of the block behind it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jtile.ops import QuantizedTensor
from jtile.ops import chained_products as products

from . import cache as kv


@dataclasses.dataclass(frozen=True)
class Layer:
    """What a block gives to `steps`.

    Attributes:
      mix: attention without its last product, of `decoder.Attention`.
      rope: its rope. projection: the weight of queries, keys and values. norms: the weights of the norms in front of
        the projection and of the MLP.
      output, gate, up, down: weights.
    """

    mix: Any
    rope: Any
    projection: Any
    norms: tuple[jax.Array, jax.Array]
    output: Any
    gate: Any
    up: Any
    down: Any
    activation: str
    eps: float

    def operands(self, after: Layer | None) -> tuple[tuple, tuple]:
        """The norms and weights of the chain behind this block's attention; after: the block behind it."""
        weights = (self.output,), (self.gate, self.up), (self.down,)
        if after is None:
            return (self.norms[1],), weights
        return (self.norms[1], after.norms[0]), (*weights, (after.projection,))


def layers_of(blocks: Sequence[Any], x) -> list[Layer] | None:
    """The blocks as `steps` takes them, if one kernel computes the chain behind each; None where it does not.

    Args:
      blocks: of a decoder; those that may be taken have a method `layer`, which gives a `Layer` or None.
      x: [rows, hidden] in front of them.
    """
    layers = [block.layer() if hasattr(block, "layer") else None for block in blocks]
    if any(layer is None for layer in layers):
        return None
    for layer, after in zip(layers, [*layers[1:], None], strict=True):
        norms, weights = layer.operands(after)
        if not all(isinstance(w, QuantizedTensor) for of_product in weights for w in of_product):
            return None
        mixed = jax.ShapeDtypeStruct((x.shape[0], weights[0][0].shape[1]), x.dtype)
        if not products.takes(mixed, x, norms, weights, eps=layer.eps, activation=layer.activation):
            return None
    return layers


def steps(layers: list[Layer], x, projected, angles, cache: kv.KVCache):
    """The next token of a row through all blocks.

    Args:
      layers: what `layers_of` gave.
      x, projected: [1, hidden] in front of the first block, and its projection [1, ...].
      angles: cos and sin for each rope.
    Returns:
      x and delta behind the last block, [1, hidden] each, and the entries of the cache.
    """
    entries = []
    for layer, after, entry in zip(layers, [*layers[1:], None], cache.entries, strict=True):
        (mixed, _), slots = layer.mix(projected, *angles[layer.rope], cache.layer(entry))
        entries.append(slots.entry)
        norms, weights = layer.operands(after)
        options = {"eps": layer.eps, "activation": layer.activation}
        projected, x = products.chained_products(mixed, x, norms, weights, **options)
    return x, projected, entries
