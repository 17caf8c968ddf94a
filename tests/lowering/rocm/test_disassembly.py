"""What AMD's assembly says of the library's kernels: matrix instructions in every product, LDS within its limit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jtile as jt
from jtile import ops, passes
from jtile._lowering import pieces_of
from jtile.lowering.rocm.disassembly import facts, matrix_instructions
from jtile.lowering.triton.compile import compile_kernel
from jtile.lowering.triton.features import features
from jtile.tools.levels import _programs

bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
PRODUCTS = {
    "matmul": (ops.matmul, [bf16(256, 192), bf16(192, 320)]),
    "gated_mlp": (ops.gated_mlp, [bf16(128, 192), bf16(192, 256), bf16(192, 256)]),
    "attention": (lambda q: ops.attention(q, q, q, causal=True), [bf16(1, 256, 2, 64)]),
    "gradient": (jax.grad(lambda a, b: ops.matmul(a, b).astype(jnp.float32).sum()), [bf16(128, 64), bf16(64, 96)]),
}
ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")


def artifacts(name: str, arch: str):
    """The compiled kernels of a function, with their texts, and the TTIR's products in each."""
    fn, types = PRODUCTS[name]
    with jt.config(arch=arch):
        programs = dict.fromkeys(_programs(jax.make_jaxpr(fn)(*types)))
    for kernel in (k for p in programs for k in pieces_of(p).kernels):
        yield compile_kernel(passes.run_pipeline(kernel, passes.TILE), arch, texts=True)


def check(name: str, arch: str):
    products = 0
    for artifact in artifacts(name, arch):
        text = artifact.texts["amdgcn"]
        wanted = "tt.dot" in artifact.texts["ttir"]
        assert bool(matrix_instructions(text)) == wanted
        assert artifact.launch["resources"]["shared"] <= features(arch).shared
        assert facts(text).registers > 0
        assert artifact.image[:4] == b"\x7fELF"
        products += wanted
    assert products


@pytest.mark.parametrize(("name", "arch"), [*zip(PRODUCTS, ARCHS, strict=False), ("matmul", "gfx1201")])
def test_products_use_matrix_instructions(name, arch):
    check(name, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_on_every_architecture(name, arch):
    check(name, arch)


def test_the_text_is_read():
    text = "\tv_mfma_f32_32x32x8_bf16 a[0:15], v[2:3]\n\tv_add_f32 v0, v1\n\tv_smfmac_f32_16x16x32_f16 a[0:3]\n"
    assert matrix_instructions(text) == ["v_mfma_f32_32x32x8_bf16", "v_smfmac_f32_16x16x32_f16"]
    numbers = (
        "    .agpr_count: 4\n    .vgpr_count:     95\n    .vgpr_spill_count: 2\n    .group_segment_fixed_size: 64\n"
    )
    assert (facts(numbers).registers, facts(numbers).spills, facts(numbers).lds) == (95, 8, 64)
