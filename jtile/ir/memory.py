"""Cards that touch Refs, and cards that talk to the outside."""

from __future__ import annotations

import dataclasses
import string

from .core import Index, Kernel, Op, Take, Tile, Value, index_shape, tile
from .types import DTYPES, RefType, TileType


def ref(v: Value) -> RefType:
    """The type of a value that must be a Ref."""
    if not isinstance(v.type, RefType):
        raise TypeError(f"expected a Ref, got {v.type}")
    return v.type


def access(r: Value, index: Index, mask: Value | None) -> TileType:
    """Type of the tile that an access reads or writes; checks index and mask."""
    t = ref(r)
    if len(index) != t.rank:
        raise TypeError(f"a Ref of rank {t.rank} takes {t.rank} indices, got {len(index)}")
    takes = [d.indices for d in index if isinstance(d, Take)]
    for d in index:
        v = d.start if hasattr(d, "start") else d.indices if isinstance(d, Take) else d.index
        if tile(v).info.kind not in "iu" or (tile(v).rank != 0 and not isinstance(d, Take)):
            raise TypeError(f"an index is an integer scalar (or an integer tile for a gather), got {v.type}")
        if isinstance(d, Tile) and (d.size < 0 or d.step < 1):
            raise ValueError(f"a tile view needs size >= 0 and step >= 1, got {d.size} and {d.step}")
    if any(v.shape != takes[0].shape for v in takes):
        raise TypeError(f"gather indices have one shape, got {', '.join(str(v.type) for v in takes)}")
    out = TileType(index_shape(index), t.dtype)
    if mask is not None and tile(mask) != out.with_dtype("bool"):
        raise TypeError(f"the mask of this access is {out.with_dtype('bool')}, got {mask.type}")
    return out


@dataclasses.dataclass(eq=False)
class Load(Op):
    """Read a tile. Lanes outside the array, and masked lanes, give `pad`.

    `checked=False` says that the bounds analysis proved every lane inside (no pad is ever read).
    """

    ref: Value
    index: Index
    mask: Value | None = None
    pad: float | int | bool = 0
    checked: bool = True

    mnemonic = "load"
    effect = "read"

    def infer(self):
        return (access(self.ref, self.index, self.mask),)


@dataclasses.dataclass(eq=False)
class Store(Op):
    """Write a tile. Lanes outside the array, and masked lanes, are not written."""

    ref: Value
    index: Index
    value: Value
    mask: Value | None = None
    checked: bool = True

    mnemonic = "store"
    effect = "write"

    def infer(self):
        t = access(self.ref, self.index, self.mask)
        if tile(self.value) != t:
            raise TypeError(f"this store writes {t}, got {self.value.type}")
        return ()


ATOMICS = ("add", "max", "min", "and", "or", "xor", "xchg", "cas")


@dataclasses.dataclass(eq=False)
class Atomic(Op):
    """Read-modify-write, atomic against other programs, lane after lane in row-major order; gives the old values (lanes
    outside and masked lanes: 0). `cas` stores `value` where the old element equals `compare` bit for bit."""

    fn: str
    ref: Value
    index: Index
    value: Value
    compare: Value | None = None
    mask: Value | None = None

    mnemonic = "atomic"
    effect = "write"

    def infer(self):
        t = access(self.ref, self.index, self.mask)
        if self.fn not in ATOMICS or (self.fn == "cas") != (self.compare is not None):
            raise ValueError(f"unknown atomic {self.fn!r}, or a compare value where none belongs")
        if self.fn in ("and", "or", "xor") and DTYPES[t.dtype].kind == "f":
            raise TypeError(f"atomic {self.fn} is not defined for {t.dtype}")
        if tile(self.value) != t or (self.compare is not None and tile(self.compare) != t):
            raise TypeError(f"this atomic takes {t}, got {self.value.type}")
        return (t,)


MOST_COUNTERS = 1 << 24  # counters of a kernel, at most; ffi/csrc has the same limit


@dataclasses.dataclass(eq=False)
class LastArrival(Op):
    """Arrive at counter `index` of the `size` called `counters`; true in the program that comes last of `count`.

    Counters of one name are one memory of the kernel, all zero at first; the last one sets its counter back to zero.
    What a program did to Refs before it arrived has happened for the last one: the others release, it acquires.
    """

    counters: str
    size: int
    index: Value
    count: Value

    mnemonic = "last_arrival"
    effect = "write"

    def infer(self):
        scalar = TileType((), "int32")
        if tile(self.index) != scalar or tile(self.count) != scalar:
            raise TypeError(f"this takes two {scalar}, got {self.index.type} and {self.count.type}")
        if not isinstance(self.size, int) or isinstance(self.size, bool) or not 1 <= self.size <= MOST_COUNTERS:
            raise ValueError(f"a kernel has 1 to {MOST_COUNTERS} counters, got {self.size}")
        return (TileType((), "bool"),)


@dataclasses.dataclass(eq=False)
class Alloc(Op):
    """A Ref private to this program and to this execution of the op; undefined at first."""

    shape: tuple[int, ...]
    dtype: str

    mnemonic = "alloc"
    effect = "write"
    level = "tile"

    def infer(self):
        return (RefType(self.shape, self.dtype, "scratch"),)


@dataclasses.dataclass(eq=False)
class Print(Op):
    """Print `format` with each `{}` (or `{:spec}`) filled by the next argument; the program id goes in front."""

    format: str
    args: tuple[Value, ...]

    mnemonic = "print"
    effect = "io"

    def infer(self):
        names = [name for _, name, _, _ in string.Formatter().parse(self.format) if name is not None]
        if any(names) or len(names) != len(self.args):
            raise ValueError(f"{self.format!r} needs one {{}} for each of the {len(self.args)} arguments")
        return ()


@dataclasses.dataclass(eq=False)
class Assert(Op):
    """Fail the call with `message` where any lane of `cond` is false."""

    cond: Value
    message: str

    mnemonic = "assert"
    effect = "io"

    def infer(self):
        if tile(self.cond).dtype != "bool":
            raise TypeError(f"assert takes a bool, got {self.cond.type}")
        return ()


def counters_of(kernel: Kernel) -> dict[str, tuple[int, int]]:
    """The counters of a kernel: where those of each name begin, and how many they are; in the order of the text.

    Raises:
      ValueError: one name has two sizes, or they are too many in all.
    """
    out: dict[str, tuple[int, int]] = {}
    total = 0
    for op in kernel.body.walk():
        if not isinstance(op, LastArrival):
            continue
        if op.counters not in out:
            out[op.counters] = total, op.size
            total += op.size
        elif out[op.counters][1] != op.size:
            raise ValueError(
                f"counters {op.counters!r} are {out[op.counters][1]} in one place and {op.size} in another"
            )
    if total > MOST_COUNTERS:
        raise ValueError(f"a kernel has at most {MOST_COUNTERS} counters, got {total}")
    return out
