"""The roles of a program, each in a block of its own: the blocks are a cluster, and reach each other's shared memory.

Roles that make parts of a sum need one multiprocessor each, where the tiles of a product are fewer than these. What
only one role works on lies in its own block, so that rings of different roles take the same place. What one role writes
and another reads lies in the block of the reader: the writer's stores and arrivals go there. The PTX says so: see
`lowering/triton/clusters.py`. The meaning of the kernel stays the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NoReturn

from jtile import ir
from jtile._errors import UnsupportedError

from .alike import Shared
from .emit_roles import roles_of
from .releases import VIEWS, root

_WARPS = 4


def spread(kernel: ir.Kernel, blocks: int) -> tuple[ir.Kernel, Shared]:
    """The kernel with one role, which is that of the block's place in its cluster, and what reaches other blocks.

    Raises:
      UnsupportedError: there are not as many roles as blocks, of four warps each, or one reads what another one fills
        by other ways than stores and arrivals.
    """
    roles = roles_of(kernel)
    alike = set(roles.warps) == {_WARPS} and len(set(roles.early)) < 2 and not any(roles.registers)
    if len(roles.bodies) != blocks or not alike:
        _refuse(kernel, f"{blocks} roles of {_WARPS} warps, alike early and with no registers of their own")
    if kernel.devices or not all(isinstance(n, int) for n in kernel.grid):
        _refuse(kernel, "a grid that is known, and no other devices")
    homes = {v: _home(kernel, v, roles) for v in _allocated(kernel)}
    places = _places(homes)
    env: dict[ir.Value, ir.Value] = {}

    def look(v: ir.Value) -> ir.Value:
        return env.get(v, v)

    ops: list[ir.Op] = []
    for op in kernel.body.ops:
        if op is roles:
            ops += _chosen(kernel, roles, look)
        elif op.results and op.results[0] in places:
            env[op.results[0]] = env[places[op.results[0]]]
        else:
            ops.append(op.clone(look))
            env.update(zip(op.results, ops[-1].results, strict=True))
    found = Shared(blocks, {}, {})
    _mark(ops[-1], {env[v]: home for v, (home, own) in homes.items() if not own}, found)
    return dataclasses.replace(kernel, grid=(*kernel.grid, blocks), body=ir.Block((), ops)), found


def _refuse(kernel: ir.Kernel, what: str) -> NoReturn:
    where = (kernel.loc.file, kernel.loc.line) if kernel.loc.file else None
    raise UnsupportedError(f"kernel {kernel.name}: roles that are spread over a cluster's blocks are {what}", where)


def _allocated(kernel: ir.Kernel) -> list[ir.Value]:
    return [op.result for op in kernel.body.ops if isinstance(op, ir.AllocShared | ir.AllocBarriers)]


def _home(kernel: ir.Kernel, v: ir.Value, roles: ir.Roles) -> tuple[int, bool]:
    """The role in whose block a buffer or barriers lie, and whether no other role works on them."""
    uses = {k: [op for op in b.walk() if any(root(x) is v for x in op.operands())] for k, b in enumerate(roles.bodies)}
    users = [k for k, ops in uses.items() if ops]
    if len(users) < 2:
        return (users or [0])[0], True
    sends = lambda op: isinstance(op, (ir.StoreShared, ir.Arrive, *VIEWS))
    receivers = [k for k in users if not all(map(sends, uses[k]))]
    if len(receivers) != 1 or any(isinstance(op, ir.AsyncLoad) for op in uses[receivers[0]]):
        _refuse(kernel, "such that one of them reads what others store")
    return receivers[0], False


def _places(homes: dict[ir.Value, tuple[int, bool]]) -> dict[ir.Value, ir.Value]:
    """What a role has for itself -> what is alike and of another role, in whose place it is in its own block."""
    places: dict[ir.Value, ir.Value] = {}
    for v, (role, own) in homes.items():
        mine = {places[x] for x in places if homes[x][0] == role}  # where this role has something already
        for other, (home, alone) in homes.items():
            if other is v:
                break
            if own and alone and home != role and other not in places and other not in mine and other.type == v.type:
                places[v] = other
                break
    return places


def _chosen(kernel: ir.Kernel, roles: ir.Roles, look: Callable[[ir.Value], ir.Value]) -> list[ir.Op]:
    """One role that does what the role of the block's place in its cluster does."""
    b = ir.Builder()
    place = b.value(ir.ProgramId(len(kernel.grid)))
    bodies = [ir.copy_block(body, look) for body in roles.bodies]
    rest = bodies[-1]
    for k in reversed(range(len(bodies) - 1)):
        inner = ir.Builder()
        inner.add(ir.If(inner.map("eq", place, inner.index(k)), bodies[k], rest))
        rest = inner.block
    b.add(ir.Roles(("all",), (_WARPS,), (0,), (rest,), roles.early[:1]))
    return b.block.ops


def _mark(merged: ir.Op, shared: dict[ir.Value, int], found: Shared) -> None:
    """Notes which ops of the roles reach other blocks, and which waits are for what others do."""
    block, place = merged.blocks()[0], 0
    while True:
        branch = next((op for op in block.ops if isinstance(op, ir.If)), None) if place < found.blocks - 1 else None
        for op in (branch.then if branch else block).walk():
            where = next((shared[r] for r in map(root, op.operands()) if r in shared), None)
            if where is not None and where != place and isinstance(op, ir.StoreShared | ir.Arrive):
                found.far[op] = where
            if where == place and isinstance(op, ir.Wait):
                found.awaited.add(op)
        if branch is None:
            return
        block, place = branch.orelse, place + 1
