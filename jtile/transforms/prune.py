"""Dead code of kernel jaxprs: what neither an output Ref nor a print or an assert can see.

Liveness is marked from the roots (stores to inputs and outputs, prints, asserts, the jaxpr's results), so that whatever
only feeds itself falls away: loop carries that nobody else reads, and scratch that is written and updated but never
read for something live. What is left is evaluated into a fresh jaxpr, with `lax.scan`, `lax.while_loop` and `lax.cond`
for the control flow, since the parameters of those equations are not the same in every version of JAX.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jtile import _compat
from jtile._compat import make_jaxpr
from jtile.language._equations import argument, bind, place, scan_counts
from jtile.trace import lanes
from jtile.trace.lower import is_jax_function
from jtile.trace.rules.calls import INLINED, own_platform
from jtile.trace.rules.control import counters, counting
from jtile.transforms.activity import is_literal, is_ref
from jtile.transforms.own_refs import own

# A Ref is changed by these, and read only by those of them whose result (the old value) is used.
_WRITES = frozenset(["jtile_store", "jtile_atomic", "swap", "addupdate", "free_ref"])
_PURE = frozenset(["jtile_load", "get", "freeze", "new_ref", "ref", "mutable_array", "empty_ref"])
_READS = frozenset(["jtile_load", "get", "freeze", "jtile_atomic", "swap"])


def prune(closed_jaxpr, scratch: frozenset[int] = frozenset(), *, own_refs: bool = False):
    """The kernel without its dead code.

    Args:
      closed_jaxpr: the jaxpr of a kernel body over Refs, as `jtile.trace.tracing.trace` gives it.
      scratch: places of the invars whose contents nobody sees after the kernel: stores to them go where nothing live
        reads them.
      own_refs: say what happens to JAX's own Refs in the language's primitives, and make loops of lanes of jax.vmap
        ready for reverse mode: what derivatives start from.
    Returns:
      An equivalent closed jaxpr with the same invars. Calls (`jit`, `jax.checkpoint`) are inlined; loops keep the form
      that the lowering counts, and equations their source lines. Nothing is pruned inside of custom derivatives.
    """
    top = _Scope.of(closed_jaxpr, None, own_refs=own_refs)
    for k, v in enumerate(top.jaxpr.invars):
        if is_ref(v):
            top.roots[v] = v
            top.kept |= set() if k in scratch else {v}
    _Liveness().settle(top, [True] * len(top.jaxpr.outvars))
    return make_jaxpr(lambda *args: tuple(_evaluate(top, args)))(*[argument(v.aval) for v in top.jaxpr.invars])


# -- what is live --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Scope:
    """One jaxpr at one place where it runs (a jaxpr that is called twice has two), and what is live there.

    Attributes:
      consts: values of the constvars.
      kept: the Refs whose contents matter, one set for the whole kernel.
      pin: source info of everything inside a function of JAX's own, which keeps the lines of its first call.
      roots: Ref variable -> the variable that made the Ref.
      needed: variables that something live reads.
      live: places of the live equations.
      inner: the scopes of an equation's jaxprs, by its place.
      made: variable -> the equation that defines it.
      own_refs: see `prune`; the same in the whole kernel.
    """

    jaxpr: Any
    consts: Sequence[Any]
    kept: set[Any]
    pin: Any
    roots: dict[Any, Any] = dataclasses.field(default_factory=dict)
    needed: set[Any] = dataclasses.field(default_factory=set)
    live: set[int] = dataclasses.field(default_factory=set)
    inner: dict[int, list[_Scope]] = dataclasses.field(default_factory=dict)
    made: dict[Any, Any] = dataclasses.field(default_factory=dict)
    own_refs: bool = False

    @staticmethod
    def of(closed, outer: _Scope | None, caller: Any = None, *, own_refs: bool = False) -> _Scope:
        """A scope for a closed (or open) jaxpr; `caller` is the call equation that it is inlined for."""
        jaxpr = getattr(closed, "jaxpr", closed)
        pin = outer.pin if outer else None
        if pin is None and caller is not None and is_jax_function(jaxpr):
            pin = caller.source_info
        made = {v: e for e in jaxpr.eqns for v in e.outvars}
        consts, kept = tuple(getattr(closed, "consts", ())), outer.kept if outer else set()
        scope = _Scope(jaxpr, consts, kept, pin, made=made, own_refs=outer.own_refs if outer else own_refs)
        for e in jaxpr.eqns:
            scope.roots |= {v: v for v in e.outvars if is_ref(v)}
        return scope

    def flags(self, variables) -> list[bool]:
        return [not is_literal(v) and v in self.needed for v in variables]


class _Liveness:
    """Marks what is live until nothing changes; marks are only added, so this ends."""

    def __init__(self):
        self.changed = True

    def settle(self, top: _Scope, outs: list[bool]) -> None:
        while self.changed:
            self.changed = False
            self.scope(top, outs)

    def need(self, scope: _Scope, variables) -> None:
        for v in variables:
            if not is_literal(v) and v not in scope.needed:
                scope.needed.add(v)
                self.changed = True

    def keep(self, scope: _Scope, refs) -> None:
        for v in refs:
            if scope.roots[v] not in scope.kept:
                scope.kept.add(scope.roots[v])
                self.changed = True

    def scope(self, scope: _Scope, outs: Sequence[bool]) -> None:
        self.need(scope, [v for v, used in zip(scope.jaxpr.outvars, outs, strict=True) if used])
        for k in reversed(range(len(scope.jaxpr.eqns))):
            eqn = scope.jaxpr.eqns[k]
            mark = _MARKS.get(eqn.primitive.name)
            if mark is not None and _structured(eqn):
                alive = mark(self, scope, k, eqn)
            else:
                alive = self.plain(scope, eqn)
            if alive and k not in scope.live:
                scope.live.add(k)
                self.changed = True

    def plain(self, scope: _Scope, eqn) -> bool:
        """Whether an equation without control flow is live; if so, its operands and Refs that it reads are marked."""
        name = eqn.primitive.name
        used = any(scope.flags(eqn.outvars))
        refs = [v for v in eqn.invars if not is_literal(v) and is_ref(v)]
        if name in _WRITES:
            alive = used or any(scope.roots[v] in scope.kept for v in refs)
        else:
            alive = used or (name not in _PURE and bool(eqn.effects))
        if alive:
            self.need(scope, eqn.invars)
            known = name in _WRITES or name in _PURE
            if (name in _READS and used) or not known:
                self.keep(scope, refs)
        return alive

    def enter(self, scope: _Scope, k: int, closed_jaxprs, operands, call=None) -> list[_Scope]:
        """The scopes of an equation's jaxprs; `operands` are, for each, the outer variables of its invars."""
        if k not in scope.inner:
            scope.inner[k] = [_Scope.of(c, scope, call) for c in closed_jaxprs]
            for inner, outer in zip(scope.inner[k], operands, strict=True):
                pairs = zip(inner.jaxpr.invars, outer, strict=True)
                inner.roots |= {v: scope.roots[w] for v, w in pairs if is_ref(v)}
        return scope.inner[k]

    def hand_out(self, scope: _Scope, inner: _Scope, operands) -> None:
        """Mark in the outer scope the operands that the inner one needs."""
        self.need(scope, [w for v, w in zip(inner.jaxpr.invars, operands, strict=True) if v in inner.needed])


