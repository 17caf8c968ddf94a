"""Speculative decoding (Leviathan et al. 2023): several tokens are drafted cheaply, and one step checks them all.

The target, the model that generates, chooses a token behind every drafted one, as it would have without drafts: the
noise of its sampling belongs to a row's seed and a token's place, so that the tokens are those of a generation without
drafts, greedy or drawn. Drafts are kept up to the first one that the target would not have chosen. A model that drafts
draws with the same noise, and so agrees more often than by chance.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jtile._errors import PromptError

from . import cache as kv
from . import programs, sampling
from .host import on_host
from .programs import is_end, merge, overlapping
from .prompt import Prompt, is_int, widen

if TYPE_CHECKING:
    from .generate import Choice, LanguageModel, Stats

ROUNDS = 4  # checks per dispatch


@dataclasses.dataclass(frozen=True)
class NGram:
    """Drafts the tokens that followed the newest ones at an earlier place (prompt lookup decoding): the last place in
    prompt and answer where the most of them, up to `n`, stood in a row. It costs nearly nothing, and pays where answers
    repeat what they were given: code, quotations, summaries.

    Raises:
      PromptError: n is no int of at least 1.
    """

    n: int = 3

    def __post_init__(self):
        if not is_int(self.n) or self.n < 1:
            raise PromptError(f"the n of an n-gram is an int of at least 1, got {self.n!r}")

    def propose(self, history, last, count: int):
        """Draft the tokens that followed the same last tokens before.

        Args:
          history: int32 [batch, slots], the tokens of each row.
          last: int32 [batch], where the newest token stands.
          count: how many tokens to draft.
        Returns:
          int32 [batch, count].
        """
        at = jnp.arange(history.shape[1], dtype=jnp.int32)[None, :]
        before = at < last[:, None]
        run = jnp.zeros(history.shape, jnp.int32)  # how many of the newest tokens end at each place
        alike = before
        for i in range(self.n):
            newest = jnp.take_along_axis(history, jnp.maximum(last - i, 0)[:, None], axis=1)
            shifted = jnp.pad(history, ((0, 0), (i, 0)))[:, : history.shape[1]]
            alike = alike & (shifted == newest) & (at >= i)
            run = run + alike.astype(jnp.int32)
        best = jnp.max(run, axis=1, keepdims=True)
        place = jnp.max(jnp.where((run == best) & before, at, -1), axis=1)
        period = jnp.maximum(last - place, 1)[:, None]  # drafts repeat the tokens between `place` and `last`
        follow = place[:, None] + 1 + jnp.arange(count, dtype=jnp.int32)[None, :] % period
        return jnp.take_along_axis(history, follow, axis=1)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a generation drafts: `count` tokens at a time, by a model or an `NGram`."""

    draft: LanguageModel | NGram
    count: int

    @property
    def drafter(self) -> Any:
        """The static half of the draft: the n-gram, or the structure of the model."""
        return self.draft if isinstance(self.draft, NGram) else self.draft._structure

    @property
    def weights(self) -> list:
        return [] if isinstance(self.draft, NGram) else self.draft._weights

    @classmethod
    def of(cls, lm: LanguageModel, draft: Any, count: Any) -> Plan | None:
        """The plan of a generation, or None for a draft that is None.

        Raises:
          PromptError: the draft is no model and no `NGram`, or a model with another vocabulary, or the count is no int
            of at least 1.
        """
        if draft is None:
            return None
        if not is_int(count) or count < 1:
            raise PromptError(f"draft_tokens is an int of at least 1, got {count!r}")
        recurrent = next((m for m in (lm, draft) if isinstance(m, type(lm)) and m.recurrent), None)
        if recurrent is not None:
            raise PromptError(
                f"layers of {recurrent.source or 'the model'} keep a state of all tokens, from which drafts cannot be "
                "taken back; generate without a draft"
            )
        if not isinstance(draft, NGram):
            if not isinstance(draft, type(lm)):
                raise PromptError(f"a draft is a LanguageModel, an NGram or None, got {draft!r}")
            ours, theirs = (m.config.vocab_size for m in (lm, draft))
            known = (
                lm.tokenizer is not None and draft.tokenizer is not None
            )  # models of one family may pad their tables differently
            if not (lm.tokenizer.same_vocabulary(draft.tokenizer) if known else ours == theirs):
                raise PromptError(
                    f"the draft {draft.source or 'model'} has another vocabulary ({theirs} tokens) than "
                    f"{lm.source or 'the model'} ({ours}); take a draft model of the same family"
                )
        return cls(draft, count)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """`programs.Memory` with drafts: the `KVCache` of the model that drafts, or the tokens so far, int32 [batch,
    slots], in which an n-gram is looked up."""

    cache: kv.KVCache
    penalties: dict[str, jax.Array]
    drafts: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The progress of each row, int32 [batch], except for `done`, bool. tokens: the newest ones; made: how many tokens
    of the answer there are; drafted, accepted: tokens that were drafted in this generation, and those of them that were
    kept."""

    tokens: jax.Array
    done: jax.Array
    made: jax.Array
    drafted: jax.Array
    accepted: jax.Array


@functools.partial(jax.jit, static_argnums=0, static_argnames=("layout",))
def draft_cache(structure, weights, prompt, *, layout):
    """The cache of a model that drafts, filled with prompts as `programs.packed` gives them."""
    ids, lengths = programs.unpacked(prompt)
    return kv.from_prefill(merge(structure, weights).prefill(ids)[1], lengths, layout)


@functools.partial(
    jax.jit, static_argnums=0, static_argnames=("drafter", "count", "steps", "logprobs"), donate_argnames=("memory",)
)
def speculate(structure, weights, draft_weights, memory, rows, total, numbers, ends,
              *, drafter, count, steps, logprobs):  # fmt: skip
    """Makes `count` drafts and runs the step that checks them, `ROUNDS` times or until each row has ended or has
    `total` tokens.

    Returns (tokens [batch, n] and their log-probabilities or None, how many there are of each row, rows, memory)."""
    model = merge(structure, weights)
    batch, width = rows.tokens.shape[0], ROUNDS * (count + 1)
    line, place = jnp.arange(batch, dtype=jnp.int32)[:, None], jnp.arange(count + 1, dtype=jnp.int32)[None, :]
    active = lambda rows: ~rows.done & (rows.made < total)

    def round_of(_, carry):
        rows, memory, out, filled = carry
        vocab = model.config.vocab_size
        drafts, drafted = _propose(drafter, draft_weights, memory, rows, count, steps, numbers, vocab)
        logits, cache = model.step(jnp.concatenate([rows.tokens[:, None], drafts], axis=1), memory.cache)
        chosen = _chosen(logits, drafts, rows.made, steps, numbers, memory.penalties)
        kept = jnp.cumprod((drafts == chosen[:, :-1]).astype(jnp.int32), axis=1).sum(1)
        hits = is_end(chosen, ends)
        ends_so_far = jnp.cumsum(hits.astype(jnp.int32), axis=1)
        new = (ends_so_far == hits.astype(jnp.int32)) & active(rows)[:, None]  # there is no end token before this one
        new = new & (place <= kept[:, None]) & (place < (total - rows.made)[:, None])
        n = new.astype(jnp.int32).sum(1)
        at = jnp.where(new, filled[:, None] + place, width)
        values = [chosen, sampling.log_probability(logits, chosen)][: len(out)]
        out = [x.at[line, at].set(y, mode="drop") for x, y in zip(out, values, strict=True)]
        newest = jnp.take_along_axis(chosen, jnp.maximum(n - 1, 0)[:, None], axis=1)[:, 0]
        penalties = memory.penalties
        for i in range(count + 1 if penalties else 0):
            penalties = sampling.noted(penalties, chosen[:, i], new[:, i])
        drafted = _behind(drafted, chosen, new, memory.cache.lengths + 1)
        lengths = memory.cache.lengths + n
        memory = Memory(dataclasses.replace(cache, lengths=lengths), penalties, drafted)
        tried = rows.drafted + count * active(rows).astype(jnp.int32)
        done = rows.done | (hits & new).any(1)
        tokens = jnp.where(n > 0, newest, rows.tokens)
        rows = Rows(tokens, done, rows.made + n, tried, rows.accepted + jnp.minimum(kept, n))
        return rows, memory, out, filled + n

    dtypes = (jnp.int32, jnp.float32) if logprobs else (jnp.int32,)
    carry = rows, memory, [jnp.zeros((batch, width), dtype) for dtype in dtypes], jnp.zeros((batch,), jnp.int32)
    if on_host():
        more = lambda c: (c[0] < ROUNDS) & active(c[1][0]).any()
        _, carry = jax.lax.while_loop(more, lambda c: (c[0] + 1, round_of(*c)), (jnp.int32(0), carry))
    else:  # as in `programs.decode`
        carry = jax.lax.fori_loop(0, ROUNDS, round_of, carry)
    rows, memory, out, filled = carry
    return out[0], out[1] if logprobs else None, filled, rows, memory


def _propose(drafter, weights, memory: Memory, rows: Rows, count: int, steps, numbers, vocab: int):
    """(drafts int32 [batch, count], what the drafter holds behind them). Drafts are below `vocab`, the number of tokens
    of the target.

    The tables of a model and its draft may end in padding of different lengths, which no text has."""
    if isinstance(drafter, NGram):
        last = memory.cache.lengths
        history = memory.drafts.at[jnp.arange(last.shape[0]), last].set(rows.tokens, mode="drop")
        return drafter.propose(history, last, count), history
    model = merge(drafter, weights)

    def step(carry, i):
        tokens, cache, penalties = carry
        with overlapping(len(tokens)):
            logits, cache = model.step(jnp.minimum(tokens, model.config.vocab_size - 1), cache)
        logits = jnp.pad(logits[:, :vocab], ((0, 0), (0, max(vocab - logits.shape[1], 0))), constant_values=-jnp.inf)
        tokens = sampling.choose(logits, rows.made + i, steps, numbers, penalties)
        return (tokens, cache, sampling.noted(penalties, tokens)), tokens

    # One step more than drafts: the last draft, which may be kept, goes into the cache, too.
    carry = rows.tokens, memory.drafts, memory.penalties
    (_, cache, _), drafts = jax.lax.scan(step, carry, jnp.arange(count + 1, dtype=jnp.int32))
    return drafts[:-1].T, cache


def _behind(drafted, chosen, new, place):
    """What the drafter holds behind those chosen tokens that are `new`; the first of them goes to `place` [batch]."""
    if isinstance(drafted, kv.KVCache):
        return dataclasses.replace(drafted, lengths=place - 1 + new.astype(jnp.int32).sum(1))
    batch, width = chosen.shape
    at = place[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    line = jnp.arange(batch, dtype=jnp.int32)[:, None]
    return drafted.at[line, jnp.where(new, at, drafted.shape[1])].set(chosen, mode="drop")


def _chosen(logits, drafts, made, steps, numbers, penalties):
    """The tokens that the target chooses, int32 [batch, count + 1], from its logits [batch, count + 1, vocab]."""
    states = [penalties]
    for i in range(drafts.shape[1]):
        states.append(sampling.noted(states[-1], drafts[:, i]))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
    choose = lambda x, i, state: sampling.choose(x, made + i, steps, numbers, state)
    place = jnp.arange(logits.shape[1], dtype=jnp.int32)
    return jax.vmap(choose, in_axes=(1, 0, 0), out_axes=1)(logits, place, stacked)


def run(lm: LanguageModel, prompt: Prompt, new_tokens: int, choice: Choice, plan: Plan, stats: Stats):
    """Yields the tokens and log-probabilities (or None) of all rows, [batch] each, one by one, as `Generation` does."""
    (tokens, logprobs, done, memory), step, rest = _start(lm, prompt, new_tokens, choice, plan, stats)
    start, zeros = time.perf_counter(), np.zeros(len(prompt.lengths), np.int32)
    rows, made, ended = Rows(tokens, done, zeros + 1, zeros, zeros), zeros + 1, np.asarray(done)
    queues = _columns(np.asarray(tokens)[:, None], None if logprobs is None else np.asarray(logprobs)[:, None], made)
    last, pending = [queue[0] for queue in queues], collections.deque()
    while True:
        while any(queues) and all(queue or end for queue, end in zip(queues, ended, strict=True)):
            last = [queue.popleft() if queue else old for queue, old in zip(queues, last, strict=True)]
            row, rates = zip(*last, strict=True)
            yield np.array(row, np.int32), None if logprobs is None else np.array(rates, np.float32)
        active = ~ended & (made < new_tokens)
        if not active.any():
            return
        # Each round under way makes at least one token; the device works on the next program while this one is read.
        while len(pending) < 2 and made[active].min() + ROUNDS * len(pending) < new_tokens:
            *out, rows, memory = step(lm._weights, plan.weights, memory, rows, *rest)
            pending.append((*out, rows))
        out, rates, filled, seen = jax.device_get(pending.popleft())
        made, ended, stats.decode_seconds = seen.made, seen.done, time.perf_counter() - start
        stats.drafted_tokens, stats.accepted_tokens = int(seen.drafted.sum()), int(seen.accepted.sum())
        for queue, column in zip(queues, _columns(out, rates, filled), strict=True):
            queue.extend(column)


def _columns(tokens, logprobs, filled) -> list[collections.deque]:
    """For each row its first `filled` tokens, in pairs with their log-probabilities or None."""
    rates = [[None] * tokens.shape[1]] * len(tokens) if logprobs is None else logprobs
    return [
        collections.deque(zip(*(x[:n] for x in of), strict=True)) for *of, n in zip(tokens, rates, filled, strict=True)
    ]


def _start(lm: LanguageModel, prompt: Prompt, new_tokens: int, choice: Choice, plan: Plan, stats: Stats):
    """Compiles and runs the prompts; returns (the result of `programs.prefill` with this file's `Memory`, the
    program of the rounds, its last arguments)."""
    length = prompt.ids.shape[1]
    size = kv.bucket(length, lm.config.max_length)
    for chunk in (m.chunk for m in (lm, plan.draft) if isinstance(m, type(lm)) and m.chunk is not None):
        if length + new_tokens + plan.count > chunk:
            raise PromptError(
                f"drafts go through attention in chunks within the first {chunk} positions; {length} tokens of prompt, "
                f"{new_tokens} new ones and a draft of {plan.count} are more: generate without a draft"
            )
    # No rings: in a ring, drafts that are not kept would have overwritten older tokens of the window.
    slots, windows = kv.bucket(max(size, length + new_tokens + plan.count)), (None,) * len(lm.windows)
    layout = kv.Layout(slots, lm.cache_dtype, windows, lm.page_size)
    static = {"steps": choice.steps, "logprobs": choice.logprobs}
    ids, numbers = widen(prompt.ids, size), (choice.numbers, choice.ends)
    whole = programs.packed(ids, prompt.lengths)
    prefill, first = lm._compiled(programs.prefill, whole, *numbers, layout=layout, **static)
    shapes = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    draft, second = plan.draft, 0.0
    if isinstance(draft, NGram):
        start_drafts = lambda: jnp.asarray(widen(prompt.ids, layout.slots))
        drafts = jax.ShapeDtypeStruct((len(ids), layout.slots), jnp.int32)
    else:
        of_draft = kv.Layout(slots, draft.cache_dtype, page=draft.page_size)
        known = programs.packed(np.minimum(ids, draft.config.vocab_size - 1), prompt.lengths)
        begin, second = draft._compiled(draft_cache, known, layout=of_draft)
        start_drafts, drafts = (lambda: begin(draft._weights, known)), shapes(begin.out_info)
    tokens, _, done, memory = shapes(prefill.out_info)
    counts = jax.ShapeDtypeStruct(tokens.shape, jnp.int32)
    memory, rows = Memory(memory.cache, memory.penalties, drafts), Rows(tokens, done, counts, counts, counts)
    rest = np.int32(new_tokens), *numbers
    args = shapes(plan.weights), memory, rows, *rest
    step, third = lm._compiled(speculate, *args, drafter=plan.drafter, count=plan.count, **static)
    stats.compile_seconds = first + second + third
    start = time.perf_counter()
    tokens, logprobs, done, memory = prefill(lm._weights, whole, *numbers)
    memory = Memory(memory.cache, memory.penalties, start_drafts())
    out = jax.block_until_ready((tokens, logprobs, done, memory))
    stats.prefill_seconds = time.perf_counter() - start
    return out, step, rest
