"""Token ids from callers: what is taken, how it is packed, what is refused."""

import numpy as np
import pytest

from jtile._errors import PromptError
from jtile.models.prompt import read_prompt


def read(ids, mask=None):
    return read_prompt(ids, mask, vocab_size=100, max_length=8)


def test_padding_moves_to_the_right():
    prompt = read([[0, 0, 5, 6], [7, 0, 8, 9]], [[0, 0, 1, 1], [1, 0, 1, 1]])
    assert prompt.ids.tolist() == [[5, 6, 0], [7, 8, 9]]
    assert prompt.lengths.tolist() == [2, 3]
    assert prompt.mask.tolist() == [[False, False, True, True], [True, False, True, True]]
    assert not prompt.single


def test_one_row_and_ragged_rows():
    assert read([1, 2]).single
    assert read(np.array([[1, 2]], np.uint8)).lengths.tolist() == [2]
    assert read([[1, 2, 3], [4]]).ids.tolist() == [[1, 2, 3], [4, 0, 0]]


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([], None, "empty"),
        ([[]], None, "empty"),
        ([[1], []], None, "empty"),
        ([[1, 2]], [[0, 0]], "empty"),
        ([100], None, "the token id 100 is outside the vocabulary of 100 tokens"),
        ([[3, -1]], None, "-1 is outside"),
        ([1.5, 2.0], None, "must be integers"),
        (np.zeros((1, 2, 3), int), None, "must be integers"),
        ("hello", None, "encode it first"),
        (["a"], None, "must be integers"),
        (range(9), None, "9 tokens; this model's context holds 8"),
        ([[1, 2]], [[1, 1, 1]], "attention_mask"),
    ],
)
def test_refused(ids, mask, message):
    with pytest.raises(PromptError, match=message):
        read(ids, mask)
