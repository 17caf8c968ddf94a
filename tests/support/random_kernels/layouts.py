"""Steps about places: other shapes, gathers, values that live long, memory that is read after it was written."""

from __future__ import annotations

import math

from jtile.ir import (
    At,
    Concat,
    Dot,
    DynamicUpdate,
    For,
    Gather,
    If,
    Load,
    Pad,
    Reduce,
    Reshape,
    Reverse,
    Scatter,
    Slice,
    Span,
    Store,
    Take,
    Transpose,
    Value,
    While,
)
from jtile.ir.types import INDEX

from .actions import action, floats, like, partner, tame, total
from .gen import DTYPE_NAMES, MAX_SIZE, Gen, V, int_bound

FLOATS = ("float32", "bfloat16", "float64", "float16")


def same(g: Gen, value: Value, v: V) -> V:
    """`value` holds elements of `v`."""
    return g.put(value, v.bound, v.err, v.grain)


def both(v: V, w: V) -> dict[str, float]:
    return {"bound": max(v.bound, w.bound), "err": max(v.err, w.err), "grain": min(v.grain, w.grain)}


def split(g: Gen, n: int) -> tuple[int, ...]:
    """Sides of a shape with n elements."""
    sides: list[int] = []
    for d in (2, 3, 4, 5, 13, 17, 8):
        if n % d == 0 and len(sides) < 3 and g.chance():
            sides.append(d)
            n //= d
    sides.insert(g.number(0, len(sides)), n)
    return tuple(sides)


@action
def regroup(g: Gen) -> None:
    """A chain of reshapes that merge and split axes, transposes, mirror images, with readers on the way."""
    v = g.find(lambda v: math.prod(v.shape) > 3, DTYPE_NAMES, rank=2)
    x = v.value
    for _ in range(g.number(1, 3)):
        match g.number(0, 3):
            case 0 | 1:
                x = g.b.reshape(x, split(g, math.prod(x.shape)))
            case 2:
                x = g.b.value(Transpose(x, g.permutation(len(x.shape))))
            case _:
                x = g.b.value(Reverse(x, tuple(k for k in range(len(x.shape)) if g.chance())))
        if g.chance():
            same(g, x, v)
    if g.chance():
        x = g.b.map("max", x, partner(g, V(x, v.bound, v.err, v.grain)).value) if v.exact else x
        x = g.b.value(Reshape(x, v.shape)) if x.shape != v.shape else x
        v = V(x, max(v.bound, 3 if v.kind == "f" else int_bound(v.dtype)), v.err, min(v.grain, 1))
    same(g, x, v)


@action
def empty(g: Gen) -> None:
    """Tiles without elements: glued on, summed, multiplied."""
    v = g.find(lambda v: len(v.shape) > 0, DTYPE_NAMES)
    axis = g.number(0, len(v.shape) - 1)
    none = g.b.value(
        Slice(
            v.value,
            (0,) * len(v.shape),
            tuple(0 if k == axis else n for k, n in enumerate(v.shape)),
            (1,) * len(v.shape),
        )
    )
    what = g.number(0, 2)
    if what == 0:
        same(g, g.b.value(Concat((none, v.value, none), axis)), v)
    elif what == 1 and v.kind != "b":
        g.put(g.b.value(Reduce(none, "sum", (axis,))), 1, 0, 1)
    elif len(v.shape) == 2 and v.dtype == "float32" and math.prod(v.shape) <= MAX_SIZE:
        other = g.b.value(Transpose(none, (1, 0)))
        g.put(g.b.value(Dot(none, other, None) if axis == 1 else Dot(other, none, None)), 1, 0, 1)
    else:
        edges = [tuple(g.number(low, 2) if k == axis else 0 for k in range(len(v.shape))) for low in (0, 1)]
        corner = g.b.reshape(
            g.b.value(Slice(v.value, (0,) * len(v.shape), (1,) * len(v.shape), (1,) * len(v.shape))), ()
        )
        same(g, g.b.value(Pad(none, corner, *edges, (0,) * len(v.shape))), v)


