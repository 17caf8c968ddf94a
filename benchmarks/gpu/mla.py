"""New tokens against a cache of latent vectors (DeepSeek's MLA): products and the cache's bytes are both the work."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.data import normal
from benchmarks.gpu.case import Case
from jtile import ops

# batch, slots, new tokens, ragged; TileLang's example gives 434 TFLOP/s for the first on an H200
SIZES = (
    (132, 8192, 1, False), (64, 4096, 1, False), (64, 32768, 1, False), (64, 1024, 1, False), (16, 8192, 1, False),
    (132, 8192, 2, False), (128, 8192, 1, True),
)  # fmt: skip
HEADS, RANK, ROPE = 128, 512, 64
SCALE = (128 + 64) ** -0.5  # by the heads before the projections are absorbed


def cases(tiny: bool = False) -> Iterator[Case]:
    for batch, slots, tokens, ragged in ((2, 96, 2, True),) if tiny else SIZES:
        heads = 4 if tiny else HEADS
        lengths = _lengths(batch, slots, tokens, ragged)
        keys, width = int(lengths.sum()), RANK + ROPE
        more = f", {tokens} tokens" * (tokens > 1) + ", ragged" * ragged
        yield Case(
            workload="mla_decode", config=f"B{batch} H{heads} S{slots} {RANK}+{ROPE}{more}", dtype="bfloat16",
            make=functools.partial(_make, heads=heads, tokens=tokens, slots=slots, lengths=lengths),
            ours=functools.partial(ops.mla_decode, scale=SCALE), peers={"xla": _xla}, reference=_reference,
            bytes=2 * (keys * width + batch * tokens * heads * (width + RANK)),
            flops=2 * keys * tokens * heads * (width + RANK),
        )  # fmt: skip


def _lengths(batch: int, slots: int, tokens: int, ragged: bool) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(tokens, slots + 1, batch) if ragged else np.full(batch, slots)


def _make(seed, heads: int, tokens: int, slots: int, lengths: np.ndarray):
    q = normal(2 * seed, len(lengths), tokens, heads, RANK + ROPE, dtype="bfloat16")
    return q, normal(2 * seed + 1, len(lengths), slots, RANK + ROPE, dtype="bfloat16"), jnp.asarray(lengths, jnp.int32)


def _seen(q, cache, length):
    """bool [tokens, slots] of one row."""
    last = length - q.shape[0] + jnp.arange(q.shape[0])[:, None]
    return jnp.arange(cache.shape[0])[None, :] <= last


def _one(q, cache, length, **precision):
    s = jnp.einsum("thd,sd->hts", q, cache, preferred_element_type=jnp.float32, **precision) * SCALE
    p = jax.nn.softmax(jnp.where(_seen(q, cache, length)[None], s, -jnp.inf), -1).astype(q.dtype)
    return jnp.einsum("hts,sr->thr", p, cache[:, :RANK], preferred_element_type=jnp.float32, **precision)


def _xla(q, cache, lengths):
    if jax.default_backend() == "cpu":  # which has no batched products of bfloat16 that give float32
        return jax.vmap(_one)(q.astype(jnp.float32), cache.astype(jnp.float32), lengths).astype(q.dtype)
    return jax.vmap(_one)(q, cache, lengths).astype(q.dtype)


def _reference(q, cache, lengths):
    wide = lambda x: x.astype(jnp.float32)
    return lax.map(lambda row: _one(wide(row[0]), wide(row[1]), row[2], precision="highest"), (q, cache, lengths))
