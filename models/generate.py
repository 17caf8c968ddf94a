"""`LanguageModel`: logits and text generation around one jitted prefill and one device-side decoding loop."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jtile as jt
from jtile._errors import PromptError

from . import cache as kv
from .checkpoint import Checkpoint
from .decoder import Decoder
from .dtypes import default_dtype, dtype_of
from .prompt import Prompt, read_prompt
from .sampling import Sampling, choose
from .tokenizer import Tokenizer

CHUNK = 8  # tokens per dispatch: Python's share is one call in eight, and Ctrl-C waits for at most eight tokens


@dataclasses.dataclass
class Stats:
    """What one generation took: token counts per row, and seconds. Compilation is apart from the two speeds."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second, first new token included."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """New tokens a second after the first."""
        return max(self.new_tokens - 1, 0) / self.decode_seconds if self.decode_seconds else 0.0


class LanguageModel:
    """A loaded model. `config`: its sizes; `tokenizer`: text to ids and back (None if the files had none);
    `eos_ids`: the tokens that end a text; `source`: where the weights came from; `dtype`: of its activations;
    `cache_dtype`: of its cache, None for that of what goes into it."""

    def __init__(
        self, model: Decoder, tokenizer: Tokenizer | None = None, eos_ids: Sequence[int] = (), source: str = "",
        cache_dtype: str | None = None,
    ):  # fmt: skip
        self.config, self.tokenizer, self.eos_ids, self.source = model.config, tokenizer, tuple(eos_ids), source
        self.dtype, self.cache_dtype = model.dtype, cache_dtype
        graph, state = nnx.split(model)
        # Plain leaves: a dispatch takes 80 us with them and 390 us with the 423 Variables of SmolLM2's nnx.State.
        self._weights, tree = jax.tree.flatten(state)
        self._structure = (graph, tree)
        self._executables: dict[tuple, jax.stages.Compiled] = {}

    @property
    def model(self) -> Decoder:
        """The Flax module over the weights of this model."""
        return _merge(self._structure, self._weights)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, dtype=None, cache_dtype=None) -> LanguageModel:
        """Reads every weight of the checkpoint; `dtype`, `cache_dtype`: see `load`."""
        dtype = default_dtype(checkpoint.sample()) if dtype is None else dtype_of(dtype, "dtype")
        cache_dtype = None if cache_dtype is None else dtype_of(cache_dtype, "cache_dtype")
        model = Decoder(checkpoint.config, checkpoint.weight, checkpoint.tied, dtype)
        return cls(model, checkpoint.tokenizer, checkpoint.eos_ids, checkpoint.source, cache_dtype)

    def logits(self, ids, attention_mask=None) -> jax.Array:
        """Logits of the next token after every position.

        Args:
          ids: int [batch, length] (or [length]).
          attention_mask: [batch, length], 0 where `ids` is padding (left or right); positions count real tokens only.

        Returns:
          float32 [batch, length, vocab] (or [length, vocab]); zero at padding.

        Raises:
          PromptError: empty, too long, or ids outside the vocabulary.
        """
        prompt = self._prompt(ids, attention_mask)
        length = prompt.mask.shape[1]
        size = kv.bucket(max(prompt.ids.shape[1], length), self.config.max_length)
        mask = _widen(prompt.mask, size)
        slot = np.clip(np.cumsum(mask, axis=1) - 1, 0, None).astype(np.int32)  # where a position's token was packed
        run, _ = self._compiled(_logits, _widen(prompt.ids, size), slot, mask)
        out = run(self._weights, _widen(prompt.ids, size), slot, mask)[:, :length]
        return out[0] if prompt.single else out

    def generate(
        self,
        ids,
        max_new_tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        eos: str | int | Sequence[int] | None = "model",
        attention_mask=None,
    ) -> np.ndarray:
        """The tokens that continue `ids`.

        Args:
          ids: int [batch, length], [length], or rows of different lengths; with padding, pass `attention_mask`.
          max_new_tokens: at most so many; fewer when every row has ended or the context of the model is full.
          temperature, top_k, top_p, seed: see `Sampling`; temperature 0 is greedy.
          eos: tokens that end a row: "model" for the model's own, ids, or None to never stop.

        Returns:
          int32 [batch, n] (or [n]), new tokens only, the ending token included; a row that ended is filled with it.

        Raises:
          PromptError: empty, too long, ids outside the vocabulary, or a sampling option out of range.
        """
        steps = list(
            self.stream(
                ids,
                max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                eos=eos,
                attention_mask=attention_mask,
            )
        )
        single = _is_single(ids)
        batch = (len(steps),) if single else (len(ids), len(steps))
        return np.asarray(steps, np.int32).T.reshape(batch)

    def stream(
        self,
        ids,
        max_new_tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        eos: str | int | Sequence[int] | None = "model",
        attention_mask=None,
    ) -> Generation:
        """As `generate`, but an iterator: an int per token for one prompt [length], int32 [batch] for a batch.

        Its `stats` hold the token counts and speeds so far. Errors in the arguments are raised here, not on iteration.
        """
        if not _is_int(max_new_tokens) or max_new_tokens < 0:
            raise PromptError(f"max_new_tokens is an int of at least 0, got {max_new_tokens!r}")
        prompt = self._prompt(ids, attention_mask)
        if isinstance(eos, str):
            if eos != "model":
                raise PromptError(f"eos is 'model', a token id, several, or None; got {eos!r}")
            ends = self.eos_ids
        else:
            ends = () if eos is None else tuple(eos) if np.iterable(eos) else (eos,)
            if not all(map(_is_int, ends)):
                raise PromptError(f"eos is 'model', a token id, several, or None; got {eos!r}")
        room = self.config.max_length - int(prompt.lengths.max())
        return Generation(self, prompt, min(max_new_tokens, room), Sampling(temperature, top_k, top_p, seed), ends)

    def _prompt(self, ids, attention_mask) -> Prompt:
        return read_prompt(ids, attention_mask, self.config.vocab_size, self.config.max_length)

    def _compiled(self, function, *args, **static):
        """The executable of a jitted function for these argument shapes; returns (executable, seconds to compile)."""
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(args))
        key = (function.__name__, shapes, tuple(static.items()))
        start = time.perf_counter()
        if key not in self._executables:
            self._executables[key] = function.lower(self._structure, self._weights, *args, **static).compile()
        return self._executables[key], time.perf_counter() - start


