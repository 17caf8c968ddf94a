"""Emission of TTIR in the forms that the compiler for Ascend takes."""

from __future__ import annotations

from ..triton.emitter import Emitter
from ..triton.ttir import Code, Val, bits

_SIGNED = {"arith.divui": "arith.divsi", "arith.remui": "arith.remsi"}


class NpuEmitter(Emitter):
    """An emitter without threads: the compiler keeps the accesses of a program in order."""

    def new_code(self, isolate: bool) -> Code:
        return NpuCode()

    def barrier(self) -> None:
        pass


class NpuCode(Code):
    """TTIR whose ops on tensors the vector cores have. They know no unsigned integers of 16 bits and more: conversions
    and divisions of those go through wider signed ones. Scalars are computed by the scalar unit, which has all."""

    def gather_attribute(self) -> str:
        return ""

    def op(self, name: str, *args: Val, elem: str | None = None) -> Val:
        first = args[0]
        if name in _SIGNED and first.shape:
            wide = "i32" if bits(first.elem) < 32 else "i64"
            a, b = (self.to_int(x, wide, signed=False) for x in args)
            return self.to_int(super().op(_SIGNED[name], a, b), first.elem)
        return super().op(name, *args, elem=elem)

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
        """Of 64 bits the upper half of the numbers lose their last bit, which is kept where it decides the rounding."""
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
        """The caller keeps `a` in range."""
        if bits(elem) < 64:
            return self.to_int(super().cast("arith.fptosi", a, "i64"), elem)
        limit = self.const(2.0**63, a.elem, a.shape)
        big = self.cmp("oge", a, limit)
        y = super().cast("arith.fptosi", self.select(big, super().op("arith.subf", a, limit), a), "i64")
        sign = self.select(big, self.const(-(2**63), "i64", a.shape), self.const(0, "i64", a.shape))
        return super().op("arith.xori", y, sign)
