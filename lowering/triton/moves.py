"""Moving the lanes of a tensor: register-only forms where the sides allow them, else one gather.

A gather here always runs on the flattened tensor: triton turns one along an inner axis into a number of warp shuffles
that grows with the square of the side, while a flat one is a vectorised write to shared memory, a barrier and a read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .emitter import Emitter
from .ttir import Code, Val, bits, spell

Coordinate = Callable[[Val], Val]
TILED = 4  # up to this factor, a narrower or wider axis is split off or joined in registers


def coordinates(code: Code, sides: Sequence[int]) -> list[Val]:
    """The coordinate of every lane of a flattened tensor along each of its axes, as i32 vectors."""
    strides, out = row_major(sides), []
    lane = code.arange(sides[0] * strides[0])
    for k, (n, stride) in enumerate(zip(sides, strides, strict=True)):
        at = shifted_right(code, lane, stride)
        out.append(at if k == 0 else low_bits(code, at, n))
    return out


def shifted_right(code: Code, v: Val, n: int) -> Val:
    """`v div n` for a power of two; v is not negative."""
    return v if n == 1 else code.op("arith.shrui", v, code.const(n.bit_length() - 1, v.elem, v.shape))


def low_bits(code: Code, v: Val, n: int) -> Val:
    """`v mod n` for a power of two: an index that cannot leave a side of n lanes."""
    return code.op("arith.andi", v, code.const(n - 1, v.elem, v.shape))


def position(code: Code, at: Sequence[Val], strides: Sequence[int]) -> Val:
    """The sum of coordinates times strides."""
    total = code.const(0, at[0].elem, at[0].shape)
    for a, stride in zip(at, strides, strict=True):
        total = code.add(total, code.scale(a, stride))
    return total


def row_major(sides: Sequence[int]) -> list[int]:
    """The strides of a dense row-major array with these sides."""
    out, acc = [], 1
    for n in reversed(sides):
        out.append(acc)
        acc *= n
    return out[::-1]


def move(em: Emitter, v: Val, sides: Sequence[int], maps: Mapping[int, Coordinate]) -> Val:
    """A tensor whose lane at `(j0, j1, ..)` is that of `v` at `(maps[0](j0), ..)`.

    A map takes and gives i32 vectors and must stay inside its axis of `v`; an axis without one is kept as it is.
    """
    groups: list[tuple[int, int, Coordinate | None]] = []
    for k, (p, m) in enumerate(zip(v.shape, sides, strict=True)):
        if k not in maps and groups and groups[-1][2] is None:
            groups[-1] = (groups[-1][0] * p, groups[-1][1] * m, None)
        else:
            groups.append((p, m, maps.get(k)))
    code = em.code
    at = coordinates(code, [m for _, m, _ in groups])
    at = [a if f is None else f(a) for a, (_, _, f) in zip(at, groups, strict=True)]
    picked = pick(em, v, position(code, at, row_major([p for p, _, _ in groups])))
    return code.reshape(picked, sides)


def pick(em: Emitter, v: Val, lanes: Val) -> Val:
    """The lanes of a flattened tensor that an i32 vector names; each must be one of its lanes."""
    code = em.code
    if v.size == 1:
        return code.splat(code.reshape(v, ()), lanes.shape)
    flat = code.reshape(v, (v.size,))
    if v.elem == "i1":
        got = pick(em, code.to_int(flat, "i8", signed=False), lanes)
        return code.cmp("ne", got, code.const(0, "i8", got.shape))
    width = bits(v.elem)
    if v.size * width // 8 > em.features.shared and width > 8 and not em.features.npu:
        return _pick_halves(em, flat, lanes)
    return gather(code, flat, lanes)


def gather(code: Code, v: Val, lanes: Val, axis: int = 0) -> Val:
    """`tt.gather` along an axis: `lanes` has the rank of `v`."""
    kind = f"({v.type}, {lanes.type}) -> {spell(lanes.shape, v.elem)}"
    return code.let(
        f"tt.gather {v.name}[{lanes.name}] {{axis = {axis} : i32{code.gather_attribute()}}} : {kind}",
        lanes.shape,
        v.elem,
    )


def _pick_halves(em: Emitter, v: Val, lanes: Val) -> Val:
    """Lanes picked in two gathers of half of the bits each: a gather holds all of its source in shared memory."""
    code, width = em.code, bits(v.elem)
    whole, half = f"i{width}", f"i{width // 2}"
    raw = code.bitcast(v, whole)
    shift = lambda like: code.const(width // 2, whole, like.shape)
    low = pick(em, code.to_int(raw, half), lanes)
    high = pick(em, code.to_int(code.op("arith.shrui", raw, shift(raw)), half), lanes)
    low, high = (code.to_int(x, whole, signed=False) for x in (low, high))
    return code.bitcast(code.op("arith.ori", code.op("arith.shli", high, shift(high)), low), v.elem)


# ---- in registers: factors of an axis that are powers of two are axes of their own ----------------------------------


def stack(code: Code, parts: Sequence[Val], axis: int) -> Val:
    """Tensors of one shape laid along a new axis, as many as a power of two."""
    rank = len(parts[0].shape)
    joined, count = list(parts), 0
    while len(joined) > 1:  # the last bit of a part's number is joined last, so that it ends up as the last axis
        half = len(joined) // 2
        joined = [_join(code, a, b) for a, b in zip(joined[:half], joined[half:], strict=True)]
        count += 1
    new = list(range(rank, rank + count))
    v = code.transpose(joined[0], [*range(axis), *new, *range(axis, rank)])
    return code.reshape(v, (*parts[0].shape[:axis], len(parts), *parts[0].shape[axis:]))


def _join(code: Code, a: Val, b: Val) -> Val:
    if not a.shape:
        a, b = (code.splat(x, (1,)) for x in (a, b))
        return code.reshape(_join(code, a, b), (2,))
    shape = (*a.shape, 2)
    return code.let(f"tt.join {a.name}, {b.name} : {a.type} -> {spell(shape, a.elem)}", shape, a.elem)


def unstack(code: Code, v: Val, axis: int, which: int) -> Val:
    """The tensor at place `which` of an axis."""
    n = v.shape[axis]
    v = code.transpose(v, [*(k for k in range(len(v.shape)) if k != axis), axis])
    while n > 1:
        n //= 2
        if n > 1:
            v = code.reshape(v, (*v.shape[:-1], n, 2))
        v = _split(code, v)[which & 1]
        which >>= 1
    return v


def _split(code: Code, v: Val) -> list[Val]:
    half = v.shape[:-1]
    if not half:
        return [code.reshape(x, ()) for x in _split(code, code.reshape(v, (1, 2)))]
    text = f"tt.split {v.name} : {v.type} -> {spell(half, v.elem)}"
    return code.let_many(text, [(half, v.elem), (half, v.elem)])
