"""`jax.vmap` inside of a kernel, of branches and loops that load and store and whose condition differs by lane.

JAX runs both branches for all lanes and selects values, and goes on with a loop while any lane does. What touches
memory needs more: here it gets the condition of its lane as a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import batching
from jax.ref import AbstractRef

from jtile import _compat
from jtile._errors import TransformError
from jtile.language import _primitives as prims
from jtile.language._equations import argument, bind, opened, place, scan_counts
from jtile.language._place import place_of

_CALLS = ("jaxpr", "call_jaxpr", "call")  # the parameters in which the equation of a call keeps its jaxpr


def register() -> None:
    """Put our rules in front of JAX's, which stay in charge of what touches no memory."""
    for p, batch in ((lax.cond_p, _cond_batch), (lax.while_p, _while_batch)):
        batching.fancy_primitive_batchers[p] = batch(batching.fancy_primitive_batchers[p])


def touches(effects: Any) -> bool:
    """Whether something with these effects loads, stores, prints or asserts."""
    return any(isinstance(e, prims.TileEffect) for e in effects)


# -- a jaxpr under a condition -------------------------------------------------------------------------------------


def guarded(closed: Any, when: Any, args: Sequence[Any], *, silent: bool = False) -> list[Any]:
    """The results of a jaxpr whose loads, stores, prints and asserts happen only where `when`, a bool scalar, is true;
    where it is not, the results mean nothing.

    Args:
      silent: whether prints in the jaxpr are left out.
    Raises:
      TransformError: something in it cannot depend on a condition that differs by lane.
    """
    jaxpr, consts = opened(closed)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    read = lambda v: v.val if hasattr(v, "val") else env[v]
    for eqn in jaxpr.eqns:
        with place(eqn):
            outs = _equation(eqn, when, [read(v) for v in eqn.invars], silent)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn: Any, when: Any, args: list[Any], silent: bool) -> list[Any]:
    name = eqn.primitive.name
    if name in _RULES and touches(eqn.effects):
        return _RULES[name](eqn, when, args, silent)
    if touches(eqn.effects) and not name.startswith("custom_") and any(k in eqn.params for k in _CALLS):
        return guarded(next(eqn.params[k] for k in _CALLS if k in eqn.params), when, args, silent=silent)
    if touches(eqn.effects) or name in ("get", "swap", "addupdate"):
        what = name.removeprefix("jtile_")
        raise TransformError(
            f"{what} under a condition or in a loop that differs by lane of jax.vmap, inside of a kernel: there, only "
            "loads, stores and atomics of the kernel's own Refs can stand; move it out, or use jt.alloc for memory",
            place_of(eqn.source_info),
        )
    return bind(eqn, args)


def _access(eqn: Any, when: Any, args: list[Any], silent: bool) -> list[Any]:
    """A load, a store, an atomic: the condition joins its mask."""
    del silent
    shape = eqn.invars[1 + len(eqn.params["dims"])].aval.shape if not eqn.outvars else eqn.outvars[0].aval.shape
    mask = jnp.broadcast_to(when, shape)
    if eqn.params["masked"]:
        mask = lax.bitwise_and(args.pop(), mask)
    out = eqn.primitive.bind(*args, mask, **{**eqn.params, "masked": True})
    return list(out) if eqn.primitive.multiple_results else [out]


def _print(eqn: Any, when: Any, args: list[Any], silent: bool) -> list[Any]:
    """One line shows the whole batch, so it is printed where the condition holds in any lane."""
    if not silent:
        lax.cond(prims.any_lane_p.bind(when), lambda: bind(eqn, args), list)
    return []


def _assert(eqn: Any, when: Any, args: list[Any], silent: bool) -> list[Any]:
    return [] if silent else bind(eqn, [lax.bitwise_or(args[0], lax.bitwise_not(when))])


