"""Building blocks of the passes that turn grid axes into loops and loops into grid axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jtile.ir import Atomic, Builder, Extent, For, Kernel, Load, Print, SizeOf, Store, Value
from jtile.ir.builder import build
from jtile.ir.memory import Alloc, Assert

from .bounds import bounds
from .canonicalise import canonicalise
from .cse import cse
from .dce import dce
from .hoist import hoist
from .pipeline import Pipeline, run_pipeline
from .ref_forwarding import ref_forwarding
from .rewrite import Rewriter, Rules

PREPARE: Pipeline = (canonicalise, cse, ref_forwarding, canonicalise, cse, hoist, bounds, canonicalise, dce)
TIDY: Pipeline = (canonicalise, cse, bounds, canonicalise, hoist, canonicalise, dce)


def tidy(kernel: Kernel) -> Kernel:
    """Canonical forms again, as they were before a rewrite."""
    for step in TIDY:
        kernel = step(kernel)
    return kernel


def finish(kernel: Kernel) -> Kernel:
    """What a kernel that is compiled next needs to be read; every back end runs its pipeline on it anyway."""
    return dce(bounds(kernel))


def prepare(kernel: Kernel) -> Kernel:
    return run_pipeline(kernel, PREPARE)


@dataclasses.dataclass(frozen=True)
class Counted:
    """A loop to be built: its bounds (upwards, step 1), a name for its index, and a wish for pipelining."""

    lo: Value
    hi: Value
    name: str = ""
    stages: int | None = None


def size_value(b: Builder, n: Any) -> Value:
    """A size as an index, also one that is known when the kernel runs."""
    return b.value(SizeOf(n)) if isinstance(n, Extent) else b.index(n)


def nest(b: Builder, bounds: Sequence[Counted], emit: Callable[[list[Value]], None]) -> None:
    """Loops without carry, the first one outermost, around what `emit` adds to the builder."""

    def level(k: int, indices: list[Value]) -> None:
        if k == len(bounds):
            return emit(indices)
        c = bounds[k]
        with b.region([c.lo.type], (c.name,)) as body:
            level(k + 1, [*indices, body.params[0]])
        loop = For(c.lo, c.hi, b.index(1), (), body, c.stages)
        b.block.ops.append(build(loop, b.loc))
        return None

    level(0, [])


def only(kernel: Kernel, keep: Sequence[Value]) -> Kernel | None:
    """The kernel with these outputs alone; None where it reads back another one, which has to be written first."""
    gone = set(kernel.outputs) - set(keep)
    rules = Rules()

    @rules(Store)
    def _(op: Store, rw: Rewriter):
        return () if op.ref in gone else None

    @rules(Atomic)
    def _(op: Atomic, rw: Rewriter):
        return op.value if op.ref in gone else None  # the old value is not used, or the load below refuses

    read = {op.ref for op in kernel.body.walk() if isinstance(op, Load)}
    used = {v for op in kernel.body.walk() for v in [*op.operands(), *(y for b in op.blocks() for y in b.yields)]}
    read |= {op.ref for op in kernel.body.walk() if isinstance(op, Atomic) and op.result in used}
    if gone & read:
        return None
    inits = dict(zip(kernel.outputs, kernel.inits or (None,) * len(kernel.outputs), strict=True))
    new = dataclasses.replace(
        kernel,
        body=Rewriter(kernel, rules).run().body,
        params=tuple(p for p in kernel.params if p not in gone),
        inits=tuple(inits[o] for o in kernel.outputs if o not in gone),
    )
    return dce(ref_forwarding(new))


def speaks(kernel: Kernel) -> bool:
    """Whether the outside world sees the programs run."""
    return any(isinstance(op, Print | Assert) for op in kernel.body.walk())


def keeps_state(kernel: Kernel, refs: Collection[Value]) -> bool:
    """Whether a kernel writes, or makes, any memory but accumulators."""
    ops = list(kernel.body.walk())
    return any(isinstance(op, Alloc) or (isinstance(op, Store | Atomic) and op.ref not in refs) for op in ops)
