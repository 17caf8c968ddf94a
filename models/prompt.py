"""Token ids from the caller, checked and packed: rows moved to the left, padding (of any side) to the right."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jtile._errors import PromptError


@dataclasses.dataclass(frozen=True)
class Prompt:
    """ids: int32 [batch, longest], row b real up to lengths[b]; lengths: int32 [batch]; mask: bool, true where
    the caller had a token; single: the caller gave one row [length]."""

    ids: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray
    single: bool


def read_prompt(ids, attention_mask, vocab_size: int, max_length: int) -> Prompt:
    """Checks the caller's ids (int [batch, length], [length], or rows of different lengths) and packs them.

    Raises:
      PromptError: `ids` is text, empty, not of integers, outside the vocabulary or longer than `max_length`, or the
        mask does not fit.
    """
    if isinstance(ids, (str, bytes)):
        raise PromptError("expected token ids, got text; encode it first: lm.tokenizer.encode(text)")
    rows, single = _rows(ids)
    if attention_mask is None:
        masks = [np.ones(len(row), bool) for row in rows]
    else:
        masks = [mask.astype(bool) for mask in _rows(attention_mask, "attention_mask")[0]]
        if [len(m) for m in masks] != [len(row) for row in rows]:
            raise PromptError("attention_mask must have the shape of the token ids")
    packed = [row[mask] for row, mask in zip(rows, masks, strict=True)]
    lengths = np.array([len(row) for row in packed], np.int32)
    if not len(packed) or not lengths.all():
        raise PromptError("the prompt is empty; give at least one token id per row")
    if lengths.max() > max_length:
        raise PromptError(f"the prompt has {lengths.max()} tokens; this model's context holds {max_length}")
    for row in packed:
        outside = row[(row < 0) | (row >= vocab_size)]
        if len(outside):
            raise PromptError(
                f"the token id {outside[0]} is outside the vocabulary of {vocab_size} tokens (0 to {vocab_size - 1})"
            )
    return Prompt(_stack(packed).astype(np.int32), lengths, _stack(masks), single)


def _rows(ids, name: str = "prompt ids") -> tuple[list[np.ndarray], bool]:
    """The rows as integer vectors, and whether there was just one without a batch axis."""
    try:
        array = np.asarray(ids)
    except ValueError:  # the rows have different lengths
        array = None
    if array is not None and array.ndim <= 2 and array.dtype != object:
        rows, single = ([array], True) if array.ndim <= 1 else (list(array), False)
    else:
        rows, single = [np.asarray(row) for row in ids] if np.iterable(ids) else [array], False
    for row in rows:
        if row.ndim != 1 or (row.size and row.dtype.kind not in "iub"):
            raise PromptError(
                f"{name} must be integers [batch, length] or [length], "
                f"got {row.dtype} of shape {row.shape if array is None else array.shape}"
            )
    return rows, single


def _stack(rows: list[np.ndarray]) -> np.ndarray:
    longest = max(len(row) for row in rows)
    return np.stack([np.pad(row, (0, longest - len(row))) for row in rows])


def widen(x: np.ndarray, length: int) -> np.ndarray:
    """Pads [batch, n] with zeros on the right to [batch, length]."""
    return np.pad(x, ((0, 0), (0, length - x.shape[1])))


def read_ends(eos: str | int | Sequence[int] | None, of_model: Sequence[int]) -> tuple[int, ...]:
    """The tokens that end a text: those of the model for "model", else ids, or none for None.

    Raises:
      PromptError: `eos` is something else.
    """
    if isinstance(eos, str):
        if eos != "model":
            raise PromptError(f"eos is 'model', a token id, several, or None; got {eos!r}")
        return tuple(of_model)
    ends = () if eos is None else tuple(eos) if np.iterable(eos) else (eos,)
    if not all(is_int(end) and -(2**31) <= end < 2**31 for end in ends):
        raise PromptError(f"eos is 'model', a token id (of 32 bits), several, or None; got {eos!r}")
    return ends


def is_int(value) -> bool:
    """Whether a value is an int, and no bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
