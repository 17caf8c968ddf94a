"""Cards of the device scale: Refs of other devices of a mesh, and signals between devices.

Two kinds of Refs belong to a call on all devices of the axes that the kernel names (`Kernel.devices`): of the role
`symmetric` (memory of any dtype) and of the role `signal` (counters). Each device has its own, of one shape everywhere;
`on` gives that of another device. A kernel at the block level may have signals and name no axis: its programs wait for
each other on one device, of the axis `ALONE`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .core import At, Index, Kernel, Op, Take, Value, tile
from .memory import access, ref
from .types import INDEX, RefType, TileType

SIGNALS = ("add", "set")
ALONE = "one device"  # the axis of a kernel whose programs wait for each other, and for no other device


def device_ref(v: Value) -> RefType:
    """The type of a value that must be a Ref that every device has."""
    t = ref(v)
    if t.role not in ("symmetric", "signal"):
        raise TypeError(f"expected a Ref that every device has (symmetric memory or signals), got {t}")
    return t


def _counter(v: Value, index: Index) -> RefType:
    t = ref(v)
    if t.role != "signal":
        raise TypeError(f"expected a Ref of signals, got {t}")
    if len(index) != t.rank or not all(isinstance(d, At) for d in index):
        raise TypeError(f"one of the signals of {t} is named by {t.rank} numbers")
    if any(tile(d.index).rank or tile(d.index).info.kind not in "iu" for d in index if isinstance(d, At)):
        raise TypeError("a signal is named by integer scalars")
    return t


def _number(v: Value, what: str) -> None:
    if v.type != INDEX:
        raise TypeError(f"{what} is an i32 scalar, got {v.type}")


@dataclasses.dataclass(eq=False)
class AxisIndex(Op):
    """The place of this device along an axis of the mesh."""

    axis: str

    mnemonic = "axis_index"

    def infer(self):
        return (INDEX,)


@dataclasses.dataclass(eq=False)
class On(Op):
    """The same memory on another device: that at place `index` of the axis, and where `ref` is along all others."""

    ref: Value
    axis: str
    index: Value

    mnemonic = "on"

    def infer(self):
        _number(self.index, "the place of a device")
        return (device_ref(self.ref),)


@dataclasses.dataclass(eq=False)
class Signal(Op):
    """Raise a counter, of this device or of another, by `value` ("add"), or to `value` ("set", which never lowers it).

    Releases: what this program did before has happened for whoever waits for this signal.
    """

    fn: str
    ref: Value
    index: Index
    value: Value

    mnemonic = "signal"
    effect = "io"

    def infer(self):
        _counter(self.ref, self.index)
        _number(self.value, "the value of a signal")
        if self.fn not in SIGNALS:
            raise ValueError(f"a signal is one of {', '.join(SIGNALS)}, got {self.fn!r}")
        return ()


@dataclasses.dataclass(eq=False)
class WaitSignal(Op):
    """Wait until a counter of this device is `at_least` so much. All are zero when a call begins. Acquires."""

    ref: Value
    index: Index
    at_least: Value

    mnemonic = "wait_signal"
    effect = "io"

    def infer(self):
        _counter(self.ref, self.index)
        _number(self.at_least, "what a signal is waited for to reach")
        if isinstance(self.ref.op, On):
            raise TypeError("a device waits for its own signals: leave out `on`")
        return ()


POSTED = ("float32", "bfloat16", "float16")  # the dtypes of what is posted


def _posted(r: Value, index: Index, mask: Value | None) -> TileType:
    t = ref(r)
    if t.role != "symmetric":
        raise TypeError(f"what is posted goes to symmetric memory, got {t}")
    if t.dtype not in POSTED:
        raise TypeError(f"what is posted is one of {', '.join(POSTED)}, got {t}")
    if any(isinstance(d, Take) for d in index):
        raise TypeError("what is posted is a tile or a part of an array: it has no gathered index")
    return access(r, index, mask)


@dataclasses.dataclass(eq=False)
class Post(Op):
    """Write a tile to symmetric memory of this device or of another, for the programs that receive it there: each
    element at most once a call. Lanes outside of the array, and masked lanes, are not written. It orders nothing else
    of this call. A NaN stays one, its other bits do not.
    """

    ref: Value
    index: Index
    value: Value
    mask: Value | None = None

    mnemonic = "post"
    effect = "io"
    level = "block"

    def infer(self):
        t = _posted(self.ref, self.index, self.mask)
        if tile(self.value) != t:
            raise TypeError(f"this posts {t}, got {self.value.type}")
        return ()


@dataclasses.dataclass(eq=False)
class Receive(Op):
    """Wait until every element of a tile has been posted in this call, and read it. Lanes outside of the array, and
    masked lanes, are not waited for and give 0. It orders nothing else of this call: what their posts had done before
    in it may not be seen yet. What their devices did in calls before has happened.
    """

    ref: Value
    index: Index
    mask: Value | None = None

    mnemonic = "receive"
    effect = "io"
    level = "block"

    def infer(self):
        return (_posted(self.ref, self.index, self.mask),)


@dataclasses.dataclass(eq=False)
class AxisBarrier(Op):
    """Wait until this program has come here on every device of an axis (those that differ along it only): once for
    each time. Releases and acquires."""

    axis: str

    mnemonic = "axis_barrier"
    effect = "io"

    def infer(self):
        return ()


TALKING = (AxisIndex, On, AxisBarrier)  # the cards that name an axis
POSTS = (Post, Receive)  # the cards that hand over elements, each for itself
WAITING = (WaitSignal, AxisBarrier, Receive)
MEETING = (Signal, Post, *WAITING)  # the cards by which programs meet


def alone(kernel: Kernel) -> bool:
    """Whether programs of a kernel wait for each other on one device, and for no other."""
    return kernel.devices == ((ALONE, 1),)


def waits(kernel: Kernel) -> bool:
    """Whether programs of a kernel wait for others, so that all of them have to run at once."""
    return any(isinstance(op, WAITING) for op in kernel.body.walk())


def posts(kernel: Kernel) -> bool:
    """Whether programs of a kernel hand over elements one by one."""
    return any(isinstance(op, Post) for op in kernel.body.walk())


def root(v: Value, roots: Mapping[Value, Value] | None = None) -> Value:
    """The Ref that stands for the memory of another: on every device, its own; `roots` says which share a buffer."""
    while isinstance(v.op, On):
        v = v.op.ref
    return v if roots is None else roots.get(v, v)
