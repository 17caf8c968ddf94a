"""`jtile view`: writes the page of a kernel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from jtile.explorer import View, view
from jtile.tools import levels


def show(what: str, *, out: str | None, **options: Any) -> None:
    """Write the page of "module:function" for arguments of these types, and say where it is."""
    made = page(what, **options)
    path = Path(out or f"{what.rpartition(':')[2]}.html")
    made.save(path)
    sys.stdout.write(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {made!r}\n")


def page(what: str, *, args: str, meta: list[str], target: str | None, gradient: bool, run: bool) -> View:
    """`jt.view` of "module:function" for arguments of these types."""
    types = levels.parse_types(args)
    with levels.as_wide_as(types):
        function, options = levels.checked(what, types, levels.parse_meta(meta))
        return view(function, *types, target=target, gradient=gradient, run=run, **options)
