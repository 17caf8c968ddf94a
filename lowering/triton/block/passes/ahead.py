"""Asks for what comes behind a loop of products before its last products have ended: loads by pointers that nobody
waits for yet.

The sums are in registers by then, and a role that first waits for them, and then for its loads, leaves the tensor cores
idle twice.
"""

from __future__ import annotations

from jtile.ir import Arrive, Block, DotWait, For, Kernel, Load, Op, Value
from jtile.passes.pipeline import Pass
from jtile.passes.rewrite import Copier, is_pure


def run(kernel: Kernel) -> Kernel:
    orders: dict[int, list[Op]] = {}
    for b in [kernel.body, *(b for op in kernel.body.walk() for b in op.blocks())]:
        order = _order(b)
        if order is not None:
            orders[id(b)] = order
    return Ordered(orders).whole(kernel) if orders else kernel


class Ordered(Copier):
    """Copies a kernel, some of whose blocks (by their `id`) have their ops in another order."""

    def __init__(self, orders: dict[int, list[Op]], forms=None):
        super().__init__(forms)
        self.orders = orders

    def block(self, old: Block) -> Block:
        order = self.orders.get(id(old))
        return super().block(old if order is None else Block(old.params, order, old.yields))


def _order(b: Block) -> list[Op] | None:
    """The ops of a block with loads moved in front of the wait for its products; None where there are no such loads."""
    ops = list(b.ops)
    waits = [k for k, op in enumerate(ops) if k and isinstance(op, DotWait) and isinstance(ops[k - 1], For)]
    moved = False
    for at in waits:
        early = _early(ops[at:])
        if any(isinstance(op, Load) for op in early):
            chosen = set(early)
            ops[at:] = [*early, *(op for op in ops[at:] if op not in chosen)]
            moved = True
    return ops if moved else None


def _early(ops: list[Op]) -> list[Op]:
    """The loads of tiles, and the ops that compute their places, that can go in front of a wait: of `ops`, which begin
    with it, those up to the first op with an effect that need no result of the ops that stay."""
    staying: set[Value] = set()
    ready: list[Op] = []
    for op in ops:
        if not isinstance(op, DotWait | Arrive | Load) and not is_pure(op):
            break
        plain = not op.blocks() and not isinstance(op, DotWait | Arrive)
        if plain and staying.isdisjoint(op.operands()):
            ready.append(op)
        else:
            staying.update(op.results)
    wanted: set[Value] = set()
    early: list[Op] = []
    for op in reversed(ready):  # only loads and the ops that they need move
        if isinstance(op, Load) or not wanted.isdisjoint(op.results):
            wanted.update(op.operands())
            early.append(op)
    return early[::-1]


ahead = Pass("ahead", "Loads behind a loop of products are asked for before its last products have ended.", run)
