"""Kernels of the library, unchanged, on Hopper: they have a plan, use its machinery, and hold what they need in
registers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.extend import core

import jtile as jt
from jtile import ops, passes
from jtile._lowering import pieces_of
from jtile.lowering.triton.compile import compile_kernel

S = jax.ShapeDtypeStruct


def heads(h: int) -> Any:
    return S((2, 2048, h, 64), "bfloat16")


CASES = {
    "product": (ops.matmul, (S((4096, 4096), "bfloat16"),) * 2),
    "attention": (lambda q, k, v: ops.attention(q, k, v, causal=True), (heads(8), heads(2), heads(2))),
}


def programs(jaxpr: Any) -> Iterator[Any]:
    """The programs of all kernels of a jaxpr."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "jtile_call":
            yield eqn.params["program"]
        for v in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: isinstance(p, core.Jaxpr | core.ClosedJaxpr)
        ):
            if isinstance(v, core.Jaxpr | core.ClosedJaxpr):
                yield from programs(getattr(v, "jaxpr", v))


@pytest.mark.parametrize("name", CASES)
def test_the_library_runs_at_the_block_level(name):
    op, args = CASES[name]
    with jt.config(arch="sm_90"):
        (program,) = programs(jax.make_jaxpr(op)(*args).jaxpr)
    (kernel,) = pieces_of(program).kernels
    options = {k: v for k, v in program.options.compiler.items() if v is not None}
    artifact = compile_kernel(passes.run_pipeline(kernel, passes.TILE), "sm_90", options, texts=True)
    assert artifact.texts["schedule"].startswith("block level: "), artifact.texts["schedule"]
    for word in ("HGMMA", "UTMALDG", "UTMASTG", "SYNCS", "USETMAXREG"):
        assert word in artifact.texts["sass"], word
    assert artifact.launch["resources"]["spills"] == 0
