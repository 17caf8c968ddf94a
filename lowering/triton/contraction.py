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


def rounded_products(llir: str) -> str:
    """LLVM IR in which no product of narrow floats is contracted with a sum."""
    return _SUM.sub(_wide, llir) if _PRODUCT.search(llir) else llir


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
