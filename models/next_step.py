"""What a greedy step leaves when its tokens are known, and what the next one begins with: parts of the kernels of
`next_tokens` and `screened`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops.argmax import keys_of
from jtile.ops.operands import Weight
from jtile.ops.weight_codes import PANEL

IN_PLACE = {name: f"new_{name}" for name in ("tokens", "done", "out", "lengths")}


def types_of_next(tokens, done, out, lengths, frequencies, hidden: int, dtype: str):
    rows = tokens.shape[0]
    x = jax.ShapeDtypeStruct((rows, hidden), dtype)
    angles = tuple(jax.ShapeDtypeStruct((rows, *f.shape), jnp.float32) for f in frequencies)
    return *map(jt.like, (tokens, done, out, lengths)), x, x, angles, angles


def token_of(found, vocab: int, done, before):
    """The token of a row whose largest logit `found` tells; the one before where the row is done."""
    top, place = found
    chosen = jnp.where(top == keys_of(jnp.float32(jnp.nan)), jnp.int32(vocab), place)
    return jnp.where(done, before, chosen)


def leave(i, token, position, done, ends, column, new_tokens, new_done, new_out, new_lengths):
    """What this step leaves of row i; `position` was read before, since the lengths are written in place."""
    new_tokens[i], new_lengths[i] = token, position
    new_done[i] = done[i] | (ends[:] == token).any()
    new_out[i, column[...]] = token


def enter(i, token, position, table, frequencies, x, rest, cos, sin, hidden: int, dtype: str, scale: float, factors):
    """What the next step begins with, for row i."""
    x[i, :] = (_row(table, token, hidden).astype(dtype) * scale).astype(dtype)
    rest[i, :] = jnp.zeros((hidden,), dtype)
    for f, c, s, factor in zip(frequencies, cos, sin, factors):
        angle = position.astype(jnp.float32) * f[:]
        c[i, :], s[i, :] = jnp.cos(angle) * factor, jnp.sin(angle) * factor


def _row(table: Weight, token, hidden: int):
    """The weights [hidden] of a row of a table, zeros outside of it."""
    if table.scale is None:
        return table.codes[token, :]
    at = jt.arange(hidden)
    if table.codes.dtype == jnp.uint32:  # see `QuantizedTensor.packed`: of 16 weights, word t has those of all h and e
        h, t, e = at // 8 % 2, at // 2 % 4, at % 2
        words = table.codes[token, at // 16 * 4 + t]
        codes = (words >> (8 * h + 16 * e).astype(jnp.uint32) & jnp.uint32(255)).astype(jnp.int32) - 128
    elif table.codes.dtype == jnp.int32:  # panels, see `QuantizedTensor.in_panels`
        words, groups, panel, lane = hidden // 4, table.scale.shape[1], token // PANEL * PANEL, token % PANEL
        place, group = at // 4 * PANEL + lane, at // (hidden // groups) * PANEL + lane
        codes = table.codes[panel + place // words, place % words] << (24 - at % 4 * 8) >> 24
        scale = table.scale[panel + group // groups, group % groups]
        return codes.astype(jnp.float32) * scale.astype(jnp.float32)
    else:
        codes = table.codes[token, :].astype(jnp.int32)
    return codes.astype(jnp.float32) * table.scale[token, at // (hidden // table.scale.shape[1])].astype(jnp.float32)
