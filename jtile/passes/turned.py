"""Which way round tiles between products lie: tensor cores take a left operand from the registers that hold the result
of another product, but not a transposed one, which goes through shared memory first.

`p = f(q kT)`, `dv += pT g` becomes `pT = f(k qT)`, `dv += pT g`: all that lies between the products is turned round.
"""

from __future__ import annotations

from jtile.ir import (
    Broadcast,
    Cast,
    Dot,
    Full,
    Iota,
    Kernel,
    Map,
    Op,
    Reduce,
    Reshape,
    Select,
    TileType,
    Transpose,
    Value,
)  # fmt: skip
from jtile.ir.builder import build

from .rewrite import Copier, Rewriter, Rules, rewrite

TURNS = Map | Select | Cast | Broadcast | Full | Iota | Dot  # ops that make the transpose of what they make as easily


rules = Rules()


@rules(Transpose)
def _product(op: Transpose, rw: Rewriter):
    dot, rank = op.x.op, len(op.perm)
    swap = (*range(rank - 2), rank - 1, rank - 2)
    if not isinstance(dot, Dot) or dot.acc is not None or op.perm != swap or rw.uses(op.x) != 1:
        return None
    return rw.new(Dot(dot.b, dot.a, None, not dot.trans_b, not dot.trans_a, dot.precision))


def turned(kernel: Kernel) -> Kernel:
    """The kernel, whose computed left operands of products are not transposed, as far as all they are made with can be
    turned round, and whose products are not transposed at once."""
    kernel = rewrite(kernel, rules)
    groups = _Groups(kernel)
    chosen = groups.chosen()
    return _Turned(chosen).whole(kernel) if chosen else kernel


def _plane(v: Value) -> bool:
    return isinstance(v.type, TileType) and len(v.shape) == 2 and min(v.shape) > 1


class _Groups:
    """Tiles that lie the same way round: those that ops take and make element by element."""

    def __init__(self, kernel: Kernel):
        self.parent: dict[Value, Value] = {}
        self.fixed: set[Value] = set()  # values that cannot be turned
        self.gain: dict[Value, int] = {}
        self.ops = list(kernel.body.walk())
        for op in self.ops:
            self._tie(op)
        for op in self.ops:
            self._use(op)

    def root(self, v: Value) -> Value:
        while (up := self.parent.get(v, v)) is not v:
            v = up
        return v

    def _tie(self, op: Op) -> None:
        same: list[Value] = []
        if isinstance(op, Map | Select | Cast):
            same = [*op.operands(), op.result]
        elif isinstance(op, Dot) and op.acc is not None:
            same = [op.acc, op.result]
        planes = [v for v in same if _plane(v) and not isinstance(v.op, Full)]
        for v in planes[1:]:
            self.parent[self.root(v)] = self.root(planes[0])

    def _use(self, op: Op) -> None:
        """Note which operands and results of an op lie the same way round, and which cannot be turned."""
        if not isinstance(op, TURNS):
            self.fixed.update(v for v in op.results if _plane(v))
        if isinstance(op, Dot):
            if op.a is not op.b:
                self.gain[op.a] = self.gain.get(op.a, 0) + (1 if op.trans_a else -1)
        elif not isinstance(op, TURNS | Reduce | Transpose):
            self.fixed.update(v for v in op.operands() if _plane(v) and not isinstance(v.op, Full))
        for b in op.blocks():
            self.fixed.update(v for v in (*b.params, *b.yields) if _plane(v) and not isinstance(v.op, Full))

    def chosen(self) -> set[Value]:
        """The values that are turned round."""
        fixed = {self.root(v) for v in self.fixed}
        gain: dict[Value, int] = {}
        for v, n in self.gain.items():
            gain[self.root(v)] = gain.get(self.root(v), 0) + n
        roots = {r for r, n in gain.items() if n > 0 and r not in fixed}
        return {v for op in self.ops for v in op.results if _plane(v) and self.root(v) in roots}


class _Turned(Copier):
    """Copies a kernel; of a value in `chosen`, the transpose stands for it."""

    def __init__(self, chosen: set[Value]):
        super().__init__()
        self.chosen = chosen

    def op(self, op: Op) -> None:
        self.b.loc = op.loc
        if isinstance(op, Dot):
            self.replace(op.results, (self.dot(op),))
        elif isinstance(op, Transpose) and op.x in self.chosen:
            self.replace(op.results, (self.look(op.x),))
        elif isinstance(op, Reduce) and op.x in self.chosen:
            axes = tuple(sorted(1 - a for a in op.axes))
            self.replace(op.results, (self.b.value(Reduce(self.look(op.x), op.fn, axes), op.result.name),))
        elif any(r in self.chosen for r in op.results):
            self.replace(op.results, (self.turn(op),))
        else:
            self.put(op)

    def turn(self, op: Op) -> Value:
        b, (result,) = self.b, op.results
        shape = result.shape[::-1]
        match op:
            case Full(value=value):
                return b.full(value, shape, result.dtype)
            case Iota(axis=axis):
                return b.value(Iota(shape, 1 - axis, result.dtype), result.name)
            case Broadcast(x=x, dims=dims):
                x = self.look(x)
                if len(x.shape) == 2:  # one of the two axes of the operand has one element
                    return b.value(Broadcast(b.value(Reshape(x, x.shape[::-1])), shape, dims), result.name)
                return b.value(Broadcast(x, shape, tuple(1 - d for d in dims)), result.name)
        new = build(op.clone(self.operand), op.loc, (result.name,))  # `build` derives the type of its result anew
        self.b.block.ops.append(new)
        return new.result

    def operand(self, v: Value) -> Value:
        """What stands for an operand of an op that is turned round; constants are made anew."""
        if _plane(v) and isinstance(v.op, Full):
            return self.b.full(v.op.value, v.shape[::-1], v.dtype)
        return self.look(v)

    def dot(self, op: Dot) -> Value:
        """A product of what there is of the operands, itself turned round where that is wanted."""
        left, right = (op.a, op.trans_a), (op.b, op.trans_b)
        if op.result in self.chosen:
            left, right = (op.b, not op.trans_b), (op.a, not op.trans_a)
        (a, ta), (c, tc) = ((self.look(v), t != (v in self.chosen)) for v, t in (left, right))
        own = self.operand if op.result in self.chosen else self.look
        acc = None if op.acc is None else own(op.acc)
        return self.b.value(Dot(a, c, acc, ta, tc, op.precision), op.result.name)
