"""A softmax that sees its scores block by block, in powers of two, and what it weighs."""

from __future__ import annotations

import jax.numpy as jnp

import jtile as jt

NOTHING = -1e30  # the running maximum before the first key: finite, so that no row subtracts infinities
EMPTY = 1e30  # the log-sum-exp of no scores: 2^(s - EMPTY) is 0 for every score s


def online(s, v, m, l, acc, unit=None, keep=None, precision: str | None = None):
    """One step of the online softmax: maxima m, sums l [bq] and weighted values acc [bq, d] after scores s [bq, bk].
    `unit`: [bk], what each value is multiplied with, if given; `keep`: bool [bq, bk], which weights are not dropped, if
    given; `precision`: see `jt.dot`."""
    top = jnp.maximum(m, s.max(1))
    p = jnp.exp2(s - top[:, None])
    fade = jnp.exp2(m - top)
    weights = p if unit is None else p * unit[None, :]
    weights = weights if keep is None else jnp.where(keep, weights, 0.0)
    return top, l * fade + p.sum(1), jt.dot(weights.astype(v.dtype), v, acc * fade[:, None], precision=precision)


def normalised(acc, l, factor: float = 1.0):
    """factor acc / l; zero where a query saw no key."""
    return acc * jnp.where(l == 0, 0.0, factor / l)[:, None]


def log_sums(m, l, lacking: float = 0.0):
    """The log-sum-exp of every query's scores, in powers of two; `EMPTY` for a query without keys. `lacking`: what the
    scores that m and l are of lack."""
    sums = m + jnp.log2(jnp.where(l == 0, 1.0, l))
    return jnp.where(l == 0, EMPTY, sums + lacking if lacking else sums)
