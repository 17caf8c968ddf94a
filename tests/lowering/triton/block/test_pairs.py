"""Neighbours of 16 bits in roles: products and sums that are rounded once, bytes of words in halves of their own."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device import run_artifact
from machines import card

import jtile as jt
from jtile.interpret import interpret
from jtile.lowering.triton.block import compile_block_kernel

ROWS, WORDS = 8, 128
OTHER = jnp.bfloat16(-3.1415926)


def _codes(words):
    """The bytes of words [rows, words] as bfloat16 times 2^-133: [rows, words, 2, 2]; bytes 0 and 2 first."""
    part = jax.lax.broadcasted_iota(jnp.uint32, (*words.shape, 2), 2)
    u = jnp.broadcast_to(words[:, :, None], part.shape) >> part * np.uint32(8) & np.uint32(0x00FF00FF)
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(u, jnp.uint16), jnp.bfloat16)


def _body(words, scales, numbers, constants):
    ring, factors, full = jt.alloc((ROWS, WORDS), words.dtype), jt.alloc((ROWS, WORDS), scales.dtype), jt.barrier(1)
    with jt.role("main"):
        full.at(0).wait()
        a, s = _codes(ring.load()), factors.load()
        wide = lambda x: jnp.broadcast_to(x, a.shape).astype(jnp.float32)
        factor, shift = s[:, :, None, None], (s * jnp.bfloat16(-(2.0**-126)))[:, :, None, None]
        numbers[...] = (wide(a) * wide(factor) + wide(shift)).astype(s.dtype)
        constants[...] = (wide(OTHER) + wide(jnp.bfloat16(2.0**127)) * wide(a)).astype(s.dtype)
    with jt.role("copies", warps=1):
        full.at(0).expect(ring.nbytes + factors.nbytes)
        jt.async_copy(words.tiles(ROWS, WORDS).at[0, 0], ring, full.at(0))
        jt.async_copy(scales.tiles(ROWS, WORDS).at[0, 0], factors, full.at(0))


@pytest.fixture(scope="module")
def case():
    random = np.random.default_rng(0)
    words = np.arange(ROWS * WORDS, dtype=np.uint32).reshape(ROWS, WORDS)
    words = (words & 255) * np.uint32(0x01000001) | random.permutation(words.ravel()).reshape(words.shape) % 65536 << 8
    scales = (random.normal(size=words.shape) * 2.0**110).astype(jnp.bfloat16)
    out = [jax.ShapeDtypeStruct((ROWS, WORDS, 2, 2), jnp.bfloat16)] * 2
    kernel = jt.call(_body, out_type=out, grid=(1,)).lower(words, scales, target="cuda:sm_90").kernel
    return kernel, compile_block_kernel(kernel, card("sm_90"), texts=("ptx", "sass")), (words, scales)


def test_meaning(case):
    """Codes less 128, times a scale, are rounded once, since all that is added up is exact in float32."""
    kernel, _, (words, scales) = case
    numbers, constants = interpret(kernel, [words, scales])
    codes = words[..., None].view(np.uint8)[..., [0, 2, 1, 3]].reshape(ROWS, WORDS, 2, 2).astype(np.float64)
    of = (codes - 128) * 2.0**-133 * scales[..., None, None].astype(np.float64)
    np.testing.assert_array_equal(numbers, of.astype(jnp.bfloat16))
    np.testing.assert_array_equal(constants, (codes / 64 + float(OTHER)).astype(jnp.bfloat16))


def test_instructions(case):
    """Each of the 8 words of a thread: two instructions for its four bytes, and two for each result of four."""
    text = case[1].texts
    assert text["ptx"].count("fma.rn.bf16x2") == 8 * 4 and text["ptx"].count("prmt.b32 ") >= 8 * 2
    assert len(re.findall(r"HFMA2\S*BF16", text["sass"])) >= 8 * 4 and "FFMA" not in text["sass"]
    assert len(re.findall(r"PRMT R\d+, R\S+, 0x4341, RZ", text["sass"])) == 8


@pytest.mark.gpu
def test_on_a_device(case):
    kernel, artifact, args = case
    for got, want in zip(run_artifact(artifact, kernel, args).outputs(), interpret(kernel, args), strict=True):
        np.testing.assert_array_equal(got, want)
