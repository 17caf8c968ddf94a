"""The walk over a jaxpr with complex numbers; calls, loops, branches and functions with a derivative of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jtile._compat import make_jaxpr
from jtile._errors import TransformError, UnsupportedError
from jtile._parts import COMPLEX, PARTS, is_complex, part_dtype
from jtile.language._equations import bind, opened, place, ref_aval, scan_counts
from jtile.language._place import place_of
from jtile.trace import lanes
from jtile.trace.lower import is_jax_function
from jtile.trace.rules.calls import INLINED
from jtile.trace.rules.control import counting


@dataclasses.dataclass(frozen=True)
class Pair:
    """A complex tile, or memory of complex numbers that the body made itself: two of real parts.

    Attributes:
      re, im: the parts.
      real: the imaginary part is known to be zero; a product with it need not multiply by it.
    """

    re: Any
    im: Any
    real: bool = False


@dataclasses.dataclass(frozen=True)
class Stored:
    """A Ref of the kernel that holds complex numbers: one of float32 with a last axis of 2."""

    ref: Any


Value = Any  # what a variable stands for: an array, a Ref, a Pair, Stored
Rule = Callable[["Walk", Any, list[Value]], Sequence[Value]]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for JAX primitives with complex operands or results: `fn(walk, eqn, args)` gives the results."""

    def register(fn: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, fn))
        return fn

    return register


def without_complex(closed: Any) -> Any:
    """The jaxpr of a kernel body over Refs, whose Refs and tiles of complex numbers are of real ones; itself where it
    has none.

    Raises:
      UnsupportedError: a function that is not defined on complex numbers, or complex128; with the source line.
    """
    jaxpr = closed.jaxpr
    if not _mentions(jaxpr):
        return closed
    avals = [v.aval for v in jaxpr.invars]

    def body(*refs: Any) -> None:
        args = [Stored(r) if is_complex(a.dtype) else r for r, a in zip(refs, avals, strict=True)]
        Walk().closed(closed, args)

    def stored(a: Any) -> Any:
        if not is_complex(a.dtype):
            return ref_aval(a.shape, a.dtype)
        if a.dtype != COMPLEX:
            raise UnsupportedError(
                f"dtype {a.dtype.name} is not one of the language's: its complex one is {COMPLEX.name}"
            )
        return ref_aval((*a.shape, PARTS), part_dtype(a.dtype))

    return make_jaxpr(body)(*map(stored, avals))


def _mentions(jaxpr: Any) -> bool:
    return any(map(_complex, [*jaxpr.constvars, *jaxpr.invars])) or any(map(_touches, jaxpr.eqns))


def _touches(eqn: Any) -> bool:
    """Whether an equation, or one inside of it, has to do with complex numbers."""
    inner = jax.extend.core.jaxprs_in_params(eqn.params)
    return any(map(_complex, [*eqn.invars, *eqn.outvars])) or any(map(_mentions, inner))


def _complex(v: Any) -> bool:
    return is_complex(getattr(v.aval, "dtype", None))


# -- pairs beside other values -----------------------------------------------------------------------------------------


def flat(values: Iterable[Value]) -> list[Any]:
    """Values with the parts of pairs side by side."""
    return [x for v in values for x in ((v.re, v.im) if isinstance(v, Pair) else (v,))]


def unflat(variables: Iterable[Any], values: Iterable[Any]) -> list[Value]:
    """The inverse of `flat` for the values of variables."""
    it = iter(values)
    return [Pair(next(it), next(it)) if _complex(v) else next(it) for v in variables]


def constant(value: Any, dtype: Any) -> Value:
    """The value of a literal or a captured array."""
    if not is_complex(dtype):
        return value
    x, part = np.asarray(value), part_dtype(dtype)
    re, im = (np.ascontiguousarray(p, part).reshape(x.shape) for p in (x.real, x.imag))
    return Pair(re, im, real=not im.any())


