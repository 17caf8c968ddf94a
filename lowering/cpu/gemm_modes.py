"""The arithmetic of a matmul kernel: which instruction multiplies and adds, and how operands reach its form.

A `Mode` consumes `group` consecutive k elements per lane and step. One group is a *unit*: 32 bits for the grouped
instructions (two bfloat16, two int16 or four bytes), one accumulator-sized number otherwise.
"""

from __future__ import annotations

import dataclasses

from jtile.lowering.cpu.isa import Isa
from jtile.lowering.cpu.llvm import Code, Val, const, lanes_of, like, scalar_of, vec

STORAGE = {
    "float32": "float", "float64": "double", "float16": "i16", "bfloat16": "i16", "float8_e4m3fn": "i8", "float8_e5m2": "i8",
    "bool": "i8", "int8": "i8", "uint8": "i8", "int16": "i16", "uint16": "i16", "int32": "i32", "uint32": "i32",
    "int64": "i64", "uint64": "i64",
}  # fmt: skip
ACCUMULATORS = {"float32": "float", "float64": "double", "int32": "i32", "int64": "i64"}
BYTES = {"i8": 1, "i16": 2, "i32": 4, "i64": 8, "float": 4, "double": 8}
_BYTE_SIGNED = {"int8": True, "uint8": False, "bool": False}


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
        """Both bytes have one signedness, vpdpbusd wants one of each: A enters with its sign bit flipped, that is +-128."""
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
        if self.kind in ("bf16", "vnni"):
            return True
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

        It happens in packing: in the micro-kernel LLVM 22 turns "broadcast, then xor" into a shape that its code generator
        never finishes with.
        """
        if not self.flip:
            return a
        return c.binary("xor", a, const(a.ty, "-128" if scalar_of(a.ty) == "i8" else str(0x80808080 - (1 << 32))))

    def column_sum(self, c: Code, acc: Val, b: Val) -> Val:
        """`acc + sum of b's group`: what `corrected` needs of B. Only where `flip`."""
        return self.mac(c, acc, const(b.ty, str(0x01010101)), b)

    def corrected(self, c: Code, acc: Val, sums: Val) -> Val:
        """Undo `enter_a`: A entered 128 too high (signed) or 128 too low (unsigned), so the sum is off by 128 column sums."""
        off = c.binary("shl", sums, const(sums.ty, "7"))
        return c.binary("sub" if _BYTE_SIGNED[self.a] else "add", acc, off)

    def widen(self, c: Code, x: Val, dtype: str) -> Val:
        """A vector (or scalar) of storage elements of `dtype` as `packed` elements; exact."""
        if self.is_native(dtype):
            return x
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
        if a == b == "bfloat16" and acc == "float32" and isa.has("avx512bf16"):
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
    exponent, mantissa = {"float16": (5, 10), "float8_e5m2": (5, 2), "float8_e4m3fn": (4, 3)}[dtype]
    return _decode_float(c, x, exponent, mantissa, has_inf=dtype != "float8_e4m3fn")


def _decode_float(c: Code, x: Val, exponent: int, mantissa: int, has_inf: bool) -> Val:
    """Decode sign | exponent | mantissa by integer arithmetic; subnormals go through an exact integer conversion."""
    i32, f32 = like(x.ty, "i32"), like(x.ty, "float")
    bits = c.cast("zext", x, i32)
    width, bias = exponent + mantissa, (1 << (exponent - 1)) - 1

    def imm(n: int) -> Val:
        return const(i32, str(n))

    magnitude = c.binary("and", bits, imm((1 << width) - 1))
    sign = c.binary("shl", c.binary("and", bits, imm(1 << width)), imm(31 - width))
    shifted = c.binary("shl", magnitude, imm(23 - mantissa))
    normal = c.binary("add", shifted, imm((127 - bias) << 23))
    scale = const(f32, f"{2.0 ** (1 - bias - mantissa):.17e}")
    tiny = c.binary("fmul", c.cast("sitofp", magnitude, f32), scale)
    small = c.cmp("icmp", "ult", magnitude, imm(1 << mantissa))
    value = c.select(small, c.cast("bitcast", tiny, i32), normal)
    if has_inf:
        top = imm(((1 << exponent) - 1) << mantissa)
        special = c.binary("or", shifted, imm(0x7F800000))
        value = c.select(c.cmp("icmp", "uge", magnitude, top), special, value)
    else:
        nan = c.cmp("icmp", "eq", magnitude, imm((1 << width) - 1))
        value = c.select(nan, imm(0x7FC00000), value)
    return c.cast("bitcast", c.binary("or", value, sign), f32)
