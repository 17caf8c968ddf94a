"""The two programs of the vendor that compile for Ascend: where they are, and how they are run.

    triton-adapter-opt      of triton-ascend 3.2.0 (MIT): TTIR to linalg         JTILE_TRITON_ADAPTER=/path/to/it
    bishengir-compile       of ascendnpu-ir 1.2.0 (Apache-2.0): linalg to HIVM   JTILE_BISHENGIR=/path/to/it
    bishengir-opt           of the same, beside it: only tests run it

Each is looked for where its variable says, then in the folder that `make ascend-tools` fills, then on the PATH.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jtile._errors import CompileError, UnsupportedError

ADAPTER, COMPILER, OPT = "triton-adapter-opt", "bishengir-compile", "bishengir-opt"
VARIABLES = {ADAPTER: "JTILE_TRITON_ADAPTER", COMPILER: "JTILE_BISHENGIR"}
# The byte that freed memory is filled with (0: it is not filled), for one try after the other.
_FILLS = {ADAPTER: ("85", "170", "0"), COMPILER: ("0", "85", "170")}
# The folder of a run, by a name that is the same for all: the shell opens it as its file 9.
HERE = "/proc/self/fd/9"
_SHELL = ("/bin/sh", "-c", 'exec 9<"$0"; cd /; exec "$@"')
SECONDS = 600  # seconds that a tool may take for one kernel; most take a tenth of a second


def folder() -> Path:
    """The folder into which `make ascend-tools` puts the tools; it is in the environment of the Python that runs."""
    return Path(sys.prefix) / "ascend-tools"


def find(name: str) -> Path | None:
    """The path of a tool, or None.

    Raises:
      UnsupportedError: its variable names something that is no file.
    """
    variable = VARIABLES.get(name)
    given = os.environ.get(variable) if variable else None
    if given:
        if not Path(given).is_file():
            raise UnsupportedError(f"{variable}={given} is no file: it should be the path of {name}")
        return Path(given)
    beside = os.environ.get(VARIABLES[COMPILER]) if name == OPT else None
    places = [Path(beside).parent / name] if beside else []
    found = next((p for p in (*places, folder() / name) if p.is_file()), None) or shutil.which(name)
    return Path(found) if found else None


def needed(name: str) -> Path:
    """The path of a tool; UnsupportedError, which says how to get it, where it is not there."""
    path = find(name)
    if path is None:
        variable = VARIABLES.get(name, VARIABLES[COMPILER])
        raise UnsupportedError(
            f"kernels for Ascend are compiled by {name}, which was not found: `make ascend-tools` (or "
            f"`python -m jtile.lowering.ascend.install`) fetches it from PyPI, or set {variable} to its path"
        )
    return path


def versions() -> tuple[str, ...]:
    """A digest of each tool, which tells it from other versions; "" for a tool that is missing."""
    return tuple(_digest(str(p), p.stat().st_mtime_ns) if p else "" for p in map(find, (ADAPTER, COMPILER)))


@functools.lru_cache(maxsize=8)
def _digest(path: str, changed: int) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def run(name: str, arguments: Sequence[str], where: Path, *, alone: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a tool; once more, in another way, where it crashes.

    The adapter of 3.2.0 reads memory that it has freed, and crashes or not as chance has it: glibc fills such memory
    with a byte, so that it always does the same. The compiler of 1.2.0 goes over sets of pointers, and orders what it
    makes by where they lie: it gets the same addresses each time, and the same names of files and folders.

    Args:
      arguments: the tool's arguments, in which `HERE` stands for the folder `where`.
      alone: the tool finds no others: what the vendor's closed compiler (`hivmc`) would do with the result is not
        part of an artifact, which must not depend on whether it is installed.
    Raises:
      CompileError: the tool has not ended after `SECONDS`.
    """
    hidden = ("PATH", "BISHENG_INSTALL_PATH") if alone else ()
    environment = {k: v for k, v in os.environ.items() if k not in hidden} | ({"PATH": "/nowhere"} if alone else {})
    command = [str(needed(name)), *arguments]
    # hivmc may be a script that closes files, so it gets the folder's own name
    command = [*_SHELL, str(where), *command] if alone else [a.replace(HERE, str(where)) for a in command]
    done = None
    for fill in _FILLS[name]:
        try:
            with _same_addresses():
                done = subprocess.run(command, cwd=where, env=environment | {"MALLOC_PERTURB_": fill}, timeout=SECONDS,
                                      capture_output=True, text=True, errors="replace")  # fmt: skip
        except subprocess.TimeoutExpired as e:
            raise CompileError(
                f"{name} has not ended after {SECONDS} seconds: make the tiles of the kernel smaller, or its loops "
                "shorter"
            ) from e
        if done.returncode >= 0:
            break
    assert done
    return done


_ASK, _NO_RANDOM_ADDRESSES = 0xFFFFFFFF, 0x0040000  # arguments of personality(2)


@contextlib.contextmanager
def _same_addresses() -> Iterator[None]:
    """Let programs that this thread starts inside have the same memory addresses each time, if the system can."""
    personality = getattr(ctypes.CDLL(None), "personality", None)
    if personality is None:
        yield
        return
    personality.argtypes = [ctypes.c_ulong]
    before = personality(_ASK)
    if before >= 0:
        personality(before | _NO_RANDOM_ADDRESSES)  # a container may refuse: the result is then one of several
    try:
        yield
    finally:
        if before >= 0:
            personality(before)
