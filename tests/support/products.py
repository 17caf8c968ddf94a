"""The tiled matrix product of the first page of the docs, in tiles of each test's choice."""

from __future__ import annotations

import jax.numpy as jnp

import jtile as jt


def tiled_matmul(bm: int, bn: int, bk: int, *, stages: int | None = None):
    """A fresh kernel `matmul(a, b, *, bm, bn, bk)` with these defaults; sums are float32."""

    @jt.kernel(
        out_type=lambda a, b, **_: jt.like(a, shape=(a.shape[0], b.shape[1])),
        grid=lambda a, b, *, bm, bn, **_: (jt.cdiv(a.shape[0], bm), jt.cdiv(b.shape[1], bn)),
    )
    def matmul(a, b, o, *, bm=bm, bn=bn, bk=bk):
        i, j = jt.program_id(0), jt.program_id(1)
        A, B, O = a.tiles(bm, bk), b.tiles(bk, bn), o.tiles(bm, bn)
        acc = jt.zeros((bm, bn), jnp.float32)
        for k in jt.range(A.shape[1], stages=stages):
            acc = jt.dot(A[i, k], B[k, j], acc)
        O[i, j] = acc.astype(o.dtype)

    return matmul
