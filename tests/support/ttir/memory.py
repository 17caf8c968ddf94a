"""Fake device memory: buffers far apart, every access checked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .parse import Stmt
from .types import TtirError

GAP = 40  # bits: buffer k starts at (k + 1) << GAP, plus 16 bytes: no base is aligned by more than XLA promises
SKEW = 16
TAIL = 0x5A  # behind the end of a buffer, up to 16 bytes: an atomic update of a whole word may touch it, nothing else


class Memory:
    """Buffers of bytes at addresses; who touched what since the last barrier of the running block."""

    def __init__(self, buffers: Sequence[np.ndarray]):
        self._buffers = [b.reshape(-1).view(np.uint8) for b in buffers]
        self.sizes = [len(b) for b in self._buffers]
        self.bytes = [np.concatenate([b, np.full(-len(b) % 16, TAIL, np.uint8)]) for b in self._buffers]
        self.epoch = 1
        self._stores: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._loads: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._clock = 0  # counts stores
        self._stored: dict[int, np.ndarray] = {}  # when each byte was stored last
        self.loops: list[int] = []  # of each running loop: when it began; -1 where its loads keep their place

    def enter_loop(self, pipelined: bool) -> None:
        """A loop starts, which triton may pipeline: then its loads come before the stores of earlier trips."""
        self.loops.append(self._clock if pipelined else -1)

    def leave_loop(self) -> None:
        self.loops.pop()

    def finish(self) -> None:
        """Back into the arrays; what lies behind them must not have changed."""
        for k, (array, memory) in enumerate(zip(self._buffers, self.bytes, strict=True)):
            array[:] = memory[: len(array)]
            if (memory[len(array) :] != TAIL).any():
                raise TtirError(f"bytes behind the end of buffer {k} changed")

    def base(self, k: int) -> int:
        return ((k + 1) << GAP) + SKEW

    def owners(self, at: np.ndarray) -> np.ndarray:
        """The buffers that addresses may belong to."""
        return (at >> GAP) - 1

    def place(self, address: int) -> tuple[int, int]:
        """The buffer of an address, and the byte in it."""
        k = int(self.owners(np.asarray(address)))
        return k, address - self.base(k)

    def barrier(self) -> None:
        """Every access so far is ordered before those that come."""
        self.epoch += 1

    def find(
        self, stmt: Stmt, at: np.ndarray, size: int, atomic: bool = False
    ) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """(buffer, which of the addresses lie in it, their byte offsets); an error where one lies in none."""
        if not at.size:
            return []
        owner, out = self.owners(at), []
        for k in np.unique(owner):
            here = np.nonzero(owner == k)[0]
            offset = at[here] - self.base(int(k))
            if not 0 <= k < len(self.bytes):
                raise stmt.error(f"{stmt.name} at address {at[here[0]]:#x}, which belongs to no buffer")
            end = len(self.bytes[k]) if atomic else self.sizes[k]
            bad = (offset < 0) | (offset + size > end)
            if bad.any():
                first = int(np.argmax(bad))
                raise stmt.error(
                    f"{stmt.name} out of bounds: active lane {here[first]} touches bytes {offset[first]}.. of buffer "
                    f"{k}, which has {self.sizes[k]}; {bad.sum()} of {at.size} active lanes do so"
                )
            if (offset % size).any():
                first = int(np.argmax(offset % size != 0))
                raise stmt.error(f"{stmt.name} of {size} bytes at byte {offset[first]} of buffer {k}: not aligned")
            out.append((int(k), here, offset))
        return out

    def load(self, stmt: Stmt, at: np.ndarray, dtype: np.dtype, lanes: np.ndarray, atomic: bool = False) -> np.ndarray:
        """Elements at addresses; `lanes` numbers those who read."""
        out = np.empty(at.shape, dtype)
        for k, here, offset in self.find(stmt, at, dtype.itemsize, atomic):
            if not atomic:
                self._check(stmt, self._stores, k, offset, lanes[here], "read", "written")
                self._mark(self._loads, stmt, k, offset, lanes[here])
                self._check_pipeline(stmt, k, offset)
            out[here] = self.bytes[k][offset[:, None] + np.arange(dtype.itemsize)].reshape(-1).view(dtype)
        return out

    def store(self, stmt: Stmt, at: np.ndarray, values: np.ndarray, lanes: np.ndarray, atomic: bool = False) -> None:
        for k, here, offset in self.find(stmt, at, values.dtype.itemsize, atomic):
            if not atomic:
                self._check(stmt, self._loads, k, offset, lanes[here], "written", "read")
                self._check(stmt, self._stores, k, offset, lanes[here], "written", "written")
                self._mark(self._stores, stmt, k, offset, lanes[here])
            self._clock += 1
            if k not in self._stored:
                self._stored[k] = np.zeros(len(self.bytes[k]), np.int64)
            self._stored[k][offset] = self._clock
            raw = np.ascontiguousarray(values[here]).view(np.uint8).reshape(len(here), -1)
            self.bytes[k][offset[:, None] + np.arange(raw.shape[1])] = raw

    def touch(self, stmt: Stmt, at: np.ndarray, size: int, lanes: np.ndarray) -> None:
        """Atomic updates: may meet each other, but no plain access without a barrier."""
        for k, _, offset in self.find(stmt, at, size, True):
            for marks, was in ((self._loads, "read"), (self._stores, "written")):
                self._check(stmt, marks, k, offset, np.full(len(offset), -1), "updated", was, atomics=True)
            self._mark(self._stores, stmt, k, offset, np.full(len(offset), -1))

    def _check_pipeline(self, stmt: Stmt, k: int, offset: np.ndarray) -> None:
        if not self.loops or self.loops[-1] < 0 or k not in self._stored:
            return
        late = self._stored[k][offset] > self.loops[-1]
        if late.any():
            at = offset[np.argmax(late)]
            raise stmt.error(
                f"byte {at} of buffer {k} was stored in an earlier trip of this loop: a pipelined loop loads before "
                f"that, so it must say tt.num_stages = 1"
            )

    # Marks: for each byte the epoch, and who: the op and lane. Threads own lanes by a layout that is the op's own.

    def _mark(self, marks, stmt: Stmt, k: int, offset: np.ndarray, lanes: np.ndarray) -> None:
        if k not in marks:
            marks[k] = np.zeros(len(self.bytes[k]), np.int64), np.zeros(len(self.bytes[k]), np.int64)
        epochs, who = marks[k]
        epochs[offset], who[offset] = self.epoch, (stmt.number << 24) + lanes

    def _check(self, stmt, marks, k, offset, lanes, now: str, was: str, atomics: bool = False) -> None:
        if k not in marks:
            return
        epochs, who = marks[k]
        other = who[offset] != (stmt.number << 24) + lanes
        if atomics:
            other &= (who[offset] & 0xFFFFFF) != 0xFFFFFF
        bad = (epochs[offset] == self.epoch) & other
        if bad.any():
            first = int(np.argmax(bad))
            raise stmt.error(
                f"byte {offset[first]} of buffer {k} is {now} by lane {lanes[first]} here, and was {was} by another "
                f"lane or op of the block, without a barrier between"
            )
