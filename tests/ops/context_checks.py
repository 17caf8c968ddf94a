"""Attention over tokens and mixtures over experts that devices share, on meshes of eight; run by test_context.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import collective_decode
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


def attention(q, k, v, g, seen, sinks=None):
    """Attention in NumPy: the output, and the cotangents of q, k and v for that of the output. `seen`: bool [b, t, s].

    q, g [b, t, heads, d]; k [b, s, kv heads, d], v [b, s, kv heads, e]; sinks [heads]."""
    dtype, group = q.dtype, q.shape[2] // k.shape[2]
    q, k, v, g = (x.astype(np.float64) for x in (q, k, v, g))
    K, V = (np.repeat(x, group, axis=2) for x in (k, v))
    scale = q.shape[3] ** -0.5
    s = np.where(seen[:, None], np.einsum("bthd,bshd->bhts", q, K) * scale, -np.inf)
    top = np.maximum(s.max(-1, keepdims=True), -1e30)
    p = np.exp(s - top)
    p /= p.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks[None, :, None, None] - top))
    dp = np.einsum("bthd,bshd->bhts", g, V)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    summed = lambda x: x.reshape(*k.shape[:3], group, -1).sum(3)
    of_k, of_v = np.einsum("bhts,bthd->bshd", ds, q), np.einsum("bhts,bthd->bshd", p, g)
    outs = np.einsum("bhts,bshd->bthd", p, V), np.einsum("bhts,bshd->bthd", ds, K), summed(of_k), summed(of_v)
    return [x.astype(dtype) for x in outs]


def causal(positions, window):
    back = positions[:, None] - positions[None, :]
    return ((back >= 0) & (back < window))[None]


def check_ring_attention():
    """With the ring run for the gradient, too."""
    cases = [
        (2, (1, 5, 2, 2, 24), "bfloat16", {"causal": True}),
        (8, (2, 6, 4, 2, 8), "float32", {"causal": True, "zigzag": True, "window": 37}),
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
        want = attention(q, k, v, g, causal(order, options.get("window", n * t)))
        agree(got, want, 1e-6 if dtype == "float32" else 1e-2)


def check_the_reference_of_ring_attention():
    q, k, v, g = (floats(1, 8, h, 4) for h in (2, 1, 1, 2))
    cut = P(None, "x")
    f = on(2, lambda *x: ops.ring_attention_reference(*x, "x", causal=True, zigzag=True, window=3), cut, cut)
    agree([f(q, k, v)], attention(q, k, v, g, causal(ops.zigzag_order(8, 2), 3))[:1], 1e-6)


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


def held(lengths, slots):
    """Which slots of all devices are in use: lengths [devices, batch] -> bool [batch, 1, devices * slots]."""
    used = np.arange(slots)[None, None, :] < lengths[:, :, None]
    return used.transpose(1, 0, 2).reshape(lengths.shape[1], 1, -1)


def check_decoding_over_a_cache_in_parts():
    """Grouped heads with sinks, and latent vectors; a device without keys, and a row without
    any; caches in pages."""
    for n, dtype in ((2, "bfloat16"), (4, "float32")):
        q, k, v, sinks = floats(2, 4, 8), floats(2, n * 6, 2, 8), floats(2, n * 6, 2, 8), floats(4)
        q, k, v = (x.astype(jnp.dtype(dtype)) for x in (q, k, v))
        lengths = RNG.integers(1, 7, (n, 2)).astype(np.int32)
        lengths[0, 0], lengths[:, 1] = 0, lengths[:, 1] * (n != 4)
        pages = np.array([[1, 0], [3, 2]], np.int32)

        def both(q, k, v, sinks, lengths, pages=pages):
            whole = ops.decode_attention(q, k, v, lengths[0], "x", sinks=sinks)
            place = np.argsort(pages.reshape(-1))
            paged = [x.reshape(4, 3, 2, 8)[place] for x in (k, v)]
            again = ops.decode_attention(q, *paged, lengths[0], "x", sinks=sinks, pages=jnp.asarray(pages))
            return whole, again, ops.mla_decode(q, k[:, :, 0], lengths[0], "x", rank=5)

        cut = P(None, "x")
        got = on(n, both, (P(), cut, cut, P(), P("x")), P())(q, k, v, sinks, lengths)
        seen = held(lengths, 6)
        latent = k[:, :, :1]
        with np.errstate(invalid="ignore", over="ignore"):
            want = attention(q[:, None], k, v, q[:, None], seen, sinks)[0][:, 0]
            of_latent = np.nan_to_num(attention(q[:, None], latent, latent, q[:, None], seen)[0][:, 0, :, :5])
        agree(got, [want, want, of_latent], 1e-6 if dtype == "float32" else 1e-2)


def check_means_of_devices_put_together():
    """What kernels of one device give, means and logarithms of sums, as those of all devices; one device has no keys of
    a row, and no device has keys of another."""
    for n, dtype in ((2, "bfloat16"), (4, "float32")):
        q, k, v = floats(3, 4, 8), floats(3, n * 6, 2, 8), floats(3, n * 6, 2, 8)
        lengths = RNG.integers(1, 7, (n, 3)).astype(np.int32)
        lengths[0, 0], lengths[:, 1] = 0, 0

        def means(q, k, v, lengths, dtype=dtype):
            k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
            seen = jnp.arange(6)[None, None, :] < lengths[0][:, None, None]
            p = jnp.where(seen, jnp.exp(jnp.einsum("bhd,bshd->bhs", q, k) * 8**-0.5), 0)
            total = p.sum(-1)
            o = jnp.einsum("bhs,bshd->bhd", p, v) / jnp.where(total > 0, total, 1)[..., None]
            logs = jnp.where(total > 0, jnp.log2(total), -1e30)
            return jt.same_along(collective_decode._weighed("x", o.astype(dtype)[:, None], logs[:, None]), "x")

        cut = P(None, "x")
        got = on(n, means, (P(), cut, cut, P("x")), P())(q, k, v, lengths)
        with np.errstate(invalid="ignore", over="ignore"):
            want = attention(q[:, None], k, v, q[:, None], held(lengths, 6))[0][:, 0]
        agree([got], [np.nan_to_num(want)], 1e-6 if dtype == "float32" else 1e-2)


def check_gradients_of_decoding():
    q, k, v, g = floats(1, 2, 4), floats(1, 8, 1, 4), floats(1, 8, 1, 4), floats(1, 2, 4)
    lengths = np.array([[2], [4]], np.int32)
    want = attention(q[:, None], k, v, g[:, None], held(lengths, 4))
    latent = attention(q[:, None], k, k[..., :3], g[:, None, :, :3], held(lengths, 4))
    of_cache = latent[2] + np.pad(latent[3], ((0, 0), (0, 0), (0, 0), (0, 1)))
    cut = P(None, "x")

    def f(q, k, v, lengths):
        latent = ops.mla_decode(q, k[:, :, 0], lengths[0], "x", rank=3)
        return ops.decode_attention(q, k, v, lengths[0], "x"), latent

    sharded = jax.shard_map(f, mesh=Mesh(DEVICES[:2], ("x",)), in_specs=(P(), cut, cut, P("x")), out_specs=P())

    def pulled(q, k, v, lengths):
        _, pull = jax.vjp(lambda *x: sharded(*x, lengths), q, k, v)
        of_first, of_both = pull((g, jnp.zeros((1, 2, 3)))), pull((jnp.zeros_like(g), g[..., :3]))
        return *of_first, *of_both[:2]

    got = jax.jit(pulled)(q, k, v, lengths)
    agree(got, [want[1][:, 0], want[2], want[3], latent[1][:, 0], of_cache], 1e-5)


def check_what_decoding_refuses():
    q, k, lengths = floats(2, 4, 8), floats(2, 6, 2, 8), np.array([1, 2], np.int32)
    cases = [
        (KernelValueError, "one token a row, q", lambda q, k, n: ops.decode_attention(q[:, None], k, k, n, "x")),
        (KernelValueError, "one token a row, q", lambda q, k, n: ops.mla_decode(q[:, None], k[:, :, 0], n, "x")),
        (KernelValueError, "has no axis 'z'", lambda q, k, n: ops.decode_attention(q, k, k, n, "z")),
        (KernelValueError, "got rank=8", lambda q, k, n: ops.mla_decode(q, k[:, :, 0], n, "x", rank=8)),
        (KernelTypeError, "lengths", lambda q, k, n: ops.decode_attention(q, k, k, n > 0, "x")),
    ]
    for kind, words, f in cases:
        with pytest.raises(kind, match=words):
            on(4, f, P(), P())(q, k, lengths)


def check_tokens_go_to_their_experts_and_back():
    """5 experts on 4 devices, of which the last has none; ids of none; with and without a capacity. Rows, sizes, sums
    and cotangents are those of a loop in NumPy, and the reference by XLA gives the same."""
    n, tokens, k, count = 4, 6, 2, 5
    x, weights, g = floats(n * tokens, 8), floats(n * tokens, k), floats(n * tokens, 8)
    experts = RNG.integers(-1, count, (n * tokens, k)).astype(np.int32)

    def forth_and_back(x, weights, experts, capacity, suffix=""):
        there, back = (getattr(ops, name + suffix) for name in ("dispatch", "combine"))
        rows, sizes, routes = there(x, experts, "x", count=count, capacity=capacity)
        scaled = rows * (1.0 + jax.lax.axis_index("x").astype(jnp.float32))
        return back(scaled, routes, "x", weights=weights), (rows, sizes)

    def f(x, weights, experts, g):
        exact = lambda x, weights: forth_and_back(x, weights, experts, None)
        y, pull, outs = jax.vjp(exact, x, weights, has_aux=True)
        some, theirs = (forth_and_back(x, weights, experts, 2, suffix) for suffix in ("", "_reference"))
        return (y, outs, pull(g)), (*some, None), (*theirs, None)

    for capacity, (y, outs, cts) in zip((None, 2, 2), on(n, f, P("x"), P("x"))(x, weights, experts, g), strict=True):
        rows, sizes = (np.asarray(v) for v in outs)
        rows, kept = rows.reshape(n, -1, 8), np.zeros(experts.shape)
        assert rows.shape[1] == n * (tokens * k if capacity is None else 4)
        for d in range(n):
            at = 0
            for e in range(2 * d, 2 * d + 2):
                first = at
                for s in range(n):
                    mine = [(t, j) for t in range(s * tokens, (s + 1) * tokens) for j in range(k) if experts[t, j] == e]
                    for t, j in mine[:capacity]:
                        np.testing.assert_array_equal(rows[d, at], x[t])
                        kept[t, j], at = 1 + d, at + 1
                assert sizes[e] == at - first
            assert not rows[d, at:].any()
        shares = (weights * kept).sum(1, keepdims=True)
        agree([y], [x * shares], 1e-6)
        if cts is not None:
            agree(cts, [g * shares, kept * (x * g).sum(1, keepdims=True)], 1e-6)


def check_what_dispatch_refuses():
    x, experts = floats(2, 8), np.zeros((2, 2), np.int32)
    send = lambda x, experts, **options: ops.dispatch(x, experts, "x", **{"count": 4} | options)
    cases = [
        (KernelValueError, "at least one expert", lambda x, e: send(x, e, count=0)),
        (KernelValueError, "capacity is at least 1", lambda x, e: send(x, e, capacity=0)),
        (KernelValueError, "experts", lambda x, e: send(x, e[:1])),
        (KernelTypeError, "experts", lambda x, e: send(x, e > 0)),
        (
            KernelValueError,
            "3 rows and routes of 4 devices",
            lambda x, e: ops.combine(x[:1].repeat(3, 0), send(x, e)[2], "x"),
        ),
    ]
    for kind, words, f in cases:
        with pytest.raises(kind, match=words):
            on(4, f, P(), P())(x, experts)
