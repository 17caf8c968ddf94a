"""Folders that appear when they are whole: they are made beside their place, and renamed."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# A file in a folder that is being made. The process that makes the folder locks the file and then writes the
# host's name; the lock ends with the process. So an unlocked file with the name of this host is left from a process
# that died.
MARK = ".jtile-unfinished"


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """An empty folder beside `out`, which becomes `out` as the block ends, or is removed as an exception leaves it.

    Unfinished folders that killed runs on this host have left beside `out` are removed first.

    Raises:
      OSError: a folder cannot be written.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(out)
    made = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        with (made / MARK).open("wb", buffering=0) as mark:
            with contextlib.suppress(OSError):  # without locks no name is written, and no run removes it
                fcntl.flock(mark, fcntl.LOCK_EX)
                mark.write(platform.node().encode())
            yield made
            (made / MARK).unlink()
        made.chmod(0o755)
        made.rename(out)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _remove_left(out: Path) -> None:
    host = platform.node().encode()
    for path in out.parent.glob(f"{glob.escape(f'.{out.name}-')}*/{MARK}"):
        with contextlib.suppress(OSError), path.open("r+b") as mark:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if host and mark.read() == host:
                shutil.rmtree(path.parent, ignore_errors=True)
