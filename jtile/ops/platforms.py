"""Kernels that run on one platform alone, and what stands in for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def on_cuda(here: Callable, elsewhere: Callable, moved: Any, fixed: Any) -> Any:
    """`here(moved, fixed)` where the program is lowered for CUDA, and `elsewhere(moved, fixed)` on other platforms: the
    one that ops choose by is a guess, which only the lowering can check.

    Derivatives are those of `elsewhere`, for a schedule has none; those by `fixed` are zero.
    """
    return jax.lax.platform_dependent(moved, fixed, cuda=here, default=elsewhere)


@on_cuda.defjvp
def _on_cuda_jvp(here, elsewhere, primals, tangents):
    moved, fixed = primals
    _, dy = jax.jvp(lambda moved: elsewhere(moved, fixed), (moved,), (tangents[0],))
    return on_cuda(here, elsewhere, moved, fixed), dy
