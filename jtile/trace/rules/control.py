"""Loops and branches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import jaxpr_as_fun

from jtile import ir
from jtile._compat import make_jaxpr
from jtile.language._equations import argument, scan_counts
from jtile.trace import lanes
from jtile.trace.lower import AnyValue, Keys, Lowering, rule
from jtile.trace.rules.calls import _takes_keys


def flat(values: Sequence[AnyValue]) -> list[ir.Value]:
    """Values with the words of keys side by side."""
    return [w for v in values for w in (v.words if isinstance(v, Keys) else (v,))]


def unflat(like: Sequence[AnyValue], values: Sequence[ir.Value]) -> list[AnyValue]:
    """The inverse of `flat` for values like `like`."""
    it = iter(values)
    return [Keys(tuple(next(it) for _ in v.words)) if isinstance(v, Keys) else next(it) for v in like]


# -- counted loops -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Counter:
    """A carry that only counts: its place in the carry and what it grows by."""

    place: int
    step: int


@dataclasses.dataclass(frozen=True)
class Hint:
    stages: int | None = None
    unroll: int = 1


def counters(jaxpr, carries, outs, shape: Sequence[int] = ()) -> list[Counter]:
    """The int carries of this shape, scalars by default, that every round adds a literal to."""
    made = {v: e for e in jaxpr.eqns for v in e.outvars}
    out = []
    for k, (before, after) in enumerate(zip(carries, outs, strict=True)):
        eqn = None if hasattr(after, "val") else made.get(after)
        if eqn is None or eqn.primitive.name not in ("add", "sub"):
            continue
        x, y = eqn.invars
        if hasattr(x, "val") and eqn.primitive.name == "add":
            x, y = y, x
        counts = before.aval.shape == tuple(shape) and np.issubdtype(before.aval.dtype, np.integer)
        if counts and hasattr(y, "val") and _origin(x, made) is before:
            out.append(Counter(k, int(y.val) if eqn.primitive.name == "add" else -int(y.val)))
    return out


def _origin(var, made):
    """The variable behind loop hints, and casts that only drop a weak type."""
    while not hasattr(var, "val") and var in made:
        (x, *_), name = made[var].invars, made[var].primitive.name
        same = name == "convert_element_type" and x.aval.dtype == var.aval.dtype
        if not same and name != "jtile_loop_hint":
            break
        var = x
    return var


def hint_of(jaxpr, counter: Counter | None, carries) -> Hint:
    for e in jaxpr.eqns:
        if e.primitive.name == "jtile_loop_hint" and counter is not None and e.invars[0] is carries[counter.place]:
            return Hint(**e.params)
    return Hint()


def _constant(v: AnyValue) -> int | None:
    """The Python int of a scalar constant."""
    return int(v.op.value) if isinstance(v, ir.Value) and isinstance(v.op, ir.Full) and not v.type.rank else None


def _open(closed):
    return getattr(closed, "jaxpr", closed)


def _for(c: Lowering, bounds, inits: Sequence[AnyValue], body, hint: Hint) -> list[AnyValue]:
    """Append a `for` whose body is `body(k, carry) -> carry`."""
    lo, hi, step = bounds
    words = flat(inits)
    with c.b.region([lo.type, *(w.type for w in words)], ("k", *[""] * len(words))) as block:
        block.yields = tuple(flat(body(block.params[0], unflat(inits, block.params[1:]))))
    op = c.b.add(ir.For(lo, hi, step, tuple(words), block, hint.stages, hint.unroll))
    return unflat(inits, op.results)


@rule("scan")
@_takes_keys
def _(c: Lowering, *args, jaxpr, length, reverse, unroll=1, **params):
    n_consts, n_carry = scan_counts(params)
    consts, init, xs = args[:n_consts], list(args[n_consts : n_consts + n_carry]), args[n_consts + n_carry :]
    inner = _open(jaxpr)
    carries, outs = inner.invars[n_consts : n_consts + n_carry], inner.outvars
    counting = [] if xs or reverse or len(outs) > n_carry else counters(inner, carries, outs)
    counter = next((n for n in counting if n.step > 0 and _constant(init[n.place]) is not None), None)
    hint = hint_of(inner, counter, carries)
    if hint.unroll == 1 and isinstance(unroll, int) and unroll > 1:
        hint = Hint(hint.stages, unroll)
    if counter is not None:
        return _counted_scan(c, jaxpr, consts, init, counter, length, hint)
    return _general_scan(c, jaxpr, consts, init, xs, length, reverse, hint)


def _counted_scan(c: Lowering, jaxpr, consts, init, counter: Counter, length: int, hint: Hint):
    """A scan one of whose carries is the loop index itself: bounds are constants of its dtype."""
    k = counter.place
    dtype, start = init[k].type.dtype, int(init[k].op.value)
    lo, hi, step = (c.b.full(v, (), dtype) for v in (start, start + length * counter.step, counter.step))
    rest = [v for j, v in enumerate(init) if j != k]

    def body(index, carry):
        out = c.closed(jaxpr, [*consts, *carry[:k], index, *carry[k:]])
        return [v for j, v in enumerate(out) if j != k]

    out = _for(c, (lo, hi, step), rest, body, hint)
    return [*out[:k], hi, *out[k:]]


def _general_scan(c: Lowering, jaxpr, consts, init, xs, length: int, reverse: bool, hint: Hint):
    """Slices of the xs by the loop index; the ys go to scratch Refs, loaded whole after the loop."""
    n_carry = len(init)
    if length == 0:
        variables = _open(jaxpr).outvars[n_carry:]
        return [*init, *_unflat_ys(variables, [c.b.full(0, (0, *t.shape), t.dtype) for t in _y_types(c, variables)])]
    y_types = _y_types(c, _open(jaxpr).outvars[n_carry:])
    refs = [c.add(ir.Alloc((length, *t.shape), t.dtype)) for t in y_types]
    lo, hi, step = (c.b.index(v) for v in (0, length, 1))

    def body(k, carry):
        at = c.map("sub", c.b.index(length - 1), k) if reverse else k
        taken = unflat(xs, [_row(c, x, at) for x in flat(xs)])
        out = c.closed(jaxpr, [*consts, *carry, *taken])
        for ref, y in zip(refs, flat(out[n_carry:]), strict=True):
            c.b.add(ir.Store(ref, (ir.At(at), *_whole(c, ref)[1:]), y))
        return out[:n_carry]

    last = _for(c, (lo, hi, step), init, body, hint)
    ys = [c.add(ir.Load(r, _whole(c, r))) for r in refs]
    return [*last, *_unflat_ys(_open(jaxpr).outvars[n_carry:], ys)]


def _key_words(var) -> int | None:
    dtype = var.aval.dtype
    return dtype._impl.key_shape[0] if hasattr(dtype, "_impl") else None


def _y_types(c: Lowering, variables) -> list[ir.TileType]:
    out = []
    for v in variables:
        words = _key_words(v)
        out += [ir.TileType(tuple(v.aval.shape), "uint32")] * words if words else [c.tile_type(v.aval)]
    return out


def _unflat_ys(variables, ys) -> list[AnyValue]:
    it = iter(ys)
    counts = [_key_words(v) for v in variables]
    return [Keys(tuple(next(it) for _ in range(n))) if n else next(it) for n in counts]


def _whole(c: Lowering, ref: ir.Value) -> ir.Index:
    return tuple(ir.Span(c.b.index(0), n) for n in ref.type.shape)


def _row(c: Lowering, x: ir.Value, k: ir.Value) -> ir.Value:
    """The row `x[k]` of a tile."""
    starts = (k, *[c.b.index(0)] * (x.type.rank - 1))
    return c.b.reshape(c.add(ir.DynamicSlice(x, starts, (1, *x.type.shape[1:]))), x.type.shape[1:])


# -- while ---------------------------------------------------------------------------------------------------------


@rule("while")
@_takes_keys
def _(c: Lowering, *args, cond_jaxpr, cond_nconsts, body_jaxpr, body_nconsts):
    cond_consts, body_consts = args[:cond_nconsts], args[cond_nconsts : cond_nconsts + body_nconsts]
    init = list(args[cond_nconsts + body_nconsts :])
    found = bounded(_open(cond_jaxpr), cond_nconsts, _open(body_jaxpr), body_nconsts)
    if _open(cond_jaxpr).outvars[0].aval.shape:
        return _lanes(c, args, cond_jaxpr, cond_nconsts, body_jaxpr, body_nconsts)
    if found is not None:
        counter, limit = found
        hi = c.literal(limit.val) if hasattr(limit, "val") else _limit(limit, _open(cond_jaxpr), cond_consts, init)
        return _counted_while(c, body_jaxpr, body_nconsts, body_consts, init, counter, hi)
    words = flat(init)
    types = [w.type for w in words]
    with c.b.region(types) as cond:
        cond.yields = tuple(c.closed(cond_jaxpr, [*cond_consts, *unflat(init, cond.params)]))
    with c.b.region(types) as body:
        body.yields = tuple(flat(c.closed(body_jaxpr, [*body_consts, *unflat(init, body.params)])))
    return unflat(init, c.b.add(ir.While(tuple(words), cond, body)).results)


def _lanes(c: Lowering, args, cond, n_cond: int, body, n_body: int) -> list[AnyValue]:
    """A loop whose condition is a tile."""

    def run(*values):
        def of(closed, first, n):
            return lambda carry: jaxpr_as_fun(closed)(*values[first : first + n], *carry)

        init = list(values[n_cond + n_body :])
        return lanes.run(
            lambda carry: of(cond, 0, n_cond)(carry)[0], lambda carry: list(of(body, n_cond, n_body)(carry)), init,
            counting(_open(cond), n_cond, _open(body), n_body, values[:n_cond], init),
        )  # fmt: skip

    return c.called(make_jaxpr(run)(*[argument(v.aval) for v in c.eqn.invars]), args)


def counting(cond, n_cond: int, body, n_body: int, cond_consts, init) -> tuple[int, int, Any] | None:
    """What `lanes.run` wants to know of a loop that counts; `cond_consts`, `init`: values."""
    found = bounded(cond, n_cond, body, n_body)
    if found is None:
        return None
    counter, limit = found
    value = np.asarray(limit.val, limit.aval.dtype) if hasattr(limit, "val") else _limit(limit, cond, cond_consts, init)
    return counter.place, counter.step, value


def bounded(cond, n_cond: int, body, n_body: int):
    """`(counter, limit)` of the form `while i < limit: ...; i += step`, where the body leaves the limit alone; `i` is a
    tile where the condition is one."""
    carries, shape = cond.invars[n_cond:], cond.outvars[0].aval.shape
    made = {v: e for e in cond.eqns for v in e.outvars}
    test = made.get(cond.outvars[0]) if not hasattr(cond.outvars[0], "val") else None
    if test is None or test.primitive.name != "lt" or cond.effects:
        return None
    tested, limit = (_origin(v, made) for v in test.invars)
    counting = counters(body, body.invars[n_body:], body.outvars, shape)
    counter = next((n for n in counting if n.step > 0 and carries[n.place] is tested), None)
    if counter is None:
        return None
    if hasattr(limit, "val") or limit in cond.invars[:n_cond]:
        return counter, limit
    k = next((k for k, v in enumerate(carries) if v is limit), None)
    if k is None or k == counter.place or body.outvars[k] is not body.invars[n_body + k]:
        return None
    return counter, limit


def _limit(var, cond, cond_consts, init) -> Any:
    return dict(zip(cond.invars, [*cond_consts, *init], strict=True))[var]


def _counted_while(c: Lowering, body_jaxpr, n_consts: int, consts, init, counter: Counter, hi: ir.Value):
    inner = _open(body_jaxpr)
    k = counter.place
    carries = inner.invars[n_consts:]
    still = {
        j for j, (a, b) in enumerate(zip(carries, inner.outvars, strict=True)) if a is b
    }  # these never change, so they are not carried
    moving = [j for j in range(len(init)) if j != k and j not in still]
    lo, step = init[k], c.b.full(counter.step, (), init[k].type.dtype)

    def body(index, carry):
        now = dict(zip(moving, carry, strict=True))
        out = c.closed(body_jaxpr, [*consts, *[index if j == k else now.get(j, init[j]) for j in range(len(init))]])
        return [out[j] for j in moving]

    out = dict(
        zip(
            moving,
            _for(c, (lo, hi, step), [init[j] for j in moving], body, hint_of(inner, counter, carries)),
            strict=True,
        )
    )
    last = _last(c, lo, hi, counter.step) if c.is_used(k) else hi
    return [last if j == k else out.get(j, init[j]) for j in range(len(init))]


def _last(c: Lowering, lo: ir.Value, hi: ir.Value, step: int) -> ir.Value:
    """The counter after `while i < hi: i += step` from `lo`."""
    if step == 1:
        return c.map("max", lo, hi)
    one = lambda v: c.b.full(v, (), lo.type.dtype)
    gap = c.map("max", c.map("sub", hi, lo), one(0))
    rounds = c.map("div", c.map("add", gap, one(step - 1)), one(step))
    return c.map("add", lo, c.map("mul", rounds, one(step)))


# -- branches ------------------------------------------------------------------------------------------------------


@rule("cond")
@_takes_keys
def _(c: Lowering, index, *args, branches, **_):
    if (k := _constant(index)) is not None:
        return c.closed(branches[min(max(k, 0), len(branches) - 1)], args)
    return _switch(c, index, list(branches), 0, args)


def _switch(c: Lowering, index: ir.Value, branches, first: int, args) -> list[AnyValue]:
    """Nested ifs; JAX clamps the index, so everything below is the first branch and everything above the last."""
    if len(branches) == 1:
        return c.closed(branches[0], args)
    if len(branches) == 2 and first == 0:
        test, then, other = _as_bool(c, index), branches[1], branches[:1]
    else:
        test, then, other = c.map("le", index, c.b.full(first, (), index.type.dtype)), branches[0], branches[1:]
    with c.b.region() as yes:
        a = c.closed(then, args)
        yes.yields = tuple(flat(a))
    with c.b.region() as no:
        no.yields = tuple(flat(_switch(c, index, other, first + 1, args)))
    return unflat(a, c.b.add(ir.If(test, yes, no)).results)


def _as_bool(c: Lowering, index: ir.Value) -> ir.Value:
    """The bool behind `convert_element_type[bool -> int32]`, where there is one."""
    if index.type.dtype == "bool":
        return index
    if isinstance(index.op, ir.Cast) and index.op.x.type.dtype == "bool":
        return index.op.x
    return c.map("gt", index, c.b.full(0, (), index.type.dtype))


@rule("jtile_any_lane")
def _(c: Lowering, x):
    return x
