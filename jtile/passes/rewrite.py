"""Rewriting: one forward walk that copies a kernel and, on the way, puts something else in the place of some ops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jtile.ir import (
    MEETING,
    AsyncStore,
    Atomic,
    Block,
    Builder,
    Kernel,
    LastArrival,
    Load,
    Op,
    Store,
    StoreWait,
    Value,
    Wait,
    root,
)
from jtile.ir.builder import build

# A rule looks at an op whose operands are already rewritten, and gives the values that stand for its results, or None.
# It may add ops through the rewriter (`new`). Rules for ops with regions get the op before its regions are copied.
Rule = Callable[[Any, "Rewriter"], "Value | tuple[Value, ...] | None"]


class Rules:
    """A table of rules per card; several rules of one card are tried in order."""

    def __init__(self, *tables: Rules):
        self.table: dict[type[Op], list[Rule]] = {}
        for t in tables:
            for card, rules in t.table.items():
                self.table.setdefault(card, []).extend(rules)

    def __call__(self, *cards: type[Op]) -> Callable[[Rule], Rule]:
        def register(fn: Rule) -> Rule:
            for card in cards:
                self.table.setdefault(card, []).append(fn)
            return fn

        return register


# Builds something in the place of an op, and gives the values that stand for its results.
Form = Callable[["Copier"], Sequence[Value]]


class Copier:
    """Copies ops into a builder, but for those that have another form.

    Attributes:
      forms: the forms of some ops, which stand for their regions, too.
      b: where the copies go.
      outside: what stands for a value that was not copied here; default: the value itself.
      env: what stands for values that were copied.
    """

    def __init__(
        self,
        forms: Mapping[Any, Form] | None = None,
        b: Builder | None = None,
        outside: Callable[[Value], Value] | None = None,
    ):
        self.forms, self.b = forms or {}, b or Builder()
        self.outside = outside or (lambda v: v)
        self.env: dict[Value, Value] = {}

    def whole(self, kernel: Kernel) -> Kernel:
        return kernel.with_body(self.block(kernel.body))

    def look(self, v: Value) -> Value:
        """The value that stands for `v`."""
        return self.env[v] if v in self.env else self.outside(v)

    def replace(self, olds: Sequence[Value], news: Sequence[Value]) -> None:
        """Let `news` stand for `olds`."""
        self.env.update(zip(olds, news, strict=True))

    def block(self, old: Block) -> Block:
        """A copy of a region."""
        with self.b.region([p.type for p in old.params], tuple(p.name for p in old.params)) as new:
            self.replace(old.params, new.params)
            for op in old.ops:
                self.op(op)
            new.yields = tuple(map(self.look, old.yields))
        return new

    def op(self, op: Op) -> None:
        """Put what stands for an op into the current block."""
        form = self.forms.get(op)
        if form is None:
            self.put(op)
        else:
            self.b.loc = op.loc
            self.replace(op.results, form(self))

    def put(self, op: Op) -> Op:
        """Put a copy of an op, with its regions, into the current block."""
        self.b.loc = op.loc
        new = op.clone(self.look, self.block)
        self.b.block.ops.append(new)
        self.replace(op.results, new.results)
        return new

    def within(self) -> Copier:
        """A plain copier that goes on where this one is, for what is copied more than once."""
        return Copier(b=self.b, outside=self.look)


class Rewriter(Copier):
    """Asks rules about every op; `changed` counts those that fired."""

    def __init__(self, kernel: Kernel, rules: Rules):
        super().__init__()
        self.kernel, self.rules = kernel, rules
        self.changed = 0
        self._new_uses: dict[Value, int] = {}

    @functools.cached_property
    def _uses(self) -> dict[Value, int]:
        return use_counts(self.kernel.body)

    def run(self) -> Kernel:
        return self.whole(self.kernel)

    def uses(self, v: Value) -> int:
        """How often the old kernel used what the new value `v` stands for."""
        return self._new_uses.get(v, 0)

    def replace(self, olds: Sequence[Value], news: Sequence[Value]) -> None:
        for old, new in zip(olds, news, strict=True):
            self.env[old] = new
            self._new_uses[new] = self._new_uses.get(new, 0) + self._uses.get(old, 0)
            if not new.name:
                new.name = old.name

    def inline(self, old: Block, args: Iterable[Value] | None = None) -> tuple[Value, ...]:
        """Rewrite the ops of a region into the current block; gives what it yields."""
        if args is not None:
            self.replace(old.params, tuple(args))
        for op in old.ops:
            self.op(op)
        return tuple(map(self.look, old.yields))

    def op(self, op: Op) -> None:
        self.b.loc = op.loc
        if not op.inner:
            self.replace(op.results, self.emit(op.clone(self.look)))
            return
        for rule in self.rules.table.get(type(op), ()):
            out = rule(op, self)
            if out is not None:
                self.changed += 1
                return self.replace(op.results, out if isinstance(out, tuple) else (out,))
        self.put(op)

    def emit(self, op: Op) -> tuple[Value, ...]:
        """Add an op without regions, unless a rule knows better."""
        for rule in self.rules.table.get(type(op), ()):
            out = rule(op, self)
            if out is not None:
                self.changed += 1
                return out if isinstance(out, tuple) else (out,)
        self.b.block.ops.append(op)
        return op.results

    def new(self, op: Op) -> Value:
        """Build and add an op with one result."""
        (v,) = self.add(op)
        return v

    def add(self, op: Op) -> tuple[Value, ...]:
        """Build and add an op without regions."""
        return self.emit(build(op, self.b.loc))

    def region_op(self, new: Op, old: Op, names: tuple[str, ...]) -> tuple[Value, ...]:
        """Add an op whose regions are rewritten already, in place of `old`."""
        self.b.block.ops.append(build(new, old.loc, names))
        return new.results


class _FiredError(Exception):
    """A rule has begun to put something in the place of an op."""


class _Probe(Rewriter):
    """Asks the rules about the ops of a kernel as they stand, up to the first that fires: most walks copy a kernel only
    to find that none does. It adds nothing anywhere, and changes no value's name."""

    def fires(self) -> bool:
        try:
            return self._any(self.kernel.body)
        except _FiredError:
            return True

    def _any(self, b: Block) -> bool:
        table = self.rules.table
        for op in b.ops:
            rules = table.get(type(op))
            if rules:
                self.b.loc = op.loc
                for rule in rules:
                    if rule(op, self) is not None:
                        return True
            if op.inner and any(map(self._any, op.blocks())):
                return True
        return False

    def look(self, v: Value) -> Value:
        return v

    def uses(self, v: Value) -> int:
        return self._uses.get(v, 0)

    def _fired(self, *args: Any, **kwargs: Any) -> Any:
        raise _FiredError

    block = op = put = within = replace = inline = emit = new = add = region_op = _fired


