"""Kernels as users write them, whose tiles are `jt.auto`."""

import jax
import jax.numpy as jnp

import jtile as jt


@jt.kernel(
    out_type=lambda a, b, *, ta=False, tb=False: jt.like(a, shape=(a.shape[ta], b.shape[1 - tb])),
    grid=lambda a, b, *, bm, bn, ta=False, tb=False: (jt.cdiv(a.shape[ta], bm), jt.cdiv(b.shape[1 - tb], bn)),
)
def matmul(a, b, o, *, bm: int = jt.auto, bn: int = jt.auto, bk: int = jt.auto, ta=False, tb=False):
    i, j = jt.program_id(0), jt.program_id(1)
    A = a.tiles(bk, bm) if ta else a.tiles(bm, bk)
    B = b.tiles(bn, bk) if tb else b.tiles(bk, bn)
    whole = jnp.issubdtype(a.dtype, jnp.integer)
    acc = jt.zeros((bm, bn), jnp.int32 if whole else jnp.float32)
    for k in jt.range(A.shape[0 if ta else 1], stages=3):
        x = A[k, i].T if ta else A[i, k]
        y = B[j, k].T if tb else B[k, j]
        acc = jt.dot(x, y, acc)
    o.tiles(bm, bn)[i, j] = acc.astype(o.dtype)


@jt.kernel(
    out_type=lambda x, gate, up: jt.like(x, shape=(x.shape[0], up.shape[1])),
    grid=lambda x, gate, up, *, bm, bn: (jt.cdiv(x.shape[0], bm), jt.cdiv(up.shape[1], bn)),
)
def gated(x, gate, up, o, *, bm: int = jt.auto, bn: int = jt.auto, bk: int = jt.auto):
    i, j = jt.program_id(0), jt.program_id(1)
    X, G, U = x.tiles(bm, bk), gate.tiles(bk, bn), up.tiles(bk, bn)
    g, u = jt.zeros((bm, bn), jnp.float32), jt.zeros((bm, bn), jnp.float32)
    for k in jt.range(X.shape[1], stages=3):
        g, u = jt.dot(X[i, k], G[k, j], g), jt.dot(X[i, k], U[k, j], u)
    o.tiles(bm, bn)[i, j] = (jax.nn.silu(g) * u).astype(o.dtype)


@jt.kernel(out_type=lambda q, k, v, **_: jt.like(q), grid=lambda q, *_, bq, **__: (q.shape[0], jt.cdiv(q.shape[1], bq)))
def attention(q, k, v, o, *, bq: int = jt.auto, bk: int = jt.auto, causal=False):
    h, i = jt.program_id(0), jt.program_id(1)
    s, d = k.shape[1:]
    Q, K, V = q.tiles(None, bq, d), k.tiles(None, bk, d), v.tiles(None, bk, d)
    q_i, rows = Q[h, i, 0], i * bq + jt.arange(bq)
    m, l, acc = jt.full((bq,), -1e30, jnp.float32), jt.zeros((bq,), jnp.float32), jt.zeros((bq, d), jnp.float32)
    last = jnp.minimum(jt.cdiv((i + 1) * bq, bk), K.shape[1]) if causal else K.shape[1]
    for j in jt.range(last, stages=2):
        keys = j * bk + jt.arange(bk)
        x = jt.dot(q_i, K[h, j, 0].T) * d**-0.5
        seen = (keys < s)[None, :] & (rows[:, None] >= keys[None, :] if causal else (rows >= 0)[:, None])
        x = jnp.where(seen, x, -1e30)
        top = jnp.maximum(m, x.max(1))
        p, fade = jnp.exp(x - top[:, None]), jnp.exp(m - top)
        m, l, acc = top, l * fade + p.sum(1), jt.dot(p.astype(v.dtype), V[h, j, 0], acc * fade[:, None])
    o.tiles(None, bq, d)[h, i, 0] = (acc / l[:, None]).astype(o.dtype)


@jt.kernel(out_type=lambda x, y: jt.like(x), grid=lambda x, y, *, block: jt.cdiv(x.shape[0], block))
def vector_add(x, y, o, *, block: int = jt.auto):
    i = jt.program_id(0)
    o.tiles(block)[i] = x.tiles(block)[i] + y.tiles(block)[i]


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x, *, br: jt.cdiv(x.shape[0], br))
def softmax(x, o, *, br: int = jt.auto):
    i = jt.program_id(0)
    X, O = x.tiles(br, x.shape[1]), o.tiles(br, x.shape[1])
    t = X[i, 0]
    e = jnp.exp(t - t.max(1, keepdims=True))
    O[i, 0] = e / e.sum(1, keepdims=True)


@jt.kernel(
    out_type=lambda x: jt.like(x, shape=x.shape[::-1]),
    grid=lambda x, *, br, bc: (jt.cdiv(x.shape[0], br), jt.cdiv(x.shape[1], bc)),
)
def transpose(x, o, *, br: int = jt.auto, bc: int = jt.auto):
    i, j = jt.program_id(0), jt.program_id(1)
    o.tiles(bc, br)[j, i] = x.tiles(br, bc)[i, j].T


def spec(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)
