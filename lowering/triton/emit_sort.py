"""Stable sort: a bitonic network orders integers that hold a key above the place it came from; all operands follow by
one gather.

Places make the integers differ, so that the network, which is not stable, need not be. Keys of 64 bits, and several
keys, are sorted from the least significant word on.
"""

from __future__ import annotations

import math

from jtile import ir

from . import combine, keys, moves
from .convert import convert
from .emitter import Emitter, emits, padded
from .math_expr import X
from .ttir import Val, bits

UNROLLED = 64  # longest axis whose network is unrolled: its exchanges stay in registers


@emits(ir.Sort)
def _sort(em: Emitter, op: ir.Sort) -> list[Val]:
    shape = op.xs[0].shape
    if 0 in shape or shape[op.axis] == 1:
        return [em.val(x) for x in op.xs]
    rows = _Rows(em, shape, op.axis)
    if len(op.xs) == 1 and ir.DTYPES[op.xs[0].dtype].kind != "f":
        return [_sort_numbers(em, op, rows)]
    order = None
    for x in reversed(op.xs[: op.keys]):
        key = rows.flat(keys.order_key(em, em.val(x), x.dtype, descending=op.descending))
        for word in _words(em, key):
            order = _sorted_by(em, rows, word, order, short=keys.is_short(x.dtype))
    assert order is not None
    return [_in_order(em, op, rows, x, order) for x in op.xs]


def _sort_numbers(em: Emitter, op: ir.Sort, rows: _Rows) -> Val:
    """Sort numbers by their keys alone: equal integers cannot be told apart, so the sorted keys give the result."""
    (x,) = op.xs
    key = rows.flat(keys.order_key(em, em.val(x), x.dtype, descending=op.descending))
    last = (1 << (bits(key.elem) - 1)) - 1
    key = key if rows.inside is None else em.code.select(rows.inside, key, em.code.const(last, key.elem, key.shape))
    return rows.tile(keys.from_key(em, network(em, key, rows.length), x.dtype, descending=op.descending))


class _Rows:
    """A tile as a vector of rows along one axis: `length` lanes each (a power of two)."""

    def __init__(self, em: Emitter, shape: tuple[int, ...], axis: int):
        full, rank = padded(shape), len(shape)
        self.em, self.full, self.length = em, full, full[axis]
        self.perm = [*(k for k in range(rank) if k != axis), axis]
        code, n = em.code, math.prod(full)
        lane = code.arange(n)
        self.place = moves.low_bits(code, lane, self.length)  # the place of each lane in its row
        self.base = code.sub(lane, self.place)
        self.inside = None
        if shape[axis] != self.length:
            self.inside = code.cmp("slt", self.place, code.const(shape[axis], "i32", (n,)))

    def flat(self, v: Val) -> Val:
        return self.em.code.reshape(self.em.code.transpose(v, self.perm), (v.size,))

    def tile(self, v: Val) -> Val:
        code = self.em.code
        v = code.reshape(v, [self.full[p] for p in self.perm])
        return code.transpose(v, [self.perm.index(k) for k in range(len(self.perm))])

    def at(self, places: Val) -> Val:
        """Lanes of the vector from places in the rows."""
        return self.em.code.add(self.base, places)


def _words(em: Emitter, key: Val) -> list[Val]:
    """A key as signed words of at most 32 bits, the least significant first."""
    if key.elem != "i64":
        return [key]
    x = X(em.code, key)
    return [(x.to_int("i32") ^ (1 << 31)).v, (x >> 32).to_int("i32").v]


def _sorted_by(em: Emitter, rows: _Rows, key: Val, order: Val | None, *, short: bool) -> Val:
    """The places of the elements in the order of a key, on from an order by less significant ones."""
    key = key if order is None else moves.pick(em, key, rows.at(order))
    k, place = X(em.code, key), X(em.code, rows.place)
    if short and rows.length <= 1 << 16:
        packed = (k << 16) | place
    else:
        packed = (k.to_int("i64") << 32) | place.to_int("i64", signed=False)
    if rows.inside is not None:  # their places keep lanes beyond the tile behind elements of the largest key
        width = 16 if packed.elem == "i32" else 32
        largest = ((1 << (width - 1)) - 1) << width
        packed = packed.new(rows.inside).where(packed, packed.const(largest) | place.to_int(packed.elem, signed=False))
    packed = X(em.code, network(em, packed.v, rows.length))
    at = (packed.to_int("i32") & (rows.length - 1)).v
    return at if order is None else moves.pick(em, order, rows.at(at))


