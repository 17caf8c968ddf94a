"""Attention with dropout, and its gradient with the forward pass, against torch's, which drop other weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.backward import pulled
from benchmarks.data import normal
from benchmarks.gpu.case import Case, Torch
from jtile import ops
from jtile.ops import dropouts

RATE = 0.1
BACKENDS = {"torch flash": "FLASH_ATTENTION", "torch cudnn": "CUDNN_ATTENTION"}
OTHERS = 0.6  # by how much outputs differ whose dropped weights do: 0.47 for a tenth of them, more for few keys


def cases(tiny: bool = False) -> Iterator[Case]:
    for shape in [(1, 64, 2, 64)] if tiny else [(2, 4096, 16, 128), (2, 4096, 32, 64)]:
        yield from _both(*shape)


def _both(batch: int, t: int, heads: int, d: int) -> Iterator[Case]:
    """The cases of forward pass and gradient."""
    elements, pairs = batch * t * heads * d, t / 2

    def make(seed, n: int):
        x = (normal(4 * seed + k, batch, t, heads, d, dtype="bfloat16") for k in range(n))
        return *x, jax.random.key_data(jax.random.key(seed))

    run = lambda f: lambda *x: f(*x[:-1], causal=True, dropout=RATE, key=x[-1])
    of = {
        "config": f"causal, a tenth dropped, {batch}x{heads}x{t}x{d}", "dtype": "bfloat16",
        "tolerances": dict.fromkeys(BACKENDS, OTHERS),
    }  # fmt: skip
    yield Case(
        "attention_dropout", make=functools.partial(make, n=3), ours=run(ops.attention),
        peers=_peers(False), reference=_exact,
        bytes=8 * elements, flops=int(4 * elements * pairs), **of,
    )  # fmt: skip
    yield Case(
        "attention_dropout_gradient", make=functools.partial(make, n=4), ours=pulled(run(ops.attention), 3),
        peers=_peers(True),
        reference=lambda ct, *x: pulled(_exact, 3)(ct.astype(jnp.float32), *x), bytes=16 * elements,
        flops=int(14 * elements * pairs), **of,
    )  # fmt: skip


def _exact(q, k, v, key):
    """In float32, head by head, so that only the weights of one head are in memory."""
    batch, t, heads, d = q.shape
    by_head = lambda x: x.astype(jnp.float32).swapaxes(1, 2).reshape(batch * heads, t, d)
    seeds = dropouts.seeds(key, batch, heads).reshape(-1, 2)

    @jax.checkpoint
    def one(args):
        q, k, v, seed = args
        s = jnp.where(jnp.tri(t, dtype=bool), jnp.matmul(q, k.T, precision="highest") * d**-0.5, -jnp.inf)
        stays = dropouts.kept(seed, dropouts.places(0, t, 0), dropouts.places(0, t, 1), RATE)
        return jnp.matmul(jnp.where(stays, jax.nn.softmax(s) / (1 - RATE), 0), v, precision="highest")

    out = jax.lax.map(one, (*map(by_head, (q, k, v)), seeds))
    return out.reshape(batch, heads, t, d).swapaxes(1, 2)


def _peers(gradient: bool) -> dict[str, Torch]:
    """Both of torch's: FlashAttention 2, and cuDNN."""
    run = _pulled if gradient else _forward
    return {name: Torch(functools.partial(run, backend=backend)) for name, backend in BACKENDS.items()}


def _forward(torch, q, k, v, key, *, backend: str):
    from torch.nn import attention  # pyright: ignore[reportMissingImports]

    del key
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=RATE)
    return out.transpose(1, 2)


def _pulled(torch, ct, q, k, v, key, *, backend: str):
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        return torch.autograd.grad(_forward(torch, q, k, v, key, backend=backend), (q, k, v), ct)
