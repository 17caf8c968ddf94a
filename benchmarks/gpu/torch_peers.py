"""Peers that run in torch, in the same process and on the same memory: cuBLAS, cuDNN, torch.compile.

Calls are captured in a CUDA graph and timed with events: no launch from the host is in the time.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.gpu.case import Torch


@functools.cache
def why_not() -> str | None:
    """Why there are no peers in torch here, if so."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "torch sees no GPU"


def to_torch(x: jax.Array) -> Any:
    """A torch tensor over the same memory; 8-bit floats travel as bytes."""
    import torch

    if x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating):
        return torch.from_dlpack(lax.bitcast_convert_type(x, jnp.uint8)).view(getattr(torch, x.dtype.name))
    return torch.from_dlpack(x)


class TorchRunner:
    """A `Torch` peer over sets of arguments, as a CUDA graph of `calls` calls."""

    def __init__(self, peer: Torch, sets: Sequence[tuple[jax.Array, ...]], calls: int):
        import torch

        jax.block_until_ready(sets)

        def function(*tensors):
            return peer.function(torch, *tensors)

        if peer.compiled:
            torch._dynamo.reset()  # pyright: ignore[reportAttributeAccessIssue]
            function = torch.compile(function, dynamic=False)
        self._torch, self.calls = torch, calls
        self._sets = [tuple(map(to_torch, args)) for args in sets]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(side):
            for args in self._sets[:2] * 2:
                function(*args)  # compiles, and makes the handles of the libraries
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._outputs = [function(*self._sets[i % len(self._sets)]) for i in range(calls)]
        self._graph.replay()
        torch.cuda.synchronize()
        self.output = jax.tree.map(lambda t: jnp.from_dlpack(t.clone().contiguous()), self._outputs[0])

    def run(self, turns: int, front: int = 1) -> float:
        """Microseconds of one call, over `turns` replays behind `front` others, as `timing.JaxRunner` does it."""
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(front):
            self._graph.replay()
        start.record()
        for _ in range(turns):
            self._graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end) / (turns * self.calls)


def free() -> None:
    """Give torch's cached memory back."""
    if why_not() is None:
        import torch

        torch.cuda.empty_cache()
