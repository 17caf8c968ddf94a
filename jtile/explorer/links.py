"""The line of the user's source that each line of a level comes from, said differently by levels: comments of jaxprs,
places behind the ops of Tile IR, locations of MLIR, debug information of LLVM, `.loc` of assemblers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import jaxprs_in_params

from jtile import ir
from jtile.ir import NOWHERE, Loc
from jtile.language._place import place_of


@dataclasses.dataclass(frozen=True)
class Linked:
    """A text and the place of each of its lines."""

    lines: list[str]
    places: list[Loc]

    @property
    def any(self) -> bool:
        return any(place.file for place in self.places)


def plain(text: str) -> Linked:
    """A text that says nothing of places."""
    lines = text.splitlines()
    return Linked(lines, [NOWHERE] * len(lines))


# -- the levels of jtile ----------------------------------------------------------------------------------------------

_COMMENT = re.compile(r"\s+# (?:(?P<file>.*?):(?P<line>\d+):\d+ \(.*\))?$")


def jaxpr(made: Any) -> Linked:
    """A jaxpr with the places of its equations; the lines of an equation's parameters belong to the equation."""
    lines, places = [], []
    silent = _without_results(made)  # equations without results, for which JAX prints no place
    name, at = next(silent, ("", NOWHERE))
    open_: list[tuple[int, Loc]] = [(-1, NOWHERE)]  # equations around a line: how far they are indented, their places
    for line in made.pretty_print(source_info=True).splitlines():
        found = _COMMENT.search(line)
        line = line[: found.start()] if found else line
        depth = len(line) - len(line.lstrip())
        place = None
        if found:
            place = Loc(found["file"], int(found["line"])) if found["file"] else NOWHERE
        elif name and re.match(rf"\s*{re.escape(name)}\b", line):
            place, (name, at) = at, next(silent, ("", NOWHERE))
        while depth < open_[-1][0] or (place is not None and depth == open_[-1][0]):
            open_.pop()
        if place is not None:
            open_.append((depth, place))
        lines.append(line)
        places.append(open_[-1][1])
    return Linked(lines, places)


def _without_results(made: Any) -> Iterator[tuple[str, Loc]]:
    """The equations that give nothing, in the order in which they are printed: their primitive and place."""
    for eqn in made.eqns:
        if not eqn.outvars:
            where = place_of(eqn.source_info)
            yield eqn.primitive.name, Loc(*where) if where else NOWHERE
        for inner in jaxprs_in_params(eqn.params):
            yield from _without_results(inner)


_PLACE = re.compile(r' @"((?:[^"\\]|\\.)*)":(\d+)')


def tile_ir(kernel: ir.Kernel) -> Linked:
    """Tile IR with the places of its ops; the end of a region belongs to its op."""
    lines, located = (ir.print_kernel(kernel, locations=where).splitlines() for where in (False, True))
    head = len(located) - len(lines)  # the first line may have become several, now that it has a place
    places: list[Loc] = [kernel.loc] if lines else []
    around: list[Loc] = []
    for line, text in zip(lines[1:], located[head + 1 :], strict=True):
        found = _PLACE.search(text)
        place = Loc(found[1], int(found[2])) if found else NOWHERE
        if line.lstrip().startswith("}") and around:
            place = around.pop()
        if line.endswith("{"):
            around.append(place)
        places.append(place)
    return Linked(lines, places)


# -- the levels of compilers ------------------------------------------------------------------------------------------

_LOC = re.compile(r' loc\((?:#loc\d*|"[^"]*":\d+:\d+|unknown)\)')
_ALIAS = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
_NUMBER = re.compile(r'":(\d+):\d+')
_NAME = re.compile(r"#loc\d*")


def mlir(text: str, emitted: Sequence[Loc]) -> Linked:
    """A module of triton, whose locations are lines of the text that jtile emitted.

    Args:
      emitted: the place of each line of that text.
    """
    aliases = {m[1]: m[2] for line in text.splitlines() if (m := _ALIAS.match(line))}
    lines, places = [], []
    for line in text.splitlines():
        if _ALIAS.match(line):
            continue
        found = _LOC.findall(line)
        number = _resolved(found[-1], aliases) if found else 0
        lines.append(_LOC.sub("", line))
        places.append(_at(emitted, number))
    return Linked(lines, places)


def _resolved(text: str, aliases: dict[str, str], depth: int = 8) -> int:
    """The first line that a location names, through its aliases; 0: none."""
    if found := _NUMBER.search(text):
        return int(found[1])
    if not depth:
        return 0
    numbers = (_resolved(aliases[name], aliases, depth - 1) for name in _NAME.findall(text) if name in aliases)
    return next((n for n in numbers if n), 0)


def _at(emitted: Sequence[Loc], number: int) -> Loc:
    return emitted[number - 1] if 0 < number <= len(emitted) else NOWHERE


_DEBUG = re.compile(r",? !dbg !(\d+)")
_LOCATION = re.compile(r"^!(\d+) = !DILocation\(line: (\d+)")
_METADATA = re.compile(r"^![\w.]+ = ")


def llvm(text: str, emitted: Sequence[Loc]) -> Linked:
    """LLVM IR with debug information, whose lines are those of a text that jtile emitted."""
    numbers = {m[1]: int(m[2]) for line in text.splitlines() if (m := _LOCATION.match(line))}
    lines, places = [], []
    for line in text.splitlines():
        if _METADATA.match(line) or line.lstrip().startswith(("call void @llvm.dbg", "#dbg_")):
            continue
        found = _DEBUG.search(line)
        instruction = line.startswith("  ")  # the debug information of a `define` is that of the whole function
        lines.append(_DEBUG.sub("", line))
        places.append(_at(emitted, numbers.get(found[1], 0)) if found and instruction else NOWHERE)
    return Linked(_trimmed(lines), places[: len(_trimmed(lines))])


_ASSEMBLER = re.compile(r"^\s*\.loc\s+\d+\s+(\d+)")
_LABEL = re.compile(r"^(?:\$L__|\.L)(?:tmp|func_begin|func_end|debug|cu_begin)\w*:")
_DROPPED = re.compile(r"^\s*\.(?:file|cv_\w+|cfi_\w+)\b")


def assembly(text: str, emitted: Sequence[Loc]) -> Linked:
    """An assembler's text with `.loc`; sections of debug information are left out."""
    lines, places = [], []
    place, debug = NOWHERE, False
    for line in text.splitlines():
        if found := _ASSEMBLER.match(line):
            place = _at(emitted, int(found[1]))
            continue
        if line.lstrip().startswith((".section", ".text")):
            debug = ".debug_" in line
        if debug or _DROPPED.match(line) or _LABEL.match(line):
            continue
        stripped = line.strip()
        lines.append(line)
        places.append(place if stripped and not stripped.startswith((".", "//", ";", "#")) else NOWHERE)
    kept = _trimmed(lines)
    return Linked(kept, places[: len(kept)])


_MACHINE = re.compile(r'^\s*//## File "[^"]*", line (\d+)')


def sass(text: str, emitted: Sequence[Loc]) -> Linked:
    """What nvdisasm says of a cubin with lines."""
    lines, places = [], []
    place = NOWHERE
    for line in text.splitlines():
        if line.lstrip().startswith("//##"):
            if found := _MACHINE.match(line):
                place = _at(emitted, int(found[1]))
            continue
        lines.append(line)
        places.append(place if "/*" in line else NOWHERE)
    return Linked(lines, places)


def _trimmed(lines: list[str]) -> list[str]:
    end = len(lines)
    while end and not lines[end - 1].strip():
        end -= 1
    return lines[:end]
