"""Reductions: accumulators stay in vector registers; consecutive reductions over the same elements share one pass."""

from __future__ import annotations

import dataclasses
import math

from jtile import ir

from . import access, plan, short_rows, together
from .access import Lanes, const_value, constant_mask
from .convert import emit_cast, register_type
from .elementwise import emit_elementwise
from .emitter import Emitter, emits
from .evaluate import Point
from .llvm import Val, i64, lanes_of, scalar_of, shuffle, vec
from .nest import emit_nest, next_power_of_2, vector_axis, width
from .values import Buffer, Ix

CHAINS = 4  # independent accumulators of a sum that is alone, to hide the latency of an add
OF_ROW = 2  # accumulators of a row, whether or not rows share a pass: the bits of its sum do not depend on other rows
COLUMNS = 8  # accumulators of sums whose lanes run along a kept axis
COPIED = 64  # vector instructions of all copies of the operand's expression in an unrolled reduction, at most
SHORT = 16  # elements of an axis, whatever the width of vectors, whose sum with those of other axes is one chain
UNROLLED = 2  # iterations of a loop around the vectors that are written one behind the other
ROWS = 4  # rows that share one pass over the reduced axes


@dataclasses.dataclass
class Job:
    """One reduction of a group: its op, its accumulation dtype and its result buffer; `beside`: what is computed and
    kept on the way."""

    op: ir.Reduce
    acc: str
    out: Buffer
    beside: list[ir.Value] = dataclasses.field(default_factory=list)

    @property
    def fn(self) -> str:
        return {"and": "and", "or": "or", "xor": "xor"}.get(
            self.op.fn, {"sum": "add", "prod": "mul"}.get(self.op.fn, self.op.fn)
        )


@emits(ir.Reduce)
def _reduce(em: Emitter, op: ir.Reduce) -> None:
    group = _group(em, op)
    shape, axes = op.x.shape, op.axes
    outs = [em.new_buffer(g.result.shape, g.result.dtype) for g in group]
    jobs = [Job(g, _accumulator(g.x.dtype), out) for g, out in zip(group, outs, strict=True)]
    if 0 in shape or not axes:
        _trivial(em, jobs)
    else:
        for job in jobs:
            job.beside = together.beside(em, job.op.x)
        beside = [v for job in jobs for v in job.beside]
        roots = [g.x for g in group]
        em.prepare([*roots, *beside], shape)
        bits = em.bits(roots)
        with em.keep_scope():
            em.flagged -= set(beside)
            em.flagged -= together.alone(em, [*roots, *beside], group, beside)
            _emit(em, jobs, shape, axes, bits)
    for job in jobs:
        em.set_buffer(job.op.result, job.out)
        em.done.add(job.op)


def _group(em: Emitter, op: ir.Reduce) -> list[ir.Reduce]:
    """This reduction and those right behind it (only lazy ops between) over the same axes that do not depend on it."""
    group, tainted = [op], set(op.results)
    for k in range(em.pos + 1, len(em.plan.block.ops)):
        other = em.plan.block.ops[k]
        depends = any(v in tainted for v in other.operands())
        if isinstance(other, ir.Reduce) and not depends:
            if other.x.shape != op.x.shape or other.axes != op.axes:
                break
            group.append(other)
            tainted.update(other.results)
        elif plan.is_lazy(other) and not isinstance(other, ir.Gather | ir.Reshape | ir.Dense):
            if depends:
                tainted.update(other.results)
            elif other not in em.done and all(v in em.env for v in other.operands()):
                em.done.add(other)
                em.lazy(other)
        else:
            break
    return group


def _accumulator(dtype: str) -> str:
    d = ir.DTYPES[dtype]
    return "float32" if d.kind == "f" and d.bits < 32 else dtype


def _trivial(em: Emitter, jobs: list[Job]) -> None:
    """A reduction of nothing: the results are the identity, or the operand itself when no axis is reduced."""
    for job in jobs:
        start = const_value(ir.identity(job.op.fn, job.op.x.dtype), job.op.x.dtype)

        def body(p: Point, job=job, start=start) -> None:
            value = start if 0 in job.op.x.shape else p.at(job.op.x, p.ix)
            access.write(em.code, em.isa, job.out, p.ix, value, p.lanes)

        if 0 not in job.op.x.shape:
            em.prepare([job.op.x], ())
        emit_nest(em, job.out.shape, plan.register_bits(job.op.x.dtype), body)