def _scan(eqn: Any, when: Any, args: list[Any], silent: bool) -> list[Any]:
    n_consts, n_carry = scan_counts(eqn.params)
    consts, init, xs = args[:n_consts], args[n_consts : n_consts + n_carry], args[n_consts + n_carry :]

    def body(carry, rows):
        outs = guarded(eqn.params["jaxpr"], when, [*consts, *carry, *rows], silent=silent)
        return tuple(outs[:n_carry]), tuple(outs[n_carry:])

    params = {p: eqn.params[p] for p in ("length", "reverse", "unroll")}
    last, ys = lax.scan(body, tuple(init), tuple(xs), **params)
    return [*last, *ys]


def _while(eqn: Any, when: Any, args: list[Any], silent: bool) -> list[Any]:
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts = args[:n_cond], args[n_cond : n_cond + n_body]

    def goes_on(carry):
        (out,) = guarded(eqn.params["cond_jaxpr"], when, [*cond_consts, *carry], silent=silent)
        return lax.bitwise_and(when, out)

    def body(carry):
        return tuple(guarded(eqn.params["body_jaxpr"], when, [*body_consts, *carry], silent=silent))

    return list(lax.while_loop(goes_on, body, tuple(args[n_cond + n_body :])))


def _cond(eqn: Any, when: Any, args: list[Any], silent: bool) -> list[Any]:
    index, *operands = args
    branches = [lambda b=b: tuple(guarded(b, when, operands, silent=silent)) for b in eqn.params["branches"]]
    if index.dtype == np.bool_:
        return list(lax.cond(index, branches[1], branches[0]))
    return list(lax.switch(index, branches))


_RULES: dict[str, Callable[..., list[Any]]] = {
    "jtile_load": _access,
    "jtile_store": _access,
    "jtile_atomic": _access,
    "jtile_print": _print,
    "jtile_assert_": _assert,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}


# -- batching ------------------------------------------------------------------------------------------------------


def _cond_batch(jax_rule: Callable[..., Any]) -> Callable[..., Any]:
    def rule(axis, args, dims, /, *, branches, **params):
        if dims[0] is None or "branches_platforms" in params or not any(touches(b.effects) for b in branches):
            return jax_rule(axis, args, dims, branches=branches, **params)
        moving = [k for k, d in enumerate(dims) if d is not None]

        def lane(*some):
            index, *operands = _put(args, moving, some)
            outs = []
            for k, b in enumerate(branches):
                chosen = index if index.dtype == np.bool_ else lax.eq(index, index.dtype.type(k))
                chosen = lax.bitwise_not(chosen) if index.dtype == np.bool_ and k == 0 else chosen
                outs.append(guarded(b, chosen, [_stopped(chosen, x) for x in operands]))
            return tuple(lax.select_n(index, *cases) for cases in zip(*outs, strict=True))

        axes = tuple(dims[k] for k in moving)
        outs = jax.vmap(lane, in_axes=axes, axis_size=axis.size, axis_name=axis.name)(*[args[k] for k in moving])
        return list(outs), [0] * len(outs)

    return rule


def _stopped(when: Any, x: Any) -> Any:
    """An operand of what runs under a condition. No derivative comes from lanes where it does not hold: theirs may be
    NaN."""
    if isinstance(jax.typeof(x), AbstractRef) or not jnp.issubdtype(x.dtype, np.inexact):
        return x
    return lax.select_n(when, lax.stop_gradient(x), x)


