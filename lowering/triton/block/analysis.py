"""The layout that each tile of a role lives in.

Products fix the layouts of their accumulators. From there layouts flow along: arithmetic takes that of its operands,
reductions what is left of it, loops that of what they carry. What nothing has reached takes what its users want (loads,
masks), or neighbours for each thread. Constants, counters and broadcasts live nowhere: each use makes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jtile import ir

from ..emitter import elem_of
from .layouts import (
    Blocked,
    Layout,
    Linear,
    Mma,
    Operand,
    Sliced,
    blocked,
    mma,
    origin,
    places,
    sliced,
    unsliced,
)
from .linear import linear, permuted, reshaped

COLUMNS = 256  # columns of an instruction for products, at most
POINTWISE = (ir.Map, ir.Select, ir.Cast, ir.Bitcast)


def is_free(v: ir.Value) -> bool:
    """Whether a tile is made anew for each layout that somebody wants it in."""
    op = v.op
    return isinstance(op, ir.Full | ir.Iota | ir.Broadcast) or (isinstance(op, ir.Reshape) and spread(op) is not None)


def spread(op: ir.Reshape) -> tuple[int, ...] | None:
    """The axes of the operand in the result of a reshape that only adds axes of length 1; None for other reshapes."""
    dims, at = [], 0
    for n in op.x.shape:
        while at < len(op.shape) and op.shape[at] != n and op.shape[at] == 1:
            at += 1
        if at == len(op.shape) or op.shape[at] != n:
            return None
        dims.append(at)
        at += 1
    return tuple(dims) if len(op.shape) > len(dims) and all(n == 1 for n in op.shape[at:]) else None


def dims_of(op: ir.Broadcast | ir.Reshape) -> tuple[int, ...]:
    """Where the axes of the operand of a free op stand in its result."""
    return op.dims if isinstance(op, ir.Broadcast) else spread(op) or ()


def product_layout(op: ir.DotAsync, warps: int, widest: int) -> Mma | None:
    """The layout of the accumulator of a product, of instructions of up to `widest` columns; None where warpgroups
    cannot compute it."""
    widest = min(widest, 128) if op.a.dtype == "int8" else widest  # triton's integer products have at most 224
    m, n = op.result.shape
    return mma(m, n, ir.DTYPES[op.a.dtype].bits, warps, widest=widest)


def operand_layout(op: ir.DotAsync, warps: int, widest: int) -> Operand | None:
    """The layout of the left operand of a product in registers."""
    out = product_layout(op, warps, widest)
    return None if out is None else Operand(out, 32 // ir.DTYPES[op.a.dtype].bits)


class Homes:
    """The layouts of one role's tiles: `homes[v]`; `widest`: columns that an instruction of its products may have."""

    def __init__(self, body: ir.Block, warps: int, widest: int = COLUMNS):
        self.warps, self.widest = warps, widest
        self._ops = list(body.walk())
        products, depth = any(isinstance(op, ir.DotAsync) for op in self._ops), _depths(body)
        self._by_depth = self._ops if products else sorted(self._ops, key=lambda op: -depth[op])
        self._same: dict[ir.Value, ir.Value] = {}
        self._home: dict[ir.Value, Layout] = {}
        self._users: dict[ir.Value, list[tuple[ir.Op, int]]] = {}
        self._yielded: dict[ir.Value, list[ir.Value]] = {}  # value -> the results of regions that it is yielded to
        for op in self._ops:
            for k, v in enumerate(op.operands()):
                self._users.setdefault(v, []).append((op, k))
            for b in op.blocks():
                for r, y in zip(op.results, b.yields, strict=False):
                    if not isinstance(op, ir.While) or b is op.body:
                        self._yielded.setdefault(y, []).append(r)
            self._tie(op)
        self._group: dict[ir.Value, list[ir.Value]] = {}  # root -> the others that share its layout
        for v in self._same:
            self._group.setdefault(self._root(v), []).append(v)
        self._solve()

    def __getitem__(self, v: ir.Value) -> Layout:
        found = self._home.get(self._root(v))
        return blocked(v.shape, elem_of(v.dtype), self.warps) if found is None else found

    def get(self, v: ir.Value) -> Layout | None:
        """The layout of a tile; None while it has none, and for free tiles."""
        return self._home.get(self._root(v))

    # -- values that share a layout -----------------------------------------------------------------------------------

    def _root(self, v: ir.Value) -> ir.Value:
        while v in self._same:
            v = self._same[v]
        return v

    def _union(self, a: ir.Value, b: ir.Value) -> None:
        a, b = self._root(a), self._root(b)
        if a is not b:
            self._same[b] = a

    def _tie(self, op: ir.Op) -> None:
        """Make values share a layout: a carry has one layout in a loop and behind it, and a wait does not change it."""
        if isinstance(op, ir.For):
            for p, r in zip(op.body.params[1:], op.results, strict=True):
                self._union(p, r)
        elif isinstance(op, ir.While):
            for p, q, r in zip(op.cond.params, op.body.params, op.results, strict=True):
                self._union(p, q)
                self._union(p, r)
        elif isinstance(op, ir.DotWait):
            for a, b in zip(op.values, op.results, strict=True):
                self._union(a, b)

    def _set(self, v: ir.Value, layout: Layout | None) -> bool:
        v = self._root(v)
        if layout is None or not v.shape or v in self._home or is_free(v):
            return False
        self._home[v] = layout
        return True

    # -- the fixpoint -------------------------------------------------------------------------------------------------

    def _solve(self) -> None:
        for op in self._ops:
            if isinstance(op, ir.DotAsync):
                self._set(op.result, product_layout(op, self.warps, self.widest))
        for op in self._ops:
            for v in self._operands_carried(op):
                self._set(v, self._wanted_operand(v))
        self._open = self._ops  # the ops that may still give a layout to a tile
        while self._round(self._forward) or self._round(self._backward) or self._default():
            pass

    def _round(self, rule: Callable[[ir.Op], bool]) -> bool:
        self._open = [op for op in self._open if any(map(self._lacks, _defined(op)))]
        ops = self._open if rule == self._forward else reversed(self._open)
        return sum(map(rule, ops)) > 0  # a sum, since `any` would stop at the first op that changes something

    def _lacks(self, v: ir.Value) -> bool:
        """Whether a value is a tile that has no layout yet."""
        return isinstance(v.type, ir.TileType) and bool(v.shape) and self.get(v) is None and not is_free(v)

    def _operands_carried(self, op: ir.Op) -> Iterator[ir.Value]:
        if isinstance(op, ir.For):
            yield from op.body.params[1:]

    def _wanted_operand(self, v: ir.Value) -> Layout | None:
        """The layout of a carry that only products take, as their left operands."""
        wants = set()
        for u in self._tied(v):
            for op, k in self._users.get(u, []):
                wants.add(
                    operand_layout(op, self.warps, self.widest) if isinstance(op, ir.DotAsync) and k == 0 else None
                )
        return wants.pop() if len(wants) == 1 else None

    def _tied(self, v: ir.Value) -> list[ir.Value]:
        root = self._root(v)
        return [root, *self._group.get(root, ())]

    def _forward(self, op: ir.Op) -> bool:
        """Layouts of results from those of operands."""
        if isinstance(op, ir.For | ir.While):
            inits = zip(op.results, op.body.yields, op.inits, strict=True)
            return sum(self._set(r, self.get(y) or self.get(i)) for r, y, i in inits) > 0
        if isinstance(op, ir.If):
            pairs = zip(op.results, op.then.yields, op.orelse.yields, strict=True)
            return sum(self._set(r, self.get(a) or self.get(b)) for r, a, b in pairs) > 0
        if not op.results or not isinstance(op.results[0].type, ir.TileType) or not op.results[0].shape:
            return False
        r = op.results[0]
        if isinstance(op, POINTWISE):
            found = [h for v in op.operands() if v.shape == r.shape and (h := self.get(v)) is not None]
            return self._set(r, max(found, key=_weight)) if found else False
        if isinstance(op, ir.Reduce | ir.ArgReduce):
            h = self.get(op.x)
            axes = op.axes if isinstance(op, ir.Reduce) else (op.axis,)
            return h is not None and self._set(r, sliced(h, axes))
        return self._set(r, self._moved(op))

    def _moved(self, op: ir.Op) -> Layout | None:
        """The layout of a tile after its elements were moved, where the move costs next to nothing."""
        if isinstance(op, ir.Transpose):
            h = self.get(op.x)
            if h is None or isinstance(h, Blocked):
                return h and transposed(h, op.perm)
            return permuted(linear(h, op.x.shape), op.perm)
        if isinstance(op, ir.Reshape):
            h = self.get(op.x)
            return h and reshaped(linear(h, op.x.shape), op.x.shape, op.shape)
        if isinstance(op, ir.Slice) and (h := self.get(op.x)) is not None:
            if isinstance(h, Mma):
                return Mma(h.warps, min(h.n, op.result.shape[1]), h.k) if _is_part(op, h) else None
            return apart(op, h)
        if isinstance(op, ir.Concat) and isinstance(h := self.get(op.xs[0]), Mma) and h.warps[1] == 1:
            return Mma(h.warps, min(op.result.shape[1], 256), h.k)
        return None

    def _backward(self, op: ir.Op) -> bool:
        """Layouts of results from what their users want."""
        return sum(self._set(v, self._wanted(v)) for v in _defined(op) if isinstance(v.type, ir.TileType)) > 0

    def _wanted(self, v: ir.Value, depth: int = 8) -> Layout | None:
        if not v.shape or not depth or (self.get(v) is not None and not is_free(v)):
            return None
        found = [w for u in self._tied(v) for op, k in self._users.get(u, []) if (w := self._want(op, u, k, depth))]
        found += [w for u in self._tied(v) for w in self._carried(u) if w]
        return max(found, key=_weight) if found else None

    def _want(self, op: ir.Op, v: ir.Value, k: int, depth: int) -> Layout | None:
        if isinstance(op, ir.DotAsync):
            if v is op.places:
                return places(op.b.shape[0]) if self.warps == 4 else None
            return operand_layout(op, self.warps, self.widest) if v is op.a else self.get(op.result)
        if isinstance(op, POINTWISE) and op.results[0].shape == v.shape:
            r = op.results[0]
            return self.get(r)
        if isinstance(op, ir.Broadcast | ir.Reshape) and is_free(op.result):
            r, dims = op.result, dims_of(op)
            want = self._wanted(r, depth - 1)
            return None if want is None else sliced(want, [a for a in range(len(r.shape)) if a not in dims])
        if isinstance(op, ir.Reduce) and (h := self.get(op.result)) is not None:
            return unsliced(h, op.axes)
        if isinstance(op, ir.Transpose) and isinstance(h := self.get(op.result), Blocked):
            return transposed(h, [op.perm.index(a) for a in range(len(op.perm))])
        if isinstance(op, ir.Transpose | ir.Reshape | ir.Slice) and (h := self.get(op.result)) is not None:
            return unmoved(op, h)
        if isinstance(op, ir.For | ir.While):
            inits = op.operands()[-len(op.inits) :] if op.inits else []
            first = len(op.operands()) - len(inits)
            return self.get(op.results[k - first]) if k >= first else None
        if isinstance(op, ir.Store | ir.Atomic | ir.Post) and op.mask is v:
            return self.get(op.value)
        if isinstance(op, ir.Receive):
            return self.get(op.result)
        return None

    def _carried(self, v: ir.Value) -> Iterator[Layout | None]:
        """The layouts of the carries that a value is yielded to."""
        return map(self.get, self._yielded.get(v, ()))

    def _default(self) -> bool:
        """Give the first tile that has no layout yet one that suits loads and stores. Without products of warpgroups
        it is the first tile of the innermost loops, where most of the work is."""
        for op in self._by_depth:
            for v in filter(self._lacks, op.results):
                return self._set(v, blocked(v.shape, elem_of(self._stored_as(v)), self.warps))
        return False

    def _stored_as(self, v: ir.Value) -> str:
        """The dtype in which a tile goes to shared memory, if it is loaded there and only converted: a thread's
        neighbours are then 16 bytes of what it stores, so that stores, of more bytes than the loads, meet no bank
        twice."""
        users = [op for op, _ in self._users.get(v, [])]
        if not isinstance(v.op, ir.LoadShared) or len(users) != 1 or not isinstance(users[0], ir.Cast):
            return v.dtype
        stores = [op for op, _ in self._users.get(users[0].result, [])]
        wider = ir.DTYPES[users[0].result.dtype].bits > ir.DTYPES[v.dtype].bits
        return users[0].result.dtype if wider and all(isinstance(op, ir.StoreShared) for op in stores) else v.dtype


