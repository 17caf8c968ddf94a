"""Attention with functions for scores and masks, and its automatic gradient, against the jnp form under XLA and
torch's FlexAttention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.backward import pulled
from benchmarks.data import normal
from benchmarks.gpu.case import Case, Torch
from jtile import ops
from jtile.ops.flash_attention import attention_reference


def window(b, h, i, j, width: int = 1024):
    return (j <= i) & (j > i - width)


def documents(b, h, i, j, segments):
    return (segments[b, i] == segments[b, j]) & (j <= i)


def alibi(s, b, h, i, j, slopes):
    return s + slopes[h] * (j - i).astype(jnp.float32)


def cases(tiny: bool = False) -> Iterator[Case]:
    batch, t, heads, d = (1, 64, 2, 16) if tiny else (2, 4096, 16, 128)
    slopes = lambda: -(2.0 ** -(8.0 * jnp.arange(1, heads + 1, dtype=jnp.float32) / heads))
    segments = lambda: jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32) // (t // 8), (batch, t))
    kinds: dict[str, tuple[dict[str, Any], Callable[[], tuple], float]] = {
        "window": ({"mask": window}, tuple, t / 4),
        "documents": ({"mask": documents}, lambda: (segments(),), t / 16),
        "alibi": ({"score": alibi, "causal": True}, lambda: (slopes(),), t / 2),
    }
    for kind, (options, extras, pairs) in kinds.items():
        yield from _both(kind, options, extras, pairs, (batch, t, heads, d))
    yield from _blocks((batch, t, heads, d), 16 if tiny else 64, 2 if tiny else 8)


def _both(kind: str, options: dict[str, Any], extras: Callable, pairs: float, shape: tuple) -> Iterator[Case]:
    """The cases of forward pass and gradient; `pairs`: keys that a query sees on average."""
    batch, t, heads, d = shape
    drawn = lambda seed, count: tuple(normal(4 * seed + n, *shape, dtype="bfloat16") for n in range(count))
    call = lambda f: lambda q, k, v, *more: f(q, k, v, extras=more, **options)
    plain, elements = call(attention_reference), batch * t * heads * d
    exact = lambda q, k, v, *more: plain(*_wide(q, k, v), *more)
    of = {"config": f"{kind}, {batch}x{heads}x{t}x{d}", "dtype": "bfloat16", "tolerance": 2e-2}
    yield Case(
        "flex_attention", make=lambda seed: (*drawn(seed, 3), *extras()), ours=call(ops.attention),
        peers={"xla": plain, "torch flex": Torch(functools.partial(_flex, kind=kind))},
        reference=exact, bytes=8 * elements, flops=int(4 * elements * pairs), **of,
    )  # fmt: skip
    yield Case(
        "flex_attention_gradient", make=lambda seed: (*drawn(seed, 4), *extras()), ours=pulled(call(ops.attention), 3),
        peers={"xla": pulled(plain, 3), "torch flex": Torch(functools.partial(_flex_pulled, kind=kind))},
        reference=lambda ct, q, k, v, *more: pulled(plain, 3)(*_wide(ct, q, k, v), *more),
        bytes=16 * elements, flops=int(14 * elements * pairs), **of,
    )  # fmt: skip


def _blocks(shape: tuple, side: int, count: int) -> Iterator[Case]:
    """Cases with a list of `count` blocks of keys for each block of queries; blocks have `side` positions."""
    batch, t, heads, d = shape
    drawn = lambda seed, n: tuple(normal(4 * seed + i, *shape, dtype="bfloat16") for i in range(n))
    scores = lambda seed: jax.random.uniform(jax.random.key(seed), (batch, heads, t // side, t // side))
    lists = lambda seed: jax.lax.top_k(scores(seed), count)[1].astype(jnp.int32)
    ours = functools.partial(ops.block_sparse_attention, keys=side, queries=side)
    peer = functools.partial(_gathered, side=side)
    exact = lambda q, k, v, lists: peer(*_wide(q, k, v), lists)  # pyright: ignore[reportCallIssue]
    elements = batch * t * heads * d
    of = {"config": f"{count} blocks of {side}, {batch}x{heads}x{t}x{d}", "dtype": "bfloat16", "tolerance": 2e-2}
    yield Case(
        "block_sparse_attention", make=lambda seed: (*drawn(seed, 3), lists(seed)), ours=ours, peers={"xla": peer},
        reference=exact, bytes=8 * elements, flops=4 * elements * side * count, **of,
    )  # fmt: skip
    yield Case(
        "block_sparse_attention_gradient", make=lambda seed: (*drawn(seed, 4), lists(seed)), ours=pulled(ours, 3),
        peers={"xla": pulled(peer, 3)}, reference=lambda ct, *args: pulled(exact, 3)(ct.astype(jnp.float32), *args),
        bytes=16 * elements, flops=14 * elements * side * count, **of,
    )  # fmt: skip


def _gathered(q, k, v, lists, *, side: int):
    """Attention to the listed blocks of keys, which a gather puts side by side for each block of queries."""
    batch, _, heads, d = q.shape
    cut = lambda x: x.reshape(batch, -1, side, heads, d).transpose(0, 3, 1, 2, 4)  # [batch, heads, blocks, side, d]
    found = lambda x: jnp.take_along_axis(cut(x)[:, :, None], lists[..., None, None], axis=3)
    K, V = (found(x).reshape(batch, heads, -1, lists.shape[3] * side, d) for x in (k, v))
    s = jnp.einsum("bhnqd,bhnkd->bhnqk", cut(q), K, preferred_element_type=jnp.float32) * d**-0.5
    o = jnp.einsum("bhnqk,bhnkd->bhnqd", jax.nn.softmax(s).astype(q.dtype), V)
    return o.transpose(0, 2, 3, 1, 4).reshape(q.shape)


def _wide(*arrays: jax.Array):
    return (x.astype(jnp.float32) for x in arrays)


def _flex(torch, q, k, v, *extras, kind: str):
    compiled, block_mask = _made(kind, q.shape[0], q.shape[1])
    score = None if kind != "alibi" else lambda s, b, h, i, j: s + extras[0][h] * (j - i)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return compiled(*heads_first, score_mod=score, block_mask=block_mask).transpose(1, 2)


def _flex_pulled(torch, ct, q, k, v, *extras, kind: str):
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        return torch.autograd.grad(_flex(torch, q, k, v, *extras, kind=kind), (q, k, v), ct)


@functools.cache
def _made(kind: str, batch: int, t: int):
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    segments = torch.arange(t, device="cuda") // (t // 8)
    masks = {
        "window": lambda b, h, i, j: (j <= i) & (j > i - 1024),
        "documents": lambda b, h, i, j: (segments[i] == segments[j]) & (j <= i),
        "alibi": lambda b, h, i, j: j <= i,
    }
    return torch.compile(flex_attention), create_block_mask(masks[kind], None, None, t, t, device="cuda")
