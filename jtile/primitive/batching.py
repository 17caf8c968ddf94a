"""The batching rule of `jtile_call`: a program under `vmap` is a program with one more grid axis, and no loop, unless
its programs wait for those of other devices and would be too many to run at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from jtile._memo import memo
from jtile.primitive.program import CustomVjp, Level, Program, batched

TOGETHER = 128  # programs that wait for each other on one device: GPUs run about as many at once, CPUs twice as many


def register(primitive: Any) -> None:
    """Make the rule below that of `primitive`, whose one parameter is `program`."""

    def rule(axis: Any, operands: Sequence[Any], dims: Sequence[int | None], *, program: Program):
        if all(d is None for d in dims):
            outs = primitive.bind(*operands, program=program)
            return outs, [None] * len(outs)
        size, flags, operands = to_front(operands, dims, [i for i, _ in program.kernel.aliases])
        if (program.devices or program.alone) and _more_than_run_at_once(program, size):
            return _lane_after_lane(primitive, program, flags, operands)
        level = Level(size, (*flags, *[True] * program.spec.n_out))
        outs = primitive.bind(*operands, program=_batched(program, level, axis.name))
        return outs, [0] * len(outs)

    batching.fancy_primitive_batchers[primitive] = rule


def _more_than_run_at_once(program: Program, lanes: Any) -> bool:
    sizes = (lanes, *program.kernel.grid)
    return all(isinstance(n, int) for n in sizes) and math.prod(sizes) > TOGETHER


def _lane_after_lane(primitive: Any, program: Program, flags: Sequence[bool], operands: Sequence[Any]):
    """The calls of all lanes in turn, in the same order on all devices."""

    def one(own: Sequence[Any]) -> tuple[Any, ...]:
        rest = iter(own)
        return tuple(primitive.bind(*(next(rest) if f else x for f, x in zip(flags, operands)), program=program))

    outs = jax.lax.map(one, [x for f, x in zip(flags, operands) if f])
    return list(outs), [0] * len(outs)


def to_front(
    operands: Sequence[Any], dims: Sequence[int | None], shared: Sequence[int]
) -> tuple[Any, list[bool], list[Any]]:
    """The batch size, whether each operand is batched, and the operands with their batch dimension in front.

    Every output is batched, so operands whose buffer becomes an output's (`shared`) have to be, too.
    """
    size = next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
    flags, moved = [], []
    for k, (x, d) in enumerate(zip(operands, dims, strict=True)):
        flags.append(d is not None or k in shared)
        if d is not None:
            moved.append(jnp.moveaxis(x, d, 0) if d else x)
        else:
            moved.append(jnp.broadcast_to(x, (size, *x.shape)) if k in shared else x)
    return size, flags, moved


@memo()  # an eager vmap asks for the rule again at every call
def _batched(program: Program, level: Level, axis_name: Any) -> Program:
    vjp = program.vjp and _batched_vjp(program.vjp, level, program.spec.n_in, axis_name)
    return batched(program, level, vjp)


def _batched_vjp(vjp: CustomVjp, level: Level, n_in: int, axis_name: Any) -> CustomVjp:
    """The user's reverse rule under one more vmap.

    Residuals and output cotangents have the batch dimension in front, as the batched `fwd` gives them; the cotangent
    of an operand that all lanes share is the sum over the lanes.
    """
    flags = level.batched[:n_in]
    bwd = over_lanes(vjp.bwd, level.size, axis_name, summed=[not b for b in flags])

    def fwd(*operands: Any) -> Sequence[Any]:
        axes = tuple(0 if b else None for b in flags)
        run = jax.vmap(_as_tuple(vjp.fwd), in_axes=axes, axis_size=level.size, axis_name=axis_name)
        return run(*operands)

    return CustomVjp(fwd, bwd, (vjp.key, level, axis_name))


def over_lanes(
    bwd: Callable[..., Sequence[Any]], size: Any, axis_name: Any, summed: Sequence[bool], shared: Sequence[int] = ()
) -> Callable[..., Sequence[Any]]:
    """`CustomVjp.bwd` under one more vmap.

    Args:
      summed: per operand of the kernel, whether all lanes share it, so that its cotangent is the sum of theirs.
      shared: which values all lanes share; the others have the batch dimension in front.
    """

    def run(*values: Any) -> Sequence[Any]:
        axes = tuple(None if k in shared else 0 for k in range(len(values)))
        found = jax.vmap(_as_tuple(bwd), in_axes=axes, axis_size=size, axis_name=axis_name)(*values)
        return [c.sum(0) if s and c is not None else c for c, s in zip(found, summed, strict=True)]

    return run


def _as_tuple(fn: Callable[..., Sequence[Any]]) -> Callable[..., tuple[Any, ...]]:
    """`fn` with a pytree for a result; cotangents of integers, which no vmap carries, are None."""

    def call(*values: Any) -> tuple[Any, ...]:
        return tuple(None if getattr(v, "dtype", None) == jax.dtypes.float0 else v for v in fn(*values))

    return call