def rewrite(kernel: Kernel, rules: Rules, rounds: int = 8) -> Kernel:
    """Apply rules until none fires (at most `rounds` walks); where none does, the kernel itself comes back."""
    for _ in range(rounds):
        if not _Probe(kernel, rules).fires():
            break
        kernel = Rewriter(kernel, rules).run()
    return kernel


# -- facts about kernels that several passes need ---------------------------------------------------------------------


def use_counts(body: Block) -> dict[Value, int]:
    """How often each value is used, in the block and all regions inside."""
    out: dict[Value, int] = {}

    def count(b: Block) -> None:
        for op in b.ops:
            for v in op.operands():
                out[v] = out.get(v, 0) + 1
            for inner in op.blocks():
                count(inner)
        for v in b.yields:
            out[v] = out.get(v, 0) + 1

    count(body)
    return out


def users_of(b: Block) -> dict[Value, list[Op | None]]:
    """The ops of a block (itself or through their regions) that use each value, once a use; None: its yields."""
    out: dict[Value, list[Op | None]] = {}
    for op in b.ops:
        inner = [v for r in op.blocks() for v in [*r.yields, *(x for o in r.walk() for x in o.operands())]]
        inner += [v for r in op.blocks() for o in r.walk() for q in o.blocks() for v in q.yields]
        for v in [*op.operands(), *inner]:
            out.setdefault(v, []).append(op)
    for y in b.yields:
        out.setdefault(y, []).append(None)
    return out


def buffers(kernel: Kernel) -> dict[Value, Value]:
    """The Ref that stands for the memory of each parameter: an input and the output it is aliased to share one."""
    out = {p: p for p in kernel.params}
    out |= {kernel.inputs[i]: kernel.outputs[o] for i, o in kernel.aliases}
    return out


# What changes a Ref by itself, and where a role may find what others, its own asynchronous stores, programs that
# arrived before or other devices have changed.
WRITES = (Store, Atomic, AsyncStore)
MEETS = (Wait, StoreWait, LastArrival, *MEETING)


def written(op_or_block: Op | Block, roots: Mapping[Value, Value]) -> list[Value]:
    """Buffers that an op, or any op inside a region, may change as far as this role sees; each once. After a wait, or
    an arrival or a signal, they are all those that anyone may write."""
    if isinstance(op_or_block, Op) and not op_or_block.blocks() and not isinstance(op_or_block, WRITES + MEETS):
        return []
    ops = op_or_block.walk() if isinstance(op_or_block, Block) else Block((), [op_or_block]).walk()
    out: dict[Value, None] = {}
    for op in ops:
        if isinstance(op, WRITES):
            out[root(op.ref, roots)] = None
        elif isinstance(op, MEETS):
            out |= {r: None for r in roots.values() if r.type.role != "in"}  # type: ignore[union-attr]
    return list(out)


def is_pure(op: Op) -> bool:
    """Whether an op has no effect of its own, nor inside its regions."""
    return op.effect == "none" and all(is_pure(x) for b in op.blocks() for x in b.ops)


def reads_only(op: Op) -> bool:
    """Whether an op is pure but for loads, also inside its regions."""
    return (op.effect == "none" or isinstance(op, Load)) and all(reads_only(x) for b in op.blocks() for x in b.ops)


def free_values(op: Op) -> list[Value]:
    """Values that an op and its regions take from outside, in order of use."""
    out = op.operands()
    for b in op.blocks():
        own = set(b.params) | {r for x in b.ops for r in x.results}
        inner = [v for x in b.ops for v in free_values(x)] + list(b.yields)
        out += [v for v in inner if v not in own]
    return out
