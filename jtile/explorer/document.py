"""`jt.view`: collects the record of a kernel, and puts it into the page."""

from __future__ import annotations

import html
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jtile import _cache
from jtile._errors import JtileError, KernelTypeError, KernelValueError
from jtile.explorer import kernels, levels
from jtile.explorer.kernels import Found
from jtile.explorer.page.document import document
from jtile.explorer.places import Places
from jtile.explorer.record import SCHEMA, Piece, Record
from jtile.explorer.speed import Timed, times
from jtile.tune import device

_FRAME = 760  # pixels: the height of the page inside of a notebook


class View:
    """A kernel as one page for a browser. In a notebook it shows itself.

    Attributes:
      record: what the page shows, as data.
    """

    def __init__(self, record: Record):
        self.record = record

    @property
    def html(self) -> str:
        """The page: one text that needs no network and no other file."""
        return document(self.record)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page, whole or not at all.

        Args:
          path: the file; one that is there is replaced.
        Raises:
          KernelValueError: the file cannot be written.
        """
        try:
            _cache.write(Path(path), self.html.encode(), _cache.PUBLIC)
        except OSError as e:
            raise KernelValueError(f"the page cannot be written to {os.fspath(path)!r}: {e}") from e

    def _repr_html_(self) -> str:
        framed = html.escape(self.html, quote=True)
        return f'<iframe srcdoc="{framed}" style="width:100%;height:{_FRAME}px;border:0" title="jtile"></iframe>'

    def __repr__(self) -> str:
        names = ", ".join(dict.fromkeys(p.name for p in self.record.pieces))
        return f"<View of {names} for {self.record.target}>"


def view(
    f: Callable[..., Any],
    *args: Any,
    target: str | None = None,
    gradient: bool = True,
    run: bool = True,
    **options: Any,
) -> View:
    """A kernel, or the kernels of a function, as one page for a browser.

    The page has the source beside every level down to machine code, linked by lines; what each pass changed; which
    program touches which part of each array; and the roofline.

    Args:
      f: a kernel, or a JAX function that calls kernels.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`. Indices that kernels load come from them, if they are
        arrays.
      target: what to compile for, such as `"cpu"`, `"cuda:sm_90"`, `"rocm:gfx942"`; None: JAX's device.
      gradient: also show the kernels of reverse mode, if there is a derivative.
      run: measure the kernels and this machine's rates, if the target is JAX's device.
      options: meta-parameters of the kernel, or keyword arguments of the function.

    Returns:
      A `View`, which a notebook shows; `save(path)` writes the page.

    Raises:
      KernelTypeError: `f` is no function. KernelValueError: it calls no kernel. UnsupportedError: there is no such
      target, or it cannot run a kernel of `f`.
    """
    if not callable(f):
        raise KernelTypeError(f"jt.view takes a kernel or a function and its arguments, got {f!r}")
    name = target or device.target().name
    found = kernels.lower(f, list(args), name, options)
    places, notes, pieces = Places(), [], []
    timed = times(f, args, options, name) if run else Timed(False, {})
    for one in found:
        pieces += _pieces(one, places, "kernel", one.calls, timed)
    for one in found if gradient else ():
        pieces += _gradient(one, places, notes, Timed(timed.run, {}))
    sources, table = places.sources()
    title = getattr(f, "__name__", None) or pieces[0].name
    version = importlib.metadata.version("jtile")
    return View(Record(title, name, version, SCHEMA, sources, table, pieces, notes))


def _pieces(found: Found, places: Places, group: str, calls: int, timed: Timed) -> list[Piece]:
    return [levels.piece(one, found, places, group, calls, timed) for one in found.lowered.pieces]


def _gradient(found: Found, places: Places, notes: list[str], timed: Timed) -> list[Piece]:
    """The kernels of reverse mode; a note where there are none."""
    try:
        lowered = found.lowered.vjp()
        outs = found.lowered.program.results(found.shapes)
        shapes = (*found.shapes, *(tuple(o.shape) for o in outs))
        data = [*found.data, *([None] * len(outs))] if found.data is not None else None
        return _pieces(Found(lowered, 1, shapes, data), places, "gradient", 1, timed)
    except JtileError as e:
        notes.append(f"The gradient of {found.lowered.program.name} is not shown: {e}")
        return []
