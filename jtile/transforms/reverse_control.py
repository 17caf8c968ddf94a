"""Reverse mode of loops and branches.

A loop runs forwards once and saves its carry at the start of every round into scratch; backwards, every round is swept
again from what was saved, and pulled back. What turns out not to be needed (the carry of a sum, say) is pruned from the
kernel afterwards, together with its scratch. A cotangent that no round changes is no carry of the loop that runs
backwards; a loop that is left without carries but sums runs in any order, so it runs forwards, by its own index.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax

from jtile.language._equations import bind
from jtile.language.control import Range, counted
from jtile.trace.rules.control import counters, hint_of
from jtile.trace.tracing import equations
from jtile.transforms.activity import Activity, is_literal
from jtile.transforms.evaluate import Loop, as_loop, refuse
from jtile.transforms.rescaling import Rescaled
from jtile.transforms.reverse import RULES, Mode, Pull, Reverse, Slot, new_ref, plus, read_row, wide, write_row

# Rounds to make room for where no bound is known. Where that room turns out to be needed, `vjp` raises.
UNBOUNDED = 2**40


@dataclasses.dataclass
class _Run:
    """One loop under one sweep: what both directions need.

    Attributes:
      values: operands of the loop (consts, init, xs) as values and `Slot`s.
      rounds: number of rounds, an int or traced.
      room: the most rounds that there can be.
      moving: places of the carries that are saved and carried: neither counters nor constant.
      steps: place of a carry that counts -> its step.
      stacks: per moving carry, the scratch that holds it at the start of every round (empty: nothing is saved).
      limit: what ends a loop whose rounds are traced.
      rescaled: how the carries change where they only rescale; `last`: the reference after all rounds, then.
      again: whether the carry of a round is computed again from the first one on.
    """

    loop: Loop
    consts: list[Any]
    init: list[Any]
    xs: list[Any]
    rounds: Any
    room: int
    moving: list[int]
    steps: dict[int, int]
    stacks: list[Any]
    limit: Any = None
    rescaled: Rescaled | None = None
    last: Any = None
    again: bool = False

    def carry(self, t: Any, k: Any, moved: Sequence[Any]) -> list[Any]:
        """The whole carry in round `t`, whose counter is `k`."""
        now = dict(zip(self.moving, moved, strict=True))
        out = []
        for j, start in enumerate(self.init):
            if j == self.loop.counter:
                out.append(_as(k, start.dtype))
            elif j in self.steps:
                grown = lax.mul(_as(t, start.dtype), start.dtype.type(self.steps[j]))
                out.append(lax.add(_as(start, start.dtype), grown))
            else:
                out.append(now.get(j, start))
        return out

    def place(self, t: Any) -> Any:
        """Where the xs and ys of round `t` stand."""
        return lax.sub(np.int32(self.loop.length - 1), t) if self.loop.reverse else t

    def rows(self, t: Any) -> list[Any]:
        return [lax.dynamic_index_in_dim(x, self.place(t), 0, keepdims=False) for x in self.xs]

    @property
    def pulled(self) -> list[int]:
        """The moving carries that a cotangent goes through."""
        return self.moving if self.rescaled is None else [*self.rescaled.sums]

    def range(self) -> tuple[Range, Callable[[Any], tuple[Any, Any]]]:
        """The loop's own range; and the map from its index to the round and the counter."""
        hint = hint_of(self.loop.body, self._counter(), self.loop.carries)
        plain = Range(0, self.rounds, 1, hint.stages, hint.unroll)
        c, step = self.loop.counter, self.loop.step
        if c is None:
            return plain, lambda i: (i, i)
        lo = self.init[c]
        if isinstance(self.rounds, int) and isinstance(lo, core.Tracer):
            return plain, lambda i: (i, self.index(i))
        if isinstance(self.rounds, int):
            own = Range(int(lo), int(lo) + self.rounds * step, step, hint.stages, hint.unroll)
        else:
            own = Range(lo, self.limit, step, hint.stages, hint.unroll)
        if step == 1 and not isinstance(lo, core.Tracer) and int(lo) == 0:
            return own, lambda i: (_int32(i), i)
        return own, lambda i: (_int32(lax.div(lax.sub(i, _as(lo, i.dtype)), i.dtype.type(step))), i)

    def index(self, t: Any) -> Any:
        """The counter in round `t`."""
        c = self.loop.counter
        if c is None:
            return t
        lo = self.init[c]
        return lax.add(_as(lo, lo.dtype), lax.mul(_as(t, lo.dtype), lo.dtype.type(self.loop.step)))

    def _counter(self) -> Any:
        found = counters(self.loop.body, self.loop.carries, self.loop.body.outvars[: len(self.init)])
        return next((f for f in found if f.place == self.loop.counter), None)


