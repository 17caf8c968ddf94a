"""Forward mode: the kernel that computes the tangents of another one's outputs.

Its Refs are the inputs of the kernel, then a tangent for each input that is differentiated; then the outputs' tangents.
An output that the kernel itself reads is computed again beside its tangent, as a result that nobody uses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jtile._compat import make_jaxpr
from jtile.language._equations import bind, place, ref_aval, scan_counts
from jtile.language._primitives import atomic_p, load_p, store_p
from jtile.trace.tracing import equations
from jtile.transforms.activity import Activity, is_float, is_literal
from jtile.transforms.evaluate import check_arrivals, refuse, refuse_memory
from jtile.transforms.prune import prune

ORDER = (
    "depends on the order of the programs: jtile differentiates atomic_add whose old value is unused; give the kernel "
    "a rule of its own (defvjp), or stop the derivative with jax.lax.stop_gradient on its inputs"
)


@dataclasses.dataclass(frozen=True)
class Dual:
    """A value or a Ref with its tangent; None: there is none."""

    primal: Any
    tangent: Any = None


@dataclasses.dataclass(frozen=True)
class Tangents:
    """The result of `jvp`: the tangent kernel.

    Attributes:
      jaxpr: over the Refs: inputs, tangents of the differentiated inputs; tangents of `active` outputs, outputs
        computed `again`; scratch.
      active: outputs that have a tangent.
      again: outputs that the kernel reads.
    """

    jaxpr: Any
    active: tuple[int, ...]
    again: tuple[int, ...]


def jvp(closed: Any, n_in: int, n_out: int, aliases: Sequence[tuple[int, int]], perturbed: Sequence[bool]) -> Tangents:
    """The tangent kernel of a pruned kernel jaxpr; `perturbed`: which inputs are differentiated."""
    jaxpr = closed.jaxpr
    check_arrivals(equations(jaxpr))
    refs = jaxpr.invars
    ins, outs, scratch = refs[:n_in], refs[n_in : n_in + n_out], refs[n_in + n_out :]
    shared = [(ins[i], outs[o]) for i, o in aliases]
    activity = Activity(jaxpr, [v for v, p in zip(ins, perturbed, strict=True) if p], shared)
    active = tuple(k for k, v in enumerate(outs) if v in activity)
    again = tuple(k for k, v in enumerate(outs) if v in activity.loaded)
    tangent_ins = [v for v, p in zip(ins, perturbed, strict=True) if p]
    private = [v for v in scratch if v in activity]
    variables = [*ins, *tangent_ins, *[outs[k] for k in active], *[outs[k] for k in again], *scratch, *private]

    def body(*tracers):
        given = iter(tracers)
        primals = {v: next(given) for v in ins}
        tangents = {v: next(given) for v in tangent_ins}
        tangents |= {outs[k]: next(given) for k in active}
        primals |= {outs[k]: next(given) for k in again}
        primals |= {v: next(given) for v in scratch}
        tangents |= {v: next(given) for v in private}
        walk = _Forward(activity)
        walk.run(jaxpr, closed.consts, [Dual(primals.get(v), tangents.get(v)) for v in refs])

    traced = make_jaxpr(body)(*[ref_aval(v.aval.shape, v.aval.dtype) for v in variables])
    n_seen = len(variables) - len(scratch) - len(private)
    made = prune(traced, frozenset(range(n_seen, len(variables))))
    _check_order(made.jaxpr, n_seen)
    return Tangents(made, active, again)


def _check_order(jaxpr: Any, n_seen: int) -> None:
    """Refuse atomics whose old value counts: programs run in another order than for the primal outputs."""
    found = Activity(jaxpr, ())
    seen = set(jaxpr.invars[:n_seen])
    for eqn in equations(jaxpr):
        if eqn.primitive is atomic_p and eqn.outvars[0] in found.read and found.roots[eqn.invars[0]] in seen:
            what = f"what the old value of atomic_{eqn.params['fn']} decides: that"
            raise refuse(f"a derivative is asked for of {what} {ORDER}", eqn)


def _zeros(v: Any) -> Any:
    return jnp.zeros(v.aval.shape, v.aval.dtype)


class _Forward:
    """Evaluates a jaxpr on `Dual`s under the trace of the tangent kernel."""

    def __init__(self, activity: Activity):
        self.activity = activity

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Dual]) -> list[Dual]:
        env: dict[Any, Dual] = {v: Dual(c) for v, c in zip(jaxpr.constvars, consts, strict=True)}
        env.update(zip(jaxpr.invars, args, strict=True))
        read = lambda v: Dual(v.val) if is_literal(v) else env[v]
        for eqn in jaxpr.eqns:
            with place(eqn):
                rule = _RULES.get(eqn.primitive.name, _Forward.pure)
                env.update(zip(eqn.outvars, rule(self, eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def pure(self, eqn: Any, args: list[Dual]) -> list[Dual]:
        moving = [k for k, x in enumerate(args) if x.tangent is not None]
        primals = [x.primal for x in args]
        if not moving:
            return [Dual(x) for x in bind(eqn, primals)]
        refuse_memory(eqn)

        def fn(*some):
            at = dict(zip(moving, some, strict=True))
            return tuple(bind(eqn, [at.get(k, x) for k, x in enumerate(primals)]))

        outs, tangents = jax.jvp(fn, [primals[k] for k in moving], [args[k].tangent for k in moving])
        floats = [is_float(v) for v in eqn.outvars]
        return [Dual(x, t if f else None) for x, t, f in zip(outs, tangents, floats, strict=True)]

    # -- memory -----------------------------------------------------------------------------------------------------
    def load(self, eqn: Any, args: list[Dual]) -> list[Dual]:
        ref, *rest = args
        rest = [x.primal for x in rest]
        out = load_p.bind(ref.primal, *rest, **eqn.params)
        if ref.tangent is None:
            return [Dual(out)]
        return [Dual(out, load_p.bind(ref.tangent, *rest, **{**eqn.params, "pad": 0}))]

    def store(self, eqn: Any, args: list[Dual]) -> list[Dual]:
        ref, *rest = args
        n = len(eqn.params["dims"])
        value = rest[n]
        others = [x.primal for x in rest]
        if ref.primal is not None:
            store_p.bind(ref.primal, *others, **eqn.params)
        if ref.tangent is not None:
            others[n] = _zeros(eqn.invars[1 + n]) if value.tangent is None else value.tangent
            store_p.bind(ref.tangent, *others, **eqn.params)
        return []

    def atomic(self, eqn: Any, args: list[Dual]) -> list[Dual]:
        ref, *rest = args
        n = len(eqn.params["dims"])
        fn, value, others = eqn.params["fn"], rest[n], [x.primal for x in rest]
        used = eqn.outvars[0] in self.activity.read
        if ref.tangent is None:
            if ref.primal is None:
                return [Dual(None)]
            return [Dual(atomic_p.bind(ref.primal, *others, **eqn.params))]
        if fn != "add" or used:
            what = "the old value of an atomic add, which" if used and fn == "add" else f"atomic_{fn}, whose result"
            raise refuse(f"a derivative is asked for through {what} {ORDER}", eqn)
        if ref.primal is not None:
            atomic_p.bind(ref.primal, *others, **eqn.params)
        if value.tangent is not None:
            others[n] = value.tangent
            atomic_p.bind(ref.tangent, *others, **eqn.params)
        return [Dual(None)]

    def alloc(self, eqn: Any, args: list[Dual]) -> list[Dual]:
        (v,) = eqn.outvars
        twin = jax.empty_ref(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)) if v in self.activity else None
        return [Dual(bind(eqn, [x.primal for x in args])[0], twin)]

    # -- control flow -------------------------------------------------------------------------------------------------
    def scan(self, eqn: Any, args: list[Dual]) -> list[Dual]:
        closed = eqn.params["jaxpr"]
        n_consts, n_carry = scan_counts(eqn.params)
        inner = closed.jaxpr
        carries, rows = inner.invars[n_consts : n_consts + n_carry], inner.invars[n_consts + n_carry :]
        consts, init, xs = args[:n_consts], args[n_consts : n_consts + n_carry], args[n_consts + n_carry :]
        ys = eqn.outvars[n_carry:]

        def step(carry, row):
            outs = self.run(inner, closed.consts, [*consts, *_joined(*carry), *_joined(*row)])
            return self.split(outs[:n_carry], carries), self.split(outs[n_carry:], ys)

        start = self.split(init, carries)
        params = {p: eqn.params[p] for p in ("length", "reverse", "unroll")}
        last, stacked = lax.scan(step, start, self.split(xs, rows), **params)
        return [*_joined(*last), *_joined(*stacked)]

    def split(self, values: Sequence[Dual], variables: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Primals, and tangents with None where the variable is not active, zeros where only this value is not."""
        tangents = [
            None if v not in self.activity or not is_float(v) else _zeros(v) if x.tangent is None else x.tangent
            for x, v in zip(values, variables, strict=True)
        ]
        return tuple(x.primal for x in values), tuple(tangents)

    def while_(self, eqn: Any, args: list[Dual]) -> list[Dual]:
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        cond_consts, consts, init = args[:n_cond], args[n_cond : n_cond + n_body], args[n_cond + n_body :]
        carries = body.jaxpr.invars[n_body:]

        def go_on(carry):
            (out,) = self.run(cond.jaxpr, cond.consts, [*cond_consts, *[Dual(x) for x in carry[0]]])
            return out.primal

        def step(carry):
            return self.split(self.run(body.jaxpr, body.consts, [*consts, *_joined(*carry)]), carries)

        return _joined(*lax.while_loop(go_on, step, self.split(init, carries)))

    def cond(self, eqn: Any, args: list[Dual]) -> list[Dual]:
        index, *operands = args

        def branch(closed):
            return lambda: self.split(self.run(closed.jaxpr, closed.consts, operands), eqn.outvars)

        return _joined(*lax.switch(index.primal, [branch(b) for b in eqn.params["branches"]]))

    def nothing(self, eqn: Any, args: list[Dual]) -> list[Dual]:
        """Leave out a print or an assert, which the kernel itself has done."""
        return []


def _joined(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Dual]:
    return [Dual(p, t) for p, t in zip(primals, tangents, strict=True)]


_RULES = {
    "jtile_load": _Forward.load,
    "jtile_store": _Forward.store,
    "jtile_atomic": _Forward.atomic,
    "empty_ref": _Forward.alloc,
    "scan": _Forward.scan,
    "while": _Forward.while_,
    "cond": _Forward.cond,
    "jtile_print": _Forward.nothing,
    "jtile_assert_": _Forward.nothing,
}
