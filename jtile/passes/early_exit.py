"""Early exit: a counted loop whose rounds do nothing once a flag is set ends at that round.

A `break` in a `jt.range` loop is a flag that the body tests (`jtile.trace.jumps`), so that derivatives find a loop that
counts. What is compiled need not run the idle rounds.
"""

from __future__ import annotations

import numpy as np

from jtile.ir import Block, For, If, Kernel, Map, Value, While
from jtile.ir.block import level_of
from jtile.ir.types import DTYPES

from .fold import number
from .hoist import trips
from .pipeline import Pass
from .rewrite import Rewriter, Rules, is_pure, rewrite, use_counts

rules = Rules()


@rules(For)
def _leaves(op: For, rw: Rewriter):
    flag = _flag(op)
    lo, hi, by = (rw.look(v) for v in (op.lo, op.hi, op.step))
    if flag is None or trips(op) in (1, 2) or not _fits(hi, by):
        return None
    types = [p.type for p in op.body.params]
    names = tuple(p.name for p in op.body.params)
    with rw.b.region(types, names) as cond:
        more, going = (rw.new(Map("lt", (cond.params[0], hi))), rw.new(Map("not", (cond.params[1 + flag],))))
        cond.yields = (rw.new(Map("and", (more, going))),)
    with rw.b.region(types, names) as body:
        carry = rw.inline(_busy(op), body.params)
        body.yields = (rw.new(Map("add", (body.params[0], by))), *carry)
    new = While((lo, *map(rw.look, op.inits)), cond, body)
    return rw.region_op(new, op, ("", *(v.name for v in op.results)))[1:]


def _fits(hi: Value, by: Value) -> bool:
    """Whether the loop counts up, and no addition of the step wraps around."""
    step, end = number(by), number(hi)
    dtype = DTYPES[hi.type.dtype].numpy
    return step is not None and (step == 1 or (step > 1 and end is not None and end + step <= np.iinfo(dtype).max))


def _flag(op: For) -> int | None:
    """The place in the carry of a flag that, once it is set, leaves all of the carry as it is: `if not flag: ...`."""
    if not op.body.ops or not isinstance(guard := op.body.ops[-1], If) or not all(map(is_pure, op.body.ops[:-1])):
        return None
    test, carry = guard.cond.op, op.body.params[1:]
    if not isinstance(test, Map) or test.fn != "not" or test.args[0] not in carry or guard.orelse.ops:
        return None
    idle = dict(zip(guard.results, guard.orelse.yields, strict=True))
    same = all(idle.get(y, y) is p for y, p in zip(op.body.yields, carry, strict=True))
    return carry.index(test.args[0]) if same else None


def _busy(op: For) -> Block:
    """The body of a round that does something."""
    *before, guard = op.body.ops
    assert isinstance(guard, If)
    used = use_counts(op.body)
    before = [o for o in before if any(used.get(r, 0) > (r is guard.cond) for r in o.results)]  # no flag is tested
    given: dict[Value, Value] = dict(zip(guard.results, guard.then.yields, strict=True))
    return Block(op.body.params, [*before, *guard.then.ops], tuple(given.get(y, y) for y in op.body.yields))


def run(kernel: Kernel) -> Kernel:
    return rewrite(kernel, rules) if level_of(kernel) == "tile" else kernel


early_exit = Pass("early_exit", "No for loop goes on once a flag keeps its rounds from doing anything.", run)
