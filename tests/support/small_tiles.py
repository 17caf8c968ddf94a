"""Kernels as people write them first: of small tiles, many programs, and masks at the edges."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtile as jt


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: (jt.cdiv(x.shape[0], 4), jt.cdiv(x.shape[1], 4)))
def lower_triangle(x, o):
    i, j = jt.program_id(0), jt.program_id(1)
    rows, columns = i * 4 + jt.arange(4)[:, None], j * 4 + jt.arange(4)[None, :]
    o.tiles(4, 4)[i, j] = jnp.where(columns <= rows, x.tiles(4, 4)[i, j], 0)


@jt.kernel(
    out_type=lambda x, w, b: jt.like(x, shape=(x.shape[0], w.shape[0])),
    grid=lambda x, w, b: (jt.cdiv(x.shape[0], 8), jt.cdiv(w.shape[0], 8)),
)
def layer(x, w, b, o):
    i, j = jt.program_id(0), jt.program_id(1)
    acc = jt.zeros((8, 8))
    for k in jt.range(x.tiles(8, 8).shape[1]):
        acc = jt.dot(x.tiles(8, 8)[i, k], w.tiles(8, 8)[j, k].T, acc)
    o.tiles(8, 8)[i, j] = jax.nn.relu(acc + b.tiles(8)[j][None, :])


@jt.kernel(out_type=lambda x: jt.like(x, shape=x.shape[:1]), grid=lambda x: x.shape[0])
def log_sum_exp(x, o):
    i, tiles = jt.program_id(0), x.tiles(None, 8, pad=-jnp.inf)
    m, s = -jnp.inf, 0.0
    for k in jt.range(tiles.shape[1]):
        t = tiles[i, k]
        new = jnp.maximum(m, t.max())
        s, m = s * jnp.exp(m - new) + jnp.exp(t - new).sum(), new
    o[i] = m + jnp.log(s)


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: jt.cdiv(x.shape[0], 8))
def backwards(x, o):
    i = jt.program_id(0)
    places = x.shape[0] - 1 - (i * 8 + jt.arange(8))
    o.tiles(8)[i] = jt.load(x, places, mask=places >= 0, other=0)


@jt.kernel(
    out_type=lambda table, ids: jt.like(table, shape=(ids.shape[0], table.shape[1])),
    grid=lambda table, ids: ids.shape[0],
)
def look_up(table, ids, o):
    i = jt.program_id(0)
    o[i, :] = table[ids[i], :]


@jt.kernel(out_type=lambda x: jt.like(x, shape=x.shape[:1]), grid=lambda x: x.shape[0])
def row_maxima(x, o):
    i, tiles = jt.program_id(0), x.tiles(None, 8, pad=-jnp.inf)
    m = -jnp.inf
    for k in jt.range(tiles.shape[1]):
        m = jnp.maximum(m, tiles[i, k].max())
    o[i] = m


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: jt.cdiv(x.shape[0], 8))
def shares(x, o):
    i = jt.program_id(0)
    t = x.tiles(8)[i]
    o.tiles(8)[i] = t / t.sum()


@jt.kernel(out_type=lambda ids: jt.like(ids, shape=(10,)), grid=lambda ids: jt.cdiv(ids.shape[0], 8), init=0)
def histogram(ids, o):
    i = jt.program_id(0)
    here = i * 8 + jt.arange(8) < ids.shape[0]
    jt.atomic_add(o, ids.tiles(8)[i], jt.ones(8, jnp.int32), mask=here)


@jt.kernel(
    out_type=lambda a, b: jt.like(a, shape=(a.shape[0], b.shape[1]), dtype=jnp.int32 if a.dtype == jnp.int8 else None),
    grid=lambda a, b: (jt.cdiv(a.shape[0], 8), jt.cdiv(b.shape[1], 8)),
)
def matmul(a, b, o):
    i, j = jt.program_id(0), jt.program_id(1)
    acc = jt.zeros((8, 8), o.dtype)
    for k in jt.range(a.tiles(8, 8).shape[1]):
        acc = jt.dot(a.tiles(8, 8)[i, k], b.tiles(8, 8)[k, j], acc)
    o.tiles(8, 8)[i, j] = acc


@jt.kernel(out_type=lambda q, k, v: jt.like(q), grid=lambda q, k, v: jt.cdiv(q.shape[0], 8))
def attention(q, k, v, o):
    i, d = jt.program_id(0), q.shape[1]
    m, l, acc = jt.full(8, -1e30), jt.zeros(8), jt.zeros((8, d))
    for j in jt.range(k.tiles(8, d).shape[0]):
        s = jt.dot(q.tiles(8, d)[i, 0], k.tiles(8, d)[j, 0].T) * d**-0.5
        s = jnp.where(j * 8 + jt.arange(8)[None, :] < k.shape[0], s, -1e30)
        new = jnp.maximum(m, s.max(1))
        p, shrink = jnp.exp(s - new[:, None]), jnp.exp(m - new)
        l = l * shrink + p.sum(1)
        acc = jt.dot(p, v.tiles(8, d)[j, 0], acc * shrink[:, None])
        m = new
    o.tiles(8, d)[i, 0] = acc / l[:, None]


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: jt.cdiv(x.shape[0], 4))
def normalise(x, o):
    i, n = jt.program_id(0), x.shape[1]
    t = x.tiles(4, n)[i, 0]
    o.tiles(4, n)[i, 0] = (t - t.mean(1, keepdims=True)) / t.std(1, keepdims=True)


@jt.kernel(out_type=lambda x: jt.like(x, shape=x.shape[:1]), grid=lambda x: x.shape[0])
def row_sums(x, o):
    i, n = jt.program_id(0), x.shape[1]
    o[i] = x.tiles(None, n)[i, 0].sum()


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0])
def running_sums(x, o):
    i, before = jt.program_id(0), 0.0
    for k in jt.range(x.tiles(None, 8).shape[1]):
        t = x.tiles(None, 8)[i, k]
        o.tiles(None, 8)[i, k] = before + jnp.cumsum(t)
        before = before + t.sum()
