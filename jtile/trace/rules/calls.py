"""Calls: all are inlined."""

from __future__ import annotations

from jtile.trace.lower import Lowering, rule


def _takes_keys(fn):
    fn.takes_keys = True
    return fn


@rule("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "custom_lin", "run_state_call")
@_takes_keys
def _(c: Lowering, *args, **params):
    return c.closed(params.get("jaxpr") or params["call_jaxpr"], args)


@rule("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
@_takes_keys
def _(c: Lowering, *args, **params):
    closed = next(params[k] for k in ("call_jaxpr", "fun_jaxpr", "jaxpr") if k in params)
    return c.closed(closed, args)


@rule("debug_callback", "debug_print")
def _(c: Lowering, *_, **__):
    raise c.unsupported("host callbacks do not run inside a kernel; use jt.print")


@rule("pure_callback", "io_callback", "ffi_call", "jtile_call", "pallas_call", "custom_partitioning")
def _(c: Lowering, *_, **__):
    raise c.unsupported("a kernel cannot call out to the host or to another kernel; do it outside, in the function that calls this one")


@rule("psum", "psum_invariant", "all_gather", "all_to_all", "ppermute", "axis_index", "pmax", "pmin", "reduce_scatter")
def _(c: Lowering, *_, **__):
    raise c.unsupported("collectives do not run inside a kernel; put them into the function around it")


@rule("fft", "cholesky", "eig", "eigh", "svd", "qr", "lu", "triangular_solve", "householder_product", "schur", "tridiagonal_solve")
def _(c: Lowering, *_, **__):
    raise c.unsupported("linear algebra routines are not tile functions; call them outside of the kernel")
