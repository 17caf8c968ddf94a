"""How the interpreter runs the cards of the block level."""

from __future__ import annotations

import numpy as np

from jtile._errors import OutOfBoundsError, ProtocolError
from jtile.ir import (
    AllocBarriers,
    AllocShared,
    Arrive,
    AsyncLoad,
    AsyncStore,
    Clock,
    DotAsync,
    DotWait,
    Expect,
    FenceShared,
    KernelsWait,
    LoadShared,
    Prefetch,
    RoleBarrier,
    SliceShared,
    Slot,
    StoreShared,
    StoreWait,
    TransposeShared,
    Wait,
)

from .block import Crew
from .block_agents import CopyIn, CopyOut, Product, places_of
from .block_memory import UNDER_WAY, Access, Barriers, Ring, View, place
from .machine import Machine, rule


def _crew(m: Machine) -> Crew:
    if m.crew is None:
        raise ValueError("this op stands inside a role")
    return m.crew


def _view(m: Machine, v) -> View:
    x = m.env[v]
    return x.views[0] if isinstance(x, Ring) else x


# -- memory -----------------------------------------------------------------------------------------------------------


@rule(AllocShared)
def _alloc_shared(m: Machine, op: AllocShared):
    return (Ring(op.result),)


@rule(Slot)
def _slot(m: Machine, op: Slot):
    ring, at = m.env[op.buffer], int(m.env[op.at])
    if not 0 <= at < len(ring.views):
        name = ring.value.name or "buffer"
        raise m.error(OutOfBoundsError, op, f"there is no slot {name}[{at}]: {name} has {len(ring.views)}")
    return (ring.views[at],)


@rule(TransposeShared)
def _transpose_shared(m: Machine, op: TransposeShared):
    return (_view(m, op.buffer).transposed(),)


@rule(SliceShared)
def _slice_shared(m: Machine, op: SliceShared):
    return (_view(m, op.buffer).part(op.starts, op.sizes),)


@rule(LoadShared)
def _load_shared(m: Machine, op: LoadShared):
    crew, view = _crew(m), _view(m, op.buffer)
    role = crew.role
    access = Access(role.number, int(role.clock[role.number]), view.box, op, role.name)
    crew.use(op, view, access, writes=False)
    crew.filled(op, view)
    return view.data.copy()


@rule(StoreShared)
def _store_shared(m: Machine, op: StoreShared):
    crew, view = _crew(m), _view(m, op.buffer)
    role = crew.role
    fence = len(crew.roles) + role.number
    access = Access(role.number, int(role.clock[role.number]), view.box, op, role.name, fence)
    crew.use(op, view, access, writes=True)
    view.data[...] = m.env[op.value]
    view.defined[...] = True
    return ()


@rule(FenceShared)
def _fence_shared(m: Machine, op: FenceShared):
    crew = _crew(m)
    role = crew.role
    role.clock[len(crew.roles) + role.number] = role.clock[role.number]
    role.advance()
    return ()


# -- barriers ---------------------------------------------------------------------------------------------------------


@rule(AllocBarriers)
def _alloc_barriers(m: Machine, op: AllocBarriers):
    return (Barriers(op.result, op.count, op.arrivals),)


@rule(Expect)
def _expect(m: Machine, op: Expect):
    crew = _crew(m)
    if crew.holds(op):
        barrier = crew.barrier(op)
        barrier.bytes += op.bytes
        crew.arrive(op, barrier, 1)
    return ()


@rule(Arrive)
def _arrive(m: Machine, op: Arrive):
    crew = _crew(m)
    if crew.holds(op):
        crew.arrive(op, crew.barrier(op), op.count)
    return ()


@rule(Wait)
def _wait(m: Machine, op: Wait):
    crew = _crew(m)
    if crew.holds(op):  # the role has stood at the wait until the phase ended
        np.maximum(crew.role.clock, crew.barrier(op).released, out=crew.role.clock)
    return ()


