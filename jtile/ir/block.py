"""Cards of the block level: memory shared by the roles of a block, asynchronous copies and products, barriers, roles.

A block-level kernel says where tiles live and who does what. Everything of the tile level that neither names a memory
nor hides a schedule (arithmetic, shapes, reductions, loops, loads and stores of Refs) stands there too, inside roles.
Each card has the meaning of one hardware mechanism of Hopper: tensor-map copies, mbarriers, warpgroup products.
"""

from __future__ import annotations

import dataclasses
import math

from .core import Block, Index, Kernel, Op, Value, tile
from .memory import access
from .types import BOOL, DTYPES, INDEX, BarrierType, SharedType, TileType


def shared(v: Value) -> SharedType:
    """The type of a value that must be one buffer of shared memory (not a ring of several)."""
    if not isinstance(v.type, SharedType):
        raise TypeError(f"expected a buffer of shared memory, got {v.type}")
    if v.type.slots is not None:
        raise TypeError(f"expected one buffer, got a ring of {v.type.slots}: take a slot of it")
    return v.type


def _barrier(v: Value, at: Value) -> BarrierType:
    if not isinstance(v.type, BarrierType):
        raise TypeError(f"expected barriers, got {v.type}")
    if at.type != INDEX:
        raise TypeError(f"the number of a barrier is an i32, got {at.type}")
    return v.type


def predicate(v: Value | None) -> None:
    """Raises TypeError where v is neither None nor a bool scalar."""
    if v is not None and v.type != BOOL:
        raise TypeError(f"a predicate is a bool scalar, got {v.type}")


def holds(buffer: tuple[int, ...], box: tuple[int, ...]) -> bool:
    """Whether a buffer of a shape has the elements of a box of an array, in their order: it has its sides, or is a
    matrix whose rows are those of a box of more axes."""
    rows = len(buffer) == 2 < len(box) and (math.prod(box[:-1]), box[-1]) == buffer
    return rows or buffer == box


