"""Arithmetic of complex numbers as pairs: products, quotients, sizes, comparisons, matrix products, reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import partial_eval

from jtile._compat import make_jaxpr
from jtile.language import compute
from jtile.trace.pairs.walk import Pair, Value, Walk, as_in_jax, bind_parts, constant, flat, refuse, rule, unflat


def computed(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of pairs and of an equation's parameters, `fn(*pairs, **params)`, under the names of JAX's
    primitives, whose derivatives it has."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        @rule(*names)
        def _(walk: Walk, eqn: Any, args: list[Value]) -> Sequence[Value]:
            return as_in_jax(walk, eqn, lambda values: [fn(*values, **eqn.params)], args)

        return fn

    return register


def plainly(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as `computed` does, but one that is differentiated as it stands."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        rule(*names)(lambda walk, eqn, args: [fn(*args, **eqn.params)])
        return fn

    return register


# -- parts -------------------------------------------------------------------------------------------------------------


@plainly("complex")
def _(re, im, **_):
    return Pair(re, im)


@plainly("real")
def _(z, **_):
    return z.re


@plainly("imag")
def _(z, **_):
    return z.im


@plainly("conj")
def _(z, **_):
    return Pair(z.re, -z.im, z.real) if isinstance(z, Pair) else Pair(z, jnp.zeros_like(z), real=True)


# -- arithmetic --------------------------------------------------------------------------------------------------------


@plainly("mul")
def mul(a: Pair, b: Pair, **_) -> Pair:
    """The product; a number known to be real multiplies both parts of the other, so that infinities make no NaN."""
    if a.real:
        return Pair(a.re * b.re, a.re * b.im, b.real)
    if b.real:
        return Pair(a.re * b.re, a.im * b.re)
    return Pair(a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re)


def scaled(z: Pair, by: Any) -> Pair:
    """The product with a real number."""
    return Pair(z.re * by, z.im * by)


def plus(a: Pair, b: Pair) -> Pair:
    return Pair(a.re + b.re, a.im + b.im)


@computed("div")
def div(a: Pair, b: Pair, **_) -> Pair:
    """The quotient, by the divisor's larger part, so that no square overflows (Smith, Algorithm 116, CACM 1962)."""
    if b.real:
        return Pair(a.re / b.re, a.im / b.re)
    swap = jnp.abs(b.re) < jnp.abs(b.im)
    large, small = jnp.where(swap, b.im, b.re), jnp.where(swap, b.re, b.im)
    ratio = jnp.where(small == 0, small, small / jnp.where(large == 0, jnp.ones_like(large), large))
    bottom = large + small * ratio
    first, second = jnp.where(swap, a.im, a.re), jnp.where(swap, a.re, a.im)
    im = jnp.where(swap, a.im * ratio - a.re, a.im - a.re * ratio)
    return Pair((first + second * ratio) / bottom, im / bottom)


@plainly("square")
def square(z: Pair, **_) -> Pair:
    return Pair((z.re - z.im) * (z.re + z.im), 2 * (z.re * z.im))


@plainly("one_minus_square")
def _(z: Pair, **_) -> Pair:
    found = square(z)
    return Pair(1 - found.re, -found.im)


def one_like(z: Pair) -> Pair:
    return Pair(jnp.ones_like(z.re), jnp.zeros_like(z.im), real=True)


@computed("integer_pow")
def integer_pow(z: Pair, *, y: int, **_) -> Pair:
    """A power, by squaring; a negative one is the reciprocal."""
    if y == 0:
        return one_like(z)
    out, power, n = None, z, abs(y)
    while n:
        if n & 1:
            out = power if out is None else mul(out, power)
        n >>= 1
        power = square(power) if n else power
    assert out is not None
    return div(one_like(out), out) if y < 0 else out


@computed("abs")
def absolute(z: Pair, **_) -> Any:
    """The absolute value, scaled by the larger part, so that no square of it overflows."""
    a, b = jnp.abs(z.re), jnp.abs(z.im)
    large, small = lax.max(a, b), lax.min(a, b)
    ratio = small / jnp.where(large == 0, jnp.ones_like(large), large)
    found = large * jnp.sqrt(1 + ratio * ratio)
    return jnp.where(large == jnp.inf, large, found)


