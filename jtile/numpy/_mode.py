"""Where the calls of a block run."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Literal

from jtile._errors import KernelValueError

type Mode = Literal["auto", "numpy", "compiled"]

MODE: contextvars.ContextVar[Mode] = contextvars.ContextVar("jtile_numpy_mode", default="auto")


@contextlib.contextmanager
def execution(mode: Mode) -> Iterator[None]:
    """Where programs run in a block: `"numpy"` by NumPy node by node, `"compiled"` always as one compiled program, and
    `"auto"`, as is the default, as soon as it pays to compile one. Calls of small arrays whose values are at hand are
    recorded, too, unless the mode is `"auto"`.

    Raises:
      KernelValueError: another mode.
    """
    if mode not in ("auto", "numpy", "compiled"):
        raise KernelValueError(f"the mode of execution is {mode!r}, expected 'auto', 'numpy' or 'compiled'")
    token = MODE.set(mode)
    try:
        yield
    finally:
        MODE.reset(token)
