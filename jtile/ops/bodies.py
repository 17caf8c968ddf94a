"""Forces between all pairs of bodies."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops._shapes import check_float, check_shape, fit, machine, sums_in, tuned, wide


@jt.kernel(
    out_type=lambda x, *_, **__: jt.like(x, dtype=sums_in(x)),
    grid=lambda x, *_, bi, **__: (x.shape[0], jt.cdiv(x.shape[2], bi)),
)
def n_body_tiles(x, masses, a, *, bi: int, bj: int, softening: float, spread: bool):
    """x, a [batch, d, n], masses [batch, n]. `spread`: each pair of a tile has sums of its own, which are added up at
    the end."""
    # a_i = sum_j m_j (x_j - x_i) / (|x_j - x_i|^2 + softening^2)^(3/2)
    # M: tiles of the masses; c: coordinate
    b, i, d = jt.program_id(0), jt.program_id(1), x.shape[1]
    at, near, M = x.tiles(None, None, bi), x.tiles(None, None, bj), masses.tiles(None, bj)
    own = [wide(at[b, c, i])[:, None] for c in range(d)]
    sums = tuple(jt.zeros((bi, bj) if spread else (bi,), a.dtype) for _ in range(d))
    never_zero = a.dtype.type(softening) ** 2 >= jnp.finfo(a.dtype).tiny
    for j in jt.range(M.shape[1]):
        apart = [wide(near[b, c, j])[None, :] - own[c] for c in range(d)]
        square = functools.reduce(lambda total, r: total + r * r, apart, jnp.asarray(softening**2, a.dtype))
        inverse = jax.lax.rsqrt(square if never_zero else jnp.where(square > 0, square, 1.0))
        pull = wide(M[b, j])[None, :] * inverse * (inverse * inverse)
        pull = pull if never_zero else jnp.where(square > 0, pull, 0.0)
        sums = tuple(s + (pull * r if spread else (pull * r).sum(1)) for s, r in zip(sums, apart, strict=True))
    for c in range(d):
        a.tiles(None, None, bi)[b, c, i] = sums[c].sum(1) if spread else sums[c]


@functools.partial(jax.jit, static_argnames=("softening",), inline=True)
def n_body(positions: jax.Array, masses: jax.Array, *, softening: float = 0.0) -> jax.Array:
    """The acceleration of every body by the gravity of all others, with a gravitational constant of 1.

    `a_i = sum_j m_j (x_j - x_i) / (|x_j - x_i|^2 + softening^2)^(3/2)` (Plummer's softening), computed in float32
    (float64 for float64) in tiles of pairs, so that no array of pairs is in memory. Differentiable in both arrays.
    Bodies at one place do not pull each other.

    Args:
      positions: float array [..., n, d] of d = 1 to 4 coordinates.
      masses: float array [..., n] of the dtype of positions.
      softening: a length, 0 or more, that bounds the pull of near bodies.
    Returns:
      An array like `positions`.
    Raises:
      KernelTypeError: no float arrays, no number. KernelValueError: shapes or a softening that do not fit.
    """
    check_float("n_body", positions=positions, masses=masses)
    if positions.ndim < 2 or not 1 <= positions.shape[-1] <= 4:
        raise KernelValueError(f"n_body: positions is [..., n, d], d of 1 to 4, got shape {tuple(positions.shape)}")
    check_shape("n_body", "masses", masses, positions.shape[:-1])
    if masses.dtype != positions.dtype:
        raise KernelTypeError(f"n_body: masses have dtype {masses.dtype.name}, positions {positions.dtype.name}")
    if isinstance(softening, bool) or not isinstance(softening, int | float):
        raise KernelTypeError(f"n_body: softening is a number, got {softening!r}")
    if not 0 <= softening < math.inf:
        raise KernelValueError(f"n_body: softening is a length, 0 or more, got {softening}")
    if positions.size == 0:
        return positions
    n, d = positions.shape[-2:]
    x, m = positions.reshape(-1, n, d).swapaxes(1, 2), masses.reshape(-1, n)
    bi, bj = (fit(n, 16), fit(n, 256)) if machine().whole else (fit(n, 64), fit(n, 64))
    # a GPU takes longer to add up over its threads than to compute what is added up
    kernel, spread = tuned(n_body_tiles, num_warps=4), not machine().whole
    found = kernel(x, m, bi=bi, bj=bj, softening=float(softening), spread=spread)
    return found.swapaxes(1, 2).reshape(positions.shape).astype(positions.dtype)


def n_body_reference(positions, masses, *, softening=0.0):
    """`n_body` in jnp, with an array of all pairs."""
    x, m = wide(positions), wide(masses)
    apart = x[..., None, :, :] - x[..., :, None, :]
    square = (apart * apart).sum(-1) + softening**2
    inverse = jax.lax.rsqrt(jnp.where(square > 0, square, 1.0))
    pull = jnp.where(square > 0, m[..., None, :] * inverse**3, 0.0)
    return (pull[..., None] * apart).sum(-2).astype(positions.dtype)
