"""Entries of a model's configuration, checked as they are read."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from jtile._errors import ModelError

# the largest numbers of a kind; integers of hundreds of digits are no floats
LARGEST = {int: 2**63 - 1, float: sys.float_info.max}


def number(config: Mapping, key: str, default: float | None = None, kind: type = int):
    """The positive number `key` of a configuration; the default stands in for an absent or null entry.

    Raises:
      ModelError: there is neither an entry nor a default, or it is no positive number of that kind.
    """
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise ModelError(f"the model's configuration lacks {key!r}; the file is of another model, or it is damaged")
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= LARGEST[kind]
    if not fits or kind(value) != value:
        raise ModelError(f"the model's configuration has {key!r} = {value!r}; expected a positive {kind.__name__}")
    return kind(value)


def count(config: Mapping, key: str, default: int) -> int:
    """The integer `key` of a configuration, as `number` reads it, which may be 0."""
    value = default if config.get(key) is None else config[key]
    return 0 if value == 0 else number({key: value}, key)


def table(config: Mapping, *keys: str) -> Mapping:
    """The first of these entries that is neither absent nor null nor empty, which must be an object; an empty one if
    there is none.

    Raises:
      ModelError: it is something else.
    """
    key = next((key for key in keys if config.get(key) not in (None, {}, [])), None)
    value = {} if key is None else config[key]
    if not isinstance(value, Mapping):
        raise ModelError(f"the model's configuration has {key!r} = {value!r}; expected an object")
    return value


def items(config: Mapping, key: str, kind: type) -> list:
    """The list `key` of a configuration, empty where the entry is absent or null.

    Raises:
      ModelError: it is no list, or something in it is of another kind.
    """
    value = [] if config.get(key) is None else config[key]
    if not isinstance(value, list) or not all(type(x) is kind for x in value):
        raise ModelError(f"the model's configuration has {key!r} = {value!r}; expected a list of {kind.__name__}")
    return value


def token_ids(value, source: str) -> tuple[int, ...]:
    """The entry 'eos_token_id' of the model `source`: the number of a token, a list of them, or None for no token.

    Raises:
      ModelError: it is something else, or a number is no int32.
    """
    found = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(type(n) is int and -(2**31) <= n < 2**31 for n in found):
        raise ModelError(
            f"{source} has 'eos_token_id' = {value!r}; expected the number of a token, or a list of them, in 32 bits"
        )
    return found
