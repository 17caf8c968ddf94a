"""Products of float32 on matrix tiles, whose operands are sums of bfloat16: x = h + l + ..., the largest first.

Three parts are all of a float32, and two leave less than 2**-17 of it. Where the other operand is bfloat16, a float32
has three: products are those of float32 then. Where both are float32, each has two, and of the four products of parts
that of both l is left out (`precision="high"` of `jt.dot`).

All products of a block of C are summed in the same tiles, which hold float32: C is loaded and stored by tiles, and
nothing is left to do by vectors. Subnormal parts and bfloat16 numbers are zeros: a float32 of at least 2**-102 is the
sum of its three parts. An infinite float32 is the largest bfloat16 and an infinite one; an infinite bfloat16 meets
parts that are zero, and gives NaN.
"""

from __future__ import annotations

import dataclasses

from jtile import ir

from . import tiles
from .gemm_vector import ATTRIBUTES, call, offset, transpose
from .isa import Isa
from .llvm import Code, Module, Val, const, i64, shuffle, vec

ROWS, STEP = tiles.ROWS, 32  # rows or columns of a tile of A or B, and terms
_LANES = 16
_FLOATS, _WORDS, _HALVES = vec(_LANES, "float"), vec(_LANES, "i32"), vec(2 * _LANES, "i16")
_SIZE = {"float32": 4, "bfloat16": 2}
_LEAST_ROWS = 12  # of A: for fewer it is not worth while to bring B to tiles
_MOST_TERMS = 768  # of sums that are made in one go
_MOST = 2.0**127 * (2 - 2.0**-7)  # the largest bfloat16


def fits(isa: Isa) -> bool:
    """Whether this instruction set has the tiles and the vectors."""
    return isa.vector_bits == 512 and isa.has("amx-tile", "amx-bf16", "avx512bf16", "avx512bw")


