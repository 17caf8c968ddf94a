"""From a kernel in Tile IR to its compiled artifact: through memory, the disk cache, or the target's back end.

`python -m jtile.lowering.registry FILE` compiles the Tile IR that a CompileError kept in FILE once more.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jtile import _cache, ir
from jtile._config import current
from jtile._errors import CompileError, JtileError, UnsupportedError
from jtile._stack import roomy

from . import failures, platforms, starts, targets
from .artifact import Artifact
from .platforms import Options
from .targets import Target


def compile(
    kernel: ir.Kernel, target: Target, *, key: str | None = None, texts: bool = False, options: Options | None = None
) -> Artifact:
    """Compile a kernel for a target.

    Args:
      kernel: Tile IR at tile level, before the passes.
      key: text that is equal for kernels that may share an artifact; None: the printed kernel.
      texts: compile even where an artifact is stored, so that it comes with the text of every level.
      options: `num_warps`, `num_stages`, `num_ctas` of a GPU kernel, where the user gave them.

    Raises:
      UnsupportedError: there is no platform of the target's, or the target lacks an op or dtype of the kernel.
      CompileError: the compiler failed; the kernel's IR is kept in the file that the message names.
    """
    texts = texts or bool(current().dump)  # a dump shows the work of the compiler, so the work has to be done
    options = {k: v for k, v in (options or {}).items() if v is not None}
    platform = _platform(kernel, target)
    tools = [*platform.tools(), *platforms.package(platform.name)]
    extra = [sorted(options.items()), *tools] if options or tools else []
    of_images = target if platform.by_units else targets.without_units(target)
    key = _cache.key(key or ir.print_kernel(kernel, locations=True), of_images, *extra)
    if not texts:
        artifact = _memory.get(key)
        if artifact is None and (artifact := _stored(key, target)):
            _memory.put(key, artifact, on_disk=True)
        if artifact is not None:
            return artifact
    targets.check_capabilities(kernel, target)
    artifact = _compile(kernel, target, options, texts)
    kept = not artifact.launch.get("defect")  # a later process is to hear of it, too
    on_disk = kept and _cache.put(key, {"target": artifact.target, "launch": artifact.launch}, artifact.image)
    _memory.put(key, artifact, on_disk=on_disk)
    return artifact


def compile_graph(
    kernels: Sequence[ir.Kernel], target: Target, options: Sequence[Options], shape: Any, *, key: str
) -> Artifact:
    """Compile the kernels of an execution graph into one image, for a platform whose launches run such.

    Args:
      kernels: Tile IR at tile level, before the passes.
      key: text that is equal for graphs that may share an artifact.
      options, shape: see `Platform.compile_graph`.

    Raises: see `compile`.
    """
    from jtile import passes

    platform = platforms.named(target.platform)
    assert platform.compile_graph is not None
    options = [{k: v for k, v in o.items() if v is not None} for o in options]
    key = _cache.key("graph", key, target, *(sorted(o.items()) for o in options), shape, *platform.tools())
    artifact = _memory.get(key)
    if artifact is None and (artifact := _stored(key, target)):
        _memory.put(key, artifact, on_disk=True)
    if artifact is not None:
        return artifact
    for kernel in kernels:
        targets.check_capabilities(kernel, target)
    plain = [passes.run_pipeline(starts.without_idle_aliases(k), passes.TILE) for k in kernels]
    try:
        artifact = platform.compile_graph(plain, target, options, shape)
    except JtileError:
        raise
    except Exception as e:  # see `_compile`
        raise _failure(dataclasses.replace(plain[0], name="graph"), target, e) from e
    on_disk = _cache.put(key, {"target": artifact.target, "launch": artifact.launch}, artifact.image)
    _memory.put(key, artifact, on_disk=on_disk)
    return artifact


def _stored(key: str, target: Target) -> Artifact | None:
    entry = _cache.get(key)
    return entry and Artifact(target.name, entry.payload, {}, entry.header["launch"])


@roomy
def _compile(kernel: ir.Kernel, target: Target, options: Options, texts: bool) -> Artifact:
    backend = _platform(kernel, target).compile
    try:
        return _lower(kernel, lambda k: backend(k, target, options, texts))
    except JtileError:
        raise
    except Exception as e:  # whatever fails in a compiler, the user gets one type of error, and the kernel's IR
        raise _failure(kernel, target, e) from e


def _platform(kernel: ir.Kernel, target: Target) -> platforms.Platform:
    try:
        return platforms.named(target.platform)
    except UnsupportedError as e:
        where = (kernel.loc.file, kernel.loc.line) if kernel.loc.file else None
        raise UnsupportedError(f"kernel {kernel.name}: {e.message}, but its target is {target.name!r}", where) from None


def _lower(kernel: ir.Kernel, compile: Callable[[ir.Kernel], Artifact]) -> Artifact:
    """Run the passes that all targets share, then a compiler; the texts of its levels are dumped behind theirs."""
    from jtile import passes

    plain = starts.without_idle_aliases(kernel)
    artifact = compile(passes.run_pipeline(plain, passes.TILE))
    folder = passes.dump_folder(plain)
    for number, (name, text) in enumerate(artifact.texts.items() if folder else (), len(passes.TILE) + 1):
        passes.dump(folder, number, name, text)
    return artifact


def _failure(kernel: ir.Kernel, target: Target, error: Exception) -> CompileError:
    """Keep the IR of a kernel that the compiler failed on, and say where it is and how to see it again."""
    why = _no_room(error) or f"this is a defect of jtile: {failures.kept(kernel, target, error)}"
    return CompileError(
        f"kernel {kernel.name}: the compiler for target {target.name!r} failed with "
        f"{type(error).__name__}: {error}; {why}",
        (kernel.loc.file, kernel.loc.line) if kernel.loc.file else None,
    )


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_ROOM = 1 << 20  # bytes that the files of one kernel may take


def _no_room(error: Exception) -> str | None:
    """What to do where a compiler could not write its files; the assemblers of GPUs do not always say why."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as e:
        return f"no folder for temporary files can be written ({e}): make room, or set TMPDIR to another"
    free = shutil.disk_usage(folder).free
    if not (isinstance(error, OSError) and error.errno in _FULL) and free >= _ROOM:
        return None
    return f"its temporary files go to {folder}, where {free} bytes are free: make room, or set TMPDIR to another"


