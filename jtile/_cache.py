"""The disk cache of compiled kernels: one file an entry, written at once or not at all, checked at every read.

A file is one line of JSON (the header) and then the payload. The header holds the sha256 of the rest, so that a
damaged or truncated file is found, deleted and compiled anew. Nothing in a file is executed to read it (no pickle).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import secrets
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jtile._config import current
from jtile._errors import CacheError, CacheWarning

FORMAT = "jtile-cache-1"
SUFFIX = ".jtile"
_STALE_SECONDS = 3600  # age from which a temporary file's writer counts as dead
_KEEP = 0.9  # share of the limit that an eviction leaves, so that the next writes need none
_SHARE = 16  # a process fills one in so many parts of the room that is left before it looks at the folder again


@dataclasses.dataclass(frozen=True)
class Entry:
    """What the cache holds for one key: `header` is JSON data, `payload` bytes."""

    header: dict[str, Any]
    payload: bytes


@dataclasses.dataclass(frozen=True)
class Info:
    """State of the cache folder: its path (empty: switched off), number of entries, their bytes, the limit in bytes."""

    folder: str
    entries: int
    size: int
    limit: int


def key(*parts: object) -> str:
    """The sha256 (hex) of the parts and of every version that decides what a kernel compiles to."""
    text = json.dumps([FORMAT, version("jtile"), version("llvmlite"), _build(), *map(str, parts)])
    return hashlib.sha256(text.encode()).hexdigest()


def get(key: str) -> Entry | None:
    """The entry of a key, or None. A damaged one is deleted, with a warning."""
    path = _path(key)
    if path is None:
        return None
    try:
        entry = read(path)
    except FileNotFoundError:
        return None
    except OSError as e:
        _warn_once(path.parent, f"the kernel cache cannot be read: {e}; kernels are compiled anew")
        return None
    except CacheError as e:
        with contextlib.suppress(OSError):
            path.unlink()
        warnings.warn(f"{e.message}; it was deleted, and the kernel is compiled anew", CacheWarning, stacklevel=2)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # eviction goes by the time of the last use
    return entry


def put(key: str, header: dict[str, Any], payload: bytes) -> bool:
    """Store an entry; whether it is on the disk now. A folder that cannot be written is reported once, and is no
    error."""
    path = _path(key)
    if path is None:
        return False
    body = json.dumps(header, sort_keys=True)
    digest = hashlib.sha256(body.encode() + payload).hexdigest()
    head = json.dumps({"format": FORMAT, "key": key, "sha256": digest, "size": len(payload), "header": body})
    data = head.encode() + b"\n" + payload
    if len(data) > current().cache_size:
        return False
    made = False
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # machine code: nobody else may write it
        made = True
        write(path, data)
        _evict(path.parent, current().cache_size, len(data))
    except OSError as e:
        if made and isinstance(e, FileNotFoundError):
            return False  # another process has emptied the folder meanwhile
        _warn_once(path.parent, f"the kernel cache cannot be written: {e}; set JTILE_CACHE_DIR to a folder that can")
        return False
    return True


def read(path: Path) -> Entry:
    """Read one cache file; raises CacheError where it is damaged or truncated, OSError where it cannot be read."""
    data = path.read_bytes()
    first, newline, payload = data.partition(b"\n")
    try:
        head = json.loads(first)
        sound = (
            bool(newline)
            and head["format"] == FORMAT
            and head["key"] == path.name.removesuffix(SUFFIX)
            and head["size"] == len(payload)
            and head["sha256"] == hashlib.sha256(head["header"].encode() + payload).hexdigest()
        )
        if sound:
            return Entry(json.loads(head["header"]), payload)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise CacheError(f"the cache file {path} is damaged ({len(data)} bytes)")


def clear() -> None:
    """Delete every entry of the cache folder."""
    folder = _folder()
    for item in _items(folder) if folder else ():
        with contextlib.suppress(OSError):
            os.unlink(item.path)


def info() -> Info:
    """What the cache folder holds now."""
    folder, options = _folder(), current()
    sizes = [size for _, size, _ in _entries(folder)] if folder else []
    return Info(options.cache_dir, len(sizes), sum(sizes), options.cache_size)


def failures() -> Path:
    """Where the IR of failed compilations is kept: beside the entries, or in the temporary folder without a cache."""
    base = current().cache_dir
    return Path(base, "failures") if base else Path(tempfile.gettempdir(), "jtile-failures")


# -- files ----------------------------------------------------------------------------------------------------------


def _folder() -> Path | None:
    base = current().cache_dir
    return Path(base, "kernels") if base else None


def _path(key: str) -> Path | None:
    folder = _folder()
    return folder and folder / (key + SUFFIX)


PUBLIC = 0o666  # the mode of files that users ask for: their umask says who reads them


def write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file so that every reader sees all of it or none, however many processes write it at once."""
    temporary = path.parent / f".{secrets.token_hex(8)}.tmp"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _items(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            yield from [f for f in found if f.name.endswith((SUFFIX, ".tmp"))]
    except OSError:
        return


def _entries(folder: Path) -> list[tuple[float, int, str]]:
    """(time of last use, size, path) of the entries; files that vanish meanwhile are left out."""
    out = []
    for f in _items(folder):
        with contextlib.suppress(OSError):
            stat = f.stat()
            if f.name.endswith(SUFFIX):
                out.append((stat.st_mtime, stat.st_size, f.path))
            elif time.time() - stat.st_mtime > _STALE_SECONDS:
                os.unlink(f.path)
    return out


_unwatched: dict[tuple[Path, int], int] = {}  # folder and limit -> bytes that may be written before the next look


def _evict(folder: Path, limit: int, written: int) -> None:
    """Delete the entries that were not used for longest until the rest fits the limit with room to spare.

    Looking takes time for every entry there is. So a process looks before it has `written` a share of the room that it
    found: a dozen of them at once stay within the limit.
    """
    left = _unwatched.get((folder, limit), 0) - written
    if left <= 0:
        entries = _entries(folder)
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries) if total > limit else ():
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size
            if total <= limit * _KEEP:
                break
        left = (limit - total) // _SHARE
    _unwatched[folder, limit] = left


_warned: set[str] = set()


def _warn_once(folder: Path, message: str) -> None:
    if str(folder) not in _warned:
        _warned.add(str(folder))
        warnings.warn(message, CacheWarning, stacklevel=3)


# -- versions -------------------------------------------------------------------------------------------------------


@functools.cache
def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "?"


@functools.cache
def _build() -> str:
    """A text that changes with every source file of the compiler: a version alone would serve developers stale code."""
    root = Path(__file__).resolve().parent
    lowering = root / "lowering" if (root / "lowering").is_dir() else root.parent / "lowering"
    marks = []
    for folder in (root / "ir", root / "passes", lowering):
        for at, _, names in sorted(os.walk(folder)):
            for name in sorted(n for n in names if n.endswith(".py")):
                stat = os.stat(os.path.join(at, name))
                marks.append((os.path.relpath(os.path.join(at, name), folder), stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(repr(marks).encode()).hexdigest()
