"""Arithmetic of one number a row leaves that of tiles: a softmax that is computed again takes one shift of its scores,
and no quotient.

With `m` and `l` one number a row, as `m` is what scores are shifted by and `l` what their exponentials are divided by:

    p = exp(s - m) / l            p = exp2(s' - w)            w = (m + log l) log2(e), s' = s log2(e), once a row
    ds = (dp / l + c) exp(s - m)  ds = (dp + c l) p

Sums are rounded otherwise than they were, so that this is for kernels that nobody wrote, and for products of operands
of 16 bits, which are rounded more.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from jtile.ir import (
    Broadcast,
    Cast,
    Dot,
    DotScaled,
    For,
    Full,
    Kernel,
    Map,
    Op,
    Reduce,
    Reshape,
    Select,
    Transpose,
    Value,
)
from jtile.ir.types import DTYPES

from .canonicalise import canonicalise
from .cse import cse
from .dce import dce
from .fold import number
from .rewrite import Copier, Form, Rewriter, Rules, users_of

LOG2_E = math.log2(math.e)
ROWS = 8  # elements of a tile for each number, at least


def per_row(kernel: Kernel) -> Kernel:
    """The kernel with such arithmetic, where all of its products are of 16 bits or fewer."""
    dots = [op for op in kernel.body.walk() if isinstance(op, Dot | DotScaled)]
    if not dots or any(DTYPES[v.dtype].bits > 16 for d in dots for v in (d.a, d.b)):
        return kernel
    for step in (_quotients, _sums, _shared, _shifts, _powers):
        kernel = dce(cse(canonicalise(step(kernel))))
    return kernel


def _large(v: Value) -> bool:
    return v.dtype == "float32" and len(v.shape) > 1


def _spread(v: Value) -> Broadcast | None:
    """The broadcast by which a value has one number for each row; None if it is no such tile."""
    op = v.op
    if not isinstance(op, Broadcast) or not _large(v) or isinstance(op.x.op, Full):
        return None
    return op if math.prod(op.x.shape) * ROWS <= math.prod(v.shape) else None


def _again(op: Broadcast, x: Value, rw: Rewriter) -> Value:
    """A tile of other numbers for the same rows."""
    return rw.new(Broadcast(x, op.shape, op.dims))


def _quotients(kernel: Kernel) -> Kernel:
    """x / l is x (1 / l); a sum of one number that number, though a sum of -0 is 0."""
    rules = Rules()

    @rules(Reduce)
    def _(op: Reduce, rw: Rewriter):
        one = op.fn == "sum" and all(op.x.shape[a] == 1 for a in op.axes)
        return rw.b.reshape(op.x, op.result.shape) if one else None

    @rules(Map)
    def _(op: Map, rw: Rewriter):
        if op.fn != "div" or number(op.args[0]) is not None or (by := _spread(op.args[1])) is None:
            return None
        one = rw.b.full(1.0, by.x.shape, by.x.dtype)
        return rw.new(Map("mul", (op.args[0], _again(by, rw.b.map("div", one, by.x), rw))))

    return Rewriter(kernel, rules).run()


def _sums(kernel: Kernel) -> Kernel:
    """`sum_j r x_j y_j` is `r sum_j x_j y_j`, of a sum over the columns of rows."""
    rules = Rules()

    @rules(Reduce)
    def _(op: Reduce, rw: Rewriter):
        if op.fn != "sum" or not _large(op.x) or (found := _row_factor(op.x, op.axes, rw)) is None:
            return None
        r, rest = found
        left = [k for k in range(len(op.x.shape)) if k not in op.axes]
        at = [(d, left.index(d)) for d, n in _long(r)]
        shape = tuple(n for n in r.x.shape if n != 1)
        factor = rw.b.value(Broadcast(rw.b.reshape(r.x, shape), op.result.shape, tuple(k for _, k in at)))
        return rw.new(Map("mul", (rw.new(Reduce(rest, "sum", op.axes)), factor)))

    return Rewriter(kernel, rules).run()


def _row_factor(v: Value, axes: Sequence[int], rw: Rewriter) -> tuple[Broadcast, Value] | None:
    """A factor of a product that is the same along axes, and the product without it."""
    if not _is(v, "mul"):
        return None
    for x, y in (v.op.args, v.op.args[::-1]):
        r = _spread(y)
        if r is not None and not {d for d, _ in _long(r)}.intersection(axes):
            return r, x
        if (inner := _row_factor(y, axes, rw)) is not None:
            return inner[0], rw.new(Map("mul", (x, inner[1])))
    return None


def _shared(kernel: Kernel) -> Kernel:
    """`(x r + c) y` is `(x + c l) (y r)` of r = 1 / l, where `y r` is there."""
    rules = Rules()
    found: dict[tuple[int, Value], list[tuple[Value, Broadcast, Value]]] = {}  # y -> (y, r, y r) of this block

    @rules(Map)
    def _(op: Map, rw: Rewriter):
        if op.fn != "mul" or not _large(op.args[0]):
            return None
        here = id(rw.b.block)
        for y, u in (op.args, op.args[::-1]):
            for _, r, product in found.get((here, y), ()):
                if _factored(u, r) and (rest := _without(u, r, rw)) is not None:
                    return rw.b.map("mul", rest, product)  # no rule again: of x r, y r and x r y it would not end
        for y, u in (op.args, op.args[::-1]):
            if (r := _spread(u)) is not None:
                rw.b.block.ops.append(op)
                found.setdefault((here, y), []).append((y, r, op.result))
                return op.result
        return None

    return Rewriter(kernel, rules).run()


def _factored(v: Value, r: Broadcast) -> bool:
    """Whether a term of a value has the factor r."""
    op = v.op
    if isinstance(op, Map) and op.fn == "mul":
        return any(_same(x, r) for x in op.args)
    return isinstance(op, Map) and op.fn in ("add", "sub") and any(_factored(x, r) for x in op.args)


def _same(v: Value, r: Broadcast) -> bool:
    return isinstance(v.op, Broadcast) and (v.op.x, v.op.dims, v.op.shape) == (r.x, r.dims, r.shape)


def _without(v: Value, r: Broadcast, rw: Rewriter) -> Value | None:
    """A value divided by r, where that is one operation less."""
    op = v.op
    if isinstance(op, Map) and op.fn == "mul":
        return next((x for x, y in (op.args, op.args[::-1]) if _same(y, r)), None)
    if isinstance(op, Map) and op.fn in ("add", "sub"):
        parts = [_without(x, r, rw) for x in op.args]
        return None if None in parts else rw.new(Map(op.fn, tuple(x for x in parts if x)))
    if not isinstance(op, Broadcast) or _long(op) != _long(r):
        return None
    over = _over(op.x, r.x, rw)
    return None if over is None else _again(op, over, rw)


def _long(op: Broadcast) -> list[tuple[int, int]]:
    return [(d, n) for d, n in zip(op.dims, op.x.shape, strict=True) if n != 1]


def _over(c: Value, r: Value, rw: Rewriter) -> Value | None:
    """c / r of r = 1 / l, which is c l; None of any other r: that of a row that a mask empties is 0, and c / r no
    number."""
    x = _plain_rows(r)
    if not _is(x, "div") or number(x.op.args[0]) != 1:
        return None
    l = x.op.args[1]
    return _less(c, l, rw) or rw.b.map("mul", c, rw.b.reshape(l, c.shape))


def _plain_rows(v: Value) -> Value:
    while isinstance(v.op, Reshape):
        v = v.op.x
    return v


def _less(c: Value, l: Value, rw: Rewriter) -> Value | None:
    """c l, of c = x / l^2, with one division less; None of any other c."""
    match c.op:
        case Reshape(x) | Map("neg", (x,)) as op:
            found = _less(x, l, rw)
            moved = None if found is None else op.clone(lambda _: found)
            return None if moved is None else rw.add(moved)[0]
        case Map("mul", args):
            for x, y in (args, args[::-1]):
                if (found := _less(x, l, rw)) is not None:
                    return rw.b.map("mul", found, y)
        case Map("div", (one, square)) if _is(square, "mul"):
            if number(one) == 1 and all(_plain_rows(x) is _plain_rows(l) for x in square.op.args):
                return rw.b.map("div", one, square.op.args[0])
    return None


def _shifts(kernel: Kernel) -> Kernel:
    """`exp(s - m) / l` is `exp(s - (m + log l))` where l is no negative number, m none that is so large that it would
    not change, and nobody else needs the first."""
    rules = Rules()

    @rules(Map)
    def _(op: Map, rw: Rewriter):
        if op.fn != "mul":
            return None
        for e, u in (op.args, op.args[::-1]):
            r, exp = _spread(u), e.op
            if r is None or not _is(r.x, "div") or not _is(e, "exp") or rw.uses(e) != 1:
                continue
            one, l = r.x.op.args
            if number(one) != 1 or not _is(exp.args[0], "sub") or not _no_negative(l, frozenset()):
                continue
            s, m = exp.args[0].op.args
            shift = _spread(m)
            if shift is None or _long(shift) != _long(r) or not _bounded(s):
                continue
            whole = rw.b.map("add", shift.x, rw.b.reshape(rw.b.map("log", l), shift.x.shape))
            return rw.new(Map("exp", (rw.new(Map("sub", (s, _again(shift, whole, rw)))),)))
        return None

    return Rewriter(kernel, rules).run()


def _is(v: Value, fn: str) -> bool:
    return isinstance(v.op, Map) and v.op.fn == fn


def _no_negative(v: Value, known: frozenset[Value]) -> bool:
    """Whether a value is surely no negative number; `known`: values that are none."""
    if v in known:
        return True
    every = lambda *vs: all(_no_negative(x, known) for x in vs)
    match v.op:
        case Full():
            n = number(v)
            return n is not None and n >= 0
        case Map("exp" | "exp2" | "abs" | "square" | "sqrt"):
            return True
        case Map("mul" | "add" | "div" | "min", args):
            return every(*args)
        case Map("max", args):
            return any(_no_negative(x, known) for x in args)
        case Reduce(x, "sum" | "max" | "min") | Broadcast(x) | Reshape(x) | Transpose(x) | Cast(x):
            return every(x)
        case Select(_, a, b):
            return every(a, b)
        case For() as loop:
            i = loop.results.index(v)
            inside = frozenset([loop.body.params[1 + i]])  # assumed of the carry: proved by induction over rounds
            return _no_negative(loop.inits[i], known) and _no_negative(loop.body.yields[i], known | inside)
    return False


def _powers(kernel: Kernel) -> Kernel:
    """exp(x) is exp2(x log2(e)); of `exp(s - m)` both are multiplied, `m` once a row and `s` with what it is already,
    where they are no numbers so large that the difference of the products is another one: masks have infinities."""
    rules = Rules()

    @rules(Map)
    def _(op: Map, rw: Rewriter):
        if op.fn != "exp" or not _large(op.args[0]):
            return None
        (x,) = op.args
        if _is(x, "sub") and (shift := _spread(x.op.args[1])) is not None and _bounded(s := x.op.args[0]):
            m = rw.b.map("mul", shift.x, rw.b.full(LOG2_E, shift.x.shape, shift.x.dtype))
            scaled = rw.new(Map("sub", (_times(s, LOG2_E, rw), _again(shift, m, rw))))
            return rw.new(Map("exp2", (scaled,)))
        return rw.new(Map("exp2", (_product(x, LOG2_E, rw),)))

    return Rewriter(kernel, rules).run()


def _bounded(v: Value) -> bool:
    """Whether a value is a product of matrices, or one times a number, or an infinity where a mask says so."""
    match v.op:
        case Select(_, a, b):
            full = [x for x in (a, b) if isinstance(x.op, Full)]
            return all(math.isinf(number(x) or 0) for x in full) and all(_bounded(x) for x in (a, b) if x not in full)
        case Map("mul", (x, c)):
            return isinstance(c.op, Full) and _bounded(x)
    return isinstance(v.op, Dot)


def _times(v: Value, c: float, rw: Rewriter) -> Value:
    """v * c, into a product with a number that nobody else needs, through masks by infinities."""
    match v.op:
        case Select(cond, a, b) if rw.uses(v) == 1:
            return rw.new(Select(cond, *(x if isinstance(x.op, Full) else _times(x, c, rw) for x in (a, b))))
        case Map("mul", (x, n)) if rw.uses(v) == 1 and isinstance(n.op, Full):
            return _product(x, c * number(n), rw)
    return _product(v, c, rw)


def _product(v: Value, c: float, rw: Rewriter) -> Value:
    return rw.new(Map("mul", (v, rw.b.full(c, v.shape, v.dtype))))


# -- sums ---------------------------------------------------------------------------------------------------------


def common_factors(kernel: Kernel) -> Kernel:
    """The kernel, in which a number that every term of a sum of products is multiplied with comes behind the loop of
    the sum: `sum_i (c x_i) y_i` is `c sum_i x_i y_i`, of x that are rounded to a dtype of the same range."""
    forms = {}
    for op in kernel.body.walk():
        if isinstance(op, For) and (found := _factors(op)):
            forms[op] = _behind(op, found)
    return kernel if not forms else Copier(forms).whole(kernel)


@dataclasses.dataclass(frozen=True)
class _Factor:
    """The common factor of a carry: the number, the products that add to it, and the casts of what it multiplies."""

    number: float
    dots: tuple[Dot, ...]
    casts: tuple[Cast, ...]


def _factors(loop: For) -> dict[int, _Factor]:
    users = users_of(loop.body)
    found = {i: f for i in range(len(loop.inits)) if (f := _factor(loop, i, users)) is not None}
    while True:  # until nobody but these products takes what is multiplied
        dots = {d for f in found.values() for d in f.dots}
        kept = {i: f for i, f in found.items() if all(dots.issuperset(users[c.result]) for c in f.casts)}
        if len(kept) == len(found):
            return kept
        found = kept


def _factor(loop: For, i: int, users: Mapping[Value, Sequence[Op | None]]) -> _Factor | None:
    if number(loop.inits[i]) != 0:
        return None
    at, dots, casts, numbers = loop.body.params[1 + i], [], [], set()
    while at is not loop.body.yields[i]:
        if len(users.get(at, ())) != 1:
            return None
        dot = users[at][0]
        if not isinstance(dot, Dot) or dot.acc is not at or dot not in loop.body.ops or at in (dot.a, dot.b):
            return None
        scaled = [v.op for v in (dot.a, dot.b) if _scaled(v)]
        if len(scaled) != 1:
            return None
        casts += scaled
        dots.append(dot)
        numbers.add(number(scaled[0].x.op.args[1]))
        at = dot.result
    if len(numbers) != 1 or users[at] != [None]:
        return None
    return _Factor(numbers.pop(), tuple(dots), tuple(casts))


def _scaled(v: Value) -> bool:
    op = v.op
    if not isinstance(op, Cast) or v.dtype != "bfloat16" or not _is(op.x, "mul") or op.x.dtype != "float32":
        return False
    return isinstance(op.x.op.args[1].op, Full)


def _behind(loop: For, found: Mapping[int, _Factor]) -> Form:
    def build(copier: Copier) -> Sequence[Value]:
        b = copier.b
        copier.forms = {**copier.forms, **{c: functools.partial(_plain, c) for f in found.values() for c in f.casts}}
        new = copier.put(loop)
        out = list(new.results)
        for i, f in found.items():
            out[i] = b.map("mul", out[i], b.full(f.number, out[i].shape, out[i].dtype))
        return out

    return build


def _plain(cast: Cast, copier: Copier) -> Sequence[Value]:
    """The form of a cast: it casts what was multiplied, without the factor."""
    assert isinstance(cast.x.op, Map)
    return (copier.b.value(Cast(copier.look(cast.x.op.args[0]), cast.dtype), cast.result.name),)
