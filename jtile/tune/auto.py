"""What `jt.auto` stands for in one call of a kernel: the kernel is traced with a few values to see what they are sides
of, and with those that `guesses` expects to be best, until one fits the target."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.tree_util import tree_flatten

from jtile import ir, passes
from jtile._errors import JtileError, KernelValueError, UnsupportedError
from jtile.lowering.targets import check_capabilities
from jtile.primitive.program import under
from jtile.tune import guesses, nature, products, prune
from jtile.tune.guesses import Guess
from jtile.tune.nature import COLUMNS, ROWS, STAGES, TERMS, Place

TRIED = 64, 32, 16, 4, 1  # values that a kernel is traced with to see what they are sides of
MOST = 64  # traces of one choice, at most
SMALL = 16  # an array of fewer bytes than this part of the largest one is small
DESCENT = 16, 32, 64, 128  # sides that are tried one after the other where no rule is for a kernel


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What was chosen for a call.

    Attributes:
      config: values of the meta-parameters that are `jt.auto`; options: those of the compiler.
      why: how they were found, in a sentence.
    """

    config: Mapping[str, int]
    options: Mapping[str, int]
    why: str


class Asked:
    """A call of a kernel, some of whose meta-parameters are `jt.auto`.

    Args:
      kernel: the kernel, without a search space.
      args: its arguments' types, without marks.
      names: the meta-parameters that are to be chosen.
      meta: the values of all other meta-parameters.
      levels: vmaps around it, innermost first.
    """

    def __init__(self, kernel: Any, args: Any, names: Sequence[str], meta: Mapping[str, Any], levels: Sequence[Any]):
        self.kernel, self.names, self.meta, self.levels = kernel, tuple(names), dict(meta), tuple(levels)
        self.leaves, self.tree = tree_flatten(args)
        self.options = kernel._options.compiler
        self.traces: dict[Any, ir.Kernel] = {}
        self._outs: Any = None

    def trace(self, config: Mapping[str, int]) -> ir.Kernel:
        """The kernel with these values, in Tile IR. Raises what the kernel raises for them."""
        key = tuple(sorted(config.items()))
        if key not in self.traces:
            self.traces[key] = self._traced(config)
        return self.traces[key]

    def program(self, config: Mapping[str, int]) -> Any:
        """The `Program` with these values, or None where the kernel does not take them."""
        return self._program(config) if self.kept(config) is not None else None

    def _traced(self, config: Mapping[str, int]) -> ir.Kernel:
        return self._program(config).kernel

    def _program(self, config: Mapping[str, int]) -> Any:
        program = self.kernel._bind(self.tree, self.leaves, {**self.meta, **config}, None).program
        outs = [(o.shape, o.dtype) for o in program.out_avals]
        self._outs = self._outs or outs
        if outs != self._outs:
            name = next(iter(config))
            raise self.error(
                name, f"the shapes or dtypes of its results depend on {' or '.join(config)}, and would on the machine"
            )
        for level in self.levels:
            program = under(program, level, None)
        return program

    def kept(self, config: Mapping[str, int]) -> ir.Kernel | None:
        """`trace`, or None where the kernel does not take these values."""
        try:
            return self.trace(config)
        except Exception as e:  # the body may raise anything: it may look a value up, or assert something of it
            if isinstance(e, AutoError):
                raise
            return None

    def error(self, name: str, why: str) -> AutoError:
        """A KernelValueError that names the line of a meta-parameter."""
        value = self.kernel._signature.meta.get(name)
        default = isinstance(value, int) and not isinstance(value, bool)
        way = f"leave it out, which means {value}" if default else f"give it a number, as in {name}=64"
        return AutoError(
            f"meta-parameter {name!r} of kernel {self.kernel.name} is jt.auto, but {why}: {way}",
            _line(self.kernel, name),
        )


class AutoError(KernelValueError):
    """A `jt.auto` that nothing can be chosen for."""


def _line(kernel: Any, name: str) -> tuple[str, int] | None:
    """Where a meta-parameter stands in the source, from the `def` on."""
    where = kernel._signature.where
    if where is None:
        return None
    file, first = where
    for number, line in enumerate(kernel._lines[first - 1 : first + 30], first):
        if f"{name}:" in line.replace(" ", "") or f"{name}=" in line.replace(" ", ""):
            return file, number
    return where


def choose(asked: Asked, target: Any) -> Chosen:
    """The values for a target: those of the first guess that the kernel takes and the target holds.

    Raises:
      AutoError: a meta-parameter of which none is better than another: it is the side of no tile.
    """
    base, start, places = probe(asked)
    found = all_guesses(asked, base, start, places, target)
    fit = (g for g in found if fits(asked.kept(g.config), g, target, asked.options))
    best = next(fit, None) or Guess(start, "no tile that was tried fits the target better")
    values = ", ".join(f"{k}={v}" for k, v in {**best.config, **best.options}.items())
    return Chosen(best.config, best.options, f"{values} for {target.name}: {best.why}")


