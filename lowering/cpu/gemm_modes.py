"""The arithmetic of a matmul kernel: which instruction multiplies and adds, and how operands reach its form.

A `Mode` consumes `group` consecutive k elements per lane and step. One group is a *unit*: 32 bits for the grouped
instructions (two bfloat16, two int16 or four bytes), one accumulator-sized number otherwise.
"""

from __future__ import annotations

import dataclasses
import struct

from .convert import SMALL_FLOATS, from_memory
from .isa import Isa
from .llvm import Code, Val, const, lanes_of, like, scalar_of, vec
from .math_expr import X

STORAGE = {
    **{dtype: f"i{fmt.storage}" for dtype, fmt in SMALL_FLOATS.items()},
    **{f"{u}int{n}": f"i{n}" for u in ("", "u") for n in (8, 16, 32, 64)},
    "float32": "float", "float64": "double", "bool": "i8",
}  # fmt: skip
ACCUMULATORS = {"float32": "float", "float64": "double", "int32": "i32", "int64": "i64"}
BYTES = {"i8": 1, "i16": 2, "i32": 4, "i64": 8, "float": 4, "double": 8}
_BYTE_SIGNED = {"int8": True, "uint8": False, "bool": False}
_IN_BFLOAT = {"bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"}  # bfloat16 holds every value exactly


@dataclasses.dataclass(frozen=True)
class Mode:
    """How one product is computed on one instruction set.

    Attributes:
      kind: `"fma"` (float, one k a step), `"mul"` (integer, one k), `"bf16"` (dpbf16ps, two k; takes bfloat16
        subnormals for zero), `"madd"` (pmaddwd, two k), `"vnni"` (vpdpbusd, four k).
      a, b: jtile dtypes of the operands; `acc`: LLVM type of the accumulator lane.
      packed: LLVM type of one element inside a unit.
      tiles: the sums are made in tile registers (`gemm_tiles`), which take the same units.
    """

    isa: Isa
    kind: str
    a: str
    b: str
    acc: str
    group: int
    packed: str
    tiles: bool = False

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
        return f"{self.kind}_{self.a}_{self.b}_{self.acc}" + "_tiles" * self.tiles

    @property
    def flip(self) -> bool:
        """Whether A's sign bits are flipped: vpdpbusd wants a signed and an unsigned side, and here both are alike."""
        return self.kind == "vnni" and not self.tiles and _BYTE_SIGNED[self.a] == _BYTE_SIGNED[self.b]

    @property
    def has_tiles(self) -> bool:
        """Whether the instruction set has tile registers that multiply such units."""
        return self.isa.has("amx-tile", {"bf16": "amx-bf16", "vnni": "amx-int8"}.get(self.kind, "amx"))

    @property
    def tile_product(self) -> str:
        """The instruction that multiplies tiles."""
        if self.kind == "bf16":
            return "tdpbf16ps"
        return "tdpb" + "".join("s" if _BYTE_SIGNED[dtype] else "u" for dtype in (self.a, self.b)) + "d"

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
        """`acc + sum of b's group`, the column sums of B that `corrected` needs. Only for modes that `flip` signs."""
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
            return c.cast("fpext", from_memory(c, self.isa, x, dtype), like(x.ty, self.packed))
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


def _to_bfloat(c: Code, isa: Isa, x: Val, dtype: str) -> Val:
    """A float of at most 8 bits as the bits of an equal bfloat16; the least magnitudes come from a table."""
    n, fmt = lanes_of(x.ty), SMALL_FLOATS[dtype]
    if n not in (8, 16, 32):
        bits = X(c, isa, c.cast("bitcast", from_memory(c, isa, x, dtype), like(x.ty, "i32")))
        return bits.lshr(16).cast("trunc", "i16").v
    u = X(c, isa, x).cast("zext", "i16")
    magnitude = u & ((1 << fmt.sign_bit) - 1)
    least = [_bfloat_bits(i, fmt.mantissa, fmt.bias) for i in range(8)] * (n // 8)
    table = Val(u.ty, "<" + ", ".join(f"i16 {bits}" for bits in least) + ">")
    y = u.new(c.intrinsic("x86.avx512.permvar.hi", u.ty, table, magnitude.v, suffix=str(16 * n)))
    if fmt.sign_bit > 3:
        shifted = magnitude << (7 - fmt.mantissa)
        y = magnitude.cmp("ugt", 7).where(shifted + ((127 - fmt.bias) << 7), y)
        if fmt.overflow == float("inf"):
            y = magnitude.cmp("uge", (2 * fmt.bias + 1) << fmt.mantissa).where(shifted | 0x7F80, y)
        else:
            y = magnitude.eq((1 << fmt.sign_bit) - 1).where(0x7FC0, y)
    return (y | (u & (1 << fmt.sign_bit)) << (15 - fmt.sign_bit)).v


def _bfloat_bits(i: int, mantissa: int, bias: int) -> int:
    """Bits of the bfloat16 that equals the magnitude of exponent and mantissa field i."""
    exponent, fraction = max(i >> mantissa, 1), i & ((1 << mantissa) - 1)
    if i >> mantissa:
        fraction += 1 << mantissa
    value = fraction * 2.0 ** (exponent - bias - mantissa)
    return struct.unpack("<I", struct.pack("<f", value))[0] >> 16
