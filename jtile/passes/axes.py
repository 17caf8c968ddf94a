"""Which axes of a kernel's tiles run along with each other: the classes that an axis can be cut along as a whole.

Every axis of every tile and Ref is a node. An op unites the axes that it walks in step (`a + b`: axis by axis) and
closes those along which elements depend on their place or on each other (`cumsum`, `iota`, a slice).
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence

from jtile import ir

Node = Hashable  # (value or Ref, axis), or what a caller adds


class Classes:
    """Union-find over nodes; a class may be closed, with the reason why."""

    def __init__(self) -> None:
        self._parent: dict[Node, Node] = {}
        self._closed: dict[Node, str] = {}

    def find(self, n: Node) -> Node:
        parent = self._parent
        root = n
        while parent.get(root, root) != root:
            root = parent[root]
        while parent.get(n, n) != root:
            parent[n], n = root, parent[n]
        parent.setdefault(root, root)
        return root

    def unite(self, a: Node, b: Node) -> None:
        a, b = self.find(a), self.find(b)
        if a == b:
            return
        self._parent[b] = a
        reason = self._closed.pop(b, None)
        if reason:
            self._closed.setdefault(a, reason)

    def close(self, n: Node, reason: str) -> None:
        self._closed.setdefault(self.find(n), reason)

    def closed(self, n: Node) -> str | None:
        """Why the class of `n` cannot be cut, or None."""
        return self._closed.get(self.find(n))

    def nodes(self) -> list[Node]:
        return list(self._parent)


def tile_axes(kernel: ir.Kernel) -> Classes:
    """The classes of the axes of all values; Refs are joined with what is loaded from them by `factors`."""
    classes = Classes()
    _Walk(classes).block(kernel.body)
    return classes


class _Walk:
    def __init__(self, classes: Classes):
        self.c = classes

    def block(self, b: ir.Block) -> None:
        for op in b.ops:
            self.op(op)
            for inner in op.blocks():
                self.block(inner)

    def same(self, *values: ir.Value | None) -> None:
        """Unite the axes of values of one shape, which are walked axis by axis."""
        first, *rest = [v for v in values if v is not None]
        for v in rest:
            for k in range(len(first.shape)):
                self.c.unite((first, k), (v, k))

    def pairs(self, a: ir.Value, b: ir.Value, axes: Iterable[tuple[int, int]]) -> None:
        for i, j in axes:
            self.c.unite((a, i), (b, j))

    def close(self, reason: str, *axes: tuple[ir.Value, int]) -> None:
        for node in axes:
            self.c.close(node, reason)

    def shut(self, op: ir.Op) -> None:
        """Close every axis of an op that says nothing about its axes."""
        for v in (*op.operands(), *op.results):
            if isinstance(v.type, ir.TileType):
                self.close(f"{op.mnemonic} at {op.loc}", *[(v, k) for k in range(len(v.shape))])

    def op(self, op: ir.Op) -> None:
        match op:
            case ir.Map() | ir.Select() | ir.Cast() | ir.Bitcast():
                self.same(*op.operands(), op.result)
            case ir.Full() | ir.ProgramId() | ir.NumPrograms() | ir.Alloc():
                pass
            case ir.Iota():
                self.close(f"positions (iota) at {op.loc}", (op.result, op.axis))
            case ir.Load() | ir.Store() | ir.Atomic():
                self.access(op)
            case ir.For() | ir.While() | ir.If():
                self.region(op)
            case _:
                self.moving(op)

    def access(self, op: ir.Load | ir.Store | ir.Atomic) -> None:
        tiles = [*op.results] if isinstance(op, ir.Load) else [op.value, *op.results]
        self.same(*tiles, op.mask, getattr(op, "compare", None))
        takes = [d.indices for d in op.index if isinstance(d, ir.Take)]
        if takes:  # the axes of the indices stand in the tile at the place of the first of them
            before = itertools.takewhile(lambda d: not isinstance(d, ir.Take), op.index)
            first = sum(not isinstance(d, ir.At) for d in before)
            for v in takes:
                self.pairs(v, tiles[0], [(k, first + k) for k in range(len(v.shape))])

    def region(self, op: ir.For | ir.While | ir.If) -> None:
        if isinstance(op, ir.If):
            groups = zip(op.then.yields, op.orelse.yields, op.results, strict=True)
        elif isinstance(op, ir.For):
            groups = zip(op.inits, op.body.params[1:], op.body.yields, op.results, strict=True)
        else:
            groups = zip(op.inits, op.cond.params, op.body.params, op.body.yields, op.results, strict=True)
        for group in groups:
            self.same(*group)

    def moving(self, op: ir.Op) -> None:
        """Note the axes of an op that moves or combines elements along some of them only."""
        if not op.results:
            return self.shut(op)
        r = op.results[0]
        match op:
            case ir.Broadcast(x=x, dims=dims):
                self.pairs(x, r, [(k, d) for k, d in enumerate(dims) if x.shape[k] == op.shape[d]])
            case ir.Transpose(x=x, perm=perm):
                self.pairs(x, r, [(p, k) for k, p in enumerate(perm)])
            case ir.Reshape(x=x):
                self.reshape(op, x, r)
            case ir.Reduce(x=x, axes=axes) | ir.UserReduce(xs=(x, *_), axes=axes):
                self.reduce(op, x, axes)
            case ir.Dot():
                self.dot(op)
            case ir.Cumulative(x=x, axis=axis) | ir.ArgReduce(x=x, axis=axis):
                self.along(op, (x,), axis, dropped=isinstance(op, ir.ArgReduce))
            case ir.Sort(xs=xs, axis=axis) | ir.UserScan(xs=xs, axis=axis):
                self.along(op, xs, axis)
            case ir.Concat(xs=xs, axis=axis):
                self.changed(op, xs, [axis])
            case ir.Reverse(x=x, axes=axes):
                self.changed(op, (x,), axes)
            case ir.Slice(x=x) | ir.Pad(x=x):
                self.changed(op, (x,), [k for k, (n, m) in enumerate(zip(x.shape, r.shape, strict=True)) if n != m])
            case _:
                self.shut(op)

    def changed(self, op: ir.Op, xs: Sequence[ir.Value], axes: Sequence[int]) -> None:
        """Unite the axes of operands and results, but close `axes`."""
        for v in (*xs, *op.results):
            self.close(f"{op.mnemonic} at {op.loc}", *[(v, a) for a in axes])
            self.pairs(xs[0], v, [(k, k) for k in range(len(v.shape)) if k not in axes])

    def along(self, op: ir.Op, xs: Sequence[ir.Value], axis: int, dropped: bool = False) -> None:
        """Close `axis`, along which elements depend on each other, and which the results may lack; unite all others."""
        self.changed_inputs(op, xs, axis)
        for r in op.results:
            if dropped:
                self.pairs(xs[0], r, [(k, k - (k > axis)) for k in range(len(xs[0].shape)) if k != axis])
            else:
                self.same(xs[0], r)

    def changed_inputs(self, op: ir.Op, xs: Sequence[ir.Value], axis: int) -> None:
        self.same(*xs)
        self.close(f"{op.mnemonic} at {op.loc}", (xs[0], axis))

    def reduce(self, op: ir.Reduce | ir.UserReduce, x: ir.Value, axes: Sequence[int]) -> None:
        """Note reduced axes: those of a plain sum may be cut (it becomes partial), all others are closed."""
        kept = [k for k in range(len(x.shape)) if k not in axes]
        if isinstance(op, ir.UserReduce):
            self.same(*op.xs)
        for r in op.results:
            self.pairs(x, r, [(k, j) for j, k in enumerate(kept)])
        if not (isinstance(op, ir.Reduce) and op.fn == "sum"):
            what = op.fn if isinstance(op, ir.Reduce) else op.mnemonic
            self.close(f"reduction by {what} at {op.loc}", *[(x, a) for a in axes])

    def dot(self, op: ir.Dot) -> None:
        rank = len(op.a.shape)
        batch = [(k, k) for k in range(rank - 2)]
        (m, ka), (kb, n) = contraction(op)
        self.pairs(op.a, op.b, [*batch, (ka, kb)])
        self.pairs(op.a, op.result, [*batch, (m, rank - 2)])
        self.pairs(op.b, op.result, [(n, rank - 1)])
        self.same(op.result, op.acc)

    def reshape(self, op: ir.Reshape, x: ir.Value, r: ir.Value) -> None:
        """Unite axes that stand alone on both sides of a reshape; close those that are split or merged."""
        for olds, news in regroup(x.shape, r.shape):
            if len(olds) == len(news) == 1:
                self.pairs(x, r, [(olds[0], news[0])])
            else:
                self.close(f"reshape at {op.loc}", *[(x, k) for k in olds], *[(r, k) for k in news])


def contraction(op: ir.Dot) -> tuple[tuple[int, int], tuple[int, int]]:
    """((axis of m, axis of k) of `a`, (axis of k, axis of n) of `b`)."""
    last, before = len(op.a.shape) - 1, len(op.a.shape) - 2
    return (last, before) if op.trans_a else (before, last), (last, before) if op.trans_b else (before, last)


def regroup(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Shortest runs of axes of equal product on both sides of a reshape, without axes of one element."""
    a = [k for k, n in enumerate(old) if n != 1]
    b = [k for k, n in enumerate(new) if n != 1]
    out, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        first_i, first_j = i, j
        p, q = old[a[i]], new[b[j]]
        i, j = i + 1, j + 1
        while p != q:
            if p < q and i < len(a):
                p, i = p * old[a[i]], i + 1
            elif q < p and j < len(b):
                q, j = q * new[b[j]], j + 1
            else:
                return [*out, (a[first_i:], b[first_j:])]
        out.append((a[first_i:i], b[first_j:j]))
    return out
