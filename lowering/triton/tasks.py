"""Several kernels as one image, of which one launch runs a graph: which kernels take part, and their compilation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jtile import ir
from jtile._errors import UnsupportedError
from jtile.ir.block import level_of

from ..artifact import Artifact
from ..targets import Target
from . import compile as single
from . import heuristics, layouts, stages
from .emit_tasks import Shape, Tasks
from .targets import features_of
from .task_pages import PAGE

MOST_WARPS = 8  # of a launch, where no kernel was given more: a thread may then have 255 registers


def refusal(kernel: ir.Kernel, target: Target) -> str | None:
    """Why a kernel can be no task of a graph, or None."""
    if level_of(kernel) == "block":
        return "it is written at the block level, whose roles are a launch of their own"
    if kernel.scratch or any(isinstance(op, ir.Alloc) for op in kernel.body.walk()):
        return "its programs have private memory, which graphs have no room for"
    return None


def compile_tasks(
    kernels: Sequence[ir.Kernel], target: Target, options: Sequence[Mapping[str, Any]], shape: Shape
) -> Artifact:
    """Compile kernels (after the passes) into one function that runs a graph of them.

    Args:
      options: those of the compiler for each kernel. All share the number of warps, the largest that one of them has.

    Raises:
      UnsupportedError: the graph has too many arrays.
    """
    f = dataclasses.replace(features_of(target), dependents=False)  # what stands behind a graph starts when it ended
    arrays, most = sum(shape.arrays), single.MAX_PARAMETERS - 6
    if arrays > most:
        raise UnsupportedError(
            f"jt.graph: a launch has {arrays} arrays that others see, and on a GPU it takes {most}: stack arrays of "
            "equal shapes, or make graphs of parts of the function"
        )
    choices = [heuristics.choose(k, f, o) for k, o in zip(kernels, options, strict=True)]
    given = max((c.num_warps for c in choices if "num_warps" in c.fixed), default=0)
    warps = max(given, min(max(c.num_warps for c in choices), MOST_WARPS))
    depth = [c.num_stages if "num_stages" in c.fixed else None for c in choices]
    choice = heuristics.Choice(warps, max(c.num_stages for c in choices))
    where = dataclasses.replace(kernels[0], name="graph")
    taken = shape.pages.bytes if shape.pages else 0
    within = dataclasses.replace(f, shared=(f.shared - taken) // PAGE * PAGE)
    try:
        text, record = Tasks(kernels, shape, f, depth).emit()
        built = stages.build(text, within, choice, where=where)
    except layouts.ScatteredLanesError:
        text, record = Tasks(kernels, shape, f, depth, isolate=True).emit()
        built = stages.build(text, within, choice, where=where)
    built = dataclasses.replace(built, shared=-(-built.shared // PAGE) * PAGE + taken)
    launch = {"name": "graph", "record": record.finish("graph", shape.name, f, built), "level": "tile"}
    return Artifact(target.name, built.image, {"ttir": text} | built.texts, launch)
