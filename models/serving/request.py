"""Requests and answers: what a client may ask for, checked, and the tokens that it gets."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jtile._errors import ContextError, PromptError

from ..generate import LanguageModel
from ..prompt import is_int, read_ends, read_prompt
from ..sampling import Sampling, SamplingOptions
from .device import Row
from .grammar import Grammar, Guide
from .programs import LOGPROBS

FinishReason = Literal["stop", "length", "cancelled", "error"]
STOPS, STOP_CHARACTERS = 16, 256  # at most so many stop strings, of at most so many characters


class Token(NamedTuple):
    """One token of an answer.

    Attributes:
      id: the token id.
      text: what the token adds to the text. It is empty while a character or a stop string may be incomplete, and for
        the token that ends the answer.
      logprob: its log-probability under the model's own logits, if the request asked for it.
      best: the likeliest tokens as pairs (id, log-probability), the likeliest first, if the request asked for them.
    """

    id: int
    text: str
    logprob: float | None = None
    best: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass
class Completion:
    """An answer, or what there is of it so far.

    Attributes:
      tokens: its tokens.
      text: its text.
      finish_reason: `"stop"` (an end token or a stop string), `"length"`, `"cancelled"` or `"error"`; None while the
        answer goes on.
      stop: the stop string that ended it.
      prompt_tokens: the number of tokens of the prompt.
      cached_tokens: how many of these were in the cache already.
    """

    tokens: list[Token] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


@dataclasses.dataclass(frozen=True)
class Request:
    """A checked request: prompt, int32 [length]; at most max_tokens; ends, token ids, and stops, strings, that end the
    answer; row: how its tokens are chosen; guide: what the answer has to be, for this one request; adapter: the number
    of the low-rank adapter that answers, 0 for the model itself."""

    prompt: np.ndarray
    max_tokens: int
    ends: frozenset[int]
    stops: tuple[str, ...]
    row: Row
    guide: Guide | None = None
    adapter: int = 0

    @functools.cached_property
    def plain(self) -> bool:
        """Whether its tokens are the likeliest ones, and nothing else is asked for."""
        return self.row.level == 0 and self.row.logprobs is None and self.guide is None


def read_request(
    lm: LanguageModel,
    length: int,
    prompt: str | Sequence[int],
    max_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    eos: str | int | Sequence[int] | None = "model",
    logprobs: bool | int = False,
    sampling: SamplingOptions | None = None,
    grammar: Grammar | None = None,
    adapter: int = 0,
) -> Request:
    """Checks a request to a model whose texts have at most `length` tokens; see `Engine.stream`.

    Raises:
      PromptError: the prompt is empty, too long (ContextError), or no prompt; an option is out of its range.
    """
    prompt = _ids(lm, prompt)
    room = length - len(prompt)
    if room < 1:
        raise ContextError(
            f"the prompt has {len(prompt)} tokens; prompt and answer together have at most {length} here"
        )
    if max_tokens is not None and (not is_int(max_tokens) or max_tokens < 1):
        raise PromptError(
            f"max_tokens is an int of at least 1, or None for as many as there is room for, got {max_tokens!r}"
        )
    options = _sampling(sampling or {})
    steps, vocab = options.static, lm.config.vocab_size
    rows = options.rows(1)  # checks that each option is one value
    biases = options.traced(1, vocab)["bias"] if steps.bias else None  # checks the tokens
    bias = {} if biases is None else {int(i): float(biases[0, i]) for i in np.flatnonzero(biases[0])}
    level = 2 if steps.repetition or steps.counts or steps.bias else 1 if steps.draws else 0
    row = Row(level, rows, bias, _logprobs(logprobs), len(prompt))
    ends = frozenset(read_ends(eos, lm.eos_ids))
    if grammar is not None and not isinstance(grammar, Grammar):
        raise PromptError(f"grammar is a Grammar, as Grammar.json(schema) gives one; got {grammar!r}")
    most = min(room, max_tokens or room)
    guide = None if grammar is None else Guide(lm, grammar, most)
    return Request(prompt, most, ends, _stops(lm, stop), row, guide, adapter)


def _sampling(given: Mapping[str, Any] | SamplingOptions) -> Sampling:
    known = SamplingOptions.__annotations__
    if unknown := [repr(name) for name in given if name not in known]:
        raise PromptError(
            f"a request has no option {', '.join(unknown)}; beside max_tokens, stop, eos, logprobs and grammar there "
            f"are {', '.join(known)}"
        )
    return Sampling(**given)


def _ids(lm: LanguageModel, prompt) -> np.ndarray:
    if isinstance(prompt, str):
        if lm.tokenizer is None:
            raise PromptError(f"{lm.source or 'the model'} has no tokenizer; give token ids")
        prompt = lm.tokenizer.encode(prompt)
    read = read_prompt(prompt, None, lm.config.vocab_size, 2**31 - 1)
    if not read.single:
        raise PromptError("one request is one prompt: text, or a list of token ids")
    return read.ids[0]


def _stops(lm: LanguageModel, stop) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop) if np.iterable(stop) else (stop,)
    if (
        isinstance(stop, Mapping)
        or not all(isinstance(x, str) and 0 < len(x) <= STOP_CHARACTERS for x in stops)
        or len(stops) > STOPS
    ):
        raise PromptError(
            f"stop is a string of 1 to {STOP_CHARACTERS} characters, or up to {STOPS} of them; got {stop!r}"
        )
    if stops and lm.tokenizer is None:
        raise PromptError(f"{lm.source or 'the model'} has no tokenizer, and so no text to stop at; use eos")
    return stops


def _logprobs(logprobs) -> int | None:
    if isinstance(logprobs, bool):
        return 0 if logprobs else None
    if not is_int(logprobs) or not 0 <= logprobs <= LOGPROBS:
        raise PromptError(
            f"logprobs is a bool, or how many of the likeliest tokens to report, 0 to {LOGPROBS}; got {logprobs!r}"
        )
    return int(logprobs)
