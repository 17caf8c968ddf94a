"""Vector expressions over the LLVM text writer: `a * b + 1.0` emits `fmul` and `fadd`, so that a formula reads as one.

Nothing here may turn into a library call on any instruction set: fused multiply-add, rounding and scaling look at
the `Isa` and take an exact integer or add-a-magic-number form where the instruction is missing.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .isa import Isa
from .llvm import Code, Val, const, lanes_of, like, scalar_of, vec


class FloatFormat(NamedTuple):
    """An IEEE binary format: the integer type of its bits, stored mantissa bits and exponent bias."""

    bits: int
    mantissa: int
    bias: int

    @property
    def int_type(self) -> str:
        return f"i{self.bits}"


FORMATS = {"float": FloatFormat(32, 23, 127), "double": FloatFormat(64, 52, 1023)}


def literal(scalar: str, value: float) -> str:
    """LLVM's spelling of `value` rounded to the scalar type."""
    if scalar == "i1":
        return "true" if value else "false"
    if scalar.startswith("i"):
        bits = int(scalar[1:])
        value = int(value) & ((1 << bits) - 1)
        return str(value - (1 << bits) if value >> (bits - 1) else value)
    if scalar == "float" and math.isfinite(value):
        value = struct.unpack("<f", struct.pack("<f", value))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


