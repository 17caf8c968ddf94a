"""Gated DeltaNet: linear attention whose state fades, and is corrected by the delta rule (Yang, Kautz and Hatamizadeh
2025), behind a short convolution of queries, keys and values.

A layer keeps the state and the last inputs of the convolution, whose size does not depend on the number of tokens.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jtile import ops

from . import layers
from .cache import Slots, State
from .config import WeightSource
from .layers import as_float32, fuse
from .rope import Rope

NORM_EPS = 1e-6  # added to squared lengths as queries and keys are brought to length 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """Sizes of a gated DeltaNet: `heads` of queries and keys of `key` features, each of which serves value_heads /
    heads heads of values of `value` features; `width`: that of the convolution, in positions; `norm_eps`: the epsilon
    of the norm of the output."""

    heads: int
    value_heads: int
    key: int
    value: int
    width: int
    norm_eps: float

    @property
    def channels(self) -> int:
        """The channels of the convolution: all features of queries, keys and values."""
        return 2 * self.heads * self.key + self.value_heads * self.value

    def part(self, mixed, gates: bool):
        """The rows of gates (`gates`), or else those of queries, keys and values, each of all heads, out of the
        projection [channels + values, hidden]. Its rows stand by heads, or the projection is a tuple of these two parts
        already."""
        if isinstance(mixed, tuple):
            return mixed[gates]
        values = self.value_heads * self.value
        sizes = self.key, self.key, values // self.heads, values // self.heads
        parts = by_parts(self.channels + values, self.heads, sizes)
        return layers.rows(mixed, parts[3] if gates else np.concatenate(parts[:3]))


class GatedDeltaNet(nnx.Module):
    """A layer that is used as `decoder.Attention` is; its entry of the cache is a `cache.State`."""

    window = None
    recurrent = True

    def __init__(self, config: DeltaConfig, rope: Rope, hidden: int, weight: WeightSource, prefix: str):
        """`rope`: that of the model's attention; this layer uses no positions. Beside the tensors of a checkpoint,
        `weight` gives `in_proj_qkv` and `in_proj_z`, see `DeltaConfig.part`."""
        self.config, self.rope = config, rope
        values, heads = config.value_heads * config.value, config.value_heads
        mixed = weight(f"{prefix}in_proj_qkv.weight", (config.channels, hidden))
        gates = weight(f"{prefix}in_proj_z.weight", (values, hidden))
        rates = weight(f"{prefix}in_proj_ba.weight", (2 * heads, hidden))
        order = np.concatenate(by_parts(2 * heads, config.heads, (heads // config.heads,) * 2))
        self.into = nnx.Param(fuse([mixed, gates, layers.rows(rates, order)]))
        taps = as_float32(weight(f"{prefix}conv1d.weight", (config.channels, 1, config.width)))
        self.taps = nnx.Param(taps[:, 0].T)
        self.decay = nnx.Param(jnp.exp(as_float32(weight(f"{prefix}A_log", (heads,)))))
        self.bias = nnx.Param(as_float32(weight(f"{prefix}dt_bias", (heads,))))
        self.norm = nnx.Param(as_float32(weight(f"{prefix}norm.weight", (config.value,))))
        self.output = nnx.Param(weight(f"{prefix}out_proj.weight", (hidden, values)))

    def enter(self, x, delta, norm, eps: float):
        """(x + delta, the projection of its norm [..., channels + value_heads (value + 2)])."""
        return layers.add_norm_linear(x, delta, norm, eps, self.into.get_value())

    def prefill(self, projected, cos, sin, lengths=None):
        """Runs prompts from their projection [batch, length, ...]; returns (output [batch, length, hidden], the `State`
        behind the first `lengths` tokens of each row, int [batch], or behind all)."""
        batch, t, _ = projected.shape
        inputs = jnp.pad(projected[..., : self.config.channels], ((0, 0), (self.config.width - 1, 0), (0, 0)))
        real = None if lengths is None else jnp.arange(t, dtype=lengths.dtype)[None, :] < lengths[:, None]
        y, last = self._mixed(projected, inputs, None, real)
        end = jnp.full((batch,), t, jnp.int32) if lengths is None else lengths
        # the inputs at the last width - 1 positions; in front of the first one there are zeros
        places = end[:, None] + jnp.arange(self.config.width - 1, dtype=end.dtype)[None, :]
        return y, State(jnp.take_along_axis(inputs, places[:, :, None], axis=1), last)

    def step(self, projected, cos, sin, slots: Slots):
        """Runs the next t tokens of each row from their projection [batch * t, ...]; returns (output [batch * t,
        hidden], the slots with the state behind these tokens)."""
        held = slots.entry
        assert isinstance(held, State)
        tokens = projected.reshape(held.state.shape[0], -1, projected.shape[-1])
        inputs = jnp.concatenate([held.inputs, tokens[..., : self.config.channels].astype(held.inputs.dtype)], axis=1)
        y, last = self._mixed(tokens, inputs, held.state)
        state = State(inputs[:, inputs.shape[1] - held.inputs.shape[1] :], last)
        return y.reshape(projected.shape[0], -1), dataclasses.replace(slots, entry=state)

    def _mixed(self, projected, inputs, state, real=None):
        """(output, state behind the tokens) for the projection [batch, t, ...] and the inputs of the convolution
        [batch, width - 1 + t, channels]; tokens that are not `real`, bool [batch, t], leave the state unchanged."""
        c, (batch, t, _) = self.config, projected.shape
        values = c.value_heads * c.value
        z, b, a = jnp.split(projected[..., c.channels :], [values, values + c.value_heads], axis=-1)
        q, k, v = self._convolved(inputs.astype(projected.dtype), t)
        b, a = b.astype(jnp.float32), a.astype(jnp.float32)
        decay = -self.decay.get_value()[None, None] * jax.nn.softplus(a + self.bias.get_value()[None, None])
        beta = jax.nn.sigmoid(b)
        if real is not None:
            decay, beta = (jnp.where(real[..., None], x, 0.0) for x in (decay, beta))
        y, last = ops.linear_attention(q, k, v, log_decay=decay, beta=beta, state=state, return_state=True)
        normed = layers.rms_norm(y, self.norm.get_value(), c.norm_eps).astype(jnp.float32)
        gated = normed * jax.nn.silu(z.reshape(normed.shape).astype(jnp.float32))
        return layers.linear(gated.astype(projected.dtype).reshape(batch, t, -1), self.output.get_value()), last

    def _convolved(self, inputs, t: int):
        """The convolved inputs as q, k [batch, t, heads, key], vectors of length 1, and v [batch, t, value_heads,
        value]."""
        c, taps = self.config, self.taps.get_value()
        wide = inputs.astype(jnp.float32)
        y = sum(wide[:, i : i + t] * taps[i][None, None] for i in range(c.width))
        y = jax.nn.silu(y)
        q, k, v = jnp.split(y, [c.heads * c.key, 2 * c.heads * c.key], axis=-1)
        q, k = (_unit(x.reshape(*x.shape[:2], c.heads, c.key)) for x in (q, k))
        v = v.reshape(*v.shape[:2], c.value_heads, c.value)
        return tuple(x.astype(inputs.dtype) for x in (q, k, v))


def _unit(x):
    return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + NORM_EPS)


def by_parts(rows: int, heads: int, sizes: tuple[int, ...]) -> list[np.ndarray]:
    """The indices of each part's rows in a matrix of `rows` rows; they stand by heads, and each head has `sizes[i]`
    rows of part i."""
    of_head = np.arange(rows).reshape(heads, -1)
    return [part.reshape(-1) for part in np.split(of_head, np.cumsum(sizes)[:-1], axis=1)]
