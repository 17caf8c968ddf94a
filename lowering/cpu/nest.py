"""Loop nests over the elements of a tile, vectorised along one axis, with a masked tail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .access import Lanes, constant_mask, tail_mask
from .evaluate import Point
from .llvm import Val, i64
from .values import Ix

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

    `scalar` asks for one lane. `flat` writes the vectors of a short row out one after the other, so that the loop over
    rows has no other loop in it, and keeps in registers what is the same in all rows. The point tells the body whether
    the nest covers the whole shape exactly once.
    """
    if 0 in shape:
        return
    bounds = bounds or {}
    axis = None if scalar else vector_axis(shape)
    outer = [k for k in range(len(shape)) if k != axis]
    ix = [Ix(i64(0))] * len(shape)

    def point(lanes: Lanes) -> Point:
        return Point(em, tuple(shape), tuple(ix), lanes, covers=not bounds)

    def go(depth: int) -> None:
        if depth == len(outer):
            if axis is None:
                body(point(Lanes(1)))
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

    with em.keep_scope():
        go(0)
    em.arena.tick()


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
