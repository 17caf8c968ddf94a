"""The smallest cut of a graph of values: the values to keep so that the rest can be computed again."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping

Node = Hashable
_EVERYTHING = 1 << 62


def smallest_cut[V: Hashable](
    before: Mapping[V, Collection[V]], size: Mapping[V, int], wanted: Collection[V]
) -> list[V]:
    """The values of the smallest size together without which no way leads from a source to one that is `wanted`.

    Args:
      before: for each value, what it is computed from; for a source nothing.
      size: the size of each value, above 0.
    Returns:
      The values in the order of `before`; of several smallest cuts the one nearest to what is wanted.
    """
    room: dict[Node, dict[Node, int]] = {}  # how much more may flow from node to node: by the maximum of the flow

    def edge(a: Node, b: Node, most: int) -> None:
        room.setdefault(a, {})[b] = most
        room.setdefault(b, {}).setdefault(a, 0)

    for v, olds in before.items():
        edge((v, "in"), (v, "out"), size[v])
        for old in olds or ("source",):
            edge((old, "out") if olds else old, (v, "in"), _EVERYTHING)
    for v in wanted:
        edge((v, "out"), "wanted", _EVERYTHING)
    while (way := _way(room, "source", "wanted")) is not None:
        least = min(room[a][b] for a, b in way)
        for a, b in way:
            room[a][b] -= least
            room[b][a] += least
    reach = _reaching(room, "wanted")
    return [v for v in before if (v, "out") in reach and (v, "in") not in reach]


def _way(room: Mapping[Node, Mapping[Node, int]], start: Node, end: Node) -> list[tuple[Node, Node]] | None:
    """The edges of a shortest way with room."""
    came: dict[Node, Node] = {start: start}
    todo = deque([start])
    while todo and end not in came:
        a = todo.popleft()
        for b, left in room.get(a, {}).items():
            if left and b not in came:
                came[b] = a
                todo.append(b)
    if end not in came:
        return None
    way, b = [], end
    while b != start:
        way.append((came[b], b))
        b = came[b]
    return way


def _reaching(room: Mapping[Node, Mapping[Node, int]], end: Node) -> set[Node]:
    """The nodes from which there is room to `end`."""
    found, todo = {end}, [end]
    while todo:
        b = todo.pop()
        for a in room.get(b, {}):  # every edge stands in both directions
            if room[a][b] and a not in found:
                found.add(a)
                todo.append(a)
    return found
