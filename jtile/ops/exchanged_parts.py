"""Large parts of arrays between devices: by engines for copies (`jt.exchange`), which write results where they belong
and leave the multiprocessors idle, or by kernels that talk, which start sooner. Each is the transpose of another.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops.collective_flows import (
    exchange_flow,
    in_flows,
    not_exchanged_in_flows,
    not_in_flows,
    sum_all_flow,
    sum_all_in_two_flow,
)
from jtile.ops.collective_parts import (
    accumulator,
    exchange_parts,
    gather_parts,
    meta,
    sum_all,
    sum_all_in_two,
    sum_parts,
)
from jtile.ops.collective_posts import (
    exchange_posts,
    gather_posts,
    in_posts,
    not_in_posts,
    sum_all_posts,
    sum_posts,
)
from jtile.ops.collective_steps import (
    exchanged_in_steps,
    few_bytes,
    in_steps,
    not_exchanged_in_steps,
    sum_all_in_steps,
    sum_all_in_two_steps,
)
from jtile.ops.dispatch import BLOCK_LEVEL, Implementation, Op, first_unmet

# Bytes sent to other devices that are worth a meeting of the devices on the host, on two devices and on more. On four
# H200s 5.5 MB take 27 us by kernels and 145 by engines, 22 MB 88 and 109, 44 MB 174 and 153.
LARGE, MANY = 4 << 20, 32 << 20


def _few_bytes(*, whole: bool):
    """A function that says why an array is not for engines.

    Args:
      whole: each device is sent all of the array, and not a part of it.
    """

    def misfit(x, *, axis: str) -> str | None:
        n = jt.axis_size(axis)
        count = math.prod(x.shape) if all(isinstance(s, int) for s in x.shape) else 0
        sent = count * x.dtype.itemsize * (n - 1) / (1 if whole else n)
        return first_unmet((sent >= (LARGE if n == 2 else MANY), "there are few bytes"))

    return misfit


def _posted(kernel: jt.Kernel) -> Implementation:
    return Implementation("tiles that are posted", in_posts(kernel), not_in_posts, BLOCK_LEVEL, portable=False)


def _flow(kernel: jt.Kernel, misfit: Callable[..., str | None] = not_in_flows) -> Implementation:
    return Implementation("tiles that are posted in turn", in_flows(kernel), misfit, BLOCK_LEVEL, portable=False)


def _op(name: str, copies, kernel, misfit, posts, *first: Implementation) -> Op:
    def talking(x, *, axis: str):
        return kernel(x, axis=axis, **meta(x.shape[-1]))

    return Op(
        name,
        *first,
        *([] if posts is None else [_posted(posts)]),
        Implementation("engines for copies", copies, misfit, BLOCK_LEVEL),
        Implementation("kernels that talk", talking),
    )


def _gathered(x, *, axis: str):
    return jt.exchanged(jt.exchange(x, axis))


def _swapped(x, *, axis: str):
    return jt.exchanged(jt.exchange(x, axis, to="each"))


def _added(x, *, axis: str):
    """The sum of the parts of all devices, in their order."""
    parts = _swapped(x, axis=axis)
    wide = accumulator(x.dtype)
    return functools.reduce(jnp.add, [parts[d].astype(wide) for d in range(x.shape[0])]).astype(x.dtype)


def _added_everywhere(x, *, axis: str):
    return _gathered(_added(x, axis=axis), axis=axis)


_gather = _op("parts of all devices", _gathered, gather_parts, _few_bytes(whole=True), gather_posts)
_exchange = _op(
    "parts for each device",
    _swapped,
    exchange_parts,
    _few_bytes(whole=False),
    exchange_posts,
    _flow(exchange_flow, not_exchanged_in_flows),
    Implementation("kernels in steps", exchanged_in_steps, not_exchanged_in_steps, BLOCK_LEVEL),
)
_sum = _op("sum of parts", _added, sum_parts, _few_bytes(whole=False), sum_posts)
# On two H200s kernels take 170 us for 32 MiB, engines 160, and kernels in steps 115. On four, 64 MiB take 333 in steps
# and 310 in turn, 8 MiB 49.3 and 43.5, 2 MiB 15.0, and 19.2 by kernels that talk.
_sum_all = _op(
    "sum of parts, gathered",
    _added_everywhere,
    sum_all_in_two,
    _few_bytes(whole=False),
    None,
    _flow(sum_all_in_two_flow),
    Implementation("kernels in steps", in_steps(sum_all_in_two_steps), few_bytes, BLOCK_LEVEL),
)
_sum_once = Op(
    "sum of arrays",
    _posted(sum_all_posts),
    _flow(sum_all_flow),
    Implementation("kernels in steps", in_steps(sum_all_in_steps), few_bytes, BLOCK_LEVEL),
    Implementation("kernels that talk", lambda x, *, axis: sum_all(x, axis=axis, **meta(x.shape[-1]))),
)


def _linear(forward: Op, transpose: Callable[[], Any]) -> Any:
    """A linear collective `f(x, axis)`, whose cotangents go through another one, which has a derivative, too."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def run(x, axis):
        return forward(x, axis=axis)

    run.defvjp(lambda x, axis: (run(x, axis), None), lambda axis, _, ct: (transpose()(ct, axis),))
    return run


gather = _linear(_gather, lambda: add)  # x [size] of all devices: [devices, size]
add = _linear(_sum, lambda: gather)  # x [devices, size], a part for each device: [size], their sum for this one
swap = _linear(_exchange, lambda: swap)  # x [devices, size], a part for each device: [devices, size], those for this


def add_everywhere(x, axis: str):
    """x [devices, size]: its sum over all devices, on each; not differentiable."""
    return _sum_all(x, axis=axis)


def add_once(x, axis: str):
    """x [size]: its sum over all devices, which each of them adds up; not differentiable."""
    return _sum_once(x, axis=axis)
