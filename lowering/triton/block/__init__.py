"""The back end of the block level: Tile IR with roles and shared memory to TTGIR, and the way there from tile level."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jtile import ir
from jtile._config import current
from jtile._errors import UnsupportedError
from jtile.ir.block import level_of

from ... import failures
from ...artifact import Artifact
from ...targets import Target
from .compile import compile_block_kernel, emit_block_kernel
from .passes import NoPlan, steps
from .passes.plan import Machine

__all__ = ["Defect", "compile_block_kernel", "emit_block_kernel", "specialised"]


class Defect(str):
    """A reason why a kernel stays at tile level that is jtile's own fault."""


def specialised(kernel: ir.Kernel, target: Target, options: Mapping[str, Any], *, texts: bool) -> Artifact | str:
    """A kernel compiled at the block level, or why it has to stay at tile level.

    Raises:
      UnsupportedError: a kernel that was written at the block level has no form there.
    """
    if level_of(kernel) == "block":
        names = ("num_warps", "num_stages", "num_ctas", "consumers", "persistent")
        given = [n for n in names if options.get(n) is not None]
        if given:
            raise UnsupportedError(
                f"kernel {kernel.name}: {given[0]} means nothing at the block level, where roles name their warps and "
                "buffers their slots: call it without",
                (kernel.loc.file, kernel.loc.line) if kernel.loc.file else None,
            )
        blocks = {"multicast": options.get("multicast") or 1, "apart": options.get("spread") or 1}
        return compile_block_kernel(kernel, target, texts=texts, **blocks)
    if (options.get("num_ctas") or 1) > 1:
        return "tile level: num_ctas shares a program among several blocks\n"
    try:
        planned = steps(kernel, Machine.of(target), options)
        if isinstance(planned, NoPlan):
            return f"tile level: {planned}\n"
        multicast = options.get("multicast") or 1
        artifact = compile_block_kernel(planned.kernel, target, texts=texts, multicast=multicast)
    except UnsupportedError as e:
        return f"tile level: the plan of the block level does not compile: {e}\n"
    except (OSError, MemoryError):  # the machine's fault, gone next time: the slow form must not be kept for ever
        raise
    except Exception as e:  # the call need not fail, for the kernel has a form at tile level
        if current().verify:
            raise
        failures.warn(kernel, target, e, "it stays at tile level, where products may take twice the time")
        return Defect(f"tile level: a defect of jtile at the block level: {type(e).__name__}: {e}\n")
    levels = {"schedule": f"block level: {planned.plan}\n"} | artifact.texts if texts else {}
    return dataclasses.replace(artifact, texts=levels)
