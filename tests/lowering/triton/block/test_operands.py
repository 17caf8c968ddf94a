"""Operands of products that are made in registers: nothing of them goes through shared memory or between threads."""

import re

import jax
import jax.numpy as jnp
import pytest

from jtile.lowering.triton.block import compile_block_kernel
from jtile.ops import hopper_quantized

SHAPE = jax.ShapeDtypeStruct


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0", "int8"])
def test_dequantised_weights_stay_in_registers(kind):
    out, inner, four = 128, 512, kind in ("q4_0", "q4_1")
    scale = SHAPE((out, 1), jnp.float32) if kind == "int8" else SHAPE((out, inner // 32), jnp.float16)
    arrays = SHAPE((out, inner // (8 if four else 4)), jnp.uint32), scale, scale
    meta = hopper_quantized.choice(16, out, inner, kind) | {"high": 1, "deep": 1, "splits": 1}
    x = SHAPE((16, inner), jnp.bfloat16)
    kernel = hopper_quantized.hopper_quantized_product.lower(x, *arrays, kind=kind, **meta).program.kernel
    artifact = compile_block_kernel(kernel, "sm_90", texts=True)
    sass = artifact.texts["sass"]
    loop = sass[: sass.rindex("HGMMA")].split("SYNCS.PHASECHK")[-1]  # from the last wait to the last product of a round
    assert len(re.findall("HGMMA", sass)) == 16
    assert not re.search(r"\b(STS|STSM|SHFL|F2F|I2F\w*)\b", loop)
    assert re.search("HMUL2.BF16|HFMA2.BF16", sass) and artifact.launch["resources"]["spills"] == 0