class Walk:
    """Evaluates a jaxpr on pairs under the trace of the kernel.

    `plain` says that every function is differentiated as it is computed. Else it has the derivative that JAX gives the
    complex function: it is shorter, and defined where the computation divides by zero.
    """

    def __init__(self, plain: bool = False, pin: Any = None):
        self.plain, self.pin = plain, pin
        self.made: dict[Any, Any] = {}  # variable -> the equation that defines it, and the values beside

    def closed(self, closed: Any, args: Sequence[Value]) -> list[Value]:
        jaxpr, consts = opened(closed)
        return self.run(jaxpr, [constant(x, v.aval.dtype) for x, v in zip(consts, jaxpr.constvars)], args)

    def run(self, jaxpr: Any, consts: Sequence[Value], args: Sequence[Value]) -> list[Value]:
        env: dict[Any, Value] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        read = lambda v: constant(v.val, v.aval.dtype) if hasattr(v, "val") else env[v]
        for eqn in jaxpr.eqns:
            self.made |= dict.fromkeys(eqn.outvars, (eqn, env))
            with place(eqn, self.pin):
                env.update(zip(eqn.outvars, self.equation(eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, args: list[Value]) -> Sequence[Value]:
        if not _touches(eqn):
            return bind(eqn, args)
        name = eqn.primitive.name
        for v in eqn.outvars:
            if getattr(v.aval, "dtype", None) == np.complex128 and not v.aval.weak_type:
                raise refuse(self, eqn, "the language has no complex128; compute in complex64: x.astype(jnp.complex64)")
        if name not in RULES:
            raise refuse(
                self, eqn,
                "complex numbers have no such function in a kernel; compute it of jnp.real(x), jnp.imag(x) or "
                "jnp.abs(x), or outside of the kernel",
            )  # fmt: skip
        return RULES[name](self, eqn, args)

    def test(self, variable: Any, index: Any) -> Any:
        """The bool that `lax.cond` made the index of a branch of, or None."""
        if variable.aval.dtype == np.bool_:
            return index
        eqn, env = self.made.get(variable, (None, {})) if not hasattr(variable, "val") else (None, {})
        if eqn is None or eqn.primitive.name != "convert_element_type" or eqn.invars[0].aval.dtype != np.bool_:
            return None
        x = eqn.invars[0]
        return None if hasattr(x, "val") else env[x]

    def inner(self, closed: Any, eqn: Any) -> Walk:
        """The walk through what is called: JAX traces its own functions (`jnp.where`) once, and keeps the lines of that
        first call, so that the line of this call counts instead."""
        own = self.pin is None and is_jax_function(getattr(closed, "jaxpr", closed))
        out = Walk(self.plain, eqn.source_info if own else self.pin)
        out.made = self.made
        return out


def refuse(walk: Walk, eqn: Any, why: str) -> UnsupportedError:
    return UnsupportedError(f"{eqn.primitive.name}: {why}", place_of(walk.pin or eqn.source_info))


def bind_parts(eqn: Any, args: Sequence[Any], k: int) -> list[Any]:
    """The results of an equation for part k of its complex operands."""
    params = {
        n: part_dtype(v) if isinstance(v, np.dtype) and is_complex(v) else v for n, v in _with_fill(eqn, k).items()
    }
    out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _with_fill(eqn: Any, k: int) -> dict[str, Any]:
    """The parameters of an equation; what a gather gives beside its operand is a number with two parts, too."""
    params = dict(eqn.params)
    if eqn.primitive.name == "gather":
        value = np.complex64(np.nan if params["fill_value"] is None else params["fill_value"])
        params["fill_value"] = float((value.real, value.imag)[k])
    return params


# -- calls ------------------------------------------------------------------------------------------------------------


@rule(*INLINED)
def _(walk: Walk, eqn: Any, args: list[Value]) -> Sequence[Value]:
    closed = next(eqn.params[k] for k in ("jaxpr", "call_jaxpr", "call") if k in eqn.params)
    return walk.inner(closed, eqn).closed(closed, args)


@rule("custom_jvp_call")
def _(walk: Walk, eqn: Any, args: list[Value]) -> Sequence[Value]:
    inner = walk.inner(eqn.params["call_jaxpr"], eqn)
    return as_in_jax(walk, eqn, lambda values: inner.closed(eqn.params["call_jaxpr"], values), args)


@rule("custom_vjp_call", "custom_vjp_call_jaxpr")
def _(walk: Walk, eqn: Any, args: list[Value]) -> Sequence[Value]:
    closed = next(eqn.params[k] for k in ("call_jaxpr", "fun_jaxpr", "jaxpr") if k in eqn.params)

    def run(*values: Any) -> tuple[Any, ...]:
        return tuple(flat(walk.inner(closed, eqn).closed(closed, unflat(eqn.invars, values))))

    def forward(*values: Any) -> Any:
        raise TransformError(
            "a derivative is asked for of a function with jax.custom_vjp that takes or gives complex numbers: give it "
            "its rule with jax.custom_jvp, or let it take and give real and imaginary parts",
            place_of(walk.pin or eqn.source_info),
        )

    fn = jax.custom_vjp(run)
    fn.defvjp(forward, lambda residuals, cts: cts)
    return unflat(eqn.outvars, fn(*flat(args)))


def as_in_jax(
    walk: Walk, eqn: Any, compute: Callable[[list[Value]], Sequence[Value]], args: list[Value]
) -> Sequence[Value]:
    """The results `compute(args)` of an equation, with the derivative that JAX has for it."""
    if walk.plain:
        return compute(args)
    moving = [jax.dtypes.issubdtype(v.aval.dtype, np.inexact) for v in eqn.invars]

    def run(*values: Any) -> tuple[Any, ...]:
        return tuple(flat(compute(unflat(eqn.invars, values))))

    def tangents(primals: Sequence[Any], dots: Sequence[Any]) -> Any:
        given = iter(dots)
        dots = [next(given) if m else np.zeros(v.aval.shape, jax.dtypes.float0) for v, m in zip(eqn.invars, moving)]
        return jax.jvp(lambda *xs: tuple(bind(eqn, xs)), tuple(primals), tuple(dots))

    def derivative(primals: Sequence[Any], dots: Sequence[Any]) -> Any:
        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        closed = make_jaxpr(tangents)(avals, [a for a, m in zip(avals, moving) if m])
        pairs = unflat(eqn.invars, primals), unflat(eqn.invars, dots)
        operands = [*pairs[0], *[d for d, m in zip(pairs[1], moving) if m]]
        found = Walk(plain=True).closed(closed, operands)
        n = len(eqn.outvars)
        return tuple(flat(found[:n])), tuple(flat(found[n:]))

    run.__name__ = run.__qualname__ = eqn.primitive.name
    fn = jax.custom_jvp(run)
    fn.defjvp(derivative)
    return unflat(eqn.outvars, fn(*flat(args)))


# -- loops and branches -----------------------------------------------------------------------------------------------


@rule("scan")
def _(walk: Walk, eqn: Any, args: list[Value]) -> Sequence[Value]:
    closed = eqn.params["jaxpr"]
    n_consts, n_carry = scan_counts(eqn.params)
    consts, init, xs = args[:n_consts], args[n_consts : n_consts + n_carry], args[n_consts + n_carry :]
    variables = opened(closed)[0].invars[n_consts:]

    def body(carry: Any, rows: Any) -> Any:
        outs = walk.closed(closed, [*consts, *unflat(variables, [*carry, *rows])])
        return tuple(flat(outs[:n_carry])), tuple(flat(outs[n_carry:]))

    params = {p: eqn.params[p] for p in ("length", "reverse", "unroll")}
    last, ys = lax.scan(body, tuple(flat(init)), tuple(flat(xs)), **params)
    return unflat(eqn.outvars, [*last, *ys])


@rule("while")
def _(walk: Walk, eqn: Any, args: list[Value]) -> Sequence[Value]:
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    cond_consts, body_consts, init = args[:n_cond], args[n_cond : n_cond + n_body], args[n_cond + n_body :]
    variables = eqn.outvars
    go_on = lambda carry: walk.closed(cond, [*cond_consts, *unflat(variables, carry)])[0]
    step = lambda carry: flat(walk.closed(body, [*body_consts, *unflat(variables, carry)]))
    inner = opened(cond)[0]
    if inner.outvars[0].aval.shape:  # the condition is a tile: under a vmap in the body, each lane has its own rounds
        found = counting(inner, n_cond, opened(body)[0], n_body, cond_consts, init)
        if found is not None:
            found = (len(flat(init[: found[0]])), *found[1:])
        return unflat(variables, lanes.run(go_on, step, flat(init), found))
    last = lax.while_loop(go_on, lambda carry: tuple(step(carry)), tuple(flat(init)))
    return unflat(variables, last)


@rule("cond")
def _(walk: Walk, eqn: Any, args: list[Value]) -> Sequence[Value]:
    index, *operands = args
    branches = [lambda b=b: tuple(flat(walk.closed(b, operands))) for b in eqn.params["branches"]]
    test = walk.test(eqn.invars[0], index) if len(branches) == 2 else None
    if test is not None:
        return unflat(eqn.outvars, lax.cond(test, branches[1], branches[0]))
    return unflat(eqn.outvars, lax.switch(index, branches))
