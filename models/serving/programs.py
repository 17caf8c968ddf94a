"""The programs of the serving device: a step of the model over tokens of any rows, and the choice of the next ones.

A step takes its tokens flat, whichever sequences they are of: each is a row of its own, with its position and the table
of its sequence's pages. In each layer all of them are appended to the cache before any of them attends, so that chunks
of prompts and single tokens are the same to it. On GPUs chunks come in tiles, whose tokens read their keys together.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

import jtile as jt

from .. import cache as kv
from .. import sampling
from ..adapters import route
from ..mesh import ENTRIES, WEIGHTS, here
from ..parallel import ALONE, laid
from ..programs import merge, overlapping
from ..sampling import Steps

GREEDY = Steps()
DRAWS = Steps(draws=True, greedy=True, top_k=True, top_p=True, min_p=True)
ALL = DRAWS._replace(repetition=True, counts=True, bias=True)
PENALTIES = ("seen", "counts", "bias")  # what `ALL` keeps for each slot, each as long as the vocabulary
LOGPROBS = 20  # how many of the likeliest tokens a step reports, if a request wants any


@functools.partial(jax.jit, static_argnums=0, static_argnames=("splits", "tiles", "seen"), donate_argnames=("entries",))
def step(structure, weights, entries, last, table, batch, of, adapters, *, splits, tiles=None, seen=None):
    """(logits float32 [k, vocab] behind the tokens `of`, int32 [k]; the longer cache).

    batch: int32 [5, n], for each of n tokens its id, its position, the slot of its sequence, whether its id is to be
    taken from `last`, int32 [slots], the newest token of each slot, and the number of its adapter, 0 for none. table:
    int32 [slots, pages of a row]. The last slot is for padding, of which nothing is kept; its positions are -1.
    adapters: the result of `adapters.stacked`, or None. splits, tiles, seen: see `KVCache`."""
    return _step(structure, weights, entries, last, table, batch, of, adapters, splits, tiles, seen)


def _step(structure, weights, entries, last, table, batch, of, adapters, splits, tiles=None, seen=None):
    tokens, positions, slots, pending, adapter = batch
    tokens = jnp.where(pending > 0, last[slots], tokens)
    cache = kv.KVCache(entries, positions, table[slots], splits, tiles, seen=seen)
    invariant = splits is not None  # then sums of a row do not depend on how many rows there are
    with jt.config(steady=True) if invariant else overlapping(len(tokens)):
        model = route(merge(structure, weights), adapters or {}, adapter)
        if invariant and model.over != ALONE:
            laid(model, dataclasses.replace(model.over, steady=True))
        logits, cache = model.step(tokens, cache, of)
    return logits, cache.entries


@functools.partial(
    jax.jit, static_argnums=0, static_argnames=("splits", "steps", "count"), donate_argnames=("entries", "last")
)
def several(structure, weights, entries, last, options, table, batch, adapters, *, splits, steps, count):
    """`count` times `step` and `choose`, without penalties, for n rows that all decode: (tokens int32 [count, n], the
    longer cache, last).

    batch: int32 [7, n], five numbers of each row as in `step`, then how many tokens it makes, at most `count`, and how
    many of its answer were made before; behind its last one a row is padding. The loop has one body, so that arrays lie
    in the same place in each step: XLA writes its CUDA graph of the kernels once a launch, and not once a step. Tokens
    have the bits that the same steps give one by one: each has the same kernels, and the barriers keep XLA from merging
    what stands in programs of its own there."""

    def one(i, carry):
        entries, last, batch, made = carry
        tokens, entries, last, batch = _one_of_several(
            structure, weights, entries, last, options, table, batch, adapters, splits, steps
        )
        return entries, last, batch, jax.lax.dynamic_update_slice(made, tokens[None], (i, jnp.int32(0)))

    made = jnp.zeros((count, batch.shape[1]), jnp.int32)
    entries, last, _, made = jax.lax.fori_loop(0, count, one, (entries, last, batch, made))
    return made, entries, last


def _one_of_several(structure, weights, entries, last, options, table, batch, adapters, splits, steps):
    """(tokens, the longer cache, last, the batch of the next step)."""
    tokens, positions, slots, pending, adapter, left, made = batch
    active, of = left > 0, jnp.arange(batch.shape[1], dtype=jnp.int32)
    at = jnp.where(active, slots, last.shape[0] - 1)
    now = jax.lax.optimization_barrier(jnp.stack([tokens, jnp.where(active, positions, -1), at, pending, adapter]))
    logits, entries = _step(structure, weights, entries, last, table, now, of, adapters, splits)
    numbers = {name: x[at] for name, x in options.items()}
    logits, numbers = jax.lax.optimization_barrier((logits, numbers))
    newest = jax.lax.optimization_barrier(sampling.choose(logits, made, steps, numbers, {}))
    behind = jnp.stack([newest, positions + 1, slots, jnp.zeros_like(pending), adapter, left - 1, made + 1])
    return newest, entries, last.at[at].set(newest), behind


@functools.partial(jax.jit, static_argnames=("steps", "logprobs"), donate_argnames=("last", "penalties"))
def choose(logits, last, penalties, options, which, allowed, *, steps, logprobs):
    """Chooses the next token of each row of the logits [k, vocab].

    which: int32 [2, k], the slot of each row, and how many tokens of its answer were made. options: what
    `Sampling.rows` gives of every slot; penalties: `PENALTIES` of every slot [slots, vocab], for `ALL`, else {}.
    allowed: the bits of tokens that may be chosen, uint32 [k, vocab / 32, rounded up], or None. Returns (int32 [k]
    tokens, None or (their log-probabilities [k], those of the likeliest `LOGPROBS` [k, n], their ids [k, n]), last,
    penalties).
    """
    slots, made = which
    numbers = {name: x[slots] for name, x in options.items()}
    state = {name: x[slots] for name, x in penalties.items()}
    numbers |= {"bias": state.pop("bias")} if steps.bias else {}
    tokens = sampling.choose(logits if allowed is None else _masked(logits, allowed), made, steps, numbers, state)
    rates = None
    if logprobs:
        best, ids = jax.lax.top_k(logits, min(LOGPROBS, logits.shape[1]))
        best = best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        rates = sampling.log_probability(logits, tokens), best, ids
    if steps.counts:
        penalties = penalties | {
            "seen": penalties["seen"].at[slots, tokens].set(True, mode="drop"),
            "counts": penalties["counts"].at[slots, tokens].add(1, mode="drop"),
        }
    return tokens, rates, last.at[slots].set(tokens), penalties


def _masked(logits, allowed):
    """The logits, -inf where the bit of a token is 0; NaN stays."""
    ids = jnp.arange(logits.shape[1], dtype=jnp.uint32)
    bits = jax.lax.shift_right_logical(allowed[:, ids // 32], (ids % 32)[None, :]) & 1
    return jnp.where((bits > 0) | jnp.isnan(logits), logits, -jnp.inf)


@functools.partial(jax.jit, donate_argnums=0)
def put(arrays, slot, rows):
    """Sets a row of arrays [slots, ...]."""
    return {name: x.at[slot].set(rows[name]) for name, x in arrays.items()}


@functools.partial(jax.jit, donate_argnums=0)
def copy(entries, sources, targets):
    """Copies pages, int32 [n]: all are read before any is written. Targets beyond the pool are dropped."""
    return jax.tree.map(lambda x: x.at[targets].set(x[sources], mode="drop"), entries)


def pool_of(lm, pages: int, page: int, dtype: str | None):
    """The shapes and dtypes of the entries of a cache with so many pages."""
    layout = kv.Layout(page, dtype, page=page)  # no windows: they are masks here, so that pages may be shared

    def one(weights):
        model = merge(lm._structure, weights)
        entries = model.prefill(jnp.zeros((1, page), jnp.int32))[1]
        return kv.from_prefill(entries, jnp.ones((1,), jnp.int32), layout).entries

    def all_of(weights):
        return jax.tree.map(lambda x: jnp.zeros((pages, *x.shape[1:]), x.dtype), one(weights))

    over = all_of if lm.devices is None else lm.devices.over(all_of, (WEIGHTS,), ENTRIES)
    with here(lm.devices):
        return jax.eval_shape(over, lm._weights)
