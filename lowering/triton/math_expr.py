"""Arithmetic on values of TTIR by Python operators, so that formulas of emitters read like formulas.

Python numbers become constants of the type of the other operand. Comparisons and shifts of integers are signed unless
the method says otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from .ttir import FLOATS, Code, Number, Val, bits


@dataclasses.dataclass(frozen=True, eq=False)
class X:
    """A value and the code that it is written to."""

    code: Code
    v: Val

    @property
    def elem(self) -> str:
        return self.v.elem

    @property
    def width(self) -> int:
        return bits(self.v.elem)

    def new(self, v: Val) -> X:
        return X(self.code, v)

    def const(self, value: Number, elem: str | None = None) -> X:
        """A number in every lane, of this type or of another element type."""
        return self.new(self.code.const(value, elem or self.elem, self.v.shape))

    def _other(self, b: X | Number) -> X:
        return b if isinstance(b, X) else self.const(b)

    def _op(self, floating: str, integer: str, b: X | Number) -> X:
        return self.new(self.code.op(f"arith.{floating if self.v.is_float else integer}", self.v, self._other(b).v))

    def __add__(self, b: X | Number) -> X:
        return self._op("addf", "addi", b)

    def __radd__(self, b: Number) -> X:
        return self.const(b) + self

    def __sub__(self, b: X | Number) -> X:
        return self._op("subf", "subi", b)

    def __rsub__(self, b: Number) -> X:
        return self.const(b) - self

    def __mul__(self, b: X | Number) -> X:
        return self._op("mulf", "muli", b)

    def __rmul__(self, b: Number) -> X:
        return self.const(b) * self

    def __truediv__(self, b: X | Number) -> X:
        """The quotient of floats: correctly rounded in f64, within 2 ulp in f32."""
        return self._op("divf", "divsi", b)

    def __rtruediv__(self, b: Number) -> X:
        return self.const(b) / self

    def __and__(self, b: X | Number) -> X:
        return self._op("", "andi", b)

    def __or__(self, b: X | Number) -> X:
        return self._op("", "ori", b)

    def __xor__(self, b: X | Number) -> X:
        return self._op("", "xori", b)

    def __lshift__(self, b: X | Number) -> X:
        return self._op("", "shli", b)

    def __rshift__(self, b: X | Number) -> X:
        return self._op("", "shrsi", b)

    def lshr(self, b: X | Number) -> X:
        """A shift to the right that lets zeros in."""
        return self._op("", "shrui", b)

    def binary(self, name: str, b: X | Number) -> X:
        return self.new(self.code.op(name, self.v, self._other(b).v))

    def unary(self, name: str) -> X:
        return self.new(self.code.op(name, self.v))

    def fma(self, a: X | Number, b: X | Number) -> X:
        """`self * a + b`, rounded once."""
        return self.new(self.code.op("math.fma", self.v, self._other(a).v, self._other(b).v))

    def __neg__(self) -> X:
        # `arith.negf` has no lowering in triton 3.6, so the sign is flipped, in which LLVM sees the negation.
        return (self.bits() ^ self.sign_mask()).as_float(self.elem) if self.v.is_float else 0 - self

    def abs(self) -> X:
        return self.unary("math.absf" if self.v.is_float else "math.absi")

    # -- comparisons --------------------------------------------------------------------------------------------------

    def cmp(self, predicate: str, b: X | Number) -> X:
        return self.new(self.code.cmp(predicate, self.v, self._other(b).v))

    def lt(self, b: X | Number) -> X:
        return self.cmp("olt" if self.v.is_float else "slt", b)

    def le(self, b: X | Number) -> X:
        return self.cmp("ole" if self.v.is_float else "sle", b)

    def gt(self, b: X | Number) -> X:
        return self.cmp("ogt" if self.v.is_float else "sgt", b)

    def ge(self, b: X | Number) -> X:
        return self.cmp("oge" if self.v.is_float else "sge", b)

    def eq(self, b: X | Number) -> X:
        return self.cmp("oeq" if self.v.is_float else "eq", b)

    def ne(self, b: X | Number) -> X:
        return self.cmp("une" if self.v.is_float else "ne", b)

    def is_nan(self) -> X:
        return self.cmp("uno", self)

    def where(self, a: X | Number, b: X | Number, elem: str | None = None) -> X:
        """`a` where this condition holds, else `b`; `elem` gives the type where both are numbers."""
        like = a if isinstance(a, X) else b if isinstance(b, X) else self.const(0, elem)
        return self.new(self.code.select(self.v, like._other(a).v, like._other(b).v))

    # -- types --------------------------------------------------------------------------------------------------------

    def cast(self, name: str, elem: str) -> X:
        """The value converted by `arith.<name>` to another element type; unchanged where it has that type already."""
        return self if self.elem == elem else self.new(self.code.cast(f"arith.{name}", self.v, elem))

    def to_int(self, elem: str, *, signed: bool = True) -> X:
        return self.new(self.code.to_int(self.v, elem, signed=signed))

    def to_float(self, elem: str) -> X:
        """The value as another float type: exact, or rounded to nearest even."""
        return self.cast("extf" if FLOATS[elem] > self.width else "truncf", elem)

    def bits(self) -> X:
        """The bits of a float as an integer of its width."""
        return self.new(self.code.bitcast(self.v, f"i{self.width}")) if self.v.is_float else self

    def as_float(self, elem: str) -> X:
        return self.new(self.code.bitcast(self.v, elem))

    def sign_mask(self) -> int:
        return 1 << (self.width - 1)

    def copysign(self, of: X) -> X:
        """The magnitude of this non-negative float with the sign of another."""
        return (self.bits() | (of.bits() & self.sign_mask())).as_float(self.elem)


def horner(x: X, coefficients: Sequence[float]) -> X:
    """c0 + c1 x + c2 x^2 + ..., by fused multiply-adds."""
    y = x.const(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        y = y.fma(x, c)
    return y


Formula = Callable[..., X]
