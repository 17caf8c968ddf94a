"""Reverse mode: the kernel that computes the cotangents of another one's inputs.

Its Refs are the inputs of the kernel, then a cotangent for each output that has one; then the cotangents of the inputs
that are differentiated, summed in the accumulator's dtype and rounded at the end; then memory that nobody else sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jtile import ir
from jtile._compat import make_jaxpr
from jtile.language._equations import ref_aval
from jtile.language._index import At, Span, Tile
from jtile.trace.tracing import equations
from jtile.transforms.activity import Activity, is_literal
from jtile.transforms.evaluate import as_loop, check_arrivals, refuse
from jtile.transforms.prune import prune
from jtile.transforms.ranges import Ranges
from jtile.transforms.rescaling import rescaled
from jtile.transforms.reverse import Mode, Reverse, Slot, new_ref, wide
from jtile.transforms.reverse_control import UNBOUNDED

if TYPE_CHECKING:
    from jtile.primitive.program import Spec


@dataclasses.dataclass(frozen=True)
class Cotangents:
    """The result of `vjp`: the reverse kernel.

    Attributes:
      jaxpr: over the Refs: inputs, cotangents of the outputs `cotangents`; cotangents of the inputs `sums`,
        cotangents of the outputs `mutable` (the kernel changes them), outputs computed `again`.
      spec: what stands around the body of that kernel.
      cotangents: outputs whose cotangent the kernel takes.
      dtypes: the dtype in which it takes each of them.
      sums: differentiated inputs whose cotangent is a sum of its own. That of an aliased input is what the kernel
        leaves in the cotangent of the output.
      results: for each differentiated input, which output of this kernel is its cotangent.
      mutable: outputs whose cotangent it changes.
      again: outputs that the kernel reads, and so computes once more.
      narrow: per output of the reverse kernel, see `Program.narrow`.
    """

    jaxpr: Any
    spec: Spec
    cotangents: tuple[int, ...]
    dtypes: tuple[np.dtype, ...]
    sums: tuple[int, ...]
    results: tuple[int, ...]
    mutable: tuple[int, ...]
    again: tuple[int, ...]
    narrow: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class _Roles:
    """The Refs of the reverse kernel, as variables of the kernel, by what they hold."""

    ins: list[Any]
    outs: list[Any]
    scratch: list[Any]
    wanted: list[Any]  # inputs that are differentiated and not aliased
    given: list[int]  # outputs with a cotangent
    mutable: list[int]
    again: list[int]


def vjp(closed: Any, spec: Spec, perturbed: Sequence[bool], given: Sequence[bool]) -> Cotangents:
    """The reverse kernel of a pruned kernel jaxpr.

    Args:
      perturbed: which inputs are differentiated.
      given: which outputs have a cotangent.
    Raises:
      TransformError: an atomic other than add, the old value of one, a loop that does not count its rounds, or one that
        must save its carry and has no bound; with the source line.
    """
    check_arrivals(equations(closed.jaxpr))
    unseen = frozenset[int]()
    while True:
        roles, activity = _roles(closed.jaxpr, spec, perturbed, given)
        seen = {*roles.given, *roles.mutable, *roles.again}
        left = frozenset(spec.n_in + k for k in range(spec.n_out) if k not in seen)
        if left == unseen:
            break
        closed, unseen = prune(closed, left), left
    ins, outs, wanted, mutable = roles.ins, roles.outs, roles.wanted, roles.mutable
    shared = {ins[i]: outs[o] for i, o in spec.aliases}
    traced = prune(_trace(closed, spec, roles, activity, dict(spec.aliases)))
    _check_bounded(traced)
    at = {v: k for k, v in enumerate(wanted)}
    at |= {v: len(wanted) + mutable.index(outs.index(o)) for v, o in shared.items() if o in activity}
    return _assemble(traced, spec, roles, tuple(at[v] for v, p in zip(ins, perturbed, strict=True) if p))


def _roles(jaxpr: Any, spec: Spec, perturbed: Sequence[bool], given: Sequence[bool]) -> tuple[_Roles, Activity]:
    n_in, n_out = spec.n_in, spec.n_out
    ins, outs, scratch = jaxpr.invars[:n_in], jaxpr.invars[n_in : n_in + n_out], jaxpr.invars[n_in + n_out :]
    differentiated = [v for v, p in zip(ins, perturbed, strict=True) if p]
    shared = {ins[i]: outs[o] for i, o in spec.aliases}
    activity = Activity(jaxpr, differentiated, shared.items())
    wanted = [v for v in differentiated if v not in shared]
    active = [k for k, v in enumerate(outs) if v in activity]
    mutable = [k for k in active if not _written_once(jaxpr, activity, outs[k]) or outs[k] in shared.values()]
    again = [k for k, v in enumerate(outs) if v in activity.loaded]
    return _Roles(ins, outs, scratch, wanted, [k for k in active if given[k]], mutable, again), activity


def _trace(closed: Any, spec: Spec, roles: _Roles, activity: Activity, aliases: dict[int, int]) -> Any:
    ins, outs = roles.ins, roles.outs
    sums = [wide(v.aval.dtype) for v in roles.wanted]
    types = [ref_aval(v.aval.shape, v.aval.dtype) for v in ins]
    types += [ref_aval(outs[k].aval.shape, _ct_dtype(roles, k)) for k in roles.given]
    types += [ref_aval(v.aval.shape, d) for v, d in zip(roles.wanted, sums, strict=True)]
    types += [ref_aval(outs[k].aval.shape, wide(outs[k].aval.dtype)) for k in roles.mutable]
    types += [ref_aval(outs[k].aval.shape, outs[k].aval.dtype) for k in roles.again]

    def body(*tracers):
        refs = iter(tracers)
        primals = {v: next(refs) for v in ins}
        cts = {outs[k]: next(refs) for k in roles.given}
        cts |= {v: next(refs) for v in roles.wanted}
        cts |= {outs[k]: next(refs) for k in roles.mutable}
        primals |= {outs[k]: next(refs) for k in roles.again}
        walk = Reverse(activity, Ranges(closed.jaxpr, spec.grid), rescaled(closed.jaxpr))
        slots = [Slot(primals[v], cts.get(v), "input") for v in ins]
        for k, v in enumerate(outs):
            slots.append(Slot(primals.get(v), cts.get(v), "memory" if k in (*roles.mutable, *roles.again) else "once"))
        for i, o in aliases.items():  # an input and its output share one memory
            kind = "memory" if o in (*roles.mutable, *roles.again) else "input"
            slots[i] = Slot(primals.get(outs[o], primals[ins[i]]), cts.get(outs[o]), kind)
        for v in roles.scratch:
            slots.append(walk.scratch(v, new_ref(v.aval.shape, v.aval.dtype), True))
        _, pull = walk.sweep(closed.jaxpr, closed.consts, slots, Mode(True, True))
        pull([])

    return make_jaxpr(body)(*types)


def _ct_dtype(roles: _Roles, k: int) -> np.dtype:
    dtype = roles.outs[k].aval.dtype
    return wide(dtype) if k in roles.mutable else np.dtype(dtype)


def _assemble(traced: Any, spec: Spec, roles: _Roles, results: tuple[int, ...]) -> Cotangents:
    """Put the reverse kernel together: the names, starts and aliases of its Refs."""
    ins, outs, wanted = roles.ins, roles.outs, roles.wanted
    by_output = {o: i for i, o in spec.aliases}
    inits = spec.inits or (None,) * spec.n_out
    first = len(wanted)
    aliases: list[tuple[int, int]] = []
    starts: list[Any] = [0] * len(wanted)
    for j, k in enumerate(roles.mutable, first):
        if k in roles.given:
            aliases.append((len(ins) + roles.given.index(k), j))
        starts.append(None if k in roles.given else 0)
    for j, k in enumerate(roles.again, first + len(roles.mutable)):
        if k in by_output:
            aliases.append((by_output[k], j))
        starts.append(None if k in by_output else inits[k])
    name = lambda v: spec.ref_names[[*ins, *outs].index(v)]
    names = [name(v) for v in ins] + [f"{name(outs[k])}_bar" for k in roles.given] + [f"{name(v)}_bar" for v in wanted]
    names += [f"{name(outs[k])}_bar_left" for k in roles.mutable] + [name(outs[k]) for k in roles.again]
    around = dataclasses.replace(
        spec, name=f"{spec.name}_vjp", n_in=len(ins) + len(roles.given), n_out=len(starts), aliases=tuple(aliases),
        inits=tuple(starts), ref_names=tuple(names), complexes=_complexes(spec, roles), derived=True, linear=True,
    )  # fmt: skip
    kept = [*[v.aval.dtype for v in wanted], *[outs[k].aval.dtype for k in roles.mutable]]
    narrow = [_narrow(d) if k in results else None for k, d in enumerate(kept)] + [None] * len(roles.again)
    return Cotangents(
        traced, around, tuple(roles.given), tuple(_ct_dtype(roles, k) for k in roles.given),
        tuple(ins.index(v) for v in wanted), results, tuple(roles.mutable), tuple(roles.again), tuple(narrow),
    )  # fmt: skip


def _complexes(spec: Spec, roles: _Roles) -> tuple[bool, ...]:
    ins, outs = spec.complex_inputs(), spec.complex_outputs()
    cotangents = [ins[roles.ins.index(v)] for v in roles.wanted]
    return (*ins, *[outs[k] for k in roles.given], *cotangents, *[outs[k] for k in (*roles.mutable, *roles.again)])


def _narrow(dtype: Any) -> str | None:
    return None if wide(dtype) == dtype else ir.dtype_info(dtype).name


def _check_bounded(traced: Any) -> None:
    for eqn in equations(traced.jaxpr):
        if eqn.primitive.name == "empty_ref" and UNBOUNDED in eqn.outvars[0].aval.shape:
            raise refuse(
                "reverse mode must save the carry of this loop for every round, and cannot see how many rounds it runs "
                "at most: bound hi with jnp.minimum(hi, a Python int), and lo with jnp.maximum where it is data; bound "
                "a dynamic dimension, jt.dynamic(x, axis, most=4096); of a while loop, whose gradient is such a "
                "loop, make `for k in jt.range(most)` and `break`; or give the kernel a rule of its own (defvjp)",
                eqn,
            )


# -- outputs that are written once -----------------------------------------------------------------------------------


def _written_once(jaxpr: Any, activity: Activity, out: Any) -> bool:
    """Whether no element of an output is written twice by one program, nor read: its cotangent is only looked at.

    Accumulated outputs (atomic adds only) count as well. True only where it is plain to see.
    """
    if out in activity.loaded:
        return False
    sites = list(_sites(jaxpr, activity, out, {}, ()))
    if all(s.eqn.primitive.name == "jtile_atomic" for s in sites):
        return True
    if any(s.eqn.primitive.name == "jtile_atomic" for s in sites):
        return False
    apart = all(_apart(a.eqn, b.eqn) for k, a in enumerate(sites) for b in sites[:k])
    return apart and all(set(s.loops) <= set(s.walked) for s in sites)


@dataclasses.dataclass(frozen=True)
class _Site:
    """An equation that writes to an output.

    Attributes:
      loops: the loops around it.
      walked: loops whose index walks, in steps, a dimension of what it writes.
    """

    eqn: Any
    loops: tuple[int, ...]
    walked: tuple[int, ...]


def _sites(jaxpr: Any, activity: Activity, out: Any, index: dict[Any, int], loops: tuple[int, ...]) -> Iterator[_Site]:
    """Where an output is written; `index`: variables that are the index of a loop -> that loop."""
    index = dict(index)
    same = lambda outer, inner: {b: index[a] for a, b in zip(outer, inner) if not is_literal(a) and a in index}
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "jtile_loop_hint" and eqn.invars[0] in index:
            index[eqn.outvars[0]] = index[eqn.invars[0]]
        elif name in ("jtile_store", "jtile_atomic") and activity.roots[eqn.invars[0]] is out:
            dims = zip(eqn.params["dims"], eqn.invars[1:])
            steps = [v for d, v in dims if isinstance(d, At) or (isinstance(d, Tile) and d.size <= d.step)]
            yield _Site(eqn, loops, tuple(index[v] for v in steps if not is_literal(v) and v in index))
        elif name in ("scan", "while"):
            loop = as_loop(eqn)
            body = loop.body if loop else eqn.params["body_jaxpr"].jaxpr
            inner = same(loop.consts, body.invars) if loop else {}
            if loop and loop.counter is not None:
                inner[loop.carries[loop.counter]] = id(eqn)
            yield from _sites(body, activity, out, inner, (*loops, id(eqn)))
        elif name == "cond":
            for b in eqn.params["branches"]:
                yield from _sites(b.jaxpr, activity, out, same(eqn.invars[1:], b.jaxpr.invars), loops)


def _apart(a: Any, b: Any) -> bool:
    """Whether two stores never write one element: along some dimension both stand at known places that differ."""
    for da, va, db, vb in zip(a.params["dims"], a.invars[1:], b.params["dims"], b.invars[1:]):
        if not hasattr(va, "val") or not hasattr(vb, "val"):
            continue
        x, y = _known(da, va), _known(db, vb)
        if x and y and (x.stop <= y.start or y.stop <= x.start):
            return True
    return False


def _known(d: Any, v: Any) -> range | None:
    k = int(v.val)
    match d:
        case At():
            return range(k, k + 1)
        case Span():
            return range(k, k + (d.size - 1) * d.stride + 1)
        case Tile():
            return range(k * d.step, k * d.step + d.size)
    return None
