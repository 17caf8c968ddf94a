"""Products of groups of rows with a stack of packed quantised matrices on Hopper, at the block level: those of
`hopper_quantized`, of which each tile takes the matrix of its group.

Programs stay, and take tiles one after the other: while a tile's last sums are written, words of the next one come. So
a matrix that some rows go through is read as fast as memory gives it, however few they are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles, hopper_quantized
from jtile.ops._shapes import known
from jtile.ops.dispatch import first_unmet
from jtile.ops.epilogues import ACTIVATIONS
from jtile.ops.hopper_quantized import DEPTH, DOWN, PIECE, ROWS, WORDS
from jtile.ops.operands import Weight
from jtile.ops.row_groups import most_tiles, place, tiles_of_groups
from jtile.ops.super_blocks import SuperBlocks

FEWEST, MOST = 8, 256  # rows of a group that a tile takes
_HELPERS = 32  # registers of a thread of the roles that copy, which find out where tiles lie


@dataclasses.dataclass(frozen=True)
class _HandOver:
    """Sums that one role leaves for another in each tile: a buffer, and barriers for its being full and empty."""

    sums: jt.Shared
    full: jt.Barrier
    empty: jt.Barrier

    @classmethod
    def of(cls, columns: int) -> _HandOver:
        """For sums [64, columns]."""
        return cls(jt.alloc((ROWS, columns), jnp.float32), jt.barrier(1), jt.barrier(1))

    def give(self, n, acc) -> None:
        """Leave the sums of the program's n-th tile."""
        self.empty.at(n).wait(before=True)
        self.sums.store(acc)
        self.full.at(n).arrive()

    def take(self, n):
        """The sums of the program's n-th tile."""
        self.full.at(n).wait()
        acc = self.sums.load()
        self.empty.at(n).arrive()
        return acc


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The tiles of a call: `columns` rows of a group, and `high` times 64 rows of its matrix.

    last, ends: see `tiles_of_groups`. count: tiles of all groups. beside: from the rows of the first consumer to those
    of the second, in tiles of 64; rows: those of x; wide: tiles of a matrix."""

    last: jax.Array
    ends: jax.Array
    count: jax.Array
    columns: int
    rows: int
    groups: int
    wide: int

    @classmethod
    def of(cls, sizes: jt.Ref, columns: int, rows: int, groups: int, wide: int) -> _Tiles:
        """The tiles of groups of these sizes."""
        last, ends, _ = tiles_of_groups(sizes[...], columns, rows)
        return cls(last, ends, last.max() * wide, columns, rows, groups, wide)

    def each(self):
        """The numbers of this program's tiles, counted from 0."""
        first, step = jt.program_id(0), jt.num_programs(0)
        return jt.range(jnp.maximum(jt.cdiv(self.count - first, step), 0))

    def at(self, n):
        """(group, its first row in this tile, the row behind the last, tile of the matrix) of the program's n-th tile.
        A tile that would hang over the last row begins before its first row."""
        t = jt.program_id(0) + n * jt.num_programs(0)
        group, first, end, _ = place(
            self.last, self.ends, self.groups, jax.lax.div(t, jnp.int32(self.wide)), self.columns, self.rows
        )
        return group, first, end, jax.lax.rem(t, jnp.int32(self.wide))

    def begin(self, first):
        """The first row of x that comes for a tile of rows from `first` on."""
        return jnp.minimum(first, max(self.rows - self.columns, 0))


def _type(x, weight, sizes, *, activation, out_dtype, **_):
    out = weight.codes.shape[1] // (1 if activation is None else 2)
    return jax.ShapeDtypeStruct((x.shape[0], out), jnp.dtype(out_dtype))


