"""New tokens against a cache of latent vectors (DeepSeek's MLA): products and the cache's bytes are both the work."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.data import normal
from benchmarks.gpu.case import Case
from jtile import ops


class Size(NamedTuple):
    """One shape: new tokens of `batch` rows, each against a cache of `slots`."""

    batch: int
    slots: int
    tokens: int = 1
    ragged: bool = False
    paged: bool = False

    @property
    def note(self) -> str:
        return f", {self.tokens} tokens" * (self.tokens > 1) + ", ragged" * self.ragged + ", paged" * self.paged

    @property
    def lengths(self) -> np.ndarray:
        """The number of slots of each row that are in use."""
        rng = np.random.default_rng(0)
        full = np.full(self.batch, self.slots)
        return rng.integers(self.tokens, self.slots + 1, self.batch) if self.ragged else full


# TileLang's example gives 434 TFLOP/s for the first on an H200
SIZES = (
    Size(132, 8192), Size(64, 4096), Size(64, 32768), Size(64, 1024), Size(16, 8192), Size(132, 8192, tokens=2),
    Size(128, 8192, ragged=True), Size(132, 8192, paged=True),
)  # fmt: skip
TINY = (Size(2, 96, tokens=2, ragged=True), Size(2, 128, paged=True))
PAGE = 64
HEADS, RANK, ROPE = 128, 512, 64
SCALE = (128 + 64) ** -0.5  # from the size of heads before the projections are absorbed


def cases(tiny: bool = False) -> Iterator[Case]:
    for size in TINY if tiny else SIZES:
        heads = 4 if tiny else HEADS
        keys, width, rows = int(size.lengths.sum()), RANK + ROPE, size.batch * size.tokens * heads
        yield Case(
            workload="mla_decode", config=f"B{size.batch} H{heads} S{size.slots} {RANK}+{ROPE}{size.note}",
            dtype="bfloat16", make=functools.partial(_make, size=size, heads=heads), ours=_ours, peers={"xla": _xla},
            reference=_reference, bytes=2 * (keys * width + rows * (width + RANK)),
            flops=2 * keys * size.tokens * heads * (width + RANK),
        )  # fmt: skip


def _make(seed, size: Size, heads: int):
    q = normal(2 * seed, size.batch, size.tokens, heads, RANK + ROPE, dtype="bfloat16")
    count = size.batch * size.slots // PAGE
    shape = (count, PAGE) if size.paged else (size.batch, size.slots)
    arrays = q, normal(2 * seed + 1, *shape, RANK + ROPE, dtype="bfloat16"), jnp.asarray(size.lengths, jnp.int32)
    if not size.paged:
        return arrays
    pages = jax.random.permutation(jax.random.key(seed), count).astype(jnp.int32)
    return *arrays, pages.reshape(size.batch, -1)


def _ours(q, cache, lengths, pages=None):
    return ops.mla_decode(q, cache, lengths, pages=pages, scale=SCALE)


def _rows(cache, pages):
    """The cache row by row, gathered from its pages."""
    return cache if pages is None else cache[pages].reshape(pages.shape[0], -1, cache.shape[2])


def _seen(q, cache, length):
    """Which slots the tokens of one row see, bool [tokens, slots]."""
    last = length - q.shape[0] + jnp.arange(q.shape[0])[:, None]
    return jnp.arange(cache.shape[0])[None, :] <= last


def _one(q, cache, length, **precision):
    s = jnp.einsum("thd,sd->hts", q, cache, preferred_element_type=jnp.float32, **precision) * SCALE
    p = jax.nn.softmax(jnp.where(_seen(q, cache, length)[None], s, -jnp.inf), -1).astype(q.dtype)
    return jnp.einsum("hts,sr->thr", p, cache[:, :RANK], preferred_element_type=jnp.float32, **precision)


def _xla(q, cache, lengths, pages=None):
    cache = _rows(cache, pages)
    if jax.default_backend() == "cpu":  # it has no batched products of bfloat16 that give float32
        return jax.vmap(_one)(q.astype(jnp.float32), cache.astype(jnp.float32), lengths).astype(q.dtype)
    return jax.vmap(_one)(q, cache, lengths).astype(q.dtype)


def _reference(q, cache, lengths, pages=None):
    cache = _rows(cache, pages)
    wide = lambda x: x.astype(jnp.float32)
    return lax.map(lambda row: _one(wide(row[0]), wide(row[1]), row[2], precision="highest"), (q, cache, lengths))
