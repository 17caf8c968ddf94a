"""The kernels of a function, lowered for a target: what `jtile inspect` prints and `jt.view` shows."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jtile import Kernel, Lowered, ir
from jtile._config import config
from jtile._errors import KernelValueError
from jtile.lowering import platforms
from jtile.tune.programs import counted_calls, operands, traced


@dataclasses.dataclass(frozen=True)
class Found:
    """A kernel that a function calls.

    Attributes:
      lowered: the kernel lowered for the target; `calls`: how often it is called.
      shapes: those of its operands in the first call. data: the operands themselves, where they are known.
    """

    lowered: Lowered
    calls: int
    shapes: tuple[tuple[int, ...], ...]
    data: Sequence[Any] | None = None

    def concrete(self, kernel: ir.Kernel) -> ir.Kernel:
        """One of its kernels for these shapes, if its sizes are dynamic."""
        values = self.lowered.program.sizes(self.shapes)
        return ir.concrete(kernel, values) if values else kernel


def lower(function: Any, types: list[Any], target: str, meta: dict[str, Any]) -> list[Found]:
    """The kernel, or every kernel that a JAX function calls for these arguments, once each.

    Raises:
      KernelValueError: the function calls no kernel.
    """
    call = lambda *args: function(*args, **meta)
    if isinstance(function, Kernel):
        leaves = jax.tree.leaves(types)
        shapes = tuple(tuple(np.shape(x)) for x in leaves)
        data = None if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves) else leaves
        return [Found(function.lower(*types, target=target, **meta), 1, shapes, data)]
    with place(target):  # library functions choose their tiles for the target at hand
        jaxpr, _ = traced(call, types)
        data = operands(call, *types)
    found: dict[Any, Found] = {}
    for (program, shapes), times in counted_calls(jaxpr).items():
        if program in found:
            found[program] = dataclasses.replace(found[program], calls=found[program].calls + times)
        else:
            found[program] = Found(Lowered(program, target), times, shapes, data.get(program))
    if not found:
        raise no_kernel(repr(getattr(function, "__name__", function)), function, types)
    return [*found.values()]


def place(target: str) -> contextlib.AbstractContextManager[Any]:
    """A block in which functions take themselves to be on the target, whatever devices this machine has."""
    name, _, arch = target.partition(":")
    if not arch or not platforms.named(name).claims(arch):
        here = platforms.named(name)
        return jax.default_device(here.hosts[0]) if here.is_here() else contextlib.nullcontext()
    return config(arch=arch)


def no_kernel(name: str, function: Any, types: list[Any]) -> KernelValueError:
    """The error of a function that calls no kernel: why there is nothing to look at."""
    said = re.search(r"(?:^|(?<=\. ))[^.]*\bXLA\b[^.]*\.", " ".join((function.__doc__ or "").split()))
    why = "XLA compiles all that it does" + (f'; its documentation says "{said[0]}"' if said else "")
    if not said and not any((of.__module__ or "").startswith("jtile") for of in (function, type(function))):
        why += "; `jt.fuse` makes kernels of the parts of a function where they are faster, `jtile tile` writes them"
    empty = any(0 in t.shape for t in types)
    return KernelValueError(
        f"{name} calls no kernel for these arguments: {'one of them has no elements' if empty else why}"
    )
