"""Sums of narrow floats that must not be contracted with a product: f16 and bf16 are rounded after every function.

LLVM narrows `round(f32(x) * f32(y))` to a product of bf16, which has the same bits, and takes such a product and a sum
for one fused multiply-add, which has not. A product of bf16 cannot be contracted with a sum in f32. Rounded, such a
sum has the bits of the narrow one: 24 bits are twice those of f16 and two more.
"""

from __future__ import annotations

import re

_NARROW = r"(?:<\d+ x )?(?:half|bfloat)>?"
_OPERAND = r"(?:%[\w.$-]+|splat \([^()]*\)|<[^<>]*>|[\w.+-]+)"
_PRODUCT = re.compile(rf"= fmul (?:\w+ )*?{_NARROW} ")
_SUM = re.compile(
    rf"^( *)(%[\w.$-]+) = (fadd|fsub) (?:\w+ )*?({_NARROW}) ({_OPERAND}), ({_OPERAND})(, !dbg !\d+)?$", re.MULTILINE
)

_ZEROS = ("0xR0000", "0xH0000", "zeroinitializer")
_ROUNDED = re.compile(
    rf"^ *(%[\w.$-]+) = fptrunc (?:<\d+ x float>|float) (%[\w.$-]+) to {_NARROW}(?:, !dbg !\d+)?$", re.MULTILINE
)
_MASK = re.compile(
    rf"^( *)(%[\w.$-]+) = select ((?:<\d+ x )?i1>? {_OPERAND}), ({_NARROW}) ({_OPERAND}), \4 ({_OPERAND})"
    r"(, !dbg !\d+)?$", re.MULTILINE
)  # fmt: skip
_FUNCTION = re.compile(r"^(?=define )", re.MULTILINE)


def rounded_products(llir: str) -> str:
    """LLVM IR in which no product of narrow floats is contracted with a sum."""
    return _SUM.sub(_wide, llir) if _PRODUCT.search(llir) else llir


def wide_masks(llir: str) -> str:
    """LLVM IR whose masks of narrow floats, with zeros, are masks of the float32 numbers that they were rounded from.
    LLVM takes a mask in front of a conversion behind it, where a GPU takes pairs of 16-bit numbers apart for it."""
    return "".join(map(_wide_masks, _FUNCTION.split(llir))) if _MASK.search(llir) else llir


def _wide_masks(function: str) -> str:
    rounded = {m[1]: m[2] for m in _ROUNDED.finditer(function)}

    def of(m: re.Match[str]) -> str:
        indent, name, cond, narrow, a, b, place = m.groups()
        wide, place = re.sub("half|bfloat", "float", narrow), place or ""
        sides = [rounded.get(x, "zeroinitializer" if x in _ZEROS else None) for x in (a, b)]
        if None in sides or sides[0] == sides[1]:
            return m[0]
        stem = f'%"jtile.{name[1:]}.w"'
        a, b = (x if wide != "float" or x != "zeroinitializer" else "0.0" for x in sides)
        return (
            f"{indent}{stem} = select {cond}, {wide} {a}, {wide} {b}{place}\n"
            f"{indent}{name} = fptrunc {wide} {stem} to {narrow}{place}"
        )

    return _MASK.sub(of, function) if rounded else function


def _wide(m: re.Match[str]) -> str:
    indent, name, fn, narrow, a, b, place = m.groups()
    wide, place = re.sub("half|bfloat", "float", narrow), place or ""
    stem = f'%"jtile.{name[1:]}'
    return "\n".join(
        [
            f'{indent}{stem}.a" = fpext {narrow} {a} to {wide}{place}',
            f'{indent}{stem}.b" = fpext {narrow} {b} to {wide}{place}',
            f'{indent}{stem}.s" = {fn} {wide} {stem}.a", {stem}.b"{place}',
            f'{indent}{name} = fptrunc {wide} {stem}.s" to {narrow}{place}',
        ]
    )
