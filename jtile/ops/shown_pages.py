"""Pages of a cache of 8 bits as 16-bit floats, for kernels that read no others.

Tiles of a prompt read each key of their row once for each tile, so that a prompt of 1024 tokens has its keys converted
32 times where attention converts what it reads. Here a page is converted once a step: the pages that tiles see stand
behind each other in two arrays, in the order of the rows, and a table says where.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import tuned

_SLOTS = 8  # slots of a page that a program converts: those of 8 heads of 128 are 16 bytes of each thread of 8 warps


def _types(k, v, of_keys, of_values, source, *, dtype: str, **_):
    return tuple(jax.ShapeDtypeStruct((source.shape[0], *x.shape[1:]), dtype) for x in (k, v))


def _grid(k, v, of_keys, of_values, source, *, slots: int, **_):
    return source.shape[0], jt.cdiv(k.shape[1], slots)


@jt.kernel(out_type=_types, grid=_grid)
def shown(k, v, of_keys, of_values, source, keys, values, *, dtype: str, slots: int):
    """The pages source int32 [n] of k, v [pages, slots of a page, kv heads, d], times their scales of_keys, of_values
    float32 [pages, kv heads, slots of a page], as keys and values [n, slots of a page, kv heads, d]. What has the
    number -1 is not written."""
    i, s = jt.program_id(0), jt.program_id(1)
    page = source[i]
    if page >= 0:
        for codes, scales, out in ((k, of_keys, keys), (v, of_values, values)):
            C = codes.tiles(None, slots, codes.shape[2], codes.shape[3])[page, s, 0, 0].astype(jnp.float32)
            S = scales.tiles(None, scales.shape[1], slots)[page, 0, s]
            out.tiles(None, slots, *out.shape[2:])[i, s, 0, 0] = (C * S.T[:, :, None]).astype(out.dtype)


def places(lengths, table, page: int, most: int) -> tuple[jax.Array, jax.Array]:
    """Where pages stand that tiles see: (source int32 [most], the page at each place, -1 where there is none; int32
    like table, the place of each page of a tile).

    Tiles of a row follow each other, and see what the last of them sees; `most`: so many pages there are at most.

    Args:
      lengths: int32 [tiles], keys of the last token of each tile; less than 1 for padding.
      table: int32 [tiles, n], the pages of the row of each tile in order.
      page: slots of a page.
    """
    # Rows that run have a page of their own, into which the step writes, so that their tables differ.
    last = jnp.concatenate([jnp.any(table[1:] != table[:-1], axis=1), jnp.ones((1,), bool)])
    count = jnp.where(last, jnp.maximum(lengths + (page - 1), 0) // page, 0).astype(jnp.int32)
    ends = jnp.cumsum(count, dtype=jnp.int32)
    first = ends - count
    place = jnp.arange(most, dtype=jnp.int32)
    tile = jnp.sum(ends[None, :] <= place[:, None], axis=1, dtype=jnp.int32)  # whose page stands at a place
    there = tile < len(ends)
    tile = jnp.minimum(tile, len(ends) - 1)
    column = jnp.clip(place - first[tile], 0, table.shape[1] - 1)
    source = jnp.where(there, table[tile, column], -1)
    return source, jnp.minimum(first[:, None] + jnp.arange(table.shape[1], dtype=jnp.int32)[None, :], most - 1)


def pages(k, v, lengths, table, scales, *, most: int, dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(keys, values [most, slots of a page, kv heads, d] of 16 bits, int32 like table: the pages of each tile there)
    of a cache k, v with scales, as `shown` and `places` take them."""
    slots = k.shape[1]
    source, table = places(lengths, table, slots, most)
    share = max(s for s in range(1, min(_SLOTS, slots) + 1) if slots % s == 0)
    keys, values = tuned(shown, num_warps=8)(k, v, *scales, source, dtype=jnp.dtype(dtype).name, slots=share)
    return keys, values, table
