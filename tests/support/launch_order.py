"""What the launches of a program may see of each other where kernels overlap: finds early reads of arrays that a kernel
in front may still write.

Kernels of a program run one after the other. One with early roles starts when the kernel in front lets it: at its start
(`launch_dependents` of a kernel of the tile level, or of one whose roles are all early), or after it has waited for all
kernels in front of it. Others start when everything in front has ended. What XLA makes in between is left out: it may
stand anywhere, or be fused away, and no order is owed to it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.extend.core as jexc

from jtile import ir
from jtile.language._equations import scan_counts

_SAME = ("reshape", "optimization_barrier", "squeeze", "expand_dims", "copy")


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel of a program.

    Attributes:
      early: it has early roles. at_once: it lets the kernel behind start when it starts itself; else when it has
        waited.
      reads: arrays that early roles read before they wait; writes: arrays that it writes.
    """

    name: str
    early: bool
    at_once: bool
    reads: frozenset[int]
    writes: frozenset[int]


def launches(jaxpr: Any, platform: str = "cuda", rounds: int = 2) -> list[Launch]:
    """The kernels of a jaxpr in order, loops of `rounds` rounds; arrays are numbers, and those in place keep theirs."""
    found = _Found(platform, rounds)
    found.walk(jaxpr, [found.new() for _ in jaxpr.invars])
    return found.launches


def hazards(order: list[Launch]) -> list[str]:
    """Early reads of what may not be written yet, in words."""
    out: list[str] = []
    written: dict[int, int] = {}
    ended_at_start, ended_behind = -1, -1  # the last kernel that has ended when this one starts; when the next one does
    for k, one in enumerate(order):
        ended_at_start = ended_behind if one.early else k - 1
        for array in sorted(one.reads):
            if written.get(array, -1) > ended_at_start:
                out.append(f"{one.name} ({k}) reads early what {order[written[array]].name} ({written[array]}) writes")
        ended_behind = ended_at_start if one.at_once else k - 1
        written |= dict.fromkeys(one.writes, k)
    return out


class _Found:
    def __init__(self, platform: str, rounds: int):
        self.platform, self.rounds, self.count = platform, rounds, 0
        self.launches: list[Launch] = []

    def new(self) -> int:
        self.count += 1
        return self.count

    def walk(self, jaxpr: Any, arrays: list[int]) -> list[int]:
        """The arrays of the results, for those of the operands."""
        held = dict(zip(jaxpr.invars, arrays, strict=True)) | {v: self.new() for v in jaxpr.constvars}
        read = lambda v: self.new() if isinstance(v, jexc.Literal) else held[v]
        for eqn in jaxpr.eqns:
            held.update(zip(eqn.outvars, self._equation(eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, operands: list[int]) -> list[int]:
        name, params = eqn.primitive.name, eqn.params
        if name == "jtile_call":
            return self._kernel(params["program"].kernel, operands)
        if name == "cond" and params.get("branches_platforms"):
            known = [self.platform in (of or ()) for of in params["branches_platforms"]]
            return self.walk(params["branches"][known.index(True) if any(known) else -1].jaxpr, operands[1:])
        if name == "scan":
            fixed, carried = scan_counts(params)
            carry, rest = operands[fixed : fixed + carried], operands[fixed + carried :]
            for _ in range(self.rounds):
                carry, stacked = _cut(self.walk(params["jaxpr"].jaxpr, [*operands[:fixed], *carry, *rest]), carried)
            return [*carry, *stacked]
        inner = next((params[k] for k in ("jaxpr", "call_jaxpr", "call") if k in params), None)
        if inner is not None and name != "pallas_call":
            return self.walk(getattr(inner, "jaxpr", inner), operands)
        if name in _SAME:
            return operands[: len(eqn.outvars)]
        return [self.new() for _ in eqn.outvars]

    def _kernel(self, kernel: ir.Kernel, operands: list[int]) -> list[int]:
        shared = {out: given for given, out in kernel.aliases}
        outs = [operands[shared[k]] if k in shared else self.new() for k in range(len(kernel.refs("out")))]
        of = dict(zip([*kernel.refs("in"), *kernel.refs("out")], [*operands, *outs]))
        roles = next((op for op in kernel.body.ops if isinstance(op, ir.Roles)), None)
        early = roles is not None and any(roles.early)
        reads: set[int] = set()
        held = False
        for body, first in zip(roles.bodies, roles.early) if early else ():
            waits = [k for k, op in enumerate(body.ops) if isinstance(op, ir.KernelsWait)]
            held |= any(body.ops[k].hold for k in waits)
            before = ir.Block((), body.ops[: waits[0]] if waits else body.ops)
            for op in before.walk() if first else ():
                reads |= {of[v] for v in op.operands() if v in of}
        at_once = not early or (all(roles.early) and not held)
        self.launches.append(Launch(kernel.name, early, at_once, frozenset(reads), frozenset(outs)))
        return outs


def _cut(values: list[int], n: int) -> tuple[list[int], list[int]]:
    return values[:n], values[n:]
