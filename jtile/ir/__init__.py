"""Tile IR: the SSA form between the language and the back ends. See docs/ir.md."""

from .block import (
    AllocBarriers,
    AllocShared,
    Arrive,
    AsyncLoad,
    AsyncStore,
    Clock,
    Expect,
    FenceShared,
    KernelsWait,
    LoadShared,
    Prefetch,
    RoleBarrier,
    Roles,
    SliceShared,
    Slot,
    StoreShared,
    StoreWait,
    TransposeShared,
    Wait,
)
from .block_products import DotAsync, DotWait
from .builder import Builder, build
from .control import For, If, While
from .core import (
    NOWHERE,
    OPS,
    At,
    Block,
    Dim,
    Index,
    Kernel,
    Loc,
    Op,
    Span,
    Take,
    Tile,
    Value,
    copy_block,
    dim_value,
    index_shape,
    tile,
    with_dim_value,
)
from .devices import (
    ALONE,
    MEETING,
    AxisBarrier,
    AxisIndex,
    On,
    Post,
    Receive,
    Signal,
    WaitSignal,
    alone,
    posts,
    root,
    waits,
)
from .dynamic import MAX_SIZE, SizeOf, Source, bind_sizes, concrete, is_dynamic, launch_symbols, sources, used_symbols
from .elementwise import ELEMENTWISE, Bitcast, Cast, Map, Select
from .extents import Extent, Size, UndecidedError, at_least, calls_of, evaluate, parse_size, symbol, symbols_of
from .memory import ATOMICS, Alloc, Assert, Atomic, LastArrival, Load, Print, Store, counters_of
from .parser import parse_kernel
from .placement import roles_of, shared_bytes
from .printer import print_kernel, print_op
from .reductions import (
    REDUCERS,
    ArgReduce,
    Cumulative,
    Dot,
    DotScaled,
    Reduce,
    Sort,
    UserReduce,
    UserScan,
    accumulator_dtype,
    identity,
)
from .shapes import (
    Broadcast,
    Concat,
    Dense,
    DynamicSlice,
    DynamicUpdate,
    Full,
    Gather,
    Iota,
    NumPrograms,
    Pad,
    ProgramId,
    Reshape,
    Reverse,
    Scatter,
    Slice,
    Transpose,
)
from .types import (
    BOOL,
    BY_NUMPY,
    DTYPES,
    FNUZ,
    INDEX,
    BarrierType,
    DType,
    RefType,
    SharedType,
    TileType,
    Type,
    dtype_info,
)
from .verifier import stage_grammar, verify

__all__ = [name for name in dir() if not name.startswith("_")]
