"""`jtile shrink`: cuts a file that fails down, and writes what is left beside it."""

from __future__ import annotations

import sys
from pathlib import Path

from jtile._errors import KernelValueError
from jtile.debug.shrink import shrink
from jtile.debug.shrink.search import headed


def show(path: str, *, out: str | None, timeout: float, time_limit: float, jobs: int | None) -> None:
    """Write the file that is left of `path`, and say how it fails."""
    name = Path(path)
    target = Path(out) if out else name.with_name(f"{name.stem}.min.py")
    if target.resolve() == name.resolve():
        raise KernelValueError(f"{path} is the file that fails, which stays: give --out another name")
    if not target.parent.is_dir():
        raise KernelValueError(f"{target} cannot be written: there is no folder {target.parent}")
    say = lambda text: sys.stderr.write(f"{text}\n")
    found = shrink(path, timeout=timeout, time_limit=time_limit, jobs=jobs, progress=say)
    target.write_text(headed(found, name.name))
    sys.stdout.write(f"{target}: {found}\n")
