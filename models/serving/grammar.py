"""Answers of a given form: JSON that fits a schema, texts that fit a regular expression or a grammar, by the package
llguidance."""

from __future__ import annotations

import dataclasses
import json
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from jtile._errors import ModelError, PromptError

from ..generate import LanguageModel
from . import endings

# Before the last so many tokens of an answer nothing is done for its end, unless the end that it has takes more than
# half as many.
NEAR = 256
RETRY = 8  # tokens after which an end is looked for again where none was found
LOOK = 16  # tokens after which it is seen how long the end has become, where nothing is done for it yet

Verdict = Literal["taken", "again", "wrong"]
LONGEST = 1 << 18  # characters of a schema: one string of a megabyte takes seconds of Python's lock
# Patterns that one text has to fit: with each one more llguidance takes twice as long, beyond five mostly to refuse.
PATTERNS = 10


@dataclasses.dataclass(frozen=True)
class Grammar:
    """The form that an answer must have; `json`, `regex` and `lark` make one. text: the grammar in llguidance's own
    form; of_json: whether the answer is JSON, which is then brought to its end within `max_tokens`.

    Raises:
      ModelError: llguidance is not installed.
    """

    text: str
    of_json: bool = False

    @classmethod
    def json(cls, schema: Mapping[str, Any] | None = None) -> Grammar:
        """JSON that a JSON schema describes, without white space that nobody needs.

        Where `max_tokens` comes near, strings, arrays and objects are closed so that the answer becomes whole, if an
        end is found. Numbers have at most 20 digits before and after the point, and two in the exponent, unless the
        schema asks for more.

        Args:
          schema: the schema as a mapping; None allows any object.
        Returns:
          A `Grammar`.
        Raises:
          PromptError: `schema` is no JSON schema, or a too large one.
        """
        schema = {"type": "object"} if schema is None else schema
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError(f"this is no JSON schema: {error}") from error
        if len(text) > LONGEST:
            raise PromptError(f"a JSON schema has at most {LONGEST} characters, this one {len(text)}")
        patterns = _most_patterns(schema)
        if patterns > PATTERNS:
            raise PromptError(
                f"a JSON schema has at most {PATTERNS} patterns for one text (allOf), this one {patterns}"
            )
        try:
            return cls(_matcher().grammar_from_json_schema(text, overrides={"whitespace_flexible": False}), True)
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
    """Where one answer of at most `most` tokens stands in its grammar.

    Raises:
      PromptError: the grammar is not valid, or the model has no tokenizer.
    """

    def __init__(self, lm: LanguageModel, grammar: Grammar, most: int):
        if lm.tokenizer is None:
            raise PromptError(f"{lm.source or 'the model'} has no tokenizer, and grammars are of text")
        matcher = _matcher()
        self._spelling = endings.spelling(lm.tokenizer, lm.config.vocab_size, lm.eos_ids)
        self._words = -(-lm.config.vocab_size // 32)
        self._matcher = matcher(self._spelling.tokenizer, grammar.text, log_level=0)
        if self._matcher.is_error():
            first, *more = self._matcher.get_error().splitlines()
            reason = " ".join([first, *(line for line in more if line.startswith("error:"))])  # of a wrong regex
            raise PromptError(f"the grammar or schema of the answer is none: {reason}")
        self._json, self._left, self._place = grammar.of_json, most, endings.Place()
        self._end: list[int] | None = None
        if self._json:
            self._end = endings.find(self._matcher, self._spelling, self._place, most=endings.FIRST)
            if self._end is None and not self._begins():
                raise PromptError("the grammar or schema of the answer is none: no answer of it ever ends")
        self._near = max(NEAR, 2 * len(self._end or ()))
        self._only: int | None = None  # the only token that may come now
        self._retry = 0

    def _begins(self) -> bool:
        """Whether some token may come first, and others behind it."""
        bits = self._spelling.bits(self._matcher.compute_bitmask())
        trial = self._matcher.deep_copy()
        return bool(bits.any()) and trial.consume_token(int(bits.argmax())) and not trial.is_error()

    def allowed(self) -> np.ndarray:
        """The tokens that may come next: bit i % 32 of number i // 32 of uint32 [vocab / 32, rounded up]."""
        only = self._only
        if only is None and self._end and self._left <= len(self._end):
            only = self._end[0]
        if only is not None:
            mask = np.zeros((self._words,), np.uint32)
            mask[only // 32] = np.uint32(1 << only % 32)
            return mask
        mask = self._matcher.compute_bitmask()
        if self._json and self._place.enough:
            bits = self._spelling.bits(mask)
            fewer = bits & ~self._spelling.digit
            if fewer.any():
                packed = np.packbits(fewer, bitorder="little")
                return np.pad(packed, (0, 4 * self._words - len(packed))).view(np.uint32)
        return np.frombuffer(mask, np.uint32, self._words)  # the mask has a word more

    def take(self, token: int) -> Verdict:
        """Advances by a token: "taken"; or "again" if the answer could not end within its tokens then, so that another
        one is to be chosen; or "wrong" if the token may not come here."""
        if not self._matcher.consume_token(token):
            return "wrong"
        place, left = self._place.after(self._spelling.texts[token]), self._left - 1
        if self._json and left > self._near and left % LOOK == 0:
            self._look(place, left)
        if left > self._near:
            self._end = None
        elif self._json:
            end, known = self._end_behind(token, place), self._end
            fits = end is not None and len(end) <= left
            if not fits and known and token != known[0] and len(known) <= self._left:
                self._matcher.rollback(1)
                self._only = known[0]
                return "again"
            self._end = end
        self._place, self._left, self._only = place, left, None
        return "taken"

    def _look(self, place: endings.Place, left: int) -> None:
        """Begins sooner to think of the end of an answer that has opened so much that its end is long."""
        end = len(endings.find(self._matcher, self._spelling, place) or ())
        self._near = max(self._near, 2 * end if 2 * end < endings.CHOSEN else left)

    def _end_behind(self, token: int, place: endings.Place) -> list[int] | None:
        """An end behind a token that was just consumed: what is left of the one known, or a new one."""
        known = self._end
        if known and token == known[0]:
            return known[1:]
        if self._retry and not known:
            self._retry -= 1
            return None
        found = endings.find(self._matcher, self._spelling, place, known or ())
        self._retry = RETRY if found is None else 0
        return found

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, so that no token may follow."""
        return self._matcher.is_stopped()


def _most_patterns(schema: Any) -> int:
    """The most patterns that one text has to fit at once in a schema."""
    behind: dict[str, int] = {}
    try:
        _patterns(schema, schema, behind, {})
        return _patterns(schema, schema, {}, behind)
    except RecursionError as error:
        raise PromptError("this JSON schema is too deep: too many references follow each other") from error


def _patterns(schema: Any, root: Any, known: dict[str, int], before: dict[str, int]) -> int:
    """The most patterns that one text has to fit, in a part of the schema `root`; known: those behind references, which
    may go round: then what was known `before` counts."""
    if isinstance(schema, list):
        return _most(_patterns(x, root, known, before) for x in schema)
    if not isinstance(schema, Mapping):
        return 0
    sums = {"allOf": sum, "anyOf": _most, "oneOf": _most}  # what lists of schemas for one and the same text add up to
    lists = {key: x for key, x in schema.items() if key in sums and isinstance(x, list)}
    together = int(isinstance(schema.get("pattern"), str))
    together += sum(sums[key](_patterns(x, root, known, before) for x in of) for key, of in lists.items())
    if isinstance(ref := schema.get("$ref"), str):
        if ref not in known:
            known[ref] = before.get(ref, 0)  # while it is looked at
            known[ref] = _patterns(_referred(ref, root), root, known, before)
        together += known[ref]
    return max(together, _most(_patterns(x, root, known, before) for key, x in schema.items() if key not in lists))


def _referred(ref: str, root: Any) -> Any:
    """The part of the schema `root` that a reference names; None where there is none."""
    at = root if ref.startswith("#") else None
    for key in urllib.parse.unquote(ref).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(at, list) and key.isdecimal() and int(key) < len(at):
            at = at[int(key)]
        else:
            at = at.get(key) if isinstance(at, Mapping) else None
    return at


def _most(numbers: Iterable[int]) -> int:
    return max(numbers, default=0)


def _matcher():
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise ModelError("grammars and JSON schemas need llguidance; run: pip install 'jtile[serve]'") from error
    return LLMatcher
