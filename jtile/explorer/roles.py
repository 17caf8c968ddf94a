"""The roles of a kernel at the block level: the rings and barriers that they share, and what they do when. The timeline
is measured on a GPU that is here, and simulated by the interpreter elsewhere: steps, which say what waits for what."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jtile import ir
from jtile.explorer.places import Places
from jtile.explorer.record import Roles
from jtile.ir.printer import Namer
from jtile.lowering import platforms
from jtile.lowering.targets import Target
from jtile.primitive import lowering
from jtile.tune.timeline import COPIED, READ, Timeline, title

ELEMENTS = 1 << 24  # a timeline is simulated if all arrays of a kernel have at most so many
PROGRAMS, STAMPS = 2, 1500  # programs that are watched, and notes that a role may leave

_READS = (ir.LoadShared, ir.DotAsync, ir.AsyncStore)
_WRITES = (ir.StoreShared, ir.AsyncLoad)
_VIEWS = (ir.Slot, ir.TransposeShared, ir.SliceShared)


def roles(
    piece: ir.Kernel,
    target: Target,
    options: Mapping[str, Any],
    data: Sequence[Any] | None,
    places: Places,
    *,
    run: bool,
) -> Roles | None:
    """What a record says of roles; None for a kernel that has none on its target.

    Args:
      piece: a piece as `pieces_of` gives it.
      data: the inputs of the piece, where they are known.
      run: the target is the device at hand, and may be measured.
    """
    if "warpgroup products" not in target.features or ir.is_dynamic(piece):
        return None
    from jtile.lowering.triton.block.passes import NoPlan
    from jtile.tune.watch import block_kernel, inputs_of, watch

    made = lowering.complete(piece, platforms.named(target.platform))
    found = block_kernel(made.kernel, target, options)
    if isinstance(found, NoPlan):
        return None
    parts = [op for op in found.body.ops if isinstance(op, ir.Roles)]
    if not parts:
        return None
    line, notes = None, []
    if sum(math.prod(v.shape) for v in found.params) > ELEMENTS and not run:
        notes.append("The timeline is simulated for arrays of few elements only: view the kernel for smaller ones.")
    else:
        known = list(data) if data is not None and all(x is not None for x in data) else None
        arrays = [*inputs_of(piece, known), *lowering.filled(made.starts), *made.tables]
        line = watch(found, target, arrays, piece.name, PROGRAMS, STAMPS, interpret=not run, alone=True)
        if line.dropped:
            notes.append("The timeline ends before the kernel does: a role made more notes than there is room for.")
    return _record(found, parts[0], line, notes, places)


def _record(kernel: ir.Kernel, part: ir.Roles, line: Timeline | None, notes: list[str], places: Places) -> Roles:
    names = Namer()
    who = [
        {"name": n, "warps": w, "registers": r, "place": places.number(_first(b))}
        for n, w, r, b in zip(part.names, part.warps, part.registers, part.bodies, strict=True)
    ]
    rings, barriers = [], []
    for op in kernel.body.ops:
        if isinstance(op, ir.AllocShared):
            rings.append(_ring(op, part, names, places))
        elif isinstance(op, ir.AllocBarriers):
            barriers.append(_barrier(op, part, names, places))
    kinds: dict[str, int] = {}
    programs = [_program(line, p, kinds, places) for p in line.programs] if line else []
    shares = [text.strip() for text in str(line).splitlines()[1:]] if line else []
    return Roles(who, rings, barriers, line.unit if line else "", [*kinds], programs, shares, notes)


def _first(body: ir.Block) -> ir.Loc:
    return next((op.loc for op in body.walk() if op.loc.file), ir.NOWHERE)


def _base(v: ir.Value) -> ir.Value:
    """The memory that a view is a part of."""
    while isinstance(v.op, _VIEWS):
        v = v.op.buffer
    return v


def _of(part: ir.Roles, cards: Any, v: ir.Value) -> list[int]:
    """The roles that have an op of these kinds on some memory or barriers."""
    uses = lambda op: isinstance(op, cards) and any(_base(x) is v for x in op.operands())
    return [k for k, body in enumerate(part.bodies) if any(uses(op) for op in body.walk())]


def _ring(op: ir.AllocShared, part: ir.Roles, names: Namer, places: Places) -> dict[str, Any]:
    v, slots = op.result, op.slots or 1
    size = slots * math.prod(op.shape) * ir.DTYPES[op.dtype].bits // 8
    return {
        "name": names(v), "slots": slots, "shape": [*op.shape], "dtype": op.dtype, "bytes": size,
        "place": places.number(op.loc), "writers": _of(part, _WRITES, v), "readers": _of(part, _READS, v),
    }  # fmt: skip


def _barrier(op: ir.AllocBarriers, part: ir.Roles, names: Namer, places: Places) -> dict[str, Any]:
    v = op.result
    return {
        "name": names(v), "slots": op.count, "arrivals": op.arrivals, "place": places.number(op.loc),
        "waits": _of(part, ir.Wait, v), "arrives": _of(part, ir.Arrive, v), "expects": _of(part, ir.Expect, v),
    }  # fmt: skip


def _program(line: Timeline, program: int, kinds: dict[str, int], places: Places) -> dict[str, Any]:
    spans = [s for s in line.spans if s.program == program]
    zero = min(s.start for s in spans)
    number = lambda kind: kinds.setdefault(kind, len(kinds))
    lanes = []
    for role in sorted({s.site.role for s in spans}):
        own = [s for s in spans if s.site.role == role]
        flat = [[number(title(s.site)), places.number(s.site.loc), s.start - zero, s.end - zero] for s in own]
        lanes.append({"name": own[0].site.name, "kind": "role", "spans": [n for span in flat for n in span]})
    busy = line.products(program)
    flat = [[number("products under way"), 0, a - zero, b - zero] for a, b in busy]
    lanes.append({"name": "products", "kind": "products", "spans": [n for span in flat for n in span]})
    stages = line.stages(program)
    for ring in sorted({(x.barrier, x.slot) for x in stages}):
        own = [x for x in stages if (x.barrier, x.slot) == ring]
        flat = [[number(COPIED), 0, x.asked - zero, x.read - zero] for x in own]
        flat += [[number(READ), 0, x.read - zero, x.freed - zero] for x in own]
        lanes.append({"name": f"{ring[0]}[{ring[1]}]", "kind": "slot", "spans": [n for span in flat for n in span]})
    length = line.length(program)
    share = sum(b - a for a, b in busy) / length if length else 0.0
    return {"number": program, "length": length, "busy": share, "lanes": lanes}
