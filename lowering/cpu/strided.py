"""Elements that lie near each other in memory, but not side by side: a few vectors of neighbours and shuffles of them.

The lanes of a vector stand at `ptr + places[lane]`: every second element, the rows of a narrow tile, a row read
backwards. A gather reads them one by one, which takes a processor as long as that many loads and more. Here windows of
neighbours are loaded or stored, each between the first and the last place, so that nothing outside of the array is
touched: an element between two of an array is one of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .isa import Isa
from .llvm import Code, Val, shuffle, vec
from .vectors import BYTES, Lanes, load_lanes, store_lanes

Places = tuple[int, ...]


class Windows(NamedTuple):
    """`starts` of windows of `size` neighbours, and for each lane (the window, the place in it) that holds it."""

    size: int
    starts: Places
    lanes: tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=4096)
def windows(places: Places) -> Windows | None:
    """The fewest windows that hold all places, the smallest of equally few; None where a lane each is as few."""
    best: Windows | None = None
    size = len(places)
    span = max(places) - min(places) + 1
    while size >= 1:
        if size <= span:
            found = _cover(places, size)
            if best is None or len(found.starts) <= len(best.starts):
                best = found
        size //= 2
    assert best is not None
    return best if best.size > 1 and 2 * len(best.starts) <= len(places) else None


def _cover(places: Places, size: int) -> Windows:
    last = max(places) - size + 1
    starts: list[int] = []
    for at in sorted(set(places)):
        if not starts or at >= starts[-1] + size:
            starts.append(min(at, last))
    where = []
    for at in places:
        k = next(k for k, start in enumerate(starts) if start <= at < start + size)
        where.append((k, at - starts[k]))
    return Windows(size, tuple(starts), tuple(where))


def loads(places: Places, masked: bool) -> Windows | None:
    """The windows that a load of the places reads; None: they are to be gathered. A mask costs a shuffle a window."""
    found = windows(places)
    if found is None or not masked:
        return found
    return found if len(set(places)) == len(places) and 4 * len(found.starts) <= len(places) else None


def load(code: Code, ty: str, ptr: Val, places: Places, mask: Val | None) -> Val | None:
    """The elements at the places in the lanes of a vector, zeros in lanes outside of the mask; None: gather them."""
    found = loads(places, mask is not None)
    if found is None:
        return None
    return load_windows(code, ty, ptr, found, lambda start, _: _window_mask(code, mask, found, start))


def load_windows(code: Code, ty: str, ptr: Val, found: Windows, inside: Callable[[int, int], Val | None]) -> Val:
    """The elements in the lanes of a vector; `inside`: which of so many behind one are to be read (None: all)."""
    parts = []
    for start in found.starts:
        lanes = Lanes(found.size, inside(start, found.size))
        parts.append(load_lanes(code, ty, _at(code, ty, ptr, start), lanes))
    return _combined(code, parts, found.lanes)


def store(code: Code, isa: Isa, ty: str, raw: Val, ptr: Val, places: Places, mask: Val | None) -> bool:
    """Store the lanes of a vector at the places. False, and nothing is emitted: they have to be scattered."""
    n = len(places)
    found = windows(places) if len(set(places)) == n else None
    if found is None:
        return False
    rows = [[-1] * found.size for _ in found.starts]
    for lane, (k, at) in enumerate(found.lanes):
        rows[k][at] = lane
    whole = mask is None and all(lane >= 0 for row in rows for lane in row)
    if not whole and not _masks_stores(isa, ty):
        return False
    for start, row in zip(found.starts, rows, strict=True):
        part = raw if row == list(range(n)) else shuffle(code, raw, raw, row)
        inner = None
        if -1 in row or mask is not None:
            real = mask if mask is not None else Val(vec(n, "i1"), "splat (i1 true)")
            inner = _window_mask(code, real, found, start)
        store_lanes(code, isa, ty, part, _at(code, ty, ptr, start), Lanes(found.size, inner))
    return True


def _masks_stores(isa: Isa, ty: str) -> bool:
    return isa.has("avx512bw", "avx512vl") if BYTES[ty] < 4 else isa.has("avx512f", "avx512vl")


def _at(code: Code, ty: str, ptr: Val, start: int) -> Val:
    return code.gep(ty, ptr, start) if start else ptr


def _window_mask(code: Code, mask: Val | None, found: Windows, start: int) -> Val | None:
    """The mask of a window's elements: of the lanes that they are."""
    if mask is None:
        return None
    n = len(found.lanes)
    row = [n] * found.size
    for lane, (k, at) in enumerate(found.lanes):
        if found.starts[k] == start:
            row[at] = lane
    return shuffle(code, mask, Val(mask.ty, "zeroinitializer"), row)


def _combined(code: Code, parts: list[Val], lanes: Sequence[tuple[int, int]]) -> Val:
    """Lane l holds element `lanes[l][1]` of part `lanes[l][0]`."""
    n, size = len(lanes), int(parts[0].ty[1:].split()[0])
    while size < n and len(parts) > 1:  # neighbours side by side, of which a shuffle picks the lanes
        pairs = [parts[k : k + 2] for k in range(0, len(parts), 2)]
        row = list(range(2 * size))
        parts = [
            shuffle(code, pair[0], pair[-1], row if len(pair) == 2 else row[:size] + [-1] * size) for pair in pairs
        ]
        lanes = [(k // 2, at + size * (k % 2)) for k, at in lanes]
        size *= 2
    out = parts[0]
    if len(parts) == 1:
        order = [at for _, at in lanes]
        return out if order == list(range(size)) else shuffle(code, out, out, order)
    for k in range(1, len(parts)):
        order = [
            at + size if of == k else (at if k == 1 else lane) if of < k else -1 for lane, (of, at) in enumerate(lanes)
        ]
        out = shuffle(code, out, parts[k], order)
    return out
