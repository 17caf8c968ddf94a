"""Arrays of elements of 2 and 4 bits, four or two a byte, the first in the low bits.

Where a tile of 4-bit elements starts at an even one, whole bytes are loaded once and split, and stored without a race.
Elsewhere each lane reads its own byte, and stores change their bits of a 32-bit word in two atomic steps, since another
program may own the other bits.
"""

from __future__ import annotations

import dataclasses

from jtile import ir
from jtile.passes.intervals import Interval

from .addresses import Line, Places, offsets, pointers, resolve
from .emitter import Buffer, Emitter, padded
from .ttir import Val, spell


def load_packed(em: Emitter, buf: Buffer, found: list[Line], op: ir.Load, pad: int) -> Val:
    """The tile of a load, one element an i8."""
    code, shape = em.code, ir.index_shape(op.index)
    places = resolve(em, buf, found, shape, op.checked)
    mask = code.both(places.mask, em.mask(op))
    half = _halves(op.index, found, buf)
    if half is None:
        at = offsets(em, places)
        power = _power(buf.dtype, 8)
        raw = _read(em, buf, code.op("arith.shrui", at, code.const(power, at.elem, at.shape)), mask)
        which = code.op("arith.andi", at, code.const((1 << power) - 1, at.elem, at.shape))
        shift = code.to_int(code.op("arith.shli", which, code.const(3 - power, at.elem, at.shape)), "i8")
        v = _extended(em, code.op("arith.shrui", raw, shift), buf.dtype)
    else:
        bytes_shape = (*shape[:-1], half.size)
        inside = resolve(em, _bytes(buf), _halved(em, found, half), bytes_shape, op.checked)
        v = _split(em, _load_bytes(em, pointers(em, buf.pointer, inside), inside.mask), buf.dtype, padded(shape))
    if mask is None or (not op.checked and op.mask is None):
        return v  # lanes beyond the tile may hold anything
    out = code.select(mask, v, code.const(pad, "i8", v.shape))
    return dataclasses.replace(out, fill=pad)


