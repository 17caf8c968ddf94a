"""Accumulation: gradients that a kernel adds up in memory become plain stores of sums, wherever the index maps say how.

Per output, in this order: a plain store where programs cannot meet; sums over loops carried; grid and loops re-nested
(a kernel of its own); partial sums in a fixed number of chunks; atomic additions where nothing else is proved.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jtile.ir import Atomic, Dot, DotScaled, Kernel, LastArrival, UndecidedError, Value, is_dynamic
from jtile.ir.block import level_of
from jtile.ir.types import DTYPES

from .affine import Forms, Site, accumulators, sites
from .fission import Fission, fission
from .lift import lift
from .nests import finish, only, prepare, speaks, tidy
from .partials import ANY, PROGRAMS, Busy, Chunks, Colours, chunked, chunks, likely
from .per_row import common_factors, per_row
from .renest import renest
from .settle import covers, disjoint, distinct, settle, told_apart
from .split_axes import split_axes
from .unscaled import unscaled

COLOURS = (2, 3, 4)  # how many copies of an accumulator, for each overlapping axis, are worth that programs run at once


@dataclasses.dataclass(frozen=True)
class Result:
    """Where an output of the whole comes from.

    Attributes:
      piece: which of the kernels.
      output: the number of the output of that kernel.
      partials: leading axes of partial sums that the caller sums away (0 or 1).
    """

    piece: int
    output: int
    partials: int = 0


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Kernels that together compute what one kernel did.

    Attributes:
      kernels: each stands behind those whose results it takes; else they may run in any order.
      inputs: for each of them the positions of the original inputs that it takes; behind those, of `between`.
      between: results of kernels that others take, and nobody else.
      results: one for each original output.
      options: for each of them what the compiler is told where the user says nothing; () where that is nothing.
      why: for each of them, in what other form it runs and why, or ""; () where none does.
    """

    kernels: tuple[Kernel, ...]
    inputs: tuple[tuple[int, ...], ...]
    results: tuple[Result, ...]
    between: tuple[Result, ...] = ()
    options: tuple[Mapping[str, int | bool], ...] = ()
    why: tuple[str, ...] = ()


@dataclasses.dataclass
class _Part:
    """A piece in the making: its kernel, and for each of its outputs the original output it stands for."""

    kernel: Kernel
    outputs: list[int]
    cut: _Cut | None = None
    summed: frozenset[int] = frozenset()  # outputs (original positions) that the cut axes are summed away of


@dataclasses.dataclass
class _Parts:
    """All pieces in the making; `between`: outputs that some of them have beside the kernel's, behind its own, and the
    inputs that others have for them."""

    parts: list[_Part]
    between: tuple[tuple[Value, Value], ...] = ()


def accumulate(kernel: Kernel, narrow: Sequence[str | None] = (), busy: Busy | None = None) -> Pieces:
    """The kernel as one or more kernels that add up in registers instead of memory, as far as that can be proved.

    Args:
      kernel: Tile IR; a schedule at block level stays as it is. Outputs that start from 0 in float32 or float64 and are
        touched by `atomic add` alone are accumulators; all other memory stays as it is.
      narrow: for each output the dtype that the caller rounds it to in the end, or None.
      busy: what keeps the machine busy that partial sums are made on.

    Returns:
      The pieces. An accumulator that is stored once has the dtype of `narrow`; one of which every element is stored has
      no init; one with partial sums has a leading axis more. The same kernel always gives the same pieces.
    """
    if level_of(kernel) == "block" or not _adds(kernel) or not accumulators(kernel) or 0 in kernel.grid:
        return _whole(kernel)
    try:
        return _pieces(kernel, tuple(narrow) or (None,) * _outputs(kernel), busy or ANY)
    except UndecidedError:  # a size that is known only when the kernel runs would have to be known now
        return _whole(kernel)


def _whole(kernel: Kernel) -> Pieces:
    every = tuple(Result(0, k) for k in range(_outputs(kernel)))
    return Pieces((kernel,), (tuple(range(len(kernel.inputs))),), every)


