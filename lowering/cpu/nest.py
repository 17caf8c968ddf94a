"""Loop nests over the elements of a tile, vectorised along one axis, with a masked tail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from .access import Lanes, constant_mask, tail_mask
from .evaluate import Point
from .llvm import Val, i64
from .values import Ix, Step, step_through

if TYPE_CHECKING:
    from .emitter import Emitter

FEW = 4  # vectors of a row that may be written out

Body = Callable[[Point], None]
Bounds = dict[int, tuple[Val, Val]]


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def vector_axis(shape: tuple[int, ...]) -> int | None:
    """The innermost axis that is longer than one element."""
    for k in reversed(range(len(shape))):
        if shape[k] > 1:
            return k
    return None


def width(em: Emitter, n: int, bits: int) -> int:
    """Lanes for an axis of n elements when the widest value has `bits` bits."""
    return min(em.isa.lanes(bits), next_power_of_2(n))


def emit_nest(
    em: Emitter, shape, bits: int, body: Body, *, bounds: Bounds | None = None, scalar: bool = False, flat: bool = False
) -> None:
    """Run `body` at every element of `shape` (or of the box `bounds`: axis -> (lo, hi), known at run time).

    Where the last axes are shorter than a vector, a vector holds several rows. `scalar` asks for one lane. `flat`
    writes the vectors of a short row out one after the other, so that the loop over rows has no other loop in it, and
    keeps in registers what is the same in all rows. The point tells the body whether the nest covers the whole shape
    exactly once.
    """
    if 0 in shape:
        return
    bounds = bounds or {}
    axis = None if scalar else vector_axis(shape)
    rows = None if axis is None else short_rows(em, tuple(shape), bits, bounds)
    inside = [axis] if rows is None else [*rows.inner, rows.axis]
    outer = [k for k in range(len(shape)) if k not in inside]
    ix = [Ix(i64(0))] * len(shape)

    def point(lanes: Lanes) -> Point:
        return Point(em, tuple(shape), tuple(ix), lanes, covers=not bounds)

    def go(depth: int) -> None:
        if depth == len(outer):
            if axis is None:
                body(point(Lanes(1)))
            elif rows is not None:
                _rows_loop(em, shape, bits, rows, rows_at, flat)
            else:
                _vector_loop(em, shape[axis], bits, bounds.get(axis), at, flat)
            return
        k = outer[depth]
        lo, hi = bounds.get(k, (i64(0), i64(shape[k])))
        with em.code.loop(lo, hi) as i:
            ix[k] = Ix(i)
            go(depth + 1)

    def at(base: Val, lanes: Lanes) -> None:
        ix[axis] = Ix(base, 1 if lanes.count > 1 else 0)
        body(point(lanes))

    def rows_at(base: Val, lanes: Lanes) -> None:
        for k, step in _steps(shape, rows, lanes.count).items():
            ix[k] = Ix(base if k == rows.axis else i64(0), step)
        body(point(lanes))

    with em.keep_scope():
        go(0)
    em.arena.tick()


class Rows(NamedTuple):
    """Axes that the lanes of one vector go along together.

    Attributes:
      inner: axes that stand in it as a whole, innermost first.
      size: elements of these.
      axis: that it has `count` indices of.
    """

    inner: list[int]
    size: int
    axis: int
    count: int


def short_rows(em: Emitter, shape: tuple[int, ...], bits: int, bounds: Bounds) -> Rows | None:
    """The rows of a tile of which a vector holds several; None: a row fills a vector, or its length is known when the
    kernel runs."""
    lanes, inner, size = em.isa.lanes(bits), [], 1
    for k in reversed(range(len(shape))):
        if shape[k] == 1:
            continue
        if k in bounds:
            return None
        count = min(lanes // size, shape[k])
        if count < shape[k] or (k == 0 and inner):
            whole = size & size - 1 == 0 or em.isa.has("avx512bw", "avx512vl")
            return Rows(inner, size, k, count) if inner and count > 1 and whole else None
        inner.append(k)
        size *= shape[k]
    *inner, axis = inner
    return Rows(inner, size // shape[axis], axis, shape[axis]) if inner else None


def _steps(shape, rows: Rows, lanes: int) -> dict[int, Step]:
    """For each of the axes what a lane adds to the index of lane 0."""
    steps, below = {}, 1
    for k in rows.inner:
        steps[k] = step_through(tuple(lane // below % shape[k] for lane in range(lanes)))
        below *= shape[k]
    return steps | {rows.axis: step_through(tuple(lane // below for lane in range(lanes)))}


def _rows_loop(em: Emitter, shape, bits: int, rows: Rows, at: Callable[[Val, Lanes], None], flat: bool) -> None:
    n, code = shape[rows.axis], em.code

    def some(count: int) -> Lanes:
        real = count * rows.size
        lanes = next_power_of_2(real)
        return Lanes(lanes, None if lanes == real else constant_mask(lanes, real))

    main = n // rows.count * rows.count
    if main == rows.count or (flat and main // rows.count <= FEW):
        for i in range(0, main, rows.count):
            at(i64(i), some(rows.count))
    elif main:
        with code.loop(0, main, rows.count) as i:
            at(i, some(rows.count))
    if main < n:
        at(i64(main), some(n - main))


def _vector_loop(em: Emitter, n: int, bits: int, bounds, at: Callable[[Val, Lanes], None], flat: bool) -> None:
    code, w = em.code, width(em, n, bits)
    if bounds is None:
        main = n // w * w
        if flat and main // w <= FEW:
            for j in range(0, main, w):
                at(i64(j), Lanes(w))
        elif main:
            with code.loop(0, main, w) as j:
                at(j, Lanes(w))
        if main < n:
            tail = min(w, next_power_of_2(n - main))
            at(i64(main), Lanes(tail, None if tail == n - main else constant_mask(tail, n - main)))
        return
    lo, hi = bounds
    span = code.sub(hi, lo)
    main = code.add(
        lo, code.binary("and", span, i64(-w)) if span.name.startswith("%") else i64(int(span.name) // w * w)
    )
    with code.loop(lo, main, w) as j:
        at(j, Lanes(w))
    if w > 1:
        with code.when(code.cmp("icmp", "slt", main, hi)):
            at(main, Lanes(w, tail_mask(code, w, code.sub(hi, main))))
