"""Differentiation of kernels in JAX: the rules of `jtile_call`, and of `jtile_tangent`, the linear map that jvp binds.

`jtile_tangent` takes the kernel's operands and the tangents of those that are differentiated, and gives the tangents of
its outputs. As a kernel it is the forward-mode kernel; transposed it is the reverse-mode kernel, built from the same
program, so neither goes through the other. It is a primitive of its own so that JAX can linearise a call: the primal
call and the tangent one are separate equations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jax.sharding import PartitionSpec

from jtile._compat import held_weakly, need_devices
from jtile._errors import TransformError
from jtile._memo import memo
from jtile.primitive.batching import over_lanes, to_front
from jtile.primitive.jtile_call import bind, joint_varying, jtile_call_p, result_types, typed
from jtile.primitive.program import Choice, CustomVjp, Level, Program, Spec, derived_choice, lane_name, make_program
from jtile.primitive.sharding import Hand
from jtile.transforms.activity import active_outputs, is_literal
from jtile.transforms.jvp import Tangents, jvp
from jtile.transforms.prune import prune
from jtile.transforms.vjp import Cotangents, vjp


@dataclasses.dataclass(frozen=True)
class Lanes:
    """One vmap of a linear map: which of its operands and results have the batch dimension."""

    size: int
    primals: tuple[bool, ...]
    tangents: tuple[bool, ...]
    outs: tuple[bool, ...]  # for each of the kernel's outputs themselves, whether it has the batch dimension
    out_tangents: tuple[bool, ...]


@held_weakly
@dataclasses.dataclass(frozen=True)
class Linear:
    """The derivative of a program at the primals that the primitive takes.

    Attributes:
      program: the kernel.
      perturbed: which of its inputs are differentiated.
      lanes: vmaps of the map, innermost first; those of the program itself are among them.
      vjp: the reverse rule of the user's, batched as the map is; None: automatic.
      residuals: how many residuals of `vjp.fwd` follow the tangents among the operands.
    """

    program: Program
    perturbed: tuple[bool, ...]
    lanes: tuple[Lanes, ...]
    vjp: CustomVjp | None
    residuals: int = 0

    @property
    def n_in(self) -> int:
        return self.program.spec.n_in

    def split(self, operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """The operands in their roles: primals, tangents, residuals."""
        k = self.n_in + sum(self.perturbed)
        return operands[: self.n_in], operands[self.n_in : k], operands[k:]


def linear(program: Program, perturbed: Sequence[bool], residuals: int) -> Linear:
    n = program.spec.n_in
    lanes = []
    for level in program.levels:
        ins, outs = level.batched[:n], level.batched[n:]
        tangents = tuple(b for b, p in zip(ins, perturbed, strict=True) if p)
        lanes.append(Lanes(level.size, ins, tangents, outs, outs))
    return Linear(program, tuple(perturbed), tuple(lanes), program.vjp, residuals)


@memo()
def _body(program: Program) -> Any:
    """The jaxpr in the form that derivatives start from: pruned, every Ref touched by the language's primitives."""
    return prune(program.jaxpr, own_refs=True)


@memo()
def active(program: Program, perturbed: tuple[bool, ...]) -> tuple[int, ...]:
    """The outputs that have a tangent; of a kernel at block level, or that talks to other devices, whose
    body is not looked into, all of floats."""
    spec = program.spec
    if program.block or program.devices:
        floats = [dtypes.issubdtype(o.dtype, np.inexact) for o in program.out_avals]
        return tuple(k for k, f in enumerate(floats) if f)
    return active_outputs(_body(program).jaxpr, spec.n_in, spec.n_out, spec.aliases, perturbed)


@memo()
def _forward_body(program: Program, perturbed: tuple[bool, ...]) -> Tangents:
    spec = program.spec
    return jvp(_body(program), spec.n_in, spec.n_out, spec.aliases, perturbed)


