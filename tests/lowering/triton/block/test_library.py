"""Kernels of the library, unchanged, on Hopper: they have a plan, use its machinery, and hold what they need in
registers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tile_kernels as tk
from device import run_artifact
from jax.extend import core
from library import normal
from sass import unwritten
from triton.backends.nvidia import compiler

import jtile as jt
from jtile import ir, ops, passes
from jtile._lowering import pieces_of
from jtile.errors import UnsupportedError
from jtile.interpret import interpret
from jtile.lowering.triton import ptxas
from jtile.lowering.triton.compile import compile_kernel
from jtile.ops.flash_attention import attention_reference
from jtile.testing import relative_error

S = jax.ShapeDtypeStruct


def heads(h: int, length: int = 2048) -> Any:
    return S((2, length, h, 64), "bfloat16")


CASES = {
    "product": (ops.matmul, (S((4096, 4096), "bfloat16"),) * 2),
    # Three consumers, the first round apart: ptxas 12.8 computed where its keys lie in one of them, for two.
    "full attention": (ops.attention, (heads(8, 1024), heads(4, 1024), heads(4, 1024))),
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
    assert artifact.launch["level"] == "block"
    for word in ("HGMMA", "UTMALDG", "UTMASTG", "SYNCS", "USETMAXREG"):
        assert word in artifact.texts["sass"], word
    # ptxas 13 keeps two registers of three consumers elsewhere, and of four what a tile begins with.
    assert artifact.launch["resources"]["spills"] <= (8 if "4 consumers" not in artifact.texts["schedule"] else 112)
    assert unwritten(artifact.texts["sass"]) == []


class Tool:
    def __init__(self, version: str):
        self.version, self.path = version, f"/{version}/ptxas"


@pytest.mark.parametrize(
    ("own", "beside", "chosen"), [("12.8", "12.9", "12.9"), ("12.9", "13.4", "12.9"), ("13.4", "12.8", "13.4")]
)
def test_roles_with_products_go_through_a_ptxas_that_is_right(monkeypatch, own, beside, chosen):
    monkeypatch.setattr(ptxas, "_tools", lambda: [Tool(own), Tool(beside)])
    assert ptxas.mended().version == chosen


def test_no_ptxas_is_right(monkeypatch):
    monkeypatch.setattr(ptxas, "_tools", lambda: [Tool("12.8"), None])
    with pytest.raises(UnsupportedError, match=r"ptxas 12\.9 or newer, got 12\.8 .*TRITON_PTXAS_PATH"):
        ptxas.mended()


def test_the_choice_is_of_one_thread_and_ends():
    own = compiler.get_ptxas(90)
    with ptxas.assembled_by(Tool("1.0")), ThreadPoolExecutor(1) as pool:
        assert compiler.get_ptxas(90).version == "1.0"
        assert pool.submit(compiler.get_ptxas, 90).result() == own
    assert compiler.get_ptxas(90) == own


@pytest.mark.gpu
def test_consumers_have_their_own_operands():
    q, k, v = (normal(seed, 2, 1024, h, 64, dtype="bfloat16") for seed, h in enumerate((8, 4, 4)))
    wanted = attention_reference(*(x.astype("float32") for x in (q, k, v)))
    found = [ops.attention(q, k, v) for _ in range(3)]
    error = jnp.linalg.norm(found[0].astype("float32") - wanted) / jnp.linalg.norm(wanted)
    assert error < 5e-3
    assert all((x == found[0]).all() for x in found)


def with_heads_of(d: int) -> ir.Kernel:
    return passes.run_pipeline(tk.plain_attention(500, 320, d), passes.TILE)


@pytest.mark.parametrize("d", [24, 96])
def test_heads_of_other_sizes_are_at_the_block_level(d):
    artifact = compile_kernel(with_heads_of(d), "sm_90", {"specialize": True}, texts=True)
    assert artifact.texts["schedule"].startswith("block level: "), artifact.texts["schedule"]
    assert artifact.launch["resources"]["spills"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("d", [24, 96, 192])
def test_heads_of_other_sizes(d):
    """Tiles of powers of two hang over arrays of other sides."""
    kernel = with_heads_of(d)
    inputs = tk.operands(kernel)
    found = [
        run_artifact(compile_kernel(kernel, "sm_90", {"specialize": True}), kernel, inputs).outputs()[0]
        for _ in range(2)
    ]
    assert relative_error(found[0], interpret(kernel, inputs)[0]) < 1e-2
    assert (found[0] == found[1]).all()
