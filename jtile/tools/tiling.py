"""`jtile tile`: the tile kernels of a function of `jax.numpy` as source."""

from __future__ import annotations

import sys

import jtile as jt
from jtile.tools import levels


def write(what: str, *, args: str, meta: list[str], out: str | None) -> None:
    """Print `jt.tile` of "module:function" for arguments of these types, or write it to the new file `out`."""
    types, options = levels.parse_types(args), levels.parse_meta(meta)
    with levels.as_wide_as(types):
        function, options = levels.checked(what, types, options)
        found = jt.tile(jt.fuse(function, static_argnames=tuple(options)), *types, **options)
    if out is None:
        sys.stdout.write(found.text)
    else:
        found.save(out)
        sys.stdout.write(f"wrote {out}: {len(found.kernels)} kernels, and {found.name}, which calls them\n")
