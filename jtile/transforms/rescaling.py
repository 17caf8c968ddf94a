"""Loops whose carries do nothing to each other but rescale: running maxima with the sums that follow them.

An online softmax carries `m`, the largest score so far, and sums `x` of `exp(s - m)`: a round makes `m' = max(m, s)`
and `x' = x exp(m - m') + h exp(s - m')`. So `exp(m) x` is a plain sum, whatever numbers `m` runs through, and the last
`m` would do for all rounds. Where results besides do not depend on `m` (`x / l`, `m + log l`), nor do their
derivatives: reverse mode takes `m` for a constant, the last one, and the rounds for those of plain sums. It saves no
carry, and the rounds run in any order. Found by how values scale (see `weights`), not by what they are called.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import dtypes

from jtile.trace.rules.control import counters
from jtile.transforms.activity import is_literal
from jtile.transforms.evaluate import Loop, as_loop
from jtile.transforms.weights import FIXED, ZERO, Symbol, Weight, Weights, guarded, literal, made, same

OLD, NEW = 0, 1  # the symbols of a reference before and after a round
MOVES = ("reshape", "broadcast_in_dim", "squeeze")


@dataclasses.dataclass(frozen=True)
class Rescaled:
    """A loop that rescales.

    Attributes:
      reference: place of the carry that the others are scaled by.
      update: the body's variable of its new value.
      sums: places of those others -> how they change with the reference.
    """

    reference: int
    update: Any
    sums: Mapping[int, Weight]


def rescaled(jaxpr: Any) -> dict[int, Rescaled]:
    """The loops of a pruned kernel jaxpr that rescale and whose reference has no effect on any result, by the `id` of
    their equation."""
    found: dict[int, Rescaled] = {}
    _level(jaxpr, found)
    return found


def _level(jaxpr: Any, found: dict[int, Rescaled]) -> None:
    """The loops of a jaxpr, then those of the jaxprs inside of it: what one of those has an effect on is for its own
    level to say, which sees every way out of it as one."""
    made_here: dict[Symbol, tuple[int, Rescaled]] = {}
    own = {id(eqn) for eqn in jaxpr.eqns}
    weights = Weights(lambda eqn, ins: _results(eqn, ins, made_here) if id(eqn) in own else None)
    outs = weights.run(jaxpr, [FIXED] * len(jaxpr.invars))
    weights.drop(outs)
    found |= {eqn: loop for symbol, (eqn, loop) in made_here.items() if symbol not in weights.bad}
    for eqn in jaxpr.eqns:
        for inner in _inner(eqn):
            _level(inner, found)


def _inner(eqn: Any) -> list[Any]:
    if eqn.primitive.name == "cond":
        return [b.jaxpr for b in eqn.params["branches"]]
    if eqn.primitive.name in ("scan", "while"):
        return [eqn.params["jaxpr" if eqn.primitive.name == "scan" else "body_jaxpr"].jaxpr]
    return []


def _results(eqn: Any, ins: Sequence[Weight], made_here: dict[Symbol, tuple[int, Rescaled]]) -> list[Weight] | None:
    """The weights of the results of a loop that rescales: its reference is a symbol. None for any other loop."""
    loop = as_loop(eqn)
    if loop is None or loop.xs or any(x.of for x in ins):
        return None
    at = dict(zip((id(v) for v in eqn.invars), ins, strict=True))
    start = [literal(v) if is_literal(v) else at[id(v)] for v in loop.init]
    if (found := _recognised(loop, start)) is None:
        return None
    symbol = len(made_here) + 2  # those of a body are OLD and NEW
    made_here[symbol] = id(eqn), found
    out = [FIXED] * len(eqn.outvars)
    out[found.reference] = _symbol(symbol, loop.carries[found.reference])
    for j, w in found.sums.items():
        out[j] = dataclasses.replace(w, of=((symbol, w.of[0][1]),))
    return out


def _symbol(symbol: Symbol, v: Any) -> Weight:
    """The weight of a value to which symbols are added, one to each element."""
    return made("plus", {symbol: 1.0}, [k for k, n in enumerate(v.aval.shape) if n > 1])


def _recognised(loop: Loop, start: Sequence[Weight]) -> Rescaled | None:
    n = len(loop.init)
    outs = loop.body.outvars[:n]
    counting = {c.place for c in counters(loop.body, loop.carries, outs)} | {loop.counter}
    moving = [j for j in range(n) if j not in counting and loop.carries[j] is not outs[j]]
    if not all(dtypes.issubdtype(loop.carries[j].aval.dtype, np.floating) for j in moving):
        return None
    for reference in moving:
        sums = [j for j in moving if j != reference]
        update = _maximum(loop, reference)
        if update is not None and sums and all(start[j] == ZERO for j in sums):
            found = _rescales(loop, reference, update, sums)
            if found is not None:
                return found
    return None


def _maximum(loop: Loop, place: int) -> Any:
    """The variable of the largest of a carry and something else that the carry becomes; None where it is none."""
    by = {v: e for e in loop.body.eqns for v in e.outvars}
    v = loop.body.outvars[place]
    v = None if is_literal(v) else _unmoved(v, by)
    eqn = by.get(v)
    if eqn is None or eqn.primitive.name != "max":
        return None
    sides = [None if is_literal(x) else _unmoved(x, by) for x in eqn.invars]
    return v if loop.carries[place] in sides else None


def _unmoved(v: Any, by: Mapping[Any, Any]) -> Any:
    """The variable whose elements this one has in another shape."""
    while v in by and by[v].primitive.name in MOVES and not is_literal(by[v].invars[0]):
        source = by[v].invars[0]
        if math.prod(source.aval.shape) != math.prod(v.aval.shape):
            break
        v = source
    return v


def _rescales(loop: Loop, reference: int, update: Any, sums: Sequence[int]) -> Rescaled | None:
    """Whether a round changes the sums as it should: of zeros it makes something of the new reference alone, and of
    what has the weight of that in the old one, the same."""
    first = len(loop.consts)
    given = {update: _symbol(NEW, update)}

    def outs(of: Mapping[int, Weight]) -> list[Weight] | None:
        args = [FIXED] * len(loop.body.invars)
        args[first + reference] = _symbol(OLD, loop.carries[reference])
        for j in sums:
            args[first + j] = of[j]
        weights = Weights()
        found = weights.run(loop.body, args, given)
        weights.drop([w for j, w in enumerate(found) if j != reference and j not in sums])
        return None if weights.bad or not same(found[reference], after) else found

    after = _symbol(NEW, loop.carries[reference])
    zero = outs(dict.fromkeys(sums, ZERO))
    if zero is None or any(zero[j].kind != "times" or [s for s, _ in zero[j].of] != [NEW] for j in sums):
        return None
    old = {j: dataclasses.replace(zero[j], of=((OLD, zero[j].of[0][1]),)) for j in sums}
    again = outs(old)
    if again is None or not all(same(again[j], zero[j]) for j in sums) or not _adds(loop, reference, update, sums):
        return None
    return Rescaled(reference, update, old)


# -- a round whose reference does not change ---------------------------------------------------------------------------

# What a value is in a round; a place instead stands for the sum there with something added.
REFERENCE, NOTHING, ONE, OTHER = "reference", "zero", "one", "other"


def _adds(loop: Loop, reference: int, update: Any, sums: Sequence[int]) -> bool:
    """Whether a round that leaves the reference as it is adds something to each sum, which does not depend on sums."""
    env: dict[Any, Any] = {loop.carries[j]: j for j in sums} | {loop.carries[reference]: REFERENCE}
    read = lambda v: OTHER if is_literal(v) or v not in env else env[v]
    by = {v: eqn for eqn in loop.body.eqns for v in eqn.outvars}
    for eqn in loop.body.eqns:
        ins = [read(v) for v in eqn.invars]
        kept = guarded(eqn, by) if eqn.primitive.name == "select_n" else None
        known = update in eqn.outvars or (kept is not None and ins[1 + kept] == REFERENCE)
        out = REFERENCE if known else _at_rest(eqn, ins)
        if out is None:
            return False
        env.update(dict.fromkeys(eqn.outvars, out))
    return all(read(loop.body.outvars[j]) == j for j in sums)


def _at_rest(eqn: Any, ins: Sequence[Any]) -> Any:
    """The kind of an equation's result; None where a sum goes into something else than a sum."""
    name, places = eqn.primitive.name, [x for x in ins if isinstance(x, int)]
    if not places:
        if name in MOVES or name == "copy":
            return ins[0] if ins[0] in (REFERENCE, NOTHING, ONE) else OTHER
        known = {("sub", (REFERENCE, REFERENCE)): NOTHING, ("exp", (NOTHING,)): ONE, ("exp2", (NOTHING,)): ONE}
        return known.get((name, tuple(ins)), OTHER)
    if len(places) > 1:
        return None
    (place,) = places
    if name in ("add", "add_any") or (name == "jtile_dot" and ins[2:] == [place] and place not in ins[:2]):
        return place
    if name == "mul" and ONE in ins:
        return place
    return place if name == "div" and list(ins) == [place, ONE] else None
