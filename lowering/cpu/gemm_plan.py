"""How one tile product is carried out: strategy, register block, cache blocks and workspace layout. Pure arithmetic."""

from __future__ import annotations

import dataclasses
from typing import Literal

from .gemm_modes import BYTES, STORAGE, Mode
from .gemm_tiles import STEPS, block_of_tiles
from .isa import Isa

_THIN = 8  # up to this many rows a product reads B once, so packing B cannot pay
_THIN_BESIDE_TILES = 5  # the same for floats where there are tile registers, on which six rows take as long as 16
_B_BLOCK_UNIT_BYTES = 1024  # bytes of one packed column of B in a k block: a 32-wide panel of 32 KiB stays in L1
_STREAMED_BYTES = 512 * 1024  # a B larger than this does not come from the second-level cache
_WORTH_COPYING = 256  # columns of a product for which rows of A are copied side by side, which takes 2 % of its time
_X_BLOCK_BYTES = 32768  # the thin side of a dot product stays in L1


@dataclasses.dataclass(frozen=True)
class Rows:
    """`count` row panels of `rows` rows each, the first at `start`; `panel` is the index of the first."""

    start: int
    count: int
    rows: int
    panel: int


@dataclasses.dataclass(frozen=True)
class Columns:
    """`count` column panels from `start`, each `width` columns in `vectors` vectors, the last with `tail` lanes."""

    start: int
    count: int
    width: int
    vectors: int
    tail: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Decisions for one product; sizes of the workspace parts are in bytes.

    Attributes:
      strategy: `"packed"` (B in panels), `"direct"` (B read in place) or `"dot"` (vectors along k).
      swap: the dot strategy runs on the transposed product (thin side is B).
      a_layout: `"raw"` (k contiguous), `"raw_lanes"` (m contiguous), `"rows"` or `"panels"` (packed).
      a_spread: rows of a `"raw"` A are copied side by side where all of them begin in the same set of the cache.
      kc: k elements of one block, a whole number of vectors; one block holds all of k unless `blocks` > 1.
    """

    strategy: Literal["packed", "direct", "dot"]
    mode: Mode
    swap: bool
    a_layout: Literal["raw", "raw_lanes", "rows", "panels"]
    rows: tuple[Rows, ...]
    columns: tuple[Columns, ...]
    a_width: int
    kc: int
    blocks: int
    a_bytes: int
    b_bytes: int
    sum_bytes: int
    a_spread: bool = False

    @property
    def workspace(self) -> int:
        return self.a_bytes + self.b_bytes + self.sum_bytes

    @property
    def a_row_bytes(self) -> int:
        """Bytes between packed rows."""
        return self.kc // self.mode.group * self.mode.unit_bytes


def register_block(isa: Isa, kind: str, narrow: bool) -> tuple[int, int, int]:
    """Usual rows, most rows, and vectors of the accumulator block; `narrow`: C is at most one vector wide."""
    if isa.registers == 32:
        return (8, 8, 1) if narrow else (8, 11, 2)
    rows = 6 if isa.has("fma") and kind == "fma" else 4
    return rows, rows, 1 if narrow else 2


def split_rows(m: int, usual: int, most: int) -> tuple[Rows, ...]:
    """Row panels of one height where m allows it, else of two that differ by one: each height costs code."""
    for height in range(usual, most + 1):
        if m % height == 0:
            return (Rows(0, m // height, height, 0),)
    panels = -(-m // usual)
    low, high = divmod(m, panels)
    parts = [Rows(0, high, low + 1, 0), Rows(high * (low + 1), panels - high, low, high)]
    return tuple(p for p in parts if p.count)


def _rows_of_tiles(m: int, height: int) -> tuple[Rows, ...]:
    """Row panels of one height and a lower one: an instruction on tiles takes as long as they have rows."""
    whole, rest = divmod(m, height)
    parts = [Rows(0, whole, height, 0), Rows(whole * height, 1, rest, whole)]
    return tuple(p for p in parts if p.count and p.rows)


def split_columns(n: int, lanes: int, vectors: int) -> tuple[Columns, ...]:
    """Whole panels and one narrower rest."""
    width = lanes * vectors
    parts = [Columns(0, n // width, width, vectors, lanes)] if n >= width else []
    if rest := n % width:
        need = -(-rest // lanes)
        parts.append(Columns(n - rest, 1, rest, need, rest - (need - 1) * lanes))
    return tuple(parts)


def make_plan(
    mode: Mode, m: int, n: int, k: int, trans_a: bool, trans_b: bool, made: bool = False, sets: int = 0
) -> Plan:
    """Choose the strategy for C[m, n] = A[m, k] . B[k, n]; all sizes at least 1. `made`, `sets`: see `GemmSpec`."""
    vector = mode.lanes * mode.group
    long_k = k >= 2 * vector
    if made and trans_b and not trans_a and mode.kind == "fma" and long_k:
        return _dot_plan(mode, m, n, k, swap=False, contiguous=True, whole=True)
    if n <= 4 and not trans_a and (long_k or n * m <= 64):
        return _dot_plan(mode, n, m, k, swap=True, contiguous=trans_b)
    thin = _THIN_BESIDE_TILES if mode.kind == "bf16" and _fills_tiles(mode, k) else _THIN
    if m <= thin and trans_b and (long_k or n <= 4):
        return _dot_plan(mode, m, n, k, swap=False, contiguous=not trans_a)
    if m <= thin and not trans_b:
        return _direct_plan(mode, m, n, k, trans_a, sets)
    return _packed_plan(mode, m, n, k, trans_a, trans_b, sets)


def _fills_tiles(mode: Mode, k: int) -> bool:
    """Whether packed products run on tile registers: of a shorter k the better part of a tile would be zeros."""
    return mode.has_tiles and 2 * k > STEPS * mode.group


def _round(x: int, to: int) -> int:
    return -(-x // to) * to


def _a_width(mode: Mode, rows: int) -> int:
    """Units of one step of a packed A panel: a power of two, at least 4, up to a vector, then whole vectors."""
    return max(4, 1 << (rows - 1).bit_length()) if rows <= mode.lanes else _round(rows, mode.lanes)


def _k_blocks(mode: Mode, k: int, limit: int) -> tuple[int, int]:
    """Elements per block (whole vectors) and number of blocks, evenly split, about `limit` elements at most."""
    vector = mode.lanes * mode.group
    blocks = max(1, -(-k // max(limit, vector)))
    kc = _round(-(-k // blocks), vector)
    return kc, -(-k // kc)


def _a_layout(mode: Mode, k: int, trans_a: bool, panels: int) -> Literal["raw", "raw_lanes", "rows", "panels"]:
    if mode.tiles:
        return "raw" if mode.a_in_place and not trans_a and k % (STEPS * mode.group) == 0 else "rows"
    if not trans_a:
        return "raw" if mode.a_in_place and k % mode.group == 0 else "rows"
    return "raw_lanes" if mode.group == 1 and mode.a_in_place and panels == 1 else "panels"


def _a_bytes(mode: Mode, layout: str, rows: tuple[Rows, ...], m: int, kc: int, width: int) -> int:
    units = kc // mode.group * mode.unit_bytes
    if layout == "rows":
        return _round(m * units, 64)
    return _round(sum(r.count for r in rows) * width * units, 64) if layout == "panels" else 0


def _panel_vectors(n: int, lanes: int, most: int) -> int:
    """Vectors of a panel: as many as there may be, or somewhat fewer if that leaves no rest to write code for."""
    need = -(-n // lanes)
    if need <= most:
        return need
    even = [v for v in range(most, most * 3 // 5, -1) if n % (v * lanes) == 0]
    return even[0] if even else most


def _direct_plan(mode: Mode, m: int, n: int, k: int, trans_a: bool, sets: int) -> Plan:
    budget = (24 if mode.isa.registers == 32 else 10 if mode.kind == "fma" else 8) // max(sets, 1)
    usual = m if mode.isa.registers == 32 else min(m, 6)
    rows = split_rows(m, usual, usual)
    vectors = max(1, min(16, (budget - (budget // 4) * mode.flip) // rows[0].rows))
    columns = split_columns(n, mode.lanes, _panel_vectors(n, mode.lanes, vectors))
    size = BYTES[STORAGE[mode.b]]
    limit = k
    if n * k * size > _STREAMED_BYTES:  # a few whole rows at a time: memory is read in order
        limit = 16 * mode.group
    elif columns[0].vectors * mode.lanes * size < 64:  # neighbouring panels share cache lines: come back to them soon
        limit = 64
    kc, blocks = _k_blocks(mode, k, limit)
    layout = _a_layout(mode, k, trans_a, sum(c.count for c in columns))
    width = _a_width(mode, rows[0].rows)
    a_bytes = _a_bytes(mode, layout, rows, m, kc, width)
    return Plan("direct", mode, False, layout, rows, columns, width, kc, blocks, a_bytes, 0, 0)


def _packed_plan(mode: Mode, m: int, n: int, k: int, trans_a: bool, trans_b: bool, sets: int) -> Plan:
    if _fills_tiles(mode, k):
        mode = dataclasses.replace(mode, tiles=True)
        height, vectors = block_of_tiles(m, n)
        rows = _rows_of_tiles(m, height)
    else:
        usual, most, vectors = register_block(mode.isa, mode.kind, n <= mode.lanes)
        if sets > 1:
            usual = max((24 if mode.isa.registers == 32 else 12) // (vectors * sets), 1)
            most = usual + (mode.isa.registers == 32)
        rows = split_rows(m, usual, most)
    columns = split_columns(n, mode.lanes, vectors)
    kc, blocks = _k_blocks(mode, k, _B_BLOCK_UNIT_BYTES // mode.unit_bytes * mode.group)
    layout = _a_layout(mode, k, trans_a, sum(c.count for c in columns))
    width = _a_width(mode, rows[0].rows)
    padded = max(c.vectors for c in columns) * mode.lanes  # one panel is packed at a time
    b_bytes = _round(padded * (kc // mode.group) * mode.unit_bytes, 64)
    sum_bytes = _round(padded * 4, 64) if mode.flip else 0
    spread = layout == "raw" and not mode.tiles and m > _THIN and n >= _WORTH_COPYING
    a_bytes = _a_bytes(mode, "rows" if spread else layout, rows, m, kc, width)
    return Plan("packed", mode, False, layout, rows, columns, width, kc, blocks, a_bytes, b_bytes, sum_bytes, spread)


def _dot_plan(mode: Mode, thin: int, long: int, k: int, swap: bool, contiguous: bool, whole: bool = False) -> Plan:
    """`thin` rows against `long` streamed rows; `contiguous`: the thin side has unit stride along k. `whole`: one block
    holds all of k, so that the terms of an element are added in one order however many rows there are."""
    mode = mode.swapped() if swap else mode
    rows = (Rows(0, 1, thin, 0),) if thin <= _THIN else split_rows(thin, 4, 6 if mode.isa.registers == 32 else 4)
    cols = {1: 8, 2: 8, 3: 4, 4: 4}.get(thin, 2) if thin <= _THIN else 4
    if mode.isa.registers == 16:
        cols = max(1, cols // 2)
    cols = min(cols, mode.lanes)
    columns = [Columns(0, long // cols, cols, cols, 0)] if long >= cols else []
    if rest := long % cols:
        columns.append(Columns(long - rest, 1, rest, rest, 0))
    raw = contiguous and mode.a_in_place
    size = BYTES[STORAGE[mode.a] if raw else mode.packed]
    kc, blocks = _k_blocks(mode, k, k if whole else _X_BLOCK_BYTES // (thin * size))
    layout = "raw" if raw else "rows" if contiguous else "panels"
    a_bytes = 0 if raw else _round(thin * kc * BYTES[mode.packed], 64)
    return Plan("dot", mode, swap, layout, rows, tuple(columns), 0, kc, blocks, a_bytes, 0, 0)
