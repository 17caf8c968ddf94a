"""Drawing one of the likeliest tokens of each row of logits (nucleus sampling, Holtzman et al. 2020) without a sort."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops._shapes import check_float, fit, machine, tuned

_BITS = 30  # of a number from 0 to 1
_ONE = 0x3F800000  # the bits of 1.0; bits of numbers from 0 to 1, as integers, are in the order of the numbers


@jt.function
def _bound(W, count, enough, bits: int):
    """The bits of the largest number c, at most 1, with sum_{w_j >= c} w_j >= enough, found `bits` of its 30 bits at a
    time: a pass over the row adds up what is above each number that they may make."""
    low = jnp.int32(0)
    for turn in jt.range(_BITS // bits):
        step = jnp.int32(1) << (_BITS - bits - bits * turn)
        bounds = [low + digit * step for digit in range(1, 1 << bits)]
        levels = [jax.lax.bitcast_convert_type(bound, jnp.float32) for bound in bounds]
        added = jnp.sum if bits == 1 else jnp.asarray  # of several sums, each place of a tile has its own
        above = tuple(jnp.zeros(() if bits == 1 else W.tile_shape, jnp.float32) for _ in bounds)
        for k in jt.range(count):
            w = W[k]
            above = tuple(a + added(jnp.where(w >= level, w, 0.0)) for a, level in zip(above, levels))
        fits = [(a.sum() >= enough) & (bound <= _ONE) for a, bound in zip(above, bounds)]
        low = low + step * sum(jnp.where(fit, 1, 0) for fit in fits)  # what is above falls from digit to digit
    return low


@jt.kernel(
    out_type=lambda x, *_, **__: jax.ShapeDtypeStruct((x.shape[0],), jnp.int32),
    grid=lambda x, *_, **__: x.shape[0],
    scratch=lambda x, *_, bn, **__: jax.ShapeDtypeStruct((jt.cdiv(x.shape[1], bn) * bn,), jnp.float32),
)
def top_p_rows(x, p, heat, drawn, y, weights, *, bn: int, bits: int):
    """x [rows, n], p, heat (1 / temperature) and drawn (in [0, 1)) float32 [rows]; y [rows]."""
    # w_j = exp((x_j - max x) heat)     c: the largest number with sum_{w_j >= c} w_j >= p sum_j w_j
    # y: the first j with sum_{i <= j, w_i >= c} w_i > drawn sum_{w_i >= c} w_i
    i, n = jt.program_id(0), x.shape[1]
    X, W = x.tiles(None, bn, pad=-jnp.inf), weights.tiles(bn)
    count = X.shape[1]
    top = jnp.float32(-jnp.inf)
    for k in jt.range(count):
        top = jnp.maximum(top, X[i, k].astype(jnp.float32).max())
    total = jnp.float32(0)
    for k in jt.range(count):
        w = jnp.exp((X[i, k].astype(jnp.float32) - top) * heat[i])
        w = jnp.where(k * bn + jt.arange(bn) < n, w, 0.0)
        W[k] = w
        total = total + w.sum()
    low = _bound(W, count, p[i] * total, bits)
    level = jax.lax.bitcast_convert_type(low, jnp.float32)
    kept = jnp.float32(0)
    for k in jt.range(count):
        kept = kept + jnp.where(W[k] >= level, W[k], 0.0).sum()
    goal, before, found, last = drawn[i] * kept, jnp.float32(0), jnp.int32(n), jnp.int32(0)
    for k in jt.range(count):
        w = jnp.where(W[k] >= level, W[k], 0.0)
        at = k * bn + jt.arange(bn)
        reached = (before + jnp.cumsum(w) > goal) & (w > 0)
        found = jnp.minimum(found, jnp.where(reached, at, n).min())
        last = jnp.maximum(last, jnp.where(w > 0, at, 0).max())
        before = before + w.sum()
    y[i] = jnp.where(found < n, found, last)  # if rounding leaves the sum below the goal: the last with a weight


@functools.partial(jax.jit, inline=True)
def sample_top_p(logits: jax.Array, key: jax.Array, *, p: Any = 1.0, temperature: Any = 1.0) -> jax.Array:
    """A token of each row, drawn from the smallest set of likeliest tokens whose probabilities sum to at least `p`.

    Tokens of equal probability enter the set together. The bound of the set is found bit by bit, by 30 sums of a row
    that stays in a cache, instead of by a sort. Not differentiable: the result holds integers.

    Args:
      logits: float array [..., n]; computed in float32. -inf bans a token.
      key: a key that `jax.random.key` gives; equal keys draw equal tokens. One uniform number is drawn for each row.
      p: in (0, 1], a number or an array [...]. temperature: above 0, likewise; logits are divided by it.
    Returns:
      int32 [...].
    Raises:
      KernelTypeError: no floats. KernelValueError: no tokens, p or temperature out of range or of another shape.
    """
    op = "sample_top_p"
    check_float(op, logits=logits)
    if logits.ndim < 1 or logits.shape[-1] == 0:
        raise KernelValueError(f"{op}: logits is [..., n] of at least one token, got shape {tuple(logits.shape)}")
    shape = logits.shape[:-1]
    p, temperature = (_of_rows(op, name, x, shape) for name, x in (("p", p), ("temperature", temperature)))
    if 0 in shape:
        return jnp.zeros(shape, jnp.int32)
    drawn = jax.random.uniform(key, shape, jnp.float32)
    rows = logits.reshape(-1, logits.shape[-1])
    bn = fit(rows.shape[1], 2048 if machine().whole else 4096)
    bits = 1 if machine().whole else 3  # a GPU waits for passes over a row, a CPU computes
    kernel = tuned(top_p_rows, num_warps=32)
    found = kernel(rows, p.reshape(-1), (1 / temperature).reshape(-1), drawn.reshape(-1), bn=bn, bits=bits)
    return found.reshape(shape)


def _of_rows(op: str, name: str, x: Any, shape: tuple[int, ...]):
    """A number or an array as a float32 number for each row."""
    if isinstance(x, bool):
        raise KernelTypeError(f"{op}: {name} is a number or a float array, got {x!r}")
    if isinstance(x, int | float):
        if not (0 < x <= 1 if name == "p" else 0 < x < float("inf")):
            raise KernelValueError(f"{op}: {name} is {'in (0, 1]' if name == 'p' else 'above 0'}, got {x}")
        return jnp.full(shape, x, jnp.float32)
    check_float(op, **{name: x})
    if x.shape not in ((), shape):
        raise KernelValueError(f"{op}: {name} has shape {tuple(x.shape)}, expected () or {tuple(shape)}")
    return jnp.broadcast_to(x.astype(jnp.float32), shape)


def sample_top_p_reference(logits, key, *, p=1.0, temperature=1.0):
    """`sample_top_p` in jnp, with a sort."""
    shape = logits.shape[:-1]
    p, temperature = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), shape)[..., None] for x in (p, temperature))
    x = logits.astype(jnp.float32) / temperature
    w = jnp.exp(x - x.max(-1, keepdims=True))
    down = -jnp.sort(-w, axis=-1)
    enough = jnp.cumsum(down, -1) >= p * w.sum(-1, keepdims=True)
    last = jnp.where(enough.any(-1, keepdims=True), enough.argmax(-1, keepdims=True), w.shape[-1] - 1)
    kept = jnp.where(w >= jnp.take_along_axis(down, last, -1), w, 0)
    sums = jnp.cumsum(kept, -1)
    drawn = jax.random.uniform(key, shape, jnp.float32)[..., None]
    return ((sums > drawn * sums[..., -1:]) & (kept > 0)).argmax(-1).astype(jnp.int32)
