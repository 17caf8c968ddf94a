"""Ref forwarding: local memory that is only stored and loaded whole becomes values, carried through loops and branches;
a load of what was just stored becomes the stored value; stores that nobody reads go."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jtile.ir import (
    Alloc,
    Atomic,
    Block,
    Builder,
    For,
    Full,
    If,
    Index,
    Kernel,
    Load,
    Op,
    Span,
    Store,
    Take,
    Tile,
    TileType,
    Value,
    While,
    dim_value,
    root,
)
from jtile.ir.block import level_of
from jtile.ir.builder import build
from jtile.ir.shapes import full_array

from .cse import index_form
from .pipeline import Pass
from .rewrite import Copier, buffers, use_counts, written


def run(kernel: Kernel) -> Kernel:
    if level_of(kernel) == "block":  # roles run at once, so that what one stores another may load
        return kernel
    if not kernel.scratch and not _may_forward(kernel):
        return kernel
    promoted = whole_refs(kernel)
    kernel = kernel.with_body(_Promote(promoted).block(kernel.body)) if promoted else kernel
    return _drop_unread(_Forward(kernel).whole(kernel))


def _may_forward(kernel: Kernel) -> bool:
    """Whether there is memory of one program alone, or a buffer that is stored to and loaded from."""
    ops = [op for op in kernel.body.walk() if isinstance(op, Load | Store | Alloc)]
    roots = buffers(kernel)
    stored = {root(op.ref, roots) for op in ops if isinstance(op, Store)}
    return any(isinstance(op, Alloc) or (isinstance(op, Load) and root(op.ref, roots) in stored) for op in ops)


def local_refs(kernel: Kernel) -> list[Value]:
    """Memory that one program alone sees: scratch and allocs."""
    return [*kernel.scratch, *(op.result for op in kernel.body.walk() if isinstance(op, Alloc))]


def covers(index: Index, shape: tuple[int, ...]) -> bool:
    """Whether an index names every element once, in order."""
    return all(
        isinstance(d, Span | Tile) and d.size == n and _number(d.start if isinstance(d, Span) else d.index) == 0
        and (not isinstance(d, Span) or d.stride == 1 or n <= 1)
        for d, n in zip(index, shape, strict=True)
    )  # fmt: skip


def _number(v: Value) -> int | None:
    return int(full_array(v.op.value, (), v.dtype)) if isinstance(v.op, Full) and not v.shape else None


def whole_refs(kernel: Kernel) -> set[Value]:
    """Local Refs that are only ever loaded and stored whole, without mask."""
    out = set(local_refs(kernel))
    for op in kernel.body.walk():
        if isinstance(op, Load | Store):
            if op.mask is not None or not covers(op.index, op.ref.shape):
                out.discard(op.ref)
        elif isinstance(op, Atomic):
            out.discard(op.ref)
    return out


class _Promote:
    """Copies the kernel with whole Refs as values: `state` holds what each of them contains at this point."""

    def __init__(self, refs: set[Value]):
        self.refs = refs
        self.env: dict[Value, Value] = {}
        self.state: dict[Value, Value] = {}
        self.b = Builder()

    def look(self, v: Value) -> Value:
        return self.env.get(v, v)

    def content(self, ref: Value) -> Value:
        """What the Ref holds; a Ref that nobody wrote holds anything: zeros."""
        if ref not in self.state:
            self.state[ref] = self.b.value(Full(0, ref.shape, ref.dtype))
        return self.state[ref]

    def changed(self, blocks: Iterable[Block]) -> list[Value]:
        """Promoted Refs from outside that the blocks write."""
        blocks = list(blocks)
        inner = {op.result for b in blocks for op in b.walk() if isinstance(op, Alloc)}
        return [
            r for r in dict.fromkeys(r for b in blocks for r in written(b, {})) if r in self.refs and r not in inner
        ]

    def block(self, b: Block, refs: Iterable[Value] = (), yields: bool = True) -> Block:
        """A copy with one parameter (and one yield, unless `yields` is off) more for each of `refs`."""
        refs = list(refs)
        types = [p.type for p in b.params] + [tile_of(r) for r in refs]
        with self.b.region(types, (*(p.name for p in b.params), *(r.name for r in refs))) as new:
            self.env.update(zip(b.params, new.params[: len(b.params)], strict=True))
            self.state.update(zip(refs, new.params[len(b.params) :], strict=True))
            for op in b.ops:
                self.op(op)
            more = tuple(self.content(r) for r in refs) if yields else ()
            new.yields = (*map(self.look, b.yields), *more)
        return new

    def op(self, op: Op) -> None:
        self.b.loc = op.loc
        match op:
            case Alloc() if op.result in self.refs:
                self.state.pop(op.result, None)
            case Store() if op.ref in self.refs:
                self.state[op.ref] = self.look(op.value)
            case Load() if op.ref in self.refs:
                self.env[op.result] = self.content(op.ref)
            case For() | While():
                self.loop(op)
            case If():
                self.branch(op)
            case _:
                self.add(op.clone(self.look), op)

    def add(self, new: Op, old: Op, refs: list[Value] | None = None) -> None:
        refs = refs or []
        self.b.block.ops.append(new)
        n = len(old.results)
        self.env.update(zip(old.results, new.results[:n], strict=True))
        self.state.update(zip(refs, new.results[n:], strict=True))

    def loop(self, op: For | While) -> None:
        refs = self.changed(op.blocks())
        inits = (*map(self.look, op.inits), *(self.content(r) for r in refs))
        outside = dict(self.state)
        if isinstance(op, For):
            bounds = {n: self.look(getattr(op, n)) for n in ("lo", "hi", "step")}
            new: Op = dataclasses.replace(op, **bounds, inits=inits, body=self.block(op.body, refs))
        else:
            cond = self.block(op.cond, refs, yields=False)
            self.state = dict(outside)
            new = While(inits, cond, self.block(op.body, refs))
        self.state = outside
        names = (*(r.name for r in op.results), *(r.name for r in refs))
        self.add(build(new, op.loc, names), op, refs)

    def branch(self, op: If) -> None:
        refs = self.changed(op.blocks())
        for r in refs:
            self.content(r)
        outside = dict(self.state)
        blocks = []
        for b in (op.then, op.orelse):
            self.state = dict(outside)
            with self.b.region() as new:
                for x in b.ops:
                    self.op(x)
                new.yields = (*map(self.look, b.yields), *(self.content(r) for r in refs))
            blocks.append(new)
        self.state = outside
        names = (*(r.name for r in op.results), *(r.name for r in refs))
        self.add(build(If(self.look(op.cond), *blocks), op.loc, names), op, refs)


def tile_of(ref: Value) -> TileType:
    return TileType(ref.shape, ref.dtype)


# -- straight-line forwarding for all other memory --------------------------------------------------------------------


class _Forward(Copier):
    """A load of exactly the lanes that the last store to the buffer wrote gives the stored value."""

    def __init__(self, kernel: Kernel):
        super().__init__()
        self.roots = buffers(kernel)
        self.last: dict[Value, Store] = {}  # the last store to each buffer in the region at hand

    def block(self, old: Block) -> Block:
        outside, self.last = self.last, {}
        new = super().block(old)
        self.last = outside
        return new

    def op(self, op: Op) -> None:
        new = self.put(op)
        store = self.last.get(root(new.ref, self.roots)) if isinstance(new, Load) else None
        if store is not None and _same_lanes(store, new):
            self.b.block.ops.pop()
            self.env[op.result] = store.value
            return
        for ref in written(new, self.roots):
            self.last.pop(ref, None)
        # Other devices have symmetric memory, too: a load may be of the memory of another device.
        if isinstance(new, Store) and new.ref.type.role != "symmetric":  # type: ignore[union-attr]
            self.last[root(new.ref, self.roots)] = new


def _same_lanes(store: Store, load: Load) -> bool:
    """Equal indices without masks, every lane inside (one outside would read the pad), no element named twice."""
    if store.mask is not None or load.mask is not None or index_form(store.index) != index_form(load.index):
        return False
    inside = not store.checked or not load.checked or covers(load.index, load.ref.shape)
    same = all(dim_value(a) is dim_value(b) for a, b in zip(store.index, load.index, strict=True))
    return inside and same and not any(isinstance(d, Take) for d in load.index)


def _drop_unread(kernel: Kernel) -> Kernel:
    """The kernel without stores to local Refs that no op reads."""
    local = set(local_refs(kernel))
    used = use_counts(kernel.body)
    returns = lambda op: isinstance(op, Load) or (isinstance(op, Atomic) and used.get(op.result, 0))
    read = {op.ref for op in kernel.body.walk() if returns(op)}
    dead = local - read

    def block(b: Block) -> Block:
        kept = [op for op in b.ops if not (isinstance(op, Store | Atomic | Alloc) and _ref(op) in dead)]
        for op in kept:  # fresh copies, made by _Forward
            for name, kind in op.fields.items():
                if kind == "block":
                    setattr(op, name, block(getattr(op, name)))
        return Block(b.params, kept, b.yields)

    params = tuple(p for p in kernel.params if p not in dead)
    return dataclasses.replace(kernel, params=params, body=block(kernel.body))


def _ref(op: Store | Atomic | Alloc) -> Value:
    return op.result if isinstance(op, Alloc) else op.ref


ref_forwarding = Pass(
    "ref_forwarding",
    "Local memory that is loaded and stored whole is values, and no store to local memory goes unread.",
    run,
)