def _in_order(em: Emitter, op: ir.Sort, rows: _Rows, x: ir.Value, order: Val) -> Val:
    if isinstance(x.op, ir.Iota) and x.op.axis == op.axis:
        return convert(em.code, em.features, rows.tile(order), "int32", x.dtype)
    return rows.tile(moves.pick(em, rows.flat(em.val(x)), rows.at(order)))


# -- the network ------------------------------------------------------------------------------------------------------


def network(em: Emitter, x: Val, length: int) -> Val:
    """A vector of integers whose runs of `length` lanes are sorted, each upwards; equal ones in any order."""
    # A loop costs two barriers a step and little code; unrolled, most steps of a short axis stay within a warp.
    half = x.size * bits(x.elem) // 16
    return _unrolled(em, x, length) if length <= UNROLLED or half > em.features.shared else _looped(em, x, length)


def _looped(em: Emitter, x: Val, length: int) -> Val:
    """The network as a loop of steps: `size` is the length of the runs that are merged, `stride` partners' distance."""
    code, steps = em.code, length.bit_length() * (length.bit_length() - 1) // 2
    lane = X(code, code.arange(x.size))
    place = lane & (length - 1)
    count, zero, one = Val(code.name(), (), "i32"), code.i32(0), code.i32(1)
    carried = [Val(code.name(), x.shape, x.elem), *(Val(code.name(), (), "i32") for _ in range(2))]
    starts = [x, code.i32(2), one]
    pairs = ", ".join(f"{c.name} = {s.name}" for c, s in zip(carried, starts, strict=True))
    types = ", ".join(c.type for c in carried)
    result = code.name()
    head = f"scf.for {count.name} = {zero.name} to {code.i32(steps).name} step {one.name}"
    code.do(f"{result}:3 = {head} iter_args({pairs}) -> ({types}) : i32 {{")
    with code.region():
        v, size, stride = carried
        sizes, strides = (X(code, code.splat(s, x.shape)) for s in (size, stride))
        partner = moves.pick(em, v, (lane ^ strides).v)
        # The second of two partners keeps the larger one; in every other run they change roles, but in the last merge.
        second = (place & strides).ne(0) ^ (place & sizes).ne(0)
        v = (X(code, v).lt(X(code, partner)) ^ second).where(X(code, v), X(code, partner))
        half = X(code, stride).lshr(1)
        merged = half.eq(0)
        runs = merged.where(X(code, size) << 1, X(code, size))
        nexts = [v.v, runs.v, merged.where(runs.lshr(1), half).v]
        code.do(f"scf.yield {', '.join(n.name for n in nexts)} : {types}")
    code.do("}")
    return Val(f"{result}#0", x.shape, x.elem)


def _unrolled(em: Emitter, x: Val, length: int) -> Val:
    """The network step by step: bits of a lane's number that a step is about are axes, and a sum modulo two gives each
    lane its partner."""
    n, size = x.size, 2
    while size <= length:
        stride = size // 2
        while stride:
            rest = size // 2 // stride
            sides = (n // (2 * size), 2, rest, 2, stride) if size < length else (n // (2 * stride), 2, stride)
            x = _step(em, em.code.reshape(x, sides), len(sides) - 2, 1 if size < length else None)
            stride //= 2
        size *= 2
    return em.code.reshape(x, (n,))


def _step(em: Emitter, x: Val, axis: int, turned: int | None) -> Val:
    """A step: partners along an axis of length 2 take the smaller and the larger; reversed where axis `turned` is 1."""
    code = em.code
    (both,) = combine.reduce(em, [x], axis, combine.binary(em, "arith.xori"))
    v = X(code, x)
    partner = v ^ v.new(code.broadcast(code.expand_dims(both, axis), x.shape))
    second = _is_second(em, x.shape, axis)
    if turned is not None:
        second = second ^ _is_second(em, x.shape, turned)
    return (v.lt(partner) ^ second).where(v, partner).v


def _is_second(em: Emitter, shape: tuple[int, ...], axis: int) -> X:
    code = em.code
    ones = tuple(2 if k == axis else 1 for k in range(len(shape)))
    which = code.along(code.cmp("ne", code.arange(2), code.const(0, "i32", (2,))), axis, ones)
    return X(code, code.broadcast(which, shape))
