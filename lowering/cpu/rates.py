"""How long one core multiplies matrices, by dtypes and instruction set: derived from what its instructions do in a
cycle, and from what was measured of the share of this that whole products reach."""

from __future__ import annotations

from jtile import ir

from . import bfloat_parts, digit_products, gemm_scaled, nibbles, scaled_tiles
from .convert import is_narrow, is_signed
from .gemm_modes import STORAGE, Mode, choose_mode
from .gemm_plan import make_plan
from .isa import Isa

CYCLES_PER_NS = 2.6  # with vectors of 512 bits under way; of server processors it is 2.5 to 3.5
# Instructions of a lane in a cycle in whole products, measured on a Sapphire Rapids. Cores have two multipliers, but
# may have one for pairs of bfloat16; without fused instructions, half of them add; 32-bit integers take two steps.
REACHED = {"fma": 1.7, "unfused": 0.85, "mul": 0.65, "bf16": 0.6, "madd": 1.3, "vnni": 1.3}
TILE_OPERATIONS = 2 * 16**3 / 16  # in a cycle, for each term of a unit: 16 x 16 sums of 16 units take 16 cycles
REACHED_BY_TILES = 0.35  # the rest of the time brings tiles from the caches; other guests of a machine slow this down
STREAMED_PER_NS = 20.0  # elements of an operand that few rows read once, or that is brought to another layout
DIGITS = 2  # of an int16 that is multiplied on tiles


def dot_ns(isa: Isa, op: ir.Dot) -> float:
    """Nanoseconds of a product on one core."""
    batch, m, n, k = op.sizes()
    if digit_products.digits(isa, op) is not None:  # three products of bytes, four terms of a unit each
        return 2.0 * m * n * k / (TILE_OPERATIONS * 4 / 3 * REACHED_BY_TILES * CYCLES_PER_NS)
    parts = bfloat_parts.spec_of(isa, op)
    if parts is not None:
        one = 2.0 * m * n * k * len(parts.pairs) / (TILE_OPERATIONS * 2 * REACHED_BY_TILES * CYCLES_PER_NS)
    else:
        one = _product_ns(isa, (op.a.dtype, op.b.dtype, op.result.dtype), (m, n, k), (op.trans_a, op.trans_b))
    for side in batch:
        one *= side
    return one


def scaled_ns(isa: Isa, op: ir.DotScaled) -> float:
    """Nanoseconds of a product with scales on one core: of integers, or of floats that the scales have been applied
    to."""
    (m, k), n = op.a.shape, op.b.shape[1]
    if not nibbles.in_integers(isa, op):
        return _product_ns(isa, ("float32",) * 3, (m, n, k), (False, False))
    if scaled_tiles.fits(isa) and m > gemm_scaled.FEW:
        rate = TILE_OPERATIONS * 2 / DIGITS * REACHED_BY_TILES
    else:
        rate = 2 * 2 * isa.lanes(32) * REACHED["madd"]
    return 2.0 * m * n * k / (rate * CYCLES_PER_NS)


def operations_per_ns(mode: Mode) -> float:
    """Multiplications and additions of one core in products of this mode, whose operands are in its caches."""
    if mode.tiles:
        return TILE_OPERATIONS * mode.group * REACHED_BY_TILES * CYCLES_PER_NS
    fused = mode.kind != "fma" or mode.isa.arch == "aarch64" or mode.isa.has("fma") or mode.isa.has("avx512f")
    return 2 * mode.lanes * mode.group * REACHED[mode.kind if fused else "unfused"] * CYCLES_PER_NS


def _product_ns(
    isa: Isa, dtypes: tuple[str, str, str], sizes: tuple[int, int, int], turned: tuple[bool, bool]
) -> float:
    if 0 in sizes:
        return 0.0
    m, n, k = sizes
    a, b = (_stored(dtype) for dtype in dtypes[:2])
    mode = choose_mode(isa, a, b, dtypes[2])
    plan = make_plan(mode, m, n, k, *turned)
    streamed = n * k / STREAMED_PER_NS
    multiplied = 2.0 * m * n * k / operations_per_ns(plan.mode)
    return multiplied + streamed if plan.strategy == "packed" else max(multiplied, streamed)


def _stored(dtype: str) -> str:
    """The dtype in which products take an operand: `emit_dot` widens what has no form of its own."""
    if is_narrow(dtype):
        return "int8" if is_signed(dtype) else "uint8"
    return dtype if dtype in STORAGE else "float32"