def nbytes(t: SharedType) -> int:
    """Bytes of one buffer."""
    return -(-t.size * DTYPES[t.dtype].bits // 8)


# -- memory -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class AllocShared(Op):
    """`slots` buffers of one shape in the memory of the block (None: one buffer); undefined at first. Stands outside
    roles: all of them see it."""

    shape: tuple[int, ...]
    dtype: str
    slots: int | None = None

    mnemonic = "alloc_shared"
    effect = "io"
    level = "block"

    def infer(self):
        if self.slots is not None and self.slots < 1:
            raise ValueError(f"a ring has one slot at least, got {self.slots}")
        return (SharedType(self.shape, self.dtype, self.slots),)


@dataclasses.dataclass(eq=False)
class Slot(Op):
    """Buffer number `at` of a ring: `0 <= at < slots`."""

    buffer: Value
    at: Value

    mnemonic = "slot"
    level = "block"

    def infer(self):
        t = self.buffer.type
        if not isinstance(t, SharedType) or t.slots is None:
            raise TypeError(f"expected a ring of buffers, got {t}")
        if self.at.type != INDEX:
            raise TypeError(f"the number of a slot is an i32, got {self.at.type}")
        return (SharedType(t.shape, t.dtype),)


@dataclasses.dataclass(eq=False)
class TransposeShared(Op):
    """A buffer of two axes, seen with its axes swapped."""

    buffer: Value

    mnemonic = "transpose_shared"
    level = "block"

    def infer(self):
        t = shared(self.buffer)
        if len(t.shape) != 2:
            raise TypeError(f"a buffer of two axes can be transposed, got {t}")
        return (SharedType(t.shape[::-1], t.dtype),)


@dataclasses.dataclass(eq=False)
class SliceShared(Op):
    """Part of a buffer: `shape` elements from `starts`, both static."""

    buffer: Value
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    mnemonic = "slice_shared"
    level = "block"

    def infer(self):
        t = shared(self.buffer)
        if not len(self.starts) == len(self.sizes) == len(t.shape):
            raise TypeError(f"a slice of {t} takes {len(t.shape)} starts and sizes")
        if any(s < 0 or n < 1 or s + n > m for s, n, m in zip(self.starts, self.sizes, t.shape, strict=True)):
            raise ValueError(f"the slice of {self.sizes} from {self.starts} leaves {t}")
        return (SharedType(tuple(self.sizes), t.dtype),)


@dataclasses.dataclass(eq=False)
class LoadShared(Op):
    """The tile that a buffer holds."""

    buffer: Value

    mnemonic = "load_shared"
    effect = "io"
    level = "block"

    def infer(self):
        t = shared(self.buffer)
        return (TileType(t.shape, t.dtype),)


@dataclasses.dataclass(eq=False)
class StoreShared(Op):
    """Write a tile to a buffer. Asynchronous copies and products see it after a `fence_shared`, other roles after a
    barrier besides."""

    buffer: Value
    value: Value

    mnemonic = "store_shared"
    effect = "io"
    level = "block"

    def infer(self):
        t = shared(self.buffer)
        if tile(self.value) != TileType(t.shape, t.dtype):
            raise TypeError(f"this buffer holds {TileType(t.shape, t.dtype)}, got {self.value.type}")
        return ()


@dataclasses.dataclass(eq=False)
class FenceShared(Op):
    """Make what this role has stored to shared memory visible to asynchronous copies and products that start later."""

    mnemonic = "fence_shared"
    effect = "io"
    level = "block"

    def infer(self):
        return ()


# -- barriers ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class AllocBarriers(Op):
    """`count` mbarriers. A phase of one ends when `arrivals` arrivals and all bytes that were announced have come;
    phases are counted from 0. Stands outside roles."""

    count: int
    arrivals: int = 1

    mnemonic = "alloc_barriers"
    effect = "io"
    level = "block"

    def infer(self):
        if self.count < 1 or self.arrivals < 1:
            raise ValueError(f"barriers need count >= 1 and arrivals >= 1, got {self.count} and {self.arrivals}")
        return (BarrierType(self.count, self.arrivals),)


@dataclasses.dataclass(eq=False)
class Expect(Op):
    """Arrive once, and announce `bytes` that asynchronous copies are going to bring in this phase."""

    barrier: Value
    at: Value
    bytes: int
    when: Value | None = None

    mnemonic = "expect"
    effect = "io"
    level = "block"

    def infer(self):
        _barrier(self.barrier, self.at)
        predicate(self.when)
        if self.bytes < 0:
            raise ValueError(f"a number of bytes is not negative, got {self.bytes}")
        return ()


@dataclasses.dataclass(eq=False)
class Arrive(Op):
    """`count` arrivals of this role as one (where `when` holds): all that it did before is seen by those who wait."""

    barrier: Value
    at: Value
    count: int = 1
    when: Value | None = None

    mnemonic = "arrive"
    effect = "io"
    level = "block"

    def infer(self):
        b = _barrier(self.barrier, self.at)
        predicate(self.when)
        if not 1 <= self.count <= b.arrivals:
            raise ValueError(f"{b} takes 1 to {b.arrivals} arrivals at once, got {self.count}")
        return ()


@dataclasses.dataclass(eq=False)
class Wait(Op):
    """Wait until the phase of parity `parity` (i32, 0 or 1) has ended: a barrier that has ended no phase counts as one
    that has just ended a phase of parity 1."""

    barrier: Value
    at: Value
    parity: Value
    when: Value | None = None

    mnemonic = "wait"
    effect = "io"
    level = "block"

    def infer(self):
        _barrier(self.barrier, self.at)
        predicate(self.when)
        if self.parity.type != INDEX:
            raise TypeError(f"a parity is an i32, got {self.parity.type}")
        return ()


@dataclasses.dataclass(eq=False)
class RoleBarrier(Op):
    """A barrier for the threads of this role: after it, each sees what any of them stored before it."""

    mnemonic = "role_barrier"
    effect = "io"
    level = "block"

    def infer(self):
        return ()


@dataclasses.dataclass(eq=False)
class KernelsWait(Op):
    """Wait until the kernels in front of this one have ended: what stands behind it in this role, an early one, sees
    their results. `hold`: the kernel behind starts after this. Nothing where launches do not overlap."""

    hold: bool = False

    mnemonic = "kernels_wait"
    effect = "io"
    level = "block"

    def infer(self):
        return ()


# -- asynchronous copies ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class AsyncLoad(Op):
    """Start to copy a tile of a Ref into a buffer that `holds` it, by a tensor map; its bytes, all of the buffer's,
    count on `barrier[at]` when they have come. Lanes outside the array give zeros (`pad=nan`: NaN).

    `evict`: how soon a cache of the device may forget what was read, before other things ("first") or after them
    ("last"); results do not depend on it.
    """

    ref: Value
    index: Index
    buffer: Value
    barrier: Value
    at: Value
    pad: float | int | bool = 0
    checked: bool = True
    when: Value | None = None
    evict: str | None = None

    mnemonic = "async_load"
    effect = "io"
    level = "block"

    def infer(self):
        t, b = access(self.ref, self.index, None), shared(self.buffer)
        _barrier(self.barrier, self.at)
        predicate(self.when)
        if self.evict not in (None, "first", "last"):
            raise ValueError(f"what a copy read is forgotten 'first' or 'last' (None: as usual), got {self.evict!r}")
        if t.dtype != b.dtype or not holds(b.shape, t.shape):
            raise TypeError(f"this copy brings {t}, the buffer is {b}")
        return ()


@dataclasses.dataclass(eq=False)
class Prefetch(Op):
    """Ask a cache of the device for what a copy of a tile of a Ref into this buffer would read. Nothing is written, and
    no result depends on it; lanes outside the array are left out. Where there is no such cache it does nothing."""

    ref: Value
    index: Index
    buffer: Value
    when: Value | None = None
    checked: bool = True

    mnemonic = "prefetch"
    effect = "io"
    level = "block"

    def infer(self):
        t, b = access(self.ref, self.index, None), shared(self.buffer)
        predicate(self.when)
        if t.dtype != b.dtype or not holds(b.shape, t.shape):
            raise TypeError(f"this would bring {t}, the buffer is {b}")
        return ()


@dataclasses.dataclass(eq=False)
class AsyncStore(Op):
    """Start to copy a buffer to a tile of a Ref, or to combine it with what is there (`fn`: add, min, max; atomic for
    each element). Lanes outside the array are not written. Copies of one role are counted for `store_wait`."""

    ref: Value
    index: Index
    buffer: Value
    fn: str = "set"
    checked: bool = True

    mnemonic = "async_store"
    effect = "io"
    level = "block"

    def infer(self):
        t, b = access(self.ref, self.index, None), shared(self.buffer)
        if self.fn not in ("set", "add", "min", "max"):
            raise ValueError(f"an asynchronous store sets, adds, or takes min or max; got {self.fn!r}")
        if t.dtype != b.dtype or not holds(b.shape, t.shape):
            raise TypeError(f"this copy writes {t}, the buffer is {b}")
        return ()


@dataclasses.dataclass(eq=False)
class StoreWait(Op):
    """Wait until at most `pending` of the asynchronous stores of this role have still to read their buffers."""

    pending: int = 0

    mnemonic = "store_wait"
    effect = "io"
    level = "block"

    def infer(self):
        if self.pending < 0:
            raise ValueError(f"a number of copies is not negative, got {self.pending}")
        return ()


# -- roles ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Roles(Op):
    """The warps of a block part: role i is `warps[i]` warps that run `bodies[i]`, with `registers[i]` registers a
    thread (0: what is left). All run at once and meet at the end. The last op of a kernel's body that does anything.

    The first role takes the warps that the kernel started with: 4 or 8. Producers come last. Where `early[i]` is true,
    role i may start before the kernels in front of this one have ended; () if none does.
    """

    names: tuple[str, ...]
    warps: tuple[int, ...]
    registers: tuple[int, ...]
    bodies: tuple[Block, ...]
    early: tuple[bool, ...] = ()

    mnemonic = "roles"
    effect = "io"
    level = "block"

    def infer(self):
        n = len(self.bodies)
        if not n or not n == len(self.names) == len(self.warps) == len(self.registers):
            raise ValueError("every role has a name, a number of warps, a number of registers and a body")
        if len(self.early) not in (0, n):
            raise ValueError("every role is early or not")
        if len(set(self.names)) != n:
            raise ValueError(f"roles have different names, got {', '.join(self.names)}")
        for k, (w, r) in enumerate(zip(self.warps, self.registers, strict=True)):
            if w not in (4, 8) and (w not in (1, 2) or not k):
                raise ValueError(f"a role has 1, 2, 4 or 8 warps, the first 4 or 8; got {w}")
            if r and (r % 8 or not 24 <= r <= 240):
                raise ValueError(f"registers are a multiple of 8 between 24 and 240, or 0; got {r}")
        if any(b.params or b.yields for b in self.bodies):
            raise TypeError("a role takes and yields nothing")
        return ()


def level_of(kernel: Kernel) -> str:
    """`"block"` for a kernel with roles, else `"tile"`."""
    return "block" if Roles in map(type, kernel.body.ops) else "tile"


@dataclasses.dataclass(eq=False)
class Clock(Op):
    """A running counter of this processor's time in nanoseconds, as i64; only its differences mean anything."""

    mnemonic = "clock"
    effect = "io"
    level = "block"

    def infer(self):
        return (TileType((), "int64"),)
