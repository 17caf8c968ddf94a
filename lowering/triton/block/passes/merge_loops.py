"""Merges adjoining loops that do the same but for masks: `for j in lo..mid: f(j)` and `for j in mid..hi: masked f(j)`
are one loop over lo..hi that masks where `j >= mid`, so that one pipelined loop serves all rounds."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jtile.ir import Block, For, Kernel, Load, Map, Op, Select, Value
from jtile.ir.printer import literal
from jtile.passes.affine import ranges
from jtile.passes.cse import index_form
from jtile.passes.fold import number
from jtile.passes.intervals import Intervals
from jtile.passes.rewrite import Copier, Form, is_pure, reads_only, use_counts

from .branches import Needed, branches


def merge_loops(kernel: Kernel) -> Kernel:
    """The kernel with one loop for every run of adjoining loops that can be merged."""
    adjoining = _Adjoining(kernel)
    blocks = [kernel.body, *(b for op in kernel.body.walk() for b in op.blocks())]
    forms: dict[Op, Form] = {}
    for run in (run for b in blocks for run in adjoining.runs(b)):
        forms |= {loop: functools.partial(_left_out, loop) for loop in run.loops[:-1]}
        forms[run.loops[-1]] = run.merged
    return Copier(forms).whole(kernel)


def _left_out(loop: For, copier: Copier) -> list[Value]:
    """The form of a loop that is left out: the next loop goes on with the values that this one starts from."""
    return [copier.look(v) for v in loop.inits]


class _Adjoining:
    """The loops of a kernel that can be merged."""

    def __init__(self, kernel: Kernel):
        self.known = ranges(kernel)
        self.uses = use_counts(kernel.body)

    def runs(self, b: Block) -> list[_Run]:
        """Runs of two or more loops that can be merged."""
        out: list[_Run] = []
        chain: list[For] = []
        for op in [*b.ops, None]:
            if isinstance(op, For) and chain and self.adjoins(chain[-1], op):
                chain.append(op)
            elif op is None or not is_pure(op):
                out += self.of(chain)
                chain = [op] if isinstance(op, For) else []
            elif isinstance(op, For):
                out += self.of(chain)
                chain = [op]
        return out

    def adjoins(self, a: For, b: For) -> bool:
        """Whether b goes on where a ends, and only b uses the results of a."""
        return (
            b.lo is a.hi
            and number(a.step) == number(b.step) == 1
            and bool(a.results)
            and b.inits == a.results
            and all(self.uses.get(r, 0) == 1 for r in a.results)
            and all(reads_only(x) for loop in (a, b) for x in loop.body.ops)
        )

    def of(self, chain: list[For]) -> list[_Run]:
        """The longest runs in a chain of adjoining loops."""
        for size in range(len(chain), 1, -1):
            for i in range(len(chain) - size + 1):
                run = self.whole(chain[i : i + size])
                if run is not None:
                    return [*self.of(chain[:i]), run, *self.of(chain[i + size :])]
        return []

    def whole(self, chain: list[For]) -> _Run | None:
        """All loops of a chain as one run."""
        if not all(_at_most(x.lo, x.hi, self.known) for x in chain[1:-1]):
            return None
        template = max(chain, key=lambda loop: len(loop.body.ops))
        bodies = [_Same(loop.body, template.body) for loop in chain]
        found = [s for s in (body.masks() for body in bodies) if s is not None]
        hanging = set().union(*(body.hanging for body in bodies))
        return _Run(chain, template, found, hanging, self.known) if len(found) == len(chain) else None


def _at_most(a: Value, b: Value, known: Intervals) -> bool:
    """Whether a <= b, from the bounds of both and from `min` and `max`."""
    x, y = known(a), known(b)
    if a is b or (x is not None and y is not None and x.hi <= y.lo):
        return True
    return (isinstance(b.op, Map) and b.op.fn == "max" and any(_at_most(a, v, known) for v in b.op.args)) or (
        isinstance(a.op, Map) and a.op.fn == "min" and any(_at_most(v, b, known) for v in a.op.args)
    )


@dataclasses.dataclass
class _Run:
    """Loops to merge: `template` has all masks, `unmasked` says for each loop which of them it lacks; its `hanging`
    loads may leave their arrays in the rounds of another loop."""

    loops: list[For]
    template: For
    unmasked: list[set[Select]]
    hanging: set[Load]
    known: Intervals

    def merged(self, copier: Copier) -> tuple[Value, ...]:
        b, look = copier.b, copier.look
        b.loc = self.template.loc
        first, last = self.loops[0], self.loops[-1]
        # A loop that makes no round may have its bounds in the wrong order.
        lo, hi = look(first.lo), look(last.hi)
        if not _at_most(first.lo, first.hi, self.known):
            lo = b.map("min", lo, look(first.hi))
        if not _at_most(last.lo, last.hi, self.known):
            hi = b.map("max", look(last.lo), hi)
        old = self.template.body
        masks = branches(old, {mask: self.needed(mask) for mask in set().union(*self.unmasked)})
        checks = {op: functools.partial(_checked, op) for op in self.hanging}
        body = Copier(masks | checks, b, look).block(old)
        stages = [loop.stages for loop in self.loops if loop.stages is not None]
        new = dataclasses.replace(
            self.template,
            lo=lo,
            hi=hi,
            step=look(first.step),
            inits=tuple(map(look, first.inits)),
            body=body,
            stages=max(stages, default=None),
        )
        b.loc = self.template.loc
        return b.add(new, *(r.name for r in last.results)).results

    def needed(self, mask: Select) -> Needed:
        """The condition on the round under which one of the loops that have the mask would have run it."""
        k = self.template.body.params[0]
        masked = [loop for loop, sites in zip(self.loops, self.unmasked, strict=True) if mask not in sites]

        def build(copier: Copier) -> Value:
            b, look = copier.b, copier.look
            parts: list[Value] = []
            for loop in masked:
                ends = [b.map("ge", look(k), look(loop.lo))] if loop is not self.loops[0] else []
                ends += [b.map("lt", look(k), look(loop.hi))] if loop is not self.loops[-1] else []
                parts.append(functools.reduce(lambda x, y: b.map("and", x, y), ends))
                if len(parts) > 1:
                    parts = [b.map("or", *parts)]
            return parts[0]

        return build


def _checked(load: Load, copier: Copier) -> tuple[Value, ...]:
    new = copier.put(load)
    assert isinstance(new, Load)
    new.checked = True
    return new.results


class _Same:
    """Compares two bodies, value by value from their yields on; `template` may have masks that `body` has not."""

    def __init__(self, body: Block, template: Block):
        self.body, self.template = body, template
        self.equal: dict[tuple[Value, Value], bool] = {}
        self.inside = {r for op in body.ops for r in op.results}
        for v, w in zip(body.params, template.params, strict=True):
            self.equal[v, w] = True
        self.sites: set[Select] = set()
        self.hanging: set[Load] = set()  # loads of the template without a bounds check, whose loads in `body` have one

    def masks(self) -> set[Select] | None:
        """The masks that only the template has; None where the bodies differ in more."""
        if [p.type for p in self.body.params] != [p.type for p in self.template.params]:
            return None
        pairs = zip(self.body.yields, self.template.yields, strict=True)
        return self.sites if all(self.same(v, w) for v, w in pairs) else None

    def same(self, v: Value, w: Value) -> bool:
        if (v, w) not in self.equal:
            self.equal[v, w] = self.compare(v, w)
        return self.equal[v, w]

    def compare(self, v: Value, w: Value) -> bool:
        if v not in self.inside:
            return v is w
        before = set(self.sites)
        if v.op is not None and w.op is not None and self.same_op(v.op, w.op):
            return v.op.results.index(v) == w.op.results.index(w)
        self.sites = before
        if isinstance(w.op, Select) and self.same(v, w.op.a):
            self.sites.add(w.op)
            return True
        return False

    def same_op(self, a: Op, b: Op) -> bool:
        if type(a) is not type(b) or a.blocks() or b.blocks() or _shape(a) != _shape(b):
            return False
        if isinstance(a, Load) and isinstance(b, Load) and a.checked and not b.checked:
            self.hanging.add(b)
        return all(self.same(v, w) for v, w in zip(a.operands(), b.operands(), strict=True))


def _shape(op: Op) -> tuple[Any, ...]:
    """Everything that an op consists of but its operands."""
    attributes = tuple((n, literal(x)) for n, x in op.attributes().items() if n != "checked")
    present = tuple(n for n, k in op.fields.items() if k == "optional" and getattr(op, n) is not None)
    lengths = tuple(len(getattr(op, n)) for n, k in op.fields.items() if k == "operands")
    return attributes, present, lengths, index_form(op.index) if isinstance(op, Load) else ()
