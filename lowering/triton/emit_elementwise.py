"""Elementwise functions, selection, conversions, counting and literal tiles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from jtile import ir

from ..literals import MAX_RUNS, line_of, runs
from .convert import (
    CODES,
    WIDE,
    bounded_to_8_bits,
    convert,
    from_f32,
    is_float,
    is_signed,
    largest_of,
    own_bits,
    reinterpret,
    to_f32,
    wrap,
)
from .emit_basics import code_of
from .emitter import Emitter, elem_of, emits, padded
from .features import Features
from .math import divide, names, tanh_beside_one, transcendental
from .math_expr import X
from .rounding import beside_one, rounded
from .ttir import Number, Val


@emits(ir.Map)
def _map(em: Emitter, op: ir.Map) -> Val:
    xs = [X(em.code, em.val(a)) for a in op.args]
    if "rounded" not in em.memo:
        em.memo["rounded"] = rounded(em.kernel)
        em.memo["beside one"] = beside_one(em.kernel)
        em.memo["summed"] = rounded(em.kernel, sums=True)
    if op.result in em.memo["beside one"] and not em.features.npu:
        y = tanh_beside_one(em.features, xs[0])
    else:
        few_digits = em.memo["summed" if op.fn == "tanh" else "rounded"]  # the short tanh has five bits to spare
        y = emit_function(em.features, op.fn, xs, op.args[0].dtype, narrow=op.result in few_digits)
    return dataclasses.replace(y.v, fill=_fill(op, [x.v for x in xs]))


def emit_function(f: Features, fn: str, xs: list[X], dtype: str, *, narrow: bool = False) -> X:
    """An elementwise function of operands of dtype in register form; `narrow`: a float32 result that is rounded to 16
    bits or less."""
    if fn in _COMPARISONS:
        return _compare(f, fn, xs, dtype)
    if dtype == "bool":
        return _BOOL[fn](*xs)
    if not is_float(dtype):
        return wrap(_INT[fn](dtype, *xs), dtype)
    if fn == "nextafter":
        return _next_after(f, xs[0], xs[1], dtype)
    if fn in _NATIVE and dtype in WIDE:
        return _NATIVE[fn](*xs)
    if dtype not in ("float32", "float64"):
        xs = [X(x.code, to_f32(x.code, f, x.v, dtype)) for x in xs]
    if fn in names():
        y = transcendental(f, fn, xs, narrow=narrow or ir.DTYPES[dtype].bits < 32)
    else:
        y = (_NATIVE | _FLOAT)[fn](*xs)
    wide = dtype in ("float32", "float64") or y.elem == "i1"
    return y if wide else X(y.code, from_f32(y.code, f, y.v, dtype))


def _fill(op: ir.Map, args: list[Val]) -> Number | None:
    """The number in the lanes beyond the shape after an exact function of known numbers; None where it is not known."""
    fills = [a.fill for a in args]
    dtype = op.args[0].dtype
    if op.fn not in _FOLDED or dtype in CODES or any(n is None for n in fills):
        return None
    numpy = ir.DTYPES[dtype].numpy
    with np.errstate(all="ignore"):
        y = op.reference(*(np.asarray(n).astype(numpy) for n in fills))
    return float(y) if is_float(dtype) else bool(y) if dtype == "bool" else int(y)


_FOLDED = ("add", "sub", "mul", "max", "min", "neg", "abs", "square", "and", "or", "xor", "clamp")


# -- comparisons and bool ---------------------------------------------------------------------------------------------

_COMPARISONS = {"eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge"}


def _compare(f: Features, fn: str, xs: list[X], dtype: str) -> X:
    if dtype == "bool":
        a, b = xs if fn not in ("gt", "ge") else xs[::-1]
        not_a = a ^ True
        return {"eq": lambda: not_a ^ b, "ne": lambda: a ^ b, "lt": lambda: not_a & b, "gt": lambda: not_a & b,
                "le": lambda: not_a | b, "ge": lambda: not_a | b}[fn]()  # fmt: skip
    if is_float(dtype):
        a, b = xs if dtype == "float64" else [X(x.code, to_f32(x.code, f, x.v, dtype)) for x in xs]
        return a.cmp("une" if fn == "ne" else f"o{fn}", b)
    unsigned = not is_signed(dtype) and fn not in ("eq", "ne")
    prefix = "u" if unsigned else "" if fn in ("eq", "ne") else "s"
    return xs[0].cmp(prefix + fn, xs[1])


_BOOL: dict[str, Callable[..., X]] = {
    "max": lambda a, b: a | b,
    "min": lambda a, b: a & b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: a ^ True,
}


# -- floats -----------------------------------------------------------------------------------------------------------


def _float_max(a: X, b: X) -> X:
    return a.binary("arith.maximumf", b)  # NaN where either is


def _float_min(a: X, b: X) -> X:
    return a.binary("arith.minimumf", b)


# Functions that f16 and bf16 have too: exact, without a detour through f32.
_NATIVE: dict[str, Callable[..., X]] = {
    "max": _float_max,
    "min": _float_min,
    "neg": lambda a: -a,
    "abs": lambda a: a.abs(),
    "clamp": lambda low, x, high: _float_min(_float_max(x, low), high),
}


def _sign(x: X) -> X:
    return x.gt(0.0).where(1.0, x.lt(0.0).where(-1.0, x))


def _round_away(x: X) -> X:
    # floor(|x| + 1/2) would be wrong: that sum rounds up just below a half, and where floats are a whole number apart.
    a = x.abs()
    whole = a.unary("math.floor")
    return (a - whole).ge(0.5).where(whole + 1.0, whole).copysign(x)


_FLOAT: dict[str, Callable[..., X]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": divide,
    "square": lambda a: a * a,
    "sign": _sign,
    "floor": lambda a: a.unary("math.floor"),
    "ceil": lambda a: a.unary("math.ceil"),
    "round_away": _round_away,
    "is_finite": lambda a: a.abs().lt(math.inf),
}


def _next_after(f: Features, x: X, y: X, dtype: str) -> X:
    """The neighbour of x towards y, by counting in the bits of the dtype itself."""
    bits = x.bits()
    sign = 8 if dtype == "float4_e2m1fn" else bits.sign_mask()
    if dtype != "float64":
        x, y = (X(v.code, to_f32(v.code, f, v.v, dtype)) for v in (x, y))
    up, down, positive = x.lt(y), y.lt(x), x.gt(0.0)
    away = (up & positive) | (down & x.lt(0.0))
    moved = away.where(bits + 1, bits - 1)
    moved = x.eq(0.0).where(y.lt(0.0).where(bits.const(1 | sign), 1), moved)
    if dtype in ir.FNUZ:
        moved = moved.eq(sign).where(0, moved)  # behind the least negative number comes 0
    other = X(y.code, from_f32(y.code, f, y.v, dtype)).bits() if dtype != "float64" else y.bits()
    moved = x.eq(y).where(other, moved)
    nan = x.cmp("uno", y)
    if dtype != "float4_e2m1fn":
        moved = nan.where(code_bits(math.nan, dtype), moved)
    return moved.as_float(elem_of(dtype)) if dtype in WIDE else moved


def code_bits(value: float, dtype: str) -> int:
    """The bits of a float of dtype."""
    info = ir.DTYPES[dtype]
    return int(np.asarray(value).astype(info.numpy).view(f"u{max(info.bits, 8) // 8}"))


# -- integers ---------------------------------------------------------------------------------------------------------


def _divisor(dtype: str, a: X, b: X) -> tuple[X, X | None]:
    """A divisor for which the machine's division is defined, and where the given one was zero (None: nowhere)."""
    n = b.v.number
    if n is not None and int(n) % (1 << b.width) not in (0, (1 << b.width) - 1):
        return b, None
    zero = b.eq(0)
    bad = zero
    if is_signed(dtype):
        bad = zero | (a.eq(-a.sign_mask()) & b.eq(-1))
    return bad.where(1, b), zero


