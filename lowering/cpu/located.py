"""The levels of a CPU's kernel with lines of the emitted text: for people who look from source to machine code. What
runs is compiled without, so that images are small and say nothing of who made them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from jtile import ir

from ..emitting import Marks
from .compile import ENTRY, KEEPING, assemble, emit_programs
from .isa import Isa

FILE = "kernel.ll"
_DEFINE = re.compile(rf"^define [^@]*@({ENTRY}|{KEEPING})\(")
_UNIT = """
!llvm.dbg.cu = !{{!0}}
!llvm.module.flags = !{{!2}}
!0 = distinct !DICompileUnit(language: DW_LANG_C, file: !1, producer: "jtile", emissionKind: LineTablesOnly)
!1 = !DIFile(filename: "{file}", directory: "")
!2 = !{{i32 2, !"Debug Info Version", i32 3}}
!3 = !DISubroutineType(types: !{{null}})
"""
_FUNCTION = (
    '!{n} = distinct !DISubprogram(name: "{name}", file: !1, line: {line}, type: !3, spFlags: DISPFlagDefinition, '
    "unit: !0)"
)
_FIRST = 4  # number of the first node behind those of `_UNIT`


def located_levels(kernel: ir.Kernel, isa: Isa) -> tuple[dict[str, str], list[ir.Loc]]:
    """The texts `llvm` (as emitted), `llvm_opt` and `asm`, the last two with debug information whose lines are those of
    the first; and for each line of the first its place in the source."""
    marks = Marks(";")
    marked, _ = emit_programs(kernel, isa, marks)
    places = marks.places(marked)
    text = re.sub(r" ; @\d+$", "", marked, flags=re.MULTILINE)
    _, levels = assemble(with_lines(text), isa, texts=True, lines=text.count("\n"))
    return {"llvm": text, **levels}, places


def with_lines(text: str) -> str:
    """LLVM text of a kernel with a debug location of its own for each instruction of the programs."""
    nodes: list[str] = []
    lines = list(_with_lines(text.splitlines(), nodes))
    return "\n".join(lines) + _UNIT.format(file=FILE) + "\n".join(nodes) + "\n"


def _with_lines(lines: list[str], nodes: list[str]) -> Iterator[str]:
    scope = 0
    node = lambda text: nodes.append(text) or _FIRST + len(nodes) - 1
    for number, line in enumerate(lines, 1):
        if found := _DEFINE.match(line):
            scope = node(_FUNCTION.format(n=_FIRST + len(nodes), name=found[1], line=number))
            yield f"{line[:-1].rstrip()} !dbg !{scope} {{"
            continue
        if line == "}":
            scope = 0
        if not scope or not line.startswith("  "):
            yield line
            continue
        place = f"!{_FIRST + len(nodes)} = !DILocation(line: {number}, column: 1, scope: !{scope})"
        yield f"{line}, !dbg !{node(place)}"
