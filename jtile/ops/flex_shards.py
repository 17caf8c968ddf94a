"""How functions for scores and masks read the numbers of batch rows and heads: where these are only places in arrays,
devices that share out rows or heads share out the arrays, too; else they get the numbers of their rows and heads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops._shapes import tuned
from jtile.ops.flex_lists import mask_lists

_ROW, _HEAD = "b", "h"


@dataclasses.dataclass(frozen=True)
class Reads:
    """What the functions of a call read.

    Attributes:
      dims: for each leaf of extras and each of its dimensions "b" or "h" if the function reads it only at the number of
        the row or head, else "_".
      row, head: whether these numbers are read in any other way.
    """

    dims: tuple[tuple[str, ...], ...]
    row: bool
    head: bool


def reads(score: Callable | None, mask: Callable | None, extras: Any, batch: int, heads: int, shared: bool) -> Reads:
    """What a score and a mask read; `shared`: heads share keys, so that their numbers are no places that devices could
    share out as they do the heads of keys."""
    leaves, tree = jax.tree.flatten(extras)
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    return _reads(score, mask, types, tree, batch, heads, shared)


def numbered(score: Callable | None, mask: Callable | None, extras: tuple, batch: int, heads: int):
    """(score, mask, extras) that read rows and heads at their places in arrays of their numbers, if devices may share
    out rows and heads, whose numbers the functions read as they are."""
    if gpu_tiles.on_one_device():
        return score, mask, extras
    found = reads(score, mask, extras, batch, heads, shared=False)
    if not (found.row or found.head):
        return score, mask, extras
    numbers = tuple(jnp.arange(n, dtype=jnp.int32) for n, there in ((batch, found.row), (heads, found.head)) if there)
    with_numbers = functools.partial(_with_numbers, row=found.row, head=found.head)
    return score and with_numbers(score, 1), mask and with_numbers(mask, 0), (*numbers, *extras)


@functools.lru_cache(maxsize=128)
def _with_numbers(function: Callable[..., Any], scores: int, row: bool, head: bool) -> Callable[..., Any]:
    """A score, of one tile of `scores`, or mask that finds numbers of rows and heads in arrays before its extras."""

    def run(*args):
        s, (b, h, i, j, *extras) = args[:scores], args[scores:]
        if row:
            b = extras.pop(0)[b]
        if head:
            h = extras.pop(0)[h]
        return function(*s, b, h, i, j, *extras)

    return run


def lists_of_mask(extras, *, sizes: tuple[int, int, int, int], by: tuple[bool, bool], mask, **options):
    """What `mask_lists` gives, whose programs meet, so that no rule for it is derived: devices share out the rows and
    heads that have lists of their own."""
    make = tuned(mask_lists, num_warps=4)
    if gpu_tiles.on_one_device() or not any(by):
        return make(extras, sizes=sizes, by=by, mask=mask, **options)
    found = reads(None, mask, extras, *sizes[:2], shared=False)
    names = [name if there else "_" for name, there in zip((_ROW, _HEAD), by, strict=True)]
    numbers = tuple(jnp.arange(n, dtype=jnp.int32) for n in sizes[:2])
    of_lists = f"{' '.join(names)} _ _"
    rule = f"{', '.join([*names, *map(_spelled, found.dims)])} -> {', '.join([of_lists] * 4)}"
    given = tuple(sorted({"by": by, "mask": mask, **options}.items()))
    return jt.partitioned(_of_a_device(given, sizes[2:], found.row, found.head), rule)(*numbers, extras)


@functools.lru_cache(maxsize=128)
def _of_a_device(given: tuple, sides: tuple[int, int], row: bool, head: bool) -> Callable[..., Any]:
    """The lists of a device's rows and heads, with their numbers where the mask reads these; sides: queries, keys."""
    options = dict(given)
    mask = options.pop("mask")

    def numbered(b, h, i, j, rows, heads, extras):
        return mask(rows[b] if row else b, heads[h] if head else h, i, j, *extras)

    def run(rows, heads, extras):
        sizes = (*rows.shape, *heads.shape, *sides)
        return tuned(mask_lists, num_warps=4)((rows, heads, extras), sizes=sizes, mask=numbered, **options)

    return run


def _spelled(dims: tuple[str, ...]) -> str:
    return " ".join(dims) or "()"


@functools.lru_cache(maxsize=128)
def _reads(score, mask, types: tuple, tree: Any, batch: int, heads: int, shared: bool) -> Reads:
    places: list[set[tuple[str, ...]]] = [set() for _ in types]
    used: set[str] = set()
    for function, scored in ((score, True), (mask, False)):
        if function is not None:
            used |= _watched(function, scored, types, tree, places)
    if shared and any(_HEAD in place for place in set().union(*places)):
        used.add(_HEAD)
    sizes = {_ROW: batch, _HEAD: heads}
    for x, found in zip(types, places, strict=True):
        for name, size in sizes.items():
            at = {tuple(d for d, n in enumerate(place) if n == name) for place in found}
            if at and at != {()} and not (len(at) == 1 and [x.shape[d] for d in at.pop()] == [size]):
                used.add(name)
    dims = []
    for x, found in zip(types, places, strict=True):  # names that are not used otherwise are alike in all places
        place = next(iter(found), ("_",) * len(x.shape))
        dims.append(tuple("_" if name in used else name for name in place))
    return Reads(tuple(dims), _ROW in used, _HEAD in used)


def _watched(function: Callable, scored: bool, types: tuple, tree: Any, places: list[set]) -> set[str]:
    """Which of the numbers a function reads other than as places; where it reads each leaf goes to `places`."""
    int32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    scores = (jax.ShapeDtypeStruct((24, 40), jnp.float32),) if scored else ()

    def run(b, h, i, j, scores, leaves):
        names = {id(b): _ROW, id(h): _HEAD}
        watched = [_Watched(x, names, found) for x, found in zip(leaves, places, strict=True)]
        return function(*scores, b, h, i, j, *jax.tree.unflatten(tree, watched))

    try:
        jaxpr = jax.make_jaxpr(run)(int32(), int32(), int32(24, 1), int32(1, 40), scores, types).jaxpr
    except (TypeError, ValueError, AttributeError, IndexError):  # it takes more than elements of extras
        return {_ROW, _HEAD}
    inner = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
    return {name for v, name in zip(jaxpr.invars, (_ROW, _HEAD), strict=False) if id(v) in inner}


class _Watched:
    """An array that keeps which of its dimensions are read at the number of the row or head."""

    def __init__(self, x: jax.Array, names: dict[int, str], found: set[tuple[str, ...]]):
        self._x, self._names, self._found = x, names, found
        self.shape, self.dtype, self.ndim, self.size = x.shape, x.dtype, x.ndim, x.size

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> jax.Array:
        parts = index if isinstance(index, tuple) else (index,)
        plain = not any(p is None or p is Ellipsis or getattr(p, "dtype", None) == jnp.bool for p in parts)
        names = [self._names.get(id(p), "_") if plain else "_" for p in parts]
        self._found.add((*names, *["_"] * (self.ndim - len(names)))[: self.ndim])
        return self._x[tuple(0 if name != "_" else p for p, name in zip(parts, names, strict=True))]