@action
def gather(g: Gen) -> None:
    """`take_along_axis` along any axis, by more or fewer indices than it is long; and a scatter of another length."""
    v = g.find(lambda v: len(v.shape) > 0, DTYPE_NAMES)
    axis, n = g.number(0, len(v.shape) - 1), g.choose(g.sides)
    shape = tuple(n if k == axis else s for k, s in enumerate(v.shape))
    if math.prod(shape) > MAX_SIZE:
        return
    dtype = g.choose(("int32", "uint8", "int64", "int16"))
    raw = g.pick(lambda i: i.shape == shape and i.dtype == dtype) or g.load(shape, dtype)
    ends = [g.b.full(k, shape, dtype) for k in (0, min(v.shape[axis] - 1, 127))]
    same(g, g.b.value(Gather(v.value, g.b.map("clamp", ends[0], raw.value, ends[1]), axis)), v)
    if len(v.shape) == 1:
        updates = g.load(shape, v.dtype)
        g.put(g.b.value(Scatter(v.value, raw.value, updates.value, "set")), **both(v, updates))


@action
def gathered_load(g: Gen) -> None:
    """A load through one or two index tiles (of rank 1 or 2), under a mask; the indices may leave the array."""
    shape, dtype = g.shape((1, 2)), g.choose(g.dtypes)
    takes, rest = g.number(1, 2), g.shape((0, 1))
    if math.prod((*shape, *rest)) > MAX_SIZE:
        return
    dims: list = []
    sides: list[int] = []
    for _ in range(takes):
        index = g.pick(lambda v: v.shape == shape and v.dtype in ("int32", "int64", "uint8", "int8", "uint64"))
        index = index or g.load(shape, g.choose(("int32", "int64", "int8")))
        dims.append(Take(index.value))
        sides.append(g.number(1, 9))
    for n in rest:
        at = g.number(0, len(dims)) if takes == 1 else len(dims)
        s = g.scalar()
        dims.insert(at, Span(s.value, n))
        sides.insert(at, s.hi + g.number(1, n))
    ref, bound, grain = g.new_input(sides, dtype)
    op = Load(ref, tuple(dims))
    op.mask = g.mask(op.infer()[0].shape)
    same(g, g.b.value(op), V(op.ref, bound, 0, grain))


@action
def rewritten_output(g: Gen) -> None:
    """An output that is written, read back (shifted, too) and written again, under a mask, in a loop."""
    v = g.find(lambda v: len(v.shape) in (1, 2), DTYPE_NAMES)
    if g.depth:
        return
    rows = v.shape[0]
    ref = g.new_output((*g.grid, *v.shape), v.dtype, None, v.err)
    pids = tuple(At(p.value) for p in g.pids)
    tail = tuple(Span(g.index(0), n) for n in v.shape[1:])
    whole = (*pids, Span(g.index(0), rows), *tail)
    g.b.add(Store(ref, whole, v.value))
    old = same(g, g.b.value(Load(ref, whole)), v)
    w = partner(g, v)
    shift = g.number(0, max(rows - 1, 0))
    with g.region([INDEX]) as block:
        part = g.b.value(Load(ref, (*pids, Span(g.index(shift), rows - shift), *tail)))
        if g.chance() and v.kind != "b":
            part = g.b.map("max", part, g.b.value(Slice(w.value, (0,) * len(v.shape), part.shape, (1,) * len(v.shape))))
        g.b.add(Store(ref, (*pids, Span(g.index(0), rows - shift), *tail), part, g.mask(part.shape)))
        if g.chance():
            g.b.add(Store(ref, whole, g.b.value(Load(ref, whole)), g.mask(v.shape)))
    g.b.add(For(g.index(0), g.index(g.number(0, 3)), g.index(1), (), block))
    v = V(v.value, **both(v, w))
    same(g, g.b.value(Load(ref, whole)), v)
    if g.chance():
        g.put(g.b.map("max" if v.kind != "b" else "xor", old.value, g.pool[-1].value), **both(v, v))


