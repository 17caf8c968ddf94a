"""Short ends of JSON: for an answer that has to become whole within the tokens that are left.

A grammar says which tokens may come next, and not how many it takes to its end. So one end is built token by token:
strings are closed as soon as they may be, then arrays and objects, and values that have to be there are the plainest
ones. It need not be the shortest end there is. Where a string has to fit a pattern none may be found.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..tokenizer import Tokenizer

# Tokens that are chosen one by one for an end, and those of them within strings. What the grammar forces takes little
# time, and has no limit: the names of a hundred properties are no hard end.
CHOSEN, INSIDE = 512, 64
FIRST = 1 << 14  # tokens that are chosen at most for the end of an answer that has not begun, once a request
MENDED = 4  # tokens that are chosen at most in front of what is left of an end that is known
FILLING = 8  # bytes of the tokens that fill strings at most
# What comes first outside of strings, if it may come: what closes, what leads on to something that must come, and
# values, short ones first.
PLAIN = (*b"}],:", *range(48, 58), b"null", b"true", b"false", *b'."ntf[{-')
DIGITS, EXPONENT = 20, 2  # digits in a row that are enough for a number, of 64 bits too, and for its exponent


class Place(NamedTuple):
    """Where a text of JSON stops. string: within a string; escaped: there behind a backslash; digits: how many digits
    it ends with, outside of strings; exponent: these follow an e."""

    string: bool = False
    escaped: bool = False
    digits: int = 0
    exponent: bool = False

    def after(self, text: bytes) -> Place:
        """The place behind more of the text."""
        string, escaped, digits, exponent = self
        for c in text:
            if string:
                string, escaped = escaped or c != 34, not escaped and c == 92  # a quotation mark, a backslash
                continue
            string, digits = c == 34, digits + 1 if 48 <= c < 58 else 0
            exponent = c in b"eE" or (exponent and c in b"+-0123456789")
        return Place(string, escaped, digits, exponent)

    @property
    def enough(self) -> bool:
        """Whether a number needs no more digits here."""
        return self.digits >= (EXPONENT if self.exponent else DIGITS)


class Spelling:
    """A vocabulary as texts.

    Attributes:
      tokenizer: llguidance's. end: the token that ends answers. texts: the bytes of each token. single: whether that
        is one. digit: whether they begin with a digit. fills: how well each token fills a string that has to be longer.
      plain: the tokens of `PLAIN`, in its order. quote: the token of a quotation mark.
    """

    def __init__(self, tokenizer: Any, vocab: int, ends: tuple[int, ...]):
        self.tokenizer, self.end = tokenizer, ends[0] if ends else int(tokenizer.eos_token)
        special = tokenizer.is_special_token
        self.texts = [b"" if special(i) else tokenizer.decode_bytes([i]) for i in range(vocab)]
        lengths = np.array([len(text) for text in self.texts], np.int32)
        words = np.array([text.isalnum() for text in self.texts])
        self.single, self.fills = lengths == 1, np.where(lengths <= FILLING, 2 * lengths + words, lengths > 0)
        self.digit = np.array([text[:1].isdigit() for text in self.texts])
        of = {text: i for i, text in reversed(list(enumerate(self.texts)))}
        plain = (bytes([x]) if isinstance(x, int) else x for x in PLAIN)
        self.plain = np.array([of[text] for text in plain if text in of], np.int64)
        self.quote = of.get(b'"')

    def bits(self, mask: bytes) -> np.ndarray:
        """Whether each token may come, bool [vocab], of llguidance's mask."""
        return np.unpackbits(np.frombuffer(mask, np.uint8), count=len(self.texts), bitorder="little").view(bool)


@functools.lru_cache(maxsize=4)
def spelling(tokenizer: Tokenizer, vocab: int, ends: tuple[int, ...]) -> Spelling:
    """The spelling of a vocabulary; for 50,000 tokens it takes a second to make."""
    from llguidance import LLTokenizer

    made = LLTokenizer(tokenizer.to_json(), n_vocab=vocab, eos_token=list(ends) or None)
    return Spelling(made, vocab, ends)


def find(
    matcher: Any, spelling: Spelling, place: Place, known: Sequence[int] = (), most: int = CHOSEN
) -> list[int] | None:
    """The tokens of an end of JSON, None if none is found.

    Args:
      matcher: llguidance's, as it stands at `place`; it is not changed.
      spelling: of the vocabulary.
      place: where the text stops.
      known: an end from one token before, of which all but its beginning often fits behind a few new tokens.
      most: how many tokens may be chosen one by one.
    """
    matcher, found, chosen, inside = matcher.deep_copy(), [], 0, 0
    used: set[int] = set()
    before: np.ndarray | None = None  # what could come before, in this string
    while not matcher.is_accepting():
        if chosen < MENDED and (rest := _rest(matcher, spelling, known)) is not None:
            return found + rest
        tokens = matcher.compute_ff_tokens()
        if not tokens:
            allowed = spelling.bits(matcher.compute_bitmask())
            token = _inside(spelling, allowed, before, used) if place.string else _outside(spelling, allowed, place)
            chosen, inside = chosen + 1, inside + (place.string and token != spelling.quote)
            if token is None or chosen > most or inside > INSIDE:
                return None
            tokens, before = [token], allowed if place.string else None
        if not matcher.consume_tokens(tokens):
            return None
        found += tokens
        place = place.after(b"".join(spelling.texts[token] for token in tokens))
    if not matcher.is_stopped():  # a number alone, which could go on
        found.append(spelling.end)
    return found


def _rest(matcher: Any, spelling: Spelling, known: Sequence[int]) -> list[int] | None:
    """The part of an end, without up to two tokens at its beginning, that is an end at the matcher's place, too."""
    for skip in range(min(3, len(known))):
        part, end = list(known[skip:]), spelling.end
        whole = part if part[-1] == end else [*part, end]
        if matcher.validate_tokens(whole) == len(whole):  # a number alone could go on without its end
            return whole if spelling.digit[part[-1]] else part
    return None


def _outside(spelling: Spelling, allowed: np.ndarray, place: Place) -> int | None:
    """A token outside of strings: the first of `PLAIN`; a number that has to go on takes one digit after the other, so
    that it does not stay 0."""
    plain = spelling.plain[allowed[spelling.plain]]
    if not len(plain):
        return None
    digits = plain[spelling.digit[plain]]
    return int(digits[place.digits % len(digits)] if spelling.digit[plain[0]] else plain[0])


def _inside(spelling: Spelling, allowed: np.ndarray, before: np.ndarray | None, used: set[int]) -> int | None:
    """A token within a string: what closes it, else a character that could not come before, which is a step in a
    pattern, else several letters or digits."""
    if spelling.quote is not None and allowed[spelling.quote]:
        return spelling.quote
    if before is not None:
        new = [int(i) for i in np.flatnonzero(allowed & ~before & spelling.single) if int(i) not in used]
        if new:
            used.add(new[-1])
            return new[-1]
    best = int(np.argmax(np.where(allowed, spelling.fills, -1)))
    return best if allowed[best] and spelling.fills[best] else None
