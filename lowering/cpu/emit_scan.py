"""Scans and user reductions: sequential along their axis, vectorised along the others."""

from __future__ import annotations

from collections.abc import Callable

from jtile import ir
from jtile._errors import UnsupportedError

from . import access, plan
from .access import Lanes
from .convert import emit_cast, register_type
from .elementwise import emit_elementwise
from .emit_shape import combine_scalars
from .emitter import Emitter, emits
from .evaluate import RULES, Point
from .llvm import Val, lanes_of
from .nest import emit_nest, vector_axis
from .values import Ix

Step = Callable[[list[Val], list[Val], Lanes], list[Val]]


def _along(
    em: Emitter, xs, outs, axis: int, reverse: bool, step: Step, accs: list[str], keep_all: bool, start=None
) -> None:
    """Run `acc = step(acc, x)` along `axis` at every other index. `keep_all` writes each partial result, else the last
    one.

    Without `start` the first element is the first accumulator.
    """
    code, shape = em.code, xs[0].shape
    em.prepare(list(xs), ())
    kept = tuple(1 if k == axis else n for k, n in enumerate(shape))
    lane = vector_axis(kept)
    bits = max(em.bits(list(xs)), *(plan.register_bits(a) for a in accs))

    def body(p: Point) -> None:
        n = p.lanes.count

        def at(i: Val) -> Point:
            ix = tuple(Ix(i) if k == axis else x for k, x in enumerate(p.ix))
            return Point(em, shape, ix, p.lanes, False)

        def values(q: Point) -> list[Val]:
            return [emit_cast(code, em.isa, q.full(x, q.ix), x.dtype, a) for x, a in zip(xs, accs, strict=True)]

        def put(q: Point, acc: list[Val]) -> None:
            for x, a, v, out in zip(xs, accs, acc, outs, strict=True):
                access.write(code, em.isa, out, q.ix, emit_cast(code, em.isa, v, a, x.dtype), p.lanes)

        first = 0
        slots = [code.var(register_type(a, n)) for a in accs]
        if start is None:
            q = at(_position(em, 0, shape[axis], reverse))
            begin = values(q)
            put(q, begin) if keep_all else None
            first = 1
        else:
            begin = [code.splat(v, n) for v in start]
        for v, s in zip(begin, slots, strict=True):
            code.store(v, s)
        with code.loop(first, shape[axis]) as i:
            q = at(_position(em, i, shape[axis], reverse))
            acc = [code.load(register_type(a, n), s) for a, s in zip(accs, slots, strict=True)]
            acc = step(acc, values(q), p.lanes)
            for v, s in zip(acc, slots, strict=True):
                code.store(v, s)
            put(q, acc) if keep_all else None
        if not keep_all:
            last = Point(em, shape, tuple(x for k, x in enumerate(p.ix) if k != axis), p.lanes, False)
            put(last, [code.load(register_type(a, n), s) for a, s in zip(accs, slots, strict=True)])

    if 0 not in shape or (start is not None and 0 not in kept):
        emit_nest(em, kept, bits, body, scalar=lane is None)


def _position(em: Emitter, i, n: int, reverse: bool) -> Val:
    from .llvm import i64

    i = i64(i) if isinstance(i, int) else i
    return em.code.sub(n - 1, i) if reverse else i


@emits(ir.Cumulative)
def _cumulative(em: Emitter, op: ir.Cumulative) -> None:
    d = ir.DTYPES[op.x.dtype]
    acc = "float32" if d.kind == "f" and d.bits < 32 else op.x.dtype
    name = {"sum": "add", "prod": "mul"}.get(op.fn, op.fn)

    def step(a: list[Val], x: list[Val], lanes: Lanes) -> list[Val]:
        if op.fn == "logsumexp":
            return [_logaddexp(em, a[0], x[0], acc)]
        return [combine_scalars(em, name, a[0], x[0], acc)]

    out = em.new_buffer(op.result.shape, op.result.dtype)
    _along(em, (op.x,), (out,), op.axis, op.reverse, step, [acc], keep_all=True)
    em.set_buffer(op.result, out)


def _logaddexp(em: Emitter, a: Val, b: Val, dtype: str) -> Val:
    """max + log1p(exp(-|a - b|)); two equal infinities give themselves."""
    run = lambda fn, *args: emit_elementwise(em.code, em.isa, fn, list(args), dtype)
    top = run("max", a, b)
    gap = run("neg", run("abs", run("sub", a, b)))
    soft = run("add", top, run("log1p", run("exp", gap)))
    return em.code.select(run("eq", a, b), run("add", a, _constant(a, 0.6931471805599453)), soft)


