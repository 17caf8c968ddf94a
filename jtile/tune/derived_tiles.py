"""The tiles of a derived kernel, of reverse mode say: those that the model of time expects to be best for what *it*
multiplies, on its target, whatever the tiles of the kernel are that it was derived from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jtile import ir, passes
from jtile.passes.apart import apart
from jtile.passes.axes import Node, contraction
from jtile.passes.partials import Busy
from jtile.transforms.factors import Factors, factors
from jtile.transforms.retile import free, lanes, retile
from jtile.transforms.rounds import round_size, shorter_rounds
from jtile.tune import cost, guesses, nature, products, warpgroups
from jtile.tune.auto import fits, has_plan, slots
from jtile.tune.guesses import Guess, Sides
from jtile.tune.nature import COLUMNS, ROWS, TERMS, Whole
from jtile.tune.warpgroups import Form

LEAST = 1 << 26  # operations from which on it is worth to look for other tiles of a kernel
TRIED = 8  # guesses that are built, at most
SHORT, HELD, STAGES = 1024, 8192, 3  # elements of short rows; of all rows that a multiprocessor holds at a time
MOST, MOST_SHORT = 4, 8  # programs of a multiprocessor, at most; those of kernels with short rows
ROUNDS = 64, 32  # terms of a round of several products
EACH = 1 << 30  # more programs than there are: no two share a sum
SLOTS = 3  # rounds of operands that roles hold, at least, to be as quick as the model says
GAIN = 1.03  # how many times as long the present tiles must be expected to take


def busy(kernel: ir.Kernel, target: Any) -> Busy | None:
    """What keeps a GPU busy that sums over rows: several programs a multiprocessor, of those with short rows more, as
    the library's norms have them; of products, which take most of the time, those of the kernel, and one for each
    multiprocessor at least. None: what is as good on any machine."""
    if "warps" not in target.features or ir.is_dynamic(kernel):
        return None
    if nature.products_of(kernel):
        return Busy(EACH, rounds=1, least=target.programs_at_once)
    side = products.power(guesses.largest(kernel))
    each = min(max(HELD // side, 1), MOST_SHORT if side < SHORT else MOST)
    return Busy(target.programs_at_once * each, stages=STAGES)


@dataclasses.dataclass(frozen=True)
class Tiled:
    """A kernel in other tiles.

    Attributes:
      options: options of the compiler, where the user gives none.
      why: which tiles, and how they were found, in a sentence.
    """

    kernel: ir.Kernel
    options: Mapping[str, int | bool]
    why: str


def tiled(kernel: ir.Kernel, target: Any, options: Mapping[str, Any]) -> Tiled | None:
    """The kernel in the tiles that are expected to be best on a target, and with a loop for each of several products
    that it adds up where more rounds of their operands are on their way then; None where it is to stay as it is.

    Args:
      options: options of the compiler, as the user gives them.
    """
    found = _in_best_tiles(kernel, target, options)
    if ir.is_dynamic(kernel) or not warpgroups.multiplies(target) or not _large(kernel):
        return found
    now = found.kernel if found else passes.run_pipeline(kernel, passes.TILE)
    given = options if found is None else {**options, **found.options}
    new = apart(now)
    if new is None or slots(new, target, given) <= slots(now, target, given):
        return found
    why = f"{found.why}; " if found else ""
    return Tiled(new, found.options if found else {}, f"{why}one product after the other on {target.name}")


def _in_best_tiles(kernel: ir.Kernel, target: Any, options: Mapping[str, Any]) -> Tiled | None:
    """The kernel in the tiles that are expected to be best on a target; None where it is no product of arrays whose
    tiles may change, or where its own are as good."""
    if "vector cores" in target.features or ir.is_dynamic(kernel) or not _large(kernel):
        return None
    kernel = passes.run_pipeline(kernel, passes.TILE)
    whole = nature.whole_product(kernel)
    if whole is None:
        return _in_rounds(kernel, target, options)
    found = factors(kernel)
    sides = _sides(found)
    if sides is None:
        return None
    now = _now(found, sides)
    best = next(_better(found, whole, sides, target, options), None)
    if best is None or best[0].config == now or _as_good(kernel, whole, best, target, options):
        return None
    guess, new = best
    p, names = whole.product, sides.names
    tile = " x ".join(str(guess.config.get(names[place] or "", size)) for place, size in zip(names, whole.tile))
    return Tiled(new, guess.options, f"tiles of {tile} for {p.m} x {p.n} x {p.k} on {target.name}: {guess.why}")


def _in_rounds(kernel: ir.Kernel, target: Any, options: Mapping[str, Any]) -> Tiled | None:
    """A chain of products in rounds that leave registers for all of them: the longest ones that roles at the block
    level hold, and where none do, of `ROUNDS[0]` terms."""
    size = round_size(kernel) if "warps" in target.features else None
    planned = warpgroups.multiplies(target)
    if planned and has_plan(kernel, target, options):
        return None
    if size is None or size <= ROUNDS[-1]:
        return None
    first = best = None
    for n in ROUNDS if planned else ROUNDS[:1]:
        new = shorter_rounds(kernel, n) if n < size else None
        first = first or (None if new is None else (n, new))
        if new is not None and planned and has_plan(new, target, options):
            best = n, new
            break
    n, new = best or first or (size, None)
    why = "which roles at the block level hold" if best else "for which there are registers"
    return None if new is None else Tiled(new, {}, f"rounds of {n} terms on {target.name}, {why}")


def _large(kernel: ir.Kernel) -> bool:
    """Whether the products of a kernel are so large that the search is worth its time."""
    if 0 in kernel.grid or not any(isinstance(op, ir.Dot) for op in kernel.body.walk()):
        return False
    return cost.work(kernel).flops >= LEAST


def _sides(found: Factors) -> Sides | None:
    """The factors that sides of the products' tiles walk along: for each place one whose tiles may change, or None."""
    dots = nature.products_of(found.kernel)
    if not all(isinstance(d, ir.Dot) and len(d.result.shape) == 2 for d in dots):
        return None
    names: dict[Any, str | None] = {}
    for place in (ROWS, COLUMNS, TERMS):
        roots = {found.classes.find(_axis(d, place)) for d in dots if isinstance(d, ir.Dot)}
        names[place] = next((f.name for f in found.factors if free(f) and roots == lanes(found, f)), None)
    given = [n for n in names.values() if n]
    return Sides(names, ()) if len(given) > 1 and len(set(given)) == len(given) else None


