"""The kernel that one shard runs: the same kernel on Refs that are cut along some of its factors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

from jtile import ir
from jtile.ir.builder import build
from jtile.ir.memory import ref
from jtile.passes.axes import Node
from jtile.transforms.factors import Factors
from jtile.transforms.walks import Counter, Use, Walk

ACCESSES = ir.Load | ir.Store | ir.Atomic
SHAPED = ("shape", "sizes")  # attributes of ops that spell the shape of their result


def localise(found: Factors, parts: Mapping[str, int], widen: Collection[int] = ()) -> ir.Kernel | None:
    """The kernel on one of `parts[factor]` shards along each named factor; None where a shard would be no whole kernel.

    Args:
      widen: outputs that are stored before their last rounding, where there is one: shards are summed in that dtype.
    """
    local = Localise(found, {k: p for k, p in parts.items() if p > 1})
    return local.run(widen) if local.possible else None


class Localise:
    """Copies a kernel with some axes of its Refs, of its tiles and of its grid at other sizes.

    Attributes:
      possible: whether the result is a whole kernel.
    """

    def __init__(self, found: Factors, parts: Mapping[str, int]):
        self.found, self.kernel = found, found.kernel
        self.possible = True
        self.dims: dict[tuple[ir.Value, int], int] = {}  # (Ref, dimension) -> by how much it shrinks
        self.axes: dict[Node, int] = {}  # root of whole axes -> by how much they shrink
        self.lanes: dict[Node, int] = {}  # root of axes of tiles -> their new size
        self.walks: dict[tuple[ir.Op, int], tuple[Walk, int]] = {}  # (access, place) -> the walk, its new size
        self.extents: dict[Counter, int] = {}
        self.env: dict[ir.Value, ir.Value] = {}
        self.counts: dict[Counter, ir.Value] = {}
        self.before: list[ir.Op] = []  # ops that an index needs in front of its access
        arrays = [*self.kernel.inputs, *self.kernel.outputs]
        for name, p in parts.items():
            factor = found.named(name)
            cuts = factor.cuts(p)
            if cuts is None:
                self.possible = False
                return
            self.dims |= {(arrays[k], d): p for k, d in factor.dims}
            self.axes |= dict.fromkeys(factor.cut, p)
            for use, (size, extent) in cuts.items():
                self.walk(use, size, extent)

    def walk(self, use: Use, size: int, extent: int) -> None:
        walk = use.how
        assert isinstance(walk, Walk)
        self.extents[walk.counter] = extent
        self.walks[use.op, use.place] = walk, size
        if size != walk.size:
            self.lanes[self.found.classes.find((use.tile, use.axis))] = size

    def run(self, widen: Collection[int]) -> ir.Kernel:
        params = tuple(self._param(p) for p in self.kernel.params)
        grid = list(self.kernel.grid)
        for counter, extent in self.extents.items():
            if counter.axis is not None:
                grid[counter.axis] = extent
        body = ir.Block()
        for axis in sorted(c.axis for c in self.extents if c.axis is not None):
            pid = build(ir.ProgramId(axis), self.kernel.loc)
            body.ops.append(pid)
            self.counts[next(c for c in self.extents if c.axis == axis)] = pid.results[0]
        rest = self._block(self.kernel.body)
        body.ops += rest.ops
        kernel = dataclasses.replace(self.kernel, params=params, grid=tuple(grid), body=body)
        for out in widen:
            kernel = _widened(kernel, kernel.outputs[out])
        return kernel

    # -- types ------------------------------------------------------------------------------------------------------
    def _size(self, v: ir.Value, axis: int) -> int:
        root = self.found.classes.find((v, axis))
        return self.lanes.get(root, v.shape[axis] // self.axes.get(root, 1))

    def _shape(self, v: ir.Value) -> tuple[int, ...]:
        return tuple(self._size(v, k) for k in range(len(v.shape)))

    def _param(self, old: ir.Value) -> ir.Value:
        if ref(old).role == "scratch":
            shape = self._shape(old)
        else:
            shape = tuple(n // self.dims.get((old, d), 1) for d, n in enumerate(old.shape))
        new = ir.Value(dataclasses.replace(old.type, shape=shape), old.name)
        self.env[old] = new
        return new

    # -- ops --------------------------------------------------------------------------------------------------------
    def _look(self, v: ir.Value) -> ir.Value:
        return self.env.get(v, v)

    def _block(self, old: ir.Block) -> ir.Block:
        params = tuple(ir.Value(dataclasses.replace(p.type, shape=self._shape(p)), p.name) for p in old.params)
        self.env.update(zip(old.params, params, strict=True))
        ops: list[ir.Op] = []
        for op in old.ops:
            new = self._op(op)
            ops += [*self.before, new]
            self.before = []
        return ir.Block(params, ops, tuple(map(self._look, old.yields)))

    def _op(self, old: ir.Op) -> ir.Op:
        hi = self._bound(old) if isinstance(old, ir.For) else None
        before, self.before = self.before, []
        new = old.clone(self._look, self._inner(old))
        self.before = before
        if hi is not None:
            assert isinstance(new, ir.For)
            new.hi = hi
        for name in SHAPED:
            if name in new.fields:
                setattr(new, name, self._shape(old.result))
        if isinstance(new, ir.Slice) and isinstance(old, ir.Slice):
            axes = zip(new.starts, new.stops, old.x.shape, new.x.shape, strict=True)
            new.stops = tuple(m if a == 0 and b == n else b for a, b, n, m in axes)
        if isinstance(new, ACCESSES) and isinstance(old, ACCESSES):
            new.index = tuple(self._dim(old, new, k) for k in range(len(new.index)))
        build(new, old.loc, tuple(r.name for r in old.results))
        self.env.update(zip(old.results, new.results, strict=True))
        return new

    def _inner(self, op: ir.Op) -> Callable[[ir.Block], ir.Block]:
        counter = next((c for c in self.extents if c.loop is op), None)
        if counter is None:
            return self._block

        def loop(b: ir.Block) -> ir.Block:
            self.counts[counter] = b.params[0]  # indices look up what stands for it
            return self._block(b)

        return loop

    def _bound(self, op: ir.For) -> ir.Value | None:
        extent = next((n for c, n in self.extents.items() if c.loop is op), None)
        return None if extent is None else self._constant(extent, op.hi.dtype, op.loc)

    def _constant(self, value: int, dtype: str, loc: ir.Loc) -> ir.Value:
        op = build(ir.Full(value, (), dtype), loc)
        self.before.append(op)
        return op.results[0]

    def _dim(self, old: ir.Load | ir.Store | ir.Atomic, new: ir.Load | ir.Store | ir.Atomic, place: int) -> ir.Dim:
        """The index along one dimension of the shard."""
        dim = new.index[place]
        n = new.ref.shape[place]
        if (old, place) in self.walks:
            walk, size = self.walks[old, place]
            return self._step(walk, size, dim, n, old)
        if n == old.ref.shape[place] or isinstance(dim, ir.At | ir.Take):
            return dim
        return dataclasses.replace(dim, size=n, step=n) if isinstance(dim, ir.Tile) else ir.Span(dim.start, n)

    def _step(self, walk: Walk, size: int, dim: ir.Dim, n: int, op: ir.Op) -> ir.Dim:
        if walk.inner > 1:  # `count * inner + k` counts from the start of the shard as it is
            return dim
        count = self._look(self.counts[walk.counter])
        if walk.coarse > 1:
            count = self._arithmetic("div", count, self._constant(walk.coarse, count.dtype, op.loc), op.loc)
        if walk.reverse:
            count = self._arithmetic("sub", self._constant(-(-n // size) - 1, count.dtype, op.loc), count, op.loc)
        return ir.At(count) if isinstance(dim, ir.At) else ir.Tile(count, size, size)

    def _arithmetic(self, fn: str, a: ir.Value, b: ir.Value, loc: ir.Loc) -> ir.Value:
        op = build(ir.Map(fn, (a, b)), loc)
        self.before.append(op)
        return op.results[0]


def _source(v: ir.Value) -> ir.Value:
    """The value before its last rounding; itself if it was not rounded."""
    return v.op.x if isinstance(v.op, ir.Cast) else v


def _widened(kernel: ir.Kernel, out: ir.Value) -> ir.Kernel:
    """The kernel with `out` in the dtype that it is rounded from, if every store to it rounds from one float dtype."""
    stores = [op for op in kernel.body.walk() if isinstance(op, ir.Store | ir.Atomic) and op.ref is out]
    sources = {_source(op.value).dtype for op in stores}
    wide = sources.pop() if len(sources) == 1 else out.dtype
    kinds = {ir.DTYPES[d].kind for d in (wide, out.dtype)}
    read = any(isinstance(op, ir.Load) and op.ref is out for op in kernel.body.walk())
    if wide == out.dtype or kinds != {"f"} or read or not all(isinstance(op, ir.Store) for op in stores):
        return kernel
    new = ir.Value(dataclasses.replace(out.type, dtype=wide), out.name)

    def copy(block: ir.Block) -> ir.Block:
        for op in block.ops:
            if isinstance(op, ir.Store) and op.ref is out:
                op.ref, op.value = new, _source(op.value)
            for inner in op.blocks():
                copy(inner)
        return block

    params = tuple(new if p is out else p for p in kernel.params)
    return dataclasses.replace(kernel, params=params, body=copy(kernel.body))