def _as(x: Any, dtype: Any) -> Any:
    """A number or a scalar, converted to another integer dtype."""
    if isinstance(x, int) or (isinstance(x, np.ndarray | np.generic) and not x.ndim):
        return np.dtype(dtype).type(int(x))
    return lax.convert_element_type(x, dtype)


def _int32(x: Any) -> Any:
    return lax.convert_element_type(x, np.int32)


def _prepare(self: Reverse, eqn: Any, args: list[Any]) -> _Run:
    loop = as_loop(eqn)
    read = dict(zip((id(v) for v in eqn.invars), args, strict=True))
    number = lambda v: np.asarray(v.val, v.aval.dtype)
    values = lambda variables: [number(v) if is_literal(v) else read[id(v)] for v in variables]
    init = [x if hasattr(x, "aval") else np.asarray(x) for x in values(loop.init)]
    n = len(init)
    found = counters(loop.body, loop.carries, loop.body.outvars[:n])
    steps = {c.place: c.step for c in found}
    still = {j for j, (a, b) in enumerate(zip(loop.carries, loop.body.outvars, strict=False)) if a is b}
    moving = [j for j in range(n) if j not in steps and j not in still and j != loop.counter]
    run = _Run(loop, values(loop.consts), init, values(loop.xs), loop.length, loop.length or 0, moving, steps, [])
    if loop.length is None:
        (limit,) = values([loop.limit])
        lo = init[loop.counter]
        limit = lax.convert_element_type(limit, lo.dtype)
        gap = lax.max(lax.sub(limit, lo), lo.dtype.type(0))
        run.rounds = _int32(lax.div(lax.add(gap, lo.dtype.type(loop.step - 1)), lo.dtype.type(loop.step)))
        run.limit = limit
        bound = self.ranges.rounds(eqn)
        run.room = UNBOUNDED if bound is None else bound
    return run


def _loop(self: Reverse, eqn: Any, args: list[Any], mode: Mode) -> tuple[list[Any], Pull | None]:
    slots = [x for x in args if isinstance(x, Slot)]
    touched = any(x.ct is not None for x in slots) or any(v in self.activity for v in eqn.outvars)
    changes = any(x.changes for x in slots)
    if not touched and not changes:
        return bind(eqn, [x.primal if isinstance(x, Slot) else x for x in args]), None
    if as_loop(eqn) is None:
        return _endless(self, eqn, args, mode, changes)
    run = _prepare(self, eqn, args)
    run.rescaled = self.rescaled.get(id(eqn))
    if mode.effects and mode.tape:
        _save_loads(self, eqn, args, mode)
    if mode.tape and touched and run.rescaled is None:
        run.stacks = [new_ref((run.room, *run.init[j].shape), run.init[j].dtype) for j in run.moving]
    outs = _forwards(self, run, mode)
    run.last = None if run.rescaled is None else outs[run.rescaled.reference]
    if not touched:
        return outs, None
    return outs, lambda cts: _backwards(self, run, mode, cts)


