"""What AMD's assembly says of the library's kernels: matrix instructions in every product, LDS within its limit."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from library_cases import CASES
from machines import card

import jtile as jt
from jtile import ops, passes
from jtile.lowering.rocm.disassembly import facts, matrix_instructions
from jtile.lowering.triton.compile import compile_kernel
from jtile.lowering.triton.features import features
from jtile.primitive.lowering import pieces_of
from jtile.tune.programs import counted_calls

bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
LENGTHS = jax.ShapeDtypeStruct((2,), jnp.int32)
PRODUCTS = {
    "matmul": (ops.matmul, [bf16(256, 192), bf16(192, 320)]),
    "gated_mlp": (ops.gated_mlp, [bf16(128, 192), bf16(192, 256), bf16(192, 256)]),
    "attention": (lambda q: ops.attention(q, q, q, causal=True), [bf16(1, 256, 2, 64)]),
    "decode_attention": (ops.decode_attention, [bf16(2, 4, 64), bf16(2, 96, 2, 64), bf16(2, 96, 2, 64), LENGTHS]),
    "convolution": (ops.convolution, [bf16(1, 9, 9, 3), bf16(3, 3, 3, 4)]),
    "gradient": (jax.grad(lambda a, b: ops.matmul(a, b).astype(jnp.float32).sum()), [bf16(128, 64), bf16(64, 96)]),
}
ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")


_DOT = re.compile(r"tt\.dot(?:_scaled)? .*: tensor<[\dx]*x(\w+)>")


def artifacts(fn, args, arch: str):
    """The compiled kernels of a function, with their texts."""
    with jt.config(arch=arch):
        programs = dict.fromkeys(program for program, _ in counted_calls(jax.make_jaxpr(fn)(*args).jaxpr))
    for kernel in (k for p in programs for k in pieces_of(p).kernels):
        yield compile_kernel(passes.run_pipeline(kernel, passes.TILE), card(arch), texts=True)


def units(elem: str, arch: str) -> bool:
    """Whether an architecture has matrix instructions for operands of an element type of TTIR."""
    return elem in ("bf16", "f16", "i8") or elem.startswith("f8") or (elem == "f32" and arch.startswith("gfx9"))


def check(fn, args, arch: str) -> int:
    """How many kernels of a function have products; each of them in matrix instructions, all within the LDS."""
    products = 0
    for artifact in artifacts(fn, args, arch):
        text, kinds = artifact.texts["amdgcn"], _DOT.findall(artifact.texts["ttir"])
        wanted = any(units(kind, arch) for kind in kinds)
        assert bool(matrix_instructions(text)) == wanted, (artifact.launch["name"], kinds)
        assert artifact.launch["resources"]["shared"] <= features(arch).shared
        assert facts(text).registers > 0
        assert artifact.image[:4] == b"\x7fELF"
        products += bool(kinds)
    return products


@pytest.mark.parametrize(("name", "arch"), [*zip(PRODUCTS, [*ARCHS, "gfx942"], strict=True)])
def test_products_use_matrix_instructions(name, arch):
    assert check(*PRODUCTS[name], arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_on_every_architecture(name, arch):
    assert check(*PRODUCTS[name], arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", CASES)
def test_the_library_in_bfloat16(name, arch):
    """The op and its gradients, where it has any."""
    half = lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x
    args = tuple(half(a) if isinstance(a, jax.Array) else a for a in CASES[name].args())
    of = [k for k, a in enumerate(args) if isinstance(a, jax.Array) and a.dtype == jnp.bfloat16]

    def total(*moved):
        out = CASES[name].op(*(moved[of.index(k)] if k in of else a for k, a in enumerate(args)))
        return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating))

    check(lambda *xs: CASES[name].op(*xs), args, arch)
    floats = tuple(args[k] for k in of)
    if jnp.issubdtype(jax.eval_shape(total, *floats).dtype, jnp.floating):
        check(jax.grad(total, tuple(range(len(of)))), floats, arch)


def test_the_text_is_read():
    text = "\tv_mfma_f32_32x32x8_bf16 a[0:15], v[2:3]\n\tv_add_f32 v0, v1\n\tv_smfmac_f32_16x16x32_f16 a[0:3]\n"
    assert matrix_instructions(text) == ["v_mfma_f32_32x32x8_bf16", "v_smfmac_f32_16x16x32_f16"]
    numbers = (
        "    .agpr_count: 4\n    .vgpr_count:     95\n    .vgpr_spill_count: 2\n    .group_segment_fixed_size: 64\n"
    )
    assert (facts(numbers).registers, facts(numbers).spills, facts(numbers).lds) == (95, 8, 64)
