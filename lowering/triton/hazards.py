"""Order among the threads of a block: barriers between accesses that may touch one element, and scatters in which
several lanes name one.

A tile lives spread over threads, and not every access spreads it alike: what one thread stored, another may load.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jtile import ir
from jtile.ir.devices import WAITING

from .addresses import Line, lay
from .emitter import Emitter, padded
from .lanes import fold
from .ttir import Val

PAIRS = 256  # lanes of a scatter that are compared each with each; more lanes are stored one after another

Access = ir.Load | ir.Store | ir.Atomic


def meet(em: Emitter, op: Access) -> None:
    """A barrier before `op` where it may touch what other threads of the block have touched since the last one."""
    watched = _watched_of(em)
    root = ir.root(op.ref, watched.root)
    if root not in watched.roots:
        return
    block = watched.block[op]
    if watched.at is not block:
        # Another region may have run in between, and this one may be a loop's body that ends in accesses.
        if watched.at is not None or block is not em.kernel.body:
            em.barrier()
        watched.at, watched.since = block, []
    elif any(_collide(watched, op, other) for other in watched.since):
        em.barrier()
        watched.since = []
    watched.since.append(op)


def in_order(em: Emitter, body: ir.Block) -> bool:
    """Whether a loop reads memory that the kernel writes: triton's pipeliner, which does not look for such, would load
    before the stores of earlier trips; the loop must say `tt.num_stages = 1`. So must one in which programs wait for
    what other devices store."""
    watched = _watched_of(em)
    if any(isinstance(op, WAITING) for op in body.walk()):
        return True
    loads = (op for op in body.walk() if isinstance(op, ir.Load))
    return any(ir.root(op.ref, watched.root) in watched.roots for op in loads)


def changes(em: Emitter, ref: ir.Value) -> bool:
    """Whether the kernel both reads and writes the memory of a Ref, through this one or an aliased one."""
    watched = _watched_of(em)
    return ir.root(ref, watched.root) in watched.changed


class Watched:
    """Where a kernel's accesses stand, and which were emitted since the last barrier.

    Attributes:
      root: a Ref that shares its memory -> the Ref that stands for both.
      roots: the Refs with accesses that must be kept in order.
      changed: the Refs of `roots` that are both read and written.
      block: the block of each access.
      at: the block of the last access; since: the accesses after the last barrier.
    """

    def __init__(
        self,
        root: dict[ir.Value, ir.Value],
        roots: set[ir.Value],
        changed: set[ir.Value],
        block: dict[ir.Op, ir.Block],
    ):
        self.root, self.roots, self.changed, self.block = root, roots, changed, block
        self.at: ir.Block | None = None
        self.since: list[Access] = []


def _watched_of(em: Emitter) -> Watched:
    if "watched" not in em.memo:
        em.memo["watched"] = _watched(em)
    return em.memo["watched"]


def _watched(em: Emitter) -> Watched:
    kernel = em.kernel
    root = {kernel.outputs[o]: kernel.inputs[i] for i, o in kernel.aliases}
    block, looped = {}, set()
    reads: set[ir.Value] = set()
    writes: dict[ir.Value, list[Access]] = {}
    for op, b, loop in _accesses(kernel.body, False):
        ref = ir.root(op.ref, root)
        block[op] = b
        if loop:
            looped.add(op)
        if isinstance(op, ir.Load):
            reads.add(ref)
        else:
            writes.setdefault(ref, []).append(op)
    fixed = {r for op in kernel.body.ops for r in op.results}
    roots = {
        ref
        for ref, ops in writes.items()
        if ref in reads
        or any(not _places_apart(a, b) for k, a in enumerate(ops) for b in ops[:k])
        or any(op in looped and (len(ops) > 1 or not _same_or_apart(op, fixed)) for op in ops)
    }
    return Watched(root, roots, reads & set(writes), block)


def _accesses(b: ir.Block, loop: bool) -> Iterator[tuple[Access, ir.Block, bool]]:
    for op in b.ops:
        if isinstance(op, Access):
            yield op, b, loop
        for inner in op.blocks():
            yield from _accesses(inner, loop or not isinstance(op, ir.If | ir.Roles))


def _same_or_apart(op: Access, fixed: set[ir.Value]) -> bool:
    """Whether two runs of a store write either the same tile, from the same threads, or tiles without a common
    element; `fixed`: values that are the same in all runs."""
    return all(
        isinstance(d, ir.At)
        or (isinstance(d, ir.Tile) and d.step >= d.size)
        or (not isinstance(d, ir.Take) and (d.start if isinstance(d, ir.Span) else d.index) in fixed)
        for d in op.index
    )


def _collide(watched: Watched, a: Access, b: Access) -> bool:
    if isinstance(a, ir.Load) and isinstance(b, ir.Load):
        return False
    if ir.root(a.ref, watched.root) is not ir.root(b.ref, watched.root):
        return False
    return not _places_apart(a, b)


def _places_apart(a: Access, b: Access) -> bool:
    """Whether two accesses to one memory have no element in common, in one run of the block that has both."""
    return any(_apart(x, y) for x, y in zip(a.index, b.index, strict=True))


def _apart(a: ir.Dim, b: ir.Dim) -> bool:
    """Whether two dimensions have no element in common: with constant starts, or tiles whose numbers are one value and
    different constants."""
    if isinstance(a, ir.Tile) and isinstance(b, ir.Tile) and (a.step, a.size) == (b.step, b.size) and a.step >= a.size:
        (x, n), (y, m) = _sum_of(a.index), _sum_of(b.index)
        return x is y and n != m
    x, y = _reach(a), _reach(b)
    return x is not None and y is not None and (x[1] < y[0] or y[1] < x[0])


def _sum_of(v: ir.Value) -> tuple[ir.Value | None, int]:
    """A number as a value, if it has one, and a constant that is added to it."""
    if isinstance(v.op, ir.Full):
        return None, int(v.op.value)
    if isinstance(v.op, ir.Map) and v.op.fn == "add":
        for x, y in (v.op.args, reversed(v.op.args)):
            if isinstance(y.op, ir.Full):
                return x, int(y.op.value)
    return v, 0


def _reach(d: ir.Dim) -> tuple[int, int] | None:
    v = ir.dim_value(d)
    if isinstance(d, ir.Take) or not isinstance(v.op, ir.Full):
        return None
    at = int(v.op.value)
    if isinstance(d, ir.At):
        return at, at
    first, step = (at * d.step, 1) if isinstance(d, ir.Tile) else (at, d.stride)
    last = first + (d.size - 1) * step
    return min(first, last), max(first, last)


# -- scatters: the last lane wins -------------------------------------------------------------------------------------


def may_repeat(index: ir.Index) -> bool:
    """Whether two lanes of an access with this index may name one element."""
    return bool(repeating_axes(index))


def repeating_axes(index: ir.Index) -> list[int]:
    """The axes of its gathers along which two lanes may name one element. Lanes that differ along another axis do not,
    whatever they have along these."""
    takes = [d.indices for d in index if isinstance(d, ir.Take)]
    spread = set().union(*(_spread(v) for v in takes)) if takes else set()
    return [axis for axis, n in enumerate(takes[0].shape) if n > 1 and axis not in spread] if takes else []


def _spread(v: ir.Value) -> set[int]:
    """The axis along which the elements of a tile differ pairwise, where it is constant along all others."""
    axes = _varies(v)
    return axes if axes is not None and len(axes) == 1 else set()


def _varies(v: ir.Value) -> set[int] | None:
    """The axes along which elements of a tile differ pairwise, for sums of index numbers and scalars; None: unknown."""
    op = v.op
    if v.type.rank == 0 or isinstance(op, ir.Full):
        return set()
    if isinstance(op, ir.Iota):
        return {op.axis} if op.shape[op.axis] <= 2 ** ir.DTYPES[op.dtype].bits else None
    if isinstance(op, ir.Dense) and v.type.rank == 1 and len(set(op.data)) == len(op.data):
        return {0}
    if isinstance(op, ir.Broadcast):
        inner = _varies(op.x)
        return None if inner is None else {op.dims[a] for a in inner}
    if isinstance(op, ir.Reshape):
        return _regrouped(_varies(op.x), op.x.shape, op.shape)
    if isinstance(op, ir.Cast) and _keeps_apart(ir.DTYPES[op.x.dtype], ir.DTYPES[op.dtype]):
        return _varies(op.x)
    if isinstance(op, ir.Map) and op.fn in ("add", "sub"):
        a, b = (_varies(x) for x in op.args)
        return None if a is None or b is None or (a and b) else a | b
    return None


def _regrouped(axes: set[int] | None, old: tuple[int, ...], new: tuple[int, ...]) -> set[int] | None:
    """The axes after a reshape that only adds or drops axes of length 1."""
    kept_old, kept_new = ([k for k, n in enumerate(shape) if n != 1] for shape in (old, new))
    if axes is None or [old[k] for k in kept_old] != [new[k] for k in kept_new]:
        return None
    return {kept_new[kept_old.index(k)] for k in axes if k in kept_old}


def _keeps_apart(a: ir.DType, b: ir.DType) -> bool:
    """Whether different integers stay different in another dtype."""
    return a.kind in "iu" and b.kind in "iu" and b.bits >= a.bits


def last_lanes(em: Emitter, found: list[Line], shape: tuple[int, ...]) -> Val:
    """The mask of a gather's lanes that no later lane repeats, laid over the tile."""
    code = em.code
    takes = [line for line in found if line.first.shape]
    axis, inner = takes[0].axis, takes[0].first.shape
    n = int(np.prod(inner))
    flat = [code.reshape(line.first, (n,)) for line in takes]
    real = em.valid(shape[axis : axis + len(inner)])
    later = code.cmp("sgt", *(_pair(em, code.arange(n), n, k) for k in (1, 0)))
    if real is not None:
        later = code.both(later, _pair(em, code.reshape(real, (n,)), n, 1))
    for v in flat:
        later = code.both(later, code.cmp("eq", *(_pair(em, v, n, k) for k in (1, 0))))
    hidden = fold(code, code.to_int(later, "i32"), "arith.ori", 1)
    alone = code.cmp("eq", hidden, code.const(0, "i32", (n,)))
    return lay(em, code.reshape(alone, inner), axis, padded(shape))


def _pair(em: Emitter, v: Val, n: int, axis: int) -> Val:
    return em.code.along(v, axis, (n, n))