def _endless(self: Reverse, eqn: Any, args: list[Any], mode: Mode, changes: bool) -> tuple[list[Any], Pull]:
    """A `while` that does not count its rounds: they are counted. Nobody knows how many there can be, so that no carry
    is saved: where a round needs its own, the rounds before it are computed again."""
    cond, closed = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    if changes or any(e.primitive.name in ("jtile_store", "jtile_atomic") for e in equations(closed.jaxpr)):
        raise refuse(
            "reverse mode goes through a while loop that does not count its rounds only where it writes nothing, and "
            "reads nothing that the kernel writes: write `for k in jt.range(most)` and `break`, where `most` is the "
            "most rounds that there can be, or give the kernel a rule of its own (defvjp)",
            eqn,
        )
    consts, init = args[n_cond : n_cond + n_body], [jnp.asarray(x) for x in args[n_cond + n_body :]]
    invars = eqn.invars[n_cond:]
    loop = Loop(eqn, closed.jaxpr, closed.consts, invars[:n_body], invars[n_body:])
    once = Mode(False, False, mode.path)
    values = lambda jaxpr, own, *xs: self.sweep(jaxpr.jaxpr, jaxpr.consts, [*own, *xs], once)[0]
    still = {j for j, (a, b) in enumerate(zip(loop.carries, loop.body.outvars, strict=True)) if a is b}

    def body(c):
        return c[0] + np.int32(1), *(jnp.asarray(x) for x in values(closed, consts, *c[1:]))

    rounds, *outs = lax.while_loop(lambda c: values(cond, args[:n_cond], *c[1:])[0], body, (np.int32(0), *init))
    moving = [j for j in range(len(init)) if j not in still]
    most = self.ranges.tested(eqn)
    if most is not None:  # of use to second derivatives, which save carries of the loop that this one's gradient is
        rounds = lax.clamp(np.int32(0), rounds, np.int32(most))
    run = _Run(loop, consts, init, [], rounds, UNBOUNDED, moving, {}, [], again=True)
    return outs, lambda cts: _backwards(self, run, mode, cts)


def _forwards(self: Reverse, run: _Run, mode: Mode) -> list[Any]:
    """The loop as it is; saves the carry of every round where there are stacks."""
    loop, n = run.loop, len(run.init)
    own, round_of = run.range()
    ys = [new_ref(v.aval.shape, v.aval.dtype) for v in loop.eqn.outvars[n:]]
    rows: list[Any] = []  # the rows of the last traced round, whose types are needed to read them back

    def body(index, moved):
        t, k = round_of(index)
        for ref, x in zip(run.stacks, moved, strict=False):
            write_row(ref, (t,), x)
        now = [*run.consts, *run.carry(t, k, moved), *run.rows(t)]
        inner = Mode(mode.effects, False, (*mode.path, t))
        outs, _ = self.sweep(loop.body, loop.body_consts, now, inner)
        rows[:] = outs[n:]
        for ref, y in zip(ys, rows, strict=True):
            write_row(ref, (run.place(t),), y)
        return [outs[j] for j in run.moving]

    last = dict(zip(run.moving, counted(own, body, [run.init[j] for j in run.moving]), strict=True))
    out = []
    for j, start in enumerate(run.init):
        if j == loop.counter or j in run.steps:
            step = loop.step if j == loop.counter else run.steps[j]
            out.append(lax.add(_as(start, start.dtype), lax.mul(_as(run.rounds, start.dtype), start.dtype.type(step))))
        else:
            out.append(last.get(j, start))
    return [*out, *[read_row(ref, (), y) for ref, y in zip(ys, rows, strict=True)]]


# -- backwards ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Round:
    """One round backwards, traced: `(t, k, cotangents of the moving carries in live, cotangent rows of the ys) ->
    (those carries' cotangents before the round, and those of the other operands where they are not zero)`.

    Attributes:
      live: moving carries (places in the loop's carry) that have a cotangent.
      fixed: those of them whose cotangent the round does not change.
      others: places in (consts, carry, xs) of the operands that get a cotangent besides.
    """

    closed: Any
    live: tuple[int, ...]
    fixed: tuple[int, ...]
    others: tuple[int, ...]