def _refuse_schedule(program: Program, mode: str) -> None:
    if program.devices:
        way = f"give its reverse mode with {program.name}.defvjp(fwd, bwd)" if program.vjp is None else "it has defvjp"
        raise TransformError(
            f"kernel {program.name} talks to other devices (along {', '.join(dict(program.devices))}), and what it "
            f"sends has no {mode}: {way}, or take jtile.ops.collectives, each the transpose of another",
            program.where,
        )
    if program.block:
        way = (
            f"give its reverse mode with {program.name}.defvjp(fwd, bwd)" if program.vjp is None else
            "its reverse mode is the one given by defvjp"
        )  # fmt: skip
        raise TransformError(
            f"kernel {program.name} is at block level, and a schedule has no {mode}: {way}, or differentiate a kernel "
            "written at tile level",
            program.where,
        )


@memo()
def forward_program(lin: Linear) -> Program:
    """The kernel of forward mode: `(primals, tangents) -> (tangents of the active outputs, outputs it needs again)`."""
    _refuse_schedule(lin.program, "forward mode")
    program, spec = lin.program, lin.program.spec
    body = _forward_body(program, lin.perturbed)
    n_tangents = sum(lin.perturbed)
    place = {k: spec.n_in + j for j, k in enumerate(k for k, p in enumerate(lin.perturbed) if p)}
    source = {o: i for i, o in spec.aliases}
    inits = spec.inits or (None,) * spec.n_out
    aliases, starts = [], []
    for j, k in enumerate(body.active):
        if source.get(k) in place:
            aliases.append((place[source[k]], j))
        starts.append(0 if (k in source and source[k] not in place) or inits[k] is not None else None)
    for j, k in enumerate(body.again, len(body.active)):
        if k in source:
            aliases.append((source[k], j))
        starts.append(inits[k])
    names = [*spec.ref_names[: spec.n_in], *[f"{spec.ref_names[k]}_dot" for k in place]]
    out_name = lambda k: spec.ref_names[spec.n_in + k]
    names += [*[f"{out_name(k)}_dot" for k in body.active], *[out_name(k) for k in body.again]]
    extra = len(body.jaxpr.jaxpr.invars) - len(names)
    around = Spec(
        f"{spec.name}_jvp", spec.n_in + n_tangents, len(body.active) + len(body.again), spec.grid, tuple(aliases),
        tuple(starts), (*names, *[f"scratch{k}" for k in range(extra)]), spec.loc,
        (*spec.complex_inputs(), *[spec.complex_inputs()[k] for k in place],
         *[spec.complex_outputs()[k] for k in (*body.active, *body.again)]),
        linear=True,
    )  # fmt: skip
    levels = tuple(
        Level(
            w.size,
            (*w.primals, *w.tangents, *[w.out_tangents[k] for k in body.active], *[w.outs[k] for k in body.again]),
        )
        for w in lin.lanes
    )
    narrow = [program.narrow[k] for k in body.active] + [None] * len(body.again)
    hand = _hand(lin, [*place], [*body.active, *body.again], forward_program)
    return make_program(
        body.jaxpr, around, meta=program.meta, options=program.options, levels=levels, narrow=tuple(narrow), hand=hand,
        choice=_choice(lin, forward_program),
    )  # fmt: skip


def _choice(lin: Linear, make: Callable[[Linear], Program]) -> Choice | None:
    """How the tiles of a derivative are chosen: they are those of the kernel."""
    return derived_choice(lin.program, lambda p: make(dataclasses.replace(lin, program=p)))