def _int_div(dtype: str, a: X, b: X) -> X:
    b, zero = _divisor(dtype, a, b)
    q = a.binary("arith.divsi" if is_signed(dtype) else "arith.divui", b)
    return q if zero is None else zero.where(-1, q)


def _int_rem(dtype: str, a: X, b: X) -> X:
    b, zero = _divisor(dtype, a, b)
    r = a.binary("arith.remsi" if is_signed(dtype) else "arith.remui", b)
    return r if zero is None else zero.where(a, r)


def _int_sign(dtype: str, a: X) -> X:
    if not is_signed(dtype):
        return a.ne(0).where(1, 0, a.elem)
    return a.gt(0).where(a.const(1), a.lt(0).where(-1, 0, a.elem))


def _extreme(name: str) -> Callable[..., X]:
    return lambda dtype, a, b: a.binary(f"arith.{name}{'s' if is_signed(dtype) else 'u'}i", b)


def _shift(dtype: str, a: X, s: X, op: str) -> X:
    """A shift in which all bits leave where it is by a negative number, or by the width and more."""
    width = ir.DTYPES[dtype].bits
    if s.v.number is not None and 0 <= s.v.number < width:
        return a.binary(op, s)
    if op == "arith.shrsi":
        return a.binary(op, s.binary("arith.minui", width - 1))
    inside = s.cmp("ult", width)
    return inside.where(a.binary(op, inside.where(s, 0)), 0)


