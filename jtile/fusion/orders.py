"""In which order the groups of a program and its other nodes can run."""

from __future__ import annotations

from collections.abc import Sequence


def sorted_order(made_by: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]) -> list[int] | None:
    """An order in which what each part of a program reads is made before it.

    Args:
      made_by: for each node the numbers of the nodes that make what it reads.
      groups: the numbers of the nodes that run together.
    Returns:
      The groups, by number, and the nodes in none of them, by -1 - number; None if there is no such order.
    """
    unit = [*range(-1, -1 - len(made_by), -1)]
    for g, members in enumerate(groups):
        for k in members:
            unit[k] = g
    needs: dict[int, set[int]] = {u: set() for u in unit}
    for u, makers in zip(unit, made_by):
        needs[u].update([unit[m] for m in makers])
    for u, those in needs.items():
        those.discard(u)
    makes: dict[int, list[int]] = {}
    for u, those in needs.items():
        for t in those:
            makes.setdefault(t, []).append(u)
    ready, order = [u for u, those in needs.items() if not those], []
    missing = {u: len(those) for u, those in needs.items()}
    while ready:
        u = ready.pop()
        order.append(u)
        for after in makes.get(u, ()):
            missing[after] -= 1
            if not missing[after]:
                ready.append(after)
    return order if len(order) == len(needs) else None
