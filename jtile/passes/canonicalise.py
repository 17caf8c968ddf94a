"""Canonical forms: the tables of `fold`, `algebra`, `layouts`, and the rules for control flow and memory below."""

from __future__ import annotations

import dataclasses

from jtile.ir import (
    Arrive,
    Assert,
    AsyncLoad,
    Atomic,
    DotAsync,
    Expect,
    For,
    Full,
    If,
    Kernel,
    Load,
    Prefetch,
    Select,
    Store,
    Value,
    Wait,
    While,
)
from jtile.ir.core import Block

from . import algebra, fold, layouts
from .fold import number
from .hoist import trips
from .pipeline import Pass
from .rewrite import Rewriter, Rules, is_pure, rewrite

control = Rules()


@control(If)
def _known_branch(op: If, rw: Rewriter):
    cond = number(rw.look(op.cond))
    return None if cond is None else rw.inline(op.then if cond else op.orelse)


@control(If)
def _branches_to_select(op: If, rw: Rewriter):
    """Replace an `if` with two empty branches by a choice between scalars, or by nothing."""
    if op.then.ops or op.orelse.ops or any(v.shape for v in op.results):
        return None
    cond = rw.look(op.cond)
    pairs = zip(op.then.yields, op.orelse.yields, strict=True)
    return tuple(rw.new(Select(cond, rw.look(a), rw.look(b))) for a, b in pairs)


@control(For)
def _unrolled(op: For, rw: Rewriter):
    """Replace a loop of no trip by the carry as it came, and one of one trip by its body."""
    new = For(rw.look(op.lo), rw.look(op.hi), rw.look(op.step), (), Block())
    lo, hi, step = (number(v) for v in (new.lo, new.hi, new.step))
    if lo is None or hi is None or step is None:
        return None
    inits = tuple(map(rw.look, op.inits))
    if step == 0 or len(range(lo, hi, step)) > 1:
        return None
    return inits if trips(new) == 0 else rw.inline(op.body, (new.lo, *inits))


@control(For, While)
def _unchanged_carry(op: For | While, rw: Rewriter):
    """A carry that the body passes on as it is has its first value everywhere."""
    params = op.body.params[-len(op.inits) :] if op.inits else ()
    # In a while, what the body passes on is its own parameter; the condition has another one.
    same = [i for i, p in enumerate(params) if op.body.yields[i] is p]
    if not same:
        return None
    keep = [i for i in range(len(params)) if i not in same]
    for i in same:
        rw.replace((params[i],), (rw.look(op.inits[i]),))
        if isinstance(op, While):
            rw.replace((op.cond.params[i],), (rw.look(op.inits[i]),))
    return _without(op, keep, same, rw)


def _without(op: For | While, keep: list[int], same: list[int], rw: Rewriter) -> tuple[Value, ...]:
    inits = tuple(rw.look(op.inits[i]) for i in keep)
    body_yields = tuple(op.body.yields[i] for i in keep)
    n = len(op.inits)
    carry = op.body.params[-n:]
    if isinstance(op, For):
        body = Block((op.body.params[0], *(carry[i] for i in keep)), op.body.ops, body_yields)
        bounds = {x: rw.look(getattr(op, x)) for x in ("lo", "hi", "step")}
        new = For(**bounds, inits=inits, body=rw.block(body), stages=op.stages, unroll=op.unroll)
    else:
        cond = Block(tuple(op.cond.params[i] for i in keep), op.cond.ops, op.cond.yields)
        new = While(inits, rw.block(cond), rw.block(Block(tuple(carry[i] for i in keep), op.body.ops, body_yields)))
    results = iter(rw.region_op(new, op, tuple(op.results[i].name for i in keep)))
    return tuple(rw.look(op.inits[i]) if i in same else next(results) for i in range(n))


@control(While)
def _never(op: While, rw: Rewriter):
    """Remove a `while` whose condition is false at once."""
    stop = isinstance(op.cond.yields[0].op, Full) and not op.cond.yields[0].op.value
    return tuple(map(rw.look, op.inits)) if stop and all(map(is_pure, op.cond.ops)) else None


@control(Load)
def _load(op: Load, rw: Rewriter):
    """Simplify a load whose mask is one bool: it has no mask then, or is no load."""
    if op.mask is None or number(op.mask) is None:
        return None
    if not number(op.mask):
        return rw.new(Full(op.pad, op.result.shape, op.result.dtype))
    return rw.new(Load(op.ref, op.index, None, op.pad, op.checked))


@control(Store)
def _store(op: Store, rw: Rewriter):
    if op.mask is None or number(op.mask) is None:
        return None
    return rw.add(Store(op.ref, op.index, op.value, None, op.checked)) if number(op.mask) else ()


@control(Atomic)
def _atomic(op: Atomic, rw: Rewriter):
    """Simplify an atomic whose mask is one bool; masked lanes give 0."""
    if op.mask is None or number(op.mask) is None:
        return None
    if not number(op.mask):
        return rw.new(Full(0, op.result.shape, op.result.dtype))
    return rw.new(Atomic(op.fn, op.ref, op.index, op.value, op.compare))


@control(Assert)
def _assert(op: Assert, rw: Rewriter):
    return () if number(op.cond) else None


@control(Arrive, AsyncLoad, Expect, Prefetch, Wait)
def _predicated(op: Arrive | AsyncLoad | Expect | Prefetch | Wait, rw: Rewriter):
    """Drop the condition of what happens always or never. The op stays where it stands, since others wait for it."""
    when = None if op.when is None else number(op.when)
    if when is None:
        return None
    return rw.add(dataclasses.replace(op, when=None)) if when else ()


@control(DotAsync)
def _kept(op: DotAsync, rw: Rewriter):
    """Simplify a product whose accumulator always counts, or never."""
    keep = None if op.keep is None else number(op.keep)
    if keep is None or (op.narrow and not keep):  # the accumulator says how many columns a narrow product has
        return None
    return rw.new(dataclasses.replace(op, keep=None, acc=op.acc if keep else None))


RULES = Rules(fold.rules, algebra.rules, layouts.rules, control)


def run(kernel: Kernel) -> Kernel:
    return rewrite(kernel, RULES)


canonicalise = Pass(
    "canonicalise",
    "No op has constant operands only, no identity, no chain of moves, no known branch is left.",
    run,
    True,
)
