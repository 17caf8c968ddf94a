"""Peers of the collectives that have none in `jax.lax`: what one would write with XLA's collectives, in the dtype of
the operands, with products in bfloat16 and sums in float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

RANK = 512  # of the latent vectors of a DeepSeek cache
# Tiles that Pallas's collective product for Hopper is tried with: rows, columns, whose sides two warpgroups share.
MOSAIC = ((128, 128, "M"), (128, 128, "N"), (64, 128, "M"), (128, 64, "N"))


def mla_decode(q: jax.Array, cache: jax.Array, lengths: jax.Array, axis: str) -> jax.Array:
    """`collectives.mla_decode` of q [rows, heads, 576] over this device's cache [rows, slots, 576]."""
    return _decoded(q[:, None], cache[:, :, None], cache[:, :, None, :RANK], lengths, axis)[:, 0]


def decode_attention(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, axis: str) -> jax.Array:
    """`collectives.decode_attention` of q [rows, heads, d] over this device's k and v [rows, slots, groups, d]."""
    rows, heads, d = q.shape
    grouped = q.reshape(rows, k.shape[2], heads // k.shape[2], d)
    return _decoded(grouped, k, v, lengths, axis).reshape(rows, heads, -1)


def _decoded(q, k, v, lengths, axis):
    """q [rows, groups, group, d], k [rows, slots, groups, d], v [rows, slots, groups, r]: [rows, groups, group, r]."""
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    s = product("bghd,bsgd->bghs", q, k) * q.shape[-1] ** -0.5
    seen = jnp.arange(k.shape[1], dtype=jnp.int32) < lengths[:, None]
    s = jnp.where(seen[:, None, None, :], s, -jnp.inf)
    top = jax.lax.pmax(s.max(-1, keepdims=True), axis)
    p = jnp.exp(s - top)
    total, y = jax.lax.psum((p.sum(-1, keepdims=True), product("bghs,bsgr->bghr", p.astype(v.dtype), v)), axis)
    return (y / total).astype(q.dtype)


def mosaic_all_gather_matmul(x: jax.Array, w: jax.Array, axis: str, tiles: tuple[int, int, str]) -> jax.Array:
    """`collectives.all_gather_matmul` by Pallas's kernel for Hopper, over all GPUs of one process."""
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu, hopper_matmul_mgpu

    rows, columns, shared = tiles
    sides = hopper_matmul_mgpu.MatmulDimension
    config = hopper_matmul_mgpu.TuningConfig(
        tile_m=rows, tile_n=columns, tile_k=64, max_concurrent_steps=4, grid_minor_dim=sides.N, grid_tile_width=8,
        wg_dimension=sides[shared],
    )  # fmt: skip
    return collective_matmul_mgpu.all_gather_lhs_matmul(x, w, axis, config=config, dtype=x.dtype)


def to_experts(x: jax.Array, experts: jax.Array, count: int, axis: str) -> jax.Array:
    """Tokens x [tokens, hidden] in the order of their experts [tokens, k] on the devices that have these, by
    `jax.lax.ragged_all_to_all`, and back; the mean of each token's k rows."""
    n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    (tokens, k), each = experts.shape, -(-count // n)
    of = experts.reshape(-1)
    order = jnp.argsort(of, stable=True)
    counts = jnp.zeros((n * each,), jnp.int32).at[of].add(1).reshape(n, each)
    tables = jax.lax.all_gather(counts, axis)  # [from, to, expert]
    sizes = tables.sum(2)
    before = lambda a, along: jnp.cumsum(a, along) - a
    sent_at, kept_at = before(sizes, 1), before(sizes, 0)
    box = jnp.zeros((n * tokens * k, x.shape[1]), x.dtype)
    box = jax.lax.ragged_all_to_all(
        x[order // k], box, sent_at[me], sizes[me], kept_at[me], sizes[:, me], axis_name=axis
    )
    arrived = tables[:, me].reshape(-1)  # by device, within it by expert
    expert = jnp.repeat(jnp.tile(jnp.arange(each), n), arrived, total_repeat_length=len(box))
    used = jnp.arange(len(box)) < arrived.sum()
    by_expert = jnp.argsort(jnp.where(used, expert, each), stable=True)
    rows = box[by_expert]  # what the products of the experts would take
    box = jnp.zeros_like(box).at[by_expert].set(rows, unique_indices=True)
    back = jnp.zeros((tokens * k, x.shape[1]), x.dtype)
    back = jax.lax.ragged_all_to_all(box, back, kept_at[:, me], sizes[:, me], sent_at[:, me], sizes[me], axis_name=axis)
    mine = jnp.zeros_like(back).at[order].set(back, unique_indices=True)
    return mine.reshape(tokens, k, -1).astype(jnp.float32).mean(1).astype(x.dtype)
