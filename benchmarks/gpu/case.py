"""The description of a comparison on a GPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Torch:
    """A peer in torch: `function(torch, *tensors)`; `compiled`: through `torch.compile`."""

    function: Callable
    compiled: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison: functions that give the same result up to rounding.

    Attributes:
      workload, config, dtype: what the record says; `config` is the size.
      make: makes one set of arguments of normal random numbers from a seed; it can be traced, so that sizes cost no
        memory.
      ours: the kernel. peers: name -> the same work by others, JAX functions or `Torch`.
      reference: computes the same in float32 or better, from the arguments of `make`.
      bytes, flops: what must be moved and computed at least; `unit` is whose peak rate counts ("bf16", "fp8").
      warm: whether every call reads the same arguments, as far as the L2 cache holds them; else they are cold.
      prepare: name ("ours" or a peer's) -> a function that turns a set of arguments into those of that function,
        outside the timing.
      tolerance: the largest relative error that counts as right; `tolerances`: that of peers by name, where they draw
        random numbers of their own.
      calls: the most calls in one program, where XLA compiles long.
      budget_s: seconds of samples at most, where that is less than what the command line says.
      untuned: peers that XLA compiles without a search for the fastest candidates, because it fails there.
    """

    workload: str
    config: str
    dtype: str
    make: Callable[[Any], tuple[Any, ...]]
    ours: Callable
    peers: Mapping[str, Callable | Torch]
    reference: Callable
    bytes: int = 0
    flops: int = 0
    unit: str = "bf16"
    warm: bool = False
    prepare: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
    tolerance: float = 1e-2
    tolerances: Mapping[str, float] = dataclasses.field(default_factory=dict)
    calls: int | None = None
    budget_s: float = math.inf
    untuned: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        """The key by which a record is found."""
        return self.workload, self.config, self.dtype


def exact(f: Callable) -> Callable:
    """`f` in float32."""
    wide = lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return lambda *args: f(*map(wide, args))
