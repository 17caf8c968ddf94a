"""Attention over tokens and mixtures over experts that devices share, on meshes of eight; run by test_context.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import collectives as ops

DEVICES = np.array(jax.devices())
RNG = np.random.default_rng(0)


def floats(*shape, dtype="float32"):
    return RNG.standard_normal(shape).astype(np.float32).astype(jnp.dtype(dtype))


def on(n, f, in_specs, out_specs, **options):
    mesh = Mesh(DEVICES[:n], ("x",))
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options))


def agree(got, want, tolerance):
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape, (g.shape, w.shape)
        g, w = (np.asarray(v, np.float64) for v in (g, w))
        assert np.linalg.norm(g - w) <= tolerance * np.linalg.norm(w), np.linalg.norm(g - w) / np.linalg.norm(w)


def attention(q, k, v, g, positions, window):
    """Causal attention in NumPy: the output, and the cotangents of q, k and v for that of the output."""
    dtype = q.dtype
    q, k, v, g = (x.astype(np.float64) for x in (q, k, v, g))
    group = q.shape[2] // k.shape[2]
    K, V = (np.repeat(x, group, axis=2) for x in (k, v))
    back = positions[:, None] - positions[None, :]
    scale = q.shape[3] ** -0.5
    s = np.where((back >= 0) & (back < window), np.einsum("bthd,bshd->bhts", q, K) * scale, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bthd,bshd->bhts", g, V)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    summed = lambda x: x.reshape(*k.shape[:3], group, -1).sum(3)
    of_k, of_v = np.einsum("bhts,bthd->bshd", ds, q), np.einsum("bhts,bthd->bshd", p, g)
    outs = np.einsum("bhts,bshd->bthd", p, V), np.einsum("bhts,bshd->bthd", ds, K), summed(of_k), summed(of_v)
    return [x.astype(dtype) for x in outs]


def check_ring_attention():
    """Over 2, 4 and 8 devices, with the ring run for the gradient, too."""
    cases = [
        (2, (1, 5, 2, 2, 24), "bfloat16", {"causal": True}),
        (4, (2, 6, 4, 2, 8), "float32", {"causal": True, "zigzag": True}),
        (8, (1, 3, 2, 1, 8), "float32", {"causal": True, "window": 7}),
    ]
    for n, (b, t, heads, groups, d), dtype, options in cases:
        q, k, v, g = (floats(b, n * t, h, d, dtype=dtype) for h in (heads, groups, groups, heads))
        ring = functools.partial(ops.ring_attention, axis="x", **options)

        def pulled(q, k, v, g, ring=ring):
            y, pull = jax.vjp(ring, q, k, v)
            return y, *pull(g)

        cut = P(None, "x")
        got = on(n, pulled, cut, cut)(q, k, v, g)
        order = ops.zigzag_order(n * t, n) if "zigzag" in options else np.arange(n * t)
        agree(got, attention(q, k, v, g, order, options.get("window", n * t)), 1e-6 if dtype == "float32" else 1e-2)


def check_the_reference_of_ring_attention():
    q, k, v, g = (floats(1, 8, h, 4) for h in (2, 1, 1, 2))
    cut = P(None, "x")
    f = on(2, lambda *x: ops.ring_attention_reference(*x, "x", causal=True, zigzag=True, window=3), cut, cut)
    agree([f(q, k, v)], attention(q, k, v, g, ops.zigzag_order(8, 2), 3)[:1], 1e-6)


def check_what_ring_attention_refuses():
    x, ring = floats(2, 3, 4, 8), ops.ring_attention
    cases = [
        (KernelValueError, "has no axis 'z'", lambda x: ring(x, x, x, "z")),
        (KernelValueError, "as many keys as queries, got 2 and 3", lambda x: ring(x, x[:, :2], x[:, :2], "x")),
        (KernelValueError, "two equal chunks, got 3 tokens", lambda x: ring(x, x, x, "x", zigzag=True)),
        (KernelTypeError, "have one dtype", lambda x: ring(x, x, x.astype(jnp.bfloat16), "x")),
        (KernelValueError, "softcap is a positive number", lambda x: ring(x, x, x, "x", softcap=0.0)),
        (KernelValueError, "no two equal chunks for each of 4 devices", lambda x: ops.zigzag_order(12, 4)),
    ]
    for kind, words, f in cases:
        with pytest.raises(kind, match=words):
            on(4, f, P(), P())(x)
    with pytest.raises(KernelValueError, match=r"outside of jax\.shard_map"):
        ring(x, x, x, "x")
