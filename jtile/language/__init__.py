"""What a kernel body may say: Refs and views, loads and stores, dots, reductions, control flow, atomics, debugging."""

from jtile.language._index import ds
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
from jtile.language.compute import associative_scan, dot, dot_scaled, reduce
from jtile.language.control import Range, cond, fori, range_, when
from jtile.language.refs import (
    Ref,
    TileView,
    alloc,
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_xchg,
    atomic_xor,
    load,
    store,
)
from jtile.language.swizzle import swizzle

print = print_
range = range_

__all__ = [
    "Range",
    "Ref",
    "TileView",
    "alloc",
    "arange",
    "assert_",
    "associative_scan",
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_xchg",
    "atomic_xor",
    "cdiv",
    "cond",
    "dot",
    "dot_scaled",
    "ds",
    "fori",
    "full",
    "like",
    "load",
    "next_power_of_2",
    "num_programs",
    "ones",
    "print",
    "program_id",
    "range",
    "reduce",
    "store",
    "swizzle",
    "when",
    "zeros",
]
