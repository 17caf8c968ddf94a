"""Answers in the forms of OpenAI's interface: whole, and in pieces as they come."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ..request import Completion, Token
from .tools import CallReader

Form = Literal["text_completion", "chat.completion"]


@dataclasses.dataclass
class Answer:
    """The answer to one request, of several choices. `spell` gives the text of a token id alone; `echo`: the prompts,
    where they are to stand in front of the answers; `tools`: the names of those that it may call."""

    form: Form
    model: str
    spell: Callable[[int], str]
    logprobs: bool
    echo: Sequence[str] = ()
    tools: Sequence[str] = ()
    id: str = ""
    created: int = 0

    def __post_init__(self):
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + secrets.token_hex(12)
        self.created = int(time.time())
        self._offsets: dict[int, int] = {}  # by choice: how many characters it has so far
        self._readers: dict[int, CallReader] = {}  # by choice, where answers come in pieces

    @property
    def chat(self) -> bool:
        return self.form == "chat.completion"

    def whole(self, completions: Sequence[Completion], usage: dict) -> dict:
        """The body of an answer that has all choices at once."""
        choices = []
        for i, completion in enumerate(completions):
            held, reason = {"text": self._prompt(i) + completion.text}, completion.finish_reason
            if self.chat:
                text, calls = self._parted(completion.text)
                held = {"message": {"role": "assistant", "content": text, "refusal": None}}
                if calls:
                    held["message"] |= {"tool_calls": calls, "content": text or None}
                    reason = "tool_calls"
            rates = self._rates(i, completion.tokens)
            choices.append({"index": i, **held, "logprobs": rates, "finish_reason": reason})
        return self._frame(self.form, choices) | {"usage": usage}

    def first(self, i: int) -> dict:
        """The piece that begins choice i."""
        held = {"delta": {"role": "assistant", "content": ""}} if self.chat else {"text": self._prompt(i)}
        return self._piece(i, held, None, None)

    def piece(self, i: int, token: Token) -> dict | None:
        """The piece for a token of choice i; None if there is nothing to send yet."""
        text = token.text
        if self.tools:
            text = self._readers.setdefault(i, CallReader(self.tools)).push(text)
        if not text and not self.logprobs:
            return None
        return self._piece(i, self._text(text), self._rates(i, [token]), None)

    def last(self, i: int, reason: str | None) -> list[dict]:
        """The pieces that end choice i."""
        rest, calls = self._readers[i].finish() if i in self._readers else ("", [])
        pieces = [self._piece(i, self._text(rest), None, None)] if rest else []
        if calls:
            numbered = [{"index": k, **call} for k, call in enumerate(calls)]
            pieces.append(self._piece(i, {"delta": {"tool_calls": numbered}}, None, None))
            reason = "tool_calls"
        return [*pieces, self._piece(i, {"delta": {}} if self.chat else {"text": ""}, None, reason)]

    def _text(self, text: str) -> dict:
        return {"delta": {"content": text}} if self.chat else {"text": text}

    def _parted(self, text: str) -> tuple[str, list[dict]]:
        """The text of a whole answer, and its calls of tools."""
        if not self.tools:
            return text, []
        reader = CallReader(self.tools)
        free = reader.push(text)
        rest, calls = reader.finish()
        return free + rest, calls

    def usage(self, usage: dict) -> dict:
        """The piece with the numbers of tokens, which follows all choices."""
        return self._frame(self._piece_form, []) | {"usage": usage}

    @property
    def _piece_form(self) -> str:
        return "chat.completion.chunk" if self.chat else self.form

    def _prompt(self, i: int) -> str:
        return self.echo[i] if self.echo else ""

    def _frame(self, form: str, choices: list) -> dict:
        return {"id": self.id, "object": form, "created": self.created, "model": self.model, "choices": choices}

    def _piece(self, i: int, held: dict, rates: Any, reason: str | None) -> dict:
        return self._frame(self._piece_form, [{"index": i, **held, "logprobs": rates, "finish_reason": reason}])

    def _rates(self, i: int, tokens: Sequence[Token]) -> dict | None:
        if not self.logprobs:
            return None
        if self.chat:
            return {"content": [self._rate(t.id, t.logprob) | {"top_logprobs": self._best(t)} for t in tokens]}
        offsets, at = [], self._offsets.get(i, 0)
        for token in tokens:
            offsets.append(at)
            at += len(token.text)
        self._offsets[i] = at
        return {
            "tokens": [self.spell(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{self.spell(j): rate for j, rate in token.best} for token in tokens],
            "text_offset": offsets,
        }

    def _best(self, token: Token) -> list[dict]:
        return [self._rate(i, rate) for i, rate in token.best]

    def _rate(self, token: int, logprob: float | None) -> dict:
        text = self.spell(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def usage_of(completions: Sequence[Completion], n: int) -> dict:
    """The numbers of tokens of completions with `n` choices for each prompt; a prompt counts once."""
    prompt = sum(completion.prompt_tokens for completion in completions[::n])
    cached = sum(completion.cached_tokens for completion in completions[::n])
    made = sum(len(completion.tokens) for completion in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