def _backwards(self: Reverse, run: _Run, mode: Mode, cts: Sequence[Any]) -> list[Any]:
    n = len(run.init)
    carry_cts, ys_cts = list(cts[:n]), list(cts[n:])
    round_ = _traced_round(self, run, mode, [j for j in run.pulled if carry_cts[j] is not None], ys_cts)
    variables = [*run.loop.body.invars]
    kinds = [variables[j] for j in round_.others]
    n_consts = len(run.consts)
    start = {j: _instance(carry_cts[j], run.loop.carries[j]) for j in round_.live}
    turning = [j for j in round_.live if j not in round_.fixed]
    rows = [j for j in round_.others if j >= n_consts + n]
    sums = [j for j in round_.others if j < n_consts + n]
    row_refs = {j: new_ref((run.room, *variables[j].aval.shape), wide(variables[j].aval.dtype)) for j in rows}
    zeros = [jnp.zeros(v.aval.shape, wide(v.aval.dtype)) for v, j in zip(kinds, round_.others) if j in sums]
    own, round_of = run.range()

    def at(t, k, carry):
        moved, sums_now = carry[: len(turning)], carry[len(turning) :]
        now = start | dict(zip(turning, moved, strict=True))
        rows_of = lambda ct: lax.dynamic_index_in_dim(ct, run.place(t), 0, keepdims=False)
        ys = [lax.convert_element_type(rows_of(ct), wide(ct.dtype)) for ct in ys_cts if ct is not None]
        k = _as(k, round_.closed.jaxpr.invars[1].aval.dtype)
        inputs = [t, k, *[now[j] for j in round_.live], *ys]
        out = core.eval_jaxpr(round_.closed.jaxpr, round_.closed.consts, *inputs)
        before = dict(zip(round_.live, out, strict=False))
        found = dict(zip(round_.others, out[len(round_.live) :], strict=True))
        for j in rows:
            write_row(row_refs[j], (run.place(t),), lax.convert_element_type(found[j], row_refs[j].dtype))
        return [*[before[j] for j in turning], *[plus(s, found[j]) for s, j in zip(sums_now, sums, strict=True)]]

    first = [*[start[j] for j in turning], *zeros]
    if turning or _ordered(round_.closed):
        last = _downwards(run, at, first)
    else:
        last = counted(own, lambda index, carry: at(*round_of(index), carry), first)
    ends = start | dict(zip(turning, last, strict=False))
    summed = dict(zip(sums, last[len(turning) :], strict=True))
    out = [summed.get(j) for j in range(n_consts)]
    for j in range(n):
        extra = summed.get(n_consts + j)
        out.append(ends.get(j) if j in run.moving else plus(carry_cts[j], extra))
    xs = range(n_consts + n, n_consts + n + len(run.xs))
    out += [read_row(row_refs[j], ()) if j in row_refs else None for j in xs]
    return _as_operands(run, out)


def _ordered(closed: Any) -> bool:
    """Whether rounds backwards must run from the last to the first: one writes to a Ref that another one sees.

    Sums commute, so that an atomic add alone orders nothing; one to a Ref that a round reads as well does.
    """
    shared = set(closed.jaxpr.constvars)
    roots = Activity(closed.jaxpr, ()).roots
    touching = {"jtile_store": set(), "jtile_atomic": set(), "jtile_load": set()}
    for e in equations(closed.jaxpr):
        if e.primitive.name in touching:
            touching[e.primitive.name].add(roots[e.invars[0]])
    stored, added, read = touching.values()
    return bool((stored | (added & read)) & shared)


def _downwards(run: _Run, at: Callable[..., list[Any]], first: list[Any]) -> list[Any]:
    """Run the rounds from the last to the first."""
    own = run.range()[0]
    up = Range(0, run.rounds, 1, own.stages, own.unroll)

    def body(s, carry):
        t = lax.sub(_as(run.rounds, s.dtype) - s.dtype.type(1), s)
        return at(t, run.index(t), carry)

    return counted(up, body, first)


