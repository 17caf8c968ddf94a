"""`LanguageModel`: logits and text generation around one jitted prefill and one device-side decoding loop."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Iterator, Sequence
from typing import Unpack

import jax
import numpy as np
from flax import nnx

from jtile._errors import ModelError, PromptError
from jtile.ops import gpu_tiles

from . import cache as kv
from . import huge_pages, next_tokens, programs, prompts, screened, speculation
from .adapters import apply_adapter, read_adapter
from .checkpoint import Checkpoint
from .config import LONGEST
from .decoder import Decoder
from .dtypes import CACHE_DTYPES, default_dtype, dtype_of, in_integers
from .host import on_host
from .mesh import Devices, Parts, here
from .prompt import Prompt, is_int, read_ends, read_prompt, widen
from .sampling import Sampling, SamplingOptions, Steps
from .speculation import NGram, Plan
from .tokenizer import Tokenizer

CHUNK = 8  # tokens per dispatch: Python's share is one call in eight, and Ctrl-C waits for at most eight tokens
# Tokens per dispatch of models on GPUs that have fewer bytes than `SMALL`: a dispatch took the host of an H200 2.2 ms,
# whether of 8 or 16 steps, and 8 of SmolLM2-135M take the device as long: 388 us a step in eights, 283 in sixteens.
LONG_CHUNK, SMALL = 16, 2 << 30
# A dispatch of SmolLM2-135M, with its 513 arrays of weights, takes a core of the host for 2.3 ms, on which a helper of
# its kernels would compute: a 24th of the time of both cores for 8 steps on two of them.
SMALL_ON_HOST = 256 << 20


@dataclasses.dataclass
class Stats:
    """What one generation took: numbers of tokens for each row, and seconds.

    The two speeds do not include compilation. With speculative decoding, `drafted_tokens` and `accepted_tokens` count
    the drafts of all rows together, and those of them that were kept."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
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
    """A loaded language model; `load` makes one.

    Attributes:
      config: the sizes of the model.
      tokenizer: turns text into token ids and back; None if the files had none.
      eos_ids: the tokens that end a text.
      source: where the weights came from.
      dtype: the dtype of activations.
      cache_dtype, page_size: those of the key-value cache, see `load`.
      windows: the attention window of each layer, None for all keys.
      recurrent: whether layers keep a state of all tokens.
      chunk: the positions of a chunk, where tokens of some layers see their own chunk only; else None.
      devices: the mesh that the model is cut over, and how; None for one device. shares: the
        part of the weights that each of them has, by places along the axes of tensor and expert.
    """

    def __init__(
        self, model: Decoder | Parts, tokenizer: Tokenizer | None = None, eos_ids: Sequence[int] = (), source: str = "",
        cache_dtype: str | None = None, page_size: int | None = None,
    ):  # fmt: skip
        self._executables: dict[tuple, jax.stages.Compiled] = {}
        self._screen: tuple[jax.Array, screened.Screen | None] | None = None  # of which head it is
        self.devices, self.shares = (model.devices, model.shares) if isinstance(model, Parts) else (None, {})
        if isinstance(model, Parts):
            self._structure, self._weights, model, config = model.structure, model.weights, model.first, model.config
        else:
            (graph, state), config = nnx.split(model), model.config
            # Plain leaves: a dispatch takes 80 us with them and 390 us with the 423 Variables of SmolLM2's nnx.State.
            self._weights, tree = jax.tree.flatten(state)
            self._structure = (graph, tree)
        self.config, self.tokenizer, self.eos_ids, self.source = config, tokenizer, tuple(eos_ids), source
        self.dtype, self.cache_dtype, self.page_size, self.windows = model.dtype, cache_dtype, page_size, model.windows
        self.recurrent, self.chunk = model.recurrent, model.chunk

    @property
    def model(self) -> Decoder:
        """The Flax module over the weights of this model.

        Raises:
          ModelError: devices have parts of the weights.
        """
        if self.devices is not None:
            raise ModelError(
                f"{self.source or 'the model'} is cut over the devices of a mesh, each of which has a module of its "
                "own; load it without a mesh for the module of the whole"
            )
        return programs.merge(self._structure, self._weights)

    @functools.cached_property
    def _nbytes(self) -> int:
        return sum(w.nbytes for w in self._weights)

    @functools.cached_property
    def _head(self) -> int | None:
        """Which of the weights a `Screen` is made of; None where none is taken."""
        model = self.model
        if not (next_tokens.fits(model, 1, Steps(), False) and screened.fits(model)):
            return None
        numbers = [jax.ShapeDtypeStruct((i,), np.float32) for i in range(len(self._weights))]
        return programs.merge(self._structure, numbers).head_table().shape[0]

    def _screens(self, rows: int, choice: Choice) -> tuple[screened.Screen, ...]:
        """The screen for steps of so many rows whose tokens are chosen so, or nothing. It is made of the weights as
        they are when it is first asked for, and again when they are others."""
        plain = self.devices is None and rows == 1 and choice.steps == Steps() and not choice.logprobs
        if not plain or self._head is None:
            return ()
        head = self._weights[self._head]
        if self._screen is None or self._screen[0] is not head:
            self._screen = None
            self._screen = (head, screened.screen_of(head)) if screened.has_room(head) else (head, None)
        return () if self._screen[1] is None else self._screen[1:]

    @functools.cached_property
    def _layer(self) -> prompts.Layer:
        return prompts.Layer.of(list(self.model.blocks))

    @property
    def part(self) -> Decoder:
        """The module of what each device has of the model: on one device `model`; over a mesh its weights are only
        shapes and dtypes."""
        if self.devices is None:
            return self.model
        count = len(self.shares)
        local = lambda x: jax.ShapeDtypeStruct((x.shape[0] // count, *x.shape[1:]), x.dtype)
        return programs.merge(self._structure, list(map(local, self._weights)))

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, dtype=None, cache_dtype=None, page_size: int | None = None,
        devices: Devices | None = None, adapter: str | os.PathLike | None = None,
    ) -> LanguageModel:  # fmt: skip
        """Reads every weight of a checkpoint.

        Args:
          checkpoint: an open checkpoint.
          dtype, cache_dtype, page_size, adapter: as in `load`.
          devices: the devices that share the model.
        Returns:
          A `LanguageModel`.
        """
        if page_size is not None and (not is_int(page_size) or not 1 <= page_size <= LONGEST):
            raise ModelError(
                f"page_size is an int of at least 1 and at most {LONGEST}, or None for rows in one piece; "
                f"got {page_size!r}"
            )
        weight = in_integers(checkpoint.weight) if dtype is None else checkpoint.weight
        dtype = default_dtype(checkpoint.sample()) if dtype is None else dtype_of(dtype, "dtype")
        cache_dtype = None if cache_dtype is None else dtype_of(cache_dtype, "cache_dtype", CACHE_DTYPES)
        if devices is None:
            model = Decoder(checkpoint.config, weight, checkpoint.tied, dtype)
            if adapter is not None:
                model = apply_adapter(model, read_adapter(adapter, model))
        else:
            model = devices.read(checkpoint, dtype, adapter)
        lm = cls(model, checkpoint.tokenizer, checkpoint.eos_ids, checkpoint.source, cache_dtype, page_size)
        del model  # `lm` alone has the weights: each goes as soon as it has moved
        if devices is None and on_host():
            huge_pages.move(lm._weights, lm._structure[1])
        return lm

    def logits(self, ids, attention_mask=None) -> jax.Array:
        """Logits of the next token after every position.

        Args:
          ids: int [batch, length] (or [length]).
          attention_mask: [batch, length], 0 where `ids` is padding (left or right); positions count real tokens only.

        Returns:
          float32 [batch, length, vocab] (or [length, vocab]); zero at padding.

        Raises:
          PromptError: the prompt is empty or too long, or has ids outside the vocabulary.
        """
        prompt, rows = self._prompt(ids, attention_mask)
        length = prompt.mask.shape[1]
        size = kv.bucket(max(prompt.ids.shape[1], length), self.config.max_length)
        mask = widen(prompt.mask, size)
        slot = np.clip(np.cumsum(mask, axis=1) - 1, 0, None).astype(np.int32)  # where each position's token is packed
        run, _ = self._compiled(programs.logits, widen(prompt.ids, size), slot, mask)
        out = run(self._weights, widen(prompt.ids, size), slot, mask)
        with here(self.devices):
            return out[0, :length] if prompt.single else out[:rows, :length]

    def embed(self, ids, attention_mask=None) -> jax.Array:
        """Embeddings of texts: the hidden state of each one's last token behind the final norm, of length 1, as models
        that are trained for embeddings by their last token want it.

        Args:
          ids, attention_mask: as in `logits`.

        Returns:
          float32 [batch, hidden] (or [hidden]).

        Raises:
          PromptError: the prompt is empty or too long, or has ids outside the vocabulary.
        """
        prompt, rows = self._prompt(ids, attention_mask)
        size = kv.bucket(prompt.ids.shape[1], self.config.max_length)
        args = widen(prompt.ids, size), prompt.lengths
        run, _ = self._compiled(programs.embed, *args)
        out = run(self._weights, *args)[:rows]
        return out[0] if prompt.single else out

    def generate(
        self,
        ids,
        max_new_tokens: int = 128,
        *,
        eos: str | int | Sequence[int] | None = "model",
        attention_mask=None,
        draft: LanguageModel | NGram | None = None,
        draft_tokens: int = 4,
        **options: Unpack[SamplingOptions],
    ) -> np.ndarray:
        """The tokens that continue `ids`.

        Args:
          ids: int [batch, length], [length], or rows of different lengths; with padding, pass `attention_mask`.
          max_new_tokens: the most tokens to make; there are fewer when every row has ended or the context of the model
            is full.
          eos: tokens that end a row: "model" for the model's own, ids, or None to never stop.
          draft: what proposes `draft_tokens` tokens at a time, which one step of this model checks: a smaller model
            with the same vocabulary, or an `NGram`. The tokens are the same as without a draft, up to the roundings
            of other shapes.
          options: those of `Sampling`, which is greedy without any of them: temperature, top_k, top_p, min_p,
            repetition_penalty, presence_penalty, frequency_penalty, logit_bias, seed.

        Returns:
          int32 [batch, n] (or [n]), new tokens only, the ending token included; a row that ended is filled with it.

        Raises:
          PromptError: the prompt is empty or too long or has ids outside the vocabulary, a sampling option is out of
            range, or the draft does not fit.
          ModelError: the model's logits are no numbers.
        """
        options |= {"draft": draft, "draft_tokens": draft_tokens}
        steps = list(self.stream(ids, max_new_tokens, eos=eos, attention_mask=attention_mask, **options))
        single = _is_single(ids)
        batch = (len(steps),) if single else (len(ids), len(steps))
        return np.asarray(steps, np.int32).T.reshape(batch)

    def stream(
        self,
        ids,
        max_new_tokens: int = 128,
        *,
        eos: str | int | Sequence[int] | None = "model",
        attention_mask=None,
        draft: LanguageModel | NGram | None = None,
        draft_tokens: int = 4,
        logprobs: bool = False,
        **options: Unpack[SamplingOptions],
    ) -> Generation:
        """Generate as `generate` does, token by token.

        Errors in the arguments are raised by the call, not by the iteration, which raises a `ModelError` where logits
        are no numbers.

        Args:
          ids, max_new_tokens, eos, attention_mask, draft, draft_tokens, options: as in `generate`.
          logprobs: keep the log-probability of each token.
        Returns:
          An iterator of tokens, each an int for one prompt [length], int32 [batch] for a batch. Its `stats` hold the
          token counts and speeds so far, and with `logprobs=True` its `logprobs` the log-probability of each token so
          far, a float or float32 [batch], under the model's own logits, before any option.
        """
        if not is_int(max_new_tokens) or max_new_tokens < 0:
            raise PromptError(f"max_new_tokens is an int of at least 0, got {max_new_tokens!r}")
        if draft is not None and (self.devices or getattr(draft, "devices", None)):
            raise PromptError("a model that is cut over a mesh neither drafts nor checks drafts; leave out draft")
        prompt, rows = self._prompt(ids, attention_mask)
        ends = read_ends(eos, self.eos_ids)
        plan = Plan.of(self, draft, draft_tokens)
        room = max(self.config.max_length - int(prompt.lengths.max()), 0)
        choice = Choice.of(Sampling(**options), rows, self.config.vocab_size, ends, logprobs, self.devices)
        return Generation(self, prompt, rows, min(max_new_tokens, room), choice, plan)

    def _prompt(self, ids, attention_mask) -> tuple[Prompt, int]:
        """(the prompt, how many of its rows the caller asked for). On a mesh, rows are added so that devices share them
        equally."""
        prompt = read_prompt(ids, attention_mask, self.config.vocab_size, self.config.max_length)
        rows = len(prompt.lengths)
        return (prompt if self.devices is None else self.devices.filled(prompt)), rows

    def _compiled(self, function, *args, weights=None, **static):
        """The executable of a jitted function for these argument shapes, and these of the weights, by default all;
        returns (executable, seconds to compile)."""
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(args))
        key = (function.__name__, shapes, tuple(static.items()))
        start = time.perf_counter()
        if key not in self._executables:
            lower = function.lower if self.devices is None else functools.partial(self.devices.lower, function)
            with gpu_tiles.beside(self._weights):
                given = self._weights if weights is None else weights
                self._executables[key] = lower(self._structure, given, *args, **static).compile()
        return self._executables[key], time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class Choice:
    """How the next tokens of a generation are chosen from logits. steps, logprobs: what its programs are compiled for.
    numbers (those of `Sampling.traced`) and ends (int32 [n], the tokens that end a row): arguments of these programs,
    on the device."""

    steps: Steps
    numbers: dict[str, jax.Array]
    ends: jax.Array
    logprobs: bool

    @classmethod
    def of(
        cls, sampling: Sampling, batch: int, vocab: int, tokens: Sequence[int], logprobs: bool,
        devices: Devices | None = None,
    ) -> Choice:  # fmt: skip
        """The choice of a sampling. `tokens`: those that end a row; `devices`: see `LanguageModel`.

        Raises:
          PromptError: an option of the sampling does not fit the batch or the vocabulary.
        """
        ends = np.asarray(tokens or (-1,), np.int32)
        size = 1 << (len(ends) - 1).bit_length()  # few sizes mean few compilations
        ends = np.pad(ends, (0, size - len(ends)), mode="edge")
        numbers = sampling.traced(batch, vocab)
        if devices is None:
            numbers, ends = jax.device_put((numbers, ends))
        else:
            numbers = devices.numbers(numbers, batch)
        return cls(sampling.static, numbers, ends, bool(logprobs))


