"""Reductions: built-in ones, the place of an extreme, and those by a function of the kernel."""

from __future__ import annotations

from collections.abc import Sequence

from jtile import ir

from . import combine, keys, moves
from .convert import convert, from_f32, is_float, is_signed, to_f32, wrap
from .emit_basics import code_of
from .emitter import Emitter, elem_of, emits, padded
from .lanes import fold
from .math_expr import X
from .ttir import Val, bits
from .user_functions import commutes, neutral

_INT = {"sum": "addi", "prod": "muli", "and": "andi", "or": "ori", "xor": "xori"}
_FLOAT = {"sum": "addf", "prod": "mulf", "max": "maximumf", "min": "minimumf"}


@emits(ir.Reduce)
def _reduce(em: Emitter, op: ir.Reduce) -> Val:
    dtype, full = op.x.dtype, padded(op.result.shape)
    if not op.axes:
        return em.val(op.x)
    if 0 in op.x.shape:
        return em.code.const(code_of(ir.identity(op.fn, dtype), dtype), elem_of(dtype), full)
    x = wide(em, em.val(op.x), dtype)
    x = combine.filled(em, x, op.x.shape, op.axes, ir.identity(op.fn, dtype))
    (y,) = combine.reduce_axes(em, [x], op.axes, combine.binary(em, arith(op.fn, dtype)))
    return narrow(em, em.code.reshape(y, full), dtype)


def arith(fn: str, dtype: str) -> str:
    """The op of arith that combines two accumulators."""
    if is_float(dtype):
        return f"arith.{_FLOAT[fn]}"
    if fn in ("max", "min"):
        return f"arith.{fn}{'si' if is_signed(dtype) else 'ui'}"
    return f"arith.{_INT[fn]}"


def wide(em: Emitter, v: Val, dtype: str) -> Val:
    """Elements in the type of accumulators: f32 and i32 at least, which threads exchange in one step."""
    if is_float(dtype):
        return v if dtype == "float64" else to_f32(em.code, em.features, v, dtype)
    if bits(v.elem) >= 32:
        return v
    return convert(em.code, em.features, v, dtype, "int32" if is_signed(dtype) else "uint32")


def narrow(em: Emitter, v: Val, dtype: str) -> Val:
    """Accumulators in the type of elements: rounded once, or wrapped."""
    if is_float(dtype):
        return v if dtype == "float64" else from_f32(em.code, em.features, v, dtype)
    return wrap(X(em.code, em.code.to_int(v, elem_of(dtype))), dtype).v


@emits(ir.ArgReduce)
def _arg_reduce(em: Emitter, op: ir.ArgReduce) -> Val:
    """The place of an extreme: the largest key wins, then the smaller index, in one integer if 64 bits hold both."""
    full, n = padded(op.result.shape), op.x.shape[op.axis]
    if n == 1 or 0 in op.x.shape:
        return em.code.const(code_of(0, op.dtype), elem_of(op.dtype), full)
    key = keys.order_key(em, em.val(op.x), op.x.dtype, descending=op.fn == "min", nan_high=True)
    index = em.iota(op.x.shape, op.axis)
    if em.features.npu:
        return convert(em.code, em.features, _place_of_best(em, op, key, index), "int32", op.dtype)
    place = _place64 if key.elem == "i64" else _place16 if keys.is_short(op.x.dtype) and n <= 1 << 16 else _place32
    return convert(em.code, em.features, place(em, op, key, index), "int32", op.dtype)


def _place16(em: Emitter, op: ir.ArgReduce, key: Val, index: Val) -> Val:
    k, i = X(em.code, key), X(em.code, index)
    return ((_largest(em, op, ((k << 16) | (i ^ 0xFFFF)).v) & 0xFFFF) ^ 0xFFFF).v


def _place32(em: Emitter, op: ir.ArgReduce, key: Val, index: Val) -> Val:
    k, i = X(em.code, key).to_int("i64"), (X(em.code, index) ^ -1).to_int("i64", signed=False)
    return (_largest(em, op, ((k << 32) | i).v).to_int("i32") ^ -1).v


def _largest(em: Emitter, op: ir.ArgReduce, packed: Val) -> X:
    packed = combine.filled(em, packed, op.x.shape, (op.axis,), -(1 << (bits(packed.elem) - 1)))
    return X(em.code, combine.reduce(em, [packed], op.axis, combine.binary(em, "arith.maxsi"))[0])