class X:
    """A value of a float or integer (vector) type with the usual operators; numbers are splatted constants.

    Integers are signed where it matters (`<`, `>>`); `lshr` and `ult` are the unsigned forms. `i1` takes `& | ~`.
    """

    __slots__ = ("code", "isa", "v")

    def __init__(self, code: Code, isa: Isa, v: Val):
        self.code, self.isa, self.v = code, isa, v

    # -- types ----------------------------------------------------------------------------------------------------
    @property
    def ty(self) -> str:
        return self.v.ty

    @property
    def scalar(self) -> str:
        return scalar_of(self.v.ty)

    @property
    def lanes(self) -> int:
        return lanes_of(self.v.ty)

    @property
    def fmt(self) -> FloatFormat:
        return FORMATS[self.scalar]

    @property
    def is_float(self) -> bool:
        return self.scalar in FORMATS

    def new(self, v: Val) -> X:
        return X(self.code, self.isa, v)

    def const(self, value: float) -> X:
        """A constant of this type."""
        return self.new(const(self.ty, literal(self.scalar, value)))

    def lift(self, other: X | float) -> X:
        return other if isinstance(other, X) else self.const(other)

    # -- arithmetic -----------------------------------------------------------------------------------------------
    def binary(self, op: str, other: X | float) -> X:
        return self.new(self.code.binary(op, self.v, self.lift(other).v))

    def _arith(self, op: str, other: X | float) -> X:
        return self.binary("f" + op if self.is_float else op, other)

    def __add__(self, other: X | float) -> X:
        return self._arith("add", other)

    def __sub__(self, other: X | float) -> X:
        return self._arith("sub", other)

    def __mul__(self, other: X | float) -> X:
        return self._arith("mul", other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: float) -> X:
        return self.const(other) - self

    def __truediv__(self, other: X | float) -> X:
        return self.binary("fdiv", other)

    def __rtruediv__(self, other: float) -> X:
        return self.const(other) / self

    def __neg__(self) -> X:
        if self.is_float:
            return self.new(self.code.let(self.ty, f"fneg {self.v}"))
        return 0 - self

    def __and__(self, other: X | float) -> X:
        return self.binary("and", other)

    def __or__(self, other: X | float) -> X:
        return self.binary("or", other)

    def __xor__(self, other: X | float) -> X:
        return self.binary("xor", other)

    def __invert__(self) -> X:
        return self ^ -1

    def __lshift__(self, other: X | int) -> X:
        return self.binary("shl", other)

    def __rshift__(self, other: X | int) -> X:
        return self.binary("ashr", other)

    def lshr(self, other: X | int) -> X:
        return self.binary("lshr", other)

    def fma(self, b: X | float, c: X | float) -> X:
        """`self * b + c`; one rounding where the machine has a fused multiply-add, two elsewhere."""
        if has_fma(self.isa):
            return self.new(self.code.intrinsic("fma", self.ty, self.v, self.lift(b).v, self.lift(c).v))
        return self * b + c

    def sqrt(self) -> X:
        return self.new(self.code.intrinsic("sqrt", self.ty, self.v))

    # -- comparisons and choice -----------------------------------------------------------------------------------
    def cmp(self, predicate: str, other: X | float) -> X:
        return self.new(self.code.cmp("fcmp" if self.is_float else "icmp", predicate, self.v, self.lift(other).v))

    def __lt__(self, other: X | float) -> X:
        return self.cmp("olt" if self.is_float else "slt", other)

    def __le__(self, other: X | float) -> X:
        return self.cmp("ole" if self.is_float else "sle", other)

    def __gt__(self, other: X | float) -> X:
        return self.cmp("ogt" if self.is_float else "sgt", other)

    def __ge__(self, other: X | float) -> X:
        return self.cmp("oge" if self.is_float else "sge", other)

    def eq(self, other: X | float) -> X:
        return self.cmp("oeq" if self.is_float else "eq", other)

    def ne(self, other: X | float) -> X:
        return self.cmp("une" if self.is_float else "ne", other)

    def ult(self, other: X | float) -> X:
        return self.cmp("ult", other)

    def is_nan(self) -> X:
        return self.cmp("uno", self)

    def where(self, a: X | float, b: X | float) -> X:
        """`a` where this condition (i1) holds, else `b`; one of the two must be an `X`."""
        if not isinstance(a, X):
            if not isinstance(b, X):
                raise TypeError("one of the two values must have a type")
            a = b.const(a)
        return self.new(self.code.select(self.v, a.v, a.lift(b).v))

    def at_most(self, bound: X | float) -> X:
        """`min(self, bound)`; NaN stays NaN."""
        return (self > bound).where(bound, self)

    def at_least(self, bound: X | float) -> X:
        """`max(self, bound)`; NaN stays NaN."""
        return (self < bound).where(bound, self)

    # -- bits and conversions -------------------------------------------------------------------------------------
    def cast(self, op: str, scalar: str) -> X:
        """An LLVM cast by name (`"sitofp"`, `"zext"`, `"bitcast"`) to the element type `scalar`, same lanes."""
        return self.new(self.code.cast(op, self.v, like(self.ty, scalar)))

    def bits(self) -> X:
        return self.cast("bitcast", self.fmt.int_type)

    def as_float(self) -> X:
        return self.cast("bitcast", "float" if self.scalar == "i32" else "double")

    def to(self, scalar: str) -> X:
        """The value converted between float and double."""
        return self.cast("fpext" if scalar == "double" else "fptrunc", scalar)

    def abs(self) -> X:
        return self.new(self.code.intrinsic("fabs", self.ty, self.v))

    def copysign(self, sign: X) -> X:
        return self.new(self.code.intrinsic("copysign", self.ty, self.v, sign.v))

    def xor_sign(self, sign: X) -> X:
        """The value, negated where `sign` has its sign bit set."""
        return (self.bits() ^ (sign.bits() & (1 << (self.fmt.bits - 1)))).as_float()

    def any(self) -> Val:
        """Whether one lane of this i1 value is true, as a scalar i1."""
        if self.lanes == 1:
            return self.v
        return self.code.intrinsic("vector.reduce.or", "i1", self.v)


# -- algorithms that depend on the instruction set ------------------------------------------------------------------
def has_fma(isa: Isa) -> bool:
    return isa.arch == "aarch64" or isa.has("fma") or isa.has("avx512f")


