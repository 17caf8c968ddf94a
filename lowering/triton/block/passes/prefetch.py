"""Loads small tiles that products need (scales of blocks, rows of statistics) a round ahead.

Such loads go by pointers, and a consumer would stand still for each: here it carries them, and asks for those of the
next round before it waits for anything of this one. The last round asks for its own again.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from jtile.ir import Block, DotAsync, DotWait, For, Kernel, Load, Op, Select, Value
from jtile.passes.affine import ranges
from jtile.passes.fold import number
from jtile.passes.intervals import Intervals
from jtile.passes.pipeline import Pass
from jtile.passes.rewrite import Copier, buffers, is_pure, written

ELEMENTS = 256  # elements of a tile that may be carried, at most: two registers a thread


def run(kernel: Kernel) -> Kernel:
    roots = buffers(kernel)
    known, outputs = ranges(kernel), set(written(kernel.body, roots))
    forms = {}
    for op in kernel.body.walk():
        if isinstance(op, For) and _is_of_products(op, known):
            loads = [x for x in _loads(op) if roots.get(x.ref, x.ref) not in outputs]
            forms |= {op: functools.partial(_ahead, op, loads)} if loads else {}
    return Copier(forms).whole(kernel)


def _is_of_products(loop: For, known: Intervals) -> bool:
    """Whether a loop surely makes a round, with products in it."""
    lo, hi, step = known(loop.lo), known(loop.hi), number(loop.step)
    runs = lo is not None and hi is not None and lo.hi < hi.lo and step is not None and step > 0
    return runs and any(isinstance(op, DotAsync) for op in loop.body.ops)


def _loads(loop: For) -> list[Load]:
    """The loads of a loop whose tiles can be carried, and whose places follow from its index."""
    loads = [op for op in loop.body.ops if isinstance(op, Load) and math.prod(op.result.shape) <= ELEMENTS]
    return [op for op in loads if _places(op, loop) is not None]


def _ahead(old: For, loads: list[Load], copier: Copier) -> tuple[Value, ...]:
    """Builds the loop that carries `loads`; returns its results without the carried tiles."""
    b = copier.b
    lo, hi, step = map(copier.look, (old.lo, old.hi, old.step))
    first = [_load(op, old, copier.within(), lo) for op in loads]
    b.loc = old.loc
    names = (*(p.name for p in old.body.params), *(op.result.name for op in loads))
    carried = len(old.inits)
    with b.region([v.type for v in (*old.body.params, *first)], names) as body:
        copier.replace(old.body.params, body.params[: 1 + carried])
        copier.replace([op.result for op in loads], body.params[1 + carried :])
        following: list[Value] = []
        early: list[Op] = []
        for op in old.body.ops:
            if isinstance(op, DotWait) and not following:
                early = _ready(old.body, op, loads)
                for x in early:
                    copier.put(x)
                following = _following(old, loads, copier, hi)
            if op not in loads and op not in early:
                copier.op(op)
        following = following or _following(old, loads, copier, hi)
        body.yields = (*map(copier.look, old.body.yields), *following)
    b.loc = old.loc
    inits = (*map(copier.look, old.inits), *first)
    new = dataclasses.replace(old, lo=lo, hi=hi, step=step, inits=inits, body=body)
    return b.add(new, *(r.name for r in old.results), *(op.result.name for op in loads)).results[:carried]


def _following(old: For, loads: list[Load], copier: Copier, hi: Value) -> list[Value]:
    """The loads of the next round, asked for when the products of this round are under way and its own loads are no
    more needed: else loads would go from register to register, and each copy would wait for its load."""
    b, k = copier.b, old.body.params[0]
    b.loc = old.loc
    after = b.map("add", copier.look(k), copier.look(old.step))
    ahead = b.value(Select(b.map("lt", after, hi), after, copier.look(k)))
    inner = copier.within()
    return [_load(op, old, inner, ahead) for op in loads]


def _ready(body: Block, at: Op, loads: list[Load]) -> list[Op]:
    """The ops from `at` on that make small tiles of the loaded ones, and need no other results of ops from `at` on."""
    place = body.ops.index(at)
    known = {*body.params, *(r for op in body.ops[:place] for r in op.results), *(op.result for op in loads)}
    inside = {r for op in body.ops for r in op.results}
    made = {op.result for op in loads}
    out: list[Op] = []
    for op in body.ops[place:]:
        small = all(math.prod(r.shape) <= ELEMENTS for r in op.results)
        ready = all(v in known or v not in inside for v in op.operands())
        if is_pure(op) and not op.blocks() and small and ready and not made.isdisjoint(op.operands()):
            out.append(op)
            known.update(op.results)
            made.update(op.results)
    return out


def _places(load: Load, loop: For) -> list[Op] | None:
    """Ops of the body that compute the place of a load from the index of the loop, in order; None where it takes more,
    or where the place is the same in all rounds."""
    k, *carries = loop.body.params
    needed = {v for v in load.operands() if v is not load.ref}
    out: list[Op] = []
    for op in reversed(loop.body.ops[: loop.body.ops.index(load)]):
        if any(r in needed for r in op.results):
            if not is_pure(op) or op.blocks():
                return None
            needed.update(op.operands())
            out.append(op)
    return out[::-1] if k in needed and not needed & set(carries) else None


def _load(load: Load, loop: For, copier: Copier, k: Value) -> Value:
    """The load of round k."""
    copier.env[loop.body.params[0]] = k
    for op in _places(load, loop) or ():
        copier.put(op)
    return copier.put(load).results[0]


prefetch = Pass("prefetch", "No loop of products waits for a small tile whose place follows from its index.", run)
