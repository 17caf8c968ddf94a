"""What a kernel body may say: Refs and views, loads and stores, dots, reductions, control flow, atomics, debugging."""

from jtile.language._index import ds
from jtile.language.arrivals import Counters, arrive, counters
from jtile.language.atomics import (
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_xchg,
    atomic_xor,
)
from jtile.language.basics import (
    arange,
    assert_,
    cdiv,
    full,
    like,
    next_power_of_2,
    num_programs,
    ones,
    print_,
    program_id,
    zeros,
)
from jtile.language.block import (
    async_copy,
    clock,
    dot_async,
    dot_wait,
    fence_shared,
    prefetch,
    role,
    role_barrier,
    store_wait,
    wait_for_kernels,
)
from jtile.language.compute import associative_scan, dot, dot_scaled, reduce
from jtile.language.control import Range, cond, fori, range_, when
from jtile.language.devices import Signals, axis_barrier, axis_index, axis_size, signal, signals, symmetric, wait
from jtile.language.refs import Ref, TileView, load, store
from jtile.language.shared import Barrier, BarrierRound, BarrierSlot, Shared, alloc, barrier
from jtile.language.swizzle import swizzle

print = print_
range = range_

__all__ = [
    "Barrier",
    "BarrierRound",
    "BarrierSlot",
    "Counters",
    "Range",
    "Ref",
    "Shared",
    "Signals",
    "TileView",
    "alloc",
    "arange",
    "arrive",
    "assert_",
    "associative_scan",
    "async_copy",
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_xchg",
    "atomic_xor",
    "axis_barrier",
    "axis_index",
    "axis_size",
    "barrier",
    "cdiv",
    "clock",
    "cond",
    "counters",
    "dot",
    "dot_async",
    "dot_scaled",
    "dot_wait",
    "ds",
    "fence_shared",
    "fori",
    "full",
    "like",
    "load",
    "next_power_of_2",
    "num_programs",
    "ones",
    "prefetch",
    "print",
    "program_id",
    "range",
    "reduce",
    "role",
    "role_barrier",
    "signal",
    "signals",
    "store",
    "store_wait",
    "swizzle",
    "symmetric",
    "wait",
    "wait_for_kernels",
    "when",
    "zeros",
]
