"""Reverse mode of attention with heads of 129 to 256 features for Hopper, in two kernels: registers do not hold the
gradients of keys and values beside a part of those of queries. That of queries gets its roles by itself."""

from __future__ import annotations

import jax.numpy as jnp

from jtile.ops._shapes import fit, machine, tuned
from jtile.ops.attention_gradients import attention_delta_tiles, attention_gradient_of_queries
from jtile.ops.attention_windows import Window
from jtile.ops.dispatch import first_unmet
from jtile.ops.hopper_attention_backward import in_shares, of_rows, shares
from jtile.ops.hopper_backward_roles import LEAST
from jtile.ops.hopper_wide_keys import SIDE, hopper_wide_keys

_WIDE = 256
# Of the gradient of queries: 723 us for 2 x 16 heads of 4096 positions, causal, on an H200; tiles of 64 x 32 847, of
# 128 x 32 998, and two roles of 64 queries each, which share keys, 911.
_TILES = {"bq": 64, "bk": 64}


def misfit(q, k, *_, softcap: float | None, scale: float, dropout: float = 0.0, **__) -> str | None:
    """Why `gradients` cannot compute the gradients of this call, None where it can."""
    known = all(isinstance(n, int) for n in (*q.shape, *k.shape))
    return first_unmet(
        (known, "sizes are not known"),
        (128 < q.shape[3] <= _WIDE, f"heads have {q.shape[3]} features, not 129 to {_WIDE}"),
        (q.dtype in (jnp.bfloat16, jnp.float16), f"operands are {q.dtype.name}, not 16-bit floats"),
        (softcap is None or softcap >= LEAST, f"scores are capped at {softcap}"),
        (not dropout, "weights are dropped"),
        (scale > 0, f"the scale is {scale}"),
    )


def gradients(
    q, k, v, o, lse, g, ct, lengths, offsets, seeds=None,
    *, scale: float, softcap: float | None, window: Window, dropout: float = 0.0,
):  # fmt: skip
    """(dq, dk, dv) for the cotangents g of o and ct of lse (or None); arguments as those of `attention_backward`."""
    del seeds, dropout
    return of_rows(of_batch, scale=scale, softcap=softcap, window=window)(q, k, v, o, lse, g, ct, lengths, offsets)


def of_batch(
    q, k, v, o, lse, g, ct, lengths, offsets, *, scale: float, softcap: float | None = None, window: Window
):  # fmt: skip
    """The result of `gradients`, without a rule for vmap."""
    options = {"scale": scale, "softcap": softcap, "window": window}
    (batch, t, heads, d), (keys, groups) = q.shape, k.shape[1:3]
    if (parts := shares(q, k, SIDE)) > 1:
        rest = o, lse, g, ct, lengths, offsets
        return in_shares(parts, of_batch, q, k, v, *rest, **options)
    n = fit(t, max(1, machine().tile // d))
    delta = tuned(attention_delta_tiles, num_warps=4)(o, g, ct, n=n, dtype="float32")
    if d != _WIDE:
        q, k, v, g = (jnp.pad(x, ((0, 0),) * 3 + ((0, _WIDE - d),)) for x in (q, k, v, g))
    of_group = lambda x: x.reshape(batch, t, groups, heads // groups, _WIDE)
    lines = [jnp.pad(x, ((0, 0), (0, 0), (0, -t % 4))) if t % 4 else x for x in (lse, delta)]  # lines of tensor maps
    lines = [x.reshape(batch, groups, heads // groups, -1) for x in lines]
    counted = lengths is not None or offsets is not None
    counts = jnp.full((batch,), keys, jnp.int32) if lengths is None else lengths
    starts = jnp.zeros((batch,), jnp.int32) if offsets is None else offsets
    dk, dv = hopper_wide_keys(of_group(q), k, v, of_group(g), *lines, counts, starts, counted=counted, **options)
    of_queries = tuned(attention_gradient_of_queries, num_warps=8)
    dq = of_queries(q, k, v, g, lse, delta, lengths, offsets, None, dropout=0.0, **_TILES, **options)
    return tuple(x if d == _WIDE else x[..., :d] for x in (dq, dk, dv))