@dataclasses.dataclass(frozen=True)
class Run:
    """The programs of a `Generation`, of which it knows nothing: whoever drops one drops the tokens that it would make,
    too, and the cache that these hold, without waiting for Python to collect what refers to itself."""

    lm: LanguageModel
    prompt: Prompt
    new_tokens: int
    choice: Choice
    stats: Stats

    def speculated(self, plan: Plan):
        """As `tokens`, with drafts."""
        if self.new_tokens > 0:
            yield from speculation.run(self.lm, self.prompt, self.new_tokens, self.choice, plan, self.stats)

    def tokens(self):
        """The tokens of each step [batch], and their log-probabilities [batch] or None."""
        if self.new_tokens == 0:
            return
        chunk = chunk_of(self.lm._nbytes, self.new_tokens - 1)
        prompt, decode, rest = self.start(chunk)
        began, start = time.perf_counter(), None
        out, seen = prompt()
        tokens, _, done, memory = out
        if on_host():  # elsewhere the prompt hides the time that the host takes to launch the first chunk
            jax.block_until_ready(out)
            start = self._prompt_done(began)
        made, (*first, ended) = 1, seen
        pending = [(*first, 1, ended)]  # dispatched, not yet read: (tokens, logprobs [batch, n], how many, done)
        for x in seen:
            if x is not None:
                x.copy_to_host_async()  # behind the launch of a chunk the copy would come later
        while pending:
            if made < self.new_tokens:  # the device works on the next chunk while this one is read and printed
                count = min(chunk, self.new_tokens - made)
                numbers = np.int32(made), np.int32(count), *rest
                *out, tokens, done, memory = decode(self.lm._weights, memory, tokens, done, *numbers)
                pending.append(out)
                made += count
            rows, logprobs, steps, ended = (None if x is None else np.asarray(x) for x in pending.pop(0))
            start = self._prompt_done(began) if start is None else start
            self.stats.decode_seconds = time.perf_counter() - start
            for i in range(int(steps)):
                yield rows[:, i], None if logprobs is None else logprobs[:, i]
            if ended.all():
                return

    def start(self, chunk: int):
        """(a function that runs the prompt, the program of `chunk` steps, its last arguments), all compiled."""
        lm, choice = self.lm, self.choice
        length = self.prompt.ids.shape[1]
        size = kv.bucket(length, lm.config.max_length)
        slots = kv.bucket(max(size, length + self.new_tokens), lm.config.max_length)
        rest, static = (choice.numbers, choice.ends), {"steps": choice.steps, "logprobs": choice.logprobs}
        args = (programs.packed(widen(self.prompt.ids, size), self.prompt.lengths), *rest)
        context = lm.devices and lm.devices.axes.context
        layout = kv.Layout(slots, lm.cache_dtype, lm.windows, lm.page_size, context)
        prompt, (tokens, _, done, memory), seconds = prompts.compiled(lm, args, static | {"layout": layout})
        rest = *rest, *lm._screens(len(self.prompt.lengths), choice)
        args_of_step = memory, tokens, done, np.int32(0), np.int32(0), *rest
        decode, more = lm._compiled(programs.decode, *args_of_step, chunk=chunk, **static)
        self.stats.compile_seconds = seconds + more
        return prompt, decode, rest

    def _prompt_done(self, began: float) -> float:
        """Notes that the prompt, which began then, is done now; returns the time."""
        now = time.perf_counter()
        self.stats.prefill_seconds = now - began
        return now


