"""Texts of answers: what of them is held back for stop strings."""

import pytest

from jtile.models.serving.text import StopText


class Letters:
    """A decoder whose tokens are letters."""

    def push(self, token: int) -> str:
        return chr(token)


@pytest.mark.parametrize(
    ("text", "stops", "pieces", "stop"),
    [
        ("abcd", (), ["a", "b", "c", "d", ""], None),
        ("abXYc", ("XY",), ["a", "b", "", ""], "XY"),
        ("abXXYc", ("XY",), ["a", "b", "", "X", ""], "XY"),
        ("abX", ("XY",), ["a", "b", "", "X"], None),
        ("xaab", ("aaa", "aab"), ["x", "", "", ""], "aab"),
        ("abab", ("b", "ab"), ["", ""], "ab"),
    ],
)
def test_stop_strings(text, stops, pieces, stop):
    """What may be the beginning of one is held back; of several the one that begins first, then the longest."""
    decoder, got = StopText(Letters(), stops), []
    for letter in text:
        got.append(decoder.push(ord(letter)))
        if decoder.stop:
            break
    else:
        got.append(decoder.finish())
    assert (got, decoder.stop) == (pieces, stop)