def _shift_right_logical(dtype: str, a: X, s: X) -> X:
    return _shift(dtype, own_bits(dtype, a), s, "arith.shrui")


def _shift_right(dtype: str, a: X, s: X) -> X:
    return _shift(dtype, a, s, "arith.shrsi" if is_signed(dtype) else "arith.shrui")


def _count_bits(x: X) -> X:
    """Set bits of an i32 or i64, by sums of neighbours; LLVM knows the pattern and takes the instruction."""
    byte = 0x0101010101010101 & ((1 << x.width) - 1)
    x = x - (x.lshr(1) & byte * 0x55)
    x = (x & byte * 0x33) + (x.lshr(2) & byte * 0x33)
    x = (x + x.lshr(4)) & byte * 0x0F
    return (x * byte).lshr(x.width - 8)


def _unsigned(dtype: str, a: X) -> X:
    """The bits of an integer in an i32 or i64 of its own."""
    a = own_bits(dtype, a)
    return a if a.width == 64 else a.to_int("i32", signed=False)


def _popcount(dtype: str, a: X) -> X:
    return _count_bits(_unsigned(dtype, a)).to_int(a.elem)


def _leading_zeros(dtype: str, a: X) -> X:
    x = _unsigned(dtype, a)
    width, k = ir.DTYPES[dtype].bits, 1
    while k < width:
        x, k = x | x.lshr(k), 2 * k
    return (width - _count_bits(x)).to_int(a.elem)


_max, _min = _extreme("max"), _extreme("min")
_INT: dict[str, Callable[..., X]] = {
    "add": lambda _, a, b: a + b,
    "sub": lambda _, a, b: a - b,
    "mul": lambda _, a, b: a * b,
    "div": _int_div,
    "rem": _int_rem,
    "max": _max,
    "min": _min,
    "neg": lambda _, a: -a,
    "abs": lambda d, a: a.abs() if is_signed(d) else a,
    "sign": _int_sign,
    "square": lambda _, a: a * a,
    "and": lambda _, a, b: a & b,
    "or": lambda _, a, b: a | b,
    "xor": lambda _, a, b: a ^ b,
    "not": lambda _, a: a ^ -1,
    "shl": lambda d, a, s: _shift(d, a, s, "arith.shli"),
    "shr": _shift_right,
    "shr_logical": _shift_right_logical,
    "popcount": _popcount,
    "clz": _leading_zeros,
    "clamp": lambda d, low, x, high: _min(d, _max(d, x, low), high),
}


# -- selection, conversion --------------------------------------------------------------------------------------------


