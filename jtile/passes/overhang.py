"""Sums of derivatives have no terms from lanes beyond the edge of an array.

A cotangent is zero in the lanes of a tile that lie outside of its array, and in those that a mask leaves out; so is, in
exact arithmetic, what it is multiplied with. But these lanes hold padding, of which a function of the kernel may have
made an infinity or NaN, and 0 * inf is NaN. It goes nowhere until a sum runs along such an axis: what is summed there
becomes a selection of the lanes inside. Nothing changes where all lanes of the padding are finite.

Example: of `o[i] = s / x[i]`, in tiles that hang over, the cotangent of `s` is the sum of `o_bar[i] / x[i]`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jtile.ir import (
    At,
    Atomic,
    Block,
    Broadcast,
    Cast,
    Cumulative,
    Dot,
    Extent,
    For,
    Full,
    If,
    Iota,
    Kernel,
    Load,
    Map,
    Op,
    Reduce,
    Reshape,
    Select,
    Size,
    SizeOf,
    Take,
    Tile,
    Transpose,
    Value,
    While,
)
from jtile.ir.block import level_of

from .rewrite import Copier, Form

# What finite numbers stay finite under, but for a result beyond the range of the dtype.
_FINITE = frozenset((
    "add", "sub", "mul", "neg", "abs", "sign", "square", "floor", "ceil", "round", "round_away", "exp", "exp2",
    "expm1", "cbrt", "sin", "cos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "logistic", "erf", "erfc",
    "max", "min", "clamp",
))  # fmt: skip
_FINITE_OF_LOW = frozenset((  # of -inf, too
    "exp", "exp2", "expm1", "logistic", "tanh", "erf", "erfc", "atan", "sign", "clamp",
))  # fmt: skip
_ZERO_OF_ZERO = frozenset((
    "neg", "abs", "sign", "square", "sqrt", "floor", "ceil", "round", "round_away", "expm1", "log1p", "cbrt", "sin",
    "tan", "asin", "atan", "sinh", "tanh", "asinh", "atanh", "erf", "erf_inv",
))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Edge:
    """Where an axis of a tile leaves its array: from element `size - index * step` on."""

    index: Value
    step: int
    size: Size


@dataclasses.dataclass(frozen=True)
class _Lanes:
    """What is known of the lanes of a value that no array has.

    Attributes:
      zero: axis -> an edge behind which the value is zero in exact arithmetic.
      mask: a bool tile of the value's shape; where it is false, the value is zero in exact arithmetic.
      beyond: axes along which some lanes hold padding, or what was computed from it.
      low: axes along which such lanes may be -inf.
      wild: axes along which such lanes may be any infinity, or NaN.
      nothing: the value is zero everywhere.
    """

    zero: Mapping[int, _Edge] = MappingProxyType({})
    mask: Value | None = None
    beyond: frozenset[int] = frozenset()
    low: frozenset[int] = frozenset()
    wild: frozenset[int] = frozenset()
    nothing: bool = False

    def moved(self, to: Mapping[int, int]) -> _Lanes:
        """The same of a value whose axis `to[k]` is axis k of this one."""
        go = lambda axes: frozenset(to[k] for k in axes if k in to)
        zero = {to[k]: e for k, e in self.zero.items() if k in to}
        return _Lanes(zero, None, go(self.beyond), go(self.low), go(self.wild), self.nothing)

    def loose(self) -> _Lanes:
        """The same without what is zero."""
        return dataclasses.replace(self, zero={}, mask=None, nothing=False)


_NOTHING = _Lanes()


def terms_inside(kernel: Kernel, kept: Sequence[Value] = ()) -> Kernel:
    """A derivative's kernel whose sums leave out lanes beyond edges that may not be finite.

    Args:
      kernel: at tile level.
      kept: inputs that another kernel has stored for it: they hold lanes of tiles that no array has.
    """
    if level_of(kernel) != "tile":
        return kernel
    found = _Analysis(frozenset([*kernel.inputs, *kernel.outputs]) - {*kept})
    found.block(kernel.body)
    return Copier(found.forms).whole(kernel) if found.forms else kernel


class _Analysis:
    """Walks a kernel forwards; `arrays`: the Refs that have no lanes beyond edges; `forms`: the sums that leave lanes
    out."""

    def __init__(self, arrays: frozenset[Value]):
        self.arrays = arrays
        self.known: dict[Value, _Lanes] = {}
        self.forms: dict[Any, Form] = {}

    def of(self, v: Value) -> _Lanes:
        return self.known.get(v, _NOTHING)

    def block(self, block: Block) -> None:
        for op in block.ops:
            if isinstance(op, For):
                self._loop(op, op.inits, [op.body], op.body.params[1:])
            elif isinstance(op, While):
                self._loop(op, op.inits, [op.cond, op.body], op.body.params)
                self.known.update(zip(op.cond.params, map(self.of, op.body.params)))
            elif isinstance(op, If):
                self.block(op.then)
                self.block(op.orelse)
                for r, a, b in zip(op.results, op.then.yields, op.orelse.yields, strict=True):
                    self.known[r] = _either(self.of(a), self.of(b))
            elif op.blocks():
                for inner in op.blocks():
                    self.block(inner)
            else:
                lanes = _RULES.get(type(op), _others)(self, op)
                self.known.update((r, lanes) for r in op.results)

    def _loop(self, op: Any, inits: Sequence[Value], blocks: Sequence[Block], carries: Sequence[Value]) -> None:
        """A loop: what any round may leave. Sets of axes only grow, so this ends."""
        yields = blocks[-1].yields
        start = [self.of(v).loose() for v in inits]
        while True:
            self.known.update(zip(carries, start, strict=True))
            if len(blocks) > 1:
                self.known.update(zip(blocks[0].params, start, strict=True))
            for b in blocks:
                self.block(b)
            after = [_either(a, self.of(y)) for a, y in zip(start, yields, strict=True)]
            if after == start:
                break
            start = after
        self.known.update(zip(op.results, start, strict=True))

    def leave_out(self, op: Op, operands: Mapping[str, tuple[int, _Edge | None]]) -> None:
        """Let `op` read zeros where operands (field -> axis, its edge) are outside, or where their masks are false."""

        def form(c: Copier) -> Sequence[Value]:
            chosen = {name: _inside(c, getattr(op, name), axis, edge, self) for name, (axis, edge) in operands.items()}
            given = {getattr(op, name): v for name, v in chosen.items()}
            new = op.clone(lambda v: given.get(v) or c.look(v), c.block)
            c.b.block.ops.append(new)
            return new.results

        self.forms[op] = form


def _inside(c: Copier, v: Value, axis: int, edge: _Edge | None, found: _Analysis) -> Value:
    """`v` in the place where the copier is, with zeros in the lanes outside."""
    x, shape, b = c.look(v), v.shape, c.b
    tests = []
    if edge is not None:
        index = c.look(edge.index)
        dtype = index.type.dtype
        full = lambda n: b.value(Full(n, (), dtype))
        end = b.value(SizeOf(edge.size, dtype)) if isinstance(edge.size, Extent) else full(edge.size)
        left = b.value(Map("sub", (end, b.value(Map("mul", (index, full(edge.step)))))))
        lanes = (shape[axis],)
        test = b.value(Map("lt", (b.value(Iota(lanes, 0, dtype)), b.value(Broadcast(left, lanes, ())))))
        tests.append(test if lanes == shape else b.value(Broadcast(test, shape, (axis,))))
    mask = found.of(v).mask
    if mask is not None:
        tests.append(c.look(mask))
    zero = b.value(Full(0.0, shape, v.type.dtype))
    for test in tests:
        x = b.value(Select(test, x, zero))
    return x


# -- what is known of results ------------------------------------------------------------------------------------------


def _same(a: _Edge, b: _Edge) -> bool:
    one = a.index is b.index or (
        type(a.index.op) is type(b.index.op) and a.index.op is not None and not a.index.op.blocks()
        and a.index.op.effect == "none" and repr(a.index.op.attributes()) == repr(b.index.op.attributes())
        and not [*a.index.op.operands(), *b.index.op.operands()]
    )  # fmt: skip
    return one and (a.step, a.size) == (b.step, b.size)


def _both(a: _Lanes, b: _Lanes) -> tuple[Mapping[int, _Edge], Value | None]:
    """Where the sum of two values is zero."""
    if a.nothing or b.nothing:
        other = b if a.nothing else a
        return other.zero, other.mask
    zero = {k: e for k, e in a.zero.items() if k in b.zero and _same(e, b.zero[k])}
    return zero, a.mask if a.mask is b.mask else None


def _either(a: _Lanes, b: _Lanes) -> _Lanes:
    """One of two values, and nobody says which."""
    wild = a.wild | b.wild
    return _Lanes({}, None, a.beyond | b.beyond, (a.low | b.low) - wild, wild)


def _load(found: _Analysis, op: Load) -> _Lanes:
    rank = len(op.result.shape)
    axis, zero = 0, {}
    takes = False
    for d, n in zip(op.index, op.ref.shape, strict=True):
        if isinstance(d, Take):
            axis, takes = axis + (0 if takes else len(d.indices.shape)), True
        elif not isinstance(d, At):
            if isinstance(d, Tile) and op.checked and not (d.step == d.size and n % d.size == 0):
                zero[axis] = _Edge(d.index, d.step, n)
            axis += 1
    every = frozenset(range(rank))
    if op.ref not in found.arrays:  # what was stored there may be whole tiles of anything
        return _Lanes({}, None, every, frozenset(), every)
    beyond = every if op.mask is not None else frozenset(zero)
    low, wild = frozenset(), frozenset()
    if op.pad == 0:
        masked = op.mask is not None and op.mask.shape == op.result.shape
        return _Lanes(zero, op.mask if masked else None, beyond)
    if not math.isfinite(op.pad):
        low, wild = (beyond, wild) if op.pad == -math.inf else (low, beyond)
    return _Lanes({}, None, beyond, low, wild)


def _map(found: _Analysis, op: Map) -> _Lanes:
    fn, args = op.fn, [found.of(a) for a in op.args]
    beyond = frozenset[int]().union(*(a.beyond for a in args))
    nothing = fn == "mul" and any(a.nothing for a in args)
    if op.result.type.dtype == "bool" or not beyond:
        return _Lanes({}, None, beyond, nothing=nothing)
    low, wild = _range(op, args, beyond)
    zero, mask = {}, None
    if fn == "mul":
        a, b = args
        zero, mask = {**b.zero, **a.zero}, a.mask or b.mask
    elif fn == "div" or fn in _ZERO_OF_ZERO:
        zero, mask = args[0].zero, args[0].mask
    elif fn in ("add", "sub", "max", "min"):
        zero, mask = _both(*args)
    return _Lanes(zero, mask, beyond, low - wild, wild, nothing)


def _range(op: Map, args: Sequence[_Lanes], beyond: frozenset[int]) -> tuple[frozenset[int], frozenset[int]]:
    """Axes along which lanes beyond an edge may be -inf, and along which they may be anything."""
    fn, none = op.fn, frozenset[int]()
    low = none.union(*(a.low for a in args))
    wild = none.union(*(a.wild for a in args))
    if fn == "div":
        return none, wild | low | args[1].beyond
    if fn not in _FINITE:
        return none, beyond
    if fn in ("add", "min"):
        return low, wild
    if fn == "sub":
        return args[0].low - args[1].low, wild | args[1].low
    if fn == "max":
        return args[0].low & args[1].low, wild
    if fn == "mul" and any(_positive(v) for v in op.args):
        return low, wild
    return none, wild if fn in _FINITE_OF_LOW else wild | low


def _positive(v: Value) -> bool:
    while isinstance(v.op, Broadcast):
        v = v.op.x
    return isinstance(v.op, Full) and v.op.value > 0


def _full(found: _Analysis, op: Full) -> _Lanes:
    return _Lanes(nothing=op.value == 0)


def _select(found: _Analysis, op: Select) -> _Lanes:
    cond, a, b = map(found.of, (op.cond, op.a, op.b))
    either = _either(a, b)
    zero, mask = _both(a, b)
    return dataclasses.replace(either, zero=zero, mask=mask, beyond=either.beyond | cond.beyond)


def _cast(found: _Analysis, op: Cast) -> _Lanes:
    return found.of(op.x)


def _broadcast(found: _Analysis, op: Broadcast) -> _Lanes:
    x = found.of(op.x)
    if op.shape == op.x.shape and op.dims == tuple(range(len(op.shape))):
        return x
    return x.moved({k: d for k, d in enumerate(op.dims) if op.x.shape[k] == op.shape[d]})


def _transpose(found: _Analysis, op: Transpose) -> _Lanes:
    return found.of(op.x).moved({k: j for j, k in enumerate(op.perm)})


def _reshape(found: _Analysis, op: Reshape) -> _Lanes:
    """Axes of one element come and go; where others change, nothing is known."""
    olds = [k for k, n in enumerate(op.x.shape) if n != 1]
    news = [k for k, n in enumerate(op.shape) if n != 1]
    same = [op.x.shape[k] for k in olds] == [op.shape[k] for k in news]
    return found.of(op.x).moved(dict(zip(olds, news)) if same else {})


def _reduce(found: _Analysis, op: Reduce) -> _Lanes:
    x = found.of(op.x)
    kept = [k for k in range(len(op.x.shape)) if k not in op.axes]
    out = x.moved({k: j for j, k in enumerate(kept)})
    if op.fn != "sum":
        return out.loose()
    _check(found, op, op.x, op.axes)
    return out


def _cumulative(found: _Analysis, op: Cumulative) -> _Lanes:
    if op.fn == "sum":
        _check(found, op, op.x, (op.axis,))
    return found.of(op.x).loose()


def _check(found: _Analysis, op: Op, v: Value, axes: Iterable[int]) -> None:
    """A sum of `v` along axes."""
    x = found.of(v)
    out = [k for k in axes if k in x.wild and k in x.zero]
    found.forms.pop(op, None)  # of a round that knew less
    if out or (x.mask is not None and x.wild):
        found.leave_out(op, {"x": (out[0], x.zero[out[0]]) if out else (0, None)})


def _dot(found: _Analysis, op: Dot) -> _Lanes:
    a, b = found.of(op.a), found.of(op.b)
    rank = len(op.a.shape)
    m, ka = (rank - 1, rank - 2) if op.trans_a else (rank - 2, rank - 1)
    kb, n = (rank - 1, rank - 2) if op.trans_b else (rank - 2, rank - 1)
    edge = a.zero.get(ka) or b.zero.get(kb)
    found.forms.pop(op, None)
    out = {
        name: (k, edge if k in x.wild else None)
        for name, x, k in (("a", a, ka), ("b", b, kb))
        if (edge is not None and k in x.wild) or (x.mask is not None and x.wild)
    }
    if out:
        found.leave_out(op, out)
    batch = {k: k for k in range(rank - 2)}
    rows, columns = a.moved({**batch, m: rank - 2}), b.moved({**batch, n: rank - 1})
    wild = rows.wild | columns.wild | rows.low | columns.low
    product = _Lanes({**columns.zero, **rows.zero}, None, rows.beyond | columns.beyond, frozenset(), wild)
    if op.acc is None:
        return product
    acc = found.of(op.acc)
    zero, _ = _both(product, acc)
    return dataclasses.replace(_either(product, acc), zero=zero)


def _atomic(found: _Analysis, op: Atomic) -> _Lanes:
    """An addition at places that are data: lanes behind an edge all have the place that the padding names."""
    x = found.of(op.value)
    out = [k for k in x.zero if k in x.wild]
    found.forms.pop(op, None)
    if op.fn == "add" and out and any(isinstance(d, Take) for d in op.index):
        found.leave_out(op, {"value": (out[0], x.zero[out[0]])})
    return _NOTHING


def _others(found: _Analysis, op: Op) -> _Lanes:
    """Of an op that may move elements: the axes of operands of the same rank as the result."""
    if len(op.results) != 1 or not hasattr(op.result.type, "shape"):
        return _NOTHING
    rank, out = len(op.result.shape), _NOTHING
    for v in op.operands():
        if v in found.known and len(v.shape) == rank:
            out = _either(out, found.of(v))
    return out


_RULES: dict[type[Op], Callable[[_Analysis, Any], _Lanes]] = {
    Load: _load, Map: _map, Full: _full, Select: _select, Cast: _cast, Broadcast: _broadcast, Transpose: _transpose,
    Reshape: _reshape, Reduce: _reduce, Cumulative: _cumulative, Dot: _dot, Atomic: _atomic,
}  # fmt: skip
