"""Running HIVM text without its data: the events that a core's scalar pipe hands to the others, in sequence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jtile._errors import UnsupportedError

from . import regions, scalars
from .effects import Effect, effect
from .machine import Event
from .read import Block, Function, Module, Op, memref, split
from .regions import Region

_FIRST, _PERIOD = 6, 12  # rounds of a long loop that run at its begin; buffers rotate by a divisor of the other number
_FLAG = re.compile(r"\[<PIPE_(\w+)>, <PIPE_(\w+)>, (?:<EVENT_ID(\d+)>|(%[\w#-]+))\]")
_BLOCK = re.compile(r"\[<\w+>, <PIPE_(\w+)>, <PIPE_(\w+)>\] flag = (\d+|%[\w#-]+)")
_CALL = re.compile(r"\s*@([\w.$-]+)\(")


def rounds(first: int, last: int, step: int) -> Iterator[int]:
    """The values of a loop's variable; of a long loop without a middle part, whose rounds repeat what others do."""
    count = max(0, -(-(last - first) // step)) if step > 0 else 0
    skip = 0
    if count > _FIRST + 2 * _PERIOD:
        skip = (count - _FIRST - _PERIOD) // _PERIOD * _PERIOD
    for k in range(count):
        if not _FIRST <= k < _FIRST + skip:
            yield first + k * step


class Run:
    """One core's way through a function.

    Args:
      block, sub_block: the number of the block in the grid, and of the vector core beside the cube core.
      grid: programs along its three axes.
      unknown: what a branch that depends on data does (even: the second way), and how many rounds such a loop has.
      bases: names of arguments that share a buffer with another: argument -> the one that it shares.
    """

    def __init__(self, module: Module, function: Function, *, block: int, sub_block: int, grid: tuple[int, int, int],
                 unknown: int, bases: dict[str, str]):  # fmt: skip
        self._module, self._function, self._bases = module, function, bases
        self._numbers = {"get_block_idx": block, "get_sub_block_idx": sub_block, "get_block_num": grid[0] * grid[1] *
                         grid[2], "get_sub_block_num": 2}  # fmt: skip
        self._grid, self._unknown, self._turn = grid, unknown, 0
        self._values: dict[str, Any] = {}
        self._blind = sub_block > 0 and function.name in module.shadows  # such a core stores nothing of what it reads
        self.buffers: dict[int, Region] = {}  # line -> the buffer that the `pointer_cast` on it made

    @property
    def guessed(self) -> bool:
        """Whether a branch or loop depended on data."""
        return self._turn > 0

    def _get(self, name: str) -> Any:
        return self._values.get(name)

    def events(self) -> Iterator[Event]:
        self._arguments()
        yield from self._block(self._function.body)

    def _arguments(self) -> None:
        numbers = [a for a, kind in self._function.args if kind.startswith("i32")][-3:]
        for name, kind in self._function.args:
            if kind.startswith("memref"):
                base = self._bases.get(name, name)
                self._values[name] = regions.argument(memref(kind), base)  # pyright: ignore[reportArgumentType]
        self._values |= dict(zip(numbers, self._grid)) if len(numbers) == 3 else {}

    def _block(self, block: Block) -> Iterator[Event]:
        """Run the ops of a block; the values that its terminator gives are left in `_out`."""
        for op in block.ops:
            if op.name in ("scf.yield", "scf.condition", "return", "func.return"):
                self._out = [self._get(v) for v in scalars.names(op)]
                return
            yield from self._op(op)
        self._out = []

    def _op(self, op: Op) -> Iterator[Event]:
        if op.name.startswith("scf."):
            yield from getattr(self, "_" + op.name.removeprefix("scf."), self._other)(op)
        elif op.name in ("func.call", "call"):
            yield from self._call(op)
        elif op.name in ("memref.load", "memref.store"):
            write = op.name == "memref.store"
            text = op.text.partition(",")[2] if write and op.text.lstrip().startswith("%") else op.text
            yield Event("op", "S", op, accesses=((scalars.element(op, self._get), write),) if text else ())
        elif op.name.startswith("hivm."):
            yield from self._hivm(op)
        elif op.name == "memref.extract_strided_metadata":
            self._assign(op, scalars.metadata(op, self._get))
        elif op.results:
            self._values[op.results[0][0]] = scalars.value(op, self._get, self._module.maps)

    def _other(self, op: Op) -> Iterator[Event]:
        raise UnsupportedError(f"the checker of HIVM does not know {op}")

    def _assign(self, op: Op, values: list[Any]) -> None:
        for name, count in op.results:
            names = [name] if count == 1 else [f"{name}#{k}" for k in range(count)]
            self._values |= zip(names, values[:count])
            values = values[count:]

    def _guess(self, most: int) -> int:
        """A number below `most`, in the place of one that depends on data: the same one everywhere in a run."""
        self._turn += 1
        return self._unknown % most

    # -- control flow -----------------------------------------------------------------------------------------------

    def _if(self, op: Op) -> Iterator[Event]:
        chosen = self._get(scalars.names(op)[0])
        chosen = self._guess(2) if chosen is None else chosen
        if chosen or len(op.blocks) > 1:
            yield from self._block(op.blocks[0 if chosen else 1])
            self._assign(op, self._out)

    def _for(self, op: Op) -> Iterator[Event]:
        found = re.search(r"= (%[\w#-]+) to (%[\w#-]+) step (%[\w#-]+)", op.text)
        bounds = found.groups()  # pyright: ignore[reportOptionalMemberAccess]
        first, last, step = (self._get(v) for v in bounds)
        carried = re.search(r"iter_args\(([^)]*)\)", op.text)
        values = [self._get(p.split("=")[1].strip()) for p in split(carried[1])] if carried else []
        body = op.blocks[0]
        if None in (first, last, step):
            first, step = first or 0, step or 1
            last = first + self._guess(4) * step
            self._values |= zip(bounds, (first, last, step))  # the bounds may decide which buffer a round takes
        for k in rounds(first, last, step):
            self._values |= zip(body.args, [k, *values])
            yield from self._block(body)
            values = self._out
        self._assign(op, values)

    def _while(self, op: Op) -> Iterator[Event]:
        carried = re.match(r"\s*\(([^)]*)\)", op.text)
        values = [self._get(p.split("=")[1].strip()) for p in split(carried[1])] if carried else []
        left = 3 * _PERIOD
        while True:
            self._values |= zip(op.blocks[0].args, values)
            yield from self._block(op.blocks[0])
            again, *values = self._out
            left -= 1
            if not (left > 3 * _PERIOD - 1 - self._guess(4) if again is None else again) or not left:
                break
            self._values |= zip(op.blocks[1].args, values)
            yield from self._block(op.blocks[1])
            values = self._out
        self._assign(op, values)

    def _call(self, op: Op) -> Iterator[Event]:
        name = _CALL.match(op.text)[1]  # pyright: ignore[reportOptionalSubscript]
        args = scalars.operands(op)
        inner = self._module.functions.get(name)
        if inner is not None:
            self._values |= zip((a for a, _ in inner.args), [self._get(a) for a in args])
            yield from self._block(inner.body)
            self._assign(op, self._out)
            return
        kinds = split(op.text.rsplit(" : (", 1)[1].rsplit(") ->", 1)[0])
        yield from self._effect(op, effect(op, name, args, kinds))

    # -- ops of HIVM ------------------------------------------------------------------------------------------------

    def _hivm(self, op: Op) -> Iterator[Event]:
        name = op.name.removeprefix("hivm.hir.")
        if name == "pointer_cast":
            self._pointer(op)
        elif name in self._numbers:
            self._values[op.results[0][0]] = self._numbers[name]
        elif name in ("set_flag", "wait_flag"):
            source, target, number, value = _FLAG.search(op.text).groups()  # pyright: ignore
            flag = (source, target, int(number) if number else self._get(value))
            yield Event(name.removesuffix("_flag"), source if name == "set_flag" else target, op, flag)
        elif name == "pipe_barrier":
            pipe = re.search(r"<PIPE_(\w+)>", op.text)[1]  # pyright: ignore[reportOptionalSubscript]
            yield Event("all", "S", op) if pipe == "ALL" else Event("barrier", pipe, op)
        elif name in ("sync_block_set", "sync_block_wait"):
            source, target, number = _BLOCK.search(op.text).groups()  # pyright: ignore[reportOptionalMemberAccess]
            number = self._get(number) if number.startswith("%") else int(number)
            announce = name == "sync_block_set"
            yield Event("announce" if announce else "await", source if announce else target, op, number)
        elif name == "bitcast":
            self._values[op.results[0][0]] = scalars.value(op, self._get, self._module.maps)
        elif (what := effect(op)) is not None:
            yield from self._effect(op, what)

    def _pointer(self, op: Op) -> None:
        addresses = [self._get(v) for v in scalars.names(op)]
        if len(addresses) != 1 or addresses[0] is None:
            raise UnsupportedError(
                f"the checker of HIVM wants one address that it knows, as module.hivm.opt.mlir has, not those of {op}"
            )
        region = regions.planned(memref(op.text), op.line, addresses[0])  # pyright: ignore[reportArgumentType]
        self._values[op.results[0][0]] = self.buffers[op.line] = region

    def _effect(self, op: Op, what: Effect | None) -> Iterator[Event]:
        if what is None:
            return
        if what.product:
            yield from self._product(op, what.product)
            return
        reads = [self._get(v) for v in what.reads]
        writes = [self._get(v) for v in what.writes]
        if what.pipe in ("MTE2", "FIX", "V") and not writes:
            raise UnsupportedError(f"the checker of HIVM finds no output of {op}")
        pipe = "MTE2" if any(w.space == "cbuf" for w in writes if isinstance(w, Region)) else what.pipe
        reads = [r for r in reads if isinstance(r, Region) and not (self._blind and r.space == "gm")]
        accesses: list[tuple[Region, bool | str]] = [(r, False) for r in reads]
        accesses += [(w, True) for w in writes if isinstance(w, Region)]
        accesses += [(t, "temporary") for t in map(self._get, what.temps) if isinstance(t, Region)]
        yield Event("op", pipe, op, accesses=tuple(accesses))

    def _product(self, op: Op, args: tuple[str, ...]) -> Iterator[Event]:
        """A matrix product: MTE1 copies both operands behind the flags that say they are there, and sets those that
        say their buffers are free again; M multiplies. An event of -1 is none; the pipes' own are inside."""
        left, right, start, total = (self._get(args[k]) for k in (0, 1, 2, 6))
        events = [self._get(a) if a.startswith("%") else int(a) for a in args[7:11]]
        for k, operand in enumerate((left, right)):
            if events[k] != -1:
                yield Event("wait", "MTE1", op, ("MTE2", "MTE1", events[k]))
            yield Event("op", "MTE1", op, accesses=((operand, False),))
            if events[2 + k] != -1:
                yield Event("set", "MTE1", op, ("MTE1", "MTE2", events[2 + k]))
        inside = ("MTE1", "M", f"line {op.line}")
        yield Event("set", "MTE1", op, inside)
        yield Event("wait", "M", op, inside)
        yield Event("op", "M", op, accesses=((total, True),) if start else ((total, False), (total, True)))
