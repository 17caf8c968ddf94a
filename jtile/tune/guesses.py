"""What `jt.auto` may stand for in a kernel on a target, the best first: from products by the model of time and the
rules that the library chooses by, from bytes of a program where there are none."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jtile import ir
from jtile.tune import nature, products, warpgroups
from jtile.tune.nature import COLUMNS, ROWS, STAGES, TERMS, Chain, Place, Whole
from jtile.tune.warpgroups import Form, cdiv

LITTLE = 100 << 10  # bytes of shared memory of a block of all GPUs but those made for data centres
BUDGET, OFTEN = 16384, 4096  # bytes of the largest tile of a program; of one that is passed over several times
LINES = 512  # bytes along the last axis that a tile has at least
SHORTEST = 128  # where there would be fewer programs than multiprocessors, each with a loop
# Bytes that the programs of a multiprocessor ask for at a time, together, so that memory stays busy; and those of the
# largest tile that one program does: sums of 64 rows of a million numbers take 473 us on an H200 in tiles of 4 KiB, 91
# in tiles of 32 KiB, 109 in tiles of 64 KiB; sums of 4096 columns 836, 56 and 48 us.
IN_FLIGHT, HELD = 32768, 32768
WAVES = 8  # programs for each multiprocessor or core that keep all of them busy
STAGED, FEW_STAGED = 3, 4
_PASSES = (ir.Reduce, ir.ArgReduce, ir.UserReduce, ir.Cumulative, ir.UserScan, ir.Sort)


@dataclasses.dataclass(frozen=True)
class Guess:
    """Values of meta-parameters.

    Attributes:
      config: the values; options: for the compiler, where the user gives none.
      why: how they were found, as the end of a sentence.
      planned: whether they are for the block level, and good only where the kernel has a plan there.
      us: the predicted microseconds, 0 where nothing predicts them.
    """

    config: Mapping[str, int]
    why: str
    options: Mapping[str, int] = dataclasses.field(default_factory=dict)
    planned: bool = False
    us: float = 0.0


@dataclasses.dataclass(frozen=True)
class Sides:
    """Which meta-parameters are sides of a product's tiles.

    Attributes:
      names: per place, the meta-parameter to be chosen that stands there, or None: it is fixed.
      stages: meta-parameters that are depths of pipelines.
    """

    names: Mapping[Place, str | None]
    stages: tuple[str, ...]

    def config(self, rows: int | None, columns: int | None, terms: int | None) -> dict[str, int] | None:
        """The values for such a tile; None where one meta-parameter would need two."""
        found: dict[str, int] = {}
        for place, size in zip((ROWS, COLUMNS, TERMS), (rows, columns, terms)):
            name = self.names[place]
            if name is not None and size is not None and found.setdefault(name, size) != size:
                return None
        return found


def of_product(whole: Whole, sides: Sides, target: Any) -> Iterator[Guess]:
    """The guesses for a kernel that makes one product of arrays (or gates), tile by tile."""
    p, cores = whole.product, target.programs_at_once
    text = f"for the product {_text(whole)}"
    if memories := matrix_memories(target):
        tile = products.on_npu(p.m, p.n, p.k, p.itemsize, p.gates, memories, cores)
        yield from _guess(sides, tile, f"tiles {text} that the memories of a matrix unit hold twice")
        return
    if "warps" not in target.features:
        tile = products.on_cpu(p.m, p.n, p.k, cores)
        why = f"tiles {text} that share its sides evenly among {cores} cores, with all terms of a sum"
        yield from _guess(sides, tile | {"bk": p.k}, why)
        powers = {"bm": products.side(p.m, 128), "bn": products.side(p.n, 128), "bk": products.side(p.k, 256)}
        yield from _guess(sides, powers, f"tiles {text} whose sides are powers of two")
        return
    measured = "measured warps" in target.features
    if warpgroups.multiplies(target):
        on = warpgroups.gpu(target)
        for tile in warpgroups.ranked(p, on):
            fixed = zip((ROWS, COLUMNS), ("bm", "bn"), whole.tile)
            if any(sides.names[place] is None and tile[key] != have for place, key, have in fixed):
                continue
            us = warpgroups.predicted_us(p, Form(1, tile["bm"], tile["bn"]), on)
            why = f"the model of time expects {us:.3g} us {text} in roles at the block level"
            options = products.warps(tile["bm"], tile["bn"], p.itemsize, p.gates)
            yield from _guess(sides, tile, why, options, planned=True, us=us)
    tile = products.on_gpu(p.m, p.n, p.k, p.itemsize, p.gates, p.transposed, cores)
    options = products.warps(tile["bm"], tile["bn"], p.itemsize, p.gates)
    stages, fewer = products.stages_of_few_rows(**tile, itemsize=p.itemsize)
    why = f"tiles {text} that occupy {cores} multiprocessors, at the tile level"
    yield from _guess(sides, tile, why, (options | fewer) if measured else {}, stages.get("stages", STAGED))


def of_chain(chain: Chain, sides: Sides, target: Any) -> Iterator[Guess]:
    """The guesses for attention, and what is like it: `sides` are those of the first product."""
    t, s, d, itemsize = chain.t, chain.s, chain.d, chain.itemsize
    text = f"for a chain of products of {t} rows over {s} columns and {d} terms of {chain.dtype}"
    if memories := matrix_memories(target):
        tile = products.attention_on_npu(t, s, d, memories)
        yield from _guess(sides, {"bm": tile["bq"], "bn": tile["bk"]}, f"tiles {text} that a matrix unit's sums fit in")
        return
    if "warps" not in target.features:
        evenly = lambda n, most: cdiv(n, max(cdiv(n, most), 1))
        yield from _guess(sides, {"bm": evenly(t, 128), "bn": evenly(s, 256)}, f"even tiles {text}")
        return
    if warpgroups.multiplies(target):
        tile = warpgroups.attention(t, s, d, itemsize, chain.uneven, chain.guessed)
        if tile is not None:
            why = f"the tiles that were quickest {text} at the block level"
            yield from _guess(sides, {"bm": tile["bq"], "bn": tile["bk"]}, why, planned=True)
    shared = target.memory("block")
    little = shared is None or shared.size is None or shared.size <= LITTLE
    tile = products.attention_on_gpu(t, s, d, itemsize, chain.uneven, little)
    options = products.warps_of_attention(d, itemsize) if "measured warps" in target.features else {}
    why = f"tiles {text} that registers and shared memory hold"
    yield from _guess(sides, {"bm": tile["bq"], "bn": tile["bk"]}, why, options, 2)


def _guess(
    sides: Sides, tile: Mapping[str, int], why: str, options: Mapping[str, int] | None = None, stages: int = STAGED,
    **of: Any,
) -> Iterator[Guess]:  # fmt: skip
    config = sides.config(tile["bm"], tile["bn"], tile.get("bk"))
    if config is not None:
        yield Guess(config | dict.fromkeys(sides.stages, stages), why, options or {}, **of)


def matrix_memories(target: Any) -> dict[str, int]:
    """The memories of an NPU's matrix unit, bytes by name; empty elsewhere."""
    known = {m.name: m.size for m in target.memories if m.size is not None}
    names = "l0a", "l0b", "l0c"
    return {name: known[name] for name in names} if all(name in known for name in names) else {}


