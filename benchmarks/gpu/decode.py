"""One new token against a key-value cache, grouped queries: the cache's bytes are the work."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.data import normal
from benchmarks.gpu.case import Case, Torch
from jtile import ops

SIZES = ((64, 8192), (16, 32768), (1, 8192), (4, 2048))
HEADS, GROUPS, D = 32, 8, 128


def cases(tiny: bool = False) -> Iterator[Case]:
    for batch, length in ((2, 256),) if tiny else SIZES:
        for warm in (False, True) if batch < 16 else (False,):  # a cache that fits in L2 may be there already
            yield Case(
                workload="decode_attention", config=f"B{batch} H{HEADS}/{GROUPS} S{length} D{D}" + ", warm L2" * warm,
                dtype="bfloat16", make=lambda seed, batch=batch, length=length: _make(seed, batch, length),
                ours=ops.decode_attention,
                peers={"cudnn": _cudnn, "xla": _xla, "torch sdpa": Torch(_sdpa)}, reference=_reference,
                bytes=2 * (2 * batch * length * GROUPS * D + 2 * batch * HEADS * D),
                flops=4 * batch * length * HEADS * D, warm=warm,
            )  # fmt: skip


def _make(seed, batch: int, length: int):
    k, v = (normal(3 * seed + i, batch, length, GROUPS, D, dtype="bfloat16") for i in range(2))
    return normal(3 * seed + 2, batch, HEADS, D, dtype="bfloat16"), k, v, jnp.full((batch,), length, jnp.int32)


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


def _reference(q, k, v, lengths):
    del lengths

    def one(args):  # q [heads, d], k and v [slots, groups, d]
        q, k, v = (x.astype(jnp.float32) for x in args)
        grouped = q.reshape(GROUPS, HEADS // GROUPS, D)
        weights = jax.nn.softmax(jnp.einsum("ghd,sgd->ghs", grouped, k, precision="highest") * D**-0.5)
        return jnp.einsum("ghs,sgd->ghd", weights, v, precision="highest").reshape(HEADS, D)

    return lax.map(one, (q, k, v))
