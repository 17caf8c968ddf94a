"""`jtile cache`: what the disk cache of compiled kernels holds, and how to empty it."""

from __future__ import annotations

from jtile import _cache
from jtile._errors import CacheError


def clear() -> None:
    """Delete every compiled kernel, and say how many that were."""
    before = _cache.info()
    _cache.clear()
    left = _cache.info()
    print(f"removed {before.entries - left.entries} kernels ({human(before.size - left.size)}) from {before.folder}")
    if left.entries and left.entries >= before.entries:
        raise CacheError(f"the {left.entries} kernels in {left.folder} cannot be deleted: is the folder read-only?")


def show() -> None:
    """Print one line: the folder, the number of kernels, and their size."""
    print(describe(_cache.info()))


def describe(state: _cache.Info) -> str:
    """One line about the cache."""
    if not state.folder:
        return "off (cache_dir is empty)"
    return f"{state.folder}: {state.entries} kernels, {human(state.size)} of at most {human(state.limit)}"


def human(size: float) -> str:
    """A number of bytes for people: 1536 becomes `1.5 KB`."""
    for unit in ("B", "KB", "MB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GB"
