"""Calls of functions, all of which are inlined."""

from __future__ import annotations

import jax

from jtile._errors import TransformError
from jtile.trace.lower import Lowering, rule


def _takes_keys(fn):
    fn.takes_keys = True
    return fn


# primitives that say "run this jaxpr"; its invars are the operands
INLINED = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "checkpoint",
    "remat",
    "remat2",
    "custom_vmap_call",
    "composite",
    "eval_jaxpr",
    "xla_metadata_call",
    "compute_on",
    "call",
)


@rule(*INLINED)
@_takes_keys
def _(c: Lowering, *args, **params):
    return c.called(next(params[k] for k in ("jaxpr", "call_jaxpr", "call") if k in params), args)


@rule("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
@_takes_keys
def _(c: Lowering, *args, **params):
    closed = next(params[k] for k in ("call_jaxpr", "fun_jaxpr", "jaxpr") if k in params)
    return c.called(closed, args)


@rule("custom_lin")
def _(c: Lowering, *_, **__):
    raise TransformError(
        "forward mode (jax.jvp, jax.linearize, jax.hessian) goes through a function with jax.custom_vjp here, whose "
        "rule is for reverse mode: take jax.grad or jax.vjp, or give the function a rule with jax.custom_jvp",
        c.place,
    )


@rule("call_hi_primitive")
def _(c: Lowering, *args, _prim):
    """Primitives that JAX itself expresses by others."""
    return c.call(lambda *xs: jax.tree.leaves(_prim.expand(*jax.tree.unflatten(_prim.in_tree, xs))), *args)


def own_platform(platforms) -> int | None:
    """Which of several versions of a code a kernel takes. It runs on every target with the same bits, so that is the
    one that is no platform's own."""
    places = [k for k, p in enumerate(platforms) if p is None] + [
        k for k, p in enumerate(platforms) if p and "cpu" in p
    ]
    return places[0] if places else None


@rule("platform_index")
def _(c: Lowering, *, platforms):
    place = own_platform(platforms)
    if place is None:
        raise c.unsupported(f"code that exists for {platforms} only")
    return c.b.full(place, (), "int32")


@rule("debug_callback", "debug_print")
def _(c: Lowering, *_, **__):
    raise c.unsupported("host callbacks do not run inside a kernel; use jt.print")


@rule("pure_callback", "io_callback", "ffi_call", "jtile_call", "pallas_call", "custom_partitioning")
def _(c: Lowering, *_, **__):
    raise c.unsupported(
        "a kernel cannot call out to the host or to another kernel; do it outside, in the function that calls this one"
    )


@rule("psum", "psum_invariant", "all_gather", "all_to_all", "ppermute", "axis_index", "pmax", "pmin", "reduce_scatter")
def _(c: Lowering, *_, **__):
    raise c.unsupported("collectives do not run inside a kernel; put them into the function around it")


@rule(
    "fft",
    "cholesky",
    "eig",
    "eigh",
    "svd",
    "qr",
    "lu",
    "triangular_solve",
    "householder_product",
    "schur",
    "tridiagonal_solve",
)
def _(c: Lowering, *_, **__):
    raise c.unsupported("linear algebra routines are not tile functions; call them outside of the kernel")