def _instance(ct: Any, v: Any) -> Any:
    """A cotangent as a carry: zeros where there is none, in the dtype of sums."""
    if ct is None:
        return jnp.zeros(v.aval.shape, wide(v.aval.dtype))
    return lax.convert_element_type(ct, wide(v.aval.dtype))


def _traced_round(self: Reverse, run: _Run, mode: Mode, live: list[int], ys_cts: Sequence[Any]) -> _Round:
    """Trace a round backwards; the carries that have a cotangent are found by trying."""
    n = len(run.init)
    summed = lambda aval, lead=0: jax.ShapeDtypeStruct(aval.shape[lead:], wide(aval.dtype))
    rows = [summed(v.aval, 1) for v, ct in zip(run.loop.eqn.outvars[n:], ys_cts, strict=True) if ct is not None]
    index, c = jax.ShapeDtypeStruct((), np.int32), run.loop.counter
    counter = index if c is None else jax.ShapeDtypeStruct((), run.init[c].dtype)
    while True:
        back = _RoundBack(self, run, mode, sorted(live), [ct is not None for ct in ys_cts])
        closed = jax.make_jaxpr(back)(index, counter, *[summed(run.loop.carries[j].aval) for j in back.live], *rows)
        if set(back.found) <= set(live):
            break
        live = list({*live, *back.found})
    outs, ins = closed.jaxpr.outvars, closed.jaxpr.invars[2:]
    fixed = tuple(j for j, a, b in zip(back.live, ins, outs, strict=False) if a is b)
    return _Round(closed, tuple(back.live), fixed, tuple(back.others))


@dataclasses.dataclass
class _RoundBack:
    """The function that `_Round` is the trace of; leaves what it found about cotangents.

    Attributes:
      live: moving carries that have a cotangent after the round.
      given: which ys have one.
      found: moving carries that have one before the round.
      others: see `_Round`.
    """

    reverse: Reverse
    run: _Run
    mode: Mode
    live: list[int]
    given: list[bool]
    found: list[int] = dataclasses.field(default_factory=list)
    others: list[int] = dataclasses.field(default_factory=list)

    def __call__(self, t: Any, k: Any, *cts: Any) -> tuple[Any, ...]:
        run, n_consts = self.run, len(self.run.consts)
        carry_cts, rows = dict(zip(self.live, cts, strict=False)), iter(cts[len(self.live) :])
        moved, given = self.before(t)
        now = [*run.consts, *run.carry(t, k, moved), *run.rows(t)]
        inner = Mode(False, True, (*self.mode.path, t))
        _, pull = self.reverse.sweep(run.loop.body, run.loop.body_consts, now, inner, given)
        after = [carry_cts.get(j) for j in range(len(run.init))] + [next(rows) if g else None for g in self.given]
        before = pull(after)
        moving = {n_consts + j for j in run.moving}
        if run.rescaled is not None:  # as with any sum, a round leaves their cotangents as they are
            before[n_consts : n_consts + len(run.init)] = [carry_cts.get(j) for j in range(len(run.init))]
        self.found = [j for j in run.pulled if before[n_consts + j] is not None]
        self.others = [j for j, ct in enumerate(before) if ct is not None and j not in moving]
        carried = [_instance(before[n_consts + j], run.loop.carries[j]) for j in self.live]
        return (*carried, *[before[j] for j in self.others])

    def before(self, t: Any) -> tuple[list[Any], Mapping[Any, Any]]:
        """The moving carries at the start of a round, and what is known of variables of its body."""
        run, known = self.run, self.run.rescaled
        if run.again:
            return self.computed(t), {}
        if known is None:
            return [read_row(ref, (t,), run.init[j]) for ref, j in zip(run.stacks, run.moving, strict=True)], {}
        moved = [run.last if j == known.reference else run.init[j] for j in run.moving]
        return moved, {known.update: lax.reshape(run.last, known.update.aval.shape)}

    def computed(self, t: Any) -> list[Any]:
        """The moving carries at the start of a round, by the rounds before it."""
        run, once = self.run, Mode(False, False, self.mode.path)

        def body(k, moved):
            now = [*run.consts, *run.carry(k, k, moved)]
            outs, _ = self.reverse.sweep(run.loop.body, run.loop.body_consts, now, once)
            return [outs[j] for j in run.moving]

        return counted(Range(0, t, 1, None, 1), body, [run.init[j] for j in run.moving])


