"""Layouts as linear maps over bits, which say where a tile's elements are after it was reshaped."""

from __future__ import annotations

from collections.abc import Sequence

from .layouts import LANES, Blocked, Layout, Linear, Mma, Operand, Sliced

Basis = tuple[int, ...]


def linear(layout: Layout, shape: Sequence[int]) -> Linear:
    """The layout of a tile of a shape as a linear one, as triton reads it."""
    cut = lambda bases: tuple(tuple(x if x < n else 0 for x, n in zip(b, shape, strict=True)) for b in bases)
    if isinstance(layout, Linear):
        return Linear(cut(layout.register), cut(layout.lane), cut(layout.warp))
    if isinstance(layout, Sliced):
        k = layout.axis
        whole = linear(layout.parent, (*shape[:k], 1, *shape[k:]))
        drop = lambda bases: tuple((*b[:k], *b[k + 1 :]) for b in bases)
        return Linear(tuple(b for b in drop(whole.register) if any(b)), drop(whole.lane), drop(whole.warp))
    if isinstance(layout, Mma):
        register, lane, sides = fragment(2, layout.n)
        warp, order = _warps(layout.warps, sides), (1, 0)
    elif isinstance(layout, Operand):
        register, lane, sides = fragment(layout.width, 8 * layout.width)
        warp, order = _warps((layout.parent.warps[0], 1), sides), (1, 0)
        warp += [(0, 0)] * (layout.parent.warps[1].bit_length() - 1)
    else:
        assert isinstance(layout, Blocked)
        sides, order = [1] * len(shape), layout.order
        register, lane, warp = (
            steps(n, sides, order) for n in (layout.per_thread, layout.lanes, layout.warps)
        )  # fmt: skip
    register += steps([-(-n // s) for n, s in zip(shape, sides, strict=True)], sides, order)
    return Linear(cut(register), cut(lane), cut(warp))


def steps(counts: Sequence[int], sides: list[int], order: Sequence[int]) -> list[Basis]:
    """Bits that walk over `counts[axis]` boxes along each axis; `sides`: the sides of the box so far, which grow."""
    out: list[Basis] = []
    for axis in order:
        for _ in range(counts[axis].bit_length() - 1):
            out.append(tuple(sides[axis] if k == axis else 0 for k in range(len(sides))))
            sides[axis] *= 2
    return out


def fragment(width: int, columns: int) -> tuple[list[Basis], list[Basis], list[int]]:
    """Registers and lanes of 16 rows of a product: `width` neighbours a register, four lanes a row."""
    sides = [1, 1]
    register = steps((1, width), sides, (1, 0))
    lane = steps((LANES // 4, 4), sides, (1, 0))
    register += steps((2, 1), sides, (1, 0)) + steps((1, columns // (4 * width)), sides, (1, 0))
    return register, lane, sides


def _warps(warps: Sequence[int], sides: list[int]) -> list[Basis]:
    return steps(warps, sides, (0, 1))


# -- what moves do ----------------------------------------------------------------------------------------------------


def _each(h: Linear, move) -> Linear:
    return Linear(*(tuple(map(move, bases)) for bases in (h.register, h.lane, h.warp)))


def reshaped(h: Linear, old: Sequence[int], new: Sequence[int]) -> Linear:
    """The layout of a tile's elements in the row-major order of another shape."""

    def move(b: Basis) -> Basis:
        flat = 0
        for x, n in zip(b, old, strict=True):
            flat = flat * n + x
        out: list[int] = []
        for n in reversed(new):
            out.insert(0, flat % n)
            flat //= n
        return tuple(out)

    return _each(h, move)


def permuted(h: Linear, perm: Sequence[int]) -> Linear:
    """The layout whose axis k is axis `perm[k]`."""
    return _each(h, lambda b: tuple(b[p] for p in perm))


def halved(h: Linear) -> Linear | None:
    """The layout of one of two tiles along a last axis of length 2; None where they share registers."""
    unit = (*(0,) * (len(h.register[0]) - 1), 1)
    if unit not in h.register or any(b[-1] for b in (*h.lane, *h.warp)):
        return None
    drop = lambda bases: tuple(b[:-1] for b in bases)
    at = h.register.index(unit)
    return Linear(drop(h.register[:at] + h.register[at + 1 :]), drop(h.lane), drop(h.warp))


def doubled(h: Linear) -> Linear:
    """The layout of two tiles side by side along a new last axis, in registers of their own."""
    more = lambda bases: tuple((*b, 0) for b in bases)
    rank = len(h.lane[0])
    return Linear(((*(0,) * rank, 1), *more(h.register)), more(h.lane), more(h.warp))


def in_vectors(h: Layout) -> Layout:
    """The layout with the same elements in the same threads in which neighbours along the last axis are in registers
    side by side, as loads of several elements ask; a move from one to the other costs nothing."""
    if not isinstance(h, Linear):
        return h
    unit = lambda k: (*(0,) * (len(h.lane[0]) - 1), 1 << k)
    found: list[Basis] = []
    while unit(len(found)) in h.register:
        found.append(unit(len(found)))
    return Linear((*found, *(b for b in h.register if b not in found)), h.lane, h.warp)


def registers_along(shape: Sequence[int], axis: int, warps: int) -> Blocked:
    """A layout in which each thread holds all of an axis."""
    if len(shape) == 1:  # there is no axis to deal out, so all threads hold the same elements
        return Blocked((shape[0],), (LANES,), (warps,), (0,))
    rest = [n for k, n in enumerate(shape) if k != axis]
    sides, out = list(rest), []
    for many in (LANES, warps):
        line = []
        for k in reversed(range(len(rest))):
            n = min(sides[k], many)
            line.insert(0, n)
            sides[k], many = sides[k] // n, many // n
        line[0] *= many
        out.append(line)
    put = lambda xs, x: (*xs[:axis], x, *xs[axis:])
    order = (axis, *(k for k in reversed(range(len(shape))) if k != axis))
    return Blocked(put((1,) * len(rest), shape[axis]), put(tuple(out[0]), 1), put(tuple(out[1]), 1), order)
