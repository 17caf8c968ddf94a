"""The primitives of the block level. A buffer or barriers of shared memory are scalars to JAX: handles, which only
these primitives take. Their types are static parameters of what reads them.
"""

from __future__ import annotations

import numpy as np

from jtile.ir.types import TileType
from jtile.language._primitives import TileEffect, _aval, _primitive

BLOCK = TileEffect("jtile.block")


def _handle(name: str, effects: bool = False):
    """A primitive that gives a handle."""
    p = _primitive(name)
    made = _aval((), np.int32)
    if effects:
        p.def_effectful_abstract_eval(lambda *_, **__: (made, {BLOCK}))
    else:
        p.def_abstract_eval(lambda *_, **__: made)
    return p


def _action(name: str):
    """A primitive without results."""
    p = _primitive(name, multiple=True)
    p.def_effectful_abstract_eval(lambda *_, **__: ([], {BLOCK}))
    return p


alloc_shared_p = _handle("alloc_shared", effects=True)  # () -> ring; shape, dtype, slots
alloc_barriers_p = _handle("alloc_barriers", effects=True)  # () -> barriers; count, arrivals
slot_p = _handle("slot")  # (ring, at) -> buffer
transpose_shared_p = _handle("transpose_shared")  # (buffer) -> buffer
slice_shared_p = _handle("slice_shared")  # (buffer) -> buffer; starts, sizes
store_shared_p = _action("store_shared")  # (buffer, value)
fence_shared_p = _action("fence_shared")
role_barrier_p = _action("role_barrier")
kernels_wait_p = _action("kernels_wait")  # hold
expect_p = _action("expect")  # (barriers, at, when?); bytes
arrive_p = _action("arrive")  # (barriers, at, when?); count
wait_p = _action("wait")  # (barriers, at, parity, when?)
async_load_p = _action("async_load")  # (ref, *index, buffer, barriers, at, when?); dims, pad, evict
prefetch_p = _action("prefetch")  # (ref, *index, buffer, when?); dims
async_store_p = _action("async_store")  # (ref, *index, buffer); dims, fn
store_wait_p = _action("store_wait")  # pending
role_begin_p = _action("role_begin")  # (*handles); name, warps, registers, early, names (of the handles)
role_end_p = _action("role_end")

load_shared_p = _primitive("load_shared")
dot_async_p = _primitive("dot_async")
dot_wait_p = _primitive("dot_wait", multiple=True)
clock_p = _primitive("clock")


def _typed(*_, type: TileType, **__):
    """The result's type is the parameter `type`."""
    return _aval(type.shape, type.info.numpy), {BLOCK}


load_shared_p.def_effectful_abstract_eval(_typed)  # (buffer) -> tile; type
dot_async_p.def_effectful_abstract_eval(
    _typed
)  # (a, b, acc?, keep?, places?) -> tile; type, has (the last three), fast
clock_p.def_effectful_abstract_eval(lambda: (_aval((), np.int64), {BLOCK}))


@dot_wait_p.def_effectful_abstract_eval
def _(*values, pending):
    """`(*tiles) -> the same tiles`."""
    del pending
    return [_aval(v.shape, v.dtype) for v in values], {BLOCK}


PRIMITIVES = (
    alloc_shared_p, alloc_barriers_p, slot_p, transpose_shared_p, slice_shared_p, store_shared_p, fence_shared_p,
    role_barrier_p, expect_p, arrive_p, wait_p, async_load_p, async_store_p, store_wait_p, role_begin_p, role_end_p,
    load_shared_p, dot_async_p, dot_wait_p, clock_p, kernels_wait_p, prefetch_p,
)  # fmt: skip