def _as_operands(run: _Run, found: list[Any]) -> list[Any]:
    """Cotangents of (consts, carry, xs) at the places of the equation's operands; a `while` has others in front."""
    return [None] * (len(run.loop.eqn.invars) - len(found)) + found


# -- branches -------------------------------------------------------------------------------------------------------


def _cond(self: Reverse, eqn: Any, args: list[Any], mode: Mode) -> tuple[list[Any], Pull | None]:
    index, *operands = args
    slots = [x for x in operands if isinstance(x, Slot)]
    touched = any(x.ct is not None for x in slots) or any(v in self.activity for v in eqn.outvars)
    if not touched and not any(x.changes for x in slots):
        return bind(eqn, [x.primal if isinstance(x, Slot) else x for x in args]), None
    if mode.effects and mode.tape:
        _save_loads(self, eqn, args, mode)
    branches = eqn.params["branches"]
    once = dataclasses.replace(mode, tape=False)
    outs = _switch(index, [lambda b=b: tuple(self.sweep(b.jaxpr, b.consts, operands, once)[0]) for b in branches])
    if not touched:
        return list(outs), None

    def back(cts):
        again = dataclasses.replace(mode, effects=False, tape=True)

        def pulled(b):
            return lambda: self.sweep(b.jaxpr, b.consts, operands, again)[1](cts)

        found: set[int] = set()
        for b in branches:
            jax.make_jaxpr(lambda b=b: found.update(k for k, ct in enumerate(pulled(b)()) if ct is not None))()
        places = sorted(found)
        variables = eqn.invars[1:]

        def run(b):
            def fn():
                got = pulled(b)()
                return tuple(_instance(got[k], variables[k]) for k in places)

            return fn

        got = dict(zip(places, _switch(index, [run(b) for b in branches]), strict=True))
        return [None, *[got.get(k) for k in range(len(operands))]]

    return list(outs), back


def _switch(index: Any, branches: Sequence[Callable[[], Any]]) -> Any:
    if index.dtype == np.bool_:
        return lax.cond(index, branches[1], branches[0])
    return lax.switch(index, branches)


# -- loads from Refs that change ------------------------------------------------------------------------------------


def _save_loads(self: Reverse, eqn: Any, args: Sequence[Any], mode: Mode) -> None:
    """Room for what the loads inside of a loop or branch give, where their Ref changes: for every round, one tile."""
    slots = {v: x for v, x in zip(eqn.invars, args, strict=True) if isinstance(x, Slot)}
    roots = {self.activity.roots[v]: x for v, x in slots.items()}
    _rooms(self, eqn, roots, ())


def _rooms(self: Reverse, eqn: Any, roots: dict[Any, Slot], room: tuple[int, ...]) -> None:
    if eqn.primitive.name in ("scan", "while"):
        loop = as_loop(eqn)
        if loop is None:
            return
        bound = self.ranges.rounds(eqn)
        bodies, room = [loop.body], (*room, UNBOUNDED if bound is None else bound)
    else:
        bodies = [b.jaxpr for b in eqn.params["branches"]]
    for inner in (e for body in bodies for e in body.eqns):
        if inner.primitive.name in ("scan", "while", "cond"):
            _rooms(self, inner, roots, room)
        elif inner.primitive.name == "jtile_load":
            root = self.activity.roots[inner.invars[0]]
            if root not in roots or roots[root].changes:  # scratch made inside changes as well
                (out,) = inner.outvars
                self.saved[id(inner)] = new_ref((*room, *out.aval.shape), out.aval.dtype)


RULES |= {"scan": _loop, "while": _loop, "cond": _cond}
__all__ = ["UNBOUNDED"]
