"""The decoder that somebody writes in `jnp` who wants it fast: bfloat16, cuDNN's attention, all steps in one loop.

A peer of `jtile.models`, on the same arrays: their query, key and value weights in one matrix help it, too. Llama only.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.gpu.models import llama
from jtile.models import LanguageModel
from jtile.ops import QuantizedTensor

Attention = Literal["xla", "cudnn"] | None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a Llama; `attention`: the implementation that `jax.nn.dot_product_attention` uses."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    attention: Attention


def weights_of(lm: LanguageModel) -> dict[str, Any]:
    """The arrays of a model, as a tree."""
    model: Any = lm.model
    blocks = [
        dict(
            before=b.attention_norm, qkv=b.attention.qkv, output=b.attention.output,
            behind=b.mlp_norm, gate=b.mlp.gate, up=b.mlp.up, down=b.mlp.down,
        )
        for b in model.blocks
    ]  # fmt: skip
    head = model.embedding if model.output is None else model.output
    tree = dict(embedding=model.embedding, norm=model.norm, head=head, blocks=blocks)
    arrays = jax.tree.map(lambda p: p.get_value(), tree, is_leaf=lambda p: hasattr(p, "get_value"))
    return arrays | {"frequencies": jnp.asarray(llama(lm).attention.rope.frequencies())}


def sizes_of(lm: LanguageModel, attention: Attention) -> Sizes:
    c = llama(lm).attention
    return Sizes(c.heads, c.kv_heads, c.head_dim, lm.config.norm_eps, attention)


def norm(x, weight, eps: float):
    """The RMS norm along the last axis; weight None: ones."""
    t = x.astype(jnp.float32)
    unit = t * lax.rsqrt((t * t).mean(-1, keepdims=True) + eps)
    return (unit if weight is None else unit * weight.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def _embedded(table, ids):
    """The embeddings [rows, t, hidden] of ids [rows, t]; rows of a quantised table become float32."""
    if isinstance(table, QuantizedTensor):
        return table.rows(ids.reshape(-1)).dequantize().reshape(*ids.shape, -1)
    return jnp.take(table, ids, axis=0)


def _linear(x, weight):
    return jnp.einsum("...i,oi->...o", x, weight)


def rotated(x, cos, sin):
    """x [..., heads, d] rotated by angles, whose cos and sin are [..., 1, d / 2]."""
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1).astype(x.dtype)


def _forward(w, s: Sizes, ids, caches, first, lengths):
    """(the hidden states [rows, t, hidden] of ids [rows, t], whose positions begin at `first`; the caches with them).
    lengths: those of all rows, to attend to the caches; None for a prompt, which attends to itself."""
    x, out = _embedded(w["embedding"], ids), []
    for block, cache in zip(w["blocks"], caches, strict=True):
        x, cache = _block(block, w["frequencies"], s, x, cache, first, lengths)
        out.append(cache)
    return x, out


def _block(block, frequencies, s: Sizes, x, cache, first, lengths):
    """One block of `_forward`."""
    keys, values = cache
    angles = (first + jnp.arange(x.shape[1], dtype=jnp.int32)).astype(jnp.float32)[:, None] * frequencies[None]
    cos, sin = (f(angles)[None, :, None] for f in (jnp.cos, jnp.sin))
    attend = functools.partial(jax.nn.dot_product_attention, implementation=s.attention)
    qkv = _linear(norm(x, block["before"], s.eps), block["qkv"]).reshape(*x.shape[:2], -1, s.head_dim)
    q, k, v = jnp.split(qkv, (s.heads, s.heads + s.kv_heads), axis=2)
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    place = (jnp.int32(0), first, jnp.int32(0), jnp.int32(0))
    keys, values = (lax.dynamic_update_slice(cache, new, place) for cache, new in ((keys, k), (values, v)))
    mixed = attend(q, k, v, is_causal=True) if lengths is None else (
        attend(q, keys, values, key_value_seq_lengths=lengths)
    )  # fmt: skip
    x = x + _linear(mixed.reshape(*x.shape[:2], -1), block["output"])
    y = norm(x, block["behind"], s.eps)
    x = x + _linear(jax.nn.silu(_linear(y, block["gate"])) * _linear(y, block["up"]), block["down"])
    return x, (keys, values)


def _logits(w, s: Sizes, x):
    """float32 logits of hidden states [..., hidden]."""
    normed = norm(x, w["norm"], s.eps)
    return jnp.einsum("...i,oi->...o", normed, w["head"], preferred_element_type=jnp.float32)


def _no_caches(w, s: Sizes, rows: int, slots: int):
    return [_no_cache(s, rows, slots, w["head"].dtype) for _ in w["blocks"]]


def _no_cache(s: Sizes, rows: int, slots: int, dtype):
    return tuple(jnp.zeros((rows, slots, s.kv_heads, s.head_dim), dtype) for _ in "kv")


@functools.partial(jax.jit, static_argnames="s")
def logits(w, ids, *, s: Sizes):
    """The logits, float32 [rows, t, vocab], of ids [rows, t]."""
    x, _ = _forward(w, s, ids, _no_caches(w, s, *ids.shape), jnp.int32(0), None)
    return _logits(w, s, x)


def exact_logits(w, ids, *, s: Sizes):
    """`logits` of the same weights, computed in float32 throughout: what both decoders' errors are measured against.

    The weights of one block at a time are float32, so that the largest model that fits has room for it."""
    with jax.default_matmul_precision("highest"):
        x = _embedded(w["embedding"], ids).astype(jnp.float32)
        for block in w["blocks"]:
            x = _exact_block(block, w["frequencies"], x, s)
        return _exact_head({name: w[name] for name in ("norm", "head")}, x, s=s)


def _wide(tree):
    return jax.tree.map(lambda a: a.astype(jnp.float32), dense(tree, jnp.float32))


def dense(tree, dtype):
    """The tree with quantised weights as arrays of a dtype."""
    of = lambda a: a.dequantize(dtype) if isinstance(a, QuantizedTensor) else a
    return jax.tree.map(of, tree, is_leaf=lambda a: isinstance(a, QuantizedTensor))


@functools.partial(jax.jit, static_argnames="s")
def _exact_block(block, frequencies, x, s: Sizes):
    cache = _no_cache(s, x.shape[0], x.shape[1], x.dtype)
    return _block(_wide(block), frequencies, s, x, cache, jnp.int32(0), None)[0]


@functools.partial(jax.jit, static_argnames="s")
def _exact_head(w, x, *, s: Sizes):
    return _logits(_wide(w), s, x)


@functools.partial(jax.jit, static_argnames=("s", "slots"))
def prefill(w, ids, *, s: Sizes, slots: int):
    """(the next tokens [rows, 1] of ids [rows, t], caches of `slots` slots)."""
    x, caches = _forward(w, s, ids, _no_caches(w, s, ids.shape[0], slots), jnp.int32(0), None)
    return jnp.argmax(_logits(w, s, x[:, -1:]), -1).astype(jnp.int32), caches


@functools.partial(jax.jit, static_argnames=("s", "length", "count"), donate_argnames="caches")
def steps(w, tokens, caches, *, s: Sizes, length: int, count: int):
    """Makes `count` greedy tokens behind caches that hold `length`; returns (the last tokens [rows, 1], the caches)."""

    def one(i, carry):
        tokens, caches = carry
        lengths = jnp.broadcast_to(length + 1 + i, tokens.shape[:1])
        x, caches = _forward(w, s, tokens, caches, length + i, lengths)
        return jnp.argmax(_logits(w, s, x), -1).astype(jnp.int32), caches

    return lax.fori_loop(0, count, one, (tokens, caches))
