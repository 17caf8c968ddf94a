"""The layers of `jtile.models` in jnp, with dequantised weights: `without_kernels` puts them in the place of those."""

import types

import jax
import jax.numpy as jnp

from jtile.models import decoder, experts, few_tokens, gemma, layers, parallel
from jtile.ops import QuantizedTensor


def dense(weight):
    """float32 [out, in] of any weight."""
    if isinstance(weight, layers.Adapted):
        return dense(weight.base) + weight.scale * weight.b @ weight.a
    if isinstance(weight, tuple):
        return jnp.concatenate([dense(part) for part in weight])
    return (
        jax.lax.stop_gradient(weight.dequantize())
        if isinstance(weight, QuantizedTensor)
        else weight.astype(jnp.float32)
    )


def rms_norm(x, weight, eps):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight.reshape((1,) * (x.ndim - 1) + (-1,))


def add_norm(x, delta, weight, eps):
    x = x if delta is None else x + delta
    return x, rms_norm(x, weight, eps)


def linear(x, weight, dtype=None):
    return jnp.matmul(x, dense(weight).T, precision="highest")


def add_norm_linear(x, delta, norm, eps, weight, dtype=None, parts=False):
    x, normed = add_norm(x, delta, norm, eps)
    return x, linear(normed, weight)


def split_heads(qkv, cos, sin, heads, kv_heads, norms=None, slots=None):
    qkv = qkv.reshape(*qkv.shape[:2], heads + 2 * kv_heads, -1)
    if norms is not None:
        q, k = (
            rms_norm(x, w, norms.eps) for x, w in ((qkv[:, :, :heads], norms.q), (qkv[:, :, heads:-kv_heads], norms.k))
        )
        qkv = jnp.concatenate([q, k, qkv[:, :, -kv_heads:]], axis=2)
    low, high = jnp.split(qkv[:, :, : heads + kv_heads], 2, axis=-1)
    cos, sin = cos[None, :, None], sin[None, :, None]
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)
    more = 0 if slots is None else slots - qkv.shape[1]
    longer = lambda x: jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)))
    return turned[:, :, :heads], longer(turned[:, :, heads:]), longer(qkv[:, :, heads + kv_heads :])


def with_bias(y, bias):
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))


def attention(q, k, v, window=None, scale=None, softcap=None, sinks=None, precision=None):
    assert precision is None  # the highest one
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    seen = (seen if window is None else seen & ~jnp.tril(seen, -window))[None, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    p = jax.nn.softmax(scores)[..., : k.shape[1]]
    return jnp.einsum("bhts,bshd->bthd", p, v, precision="highest")


def gated_mlp(x, gate, up, down, activation="silu", last=linear):
    return last(layers.ACTIVATIONS[activation](linear(x, gate)) * linear(x, up), down)


def add_norm_gated_mlp(x, delta, norm, eps, *weights):
    x, normed = add_norm(x, delta, norm, eps)
    return x, gated_mlp(normed, *weights)


def mixture(x, chosen, weights, gate_up, down):
    """Every token through every expert."""
    gate, up = jnp.split(jnp.einsum("th,efh->tef", x, gate_up, precision="highest"), 2, axis=-1)
    y = jnp.einsum("tef,ehf->teh", jax.nn.silu(gate) * up, down, precision="highest")
    share = (jax.nn.one_hot(chosen, len(down)) * weights[:, :, None]).sum(1)
    return jnp.einsum("te,teh->th", share, y, precision="highest")


LAYERS = types.SimpleNamespace(
    rms_norm=rms_norm,
    add_norm=add_norm,
    linear=linear,
    linear_or_unmade=linear,
    with_bias=with_bias,
    add_norm_linear=add_norm_linear,
    HeadNorms=layers.HeadNorms,
    rope_angles=layers.rope_angles,
    whole=layers.whole,
    split_heads=split_heads,
    attention=attention,
    precision=lambda weight: None,
    gated_mlp=gated_mlp,
    add_norm_gated_mlp=add_norm_gated_mlp,
)


def without_kernels(monkeypatch) -> None:
    """Decoders (of grouped-query attention) compute with these from now on."""
    for module in (decoder, few_tokens, gemma):
        monkeypatch.setattr(module, "layers", LAYERS)
    monkeypatch.setattr(experts, "mixture", mixture)
    monkeypatch.setattr(parallel.Axes, "embedding", lambda self, table, ids, dtype: dense(table)[ids])


def mean_loss(model, ids):
    """`Decoder.loss` in jnp, for a model that computes with `LAYERS`."""
    logits = jax.nn.log_softmax(model(ids[:, :-1]))
    return -jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1).mean()