def _place64(em: Emitter, op: ir.ArgReduce, key: Val, index: Val) -> Val:
    key = combine.filled(em, key, op.x.shape, (op.axis,), -(1 << 63))

    def better(a: list[Val], b: list[Val]) -> list[Val]:
        (k, i), (l, j) = ([X(em.code, v) for v in side] for side in (a, b))
        first = k.gt(l) | (k.eq(l) & i.lt(j))
        return [first.where(k, l).v, first.where(i, j).v]

    return combine.reduce(em, [key, index], op.axis, better)[1]


def _place_of_best(em: Emitter, op: ir.ArgReduce, key: Val, index: Val) -> Val:
    """The place of an extreme by two reductions, for the largest key and for the first place that has it. It is for a
    compiler that takes any reduction of two values for one with its own rule for ties."""
    code, shape, n = em.code, op.x.shape, key.shape[op.axis]
    key = combine.filled(em, key, shape, (op.axis,), -(1 << (bits(key.elem) - 1)))
    (best,) = combine.reduce(em, [key], op.axis, combine.binary(em, "arith.maxsi"))
    wide = code.expand_dims(best, op.axis) if best.shape else best
    wide = code.broadcast(wide, key.shape) if wide.shape else code.splat(wide, key.shape)
    places = code.select(code.cmp("eq", key, wide), index, code.const(n, "i32", key.shape))
    return combine.reduce(em, [places], op.axis, combine.binary(em, "arith.minsi"))[0]


# -- by a function of the kernel --------------------------------------------------------------------------------------


@emits(ir.UserReduce)
def _user_reduce(em: Emitter, op: ir.UserReduce) -> list[Val]:
    body = combine.checked(em, op, "reduce")
    full, shape = padded(op.results[0].shape), op.xs[0].shape
    inits = [em.code.splat(em.val(i), full) for i in op.inits]
    if 0 in op.xs[0].shape:
        return inits
    xs = [em.val(x) for x in op.xs]
    if not op.axes:
        return _start(em, op, body, inits, xs)
    plain = neutral(op)
    guard = None
    if plain:
        xs = [_padded_by(em, x, i, shape, op.axes) for x, i in zip(xs, op.inits, strict=True)]
    else:
        guard = combine.with_guard(em, xs, shape, op.axes)
    combine.check_number(em, op, guard or xs)
    rule = body if guard is None else combine.guarded(em, body)
    ys = (combine.reduce_axes if commutes(op.body) else _last)(em, guard or xs, op.axes, rule)
    out = [em.code.reshape(y, full) for y in ys[: len(xs)]]
    return out if plain else _start(em, op, body, inits, out)


def _padded_by(em: Emitter, x: Val, init: ir.Value, shape: Sequence[int], axes: Sequence[int]) -> Val:
    """`x` with the initial value in the lanes beyond the tile along `axes`."""
    mask = combine.inside(em, shape, axes)
    return x if mask is None else em.code.select(mask, x, em.code.splat(em.val(init), x.shape))


def _last(em: Emitter, xs: Sequence[Val], axes: Sequence[int], body: combine.Combiner) -> list[Val]:
    """The result of a reduction that keeps the order of the lanes: the last element of a scan."""
    flat = [combine.flattened(em, x, axes) for x in xs]
    code, axis = em.code, flat[0][1]
    n = flat[0][0].shape[axis]
    if n == 1:
        return [x for x, _ in flat]
    ys = combine.scan(em, [x for x, _ in flat], axis, body)
    last = code.cmp("eq", code.along(code.arange(n), axis, ys[0].shape), code.const(n - 1, "i32", ys[0].shape))
    out = []
    for y in ys:
        raw = y if y.elem == "i1" else code.bitcast(y, f"i{bits(y.elem)}")
        picked = code.select(last, raw, code.const(0, raw.elem, raw.shape))
        got = fold(em.code, picked, "arith.ori", axis)
        out.append(got if y.elem == "i1" else code.bitcast(got, y.elem))
    return out


def _start(em: Emitter, op: ir.UserReduce, body: combine.Combiner, inits: list[Val], xs: list[Val]) -> list[Val]:
    """The value of `body(inits, xs)`, lane by lane, by a scan of two elements, which keeps their order."""
    rank = len(xs[0].shape)
    pairs = [moves.stack(em.code, [i, x], rank) for i, x in zip(inits, xs, strict=True)]
    out = combine.scan(em, pairs, rank, body)
    return [em.code.reshape(moves.unstack(em.code, y, rank, 1), padded(op.results[0].shape)) for y in out]
