"""Elements of 2 and 4 bits that share a byte, the first in the low bits."""

from __future__ import annotations

from jtile import ir

from .llvm import Code, Val, i64, lanes_of, like


def is_packed(ref: ir.Value) -> bool:
    """Whether the elements of a Ref share bytes: elements of less than 8 bits do, except in scratch."""
    return ir.DTYPES[ref.dtype].bits < 8 and ref.type.role != "scratch"  # type: ignore[union-attr]


def bytes_of(code: Code, linear: Val, dtype: str) -> Val:
    """The numbers of the bytes that hold the elements numbered `linear`."""
    return code.binary("lshr", linear, code.splat(i64(_places(dtype)), lanes_of(linear.ty)))


def extract(code: Code, raw: Val, linear: Val, dtype: str) -> Val:
    """The elements numbered `linear` out of their bytes `raw`, sign- or zero-extended to i8."""
    n, info = lanes_of(raw.ty), ir.DTYPES[dtype]
    number = lambda k: code.splat(Val("i8", str(k)), n)
    which = code.binary("and", code.cast("trunc", linear, like(raw.ty, "i8")), number(8 // info.bits - 1))
    shift = code.binary("shl", which, number(3 - _places(dtype)))
    low = code.binary("shl", code.binary("lshr", raw, shift), number(8 - info.bits))
    return code.binary("ashr" if info.kind == "i" else "lshr", low, number(8 - info.bits))


def own_bits(code: Code, raw: Val, dtype: str) -> Val:
    """The bits of an element, without copies of its sign."""
    return code.binary("and", raw, Val("i8", str(_ones(dtype))))


def in_byte(code: Code, linear: Val, dtype: str) -> tuple[Val, Val]:
    """How far one element is shifted in its byte, and a mask of the byte's other bits."""
    last = 8 // ir.DTYPES[dtype].bits - 1
    which = code.cast("trunc", code.binary("and", linear, i64(last)), "i8")
    shift = code.binary("shl", which, Val("i8", str(3 - _places(dtype))))
    return shift, code.binary("xor", code.binary("shl", Val("i8", str(_ones(dtype))), shift), Val("i8", "-1"))


def _places(dtype: str) -> int:
    """The binary logarithm of the number of elements in a byte."""
    return {4: 1, 2: 2}[ir.DTYPES[dtype].bits]


def _ones(dtype: str) -> int:
    return (1 << ir.DTYPES[dtype].bits) - 1
