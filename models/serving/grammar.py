"""Answers of a given form: JSON that fits a schema, texts that fit a regular expression or a grammar, by the package
llguidance."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from jtile._errors import ModelError, PromptError

from ..generate import LanguageModel
from ..tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Grammar:
    """The form that an answer must have; `json`, `regex` and `lark` make one. text: the grammar in llguidance's own
    form.

    Raises:
      ModelError: llguidance is not installed.
    """

    text: str

    @classmethod
    def json(cls, schema: Mapping[str, Any] | None = None) -> Grammar:
        """JSON that a JSON schema describes, without white space that nobody needs.

        Args:
          schema: the schema as a mapping; None allows any object.
        Returns:
          A `Grammar`.
        Raises:
          PromptError: `schema` is no JSON schema.
        """
        schema = {"type": "object"} if schema is None else schema
        try:
            return cls(
                _matcher().grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})
            )
        except (TypeError, ValueError) as error:
            raise PromptError(f"this is no JSON schema: {error}") from error

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Texts that match a regular expression as a whole.

        Args:
          pattern: the expression, in the syntax of Rust's regex.
        Returns:
          A `Grammar`.
        """
        return cls(_matcher().grammar_from_regex(pattern))

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Texts of a context-free grammar.

        Args:
          grammar: its rules, in the form of Lark.
        Returns:
          A `Grammar`.
        """
        return cls(_matcher().grammar_from_lark(grammar))


class Guide:
    """Where one answer stands in its grammar.

    Raises:
      PromptError: the grammar is not valid, or the model has no tokenizer.
    """

    def __init__(self, lm: LanguageModel, grammar: Grammar):
        if lm.tokenizer is None:
            raise PromptError(f"{lm.source or 'the model'} has no tokenizer, and grammars are of text")
        tokenizer = _tokenizer(lm.tokenizer, lm.config.vocab_size, lm.eos_ids)
        self._words = -(-lm.config.vocab_size // 32)
        self._matcher = _matcher()(tokenizer, grammar.text, log_level=0)
        if self._matcher.is_error():
            first, *more = self._matcher.get_error().splitlines()
            reason = " ".join([first, *(line for line in more if line.startswith("error:"))])  # of a wrong regex
            raise PromptError(f"the grammar or schema of the answer is none: {reason}")

    def allowed(self) -> np.ndarray:
        """The tokens that may come next: bit i % 32 of number i // 32 of uint32 [vocab / 32, rounded up]."""
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint32, self._words)  # the mask has a word more

    def take(self, token: int) -> bool:
        """Advances by a token; returns False if the token may not come here."""
        return self._matcher.consume_token(token)

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, so that no token may follow."""
        return self._matcher.is_stopped()


def _matcher():
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise ModelError("grammars and JSON schemas need llguidance; run: pip install 'jtile[serve]'") from error
    return LLMatcher


@functools.lru_cache(maxsize=4)
def _tokenizer(tokenizer: Tokenizer, vocab: int, ends: tuple[int, ...]):
    """llguidance's tokenizer for a vocabulary; for 50,000 tokens it takes a second to make."""
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer.to_json(), n_vocab=vocab, eos_token=list(ends) or None)
