"""Automatic gradients of kernels as users write them, at tile level, against the gradients that XLA, cuDNN and
torch.compile have of the same functions; the forward pass is part of it where the peer needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from benchmarks import norms
from benchmarks.backward import cross_entropy as plain_cross_entropy
from benchmarks.backward import pulled
from benchmarks.data import normal
from benchmarks.gpu.attention import Size, cudnn, exact_gradient
from benchmarks.gpu.case import Case, Torch

f32 = jnp.float32

# -- what users write --------------------------------------------------------------------------------------------------


@jt.kernel(out_type=lambda a, b, **_: jt.like(a, shape=(a.shape[0], b.shape[1])),
           grid=lambda a, b, *, bm, bn, **_: (jt.cdiv(a.shape[0], bm), jt.cdiv(b.shape[1], bn)))  # fmt: skip
def matmul(a, b, o, *, bm=128, bn=256, bk=64):
    i, j = jt.program_id(0), jt.program_id(1)
    A, B, O = a.tiles(bm, bk), b.tiles(bk, bn), o.tiles(bm, bn)
    acc = jt.zeros((bm, bn), f32)
    for k in jt.range(A.shape[1]):
        acc = jt.dot(A[i, k], B[k, j], acc)
    O[i, j] = acc.astype(o.dtype)


@jt.kernel(out_type=lambda a, b, c, r, **_: jt.like(r),
           grid=lambda a, b, c, r, *, bm, bn, **_: (jt.cdiv(a.shape[0], bm), jt.cdiv(b.shape[1], bn)))  # fmt: skip
def layer(a, b, c, r, o, *, bm=128, bn=256, bk=64):
    """gelu(a b + c) + r"""
    i, j = jt.program_id(0), jt.program_id(1)
    A, B, C, R, O = a.tiles(bm, bk), b.tiles(bk, bn), c.tiles(bn), r.tiles(bm, bn), o.tiles(bm, bn)
    acc = jt.zeros((bm, bn), f32)
    for k in jt.range(A.shape[1]):
        acc = jt.dot(A[i, k], B[k, j], acc)
    O[i, j] = (jax.nn.gelu(acc + C[j].astype(f32)) + R[i, j].astype(f32)).astype(o.dtype)


@jt.kernel(out_type=lambda x, g, u, **_: jt.like(x, shape=(x.shape[0], g.shape[1])),
           grid=lambda x, g, u, *, bm, bn, **_: (jt.cdiv(x.shape[0], bm), jt.cdiv(g.shape[1], bn)))  # fmt: skip
def gated_mlp(x, g, u, o, *, bm=128, bn=128, bk=64):
    """silu(x g) * (x u)"""
    i, j = jt.program_id(0), jt.program_id(1)
    X, G, U, O = x.tiles(bm, bk), g.tiles(bk, bn), u.tiles(bk, bn), o.tiles(bm, bn)
    gates = ups = jt.zeros((bm, bn), f32)
    for k in jt.range(X.shape[1]):
        part = X[i, k]
        gates, ups = jt.dot(part, G[k, j], gates), jt.dot(part, U[k, j], ups)
    O[i, j] = (jax.nn.silu(gates) * ups).astype(o.dtype)


@jt.kernel(out_type=lambda q, k, v, **_: jt.like(q),
           grid=lambda q, k, v, *, bq, **_: (q.shape[0], q.shape[2], jt.cdiv(q.shape[1], bq)))  # fmt: skip
def attention(q, k, v, o, *, bq=128, bk=128, causal=False):
    """q, k, v [batch, length, heads, d]; the online softmax of Milakov and Gimelshein (2018)."""
    b, h, i = (jt.program_id(axis) for axis in range(3))
    d = q.shape[3]
    Q, K, V, O = (x.tiles(None, n, None, d) for x, n in ((q, bq), (k, bk), (v, bk), (o, bq)))
    query, rows = Q[b, i, h, 0], i * bq + jt.arange(bq)[:, None]
    m, l, acc = jnp.full((bq, 1), -jnp.inf, f32), jt.zeros((bq, 1), f32), jt.zeros((bq, d), f32)
    for j in jt.range(jt.cdiv((i + 1) * bq, bk) if causal else K.shape[1]):
        s = jt.dot(query, K[b, j, h, 0].T) * d**-0.5
        if causal:
            s = jnp.where(rows >= j * bk + jt.arange(bk)[None, :], s, -jnp.inf)
        top = jnp.maximum(m, s.max(1, keepdims=True))
        p, c = jnp.exp(s - top), jnp.exp(m - top)
        l = l * c + p.sum(1, keepdims=True)
        acc = jt.dot(p.astype(v.dtype), V[b, j, h, 0], acc * c)
        m = top
    O[b, i, h, 0] = (acc / l).astype(o.dtype)


@jt.kernel(out_type=lambda x, w: jt.like(x), grid=lambda x, w: x.shape[0])
def rms_norm(x, w, o):
    i = jt.program_id(0)
    t = x[i, :].astype(f32)
    o[i, :] = (t * jax.lax.rsqrt((t * t).mean() + norms.EPS) * w[:].astype(f32)).astype(o.dtype)


@jt.kernel(out_type=lambda x, w, b: jt.like(x), grid=lambda x, w, b: x.shape[0])
def layer_norm(x, w, b, o):
    i = jt.program_id(0)
    t = x[i, :].astype(f32)
    t = t - t.mean()
    unit = t * jax.lax.rsqrt((t * t).mean() + norms.EPS)
    o[i, :] = (unit * w[:].astype(f32) + b[:].astype(f32)).astype(o.dtype)


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0])
def softmax(x, o):
    i = jt.program_id(0)
    t = x[i, :].astype(f32)
    e = jnp.exp(t - t.max())
    o[i, :] = (e / e.sum()).astype(o.dtype)


@jt.kernel(out_type=lambda x, labels: jax.ShapeDtypeStruct(labels.shape, f32), grid=lambda x, labels: x.shape[0])
def cross_entropy(x, labels, o):
    i = jt.program_id(0)
    t = x[i, :].astype(f32)
    m = t.max()
    chosen = jnp.where(jt.arange(x.shape[1]) == labels[i], t, 0.0).sum()
    o[i] = m + jnp.log(jnp.exp(t - m).sum()) - chosen


# -- the cases ---------------------------------------------------------------------------------------------------------


def cases(tiny: bool = False) -> Iterator[Case]:
    yield from _products(tiny)
    yield from _attention(tiny)
    yield from _rows(tiny)


def _gradient(name: str, config: str, ours: Callable, plain: Callable, shapes: Any, peers: Any = None, **of: Any):
    """The case of a gradient: all cotangents, from a cotangent of the result and arguments of `shapes`."""
    n = len(shapes) - 1
    wide = lambda *args: pulled(plain, n)(*(x.astype(f32) for x in args))
    make = lambda seed: tuple(normal(8 * seed + k, *shape, dtype="bfloat16") for k, shape in enumerate(shapes))
    return Case(f"{name}_user_gradient", config, "bfloat16", make=make, ours=pulled(ours, n),
                peers={"xla": pulled(plain, n)} | (peers or {}), reference=wide, tolerance=2e-2, **of)  # fmt: skip


def _products(tiny: bool) -> Iterator[Case]:
    product = lambda a, b: jnp.matmul(a, b, precision="highest" if a.dtype == f32 else None)
    small = {"bm": 16, "bn": 16, "bk": 16} if tiny else {}
    mine = lambda a, b: matmul(a, b, **small)
    for n in (32,) if tiny else (4096, 8192):
        yield _gradient("matmul", f"{n}", mine, product, [(n, n)] * 3, bytes=10 * n * n, flops=4 * n**3)
    batch, n = (2, 32) if tiny else (16, 1024)
    of = {"bytes": 10 * batch * n * n, "flops": 4 * batch * n**3}
    yield _gradient("matmul", f"{batch} x {n}", jax.vmap(mine), product, [(batch, n, n)] * 3, **of)
    n = 32 if tiny else 4096
    whole = lambda a, b, c, r: (jax.nn.gelu(product(a, b).astype(f32) + c.astype(f32)) + r.astype(f32)).astype(a.dtype)
    yield _gradient(
        "linear_gelu_residual", f"{n}", lambda *args: layer(*args, **small), whole,
        [(n, n), (n, n), (n, n), (n,), (n, n)], bytes=14 * n * n, flops=6 * n**3,
    )  # fmt: skip
    exact = lambda *args: whole(*(x.astype(f32) for x in args))
    yield Case(
        "linear_gelu_residual_user", f"{n}", "bfloat16", ours=lambda *args: layer(*args, **small),
        make=lambda seed: tuple(
            normal(4 * seed + j, *s, dtype="bfloat16") for j, s in enumerate([(n, n), (n, n), (n,), (n, n)])
        ),
        peers={"xla": whole}, reference=exact, bytes=8 * n * n, flops=2 * n**3,
    )  # fmt: skip
    m, k, n = (32, 32, 48) if tiny else (4096, 4096, 14336)
    gates = lambda x, g, u: (jax.nn.silu(product(x, g).astype(f32)) * product(x, u).astype(f32)).astype(x.dtype)
    yield _gradient(
        "gated_mlp", f"{m}x{k}x{n}", lambda *args: gated_mlp(*args, **small), gates,
        [(m, n), (m, k), (k, n), (k, n)], bytes=2 * (m * n + 2 * m * k + 4 * k * n), flops=12 * m * k * n,
    )  # fmt: skip


def _attention(tiny: bool) -> Iterator[Case]:
    sizes = [Size(2, 16, 16, 4096, d, causal) for d in (128, 64) for causal in (True, False)]
    for size in [Size(1, 2, 2, 64, 16, True)] if tiny else sizes:
        small = {"bq": 16, "bk": 16} if tiny else {}
        mine = lambda q, k, v, causal=size.causal, small=small: attention(q, k, v, causal=causal, **small)
        peer = lambda q, k, v, causal=size.causal: cudnn(q, k, v, causal=causal)
        last = lambda f: lambda q, k, v, ct: pulled(f, 3)(ct, q, k, v)
        elements = size.elements[0]
        yield Case(
            "attention_user_gradient", size.config, "bfloat16",
            make=lambda seed, s=size: s.make(seed, "bfloat16", True),
            ours=last(mine), peers={} if tiny else {"cudnn": last(peer)},
            reference=lambda *args, causal=size.causal: exact_gradient(*args, causal=causal),
            bytes=16 * elements, flops=14 * size.pairs * size.d, tolerance=2e-2,
        )  # fmt: skip


def _rows(tiny: bool) -> Iterator[Case]:
    rows, n = (32, 64) if tiny else (16384, 4096)
    config, x, w = f"{rows}x{n}", (rows, n), (n,)
    functional = lambda name: lambda torch, ct, *args: torch.func.vjp(_TORCH[name](torch), *args)[1](ct)
    compiled = lambda name: {"torch.compile": Torch(functional(name), compiled=True)}
    moved = {"bytes": 6 * rows * n}
    yield _gradient("rms_norm", config, rms_norm, norms.rms_norm, [x, x, w], compiled("rms_norm"), **moved)
    yield _gradient("layer_norm", config, layer_norm, norms.layer_norm, [x, x, w, w], compiled("layer_norm"), **moved)
    yield _gradient("softmax", config, softmax, jax.nn.softmax, [x, x], compiled("softmax"), **moved)
    make = lambda seed: (normal(2 * seed, rows, dtype="float32"), normal(2 * seed + 1, rows, n, dtype="bfloat16"),
                         jax.random.randint(jax.random.key(seed), (rows,), 0, n))  # fmt: skip
    yield Case(
        "cross_entropy_user_gradient", config, "bfloat16", make=make, ours=pulled(cross_entropy, 1),
        peers={"xla": pulled(plain_cross_entropy, 1), "torch.compile": Torch(_torch_cross_entropy, compiled=True)},
        bytes=4 * rows * n,
        reference=lambda ct, x, labels: pulled(plain_cross_entropy, 1)(ct, x.astype(f32), labels),
    )  # fmt: skip


def _torch_cross_entropy(torch, ct, x, labels):
    losses = lambda x: torch.nn.functional.cross_entropy(x.float(), labels.long(), reduction="none")
    return torch.func.vjp(losses, x)[1](ct)


_TORCH: dict[str, Callable] = {
    "rms_norm": lambda torch: lambda x, w: torch.nn.functional.rms_norm(x, x.shape[-1:], w, norms.EPS),
    "layer_norm": lambda torch: lambda x, w, b: torch.nn.functional.layer_norm(x, x.shape[-1:], w, b, norms.EPS),
    "softmax": lambda torch: lambda x: torch.softmax(x, -1),
}
