"""The back end of the block level: Tile IR with roles and shared memory to TTGIR, and the way there from tile level."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jtile import ir
from jtile._errors import UnsupportedError, VerificationError
from jtile.ir.block import level_of
from jtile.lowering.artifact import Artifact
from jtile.lowering.triton.block.compile import compile_block_kernel, emit_block_kernel
from jtile.passes.block import NoPlan, steps
from jtile.passes.block.plan import Machine

__all__ = ["compile_block_kernel", "emit_block_kernel", "specialised"]


def specialised(kernel: ir.Kernel, arch: str, options: Mapping[str, Any], *, texts: bool) -> Artifact | str:
    """A kernel compiled at the block level, or why it has to stay at tile level.

    Raises:
      UnsupportedError: a kernel that was written at the block level has no form there.
    """
    if level_of(kernel) == "block":
        return compile_block_kernel(kernel, arch, options, texts=texts)
    if (options.get("num_ctas") or 1) > 1:
        return "tile level: num_ctas shares a program among several blocks\n"
    try:
        planned = steps(kernel, Machine(), options)
    except VerificationError as e:
        return f"tile level: the plan of the block level is wrong, a defect of jtile: {e}\n"
    if isinstance(planned, NoPlan):
        return f"tile level: {planned}\n"
    try:
        artifact = compile_block_kernel(planned.kernel, arch, options, texts=texts)
    except UnsupportedError as e:
        return f"tile level: the plan of the block level does not compile: {e}\n"
    levels = {"schedule": f"block level: {planned.plan}\n"} | artifact.texts if texts else {}
    return dataclasses.replace(artifact, texts=levels)
