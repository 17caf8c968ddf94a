"""Bytes of words in roles: what few instructions do with all four of a word, and rows that come in one copy."""

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


def _byte(words, k, dtype=np.uint8):
    return jax.lax.bitcast_convert_type((words >> np.uint32(8 * k)).astype(jnp.uint8), dtype)


def _dot(a, b, dtype, of=range(4)):
    return sum(_byte(a, k).astype(jnp.int32) * _byte(b, k, dtype).astype(jnp.int32) for k in of)


def _body(a, b, sums, others, floats):
    ring, full = jt.alloc((ROWS, WORDS), a.dtype, slots=2), jt.barrier(1)
    with jt.role("main"):
        full.at(0).wait()
        x, y = ring.at(0).load(), ring.at(1).load()
        sums[...] = _dot(x, y, np.int8) + _dot(x & np.uint32(0x0F0F0F0F), y, np.uint8)
        others[...] = _dot(x, y, np.int8, of=(0, 1, 2, 2))  # not all bytes
        floats[...] = jnp.stack([_byte(x, k, jnp.float8_e4m3fn).astype(jnp.float32) for k in range(4)]).sum(0)
    with jt.role("copies", warps=1):
        full.at(0).expect(2 * ring.nbytes)
        for k, ref in enumerate((a, b)):
            jt.async_copy(ref.tiles(ROWS, WORDS).at[0, 0], ring.at(k), full.at(0))


@pytest.fixture(scope="module")
def case():
    random = np.random.default_rng(0)
    words = [random.integers(0, 1 << 32, (ROWS, WORDS), np.uint32) & np.uint32(0xBFBFBFBF) for _ in "ab"]
    of = lambda dtype: jax.ShapeDtypeStruct((ROWS, WORDS), dtype)
    out = of(jnp.int32), of(jnp.int32), of(jnp.float32)
    kernel = jt.call(_body, out_type=out, grid=(1,)).lower(*words, target="cuda:sm_90").kernel
    return kernel, compile_block_kernel(kernel, card("sm_90"), texts=True), words


def test_meaning(case):
    kernel, _, (a, b) = case
    sums, others, floats = interpret(kernel, [a, b])
    of = lambda v, dtype: v[..., None].view(dtype).astype(np.int32)
    assert (
        sums
        == (of(a, np.uint8) * of(b, np.int8)).sum(-1)
        + (of(a & np.uint32(0x0F0F0F0F), np.uint8) * of(b, np.uint8)).sum(-1)
    ).all()
    assert (others == (of(a, np.uint8) * of(b, np.int8) * np.array([1, 1, 2, 0])).sum(-1)).all()
    assert (floats == a[..., None].view(jnp.float8_e4m3fn).astype(np.float32).sum(-1)).all()


def test_instructions(case):
    """Each of the 8 words of a thread: two sums of products, and two conversions for its four 8-bit floats."""
    text = case[1].texts
    assert text["ptx"].count("dp4a.u32.s32") == 8 and text["ptx"].count("dp4a.u32.u32") == 8
    assert len(re.findall("F2FP.F16.E4M3.UNPACK_B", text["sass"])) == 16
    assert len(re.findall("UTMALDG", text["sass"])) == 2  # a row of 512 bytes is not swizzled
    assert "swizzlingByteWidth = 0" in text["ttgir"]


@pytest.mark.gpu
def test_on_a_device(case):
    kernel, artifact, words = case
    for got, want in zip(run_artifact(artifact, kernel, words).outputs(), interpret(kernel, words), strict=True):
        np.testing.assert_array_equal(got, want)


def test_neighbours_of_bfloat16_take_an_instruction_each():
    """A register with two becomes float32 by a shift and a mask."""

    def body(x, y):
        ring, full = jt.alloc((ROWS, 256), x.dtype, slots=2), jt.barrier(1)
        with jt.role("main"):
            full.at(0).wait()
            y[...] = ring.at(0).load().astype(jnp.float32) * 3.0
        with jt.role("copies", warps=1):
            full.at(0).expect(ring.nbytes)
            jt.async_copy(x.tiles(ROWS, 256).at[0, 0], ring.at(0), full.at(0))

    x = np.random.default_rng(0).normal(size=(ROWS, 256)).astype(jnp.bfloat16)
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    kernel = jt.call(body, out_type=out, grid=(1,)).lower(x, target="cuda:sm_90").kernel
    (y,) = interpret(kernel, [x])
    assert (y == x.astype(np.float32) * 3).all()
    ptx = compile_block_kernel(kernel, card("sm_90"), texts=True).texts["ptx"]
    assert len(re.findall(r"and\.b32 [^;]*0xffff0000;", ptx)) == x.size // 128 // 2
