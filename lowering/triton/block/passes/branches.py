"""Masks in branches: in the rounds that do not need a mask, nothing of what makes it is computed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping

from jtile.ir import Block, Dot, If, Load, Op, RefType, Select, Value
from jtile.passes.rewrite import Copier, Form, is_pure, reads_only, users_of

# Builds the condition under which a mask is needed.
Needed = Callable[[Copier], Value]


def branches(body: Block, needed: Mapping[Select, Needed]) -> dict[Op, Form]:
    """Forms of masks of a region: each stands in a branch, with all that only masks need; what they leave behind unused
    is for `dce`."""
    return {mask: functools.partial(_branch, mask, when, _own(mask, body, needed)) for mask, when in needed.items()}


def _branch(mask: Select, needed: Needed, own: list[Op], copier: Copier) -> tuple[Value, ...]:
    cond, b = needed(copier), copier.b
    with b.region() as then:
        inside = copier.within()
        for op in own:
            inside.put(op)
        then.yields = inside.put(mask).results
    with b.region() as orelse:
        orelse.yields = (copier.look(mask.a),)
    b.loc = mask.loc
    return b.add(If(cond, then, orelse), mask.result.name).results


def _own(mask: Select, body: Block, masks: Collection[Op]) -> list[Op]:
    """Ops of the body that make the mask, in order, and are needed for masks alone; scalars cost nothing. Loads of the
    kernel's inputs are such ops, too, where the round writes nothing that they could read."""
    users, reading = users_of(body), all(map(reads_only, body.ops))
    masking: set[Op] = set()
    for op in reversed(body.ops):
        alone = is_pure(op) or (reading and isinstance(op, Load) and _is_input(op.ref))
        pure = alone and not op.blocks() and not isinstance(op, Dot) and any(r.shape for r in op.results)
        only = all(
            u in masking or (isinstance(u, Select) and u in masks and r is not u.a)
            for r in op.results
            for u in users.get(r, ())
            if op not in masks
        )
        if pure and only and op not in masks and any(users.get(r) for r in op.results):
            masking.add(op)
    needed: set[Value] = {mask.cond, mask.b}
    out: list[Op] = []
    for op in reversed(body.ops):
        if op in masking and any(r in needed for r in op.results):
            needed.update(op.operands())
            out.append(op)
    return out[::-1]


def _is_input(ref: Value) -> bool:
    return isinstance(ref.type, RefType) and ref.type.role == "in"