class Generation(Iterator):
    """The tokens of one call of `LanguageModel.stream`; see there."""

    def __init__(self, lm: LanguageModel, prompt: Prompt, new_tokens: int, sampling: Sampling, ends: tuple[int, ...]):
        self.stats = Stats(prompt_tokens=int(prompt.lengths.max()))
        self._lm, self._prompt, self._new_tokens, self._sampling, self._ends = lm, prompt, new_tokens, sampling, ends
        self._tokens = self._run()

    def __next__(self):
        row = next(self._tokens)
        self.stats.new_tokens += 1
        return int(row[0]) if self._prompt.single else row

    def _run(self):
        if self._new_tokens == 0:
            return
        (tokens, done, cache), decode, rest = self._start()
        start, made = time.perf_counter(), 1
        pending = [(tokens[:, None], 1, done)]  # dispatched and not yet read: (tokens [batch, n], how many, done)
        while pending:
            if made < self._new_tokens:  # the device works on the next chunk while this one is read and printed
                count = min(CHUNK, self._new_tokens - made)
                out, steps, tokens, done, cache = decode(
                    self._lm._weights, cache, tokens, done, np.int32(made), np.int32(count), *rest
                )
                pending.append((out, steps, done))
                made += count
            rows, steps, ended = (np.asarray(x) for x in pending.pop(0))
            self.stats.decode_seconds = time.perf_counter() - start
            yield from rows.T[: int(steps)]
            if ended.all():
                return

    def _start(self):
        lm, numbers = self._lm, self._sampling.traced()
        length = self._prompt.ids.shape[1]
        size = kv.bucket(length, lm.config.max_length)
        slots = kv.bucket(max(size, length + self._new_tokens), lm.config.max_length)
        ends = np.asarray(self._ends or (-1,), np.int32)
        args = (_widen(self._prompt.ids, size), self._prompt.lengths, numbers, ends)
        static = {"slots": slots, "sampling": self._sampling.static, "cache_dtype": lm.cache_dtype}
        prefill, seconds = lm._compiled(_prefill, *args, **static)
        tokens, done, cache = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), prefill.out_info)
        state_args = (cache, tokens, done, np.int32(0), np.int32(0), numbers, ends)
        decode, more = lm._compiled(_decode, *state_args, chunk=CHUNK, sampling=self._sampling.static)
        self.stats.compile_seconds = seconds + more
        start = time.perf_counter()
        out = jax.block_until_ready(prefill(lm._weights, *args))
        self.stats.prefill_seconds = time.perf_counter() - start
        return out, decode, (numbers, ends)


