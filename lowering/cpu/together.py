"""Values that one nest computes together, since they are made of the same ones at the same place.

A value that several others are made of is kept in memory by the first nest that reads it. Where all of these are
computed in that nest, too, it need not be: `alone` says so. `beside` says what a reduction may compute on its way, and
`behind` which stores a store may take with it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jtile import ir

from . import plan
from .packed import is_packed
from .values import Lazy

if TYPE_CHECKING:
    from .emitter import Emitter


def beside(em: Emitter, root: ir.Value) -> list[ir.Value]:
    """Bytes that products of digits of this block will read in memory, each made of `root` at its own index."""
    products = (of for op, of in em.digits.items() if op not in em.done and op in em.plan.block.ops)
    stored = dict.fromkeys(v for of in products for v in of.of_a[:2])
    return [v for v in stored if isinstance(em.env.get(v), Lazy) and v.shape == root.shape and _reads(em, v, root)]


def behind(em: Emitter, op: ir.Store) -> list[ir.Store]:
    """The stores right behind this one, of values of the same shape that share what they are made of, to the memory of
    other Refs, from which the stores in front load nothing: a load may stand in its Ref until its last reader is done.
    They write whole tiles, or the caller sees that they do."""
    found, refs = [], {ir.root(op.ref)}
    shared = {v for v, at_its_own in em.tree(op.value) if at_its_own and v in em.flagged}
    for other in em.plan.block.ops[em.pos + 1 :]:
        if not isinstance(other, ir.Store):
            if plan.is_lazy(other) and other in em.done:
                continue
            break
        simple = (
            other.mask is None and not is_packed(other.ref) and not any(isinstance(d, ir.Take) for d in other.index)
        )
        memory = plan.same_memory(em.kernel, other.ref)
        if not simple or refs & memory or other.value.shape != op.value.shape:
            break
        if not isinstance(em.env.get(other.value), Lazy) or not any(_reads(em, other.value, v) for v in shared):
            break
        if any(plan.loads_from(o.value.op, memory) for o in (op, *found)):
            break
        found.append(other)
        refs |= memory
    return found


def _reads(em: Emitter, v: ir.Value, root: ir.Value) -> bool:
    """Whether a lazy value is made of `root`, and of that at its own index alone."""
    ways = [at_its_own for x, at_its_own in em.tree(v) if x is root]
    return bool(ways) and all(ways)


def alone(em: Emitter, roots: list[ir.Value], ops: list[ir.Op], kept: list[ir.Value]) -> set[ir.Value]:
    """The flagged values in the expressions at `roots`, which one nest computes for `ops`, that nobody but these and
    those `kept` in memory will read: the nest computes them once, and need not keep them."""
    inside = {v for root in roots for v, at_its_own in em.tree(root) if at_its_own}
    block = em.plan.block.ops

    @functools.cache  # a value may be reached along many ways
    def within(v: ir.Value) -> bool:
        users = [block[k] if k < len(block) else None for k in em.plan.uses.get(v, [])]
        return v in em.plan.defined and all(u in ops or (u is not None and taken(u)) for u in users)

    def taken(user: ir.Op) -> bool:
        return plan.is_lazy(user) and user.result in inside and (user.result in kept or within(user.result))

    return {v for v in inside & em.flagged if v not in kept and isinstance(em.env.get(v), Lazy) and within(v)}


def kept_for_nobody(
    em: Emitter, roots: list[ir.Value], ops: list[ir.Op], kept: Sequence[ir.Value] = ()
) -> set[ir.Value]:
    """The flagged values that nobody but the nest at `roots` reads, which is for `ops` and for values that are `kept`,
    each element of them at its own index: it need not cover their shape to compute them."""
    elsewhere = {v for root in roots for v, at_its_own in em.tree(root) if not at_its_own}
    return alone(em, roots, ops, list(kept)) - elsewhere
