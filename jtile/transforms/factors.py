"""Factors: along what a kernel can be cut into shards, read off the index maps of its Tile IR.

A factor is a set of Ref dimensions that are walked in step: by one grid axis, by loops, or as whole axes of tiles. Cut
along a factor, a kernel on one shard is the same kernel on smaller Refs (`localise`); an output without the factor is
then the sum of what the shards give, or the same on all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from jtile import ir
from jtile.ir.memory import ref
from jtile.passes import dce
from jtile.passes.axes import Classes, Node, tile_axes
from jtile.transforms.sums import NotLinearError, Sums, check_partial
from jtile.transforms.walks import WHOLE, Counter, Inside, Use, Walk, Walks

ROUND_UP = 4  # a tile may become this many times smaller, so that tiles divide a shard evenly


@dataclasses.dataclass(frozen=True, eq=False)
class Factor:
    """One factor of a kernel.

    Attributes:
      name: a letter, for the printed rule.
      dims: (Ref, dimension) of every input and output that the factor cuts; Refs as numbers: inputs, then outputs.
      sizes: the sizes of these dimensions.
      partial: outputs (numbered from 0) that are sums over the shards.
      uses: the accesses along the factor.
      cut: roots of the axis classes of whole axes along it.
      counters: what walks along it: one grid axis, or loops.
      period: the number of counts on a shard is a multiple of this.
      even: tiles along the factor may be cut to another size.
      ragged: a tile along it may hang over the edge of a shard.
    """

    name: str
    dims: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    partial: frozenset[int]
    uses: tuple[Use, ...]
    cut: frozenset[Node]
    counters: tuple[Counter, ...]
    period: int
    even: bool
    ragged: bool

    def cuts(self, parts: int) -> dict[Use, tuple[int, int]] | None:
        """(tile size, counts) of each walk on one of `parts` shards; None where a shard would be no whole kernel."""
        if any(n % parts for n in self.sizes):
            return None
        out, extent = {}, {}
        for use in self.uses:
            walk = use.how
            if not isinstance(walk, Walk):
                continue
            found = self._cut(walk, use.op.ref.shape[use.place], parts)
            if found is None or extent.setdefault(walk.counter, found[1]) != found[1] or found[1] % self.period:
                return None
            out[use] = found
        return out

    def _cut(self, walk: Walk, n: int, parts: int) -> tuple[int, int] | None:
        local = n // parts
        if n % walk.step == 0 and local % walk.step == 0:
            return walk.size, local // walk.step * walk.coarse
        if not self.even or walk.coarse > 1 or walk.inner > 1:
            return None
        best = next(t for t in range(min(walk.size, local), 0, -1) if local % t == 0)
        if best * ROUND_UP < min(walk.size, local):
            if not self.ragged:
                return None
            best = min(walk.size, local)
        return best, -(-local // best)


@dataclasses.dataclass(frozen=True, eq=False)
class Factors:
    """All factors of a kernel.

    Attributes:
      kernel: the kernel that they are of, without dead code.
      factors: the factors, in the order of the dimensions of the kernel's Refs.
      classes: the classes of the axes of its values.
      reasons: (Ref, dimension) -> why it is in no factor.
    """

    kernel: ir.Kernel
    factors: tuple[Factor, ...]
    classes: Classes
    reasons: Mapping[tuple[int, int], str]

    def of(self, ref: int) -> list[Factor | None]:
        """The factor of each dimension of a Ref."""
        found = {d: f for f in self.factors for r, d in f.dims if r == ref}
        return [found.get(d) for d in range(len(_arrays(self.kernel)[ref].shape))]

    def named(self, name: str) -> Factor:
        return next(f for f in self.factors if f.name == name)

    def __str__(self) -> str:
        """`a c, c b -> a b` and which outputs are summed; `_` is a dimension that cannot be cut."""
        texts = [
            " ".join("1" if n == 1 else f.name if f else "_" for f, n in zip(self.of(k), v.shape, strict=True)) or "()"
            for k, v in enumerate(_arrays(self.kernel))
        ]
        n = len(self.kernel.inputs)
        rule = f"{', '.join(texts[:n])} -> {', '.join(texts[n:])}"
        sums = [f"{f.name} summed into {self.kernel.outputs[o].name}" for f in self.factors for o in sorted(f.partial)]
        return "; ".join([rule.strip(), *sums])


def factors(kernel: ir.Kernel) -> Factors:
    """The factors of a kernel in Tile IR, before any pass; its sizes are numbers (see `ir.concrete`)."""
    return _Finder(dce(kernel)).find()


def _arrays(kernel: ir.Kernel) -> list[ir.Value]:
    return [*kernel.inputs, *kernel.outputs]


class _Finder:
    def __init__(self, kernel: ir.Kernel):
        self.kernel = kernel
        self.classes = tile_axes(kernel)
        self.walks = Walks(kernel)
        self.lanes: dict[Counter, set[Node]] = {}

    def find(self) -> Factors:
        for use in self.walks.uses:
            self._join(use)
        for i, o in self.kernel.aliases:
            a, b = self.kernel.inputs[i], self.kernel.outputs[o]
            for d in range(len(a.shape)):
                self.classes.unite((a, d), (b, d))
        for counter, place in self.walks.stray.items():
            self.classes.close(counter, f"its position is used by {place}")
        groups = self._groups()
        for root, dims in groups.items():
            self._check_shape(root, dims)
        found, reasons = [], {}
        for root, dims in groups.items():
            try:
                found.append(self._factor(root, dims, _name(len(found))))
            except NotLinearError as e:
                reasons |= dict.fromkeys(dims, str(e))
        if any(isinstance(op, ir.LastArrival) for op in self.kernel.body.walk()):
            reasons |= {dim: "its programs arrive at counters" for f in found for dim in f.dims}
            found = []
        return Factors(self.kernel, tuple(found), self.classes, reasons)

    def _join(self, use: Use) -> None:
        """Join a dimension of a Ref with what walks along it."""
        how, classes, place = use.how, self.classes, f"the index of {use.op.mnemonic} at {use.op.loc}"
        if how is WHOLE:
            if use.axis is not None:
                classes.unite(use.node, (use.tile, use.axis))
            return
        if isinstance(how, Walk) and ref(use.op.ref).role != "scratch":
            classes.unite(use.node, how.counter)
            strays = [counter for counter in use.counters if counter != how.counter]
            if use.axis is not None:
                self.lanes.setdefault(how.counter, set()).add((use.tile, use.axis))
        else:
            strays = () if isinstance(how, Inside) else use.counters
            classes.close(use.node, place)
            if use.axis is not None:
                classes.close((use.tile, use.axis), place)
        for counter in strays:
            classes.close(counter, place)

    def _groups(self) -> dict[Node, list[tuple[int, int]]]:
        """The dimensions of arrays that are in one class, by its root: (position of the array, dimension)."""
        out: dict[Node, list[tuple[int, int]]] = {}
        for position, array in enumerate(_arrays(self.kernel)):
            for dim, size in enumerate(array.shape):
                if isinstance(size, int) and size > 1:
                    out.setdefault(self.classes.find((array, dim)), []).append((position, dim))
        return out

    def _members(self, root: Node) -> tuple[list[Counter], list[Use]]:
        """What walks along the dimensions of a class, once each, and all accesses along them."""
        uses = [use for use in self.walks.uses if self.classes.find(use.node) == root]
        return list(dict.fromkeys(use.how.counter for use in uses if isinstance(use.how, Walk))), uses

    def _check_shape(self, root: Node, dims: list[tuple[int, int]]) -> None:
        """Close a class whose dimensions are not walked in one way."""
        counters, uses = self._members(root)
        grid_axes = [counter for counter in counters if counter.axis is not None]
        arrays = [array for array, _ in dims]
        walks = [use.how for use in uses if isinstance(use.how, Walk)]
        directions = {(walk.counter, walk.reverse) for walk in walks}  # two of one counter are opposite ones
        if len(set(arrays)) < len(arrays):
            self.classes.close(root, "two dimensions of one array are walked in step")
        elif len(grid_axes) > 1 or (grid_axes and len(counters) > 1):
            self.classes.close(root, "the dimension is walked in two ways at once")
        elif len(directions) > len(counters):
            self.classes.close(root, "arrays are walked in opposite directions")
        elif counters and any(use.how is WHOLE for use in uses):
            self.classes.close(root, "the dimension is walked, and also read as a whole")
        elif _nested([counter.loop for counter in counters if counter.loop]):
            self.classes.close(root, "two nested loops walk along the dimension")
        along_tiles = {self.classes.find(node) for nodes in self.lanes.values() for node in nodes}
        if root in along_tiles:
            self.classes.close(root, "the dimension lies along the elements of a tile")

    def _factor(self, root: Node, dims: list[tuple[int, int]], name: str) -> Factor:
        reason = self.classes.closed(root)
        if reason:
            raise NotLinearError(reason)
        arrays, n_in = _arrays(self.kernel), len(self.kernel.inputs)
        counters, uses = self._members(root)
        refs = {arrays[k] for k, _ in dims}
        if any(c.axis is not None for c in counters):
            partial = self._programs(refs)
        else:
            partial = self._sums(root, refs, counters, lanes=False).partial
        even, ragged = self._even(root, refs, counters, uses)
        outputs = frozenset(k - n_in for k, v in enumerate(arrays) if v in partial)
        sizes = tuple(arrays[k].shape[d] for k, d in dims)
        cut = frozenset() if counters else frozenset([root])
        periods = [u.how.period for u in self.walks.uses if isinstance(u.how, Inside) and u.how.counter in counters]
        period = math.lcm(*periods)
        return Factor(
            name, tuple(dims), sizes, outputs, tuple(uses), cut, tuple(counters), period, even and not periods, ragged
        )

    def _sums(self, root: Node, refs: set[ir.Value], counters: list[Counter], *, lanes: bool) -> Sums:
        cut = {self.classes.find(n) for c in counters for n in self.lanes.get(c, ())} if lanes else {root}
        loops = [c.loop for c in counters if c.loop]
        programs = any(c.axis is not None for c in counters)
        return Sums(self.kernel, self.classes, cut, refs, loops, programs=programs, lanes=lanes)

    def _programs(self, refs: set[ir.Value]) -> set[ir.Value]:
        """Outputs that programs on different shards accumulate into; raises where they do anything else."""
        partial: set[ir.Value] = set()
        ops = list(self.kernel.body.walk())
        used = {v for op in ops for v in op.operands()} | {v for op in ops for b in op.blocks() for v in b.yields}
        for op in ops:
            if not isinstance(op, ir.Store | ir.Atomic) or op.ref in refs or ref(op.ref).role == "scratch":
                continue
            if not (isinstance(op, ir.Atomic) and op.fn == "add") or op.result in used or ref(op.ref).role != "out":
                raise NotLinearError(f"all programs write {op.ref.name} ({op.mnemonic} at {op.loc})")
            partial.add(op.ref)
        if any(isinstance(op, ir.Load) and op.ref in partial for op in ops):
            raise NotLinearError("an accumulated output is read")
        check_partial(self.kernel, partial)
        return partial

    def _even(self, root, refs, counters: list[Counter], uses: Iterable[Use]) -> tuple[bool, bool]:
        """(tiles along the factor may be cut to another size, and may hang over the edge)."""
        walks = [u.how for u in uses if isinstance(u.how, Walk)]
        lanes = [self.classes.find(n) for c in counters for n in self.lanes.get(c, ())]
        others = {self.classes.find(n) for c, ns in self.lanes.items() if c not in counters for n in ns}
        if not walks or any(u.axis is None for u in uses) or len({w.size for w in walks}) > 1:
            return False, False
        if any(self.classes.closed(r) or r in others for r in lanes) or self._fixed(lanes):
            return False, False
        try:
            sums = self._sums(root, refs, counters, lanes=True)
        except NotLinearError:
            return False, False
        return True, not sums.contracted

    def _fixed(self, lanes: list[Node]) -> bool:
        """Whether a dimension of some Ref lies along these lanes, so that they cannot become fewer."""
        arrays = [*_arrays(self.kernel), *self.kernel.scratch]
        arrays += [op.result for op in self.kernel.body.walk() if isinstance(op, ir.Alloc)]
        return any(self.classes.find((v, d)) in lanes for v in arrays for d in range(len(v.shape)))


def _name(k: int) -> str:
    return chr(ord("a") + k) if k < 26 else f"f{k}"


def _nested(loops: list[ir.For]) -> bool:
    return any(inner is not outer and inner in list(outer.body.walk()) for outer in loops for inner in loops)