@jt.function
def _zeros_behind(y, end, columns: int) -> None:
    """Zeros in the rows of y from `end` on, `columns` rows at a time."""
    wide = jt.cdiv(y.shape[1], ROWS)
    first = jax.lax.div(end, jnp.int32(columns)) * wide
    behind = jnp.maximum(jt.cdiv(y.shape[0], columns) * wide - first - jt.program_id(0), 0)
    for n in jt.range(jt.cdiv(behind, jt.num_programs(0))):
        t = first + jt.program_id(0) + n * jt.num_programs(0)
        row = jax.lax.div(t, jnp.int32(wide)) * columns
        at = (jt.ds(row, columns), jt.ds(jax.lax.rem(t, jnp.int32(wide)) * ROWS, ROWS))
        mask = jnp.broadcast_to((row + jt.arange(columns) >= end)[:, None], (columns, ROWS))
        jt.store(y, at, jnp.zeros((columns, ROWS), y.dtype), mask=mask)


def _store(y, acc, tiles: _Tiles, first, end, row) -> None:
    """Write sums [64, columns] of the rows from `first` to before `end`, of columns of y from `row` on."""
    begin, columns = tiles.begin(first), tiles.columns
    r = begin + jt.arange(columns)
    mask = jnp.broadcast_to(((r >= first) & (r < end))[:, None], (columns, ROWS))
    jt.store(y, (jt.ds(begin, columns), jt.ds(row * ROWS, ROWS)), acc.T.astype(y.dtype), mask=mask)


@jt.function
def _feed(mem: hopper_quantized.Memory, x, tiles: _Tiles, pieces: int, width: int) -> None:
    """Copy the rows of each tile, in so many pieces of `width` columns."""
    for n in tiles.each():
        _, first, _, _ = tiles.at(n)
        rows = jt.ds(tiles.begin(first), tiles.columns)
        for k in jt.range(pieces):
            at = n * pieces + k
            mem.x_empty.at(at).wait(before=True)
            mem.x_full.at(at).expect(mem.x.nbytes)
            jt.async_copy(x.at[rows, jt.ds(k * width, width)], mem.x.at(at), mem.x_full.at(at))


@jt.kernel(out_type=_type, grid=lambda *_, programs, **__: programs)
def hopper_grouped_product(
    x, weight: Weight, sizes, y, *, kind: str, activation: str | None, high: int, deep: int, columns: int, slots: int,
    x_slots: int, pieces: int, registers: int, programs: int, out_dtype: str,
):  # fmt: skip
    """y [m, out] of x [m, in], whose rows stand in the order of their groups, and weights of groups: codes [groups,
    out, words], scale [groups, out, in / group], minimum like it, which is read for Q4_1 alone; sizes int32, zero
    behind the groups. With an activation rows of a matrix are gates and, behind them, what they gate: y [m, out / 2].

    Roles are those of `hopper_quantized_product`; with an activation the first 64 rows of a tile are gates.
    """
    # Yᵀ = W_g Xᵀ, a sum over rounds of 256 weights     for the rows of group g; zero behind the groups
    codes, last = weight.codes, weight.scaled_last(kind)
    blocks = [] if last else [weight.scale, weight.minimum] if kind == "q4_1" else [weight.scale]
    words = 1 if kind in hopper_quantized.FOUR_BIT else 2
    mem = hopper_quantized.memory(x, blocks, wide=words, high=high, deep=1, columns=columns, slots=slots,
                                  x_slots=x_slots, pieces=pieces)  # fmt: skip
    parts = [[_HandOver.of(columns) for _ in range(high)] for _ in range(deep - 1)]
    gated = None if activation is None else _HandOver.of(columns)
    rounds, each = jt.cdiv(codes.shape[2], WORDS * words), DEPTH // PIECE // pieces
    matrix = jt.cdiv(codes.shape[1], high * ROWS)
    place_of = lambda i, r: r * high + i if gated is None else i * matrix + r
    found = lambda: _Tiles.of(sizes, columns, x.shape[0], codes.shape[0], matrix)
    for j in range(deep):
        for i in range(high):
            with jt.role(f"consumer{j}{i}", warps=4, registers=registers):
                tiles = found()
                for n in tiles.each():
                    g, first, end, r = tiles.at(n)
                    acc = hopper_quantized.consume(mem, i, n * rounds + j, (n + 1) * rounds, deep, kind, -n * rounds)
                    if j:
                        parts[j - 1][i].give(n, acc)
                    else:
                        for part in parts:
                            acc = acc + part[i].take(n)
                        acc = acc * jnp.float32(DOWN) if x.dtype == jnp.bfloat16 else acc
                        if last:
                            acc = acc * weight.scale.tiles(None, ROWS, 1)[g, place_of(i, r), 0]
                        if gated is not None and i:
                            gated.give(n, acc)
                        else:
                            acc = acc if gated is None else ACTIVATIONS[activation](acc) * gated.take(n)
                            _store(y, acc, tiles, first, end, r if gated is not None else place_of(i, r))
                if i == j == 0:
                    _zeros_behind(y, tiles.ends.max(), columns)
    with jt.role("producer", warps=1, registers=_HELPERS):
        tiles = found()
        for n in tiles.each():
            g, _, _, r = tiles.at(n)
            for k in jt.range(rounds):
                mem.empty.at(n * rounds + k).wait(before=True)
                places = [(g, place_of(i, r)) for i in range(high)]
                hopper_quantized.bring(mem, n * rounds + k, k, codes, blocks, places)
    with jt.role("feeder", warps=1, registers=_HELPERS):
        _feed(mem, x, found(), rounds * each, PIECE * pieces)