def _hand(lin: Linear, ins: Sequence[int], outs: Sequence[int], make: Callable[[Linear], Program], *, reverse=False):
    """The sharding rule given by hand, for the derivative: tangents and cotangents are cut as what they are of.

    Args:
      ins, outs: which of the kernel's inputs (outputs, in reverse) the further inputs are of; likewise the outputs.
      make: the derivative of a shard.
    """
    hand = lin.program.hand
    if hand is None:
        return None
    further = [(hand.outputs if reverse else hand.inputs)[k] for k in ins]

    def shard(parts: Mapping[str, int]) -> Program:
        lanes = [dataclasses.replace(w, size=w.size // parts.get(lane_name(j), 1)) for j, w in enumerate(lin.lanes)]
        return make(dataclasses.replace(lin, program=hand.shard(parts), lanes=tuple(lanes)))

    names = [hand.outputs[k] for k in outs] if not reverse else [(*hand.inputs, *hand.outputs)[k] for k in outs]
    return Hand((*hand.inputs, *further), tuple(names), shard)


@memo()
def reverse_program(lin: Linear, given: tuple[bool, ...]) -> tuple[Program, Cotangents]:
    """The kernel of reverse mode: `(primals, cotangents of the active outputs that are given) -> (cotangents of the
    perturbed inputs, and memory that only the kernel needs)`."""
    _refuse_schedule(lin.program, "automatic reverse mode")
    choice = lin.program.choice
    if choice is not None:
        make = lambda p: _reversed(dataclasses.replace(lin, program=p), given)[0]
        best = choice.derived(choice.target, lin.program.levels, make)
        lin = lin if best is None else dataclasses.replace(lin, program=best)
    return _reversed(lin, given)


def _reversed(lin: Linear, given: tuple[bool, ...]) -> tuple[Program, Cotangents]:
    """`reverse_program` with the tiles that the kernel has."""
    program, spec = lin.program, lin.program.spec
    body = vjp(_body(program), spec, lin.perturbed, given)
    levels = []
    for w in lin.lanes:
        ct_ins = [w.out_tangents[k] for k in body.cotangents]
        spread = dict(zip([k for k, p in enumerate(lin.perturbed) if p], w.tangents, strict=True))
        wanted = [spread[k] for k in body.sums]
        memory = [w.out_tangents[k] for k in body.mutable] + [w.outs[k] for k in body.again]
        levels.append(Level(w.size, (*w.primals, *ct_ins, *wanted, *memory)))
    outs = [*body.sums, *[spec.n_in + k for k in (*body.mutable, *body.again)]]
    hand = _hand(lin, body.cotangents, outs, lambda local: reverse_program(local, given)[0], reverse=True)
    made = make_program(
        body.jaxpr, body.spec, meta=program.meta, options=program.options, levels=tuple(levels), narrow=body.narrow,
        hand=hand, choice=_choice(lin, lambda other: reverse_program(other, given)[0]),
    )  # fmt: skip
    return made, body


# -- the jvp rule of jtile_call --------------------------------------------------------------------------------------


def _call_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, program: Program):
    perturbed = [type(t) is not ad.Zero and t.dtype != dtypes.float0 for t in tangents]
    if program.vjp is None:
        if any(perturbed):
            _refuse_schedule(program, "automatic derivative")
        outs, residuals = bind(program, primals), ()
    else:
        results = list(program.vjp.fwd(*primals))
        outs, residuals = results[: program.spec.n_out], results[program.spec.n_out :]
    if not any(perturbed):
        return outs, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs]
    lin = linear(program, perturbed, len(residuals))
    moved = active(program, lin.perturbed)
    moving = [t for t, p in zip(tangents, perturbed, strict=True) if p]
    found = dict(zip(moved, bind_linear(lin, [*primals, *moving, *residuals]), strict=True))
    return outs, [found[k] if k in found else ad.Zero(jax.typeof(x).to_tangent_aval()) for k, x in enumerate(outs)]


ad.primitive_jvps[jtile_call_p] = _call_jvp

# -- the linear map ----------------------------------------------------------------------------------------------------

jtile_tangent_p = jexc.Primitive("jtile_tangent")
jtile_tangent_p.multiple_results = True
need_devices(jtile_tangent_p)  # it is lowered through jtile_call, which needs them