def store_packed(em: Emitter, buf: Buffer, found: list[Line], op: ir.Store, extra: Val | None) -> None:
    """Store a tile of elements, one an i8; `extra`: a further mask."""
    code, shape = em.code, ir.index_shape(op.index)
    value = em.val(op.value)
    value = code.op("arith.andi", value, code.const((1 << ir.DTYPES[buf.dtype].bits) - 1, "i8", value.shape))
    half = _halves(op.index, found, buf)
    if half is None or shape[-1] % 2 or op.mask is not None or extra is not None:
        _store_bits(em, buf, resolve(em, buf, found, shape, op.checked), op, value, extra)
        return
    full = value.shape
    pairs = code.reshape(value, (*full[:-1], full[-1] // 2, 2))
    kind = spell(pairs.shape[:-1], "i8")
    low, high = code.let_many(f"tt.split {pairs.name} : {pairs.type} -> {kind}", [(pairs.shape[:-1], "i8")] * 2)
    whole = code.op("arith.ori", low, code.op("arith.shli", high, code.const(4, "i8", high.shape)))
    places = resolve(em, _bytes(buf), _halved(em, found, half), (*shape[:-1], half.size), op.checked)
    where = [pointers(em, buf.pointer, places), whole] + ([] if places.mask is None else [places.mask])
    code.do(f"tt.store {', '.join(v.name for v in where)} : {where[0].type}")


def _read(em: Emitter, buf: Buffer, at: Val, mask: Val | None) -> Val:
    """The bytes of an array at the positions `at`."""
    code = em.code
    base = code.splat(buf.pointer, at.shape)
    where = code.let(f"tt.addptr {base.name}, {at.name} : {base.type}, {at.type}", at.shape, base.elem)
    return _load_bytes(em, where, mask)


def _load_bytes(em: Emitter, where: Val, mask: Val | None) -> Val:
    code = em.code
    if mask is None:
        return code.let(f"tt.load {where.name} : {where.type}", where.shape, "i8")
    other = code.const(0, "i8", where.shape)
    return code.let(f"tt.load {where.name}, {mask.name}, {other.name} : {where.type}", where.shape, "i8")


def _extended(em: Emitter, v: Val, dtype: str) -> Val:
    """The low bits of an i8 as registers hold an element."""
    code, info = em.code, ir.DTYPES[dtype]
    if info.kind != "i":
        return code.op("arith.andi", v, code.const((1 << info.bits) - 1, "i8", v.shape))
    rest = code.const(8 - info.bits, "i8", v.shape)
    return code.op("arith.shrsi", code.op("arith.shli", v, rest), rest)


def _power(dtype: str, bits: int) -> int:
    """The binary logarithm of the number of elements in a word of so many bits."""
    return (bits // ir.DTYPES[dtype].bits).bit_length() - 1


def _split(em: Emitter, raw: Val, dtype: str, full: tuple[int, ...]) -> Val:
    """Two elements of each byte, side by side along the last axis."""
    code = em.code
    low = _extended(em, raw, dtype)
    high = code.op("arith.shrsi" if dtype == "int4" else "arith.shrui", raw, code.const(4, "i8", raw.shape))
    pair = (*raw.shape, 2)
    both = code.let(f"tt.join {low.name}, {high.name} : {low.type} -> {spell(pair, 'i8')}", pair, "i8")
    return code.reshape(both, full)


# -- whole bytes ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Half:
    """The last dimension of an access, counted in bytes: their number, and how a start in elements is converted."""

    size: int
    scale: int
    shifted: bool


def _halves(index: ir.Index, found: list[Line], buf: Buffer) -> _Half | None:
    """The last dimension in bytes, where all of its tiles start at an even element and its rows are whole bytes."""
    if not found or ir.DTYPES[buf.dtype].bits != 4:
        return None
    line, d = found[-1], index[-1]
    even_rows = isinstance(line.side, int) and line.side % 2 == 0
    last = line.axis == len(ir.index_shape(index)) - 1 and line.size is not None and line.step == 1
    if not even_rows or not last or line.size < 2 or not all(isinstance(s, int) for s in buf.strides):
        return None
    size = -(-line.size // 2)
    if line.scale % 2 == 0 and isinstance(d, ir.Tile):
        return _Half(size, line.scale // 2, False)
    return _Half(size, line.scale, True) if _is_even(ir.dim_value(d)) else None


def _is_even(v: ir.Value, depth: int = 8) -> bool:
    """Whether a number is even, by how it was computed."""
    op = v.op
    if isinstance(op, ir.Full):
        return int(op.value) % 2 == 0
    if depth and isinstance(op, ir.Map) and op.fn == "mul":
        return any(_is_even(x, depth - 1) for x in op.args)
    if depth and isinstance(op, ir.Map) and op.fn in ("add", "sub"):
        return all(_is_even(x, depth - 1) for x in op.args)
    if depth and isinstance(op, ir.Cast) and ir.DTYPES[op.x.dtype].kind in "iu":
        return _is_even(op.x, depth - 1)
    return False


def _bytes(buf: Buffer) -> Buffer:
    """A packed array as an array of bytes."""
    strides = tuple(s // 2 for s in buf.strides[:-1])  # type: ignore[operator]
    return dataclasses.replace(buf, shape=(*buf.shape[:-1], buf.shape[-1] // 2), strides=(*strides, 1), dtype="uint8")  # type: ignore[operator]


def _halved(em: Emitter, found: list[Line], half: _Half) -> list[Line]:
    """The dimensions of an access to the array of bytes."""
    last = found[-1]
    first, known = last.first, last.known
    if half.shifted:
        first = em.code.op("arith.shrsi" if last.signed else "arith.shrui", first, em.code.const(1, first.elem))
        known = None if known is None else Interval(known.lo >> 1, known.hi >> 1)
    rows = [dataclasses.replace(line, stride=line.stride // 2) for line in found[:-1]]  # type: ignore[operator]
    side = last.side // 2  # type: ignore[operator]
    return [*rows, dataclasses.replace(last, first=first, known=known, side=side, size=half.size, scale=half.scale)]


# -- single elements --------------------------------------------------------------------------------------------------


def _store_bits(em: Emitter, buf: Buffer, places: Places, op: ir.Store, value: Val, extra: Val | None) -> None:
    """Change the bits of one element of a 32-bit word each, in two atomic steps: clear, set."""
    if em.features.npu:
        em.refuse(
            op, "no stores of elements of less than a byte but in whole bytes: an even number, from an even one on"
        )
    code = em.code
    at = offsets(em, places)
    mask = code.both(code.both(places.mask, em.mask(op)), extra)
    mask = code.const(True, "i1", at.shape) if mask is None else mask
    base = code.splat(code.bitcast(buf.pointer, "!tt.ptr<i32>"), at.shape)
    power = _power(buf.dtype, 32)
    word = code.op("arith.shrui", at, code.const(power, at.elem, at.shape))
    where = code.let(f"tt.addptr {base.name}, {word.name} : {base.type}, {word.type}", at.shape, base.elem)
    place = code.to_int(code.op("arith.andi", at, code.const((1 << power) - 1, at.elem, at.shape)), "i32")
    shift = code.op("arith.shli", place, code.const(5 - power, "i32", at.shape))
    clear = code.op("arith.shli", code.const((1 << ir.DTYPES[buf.dtype].bits) - 1, "i32", at.shape), shift)
    keep = code.op("arith.xori", clear, code.const(-1, "i32", at.shape))
    bits = code.op("arith.shli", code.to_int(value, "i32", signed=False), shift)
    for fn, v in (("and", keep), ("or", bits)):
        operands = f"{where.name}, {v.name}, {mask.name}"
        kinds = f"({where.type}, {v.type}, {mask.type}) -> {v.type}"
        code.let(f"tt.atomic_rmw {fn}, relaxed, {buf.scope}, {operands} : {kinds}", at.shape, "i32")
