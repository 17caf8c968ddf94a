"""TTGIR as text: `Code` whose tensors have layouts, and values in shared memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from ..ttir import Code, Val
from .layouts import Layout, Sliced, sliced

SHARED = "#ttg.shared_memory"
FENCE = "ttng.fence_async_shared {bCluster = false}"  # asynchronous copies come behind what a thread did in front


@dataclasses.dataclass(frozen=True)
class Mem:
    """A buffer in shared memory, a ring of buffers (`slots`), or barriers.

    Attributes:
      name: its spelling.
      shape: the shape of one buffer.
      elem: element type.
      layout: the layout of one buffer.
      whole: the shape of the buffer that this is a part of, where it is one.
      part: the shape of its first rows or columns, where only products read those: a side is no power of two.
    """

    name: str
    shape: tuple[int, ...]
    elem: str
    layout: Any
    slots: int | None = None
    whole: tuple[int, ...] | None = None
    part: tuple[int, ...] | None = None

    @property
    def type(self) -> str:
        sides = (() if self.slots is None else (self.slots,)) + self.shape
        whole = "" if self.whole is None else f", {'x'.join(map(str, self.whole))}"
        return f"!ttg.memdesc<{'x'.join([*map(str, sides), self.elem])}, {self.layout}, {SHARED}, mutable{whole}>"


class LaidCode(Code):
    """Code of one role. `ambient` has for each rank the layout of the tensors that an op makes."""

    def __init__(self, count: list[int], depth: int):
        super().__init__()
        self._counter, self._depth = count, depth
        self.ambient: dict[int, Layout] = {}
        self._target: list[Any] = self.lines

    def name(self) -> str:
        """A new name, which is unique in the whole function."""
        self._counter[0] += 1
        return f"%{self._counter[0]}"

    def do(self, text: str) -> None:
        self._target.append("  " * self._depth + text + self.mark)

    def place(self) -> tuple[list[Any], int]:
        """A place between lines to come back to, with its depth."""
        here: list[Any] = []
        self._target.append(here)
        return here, self._depth

    @contextlib.contextmanager
    def writing(self, place: tuple[list[Any], int]) -> Iterator[None]:
        """A context in which lines are written at a place that `place` gave."""
        old = self._target, self._depth
        self._target, self._depth = place
        yield
        self._target, self._depth = old

    @contextlib.contextmanager
    def within(self, layouts: dict[int, Layout]) -> Iterator[None]:
        """A context in which tensors that are made have the layouts given for their ranks."""
        old, self.ambient = self.ambient, layouts
        yield
        self.ambient = old

    def layout(self, shape: Sequence[int]) -> Any:
        if not shape:
            return ""
        if len(shape) not in self.ambient:
            raise AssertionError(f"no layout for a tensor of {tuple(shape)}")
        return self.ambient[len(shape)]

    def vector(self, axis: int, full: Sequence[int]) -> contextlib.AbstractContextManager[None]:
        layout = sliced(self.layout(full), [k for k in range(len(full)) if k != axis])
        return self.within({**self.ambient, 1: layout})

    # -- layouts ------------------------------------------------------------------------------------------------------

    def convert(self, a: Val, layout: Layout) -> Val:
        """The tensor `a` converted to another layout."""
        if a.layout == layout or not a.shape:
            return a
        out = dataclasses.replace(a, name=self.name(), layout=layout)
        self.do(f"{out.name} = ttg.convert_layout {a.name} : {a.type} -> {out.type}")
        return out

    def expand_dims(self, a: Val, axis: int) -> Val:
        if not isinstance(a.layout, Sliced) or a.layout.axis != axis:
            a = self.convert(a, Sliced(axis, self.layout((*a.shape, 1))))
        with self.within({**self.ambient, len(a.shape) + 1: a.layout.parent}):
            return super().expand_dims(a, axis)

    def broadcast(self, a: Val, shape: Sequence[int]) -> Val:
        with self.within({**self.ambient, len(a.shape): a.layout}):
            return super().broadcast(a, shape)

    def along(self, a: Val, axis: int, shape: Sequence[int]) -> Val:
        return self.broadcast(self.laid(a, axis, len(shape)), shape)

    def laid(self, a: Val, axis: int, rank: int) -> Val:
        kept = range(axis, axis + len(a.shape))
        missing = [k for k in range(rank) if k not in kept]
        a = self.convert(a, sliced(self.layout((1,) * rank), missing))
        for k in missing:
            a = self.expand_dims(a, k)
        return a

    def isolated(self, a: Val) -> Val:
        return a

    def text(self) -> str:
        return "\n".join([*self.head, *_flat(self.lines)])


def _flat(lines: list[Any]) -> Iterator[str]:
    for line in lines:
        if isinstance(line, str):
            yield line
        else:
            yield from _flat(line)