@rule(RoleBarrier)
def _role_barrier(m: Machine, op: RoleBarrier):
    return ()  # the interpreter runs a role as one thread, so there is nobody to meet


@rule(KernelsWait)
def _kernels_wait(m: Machine, op: KernelsWait):
    return ()  # the interpreter runs kernels one after the other, so there is nothing to wait for


# -- copies -----------------------------------------------------------------------------------------------------------


@rule(AsyncLoad)
def _async_load(m: Machine, op: AsyncLoad):
    crew = _crew(m)
    if not crew.holds(op):
        return ()
    role, view, barrier = crew.role, _view(m, op.buffer), crew.barrier(op)
    buffer, lanes = m.lanes(op)
    access = Access(barrier.line, UNDER_WAY, view.box, op, role.name)
    crew.use(op, view, access, writes=True, asynchronous=True)
    crew.agents.append(CopyIn(op, role, view, barrier, access, buffer, lanes, role.advance()))
    return ()


@rule(Prefetch)
def _prefetch(m: Machine, op: Prefetch):
    return ()


@rule(AsyncStore)
def _async_store(m: Machine, op: AsyncStore):
    crew, view = _crew(m), _view(m, op.buffer)
    role = crew.role
    buffer, lanes = m.lanes(op)
    role.sent += 1
    access = Access(3 * len(crew.roles) + role.number, role.sent, view.box, op, role.name)
    crew.use(op, view, access, writes=False, asynchronous=True)
    crew.filled(op, view)
    copy = CopyOut(op, role, role.sent, view, buffer, lanes, role.advance())
    role.stores.append(copy)
    crew.agents.append(copy)
    return ()


@rule(StoreWait)
def _store_wait(m: Machine, op: StoreWait):
    crew = _crew(m)
    role, line = crew.role, 3 * len(crew.roles) + crew.role.number
    read = role.sent - op.pending
    for copy in [c for c in role.stores if c.number <= read]:
        copy.read()
    role.clock[line] = max(role.clock[line], read)
    return ()


# -- products ---------------------------------------------------------------------------------------------------------


@rule(DotAsync)
def _dot_async(m: Machine, op: DotAsync):
    crew = _crew(m)
    role, line = crew.role, 2 * len(crew.roles) + crew.role.number
    role.started += 1
    a, b, acc = m.env[op.a], _view(m, op.b), None if op.acc is None else m.env[op.acc]
    a = a.views[0] if isinstance(a, Ring) else a
    if isinstance(a, Product):
        raise m.error(ProtocolError, op, f"an operand is the result of dot_async ({place(a.op)}), not waited for")
    for view in (a, b):
        if isinstance(view, View):
            access = Access(line, role.started, view.box, op, role.name)
            crew.use(op, view, access, writes=False, asynchronous=True)
            crew.filled(op, view)
    if isinstance(acc, Product):
        if acc.taken is not None:
            raise m.error(ProtocolError, op, f"dot_async ({place(acc.taken)}) adds to this accumulator already")
        acc.taken = op
    if op.keep is not None and not m.env[op.keep]:
        acc = None
    places = None if op.places is None else m.env[op.places]
    if places is not None and not (np.diff(places_of(places)) > 0).all():
        raise m.error(
            ProtocolError, op, "the two places of a group of four do not ascend, which has no defined product"
        )
    product = Product(op, role, role.started, a, b, acc, places)
    role.products.append(product)
    return (product,)


@rule(DotWait)
def _dot_wait(m: Machine, op: DotWait):
    crew = _crew(m)
    role, line = crew.role, 2 * len(crew.roles) + crew.role.number
    role.ended = max(role.ended, role.started - op.pending)
    while role.products and role.products[0].number <= role.ended:
        role.products[0].act(crew)
    role.clock[line] = role.ended
    values = [m.env[v] for v in op.values]
    return [x.after_wait(crew, op) if isinstance(x, Product) else x for x in values]


@rule(Clock)
def _clock(m: Machine, op: Clock):
    return np.asarray(_crew(m).ticks, np.int64)