class Generation(Iterator):
    """An iterator over the tokens of one call of `LanguageModel.stream`.

    Attributes:
      stats: what the generation took so far.
      logprobs: the log-probability of each token, if the call asked for them.
    """

    def __init__(
        self, lm: LanguageModel, prompt: Prompt, rows: int, new_tokens: int, choice: Choice, plan: Plan | None = None
    ):
        self.stats = Stats(prompt_tokens=int(prompt.lengths.max()))
        self.logprobs: list = []
        self._rows, self._run = rows, Run(lm, prompt, new_tokens, choice, self.stats)
        self._tokens = self._run.tokens() if plan is None else self._run.speculated(plan)

    def __next__(self):
        lm = self._run.lm
        with here(lm.devices):
            row, logprobs = (x if x is None else x[: self._rows] for x in next(self._tokens))
        if (row >= lm.config.vocab_size).any():  # see `sampling.choose`
            self._tokens.close()
            overflow = ", or load it with dtype='bfloat16' or 'float32': beyond 65504 float16 has no numbers"
            raise ModelError(
                f"the logits of {lm.source or 'the model'} are no numbers (NaN) at token {self.stats.new_tokens} "
                f"of the answer; check its weights and their scales{overflow if lm.dtype == 'float16' else ''}"
            )
        self.stats.new_tokens += 1
        single = self._run.prompt.single
        if logprobs is not None:
            self.logprobs.append(float(logprobs[0]) if single else logprobs)
        return int(row[0]) if single else row


def chunk_of(nbytes: int, steps: int) -> int:
    """How many steps of a model with so many bytes a dispatch has, where `steps` are asked for."""
    return CHUNK if steps <= CHUNK or nbytes >= (SMALL_ON_HOST if on_host() else SMALL) else LONG_CHUNK


def _is_single(ids) -> bool:
    return np.ndim(ids[0]) == 0
