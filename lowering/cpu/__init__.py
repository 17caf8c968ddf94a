"""The CPU back end: Tile IR to LLVM IR to a relocatable object. `compile_kernel` is its one entry; it imports llvmlite
when called."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jtile import ir

    from ..artifact import Artifact
    from .isa import Isa


def compile_kernel(kernel: ir.Kernel, isa: Isa | None = None, *, texts: bool = False, coarse: bool = True) -> Artifact:
    """Compile a kernel (after the passes) for an instruction set; see `jtile.lowering.cpu.compile.compile_kernel`."""
    from . import compile

    return compile.compile_kernel(kernel, isa, texts=texts, coarse=coarse)
