"""DeepSeek's MLA over whole sequences: heads of 128 with a rotary part of 64 that the keys of all heads share."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.data import normal
from benchmarks.gpu.attention import _by_head, _one_head
from benchmarks.gpu.case import Case, Torch
from jtile import ops

SIZES = ((2, 32, 4096, True), (2, 32, 4096, False))  # batch, heads, length, causal
D, ROPE = 128, 64


def cases(tiny: bool = False) -> Iterator[Case]:
    for batch, heads, length, causal in ((1, 2, 128, True),) if tiny else SIZES:
        rows, pairs = batch * heads * length, batch * heads * length**2 // (2 if causal else 1)
        yield Case(
            workload="mla_attention", config=f"B{batch} H{heads} S{length} {D}+{ROPE}" + ", causal" * causal,
            dtype="bfloat16", make=functools.partial(_make, batch=batch, heads=heads, length=length),
            ours=functools.partial(ops.mla_attention, causal=causal),
            peers={"torch sdpa": Torch(functools.partial(_sdpa, causal=causal)),
                   "xla": functools.partial(_xla, causal=causal)},
            prepare={"torch sdpa": _joined, "xla": _joined}, reference=functools.partial(_exact, causal=causal),
            bytes=2 * (rows * (2 * D + ROPE + 2 * D) + batch * length * ROPE), flops=2 * pairs * (2 * D + ROPE),
        )  # fmt: skip


def _make(seed, batch: int, heads: int, length: int):
    shapes = (heads, D + ROPE), (heads, D), (ROPE,), (heads, D)
    return tuple(normal(4 * seed + i, batch, length, *s, dtype="bfloat16") for i, s in enumerate(shapes))


def _joined(q, k, rope, v):
    """The keys of every head in one piece, as other kernels take them."""
    shared = jnp.broadcast_to(rope[:, :, None], (*k.shape[:3], ROPE))
    return q, jnp.concatenate([k, shared], 3), v


def _sdpa(torch, q, k, v, *, causal: bool):
    """Attention by cuDNN's kernel; FlashAttention 2 has none for values shorter than keys."""
    from torch.nn import attention  # pyright: ignore[reportMissingImports]

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def _xla(q, k, v, *, causal: bool):
    v = jnp.pad(v, ((0, 0),) * 3 + ((0, ROPE),))  # keys and values must have one size there
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla")[..., :D]


def _exact(q, k, rope, v, *, causal: bool):
    q, k, v = _joined(q, k, rope, v)
    batch, length, heads, _ = q.shape
    out = lax.map(lambda head: _one_head(*head, causal=causal), _by_head(q, k, v))
    return out.reshape(batch, heads, length, D).swapaxes(1, 2)
