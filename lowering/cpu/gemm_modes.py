"""The arithmetic of a matmul kernel: which instruction multiplies and adds, and how operands reach its form.

A `Mode` consumes `group` consecutive k elements per lane and step. One group is a *unit*: 32 bits for the grouped
instructions (two bfloat16, two int16 or four bytes), one accumulator-sized number otherwise.
"""

from __future__ import annotations

import dataclasses
import struct

from jtile.lowering.cpu.isa import Isa
from jtile.lowering.cpu.llvm import Code, Val, const, lanes_of, like, scalar_of, vec

STORAGE = {
    "float32": "float", "float64": "double", "float16": "i16", "bfloat16": "i16", "float8_e4m3fn": "i8",
    "float8_e5m2": "i8", "bool": "i8", "int8": "i8", "uint8": "i8", "int16": "i16", "uint16": "i16", "int32": "i32", "uint32": "i32",
    "int64": "i64", "uint64": "i64",
}  # fmt: skip
ACCUMULATORS = {"float32": "float", "float64": "double", "int32": "i32", "int64": "i64"}
BYTES = {"i8": 1, "i16": 2, "i32": 4, "i64": 8, "float": 4, "double": 8}
_BYTE_SIGNED = {"int8": True, "uint8": False, "bool": False}
_FIELDS = {"float16": (5, 10), "float8_e5m2": (5, 2), "float8_e4m3fn": (4, 3)}  # exponent and mantissa bits
_IN_BFLOAT = {"bfloat16", "float8_e4m3fn", "float8_e5m2"}  # every value of these is a bfloat16


@dataclasses.dataclass(frozen=True)
class Mode:
    """How one product is computed on one instruction set.

    Attributes:
      kind: `"fma"` (float, one k a step), `"mul"` (integer, one k), `"bf16"` (dpbf16ps, two k), `"madd"` (pmaddwd,
        two k), `"vnni"` (vpdpbusd, four k).
      a, b: jtile dtypes of the operands; `acc`: LLVM type of the accumulator lane.
      packed: LLVM type of one element inside a unit.
    """

    isa: Isa
    kind: str
    a: str
    b: str
    acc: str
    group: int
    packed: str

    @property
    def unit(self) -> str:
        return "i32" if self.group > 1 else self.acc

    @property
    def unit_bytes(self) -> int:
        return BYTES[self.unit]

    @property
    def lanes(self) -> int:
        return self.isa.lanes(8 * BYTES[self.acc])

    @property
    def tag(self) -> str:
        return f"{self.kind}_{self.a}_{self.b}_{self.acc}"

    @property
    def flip(self) -> bool:
        """vpdpbusd wants one signed and one unsigned side: where both are alike, A enters with its sign bits flipped."""
        return self.kind == "vnni" and _BYTE_SIGNED[self.a] == _BYTE_SIGNED[self.b]

    def swapped(self) -> Mode:
        """The mode of the transposed product, where A and B change places."""
        return dataclasses.replace(self, a=self.b, b=self.a)

    @property
    def a_in_place(self) -> bool:
        """Whether the kernels can read A where it lies."""
        return self.is_native(self.a) and not self.flip

    def is_native(self, dtype: str) -> bool:
        """Whether an operand of this dtype enters the instruction with the bits it has in memory."""
        if self.kind == "vnni":
            return True
        if self.kind == "bf16":
            return dtype == "bfloat16"
        return dtype.startswith("float") == (self.kind == "fma") and STORAGE[dtype] == self.packed

    def mac(self, c: Code, acc: Val, a: Val, b: Val) -> Val:
        """`acc + a . b` lane by lane; a and b are vectors of units."""
        n = lanes_of(acc.ty)
        if self.kind == "fma":
            if self.isa.arch == "aarch64" or self.isa.has("fma") or self.isa.has("avx512f"):
                return c.intrinsic("fma", acc.ty, a, b, acc)
            return c.binary("fadd", acc, c.binary("fmul", a, b))
        if self.kind == "mul":
            return c.binary("add", acc, c.binary("mul", a, b))
        bits = 32 * n
        if self.kind == "bf16":
            pair = vec(2 * n, "bfloat")
            a, b = c.cast("bitcast", a, pair), c.cast("bitcast", b, pair)
            return c.intrinsic("x86.avx512bf16.dpbf16ps", acc.ty, acc, a, b, suffix=str(bits))
        if self.kind == "madd":
            pair = vec(2 * n, "i16")
            name = {128: "x86.sse2.pmadd.wd", 256: "x86.avx2.pmadd.wd", 512: "x86.avx512.pmaddw.d.512"}[bits]
            product = c.intrinsic(name, acc.ty, c.cast("bitcast", a, pair), c.cast("bitcast", b, pair), suffix="")
            return c.binary("add", acc, product)
        unsigned, signed = (a, b) if _BYTE_SIGNED[self.b] else (b, a)
        return c.intrinsic("x86.avx512.vpdpbusd", acc.ty, acc, unsigned, signed, suffix=str(bits))

    def enter_a(self, c: Code, a: Val) -> Val:
        """A's units (or bytes) with their sign bits flipped where `flip`.

        It happens in packing: in the micro-kernel LLVM 22 turns "broadcast, then xor" into a shape that its code
        generator never finishes with.
        """
        if not self.flip:
            return a
        return c.binary("xor", a, const(a.ty, "-128" if scalar_of(a.ty) == "i8" else str(0x80808080 - (1 << 32))))

    def column_sum(self, c: Code, acc: Val, b: Val) -> Val:
        """`acc + sum of b's group`: what `corrected` needs of B. Only where `flip`."""
        return self.mac(c, acc, const(b.ty, str(0x01010101)), b)

    def corrected(self, c: Code, acc: Val, sums: Val) -> Val:
        """Undo `enter_a`: A was 128 too high (signed) or too low (unsigned), so the sum is off by 128 column sums."""
        off = c.binary("shl", sums, const(sums.ty, "7"))
        return c.binary("sub" if _BYTE_SIGNED[self.a] else "add", acc, off)

    def widen(self, c: Code, x: Val, dtype: str) -> Val:
        """A vector (or scalar) of storage elements of `dtype` as `packed` elements; exact."""
        if self.is_native(dtype):
            return x
        if self.kind == "bf16":
            return _to_bfloat(c, self.isa, x, dtype)
        if self.kind == "fma":
            wide = x if dtype == "float32" else _to_float(c, self.isa, x, dtype)
            return c.cast("fpext", wide, like(x.ty, self.packed))
        have, want = BYTES[STORAGE[dtype]], BYTES[self.packed]
        if have == want:
            return x
        op = "trunc" if have > want else "sext" if dtype.startswith("int") else "zext"
        return c.cast(op, x, like(x.ty, self.packed))


