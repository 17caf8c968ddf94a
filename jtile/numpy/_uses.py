"""Which of the arrays that a script holds it will use.

When a value is looked at, or a graph is cut, the script holds names that it never reads again: the temporaries of a
round that the next round assigns anew. To write them to memory would take as long as what is asked for. So each
structure of a graph remembers which of its arrays died unused, and leaves those pending the next time; if one is used
after all, it is computed then, and always from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable

from jtile._memo import Recent
from jtile.numpy._graph import Node


class Uses:
    """What became of the held arrays of a structure, by their places in it.

    Attributes:
      used: those that were used once; spare: those that died unused, and have never been used.
    """

    def __init__(self) -> None:
        self.used: set[int] = set()
        self.spare: set[int] = set()
        self._last: list[tuple[weakref.ref[Node], int]] = []

    def start(self) -> None:
        """The structure comes again: what the script held of the last time and has dropped unused is spare."""
        for reference, k in self._last:
            if reference() is None and k not in self.used:
                self.spare.add(k)
        self._last = []

    def follow(self, nodes: Iterable[tuple[int, Node]]) -> None:
        """Watch what becomes of the arrays of this time."""
        for k, node in nodes:
            node.origin = (self, k)
            self._last.append((weakref.ref(node), k))


_USES: Recent[Hashable, Uses] = Recent(512)


def uses_of(structure: Hashable) -> Uses:
    """What is known of a structure."""
    return _USES.get(structure) or _USES.put(structure, Uses())


def use(node: Node) -> None:
    """The script uses an array that it held when its graph was computed."""
    found, k = node.origin
    found.used.add(k)
    found.spare.discard(k)
    node.origin = None
