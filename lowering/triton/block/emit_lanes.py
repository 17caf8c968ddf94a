"""Products of codes by instructions of one warp, whose operands stand in registers; see `lanes`."""

from __future__ import annotations

import contextlib
import struct

from jtile import ir

from ..ttir import Val
from . import lanes
from .emit_moves import _as, _halves, _reshape, _transpose
from .emitter import BlockEmitter, emits
from .layouts import Sliced

_COUNT = 8  # registers of a thread in a tile of words: four words of each of its two quads


@emits(ir.DotQuads)
def _dot_quads(em: BlockEmitter, op: ir.DotQuads) -> Val:
    if not lanes.fits(op, em.warps):
        em.refuse(op, f"products of quads of lanes in a role of {lanes.WARPS} warps, got one of {em.warps}")
    code, home = em.code, lanes.words()
    terms = [em.tile(a, home) for a in (op.first, op.second)]
    factors = [_for_rows(em, _masked(em, op, n)) for n in range(len(op.factors))]
    given = [*terms, *factors]
    constraints = ",".join(["=f"] * _COUNT + ["r"] * _COUNT * len(given))
    names, types = (", ".join(getattr(v, what) for v in given) for what in ("name", "type"))
    with code.within({3: home}):
        asm = _asm(_instructions(op.kind), constraints, pure=False)
        out = code.spell(lanes.WORDS_OF, "f32")
        made = code.let(f"{asm} {names} : {types} -> {out}", lanes.WORDS_OF, "f32")
    return _of_rows(em, _as(made, made.shape, home, made.name))


def _asm(text: str, constraints: str, *, pure: bool) -> str:
    options = f'constraints = "{constraints}", packed_element = {_COUNT} : i32, pure = {str(pure).lower()}'
    return f'tt.elementwise_inline_asm "{text}" {{{options}}}'


# -- the instructions -------------------------------------------------------------------------------------------------

_SHAPES = {
    "int4": "m16n8k32.row.col.s32.s8.s8.s32",
    "uint4": "m16n8k32.row.col.s32.u8.s8.s32",
    "int8": "m16n8k32.row.col.s32.s8.s8.s32",
    "float8_e4m3fn": "m16n8k16.row.col.f32.f16.f16.f32",
}
_LARGE, _LARGE_BITS = 1.5 * 2**23, 0x4B400000  # a float whose last bit says 1, and its bits: a sum begins with them
_OFFSET = 0x6A  # the table of (a & b) ^ c