def choice(m: int, groups: int, out: int, inner: int, kind: str, gated: bool) -> dict[str, Any]:
    """Meta-parameters: tiles have about twice as many rows as a group has on average; those of a gated layer, whose
    roles hand their sums over in shared memory, have fewer."""
    most = MOST // 2 if gated else MOST
    columns = min(max(jt.next_power_of_2(2 * jt.cdiv(m, groups)), FEWEST), most)
    like = kind if kind != "fp8" else "int8"
    found = hopper_quantized.choice(columns, gpu_tiles.processors() * 2 * ROWS, inner, like)  # as of large matrices
    del found["splits"]
    if jt.cdiv(inner, DEPTH) % found["deep"]:
        found["deep"] = 1
    if columns >= 32:  # room for sums that roles hand over
        found["slots"] = min(found["slots"], 4)
    if columns > 64:
        found["x_slots"] = min(found["x_slots"], 6)
    elif columns == 64 and found["deep"] == 1:
        found["x_slots"] = 4
    elif columns == 64 and kind not in hopper_quantized.FOUR_BIT:  # each of two consumers has slots of x of its own
        found["slots"] = 2
    programs = min(gpu_tiles.processors(), most_tiles(m, groups, columns) * (out // (2 * ROWS)))
    return found | {"registers": min(found["registers"], 256 - _HELPERS), "programs": programs}


def misfit(x, weight: Weight | SuperBlocks, sizes, *, kind: str, activation: str | None = None, **_) -> str | None:
    """Why the kernel does not compute these products, None where it does."""
    if isinstance(weight, SuperBlocks):
        return "weights have super blocks"
    out, rows = weight.scale.shape[1], 2 * ROWS
    of_one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), weight)
    return hopper_quantized.misfit(x, of_one, kind) or first_unmet(
        (out % rows == 0, f"matrices have {out} rows, no multiple of {rows}"),
        (activation is None or _room_beside(of_one, kind, x.shape[1]), "scales leave no room for gates"),
        (gpu_tiles.on_one_device(), "rows may be shared out among several devices"),
    )


def _room_beside(weight: Weight, kind: str, inner: int) -> bool:
    """Whether there is room for the scales of a round of one matrix beside sums that gates are handed over in: for
    lines of 16 bytes, or of any length beside codes of 4 bits, which take half as much."""
    if kind in hopper_quantized.FOUR_BIT or weight.scaled_last(kind):
        return True
    return weight.scale.shape[-1] * DEPTH * weight.scale.dtype.itemsize <= 16 * inner


def products(x, weight: Weight, sizes, *, kind: str, out_dtype: str, activation: str | None = None):
    """The products [m, out] of x [m, in] in the order of groups; with an activation [m, out / 2]."""
    groups, out = weight.scale.shape[:2]
    meta = choice(known(x.shape[0]), groups, out, x.shape[1], kind, activation is not None)
    if weight.minimum is None:  # all kinds have one signature
        weight = weight._replace(minimum=weight.scale)
    return hopper_grouped_product(x, weight, sizes, kind=kind, activation=activation, out_dtype=out_dtype, **meta)
