"""Which value a name of the source has at each op of a kernel, and where in the kernel each op stands.

A body that was traced for the debugger has an op for each assignment, whose result has the name (`jtile.trace.marks`).
From these the names of carries, and of what loops and branches give, follow: a carry has the name of what it starts
from, and a result that of what the branches or the last round gave it.
"""

from __future__ import annotations

from collections.abc import Mapping

from jtile.ir import Block, For, If, Kernel, Op, Reshape, Value, While

Names = Mapping[str, Value]
Around = tuple[tuple[Op, Block], ...]  # the ops that an op stands in and which of their regions, outer first


def is_mark(op: Op) -> bool:
    """Whether an op does nothing but give a value its name."""
    return isinstance(op, Reshape) and bool(op.result.name) and op.result.type == op.x.type


class Scopes:
    """The names at each op of a kernel.

    Attributes:
      names: at each op the values of the names, before it runs; `around`: what it stands in; `index`: its number in
        its region.
    """

    def __init__(self, kernel: Kernel):
        self.names: dict[Op, Names] = {}
        self.around: dict[Op, Around] = {}
        self.index: dict[Op, int] = {}
        self.end = self._block(kernel.body, {v.name: v for v in kernel.params if v.name}, ())

    def _block(self, block: Block, names: Names, around: Around) -> Names:
        """The names at the end of a region."""
        for k, op in enumerate(block.ops):
            self.names[op], self.around[op], self.index[op] = names, around, k
            if is_mark(op):
                names = {**names, op.result.name: op.result}
            elif op.inner:
                names = self._behind(op, names, around)
        return names

    def _behind(self, op: Op, names: Names, around: Around) -> Names:
        """The names behind an op with regions."""
        inits = op.inits if isinstance(op, For | While) else ()
        changed = {inner.result.name for b in op.blocks() for inner in b.walk() if is_mark(inner)}
        out = {n: v for n, v in names.items() if n not in changed}
        given: dict[str, Value] = {}
        for b in op.blocks():
            # Inside, a carry is its parameter; a name that is assigned there and is no carry has no value yet.
            inside = dict(out)
            params = b.params[1:] if isinstance(op, For) else b.params
            carried = dict(zip(inits, params, strict=True)) if len(inits) == len(params) else {}
            inside |= {n: carried[v] for n, v in names.items() if v in carried}
            if isinstance(op, For) and b.params[0].name:
                inside[b.params[0].name] = b.params[0]
            if isinstance(op, If):
                inside = dict(names)
            ends = self._block(b, inside, (*around, (op, b)))
            results = dict(zip(b.yields, op.results, strict=True)) if len(b.yields) == len(op.results) else {}
            given |= {n: results[v] for n, v in ends.items() if v in results and n in changed}
        given |= {n: op.results[inits.index(v)] for n, v in names.items() if v in inits}
        return out | given