@computed("sign")
def _(z: Pair, **_) -> Pair:
    size = absolute(z)
    return scaled(z, 1 / jnp.where(size == 0, jnp.ones_like(size), size))


@plainly("eq")
def _(a: Pair, b: Pair, **_):
    return (a.re == b.re) & (a.im == b.im)


@plainly("ne")
def _(a: Pair, b: Pair, **_):
    return (a.re != b.re) | (a.im != b.im)


# -- products of matrices, convolutions --------------------------------------------------------------------------------


@rule("dot_general", "conv_general_dilated")
def _(walk: Walk, eqn: Any, args: list[Value]) -> Sequence[Value]:
    """A bilinear function: four products of parts, fewer where an operand is known to be real."""
    a, b = (x if isinstance(x, Pair) else Pair(x, None, real=True) for x in args)
    times = lambda x, y: bind_parts(eqn, [x, y], 0)[0]
    if a.real or b.real:
        re = times(a.re, b.re)
        if a.real and b.real:
            return [Pair(re, jnp.zeros_like(re), real=True)]
        return [Pair(re, times(a.re, b.im) if a.real else times(a.im, b.re))]
    return [Pair(times(a.re, b.re) - times(a.im, b.im), times(a.re, b.im) + times(a.im, b.re))]


@rule("jtile_dot")
def _(walk: Walk, eqn: Any, args: list[Value]) -> Sequence[Value]:
    """A chain of products that accumulate."""
    a, b, *acc = args
    times = lambda x, y, *start: bind_parts(eqn, [x, y, *start], 0)[0]
    re = times(a.re, b.re, *[x.re for x in acc])
    im = times(a.re, b.im, *[x.im for x in acc])
    if a.real:
        return [Pair(re, im)]
    return [Pair(times(-a.im, b.im, re), times(a.im, b.re, im))]


# -- reductions --------------------------------------------------------------------------------------------------------


def _of_scalars(walk: Walk, jaxpr: Any, variables: Sequence[Any]) -> Any:
    """The function of a user's reduction, on the parts of scalars."""

    def run(*values: Any) -> list[Any]:
        return flat(Walk(walk.plain, walk.pin).run(jaxpr, [], unflat(jaxpr.invars, values)))

    parts = [x for v in variables for x in flat([constant(np.zeros((), v.aval.dtype), v.aval.dtype)])]
    closed = make_jaxpr(run)(*[jax.ShapeDtypeStruct((), x.dtype) for x in parts])
    return partial_eval.convert_constvars_jaxpr(closed.jaxpr), closed.consts


@rule("jtile_reduce", "jtile_associative_scan")
def _(walk: Walk, eqn: Any, args: list[Value]) -> Sequence[Value]:
    params = eqn.params
    jaxpr, more = _of_scalars(walk, params["jaxpr"], params["jaxpr"].invars)
    own = flat(args[: params["consts"]])
    rest = {k: v for k, v in params.items() if k not in ("jaxpr", "consts")}
    operands = [*more, *own, *flat(args[params["consts"] :])]
    return unflat(eqn.outvars, eqn.primitive.bind(*operands, jaxpr=jaxpr, consts=len(more) + len(own), **rest))


def _product(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    out = mul(Pair(*a), Pair(*b))
    return out.re, out.im


@plainly("reduce_prod")
def _(z: Pair, *, axes, **_):
    return Pair(*compute.reduce((z.re, z.im), tuple(axes), _product, (1, 0))) if axes else z


@plainly("cumprod")
def _(z: Pair, *, axis, reverse, **_):
    return Pair(*compute.associative_scan(_product, (z.re, z.im), axis, reverse))


ORDERED = (
    "max", "min", "clamp", "lt", "le", "gt", "ge", "sort", "top_k", "argmax", "argmin", "reduce_max", "reduce_min",
    "cummax", "cummin", "cumlogsumexp", "scatter-max", "scatter-min", "scatter_max", "scatter_min",
)  # fmt: skip


@rule(*ORDERED)
def _(walk: Walk, eqn: Any, args: list[Value]) -> Sequence[Value]:
    raise refuse(walk, eqn, "complex numbers have no order; compare jnp.abs(x), or jnp.real(x)")
