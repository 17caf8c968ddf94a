"""Programs of a comparison, each of which is compiled once: functions that lower to equal programs share it.

XLA times its candidates while it compiles, so two compilations of one program may be several percent apart.
"""

from __future__ import annotations

import concurrent.futures
import re
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

# What a custom call calls, and what stands in quotes (MLIR writes a quote in them as \22), are no names of functions:
# machine code has an @ before other bytes, too.
_SYMBOL = re.compile(r'custom_call @(?:"[^"]*"|[\w.$-]+)|@(?:"[^"]*"|[\w.$-]+)|"[^"]*"')
_UNTUNED = {"xla_gpu_autotune_level": 0}  # compiler options of references, whose speed does not matter


class Programs:
    """The compiled programs of one case, by the text of what they were lowered to. It is safe from any thread."""

    def __init__(self):
        self._lock = threading.Lock()
        self._known: dict[str, concurrent.futures.Future] = {}

    def compiled(self, function: Callable, *args: Any, tuned: bool = True) -> Any:
        """The jitted function of these arguments, or shapes, compiled: by this call or by one with an equal program;
        not `tuned`: without a search for the fastest candidates."""
        lowered = function.lower(*args)
        key = without_names(lowered.as_text()) + ("" if tuned else " untuned")
        with self._lock:
            mine = key not in self._known
            done = self._known.setdefault(key, concurrent.futures.Future())
        if mine:
            try:
                done.set_result(lowered.compile(compiler_options=None if tuned else _UNTUNED))
            except BaseException as error:
                done.set_exception(error)
                raise
        return done.result()


def untuned(function: Callable, *args: Any) -> Any:
    """A function of these arguments, or shapes, compiled without a search for the fastest candidates."""
    return jax.jit(function).lower(*args).compile(compiler_options=_UNTUNED)


def without_names(text: str) -> str:
    """The text of a program in which functions have numbers, by where they first stand, and the arguments and results
    no other names than their places. What custom calls call keeps its name, and text in quotes, such as a kernel's,
    stays as it is."""
    numbers: dict[str, str] = {}
    text = re.sub(r' \{jax\.result_info = "[^"]*"\}', "", text)
    number = lambda name: numbers.setdefault(name, f"@{len(numbers)}") if name.startswith("@") else name
    return _SYMBOL.sub(lambda found: number(found[0]), text)


def same_as(programs: Mapping[str, Any], names: Collection[str], name: str = "ours") -> str | None:
    """The first of `names` whose program is that of `name`, since both lower to equal ones; None if there is none."""
    return next((other for other in names if other != name and programs[other] is programs[name]), None)