def _instructions(kind: str) -> str:
    """The instructions for a thread's words. Sums of integers begin with the bits of a large float, so that they are
    floats when it is taken off; codes of 4 bits less 8 are multiplied as the upper 4 of 8 bits, 16 times as large."""
    floats = kind == "float8_e4m3fn"
    of = "f32" if floats else "b32"
    text = f"{{ .reg .{of} c<4>, d<4>, z, s; .reg .b32 a<4>, t; .reg .b16 h<2>; "
    text += "mov.f32 z, 0f00000000; mov.f32 s, z; " if floats else f"mov.b32 z, 0; mov.b32 s, {_LARGE_BITS}; "
    own = {"c": "{s, s, s, s}", "d": "{z, z, z, z}"}
    for k in range(_COUNT):
        first, second, factor = (f"${n * _COUNT + k}" for n in (1, 2, 3))
        sums = "cd"[k // 4]
        if kind == "int8":
            if k % 2 == 0:
                after = [f"${n * _COUNT + k + 1}" for n in (1, 2, 3)]
                for n, word in enumerate((first, second, *after[:2])):
                    text += f"xor.b32 a{n}, {word}, 0x80808080; "
                text += _product(kind, sums, (factor, after[2]), own)
            continue
        text += "".join(_UNPACKED[kind].format(word=word, low=n, up=n + 2) for n, word in enumerate((first, second)))
        text += _product(kind, sums, (factor, f"${4 * _COUNT + k}"), own)
    for k in range(4):
        if floats:
            text += f"add.f32 ${k}, c{k}, d{k}; "
        else:
            unit = 1 / 16 if kind == "int4" else 1.0
            text += f"add.s32 c{k}, c{k}, d{k}; fma.rn.f32 ${k}, c{k}, {_real(unit)}, {_real(-unit * _LARGE)}; "
        text += f"mov.f32 ${k + 4}, 0f00000000; "
    return text + "}"


_UNPACKED = {  # how the codes of part 0 of a word get to one register, and those of part 1 to another
    "int4": f"shl.b32 t, {{word}}, 4; lop3.b32 a{{low}}, t, 0xF0F0F0F0, 0x80808080, {_OFFSET}; "
            f"lop3.b32 a{{up}}, {{word}}, 0xF0F0F0F0, 0x80808080, {_OFFSET}; ",
    "uint4": "shr.b32 t, {word}, 4; and.b32 a{low}, {word}, 0x0F0F0F0F; and.b32 a{up}, t, 0x0F0F0F0F; ",
    "float8_e4m3fn": "mov.b32 {{h0, h1}}, {word}; cvt.rn.f16x2.e4m3x2 a{low}, h0; cvt.rn.f16x2.e4m3x2 a{up}, h1; ",
}  # fmt: skip


def _real(x: float) -> str:
    return f"0f{struct.unpack('>I', struct.pack('>f', x))[0]:08X}"


def _product(kind: str, sums: str, right: tuple[str, str], own: dict[str, str]) -> str:
    """One instruction, which adds to `sums`; own: what they are before."""
    out = "{" + ", ".join(f"{sums}{k}" for k in range(4)) + "}"
    before, own[sums] = own[sums], out
    return f"mma.sync.aligned.{_SHAPES[kind]} {out}, {{a0, a1, a2, a3}}, {{{', '.join(right)}}}, {before}; "


# -- operands and sums ------------------------------------------------------------------------------------------------


def _mask(kind: str, n: int) -> str:
    """What a thread keeps of tile n of factors: of the quad and of the part of codes that its column is of."""
    text = "{ .reg .pred p<4>; .reg .b32 l; mov.u32 l, %laneid; shr.u32 l, l, 3; "
    for part in range(2):
        for quad in range(2):
            text += f"setp.eq.u32 p{2 * part + quad}, l, {2 * part + quad}; "
    for k in range(_COUNT):
        part = k % 4 // 2 if kind == "int8" else n
        text += f"selp.b32 ${k}, ${_COUNT + k}, 0, p{2 * part + k // 4}; "
    return text + "}"


def _masked(em: BlockEmitter, op: ir.DotQuads, n: int) -> Val:
    """The words of tile n of factors with zeros for terms of other columns, made once where they are."""
    b = op.factors[n]
    layout, key = lanes.factors(), (b, "masked", n)
    if key not in em.laid:
        block, place = em.places[b]
        with contextlib.nullcontext() if block is em.within else em.code.writing(place):
            v = em.tile(b, layout)
            constraints = ",".join(["=r"] * _COUNT + ["r"] * _COUNT)
            asm = _asm(_mask(op.kind, n), constraints, pure=True)
            with em.code.within({3: layout}):
                text = f"{asm} {v.name} : {v.type} -> {v.type}"
                em.laid[key] = em.code.let(text, v.shape, v.elem)  # type: ignore[index]
    return em.laid[key]  # type: ignore[index]


def _for_rows(em: BlockEmitter, b: Val) -> Val:
    """The words of factors in registers beside those of terms."""
    code = em.code
    with code.within({5: lanes.spread(), 4: Sliced(2, lanes.spread())}):
        wide = code.expand_dims(code.expand_dims(b, 1), 2)
        wide = code.broadcast(wide, (2, 2, 2, *b.shape[1:]))
    return code.convert(_reshape(em, wide, lanes.WORDS_OF), lanes.words())


def _of_rows(em: BlockEmitter, made: Val) -> Val:
    """The sums out of the registers of the instructions, of which those of the second quad have none."""
    apart = _transpose(em, _reshape(em, made, lanes.BITS), lanes.LAST)
    return _reshape(em, _transpose(em, _halves(em, apart)[0], lanes.PERM), lanes.SUMS)
