"""Dead code: ops without effect whose results nobody uses, loop carries that feed only themselves, unused scratch."""

from __future__ import annotations

import dataclasses

from jtile.ir import Alloc, Block, For, If, Kernel, Op, Value, While
from jtile.ir.builder import build

from .pipeline import Pass


def run(kernel: Kernel) -> Kernel:
    live = _Live()
    live.block(kernel.body)
    if not kernel.scratch and all(_is_whole(op, live.values) for op in kernel.body.walk()):
        return kernel
    body = _Sweep(live.values).block(kernel.body, keep=None)
    used = {v for op in body.walk() for v in op.operands()}
    params = tuple(p for p in kernel.params if p not in kernel.scratch or p in used)
    return dataclasses.replace(kernel, body=body, params=params)


class _Live:
    """Marks live values; an op without live results and without effect is dead."""

    def __init__(self) -> None:
        self.values: set[Value] = set()

    def use(self, values) -> bool:
        new = [v for v in values if v not in self.values]
        self.values.update(new)
        return bool(new)

    def block(self, b: Block) -> None:
        for op in reversed(b.ops):
            if is_live(op, self.values):
                self.op(op)

    def op(self, op: Op) -> None:
        match op:
            case For():
                self.use((op.lo, op.hi, op.step))
                self.loop([op.body], op)
            case While():
                self.use(op.cond.yields)
                self.loop([op.cond, op.body], op)
            case If():
                self.use((op.cond,))
                for b in op.blocks():
                    self.use(y for y, r in zip(b.yields, op.results, strict=True) if r in self.values)
                    self.block(b)
            case _:
                self.use(op.operands())
                for b in op.blocks():
                    self.use(b.yields)
                    self.block(b)

    def loop(self, blocks: list[Block], op: For | While) -> None:
        """A carry is live where its result is, or where a region needs it for anything but the carry itself."""
        while True:
            before = len(self.values)
            for i in self.carries(op):
                self.use((op.body.yields[i], op.inits[i], op.results[i]))
            for b in blocks:
                self.block(b)
            if len(self.values) == before:
                return

    def carries(self, op: For | While) -> list[int]:
        """Positions of live carries."""
        n = len(op.inits)
        columns = [op.results, op.body.params[-n:] if n else ()] + ([op.cond.params] if isinstance(op, While) else [])
        return [i for i in range(n) if any(c[i] in self.values for c in columns)]


def is_live(op: Op, live: set[Value]) -> bool:
    """Whether an op must stay: a live result, or an effect on memory or on the outside world, here or inside."""
    if any(r in live for r in op.results) or op.effect == "io" or (op.effect == "write" and not isinstance(op, Alloc)):
        return True
    return any(is_live(x, set()) for b in op.blocks() for x in b.ops)


def _is_whole(op: Op, live: set[Value]) -> bool:
    """Whether an op stays with all of its carries."""
    return is_live(op, live) and (not op.inner or all(r in live for r in op.results))


class _Sweep:
    """Copies what is live."""

    def __init__(self, live: set[Value]):
        self.live = live
        self.env: dict[Value, Value] = {}

    def look(self, v: Value) -> Value:
        return self.env.get(v, v)

    def block(self, b: Block, keep: list[int] | None, params: tuple[Value, ...] | None = None) -> Block:
        """`keep`: positions of the yields that stay (None: all)."""
        old = b.params if params is None else params
        new = tuple(Value(p.type, p.name) for p in old)
        self.env.update(zip(old, new, strict=True))
        ops = []
        for op in b.ops:
            if is_live(op, self.live):
                ops.append(self.op(op))
        yields = b.yields if keep is None else [b.yields[i] for i in keep]
        return Block(new, ops, tuple(map(self.look, yields)))

    def op(self, op: Op) -> Op:
        keep = [i for i, r in enumerate(op.results) if r in self.live]
        if isinstance(op, For | While):
            new = self.loop(op, keep)
        elif isinstance(op, If):
            new = If(self.look(op.cond), self.block(op.then, keep), self.block(op.orelse, keep))
        else:
            new = op.clone(self.look, lambda b: self.block(b, None))
            self.env.update(zip(op.results, new.results, strict=True))
            return new
        build(new, op.loc, tuple(op.results[i].name for i in keep))
        self.env.update((op.results[i], v) for i, v in zip(keep, new.results, strict=True))
        return new

    def loop(self, op: For | While, keep: list[int]) -> For | While:
        inits = tuple(self.look(op.inits[i]) for i in keep)
        if isinstance(op, For):
            k, *carry = op.body.params
            body = self.block(op.body, keep, (k, *(carry[i] for i in keep)))
            return dataclasses.replace(
                op, **{n: self.look(getattr(op, n)) for n in ("lo", "hi", "step")}, inits=inits, body=body
            )
        cond = self.block(op.cond, None, tuple(op.cond.params[i] for i in keep))
        return While(inits, cond, self.block(op.body, keep, tuple(op.body.params[i] for i in keep)))


dce = Pass("dce", "Every op has an effect or a result that somebody uses, and every loop carry is needed.", run)
