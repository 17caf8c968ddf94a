"""Matrices of 4-bit codes that are unpacked from bytes for one product only, which takes the bytes themselves."""

from __future__ import annotations

from jtile import ir

from . import gemm_scaled
from .isa import Isa
from .plan import BlockPlan

HALF = 16  # bytes of a block; byte j has code j in its low bits, and code j + 16


def in_integers(isa: Isa, op: ir.DotScaled) -> bool:
    """Whether `gemm_scaled` computes this product: int16 rows times columns of bytes, with scales of blocks of 32."""
    k, sa, sb = op.a.shape[1], op.sa, op.sb
    if sa is None or sb is None or not gemm_scaled.fits(isa) or 0 in (*op.a.shape, op.b.shape[1]):
        return False
    if (op.a.dtype, sa.dtype) != ("int16", "float32") or op.b.dtype not in ("int8", "uint8"):
        return False
    blocks, groups, columns = sa.shape[1], sb.shape[0], isinstance(op.b.op, ir.Transpose)
    fit = blocks * gemm_scaled.BLOCK == k and blocks % groups == 0
    return fit and columns and isinstance(sb.op, ir.Transpose) and sb.dtype in ("float32", "float16", "bfloat16")


def stays_packed(isa: Isa, plan: BlockPlan, op: ir.Reshape) -> bool:
    """Whether all readers of this matrix are products that take its bytes, so that nobody has to unpack them."""
    ops = plan.block.ops
    readers = lambda v: [ops[k] if k < len(ops) else None for k in plan.uses.get(v, [])]
    turned = readers(op.result)
    if not turned or not all(isinstance(t, ir.Transpose) for t in turned) or packed_codes(op.result) is None:
        return False
    products = [(p, t) for t in turned for p in readers(t.result)]
    return all(isinstance(p, ir.DotScaled) and p.b is t.result and in_integers(isa, p) for p, t in products)


def packed_codes(v: ir.Value) -> ir.Value | None:
    """The bytes [n, k / 2] of a matrix [n, k] that is made as (bytes[..., None, :] >> 4 * (0, 1)) & 15 of blocks of 16
    bytes; None: the matrix is made otherwise."""
    whole = v.op
    if not isinstance(whole, ir.Reshape) or v.type.rank != 2 or v.dtype != "uint8":
        return None
    shape = whole.x.shape
    if shape[-2:] != (2, HALF) or shape[0] != v.shape[0]:
        return None
    shifted = _other(whole.x, "and", _is_full(15))
    wide = None if shifted is None else _other(shifted, "shr_logical", _is_shift)
    if wide is None or not isinstance(wide.op, ir.Broadcast):
        return None
    spread = wide.op
    if spread.dims != tuple(range(len(shape))) or spread.x.shape != (*shape[:-2], 1, HALF):
        return None
    source = spread.x
    while isinstance(source.op, ir.Reshape) and source.type.rank != 2:
        source = source.op.x
    return source if source.shape == (v.shape[0], v.shape[1] // 2) else None


def _other(v: ir.Value, fn: str, known) -> ir.Value | None:
    """The first operand of the function `fn`, if the second one is `known`."""
    is_it = isinstance(v.op, ir.Map) and v.op.fn == fn and known(v.op.args[1])
    return v.op.args[0] if is_it else None


def _is_full(value: int):
    """Whether a tile has this number everywhere."""

    def check(v: ir.Value) -> bool:
        op = v.op.x.op if isinstance(v.op, ir.Broadcast) else v.op
        return isinstance(op, ir.Full) and op.value == value

    return check


def _is_shift(v: ir.Value) -> bool:
    """Whether a tile [..., 2, 16] is 0 and 4 along its last axis but one."""
    place = _other(v, "mul", _is_full(4))
    return place is not None and isinstance(place.op, ir.Iota) and place.op.axis == len(v.shape) - 2
