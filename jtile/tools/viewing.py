"""`jtile view`: writes the page of a kernel, or serves it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from jtile._errors import KernelValueError
from jtile.explorer import View, view
from jtile.explorer.serve import Server, forget, neighbours
from jtile.tools import levels


def show(what: str, *, out: str | None, **options: Any) -> None:
    """Write the page of "module:function" for arguments of these types, and say where it is."""
    made = page(what, **options)
    path = Path(out or f"{what.rpartition(':')[2]}.html")
    made.save(path)
    sys.stdout.write(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {made!r}\n")


def serve(what: str, *, port: int, **options: Any) -> None:
    """Answer with the page of "file.py:function", which is made anew when the file or its neighbours change."""
    sys.dont_write_bytecode = True  # cached bytecode goes by whole seconds, and would hide quick edits
    server = server_of(what, port=port, **options)
    sys.stdout.write(f"{what} is at {server.url}; Ctrl-C ends it\n")
    sys.stdout.flush()
    if server.error:
        sys.stderr.write(f"jtile: {server.error}\n")
    try:
        server.run()
    except KeyboardInterrupt:
        server.close()


def server_of(what: str, *, port: int, **options: Any) -> Server:
    file = Path(what.rpartition(":")[0])
    if file.suffix != ".py" or not file.is_file():
        raise KernelValueError(f"--serve looks after a file: write file.py:kernel, got {what!r}")

    def make() -> str:
        forget(file)
        return page(what, **options).html

    try:
        return Server(make, lambda: neighbours(file), port)
    except (OSError, OverflowError) as error:
        raise KernelValueError(f"nobody can listen at port {port}: {error}") from None


def page(what: str, *, args: str, meta: list[str], target: str | None, gradient: bool, run: bool) -> View:
    """`jt.view` of "module:function" for arguments of these types."""
    types = levels.parse_types(args)
    with levels.as_wide_as(types):
        function, options = levels.checked(what, types, levels.parse_meta(meta))
        return view(function, *types, target=target, gradient=gradient, run=run, **options)
