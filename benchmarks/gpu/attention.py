"""Attention over whole sequences, forwards, against cuDNN and Pallas Mosaic."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.data import normal
from benchmarks.gpu import mosaic
from benchmarks.gpu.case import Case, Torch
from jtile import ops


class Size(NamedTuple):
    """One shape: q [batch, length, heads, d], k and v [batch, length, groups, d]."""

    batch: int
    heads: int
    groups: int
    length: int
    d: int
    causal: bool

    @property
    def config(self) -> str:
        heads = f"H{self.heads}" + (f"/{self.groups}" if self.groups < self.heads else "")
        return f"B{self.batch} {heads} S{self.length} D{self.d}" + (", causal" if self.causal else "")

    @property
    def pairs(self) -> int:
        """The number of scores that count, as is usual for such speeds: half of all under the causal mask."""
        return self.batch * self.heads * self.length**2 // (2 if self.causal else 1)

    @property
    def elements(self) -> tuple[int, int]:
        """The numbers of elements of q, and of k."""
        row = self.batch * self.length * self.d
        return row * self.heads, row * self.groups

    def make(self, seed, dtype: str, ct: bool = False):
        heads = (self.heads, self.groups, self.groups, *([self.heads] if ct else []))
        shapes = ((self.batch, self.length, h, self.d) for h in heads)
        return tuple(normal(4 * seed + i, *shape, dtype=dtype) for i, shape in enumerate(shapes))


SIZES = (
    Size(4, 32, 32, 4096, 128, False), Size(4, 32, 32, 4096, 128, True), Size(1, 16, 16, 32768, 128, False),
    Size(1, 16, 16, 16384, 128, True), Size(4, 32, 8, 8192, 128, True), Size(4, 32, 32, 4096, 64, True),
)  # fmt: skip
WIDE = Size(2, 16, 16, 4096, 256, True)
TINY = (Size(2, 4, 2, 128, 64, True), Size(1, 2, 2, 128, 64, False))


def cases(tiny: bool = False) -> Iterator[Case]:
    for dtype in ("bfloat16", "float16"):
        for size in TINY if tiny else (*SIZES, WIDE):
            q, k = size.elements
            peers: dict = {"cudnn": functools.partial(cudnn, causal=size.causal)}
            prepare = {}
            if dtype == "float16" and size.d <= 128:  # Mosaic's kernel takes only these
                peers["mosaic"] = mosaic.attention(*size[4:])
                prepare["mosaic"] = mosaic.scaled
            if dtype == "bfloat16" and size.d == 128:
                peers["torch flash"] = Torch(functools.partial(_sdpa, causal=size.causal))
            yield Case(
                workload="attention", config=size.config, dtype=dtype,
                make=lambda seed, size=size, dtype=dtype: size.make(seed, dtype),
                ours=functools.partial(ops.attention, causal=size.causal), peers=peers,
                reference=functools.partial(exact, causal=size.causal), bytes=4 * (q + k),
                flops=4 * size.pairs * size.d, prepare=prepare,
            )  # fmt: skip


def cudnn(q, k, v, *, causal: bool):
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")


def _sdpa(torch, q, k, v, *, causal: bool):
    """The flash kernel that torch brings (FlashAttention 2); cuDNN is measured through JAX."""
    from torch.nn import attention  # pyright: ignore[reportMissingImports]

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        grouped = q.shape[1] != k.shape[1]
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    return out.transpose(1, 2)


def exact(q, k, v, *, causal: bool):
    """Attention in float32, head by head, so that only the scores of one head are in memory."""
    heads = _by_head(q, k, v)
    out = lax.map(lambda qkv: _one_head(*qkv, causal=causal), heads)
    batch, length, count, d = q.shape
    return out.reshape(batch, count, length, d).swapaxes(1, 2)


def exact_gradient(q, k, v, ct, *, causal: bool):
    """Cotangents of q, k and v in float32, head by head."""
    (batch, length, count, d), groups = q.shape, k.shape[2]
    cts = ct.swapaxes(1, 2).reshape(batch * count, length, d)

    def one(args):
        qkv, g = args
        wide = [x.astype(jnp.float32) for x in qkv]
        return jax.vjp(functools.partial(_one_head, causal=causal), *wide)[1](g.astype(jnp.float32))

    dq, dk, dv = lax.map(one, (_by_head(q, k, v), cts))
    dk, dv = (x.reshape(batch, groups, count // groups, length, d).sum(2).swapaxes(1, 2) for x in (dk, dv))
    return dq.reshape(batch, count, length, d).swapaxes(1, 2), dk, dv


def _by_head(q, k, v):
    """q, k and v, each as [batch * heads, length, d]."""
    share = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, share, axis=2) for x in (k, v))
    return tuple(x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (q, k, v))


def _one_head(q, k, v, *, causal: bool):
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    scores = jnp.matmul(q, k.T, precision="highest") * q.shape[1] ** -0.5
    if causal:
        rows, columns = (lax.broadcasted_iota(jnp.int32, scores.shape, axis) for axis in (0, 1))
        scores = jnp.where(columns <= rows, scores, -jnp.inf)
    return jnp.matmul(jax.nn.softmax(scores), v, precision="highest")