def _pieces(kernel: Kernel, narrow: Sequence[str | None], busy: Busy) -> Pieces:
    kernel = prepare(kernel)
    kernel = tidy(lift(kernel, accumulators(kernel)))
    movable = not speaks(kernel) and not kernel.aliases
    if movable and _meeting(kernel):
        split = split_axes(kernel)
        kernel = kernel if split is kernel else tidy(lift(split, accumulators(split)))
    made = _parts(kernel, busy, narrow) if movable else _Parts([_Part(kernel, list(range(_outputs(kernel))))])
    return _finished(kernel, [_settled(p, narrow) for p in made.parts], [given for _, given in made.between])


def _outputs(kernel: Kernel) -> int:
    return len(kernel.outputs)


def _adds(kernel: Kernel) -> bool:
    ops = list(kernel.body.walk())
    if kernel.devices or any(isinstance(op, LastArrival) for op in ops):  # programs are counted as they stand
        return False
    return any(isinstance(op, Atomic) and op.fn == "add" for op in ops)


def _where(kernel: Kernel) -> dict[Value, list[Site]]:
    """Accumulators and their sites, in the order of the outputs."""
    wanted = accumulators(kernel)
    found = sites(kernel, lambda r: r in wanted)
    return {r: found[r] for r in wanted}


def _meeting(kernel: Kernel) -> list[Value]:
    """Accumulators whose programs may touch one element."""
    forms = Forms(kernel)
    return [r for r, found in _where(kernel).items() if not disjoint(forms, found)]


# -- which outputs go together ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Cut:
    """What happens to the grid axes along which programs meet at an accumulator: walked in one program, or coloured."""

    serial: tuple[int, ...] = ()
    colours: tuple[tuple[int, int], ...] = ()  # axis, number
    busy: Busy = ANY


def _parts(whole: Kernel, busy: Busy, narrow: Sequence[str | None]) -> _Parts:
    """Kernels for the outputs: those re-nested, one for each way to cut grid axes, one for the rest, which joins the
    first of those."""
    meeting = _meeting(whole)
    own, split = _renested(whole, meeting)
    kernel = whole if split is None else tidy(split.first)
    own += _shorter(whole, split, meeting)
    alone = {whole.outputs[k] for part in own for k in part.outputs}
    own += _of_rounded(whole, split, [r for r in meeting if r not in alone], busy, narrow)
    alone = {whole.outputs[k] for part in own for k in part.outputs}
    cuts: dict[_Cut, list[Value]] = {}
    rest = [r for r in kernel.outputs if r not in meeting and r not in alone]
    for ref in (r for r in meeting if r not in alone):
        cut = _cut(kernel, ref, busy)
        if cut is not None:
            cuts.setdefault(cut, []).append(ref)
        else:
            rest.append(ref)
    groups: list[tuple[_Cut, list[Value]]] = list(cuts.items())
    if rest and groups:
        groups[0] = (groups[0][0], groups[0][1] + rest)
    elif rest:
        groups = [(_Cut(), rest)]
    parts = [_group(kernel, cut, refs, cuts.get(cut, ())) for cut, refs in groups]
    for part, (_, refs) in zip(parts[1:], groups[1:], strict=True):
        if part is not None:
            part.kernel = dataclasses.replace(part.kernel, name=_name(kernel, refs[0]))
    if any(p is None for p in parts):
        return _Parts([_Part(whole, list(range(_outputs(whole))))])
    return _Parts([*(p for p in parts if p is not None), *own], () if split is None else split.between)


def _renested(kernel: Kernel, meeting: Sequence[Value]) -> tuple[list[_Part], Fission | None]:
    """The kernels of those accumulators that are re-nested, those of one grid in one kernel; and where these go on from
    what others of the kernel's outputs take as well, how that comes to them."""
    groups: list[list[Value]] = []
    found: list[Kernel] = []
    for ref in meeting:
        for k, group in enumerate(groups):
            if (new := renest(kernel, [*group, ref])) is not None:
                group.append(ref)
                found[k] = new
                break
        else:
            if (new := renest(kernel, [ref])) is not None:
                groups.append([ref])
                found.append(new)
    refs = [ref for group in groups for ref in group]
    split = fission(tidy(per_row(tidy(unscaled(kernel)))), refs) if groups else None
    if split is not None:
        rest = tidy(split.rest)
        apart = [renest(rest, group) for group in groups]
        found, split = ([k for k in apart if k], split) if all(apart) else (found, None)
    position = {r: k for k, r in enumerate(kernel.outputs)}
    parts = [
        _Part(dataclasses.replace(new, name=_name(kernel, group[0])), [position[r] for r in new.outputs])
        for new, group in zip(found, groups, strict=True)
    ]
    return parts, split


