"""Layers of a decoder that are one kernel each, for one new token of one row: see `jtile.ops.hopper_layer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jtile.ops import QuantizedTensor, hopper_layer
from jtile.ops.operands import Weight

from . import cache as kv

if TYPE_CHECKING:
    from .decoder import Block

ON = False  # whether steps take such kernels where they fit


def step(block: Block, x, delta, cos, sin, slots: kv.Slots) -> Any:
    """What `Block.step` gives, by one kernel; None where none fits."""
    weights = _weights(block) if ON else None
    entry = slots.entry
    if weights is None or not isinstance(entry, kv.Entry) or not _plain(block, slots):
        return None
    if not all(isinstance(n, int) for n in (*x.shape, *entry.arrays[0].shape)):
        return None
    kinds = {w.kind if isinstance(w, QuantizedTensor) else w.dtype.name for w in weights}
    if len(kinds) != 1 or not (delta is None or isinstance(delta, jax.Array)):
        return None
    (kind,), stored = kinds, tuple(map(_stored, weights))
    delta = jnp.zeros_like(x) if delta is None else delta
    norms = block.attention_norm.get_value(), block.mlp_norm.get_value()
    keys, values = entry.arrays
    scale = block.attention.config.scale or keys.shape[3] ** -0.5
    if kind not in ("q4_0", "q4_1", "bfloat16") or hopper_layer.misfit(
        x, delta, norms, kind, stored, slots.lengths, keys, scale
    ):
        return None
    x, delta, keys, values = hopper_layer.layer(
        x, delta, norms, kind, stored, cos, sin, slots.lengths.astype(jnp.int32), keys, values, eps=block.eps,
        scale=scale, activation=block.mlp.activation,
    )  # fmt: skip
    return (x, delta), slots._with((keys, values))


def _weights(block: Block) -> list | None:
    """The five matrices of a block that is made of plain attention and a gated MLP."""
    attention, mlp = block.attention, block.mlp
    names = ("qkv", "output"), ("gate", "up", "down")
    if not all(hasattr(m, name) for m, of in zip((attention, mlp), names) for name in of):
        return None
    found = [getattr(m, name).get_value() for m, of in zip((attention, mlp), names) for name in of]
    return found if all(isinstance(w, QuantizedTensor) or hasattr(w, "dtype") for w in found) else None


def _plain(block: Block, slots: kv.Slots) -> bool:
    a, entry = block.attention, slots.entry
    c = a.config
    extras = a.bias, a.output_bias, a.sinks, a.q_norm, a.window, c.softcap, c.rope.tempered
    alone = slots.splits is None and slots.tiles is None and slots.context is None and slots.table is None
    whole = not entry.scales and not entry.ring and a.over.tensor is None and block.mlp.over.tensor is None
    return alone and whole and not c.gated and all(x is None for x in extras)


def _stored(w) -> Weight:
    return Weight(w.codes, w.scale, w.minimum) if isinstance(w, QuantizedTensor) else Weight(w)