_MARKS: dict[str, Callable[[_Liveness, _Scope, int, Any], bool]] = {}
_EMITS: dict[str, Callable[[_Scope, int, Any, Callable[[Any], Any]], list[Any]]] = {}


def _register(table, *names):
    def register(fn):
        for n in names:
            table[n] = fn
        return fn

    return register


def _structured(eqn) -> bool:
    """Whether prune looks into an equation: branches for platforms of which none is ours stay as they are."""
    platforms = eqn.params.get("branches_platforms")
    return platforms is None or own_platform(platforms) is not None


def _callee(eqn):
    return next(eqn.params[k] for k in ("jaxpr", "call_jaxpr", "call") if k in eqn.params)


@_register(_MARKS, *INLINED)
def _(mark: _Liveness, scope: _Scope, k: int, eqn) -> bool:
    (inner,) = mark.enter(scope, k, [_callee(eqn)], [eqn.invars], eqn)
    mark.scope(inner, scope.flags(eqn.outvars))
    mark.hand_out(scope, inner, eqn.invars)
    return any(scope.flags(eqn.outvars)) or bool(inner.live)


@_register(_MARKS, "cond")
def _(mark: _Liveness, scope: _Scope, k: int, eqn) -> bool:
    operands, taken = eqn.invars[1:], _taken(eqn)
    branches = eqn.params["branches"] if taken is None else [eqn.params["branches"][taken]]
    inner = mark.enter(scope, k, branches, [operands] * len(branches))
    used = scope.flags(eqn.outvars)
    for s in inner:
        mark.scope(s, used)
        mark.hand_out(scope, s, operands)
    alive = any(used) or any(s.live for s in inner)
    if alive and taken is None:
        mark.need(scope, [_choice(scope, eqn)[1]])
    return alive


