"""Emission of TTIR in the forms that the compiler for Ascend takes."""

from __future__ import annotations

from ..triton.emitter import Emitter
from ..triton.lanes import fold
from ..triton.ttir import Code, Val, bits

_ORDERED = {"ult": "oge", "ule": "ogt", "ugt": "ole", "uge": "olt"}  # an unordered comparison is the negation of this
_UNSIGNED = ("ult", "ule", "ugt", "uge")
# The adapter crashes on these ops of triton where operands are scalars.
_PLAIN = {"tt.precise_divf": "arith.divf", "tt.precise_sqrt": "math.sqrt"}
_DIVISIONS = ("arith.divui", "arith.remui", "arith.divsi")


class NpuEmitter(Emitter):
    """An emitter without threads: the compiler keeps the accesses of a program in order."""

    def new_code(self, isolate: bool) -> Code:
        return NpuCode()

    def barrier(self) -> None:
        pass

    def unfolded(self, base: Val) -> Val:
        """An offset that the adapter does not know: it refuses negative ones that it knows, where the elements in front
        of the array are masked, too."""
        if base.number is None:
            return base
        block = self.code.let("tt.get_program_id x : i32", (), "i32")
        none = self.code.op("arith.minsi", block, self.code.i32(0))
        return self.code.add(base, self.code.to_int(none, base.elem))


class NpuCode(Code):
    """TTIR whose ops on tensors the vector cores have, and which their compiler (1.2.0) translates as they are meant:
    it takes unsigned integers of 16 bits and more for signed ones, without a word where it extends them or shifts them
    to the right. Scalars are computed by the scalar unit, which has all but the conversion of floats to integers."""

    lifts_scalars = True

    def gather_attribute(self) -> str:
        return ""

    def op(self, name: str, *args: Val, elem: str | None = None) -> Val:
        first, name = args[0], _PLAIN.get(name, name)
        if not first.shape:
            return super().op(name, *args, elem=elem)
        if name in _DIVISIONS:
            return self._divided(name, *args)
        if name == "arith.shrui":
            return self._shifted(*args)
        if name in ("arith.minui", "arith.maxui"):
            a, b = args
            less = self.cmp("ult", a, b)
            return self.select(less, a, b) if name == "arith.minui" else self.select(less, b, a)
        return super().op(name, *args, elem=elem)

    def _divided(self, name: str, a: Val, b: Val) -> Val:
        """Divide in 64 bits: the compiler divides 32-bit integers as 32-bit floats, which do not hold them."""
        signed = name.endswith("si")
        wide = "i32" if bits(a.elem) < 16 else "i64"
        a64, b64 = (self.to_int(x, wide, signed=signed) for x in (a, b))
        return self.to_int(super().op(name.removesuffix("ui").removesuffix("si") + "si", a64, b64), a.elem)

    def _shifted(self, a: Val, by: Val) -> Val:
        """A shift to the right that lets zeros in, by one that repeats the sign: the compiler makes that of both."""
        width = bits(a.elem)
        moved = super().op("arith.shrsi", a, by)
        if by.number is not None:
            kept = self.const((1 << (width - int(by.number))) - 1, a.elem, a.shape)
        else:
            left = super().op("arith.subi", self.const(width - 1, a.elem, a.shape), by)
            top = super().op("arith.shli", self.const(1, a.elem, a.shape), left)
            one = self.const(1, a.elem, a.shape)
            kept = super().op("arith.subi", super().op("arith.shli", top, one), one)
        return super().op("arith.andi", moved, kept)

    def unsplat(self, a: Val) -> Val:
        """The only element of a tensor, as a sum over it: the adapter does not know `tt.unsplat`."""
        return fold(self, a, "arith.addf" if a.is_float else "arith.addi")

    def cmp(self, predicate: str, a: Val, b: Val) -> Val:
        if not a.shape:
            return super().cmp(predicate, a, b)
        if a.is_float and predicate == "uno":  # NaN is what differs from itself
            return super().op("arith.ori", super().cmp("une", a, a), super().cmp("une", b, b))
        if a.is_float and predicate in _ORDERED:
            less = super().cmp(_ORDERED[predicate], a, b)
            return super().op("arith.xori", less, self.const(True, "i1", a.shape))
        if not a.is_float and predicate in _UNSIGNED:
            if bits(a.elem) < 32:
                return super().cmp("s" + predicate[1:], *(self.to_int(x, "i32", signed=False) for x in (a, b)))
            return super().cmp("s" + predicate[1:], self._biased(a), self._biased(b))
        return super().cmp(predicate, a, b)

    def _biased(self, a: Val) -> Val:
        """An unsigned number as a signed one in the same order: the number less half of the range of its width."""
        least = -(1 << (bits(a.elem) - 1))
        if a.number is not None:
            return self.const(int(a.number) ^ least, a.elem, a.shape)
        return super().op("arith.xori", a, self.const(least, a.elem, a.shape))

    def cast(self, name: str, a: Val, elem: str) -> Val:
        if a.shape and name == "arith.extui" and bits(a.elem) in (16, 32):
            wide = super().cast("arith.extsi", a, elem)
            return super().op("arith.andi", wide, self.const((1 << bits(a.elem)) - 1, elem, a.shape))
        if a.shape and name == "arith.uitofp" and a.elem != "i1":
            return self._float_of_unsigned(a, elem)
        if a.shape and name == "arith.fptoui":
            return self._unsigned_of_float(a, elem)
        return super().cast(name, a, elem)

    def _float_of_unsigned(self, a: Val, elem: str) -> Val:
        """A float of an unsigned integer. Numbers in the upper half of 64 bits lose their last bit, which is kept where
        it decides the rounding."""
        if bits(a.elem) < 64:
            return super().cast(
                "arith.sitofp", self.to_int(a, "i32" if bits(a.elem) < 32 else "i64", signed=False), elem
            )
        zero, one = self.const(0, "i64", a.shape), self.const(1, "i64", a.shape)
        odd = super().op("arith.andi", a, one)
        half = super().op("arith.ori", super().op("arith.shrui", a, one), odd)
        large = super().cast("arith.sitofp", half, elem)
        large = super().op("arith.mulf", large, self.const(2.0, elem, a.shape))
        return self.select(self.cmp("slt", a, zero), large, super().cast("arith.sitofp", a, elem))

    def _unsigned_of_float(self, a: Val, elem: str) -> Val:
        """An unsigned integer of a float; the caller keeps `a` in range."""
        if bits(elem) < 64:
            return self.to_int(super().cast("arith.fptosi", a, "i64"), elem)
        limit = self.const(2.0**63, a.elem, a.shape)
        big = self.cmp("oge", a, limit)
        y = super().cast("arith.fptosi", self.select(big, super().op("arith.subf", a, limit), a), "i64")
        sign = self.select(big, self.const(-(2**63), "i64", a.shape), self.const(0, "i64", a.shape))
        return super().op("arith.xori", y, sign)
