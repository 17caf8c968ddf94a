"""Common subexpressions: one op for equal pure ops, and for equal loads with no write to the buffer between them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from jtile.ir import Alloc, At, Block, Index, Kernel, Load, Map, Op, Span, Take, Tile, Value, root
from jtile.ir.elementwise import ELEMENTWISE
from jtile.ir.printer import literal

from .pipeline import Pass
from .rewrite import buffers, is_pure, written

COMMUTATIVE = frozenset({"add", "mul", "and", "or", "xor", "eq", "ne"})


def run(kernel: Kernel) -> Kernel:
    numbering = _Numbering(kernel)
    body = numbering.block(kernel.body, {})
    return kernel.with_body(body) if numbering.merged else kernel


class _Numbering:
    """Copies the kernel; `seen` maps the key of an op to the results that dominate the place."""

    def __init__(self, kernel: Kernel):
        self.roots = buffers(kernel)
        self.env: dict[Value, Value] = {}
        self.number: dict[Value, int] = {}
        self.version: dict[Value, int] = {}  # a number for each buffer, which changes with every write to it
        self.versions = 0
        self.merged = False  # whether an op has gone

    def look(self, v: Value) -> Value:
        return self.env.get(v, v)

    def bump(self, refs: list[Value]) -> None:
        for r in refs:
            self.versions += 1
            self.version[self.look(r)] = self.versions  # keys are made from the copies

    def block(self, b: Block, seen: dict[Hashable, tuple[Value, ...]]) -> Block:
        seen = dict(seen)
        params = tuple(Value(p.type, p.name) for p in b.params)
        self.env.update(zip(b.params, params, strict=True))
        ops: list[Op] = []
        for op in b.ops:
            self.op(op, ops, seen)
        return Block(params, ops, tuple(map(self.look, b.yields)))

    def op(self, op: Op, ops: list[Op], seen: dict[Hashable, tuple[Value, ...]]) -> None:
        wrote = written(op, self.roots)
        if op.inner:
            new = self.regions(op, seen, wrote)
        else:
            new = op.clone(self.look)
            key = self.key(new)
            if key is not None and key in seen:
                self.merged = True
                for old, v in zip(op.results, seen[key], strict=True):
                    self.env[old] = v
                    v.name = v.name or old.name
                return
            if key is not None:
                seen[key] = new.results
        self.bump(wrote)
        ops.append(new)
        self.env.update(zip(op.results, new.results, strict=True))

    def regions(self, op: Op, seen: dict[Hashable, tuple[Value, ...]], wrote: list[Value]) -> Op:
        """Every region starts from the memory before the op; a loop's may also start from its own writes."""
        before = dict(self.version)

        def one(b: Block) -> Block:
            self.version = dict(before)
            if op.mnemonic in ("for", "while"):
                self.bump(wrote)
            return self.block(b, seen)

        new = op.clone(self.look, one)
        self.version = before
        return new

    def key(self, op: Op) -> Hashable | None:
        """The key of an op: ops of equal keys have equal results. None for one that must stay as often as it stands."""
        if isinstance(op, Alloc) or not (is_pure(op) or isinstance(op, Load)):
            return None
        operands = [self.id(v) for v in op.operands()]
        if isinstance(op, Map) and op.fn in COMMUTATIVE and ELEMENTWISE[op.fn].arity == 2:
            operands.sort()
        attrs = tuple([(n, form(v)) for n, v in op.attributes().items() if n != "checked"])
        # An absent mask or accumulator is a difference that the list of operands does not show.
        present = tuple([n for n, k in op.others if k == "optional" and getattr(op, n) is not None])
        index: tuple[Hashable, ...] = ()
        memory = None
        if isinstance(op, Load):
            index, memory = index_form(op.index), self.version.get(root(op.ref, self.roots), 0)
        return (type(op), tuple(operands), attrs, index, memory, present)

    def id(self, v: Value) -> int:
        return self.number.setdefault(v, len(self.number))


def form(v: Any) -> Hashable:
    """What is equal for equal attributes. 1 and True differ, as do 0.0 and -0.0; NaN is itself."""
    kind = type(v)
    if v is None or kind is int or kind is bool or kind is str or (kind is tuple and set(map(type, v)) <= {int}):
        return kind, v
    return literal(v)


def index_form(index: Index) -> tuple[Hashable, ...]:
    """The static part of an index."""
    out: list[Hashable] = []
    for d in index:
        match d:
            case Span(_, size, stride):
                out.append(("span", size, stride))
            case Tile(_, size, step):
                out.append(("tile", size, step))
            case At():
                out.append("at")
            case Take():
                out.append("take")
    return tuple(out)


cse = Pass(
    "cse", "No two equal pure ops, or loads of unchanged memory, stand where one dominates the other.", run, True
)