def _emit(em: Emitter, jobs: list[Job], shape, axes, bits: int) -> None:
    kept = [k for k in range(len(shape)) if k not in axes]
    lane = vector_axis(tuple(n if k in axes else 1 for k, n in enumerate(shape)))
    lane_kept = vector_axis(tuple(n if k in kept else 1 for k, n in enumerate(shape)))
    if lane_kept is not None and (lane is None or lane_kept > lane):
        _across(em, jobs, shape, axes, lane_kept, bits, _copies(em, jobs, shape, bits))
    else:
        _along(em, jobs, shape, axes, lane, bits, _copies(em, jobs, shape, bits))


def _copies(em: Emitter, jobs: list[Job], shape, bits: int) -> int:
    """How many times the operand's expression is repeated in the code: less for a long one, or for a small tile."""
    cost = sum(em.expression_cost(job.op.x) for job in jobs)
    return max(1, min(int(COPIED // max(cost, 1)), math.prod(shape) // (4 * em.isa.lanes(bits))))


def _combine(em: Emitter, job: Job, a: Val, b: Val, contract: bool = True) -> Val:
    """Two terms as one; `contract`: the second may be a product that is not rounded by itself."""
    if job.op.fn in ("sum", "prod") and ir.DTYPES[job.acc].kind == "f":
        add = "fadd contract" if contract else "fadd"
        return em.code.binary(add if job.op.fn == "sum" else "fmul", a, b)
    if ir.DTYPES[job.acc].kind == "b":
        return em.code.binary({"max": "or", "min": "and", "sum": "or", "prod": "and"}.get(job.op.fn, job.op.fn), a, b)
    return emit_elementwise(em.code, em.isa, job.fn, [a, b], job.acc)


def _identity(job: Job, lanes: int) -> Val:
    return const_value(ir.identity(job.op.fn, job.acc), job.acc, lanes)


def _value(em: Emitter, p: Point, job: Job) -> Val:
    """The operand at the point, with lanes outside the tail mask replaced by the identity."""
    x = _read(p, job)
    if p.lanes.mask is not None:
        x = em.code.select(p.lanes.mask, x, _identity(job, p.lanes.count))
    return x


def _read(p: Point, job: Job) -> Val:
    """The operand at the point; what is beside it is kept."""
    x = p.full(job.op.x, p.ix)
    for v in job.beside:
        p.em.keep(p, v, p.at(v, p.ix))
    return x


def _across(em: Emitter, jobs: list[Job], shape, axes, lane: int, bits: int, copies: int) -> None:
    """Lanes run along a kept axis: every lane is its own reduction, the reduced axes are inner loops. Several vectors
    of lanes share a pass over the reduced axes to hide the latency of an add, which changes no sum's terms or order."""
    code, n = em.code, shape[lane]
    wide = width(em, n, bits)
    many = max(1, min(COLUMNS // len(jobs), copies, n // wide))
    others = [k for k in range(len(shape)) if k not in axes and k != lane]

    def outer(depth: int, index: list[Ix]) -> None:
        """The loops over the kept axes from `depth` on, that of the lanes last."""
        if depth < len(others):
            with code.loop(0, shape[others[depth]]) as i:
                outer(depth + 1, _with(index, others[depth], i))
            return
        main = n // (wide * many) * wide * many
        run = lambda at, count, lanes: _columns(
            em, jobs, shape, axes, [_lane(index, lane, code.add(at, c * wide), lanes) for c in range(count)], lanes
        )
        with code.loop(0, main, wide * many) as at:
            run(at, many, Lanes(wide))
        with code.loop(main, n // wide * wide, wide) as at:
            if main < n // wide * wide:
                run(at, 1, Lanes(wide))
        if n % wide:
            tail = min(wide, next_power_of_2(n % wide))
            run(i64(n - n % wide), 1, Lanes(tail, None if tail == n % wide else constant_mask(tail, n % wide)))

    with em.keep_scope():
        outer(0, [Ix(i64(0))] * len(shape))
    em.arena.tick()


def _lane(index: list[Ix], lane: int, at: Val, lanes: Lanes) -> list[Ix]:
    """The index of a vector of lanes from element `at` on."""
    out = list(index)
    out[lane] = Ix(at, 1 if lanes.count > 1 else 0)
    return out


def _columns(em: Emitter, jobs: list[Job], shape, axes, columns: list[list[Ix]], lanes: Lanes) -> None:
    """Reduce the vectors of lanes at some places along the kept axes together."""
    code = em.code
    start = lambda job: code.var(register_type(job.acc, lanes.count), _identity(job, lanes.count))
    sums = [[start(job) for job in jobs] for _ in columns]

    def inner(depth: int, reduced: dict[int, Ix]) -> None:
        """The loops over the reduced axes from `depth` on."""
        if depth < len(axes):
            with code.loop(0, shape[axes[depth]]) as i:
                inner(depth + 1, reduced | {axes[depth]: Ix(i)})
            return
        for index, totals in zip(columns, sums, strict=True):
            point = Point(em, tuple(shape), tuple(reduced.get(k, x) for k, x in enumerate(index)), lanes)
            for job, total in zip(jobs, totals, strict=True):
                x = _read(point, job)
                code.store(_combine(em, job, code.load(x.ty, total), x), total)

    inner(0, {})
    kept_shape = tuple(1 if k in axes else n for k, n in enumerate(shape))
    for index, totals in zip(columns, sums, strict=True):
        point = Point(em, kept_shape, tuple(index), lanes)
        for job, total in zip(jobs, totals, strict=True):
            _finish(em, job, code.load(register_type(job.acc, lanes.count), total), point, axes)


def _finish(em: Emitter, job: Job, acc: Val, p: Point, axes) -> None:
    ix = tuple(x for k, x in enumerate(p.ix) if k not in axes)
    value = emit_cast(em.code, em.isa, acc, job.acc, job.op.x.dtype)
    access.write(em.code, em.isa, job.out, ix, value, p.lanes)


def _along(em: Emitter, jobs: list[Job], shape, axes, lane: int | None, bits: int, copies: int) -> None:
    """Lanes run along a reduced axis: several accumulators per row, several rows a pass, one horizontal step at the
    end."""
    kept = [axis for axis in range(len(shape)) if axis not in axes]
    code = em.code
    cost = sum(em.expression_cost(job.op.x) for job in jobs)
    of_row = min(OF_ROW, max(1, int(COPIED // max(cost, 1)) // ROWS))

    def rows(depth: int, index: list[Ix]) -> None:
        """The loops over the kept axes from `depth` on; the innermost one takes several rows at a time."""
        if depth == len(kept) - 1 and shape[kept[depth]] > 1:
            axis, length = kept[depth], shape[kept[depth]]
            many = min(ROWS, length, copies) if len(jobs) == 1 else 1
            first = _in_lanes(em, jobs, shape, axes, bits, index, axis)
            with code.loop(first, first + (length - first) // many * many, many) as i:
                together = [_with(index, axis, code.add(i, row)) for row in range(many)]
                _rows(em, jobs, shape, axes, lane, bits, together, of_row, axis)
            if (length - first) % many:
                with code.loop(length - (length - first) % many, length) as i:
                    _rows(em, jobs, shape, axes, lane, bits, [_with(index, axis, i)], of_row)
        elif depth < len(kept):
            with code.loop(0, shape[kept[depth]]) as i:
                rows(depth + 1, _with(index, kept[depth], i))
        else:
            _rows(em, jobs, shape, axes, lane, bits, [index], of_row if kept else min(CHAINS, copies))

    rows(0, [Ix(i64(0))] * len(shape))


def _in_lanes(em: Emitter, jobs: list[Job], shape, axes, bits: int, index: list[Ix], axis: int) -> int:
    """Reduce rows that are shorter than a vector, each in a lane; how many of them there were."""
    lanes = 0 if any(j.beside for j in jobs) else short_rows.lanes_for(em, [j.op.x for j in jobs], shape, axes, bits)
    if not lanes:
        return 0
    code, rows = em.code, shape[axis] // lanes * lanes
    with code.loop(0, rows, lanes) as i:
        here = _with(index, axis, i, step=1)
        points = short_rows.points(em, shape, axes, here, axis, lanes)
        for job in jobs:
            terms = [lambda p=p, job=job: _read(p, job) for p in points]
            total = short_rows.halves(terms, lambda a, b, job=job: _combine(em, job, a, b, contract=False))
            if job.op.fn == "sum" and ir.DTYPES[job.acc].kind == "f":  # no sum is -0.0
                total = _combine(em, job, _identity(job, lanes), total, contract=False)
            _finish(em, job, total, Point(em, tuple(shape), tuple(here), Lanes(lanes)), axes)
    return rows


def _with(index: list[Ix], axis: int, base: Val, step: int = 0) -> list[Ix]:
    """The index with another element along one axis; lanes take elements `step` apart."""
    out = list(index)
    out[axis] = Ix(base, step)
    return out


def _rows(
    em: Emitter, jobs: list[Job], shape, axes, lane: int | None, bits: int, rows: list[list[Ix]], most: int,
    row_axis: int | None = None,
) -> None:  # fmt: skip
    """Reduce several rows of a tile together: each sum has chains of vectors, which are combined in the end.

    Args:
      shape: of the tile; axes: those that are reduced; lane: the one of them that vectors run along, or None: scalars.
      rows: the index of each row along the other axes; along `axes` it is 0.
      most: accumulators of a row, at most.
      row_axis: the axis along which the next rows follow.
    """
    code = em.code
    length = 1 if lane is None else shape[lane]
    wide = 1 if lane is None else width(em, length, bits)  # elements of a vector
    chains = 1 if length <= SHORT and len(axes) > 1 else max(1, min(length // wide, most))
    main = length // (wide * chains) * (wide * chains)
    others = [a for a in axes if a != lane]
    loops = [shape[a] for a in others if a != others[-1] or shape[a] > UNROLLED]
    straight = main <= wide * chains and all(n == 1 for n in loops)
    start = lambda job: Running(em, _identity(job, wide), straight)
    sums = [[[start(job) for _ in range(chains)] for job in jobs] for _ in rows]  # by row, job and chain

    def step(here: list[list[Ix]], at: Val, lanes: Lanes, chain: int) -> None:
        """Add a vector of each row, from element `at` along `lane`, to the accumulators of one chain."""
        for number, (index, sums_of_row) in enumerate(zip(here, sums, strict=True)):
            full = list(index)
            if lane is not None:
                full[lane] = Ix(at, 1 if lanes.count > 1 else 0)
            row = None if row_axis is None else index[row_axis].base
            point = Point(em, tuple(shape), tuple(full), lanes, row=row, number=number)
            for job, sums_of_job in zip(jobs, sums_of_row, strict=True):
                x = _value(em, point, job)
                sums_of_job[chain].set(_combine(em, job, sums_of_job[chain].get(), x))

    def outer(depth: int, here: list[list[Ix]]) -> None:
        """The loops over the reduced axes that vectors do not run along, then the vectors of the innermost one."""
        if depth < len(others):
            axis = others[depth]
            if depth == len(others) - 1 and shape[axis] <= UNROLLED:
                for k in range(shape[axis]):
                    outer(depth + 1, [_with(index, axis, i64(k)) for index in here])
                return
            with code.loop(0, shape[axis]) as i:
                outer(depth + 1, [_with(index, axis, i) for index in here])
            return
        if main:
            with code.loop(0, main, wide * chains) as at:
                for chain in range(chains):
                    step(here, code.add(at, chain * wide), Lanes(wide), chain)
        for k, at in enumerate(range(main, length, wide)):
            count = min(wide, length - at)
            step(here, i64(at), Lanes(wide, None if count == wide else constant_mask(wide, count)), k % chains)

    outer(0, rows)
    totals = [[_pairwise(em, job, [s.get() for s in of]) for job, of in zip(jobs, row, strict=True)] for row in sums]
    _end_rows(em, jobs, shape, axes, rows, totals, row_axis)


def _end_rows(
    em: Emitter, jobs: list[Job], shape, axes, rows: list[list[Ix]], totals: list[list[Val]], row_axis: int | None
) -> None:
    """Combine the lanes of the vectors of each row and job, of several rows in one vector where they follow each other
    along `row_axis`, and store the results."""
    wide = lanes_of(totals[0][0].ty)
    if row_axis is not None and wide > 1 and len(rows) in (2, 4, 8) and ir.DTYPES[jobs[0].op.x.dtype].bits >= 8:
        (job,), index = jobs, _with(rows[0], row_axis, rows[0][row_axis].base, step=1)
        total = _together(em, job, [total for (total,) in totals])
        return _finish(em, job, total, Point(em, tuple(shape), tuple(index), Lanes(len(rows))), axes)
    for index, of_row in zip(rows, totals, strict=True):
        for job, total in zip(jobs, of_row, strict=True):
            total = halve(em, total, lambda a, b, job=job: _combine(em, job, a, b))
            _finish(em, job, total, Point(em, tuple(shape), tuple(index), Lanes(1)), axes)


class Running:
    """What a reduction has so far: a register where all of it is in one block, else a variable."""

    def __init__(self, em: Emitter, start: Val, one_block: bool):
        self._code, self._value = em.code, start
        self._slot = None if one_block else em.code.var(start.ty, start)

    def get(self) -> Val:
        return self._value if self._slot is None else self._code.load(self._value.ty, self._slot)

    def set(self, value: Val) -> None:
        if self._slot is None:
            self._value = value
        else:
            self._code.store(value, self._slot)


def _pairwise(em: Emitter, job: Job, parts: list[Val]) -> Val:
    """The accumulators of a row, combined pairwise."""
    while len(parts) > 1:
        rest = [parts[-1]] if len(parts) % 2 else []
        parts = [_combine(em, job, a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)] + rest
    return parts[0]


def _together(em: Emitter, job: Job, rows: list[Val]) -> Val:
    """What `halve` gives for each of 2, 4 or 8 vectors, as one vector with a lane for each. Halves of two vectors are
    combined by one instruction, in the same pairs of lanes."""
    code, vectors, of_row = em.code, rows, lanes_of(rows[0].ty)
    while of_row > 1:
        two = len(vectors) > 1
        pairs = zip(vectors[::2], vectors[1::2], strict=True) if two else [(v, Val(v.ty, "poison")) for v in vectors]
        lanes = lanes_of(vectors[0].ty) * (2 if two else 1)
        low = [k for k in range(lanes) if k % of_row < of_row // 2]
        high = [k + of_row // 2 for k in low]
        vectors = [_combine(em, job, shuffle(code, a, b, low), shuffle(code, a, b, high)) for a, b in pairs]
        of_row //= 2
    while len(vectors) > 1:
        every = [*range(2 * lanes_of(vectors[0].ty))]
        vectors = [shuffle(code, a, b, every) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def halve(em: Emitter, x: Val, combine) -> Val:
    """Reduce the lanes of a vector (a power of two of them) by halves."""
    code = em.code
    while (n := lanes_of(x.ty)) > 1:
        half = vec(n // 2, scalar_of(x.ty)) if n > 2 else f"<1 x {scalar_of(x.ty)}>"
        lo = ", ".join(f"i32 {k}" for k in range(n // 2))
        hi = ", ".join(f"i32 {k + n // 2}" for k in range(n // 2))
        if n == 2:
            a = code.let(scalar_of(x.ty), f"extractelement {x}, i64 0")
            b = code.let(scalar_of(x.ty), f"extractelement {x}, i64 1")
        else:
            a = code.let(half, f"shufflevector {x}, {x.ty} poison, <{n // 2} x i32> <{lo}>")
            b = code.let(half, f"shufflevector {x}, {x.ty} poison, <{n // 2} x i32> <{hi}>")
        x = combine(a, b)
    return x


@emits(ir.ArgReduce)
def _arg_reduce(em: Emitter, op: ir.ArgReduce) -> None:
    """Position of the first extreme element; a NaN wins. Lanes run along a kept axis where there is one."""
    shape, axis, code = op.x.shape, op.axis, em.code
    out = em.new_buffer(op.result.shape, op.dtype)
    dtype = op.x.dtype
    em.prepare([op.x], ())
    kept_shape = tuple(1 if k == axis else n for k, n in enumerate(shape))
    lane = vector_axis(kept_shape)
    scalar = lane is None or lane < axis
    wide = width(em, shape[axis], em.bits([op.x])) if scalar else 1
    main = shape[axis] // wide * wide

    def body(p: Point) -> None:
        n = p.lanes.count
        if wide > 1 and main >= 2 * wide:
            start, (value, place) = main, _best_of_vectors(em, op, list(p.ix), wide, main)
        else:
            first = Point(em, shape, p.ix, p.lanes, False)
            start, value, place = 1, first.full(op.x, p.ix), code.splat(i64(0), n)
        best, where = code.var(register_type(dtype, n), value), code.var(vec(n, "i64"), place)
        with code.loop(start, shape[axis]) as i:
            q = Point(em, shape, tuple(_with(list(p.ix), axis, i)), p.lanes, False)
            x = q.full(op.x, q.ix)
            old = code.load(x.ty, best)
            better = _better(em, op.fn, x, old, dtype)
            code.store(code.select(better, x, old), best)
            at = code.load(vec(n, "i64"), where)
            code.store(code.select(better, code.splat(i, n), at), where)
        at = emit_cast(code, em.isa, code.load(vec(n, "i64"), where), "int64", op.dtype)
        access.write(code, em.isa, out, tuple(x for k, x in enumerate(p.ix) if k != axis), at, p.lanes)

    emit_nest(em, kept_shape, max(em.bits([op.x]), plan.register_bits(op.dtype)), body, scalar=scalar)
    em.set_buffer(op.result, out)


def _best_of_vectors(em: Emitter, op: ir.ArgReduce, index: list[Ix], wide: int, main: int) -> tuple[Val, Val]:
    """The extreme of the first `main` elements of a row and its position: every lane has one of its own, of elements
    `wide` apart, and the first of the best lanes wins."""
    code, dtype, lanes = em.code, op.x.dtype, Lanes(wide)

    def at(i: Val) -> Val:
        p = Point(em, op.x.shape, tuple(_lane(index, op.axis, i, lanes)), lanes)
        return p.full(op.x, p.ix)

    i32 = lambda n: Val("i32", str(n))
    best = code.var(register_type(dtype, wide), at(i64(0)))
    place = code.var(vec(wide, "i32"), code.splat(i32(0), wide))
    with code.loop(wide, main, wide) as i:
        x = at(i)
        old, before = code.load(x.ty, best), code.load(vec(wide, "i32"), place)
        better = _better(em, op.fn, x, old, dtype)
        code.store(code.select(better, x, old), best)
        code.store(code.select(better, code.splat(code.cast("trunc", i, "i32"), wide), before), place)
    pick = lambda v, k: code.let(scalar_of(v.ty), f"extractelement {v}, i64 {k}")
    every, places = code.load(register_type(dtype, wide), best), code.load(vec(wide, "i32"), place)
    value, first = pick(every, 0), pick(places, 0)
    for k in range(1, wide):
        x, here = pick(every, k), code.binary("add", pick(places, k), i32(k))
        same = emit_elementwise(code, em.isa, "eq", [x, value], dtype)
        if ir.DTYPES[dtype].kind == "f":
            same = code.binary("or", same, code.binary("and", *(code.cmp("fcmp", "uno", v, v) for v in (x, value))))
        earlier = code.binary("and", same, code.cmp("icmp", "slt", here, first))
        better = code.binary("or", _better(em, op.fn, x, value, dtype), earlier)
        value, first = code.select(better, x, value), code.select(better, here, first)
    return value, code.cast("sext", first, "i64")


def _better(em: Emitter, fn: str, x: Val, old: Val, dtype: str) -> Val:
    """Whether x replaces the old extreme: it is strictly better, or the first NaN."""
    code = em.code
    wins = emit_elementwise(code, em.isa, "gt" if fn == "max" else "lt", [x, old], dtype)
    if ir.DTYPES[dtype].kind != "f":
        return wins
    new_nan = code.cmp("fcmp", "uno", x, x)
    old_ok = code.cmp("fcmp", "ord", old, old)
    return code.binary("and", old_ok, code.binary("or", wins, new_nan))