def whole_sides(target: Any) -> bool:
    """Whether sides of tiles need not be powers of two."""
    return "warps" not in target.features and not matrix_memories(target)


def budget(kernel: ir.Kernel) -> int:
    """Bytes of the largest tile that a program of a kernel without products best holds."""
    return OFTEN if any(isinstance(op, _PASSES) for op in kernel.body.walk()) else BUDGET


def streamed(kernel: ir.Kernel, target: Any) -> int:
    """Bytes of the largest tile that a program of a kernel without products best reads in a loop, on a GPU."""
    return min(IN_FLIGHT * target.programs_at_once // max(math.prod(kernel.grid), 1), HELD)


def largest(kernel: ir.Kernel) -> int:
    """Elements of the largest tile that a program reads, writes or makes."""
    values = [v for op in kernel.body.walk() for v in (*op.operands(), *op.results)]
    return max((v.type.size for v in values if isinstance(v.type, ir.TileType)), default=0)


def largest_tile(kernel: ir.Kernel) -> int:
    """Bytes of the largest tile that a program reads, writes or makes."""
    values = [v for op in kernel.body.walk() for v in (*op.operands(), *op.results)]
    tiles = [v.type for v in values if isinstance(v.type, ir.TileType)]
    return max((t.size * max(t.info.bits // 8, 1) for t in tiles), default=0)


def _text(whole: Whole) -> str:
    p = whole.product
    many = f"{p.batch} x " * (p.batch > 1) + f"{p.gates} gates of " * (p.gates > 1)
    return f"{many}{p.m} x {p.n} x {p.k} of {whole.dtype}"


def sides_of(places: Mapping[str, frozenset[Place]], config: Mapping[str, int], kernel: ir.Kernel) -> Sides | None:
    """The sides of the tiles of a kernel's first product that meta-parameters are; None where a side is computed from
    them.

    Args:
      places: what each meta-parameter moves in the kernel, which was traced with `config`.
    """
    tile = dict(zip((ROWS, COLUMNS, TERMS), nature.sizes(nature.products_of(kernel)[0])))
    names: dict[Place, str | None] = {}
    for place, size in tile.items():
        here = [n for n, moved in places.items() if place in moved]
        if len(here) > 1 or any(config[n] != size for n in here if _alone(place, kernel)):
            return None
        names[place] = here[0] if here and config[here[0]] == size else None
    stages = tuple(n for n, moved in places.items() if moved == {STAGES})
    return Sides(names, stages)


def _alone(place: Place, kernel: ir.Kernel) -> bool:
    """Whether all products of a kernel are of equal size there."""
    return len(nature.places(kernel)[place]) == 1
