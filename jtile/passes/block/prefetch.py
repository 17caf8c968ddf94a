"""Loads small tiles that products need (scales of blocks, rows of statistics) a round ahead.

Such loads go by pointers, and a consumer would stand still for each: here it carries them, and asks for those of the
next round before it waits for anything of this one. The last round asks for its own again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from jtile.ir import Block, Builder, DotAsync, DotWait, For, Kernel, Load, Op, Select, Value
from jtile.passes.affine import ranges
from jtile.passes.fold import number
from jtile.passes.intervals import Intervals
from jtile.passes.pipeline import Pass
from jtile.passes.rewrite import buffers, is_pure, written

from .chains import Copier

ELEMENTS = 256  # of a tile that may be carried: two registers a thread


def run(kernel: Kernel) -> Kernel:
    roots = buffers(kernel)
    ahead = _Ahead(ranges(kernel), roots, set(written(kernel.body, roots)))
    return kernel.with_body(ahead.block(kernel.body, lambda v: v))


@dataclasses.dataclass
class _Ahead:
    """Copies a kernel; loops of products load ahead what no part of the kernel writes."""

    known: Intervals
    roots: dict[Value, Value]
    written: set[Value]

    def block(self, old: Block, env: Callable[[Value], Value]) -> Block:
        b = Builder(Block(tuple(Value(p.type, p.name) for p in old.params)))
        copy = Copier(b, env)
        copy.local.update(zip(old.params, b.block.params, strict=True))
        for op in old.ops:
            loads = self.loads(op) if isinstance(op, For) else []
            if isinstance(op, For) and loads:
                new: Op = self.loop(op, loads, b, copy.look)
            else:
                new = op.clone(copy.look, lambda inner: self.block(inner, copy.look))
                b.block.ops.append(new)
            copy.local.update(zip(op.results, new.results, strict=False))
        b.block.yields = tuple(map(copy.look, old.yields))
        return b.block

    def loads(self, loop: For) -> list[Load]:
        """The loads of a loop that can be carried: their places follow from the index of the loop."""
        lo, hi, step = self.known(loop.lo), self.known(loop.hi), number(loop.step)
        runs = lo is not None and hi is not None and lo.hi < hi.lo and step is not None and step > 0
        if not runs or not any(isinstance(op, DotAsync) for op in loop.body.ops):
            return []
        out = []
        for op in loop.body.ops:
            if not isinstance(op, Load) or math.prod(op.result.shape) > ELEMENTS:
                continue
            if self.roots.get(op.ref, op.ref) not in self.written and _places(op, loop) is not None:
                out.append(op)
        return out

    def loop(self, old: For, loads: list[Load], b: Builder, env: Callable[[Value], Value]) -> Op:
        k, *params = old.body.params
        b.loc = old.loc
        lo, hi, step = map(env, (old.lo, old.hi, old.step))
        first = [_load(op, old, Copier(b, env), lo) for op in loads]
        names = (*(p.name for p in old.body.params), *(op.result.name for op in loads))
        with b.region([v.type for v in (k, *params, *first)], names) as body:
            copy = Copier(b, env)
            copy.local.update(zip(old.body.params, body.params, strict=False))
            copy.local.update(zip((op.result for op in loads), body.params[1 + len(params) :], strict=True))
            following: list[Value] = []
            early: list[Op] = []
            for op in old.body.ops:
                if isinstance(op, DotWait) and not following:
                    early = _ready(old.body, op, loads)
                    for x in early:
                        copy.op(x)
                    following = self.following(old, loads, copy, hi)
                if op not in loads and op not in early:
                    new = op.clone(copy.look, lambda inner: self.block(inner, copy.look))
                    b.block.ops.append(new)
                    copy.local.update(zip(op.results, new.results, strict=True))
            following = following or self.following(old, loads, copy, hi)
            body.yields = (*map(copy.look, old.body.yields), *following)
        b.loc = old.loc
        inits = (*map(env, old.inits), *first)
        new = dataclasses.replace(old, lo=lo, hi=hi, step=step, inits=inits, body=body)
        return b.add(new, *(r.name for r in old.results), *(op.result.name for op in loads))

    @staticmethod
    def following(old: For, loads: list[Load], copy: Copier, hi: Value) -> list[Value]:
        """The loads of the next round, asked for when the products of this one are under way, and when those of this
        round are no more needed: else they would go from register to register, and each copy wait for its load."""
        b, k = copy.b, old.body.params[0]
        b.loc = old.loc
        after = b.map("add", copy.look(k), copy.look(old.step))
        ahead = b.value(Select(b.map("lt", after, hi), after, copy.look(k)))
        inner = Copier(b, copy.look)
        return [_load(op, old, inner, ahead) for op in loads]


def _ready(body: Block, at: Op, loads: list[Load]) -> list[Op]:
    """Small tiles that are made of what is loaded, by ops from `at` on that need nothing of the others of them."""
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


def _load(load: Load, loop: For, copy: Copier, k: Value) -> Value:
    """The load of round k."""
    copy.local[loop.body.params[0]] = k
    for op in _places(load, loop) or ():
        copy.op(op)
    return copy.op(load).results[0]


prefetch = Pass("prefetch", "No loop of products waits for a small tile whose place follows from its index.", run)
