"""Programs that meet without waiting: each arrives at a counter, and the last goes on with what all have written."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import core

from jtile._errors import KernelTypeError, KernelValueError
from jtile.ir.memory import MOST_COUNTERS
from jtile.language._place import user_place
from jtile.language._primitives import last_arrival_p


@dataclasses.dataclass(frozen=True)
class Counters:
    """What `jt.counters` gives; `jt.arrive` takes it.

    Attributes:
      name: counters of one name are one memory of the kernel.
      shape: how many there are along each axis.
    """

    name: str
    shape: tuple[int, ...]


def counters(name: str, shape: int | tuple[int, ...]) -> Counters:
    """Counters at which the programs of a kernel arrive: zero when a call begins and when it ends.

    They belong to the call: programs of other calls never see them, and under `jax.vmap` each lane has its own.

    Args:
      name: an identifier. Counters of one name are one memory, wherever in the kernel they are named.
      shape: how many; Python ints, known when the kernel is traced.
    Returns:
      `Counters`, at which `jt.arrive` arrives.
    Raises:
      KernelTypeError, KernelValueError: a name or shape that is none, or too many counters.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise KernelTypeError(f"counters have a name like 'rows', got {name!r}", user_place())
    sides = shape if isinstance(shape, tuple | list) else (shape,)
    if any(isinstance(n, bool) or not isinstance(n, int | np.integer) for n in sides):
        raise KernelTypeError(f"the shape of counters {name!r} is Python ints, got {shape!r}", user_place())
    total = math.prod(sides)
    if any(n < 1 for n in sides) or total > MOST_COUNTERS:
        raise KernelValueError(
            f"counters {name!r} of shape {shape!r}: a kernel has 1 to {MOST_COUNTERS} counters", user_place()
        )
    return Counters(name, tuple(int(n) for n in sides))


def arrive(counters: Counters, index: Any, count: Any) -> Any:
    """Arrive at a counter: true in exactly the program that comes last of `count`.

    Nobody waits. What the programs that arrived before wrote to Refs before they arrived, the last one sees; nothing
    orders what any of them does afterwards. The counter is at zero again once the last one has come.

        done = jt.counters("done", parts.shape[0])
        parts[row, k] = part
        if jt.arrive(done, row, parts.shape[1]):       # one of the programs k, when all have written
            out[row] = parts[row, :].sum(0)            # in a fixed order, whoever is the last

    Inside of a role all of its threads arrive as one; what other roles have written counts where a barrier orders it
    before. A kernel that arrives has no derivative of its own: give it one with `defvjp`.

    Args:
      counters: what `jt.counters` gave.
      index: which of them: an int, a traced int scalar, or a tuple of one for each axis.
      count: how many programs arrive there, at least 1: an int or a traced int scalar, the same for all of them.
    Returns:
      A bool scalar.
    Raises:
      KernelTypeError, KernelValueError: operands that do not fit. The interpreter raises OutOfBoundsError for a counter
        that is not there, and ProtocolError for counts that differ and for programs that never come.
    """
    if not isinstance(counters, Counters):
        raise KernelTypeError(f"jt.arrive takes what jt.counters gives, got {counters!r}", user_place())
    at = index if isinstance(index, tuple | list) else (index,)
    if len(at) != len(counters.shape):
        raise KernelValueError(
            f"counters {counters.name!r} have shape {counters.shape}: this index has {len(at)} of "
            f"{len(counters.shape)} axes",
            user_place(),
        )
    flat: Any = None
    for i, n in zip(at, counters.shape, strict=True):
        if isinstance(i, int | np.integer) and not 0 <= i < n:
            raise KernelValueError(f"there is no counter {i} of {n} ({counters.name!r})", user_place())
        i = _scalar(i, "an index of counters")
        flat = i if flat is None else flat * n + i
    if isinstance(count, int | np.integer) and not 1 <= count < 2**31:
        raise KernelValueError(f"a count of programs is at least 1, got {count}", user_place())
    operands = [jnp.asarray(v, np.int32) for v in (0 if flat is None else flat, _scalar(count, "a count of programs"))]
    return last_arrival_p.bind(*operands, counters=counters.name, size=math.prod(counters.shape))


def _scalar(v: Any, what: str) -> Any:
    if isinstance(v, bool | np.bool_) or np.ndim(v) or not jnp.issubdtype(jnp.result_type(v), np.integer):
        shown = f"a tile of shape {list(np.shape(v))}" if np.ndim(v) else repr(v)
        raise KernelTypeError(f"{what} is an int scalar, got {shown}", user_place())
    return v.astype(np.int32) if isinstance(v, core.Tracer) else int(v)
