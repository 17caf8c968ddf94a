"""Kernels of the library, unchanged, on Hopper: they have a plan, use its machinery, and hold what they need in
registers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tile_kernels as tk
from device import run_artifact
from jax.extend import core
from library import normal
from machines import card
from sass import unwritten
from triton.backends.nvidia import compiler

import jtile as jt
from jtile import ir, ops, passes
from jtile.errors import UnsupportedError
from jtile.interpret import interpret
from jtile.lowering.triton import ptxas
from jtile.lowering.triton.block.emit_roles import columns_of_products
from jtile.lowering.triton.compile import compile_kernel
from jtile.ops.flash_attention import attention_reference
from jtile.primitive.lowering import pieces_of
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
    artifact = compile_kernel(passes.run_pipeline(kernel, passes.TILE), card("sm_90"), options, texts=True)
    assert artifact.texts["schedule"].startswith("block level: "), artifact.texts["schedule"]
    assert artifact.launch["level"] == "block"
    for word in ("HGMMA", "UTMALDG", "UTMASTG", "SYNCS", "USETMAXREG"):
        assert word in artifact.texts["sass"], word
    # ptxas 13 keeps two registers of three consumers elsewhere, and of four what a tile begins with.
    assert artifact.launch["resources"]["spills"] <= (8 if "4 consumers" not in artifact.texts["schedule"] else 112)
    assert unwritten(artifact.texts["sass"]) == []


@pytest.mark.parametrize(
    ("warps", "columns"),
    [
        *[
            ((4, 4, 1), 256),
            ((4, 4, 4, 1), 128),
            ((4, 4, 4, 4, 1), 128),
            ((8, 1), 256),
            ((4,) * 6, 64),
            ((8, 8, 8, 4), 64),
        ],
        *[((4, 4, 1, 1), 256), ((8, 1, 1), 256), ((4, 1, 1, 1), 256), ((4, 4, 4, 1, 1), 128)],  # they share a warpgroup
    ],
)
def test_columns_of_a_product_that_registers_hold_from_the_start(warps, columns):
    roles = ir.Roles(tuple(map(str, warps)), warps, (0,) * len(warps), tuple(ir.Block() for _ in warps))
    assert columns_of_products(roles) == columns


@pytest.mark.parametrize("tb", [pytest.param(False, marks=pytest.mark.slow), True])
def test_three_consumers_of_256_columns(tb):
    """ptxas gives 128 registers to threads of 512, and wants 154 for a product of 256 columns."""
    kernel = passes.run_pipeline(tk.matmul(384, 512, 256, tile=(192, 256, 64), tb=tb), passes.TILE)
    artifact = compile_kernel(kernel, card("sm_90"), {}, texts=True)
    assert artifact.texts["schedule"].startswith("block level: 3 consumers"), artifact.texts["schedule"]
    assert set(re.findall(r"wgmma\.mma_async\S*m64(n\d+)k16", artifact.texts["ptx"])) == {"n128"}
    assert artifact.launch["resources"]["spills"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(384, 512, 256), (1000, 900, 320)])
def test_three_consumers_of_256_columns_compute_what_is_meant(sizes):
    kernel = passes.run_pipeline(tk.matmul(*sizes, tile=(192, 256, 64)), passes.TILE)
    inputs = tk.operands(kernel)
    found = run_artifact(compile_kernel(kernel, card("sm_90"), {}), kernel, inputs).outputs()[0]
    assert relative_error(found, interpret(kernel, inputs)[0]) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "tile"),
    [(72, (64, 128, 64)), (72, (128, 256, 64)), (96, (64, 64, 32)), (144, (192, 128, 64)), (200, (128, 64, 64))],
)
def test_rows_outside_of_the_left_operand(m, tile):
    """They come in boxes of few rows, or not at all: what comes instead spoils nothing."""
    kernel = passes.run_pipeline(tk.matmul(m, 264, 320, tile=tile, batch=2, bias=True), passes.TILE)
    inputs = [np.array(x) for x in tk.operands(kernel)]
    inputs[0][:, :16] = np.nan
    artifact = compile_kernel(kernel, card("sm_90"), {}, texts=True)
    assert artifact.texts["schedule"].startswith("block level: "), artifact.texts["schedule"]
    found = np.asarray(run_artifact(artifact, kernel, inputs).outputs()[0], np.float32)
    want = np.asarray(interpret(kernel, inputs)[0], np.float32)
    assert np.isnan(found[:, :16]).all()
    assert relative_error(found[:, 16:], want[:, 16:]) < 1e-2


class Tool:
    def __init__(self, version: str):
        self.version, self.path = version, f"/{version}/ptxas"


@pytest.mark.parametrize(
    ("own", "beside", "chosen"), [("12.8", "12.9", "12.9"), ("12.9", "13.4", "12.9"), ("13.4", "12.8", "13.4")]
)
def test_roles_with_products_go_through_a_ptxas_that_is_right(monkeypatch, own, beside, chosen):
    monkeypatch.setattr(ptxas, "tools", lambda: [Tool(own), Tool(beside)])
    assert ptxas.mended().version == chosen


def test_no_ptxas_is_right(monkeypatch):
    monkeypatch.setattr(ptxas, "tools", lambda: [Tool("12.8"), None])
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


@pytest.mark.parametrize("d", [pytest.param(24, marks=pytest.mark.slow), 96])
def test_heads_of_other_sizes_are_at_the_block_level(d):
    artifact = compile_kernel(with_heads_of(d), card("sm_90"), {"specialize": True}, texts=True)
    assert artifact.texts["schedule"].startswith("block level: "), artifact.texts["schedule"]
    assert artifact.launch["resources"]["spills"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("d", [24, 96, 192])
def test_heads_of_other_sizes(d):
    """Tiles of powers of two hang over arrays of other sides."""
    kernel = with_heads_of(d)
    inputs = tk.operands(kernel)
    found = [
        run_artifact(compile_kernel(kernel, card("sm_90"), {"specialize": True}), kernel, inputs).outputs()[0]
        for _ in range(2)
    ]
    assert relative_error(found[0], interpret(kernel, inputs)[0]) < 1e-2
    assert (found[0] == found[1]).all()