def _merge(structure, weights) -> Decoder:
    graph, tree = structure
    return nnx.merge(graph, jax.tree.unflatten(tree, weights))


@functools.partial(jax.jit, static_argnums=0)
def _logits(structure, weights, ids, slot, mask):
    model = _merge(structure, weights)
    hidden, _ = model.prefill(ids)
    hidden = jnp.take_along_axis(hidden, slot[:, :, None], axis=1)
    return model.head(hidden) * mask[:, :, None].astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("slots", "sampling", "cache_dtype"))
def _prefill(structure, weights, ids, lengths, numbers, ends, *, slots, sampling, cache_dtype):
    """Runs the prompts; returns (first new tokens [batch], whether each ends its row, the cache)."""
    model = _merge(structure, weights)
    hidden, entries = model.prefill(ids)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    tokens = choose(model.head(last), jnp.int32(0), sampling, numbers)
    return tokens, _is_end(tokens, ends), kv.from_prefill(entries, lengths, slots, cache_dtype)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("chunk", "sampling"), donate_argnames=("cache",))
def _decode(structure, weights, cache, tokens, done, made, count, numbers, ends, *, chunk, sampling):
    """Makes up to `count` <= chunk tokens a row, and stops when every row has ended.

    Returns (tokens [batch, chunk], how many columns are filled, the last tokens, done, cache)."""
    model = _merge(structure, weights)

    def unfinished(i, carry):
        return (i < count) & ~jnp.all(carry[1])

    def step(i, carry):
        tokens, done, out, cache, steps = carry
        steps = steps + unfinished(i, carry).astype(jnp.int32)
        logits, cache = model.step(tokens, cache)
        tokens = jnp.where(done, tokens, choose(logits, made + i, sampling, numbers))
        out = jax.lax.dynamic_update_slice(out, tokens[:, None], (jnp.int32(0), i))
        return tokens, done | _is_end(tokens, ends), out, cache, steps

    out = jnp.zeros((tokens.shape[0], chunk), jnp.int32)
    carry = tokens, done, out, cache, jnp.int32(0)
    if jt.platform() == "cpu":
        more, again = (lambda c: unfinished(*c)), (lambda c: (c[0] + 1, step(*c)))
        _, carry = jax.lax.while_loop(more, again, (jnp.int32(0), carry))
    else:  # a GPU waits for the host where that reads a condition: rather some tokens too many, which nobody reads
        carry = jax.lax.fori_loop(0, chunk, step, carry)
    tokens, done, out, cache, steps = carry
    return out, steps, tokens, done, cache


def _is_end(tokens, ends):
    return jnp.any(tokens[:, None] == ends[None, :], axis=-1)


def _widen(x: np.ndarray, length: int) -> np.ndarray:
    """Pads [batch, n] with zeros on the right to [batch, length]."""
    return np.pad(x, ((0, 0), (0, length - x.shape[1])))


def _is_int(value) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_single(ids) -> bool:
    return np.ndim(ids[0]) == 0
