"""Pages: how weights come to the tasks of a graph through shared memory, ahead of the bands that read them.

A block of a graph has a ring of pages in shared memory, which belongs to no task: the loads of all its bands, one after
another, are one list of copies, written into the plan before the launch. One thread starts as many copies as the ring
has room for, and goes on whenever a tile has been read out of it. So what a band reads comes while the block waits for
others, and while it runs other tasks. What comes this way: tiles of whole rows of arrays that no task in front writes,
read where the number of rounds is known.

The pages are at the end of the block's shared memory, behind what triton takes:

    0     i64 barriers  of the copies in flight: copy c has barrier c % BARRIERS
    128   i32 counts    for each thread the copies that its block has read so far
    4224  rows          a copy each: i64 address, i32 bytes and place, i32 copies to start when so many have been read
    ..    ring          pages of 128 bytes
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jtile import ir
from jtile.ir.types import DTYPES
from jtile.passes.affine import Affine, Forms

from . import versions
from .ttir import Val

if TYPE_CHECKING:
    from .emitter import Emitter

PAGE = 128  # bytes
BARRIERS = 16
COUNTS = 8 * BARRIERS  # bytes in front of the counts
TABLE = COUNTS + 4 * 1024  # in front of the rows of copies
ROW = 4  # int32 words of a row
SIZES = 20  # bits of the bytes of a copy; above them its place, in pages
LEAST = 4 << 10  # bytes of a tile that comes in pages, at least: smaller ones wait in registers
RING = 144 << 10  # bytes of the ring; a tile takes half of it at most
ROWS = 1024  # of which the rows of a table are a multiple
COPIES = 2048  # of a block, at most: a row takes 16 bytes of shared memory

# The first byte of the pages: $1 are the bytes of all.
HERE = (
    "{ .reg .b32 %jx, %jy; mov.u32 %jy, jtile_pages; mov.u32 %jx, %dynamic_smem_size; add.u32 %jy, %jy, %jx; "
    "sub.u32 %jy, %jy, $1; cvt.u64.u32 $0, %jy; }"
)
_BEGIN = """
{ .reg .pred %jp; .reg .b32 %jx, %jk, %jz; cvt.u32.u64 %jz, $1; mov.u32 %jx, %tid.x; shl.b32 %jk, %jx, 2;
add.u32 %jk, %jk, %jz; st.shared.b32 [%jk+128], 0; setp.eq.u32 %jp, %jx, 0; INITS
@%jp fence.mbarrier_init.release.cluster; @%jp fence.proxy.async; mov.b32 $0, 0; }
"""
_INITS = " ".join(f"@%jp mbarrier.init.shared::cta.b64 [%jz+{8 * k}], 1;" for k in range(BARRIERS))
BEGIN = " ".join(_BEGIN.replace("INITS", _INITS).split())
PUT = "st.shared.b64 [$1], $2; st.shared.v2.b32 [$1+8], {$3, $4}; mov.b32 $0, 0;"
# Waits for the next copy; gives how many bytes it is from the first of the pages.
_AWAIT = f"""
{{ .reg .pred %jp; .reg .b32 %jc, %jb, %jk, %jz; cvt.u32.u64 %jz, $1; mov.u32 %jc, %tid.x; shl.b32 %jc, %jc, 2;
add.u32 %jc, %jc, %jz; ld.shared.b32 %jc, [%jc+{COUNTS}]; and.b32 %jb, %jc, {BARRIERS - 1}; shl.b32 %jb, %jb, 3;
add.u32 %jb, %jb, %jz; shr.u32 %jk, %jc, {BARRIERS.bit_length() - 1}; and.b32 %jk, %jk, 1;
JT_TRY: mbarrier.try_wait.parity.shared::cta.b64 %jp, [%jb], %jk; @!%jp bra JT_TRY;
shl.b32 %jb, %jc, 4; add.u32 %jb, %jb, %jz; ld.shared.b32 %jb, [%jb+{TABLE + 8}]; shr.u32 %jb, %jb, {SIZES};
shl.b32 $0, %jb, {PAGE.bit_length() - 1}; }}
"""
AWAIT = " ".join(_AWAIT.split())
# Counts $2 more copies as read, and starts those whose pages are free by now. All threads of the block have read.
_START = f"""
{{ .reg .pred %jp; .reg .b32 %jx, %jc, %jd, %jf, %ju, %jb, %js, %jz; .reg .b64 %ja; cvt.u32.u64 %jz, $1;
mov.u32 %jx, %tid.x; shl.b32 %jd, %jx, 2; add.u32 %jd, %jd, %jz; ld.shared.b32 %jc, [%jd+{COUNTS}];
add.u32 %jc, %jc, $2; st.shared.b32 [%jd+{COUNTS}], %jc; setp.ne.u32 %jp, %jx, 0; @%jp bra JT_END;
shl.b32 %jd, %jc, 4; add.u32 %jd, %jd, %jz; ld.shared.b32 %ju, [%jd+{TABLE + 12}];
and.b32 %jf, %ju, 65535; shr.u32 %ju, %ju, 16;
JT_NEXT: setp.ge.u32 %jp, %jf, %ju; @%jp bra JT_END;
shl.b32 %jd, %jf, 4; add.u32 %jd, %jd, %jz; ld.shared.b64 %ja, [%jd+{TABLE}]; ld.shared.b32 %js, [%jd+{TABLE + 8}];
shr.u32 %jd, %js, {SIZES}; shl.b32 %jd, %jd, {PAGE.bit_length() - 1}; add.u32 %jd, %jd, %jz;
and.b32 %js, %js, {(1 << SIZES) - 1}; and.b32 %jb, %jf, {BARRIERS - 1}; shl.b32 %jb, %jb, 3; add.u32 %jb, %jb, %jz;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%jb], %js; setp.ne.u32 %jp, %js, 0;
@%jp cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%jd], [%ja], %js, [%jb];
add.u32 %jf, %jf, 1; bra JT_NEXT;
JT_END: mov.b32 $0, 0; }}
"""
START = " ".join(_START.split())
# Loads with this modifier are of the pages: `ptx.py` makes loads from shared memory of them.
MODIFIER = "cg"


@dataclasses.dataclass(frozen=True)
class Pages:
    """The shared memory of a launch that pages take: a ring behind a table.

    Attributes:
      copies: rows of the table, a block's copies and one row more.
      ring: bytes of the ring.
    """

    copies: int
    ring: int = RING

    @property
    def first(self) -> int:
        """Bytes in front of the ring."""
        return -(-(TABLE + 4 * ROW * self.copies) // PAGE) * PAGE

    @property
    def bytes(self) -> int:
        return self.first + self.ring


# -- which loads come in pages ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Paged:
    """A load that comes in pages.

    Attributes:
      input: the number of its Ref among the kernel's inputs.
      starts: where its tile begins along each axis of the array.
      rows: (axis, number) of the rows of the tile.
      row: elements of a row.
    """

    op: ir.Load
    input: int
    starts: tuple[Affine, ...]
    rows: tuple[int, int]
    row: int

    @property
    def itemsize(self) -> int:
        return DTYPES[self.op.ref.dtype].bits // 8

    @property
    def span(self) -> int:
        """Bytes from the first to the last lane, those beyond the tile's own with them."""
        up = lambda n: 1 << max(n - 1, 0).bit_length()
        return ((up(self.rows[1]) - 1) * self.row + up(self.row)) * self.itemsize


