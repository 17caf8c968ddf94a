"""What kernels of linear recurrences share: decays between the positions of a chunk, and triangular inverses."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import sums_in, wide


def chunk_of(length: int, most: int) -> int:
    """Positions of a chunk: a power of two, and no more than cover `length`."""
    return min(most, jt.next_power_of_2(length))


def held_chunk(most: int, dk: int, itemsize: int) -> int:
    """The largest chunk, at most `most` positions, of whose rows of dk numbers the memory of a block holds four tiles:
    the two operands of the products of pairs, and those of the round that comes next."""
    memory, row = jt.target().memory("block"), 4 * jt.next_power_of_2(dk) * itemsize
    while most > 16 and memory is not None and memory.size is not None and most * row > memory.size:
        most //= 2
    return most


def logarithms(g):
    """Logarithms of decays as they are summed: none is less than that of the smallest float.

    A logarithm of -inf or -1e9, as stands where a document begins, would make the sums lose the digits of others."""
    wide_g = wide(g)
    return jnp.maximum(wide_g, -746.0 if wide_g.dtype == jnp.float64 else -104.0)


def fade(x, g):
    """`x e^g` in the dtype of x; g None for no decay."""
    return x if g is None else (x.astype(g.dtype) * jnp.exp(g)).astype(x.dtype)


def _places(c: int):
    return jt.arange(c)[:, None], jt.arange(c)[None, :]


def pairs(x, y, g, *, at=None, diagonal: bool = True):
    """P [c, c] with `P_ts = sum_d x_td y_sd e^(H_td - G_sd)` for s < t (for s = t too, if `diagonal`), 0 for others.

    x, y [c, d]; G: the cumulative sums of the decay's logarithms over the chunk, [c, 1], [c, d], or None; H: `at`,
    where x stands between t - 1 and t, by default G. No factor has a positive exponent where no decay has one: nothing
    overflows, however small e^G gets.
    """
    at = g if at is None else at
    t, s = _places(x.shape[0])
    if g is None or g.shape[1] == 1:
        products = jt.dot(x, y.T)
        seen = t >= s if diagonal else t > s
        if g is None:
            return jnp.where(seen, products, 0.0)
        return products * jnp.exp(jnp.where(seen, at - g.T, -jnp.inf))
    total = jnp.where(t == s, (x.astype(g.dtype) * y.astype(g.dtype)).sum(1, keepdims=True), 0.0) if diagonal else 0.0
    for level in range(x.shape[0].bit_length() - 1):  # t in the second half and s in the first meet in the middle
        half = 1 << level
        second, blocks = t & half != 0, (-1, 2 * half, g.shape[1])
        middle = jnp.broadcast_to(g.reshape(blocks)[:, half - 1 : half], g.reshape(blocks).shape).reshape(g.shape)
        ahead, behind = jnp.where(second, at - middle, 0.0), jnp.where(second, 0.0, middle - g)
        total = total + jnp.where(_halves(t, s, level), jt.dot(fade(x, ahead), fade(y, behind).T), 0.0)
    return total


def _halves(t, s, level):
    """Whether t is in the second and s in the first half of one block of 2^(level + 1) places."""
    return ((t ^ s) >> level == 1) & (t > s)


@jax.custom_jvp
def inverse(low):
    """`(I + low)^-1` of a strictly lower triangular tile [c, c], c a power of two.

    From blocks of two places to blocks of all: `[[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]`, as stable as
    substitution. (Powers of `low` are not: those of a matrix of ones have binomial entries.)
    """
    return _inverse(low)


@jt.function
def _inverse(low):
    c = low.shape[0]
    t, s = _places(c)
    x = jnp.where(t == s, 1.0, 0.0).astype(low.dtype) - jnp.where(_halves(t, s, 0), low, 0.0)
    for level in jt.range(1, c.bit_length() - 1):  # a body for all sizes: a compiler takes seconds for one of each
        x = x - jt.dot(x, jt.dot(jnp.where(_halves(t, s, level), low, 0.0), x))
    return x


@inverse.defjvp
def _inverse_jvp(primals, tangents):
    x = inverse(*primals)
    return x, -jt.dot(jt.dot(x, tangents[0]), x)


def first_state(state, at, shape, like):
    """The tile `at` of the states [batch, heads, dk, dv] before the first position, or zeros."""
    dtype = sums_in(like)
    return jt.zeros(shape, dtype) if state is None else state.tiles(None, None, *shape)[at].astype(dtype)