def _shorter(kernel: Kernel, split: Fission | None, meeting: Sequence[Value]) -> list[_Part]:
    """A kernel for the outputs that need fewer products from what goes through memory anyway, but some: the loops of
    both halves do not have to share the registers of one program; and one for those that need none at all."""
    if split is None:
        return []
    fewer, none = [], []
    for ref in (r for r in kernel.outputs if r not in meeting):
        before, after = only(split.first, [ref]), only(split.rest, [ref])
        if before is not None and not _products(before):
            none.append(ref)
        elif before is not None and after is not None and 0 < _products(after) < _products(before):
            fewer.append(ref)
    halves = [(refs, only(half, refs)) for half, refs in ((split.rest, fewer), (split.first, none)) if refs]
    at = lambda refs: [k for k, r in enumerate(kernel.outputs) if r in refs]
    return [
        _Part(dataclasses.replace(tidy(common_factors(tidy(new))), name=_name(kernel, refs[0])), at(refs))
        for refs, new in halves
        if new is not None
    ]


def _of_rounded(
    kernel: Kernel, split: Fission | None, meeting: Sequence[Value], busy: Busy, narrow: Sequence[str | None]
) -> list[_Part]:
    """Kernels without products for sums of what goes through memory, where they are rounded as much in the end as that
    is: a product is slower where it sums over its rows besides."""
    out: list[_Part] = []
    for k, ref in enumerate(kernel.outputs if split else ()):
        dtype = narrow[k]
        if split is None or ref not in meeting or dtype is None:
            continue
        fine = all(DTYPES[b.dtype].bits >= DTYPES[dtype].bits for _, b in split.between)
        new, before = only(split.rounded, [ref]), only(split.first, [ref])
        if not fine or new is None or before is None or _products(new) or not _products(before):
            continue
        new = tidy(lift(tidy(new), [ref]))
        few = dataclasses.replace(busy, programs=min(busy.programs, 4 * PROGRAMS))
        if ref in accumulators(new) and (cut := _cut(new, ref, few)) is not None:
            out.append(_Part(dataclasses.replace(new, name=_name(kernel, ref)), [k], cut, frozenset([k])))
    return out


def _products(kernel: Kernel) -> int:
    return sum(isinstance(op, Dot | DotScaled) for op in kernel.body.walk())


def _group(kernel: Kernel, cut: _Cut, refs: list[Value], summed: Sequence[Value]) -> _Part | None:
    kept = [r for r in kernel.outputs if r in refs]
    new = kernel if len(kept) == _outputs(kernel) else only(kernel, kept)
    if new is None:
        return None
    at = [k for k, r in enumerate(kernel.outputs) if r in refs]
    wide = frozenset(k for k, r in enumerate(kernel.outputs) if r in summed)
    return _Part(new, at, cut, wide)


def _name(kernel: Kernel, ref: Value) -> str:
    return f"{kernel.name}_{ref.name}" if ref.name else kernel.name


def _cut(kernel: Kernel, ref: Value, busy: Busy) -> _Cut | None:
    """How to cut the grid axes along which programs meet at an accumulator, if that is worth it."""
    found = _where(kernel)[ref]
    forms = Forms(kernel)
    if not all(distinct(forms, s) for s in found):
        return None
    wide = {a for a, n in enumerate(kernel.grid) if n != 1}
    axes = wide - told_apart(forms, found)
    missing = {a for a in axes if _missing(forms, found, a)}
    for count in COLOURS:
        colours = {a: min(count, likely(kernel.grid[a])) for a in axes - missing}
        if colours and wide - missing <= told_apart(forms, found, colours):
            return _worth(kernel, ref, found, _Cut(tuple(sorted(missing)), tuple(sorted(colours.items())), busy))
    return _worth(kernel, ref, found, _Cut(tuple(sorted(axes)), busy=busy))


