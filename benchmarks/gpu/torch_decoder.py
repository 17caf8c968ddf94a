"""The decoder of plain.py in torch, its prompt and its step each a CUDA graph: a peer on the memory of the same
arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from benchmarks.gpu.plain import Sizes
from benchmarks.gpu.torch_peers import to_torch


class TorchDecoder:
    """`prompt()` and `step()` of `rows` times `length` tokens, as functions to call or to capture.

    A step stands at `length` plus half of `steps`: a graph has fixed sizes, and the one in the middle takes as long as
    the steps do on average. So its attention reads no slots that are not in use, and needs no mask.
    """

    def __init__(self, weights: dict[str, Any], s: Sizes, ids: jax.Array, steps: int):
        import torch

        self._torch, self._s = torch, s
        self._w = jax.tree.map(to_torch, weights)
        dtype = self._w["head"].dtype
        self._w["norm"] = self._w["norm"].to(dtype)
        for block in self._w["blocks"]:  # a norm in torch is quickest of one dtype
            block |= {name: block[name].to(dtype) for name in ("before", "behind")}
        self._ids, (rows, length) = to_torch(ids).long(), ids.shape
        self._at = length + steps // 2
        self._device = self._ids.device
        shape = (rows, s.kv_heads, length + steps, s.head_dim)
        cache = lambda: torch.zeros(shape, dtype=dtype, device=self._device)
        self._caches = [(cache(), cache()) for _ in self._w["blocks"]]
        self.tokens = torch.zeros((rows, 1), dtype=torch.long, device=self._device)

    def prompt(self) -> Any:
        """Runs the prompt: returns the next tokens; the caches then hold the prompt."""
        self.tokens.copy_(self._forward(self._ids, 0))
        return self.tokens

    def step(self) -> Any:
        """Runs a step: returns the next tokens."""
        self.tokens.copy_(self._forward(self.tokens, self._at))
        return self.tokens

    def _forward(self, ids, first: int):
        f, s, w = self._torch.nn.functional, self._s, self._w
        x = f.embedding(ids, w["embedding"])
        rows, t, hidden = x.shape
        places = self._torch.arange(first, first + t, device=self._device, dtype=self._torch.float32)
        angles = places[:, None] * w["frequencies"][None]
        cos, sin = angles.cos(), angles.sin()
        norm = lambda x, weight: f.rms_norm(x, (hidden,), weight, s.eps)
        for block, (keys, values) in zip(w["blocks"], self._caches, strict=True):
            qkv = f.linear(norm(x, block["before"]), block["qkv"]).view(rows, t, -1, s.head_dim).transpose(1, 2)
            q, k, v = qkv.split((s.heads, s.kv_heads, s.kv_heads), dim=1)
            q, k = self._rotated(q, cos, sin), self._rotated(k, cos, sin)
            keys[:, :, first : first + t], values[:, :, first : first + t] = k, v
            seen = (k, v) if first == 0 else (keys[:, :, : first + t], values[:, :, : first + t])
            mixed = f.scaled_dot_product_attention(q, *seen, is_causal=first == 0, enable_gqa=True)
            x = x + f.linear(mixed.transpose(1, 2).reshape(rows, t, -1), block["output"])
            y = norm(x, block["behind"])
            x = x + f.linear(f.silu(f.linear(y, block["gate"])) * f.linear(y, block["up"]), block["down"])
        return f.linear(norm(x[:, -1:], w["norm"]), w["head"]).argmax(-1)

    def _rotated(self, x, cos, sin):
        low, high = x.float().chunk(2, dim=-1)
        return self._torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


class Graph:
    """A function of tensors that stay where they are, as a CUDA graph."""

    def __init__(self, function: Callable[[], Any]):
        import torch

        self._torch = torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(side):
            for _ in range(2):
                function()  # makes the handles of the libraries
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            function()
        self.seconds(1)

    def seconds(self, times: int) -> float:
        """The seconds of one replay, the mean of so many."""
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            self._graph.replay()
        end.record()
        end.synchronize()
        return 1e-3 * start.elapsed_time(end) / times
