"""Integers in the order of the values of any dtype, so that comparisons, sorts and extremes are those of integers."""

from __future__ import annotations

from jtile import ir

from .emitter import Emitter, elem_of
from .math_expr import X
from .ttir import Val, bits

# The largest magnitude of each float dtype that is no NaN, as bits without the sign.
_INFINITE = {
    "float64": 0x7FF0_0000_0000_0000, "float32": 0x7F80_0000, "float16": 0x7C00, "bfloat16": 0x7F80,
    "float8_e5m2": 0x7C, "float8_e4m3fn": 0x7E, "float8_e4m3": 0x78, "float8_e3m4": 0x70,
    "float8_e8m0fnu": 0xFE, "float4_e2m1fn": 7,
}  # fmt: skip


def is_short(dtype: str) -> bool:
    """Whether the keys of a dtype lie in the range of an i16."""
    return ir.DTYPES[dtype].bits <= 16


def order_key(em: Emitter, v: Val, dtype: str, *, descending: bool = False, nan_high: bool = False) -> Val:
    """Signed integers (i64 for dtypes of 64 bits, else i32) that compare as the values do, or the other way round.

    -0 equals 0. All NaNs are equal: above all numbers, and below them if `descending`, unless `nan_high`.
    """
    info = ir.DTYPES[dtype]
    if info.kind != "f":
        key = _integer_key(em, v, dtype)
        return (key ^ -1).v if descending else key.v
    width = info.bits
    u = X(em.code, v).bits().to_int("i32" if width < 64 else "i64", signed=False)
    sign = 0 if dtype == "float8_e8m0fnu" else 1 << (width - 1)
    magnitude = u & ((sign or 1 << width) - 1)
    key = magnitude
    if sign:
        negative = u.lt(0) if width == bits(u.elem) else (u & sign).ne(0)
        key = negative.where(0 - magnitude, magnitude)
    if descending:
        key = key ^ -1
    highest = (1 << (max(width, 16) - 1)) - 1
    if dtype == "float4_e2m1fn":
        return key.v
    nan = -1 - highest if descending and not nan_high else highest
    none = u.eq(sign) if dtype in ir.FNUZ else magnitude.gt(_INFINITE[dtype])
    return none.where(nan, key).v


def _integer_key(em: Emitter, v: Val, dtype: str) -> X:
    info, x = ir.DTYPES[dtype], X(em.code, v)
    if info.kind == "u" and info.bits >= 32:
        return x ^ x.sign_mask()
    x = x.to_int("i64" if info.bits == 64 else "i32", signed=info.kind == "i")
    return x - 32768 if dtype == "uint16" else x


def from_key(em: Emitter, key: Val, dtype: str, *, descending: bool = False) -> Val:
    """The integer or bool whose key this is."""
    info, x = ir.DTYPES[dtype], X(em.code, key)
    if descending:
        x = x ^ -1
    if dtype == "bool":
        return x.ne(0).v
    if info.kind == "u" and info.bits >= 32:
        return (x ^ x.sign_mask()).v
    return (x + 32768 if dtype == "uint16" else x).to_int(elem_of(dtype)).v