def _worth(kernel: Kernel, ref: Value, found: list[Site], cut: _Cut) -> _Cut | None:
    """A sum that is carried is always worth it. One that stays in memory costs a copy of the output for each chunk,
    which must leave enough programs."""
    forms = Forms(kernel)
    if all(not s.path for s in found) and all(_missing(forms, found, a) for a in cut.serial):
        return cut
    parts = _chunks(kernel.grid, cut, _nbytes(ref))
    programs = math.prod(likely(n) for a, n in enumerate(kernel.grid) if a not in cut.serial)
    programs *= math.prod(c.count for c in parts if c.axis in cut.serial)
    return cut if programs >= min(cut.busy.least, math.prod(map(likely, kernel.grid))) else None


def _chunks(grid: Sequence[int], cut: _Cut, nbytes: int) -> list[Chunks | Colours]:
    colours = [Colours(a, grid[a], n) for a, n in cut.colours]
    copies = math.prod(c.count for c in colours)
    return [*colours, *chunks(grid, cut.serial, nbytes * copies, cut.busy)]


def _missing(forms: Forms, found: list[Site], axis: int) -> bool:
    """Whether no index depends on a grid axis."""
    starts = [forms.start(d) for s in found for d in s.op.index]
    return all(f is not None and all(v != axis for v, _ in f.terms) for f in starts)


def _nbytes(ref: Value) -> int:
    return math.prod(map(likely, ref.shape)) * DTYPES[ref.dtype].bits // 8


# -- the end of every piece -------------------------------------------------------------------------------------------


def _settled(part: _Part, narrow: Sequence[str | None]) -> tuple[Kernel, list[int], dict[int, int]]:
    """The finished kernel of a part, its outputs, and which of them hold partial sums."""
    kernel, original = part.kernel, dict(zip(part.kernel.outputs, part.outputs, strict=True))
    covered = _covered(kernel)
    partials: dict[int, int] = {}
    if part.cut is not None and part.summed:
        summed = [r for r in kernel.outputs if original[r] in part.summed]
        nbytes = max((_nbytes(r) for r in summed), default=0)
        kernel, moved = chunked(kernel, _chunks(kernel.grid, part.cut, nbytes), summed, part.cut.busy.stages)
        original |= {new: original[old] for old, new in moved.items()}
        partials = {original[r]: 1 for r in moved.values()}
        kernel = tidy(lift(tidy(kernel), accumulators(kernel)))
    where = _where(kernel)
    wanted = {r: n for r in where if (n := narrow[original[r]]) is not None and original[r] not in partials}
    done = settle(kernel, where, wanted, covered)
    return finish(done.kernel), part.outputs, partials


def _covered(kernel: Kernel) -> set[Value]:
    """Accumulators of which every element is touched; how the grid is walked changes nothing about that."""
    forms = Forms(kernel)
    return {r for r, found in _where(kernel).items() if any(covers(forms, s) for s in found)}


def _finished(
    kernel: Kernel, parts: list[tuple[Kernel, list[int], dict[int, int]]], between: Sequence[Value]
) -> Pieces:
    given = [*kernel.inputs, *between]
    results: dict[int, Result] = {}
    kernels, inputs = [], []
    for piece, (new, outputs, partials) in enumerate(parts):
        used = {v for op in new.body.walk() for v in op.operands()}
        keep = [v for v in new.inputs if v in used or kernel.aliases or is_dynamic(kernel)]
        inputs.append(tuple(given.index(v) for v in keep))
        kernels.append(dataclasses.replace(new, params=(*keep, *new.outputs, *new.scratch)))
        for k, original in enumerate(outputs):
            results[original] = Result(piece, k, partials.get(original, 0))
    n = _outputs(kernel)
    passed = tuple(results[n + k] for k in range(len(between)))
    return Pieces(tuple(kernels), tuple(inputs), tuple(results[k] for k in range(n)), passed)
