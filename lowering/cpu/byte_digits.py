"""Products of rows of two digits with quantised columns on matrix tiles of bytes.

A row of A is s (256 h + l) with bytes h and l, and so is a column of B when it is packed: its weights are rounded to
integers of 16 bits of which the largest is about 2**15. Of the four products of digits that of both low ones is left
out. Sums of bytes are exact in any order, so that a row has the same bits among any others. All of k meets the same
tiles of sums: they go to memory once, or once a part of k that the first-level cache has room for.

How columns become tiles is said in `byte_columns`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from . import tiles
from .byte_columns import B_STEP, ROWS, STEP, DigitSpec, packer
from .gemm_vector import ATTRIBUTES, call, offset
from .isa import Isa
from .llvm import Code, Module, Val, const, i64, vec
from .scaled_columns import LANES, WORDS

_VECTORS = 2  # of 16 columns each, that meet a tile of A when it is loaded
_SUMS = 2 * _VECTORS  # tiles: for each vector those of both high digits, and of a high and a low one
_A = [Val("ptr", "%high"), Val("i64", "%high_row"), Val("ptr", "%low"), Val("i64", "%low_row")]
_OF_A = [*_A, Val("ptr", "%s"), Val("i64", "%s_row")]
_OUT = [Val("ptr", "%c"), Val("i64", "%c_row")]
_FADE = [Val("ptr", "%fade"), Val("i64", "%fade_row")]
_WORK = Val("ptr", "%work")
_FLOATS = vec(LANES, "float")


def fits(isa: Isa) -> bool:
    """Whether this instruction set has the tiles and the vectors."""
    return isa.vector_bits == 512 and isa.has("amx-tile", "amx-int8", "avx512bw")


def emit_digits(module: Module, isa: Isa, spec: DigitSpec) -> tuple[str, int]:
    """Add `void @name(*_OF_A, *spec.of_b, *_OUT, ptr fade, i64 fade_row, ptr work)` to the module; distances of rows
    are in bytes.

    Returns:
      Its name, and the bytes of 64-byte aligned scratch that it wants.
    """
    panel = spec.steps * B_STEP
    kept = (spec.m // ROWS if len(spec.parts) > 1 else 2) * _SUMS * tiles.TILE_BYTES
    starts = [0, panel * _VECTORS, panel * _VECTORS + LANES * 4 * _VECTORS]
    if spec.name in module.functions:
        return spec.name, starts[-1] + kept
    c = Code(module, spec.name, [*_OF_A, *spec.of_b, *_OUT, *_FADE, _WORK], attributes=ATTRIBUTES)
    panels, scales, sums = (offset(c, _WORK, start, 1) for start in starts)
    pack = packer(module, spec)
    whole, rest = divmod(spec.n // LANES, _VECTORS)
    with tiles.kept(c):
        tiles.resize(c, tiles.WHOLE)
        for start, count, vectors in ((0, whole, _VECTORS), (whole * _VECTORS, int(rest > 0), rest)):
            with c.loop(0, count) as p:
                first = c.add(start, c.mul(p, vectors))
                for v in range(vectors):
                    of_b = spec.panel(c, c.add(first, v))
                    call(c, pack, *of_b, c.gep("i8", panels, v * panel), c.gep("i8", scales, v * LANES * 4))
                out = offset(c, _OUT[0], c.mul(first, LANES), 4)
                for part in spec.parts:
                    name = _kernel(module, spec, vectors, part)
                    call(c, name, *_OF_A, panels, scales, sums, out, _OUT[1], *_FADE)
    c.finish()
    return spec.name, starts[-1] + kept


def _kernel(module: Module, spec: DigitSpec, vectors: int, part: tuple[int, int]) -> str:
    """`void(*_OF_A, ptr panels, ptr scales, ptr sums, *_OUT, *_FADE)`: a part of k for all rows of A and the panels of
    B. The last part multiplies with the scales and writes C."""
    name = f"{spec.name}_{vectors}_{part[0]}"
    if name in module.functions:
        return name
    panels, scales, sums = of_b = [Val("ptr", "%panels"), Val("ptr", "%scales"), Val("ptr", "%sums")]
    c = Code(module, name, [*_OF_A, *of_b, *_OUT, *_FADE], attributes=ATTRIBUTES)
    last, alone = part == spec.parts[-1], len(spec.parts) == 1
    count = spec.m // tiles.ROWS
    place = lambda p: offset(c, sums, c.binary("and", p, i64(1)) if alone else p, _SUMS * tiles.TILE_BYTES)

    def finish(p: Val, r: Val) -> None:
        _finish(c, spec, vectors, c.add(c.mul(p, ROWS), r), offset(c, place(p), r, tiles.ROW_BYTES), scales)

    if spec.steps == 1:
        multiply = functools.partial(_multiply_once, c, vectors)
        for v, n in itertools.product(range(vectors), range(2)):
            tiles.load(c, _b_at(v, n), _digit(c, spec, panels, i64(0), v, n))
    else:
        multiply = functools.partial(_multiply, c, spec, vectors, part, panels)
    multiply(i64(0), place(i64(0)), lambda r: None)
    with c.loop(1, count) as p:
        # Tiles are all that is busy for long, and what they have stored is to be loaded later: each step of k comes
        # with some of the rows before.
        meanwhile = functools.partial(finish, c.sub(p, 1)) if last else (lambda r: None)
        multiply(p, place(p), meanwhile)
    if last:
        with c.loop(0, ROWS) as r:
            finish(i64(count - 1), r)
    c.finish()
    return name


def _multiply(
    c: Code, spec: DigitSpec, vectors: int, part: tuple[int, int], panels: Val, p: Val, sums: Val, meanwhile
) -> None:
    """The sums of 16 rows over a part of k, on top of those of the parts before; `meanwhile` is called for 16 rows."""
    begin, count = part
    for tile in (t for v in range(vectors) for t in (v, v + _VECTORS)):
        if begin:
            tiles.load(c, tile, c.gep("i8", sums, tile * tiles.TILE_BYTES), passing=True)
        else:
            tiles.clear(c, tile)
    each = next(n for n in (1, 2, 4, 8, 16) if n * count >= ROWS)
    row = c.mul(p, ROWS)
    a = [c.gep("i8", ptr, c.mul(row, distance)) for ptr, distance in zip(_A[::2], _A[1::2], strict=True)]
    for first, end, rows in ((0, ROWS // each, each), (ROWS // each, count, 0)):
        with c.loop(first, end) as s:
            parts = _step(c, spec, vectors, c.add(s, begin), a, panels)
            for n in range(max(rows, 3)):
                next(parts, None)
                if n < rows:
                    meanwhile(c.add(c.mul(s, each), n))
            for _ in parts:
                pass
    for tile in (t for v in range(vectors) for t in (v, v + _VECTORS)):
        tiles.store(c, tile, c.gep("i8", sums, tile * tiles.TILE_BYTES))


def _step(c: Code, spec: DigitSpec, vectors: int, step: Val, a: list[Val], panels: Val) -> Iterator[None]:
    """One tile of k for 16 rows; other work may come in between."""
    (high, low), of_b = (4, 5), (6, 7)
    for tile, ptr, distance in zip((high, low), a, _A[1::2], strict=True):
        # Rows of A meet each panel once, and all of them do not fit into the first-level cache beside it.
        tiles.load(c, tile, offset(c, ptr, step, STEP), distance, passing=True)

    digit = functools.partial(_digit, c, spec, panels, step)
    for v in range(vectors):
        tiles.load(c, of_b[v], digit(v, 0))
        tiles.multiply(c, "tdpbssd", v, high, of_b[v])
        tiles.multiply(c, "tdpbssd", v + _VECTORS, low, of_b[v])
        yield
    for v in range(vectors):
        tiles.load(c, of_b[v], digit(v, 1))
        tiles.multiply(c, "tdpbssd", v + _VECTORS, high, of_b[v])
    yield


def _digit(c: Code, spec: DigitSpec, panels: Val, step: Val, v: int, n: int) -> Val:
    """The tile of the high or the low bytes of 16 columns at a step."""
    at = v * spec.steps * B_STEP + n * tiles.TILE_BYTES
    return c.gep("i8", panels, c.add(c.mul(step, B_STEP), at))


def _b_at(v: int, n: int) -> int:
    """Where the tile of a digit of 16 columns stays in `_multiply_once`."""
    return 4 + _VECTORS * n + v


def _multiply_once(c: Code, vectors: int, p: Val, sums: Val, meanwhile) -> None:
    """`_multiply` where all of k is one step: the tiles of B stay, and those of sums are stored when they are done."""
    a, mixed, row = 3, (2, 0), c.mul(p, ROWS)
    high, low = (c.gep("i8", ptr, c.mul(row, distance)) for ptr, distance in zip(_A[::2], _A[1::2], strict=True))

    def quarter(n: int) -> None:
        for r in range(n * ROWS // 4, (n + 1) * ROWS // 4):
            meanwhile(i64(r))

    tiles.load(c, a, high, _A[1])
    for v in range(vectors):
        tiles.clear(c, v)
        tiles.multiply(c, "tdpbssd", v, a, _b_at(v, 0))
        tiles.store(c, v, c.gep("i8", sums, v * tiles.TILE_BYTES))
    quarter(0)
    for v in range(vectors):
        tiles.clear(c, mixed[v])
        tiles.multiply(c, "tdpbssd", mixed[v], a, _b_at(v, 1))
    quarter(1)
    tiles.load(c, a, low, _A[3])
    for v in range(_VECTORS):
        if v < vectors:
            tiles.multiply(c, "tdpbssd", mixed[v], a, _b_at(v, 0))
            tiles.store(c, mixed[v], c.gep("i8", sums, (v + _VECTORS) * tiles.TILE_BYTES))
        quarter(2 + v)


def _finish(c: Code, spec: DigitSpec, vectors: int, row: Val, sums: Val, scales: Val) -> None:
    """C = (256 high sums + mixed sums) times 256 and the scales of the row and the column, for one row."""
    large = const(_FLOATS, "256.0")
    of_a = c.splat(c.load("float", c.gep("i8", _OF_A[4], c.mul(row, _OF_A[5])), align=4), LANES)
    line = c.gep("i8", _OUT[0], c.mul(row, _OUT[1]))
    fade = c.splat(c.load("float", c.gep("i8", _FADE[0], c.mul(row, _FADE[1])), align=4), LANES) if spec.fade else None
    for v in range(vectors):
        of_b = c.load(_FLOATS, c.gep("i8", scales, v * LANES * 4), align=64)
        high, mixed = (
            c.cast("sitofp", c.load(WORDS, c.gep("i8", sums, t * tiles.TILE_BYTES), align=64), _FLOATS)
            for t in (v, v + _VECTORS)
        )
        x = c.binary("fmul", c.intrinsic("fma", _FLOATS, high, large, mixed), of_b)
        at = c.gep("i8", line, v * LANES * 4)
        if spec.accumulate:
            there = c.load(_FLOATS, at, align=4)
            there = there if fade is None else c.binary("fmul", there, fade)
            x = c.intrinsic("fma", _FLOATS, x, of_a, there)
        else:
            x = c.binary("fmul", x, of_a)
        c.store(x, at, align=4)