def bind_linear(lin: Linear, operands: Sequence[Any]) -> list[Any]:
    return jtile_tangent_p.bind(*joint_varying(operands), linear=lin)


def _tangent_call(*operands: Any, linear: Linear) -> list[Any]:
    program = forward_program(linear)
    n = len(active(linear.program, linear.perturbed))
    primals, tangents, _ = linear.split(operands)
    return bind(program, [*primals, *tangents])[:n]


jtile_tangent_p.def_impl(_tangent_call)
mlir.register_lowering(jtile_tangent_p, mlir.lower_fun(_tangent_call, multiple_results=True))


@jtile_tangent_p.def_abstract_eval
def _(*avals: Any, linear: Linear) -> list[ShapedArray]:
    moved = active(linear.program, linear.perturbed)
    named = any(not a.sharding.mesh.empty for a in avals)  # the types name shardings: those of the kernel's rule
    if named and not (linear.program.block or linear.program.devices):
        return result_types(avals, forward_program(linear))[: len(moved)]
    outs = outs_of(linear, avals[: linear.n_in])
    if linear.program.devices:  # inside of shard_map: no dimension of a part is cut
        whole = [outs[k] for k in moved]
        return typed(avals, whole, [PartitionSpec(*(None,) * len(o.shape)) for o in whole])
    like = max(avals, key=lambda a: len(a.manual_axis_type.varying))
    return [like.update(shape=outs[k].shape, dtype=outs[k].dtype, weak_type=False) for k in moved]


def _tangent_jvp(operands: Sequence[Any], tangents: Sequence[Any], *, linear: Linear):
    """The jvp rule of the map, for second order: it differentiates the map as an ordinary kernel call."""
    used = linear.n_in + sum(linear.perturbed)
    fn = functools.partial(_tangent_call, linear=dataclasses.replace(linear, residuals=0))
    full = [ad.instantiate_zeros(t) for t in tangents[:used]]
    moving = [k for k, t in enumerate(tangents[:used]) if type(t) is not ad.Zero]

    def some(*xs):
        at = dict(zip(moving, xs, strict=True))
        return fn(*[at.get(k, x) for k, x in enumerate(operands[:used])])

    return jax.jvp(some, [operands[k] for k in moving], [full[k] for k in moving])


ad.primitive_jvps[jtile_tangent_p] = _tangent_jvp


def _tangent_transpose(cts: Sequence[Any], *operands: Any, linear: Linear) -> list[Any]:
    primals, tangents, residuals = linear.split(operands)
    if any(ad.is_undefined_primal(x) for x in (*primals, *residuals)):
        raise TransformError(f"kernel {linear.program.name}: not linear in its inputs", linear.program.where)
    if linear.vjp is not None:
        found = _custom_transpose(linear.vjp, linear, cts, residuals, primals)
    else:
        found = _automatic_transpose(linear, cts, primals)
    found = [ct if ct is None else _as_sharded(ct, x.aval) for ct, x in zip(found, tangents, strict=True)]
    return [None] * len(primals) + found + [None] * len(residuals)


def _as_sharded(ct: Any, aval: Any) -> Any:
    """A cotangent with the sharding of what it is of: on an explicit mesh that is part of its type."""
    want = aval.sharding
    return ct if want.mesh.empty or jax.typeof(ct).sharding.spec == want.spec else jax.sharding.reshard(ct, want)


def _automatic_transpose(linear: Linear, cts: Sequence[Any], primals: Sequence[Any]) -> list[Any]:
    given = _given(linear, cts)
    if not any(given):
        return [None] * sum(linear.perturbed)
    program, body = reverse_program(linear, given)
    known = [ct for ct in cts if type(ct) is not ad.Zero]
    known = [ct.astype(d) for ct, d in zip(known, body.dtypes, strict=True)]
    outs = bind(program, [*primals, *known])
    return [outs[k] for k in body.results]


