"""Sentences for `jt.explain`: what in a kernel's source or in its tiles costs time, and what to try instead."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jtile import ir
from jtile.tune.cost import Work

COPIES = 8  # so many copies of a product on one line of source are taken for an unrolled loop


def advice(
    kernel: ir.Kernel, w: Work, target: Any, resources: Sequence[Mapping[str, Any]] = (), schedule: str = ""
) -> tuple[str, ...]:
    """What to try with a kernel, the likeliest gain first; () where nothing is known that would help.

    Args:
      kernel: the kernel after the passes on tiles.
      w: the bytes that the kernel moves, and the operations that it computes.
      resources: those of the kernels that run for it, as a GPU's compiler tells them.
      schedule: the text of the level `schedule`: whether the kernel runs in roles at the block level, or why not.
    """
    found = [*_unrolled(kernel), *_spilled(resources), *_few(w, target)]
    if schedule.startswith("tile level: ") and w.products:
        reason = schedule.removeprefix("tile level: ").strip()
        found.append(f"its products run without roles that load ahead for the tensor cores: {reason}")
    return tuple(found)


def _unrolled(kernel: ir.Kernel) -> Iterator[str]:
    copies: collections.Counter[ir.Loc] = collections.Counter()
    for block in _blocks(kernel.body):
        here = collections.Counter(op.loc for op in block.ops if isinstance(op, ir.Dot) and op.loc.file)
        copies.update({loc: n for loc, n in here.items() if n >= COPIES})
    for loc, n in copies.items():
        yield (
            f"the product of {loc} stands {n} times in the kernel, as in a loop over Python's `range`, which is "
            "unrolled; `jt.range` keeps it one loop, which compiles faster and whose loads run ahead of its products"
        )


def _blocks(block: ir.Block) -> Iterator[ir.Block]:
    yield block
    for op in block.ops:
        for inner in op.blocks():
            yield from _blocks(inner)


def _spilled(resources: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    spills = max((r["spills"] for r in resources), default=0)
    if spills:
        yield f"{spills} bytes of registers are spilled to memory: take smaller tiles, or more threads (`num_warps`)"


def _few(w: Work, target: Any) -> Iterator[str]:
    units = target.programs_at_once
    if "warps" in target.features and 2 * w.programs <= units:
        yield (
            f"{w.programs} programs leave at least half of {units} multiprocessors idle: take smaller tiles, or cut a "
            "sum in parts"
        )
