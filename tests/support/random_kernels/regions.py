"""Steps with regions and memory of their own: loops, branches, scratch, atomics, updates in place."""

from __future__ import annotations

from jtile.ir import Alloc, At, Atomic, For, If, Load, Map, RefType, Span, Store, Take, Tile, Value, While
from jtile.ir.types import BOOL, INDEX

from .actions import ACTIONS, action, floats, ints, like, partner, rounded, tame, total
from .gen import DTYPE_NAMES, Gen, Scalar, V, int_bound

SIMPLE = list(ACTIONS)  # what may stand inside a region without nesting further


def body(g: Gen) -> None:
    """A few steps inside a region."""
    for _ in range(g.number(0, 3)):
        g.choose(SIMPLE if g.depth > 1 else ACTIONS)(g)


@action
def loop(g: Gen) -> None:
    """A for loop; what it carries is replaced, summed, maximised or (integers) anything."""
    trips, start, step = g.number(0, 4), g.number(0, 2), g.choose((1, 1, 2))
    lo, hi = g.index(start), g.index(start + trips * step)
    dynamic = g.chance()
    if dynamic:
        s = g.scalar()
        lo, hi, trips, start, step = g.index(0), s.value, s.hi, 0, 1
    carried = [v for v in (g.pick(), g.pick()) if v is not None]
    how = [g.choose(("sum", "max", "keep", "swap") if floats(v) else ("any", "keep")) for v in carried]
    with g.region([INDEX, *(v.value.type for v in carried)]) as block:
        k, *params = block.params
        g.scalars.append(Scalar(k, max(start + (trips - 1) * step, 0)))
        if g.chance():
            g.load(g.shape((1, 2)), g.choose(g.dtypes))  # most loops walk over memory
        for v, p, h in zip(carried, params, how):
            if h == "any":
                g.put(p, int_bound(v.dtype) if v.kind in "iu" else 0)
        body(g)
        out = [update(g, v, p, h, trips) for v, p, h in zip(carried, params, how)]
        block.yields = tuple(v.value for v in out)
    step_value = g.index(step)
    # bounds and step must stand in front of the loop: they were made before, or are constants
    op = g.b.add(
        For(
            lo,
            hi,
            step_value,
            tuple(v.value for v in carried),
            block,
            stages=g.choose((None, 2)),
            unroll=g.choose((1, 4)),
        )
    )
    for r, v in zip(op.results, out):
        g.put(r, v.bound, v.err, v.grain)


def update(g: Gen, v: V, p: Value, how: str, trips: int) -> V:
    """The next value of a carry that started as `v`; bounds hold after all trips."""
    kept = V(p, v.bound, v.err, v.grain)
    if how == "any":
        w = g.pick(like(v)) or kept
        return V(g.b.map("xor", p, w.value) if g.chance() else w.value, int_bound(v.dtype) if v.kind in "iu" else 0)
    if how == "keep" or not floats(v):
        return kept
    x = g.pick(like(v)) or partner(g, v)
    if how == "sum":
        bound, err = v.bound + trips * x.bound, v.err + trips * x.err
        known = rounded(v.dtype, bound, err, min(v.grain, x.grain))
        if not known["grain"]:
            known["err"] = err + trips * rounded(v.dtype, bound, 1e-30)["err"]
        return V(g.b.map("add", p, x.value), **known) if tame(g, known, v.dtype) else kept
    known = {"bound": max(v.bound, x.bound), "err": max(v.err, x.err), "grain": min(v.grain, x.grain)}
    return V(g.b.map("max", p, x.value) if how == "max" else x.value, **known)


@action
def while_loop(g: Gen) -> None:
    """Count up to a number from memory; an integer value changes on the way."""
    s, v = g.scalar(), g.pick(ints)
    inits = [g.index(0), *([v.value] if v else [])]
    types = [x.type for x in inits]
    with g.region(types) as cond:
        cond.yields = (g.b.map("lt", cond.params[0], s.value),)
    with g.region(types) as block:
        g.scalars.append(Scalar(block.params[0], max(s.hi - 1, 0)))
        if v:
            g.put(block.params[1], int_bound(v.dtype))
        body(g)
        more = g.b.map("add", block.params[0], g.index(1))
        last = g.pick(like(v)) if v else None
        block.yields = (more, *([last.value if last else block.params[1]] if v else []))
    op = g.b.add(While(tuple(inits), cond, block))
    g.put(op.results[0], s.hi)
    if v:
        g.put(op.results[1], int_bound(v.dtype))


@action
def branch(g: Gen) -> None:
    c = g.pick(lambda v: v.value.type == BOOL)
    if c is None:
        c = V(g.b.map("lt", g.scalar().value, g.index(1)))
    v = g.pick()
    if v is None:
        return
    sides, results = [], []
    for _ in range(2):
        with g.region() as block:
            body(g)
            w = g.pick(like(v)) or v
            block.yields = (w.value,)
        sides.append(block)
        results.append(w)
    op = g.b.add(If(c.value, *sides))
    a, b = results
    g.put(op.result, max(a.bound, b.bound), max(a.err, b.err), min(a.grain, b.grain))