def choose_mode(isa: Isa, a: str, b: str, acc: str) -> Mode:
    """The fastest exact mode for operand dtypes a and b with an accumulator of dtype acc.

    Raises:
      ValueError: a dtype is unknown, floats meet integers, or the accumulator is narrower than an operand.
    """
    if a not in STORAGE or b not in STORAGE or acc not in ACCUMULATORS:
        raise ValueError(f"no matmul of {a} and {b} with a {acc} accumulator on the CPU")
    floats = {d.startswith(("float", "bfloat")) for d in (a, b, acc)}
    if len(floats) > 1 or (floats == {True} and acc == "float32" and "float64" in (a, b)):
        raise ValueError(f"no matmul of {a} and {b} with a {acc} accumulator on the CPU: cast the operands first")
    lane = ACCUMULATORS[acc]
    if floats == {True}:
        if {a, b} <= _IN_BFLOAT and acc == "float32" and isa.has("avx512bf16") and isa.vector_bits == 512:
            return Mode(isa, "bf16", a, b, lane, 2, "i16")
        return Mode(isa, "fma", a, b, lane, 1, lane)
    if acc == "int32" and isa.arch == "x86_64":
        if {a, b} <= _BYTE_SIGNED.keys() and isa.has("avx512vnni") and isa.vector_bits == 512:
            return Mode(isa, "vnni", a, b, lane, 4, "i8")
        if {a, b} <= _BYTE_SIGNED.keys() | {"int16"}:  # the one overflow of pmaddwd wraps to the exact sum modulo 2**32
            return Mode(isa, "madd", a, b, lane, 2, "i16")
    return Mode(isa, "mul", a, b, lane, 1, lane)


