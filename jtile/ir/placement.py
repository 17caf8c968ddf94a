"""Where ops and values of the block level may stand: memory as operands, allocations, roles; what a block takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NoReturn

from jtile._errors import VerificationError

from .block import (
    AllocBarriers,
    AllocShared,
    Arrive,
    AsyncLoad,
    AsyncStore,
    Expect,
    FenceShared,
    KernelsWait,
    LoadShared,
    Prefetch,
    RoleBarrier,
    Roles,
    StoreShared,
    StoreWait,
    Wait,
    nbytes,
)
from .block_products import DotAsync, DotWait
from .core import Block, Kernel, Op, Take, Value
from .devices import MEETING, On, root
from .memory import Atomic, LastArrival, Load, Store
from .printer import print_op
from .reductions import UserReduce, UserScan
from .types import DTYPES, BarrierType, RefType, SharedType

REGISTERS = 65536  # registers of a multiprocessor
WARPS = 32  # warps of a block, at most
SLOTS = 4096  # barriers of a block, and buffers of a ring: more than 227 KiB have room for buffers of 64 bytes
IN_ROLES = (
    LoadShared,
    StoreShared,
    FenceShared,
    Expect,
    Arrive,
    Wait,
    KernelsWait,
    RoleBarrier,
    AsyncLoad,
    AsyncStore,
    Prefetch,
    StoreWait,
    DotAsync,
    DotWait,
)
# The fields that take memory, per type; everything else takes tiles.
_FIELDS = {RefType: ("ref",), SharedType: ("buffer", "a", "b"), BarrierType: ("barrier",)}
_WHAT = {RefType: "a Ref", SharedType: "a buffer", BarrierType: "a barrier"}


def refuse(kernel: Kernel, op: Op | None, message: str, role: str = "") -> NoReturn:
    """Raise the VerificationError that names kernel, role, op and source line."""
    loc = op.loc if op is not None else kernel.loc
    shown = f"\n  in {print_op(op).splitlines()[0]}" if op is not None else ""
    who = f"kernel {kernel.name}" + (f", role {role}" if role else "")
    raise VerificationError(f"{who}: {message}{shown}", (loc.file, loc.line) if loc.file else None)


def check_memory(kernel: Kernel, op: Op) -> None:
    """Check that Refs, buffers and barriers are used only by the ops that access them."""
    for name, kind in op.fields.items():
        v = getattr(op, name)
        values = v if kind == "operands" else (v,) if kind in ("operand", "optional") and v is not None else ()
        for x in values:
            if name not in _FIELDS.get(type(x.type), (name,)):
                refuse(kernel, op, f"{_WHAT[type(x.type)]} is memory, not a value: {x!r}")
    if isinstance(op, UserReduce | UserScan) and any(x.level == "block" for x in op.body.walk()):
        refuse(kernel, op, "a combiner computes on scalars: memory and barriers of the block have no place in it")


def check_copy(kernel: Kernel, op: AsyncLoad | AsyncStore | Prefetch) -> None:
    """Refuse what a tensor map cannot say, whatever the target: gathers, pads other than 0 and NaN."""
    if any(isinstance(d, Take) for d in op.index):
        refuse(kernel, op, "an asynchronous copy takes rectangles, not gathered rows: use load and store_shared")
    if isinstance(op, AsyncLoad | Prefetch) and isinstance(op.ref.op, On):
        refuse(kernel, op, "an asynchronous copy comes from this device's own memory: let the other device send it")
    if isinstance(op, AsyncLoad):
        nan = isinstance(op.pad, float) and math.isnan(op.pad)
        if not nan and op.pad != 0:
            refuse(kernel, op, f"an asynchronous copy pads with 0 or nan, got {op.pad!r}: mask what was loaded")
        if nan and DTYPES[op.ref.dtype].kind != "f":
            refuse(kernel, op, f"the pad nan is no {op.ref.dtype}")


def check_roles(kernel: Kernel) -> None:
    """Check that a block-level kernel allocates, then hands over to roles: once, at the end, within the registers."""
    ops = kernel.body.ops
    found = [op for op in kernel.body.walk() if isinstance(op, Roles)]
    if len(found) != 1 or not ops or found[0] is not ops[-1]:
        last = found[-1] if found else None
        if last is not None and len(found) > 1:
            refuse(kernel, last, f"a kernel has its roles once, here are {len(found)}: put the bodies into one")
        why = "a block-level kernel ends in its roles, and nothing comes after them or around them"
        refuse(kernel, last, f"{why}: {'move this to the end' if last else 'there are none'}")
    _check_outside(kernel, Block((), ops[:-1]), True)
    for name, body in zip(found[0].names, found[0].bodies, strict=True):
        for op in body.walk():
            if isinstance(op, AllocShared | AllocBarriers):
                refuse(kernel, op, "memory of the block is allocated before the roles, for all of them", name)
    _check_slots(kernel)
    _check_warps(kernel, found[0])
    _check_registers(kernel, found[0])
    _check_early(kernel, found[0])


def _check_outside(kernel: Kernel, block: Block, top: bool) -> None:
    for op in block.ops:
        if isinstance(op, IN_ROLES):
            refuse(kernel, op, f"{op.mnemonic} stands in a role: only allocations and arithmetic come before")
        if isinstance(op, AllocShared | AllocBarriers) and not top:
            refuse(kernel, op, "memory of the block is allocated once, not in a loop or a branch")
        for b in op.blocks():
            _check_outside(kernel, b, False)


def _check_slots(kernel: Kernel) -> None:
    """Check the number of barriers and buffers, which is bounded: the interpreter's clocks have a line for each."""
    barriers = 0
    for op in kernel.body.ops:
        barriers += op.count if isinstance(op, AllocBarriers) else 0
        if barriers > SLOTS:
            refuse(kernel, op, f"{barriers} barriers, at most {SLOTS} are possible: give one to each slot of a ring")
        if isinstance(op, AllocShared) and (op.slots or 1) > SLOTS:
            refuse(kernel, op, f"a ring of {op.slots} slots, at most {SLOTS} are possible: take them in turns, A.at(k)")


