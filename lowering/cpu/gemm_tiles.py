"""Micro-kernel of the matmul on tile registers (Intel's AMX): eight registers of 16 rows of 64 bytes.

One instruction adds the product of a tile of A, 16 rows of 16 units along k, and a tile of B, 16 units along k of 16
columns, to a tile of C, 16 rows of 16 accumulators. That layout of B is a packed panel of `gemm_pack`, and that of A is
its rows in memory. Tiles may have fewer rows and columns, which `configure` says for the calls that follow.
"""

from __future__ import annotations

import dataclasses

from . import tiles
from .gemm_modes import BYTES, Mode
from .gemm_vector import ATTRIBUTES, fetch_rows, offset
from .llvm import Code, Module, Val, i64

ROWS = LANES = STEPS = 16  # rows of a tile, columns of C, and units along k


@dataclasses.dataclass(frozen=True)
class TileShape:
    """A block of C: `rows` in tiles of 16, by `vectors` tiles of columns of which the last holds `tail`.

    `add`: the kernel can add to C, where its run-time flag says so. `ahead`: rows of B, and bytes of each, that the
    second-level cache is asked for in every step of 16 units.
    """

    rows: int
    vectors: int
    tail: int
    add: bool = False
    ahead: tuple[int, int] = (0, 0)

    @property
    def heights(self) -> list[int]:
        """Rows of the tiles of A, from above."""
        return [min(ROWS, self.rows - r) for r in range(0, self.rows, ROWS)]

    @property
    def widths(self) -> list[int]:
        """Columns of the tiles of B, from the left."""
        return [LANES] * (self.vectors - 1) + [self.tail]

    def registers(self) -> tuple[list[list[int]], list[int], list[int]]:
        """Registers of the tiles of C, of A and of B: what C leaves of the eight goes to the longer side."""
        r, v = len(self.heights), self.vectors
        c = [[i * v + j for j in range(v)] for i in range(r)]
        free = range(r * v, tiles.REGISTERS)
        a = r if r <= v else len(free) - v
        return c, _shared(r, free[:a]), _shared(v, free[a:])


def _shared(count: int, registers: range) -> list[int]:
    """A register for each tile: the last, whose size may be another, has one alone, and the others take turns."""
    if count <= len(registers):
        return list(registers[:count])
    turns = registers[:-1]
    return [turns[i % len(turns)] for i in range(count - 1)] + [registers[-1]]


def block_of_tiles(rows: int, columns: int) -> tuple[int, int]:
    """Rows and tiles of columns of one block of C: four tiles, so that four sums are under way."""
    if columns <= LANES:
        return 4 * ROWS, 1
    return (ROWS, 4) if rows <= ROWS else (2 * ROWS, 2)


def configure(c: Code, shape: TileShape) -> None:
    """Set the sizes of the tile registers for calls of the kernel of this shape."""
    of_c, of_a, of_b = shape.registers()
    sizes = {}
    for i, height in enumerate(shape.heights):
        sizes[of_a[i]] = height, tiles.ROW_BYTES
        for j, width in enumerate(shape.widths):
            sizes[of_b[j]], sizes[of_c[i][j]] = (STEPS, 4 * width), (height, 4 * width)
    tiles.resize(c, sizes)


def tile_kernel(module: Module, mode: Mode, shape: TileShape) -> str:
    """`void(ptr a, i64 a_row, ptr b, i64 b_step, ptr c, i64 ldc, i64 steps, i1 add, ptr ahead, i64 ahead_row)`.

    `a_row` and `b_step` are bytes between rows of A and packed steps of B, `ldc` counts elements, and `steps` units
    along k, a multiple of 16. `ahead`: the first of the rows `shape.ahead`, and `ahead_row` the bytes between them. The
    registers are configured.
    """
    name = f"tiles_{mode.tag}_{shape.rows}x{shape.vectors}_{shape.tail}" + "_add" * shape.add
    name += f"_ahead{shape.ahead[0]}x{shape.ahead[1]}" if shape.ahead[0] else ""
    if name in module.functions:
        return name
    a, a_row, b, b_step, out, ldc, steps, add, ahead, ahead_row = params = [
        Val("ptr", "%a"), Val("i64", "%a_row"), Val("ptr", "%b"), Val("i64", "%b_step"), Val("ptr", "%c"),
        Val("i64", "%ldc"), Val("i64", "%steps"), Val("i1", "%add"), Val("ptr", "%ahead"), Val("i64", "%ahead_row"),
    ]  # fmt: skip
    c = Code(module, name, params, attributes=ATTRIBUTES)
    of_c, of_a, _ = shape.registers()
    line = c.mul(ldc, BYTES[mode.acc])
    block = [
        (of_c[i][j], offset(c, c.gep("i8", out, c.mul(line, ROWS * i)), LANES * j, BYTES[mode.acc]))
        for i in range(len(of_a))
        for j in range(shape.vectors)
    ]
    for tile, _ in block:
        tiles.clear(c, tile)
    if shape.add:
        with c.when(add):
            for tile, ptr in block:
                tiles.load(c, tile, ptr, line)
    with c.loop(0, steps, STEPS) as step:
        left, right = c.gep("i8", a, c.mul(step, 4)), c.gep("i8", b, c.mul(step, b_step))
        _products(c, mode, shape, (left, a_row), (right, b_step))
        if shape.ahead[0]:
            first = c.mul(c.binary("sdiv", step, i64(STEPS)), shape.ahead[0])
            fetch_rows(c, c.gep("i8", ahead, c.mul(first, ahead_row)), ahead_row, shape.ahead)
    for tile, ptr in block:
        tiles.store(c, tile, ptr, line)
    c.finish()
    return name


def _products(c: Code, mode: Mode, shape: TileShape, a: tuple[Val, Val], b: tuple[Val, Val]) -> None:
    """One tile along k for the whole block; the shorter side stays in registers while the longer one passes."""
    of_c, of_a, of_b = shape.registers()

    def left(i: int) -> None:
        tiles.load(c, of_a[i], c.gep("i8", a[0], c.mul(a[1], ROWS * i)), a[1])

    def right(j: int) -> None:
        tiles.load(c, of_b[j], c.gep("i8", b[0], i64(tiles.ROW_BYTES * j)), b[1])

    def multiply(i: int, j: int) -> None:
        tiles.multiply(c, mode.tile_product, of_c[i][j], of_a[i], of_b[j])

    rows, columns = range(len(of_a)), range(shape.vectors)
    if len(rows) <= len(columns):
        for i in rows:
            left(i)
        for j in columns:
            right(j)
            for i in rows:
                multiply(i, j)
    else:
        for j in columns:
            right(j)
        for i in rows:
            left(i)
            for j in columns:
                multiply(i, j)
