"""Attention to blocks of keys that lists of indices name: block-sparse patterns, and the selected branch of native
sparse attention (Yuan et al. 2025)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops._shapes import check_int, check_rank, check_shape, sums_in
from jtile.ops.attention_windows import LOG2_E
from jtile.ops.flash_attention import check_operands
from jtile.ops.online_softmax import NOTHING, normalised, online


@jt.kernel(
    out_type=lambda q, *_, **__: jt.like(q),
    grid=lambda q, k, v, blocks, o=None, **_: (q.shape[0], k.shape[2], blocks.shape[2]),
)
def block_sparse_tiles(q, k, v, blocks, o, *, bq: int, bk: int, scale: float, causal: bool):
    """q, o [batch, t, heads, d]; k, v [batch, s, kv heads, d]; blocks: int32 [batch, kv heads, t / bq, n]."""
    # The online softmax of `flash_attention` over the keys of the blocks in a list; all heads of a group have one list.
    b, h, i = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    d, group, wide = q.shape[3], q.shape[2] // k.shape[2], sums_in(q)
    Q, O = q.tiles(None, bq, group, d), o.tiles(None, bq, group, d)
    K, V = k.tiles(None, bk, None, d), v.tiles(None, bk, None, d)
    q_i = Q[b, i, h, 0].reshape(bq * group, d)
    rows = i * bq + jt.arange(bq * group)[:, None] // group
    m, l, acc = jt.full((bq * group,), NOTHING, wide), jt.zeros((bq * group,), wide), jt.zeros((bq * group, d), wide)
    for n in jt.range(blocks.shape[3]):
        named = blocks[b, h, i, n]
        j = jnp.clip(named, 0, K.shape[1] - 1)
        columns = j * bk + jt.arange(bk)[None, :]
        seen = (columns < k.shape[1]) & (named == j)
        seen = seen & (columns <= rows) if causal else jnp.broadcast_to(seen, (bq * group, bk))
        s = jnp.where(seen, jt.dot(q_i, K[b, j, h, 0].T) * (scale * LOG2_E), -jnp.inf)
        m, l, acc = online(s, V[b, j, h, 0], m, l, acc)
    O[b, i, h, 0] = normalised(acc, l).reshape(bq, group, d).astype(o.dtype)


@functools.partial(jax.jit, static_argnames=("queries", "keys", "causal", "scale"), inline=True)
def block_sparse_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, blocks: jax.Array, *, keys: int = 64, queries: int = 1,
    causal: bool = False, scale: float | None = None,
) -> jax.Array:  # fmt: skip
    """`softmax(scale q k^T) v` over the keys of the blocks that `blocks` names for each group of heads.

    With `queries` 1 every query has its own list, as in the selected branch of native sparse attention; with 64, say,
    it is block-sparse attention. Differentiable in q, k and v. Backwards, a program adds up the gradients of all lists
    of a head. On a GPU with more multiprocessors than there are heads and batch rows, each list has a program of its
    own, and gradients of keys and values are added up by atomic float additions: their order may differ between runs.

    Args:
      q: float array [batch, t, heads, d].
      k, v: float arrays [batch, s, kv_heads, d] of q's dtype; kv_heads divides heads.
      blocks: int [batch, kv_heads, ceil(t / queries), n], numbers of blocks of `keys` keys, in any order; a number
        that is none of a block, such as -1, stands for none. A block that a list names twice counts twice.
      keys: keys of a block, a power of two. queries: how many queries share a list.
      causal: query i sees keys j <= i only.
      scale: default 1 / sqrt(d).
    Returns:
      An array like `q`, computed in float32 (float64 for float64); a query that sees no key gives zeros.
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes or sizes that do not fit.
    """
    op = "block_sparse_attention"
    check_rank(op, "q", q, 4, "[batch, t, heads, d]")
    check_operands(op, q, k, v)
    check_int(op, blocks=blocks)
    check_rank(op, "blocks", blocks, 4, "[batch, kv_heads, ceil(t / queries), n]")
    for name, size in (("keys", keys), ("queries", queries)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise KernelTypeError(f"{op}: {name} is an int, the size of a block, got {size!r}")
    if keys < 1 or keys & (keys - 1) or queries < 1:
        raise KernelValueError(f"{op}: keys is a power of two and queries at least 1, got {keys} and {queries}")
    check_shape(op, "blocks", blocks, (q.shape[0], k.shape[2], jt.cdiv(q.shape[1], queries), blocks.shape[3]))
    if 0 in (q.size, k.size, blocks.size):
        return jnp.zeros(q.shape, q.dtype)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    return block_sparse_tiles(q, k, v, blocks.astype(jnp.int32), bq=queries, bk=keys, scale=scale, causal=causal)


def block_sparse_attention_reference(q, k, v, blocks, *, keys=64, queries=1, causal=False, scale=None):
    """`block_sparse_attention` in jnp, with the whole matrix of scores."""
    (batch, t, heads, d), (s, groups) = q.shape, k.shape[1:3]
    q, k, v, dtype = *(x.astype(sums_in(q)) for x in (q, k, v)), q.dtype
    named = blocks[..., None] == jnp.arange(jt.cdiv(s, keys), dtype=blocks.dtype)[None, None, None, None]
    times = jnp.repeat(jnp.repeat(named.sum(3), queries, 2)[:, :, :t], keys, 3)[..., :s].astype(q.dtype)
    if causal:
        places = (jax.lax.broadcasted_iota(jnp.int32, (t, s), axis) for axis in (0, 1))
        times = jnp.where(jnp.greater_equal(*places)[None, None], times, 0)
    x = jnp.einsum("btghd,bsgd->bghts", q.reshape(batch, t, groups, -1, d), k, precision="highest")
    times = times[:, :, None]
    x = jnp.where(times > 0, x * (d**-0.5 if scale is None else scale), -jnp.inf)
    top = x.max(-1, keepdims=True)
    p = times * jnp.exp(x - jnp.where(jnp.isfinite(top), top, 0.0))
    total = p.sum(-1, keepdims=True)
    p = p / jnp.where(total == 0, 1.0, total)
    return jnp.einsum("bghts,bsgd->btghd", p, v, precision="highest").reshape(batch, t, heads, d).astype(dtype)
