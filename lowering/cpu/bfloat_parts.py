"""Products of float32 on matrix tiles, whose operands are sums of two bfloat16 each: x = h + l, without 2**-17 of x.

Of the four products of parts that of both l is left out (`precision="high"` of `jt.dot`). What is bfloat16 already is
one part. All products of a block of C are summed in the same tiles, which hold float32: C is loaded and stored by
tiles, and nothing is left to do by vectors. Infinite numbers give NaN, and what is below 2**-117 loses its l.
"""

from __future__ import annotations

import dataclasses

from . import tiles
from .gemm_vector import ATTRIBUTES, call, offset, transpose
from .isa import Isa
from .llvm import Code, Module, Val, i64, shuffle, vec

ROWS, STEP = tiles.ROWS, 32  # rows or columns of a tile of A or B, and terms
_LANES = 16
_FLOATS, _WORDS, _HALVES = vec(_LANES, "float"), vec(_LANES, "i32"), vec(2 * _LANES, "i16")
_SIZE = {"float32": 4, "bfloat16": 2}


def fits(isa: Isa) -> bool:
    """Whether this instruction set has the tiles and the vectors."""
    return isa.vector_bits == 512 and isa.has("amx-tile", "amx-bf16", "avx512bf16", "avx512bw")


@dataclasses.dataclass(frozen=True)
class PartsSpec:
    """C[m, n] (+)= A[m, k] . B, with m and n multiples of 16 and k of 32; B is [n, k] with `trans_b`, else [k, n].

    a, b: "float32" or "bfloat16". accumulate: add to C instead of overwriting it.
    """

    m: int
    n: int
    k: int
    a: str
    b: str
    trans_b: bool
    accumulate: bool

    @property
    def name(self) -> str:
        form = f"{'t' if self.trans_b else 'n'}{'_add' * self.accumulate}"
        return f"bfloat_parts_{self.m}x{self.n}x{self.k}_{self.a}_{self.b}_{form}"

    @property
    def steps(self) -> int:
        return self.k // STEP

    def panel(self, dtype: str) -> int:
        """Bytes of the tiles of 16 rows or columns: [steps, parts, 16, 64]."""
        return self.steps * _parts(dtype) * tiles.TILE_BYTES


def _parts(dtype: str) -> int:
    return 1 if dtype == "bfloat16" else 2


_PARAMS = [
    Val("ptr", "%a"), Val("i64", "%a_row"), Val("ptr", "%b"), Val("i64", "%b_row"), Val("ptr", "%c"),
    Val("i64", "%c_row"), Val("ptr", "%work"),
]  # fmt: skip