@_register(_MARKS, "scan")
def _(mark: _Liveness, scope: _Scope, k: int, eqn) -> bool:
    n_consts, n_carry = scan_counts(eqn.params)
    (inner,) = mark.enter(scope, k, [eqn.params["jaxpr"]], [eqn.invars])
    used = scope.flags(eqn.outvars)
    carries = inner.jaxpr.invars[n_consts : n_consts + n_carry]
    outs = [u or v in inner.needed for u, v in zip(used[:n_carry], carries, strict=True)]
    mark.scope(inner, outs + used[n_carry:])
    mark.hand_out(scope, inner, eqn.invars)
    alive = any(used) or bool(inner.live)
    if alive:  # the loop index stays, and with it what jt.range was told about the loop
        places = {c.place for c in counters(inner.jaxpr, carries, inner.jaxpr.outvars[:n_carry])}
        places |= {j for j in range(n_carry) if used[j]}
        mark.need(inner, [carries[j] for j in places])
        mark.need(inner, [v for e in inner.jaxpr.eqns if e.primitive.name == "jtile_loop_hint" for v in e.outvars])
        mark.need(scope, [eqn.invars[n_consts + j] for j in places])
    return alive


@_register(_MARKS, "while")
def _(mark: _Liveness, scope: _Scope, k: int, eqn) -> bool:
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts = eqn.invars[:n_cond], eqn.invars[n_cond : n_cond + n_body]
    init, used = eqn.invars[n_cond + n_body :], scope.flags(eqn.outvars)
    operands = [[*cond_consts, *init], [*body_consts, *init]]
    cond, body = mark.enter(scope, k, [eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]], operands)
    kept = [cond.jaxpr.invars[n_cond:], body.jaxpr.invars[n_body:]]
    carried = [u or a in cond.needed or b in body.needed for u, a, b in zip(used, *kept, strict=True)]
    # Nobody needs how often a loop runs whose rounds do nothing: its condition counts only if the loop is live.
    alive = any(used) or bool(body.live) or _does_io(cond.jaxpr)
    mark.scope(cond, [alive])
    mark.scope(body, [c and alive for c in carried])
    if alive:
        mark.need(body, [v for v, c in zip(kept[1], carried, strict=True) if c])
        mark.need(body, [v for e in body.jaxpr.eqns if e.primitive.name == "jtile_loop_hint" for v in e.outvars])
        mark.need(scope, [v for v, c in zip(init, carried, strict=True) if c])
    for s, args in zip((cond, body), operands, strict=True):
        mark.hand_out(scope, s, args)
    return alive


def _does_io(jaxpr) -> bool:
    return any(e.primitive.name not in _PURE and e.effects for e in jaxpr.eqns)


# -- what stays ----------------------------------------------------------------------------------------------------


def _evaluate(scope: _Scope, args: Sequence[Any]) -> list[Any]:
    """Run the live part under the trace at hand; gives None for results and takes None for operands that are dead."""
    env: dict[Any, Any] = dict(zip(scope.jaxpr.constvars, scope.consts, strict=True))
    env.update(zip(scope.jaxpr.invars, args, strict=True))
    read = lambda v: v.val if is_literal(v) else env.get(v)
    for k in sorted(scope.live):
        eqn = scope.jaxpr.eqns[k]
        emit = _EMITS.get(eqn.primitive.name) if k in scope.inner else None
        with place(eqn, scope.pin):
            outs = emit(scope, k, eqn, read) if emit else _plain(scope, eqn, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in scope.jaxpr.outvars]


def _plain(scope: _Scope, eqn, args: Sequence[Any]) -> list[Any]:
    if eqn.primitive.name == "random_gamma":
        return [_gamma(*args, eqn.params["log_space"])]
    outs = own(eqn, args, any(scope.flags(eqn.outvars))) if scope.own_refs else None
    return bind(eqn, args) if outs is None else outs


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _gamma(key, a, log_space: bool):
    """`random_gamma` whose derivative is of all elements at once; JAX's is a loop over them where the host is a CPU,
    whatever the target is."""
    return _compat.random_gamma_p().bind(key, a, log_space=log_space)


@_gamma.defjvp
def _(log_space: bool, primals, tangents):
    (key, a), (_, da) = primals, tangents
    out = _gamma(key, a, log_space)
    sample = out
    if log_space:  # d log(x) = dx / x, where x is a number that is not 0
        sample = lax.max(lax.exp(out), lax.full_like(out, jnp.finfo(out.dtype).tiny))
    slope = lax.random_gamma_grad(a, sample)  # pyright: ignore[reportCallIssue]  JAX fills its dtype in
    return out, da * (lax.div(slope, sample) if log_space else slope)


@_register(_EMITS, *INLINED)
def _(scope: _Scope, k: int, eqn, read) -> list[Any]:
    return _evaluate(scope.inner[k][0], [read(v) for v in eqn.invars])


