"""Matrices of codes that are unpacked for one product only, which takes them as they are stored: bytes of two codes of
4 bits, or words of four bytes in panels of 16 rows."""

from __future__ import annotations

from jtile import ir

from . import gemm_scaled
from .isa import Isa
from .plan import BlockPlan

HALF = 16  # bytes of a block; byte j has code j in its low bits, and code j + 16
ROWS = 16  # of a panel, whose words stand as [words of a row, rows]


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
    """Whether all readers of this matrix are products that take it as it is stored, so that nobody has to unpack it."""
    ops = plan.block.ops
    readers = lambda v: [ops[k] if k < len(ops) else None for k in plan.uses.get(v, [])]
    turned = readers(op.result)
    if panel_numbers(op.result) is not None:
        return _meet_products(isa, readers, op.result)
    if not turned or not all(isinstance(t, ir.Transpose) for t in turned):
        return False
    if packed_codes(op.result) is None and panel_words(op.result) is None:
        return False
    products = [(p, t) for t in turned for p in readers(t.result)]
    return all(isinstance(p, ir.DotScaled) and p.b is t.result and in_integers(isa, p) for p, t in products)


def _meet_products(isa: Isa, readers, numbers: ir.Value) -> bool:
    """Whether all that reads these numbers are products of integers that they scale, or that are added to a product
    with them."""

    def known(reader: ir.Op | None, v: ir.Value) -> bool:
        if isinstance(reader, ir.Cast | ir.Transpose):
            return all(known(r, reader.result) for r in readers(reader.result))
        if isinstance(reader, ir.DotScaled):
            return reader.sb is v and in_integers(isa, reader)
        acc = reader.acc if isinstance(reader, ir.Dot) and reader.b is v else None
        return acc is not None and isinstance(acc.op, ir.DotScaled) and in_integers(isa, acc.op)

    return all(known(reader, numbers) for reader in readers(numbers))


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


def panel_numbers(v: ir.Value) -> ir.Value | None:
    """The numbers [n, g] of panels [g, 16] as they are stored, of a matrix [n, g] that has them in rows; None: the
    matrix is made otherwise."""
    turned = v.op.x.op if isinstance(v.op, ir.Reshape) and v.type.rank == 2 else None
    if not isinstance(turned, ir.Transpose) or turned.perm != (0, 2, 1) or not isinstance(turned.x.op, ir.Reshape):
        return None
    n, g = v.shape
    source = turned.x.op.x
    return source if turned.x.shape == (n // ROWS, g, ROWS) and source.shape == v.shape and n % ROWS == 0 else None


def panel_words(v: ir.Value) -> ir.Value | None:
    """The words int32 [n, w] of a matrix [n, k] in panels; None: the matrix is made otherwise.

    A panel [w, 16] becomes bytes [w, 16, 4], or codes [blocks, 2, 4, 16, 4] of 4 bits: the word >> 8 * (0, 1, 2, 3),
    and of 4 bits (the word >> 4 * (0, 1) + 8 * (0, 1, 2, 3)) & 15. The axis of the 16 rows then comes to the front.
    """
    whole = v.op
    if not isinstance(whole, ir.Reshape) or v.type.rank != 2 or not isinstance(whole.x.op, ir.Transpose):
        return None
    turned, four = whole.x.op, v.dtype == "uint8"
    if turned.perm != ((0, 4, 1, 2, 3, 5) if four else (0, 2, 1, 3)) or not isinstance(turned.x.op, ir.Cast):
        return None
    numbers = turned.x.op.x
    fields = _other(numbers, "and", _is_full(15)) if four else numbers
    wide = None if fields is None else _other(fields, "shr", _is_place)
    if wide is None or wide.dtype != "int32" or not isinstance(wide.op, ir.Broadcast):
        return None
    spread = wide.op
    if spread.dims != tuple(range(len(spread.shape))) or not isinstance(spread.x.op, ir.Reshape):
        return None
    (n, k), source = v.shape, spread.x.op.x
    words = k // (8 if four else 4)
    panels = (n // ROWS, words // 4, 1, 4, ROWS, 1) if four else (n // ROWS, words, ROWS, 1)
    return source if source.shape == (n, words) and n % ROWS == 0 and spread.x.shape == panels else None


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
    return _counts(v, len(v.shape) - 2, 4)


def _is_place(v: ir.Value) -> bool:
    """Whether a tile [..., 4] is 8 * (0, 1, 2, 3) along its last axis; of rank 6, with 4 * (0, 1) along its third one
    added to that."""
    if len(v.shape) != 6:
        return _counts(v, len(v.shape) - 1, 8)
    both = isinstance(v.op, ir.Map) and v.op.fn == "add"
    return both and _counts(v.op.args[0], 2, 4) and _counts(v.op.args[1], 5, 8)


def _counts(v: ir.Value, axis: int, step: int) -> bool:
    """Whether a tile is 0, step, 2 * step along an axis."""
    place = _other(v, "mul", _is_full(step))
    return place is not None and isinstance(place.op, ir.Iota) and place.op.axis == axis
