"""The kernel after every pass, with what the pass changed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jtile import ir, passes
from jtile.explorer import links
from jtile.explorer.links import Linked
from jtile.explorer.places import Places
from jtile.explorer.record import Step
from jtile.ir.block import level_of
from jtile.lowering.targets import Target

# What holds after each step to the block level; the passes of tiles say it themselves.
_BLOCK = {
    "widen": "Tiles that cover a whole side of their array have sides that are powers of two.",
    "scales": "Positive factors of scores stand behind the maximum of a row.",
    "masks": "Masks that most rounds of a loop do not need stand in a branch.",
    "persist": "The grid has one axis of blocks, each of which may take many tiles.",
    "specialise": "A producer copies operands into rings, and consumers multiply what waits there.",
    "join": "Products of one left operand are one product.",
    "pairs": "Rounds of loops that fold products into their sums themselves go in pairs.",
    "prefetch": "Small tiles that products need are loaded a round ahead.",
    "early": "A product starts together with the one before it, where it needs nothing of that one.",
    "overlap": "Products of a loop are waited for a round later.",
    "ahead": "What comes behind a loop of products is asked for before its last products have ended.",
    "clean": "No op is left that nobody needs.",
}
_NUMBER = re.compile(r"%\d+\b|%c\w+?(?:_\d+)?\b")


def steps(kernel: ir.Kernel, target: Target, options: Mapping[str, Any], places: Places) -> list[Step]:
    """The kernel as traced, then after every pass of tiles and every step to the block level."""
    out: list[Step] = []
    before: Linked | None = None
    for name, ensures, level, made in _steps(kernel, target, options):
        after = links.tile_ir(made)
        same = before is not None and after.lines == before.lines
        diff = [] if same or before is None else difference(before.lines, after.lines)
        out.append(Step(name, ensures, level, None if same else places.text(after), diff))
        before = after
    return out


def _steps(kernel: ir.Kernel, target: Target, options: Mapping[str, Any]) -> Iterator[tuple[str, str, str, ir.Kernel]]:
    yield "traced", "The kernel as its function was traced.", level_of(kernel), kernel
    for step in passes.TILE:
        kernel = step.run(kernel)
        yield step.name, step.ensures, level_of(kernel), kernel
    yield from _to_blocks(kernel, target, options)


def _to_blocks(
    kernel: ir.Kernel, target: Target, options: Mapping[str, Any]
) -> Iterator[tuple[str, str, str, ir.Kernel]]:
    if "warpgroup products" not in target.features or level_of(kernel) == "block":
        return
    from jtile.lowering.triton.block.passes import NoPlan, steps
    from jtile.lowering.triton.block.passes.plan import Machine

    planned = steps(kernel, Machine.of(target), options)
    for name, level, after in () if isinstance(planned, NoPlan) else planned.steps:
        yield name, _BLOCK.get(name, ""), level, after


def difference(before: list[str], after: list[str]) -> list[list[Any]]:
    """`[kind, from, to, from, to]` of lines; the numbers that the printer gives to values are no difference."""
    a, b = ([_NUMBER.sub("%", line) for line in lines] for lines in (before, after))
    return [list(code) for code in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()]