def probe(asked: Asked) -> tuple[ir.Kernel, dict[str, int], dict[str, frozenset[Place]]]:
    """The kernel with one value for all names, and what each of them moves."""
    first: Exception | None = None
    for value in TRIED:
        start = dict.fromkeys(asked.names, value)
        try:
            base = asked.trace(start)
            break
        except AutoError:
            raise
        except Exception as e:  # an error of the user's body, who may not know that these values were tried
            first = first or e
    else:
        assert first is not None
        tried = ", ".join(f"{n}={TRIED[0]}" for n in asked.names)
        note = f"{getattr(first, 'message', first)} (traced with {tried} for jt.auto)"
        kind = type(first) if isinstance(first, JtileError) else KernelValueError
        raise kind(note, getattr(first, "where", None) or asked.kernel._signature.where) from first
    places = {}
    for name in asked.names:
        other = next((k for v in (start[name] * 2, start[name] // 2, 1, 2) if v != start[name] and v
                      if (k := asked.kept({**start, name: v})) is not None), None)  # fmt: skip
        places[name] = frozenset() if other is None else nature.moved(base, other)
        if not places[name]:
            raise asked.error(name, "it is the side of no tile that the kernel reads, writes or multiplies")
    return base, start, places


def all_guesses(
    asked: Asked, base: ir.Kernel, start: dict[str, int], places: dict[str, frozenset[Place]], target: Any
) -> Iterator[Guess]:
    multiplied = [n for n, at in places.items() if at & {ROWS, COLUMNS, TERMS}]
    rest = {n: at for n, at in places.items() if n not in multiplied and at != {STAGES}}
    stages = dict.fromkeys((n for n, at in places.items() if at == {STAGES}), guesses.STAGED)
    if multiplied:
        for guess in _of_products(passes.run_pipeline(base, passes.TILE), start, places, target):
            yield dataclasses.replace(guess, config={**start, **stages, **guess.config}) if rest else guess
        yield _by_descent(asked, {**start, **stages}, multiplied, target)
    elif rest:
        config = _by_bytes(asked, base, {**start, **stages}, rest, target)
        kernel = asked.kept(config)
        if kernel is None:  # the kernel takes no sides as small as these: it gets those that it was traced with
            return
        why = (
            f"the largest tile of a program has {guesses.largest_tile(kernel)} bytes, and there are "
            f"{math.prod(kernel.grid)} programs for {target.programs_at_once} units"
        )
        yield Guess(config, why)
    else:
        yield Guess({**start, **stages}, "the usual depth of a pipeline")


def _of_products(
    kernel: ir.Kernel, start: Mapping[str, int], places: Mapping[str, frozenset[Place]], target: Any
) -> Iterator[Guess]:
    """The guesses by rule, where there is one for what the kernel computes. None where no program runs, or the passes
    have found that no product is needed."""
    if 0 in kernel.grid or not nature.products_of(kernel):
        return
    sides = guesses.sides_of(places, start, kernel)
    whole, chain = nature.whole_product(kernel), nature.chain(kernel)
    if sides is not None and whole is not None:
        yield from guesses.of_product(whole, sides, target)
    elif sides is not None and chain is not None:
        yield from guesses.of_chain(chain, sides, target)


def fits(kernel: ir.Kernel | None, guess: Guess, target: Any, options: Mapping[str, Any]) -> bool:
    """Whether a target runs a kernel as a guess expects it; None is one that does not take the values."""
    if kernel is None:
        return False
    options = {**guess.options, **{k: v for k, v in options.items() if v is not None}}
    try:
        check_capabilities(kernel, target)
    except UnsupportedError:
        return False
    if prune.unfit(kernel, target, options):
        return False
    return not guess.planned or has_plan(kernel, target, options)


def has_plan(kernel: ir.Kernel, target: Any, options: Mapping[str, Any]) -> bool:
    """Whether a kernel gets roles at the block level of a target."""
    return slots(kernel, target, options) > 0


def slots(kernel: ir.Kernel, target: Any, options: Mapping[str, Any]) -> int:
    """How many rounds of operands the roles hold that a kernel gets at the block level of a target; 0: it gets none."""
    from jtile.lowering.triton.block.passes import NoPlan, steps  # for the targets only that have the level
    from jtile.lowering.triton.block.passes.plan import Machine

    found = steps(passes.run_pipeline(kernel, passes.TILE), Machine.of(target), options)
    return 0 if isinstance(found, NoPlan) else found.plan.stages


def _by_bytes(
    asked: Asked, base: ir.Kernel, config: dict[str, int], places: Mapping[str, frozenset[Place]], target: Any
) -> dict[str, int]:
    """Sides of tiles of a kernel without products: those along the last axis of an array first, as long as the budget
    allows (two of them, as of a transpose, share it), then rows; and all so that every unit has several programs."""
    often = guesses.WAVES * target.programs_at_once
    config = config | dict.fromkeys(places, 1)
    lines = sum(max(axis for axis, *_ in _arrays(base, at, joined=False)) == -1 for at in places.values())
    for name in sorted(places, key=lambda n: -max(axis for axis, *_ in _arrays(base, places[n]))):
        found = _arrays(base, places[name])
        last, most = max(axis for axis, *_ in found) == -1, max(length for _, length, _ in found)
        itemsize = max(size for *_, size in found)
        longest = math.isqrt(guesses.BUDGET // itemsize) if last and lines > 1 else guesses.BUDGET // itemsize
        line = 1 << (guesses.LINES // itemsize).bit_length() - 1
        least = min(line if last else 1, products.power(most), longest)
        kernel, side = asked.kept({**config, name: least}), least
        if kernel is not None:  # tiles grow with their sides
            larger = guesses.budget(kernel) // max(guesses.largest_tile(kernel), 1)
            double = asked.kept({**config, name: 2 * least})
            if double is None or double.grid != kernel.grid:  # and programs become fewer, at most as quickly
                larger = min(larger, math.prod(kernel.grid) // often)
            larger = min(larger, min(products.power(most), longest) // least)
            side = least << max(larger.bit_length() - 1, 0)
        while side > 1 and asked.kept({**config, name: side}) is None:
            side //= 2
        config[name] = side
        even = products.even(most, side) if last else -(-most // max(-(-most // side), 1))
        if guesses.whole_sides(target) and asked.kept({**config, name: even}) is not None:
            config[name] = even
    return _busy(asked, base, config, places, target) if "warps" in target.features else config


def _busy(
    asked: Asked, base: ir.Kernel, config: dict[str, int], places: Mapping[str, frozenset[Place]], target: Any
) -> dict[str, int]:
    """Sides with which few programs, each of which loops, keep the memory of a GPU busy: shorter lines, so that every
    multiprocessor has a program, and then longer tiles in the loops, since a program waits for one after the other."""
    kernel, loops = asked.kept(config), []
    if kernel is None or not math.prod(kernel.grid):
        return config
    for name in places:
        double = asked.kept({**config, name: 2 * config[name]})
        if double is not None and double.grid == kernel.grid and guesses.largest(double) > guesses.largest(kernel):
            loops.append(name)
    if not loops:
        return config
    for name in sorted(places.keys() - set(loops)):
        axis, _, itemsize = max(_arrays(base, places[name]))
        while axis == -1 and config[name] > 1 and config[name] * itemsize > guesses.SHORTEST:
            shorter = {**config, name: config[name] // 2}
            found = asked.kept(shorter)
            if found is None or math.prod(kernel.grid) >= target.programs_at_once:
                break
            config, kernel = shorter, found
    for name in loops:
        most = max(length for _, length, _ in _arrays(base, places[name]))
        while config[name] < most:
            longer = {**config, name: 2 * config[name]}
            found = asked.kept(longer)
            if found is None or guesses.largest_tile(found) > guesses.streamed(found, target):
                break
            config, kernel = longer, found
    return config


def _arrays(kernel: ir.Kernel, places: frozenset[Place], joined: bool = True) -> list[tuple[int, int, int]]:
    """For each array in which a meta-parameter is a side: the axis from the end, its length, and an element's bytes.

    Where a line of memory holds several of what stands behind an axis, as of pairs, that counts as an element, if they
    are to be `joined`. Arrays much smaller than the largest one say nothing where another does: the sums of rows, a row
    that is added to all.
    """
    found = []
    for kind, *where in places:
        if kind == "array":
            ref = kernel.params[where[0]]
            axis, size = where[1] - len(ref.shape), max(ref.type.info.bits // 8, 1)
            behind = size * math.prod(ref.shape[where[1] + 1 :])
            if joined and axis < -1 and 0 < 2 * behind <= guesses.LINES:
                axis, size = -1, behind
            found.append((_bytes(ref), (axis, ref.shape[where[1]], size)))
    most = max(map(_bytes, kernel.inputs + kernel.outputs), default=0)
    large = [f for bytes_, f in found if SMALL * bytes_ >= most]
    return large or [f for _, f in found]


def _bytes(ref: ir.Value) -> int:
    return math.prod(ref.shape) * max(ref.type.info.bits // 8, 1)


def _by_descent(asked: Asked, config: dict[str, int], names: Sequence[str], target: Any) -> Guess:
    """The sides of tiles of several products that are neither alike nor a chain, one after the other: those of the
    shortest time that is predicted from what their programs move and compute."""
    best = math.inf
    for name in names:
        for side in DESCENT:
            kernel = asked.kept({**config, name: side}) if len(asked.traces) < MOST else None
            if kernel is None or prune.unfit(kernel, target, {}):
                continue
            us = prune.predicted_us(passes.run_pipeline(kernel, passes.TILE), target)
            if 0 < us < best:
                best, config = us, {**config, name: side}
    predicted = f"about {best:.3g} us" if best < math.inf else "which depends on data"
    return Guess(config, f"of the sides that were tried, those of the shortest predicted time, {predicted}")