@action
def local_memory(g: Gen) -> None:
    """Through scratch or an alloc and back: whole, or a part of what was written, or summed in a loop."""
    v = g.pick()
    if v is None:
        return
    margin = g.choose((0, 0, 1))
    sides = tuple(n + margin for n in v.shape)
    if g.chance() and g.depth == 0:
        ref = Value(RefType(sides, v.dtype, "scratch"), f"s{len(g.scratch)}")
        g.scratch.append(ref)
    else:
        ref = g.b.add(Alloc(sides, v.dtype)).result
    where = tuple(Span(g.index(margin), n) for n in v.shape)
    g.b.add(Store(ref, where, v.value))
    if g.chance():
        x, trips = partner(g, v), g.number(0, 3)
        known = (
            rounded(v.dtype, v.bound + trips * x.bound, 0, min(v.grain, x.grain)) if floats(v) else {"bound": v.bound}
        )
        flips = known.get("grain", 1) and v.exact and x.exact  # x - (x - old): no trip may be left out
        with g.region([INDEX]) as block:
            old = g.b.value(Load(ref, where))
            fn = "max" if not flips else "xor" if v.kind == "b" else "sub"
            g.b.add(Store(ref, where, g.b.map(fn, x.value, old)))
        g.b.add(For(g.index(0), g.index(trips), g.index(1), (), block))
        known = (
            known
            if flips
            else {"bound": max(v.bound, x.bound), "err": max(v.err, x.err), "grain": min(v.grain, x.grain)}
        )
        v = V(v.value, **(known if v.kind == "f" else {"bound": int_bound(v.dtype) if v.kind != "b" else 0}))
    part = tuple(Span(g.index(margin + g.number(0, n // 2)), n // 2 + n % 2) for n in v.shape) if g.chance() else where
    g.put(g.b.value(Load(ref, part)), v.bound, v.err, v.grain)


@action
def pieces(g: Gen) -> None:
    """Two tiles side by side in memory of the program, read back across their border and over the end."""
    v = g.find(lambda v: len(v.shape) == 1 and v.exact, DTYPE_NAMES)
    if len(v.shape) != 1:
        return
    w, n = partner(g, v), v.shape[0]
    ref = g.b.add(Alloc((2 * n,), v.dtype)).result
    for k, x in enumerate((v, w)):
        g.b.add(Store(ref, (Tile(g.index(k), n, n),), x.value))
    known = {"bound": max(v.bound, w.bound), "err": max(v.err, w.err), "grain": min(v.grain, w.grain)}
    start = g.index(g.number(0, 2 * n))
    g.put(
        g.b.value(Load(ref, (g.choose((Span(start, n), Span(start, 2 * n), Tile(g.index(g.number(0, 1)), n, n))),))),
        **known,
    )


@action
def add_to_all(g: Gen) -> None:
    """Every program adds (or maximises) into the same elements of an output."""
    four = ("int32", "float32", "uint32", "int64")
    v = g.find(lambda v: len(v.shape) == 1 and v.dtype in four and v.exact, four)
    if len(v.shape) != 1:
        return
    n, trips = g.number(1, 6), 4 * max(1, len(g.grid)) ** 3
    fn = g.choose(("max", "min", "add") if floats(v) else ("add", "max", "min", "xor", "and", "or"))
    known = total(v.dtype, v.bound, 0, v.grain, v.shape[0] * 27 * trips) if floats(v) else {"err": 0.0, "bound": 0.0}
    if fn == "add" and floats(v) and known["err"]:
        return
    ref = g.new_output((n,), v.dtype, 0, 0)
    index = Take(g.take_indices(v.shape[0])) if g.chance() else Span(g.index(g.number(0, n)), v.shape[0])
    g.b.add(Atomic(fn, ref, (index,), v.value, None, g.mask(v.shape)))


@action
def update_in_place(g: Gen) -> None:
    """An output that shares the buffer of an input: read, changed, written back, read again."""
    if g.depth:
        return
    four = ("float32", "int32", "bfloat16", "bool")
    v = g.find(lambda v: v.dtype in four and v.exact, four)
    dims = [At(p.value) for p in g.pids] + [Tile(g.index(0), n, n) for n in v.shape]
    shape = [*g.grid, *v.shape]
    ref, bound, grain = g.new_input(shape, v.dtype)
    out = g.new_output(shape, v.dtype, None, 0)
    g.aliases.append((len(g.inputs) - 1, len(g.outputs) - 1))
    old = V(g.b.value(Load(ref, tuple(dims))), bound, 0, grain)
    new = V(g.b.value(Map("max", (old.value, v.value))), max(v.bound, bound), 0, min(v.grain, grain))
    g.b.add(Store(g.choose((ref, out)), tuple(dims), new.value))
    again = g.b.value(Load(g.choose((ref, out)), tuple(dims)))
    g.put(old.value, old.bound, 0, grain)
    g.put(again, new.bound, 0, new.grain)
