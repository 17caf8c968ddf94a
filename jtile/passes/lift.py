"""Sums out of loops: what every round of a loop adds to the same elements is carried, and added once after the loop."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from jtile.ir import Atomic, Block, For, Full, If, Kernel, Map, Op, Select, Value, copy_block, dim_value
from jtile.ir.builder import build

from .affine import Forms
from .cse import index_form
from .hoist import trips


def lift(kernel: Kernel, refs: Iterable[Value]) -> Kernel:
    """A copy in which no loop accumulates onto one of `refs` at a place that does not change in it, and no block
    accumulates twice at one place, as far as the index may stand outside."""
    new = kernel.with_body(copy_block(kernel.body, lambda v: v))
    _Lifter(new, set(refs)).block(new.body)
    return new


class _Lifter:
    """Works in place on a private copy."""

    def __init__(self, kernel: Kernel, refs: set[Value]):
        self.forms, self.refs = Forms(kernel), refs

    def block(self, b: Block) -> None:
        ops: list[Op] = []
        for op in b.ops:
            for inner in op.blocks():
                self.block(inner)
            ops += self.loop(op) if isinstance(op, For) else [op]
        b.ops = ops
        self.merge(b)

    def loop(self, op: For) -> list[Op]:
        """The loop, with what must stand before and after it."""
        inside = _defined(op.body)
        runs = trips(op) > 0
        before: list[Op] = []
        after: list[Op] = []
        for group in self.groups(op.body, inside).values():
            first = group[0][0]
            always = runs and any(not deep for _, deep in group)
            if not always and not self.forms.legal(first.index, first.ref.shape):
                continue
            mask = first.mask if first.mask not in inside else None
            zero = build(Full(0.0, first.value.shape, first.value.dtype), first.loc)
            carry = Value(zero.result.type, _name(first))
            thread = _Thread({site for site, _ in group}, outside=mask)
            total = thread.block(op.body, carry)
            op.inits += (zero.result,)
            op.body.params += (carry,)
            op.body.yields += (total,)
            op.results += (Value(carry.type, _name(first), op),)
            before.append(zero)
            after.append(_atomic(first, op.results[-1], mask))
        return [*before, op, *after]

    def merge(self, b: Block) -> None:
        """Make one accumulation of several in a block at one place; those in its branches count too."""
        inside = _defined_within(b)
        for group in self.groups(b, inside).values():
            first, last = group[0][0], group[-1][0]
            direct = any(not deep for _, deep in group)
            if len(group) < 2 or not (direct or self.forms.legal(first.index, first.ref.shape)):
                continue
            mask = first.mask if first.mask not in inside else None
            ops = [k for k, op in enumerate(b.ops) if op is last or any(last in x.ops for x in _walk_blocks(op))]
            zero = build(Full(0.0, first.value.shape, first.value.dtype), first.loc)
            thread = _Thread({site for site, _ in group}, outside=mask)
            tail, b.ops = b.ops[ops[0] + 1 :], b.ops[: ops[0] + 1]
            total = thread.block(b, None if not group[0][1] else zero.result)
            start = [zero] if group[0][1] else []
            b.ops = [*start, *b.ops, _atomic(last, total, mask), *tail]

    def groups(self, b: Block, inside: set[Value]) -> dict[Hashable, list[tuple[Atomic, bool]]]:
        """Accumulations of a block and of its branches whose index comes from outside of `inside`, by place: the op,
        and whether it stands in a branch."""
        out: dict[Hashable, list[tuple[Atomic, bool]]] = {}

        def look(block: Block, deep: bool) -> None:
            for op in block.ops:
                if isinstance(op, Atomic) and op.ref in self.refs:
                    values = [dim_value(d) for d in op.index]
                    if not any(v in inside for v in values):
                        mask = op.mask if op.mask not in inside else None
                        key = (op.ref, index_form(op.index), tuple(values), mask)
                        out.setdefault(key, []).append((op, deep))
                elif isinstance(op, If):
                    for inner in op.blocks():
                        look(inner, True)

        look(b, False)
        return out


class _Thread:
    """Turns accumulations of a block into a running sum."""

    def __init__(self, group: set[Atomic], outside: Value | None):
        self.group, self.outside = group, outside

    def block(self, b: Block, acc: Value | None) -> Value:
        ops: list[Op] = []
        for op in b.ops:
            if op in self.group:
                assert isinstance(op, Atomic)
                acc = self.add(op, acc, ops)
                continue
            ops.append(op)
            if isinstance(op, If) and any(x in self.group for inner in op.blocks() for x in inner.walk()):
                assert acc is not None
                for inner in op.blocks():
                    inner.yields += (self.block(inner, acc),)
                op.results += (Value(acc.type, acc.name, op),)
                acc = op.results[-1]
        b.ops = ops
        assert acc is not None
        return acc

    def add(self, op: Atomic, acc: Value | None, ops: list[Op]) -> Value:
        value = op.value
        if op.mask is not None and op.mask is not self.outside:
            zero = build(Full(0.0, value.shape, value.dtype), op.loc)
            kept = build(Select(op.mask, value, zero.result), op.loc)
            ops += [zero, kept]
            value = kept.result
        if acc is None:
            return value
        ops.append(build(Map("add", (acc, value)), op.loc, (acc.name,)))
        return ops[-1].result


def _atomic(like: Atomic, value: Value, mask: Value | None) -> Atomic:
    new = build(Atomic("add", like.ref, like.index, value, None, mask), like.loc)
    assert isinstance(new, Atomic)
    return new


def _name(op: Atomic) -> str:
    return f"{op.ref.name}_sum" if op.ref.name else "sum"


def _defined(b: Block) -> set[Value]:
    """All values made in a region."""
    out = set(b.params)
    for op in b.walk():
        out.update(op.results)
        for inner in op.blocks():
            out.update(inner.params)
    return out


def _defined_within(b: Block) -> set[Value]:
    """Values made in the branches of a block, which a merged accumulation after them cannot use."""
    return {v for op in b.ops for inner in op.blocks() for v in _defined(inner)}


def _walk_blocks(op: Op) -> list[Block]:
    out = list(op.blocks())
    for b in op.blocks():
        for x in b.ops:
            out += _walk_blocks(x)
    return out