@action
def long_lived(g: Gen) -> None:
    """A loop whose carries swap, are read late, through views, and are updated in place, in a branch, or not at all."""
    v = g.find(lambda v: len(v.shape) in (1, 2) and v.kind != "b", FLOATS)
    w = g.pick(like(v)) or partner(g, v)
    size, rank = math.prod(v.shape), len(v.shape)
    known = both(v, w) if g.chance() else both(v, v)
    second = w if known == both(v, w) else v
    with g.region([INDEX, v.value.type, v.value.type]) as block:
        _, a, b = block.params
        values = [a, b]
        for _ in range(g.number(1, 5)):
            x, y = (values[g.number(0, len(values) - 1)] for _ in range(2))
            match g.number(0, 6):
                case 0:
                    values.append(g.b.map("max", x, y))
                case 1:
                    flat = g.b.reshape(x, (size,))
                    values.append(g.b.reshape(g.b.value(Reverse(flat, (0,))), v.shape))
                case 2:
                    part = g.b.value(Slice(y, (0,) * rank, tuple((n + 1) // 2 for n in v.shape), (1,) * rank))
                    values.append(g.b.value(DynamicUpdate(x, part, tuple(g.scalar().value for _ in v.shape))))
                case 3:
                    top = g.b.value(Reduce(x, "max", (0,)))
                    top = g.b.reshape(top, (1, *v.shape[1:]))
                    values.append(
                        g.b.value(Concat((top, g.b.value(Slice(y, (1,) + (0,) * (rank - 1), v.shape, (1,) * rank))), 0))
                    )
                case 4:
                    values.append(in_branch(g, x, y))
                case 5:
                    values.append(in_loop(g, x, y))
                case _:
                    values.append(g.b.map("neg", g.b.map("neg", x)))
        block.yields = tuple(values[-1 - g.number(0, min(2, len(values) - 1))] for _ in range(2))
    op = g.b.add(For(g.index(0), g.scalar().value, g.index(1), (v.value, second.value), block))
    for r in op.results:
        g.put(r, **known)


def in_branch(g: Gen, x: Value, y: Value) -> Value:
    cond = g.b.map("lt", g.scalar().value, g.index(1))
    with g.region() as then:
        z = g.b.map("min", x, y)
        then.yields = (g.b.value(Reverse(z, (0,))) if g.chance() else z,)
    with g.region() as other:
        other.yields = (x if g.chance() else y,)
    return g.b.add(If(cond, then, other)).result


def in_loop(g: Gen, x: Value, y: Value) -> Value:
    n = g.scalar()
    with g.region([INDEX, x.type]) as cond:
        cond.yields = (g.b.map("lt", cond.params[0], n.value),)
    with g.region([INDEX, x.type]) as body:
        more = g.b.map("add", body.params[0], g.index(1))
        body.yields = (more, g.b.map("max", g.b.value(Reverse(body.params[1], (0,))), y))
    return g.b.add(While((g.index(0), x), cond, body)).results[1]


@action
def accumulated_dot(g: Gen) -> None:
    """A product added up over a loop, whose accumulator is also read, scaled or replaced on the way."""
    m, n, k = (g.choose(g.sides) for _ in range(3))
    if max(m * n, m * k, k * n) > MAX_SIZE:
        return
    a, b = (
        g.pick(lambda v, s=s: v.shape == s and v.dtype == "float32" and v.exact) or g.load(s, "float32")
        for s in ((m, k), (k, n))
    )
    c = g.pick(lambda v: v.shape == (m, n) and v.dtype == "float32" and v.exact) or g.load((m, n), "float32")
    trips = g.number(0, 3)
    known = total(
        "float32", a.bound * b.bound + c.bound, 0, min(a.grain * b.grain, c.grain, 1), 2 * k * (trips + 1) + 2
    )
    if known["err"] or not tame(g, known, "float32"):
        return
    with g.region([INDEX, c.value.type]) as block:
        acc = block.params[1]
        left = g.b.map("neg", g.b.map("neg", a.value)) if g.chance() else a.value
        start = g.b.value(Reverse(acc, (0,))) if g.chance() else acc
        d = g.b.value(Dot(left, b.value, start))
        if g.chance():
            d = g.b.map("max", d, acc)
        elif g.chance():
            d = g.b.map("min", g.b.value(Dot(left, b.value, acc)), d)
        block.yields = (d,)
    op = g.b.add(For(g.index(0), g.index(trips), g.index(1), (c.value,), block))
    g.put(op.result, **known)


@action
def deep_tile(g: Gen) -> None:
    """A tile of four axes from memory, reduced along some of them."""
    shape = tuple(g.choose((1, 2, 3, 5)) for _ in range(4))
    v = g.load(shape, g.choose(g.dtypes))
    axes = tuple(k for k in range(4) if g.chance()) or (1,)
    if v.kind == "b":
        g.put(g.b.value(Reduce(v.value, "or", axes)))
    else:
        same(g, g.b.value(Reduce(v.value, g.choose(("max", "min")), axes)), v)
    if floats(v):
        same(g, g.b.value(Transpose(v.value, g.permutation(4))), v)
