"""Linear recurrences as people write them in jnp: what kernels are compared with, on CPUs and on GPUs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.backward import pulled
from benchmarks.data import TOLERANCE, normal, size
from benchmarks.harness import Case
from jtile import ops
from jtile.ops.rwkv import rwkv7_reference

f32 = jnp.float32
KINDS = {"plain": (0, False), "decay": (1, False), "gated": (2, False), "gated delta": (1, True)}


def cases() -> Iterator[Case]:
    for kind in KINDS:
        args = make(0, kind, 1, 2048, 8, 64, "float32")
        flops, bytes = 4 * 2048 * 8 * 64 * 64, size(*args, args[2])
        yield Case(
            "linear_attention", f"{kind}, 2048, 8 heads of 64", "float32", ours(kind), {"xla": plain(kind)}, args,
            bytes, flops, tolerance=TOLERANCE["float32"],
        )  # fmt: skip
        yield Case(
            "linear_attention_gradient", f"{kind}, 2048, 8 heads of 64", "float32", pulled(ours(kind), len(args)),
            {"xla": pulled(plain(kind), len(args))}, (args[2], *args), 2 * bytes, 3 * flops,
            tolerance=10 * TOLERANCE["float32"],
        )  # fmt: skip
    for name, (op, peer, given) in OTHERS.items():
        args = given(0, 1, 2048, 8, 64, "float32")
        yield Case(name, "2048 x 512", "float32", op, {"xla": peer}, args, size(*args), tolerance=1e-4)


def make(seed, kind: str, batch: int, t: int, heads: int, d: int, dtype: str) -> tuple[Any, ...]:
    """Arguments: q, k, v [batch, t, heads, d], and log_decay and beta if the kind has them; keys have length 1."""
    gate, rule = KINDS[kind]
    q, k, v = (normal(8 * seed + s, batch, t, heads, d, dtype=dtype) for s in range(3))
    wide = k.astype(f32)
    k = (wide / jnp.linalg.norm(wide, axis=-1, keepdims=True)).astype(q.dtype)
    width = {1: (batch, t, heads), 2: (batch, t, heads, d)}.get(gate)
    g = [] if width is None else [jax.nn.log_sigmoid(normal(8 * seed + 3, *width) + 3.0)]
    return q, k, v, *g, *([jax.nn.sigmoid(normal(8 * seed + 4, batch, t, heads))] if rule else [])


def _named(kind: str, more: tuple[Any, ...]) -> dict[str, Any]:
    gate, rule = KINDS[kind]
    return dict(zip([*(["log_decay"] if gate else []), *(["beta"] if rule else [])], more, strict=True))


def ours(kind: str):
    return lambda q, k, v, *more: ops.linear_attention(q, k, v, **_named(kind, more))


def plain(kind: str):
    """The chunked form in jnp: all chunks at once, but for the states in front of them, which a scan computes."""
    return lambda q, k, v, *more: chunked(q, k, v, **_named(kind, more))


def chunked(q, k, v, log_decay=None, beta=None):
    vectors = log_decay is not None and log_decay.ndim == 4
    c = min(16 if vectors else 64, q.shape[1])
    cut = lambda x: x.reshape(x.shape[0], -1, c, *x.shape[2:]).swapaxes(2, 3)  # [batch, chunks, heads, c, ...]
    dtype, t = q.dtype, q.shape
    dot = functools.partial(
        jnp.einsum, precision="highest" if dtype == f32 else None, preferred_element_type=f32
    )  # fmt: skip
    q, k, v = cut(q) * jnp.asarray(q.shape[-1] ** -0.5, dtype), cut(k), cut(v)
    low = jnp.tril(jnp.ones((c, c), bool))
    if log_decay is None:  # sums and exponentials of zeros would be constants, which XLA takes minutes to fold
        pairs = lambda x, y: jnp.where(low, dot("bnhtd,bnhsd->bnhts", x, y), 0.0)
        kept, ins, outs, since = None, q, k, k
    else:
        G = jnp.cumsum(cut(log_decay.reshape(*t[:3], -1)), 3)
        fades = jnp.exp(jnp.where(low[:, :, None], G[..., :, None, :] - G[..., None, :, :], -jnp.inf))
        if vectors:
            pairs = lambda x, y: jnp.einsum("bnhtd,bnhsd,bnhtsd->bnhts", x.astype(f32), y.astype(f32), fades)
        else:
            pairs = lambda x, y: dot("bnhtd,bnhsd->bnhts", x, y) * fades[..., 0]
        whole = G[..., -1:, :]
        ins, outs = (q * jnp.exp(G)).astype(dtype), (k * jnp.exp(whole - G)).astype(dtype)
        kept, since = jnp.exp(whole).swapaxes(-1, -2), k.astype(f32) * jnp.exp(G)
    own = pairs(q, k).astype(dtype)
    errors = jnp.zeros_like(k)
    if beta is not None:
        b = cut(beta[..., None])
        system = jnp.eye(c) + b * jnp.where(jnp.tril(low, -1), pairs(k, k), 0.0)
        solve = lambda x: jax.scipy.linalg.solve_triangular(system, b * x, lower=True, unit_diagonal=True).astype(dtype)
        errors, v = solve(since.astype(f32)), solve(v.astype(f32))

    def step(S, now):
        ins, outs, errors, v, own, kept = now
        S_n = S.astype(dtype)
        u = v if beta is None else (v - dot("bhtk,bhkv->bhtv", errors, S_n)).astype(dtype)
        o = dot("bhtk,bhkv->bhtv", ins, S_n) + dot("bhts,bhsv->bhtv", own, u)
        S = S if kept is None else S * kept
        return S + dot("bhtk,bhtv->bhkv", outs, u), o.astype(dtype)

    start = jnp.zeros((t[0], t[2], k.shape[-1], v.shape[-1]), f32)
    chunks = jax.tree.map(lambda x: x.swapaxes(0, 1), (ins, outs, errors, v, own, kept))
    _, o = jax.lax.scan(step, start, chunks)
    return o.swapaxes(0, 1).swapaxes(2, 3).reshape(*t[:3], -1)


# -- RWKV-7 and Mamba --------------------------------------------------------------------------------------------------


def rwkv_operands(seed, batch: int, t: int, heads: int, d: int, dtype: str) -> tuple[Any, ...]:
    """r, log_decay, k, v, a, b [batch, t, heads, d]."""
    r, k, v, a = (normal(8 * seed + s, batch, t, heads, d, dtype=dtype) for s in range(4))
    wide = a.astype(f32)
    a = (wide / jnp.linalg.norm(wide, axis=-1, keepdims=True)).astype(a.dtype)
    g = -0.6 * jax.nn.sigmoid(normal(8 * seed + 4, batch, t, heads, d))
    return r, g, k, v, -a, a * jax.nn.sigmoid(normal(8 * seed + 5, batch, t, heads, d, dtype=dtype))


def mamba_operands(seed, batch: int, t: int, heads: int, d: int, dtype: str) -> tuple[Any, ...]:
    """x, dt [batch, t, heads d], a [heads d, 16], b, c [batch, t, 16]."""
    x, dt = (normal(8 * seed + s, batch, t, heads * d, dtype=dtype) for s in range(2))
    b, c = (normal(8 * seed + s, batch, t, 16, dtype=dtype) for s in (2, 3))
    a = -jnp.broadcast_to(jnp.arange(1.0, 17.0, dtype=f32), (heads * d, 16))
    return x, jax.nn.softplus(dt - jnp.asarray(4, dt.dtype)), a, b, c


def mamba_chunked(x, dt, a, b, c, length: int = 64):
    """Mamba as a scan over chunks, inside of which `associative_scan` computes all states."""
    cut = lambda v: v.astype(f32).reshape(v.shape[0], -1, min(length, v.shape[1]), v.shape[2]).swapaxes(0, 1)

    def step(h, now):
        x_k, dt_k, b_k, c_k = now
        fades = jnp.exp(dt_k[..., None] * a[None, None])
        behind = lambda p, q: (q[0] * p[0], q[0] * p[1] + q[1])
        fades, sums = jax.lax.associative_scan(behind, (fades, (dt_k * x_k)[..., None] * b_k[:, :, None]), axis=1)
        states = sums + fades * h[:, None]
        return states[:, -1], (states * c_k[:, :, None]).sum(3).astype(x.dtype)

    start = jnp.zeros((x.shape[0], *a.shape), f32)
    _, y = jax.lax.scan(step, start, tuple(map(cut, (x, dt, b, c))))
    return y.swapaxes(0, 1).reshape(x.shape)


OTHERS = {
    "rwkv7": (ops.rwkv7, rwkv7_reference, rwkv_operands),
    "selective_scan": (ops.selective_scan, mamba_chunked, mamba_operands),
}