def _put(args: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """`args` with `values` at `places`."""
    at = dict(zip(places, values, strict=True))
    return [at.get(k, x) for k, x in enumerate(args)]


def _while_batch(jax_rule: Callable[..., Any]) -> Callable[..., Any]:
    def rule(axis, args, dims, /, *, cond_nconsts, cond_jaxpr, body_nconsts, body_jaxpr):
        n, own = cond_nconsts, dict(cond_nconsts=cond_nconsts, cond_jaxpr=cond_jaxpr)
        effects = [*cond_jaxpr.effects, *body_jaxpr.effects]
        batched = [d is not None for d in dims]
        if not _differs(axis, batched, cond_jaxpr, n, body_jaxpr, body_nconsts):
            return jax_rule(axis, args, dims, body_nconsts=body_nconsts, body_jaxpr=body_jaxpr, **own)
        if not touches(effects):
            return _carried(jax_rule, axis, args, dims, cond_jaxpr, n, body_jaxpr, body_nconsts)
        # JAX keeps the carries of lanes that have ended; for the memory that a round touches, it computes the
        # condition once more.
        jaxpr = opened(body_jaxpr)[0]
        cond_vars = opened(cond_jaxpr)[0].invars[:n]

        def body(*values):
            cond_consts, rest = values[:n], values[n:]
            (goes_on,) = guarded(cond_jaxpr, np.bool_(True), [*cond_consts, *rest[body_nconsts:]], silent=True)
            return tuple(guarded(body_jaxpr, goes_on, [_stopped(goes_on, x) for x in rest]))

        closed = _compat.make_jaxpr(body)(*[argument(v.aval) for v in (*cond_vars, *jaxpr.invars)])
        args, dims = [*args[:n], *args], [*dims[:n], *dims]
        return jax_rule(axis, args, dims, body_nconsts=n + body_nconsts, body_jaxpr=closed, **own)

    return rule


def _carried(jax_rule: Any, axis: Any, args: Any, dims: Any, cond: Any, n_cond: int, body: Any, n_body: int) -> Any:
    """JAX's rule for a loop of values whose rounds differ by lane, with all of the body that differs by lane among the
    carries: reverse mode gives other values of them to lanes that have ended, see `jtile.trace.lanes`."""
    moved = [k for k in range(n_cond, n_cond + n_body) if dims[k] is not None]
    if not moved:
        return jax_rule(axis, args, dims, cond_nconsts=n_cond, cond_jaxpr=cond, body_nconsts=n_body, body_jaxpr=body)
    kept = [k for k in range(n_cond, n_cond + n_body) if dims[k] is None]
    carry = range(n_cond + n_body, len(args))
    avals = [argument(v.aval) for v in (*opened(cond)[0].invars[:n_cond], *opened(body)[0].invars)]

    def test(*values: Any) -> Any:
        return jax.core.eval_jaxpr(*opened(cond), *values[:n_cond], *values[n_cond + len(moved) :])

    def step(*values: Any) -> Any:
        at = dict(zip((*kept, *moved, *carry), values, strict=True))
        outs = jax.core.eval_jaxpr(*opened(body), *[at[k] for k in range(n_cond, len(args))])
        return (*[at[k] for k in moved], *outs)

    taken = lambda places: [avals[k] for k in places]
    outs, out_dims = jax_rule(
        axis,
        [args[k] for k in (*range(n_cond), *kept, *moved, *carry)],
        [dims[k] for k in (*range(n_cond), *kept, *moved, *carry)],
        cond_nconsts=n_cond,
        cond_jaxpr=_compat.make_jaxpr(test)(*taken((*range(n_cond), *moved, *carry))),
        body_nconsts=len(kept),
        body_jaxpr=_compat.make_jaxpr(step)(*taken((*kept, *moved, *carry))),
    )
    return outs[len(moved) :], out_dims[len(moved) :]


def _differs(axis: Any, batched: list[bool], cond: Any, n_cond: int, body: Any, n_body: int) -> bool:
    """Whether the condition of a loop differs by lane: as JAX finds it, by the carries that come to differ."""
    consts, carry = batched[n_cond : n_cond + n_body], batched[n_cond + n_body :]
    while True:
        _, after = _compat.batch_jaxpr(body, axis, [*consts, *carry], carry)
        if list(after) == carry:
            break
        carry = [a or b for a, b in zip(carry, after, strict=True)]
    _, (differs,) = _compat.batch_jaxpr(cond, axis, [*batched[:n_cond], *carry], False)
    return differs