def horner(x: X, coefficients: Sequence[float]) -> X:
    """The polynomial with these coefficients, lowest power first."""
    acc = x.const(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        acc = acc.fma(x, c)
    return acc


def estrin(x: X, coefficients: Sequence[float]) -> X:
    """The polynomial with these coefficients, lowest power first, in pairs whose sums are paired again: a few products
    more than `horner`, and a chain of log2(n) steps instead of n."""
    terms: list[X | float] = [*coefficients]
    while len(terms) > 1:
        pairs = [(terms[i], terms[i + 1] if i + 1 < len(terms) else None) for i in range(0, len(terms), 2)]
        terms = [low if high is None else x.lift(high).fma(x, low) for low, high in pairs]
        if len(terms) > 1:
            x = x * x
    return x.lift(terms[0])


def _rounding_instruction(isa: Isa) -> bool:
    return isa.arch == "aarch64" or isa.has("sse4.1")


def round_even(x: X) -> X:
    """Round to the nearest integer, ties to even; keeps the sign of zero."""
    if _rounding_instruction(x.isa):
        return x.new(x.code.intrinsic("rint", x.ty, x.v))
    magic = 2.0**x.fmt.mantissa
    a = x.abs()
    # At and above 2^mantissa every float is an integer; below it the sum is rounded to an integer by the adder.
    return (a < magic).where(a + magic - magic, a).copysign(x)


def floor(x: X) -> X:
    if _rounding_instruction(x.isa):
        return x.new(x.code.intrinsic("floor", x.ty, x.v))
    r = round_even(x)
    return (r > x).where(r - 1.0, r).copysign(x)


def ceil(x: X) -> X:
    if _rounding_instruction(x.isa):
        return x.new(x.code.intrinsic("ceil", x.ty, x.v))
    return -floor(-x)


def magic_round(x: X) -> tuple[X, X]:
    """`x` rounded to an integer (|x| < 2^(mantissa-2)) as a float, and the float whose low mantissa bits hold it.

    Adding 1.5 * 2^mantissa leaves the integer in the low bits: no conversion, defined for NaN too.
    """
    magic = 1.5 * 2.0**x.fmt.mantissa
    t = x + magic
    return t - magic, t


def magic_int(t: X) -> X:
    """The integer that the second result of `magic_round` holds."""
    return t.bits() - t.const(1.5 * 2.0**t.fmt.mantissa).bits()


def pow2(n: X) -> X:
    """2^n for an integer n in the normal exponent range, as a float of the same width."""
    fmt = FORMATS["float" if n.scalar == "i32" else "double"]
    return ((n + fmt.bias) << fmt.mantissa).as_float()


def scale(x: X, n: X, t: X, gone: X | None = None) -> X:
    """`x * 2^n` rounded once, also when it leaves the normal range, and 0 where `gone`; (n, t) are from `magic_round`.

    What is gone is not scaled: on Intel's cores a product that underflows takes some hundred cycles.
    """
    native = 512 // x.fmt.bits
    if x.isa.has("avx512f") and x.lanes % native == 0:
        return _by_chunks(_scalef, native, x, n, *(() if gone is None else (~gone,)))
    if gone is not None:
        return gone.where(0.0, scale(gone.where(0.0, x), n, gone.where(1.5 * 2.0**t.fmt.mantissa, t)))
    i = magic_int(t)
    half = i >> 1
    return x * pow2(half) * pow2(i - half)


def splits(x: X) -> bool:
    """Whether there are instructions that split a double into its exponent and its mantissa."""
    return x.isa.has("avx512f") and x.scalar == "double" and x.lanes % 8 == 0


def exponent(x: X) -> X:
    """The exponent of doubles as a float: floor(log2(abs(x))); -inf of 0, inf of infinity."""
    how = lambda v, _: v.new(v.code.intrinsic("x86.avx512.mask.getexp", v.ty, v.v, v.v, *_ALL, suffix="pd.512"))
    return _by_chunks(how, 8, x, x)


def mantissa(x: X) -> X:
    """The mantissa of positive doubles in [3/4, 3/2); 1 of zeros and infinity, NaN of negative numbers."""
    kind = Val("i32", "15")  # that interval, and NaN for a sign
    how = lambda v, _: v.new(v.code.intrinsic("x86.avx512.mask.getmant", v.ty, v.v, kind, v.v, *_ALL, suffix="pd.512"))
    return _by_chunks(how, 8, x, x)


_ALL = Val("i8", "-1"), Val("i32", "4")  # all lanes; 4: the rounding mode of MXCSR


def _scalef(x: X, n: X, kept: X | None = None) -> X:
    """`x * 2^floor(n)`, or 0 in lanes that are not kept."""
    suffix, mask = ("ps.512", "i16") if x.scalar == "float" else ("pd.512", "i8")
    other, lanes = x, Val(mask, "-1")
    if kept is not None:
        other, lanes = x.const(0.0), kept.code.let(mask, f"bitcast {kept.v} to {mask}")
    args = (x.v, n.v, other.v, lanes, Val("i32", "4"))  # 4: rounding mode of MXCSR
    return x.new(x.code.intrinsic("x86.avx512.mask.scalef", x.ty, *args, suffix=suffix))


def has_lookup(x: X) -> bool:
    """Whether one instruction takes numbers of a table of sixteen floats."""
    return x.isa.has("avx512f") and x.scalar == "float"


def lookup(table: Sequence[float], at: X) -> X:
    """The numbers of a table of sixteen floats whose places are the four low bits of the integers `at`."""
    numbers = ", ".join(f"float {literal('float', x)}" for x in table)
    ty = vec(16, "float")

    def take(at: X) -> X:
        args = (Val(ty, f"<{numbers}>"), at.v)
        return at.new(at.code.intrinsic("x86.avx512.permvar.sf", ty, *args, suffix="512"))

    if at.lanes == 1:
        one = at.code.let(vec(16, "i32"), f"insertelement {vec(16, 'i32')} poison, {at.v}, i64 0")
        return at.new(at.code.let("float", f"extractelement {take(at.new(one)).v}, i64 0"))
    whole = -(-at.lanes // 16) * 16
    return (
        _lanes(_by_chunks(take, 16, _widened(at, whole)), 0, at.lanes) if at.lanes < whole else _by_chunks(take, 16, at)
    )


def _by_chunks(fn: Callable[..., X], native: int, *args: X) -> X:
    """Apply `fn` to consecutive groups of `native` lanes."""
    lanes = args[0].lanes
    if lanes == native:
        return fn(*args)
    parts = [fn(*(_lanes(a, k, native) for a in args)) for k in range(0, lanes, native)]
    while len(parts) > 1:
        parts = [_concat(p, q) if q is not None else p for p, q in _pairs(parts)]
    return parts[0]


def _pairs(parts: list[X]) -> list[tuple[X, X | None]]:
    return [(parts[i], parts[i + 1] if i + 1 < len(parts) else None) for i in range(0, len(parts), 2)]


def _lanes(x: X, start: int, count: int) -> X:
    mask = ", ".join(f"i32 {start + i}" for i in range(count))
    ty = vec(count, x.scalar)
    return x.new(x.code.let(ty, f"shufflevector {x.v}, {x.ty} poison, <{count} x i32> <{mask}>"))


def _widened(x: X, lanes: int) -> X:
    """x with lanes behind its own that hold anything."""
    kept = ", ".join(f"i32 {i}" if i < x.lanes else "i32 poison" for i in range(lanes))
    ty = vec(lanes, x.scalar)
    return x.new(x.code.let(ty, f"shufflevector {x.v}, {x.ty} poison, <{lanes} x i32> <{kept}>"))


def _concat(a: X, b: X) -> X:
    total = a.lanes + b.lanes
    second = b if a.lanes == b.lanes else _widened(b, a.lanes)
    mask = ", ".join(f"i32 {i}" for i in range(total))
    ty = vec(total, a.scalar)
    return a.new(a.code.let(ty, f"shufflevector {a.v}, {second.v}, <{total} x i32> <{mask}>"))


# -- double-word arithmetic: a value as an unevaluated sum hi + lo ----------------------------------------------------
def two_sum(a: X, b: X) -> tuple[X, X]:
    """a + b exactly, as a rounded sum and its error (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def fast_two_sum(a: X, b: X) -> tuple[X, X]:
    """a + b exactly, as a rounded sum and its error, when |a| >= |b| or a is 0 (Dekker)."""
    s = a + b
    return s, b - (s - a)


def two_product(a: X, b: X) -> tuple[X, X]:
    """a * b exactly, as a rounded product and its error; without fused multiply-add both are split (Dekker)."""
    p = a * b
    if has_fma(a.isa):
        return p, a.fma(b, -p)
    ah, al = _split(a)
    bh, bl = _split(b)
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def _split(a: X) -> tuple[X, X]:
    """The upper half of the mantissa by masking (no overflow), and the exact rest."""
    keep = (a.fmt.mantissa + 1) // 2
    hi = (a.bits() & -(1 << (keep + 1 if a.scalar == "double" else keep))).as_float()
    return hi, a - hi
