"""One new token against a key-value cache, grouped queries: the cache's bytes are the work."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.data import normal
from benchmarks.gpu.case import Case, Torch
from jtile import ops


class Size(NamedTuple):
    """One shape: a new token of each of `batch` rows, against a cache of `slots`."""

    batch: int
    slots: int
    ragged: bool = False
    paged: bool = False

    @property
    def note(self) -> str:
        return ", ragged" * self.ragged + ", paged" * self.paged

    @property
    def lengths(self) -> np.ndarray:
        """The number of slots of each row that are in use."""
        rng, full = np.random.default_rng(0), np.full(self.batch, self.slots)
        return rng.integers(1, self.slots + 1, self.batch) if self.ragged else full


SIZES = (
    Size(64, 8192), Size(16, 32768), Size(1, 8192), Size(4, 2048), Size(128, 8192, ragged=True),
    Size(64, 8192, paged=True),
)  # fmt: skip
TINY = (Size(2, 256), Size(2, 128, ragged=True), Size(2, 128, paged=True))
HEADS, GROUPS, D, PAGE = 32, 8, 128, 64


def cases(tiny: bool = False) -> Iterator[Case]:
    for size in TINY if tiny else SIZES:
        full = not size.ragged and not size.paged
        peers: dict = {"cudnn": _cudnn, "xla": _xla, "torch sdpa": Torch(_sdpa)} if full else {"xla": _ragged_xla}
        keys = int(size.lengths.sum())
        for warm in (False, True) if size.batch < 16 else (False,):  # a cache that fits in L2 may be there already
            yield Case(
                workload="decode_attention", dtype="bfloat16",
                config=f"B{size.batch} H{HEADS}/{GROUPS} S{size.slots} D{D}{size.note}" + ", warm L2" * warm,
                make=functools.partial(_make, size=size), ours=_ours, peers=peers, reference=_reference,
                bytes=2 * (2 * keys * GROUPS * D + 2 * size.batch * HEADS * D), flops=4 * keys * HEADS * D, warm=warm,
            )  # fmt: skip


def _make(seed, size: Size):
    k, v = (normal(3 * seed + i, size.batch, size.slots, GROUPS, D, dtype="bfloat16") for i in range(2))
    q, lengths = normal(3 * seed + 2, size.batch, HEADS, D, dtype="bfloat16"), jnp.asarray(size.lengths, jnp.int32)
    if not size.paged:
        return q, k, v, lengths
    order = np.random.default_rng(1).permutation(size.batch * size.slots // PAGE)  # the pages of a row are scattered
    k, v = (x.reshape(-1, PAGE, GROUPS, D) for x in (k, v))
    return q, k, v, lengths, jnp.asarray(order.reshape(size.batch, -1), jnp.int32)


def _ours(q, k, v, lengths, pages=None):
    return ops.decode_attention(q, k, v, lengths, pages=pages)


def _rows(x, pages):
    """A cache, or its pages, in one piece for each row."""
    return x if pages is None else x[pages].reshape(len(pages), -1, *x.shape[2:])


def _ragged_xla(q, k, v, lengths, pages=None):
    k, v = _rows(k, pages), _rows(v, pages)
    return jax.nn.dot_product_attention(q[:, None], k, v, key_value_seq_lengths=lengths, implementation="xla")[:, 0]


def _cudnn(q, k, v, lengths):
    del lengths  # all slots are in use
    return jax.nn.dot_product_attention(q[:, None], k, v, implementation="cudnn")[:, 0]


def _xla(q, k, v, lengths):
    del lengths
    return jax.nn.dot_product_attention(q[:, None], k, v, implementation="xla")[:, 0]


def _sdpa(torch, q, k, v, lengths):
    del lengths
    k, v = (x.transpose(1, 2) for x in (k, v))
    f = torch.nn.functional.scaled_dot_product_attention
    return f(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def _reference(q, k, v, lengths, pages=None):
    def one(args):  # q [heads, d], k and v [slots, groups, d]
        q, k, v = (x.astype(jnp.float32) for x in args[:3])
        grouped = q.reshape(GROUPS, HEADS // GROUPS, D)
        scores = jnp.einsum("ghd,sgd->ghs", grouped, k, precision="highest") * D**-0.5
        weights = jax.nn.softmax(jnp.where(jnp.arange(len(k)) < args[3], scores, -jnp.inf))
        return jnp.einsum("ghs,sgd->ghd", weights, v, precision="highest").reshape(HEADS, D)

    return lax.map(one, (q, _rows(k, pages), _rows(v, pages), lengths))
