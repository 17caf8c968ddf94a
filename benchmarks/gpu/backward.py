"""The backward pass of attention alone: what the forward pass saves is made before, outside the timing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax

from benchmarks.gpu.attention import SIZES, TINY, WIDE, Size, cudnn, exact_gradient
from benchmarks.gpu.case import Case
from jtile import ops


def cases(tiny: bool = False) -> Iterator[Case]:
    for dtype in ("bfloat16", "float16"):
        for size in TINY if tiny else (*SIZES, WIDE):
            yield _case(size, dtype)


def _case(size: Size, dtype: str) -> Case:
    ours, peer = (functools.partial(f, causal=size.causal) for f in (ops.attention, cudnn))
    q, k = size.elements
    return Case(
        workload="attention_backward", config=size.config, dtype=dtype,
        make=lambda seed: size.make(seed, dtype, ct=True), ours=_pull, peers={"cudnn": _pull},
        prepare={"ours": _saving(ours), "cudnn": _saving(peer)},
        reference=functools.partial(exact_gradient, causal=size.causal), bytes=2 * (4 * q + 4 * k),
        flops=10 * size.pairs * size.d, tolerance=2e-2,
    )  # fmt: skip


def _saving(f: Callable) -> Callable:
    """A function from arguments and cotangent to the pulled-back function, a pytree of the saved arrays, and the
    cotangent."""
    forward = jax.jit(lambda q, k, v: jax.vjp(f, q, k, v)[1])
    return lambda q, k, v, ct: (forward(q, k, v), ct)


def _pull(back, ct):
    return back(ct)