def _given(linear: Linear, cts: Sequence[Any]) -> tuple[bool, ...]:
    """Which outputs of the kernel have a cotangent; `cts` has an entry for each active one."""
    given = {k for k, ct in zip(active(linear.program, linear.perturbed), cts, strict=True) if type(ct) is not ad.Zero}
    return tuple(k in given for k in range(linear.program.spec.n_out))


def _custom_transpose(
    vjp: CustomVjp, linear: Linear, cts: Sequence[Any], residuals: Sequence[Any], primals: Sequence[Any]
) -> list[Any]:
    """The user's rule; it gets a cotangent for every output, None for one that is not of floats."""
    given = dict(zip(active(linear.program, linear.perturbed), cts, strict=True))
    full = []
    for k, out in enumerate(outs_of(linear, primals)):
        ct = given.get(k)
        if not dtypes.issubdtype(out.dtype, np.inexact):
            full.append(None)
        else:
            full.append(jnp.zeros(out.shape, out.dtype) if ct is None or type(ct) is ad.Zero else ct)
    back = vjp.bwd(*residuals, *full)
    return [ct for ct, p in zip(back, linear.perturbed, strict=True) if p]


def outs_of(lin: Linear, primals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Types of the kernel's outputs under the map's vmaps, those of the cotangents that a rule of the user's gets."""
    outs = []
    for k, o in enumerate(lin.program.results([x.shape for x in primals])):
        shape = o.shape[sum(level.batched[lin.n_in + k] for level in lin.program.levels) :]
        for w in lin.lanes:
            shape = (w.size, *shape) if w.out_tangents[k] else shape
        outs.append(jax.ShapeDtypeStruct(shape, o.dtype))
    return outs


ad.primitive_transposes[jtile_tangent_p] = _tangent_transpose


def _tangent_batch(axis: Any, operands: Sequence[Any], dims: Sequence[int | None], *, linear: Linear):
    if all(d is None for d in dims):  # inside of a scan or a checkpoint whose other operands are batched
        results = bind_linear(linear, operands)
        return results, [None] * len(results)
    size, flags, moved = to_front(operands, dims, _shared_operands(linear))
    primals, tangents, residuals = linear.split(flags)
    n_out = linear.program.spec.n_out
    # What the kernel computes again and reads back is memory that each lane needs for itself.
    lanes = Lanes(size, tuple(primals), tuple(tangents), (True,) * n_out, (True,) * n_out)
    vjp = linear.vjp and _batched_vjp(linear.vjp, linear, lanes, tuple(residuals), axis.name)
    wide = dataclasses.replace(linear, lanes=(*linear.lanes, lanes), vjp=vjp)
    results = bind_linear(wide, moved)
    return results, [0] * len(results)


def _shared_operands(linear: Linear) -> list[int]:
    """Operands whose buffers become a result's: aliased inputs and their tangents."""
    place = {k: linear.n_in + j for j, k in enumerate(k for k, p in enumerate(linear.perturbed) if p)}
    ins = [i for i, _ in linear.program.spec.aliases]
    return [place[i] for i in ins if i in place] + ins


def _batched_vjp(
    vjp: CustomVjp, linear: Linear, lanes: Lanes, residuals: tuple[bool, ...], axis_name: Any
) -> CustomVjp:
    """The user's reverse rule under one more vmap; what all lanes share gets the sum of their cotangents."""
    tangents = iter(lanes.tangents)
    summed = [p and not next(tangents) for p in linear.perturbed]
    bwd = over_lanes(vjp.bwd, lanes.size, axis_name, summed, shared=[k for k, b in enumerate(residuals) if not b])
    return CustomVjp(vjp.fwd, bwd, (vjp.key, lanes, residuals, axis_name))


batching.fancy_primitive_batchers[jtile_tangent_p] = _tangent_batch


# -- the transpose of a kernel that is linear itself -----------------------------------------------------------------


def _call_transpose(cts: Sequence[Any], *operands: Any, program: Program) -> list[Any]:
    """The transpose of a call that JAX takes for linear in some operands: tangents in a rule of `jax.custom_jvp`, what
    `jax.linear_transpose` and linear solvers turn round. It is the reverse mode at zero, if that does not ask where.

    Raises:
      TransformError: the reverse mode asks for an operand, so the kernel is not linear in it.
    """
    unknown = tuple(ad.is_undefined_primal(x) for x in operands)
    primals = [ad.instantiate_zeros(ad.Zero(x.aval)) if u else x for x, u in zip(operands, unknown, strict=True)]
    moved = [cts[k] for k in active(program, unknown)]
    found, asked = (_transposed if program.vjp is None else _transposed_by_rule)(program, unknown, moved, primals)
    bad = [program.spec.ref_names[k] for k, (u, a) in enumerate(zip(unknown, asked)) if u and a]
    if bad:
        raise TransformError(
            f"kernel {program.name} is not linear in {', '.join(bad)}, so it cannot be transposed: differentiate it "
            "with jax.grad or jax.vjp, and call it on tangents only where it is linear in them",
            program.where,
        )
    each = iter(found)
    found = [next(each) if u else None for u in unknown]
    return [ct if ct is None else _as_sharded(ct, x.aval) for ct, x in zip(found, operands, strict=True)]


Transposed = tuple[list[Any], Sequence[bool]]  # a cotangent (or None) of each unknown operand; operands asked for


def _transposed(program: Program, unknown: tuple[bool, ...], cts: Sequence[Any], primals: Sequence[Any]) -> Transposed:
    lin = linear(program, unknown, 0)
    found = _automatic_transpose(lin, cts, primals)
    if all(ct is None for ct in found):
        return found, [False] * len(unknown)
    return found, _asked(lin, _given(lin, cts))


@memo()
def _asked(lin: Linear, given: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which inputs the cotangents depend on.

    Reverse mode computes again every output that the kernel reads back, and so asks for what goes into it; only the
    dead code of that computation says whether a cotangent needs it.
    """
    made, body = reverse_program(lin, given)
    idle = frozenset(made.spec.n_in + k for k in range(made.spec.n_out) if k not in body.results)
    jaxpr = prune(made.jaxpr, idle, own_refs=True).jaxpr
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if not is_literal(v)}
    # An aliased input is what its output holds at first: a kernel reads it through either Ref.
    read |= {jaxpr.invars[i] for i, o in made.spec.aliases if jaxpr.invars[made.spec.n_in + o] in read}
    return tuple(v in read for v in jaxpr.invars[: lin.n_in])


def _transposed_by_rule(
    program: Program, unknown: tuple[bool, ...], cts: Sequence[Any], primals: Sequence[Any]
) -> Transposed:
    rule, n = program.vjp, len(primals)
    assert rule is not None

    def back(*values: Any) -> list[Any]:
        residuals = list(rule.fwd(*values[:n]))[program.spec.n_out :]
        given = iter(values[n:])
        full = [ct if type(ct) is ad.Zero else next(given) for ct in cts]
        return _custom_transpose(rule, linear(program, unknown, len(residuals)), full, residuals, values[:n])

    known = [ct for ct in cts if type(ct) is not ad.Zero]
    closed, shapes = jax.make_jaxpr(back, return_shape=True)(*primals, *known)
    # Run as it is, it would compute the result of the kernel, and the cotangents that nobody asked for.
    alive, used = pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    needed = [x for x, u in zip([*primals, *known], used, strict=True) if u]
    found = jexc.jaxpr_as_fun(jexc.ClosedJaxpr(alive, closed.consts))(*needed)
    return jax.tree.unflatten(jax.tree.structure(shapes), found), used[:n]


ad.primitive_transposes[jtile_call_p] = _call_transpose
