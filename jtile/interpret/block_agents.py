"""What runs beside the roles of a block: asynchronous copies and products, each of which takes effect at some moment
between its start and the wait that covers it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from jtile._errors import ProtocolError
from jtile.ir import AsyncLoad, AsyncStore, DotAsync, Op, Take
from jtile.ir.block import nbytes
from jtile.ir.shapes import full_array
from jtile.ir.types import DTYPES

from .block_memory import Access, Barrier, View, place
from .effects import update
from .memory import Buffer, Handle, Lanes

if TYPE_CHECKING:
    from .block import Crew, Role


@dataclasses.dataclass(eq=False)
class CopyIn:
    """An `async_load` under way. `before`: what its role knew when it started."""

    op: AsyncLoad
    role: Role
    view: View
    barrier: Barrier
    access: Access
    buffer: Buffer
    lanes: Lanes
    before: np.ndarray

    def act(self, crew: Crew) -> None:
        """Read the array, fill the buffer, count the bytes."""
        op, barrier = self.op, self.barrier
        crew.agents.remove(self)
        crew.actor = (barrier.line, barrier.phase + 1, self.before)
        crew.machine.touch(op, self.buffer, self.lanes, "read")
        out = full_array(op.pad, self.lanes.active.shape, op.buffer.dtype)
        out[self.lanes.active] = self.buffer.data[self.lanes.elements]
        self.view.data[...] = out.reshape(self.view.data.shape)
        self.view.defined[...] = True
        crew.landed(self)
        barrier.receive(nbytes(op.buffer.type), self.access)
        crew.account(op, barrier)


@dataclasses.dataclass(eq=False)
class CopyOut:
    """An `async_store` under way: number `number` (from 1) of its role. First it reads the buffer, then it writes."""

    op: AsyncStore
    role: Role
    number: int
    view: View
    buffer: Buffer
    lanes: Lanes
    before: np.ndarray
    data: np.ndarray | None = None

    def read(self) -> None:
        if self.data is None:
            self.data = self.view.data.reshape(-1).copy()
            self.role.stores.remove(self)

    def act(self, crew: Crew) -> None:
        if self.data is None:
            self.read()
            return
        crew.agents.remove(self)
        crew.actor = (crew.never, 1, self.before)
        kind = "write" if self.op.fn == "set" else "atomic"
        crew.machine.touch(self.op, self.buffer, self.lanes, kind)
        if self.op.fn == "set":
            self.buffer.data[self.lanes.elements] = self.data[self.lanes.active]
            self.buffer.defined[self.lanes.elements] = True
            return
        if any(isinstance(d, Take) for d in self.op.index):  # an element may be named twice: update one after the other
            for lane in np.flatnonzero(self.lanes.active).tolist():
                at = self.lanes.at[lane]
                update(self.buffer, self.op.fn, slice(at, at + 1), self.data[lane : lane + 1])
        else:
            update(self.buffer, self.op.fn, self.lanes.elements, self.data[self.lanes.active])


@dataclasses.dataclass(eq=False)
class Product(Handle):
    """The result of a `dot_async`: number `number` (from 1) of its role; `value` once it has taken effect.

    `taken`: the product that sums into the same registers, which hold this result no more.
    """

    op: DotAsync
    role: Role
    number: int
    a: np.ndarray | View | None
    b: View | None
    acc: np.ndarray | Product | None
    places: np.ndarray | None = None
    value: np.ndarray | None = None
    taken: Op | None = None

    def act(self, crew: Crew) -> None:
        """Read the operands; products of a role do so in order."""
        assert self.role.products[0] is self
        assert self.b is not None
        self.role.products.popleft()
        a = self.a.data if isinstance(self.a, View) else self.a
        a = a if self.places is None else _with_zeros(a, self.places)
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc
        out = DTYPES[self.op.result.dtype].numpy
        wide = np.float64 if out.kind == "f" else np.int64
        with np.errstate(all="ignore"):
            r = np.matmul(a.astype(wide), self.b.data.astype(wide))  # computed as by the card of `dot`
            total = np.zeros(self.op.result.shape, wide) if acc is None else acc.astype(wide)
            total[:, : r.shape[1]] += r
            self.value = total.astype(out)
        self.a = self.b = self.acc = None

    def after_wait(self, crew: Crew, op: Op) -> np.ndarray | Product:
        """What a wait gives for this product: its value, or the product itself while it still runs."""
        if self.taken is not None:
            why = (
                f"the result of dot_async ({place(self.op)}) is gone: dot_async ({place(self.taken)}) adds to the same "
            )
            raise crew.machine.error(ProtocolError, op, why + "registers; use its result")
        return self if self.value is None or self.number > self.role.ended else self.value


def places_of(codes: np.ndarray) -> np.ndarray:
    """The places [m, groups, 2] of kept numbers in their groups of four, from codes [m, groups / 2]."""
    bits = codes[..., None] >> np.arange(0, 8, 2, dtype=np.uint8) & np.uint8(3)
    return bits.reshape(len(codes), -1, 2)


def _with_zeros(a: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """The matrix [m, k] of which two of every four numbers are in a [m, k / 2]."""
    places = places_of(codes).astype(np.intp)
    out = np.zeros((*places.shape[:2], 4), a.dtype)
    np.put_along_axis(out, places, a.reshape(places.shape), 2)
    return out.reshape(len(a), -1)
