"""What stands between two greedy steps, in one kernel: the largest logits, the ends of rows, and what the next step
begins with.

XLA makes a dozen kernels of it. On GPUs they take one to two microseconds each and as much between them, where a step
of a small model takes 400 in all; on a CPU they wake threads of XLA's pool, 100 to 200 microseconds of a step of 4000.
Here the programs of a row search its logits together, and the last of them does the rest.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import QuantizedTensor
from jtile.ops._shapes import fit
from jtile.ops.argmax import TILE, first_in_part, first_of, parts_of
from jtile.ops.operands import Weight

from . import cache as kv
from . import screened
from .decoder import Decoder
from .host import on_host
from .next_step import IN_PLACE, enter, leave, token_of, types_of_next
from .parallel import ALONE
from .sampling import Steps

TAKEN = True  # whether `loop` is taken where it fits
ROWS = 64  # rows of a batch, at most: of more, the logits take so long that the rest does not matter


def _types(
    logits, tokens, done, out, lengths, ends, column, table, frequencies, *, hidden: int, dtype: str, parts: int, **_
):
    found = jax.ShapeDtypeStruct((logits.shape[0], parts), jnp.int32)
    return *types_of_next(tokens, done, out, lengths, frequencies, hidden, dtype), found, found


@jt.kernel(out_type=_types, grid=lambda logits, *_, parts, **__: (logits.shape[0], parts), alias=IN_PLACE)
def next_tokens(
    logits, tokens, done, out, lengths, ends, column, table, frequencies,
    new_tokens, new_done, new_out, new_lengths, x, rest, cos, sin, tops, places,
    *, hidden: int, dtype: str, parts: int, bn: int, scale: float, factors: tuple[float, ...],
):  # fmt: skip
    """The tokens behind logits float32 [rows, vocab]: each row's first largest one, or `vocab` where a logit is NaN;
    rows that are done keep theirs.

    tokens, lengths int32 [rows] and done bool [rows] become those of the next step, in place: a row is done, too, where
    its token is one of `ends` int32 [n]. The tokens go to a column of out int32 [rows, columns]. x [rows, hidden]: the
    rows of the table for them, times `scale`, or zeros outside of the table; rest: zeros of the same shape. cos, sin
    float32 [rows, size / 2]: of the next positions, for the frequencies [size / 2] of each rope, times its factor.
    tops, places int32 [rows, parts]: what the programs of a row have found."""
    # y_i: the first j with logits_ij = max_j logits_ij
    i, p, vocab = jt.program_id(0), jt.program_id(1), logits.shape[1]
    tops[i, p], places[i, p] = first_in_part(logits, i, p, parts, bn, vocab)
    if jt.arrive(jt.counters("rows", tokens.shape[0]), i, parts):
        token = token_of(first_of(tops[i, :], places[i, :]), vocab, done[i], tokens[i])
        position = lengths[i] + 1
        leave(i, token, position, done, ends, column, new_tokens, new_done, new_out, new_lengths)
        enter(i, token, position, table, frequencies, x, rest, cos, sin, hidden, dtype, scale, factors)


def _found_types(tops, places, tokens, done, out, lengths, ends, column, table, frequencies, *, hidden, dtype, **_):
    return types_of_next(tokens, done, out, lengths, frequencies, hidden, dtype)


@jt.kernel(out_type=_found_types, grid=lambda tops, *_, **__: tops.shape[0], alias=IN_PLACE)
def tokens_of_largest(
    tops, places, tokens, done, out, lengths, ends, column, table, frequencies,
    new_tokens, new_done, new_out, new_lengths, x, rest, cos, sin,
    *, hidden: int, dtype: str, vocab: int, scale: float, factors: tuple[float, ...],
):  # fmt: skip
    """What `next_tokens` makes, where the head has left the largest logits of its parts: tops, places int32 [rows,
    parts]."""
    i = jt.program_id(0)
    wide = jt.next_power_of_2(tops.shape[1])
    keys = tops.tiles(None, wide, pad=-(2**31))[i, 0]
    token = token_of(first_of(keys, places.tiles(None, wide, pad=0)[i, 0]), vocab, done[i], tokens[i])
    position = lengths[i] + 1
    leave(i, token, position, done, ends, column, new_tokens, new_done, new_out, new_lengths)
    enter(i, token, position, table, frequencies, x, rest, cos, sin, hidden, dtype, scale, factors)


def fits(model: Decoder, rows: int, steps: Steps, logprobs: bool) -> bool:
    """Whether `loop` makes the tokens of so many rows: greedy ones, of a model with a dense or Q8_0 table."""
    table = model.embedding.get_value()
    known = not isinstance(table, QuantizedTensor) or table.kind == "q8_0"
    turns = all(block.rope.tempered is None for block in model.blocks)
    alone = model.over == ALONE and rows <= ROWS and steps == Steps() and not logprobs
    return TAKEN and (_threads() or on_host()) and alone and known and turns


def _threads() -> bool:
    """Whether the target at hand runs programs by warps of threads."""
    return "warps" in jt.target().features


def loop(model: Decoder, cache: kv.KVCache, tokens, done, ends, count, *, chunk: int, run, screen=None):
    """`chunk` greedy tokens of each row behind `tokens` int32 [rows], or on a host up to `count` of them, until all
    rows are done: a GPU would wait until the host has read a condition.

    run: `run(function, *arguments)`, which calls a function under what the steps of these rows promise. screen: a
    `screened.Screen` of the head, by which the tokens come, or None.
    Returns (tokens int32 [rows, chunk], the last ones, which rows are done, the cache)."""
    table = model.embedding.get_value()
    quantized = isinstance(table, QuantizedTensor)
    ropes = model.ropes
    options = {
        "hidden": model.config.hidden_size, "dtype": model.dtype,
        "scale": float(model.config.embedding_scale), "factors": tuple(rope.attention_factor for rope in ropes),
    }  # fmt: skip
    weight = Weight(table.codes, table.scale) if quantized else Weight(table)
    frequencies = tuple(jnp.asarray(rope.frequencies()) for rope in ropes)

    def step(column, carry):
        tokens, done, out, cache, (x, rest, cos, sin) = carry
        entered = x, rest, dict(zip(ropes, zip(cos, sin)))
        more = {} if screen is None else {"head": screen.codes}
        first, longer = model.step(tokens, cache, entered=entered, largest=True, **more)
        same = tokens, done, out, cache.lengths, ends, column, weight, frequencies
        if screen is not None:
            made = screened.tokens(*first, model, screen, same, options)
        elif isinstance(first, tuple):
            made = tokens_of_largest(*first, *same, vocab=model.config.vocab_size, **options)
        else:
            tiles = {"parts": parts_of(*first.shape), "bn": fit(first.shape[1], TILE)}
            made = next_tokens(first, *same, **tiles, **options)[:-2]
        tokens, done, out, lengths, *entered = made
        return tokens, done, out, dataclasses.replace(longer, lengths=lengths), tuple(entered)

    x, angles = model.enter(tokens, cache.lengths)
    cos, sin = zip(*(angles[rope] for rope in ropes))
    out = jnp.zeros((tokens.shape[0], chunk + 1), jnp.int32)  # the last column is none of a step: see `decode`
    carry = tokens, done, out, cache, (x, jnp.zeros_like(x), cos, sin)
    # Attention reads the lengths early, which `next_tokens` writes: the first product of a step lets it start only when
    # `next_tokens` has ended (see `entered` of `Decoder.step`).
    if on_host():
        more, again = (lambda c: (c[0] < count) & ~jnp.all(c[1][1])), (lambda c: (c[0] + 1, run(step, *c)))
        _, carry = jax.lax.while_loop(more, again, (jnp.int32(0), carry))
    else:
        carry = jax.lax.fori_loop(0, chunk, lambda i, carry: run(step, i, carry), carry)
    tokens, done, out, cache, _ = carry
    return out[:, :chunk], tokens, done, cache
