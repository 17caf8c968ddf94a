"""Products that ask the caches for what comes next, and rows that all begin in one set of a cache."""

from __future__ import annotations

import re

import numpy as np
import pytest
from gemm_products import Products, check, random_matrix

from jtile.lowering.cpu.gemm import GemmSpec, _chunks, _rows_ahead, emit_gemm
from jtile.lowering.cpu.gemm_modes import choose_mode
from jtile.lowering.cpu.gemm_plan import make_plan
from jtile.lowering.cpu.isa import ISAS, host_isa
from jtile.lowering.cpu.llvm import Module


def text(isa: str, spec: GemmSpec) -> str:
    module = Module(ISAS[isa].triple)
    emit_gemm(module, ISAS[isa], spec)
    return module.text()


def test_rows_in_one_set_of_a_cache_are_copied(undefined):
    """Rows of 4096 bytes are multiplied from a copy, others in place: the bits are the same."""
    spec = GemmSpec(21, 300, 1024, "float32", "float32", "float32")
    products = Products(host_isa(), [spec], undefined)
    check(products, spec)
    rng = np.random.default_rng(1)
    a, b = random_matrix(rng, (21, 1024), "float32"), random_matrix(rng, (1024, 300), "float32")
    c = np.zeros((21, 300), np.float32)
    crowded, apart = (products.run(spec, a, b, c, slack) for slack in (0, 16))
    np.testing.assert_array_equal(crowded, apart)


@pytest.mark.parametrize(("n", "copied"), [(64, 0), (300, 21 * 256 * 4)])
def test_copies_are_for_many_columns(n, copied):
    """A copy of the rows that this k block needs has room where many columns pay for it."""
    spec = GemmSpec(21, n, 1024, "float32", "float32", "float32")
    panel = 256 * 32 * 4
    assert emit_gemm(Module(ISAS["avx512"].triple), ISAS["avx512"], spec).workspace == panel + copied


@pytest.mark.parametrize("isa", ["avx512", "avx2", "sse2"])
def test_panels_are_asked_for_ahead(isa):
    """Packed products ask for sums and the next panel; products of few rows, which read B once, for nothing."""
    packed = text(isa, GemmSpec(96, 256, 512, "float32", "float32", "float32"))
    levels = set(re.findall(r"call void @llvm\.prefetch\.p0\(ptr %\S+, i32 0, i32 (\d), i32 1\)", packed))
    assert levels == {"2", "3"}  # the second-level cache, for B, and the first, for sums
    assert "llvm.prefetch" not in text(isa, GemmSpec(4, 256, 512, "float32", "float32", "float32"))


@pytest.mark.parametrize(
    ("m", "dtype", "isa"),
    [
        (256, "float32", "avx512"),
        (100, "float32", "avx2"),
        (250, "int8", "avx512bf16"),
        (256, "bfloat16", "amx"),
        (250, "int8", "amx"),
    ],
)
def test_row_panels_share_the_rows_of_the_next_panel(m, dtype, isa):
    """All row panels together ask for every row of the next panel, and the last one for few that are not in it."""
    acc = "int32" if dtype == "int8" else "float32"
    spec = GemmSpec(m, 256, 2048, dtype, dtype, acc)
    plan = make_plan(choose_mode(ISAS[isa], dtype, dtype, acc), m, 256, 2048, False, False)
    panels = sum(rows.count for rows in plan.rows)
    asked = _rows_ahead(spec, plan) * _chunks(plan)  # rows that one row panel asks for
    assert panels * asked >= plan.kc > (panels * asked) // 2


@pytest.mark.parametrize(
    ("n", "k", "levels"), [(32, 4096, {"2", "3"}), (32, 256, {"3"}), (256, 160, {"3"}), (64, 64, set())]
)
def test_nothing_is_asked_for_that_is_near(n, k, levels):
    """A small matrix lies in the caches, and sums of few terms would be made before they are there."""
    found = text("avx512", GemmSpec(96, n, k, "float32", "float32", "float32"))
    assert set(re.findall(r"call void @llvm\.prefetch\.p0\(ptr %\S+, i32 0, i32 (\d), i32 1\)", found)) == levels
