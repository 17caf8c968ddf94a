"""Array programs as people write them in jnp, by `jt.fuse` and by XLA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from benchmarks.data import normal, size
from benchmarks.harness import Case

Program = tuple[Callable, tuple]


def cases() -> Iterator[Case]:
    for name, (fun, args) in programs().items():
        fixed = {"config": name, "dtype": "float32", "unit": "f32", "bytes": size(*jax.tree.leaves(args))}
        yield Case("fuse", ours=jt.fuse(fun), peers={"xla": fun}, args=args, flops=0, tolerance=2e-3, **fixed)


def programs(least: int = 1, *, times: int = 1, seed: Any = 0) -> dict[str, Program]:
    """{name: (function, arguments)}; sides are divided by `least`, or `times` as long, and lines by its square.

    The numbers are those of `seed`, which may be traced.
    """
    n = lambda side: max(side * times // least, 4)
    a = lambda number, *shape: normal(100 * seed + number, *shape)
    rows, wide = n(2048), n(1024)
    x, w, b = a(0, rows, wide), a(1, wide), a(2, wide)
    line = a(3, n(1 << 20) * times)
    heads = [a(k, 1, n(512), 8, 64) for k in (4, 5, 6)]
    labels = jnp.arange(rows) % wide
    positive = [jnp.abs(a(k, n(1 << 20) * times)) + 0.1 for k in (7, 8, 9)]
    return {
        "chain": (chain, (line, line)),
        "gelu": (jax.nn.gelu, (line,)),
        "swiglu": (swiglu, (x, x)),
        "outer sum": (outer_sum, (a(10, n(1024)), a(11, n(2048)))),
        "softmax": (jax.nn.softmax, (x,)),
        "log softmax": (jax.nn.log_softmax, (x,)),
        "entropy": (entropy, (x,)),
        "layer norm": (layer_norm, (x, w, b)),
        "rms norm": (rms_norm, (x, w)),
        "layer norm gradient": (gradient(layer_norm, 3), (x, w, b)),
        "rms norm gradient": (gradient(rms_norm, 2), (x, w)),
        "softmax gradient": (gradient(jax.nn.softmax, 1), (x,)),
        "residual and norm": (residual_and_norm, (x, x, w)),
        "causal attention": (causal_attention, tuple(heads)),
        "attention with bias": (attention_with_bias, (*heads, a(12, 8, n(512), n(512)))),
        "masked attention": (masked_attention, (*heads, jnp.arange(n(512)) % 3 > 0)),
        "gated MLP": (gated_mlp, (a(13, n(256), n(512)), a(14, n(512), n(1536)), a(15, n(512), n(1536)))),
        "cross-entropy": (cross_entropy, (x, labels)),
        "quantised product": (quantised_product, (a(16, n(256), wide), jnp.int8(w[:, None] * x.T[:, : n(512)] * 9), w)),
        "k-means": (k_means, (a(17, n(16384), 8), a(18, 16, 8))),
        "n-body": (n_body, (a(19, n(1024), 3), jnp.abs(a(20, n(1024))))),
        "distances": (distances, (a(21, n(1024), 4), a(22, n(1024), 4))),
        "stencil": (stencil, (a(23, n(1024), n(1024)),)),
        "heat": (heat, (a(24, n(512), n(512)),)),
        "blur": (blur, (a(25, n(1024), n(1024)),)),
        "Fourier by products": (fourier, (a(26, n(512), n(512)),)),
        "Black-Scholes": (black_scholes, tuple(positive)),
        "PageRank": (page_rank, (jnp.abs(a(27, n(1024), n(1024))),)),
        "selective scan": (selective_scan, (a(28, n(256), n(512)), a(29, n(256), n(512)))),
        "Adam": (adam, (line, line, line, jnp.abs(line))),
        "Mandelbrot": (mandelbrot, (a(30, n(512), n(512)), a(31, n(512), n(512)))),
        "column statistics": (column_statistics, (a(32, n(512), n(4096)),)),
    }


def gradient(fun: Callable, args: int) -> Callable:
    return jax.grad(lambda *xs: (fun(*xs) ** 2).sum(), argnums=tuple(range(args)))


def chain(x, y):
    return jnp.tanh(2 * x + 1) * jnp.exp(-y * y) + jnp.where(x > y, x, y)


def swiglu(x, y):
    return jax.nn.silu(x) * y


def outer_sum(x, y):
    return jnp.exp(-((x[:, None] - y[None, :]) ** 2))


def entropy(x):
    p = jax.nn.softmax(x)
    return -(p * jnp.log(p + 1e-9)).sum(-1)


def layer_norm(x, w, b):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * w + b


def rms_norm(x, w):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w


def residual_and_norm(x, r, w):
    s = x + r
    return s, rms_norm(s, w)


def _attention(q, k, v, change: Callable):
    scores = change(jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


def plain_attention(q, k, v):
    return _attention(q, k, v, lambda s: s)


def causal_attention(q, k, v):
    n = jnp.arange(q.shape[1])
    return _attention(q, k, v, lambda s: jnp.where(n[:, None] >= n[None, :], s, -jnp.inf))


def attention_with_bias(q, k, v, bias):
    return _attention(q, k, v, lambda s: s + bias)


def masked_attention(q, k, v, mask):
    return _attention(q, k, v, lambda s: jnp.where(mask, s, -1e9))


def gated_mlp(x, gate, up):
    return jax.nn.gelu(x @ gate) * (x @ up)


def embedding_gradient(tokens, slope, table):
    """The gradient of picking rows of a table, for that of the rows."""
    return jnp.zeros_like(table).at[tokens].add(slope)


def norm_and_product(x, weight, matrix):
    return rms_norm(x, weight) @ matrix


def linear_gelu(x, weight, bias):
    return jax.nn.gelu(x @ weight + bias)


def linear_residual(x, weight, bias, residual):
    return residual + jax.nn.silu(x @ weight + bias)


def cross_entropy(x, labels):
    logits = jax.nn.log_softmax(x)
    return -jnp.take_along_axis(logits, labels[:, None], axis=-1).mean()


def quantised_product(x, codes, scale):
    return x @ (codes.astype(jnp.float32) * scale[:, None])


def k_means(points, centres):
    far = ((points[:, None] - centres[None]) ** 2).sum(-1)
    mine = jax.nn.one_hot(far.argmin(-1), len(centres))
    return (mine.T @ points) / (mine.sum(0)[:, None] + 1e-9)


def n_body(places, masses):
    apart = places[None] - places[:, None]
    near = jax.lax.rsqrt((apart**2).sum(-1) + 1e-3)
    return (apart * (masses[None] * near**3)[..., None]).sum(1)


def distances(x, y):
    return jnp.sqrt(((x[:, None] - y[None]) ** 2).sum(-1))


def stencil(x):
    return x[1:-1, 1:-1] + 0.1 * (x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:] - 4 * x[1:-1, 1:-1])


def heat(x):
    step = lambda _, u: u.at[1:-1, 1:-1].set(stencil(u))
    return jax.lax.fori_loop(0, 10, step, x)


def blur(x):
    weights = np.exp(-(np.arange(-2, 3) ** 2) / 2)
    along = lambda x, axis: sum(w * jnp.roll(x, k - 2, axis) for k, w in enumerate(weights / weights.sum()))
    return along(along(x, 0), 1)


def fourier(x):
    n = jnp.arange(x.shape[0])
    angles = 2 * jnp.pi * (n[:, None] * n[None, :] % x.shape[0]) / x.shape[0]
    real, imaginary = jnp.cos(angles) @ x, jnp.sin(angles) @ x
    return jnp.sqrt(real**2 + imaginary**2)


def black_scholes(price, strike, time):
    spread = 0.2 * jnp.sqrt(time)
    first = (jnp.log(price / strike) + 0.05 * time) / spread
    share = lambda x: 0.5 * (1 + jax.lax.erf(x * 0.5**0.5))
    return price * share(first) - strike * jnp.exp(-0.03 * time) * share(first - spread)


def page_rank(links):
    flow = links / links.sum(0, keepdims=True)
    step = lambda _, rank: 0.85 * (flow @ rank) + 0.15 / len(rank)
    return jax.lax.fori_loop(0, 20, step, jnp.full(len(links), 1 / len(links)))


def selective_scan(x, gates):
    def step(state, given):
        value, gate = given
        state = state * jax.nn.sigmoid(gate) + value
        return state, jnp.tanh(state)

    return jax.lax.scan(step, jnp.zeros_like(x[0]), (x, gates))[1]


def adam(weight, slope, first, second):
    first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope**2
    return weight - 1e-3 * first / (jnp.sqrt(second) + 1e-8), first, second


def mandelbrot(x, y):
    u, v, steps = x, y, jnp.zeros_like(x)
    for _ in range(12):
        u, v = u * u - v * v + x, 2 * u * v + y
        steps = steps + (u * u + v * v < 4)
    return steps


def column_statistics(x):
    mean = x.mean(0)
    return mean, ((x - mean) ** 2).mean(0), x.max(0), x.min(0)
