"""The kernel library, with its gradients, compiles for GPUs of both vendors."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import zoo_cases
from jax.extend import core
from library_cases import CASES, LibraryCase
from machines import card

import jtile as jt
from jtile import ir, passes
from jtile.lowering.triton.compile import compile_kernel
from jtile.primitive.lowering import pieces_of

ARCHS = ("sm_90", "gfx942")
OTHERS = ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120", "gfx90a", "gfx950", "gfx1100", "gfx1201")
ALL = CASES | zoo_cases.CASES
JAXPRS = (core.Jaxpr, core.ClosedJaxpr)


def programs(jaxpr: core.Jaxpr) -> Iterator[Any]:
    """The programs of all kernels of a jaxpr."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "jtile_call":
            yield eqn.params["program"]
            continue
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: isinstance(p, JAXPRS)):
            if isinstance(inner, JAXPRS):
                yield from programs(getattr(inner, "jaxpr", inner))


def gradients(case: LibraryCase, *args):
    """The gradients of an op by its float arguments, or None where it gives integers."""
    of = [k for k, a in enumerate(args) if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jnp.floating)]

    def total(*moved):
        out = case.op(*(moved[of.index(k)] if k in of else a for k, a in enumerate(args)))
        return sum(x.sum() for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating))

    floats = any(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(jax.eval_shape(case.op, *args)))
    return jax.grad(total, tuple(range(len(of))))(*(args[k] for k in of)) if floats else None


def kernels(fn, args, arch: str) -> list[ir.Kernel]:
    """The kernels of a function as it is traced for an architecture, after the passes."""
    with jt.config(arch=arch):
        of = dict.fromkeys(programs(jax.make_jaxpr(lambda *args: fn(*args))(*args).jaxpr))
        return [passes.run_pipeline(k, passes.TILE) for p in of for k in pieces_of(p).kernels]


@pytest.mark.parametrize("name", ALL)
def test_one_architecture(name):
    """The op itself, for each architecture in turn."""
    arch = ARCHS[list(ALL).index(name) % len(ARCHS)]
    found = kernels(ALL[name].op, ALL[name].args(), arch)
    assert found
    for kernel in found:
        assert compile_kernel(kernel, card(arch)).image


@pytest.mark.slow
@pytest.mark.parametrize("arch", [*ARCHS, *OTHERS])
@pytest.mark.parametrize("name", ALL)
def test_every_architecture(name, arch):
    """The op and its gradients."""
    case, args = ALL[name], ALL[name].args()
    for kernel in (k for f in (case.op, functools.partial(gradients, case)) for k in kernels(f, args, arch)):
        assert compile_kernel(kernel, card(arch)).image
