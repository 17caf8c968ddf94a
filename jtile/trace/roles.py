"""From equations between markers to the regions of a `Roles` op: what `with jt.role(...)` becomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from jtile import ir
from jtile._errors import JtileError, KernelSyntaxError, KernelTypeError
from jtile.ir.builder import Builder

Place = tuple[str, int] | None


@dataclasses.dataclass(frozen=True)
class Role:
    """One role, as the marker at its beginning describes it."""

    name: str
    warps: int
    registers: int
    early: bool
    block: ir.Block
    loc: ir.Loc


class RoleBuilder:
    """Collects the roles of one kernel while its equations are walked.

    Attributes:
      roles: the finished ones.
    """

    def __init__(self, b: Builder):
        self._b, self._body = b, b.block
        self._open: Role | None = None
        self._owner: dict[ir.Value, str] = {}  # value that is defined in a finished role -> the name of the role
        self.roles: list[Role] = []

    def begin(self, name: str, warps: int, registers: int, early: bool = False) -> None:
        if self._b.block is not self._body:
            raise _error(
                f"role {name!r} stands in a loop or branch; roles stand in the body of the kernel itself, and loops "
                "and branches in them",
                self._b.loc,
                KernelSyntaxError,
            )
        self._open = Role(name, warps, registers, early, ir.Block(), self._b.loc)
        self._b.block = self._open.block

    def end(self) -> None:
        role = self._open
        assert role is not None, "markers of roles are balanced"
        self._owner |= {v: role.name for op in role.block.ops for v in op.results}
        self.roles.append(role)
        self._open, self._b.block = None, self._body

    def check(self, values: Iterable[object], loc: ir.Loc) -> None:
        """Raise an error for a value that a finished role defines: roles share memory only."""
        if not self._owner:
            return
        for v in values:
            owner = self._owner.get(v) if isinstance(v, ir.Value) else None
            if owner is not None:
                here = f"role {self._open.name!r}" if self._open else "code outside of roles"
                raise _error(
                    f"{here} uses a value of role {owner!r}; roles share buffers and barriers only: compute it in each "
                    "of them, before the roles if it is a scalar, or hand it over in shared memory",
                    loc,
                    KernelSyntaxError,
                )

    def finish(self) -> None:
        """Append the `Roles` op; nothing happens in a kernel at tile level."""
        ops = [op for block in (self._body, *[r.block for r in self.roles]) for op in block.walk()]
        if not self.roles:
            made = next((op for op in ops if op.level == "block"), None)
            if made is not None:
                what = _NAMES.get(made.mnemonic, made.mnemonic)
                raise _error(
                    f"{what} belongs to a kernel with roles, and this one has none: put what the warps do under "
                    "`with jt.role(name, warps=4):`",
                    made.loc,
                    KernelSyntaxError,
                )
            return
        for r in self.roles:
            _check_role(r)
        bodies = _sunk(self._body, [r.block for r in self.roles])
        _check_outside(self._body)
        fields = zip(*[(r.name, r.warps, r.registers) for r in self.roles], strict=True)
        with self._b.at(self.roles[0].loc):
            early = tuple(r.early for r in self.roles)
            self._b.add(ir.Roles(*fields, tuple(bodies), early if any(early) else ()))


def _error(message: str, loc: ir.Loc, kind: Callable[..., JtileError]) -> JtileError:
    return kind(message, (loc.file, loc.line) if loc.file else None)


_INSTEAD = {
    "dot": "jt.dot_async with b in shared memory, and jt.dot_wait",
    "dot_scaled": "jt.dot_async on the elements, and the scales multiplied in",
    "alloc": "jt.alloc outside of roles",
}


_NAMES = {"alloc_shared": "jt.alloc with slots", "alloc_barriers": "jt.barrier"}


def _check_role(role: Role) -> None:
    for op in role.block.walk():
        if op.level == "tile":
            instead = _INSTEAD.get(op.mnemonic, "the ops of the block level")
            what = f"jt.{op.mnemonic}" if op.mnemonic != "alloc" else "memory made"
            raise _error(
                f"{what} in role {role.name!r} is only for kernels without roles: write {instead}",
                op.loc,
                KernelTypeError,
            )


_ALLOCATIONS = (ir.AllocShared, ir.AllocBarriers)


def _pure(op: ir.Op) -> bool:
    return op.effect == "none" and all(_pure(k) for b in op.blocks() for k in b.ops)


def _scalar(v: ir.Value) -> bool:
    return isinstance(v.type, ir.TileType) and not v.type.rank


def _check_outside(body: ir.Block) -> None:
    """Check that only allocations and arithmetic of scalars stand outside of roles."""
    for op in body.ops:
        if isinstance(op, _ALLOCATIONS) or (_pure(op) and all(map(_scalar, op.results))):
            continue
        what = f"{op.mnemonic} (it makes {op.results[0].type})" if op.results else op.mnemonic
        raise _error(
            f"{what} stands outside of roles, where only jt.alloc, jt.barrier and arithmetic of scalars stand: put it "
            "into the role that needs it",
            op.loc,
            KernelSyntaxError,
        )


def _sunk(body: ir.Block, blocks: list[ir.Block]) -> list[ir.Block]:
    """The blocks, each with its own copy of the pure ops of `body` that give it tiles or parts of buffers; what no op
    of `body` needs any more leaves it."""
    movable = {v: op for op in body.ops if _pure(op) and not all(map(_scalar, op.results)) for v in op.results}
    out = []
    for block in blocks:
        env: dict[ir.Value, ir.Value] = {}
        ops: list[ir.Op] = []

        def look(v: ir.Value, env=env, ops=ops) -> ir.Value:
            op = movable.get(v)
            if op is None or v in env:
                return env.get(v, v)
            new = op.clone(lambda x: look(x))
            ops.append(new)
            env.update(zip(op.results, new.results, strict=True))
            return env[v]

        copy = ir.copy_block(block, look)
        copy.ops[:0] = ops
        out.append(copy)
    used: set[ir.Value] = set()
    for op in reversed(list(body.ops)):
        if op.results and all(v in movable and v not in used for v in op.results):
            body.ops.remove(op)
        else:
            inner = [k for b in op.blocks() for k in b.walk()]
            used |= {v for k in (op, *inner) for v in k.operands()}
            used |= {v for k in (op, *inner) for b in k.blocks() for v in b.yields}
    return out