def _check_warps(kernel: Kernel, op: Roles) -> None:
    """Check that a block has no more than 32 warps, in whole warpgroups."""
    total = op.warps[0] + -(-sum(op.warps[1:]) // 4) * 4
    if total > WARPS:
        parts = " + ".join(map(str, op.warps))
        refuse(
            kernel, op, f"the roles have {parts} = {sum(op.warps)} warps, a block has {WARPS}: give some of them fewer"
        )


def _check_registers(kernel: Kernel, op: Roles) -> None:
    """Check the registers of roles, which are given to whole warpgroups: a role of one warp counts as four."""
    threads = [-(-w // 4) * 128 for w in op.warps]
    given = sum(n * r for n, r in zip(threads, op.registers, strict=True))
    rest = sum(n for n, r in zip(threads, op.registers, strict=True) if not r)
    if given + 24 * rest > REGISTERS:
        parts = " + ".join(f"{n} x {r or 24}" for n, r in zip(threads, op.registers, strict=True))
        least = ", with 24 at least for roles that take what is left" if rest else ""
        refuse(
            kernel,
            op,
            f"the roles take {parts} = {given + 24 * rest} registers (threads of whole warpgroups{least}), a "
            f"multiprocessor has {REGISTERS}: give some of them fewer",
        )


def _check_early(kernel: Kernel, op: Roles) -> None:
    """Check early roles: kernels in front may still read what such a role would write, and write what it would read."""
    if not any(op.early):
        return
    waits = [any(isinstance(inner, KernelsWait) for inner in body.ops) for body in op.bodies]
    if all(early and not wait for early, wait in zip(op.early, waits, strict=True)):
        why = "one has to wait for the kernels in front, so that this one ends last"
        refuse(kernel, op, f"all roles are early: {why}; call jt.wait_for_kernels() in one, in no loop or branch of it")
    for name, body, early in zip(op.names, op.bodies, op.early, strict=True):
        ends = [k for k, inner in enumerate(body.ops) if isinstance(inner, KernelsWait)]
        before = Block((), body.ops[: ends[0]] if ends else body.ops)
        for inner in before.walk() if early else ():
            if isinstance(inner, Store | Atomic | AsyncStore | LastArrival):
                why = "writes memory while kernels in front of this one still run: leave that to a role that waits"
                refuse(kernel, inner, f"{inner.mnemonic} in an early role {why}", name)
            if isinstance(inner, (On, *MEETING)) or (
                isinstance(inner, Load | AsyncLoad | Prefetch) and root(inner.ref).type.role == "symmetric"
            ):
                why = "meets other devices before it is known which call this is: call jt.wait_for_kernels() first"
                refuse(kernel, inner, f"{inner.mnemonic} in an early role {why}", name)
    for outside in Block((), kernel.body.ops[:-1]).walk():
        if isinstance(outside, Load):
            refuse(kernel, outside, "a load before the roles is each role's own, and early ones would not wait for it")


def named(v: Value) -> str:
    """The name of a barrier or a buffer in messages."""
    return f"%{v.name}" if v.name else "what has no name"


def blocks_of(b: Block) -> Iterator[Block]:
    """A block and all regions inside it."""
    yield b
    for op in b.ops:
        for inner in op.blocks():
            yield from blocks_of(inner)


def roles_of(kernel: Kernel) -> Roles:
    """The roles of a verified block-level kernel."""
    (op,) = (op for op in kernel.body.ops if isinstance(op, Roles))
    return op


def shared_bytes(kernel: Kernel) -> int:
    """Bytes of shared memory that a block-level kernel allocates, 8 for each barrier; without padding between them and
    without what a back end needs besides (conversions between layouts)."""
    allocs = [op for op in kernel.body.walk() if isinstance(op, AllocShared)]
    barriers = [op for op in kernel.body.walk() if isinstance(op, AllocBarriers)]
    total = sum((op.slots or 1) * nbytes(op.result.type) for op in allocs)  # type: ignore[arg-type]
    return total + 8 * sum(op.count for op in barriers)
