"""`tt.reduce` and `tt.scan` over tiles: their text, lanes beyond a tile's shape, several axes as one.

`tt.reduce` combines lanes in an order that depends on the layout, so its function must commute; `tt.scan` keeps the
order of the lanes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from jtile import ir

from .emitter import Emitter, padded
from .ttir import Number, Val

Combiner = Callable[[list[Val], list[Val]], list[Val]]


def reduce(em: Emitter, xs: Sequence[Val], axis: int, body: Combiner) -> list[Val]:
    """Tensors of one shape folded along an axis by a commutative function of scalars: `body(a..., b...)`."""
    shape = (*xs[0].shape[:axis], *xs[0].shape[axis + 1 :])
    isolated = [em.code.isolated(x) for x in xs]
    return _region(em, "tt.reduce", f"axis = {axis} : i32", isolated, shape, body)


def reduce_axes(em: Emitter, xs: Sequence[Val], axes: Sequence[int], body: Combiner) -> list[Val]:
    """Tensors folded as `reduce` does it along several axes, one after the other: if the axes were merged into one,
    threads that meet would not be neighbours. Axes of length 1 may stay."""
    out = list(xs)
    for axis in sorted(axes, reverse=True):
        if out[0].shape[axis] > 1:
            out = reduce(em, out, axis, body)
    return out


def scan(em: Emitter, xs: Sequence[Val], axis: int, body: Combiner, *, reverse: bool = False) -> list[Val]:
    """Inclusive scan along an axis, from its end if `reverse`; `body(before..., x...)` must be associative."""
    shape, code = xs[0].shape, em.code
    if len(shape) > 1 and math.prod(shape) == shape[axis] and not code.layout(shape):
        # Triton 3.6 fails on scans along a column whose lanes several warps hold, as [64, 1] tiles of loads are.
        flat = scan(em, [code.reshape(x, (shape[axis],)) for x in xs], 0, body, reverse=reverse)
        return [code.reshape(y, shape) for y in flat]
    attributes = f"axis = {axis} : i32, reverse = {'true' if reverse else 'false'}"
    return _region(em, "tt.scan", attributes, xs, shape, body)


def _region(em: Emitter, name: str, attributes: str, xs: Sequence[Val], shape: Sequence[int], body) -> list[Val]:
    """The text of a `tt.reduce` or `tt.scan` with its region. Bools go as i32: threads exchange whole registers, and
    integers of 32 bits have instructions for folding."""
    code = em.code
    carried = [code.to_int(x, "i32", signed=False) if x.elem == "i1" else x for x in xs]
    result = code.name()
    a, b = ([Val(code.name(), (), x.elem) for x in carried] for _ in range(2))
    many = f"{result}:{len(xs)}" if len(xs) > 1 else result
    code.do(f'{many} = "{name}"({", ".join(x.name for x in carried)}) <{{{attributes}}}> ({{')
    code.do(f"^bb0({', '.join(f'{v.name}: {v.elem}' for v in (*a, *b))}):")
    with code.region():
        as_bool = [x.elem == "i1" for x in xs]
        low = [[code.to_int(v, "i1") if bool_ else v for v, bool_ in zip(vs, as_bool, strict=True)] for vs in (a, b)]
        ys = [code.to_int(y, "i32", signed=False) if y.elem == "i1" else y for y in body(*low)]
        code.do(f"{name}.return {', '.join(y.name for y in ys)} : {', '.join(y.elem for y in ys)}")
    names = [result if len(xs) == 1 else f"{result}#{k}" for k in range(len(xs))]
    out = [Val(n, tuple(shape), x.elem, layout=code.layout(shape)) for n, x in zip(names, carried, strict=True)]
    code.do(f"}}) : ({', '.join(x.type for x in carried)}) -> {_types(out)}")
    return [code.to_int(v, "i1") if x.elem == "i1" else v for v, x in zip(out, xs, strict=True)]


def _types(out: Sequence[Val]) -> str:
    return out[0].type if len(out) == 1 else f"({', '.join(v.type for v in out)})"


def binary(em: Emitter, name: str) -> Combiner:
    """One op of arith on single values, as a combiner."""
    return lambda a, b: [em.code.op(name, a[0], b[0])]


# -- lanes beyond a tile's shape --------------------------------------------------------------------------------------


def inside(em: Emitter, shape: Sequence[int], axes: Sequence[int]) -> Val | None:
    """The mask of the lanes that lie within a tile along some of its axes; None where all lanes do."""
    return em.valid(tuple(n if k in axes else padded((n,))[0] for k, n in enumerate(shape)))


def filled(em: Emitter, v: Val, shape: Sequence[int], axes: Sequence[int], number: Number) -> Val:
    """`v`, the tensor of a tile of this shape, with `number` in the lanes beyond its sides along `axes`."""
    number = float(number) if v.is_float else bool(number) if v.elem == "i1" else int(number)
    if v.fill is not None and type(v.fill) is type(number) and v.fill == number:
        return v
    mask = inside(em, shape, axes)
    if mask is None:
        return v
    return dataclasses.replace(em.code.select(mask, v, em.code.const(number, v.elem, v.shape)), fill=None)


def flattened(em: Emitter, v: Val, axes: Sequence[int]) -> tuple[Val, int]:
    """A tensor with some axes as a single one, in their order, and its place. A transposition moves nothing by itself:
    threads keep their elements."""
    axes = sorted(axes)
    first = axes[0]
    if axes != list(range(first, first + len(axes))):
        kept = [k for k in range(len(v.shape)) if k not in axes]
        v, first = em.code.transpose(v, [*kept, *axes]), len(kept)
    n = math.prod(v.shape[first : first + len(axes)])
    return em.code.reshape(v, (*v.shape[:first], n, *v.shape[first + len(axes) :])), first


# -- combiners that a kernel gives ------------------------------------------------------------------------------------


def checked(em: Emitter, op: ir.UserReduce | ir.UserScan, what: str) -> Combiner:
    """The block of an op as a combiner.

    Raises:
      UnsupportedError: the block does more than compute on scalars.
    """
    for inner in op.body.ops:
        scalars = all(isinstance(r.type, ir.TileType) and not r.type.rank for r in inner.results)
        if not isinstance(inner, _ELEMENTWISE) or not scalars:
            em.refuse(inner, f"combiners of elementwise operations only, and {inner.mnemonic!r} in this {what}")
    return lambda a, b: em.block(op.body, [*a, *b])


_ELEMENTWISE = (ir.Map, ir.Select, ir.Cast, ir.Bitcast, ir.Full)


def check_number(em: Emitter, op: ir.Op, xs: Sequence[Val]) -> None:
    """Refuse combiners of several values where the compiler knows one, and an extreme with its place."""
    if em.features.npu and len(xs) > 1:
        em.refuse(
            op,
            f"combiners of one value only, and {op.mnemonic!r} has {len(xs)} here (one more where lanes beyond a tile "
            "must not count): reduce the values one after the other, over sides of powers of two",
        )


def guarded(em: Emitter, body: Combiner) -> Combiner:
    """A combiner of values and, last, a bool that says whether they count: values that do not are passed over."""

    def run(a: list[Val], b: list[Val]) -> list[Val]:
        code = em.code
        *xs, left = a
        *ys, right = b
        both = code.op("arith.andi", left, right)
        one = [code.select(left, x, y) for x, y in zip(xs, ys, strict=True)]
        out = [code.select(both, z, o) for z, o in zip(body(xs, ys), one, strict=True)]
        return [*out, code.op("arith.ori", left, right)]

    return run


def with_guard(em: Emitter, xs: Sequence[Val], shape: Sequence[int], axes: Sequence[int]) -> list[Val] | None:
    """Tensors with the mask of their lanes that lie within the tile along `axes`; None where all lanes do."""
    mask = inside(em, shape, axes)
    return None if mask is None else [*xs, mask]
