"""The kernels of a function, lowered for a target: what `jtile inspect` prints and `jt.view` shows."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from typing import Any

from jtile import Kernel, Lowered
from jtile._config import config
from jtile._errors import KernelValueError
from jtile.lowering import platforms
from jtile.tune.programs import counted_calls, traced


def lower(function: Any, types: list[Any], target: str, meta: dict[str, Any]) -> dict[Lowered, int]:
    """The kernel, or every kernel that a JAX function calls for these arguments, and how often it is called.

    Raises:
      KernelValueError: the function calls no kernel.
    """
    if isinstance(function, Kernel):
        return {function.lower(*types, target=target, **meta): 1}
    with place(target):  # library functions choose tiles by it
        jaxpr, _ = traced(lambda *args: function(*args, **meta), types)
        programs: Counter[Any] = Counter()
        for called, times in counted_calls(jaxpr).items():
            programs[called.program] += times
    if not programs:
        raise no_kernel(repr(getattr(function, "__name__", function)), function, types)
    return {Lowered(program, target): times for program, times in programs.items()}


def place(target: str) -> contextlib.AbstractContextManager[Any]:
    """Where a function called inside takes itself to be: on the target, whatever devices this machine has."""
    import jax

    name, _, arch = target.partition(":")
    if not arch or not platforms.named(name).claims(arch):
        return jax.default_device("cpu") if name == "cpu" else contextlib.nullcontext()
    return config(arch=arch)


def no_kernel(name: str, function: Any, types: list[Any]) -> KernelValueError:
    """The error of a function that calls no kernel: why there is nothing to look at."""
    said = re.search(r"(?:^|(?<=\. ))[^.]*\bXLA\b[^.]*\.", " ".join((function.__doc__ or "").split()))
    why = "XLA compiles all that it does" + (f'; its documentation says "{said[0]}"' if said else "")
    empty = any(0 in t.shape for t in types)
    return KernelValueError(
        f"{name} calls no kernel for these arguments: {'one of them has no elements' if empty else why}"
    )