def _taken(eqn) -> int | None:
    """The branch of a `cond` that is known here."""
    index, *_ = eqn.invars
    platforms = eqn.params.get("branches_platforms")
    if platforms is not None:
        return own_platform(platforms)
    if not is_literal(index):
        return None
    return min(max(int(np.asarray(index.val)), 0), len(eqn.params["branches"]) - 1)


def _choice(scope: _Scope, eqn) -> tuple[str, Any]:
    """What a `cond` chooses by, before `lax.cond` and `lax.switch` made an index of it (they will again)."""
    index, n = eqn.invars[0], len(eqn.params["branches"])
    by = scope.made.get(index)
    if n == 2 and index.aval.dtype == np.bool_:
        return "bool", index
    if by is not None and n == 2 and by.primitive.name == "convert_element_type":
        (x,) = by.invars
        if x.aval.dtype == np.bool_ and not is_literal(x):
            return "bool", x
    if by is not None and by.primitive.name == "clamp":
        lo, x, hi = by.invars
        bounds = [int(v.val) if is_literal(v) else None for v in (lo, hi)]
        if bounds == [0, n - 1] and not is_literal(x):
            return "index", x
    return "index", index


@_register(_EMITS, "cond")
def _(scope: _Scope, k: int, eqn, read) -> list[Any]:
    operands = [read(v) for v in eqn.invars[1:]]
    used, inner = scope.flags(eqn.outvars), scope.inner[k]
    spread = lambda outs: _spread(used, outs)
    if _taken(eqn) is not None:
        return _evaluate(inner[0], operands)
    branches = [lambda s=s: tuple(_chosen(used, _evaluate(s, operands))) for s in inner]
    kind, by = _choice(scope, eqn)
    if kind == "bool":
        return spread(lax.cond(read(by), branches[1], branches[0]))
    return spread(lax.switch(read(by), branches))


@_register(_EMITS, "scan")
def _(scope: _Scope, k: int, eqn, read) -> list[Any]:
    n_consts, n_carry = scan_counts(eqn.params)
    (inner,) = scope.inner[k]
    values = [read(v) for v in eqn.invars]
    consts, init, xs = values[:n_consts], values[n_consts : n_consts + n_carry], values[n_consts + n_carry :]
    used = scope.flags(eqn.outvars)
    flags = inner.flags(inner.jaxpr.invars)[n_consts:]
    carried, taken = [a or b for a, b in zip(flags, used[:n_carry], strict=False)], flags[n_carry:]

    def body(carry, rows):
        now = [*consts, *_spread(carried, carry), *_spread(taken, rows)]
        outs = _evaluate(inner, now)
        return tuple(_chosen(carried, outs[:n_carry])), tuple(_chosen(used[n_carry:], outs[n_carry:]))

    params = {p: eqn.params[p] for p in ("length", "reverse", "unroll")}
    last, ys = lax.scan(body, tuple(_chosen(carried, init)), tuple(_chosen(taken, xs)), **params)
    return [*_spread(carried, last), *_spread(used[n_carry:], ys)]


@_register(_EMITS, "while")
def _(scope: _Scope, k: int, eqn, read) -> list[Any]:
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond, body = scope.inner[k]
    values = [read(v) for v in eqn.invars]
    cond_consts, body_consts, init = values[:n_cond], values[n_cond : n_cond + n_body], values[n_cond + n_body :]
    needed = zip(
        scope.flags(eqn.outvars),
        cond.flags(cond.jaxpr.invars[n_cond:]),
        body.flags(body.jaxpr.invars[n_body:]),
        strict=True,
    )
    carried = [any(flags) for flags in needed]
    if cond.jaxpr.outvars[0].aval.shape:
        found = counting(cond.jaxpr, n_cond, body.jaxpr, n_body, cond_consts, init)
        return lanes.run(
            lambda carry: _evaluate(cond, [*cond_consts, *carry])[0],
            lambda carry: _evaluate(body, [*body_consts, *carry]),
            [x if c else None for x, c in zip(init, carried, strict=True)],
            found,
            lent=scope.own_refs and not eqn.effects,  # accesses to memory go by their own condition
        )
    last = lax.while_loop(
        lambda c: _evaluate(cond, [*cond_consts, *_spread(carried, c)])[0],
        lambda c: tuple(_chosen(carried, _evaluate(body, [*body_consts, *_spread(carried, c)]))),
        tuple(_chosen(carried, init)),
    )
    return _spread(carried, last)


def _chosen(flags, values) -> list[Any]:
    return [v for v, f in zip(values, flags, strict=True) if f]


def _spread(flags, values) -> list[Any]:
    """The inverse of `_chosen`, with None at the places left out."""
    it = iter(values)
    return [next(it) if f else None for f in flags]


__all__ = ["prune"]