_FEW, _MANY = 4 << 20, 128 << 20  # bytes of artifacts in memory, with and without a disk cache that holds all of them


def _limit(on_disk: bool) -> int:
    """Bytes of artifacts to hold: few where those that are dropped are read from the disk again, which takes all of
    them to be there, and a disk cache with no less room than the memory would have."""
    return _FEW if on_disk and current().cache_size >= _MANY else _MANY


_ENTRY = 2048  # bytes of an entry besides its image: its key, its launch record


def _bytes(artifact: Artifact) -> int:
    return len(artifact.image) + _ENTRY


class _Memory:
    """The artifacts used last, at most `_limit` bytes of them; safe from any thread."""

    def __init__(self):
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[str, Artifact] = collections.OrderedDict()
        self._size = 0
        self._on_disk = True  # whether every artifact that was put here is in the disk cache too

    def get(self, key: str) -> Artifact | None:
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: str, artifact: Artifact, *, on_disk: bool) -> None:
        if artifact.texts:  # texts are several times as large as the image, and nobody asks a cache for them
            artifact = dataclasses.replace(artifact, texts={})
        with self._lock:
            old = self._entries.pop(key, None)
            self._entries[key] = artifact
            self._size += _bytes(artifact) - (_bytes(old) if old else 0)
            self._on_disk &= on_disk
            limit = _limit(self._on_disk)
            while self._size > limit and len(self._entries) > 1:
                self._size -= _bytes(self._entries.popitem(last=False)[1])

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._size = 0
            self._on_disk = True


_memory = _Memory()


def forget() -> None:
    """Empty the cache in memory; the disk cache stays."""
    _memory.clear()


def main(argv: list[str]) -> int:
    """Compile the Tile IR in a file for a target (default: this machine's CPU) and say what came out."""
    if not argv:
        print("usage: python -m jtile.lowering.registry FILE [TARGET]", file=sys.stderr)
        return 2
    target = targets.resolve(argv[1] if len(argv) > 1 else None)
    artifact = compile(ir.parse_kernel(Path(argv[0]).read_text()), target, texts=True)
    print(f"{argv[0]}: compiled for {target.name}, {len(artifact.image)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
