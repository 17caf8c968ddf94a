"""What editors know of kernels whose parameters are annotated: `.ci/typecheck` reads this file, and nobody runs it."""

from collections.abc import Mapping
from typing import assert_type

import jax
import jax.numpy as jnp

import jtile as jt


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x, *, rows: jt.cdiv(x.shape[0], rows))
def softmax(x: jt.Ref, o: jt.Ref, *, rows: int = 4) -> None:
    assert_type(x.shape, tuple[int, ...])
    X = assert_type(x.tiles(rows, x.shape[1]), jt.TileView)
    i = assert_type(jt.program_id(0), jax.Array)
    tile = assert_type(X[i, 0], jax.Array)
    total = assert_type(jt.zeros((rows,), jnp.float32), jax.Array)
    for k in jt.range(3, stages=2):
        assert_type(k, jax.Array)
        total = total + jnp.exp(tile).sum(1) * k
    assert_type(jt.dot(tile, tile.T), jax.Array)
    assert_type(x[0, :], jax.Array)
    assert_type(o.at[0, 0].add(total[0]), jax.Array)
    o.tiles(rows, x.shape[1])[i, 0] = tile / total[:, None]


assert_type(softmax, jt.Kernel)
assert_type(softmax.with_options(num_warps=4), jt.Kernel)
assert_type(softmax.lower(jnp.ones((8, 8)), target="cpu"), jt.Lowered)
assert_type(softmax.lower(jnp.ones((8, 8))).texts, Mapping[str, str])
