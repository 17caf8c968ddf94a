"""Runs the blocks of a kernel, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .memory import Memory
from .parse import Function, Region, Stmt
from .table import OPS
from .types import TtirError

MAX_STEPS = 20_000_000  # statements of all blocks: a loop that does not end is an error

ENDS = ("scf.yield", "scf.condition", "tt.reduce.return", "tt.scan.return", "tt.map_elementwise.return", "tt.return")


class Machine:
    """State of one launch; `descriptors`: (address, sides, byte strides but the innermost, fill), outermost first."""

    def __init__(
        self, functions: dict[str, Function], memory: Memory, grid: int, descriptors: Sequence[Any], seed: int
    ):
        self.functions, self.memory, self.grid, self.descriptors = functions, memory, grid, descriptors
        self.random = np.random.default_rng(seed)
        self.env: dict[str, np.ndarray] = {}
        self.yields: tuple[np.ndarray, ...] = ()
        self.printed: list[tuple] = []
        self.block = self.steps = 0
        self._lifted = False

    def launch(self, function: Function, args: Sequence[Any]) -> None:
        """Every block, in a random order."""
        with np.errstate(all="ignore"):
            for block in self.random.permutation(self.grid):
                self.block = int(block)
                self.memory.barrier()
                self.memory.loops = []
                self.call(function, [np.asarray(a, t.numpy) for a, (_, t) in zip(args, function.params, strict=True)])

    def call(self, function: Function, args: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        outer, self.env = self.env, dict(zip((n for n, _ in function.params), args, strict=True))
        self.run(function.body)
        self.env = outer
        return self.yields

    def region(self, region: Region, args: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        self.env.update(zip((n for n, _ in region.params), args, strict=True))
        self.yields = ()
        self.run(region.body)
        ended = region.body and region.body[-1].name in ENDS  # else what an inner region yielded is still there
        return self.yields if ended else ()

    def lifted(self, region: Region, args: Sequence[np.ndarray]) -> list[np.ndarray]:
        """A region over scalars, run for all elements of arrays at once."""
        outer, self._lifted = self._lifted, True
        out = self.region(region, args)
        self._lifted = outer
        return [np.broadcast_to(x, args[0].shape) for x in out]

    def run(self, body: Sequence[Stmt]) -> None:
        env = self.env
        for s in body:
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise s.error(f"{MAX_STEPS} statements ran: this kernel does not end")
            try:
                out = OPS[s.name].run(self, s, *(env[a] for a in s.args))
            except TtirError:
                raise
            except Exception as e:
                raise s.error(f"evaluator: {type(e).__name__}: {e}") from e
            if not s.results:
                continue
            out = out if isinstance(out, tuple) else (out,)
            for name, t, x in zip(s.results, s.types, out, strict=True):
                x = np.asarray(x)
                if x.dtype != t.numpy or (x.shape != t.shape and not self._lifted):
                    raise s.error(f"evaluator: {s.name} gave {x.dtype}{list(x.shape)} for {t}")
                env[name] = x

    def signalled(self) -> None:
        """An atomic that other devices see is about to happen."""

    def mixed(self, x: np.ndarray) -> np.ndarray:
        """The same elements in another order: for ops that may reorder."""
        return self.random.permutation(x.reshape(-1)).reshape(x.shape)