@dataclasses.dataclass(frozen=True)
class Round:
    """A loop in which tiles come in pages: its index, the numbers that it takes, and what it does."""

    index: ir.Value
    numbers: range
    body: tuple[Paged | Round, ...]


def paged(kernel: ir.Kernel, fixed: Sequence[int]) -> tuple[Paged | Round, ...]:
    """The loads of a kernel, behind the passes, that come in pages, in their order.

    Args:
      fixed: the inputs that no band in front of its bands writes.
    """
    refs = {kernel.inputs[k]: k for k in fixed}
    return _of_block(kernel.body, Forms(kernel), refs) if refs else ()


def loads(found: Sequence[Paged | Round]) -> Iterator[Paged]:
    for part in found:
        if isinstance(part, Paged):
            yield part
        else:
            yield from loads(part.body)


def _of_block(block: ir.Block, forms: Forms, refs: dict[ir.Value, int]) -> tuple[Paged | Round, ...]:
    out: list[Paged | Round] = []
    for op in block.ops:
        if isinstance(op, ir.For) and forms.static(op):
            if body := _of_block(op.body, forms, refs):
                first, step, count = forms.steps(op.body.params[0])
                out.append(Round(op.body.params[0], range(first, first + step * count, step), body))
        elif isinstance(op, ir.Load) and op.ref in refs and (found := _load(op, forms, refs[op.ref])):
            out.append(found)
    return tuple(out)


def _load(op: ir.Load, forms: Forms, number: int) -> Paged | None:
    """A load as one that comes in pages; None: it is not of whole rows, or not of a size that is worth it."""
    shape, size = op.ref.shape, DTYPES[op.ref.dtype].bits // 8
    if op.mask is not None or DTYPES[op.ref.dtype].bits not in (16, 32) or DTYPES[op.ref.dtype].kind not in "fiu":
        return None
    starts: list[Affine] = []
    sides: list[int] = []
    for d in op.index:
        known, start = forms.known(ir.dim_value(d)), None if isinstance(d, ir.Take) else forms.start(d)
        if start is None or known is None or known.lo < 0 or (isinstance(d, ir.Span) and d.stride != 1):
            return None
        if not all(isinstance(v, int) or v in forms.loops for v, _ in start.terms):
            return None
        starts.append(start)
        sides.append(1 if isinstance(d, ir.At) else d.size)
    axis = len(shape)
    while axis > 0 and sides[axis - 1] == shape[axis - 1] and starts[axis - 1] == Affine(0):
        axis -= 1
    axis = max(axis - 1, 0)
    row = math.prod(shape[axis + 1 :])
    whole = len(ir.index_shape(op.index)) == 2 and axis == len(shape) - 2
    if not whole or any(n != 1 for n in sides[:axis]) or row * size % 16 or sides[axis] * row * size < LEAST:
        return None
    found = Paged(op, number, tuple(starts), (axis, sides[axis]), row)
    return found if found.span <= RING // 2 else None


