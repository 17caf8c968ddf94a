"""The names of the axes of the grid whose kernel is being traced."""

from __future__ import annotations

import contextlib
import contextvars
import difflib
from collections.abc import Iterator
from typing import Any

import numpy as np

from jtile._config import jit_key
from jtile._errors import KernelTypeError, KernelValueError
from jtile.language._place import user_place

_NAMES: contextvars.ContextVar[tuple[str, ...] | None] = contextvars.ContextVar("jtile_axes", default=None)


@contextlib.contextmanager
def named_axes(names: tuple[str, ...]) -> Iterator[None]:
    """Inside of this `with` block the axes of the grid have these names; `()`: they have none.

    What JAX traced of a function under other names is not taken for these.
    """
    token = _NAMES.set(names)
    try:
        with jit_key(names) if names else contextlib.nullcontext():
            yield
    finally:
        _NAMES.reset(token)


def axis_number(axis: Any) -> int:
    """The number of a grid axis that is given by number or name."""
    if isinstance(axis, str):
        return _by_name(axis)
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise KernelTypeError(f"a grid axis is a Python int or a name, got {axis!r}", user_place())
    if axis < 0:
        raise KernelValueError(f"a grid axis counts from 0, got {axis}", user_place())
    return int(axis)


def _by_name(axis: str) -> int:
    names = _NAMES.get()
    if names is None:
        raise KernelTypeError("the axes of a grid have names only inside of a kernel", user_place())
    if axis in names:
        return names.index(axis)
    if not names:
        raise KernelValueError(
            f"the axes of this grid have no names, so none is {axis!r}: name them all, grid={{{axis!r}: ..., ...}}",
            user_place(),
        )
    close = difflib.get_close_matches(axis, names, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"its axes are {', '.join(map(repr, names))}"
    raise KernelValueError(f"this grid has no axis {axis!r}; {hint}", user_place())
