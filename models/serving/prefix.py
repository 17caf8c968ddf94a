"""The prefix tree: which pages of the pool hold which tokens, so that equal beginnings are computed once. Pure Python.

It is a radix tree whose edges are whole pages: a node's key is the tokens of one page, its path from the root is a
prefix. What a cache holds of some tokens depends on the adapter of their sequence, too, so that each adapter has a root
of its own. Children are kept in the order of their keys, in which the one that shares most of its tokens with a given
page stands next to that page's place.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from .pages import PagePool


@dataclasses.dataclass(eq=False)
class Node:
    """A page whose tokens are `key`, behind the tokens of its parents."""

    key: bytes
    page: int
    parent: Node | None
    children: dict[bytes, Node] = dataclasses.field(default_factory=dict)
    order: list[bytes] = dataclasses.field(default_factory=list)  # the keys of the children, sorted


@dataclasses.dataclass(frozen=True)
class Match:
    """What the tree has of some tokens: `pages`, which hold the first of them, and page `partial`, which is to be
    copied: its first `count` tokens are those that follow."""

    pages: tuple[int, ...]
    partial: int | None = None
    count: int = 0


class PrefixTree:
    """The prefixes in `pool`, whose pages have `page` slots. With `enabled=False` it holds nothing."""

    def __init__(self, pool: PagePool, page: int, enabled: bool = True):
        self._pool, self._page, self._enabled = pool, page, enabled
        self._roots: dict[int, Node] = {}
        self._recent: collections.OrderedDict[Node, None] = collections.OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        """How many pages it holds."""
        return len(self._recent)

    def _root(self, adapter: int) -> Node:
        return self._roots.setdefault(adapter, Node(b"", -1, None))

    def match(self, tokens: Sequence[int], adapter: int = 0) -> Match:
        """The longest prefix of the tokens that it holds. The pages are marked as used; nobody becomes their owner."""
        node, pages, keys = self._root(adapter), [], self._keys(tokens)
        for key in keys:
            if key not in node.children:
                break
            node = node.children[key]
            pages.append(node.page)
        rest = _encoded(tokens[len(pages) * self._page : (len(pages) + 1) * self._page])
        partial, count = _nearest(node, rest)
        self._touch(partial or node)
        return Match(tuple(pages), partial.page if partial else None, count)

    def insert(self, tokens: Sequence[int], pages: list[int], first: int, adapter: int = 0) -> None:
        """Adds whole pages: `pages[i]` holds the tokens of page i. Pages before `first` are in the tree already.
        If the tree has equal tokens in another page, that one replaces the page in `pages`, which is released."""
        if not self._enabled:
            return
        node = self._root(adapter)
        for i, key in enumerate(self._keys(tokens)[: len(pages)]):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, pages[i], node)
                bisect.insort(node.order, key)
                self._recent[child] = None
                self._pool.keep(pages[i])
            elif i >= first and child.page != pages[i]:
                self._pool.share(child.page)
                self._pool.release(pages[i])
                pages[i] = child.page
            node = child
        self._touch(node)

    def evict(self, count: int) -> int:
        """Lets go of up to `count` pages that the tree alone owns, the least recently used first and never one whose
        children it keeps; returns how many it let go of."""
        gone = 0
        for node in list(self._recent) if count > 0 else ():
            if gone == count:
                break
            if not node.children and self._pool.owners(node.page) == 1:
                self._remove(node)
                gone += 1
        return gone

    def clear(self) -> None:
        """Lets go of everything."""
        for node in self._recent:
            self._pool.drop(node.page)
        self._recent.clear()
        self._roots.clear()

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        del parent.order[bisect.bisect_left(parent.order, node.key)]
        del self._recent[node]
        self._pool.drop(node.page)

    def _touch(self, node: Node) -> None:
        """Marks a node and those above it as most recently used, the root's child last, so that leaves are evicted
        first."""
        while node.parent is not None:
            self._recent.move_to_end(node)
            node = node.parent

    def _keys(self, tokens: Sequence[int]) -> list[bytes]:
        """The keys of the whole pages of the tokens."""
        size, whole = 4 * self._page, len(tokens) // self._page
        data = _encoded(tokens[: whole * self._page])
        return [data[i * size : (i + 1) * size] for i in range(whole)]


def _encoded(tokens: Sequence[int]) -> bytes:
    """Tokens as bytes that sort in the order of the tokens."""
    return np.asarray(tokens, ">i4").tobytes()


def _nearest(node: Node, rest: bytes) -> tuple[Node | None, int]:
    """The child whose key begins with most of the tokens `rest`, and their number."""
    at = bisect.bisect_left(node.order, rest)
    best: Node | None = None
    count = 0
    for key in node.order[max(at - 1, 0) : at + 1]:
        same = _common(key, rest)
        if same > count:
            best, count = node.children[key], same
    return best, count


def _common(a: bytes, b: bytes) -> int:
    """How many tokens both begin with."""
    size = min(len(a), len(b)) // 4
    return common_length(np.frombuffer(a, ">i4", size), np.frombuffer(b, ">i4", size))


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """How many equal numbers two vectors begin with."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size
