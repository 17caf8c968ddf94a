"""How the interpreter runs loads, stores, atomics, print, assert, program ids and value gathers."""

from __future__ import annotations

import numpy as np

from jtile._errors import OutOfBoundsError
from jtile.ir import Alloc, Assert, Atomic, Gather, LastArrival, Load, NumPrograms, Print, ProgramId, Store
from jtile.ir.elementwise import ELEMENTWISE, compute
from jtile.ir.shapes import full_array

from .machine import Machine, rule
from .memory import Buffer, poison


@rule(Load)
def _load(m: Machine, op: Load):
    buffer, lanes = m.lanes(op)
    m.touch(op, buffer, lanes, "read")
    out = full_array(op.pad, lanes.active.shape, op.result.dtype)
    out[lanes.active] = buffer.data[lanes.elements]
    return out.reshape(lanes.shape)


@rule(Store)
def _store(m: Machine, op: Store):
    buffer, lanes = m.lanes(op)
    m.touch(op, buffer, lanes, "write")
    # An element named twice keeps the last lane's value, as row-major order says.
    buffer.data[lanes.elements] = m.env[op.value].reshape(-1)[lanes.active]
    buffer.defined[lanes.elements] = True
    return ()


@rule(Atomic)
def _atomic(m: Machine, op: Atomic):
    buffer, lanes = m.lanes(op)
    m.touch(op, buffer, lanes, "atomic")
    new = m.env[op.value].reshape(-1)
    compare = None if op.compare is None else m.env[op.compare].reshape(-1)
    out = np.zeros(lanes.active.shape, buffer.data.dtype)
    if compare is None and np.unique(lanes.elements).size == lanes.elements.size:  # no lane sees what another did
        out[lanes.active] = buffer.data[lanes.elements]
        if op.fn == "xchg":
            buffer.data[lanes.elements] = new[lanes.active]
        else:
            update(buffer, op.fn, lanes.elements, new[lanes.active])
        return out.reshape(lanes.shape)
    for lane in np.flatnonzero(lanes.active).tolist():
        at = lanes.at[lane]
        old = out[lane] = buffer.data[at]
        if op.fn == "xchg":
            buffer.data[at] = new[lane]
        elif compare is not None:
            if old.tobytes() == compare[lane].tobytes():
                buffer.data[at] = new[lane]
        else:
            update(buffer, op.fn, slice(at, at + 1), new[lane : lane + 1])
    return out.reshape(lanes.shape)


def update(buffer: Buffer, fn: str, at: np.ndarray | slice, new: np.ndarray) -> None:
    """Combine elements, each of which `at` names once, with new ones by an elementwise function."""
    buffer.data[at] = compute(ELEMENTWISE[fn], [buffer.data[at], new])


@rule(LastArrival)
def _last_arrival(m: Machine, op: LastArrival):
    if m.part is not None:
        return np.asarray(m.part.world.arrive(m.part, op))
    assert m.arrivals is not None
    return np.asarray(m.arrivals.arrive(op))


@rule(Alloc)
def _alloc(m: Machine, op: Alloc):
    return (Buffer(poison(op.shape, op.dtype), defined=False),)


@rule(ProgramId)
def _program_id(m: Machine, op: ProgramId):
    return np.asarray(m.pid[op.axis] if op.axis < len(m.pid) else 0, np.int32)


@rule(NumPrograms)
def _num_programs(m: Machine, op: NumPrograms):
    return np.asarray(m.kernel.grid[op.axis] if op.axis < len(m.kernel.grid) else 1, np.int32)


@rule(Print)
def _print(m: Machine, op: Print):
    if m.silent:
        return ()
    pid = _three_at_least(m.pid, m.kernel.lanes)
    device = f"{m.where.partition(', call')[0]} " if m.where else ""
    who = f"[{m.kernel.name} {device}{m.kernel.program_text(pid)}] "
    print(who + op.format.format(*(_Shown(m.env[v]) for v in op.args)))
    return ()


def _three_at_least(pid: tuple[int, ...], lanes: int) -> tuple[int, ...]:
    """A program id as it is printed, the same on all platforms: at least three axes, besides those of vmap."""
    return (*pid, *[0] * (3 + lanes - len(pid)))


class _Shown:
    """A tile in a format string: a specification (`{:.3f}`) applies to every element."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self.array)
        return np.array2string(self.array, formatter={"all": lambda x: format(x.item(), spec)})


@rule(Assert)
def _assert(m: Machine, op: Assert):
    if not m.env[op.cond].all():
        raise m.failed(op)
    return ()


@rule(Gather)
def _gather(m: Machine, op: Gather):
    x, indices = m.env[op.x], m.env[op.indices]
    n = x.shape[op.axis]
    # NumPy compares without a cast here, since an unsigned index past the end of int64 must not wrap.
    bad = (indices < 0) | (indices >= n)
    if bad.any():
        if m.check:
            first = indices.reshape(-1)[np.argmax(bad)]
            why = f"gather out of bounds: index {first} into axis {op.axis} of {n} elements"
            raise m.error(OutOfBoundsError, op, why)
        if n == 0:
            return poison(indices.shape, op.result.dtype)
        indices = np.clip(indices, 0, n - 1)
    return op.reference(x, indices)
