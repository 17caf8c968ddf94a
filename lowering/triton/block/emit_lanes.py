"""Products of lanes by instructions of one warp, whose operands stand in registers; see `lanes`."""

from __future__ import annotations

import contextlib

from jtile import ir

from ..ttir import Val
from . import lanes
from .emit_moves import _as, _halves, _join, _reshape, _transpose
from .emitter import BlockEmitter, emits
from .layouts import Layout, Sliced
from .linear import reshaped

# A thread multiplies with zero where its four neighbours stand for other lanes than its own.
_MASK = (
    "{ .reg .pred p; .reg .b32 l, m; mov.u32 l, %laneid; shr.u32 m, l, 2; xor.b32 m, m, l; and.b32 m, m, 3; "
    "setp.eq.u32 p, m, 0; selp.b32 $0, $1, 0, p; }"
)


@emits(ir.DotLanes)
def _dot_lanes(em: BlockEmitter, op: ir.DotLanes) -> Val:
    shape = op.terms[0].shape
    rows = shape[0]
    if not lanes.fits(op, em.warps):
        em.refuse(op, f"products of multiples of eight rows, {lanes.COUNT} lanes of {lanes.WORDS} words and two planes "
                      f"in a role of {lanes.WARPS} warps, got {op.terms[0].type} in a role of {em.warps}")  # fmt: skip
    code, home = em.code, lanes.words(rows)
    terms = [em.tile(a, home) for a in op.terms]
    factors = [_for_rows(em, _masked(em, b), rows) for b in op.factors]
    elem, kind = ("i32", "r") if op.result.dtype == "int32" else ("f32", "f")
    given = [*terms, *factors]
    constraints = ",".join([f"={kind}"] * 4 + ["r"] * 4 * len(given) + [kind] * 4 * (op.acc is not None))
    if op.acc is not None:
        given.append(_as_columns(em, em.tile(op.acc, lanes.sums(rows)), rows))
    names, types = (", ".join(getattr(v, what) for v in given) for what in ("name", "type"))
    text = _instructions(op.kind, len(terms), op.acc is not None)
    with code.within({3: home}):
        asm = f'"{text}" {{constraints = "{constraints}", packed_element = 4 : i32, pure = false}}'
        out = code.spell(shape, elem)
        made = code.let(f"tt.elementwise_inline_asm {asm} {names} : {types} -> {out}", shape, elem)
    return _of_rows(em, _as(made, made.shape, home, made.name), rows)


# Four words of factors fill the operand that has 16 rows: two of them are its first eight rows, the other two the last.
# So there are two sums of eight rows each, of which one half counts: products of the words of the other rows are left.


_SHAPES = {
    "integers": "m16n8k32.row.col.s32.s8.u8.s32",
    "bfloat16": "m16n8k16.row.col.f32.bf16.bf16.f32",
    "float8_e4m3fn": "m16n8k16.row.col.f32.f16.f16.f32",
}


def _instructions(kind: str, count: int, has_acc: bool) -> str:
    """The instructions for the words of a lane, `count` tiles of four. 8-bit floats become float16, two at a time."""
    type_, zero = ("s32", "0") if kind == "integers" else ("f32", "0f00000000")
    text = f"{{ .reg .{type_} c<4>, d<4>, z; .reg .b32 u, v; .reg .b16 h, l; mov.{type_} z, {zero}; "
    own = dict.fromkeys("cd", "{z, z, z, z}")
    for n in range(count):
        a, b = 4 + 4 * n, 4 + 4 * (count + (2 * n if kind == "float8_e4m3fn" else n))
        for k in range(4):
            sums = "cd"[k % 2]
            if kind == "float8_e4m3fn":
                text += f"mov.b32 {{l, h}}, ${a + k}; cvt.rn.f16x2.e4m3x2 u, l; cvt.rn.f16x2.e4m3x2 v, h; "
                first = b + k // 2 * 2
                text += _product(kind, sums, (first, first + 1, first + 4, first + 5), ("u", "v"), own)
            elif k < 2:
                words = (f"${a + 2 * k}", f"${a + 2 * k + 1}")
                text += _product(kind, sums, (b, b + 2, b + 1, b + 3), words, own)
    acc = 4 + 4 * count * (3 if kind == "float8_e4m3fn" else 2)
    for k in range(2):
        text += f"add.{type_} c{k}, c{k}, d{k + 2}; "
        text += f"add.{type_} ${k}, c{k}, ${acc + k}; " if has_acc else f"mov.{type_} ${k}, c{k}; "
        text += f"mov.{type_} ${k + 2}, z; "
    return text + "}"


