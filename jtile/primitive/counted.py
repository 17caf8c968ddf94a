"""Kernels that XLA's own cost analysis counts: `jt.config(cost_analysis=True)`.

XLA notes -1 operations and -1 bytes for a custom call. Of a conditional it notes the most of each number over the
branches, whichever of them runs. So a call becomes a branch that is always taken, and the other one is made of
operations that cost as much as the kernel. It never runs, and needs no memory: a sum over a window of one number and
padding is as many additions as the window is long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jtile._compat import is_symbolic
from jtile.primitive.program import Program

_LONGEST = 1 << 62  # a window: sizes are 64-bit integers


def can_be(program: Program, avals: Sequence[Any]) -> bool:
    """Whether the call of a program can be counted: its sizes are known, and it has no effects besides its results,
    which a branch may not have."""
    shapes = [a.shape for a in avals]
    sizes = [n for shape in (*shapes, *(o.shape for o in program.results(shapes))) for n in shape]
    return not program.effect and not any(map(is_symbolic, sizes))


def call(run: Callable[..., Sequence[Any]], program: Program, *operands: Any) -> Sequence[Any]:
    """The results of `run(*operands)`, a call of the program, where XLA counts what the kernel computes and as many
    bytes as its operands and results have."""
    from jtile.tune.totals import counts_of

    shapes = [x.shape for x in operands]
    counts, results = counts_of(program, shapes), program.results(shapes)

    def as_costly(*operands: Any) -> list[Any]:
        number = sum(map(_read, operands), jnp.float32(0))
        number = _times(number, lambda _, x: lax.exp(x), counts.transcendentals)
        number = _times(number, lax.add, counts.flops - len(operands))  # the numbers of operands are summed above
        return [jnp.broadcast_to(number.astype(o.dtype), o.shape) for o in results]

    always = lax.optimization_barrier(jnp.bool_(True))  # which XLA does not look through
    return lax.cond(always, lambda *x: list(run(*x)), as_costly, *operands)


def _read(x: Any) -> Any:
    """A number for which all of an array is read, and nothing computed."""
    if x.size == 0:
        return jnp.float32(0)
    last = lax.reduce(x, jnp.zeros((), x.dtype), lambda _, x: x, tuple(range(x.ndim)))
    return jnp.real(last).astype(jnp.float32)


def _times(number: Any, operation: Callable[[Any, Any], Any], times: float) -> Any:
    """A number that an operation gives of another one, so many times."""
    window = min(int(times), _LONGEST) + 1
    if window < 2:
        return number
    return lax.reduce_window(number[None], jnp.float32(0), operation, (window,), (1,), [(0, window - 1)])[0]
