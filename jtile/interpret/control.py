"""How the interpreter runs loops, branches and combiners written by the user."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from jtile._errors import InterpreterError
from jtile.ir import Bitcast, Block, Cast, For, Full, If, Map, Select, UserReduce, UserScan, Value, While
from jtile.ir.types import DTYPES

from .machine import Machine, rule


def _run(m: Machine, b: Block, args: Sequence[np.ndarray]) -> list[np.ndarray]:
    m.env.update(zip(b.params, args, strict=True))
    m.block(b.ops)
    return [m.env[v] for v in b.yields]


def rounds(m: Machine, op: For) -> Iterator[np.ndarray]:
    """The index of each round of a loop."""
    lo, hi, step = (int(m.env[v]) for v in (op.lo, op.hi, op.step))
    if step == 0:
        raise m.error(InterpreterError, op, "the step of a loop is 0")
    index = DTYPES[op.lo.dtype].numpy
    return (np.asarray(k, index) for k in range(lo, hi, step))


@rule(For)
def _for(m: Machine, op: For):
    carry = [m.env[v] for v in op.inits]
    for k in rounds(m, op):
        carry = _run(m, op.body, [k, *carry])
    return carry


@rule(While)
def _while(m: Machine, op: While):
    carry = [m.env[v] for v in op.inits]
    while _run(m, op.cond, carry)[0]:
        carry = _run(m, op.body, carry)
    return carry


@rule(If)
def _if(m: Machine, op: If):
    return _run(m, op.then if m.env[op.cond] else op.orelse, ())


@rule(UserReduce)
def _user_reduce(m: Machine, op: UserReduce):
    xs = [m.env[x] for x in op.xs]
    rank, axes = xs[0].ndim, sorted(op.axes)
    keep = [k for k in range(rank) if k not in axes]
    moved = [x.transpose(*axes, *keep) for x in xs]
    count, out_shape = math.prod(moved[0].shape[: len(axes)]), op.results[0].shape
    rows = [x.reshape(count, *out_shape) for x in moved]
    acc = [np.broadcast_to(m.env[i], out_shape) for i in op.inits]
    for k in range(count):
        acc = combine(m, op.body, [*acc, *(r[k] for r in rows)])
    return acc


@rule(UserScan)
def _user_scan(m: Machine, op: UserScan):
    xs = [np.moveaxis(m.env[x], op.axis, 0) for x in op.xs]
    xs = [x[::-1] for x in xs] if op.reverse else xs
    out = [x.copy() for x in xs]
    for k in range(1, len(xs[0])):
        acc = combine(m, op.body, [*(o[k - 1] for o in out), *(x[k] for x in xs)])
        for o, a in zip(out, acc, strict=True):
            o[k] = a
    return [np.moveaxis(o[::-1] if op.reverse else o, 0, op.axis) for o in out]


_LANEWISE = (Map, Select, Cast, Bitcast, Full)


def combine(m: Machine, body: Block, args: list[np.ndarray]) -> list[np.ndarray]:
    """A block over scalars, applied to arrays of one shape lane by lane."""
    if not args[0].size:
        return args[: len(body.yields)]
    if all(isinstance(op, _LANEWISE) for op in body.ops):
        return _lanewise(m, body, args)
    lanes = [_run(m, body, [a[i] for a in args]) for i in np.ndindex(args[0].shape)]
    return [np.stack(out).reshape(args[0].shape) for out in zip(*lanes, strict=True)]


def _lanewise(m: Machine, body: Block, args: list[np.ndarray]) -> list[np.ndarray]:
    shape = args[0].shape
    env: dict[Value, np.ndarray] = dict(zip(body.params, args, strict=True))
    for op in body.ops:
        # Values from outside the combiner are scalars: repeat them.
        operands = [env[v] if v in env else np.broadcast_to(m.env[v], shape) for v in op.operands()]
        env[op.result] = np.broadcast_to(np.asarray(op.reference(*operands)), shape)
    return [env[v] if v in env else np.broadcast_to(m.env[v], shape) for v in body.yields]
