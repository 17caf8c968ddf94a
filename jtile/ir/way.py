"""The way of one role through its program, on numbers alone: what it does at barriers and to the memory of the block.

Where the way depends on what is not known (a loaded number), or is too long, it ends: the role may do anything from
there on. A way does not depend on what other roles do, so that all orders of roles are played along the same ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from .block import Wait
from .control import For, If, While
from .core import Block, Kernel, Op, Value
from .places import Place, fills, place, reads
from .scalars import Scalars
from .skeleton import Event, Skeleton, Touch

STEPS = 1_000  # ops of scalars and barriers that a role is followed for: some hundred rounds of a ring


class _LostError(Exception):
    """The way depends on what is not known, or is too long to follow."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """An op that a role does, and the numbers that it goes by.

    Attributes:
      op: an op of barriers or memory, or one with regions of which nobody knows what they did to memory.
      at, parity: which barrier of an allocation, and the parity that a wait waits for; None: not known.
      fills, reads: places that it writes and reads.
    """

    op: Op
    at: int | None = None
    parity: int | None = None
    fills: tuple[Place, ...] = ()
    reads: tuple[Place, ...] = ()


class Way:
    """The steps of a role, found as far as somebody asks for them. `sizes`, `loaded`: see `Scalars`.

    Attributes:
      lost: whether the way ends because nobody knows how it goes on.
    """

    def __init__(
        self,
        kernel: Kernel,
        skeleton: Skeleton,
        pid: tuple[int, ...],
        sizes: Mapping[str, int],
        loaded: int | None = None,
    ):
        self.skeleton, self.lost = skeleton, False
        self._scalars = Scalars(kernel, pid, sizes, loaded)
        for op in kernel.body.ops[:-1]:
            self._scalars.run(op)
        self._count, self._found = 0, list[Step]()
        self._rest = self._block(skeleton.body)

    def step(self, k: int) -> Step | None:
        """Step k, or None where the way has ended."""
        while k >= len(self._found):
            try:
                self._found.append(next(self._rest))
            except StopIteration:
                return None
            except _LostError:
                self.lost = True
        return self._found[k]

    def _known(self, v: Value | None) -> int | None:
        n = self._scalars.known(v)
        return None if n is None else int(n)

    def _number(self, v: Value | None) -> int:
        n = self._known(v)
        if n is None:
            raise _LostError
        return n

    def _go(self) -> None:
        self._count += 1
        if self._count > STEPS:
            raise _LostError

    def _step(self, op: Event | Touch) -> Step:
        at = self._known(op.at) if isinstance(op, Event) else None
        parity = self._known(op.parity) if isinstance(op, Wait) else None
        written, read = (tuple(place(v, self._scalars) for v in vs) for vs in (fills(op), reads(op)))
        return Step(op, at, parity, written, read)

    def _block(self, b: Block) -> Iterator[Step]:
        self._go()
        skeleton, run = self.skeleton, self._scalars.run
        for op in skeleton.ops[id(b)]:
            self._go()
            if isinstance(op, Event):
                if self._number(op.when):
                    yield self._step(op)
            elif isinstance(op, Touch):
                yield self._step(op)
            elif op in skeleton.acts:
                yield from self._region(op)
            elif op.blocks():
                yield from self._apart(op)
            else:
                run(op)

    def _apart(self, op: Op) -> Iterator[Step]:
        """The steps of an op whose regions have no barriers, for what they do to the memory of the block."""
        try:
            yield from self._region(op)
        except _LostError:
            self._scalars.forget(op.results)
            yield Step(op)

    def _region(self, op: Op) -> Iterator[Step]:
        if isinstance(op, If):
            taken = op.then if self._number(op.cond) else op.orelse
            yield from self._block(taken)
            return self._give(taken.yields, op.results)
        if isinstance(op, While):
            self._give(op.inits, op.cond.params)
            while True:
                yield from self._block(op.cond)
                if not self._number(op.cond.yields[0]):
                    return self._give(op.cond.params, op.results)
                self._give(op.cond.params, op.body.params)
                yield from self._block(op.body)
                self._give(op.body.yields, op.cond.params)
        if not isinstance(op, For):
            raise _LostError
        k, *carry = op.body.params
        self._give(op.inits, carry)
        lo, hi, step = (self._number(v) for v in (op.lo, op.hi, op.step))
        if not step:
            raise _LostError
        for i in range(lo, hi, step):
            self._scalars.env[k] = i
            yield from self._block(op.body)
            self._give(op.body.yields, carry)
        self._give(carry, op.results)

    def _give(self, values, to) -> None:
        pairs = [(v, t) for v, t in zip(values, to, strict=True) if t in self.skeleton.needed]
        self._scalars.bind([t for _, t in pairs], [self._scalars.of(v) for v, _ in pairs])