def _axis(dot: ir.Dot, place: Any) -> Node:
    if place == TERMS:
        return dot.a, contraction(dot)[0][1]
    return dot.result, 0 if place == ROWS else 1


def _now(found: Factors, sides: Sides) -> dict[str, int]:
    return {n: size for n in sides.names.values() if n and (size := free(found.named(n)))}


def _better(
    found: Factors, whole: Whole, sides: Sides, target: Any, options: Mapping[str, Any]
) -> Iterator[tuple[Guess, ir.Kernel]]:
    """Guesses that the target takes, and the kernel in them, the best first."""
    for number, guess in enumerate(guesses.of_product(whole, sides, target)):
        if number == TRIED:
            return
        new = retile(found, guess.config)
        if fits(new, guess, target, options):
            assert new is not None
            yield guess, new


def _as_good(
    kernel: ir.Kernel, whole: Whole, best: tuple[Guess, ir.Kernel], target: Any, options: Mapping[str, Any]
) -> bool:
    """Whether the tiles that the kernel has are expected to take about as long."""
    guess, new = best
    (bm, bn, _), other = whole.tile, nature.whole_product(new)
    if other is not None and other.tile[:2] == (bm, bn):  # only the terms of a round differ
        return False
    on, p = warpgroups.gpu(target) if warpgroups.multiplies(target) else None, whole.product
    if on is None or not guess.us or (bm, bn) not in warpgroups.candidates(p):
        return False
    plan, few = Guess({}, "", planned=True), slots(kernel, target, options) < SLOTS
    return (
        not few and warpgroups.predicted_us(p, Form(1, bm, bn), on) < GAIN * guess.us
        and fits(kernel, plan, target, options)
    )  # fmt: skip
