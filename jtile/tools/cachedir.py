"""`jtile cache`: what the disk cache of compiled kernels holds, and how to empty it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from jtile._config import current


@dataclasses.dataclass(frozen=True)
class Usage:
    """What the cache folder holds: `files` entries of `size` bytes together; `limit` bytes are allowed."""

    folder: str
    files: int
    size: int
    limit: int


def usage() -> Usage:
    """What is in the cache now; a folder that does not exist yet is empty."""
    options = current()
    sizes = []
    for file in _files(options.cache_dir):
        try:
            sizes.append(file.stat().st_size)
        except FileNotFoundError:  # another process has just removed it
            continue
    return Usage(options.cache_dir, len(sizes), sum(sizes), options.cache_size)


def clear() -> None:
    """Delete every file of the cache folder, and say how much that was."""
    before = usage()
    for file in _files(before.folder):
        file.unlink(missing_ok=True)
    print(f"removed {before.files} files ({human(before.size)}) from {before.folder}")


def show() -> None:
    """One line: the folder, the number of entries, and their size."""
    print(describe(usage()))


def describe(state: Usage) -> str:
    """One line about the cache."""
    if not state.folder:
        return "off (cache_dir is empty)"
    return f"{state.folder}: {state.files} files, {human(state.size)} of at most {human(state.limit)}"


def human(size: float) -> str:
    """`1536` -> `1.5 KB`."""
    for unit in ("B", "KB", "MB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GB"


def _files(folder: str) -> list[Path]:
    if not folder:
        return []
    return [Path(root, name) for root, _, names in os.walk(folder) for name in names]