@dataclasses.dataclass(frozen=True)
class PartsSpec:
    """C[m, n] (+)= A[m, k] . B, with n a multiple of 16 and k of 32; B is [n, k] with `trans_b`, else [k, n].

    a, b: "float32" or "bfloat16"; parts: how many bfloat16 numbers each of both is taken apart into.
    accumulate: add to C instead of overwriting it.
    """

    m: int
    n: int
    k: int
    a: str
    b: str
    parts: tuple[int, int]
    trans_b: bool
    accumulate: bool

    @property
    def name(self) -> str:
        form = f"{'t' if self.trans_b else 'n'}{'_add' * self.accumulate}"
        return f"bfloat_parts_{self.m}x{self.n}x{self.k}_{self.a}_{self.b}_{self.parts[0]}_{self.parts[1]}_{form}"

    @property
    def steps(self) -> int:
        return self.k // STEP

    def panel(self, side: int) -> int:
        """Bytes of the tiles of 16 rows of A (0) or columns of B (1): [steps, parts, 16, 64]."""
        return self.steps * self.parts[side] * tiles.TILE_BYTES

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The parts of A and of B that are multiplied."""
        parts = max(self.parts)
        return [(i, j) for j in range(self.parts[1]) for i in range(self.parts[0]) if i + j < parts]


def narrow(v: ir.Value) -> ir.Value:
    """The bfloat16 numbers that were cast to these of float32, or the numbers themselves."""
    cast = isinstance(v.op, ir.Cast) and (v.op.x.dtype, v.dtype) == ("bfloat16", "float32")
    return v.op.x if cast else v


def spec_of(isa: Isa, op: ir.Dot, dtypes: tuple[str, str] | None = None) -> PartsSpec | None:
    """How this product is computed here, perhaps with operands of other dtypes; None: it is not. C is overwritten."""
    _, m, n, k = op.sizes()
    dtypes = dtypes or (narrow(op.a).dtype, narrow(op.b).dtype)
    if not fits(isa) or m < _LEAST_ROWS or n % ROWS or k % STEP or 0 in (n, k) or op.trans_a:
        return None
    if sorted(dtypes) == ["bfloat16", "float32"]:
        several = 2 if op.precision == "high" else 3
        return PartsSpec(m, n, k, *dtypes, tuple(1 if d == "bfloat16" else several for d in dtypes), op.trans_b, False)
    if op.precision == "high" and dtypes == ("float32", "float32"):
        return PartsSpec(m, n, k, *dtypes, (2, 2), op.trans_b, False)
    return None


_PARAMS = [
    Val("ptr", "%a"), Val("i64", "%a_row"), Val("ptr", "%b"), Val("i64", "%b_row"), Val("ptr", "%c"),
    Val("i64", "%c_row"), Val("ptr", "%work"),
]  # fmt: skip


def emit_parts(module: Module, isa: Isa, spec: PartsSpec) -> tuple[str, int]:
    """Add `void @name(*_PARAMS)` to the module; distances of rows are in bytes.

    Returns:
      Its name, and the bytes of 64-byte aligned scratch that it wants.
    """
    if spec.k > _MOST_TERMS:
        return _emit_split(module, isa, spec)
    panels, rest = divmod(spec.m, ROWS)
    size = (panels + (rest > 0)) * spec.panel(0)
    if spec.name in module.functions:
        return spec.name, size + 2 * spec.panel(1)
    a, a_row, b, b_row, *_, work = _PARAMS
    c = Code(module, spec.name, _PARAMS, attributes=ATTRIBUTES)
    for start, count, rows in ((0, panels, ROWS), (panels, int(rest > 0), rest)):
        with c.loop(0, count) as p:
            row = c.mul(c.add(start, p), ROWS)
            to = offset(c, work, c.add(start, p), spec.panel(0))
            call(c, _rows_packer(module, spec, rows), c.gep("i8", a, c.mul(row, a_row)), a_row, to)
    pack = (_columns_packer if spec.trans_b else _lanes_packer)(module, spec)
    far = b_row if spec.trans_b else i64(_SIZE[spec.b])  # from a column to the next
    of_b = c.gep("i8", work, size)
    with tiles.kept(c):
        tiles.resize(c, tiles.WHOLE)
        for first, count, columns in _pairs(spec.n // ROWS):
            with c.loop(0, count) as j:
                column = c.mul(c.add(first, c.mul(j, columns)), ROWS)
                for v in range(columns):
                    source = c.gep("i8", b, c.mul(c.add(column, v * ROWS), far))
                    call(c, pack, source, b_row, c.gep("i8", of_b, v * spec.panel(1)))
                for start, times, rows in _pairs(panels):
                    with c.loop(0, times) as i:
                        _multiply(c, spec, c.add(start, c.mul(i, rows)), rows, columns, column, of_b)
                if rest:
                    tiles.resize(c, _rest_sizes(rest))
                    _multiply(c, spec, i64(panels), 1, columns, column, of_b)
                    tiles.resize(c, tiles.WHOLE)
    c.finish()
    return spec.name, size + 2 * spec.panel(1)


def _multiply(c: Code, spec: PartsSpec, p: Val, rows: int, columns: int, column: Val, of_b: Val) -> None:
    """A call for one or two panels of rows from p on and one or two of columns."""
    out = offset(c, c.gep("i8", _PARAMS[4], c.mul(c.mul(p, ROWS), _PARAMS[5])), column, 4)
    name = _kernel(c.module, spec, rows, columns)
    call(c, name, offset(c, _PARAMS[6], p, spec.panel(0)), of_b, out, _PARAMS[5])


def _rest_sizes(rest: int) -> dict[int, tuple[int, int]]:
    """The sizes of tiles where A has `rest` rows."""
    few = (rest, tiles.ROW_BYTES)
    return tiles.WHOLE | {0: few, 1: few, 4: few}


def _emit_split(module: Module, isa: Isa, spec: PartsSpec) -> tuple[str, int]:
    """A product of long sums in parts, whose tiles of A stay in the second-level cache."""
    steps = -(-spec.steps // -(-spec.k // _MOST_TERMS))
    part = dataclasses.replace(spec, k=steps * STEP)
    whole, rest = divmod(spec.k, part.k)
    first, workspace = emit_parts(module, isa, part)
    more, _ = emit_parts(module, isa, dataclasses.replace(part, accumulate=True))
    last = dataclasses.replace(spec, k=rest, accumulate=True)
    names = [(0, 1, first), (1, whole, more)]
    names += [(whole, whole + 1, emit_parts(module, isa, last)[0])] if rest else []
    if spec.name in module.functions:
        return spec.name, workspace
    a, a_row, b, b_row, *others = _PARAMS
    c = Code(module, spec.name, _PARAMS, attributes=ATTRIBUTES)
    for begin, end, name in names:
        with c.loop(begin, end) as i:
            k = c.mul(i, part.k)
            of_b = c.mul(k, i64(_SIZE[spec.b]) if spec.trans_b else b_row)
            call(c, name, offset(c, a, k, _SIZE[spec.a]), a_row, c.gep("i8", b, of_b), b_row, *others)
    c.finish()
    return spec.name, workspace


def _pairs(count: int) -> list[tuple[int, int, int]]:
    """(the first, how many, 2 or 1) of pairs, and of what is left."""
    return [part for part in ((0, count // 2, 2), (count // 2 * 2, count % 2, 1)) if part[1]]


# -- operands as tiles ------------------------------------------------------------------------------------------------

_PACK = [Val("ptr", "%src"), Val("i64", "%row"), Val("ptr", "%panel")]


def _split(c: Code, first: Val, second: Val, parts: int) -> list[Val]:
    """The parts of two vectors of float32, as bfloat16: those of the first come first."""
    both, found = vec(2 * _LANES, "bfloat"), []
    rest = shuffle(c, first, second, list(range(2 * _LANES)))
    for n in range(parts):
        part = c.cast("fptrunc", rest if n else _finite(c, rest), both)
        rest = c.binary("fsub", rest, c.cast("fpext", part, rest.ty))
        if n:  # what was infinite, or no number, is so once
            rest = c.select(c.cmp("fcmp", "ord", rest, rest), rest, const(rest.ty, "0.0"))
        found.append(c.cast("bitcast", part, _HALVES))
    return found


def _finite(c: Code, x: Val) -> Val:
    """The nearest numbers that are finite as bfloat16, too; NaN becomes the largest one."""
    for order, most in (("olt", _MOST), ("ogt", -_MOST)):
        end = const(x.ty, repr(most))
        x = c.select(c.cmp("fcmp", order, x, end), x, end)
    return x


def _of_row(c: Code, dtype: str, parts: int, ptr: Val) -> list[Val]:
    """The parts of 32 neighbours."""
    if dtype == "bfloat16":
        return [c.load(_HALVES, ptr, align=2)]
    return _split(c, *(c.load(_FLOATS, c.gep("i8", ptr, n * 64), align=4) for n in range(2)), parts)


def _rows_packer(module: Module, spec: PartsSpec, rows: int) -> str:
    """`void(*_PACK)`: up to 16 rows of A."""
    name = f"bfloat_rows_{spec.a}_{spec.parts[0]}_{rows}x{spec.steps}"
    if name in module.functions:
        return name
    src, row, panel = _PACK
    c = Code(module, name, _PACK, attributes=ATTRIBUTES)
    with c.loop(0, rows) as r, c.loop(0, spec.steps) as step:
        at = c.gep("i8", c.gep("i8", src, c.mul(r, row)), c.mul(step, STEP * _SIZE[spec.a]))
        for n, part in enumerate(_of_row(c, spec.a, spec.parts[0], at)):
            tile = c.add(c.mul(step, spec.parts[0]), n)
            c.store(part, offset(c, offset(c, panel, tile, tiles.TILE_BYTES), r, tiles.ROW_BYTES), align=64)
    c.finish()
    return name


def _columns_packer(module: Module, spec: PartsSpec) -> str:
    """`void(*_PACK)`: 16 columns of B, which stand as rows: pairs of neighbours are turned."""
    name = f"bfloat_columns_{spec.b}_{spec.parts[1]}_{spec.steps}"
    if name in module.functions:
        return name
    src, row, panel = _PACK
    c = Code(module, name, _PACK, attributes=ATTRIBUTES)
    with c.loop(0, spec.steps) as step:
        at = c.gep("i8", src, c.mul(step, STEP * _SIZE[spec.b]))
        rows = [_of_row(c, spec.b, spec.parts[1], c.gep("i8", at, c.mul(row, r))) for r in range(ROWS)]
        for n, part in enumerate(zip(*rows, strict=True)):
            tile = offset(c, panel, c.add(c.mul(step, spec.parts[1]), n), tiles.TILE_BYTES)
            for p, pairs in enumerate(transpose(c, [c.cast("bitcast", x, _WORDS) for x in part])):
                c.store(pairs, c.gep("i8", tile, p * tiles.ROW_BYTES), align=64)
    c.finish()
    return name


def _lanes_packer(module: Module, spec: PartsSpec) -> str:
    """`void(*_PACK)`: 16 columns of B, whose rows stand as such: two rows are interleaved."""
    name = f"bfloat_lanes_{spec.b}_{spec.parts[1]}_{spec.steps}"
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
            halves = _split(c, *(c.load(_FLOATS, x, align=4) for x in both), spec.parts[1])
            parts = [shuffle(c, x, x, turns) for x in halves]
        for n, part in enumerate(parts):
            tile = c.add(c.mul(step, spec.parts[1]), n)
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

    def load(side: int, count: int, panels: Val, step: Val, part: int) -> None:
        for n in range(count):
            at = c.add(c.mul(step, spec.parts[side] * tiles.TILE_BYTES), n * spec.panel(side) + part * tiles.TILE_BYTES)
            # Panels of A pass once for each block of columns, which the first-level cache is to keep.
            tiles.load(c, (4, 6)[side] + n, c.gep("i8", panels, at), passing=side == 0)

    with c.loop(0, spec.steps) as step:
        there = (-1, -1)
        for pair in spec.pairs:
            for side, count, panels in ((0, rows, a), (1, columns, b)):
                if pair[side] != there[side]:
                    load(side, count, panels, step, pair[side])
            there = pair
            for tile, i, j in of_c:
                tiles.multiply(c, "tdpbf16ps", tile, 4 + i, 6 + j)
    for tile, i, j in of_c:
        tiles.store(c, tile, place(i, j), out_row)
    c.finish()
    return name
