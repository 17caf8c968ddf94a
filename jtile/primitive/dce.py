"""Dead-code elimination of kernel calls: results that nobody uses are neither computed nor stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import core

from jtile._compat import make_jaxpr, register_dce
from jtile._memo import memo
from jtile.language._equations import ref_aval
from jtile.primitive.program import CustomVjp, Program, derived_choice, make_program
from jtile.transforms.prune import prune


def register(primitive: Any) -> None:
    """Make the rule below that of `primitive`, whose one parameter is `program`."""
    register_dce(primitive, _rule)


def _rule(used_outputs: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    program = eqn.params["program"]
    if not any(used_outputs) and not program.effect:
        return [False] * len(eqn.invars), None
    smaller = None if all(used_outputs) else _smaller(program, tuple(used_outputs))
    if smaller is None:
        return [True] * len(eqn.invars), eqn
    made, ins, outs = smaller
    pick = lambda values, flags: [v for v, f in zip(values, flags, strict=True) if f]
    invars, outvars = pick(eqn.invars, ins), pick(eqn.outvars, outs)
    return list(ins), eqn.replace(invars=invars, outvars=outvars, params={"program": made})


@memo()
def _smaller(program: Program, used: tuple[bool, ...]) -> tuple[Program, tuple[bool, ...], tuple[bool, ...]] | None:
    """The program without unused outputs that no other needs, and which inputs and outputs it keeps; None: no such.

    Kept are outputs that share the buffer of an input or that the kernel reads for something live. A sharding rule
    given by hand counts operands and results, so all of them stay, and so do the operands of a reverse rule. A kernel
    that asserts keeps its results where no other is used: partitioning over devices finds the call by them. A schedule
    at block level is what was written: nothing of it is taken out.
    """
    spec = program.spec
    if program.hand or program.dynamic or program.block or program.devices or not any(used):
        return None
    shared = {o for _, o in spec.aliases}
    idle = {k for k, u in enumerate(used) if not u and k not in shared}
    closed = prune(program.jaxpr, frozenset(spec.n_in + k for k in idle))
    seen = {v for eqn in closed.jaxpr.eqns for v in eqn.invars if not hasattr(v, "val")}
    in_use = [v in seen for v in closed.jaxpr.invars]
    outs = tuple(k not in idle or in_use[spec.n_in + k] for k in range(spec.n_out))
    if all(outs):
        return None
    sharing = {i for i, _ in spec.aliases}
    ins = tuple(in_use[k] or k in sharing or program.vjp is not None for k in range(spec.n_in))
    kept = (*ins, *outs, *[True] * (len(in_use) - spec.n_in - spec.n_out))
    levels = [dataclasses.replace(w, batched=_picked(w.batched, (*ins, *outs))) for w in program.levels]
    made = make_program(
        _without(closed, kept), _narrowed(spec, ins, outs, kept), meta=program.meta, options=program.options,
        levels=tuple(levels), narrow=_picked(program.narrow, outs), vjp=program.vjp and _vjp(program, outs),
        choice=derived_choice(program, lambda p: (_smaller(p, used) or (p,))[0]),
    )  # fmt: skip
    return made, ins, outs


def _vjp(program: Program, outs: tuple[bool, ...]) -> CustomVjp:
    """The reverse rule of the program without some of its outputs: their cotangents are zero."""
    rule, n = program.vjp, sum(outs)
    assert rule is not None

    def fwd(*operands: Any) -> Sequence[Any]:
        values = rule.fwd(*operands)
        return [*_picked(values[: len(outs)], outs), *values[len(outs) :]]

    def bwd(*values: Any) -> Sequence[Any]:
        residuals, given = values[: len(values) - n], iter(values[len(values) - n :])
        cotangents = [next(given) if k else _zero(o) for o, k in zip(program.out_avals, outs, strict=True)]
        return rule.bwd(*residuals, *cotangents)

    return CustomVjp(fwd, bwd, (rule.key, outs))


def _zero(o: jax.ShapeDtypeStruct) -> Any:
    return jnp.zeros(o.shape, o.dtype) if jnp.issubdtype(o.dtype, jnp.floating) else None


def _picked(values: Sequence[Any], flags: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(v for v, f in zip(values, flags, strict=True) if f)


def _narrowed(spec: Any, ins: Sequence[bool], outs: Sequence[bool], kept: Sequence[bool]) -> Any:
    return dataclasses.replace(
        spec,
        n_in=sum(ins),
        n_out=sum(outs),
        aliases=tuple((sum(ins[:i]), sum(outs[:o])) for i, o in spec.aliases),
        inits=_picked(spec.inits, outs) if spec.inits else (),
        complexes=_picked(spec.complexes, (*ins, *outs)) if spec.complexes else (),
        ref_names=_picked(spec.ref_names, kept) if len(spec.ref_names) == len(kept) else (),
    )


def _without(closed: Any, kept: Sequence[bool]) -> Any:
    """The kernel's jaxpr without Refs that no equation uses."""

    def body(*refs: Any) -> Any:
        it = iter(refs)
        return core.eval_jaxpr(closed.jaxpr, closed.consts, *[next(it) if k else None for k in kept])

    variables = _picked(closed.jaxpr.invars, kept)
    return make_jaxpr(body)(*[ref_aval(v.aval.shape, v.aval.dtype) for v in variables])