def copies(kernel: ir.Kernel, found: Sequence[Paged | Round], program: int) -> list[tuple[Paged, int, int]]:
    """(load, first element, elements) of the copies of a program, in their order."""
    place = dict(enumerate(map(int, np.unravel_index(program, tuple(kernel.grid))))) if kernel.grid else {}
    return list(_copies(found, place))


def _copies(found: Sequence[Paged | Round], place: dict) -> Iterator[tuple[Paged, int, int]]:
    for part in found:
        if isinstance(part, Round):
            for n in part.numbers:
                yield from _copies(part.body, place | {part.index: n})
            continue
        shape, (axis, rows) = part.op.ref.shape, part.rows
        starts = [a.const + sum(c * place[v] for v, c in a.terms) for a in part.starts]
        inside = all(s < n for s, n in zip(starts, shape, strict=True))
        kept = min(rows, shape[axis] - starts[axis]) if inside else 0
        first = functools.reduce(lambda at, pair: at * pair[1] + pair[0], zip(starts, shape, strict=True), 0)
        yield part, first if kept else 0, kept * part.row


# -- emission ---------------------------------------------------------------------------------------------------------


def load(em: Emitter, found: Paged, base: Val, arrays: Val) -> Val:
    """The tile of a load out of the pages.

    Args:
      base: the address of the first byte of all pages.
      arrays: a pointer to bytes, a multiple of 16.
    """
    from .emitter import elem_of, memory_elem, padded

    code, dtype = em.code, found.op.ref.dtype
    at = act(em, AWAIT, "=r,l,~{memory}", (base,))
    start = code.cast("tt.ptr_to_int", arrays, "i64")
    far = code.op("arith.divsi", code.sub(base, start), code.const(16, "i64"))
    at = code.op("arith.divsi", at, code.i32(16))
    far = code.scale(code.add(far, code.to_int(at, "i64")), 16)  # so that its factor is seen
    pointer = code.let(f"tt.addptr {arrays.name}, {far.name} : {arrays.elem}, i64", (), arrays.elem)
    pointer = code.bitcast(pointer, f"!tt.ptr<{memory_elem(dtype)}>")
    full = padded((found.rows[1], found.row))
    inner = min(full[1], 512 // found.itemsize)  # what a warp reads at once: other warps read other rows
    sides = [(full[0], found.row), (full[1] // inner, inner)]
    turned = not versions.spreads_first_axis()  # so that a warp has rows of its own, and sums of rows stay in it
    shape = (*(n for n, _ in (sides[::-1] if turned else sides)), inner)
    where = code.splat(pointer, shape)
    for axis, pitch in enumerate((*(p for _, p in (sides[::-1] if turned else sides)), 1)):
        if shape[axis] > 1:
            lanes = code.along(code.scale(code.arange(shape[axis]), pitch), axis, shape)
            where = code.let(f"tt.addptr {where.name}, {lanes.name} : {where.type}, {lanes.type}", shape, pointer.elem)
    v = code.let(f"tt.load {where.name}{versions.modifier(MODIFIER)} : {where.type}", shape, elem_of(dtype))
    em.barrier()
    act(em, START, "=r,l,r,~{memory}", (base, code.i32(1)))
    return code.reshape(code.transpose(v, (1, 0, 2)) if turned else v, full)


def put(em: Emitter, base: Val, rows: Val, words: Sequence[Val]) -> None:
    """Write rows of the table: (address, bytes and place, copies to start) of each."""
    code = em.code
    far = code.to_int(code.scale(rows, 4 * ROW), "i64")
    at = code.shift(code.add(far, code.splat(base, rows.shape)), TABLE)
    text = f'"{PUT}" {{constraints = "=r,l,l,r,r,~{{memory}}", packed_element = 1 : i32, pure = false}}'
    args = (at, *words)
    kinds = f"{', '.join(a.name for a in args)} : {', '.join(a.type for a in args)}"
    code.let(f"tt.elementwise_inline_asm {text} {kinds} -> {rows.type}", rows.shape, "i32")


def act(em: Emitter, text: str, constraints: str, args: Sequence[Val], elem: str = "i32") -> Val:
    """An instruction with effects."""
    kinds = f"{', '.join(a.name for a in args)} : {', '.join(a.elem for a in args)}"
    attributes = f'constraints = "{constraints}", packed_element = 1 : i32, pure = false'
    return em.code.let(f'tt.elementwise_inline_asm "{text}" {{{attributes}}} {kinds} -> {elem}', (), elem)
