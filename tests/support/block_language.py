"""Kernels written by hand at the block level, in the language."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import jtile as jt


def _product(a, b, *, at, bt, **_):
    return jt.like(a, shape=(a.shape[1 if at else 0], b.shape[0 if bt else 1]), dtype=sum_dtype(a))


def sum_dtype(a) -> np.dtype:
    return np.dtype(np.int32 if jnp.issubdtype(a.dtype, np.integer) else np.float32)


def _grid(a, b, *, bm, bn, at, bt, **_):
    return jt.cdiv(a.shape[1 if at else 0], bm), jt.cdiv(b.shape[0 if bt else 1], bn)


@jt.kernel(out_type=_product, grid=_grid)
def gemm(a, b, o, *, bm=64, bn=64, bk=32, slots=3, at=False, bt=False):
    """a @ b, with a stored as [k, m] where `at`, and b as [n, k] where `bt`; one consumer, one product in flight."""
    i, j = jt.program_id(0), jt.program_id(1)
    A = jt.alloc((bk, bm) if at else (bm, bk), a.dtype, slots=slots)
    B = jt.alloc((bn, bk) if bt else (bk, bn), b.dtype, slots=slots)
    C = jt.alloc((bm, bn), o.dtype)
    full, empty = jt.barrier(slots), jt.barrier(slots)
    rounds = jt.cdiv(a.shape[0 if at else 1], bk)
    turned = lambda x, flag: x.T if flag else x
    with jt.role("consumer", warps=4, registers=240):
        acc = jt.zeros((bm, bn), o.dtype)
        for k in jt.range(rounds):
            full.at(k).wait()
            acc = jt.dot_async(turned(A.at(k), at), turned(B.at(k), bt), acc, keep=k > 0)
            acc = jt.dot_wait(acc, pending=1)
            empty.at(k + slots - 1).arrive(when=k > 0)
        C.store(jt.dot_wait(acc))
        jt.fence_shared()
        jt.role_barrier()
        jt.async_copy(C, o.tiles(bm, bn).at[i, j])
        jt.store_wait()
    with jt.role("producer", warps=1, registers=24):
        for k in jt.range(rounds):
            empty.at(k).wait(before=True)
            full.at(k).expect(A.nbytes + B.nbytes)
            jt.async_copy(a.tiles(*A.shape).at[(k, i) if at else (i, k)], A.at(k), full.at(k))
            jt.async_copy(b.tiles(*B.shape).at[(j, k) if bt else (k, j)], B.at(k), full.at(k))


@jt.function
def _rows(q_full, k_full, k_empty, v_full, v_empty, Q, K, V, rounds, length, scale):
    """The rows of one consumer; the second product is one round behind, in flight while the softmax runs."""
    rows, columns, d = Q.shape[0], K.shape[0], Q.shape[1]

    def scores(s, k):
        inside = k * columns + jt.arange(columns) < length
        return jnp.where(inside[None, :], s * scale, -jnp.inf)

    q_full.wait(0)
    k_full.at(0).wait()
    s = scores(jt.dot_wait(jt.dot_async(Q, K[0].T)), 0)
    k_empty[0].arrive()
    m = s.max(1)
    p = jnp.exp2(s - m[:, None])
    total, acc = p.sum(1), jt.zeros((rows, d), jnp.float32)
    p = p.astype(Q.dtype)
    for k in jt.range(1, rounds):
        k_full.at(k).wait()
        s = jt.dot_async(Q, K.at(k).T)
        v_full.at(k - 1).wait()
        acc = jt.dot_async(p, V.at(k - 1), acc)
        s = scores(jt.dot_wait(s, pending=1), k)
        k_empty.at(k).arrive()
        new = jnp.maximum(m, s.max(1))
        alpha = jnp.exp2(m - new)
        e = jnp.exp2(s - new[:, None])
        total, m = total * alpha + e.sum(1), new
        acc = jt.dot_wait(acc) * alpha[:, None]
        v_empty.at(k - 1).arrive()
        p = e.astype(Q.dtype)
    v_full.at(rounds - 1).wait()
    return jt.dot_wait(jt.dot_async(p, V.at(rounds - 1), acc)) / total[:, None]


@jt.kernel(
    out_type=lambda q, k, v, **_: jt.like(q),
    grid=lambda q, k, v, *, rows, **_: (q.shape[0], jt.cdiv(q.shape[1], 2 * rows)),
)
def attention(q, k, v, o, *, rows=64, columns=64, slots=2):
    """Softmax attention of q [heads, m, d] over k, v [heads, n, d]."""
    h, i = jt.program_id(0), jt.program_id(1)
    d, length = q.shape[2], k.shape[1]
    rounds = jt.cdiv(length, columns)
    Q = [jt.alloc((rows, d), q.dtype) for _ in range(2)]
    K, V = jt.alloc((columns, d), k.dtype, slots=slots), jt.alloc((columns, d), v.dtype, slots=slots)
    q_full = jt.barrier(2)
    k_full, k_empty, v_full, v_empty = (jt.barrier(slots, arrivals=1 + x) for x in (0, 1, 0, 1))
    tile = lambda x, n: x.tiles(None, n, d)
    for w in range(2):
        with jt.role(f"rows{w}", warps=4, registers=240):
            scale = float(np.log2(np.e) / np.sqrt(d))
            out = _rows(q_full[w], k_full, k_empty, v_full, v_empty, Q[w], K, V, rounds, length, scale)
            Q[w].store(out.astype(o.dtype))
            jt.fence_shared()
            jt.role_barrier()
            jt.async_copy(Q[w], tile(o, rows).at[h, 2 * i + w, 0])
            jt.store_wait()
    with jt.role("producer", warps=1, registers=24):
        for w in range(2):
            q_full[w].expect(Q[w].nbytes)
            jt.async_copy(tile(q, rows).at[h, 2 * i + w, 0], Q[w], q_full[w])
        for r in jt.range(rounds):
            for x, ring, full, empty in ((k, K, k_full, k_empty), (v, V, v_full, v_empty)):
                empty.at(r).wait(before=True)
                full.at(r).expect(ring.nbytes)
                jt.async_copy(x.at[h, jt.ds(r * columns, columns), :], ring.at(r), full.at(r))