def emit_parts(module: Module, isa: Isa, spec: PartsSpec) -> tuple[str, int]:
    """Add `void @name(*_PARAMS)` to the module; distances of rows are in bytes.

    Returns:
      Its name, and the bytes of 64-byte aligned scratch that it wants.
    """
    size = spec.m // ROWS * spec.panel(spec.a)
    workspace = size + 2 * spec.panel(spec.b)
    if spec.name in module.functions:
        return spec.name, workspace
    a, a_row, b, b_row, out, out_row, work = _PARAMS
    c = Code(module, spec.name, _PARAMS, attributes=ATTRIBUTES)
    panels = c.gep("i8", work, size)
    with c.loop(0, spec.m // ROWS) as p:
        rows = c.gep("i8", a, c.mul(c.mul(p, ROWS), a_row))
        call(c, _rows_packer(module, spec), rows, a_row, offset(c, work, p, spec.panel(spec.a)))
    pack = (_columns_packer if spec.trans_b else _lanes_packer)(module, spec)
    far = b_row if spec.trans_b else i64(_SIZE[spec.b])  # from a column to the next
    with tiles.kept(c):
        tiles.resize(c, tiles.WHOLE)
        for first, count, columns in _pairs(spec.n // ROWS):
            with c.loop(0, count) as j:
                column = c.mul(c.add(first, c.mul(j, columns)), ROWS)
                for v in range(columns):
                    source = c.gep("i8", b, c.mul(c.add(column, v * ROWS), far))
                    call(c, pack, source, b_row, c.gep("i8", panels, v * spec.panel(spec.b)))
                for start, times, rows in _pairs(spec.m // ROWS):
                    name = _kernel(module, spec, rows, columns)
                    with c.loop(0, times) as i:
                        p = c.add(start, c.mul(i, rows))
                        line = c.gep("i8", out, c.mul(c.mul(p, ROWS), out_row))
                        call(
                            c, name, offset(c, work, p, spec.panel(spec.a)), panels, offset(c, line, column, 4), out_row
                        )
    c.finish()
    return spec.name, workspace


def _pairs(count: int) -> list[tuple[int, int, int]]:
    """(the first, how many, 2 or 1) of pairs, and of what is left."""
    return [part for part in ((0, count // 2, 2), (count // 2 * 2, count % 2, 1)) if part[1]]


# -- operands as tiles ------------------------------------------------------------------------------------------------

_PACK = [Val("ptr", "%src"), Val("i64", "%row"), Val("ptr", "%panel")]


def _split(c: Code, first: Val, second: Val) -> list[Val]:
    """The parts h and l of two vectors of float32, as bfloat16: those of the first come first."""
    both = vec(2 * _LANES, "bfloat")
    whole = shuffle(c, first, second, list(range(2 * _LANES)))
    high = c.cast("fptrunc", whole, both)
    rest = c.binary("fsub", whole, c.cast("fpext", high, whole.ty))
    return [c.cast("bitcast", x, _HALVES) for x in (high, c.cast("fptrunc", rest, both))]


def _of_row(c: Code, dtype: str, ptr: Val) -> list[Val]:
    """The parts of 32 neighbours."""
    if dtype == "bfloat16":
        return [c.load(_HALVES, ptr, align=2)]
    return _split(c, *(c.load(_FLOATS, c.gep("i8", ptr, n * 64), align=4) for n in range(2)))


def _rows_packer(module: Module, spec: PartsSpec) -> str:
    """`void(*_PACK)`: 16 rows of A."""
    name = f"bfloat_rows_{spec.a}_{spec.steps}"
    if name in module.functions:
        return name
    src, row, panel = _PACK
    c = Code(module, name, _PACK, attributes=ATTRIBUTES)
    with c.loop(0, ROWS) as r, c.loop(0, spec.steps) as step:
        parts = _of_row(c, spec.a, c.gep("i8", c.gep("i8", src, c.mul(r, row)), c.mul(step, STEP * _SIZE[spec.a])))
        for n, part in enumerate(parts):
            tile = c.add(c.mul(step, _parts(spec.a)), n)
            c.store(part, offset(c, offset(c, panel, tile, tiles.TILE_BYTES), r, tiles.ROW_BYTES), align=64)
    c.finish()
    return name


def _columns_packer(module: Module, spec: PartsSpec) -> str:
    """`void(*_PACK)`: 16 columns of B, which stand as rows: pairs of neighbours are turned."""
    name = f"bfloat_columns_{spec.b}_{spec.steps}"
    if name in module.functions:
        return name
    src, row, panel = _PACK
    c = Code(module, name, _PACK, attributes=ATTRIBUTES)
    with c.loop(0, spec.steps) as step:
        at = c.gep("i8", src, c.mul(step, STEP * _SIZE[spec.b]))
        rows = [_of_row(c, spec.b, c.gep("i8", at, c.mul(row, r))) for r in range(ROWS)]
        for n, part in enumerate(zip(*rows, strict=True)):
            tile = offset(c, panel, c.add(c.mul(step, _parts(spec.b)), n), tiles.TILE_BYTES)
            for p, pairs in enumerate(transpose(c, [c.cast("bitcast", x, _WORDS) for x in part])):
                c.store(pairs, c.gep("i8", tile, p * tiles.ROW_BYTES), align=64)
    c.finish()
    return name


def _lanes_packer(module: Module, spec: PartsSpec) -> str:
    """`void(*_PACK)`: 16 columns of B, whose rows stand as such: two rows are interleaved."""
    name = f"bfloat_lanes_{spec.b}_{spec.steps}"
    if name in module.functions:
        return name
    src, row, panel = _PACK
    c = Code(module, name, _PACK, attributes=ATTRIBUTES)
    turns = [n + _LANES * half for n in range(_LANES) for half in range(2)]
    with c.loop(0, spec.steps) as step, c.loop(0, STEP // 2) as p:
        at = c.gep("i8", src, c.mul(c.add(c.mul(step, STEP), c.mul(p, 2)), row))
        both = at, c.gep("i8", at, row)
        if spec.b == "bfloat16":
            parts = [shuffle(c, *(c.load(vec(_LANES, "i16"), x, align=2) for x in both), turns)]
        else:
            halves = _split(c, *(c.load(_FLOATS, x, align=4) for x in both))
            parts = [shuffle(c, x, x, turns) for x in halves]
        for n, part in enumerate(parts):
            tile = c.add(c.mul(step, _parts(spec.b)), n)
            c.store(part, offset(c, offset(c, panel, tile, tiles.TILE_BYTES), p, tiles.ROW_BYTES), align=64)
    c.finish()
    return name


# -- products ---------------------------------------------------------------------------------------------------------


def _kernel(module: Module, spec: PartsSpec, rows: int, columns: int) -> str:
    """`void(ptr a, ptr b, ptr c, i64 c_row)`: a block of C of one or two tiles by one or two."""
    name = f"{spec.name}_{rows}x{columns}"
    if name in module.functions:
        return name
    a, b, out, out_row = params = [Val("ptr", "%a"), Val("ptr", "%b"), Val("ptr", "%c"), Val("i64", "%c_row")]
    c = Code(module, name, params, attributes=ATTRIBUTES)
    of_c = [(2 * i + j, i, j) for i in range(rows) for j in range(columns)]
    place = lambda i, j: c.gep("i8", c.gep("i8", out, c.mul(out_row, i * ROWS)), j * tiles.ROW_BYTES)
    for tile, i, j in of_c:
        if spec.accumulate:
            tiles.load(c, tile, place(i, j), out_row)
        else:
            tiles.clear(c, tile)
    parts = _parts(spec.a), _parts(spec.b)

    def load(first: int, count: int, panels: Val, dtype: str, step: Val, part: int) -> None:
        for n in range(count):
            at = c.add(c.mul(step, _parts(dtype) * tiles.TILE_BYTES), n * spec.panel(dtype) + part * tiles.TILE_BYTES)
            tiles.load(c, first + n, c.gep("i8", panels, at))

    with c.loop(0, spec.steps) as step:
        there = (-1, -1)
        for pair in ((0, 0), (1, 0), (0, 1)):
            if pair[0] >= parts[0] or pair[1] >= parts[1]:
                continue
            if pair[0] != there[0]:
                load(4, rows, a, spec.a, step, pair[0])
            if pair[1] != there[1]:
                load(6, columns, b, spec.b, step, pair[1])
            there = pair
            for tile, i, j in of_c:
                tiles.multiply(c, "tdpbf16ps", tile, 4 + i, 6 + j)
    for tile, i, j in of_c:
        tiles.store(c, tile, place(i, j), out_row)
    c.finish()
    return name