def _constant(like: Val, value: float) -> Val:
    from .llvm import const, scalar_of
    from .math_expr import literal

    return const(like.ty, literal(scalar_of(like.ty), value))


def run_combiner(em: Emitter, block: ir.Block, acc: list[Val], x: list[Val], lanes: Lanes) -> list[Val]:
    """A block of scalar ops, evaluated on all lanes at once."""
    values: dict[ir.Value, Val] = dict(zip(block.params, [*acc, *x], strict=True))
    p = LanePoint(em, (), (), lanes, False)
    p.values = values
    for op in block.ops:
        if type(op) not in RULES or op.results[0].type.rank:
            raise UnsupportedError(
                f"a combiner may hold elementwise operations only, got {op.mnemonic!r}",
                (op.loc.file, op.loc.line) if op.loc.file else None,
            )
        values[op.result] = RULES[type(op)](p, op, ())
    return [_widen(em, p.at(v, ()), lanes) for v in block.yields]


def _widen(em: Emitter, v: Val, lanes: Lanes) -> Val:
    return v if lanes_of(v.ty) == lanes.count else em.code.splat(v, lanes.count)


class LanePoint(Point):
    """A point whose values are given: inside a combiner every scalar is a vector of lanes."""

    def at(self, v: ir.Value, ix) -> Val:
        return self.values[v] if v in self.values else self.em.scalar(v)


@emits(ir.UserScan)
def _user_scan(em: Emitter, op: ir.UserScan) -> None:
    outs = [em.new_buffer(r.shape, r.dtype) for r in op.results]

    def step(acc: list[Val], x: list[Val], lanes: Lanes) -> list[Val]:
        return run_combiner(em, op.body, acc, x, lanes)

    _along(em, op.xs, outs, op.axis, op.reverse, step, [x.dtype for x in op.xs], keep_all=True)
    for r, out in zip(op.results, outs, strict=True):
        em.set_buffer(r, out)


@emits(ir.UserReduce)
def _user_reduce(em: Emitter, op: ir.UserReduce) -> None:
    """Several axes are reduced one after the other, the last first; the start comes in with the first axis, once."""
    dtypes = [x.dtype for x in op.xs]
    xs, axes = list(op.xs), sorted(op.axes)
    start = [em.scalar(v) for v in op.inits]
    if any(xs[0].shape[k] == 0 for k in axes):
        xs, axes = _nothing(em, op), [op.results[0].type.rank]

    def step(acc: list[Val], x: list[Val], lanes: Lanes) -> list[Val]:
        return run_combiner(em, op.body, acc, x, lanes)

    if not axes:
        _from_start(em, op, start, step)
        return
    for axis in reversed(axes):
        shape = tuple(n for k, n in enumerate(xs[0].shape) if k != axis)
        outs = [em.new_buffer(shape, d) for d in dtypes]
        first = start if axis == axes[0] else None
        _along(em, xs, outs, axis, False, step, dtypes, keep_all=False, start=first)
        xs = [ir.Value(ir.TileType(shape, d)) for d in dtypes]
        em.env.update(zip(xs, outs, strict=True))
    for r, x in zip(op.results, xs, strict=True):
        em.set_buffer(r, em.env.pop(x))


def _nothing(em: Emitter, op: ir.UserReduce) -> list[ir.Value]:
    """Empty operands: they have the shape of the results and an axis of length 0 behind it."""
    out = [ir.Value(ir.TileType((*op.results[0].shape, 0), x.dtype)) for x in op.xs]
    em.env.update((v, em.new_buffer(v.shape, v.dtype)) for v in out)
    return out


def _from_start(em: Emitter, op: ir.UserReduce, start: list[Val], step: Step) -> None:
    """Evaluate `body(inits, xs)` once at each place of the results, on vectors of lanes."""
    xs, shape = list(op.xs), op.xs[0].shape
    em.prepare(xs, shape)
    outs = [em.new_buffer(shape, x.dtype) for x in xs]

    def body(p: Point) -> None:
        acc = step([em.code.splat(v, p.lanes.count) for v in start], [p.full(x, p.ix) for x in xs], p.lanes)
        for v, out in zip(acc, outs, strict=True):
            access.write(em.code, em.isa, out, p.ix, v, p.lanes)

    emit_nest(em, shape, em.bits(xs), body)
    for r, out in zip(op.results, outs, strict=True):
        em.set_buffer(r, out)