def _product(kind: str, sums: str, left: tuple[int, ...], right: tuple[str, str], own: dict[str, str]) -> str:
    """One instruction, which adds to `sums`; own: what they are before."""
    out = "{" + ", ".join(f"{sums}{k}" for k in range(4)) + "}"
    a, before = ", ".join(f"${k}" for k in left), own[sums]
    own[sums] = out
    return f"mma.sync.aligned.{_SHAPES[kind]} {out}, {{{a}}}, {{{', '.join(right)}}}, {before}; "


def _masked(em: BlockEmitter, b: ir.Value) -> Val:
    """The words of b with zeros for terms of other lanes, made once where b is."""
    layout, key = lanes.factors(), (b, "masked")
    if key not in em.laid:
        block, place = em.places[b]
        with contextlib.nullcontext() if block is em.within else em.code.writing(place):
            v = em.tile(b, layout)
            asm = f'"{_MASK}" {{constraints = "=r,r", packed_element = 1 : i32, pure = true}}'
            with em.code.within({3: layout}):
                text = f"tt.elementwise_inline_asm {asm} {v.name} : {v.type} -> {v.type}"
                em.laid[key] = em.code.let(text, v.shape, v.elem)  # type: ignore[index]
    return em.laid[key]  # type: ignore[index]


def _for_rows(em: BlockEmitter, b: Val, rows: int) -> Val:
    """The words of b in registers beside those of each eight rows of a."""
    code = em.code
    with code.within({5: lanes.spread(), 4: Sliced(2, lanes.spread())}):
        wide = code.expand_dims(code.expand_dims(b, 1), 2)
        wide = code.broadcast(wide, (2, 2, 2, *b.shape[1:]))
    eight = _reshape(em, wide, (lanes.EIGHT, *b.shape[1:]))
    if rows == lanes.EIGHT:
        return code.convert(eight, lanes.words(rows))
    four = _in_eights(rows)
    with code.within({4: four}):
        wide = code.expand_dims(code.convert(eight, Sliced(0, four)), 0)
        wide = code.broadcast(wide, (rows // lanes.EIGHT, *eight.shape))
    return code.convert(_reshape(em, wide, (rows, *b.shape[1:])), lanes.words(rows))


def _in_eights(rows: int) -> Layout:
    shape = (lanes.COUNT, lanes.WORDS)
    return reshaped(lanes.words(rows), (rows, *shape), (rows // lanes.EIGHT, lanes.EIGHT, *shape))


def _of_rows(em: BlockEmitter, made: Val, rows: int) -> Val:
    """The sums [rows, planes, lanes] out of the registers of an instruction, of which the upper two have no sums."""
    apart = _transpose(em, _reshape(em, made, (rows, lanes.COUNT, 2, 2)), (0, 1, 3, 2))
    own = _reshape(em, _halves(em, apart)[0], lanes.bits(rows))
    return _reshape(em, _transpose(em, own, lanes.PERM), (rows, 2, lanes.COUNT))


def _as_columns(em: BlockEmitter, acc: Val, rows: int) -> Val:
    """The inverse of `_of_rows`."""
    bits = lanes.bits(rows)
    own = _transpose(em, _reshape(em, acc, tuple(bits[k] for k in lanes.PERM)), lanes.BACK)
    own = _reshape(em, own, (rows, lanes.COUNT, 2))
    both = _transpose(em, _join(em, own, own), (0, 1, 3, 2))
    return em.code.convert(_reshape(em, both, (rows, lanes.COUNT, lanes.WORDS)), lanes.words(rows))
