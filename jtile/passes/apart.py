"""Apart: a loop that adds several products up, which have no operand in common, becomes a loop for each of them, one
behind the other. A round then brings the operands of one product, so that memory holds more rounds of them.

Example: `dx = dg g^T + du u^T`, the gradient of a gated layer.
"""

from __future__ import annotations

import functools

from jtile.ir import Block, Dot, For, Kernel, Load, Op, Value

from .dce import dce
from .rewrite import Copier, Form, reads_only, use_counts


def apart(kernel: Kernel) -> Kernel | None:
    """The kernel with such loops cut, whose sums have another order; None where it has none."""
    uses = use_counts(kernel.body)
    forms: dict[Op, Form] = {}
    for op in kernel.body.walk():
        dots = _added(op, uses) if isinstance(op, For) else []
        if dots:
            forms[op] = functools.partial(_loops, op, dots)
    return dce(Copier(forms).whole(kernel)) if forms else None


def _added(loop: For, uses: dict[Value, int]) -> list[Dot]:
    """The products that a loop adds up, first to last, where they are all that it does; else nothing."""
    if len(loop.inits) != 1 or not all(reads_only(op) and not op.blocks() for op in loop.body.ops):
        return []
    dots: list[Dot] = []
    v = loop.body.yields[0]
    while v is not loop.body.params[1]:
        if not isinstance(v.op, Dot) or v.op not in loop.body.ops or v.op.acc is None or uses.get(v, 0) != 1:
            return []
        dots.insert(0, v.op)
        v = v.op.acc
    needed = [_needed(loop.body, dot) for dot in dots]
    loads = [{op for op in ops if isinstance(op, Load)} for ops in needed]
    alone = len(set().union(*loads)) == sum(map(len, loads)) if loads else False
    from_loads = all(len(found) and not any(isinstance(op, Dot) for op in ops) for found, ops in zip(loads, needed))
    return dots if len(dots) > 1 and alone and from_loads and uses.get(loop.body.params[1], 0) == 1 else []


def _needed(body: Block, dot: Dot) -> list[Op]:
    """The ops of a body that a product's operands are computed by, in their order."""
    found, todo = set(), [dot.a, dot.b]
    while todo:
        op = todo.pop().op
        if op in body.ops and op not in found:
            found.add(op)
            todo += op.operands()
    return [op for op in body.ops if op in found]


def _loops(loop: For, dots: list[Dot], copier: Copier) -> tuple[Value, ...]:
    b, look = copier.b, copier.look
    total = look(loop.inits[0])
    for dot in dots:
        with b.region([p.type for p in loop.body.params], tuple(p.name for p in loop.body.params)) as body:
            inner = copier.within()
            inner.replace(loop.body.params, body.params)
            for op in _needed(loop.body, dot):
                inner.put(op)
            assert dot.acc is not None
            inner.replace([dot.acc], [body.params[1]])
            body.yields = (inner.put(dot).result,)
        b.loc = loop.loc
        new = For(look(loop.lo), look(loop.hi), look(loop.step), (total,), body, loop.stages, loop.unroll)
        total = b.add(new, loop.results[0].name).result
    return (total,)