def _defined(op: ir.Op) -> list[ir.Value]:
    """The values that an op defines, those of its regions' heads too."""
    return [*op.results, *(p for b in op.blocks() for p in b.params)]


def _depths(body: ir.Block, depth: int = 0) -> dict[ir.Op, int]:
    """In how many loops each op of a block stands."""
    out: dict[ir.Op, int] = {}
    for op in body.ops:
        out[op] = depth
        for b in op.blocks():
            out |= _depths(b, depth + isinstance(op, ir.For | ir.While))
    return out


def apart(op: ir.Slice, h: Layout) -> Linear | None:
    """The layout of a part of a tile, where its parts have sides of powers of two and lie in registers of their own."""
    whole = linear(h, op.x.shape)
    for axis, (first, part, n) in enumerate(zip(op.starts, op.result.shape, op.x.shape, strict=True)):
        if part == n:
            continue
        if op.strides[axis] != 1 or first % part or part & (part - 1):
            return None
        if any(b[axis] >= part for b in (*whole.lane, *whole.warp)):
            return None
        whole = Linear(tuple(b for b in whole.register if b[axis] < part), whole.lane, whole.warp)
    return whole


def unmoved(op: ir.Transpose | ir.Reshape | ir.Slice, h: Layout) -> Linear | None:
    """The layout of a tile from which its elements move to the operand layout `h` without leaving their registers."""
    if not isinstance(origin(h), Linear | Operand):
        return None
    out = linear(h, op.result.shape)
    if isinstance(op, ir.Transpose):
        return permuted(out, [op.perm.index(a) for a in range(len(op.perm))])
    if isinstance(op, ir.Reshape):
        return reshaped(out, op.result.shape, op.x.shape)
    more = []
    for axis in reversed(range(len(op.x.shape))):
        part = op.result.shape[axis]
        while part < op.x.shape[axis]:  # the parts lie in registers of their own
            more.append(tuple(part if k == axis else 0 for k in range(len(op.x.shape))))
            part *= 2
    return Linear((*out.register, *more), out.lane, out.warp)


def _weight(h: Layout) -> int:
    """A weight by which arithmetic chooses among layouts: conversions of accumulators cost most."""
    if isinstance(h, Sliced):
        return _weight(h.parent)
    return 3 if isinstance(h, Mma) else 2 if isinstance(h, Operand) else 1


def transposed(h: Blocked, perm) -> Blocked:
    """The layout whose axis k is axis `perm[k]` of another."""
    pick = lambda xs: tuple(xs[p] for p in perm)
    back = [list(perm).index(a) for a in range(len(perm))]
    return Blocked(pick(h.per_thread), pick(h.lanes), pick(h.warps), tuple(back[a] for a in h.order))


def _is_part(op: ir.Slice, h: Mma) -> bool:
    """Whether a slice is one of 2, 4, 8 ... equal parts of the columns, which lie in registers of their own."""
    (m, n), (rows, part) = op.x.shape, op.result.shape
    whole = rows == m and set(op.strides) == {1} and op.starts[0] == 0
    fits = n % part == 0 and op.starts[1] % part == 0 and part >= 8
    return whole and fits and h.warps[1] == 1 and not part & (part - 1)
