"""New tokens on their way from the projection to the cache: queries and keys are normalised and turned, keys and values
written to their slots."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

import jtile as jt


def _normed(x, weight, eps: float):
    """x [..., head_dim] / sqrt(mean(x^2) + eps) * weight."""
    unit = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return unit * weight.reshape((1,) * (x.ndim - 1) + (-1,))


def heads_of(x, norms, heads: int, kv_heads: int, eps: float):
    """Queries and keys of x [..., heads + 2 kv_heads, head_dim], float32, normalised by `norms`, two weights or ()."""
    x = x[..., : heads + kv_heads, :].astype(jnp.float32)
    if not norms:
        return x
    Q, K = x[..., :heads, :], x[..., heads:, :]
    return jnp.concatenate([_normed(Q, norms[0][:], eps), _normed(K, norms[1][:], eps)], axis=-2)


def rotated(x, cos, sin):
    """The pairs (i, i + half) of x [..., heads, head_dim] turned by the angles of cos, sin [..., 1, half]."""
    half = x.shape[-1] // 2
    return jnp.concatenate(turned(x[..., :half], x[..., half:], cos, sin), axis=-1)


def turned(low, high, cos, sin):
    """The two halves of `rotated`, from the halves of its x."""
    return low * cos - high * sin, high * cos + low * sin


def slot_of(p, rows: int, lengths, table, cache, ring: bool):
    """Where the cache keeps token p of the `rows` new ones, which lie row by row: (row or page, slot there, whether
    there is such a page, or None where that need not be asked).

    lengths int32 [batch]: tokens before this step, or -1 for a row that is padding, where there are pages. table: int32
    [batch, n], the pages of each row, or None; a negative number stands for no page. ring: slots are taken in turns:
    the slot of a token is its position modulo the number of slots."""
    batch, slots = lengths.shape[0], jnp.int32(cache.shape[1])
    t = rows // batch if batch != 0 else 1
    b, i = (p, 0) if t == 1 else (jax.lax.div(p, jnp.int32(t)), jax.lax.rem(p, jnp.int32(t)))
    at = lengths[b] + i
    at = jax.lax.rem(at, slots) if ring else at
    if table is None:
        return b, at, None
    block, last = jax.lax.div(at, slots), table.shape[1] - 1
    page = table[b, jnp.clip(block, 0, last)]
    return jnp.maximum(page, 0), jax.lax.rem(at, slots), (at >= 0) & (block <= last) & (page >= 0)


def put(cache, place, value, *part: slice) -> None:
    """Writes what the cache keeps of one token, or a part of it, to a place of `slot_of`."""
    row, at, there = place
    jt.store(cache, (row, at, *part, ...), value.astype(cache.dtype), mask=there)


def step_types(qkv, cos, sin, lengths, keys, values, norms, table, *, heads, dtype=None, **_):
    q = jax.ShapeDtypeStruct((qkv.shape[-3], heads, qkv.shape[-1]), dtype or qkv.dtype)
    return q, jt.like(keys), jt.like(values)


@dataclasses.dataclass(frozen=True)
class Projection:
    """The projection of new tokens [tokens, heads, head_dim], or float32 parts of it [parts, tokens, heads, head_dim],
    which are added up, and then rounded to `dtype`, where they are read."""

    ref: jt.Ref
    dtype: str | None

    @property
    def shape(self) -> tuple:
        return self.ref.shape[-3:]

    def __getitem__(self, at: tuple):
        if len(self.ref.shape) == 3:
            return self.ref[at]
        found = functools.reduce(jnp.add, [self.ref[(part, *at)] for part in range(self.ref.shape[0])])
        return found.astype(self.dtype or found.dtype)


@jt.kernel(
    out_type=step_types,
    grid=lambda qkv, *_, **__: (qkv.shape[-3],),
    alias={"keys": "new_keys", "values": "new_values"},
)
def rope_append(
    qkv, cos, sin, lengths, keys, values, norms, table, q, new_keys, new_values,
    *, heads: int, kv_heads: int, eps: float = 0.0, ring: bool = False, dtype: str | None = None,
):  # fmt: skip
    """The next t tokens of each row: rotates q and k of qkv [batch * t, heads + 2 kv_heads, head_dim] by float32 cos,
    sin [batch * t, head_dim / 2], and writes k and v into the caches [batch, slots, kv_heads, head_dim], or those of
    pages, in place and in their dtype. `norms`: see `heads_of`; `dtype`: of q, where qkv are parts, see `Projection`;
    the others: see `slot_of`."""
    p, qkv = jt.program_id(0), Projection(qkv, dtype)
    place, half = slot_of(p, qkv.shape[0], lengths, table, keys, ring), qkv.shape[2] // 2
    # p: position among all new tokens; X: its queries and keys, R: the same rotated; x, y: halves of them
    turn = cos[p, :][None], sin[p, :][None]
    if norms:
        X = qkv[p, : heads + kv_heads, :]
        R = rotated(heads_of(X, norms, heads, kv_heads, eps), *turn)
        q[p, :, :] = R[:heads].astype(q.dtype)
        put(new_keys, place, R[heads:])
    else:  # halves that are loaded and stored as such: on GPUs cutting and joining tiles goes through shared memory
        low, high = slice(0, half), slice(half, 2 * half)
        for first, count in ((0, heads), (heads, kv_heads)):
            some = slice(first, first + count)
            x, y = (qkv[p, some, side].astype(jnp.float32) for side in (low, high))
            for side, value in zip((low, high), turned(x, y, *turn), strict=True):
                if first == 0:
                    q[p, :, side] = value.astype(q.dtype)
                else:
                    put(new_keys, place, value, slice(0, kv_heads), side)
    put(new_values, place, qkv[p, heads + kv_heads :, :])
