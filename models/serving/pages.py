"""The pool of cache pages: which pages are free, and how many owners each of the others has. Pure Python."""

from __future__ import annotations


class PagePool:
    """A pool of `count` pages, each named by its number. A page that is taken has one owner, and more where sequences
    share it; it is free again when its last owner lets go. The prefix tree is an owner that can be asked to let go: a
    page that it alone owns is `idle`."""

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._owners = [0] * count
        self._kept = [False] * count  # whether the prefix tree is one of the owners
        self.idle = 0

    @property
    def free(self) -> int:
        """How many pages nobody owns."""
        return len(self._free)

    @property
    def available(self) -> int:
        """How many pages are free, or would be if the prefix tree let go of what it alone owns."""
        return len(self._free) + self.idle

    def owners(self, page: int) -> int:
        return self._owners[page]

    def take(self) -> int:
        """A free page, with one owner. There must be one: see `free`."""
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def share(self, page: int) -> None:
        """Adds an owner to a page that has one."""
        self._change(page, 1)

    def release(self, page: int) -> None:
        """Removes an owner of a page."""
        self._change(page, -1)

    def keep(self, page: int) -> None:
        """The prefix tree becomes an owner of a page."""
        self._owners[page] += 1
        self._kept[page] = True

    def drop(self, page: int) -> None:
        """The prefix tree lets go of a page."""
        self.idle -= self._owners[page] == 1
        self._kept[page] = False
        self._change(page, -1)

    def _change(self, page: int, by: int) -> None:
        before, after = self._owners[page], self._owners[page] + by
        if before < 1:
            raise RuntimeError(f"page {page} has no owner")
        self._owners[page] = after
        if self._kept[page]:
            self.idle += (after == 1) - (before == 1)
        if after == 0:
            self._free.append(page)