@emits(ir.Select)
def _select(em: Emitter, op: ir.Select) -> Val:
    c, a, b = (em.val(v) for v in (op.cond, op.a, op.b))
    same = a.fill is not None and type(a.fill) is type(b.fill) and a.fill == b.fill
    return dataclasses.replace(em.code.select(c, a, b), fill=a.fill if same else None)


@emits(ir.Cast)
def _cast(em: Emitter, op: ir.Cast) -> Val:
    v, small = em.val(op.x), op.x.dtype == "float32" and op.dtype in ("float8_e4m3fn", "float8_e5m2")
    found = None
    if small and _clamped(op.x, largest_of(op.dtype)):
        found = bounded_to_8_bits(em.code, em.features, v, op.dtype)
    return convert(em.code, em.features, v, op.x.dtype, op.dtype) if found is None else found


def _clamped(v: ir.Value, most: float) -> bool:
    """Whether a tile is `jnp.clip` of another, or its like, with bounds from `-most` to `most`."""
    bounds, op = {}, v.op
    while isinstance(op, ir.Map) and op.fn in ("min", "max") and op.fn not in bounds:
        fixed = [k for k, a in enumerate(op.args) if isinstance(a.op, ir.Full)]
        if not fixed:
            break
        bounds[op.fn] = op.args[fixed[0]].op.value
        op = op.args[1 - fixed[0]].op
    return len(bounds) == 2 and all(-most <= bound <= most for bound in bounds.values())


@emits(ir.Bitcast)
def _bitcast(em: Emitter, op: ir.Bitcast) -> Val:
    return reinterpret(em.code, em.val(op.x), op.x.dtype, op.dtype)


# -- tiles of numbers -------------------------------------------------------------------------------------------------


@emits(ir.Iota)
def _iota(em: Emitter, op: ir.Iota) -> Val:
    return dataclasses.replace(_from_i32(em, em.iota(op.shape, op.axis), op.dtype), fill=None)


def _from_i32(em: Emitter, v: Val, dtype: str) -> Val:
    return convert(em.code, em.features, v, "int32", dtype)


@emits(ir.Dense)
def _dense(em: Emitter, op: ir.Dense) -> Val:
    """A line of integers, or one selection for each run of equal numbers (TTIR has no other constants than splats)."""
    values = [code_of(n, op.dtype) for n in op.reference().reshape(-1).tolist()]
    elem, full = elem_of(op.dtype), padded(op.shape)
    parts = runs(values)
    if len(parts) <= 1:
        return em.code.const(parts[0][1] if parts else 0, elem, full)
    place, line = _place(em, op.shape), None if op.dtype in CODES else line_of(values)
    if line:
        first, step = line
        return dataclasses.replace(_from_i32(em, em.code.shift(em.code.scale(place, step), first), op.dtype), fill=None)
    if len(parts) > MAX_RUNS:  # `literals.as_inputs` has made inputs of literals with more runs
        em.refuse(op, f"no literal tiles of {len(values)} different numbers (at most {MAX_RUNS})")
    return _steps(em, place, parts, elem, full)


def _place(em: Emitter, shape: tuple[int, ...]) -> Val:
    """The row-major number of each lane among those of a tile."""
    code, stride = em.code, 1
    total = code.const(0, "i32", padded(shape))
    for axis in reversed(range(len(shape))):
        if shape[axis] > 1:
            total = code.add(total, code.scale(em.iota(shape, axis), stride))
        stride *= shape[axis]
    return total


def _steps(em: Emitter, place: Val, runs: list[tuple[int, Number]], elem: str, full: tuple[int, ...]) -> Val:
    """A balanced tree of selections: its depth is the logarithm of the number of runs."""
    if len(runs) == 1:
        return em.code.const(runs[0][1], elem, full)
    half = len(runs) // 2
    low, high = (_steps(em, place, part, elem, full) for part in (runs[:half], runs[half:]))
    below = em.code.cmp("slt", place, em.code.const(runs[half][0], "i32", full))
    return dataclasses.replace(em.code.select(below, low, high), fill=None)
