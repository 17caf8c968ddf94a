"""Taking turns: whoever runs beside others (a role of a block, a program that talks to other devices) is a generator
that stops before each op which the others could notice; a seed decides who goes on."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jtile.ir import Block, For, If, Op, While

from .control import rounds

if TYPE_CHECKING:
    from .machine import Machine

Steps = Generator[None, None, Any]
_CONTROL = (For, While, If)


class Turns[Who]:
    """Who goes on among those that can, by one of three habits: anyone; the same for as long as it can; by rank."""

    def __init__(self, rng: random.Random, everyone: Sequence[Who]):
        self.rng = rng
        self.habit = rng.choice(("any", "keep", "rank"))
        self.rank = rng.sample(list(everyone), len(everyone))

    def next(self, ready: Sequence[Who], last: Who | None) -> Who:
        if self.habit == "rank":
            return next(r for r in self.rank if r in ready)
        if self.habit == "keep" and last in ready:
            assert last is not None
            return last
        return self.rng.choice(ready)


@dataclasses.dataclass(frozen=True)
class Standing:
    """The op at which a program or a role stands, and what it waits for."""

    op: Op
    what: Callable[[], str]
    passes: Callable[[], bool]


@dataclasses.dataclass
class Voice:
    """Whoever acts among the programs of all devices: its line of the clocks, and how to get its clock."""

    line: int
    of: Callable[[], np.ndarray]

    @property
    def clock(self) -> np.ndarray:
        return self.of()


class Walker:
    """Runs ops one after another, stopping before those of `stops`."""

    stops: frozenset[type[Op]] = frozenset()
    crews: frozenset[type[Op]] = frozenset()  # ops that `crew` runs, step by step
    machine: Machine

    def stand(self, op: Op) -> Steps:
        """Stop again before an op for as long as it cannot run."""
        yield from ()

    def crew(self, op: Op) -> Steps:
        """Run an op of `crews`."""
        yield from ()

    def prepare(self, op: Op) -> None:
        """Something to check before an op runs."""

    def steps(self, ops: Sequence[Op]) -> Steps:
        m = self.machine
        for op in ops:
            card = type(op)
            if card in _CONTROL:
                if m.watch is not None:
                    m.watch.op(m, op)
                out = yield from self.control(op)
                m.env.update(zip(op.results, out, strict=True))
                continue
            if card in self.crews:
                yield from self.crew(op)
                continue
            if card in self.stops:
                yield
                yield from self.stand(op)
            self.prepare(op)
            m.op(op)

    def control(self, op: Any) -> Steps:
        env = self.machine.env
        if isinstance(op, If):
            return (yield from self.region(op.then if env[op.cond] else op.orelse, ()))
        carry = [env[v] for v in op.inits]
        if isinstance(op, For):
            for k in rounds(self.machine, op):
                carry = yield from self.region(op.body, [k, *carry])
        else:
            while (yield from self.region(op.cond, carry))[0]:
                carry = yield from self.region(op.body, carry)
        return carry

    def region(self, b: Block, args: Sequence[Any]) -> Steps:
        env = self.machine.env
        env.update(zip(b.params, args, strict=True))
        yield from self.steps(b.ops)
        return [env[v] for v in b.yields]
