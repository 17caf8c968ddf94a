"""Kernels that hand an array on: whose only output is one of their inputs, element by element. The cotangent of what is
added to a result is the cotangent of the result, and nobody needs a copy of that."""

from __future__ import annotations

from jtile.ir import Atomic, Full, Kernel, Load, Map, ProgramId, Store
from jtile.ir.block import level_of

from .affine import Forms, Site
from .pipeline import run_pipeline
from .settle import covers

FEW = 64  # ops of a kernel that does nothing else, before the passes


def handed_on(kernel: Kernel) -> int | None:
    """The number of the input that the only output of a kernel equals for certain, or None.

    Args:
      kernel: Tile IR, before or after the passes.
    """
    from . import TILE  # imported here, since the pipelines are made of this folder's passes

    if len(kernel.outputs) != 1 or kernel.aliases or kernel.devices or level_of(kernel) == "block":
        return None
    if any(i is not None for i in kernel.inits) or sum(1 for _ in kernel.body.walk()) > FEW:
        return None
    out = kernel.outputs[0].type
    alike = [k for k, v in enumerate(kernel.inputs) if (v.shape, v.type.dtype) == (out.shape, out.dtype)]
    if not alike:
        return None
    kernel = run_pipeline(kernel, TILE)
    ops = list(kernel.body.walk())
    loads, stores = ([op for op in ops if isinstance(op, kind)] for kind in (Load, Store))
    if (
        len(loads) != 1
        or len(stores) != 1
        or not all(isinstance(op, ProgramId | Full | Map | Load | Store) for op in ops)
    ):
        return None
    (load,), (store,) = loads, stores
    same = store.value is load.result and store.index == load.index and load.mask is store.mask is None
    source = next((k for k in alike if kernel.inputs[k] is load.ref), None)
    if not same or source is None:
        return None
    return source if covers(Forms(kernel), Site(Atomic("add", store.ref, store.index, store.value), ())) else None
