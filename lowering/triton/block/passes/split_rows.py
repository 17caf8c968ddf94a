"""Cuts the work of a program along the rows of its products, so that several warpgroups take a share each.

First every value that depends on rows of a product gets the axis along which they lie (forward); then every op is asked
in which forms its result is needed, cut or whole (backward). An op that would need the rows of other shares, such as a
sum over them, is a reason not to cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

from jtile.ir import (
    Alloc,
    Assert,
    Atomic,
    Block,
    Broadcast,
    Builder,
    Dim,
    Dot,
    DotScaled,
    For,
    Full,
    If,
    Index,
    Iota,
    Kernel,
    Load,
    Map,
    Op,
    Reshape,
    Slice,
    Span,
    Store,
    Tile,
    TileType,
    Type,
    Value,
    While,
    copy_block,
    dim_value,
)
from jtile.ir.builder import build
from jtile.passes.rewrite import buffers

from .plan import NoPlan, Refusal, refuse
from .row_axes import Axis, index_axes, operand_axes

ROWS = 64  # rows of one warpgroup's product
_COMMUTING = ("add", "max", "min", "and", "or", "xor")


def split(kernel: Kernel, consumers: int) -> Split | NoPlan:
    """`kernel` (at tile level) in `consumers` shares of the rows of its products, or why there are none.

    The shares touch different elements of the outputs, in the order in which the kernel does, so that all results are
    the same bit for bit.
    """
    return _split(kernel, consumers, analyse=consumers > 1)


def by_rows(kernel: Kernel) -> Split | NoPlan:
    """The kernel as one share that knows, for all values, the axis along which the rows of its products lie; or, where
    an op mixes rows, why there is none."""
    return _split(kernel, 1, analyse=True)


def _split(kernel: Kernel, consumers: int, *, analyse: bool) -> Split | NoPlan:
    try:
        rows = _Rows(kernel, consumers, analyse)
        return Split(kernel, consumers, rows.wanted, rows.cut)
    except Refusal as e:
        return e.no_plan


@dataclasses.dataclass(frozen=True)
class Split:
    """The shares of a kernel.

    Attributes:
      consumers: number of shares.
      wanted: for each value the forms in which it is needed: cut along an axis, or whole (None).
      cut: the axis of the operand of a store, an atomic or an assert; None for an op that only the first share has.
    """

    kernel: Kernel
    consumers: int
    wanted: dict[Value, set[Axis]]
    cut: dict[Op, Axis]

    @property
    def axes(self) -> dict[Load, Axis]:
        """The axis along which the tile of each load that is needed is cut; None: every share has all of it."""
        loads = (op for op in self.kernel.body.walk() if isinstance(op, Load))
        return {op: next(iter(self.wanted[op.result])) for op in loads if self.wanted.get(op.result)}

    def body(self, w: int) -> tuple[Block, dict[Load, Load]]:
        """The body of share `w`, whose values are new, and for each load of the kernel the load of this share."""
        share = _Share(self, w)
        return share.block(self.kernel.body, ()), share.loads


# -- analysis ---------------------------------------------------------------------------------------------------------


class _Rows:
    """Which axis of each value lies along the rows, and in which forms each value is needed."""

    def __init__(self, kernel: Kernel, consumers: int, analyse: bool):
        self.consumers = consumers
        self.natural: dict[Value, int] = {}
        self.wanted: dict[Value, set[Axis]] = {}
        self.cut: dict[Op, Axis] = {}
        if analyse:
            _check_memory(kernel)
            self._until_stable(lambda: self.forward(kernel.body), self.natural)
            _check_order(kernel, self.cut)
        self._until_stable(lambda: self.backward(kernel.body), self.wanted)

    @staticmethod
    def _until_stable(step, facts: dict) -> None:
        size = -1
        while size != (size := sum(len(x) if isinstance(x, set) else 1 for x in facts.values())):
            step()

    # forward
    def forward(self, b: Block) -> None:
        for op in b.ops:
            match op:
                case For():
                    self.loop(op, op.body.params[1:], op.body)
                case While():
                    self.loop(op, op.body.params, op.body, op.cond)
                case If():
                    self.forward(op.then)
                    self.forward(op.orelse)
                    for r, *ys in zip(op.results, op.then.yields, op.orelse.yields, strict=True):
                        self.same(op, [r], [*ys])
                case _:
                    self.plain(op)

    def loop(self, op: For | While, params: tuple[Value, ...], *blocks: Block) -> None:
        columns = [op.results, params, op.inits, blocks[0].yields] + [b.params for b in blocks[1:]]
        for group in zip(*columns, strict=True):
            self.same(op, [group[0], group[1], *group[4:]], list(group))
        for b in blocks:
            self.forward(b)

    def same(self, op: Op, values: list[Value], of: list[Value]) -> None:
        """Note that the rows of `values` lie along the same axis as those of the known ones of the values `of`."""
        axes = {self.natural[v] for v in of if v in self.natural}
        if len(axes) > 1:
            refuse("a tile lies along the rows of the products in two ways", op)
        for v in values:
            self.natural.update((v, a) for a in axes)

    def plain(self, op: Op) -> None:
        rows = [self.natural.get(v) for v in op.operands()]
        if isinstance(op, Dot | DotScaled):
            axis = len(op.result.shape) - 2
            if op.result.shape[axis] % (ROWS * self.consumers):
                n = op.result.shape[axis]
                refuse(f"{n} rows of a product are not {self.consumers} shares of whole {ROWS}s", op)
        elif all(a is None for a in rows):
            return
        else:
            axis = self.axis_of(op, rows)
        needed = operand_axes(op, axis) if not isinstance(op, Assert) else [axis]
        if needed is None or any(a is not None and a != n for a, n in zip(rows, needed, strict=True)):
            refuse(f"{op.mnemonic} mixes the rows of a product", op)
        if not op.results or isinstance(op, Atomic):
            self.cut[op] = axis
        for r in op.results:
            self.natural[r] = axis

    def axis_of(self, op: Op, rows: list[Axis]) -> int:
        """The axis of the result (of a store: of its value) that lies along the rows."""
        if isinstance(op, Assert):
            return rows[0] or 0
        shape = op.value.shape if isinstance(op, Store) else op.results[0].shape if op.results else ()
        for axis, n in enumerate(shape):
            needed = operand_axes(op, axis) if n % self.consumers == 0 else None
            if needed is not None and all(a in (None, k) for a, k in zip(rows, needed, strict=True)):
                return axis
        refuse(f"{op.mnemonic} mixes the rows of a product", op)

    # backward
    def want(self, op: Op, v: Value, axis: Axis) -> None:
        natural = self.natural.get(v)
        if natural is not None and axis != natural:
            refuse(f"{op.mnemonic} needs all rows of a product", op)
        if axis is not None and v.shape[axis] % self.consumers:
            refuse(f"{v.shape[axis]} rows do not divide into {self.consumers} shares", op)
        self.wanted.setdefault(v, set()).add(axis)

    def backward(self, b: Block) -> None:
        for op in reversed(b.ops):
            if op.blocks() and isinstance(op, For | While | If):
                self.region(op)
                continue
            forms = set().union(*(self.wanted.get(r, set()) for r in op.results))
            if op.effect in ("write", "io"):
                forms.add(self.cut.get(op))
            for axis in forms:
                self.operands(op, axis)
            if isinstance(op, Atomic) and self.consumers > 1 and op not in self.cut and op.result in self.wanted:
                refuse("every share needs what this atomic gives", op)
            if len(forms) > 1 and isinstance(op, Load | Atomic):
                refuse(f"the tile of this {op.mnemonic} is needed whole and by rows", op)

    def operands(self, op: Op, axis: Axis) -> None:
        needed: Sequence[Axis] | None = [None] * len(op.operands())
        if axis is not None:
            needed = [axis] if isinstance(op, Assert) else operand_axes(op, axis)
        if needed is None:
            refuse(f"{op.mnemonic} cannot be cut along axis {axis} of its result", op)
        for v, a in zip(op.operands(), needed, strict=True):
            self.want(op, v, a)

    def region(self, op: For | While | If) -> None:
        for v in op.operands():
            if isinstance(op, If) or v not in op.inits:
                self.want(op, v, None)
        if isinstance(op, If):
            columns = [op.results, op.then.yields, op.orelse.yields]
        else:
            columns = [op.results, op.body.params[-len(op.inits) :] if op.inits else (), op.inits, op.body.yields]
            columns += [op.cond.params] if isinstance(op, While) else []
        for y in op.cond.yields if isinstance(op, While) else ():
            self.want(op, y, None)
        for group in zip(*columns, strict=True):
            axis = self.one_form(op, group)
            for v in group:
                self.want(op, v, axis)
        for b in op.blocks():
            self.backward(b)

    def one_form(self, op: Op, group: tuple[Value, ...]) -> Axis:
        """The form of a carry, or of a result of a branch, which can have one form only."""
        natural = [self.natural[v] for v in group if v in self.natural]
        own = group[:1] if isinstance(op, If) else (group[0], group[1], *group[4:])
        forms = {natural[0]} if natural else set().union(*(self.wanted.get(v, set()) for v in own))
        if len(forms) > 1:
            refuse(f"a tile that this {op.mnemonic} gives is needed whole and by rows", op)
        return next(iter(forms), None)


def _check_memory(kernel: Kernel) -> None:
    """Refuse kernels in which a share would read what another one writes: shares do not wait for each other."""
    roots = buffers(kernel)
    ops = list(kernel.body.walk())
    written = {roots.get(op.ref, op.ref) for op in ops if isinstance(op, Store | Atomic)}
    for op in ops:
        if isinstance(op, Load) and roots.get(op.ref, op.ref) in written:
            refuse("the kernel reads an array that it writes", op)
        if isinstance(op, Alloc):
            refuse("the kernel has scratch memory", op)


def _check_order(kernel: Kernel, cut: dict[Op, Axis]) -> None:
    """Refuse kernels whose ops on one array are cut in several ways: what an op overwrites must be of its own share."""
    roots = buffers(kernel)
    found: dict[Value, list[Store | Atomic]] = {}
    for op in kernel.body.walk():
        if isinstance(op, Store | Atomic):
            found.setdefault(roots.get(op.ref, op.ref), []).append(op)
    for ops in found.values():
        combined = all(isinstance(op, Atomic) and op.fn in _COMMUTING for op in ops)
        if not (combined and len({op.fn for op in ops}) == 1) and len({_part(op, cut.get(op)) for op in ops}) > 1:
            refuse(f"several ops write {ops[1].ref.name or 'an array'}, not all of them cut alike", ops[1])


def apart(shares: Split) -> Split | NoPlan:
    """The shares, or why a later round of a loop may write what another share wrote in an earlier one: shares go around
    loops at their own speed. (Programs write different elements, so a loop over programs needs no such check.)"""
    if shares.consumers == 1:
        return shares
    for loop in (op for op in shares.kernel.body.walk() if isinstance(op, For | While)):
        own = made_in(loop)
        for op in (x for b in loop.blocks() for x in b.walk()):
            axis = shares.cut.get(op)
            if axis is None or not isinstance(op, Store | Atomic) or (isinstance(op, Atomic) and op.fn in _COMMUTING):
                continue
            if _part(op, axis)[-1] in own:
                return NoPlan(f"rounds of a loop may write the same rows of {op.ref.name or 'an array'}", op.loc)
    return shares


def made_in(loop: For | While) -> set[Value]:
    """The values of the regions of a loop, which may be others in another round."""
    inside = [x for b in loop.blocks() for x in b.walk()]
    params = {p for op in (loop, *inside) for b in op.blocks() for p in b.params}
    return params | {r for op in inside for r in op.results}


def _part(op: Store | Atomic, axis: Axis) -> tuple[Hashable, ...]:
    """Which rows of an array a share writes: the same for two ops whose shares never meet."""
    if axis is None:
        return ()
    k, inside = index_axes(op.index)[axis]
    d = op.index[k]
    whole = isinstance(d, Tile) and d.step == d.size  # two such tiles are equal, or have no element in common
    static = getattr(d, "size", None), getattr(d, "stride", None)
    return k, inside, type(d), *static, None if whole else dim_value(d)


# -- the shares -------------------------------------------------------------------------------------------------------


class _Share:
    """Builds the body of one share; `env` has each value in the forms that are needed."""

    def __init__(self, plan: Split, w: int):
        self.plan, self.w, self.n = plan, w, plan.consumers
        self.b = Builder()
        self.env: dict[tuple[Value, Axis], Value] = {}
        self.loads: dict[Load, Load] = {}

    def look(self, v: Value, axis: Axis = None) -> Value:
        return self.env.get((v, axis), v)

    def form(self, v: Value) -> Axis:
        """The form of a value that is needed in one at most."""
        return next(iter(self.plan.wanted.get(v, ())), None)

    def type(self, v: Value) -> Type:
        axis = self.form(v)
        return v.type if axis is None else TileType(self.shape(v.shape, axis), v.dtype)

    def shape(self, shape: tuple[int, ...], axis: Axis) -> tuple[int, ...]:
        return tuple(n // self.n if k == axis else n for k, n in enumerate(shape))

    def block(self, old: Block, yields_as: tuple[Axis, ...]) -> Block:
        types = [self.type(p) for p in old.params]
        with self.b.region(types, tuple(p.name for p in old.params)) as new:
            for p, q in zip(old.params, new.params, strict=True):
                self.env[p, self.form(p)] = q
            for op in old.ops:
                self.op(op)
            new.yields = tuple(self.look(y, a) for y, a in zip(old.yields, yields_as, strict=True))
        return new

    def op(self, op: Op) -> None:
        self.b.loc = op.loc
        if isinstance(op, For | While | If):
            return self.region(op)
        forms = set().union(*(self.plan.wanted.get(r, set()) for r in op.results))
        if op.effect in ("write", "io"):
            axis = self.plan.cut.get(op)
            forms = {axis} if axis is not None or self.w == 0 else set()
        for axis in sorted(forms, key=lambda a: -1 if a is None else a):
            new = self.cut(op, axis)
            for r, s in zip(op.results, new.results, strict=True):
                self.env[r, axis] = s
        return None

    def region(self, op: For | While | If) -> None:
        axes = tuple(self.form(r) for r in op.results)
        if isinstance(op, If):
            new: Op = If(self.look(op.cond), self.block(op.then, axes), self.block(op.orelse, axes))
        else:
            inits = tuple(self.look(v, a) for v, a in zip(op.inits, axes, strict=True))
            if isinstance(op, For):
                bounds = {n: self.look(getattr(op, n)) for n in ("lo", "hi", "step")}
                new = dataclasses.replace(op, **bounds, inits=inits, body=self.block(op.body, axes))
            else:
                new = While(inits, self.block(op.cond, (None,)), self.block(op.body, axes))
        self.b.loc = op.loc
        self.b.add(new, *(r.name for r in op.results))
        for r, s, a in zip(op.results, new.results, axes, strict=True):
            self.env[r, a] = s

    def cut(self, op: Op, axis: Axis) -> Op:
        """The op in the share, with its result along `axis`."""
        if axis is None or self.n == 1:
            needed: Sequence[Axis] = [None] * len(op.operands())
        else:
            needed = [axis] if isinstance(op, Assert) else operand_axes(op, axis) or []
        given = iter(needed)
        new = op.clone(lambda v: self.look(v, next(given)), lambda b: copy_block(b, self.look))
        if axis is not None and self.n > 1:
            self.place(new, axis)
        self.b.block.ops.append(build(new, op.loc, tuple(r.name for r in op.results)))
        if isinstance(op, Load) and isinstance(new, Load):
            self.loads[op] = new
        return self.shifted(new) if isinstance(new, Iota) and new.axis == axis and self.w else new

    def place(self, new: Op, axis: int) -> None:
        """Give a new op the shapes and places that it has in the share."""
        match new:
            case Full() | Iota() | Broadcast() | Reshape():
                new.shape = self.shape(new.shape, axis)
            case Slice():
                new.stops = self.shape(new.stops, axis)
            case Load() | Store() | Atomic():
                new.index = self.index(new.index, axis)

    def index(self, index: Index, axis: int) -> Index:
        k, inside = index_axes(index)[axis]
        return tuple(self.part(d) if j == k and inside is None else d for j, d in enumerate(index))

    def part(self, d: Dim) -> Dim:
        assert isinstance(d, Span | Tile)  # only these give an axis of the tile
        size, i = d.size // self.n, dim_value(d)
        if isinstance(d, Span):
            return Span(self.affine(i, 1, self.w * size * d.stride), size, d.stride)
        if d.step == d.size:
            return Tile(self.affine(i, self.n, self.w), size, size)
        return Span(self.affine(i, d.step, self.w * size), size)

    def affine(self, i: Value, factor: int, offset: int) -> Value:
        """The scalar `i * factor + offset`."""
        b = self.b
        i = b.map("mul", i, b.full(factor, (), i.dtype)) if factor != 1 else i
        return b.map("add", i, b.full(offset, (), i.dtype)) if offset else i

    def shifted(self, iota: Iota) -> Op:
        first = self.b.full(self.w * iota.shape[iota.axis], iota.shape, iota.dtype)
        return self.b.add(Map("add", (iota.result, first)))