def _to_float(c: Code, isa: Isa, x: Val, dtype: str) -> Val:
    """Storage bits of a narrow float as f32, exactly, also where the CPU flushes denormals."""
    f32 = like(x.ty, "float")
    if dtype == "bfloat16":
        wide = c.cast("zext", x, like(x.ty, "i32"))
        return c.cast("bitcast", c.binary("shl", wide, const(wide.ty, "16")), f32)
    hardware = isa.arch == "aarch64" or isa.has("f16c") or isa.has("avx512f")
    if dtype == "float8_e5m2" and hardware:
        wide = c.cast("zext", x, like(x.ty, "i16"))
        x, dtype = c.binary("shl", wide, const(wide.ty, "8")), "float16"
    if dtype == "float16" and hardware:
        return c.cast("fpext", c.cast("bitcast", x, like(x.ty, "half")), f32)
    return _decode_float(c, x, dtype)


def _decode_float(c: Code, x: Val, dtype: str) -> Val:
    """Decode sign | exponent | mantissa by integer arithmetic; subnormals go through an exact integer conversion."""
    i32, f32 = like(x.ty, "i32"), like(x.ty, "float")
    magnitude, sign = _split_sign(c, c.cast("zext", x, i32), dtype, 32)
    _, mantissa = _FIELDS[dtype]
    tiny = c.binary("fmul", c.cast("sitofp", magnitude, f32), const(f32, f"{_unit_of(dtype):.17e}"))
    bits = _join_float(c, magnitude, sign, c.cast("bitcast", tiny, i32), dtype, 23 - mantissa)
    return c.cast("bitcast", bits, f32)


def _to_bfloat(c: Code, isa: Isa, x: Val, dtype: str) -> Val:
    """An 8-bit float as the bits of a bfloat16 with the same value; subnormals by a table of eight in a register."""
    n, (_, mantissa) = lanes_of(x.ty), _FIELDS[dtype]
    if n not in (8, 16, 32):
        bits = c.cast("bitcast", _decode_float(c, x, dtype), like(x.ty, "i32"))
        return c.cast("trunc", c.binary("lshr", bits, const(bits.ty, "16")), like(x.ty, "i16"))
    i16 = vec(n, "i16")
    magnitude, sign = _split_sign(c, c.cast("zext", x, i16), dtype, 16)
    entries = [struct.unpack("<I", struct.pack("<f", i * _unit_of(dtype)))[0] >> 16 for i in range(8)] * (n // 8)
    table = Val(i16, "<" + ", ".join(f"i16 {e}" for e in entries) + ">")
    tiny = c.intrinsic("x86.avx512.permvar.hi", i16, table, magnitude, suffix=str(16 * n))
    return _join_float(c, magnitude, sign, tiny, dtype, 7 - mantissa)


def _unit_of(dtype: str) -> float:
    """The smallest subnormal."""
    exponent, mantissa = _FIELDS[dtype]
    return 2.0 ** (2 - (1 << (exponent - 1)) - mantissa)


def _split_sign(c: Code, bits: Val, dtype: str, width: int) -> tuple[Val, Val]:
    """Exponent and mantissa of a zero-extended value, and its sign moved to the top of `width` bits."""
    at = sum(_FIELDS[dtype])
    magnitude = c.binary("and", bits, const(bits.ty, str((1 << at) - 1)))
    sign = c.binary("shl", c.binary("and", bits, const(bits.ty, str(1 << at))), const(bits.ty, str(width - 1 - at)))
    return magnitude, sign


def _join_float(c: Code, magnitude: Val, sign: Val, tiny: Val, dtype: str, shift: int) -> Val:
    """Bits of a float with 8 exponent bits: `tiny` for subnormals, infinity and NaN kept, else the exponent moved."""
    (exponent, mantissa), ty = _FIELDS[dtype], magnitude.ty
    bias, one = (1 << (exponent - 1)) - 1, 1 << (mantissa + shift)  # one: a step of the new exponent
    shifted = c.binary("shl", magnitude, const(ty, str(shift)))
    normal = c.binary("add", shifted, const(ty, str((127 - bias) * one)))
    value = c.select(c.cmp("icmp", "ult", magnitude, const(ty, str(1 << mantissa))), tiny, normal)
    if dtype == "float8_e4m3fn":  # no infinity, one NaN
        top, special = (1 << (exponent + mantissa)) - 1, const(ty, str(255 * one + one // 2))
    else:
        top, special = ((1 << exponent) - 1) << mantissa, c.binary("or", shifted, const(ty, str(255 * one)))
    value = c.select(c.cmp("icmp", "uge", magnitude, const(ty, str(top))), special, value)
    return c.binary("or", value, sign)
