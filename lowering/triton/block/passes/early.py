"""Starts a product of a round together with the one before it, where it needs nothing of that one.

`s = k qT; p = f(s); dp = v gT; ds = p dp` (the gradient of attention): dp runs while p is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from jtile.ir import Arrive, Block, Broadcast, DotAsync, DotWait, For, Kernel, LoadShared, Op, StoreShared, Value, Wait
from jtile.passes.pipeline import Pass
from jtile.passes.rewrite import Copier, Form, is_pure

from .ahead import Ordered
from .chains import VIEWS, Products, filled_by, root_of


def run(kernel: Kernel) -> Kernel:
    filled = filled_by(kernel)
    orders: dict[int, list[Op]] = {}
    forms: dict[Op, Form] = {}
    for op in kernel.body.walk():
        products = Products(op) if isinstance(op, For) else None
        if products is not None and (found := _order(products, filled)) is not None:
            orders[id(products.body)], moved = found
            for d in moved:
                if d.acc is not None:
                    forms |= _added(d, products.waits[d])
    return Ordered(orders, forms).whole(kernel) if orders else kernel


def _added(d: DotAsync, wait: DotWait) -> dict[Op, Form]:
    """Forms of a product and its wait that add the accumulator behind the wait: where registers are written while
    another product runs, ptxas makes all products run one after the other."""

    def start(copier: Copier) -> Sequence[Value]:
        a, b = map(copier.look, (d.a, d.b))
        return (copier.b.value(DotAsync(a, b, None, None, d.fast), d.result.name),)

    def end(copier: Copier) -> Sequence[Value]:
        (done,) = copier.b.add(DotWait((copier.look(d.result),), wait.pending)).results
        assert d.acc is not None
        return (copier.b.map("add", done, copier.look(d.acc)),)

    return {d: start, wait: end}


def _order(products: Products, filled: dict[Op, set[Value]]) -> tuple[list[Op], list[DotAsync]] | None:
    """The ops of a loop's body with products moved to the one before, and these products; None where none can move."""
    accumulated = {d for c in products.chains for d in c.dots}
    heads = [d for d in products.waits if d not in accumulated]
    ops, moved = list(products.body.ops), []
    for before, d in itertools.pairwise(heads):
        first, last = ops.index(before), ops.index(d)
        between = ops[first + 1 : last]
        if not any(isinstance(x, DotWait) for x in between):
            continue
        needed = _needed(d, between, filled)
        if needed is not None and (d.acc is None or _one_a_line(d.acc)):
            rest = [x for x in between if x not in needed]
            ops[first + 1 : last + 1] = [*needed, d, *rest]
            moved.append(d)
    return (ops, moved) if moved else None


def _one_a_line(v: Value) -> bool:
    """Whether a tile repeats one number along each row or column, or everywhere."""
    return isinstance(v.op, Broadcast) and len(v.op.x.shape) < 2


def _needed(d: DotAsync, between: list[Op], filled: dict[Op, set[Value]]) -> list[Op] | None:
    """The ops of `between` that a product needs; None where they do more than compute places and wait for copies that
    have arrived."""
    wanted = {d.a, d.b}
    read = {r for v in wanted if (r := root_of(v)) is not None}
    barriers = set().union(*(filled.get(r, set()) for r in read))
    needed: list[Op] = []
    for op in reversed(between):
        arrived = isinstance(op, Wait) and op.barrier in barriers
        if not arrived and wanted.isdisjoint(op.results):
            continue
        if not arrived and not isinstance(op, (*VIEWS, LoadShared)) and (op.blocks() or not is_pure(op)):
            return None
        if isinstance(op, LoadShared) and (r := root_of(op.buffer)) is not None:
            barriers |= filled.get(r, set())
            read.add(r)
        wanted.update(op.operands())
        needed.append(op)
    # the copies that the product needs may wait for a buffer that is given back in between
    given = any(isinstance(x, Arrive) for x in between)
    computed = {root_of(x.buffer) for x in Block((), between).walk() if isinstance(x, StoreShared)}
    return None if given or computed & read else needed[::-1]


early = Pass("early", "A product that needs nothing of the one before it in a round starts together with it.", run)
