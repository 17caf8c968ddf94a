"""New tokens on their way from the projection to the cache, as in `cache_appends`, on Hopper at the block level: in
smaller programs, which are there when the projection in front of them ends."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.cache_appends import Projection, put, slot_of, step_types, turned
from jtile.ops.dispatch import first_unmet

_SHARES, _WARPS = 8, 4  # programs of a token, and warps of each


@jt.function
def _append(qkv, cos, sin, lengths, keys, q, new_keys, new_values, heads: int, kv_heads: int, ring: bool, shares: int):
    """What a program does: its share of the heads of a token."""
    (p, share), half = (jt.program_id(0), jt.program_id(1)), qkv.shape[2] // 2
    place = slot_of(p, qkv.shape[0], lengths, None, keys, ring)
    turn, halves = (cos[p, :][None], sin[p, :][None]), (slice(0, half), slice(half, 2 * half))
    of = lambda count, first=0: jt.ds(first + share * (count // shares), count // shares)
    for i, (first, count) in enumerate(((0, heads), (heads, kv_heads))):
        x = [qkv[p, of(count, first), side].astype(jnp.float32) for side in halves]
        for side, value in zip(halves, turned(*x, *turn), strict=True):
            if i == 0:
                q[p, of(heads), side] = value.astype(q.dtype)
            else:
                put(new_keys, place, value, of(kv_heads), side)
    put(new_values, place, qkv[p, of(kv_heads, heads + kv_heads), :], of(kv_heads), slice(0, 2 * half))


@jt.kernel(
    out_type=step_types,
    grid=lambda qkv, *_, shares, **__: (qkv.shape[-3], shares),
    alias={"keys": "new_keys", "values": "new_values"},
)
def hopper_append(
    qkv, cos, sin, lengths, keys, values, norms, table, q, new_keys, new_values,
    *, heads: int, kv_heads: int, eps: float = 0.0, ring: bool = False, dtype: str | None = None, shares: int = 1,
):  # fmt: skip
    """What `rope_append` does where there are neither norms nor pages; `shares`: the programs that share the heads of a
    token, a divisor of kv_heads."""
    del norms, table, eps
    with jt.role("all", warps=_WARPS, early=True):
        jt.wait_for_kernels()
        _append(Projection(qkv, dtype), cos, sin, lengths, keys, q, new_keys, new_values, heads, kv_heads, ring, shares)


def shares_of(qkv, keys, norms, table, *, heads: int, kv_heads: int) -> int | None:
    """The programs that share the heads of a token; None where `hopper_append` does not take a call: qkv [parts,
    tokens, heads + 2 kv_heads, head_dim]."""
    why = first_unmet(
        (gpu_tiles.overlaps(), "kernels do not overlap"),
        (gpu_tiles.on_one_device(), "rows may be shared out among several devices"),
        (not jax.sharding.get_abstract_mesh().manual_axes, "several devices share the heads"),
        (table is None, "the cache has pages"),
        (qkv.ndim == 4 and keys.dtype.itemsize == 2, "no parts of a sum, or a cache of other than 16 bits"),
        (not norms, "queries and keys have norms, which were not timed"),
        (qkv.shape[-1] in (64, 128, 256), f"heads have {qkv.shape[-1]} features"),
    )
    found = (n for n in (_SHARES, 4, 2, 1) if kv_heads % n == 0 and heads % n == 0)
    return next(found) if why is None else None
