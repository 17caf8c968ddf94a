"""Gradients: the forward pass where it is needed, and the backward pass, against `jax.grad` of the `jnp` forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from benchmarks.data import TOLERANCE, normal, size
from benchmarks.harness import Case
from benchmarks.norms import EPS, rms_norm
from jtile import ops

DTYPES = (("float32", "f32"), ("bfloat16", "bf16"))


def cases() -> Iterator[Case]:
    for dtype, unit in DTYPES:
        yield from _matmul(dtype, unit)
        yield from _rows(dtype)
        yield from _attention(dtype, unit)


def pulled(f: Callable, moved: int) -> Callable:
    """`f`'s cotangents for its first `moved` arguments: a function of the result's cotangent and f's arguments."""

    def run(ct, *args):
        return jax.vjp(lambda *x: f(*x, *args[moved:]), *args[:moved])[1](ct)

    return run


def _matmul(dtype: str, unit: str) -> Iterator[Case]:
    n = 1024
    a, b, ct = (normal(s, n, n, dtype=dtype) for s in range(3))
    yield Case(
        workload="matmul_backward", config=f"{n}", dtype=dtype, ours=pulled(ops.matmul, 2),
        peers={"xla": pulled(jnp.matmul, 2)}, args=(ct, a, b), bytes=size(a, b, ct, a, b), flops=4 * n**3, unit=unit,
        tolerance=TOLERANCE[dtype],
    )  # fmt: skip


def _rows(dtype: str) -> Iterator[Case]:
    for rows, columns in ((4096, 1024), (1024, 4096)):
        x, ct = normal(0, rows, columns, dtype=dtype), normal(1, rows, columns, dtype=dtype)
        fixed = {"config": f"{rows}x{columns}", "dtype": dtype, "tolerance": TOLERANCE[dtype]}
        ours, peers = pulled(ops.softmax, 1), {"xla": pulled(jax.nn.softmax, 1)}
        moved = size(x, x, x, ct, x)  # x and y forwards, y, the cotangent and dx backwards
        yield Case("softmax_backward", ours=ours, peers=peers, args=(ct, x), bytes=moved, **fixed)
        weight = normal(2, columns, dtype=dtype)
        ours = pulled(lambda x, w: ops.rms_norm(x, w, eps=EPS), 2)
        peers = {"xla": pulled(rms_norm, 2)}
        moved = size(x, ct, x)
        yield Case("rms_norm_backward", ours=ours, peers=peers, args=(ct, x, weight), bytes=moved, **fixed)
    rows, vocabulary = 512, 32000
    x, ct = normal(0, rows, vocabulary, dtype=dtype), normal(1, rows)
    labels = jax.random.randint(jax.random.key(2), (rows,), 0, vocabulary)
    ours, peers = pulled(ops.cross_entropy, 1), {"xla": pulled(cross_entropy, 1)}
    yield Case(
        workload="cross_entropy_backward", config=f"{rows}x{vocabulary}", dtype=dtype, ours=ours, peers=peers,
        args=(ct, x, labels), bytes=size(x, x, x), tolerance=TOLERANCE[dtype],
    )  # fmt: skip


def cross_entropy(logits, labels):
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(logs, labels[:, None], axis=1)[:, 0]


def _attention(dtype: str, unit: str) -> Iterator[Case]:
    length, heads, width = 2048, 8, 64
    for groups, causal in ((8, False), (8, True), (2, True)):
        q, ct = (normal(s, 1, length, heads, width, dtype=dtype) for s in (0, 3))
        k, v = (normal(s, 1, length, groups, width, dtype=dtype) for s in (1, 2))
        ours = lambda q, k, v, causal=causal: ops.attention(q, k, v, causal=causal)
        peer = lambda q, k, v, causal=causal: jax.nn.dot_product_attention(q, k, v, is_causal=causal)
        plain = lambda q, k, v, causal=causal: attention(q, k, v, causal)
        pairs = length * (length + 1) // 2 if causal else length * length
        config = f"{length}, {heads} heads of {width}" + f", {groups} of keys" * (groups < heads) + ", causal" * causal
        yield Case(
            workload="attention_backward", config=config, dtype=dtype, ours=pulled(ours, 3),
            peers={"xla": pulled(peer, 3), "xla, plain": pulled(plain, 3)}, args=(ct, q, k, v),
            bytes=size(q, k, v, ct, q, k, v), flops=14 * pairs * heads * width, unit=unit, tolerance=TOLERANCE[dtype],
        )  # fmt: skip


def attention(q, k, v, causal: bool):
    """Attention by softmax, in float32, as people write it."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * q.shape[3] ** -0.5
    if causal:
        scores = jnp.where(jnp.tri(q.shape[1], k.shape[1], dtype=bool)[None, None], scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(v.dtype), v)
