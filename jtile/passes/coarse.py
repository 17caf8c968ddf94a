"""Writes the kernel that `coarsen` has planned: every value in its lanes, and in others where an op needs it so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jtile import ir
from jtile.ir import Builder, Kernel, Op, Value
from jtile.ir import build as built

from .axes import contraction
from .coarsen import ELEMENTWISE, MOVED, Accesses, Plan, operand_lanes, reduced, same_axis
from .lanes import ANY, Kind, Lanes, New, Refused, Wide, before, place
from .nests import tidy

Keeps = Callable[[Op, Op], bool]


def build(plan: Plan, keeps: Keeps) -> Kernel:
    """The kernel of a plan.

    Raises:
      Refused: something has no form in the lanes that it needs, or `keeps` says no.
    """
    kernel = plan.kernel
    writer = _Writer(plan, keeps)
    with writer.b.region() as body:
        writer.block(kernel.body)
    grid = tuple(-(-n // plan.count) if k == plan.over else n for k, n in enumerate(kernel.grid))
    return tidy(dataclasses.replace(kernel, grid=grid, body=body))


class _Writer:
    def __init__(self, plan: Plan, keeps: Keeps):
        self.plan, self.keeps, self.programs = plan, keeps, plan.count
        self.b = Builder()
        self.env: dict[Value, Value] = {}
        self.made: list[dict[tuple[Value, Lanes | None], Value]] = [{}]  # by region: what was made in other lanes

    # -- ops ----------------------------------------------------------------------------------------------------------
    def block(self, b: ir.Block) -> None:
        self.made.append({})
        for op in b.ops:
            self.b.loc = op.loc
            self.op(op)
        self.made.pop()

    def op(self, op: Op) -> None:
        match op:
            case ir.For():
                return self.loop(op)
            case ir.If():
                return self.branch(op)
            case ir.Load() | ir.Store() | ir.Atomic() if op in self.plan.access:
                return self.memory(op)
            case ir.NumPrograms() if op.axis == self.plan.over:
                self.env[op.result] = self.b.index(self.plan.size)
                return None
        kinds = [self.plan.kind(r) for r in op.results]
        if op in self.plan.totals and any(self.plan.kind(v) is not None for v in op.operands()):
            _total(self, op)
        elif all(k is None for k in kinds):
            self.put(op, op.clone(self.same))
        elif not (isinstance(kinds[0], str) or isinstance(op, MOVED)):
            next(_RULES[card] for card in type(op).__mro__ if card in _RULES)(self, op, kinds[0])
        return None

    def put(self, old: Op, new: Op) -> None:
        """Add an op in the place of an old one; its results have the types that their operands give."""
        if not self.keeps(old, built(new, old.loc, tuple(r.name for r in old.results))):
            raise Refused(f"{old.mnemonic} would be computed otherwise")
        self.b.block.ops.append(new)
        self.env.update(zip(old.results, new.results, strict=True))

    def loop(self, op: ir.For) -> None:
        kinds = [self.plan.kind(v) for v in op.results]
        inits = tuple(self.get(v, k) for v, k in zip(op.inits, kinds, strict=True))
        with self.region(op.body, [op.lo.type, *(v.type for v in inits)]) as body:
            self.block_into(op.body, body, kinds)
        lo, hi, step = map(self.same, (op.lo, op.hi, op.step))
        if op is self.plan.over:
            hi = self.b.full(self.plan.size // self.plan.count, (), hi.dtype)
        self.put(op, ir.For(lo, hi, step, inits, body, op.stages, op.unroll))

    def branch(self, op: ir.If) -> None:
        kinds = [self.plan.kind(v) for v in op.results]
        blocks = []
        for b in (op.then, op.orelse):
            with self.region(b, ()) as new:
                self.block_into(b, new, kinds)
            blocks.append(new)
        self.put(op, ir.If(self.same(op.cond), *blocks))

    def region(self, old: ir.Block, types: Sequence[Any]) -> Any:
        return self.b.region(list(types), tuple(p.name for p in old.params))

    def block_into(self, old: ir.Block, new: ir.Block, kinds: Sequence[Kind]) -> None:
        self.env.update(zip(old.params, new.params, strict=True))
        self.made.append({})
        self.block(old)
        new.yields = tuple(self.get(y, k) for y, k in zip(old.yields, kinds, strict=True))
        self.made.pop()

    # -- memory -------------------------------------------------------------------------------------------------------
    def memory(self, op: Accesses) -> None:
        lanes = self.plan.access[op]
        fields: dict[str, Any] = {"index": self.index(op)}
        if op.mask is not None:
            fields["mask"] = self.get(op.mask, lanes)
        if isinstance(op, ir.Store | ir.Atomic):
            fields["value"] = self.get(op.value, lanes)
            if self.plan.ragged and not self.ends_outside(op):
                alive = self.alive(op.value.shape, lanes)
                fields["mask"] = self.b.map("and", fields["mask"], alive) if op.mask is not None else alive
        if not isinstance(op, ir.Atomic):
            fields["checked"] = op.checked or self.plan.ragged
        new = dataclasses.replace(op, **fields)
        self.put(op, new)

    def index(self, op: Accesses) -> ir.Index:
        """The index of the elements that all of the programs access."""
        plan, takes = self.plan, [d for d in op.index if isinstance(d, ir.Take)]
        inner: Lanes | None = None
        if any(plan.kind(d.indices) is not None for d in takes):
            inner = plan.of_takes([d.indices for d in takes])
        out: list[Any] = []
        for d in op.index:
            v = ir.dim_value(d)
            if isinstance(d, ir.Take):
                out.append(ir.Take(self.get(v, inner)))
            elif plan.kind(v) is None:
                out.append(ir.core.with_dim_value(d, self.same(v)))
            else:
                out.append(self.dim(d, v))
        return tuple(out)

    def dim(self, d: Any, v: Value) -> Any:
        n, grows = self.programs, self.plan.slopes(v)
        plain = self.plan.counts(v)
        match d:
            case ir.Tile(_, size, step):
                if plain:
                    return ir.Tile(self.id(), n * size, n * step)
                return ir.Tile(self.origin(v), n * size, step)
            case ir.Span(_, size, stride):
                assert grows is not None
                return ir.Span(self.origin(v), n * size, grows.program if size == 1 else stride)
        if grows is None or grows.program < 1:
            return ir.Take(self.get(v, New(0)))
        return ir.Tile(self.id(), n, n) if plain else ir.Span(self.origin(v), n, grows.program)

    def ends_outside(self, op: ir.Store | ir.Atomic) -> bool:
        """Whether programs that do not exist would access nothing but what lies outside of the array."""
        end = self.plan.size
        for d, n in zip(op.index, op.ref.shape, strict=True):
            if self.plan.counts(ir.dim_value(d)):
                return end * (d.step if isinstance(d, ir.Tile) else 1) >= n
        return False

    def alive(self, shape: Sequence[int], lanes: Lanes) -> Value:
        """Which elements are of programs that exist."""
        b, n = self.b, self.programs
        count = b.value(ir.Iota((n,), 0, "int32"))
        number = b.map("add", count, b.splat(b.map("mul", self.id(), b.index(n)), (n,)))
        there = b.map("lt", number, b.full(self.plan.size, (n,)))
        at = New(lanes.at).shape(shape, n)
        return b.reshape(b.value(ir.Broadcast(there, at, (lanes.at,))), lanes.shape(shape, n))

    # -- values in other lanes ----------------------------------------------------------------------------------------
    def same(self, v: Value) -> Value:
        return self.env.get(v, v)

    def id(self) -> Value:
        """The number of the new program, or of the new round."""
        over = self.plan.over
        return self.env[over.body.params[0]] if isinstance(over, ir.For) else self.b.value(ir.ProgramId(over))

    def get(self, v: Value, want: Kind) -> Value:
        """A value in some lanes; with None, one that is the same in all programs as it is."""
        if want is None:
            if self.plan.kind(v) is not None:
                raise Refused("one value for all")
            return self.same(v)
        assert not isinstance(want, str)
        for made in reversed(self.made):
            if (v, want) in made:
                return made[v, want]
        out = self.make(v, want)
        if out.shape != want.shape(v.shape, self.programs):
            raise AssertionError(f"{v!r} became {out!r} in {want}")
        self.made[-1][v, want] = out
        return out

    def make(self, v: Value, want: Lanes) -> Value:
        kind, op = self.plan.kind(v), v.op
        if isinstance(kind, New | Wide) and not isinstance(op, MOVED):
            return self.turned(self.env[v], v.shape, kind, want)
        if kind == ANY and (grows := self.plan.slopes(v)) is not None:
            return self.even(v, grows, want)
        match op:
            case ir.Broadcast():
                return self.broadcast(op, want)
            case ir.Reshape() if kind is not None:
                return self.reshape(op, want)
            case ir.Transpose() if kind is not None:
                return self.transpose(op, want)
            case ir.Map() | ir.Select() | ir.Cast() | ir.Bitcast() if kind is not None or isinstance(want, Wide):
                return self.add(op.clone(lambda x: self.get(x, want)))
        if kind is not None:
            raise Refused(f"{op} in other lanes")
        return self.repeated(v, want)

    def add(self, op: Op) -> Value:
        return self.b.add(op).result

    def turned(self, x: Value, shape: Sequence[int], kind: Lanes, want: Lanes) -> Value:
        """A tile in lanes that have its elements in the same order."""
        if before(kind, shape) != before(want, shape):
            raise Refused("lanes that would have to be transposed")
        return self.b.reshape(x, want.shape(shape, self.programs))

    def repeated(self, v: Value, want: Lanes) -> Value:
        """A value that is the same in all programs."""
        b, n, op = self.b, self.programs, v.op
        shape = want.shape(v.shape, n)
        if isinstance(op, ir.Full):
            return b.full(op.value, shape, op.dtype)
        if isinstance(op, ir.Iota) and isinstance(want, Wide):
            count = self.add(ir.Iota(shape, op.axis, op.dtype))
            by = v.shape[want.at]
            return count if op.axis != want.at else b.map("rem", count, b.full(by, shape, op.dtype))
        dims = [*range(len(v.shape))]
        if isinstance(want, Wide) and v.shape[want.at] == 1:
            return self.add(ir.Broadcast(self.same(v), shape, tuple(dims)))
        dims = tuple(d + (d >= want.at) for d in dims)
        return b.reshape(self.add(ir.Broadcast(self.same(v), New(want.at).shape(v.shape, n), dims)), shape)

    def even(self, v: Value, grows: Any, want: Lanes) -> Value:
        """Integers that grow evenly from program to program and along axes."""
        b, n = self.b, self.programs
        shape = want.shape(v.shape, n)
        terms: list[tuple[Value, int]] = []

        def along(axis: int) -> Value:
            return self.add(ir.Iota(shape, axis, v.dtype))

        by = dict(grows.axes)
        if isinstance(want, New):
            terms.append((along(want.at), grows.program))
            by = {a + (a >= want.at): c for a, c in by.items()}
        else:
            size, c = v.shape[want.at], by.pop(want.at, 0)
            if size == 1 or grows.program == c * size:
                terms.append((along(want.at), grows.program if size == 1 else c))
            else:
                length = b.full(size, shape, v.dtype)
                terms.append((b.map("div", along(want.at), length), grows.program))
                terms.append((b.map("rem", along(want.at), length), c))
        terms += [(along(a), c) for a, c in by.items()]
        out = None
        for x, c in terms:
            x = x if c == 1 else b.map("mul", x, b.full(c, shape, v.dtype))
            if c:
                out = x if out is None else b.map("add", out, x)
        first = b.splat(b.cast(self.origin(v), v.dtype), shape)
        return first if out is None else b.map("add", out, first)

    def origin(self, v: Value) -> Value:
        """The first element of a tile that grows evenly, in the first of the programs."""
        key = (v, None)
        for made in reversed(self.made):
            if key in made:
                return made[key]
        self.made[-1][key] = out = self.first(v)
        return out

    def first(self, v: Value) -> Value:
        if self.plan.kind(v) is None and not v.shape:
            return self.same(v)
        if self.plan.counts(v):
            return self.b.map("mul", self.id(), self.b.full(self.programs, (), v.dtype))
        match v.op:
            case ir.Full(value, _, dtype):
                return self.b.full(value, (), dtype)
            case ir.Iota(_, _, dtype):
                return self.b.full(0, (), dtype)
            case ir.Cast(x, dtype):
                return self.b.cast(self.origin(x), dtype)
            case ir.Broadcast(x) | ir.Reshape(x):
                return self.origin(x)
            case ir.Map(fn, args):
                return self.b.map(fn, *map(self.origin, args))
        raise AssertionError(v)

    # -- what moves elements ------------------------------------------------------------------------------------------
    def broadcast(self, op: ir.Broadcast, want: Lanes) -> Value:
        x, dims, k = op.x, op.dims, want.at
        shape = want.shape(op.shape, self.programs)
        same = self.plan.kind(x) is None
        q = sum(d < k for d in dims)  # axes of x in front of the lanes
        if isinstance(want, New):
            moved = [d + (d >= k) for d in dims]
            if same:
                return self.add(ir.Broadcast(self.same(x), shape, tuple(moved)))
            return self.add(ir.Broadcast(self.get(x, New(q)), shape, (*moved[:q], k, *moved[q:])))
        if k in dims and x.shape[q] == op.shape[k]:
            return self.add(ir.Broadcast(self.get(x, Wide(q)), shape, dims))
        if same:
            return self.add(ir.Broadcast(self.same(x), shape, dims))
        if op.shape[k] == 1:  # and no axis of x stands there
            return self.add(ir.Broadcast(self.get(x, New(q)), shape, (*dims[:q], k, *dims[q:])))
        return self.b.reshape(self.broadcast(op, New(k)), shape)

    def reshape(self, op: ir.Reshape, want: Lanes) -> Value:
        shape = want.shape(op.shape, self.programs)
        if isinstance(want, Wide) and (axis := same_axis(want.at, op.shape, op.x.shape)) is not None:
            return self.b.reshape(self.get(op.x, Wide(axis)), shape)
        found = place(op.x.shape, before(want, op.shape))
        if found is None:
            raise Refused("a reshape through the lanes")
        return self.b.reshape(self.get(op.x, found), shape)

    def transpose(self, op: ir.Transpose, want: Lanes) -> Value:
        if isinstance(want, Wide):
            return self.add(ir.Transpose(self.get(op.x, Wide(op.perm[want.at])), op.perm))
        kind = self.plan.kind(op.x)
        q = kind.at if isinstance(kind, New) else 0
        moved = [d + (d >= q) for d in op.perm]
        return self.add(ir.Transpose(self.get(op.x, New(q)), (*moved[: want.at], q, *moved[want.at :])))


# -- ops that are computed in their own lanes -----------------------------------------------------------------------


def _elementwise(w: _Writer, op: Op, kind: Lanes) -> None:
    w.put(op, op.clone(lambda x: w.get(x, kind)))


def _moved(w: _Writer, op: Any, kind: Lanes) -> None:
    new = isinstance(kind, New)
    shift = lambda axis: axis + (new and axis >= kind.at)

    def beside(numbers: Sequence[int], neutral: int) -> tuple[int, ...]:
        if new:
            return (*numbers[: kind.at], neutral, *numbers[kind.at :])
        return tuple(neutral if k == kind.at else n for k, n in enumerate(numbers))

    match op:
        case ir.Concat():
            w.put(op, ir.Concat(tuple(w.get(x, kind) for x in op.xs), shift(op.axis)))
        case ir.Cumulative():
            w.put(op, dataclasses.replace(op, x=w.get(op.x, kind), axis=shift(op.axis)))
        case ir.Reverse():
            w.put(op, ir.Reverse(w.get(op.x, kind), tuple(map(shift, op.axes))))
        case ir.Pad():
            fields = beside(op.low, 0), beside(op.high, 0), beside(op.interior, 0)
            w.put(op, ir.Pad(w.get(op.x, kind), w.same(op.value), *fields))
        case ir.Slice():
            x = w.get(op.x, kind)
            w.put(op, ir.Slice(x, beside(op.starts, 0), beside(op.stops, x.shape[kind.at]), beside(op.strides, 1)))


def _reduce(w: _Writer, op: ir.Reduce | ir.ArgReduce, kind: Lanes) -> None:
    lanes = operand_lanes(w.plan, op)
    axes = tuple(a + (isinstance(lanes, New) and a >= lanes.at) for a in reduced(op))
    fields = {"axes": axes} if isinstance(op, ir.Reduce) else {"axis": axes[0]}
    w.put(op, dataclasses.replace(op, x=w.get(op.x, lanes), **fields))


def _dot(w: _Writer, op: ir.Dot, kind: Lanes) -> None:
    a, b = w.plan.kind(op.a), w.plan.kind(op.b)
    a = w.same(op.a) if a is None else w.get(op.a, Wide(1 if op.trans_a else 0))
    b = w.same(op.b) if b is None else w.get(op.b, Wide(0 if op.trans_b else 1))
    w.put(op, dataclasses.replace(op, a=a, b=b, acc=None if op.acc is None else w.get(op.acc, kind)))


def _total(w: _Writer, op: ir.Dot | ir.Reduce) -> None:
    """What is summed over the rounds, of all of them."""
    if isinstance(op, ir.Dot):
        (_, of_a), (of_b, _) = contraction(op)
        a, b = w.get(op.a, Wide(of_a)), w.get(op.b, Wide(of_b))
        return w.put(op, dataclasses.replace(op, a=a, b=b, acc=op.acc and w.same(op.acc)))
    kind = w.plan.kind(op.x)
    return w.put(op, dataclasses.replace(op, x=w.get(op.x, kind)))


_RULES: dict[type[Op], Callable[[_Writer, Any, Any], None]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys((ir.Concat, ir.Slice, ir.Pad, ir.Reverse, ir.Cumulative), _moved),
    **dict.fromkeys((ir.Reduce, ir.ArgReduce), _reduce),
    ir.Dot: _dot,
}
