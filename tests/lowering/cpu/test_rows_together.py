"""Reductions along rows: several rows share a pass, and their vectors are combined together in the end."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile import trace
from jtile.lowering.cpu import nest
from jtile.lowering.cpu.compile import emit_kernel
from jtile.lowering.cpu.isa import ISAS, host_isa
from jtile.lowering.cpu.llvm import Code, Module
from jtile.passes import TILE, run_pipeline

FUNCTIONS = {
    "sum": lambda x: x.sum(-1),
    "max": lambda x: x.max(-1),
    "square": lambda x: (x * x).sum(-1),
    "prod": lambda x: jnp.prod(x, -1),
    "any": lambda x: (x > 1).any(-1),
    "integers": lambda x: (x * 9).astype(jnp.int32).sum(-1),
    "bytes": lambda x: (x * 9).astype(jnp.int8).max(-1),
    "short": lambda x: x.astype(jnp.bfloat16).sum(-1),
    "two axes": lambda x: x.reshape(x.shape[0], 2, -1).sum((1, 2)) if x.shape[1] % 2 == 0 else x.sum(-1),
}


def body(fn, tile):
    def kernel(x, o):
        i = jt.program_id(0)
        o.tiles(tile)[i] = fn(x.tiles(tile, x.shape[1])[i, 0])

    return kernel


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_has_the_bits_that_it_has_alone(name):
    fn = FUNCTIONS[name]
    kernels, tiles = {}, (64, 1)
    x = np.random.default_rng(0).normal(size=(64, 40)).astype(np.float32)
    arrays = {width: x[:, :width].copy() for width in (3, 8, 40)}
    for width, array in arrays.items():
        out = jax.eval_shape(fn, array)
        for tile in tiles:
            kernels[width, tile] = jt.call(body(fn, tile), out_type=out, grid=64 // tile)
    with jax.default_device(jax.devices("cpu")[0]):
        got = jax.jit(lambda arrays: {key: k(arrays[key[0]]) for key, k in kernels.items()})(arrays)
    for width, array in arrays.items():
        want = np.asarray(fn(array), np.float64)
        tolerance = 0.2 if name == "short" else 1e-4  # XLA rounds some sums of bfloat16 on the way
        np.testing.assert_allclose(np.asarray(got[width, 64], np.float64), want, tolerance, tolerance)
        for tile in tiles[1:]:
            np.testing.assert_array_equal(np.asarray(got[width, 64]), np.asarray(got[width, tile]), f"{width}, {tile}")


def test_rows_are_stored_as_a_vector_and_one_pass_needs_no_variables():
    refs = [jax.ShapeDtypeStruct((64, 16), jnp.float32)], [jax.ShapeDtypeStruct((64,), jnp.float32)]
    traced = trace.trace(body(FUNCTIONS["square"], 64), *refs, grid=(1,))
    kernel = trace.to_tile_ir(traced, name="rows", n_in=1, n_out=1, grid=(1,))
    text, _ = emit_kernel(run_pipeline(kernel, TILE), host_isa())
    assert "store float" not in text and "store <4 x float>" in text
    assert "alloca <4 x float>" not in text


def test_a_loop_over_short_rows_keeps_in_registers_what_is_the_same_in_all():
    """An outer product that goes into a carried tile: one loop over its rows, which reads no column factor."""

    def kernel(a, b, o):
        step = lambda t, total: total * 0.5 + a[t, :][:, None] * jnp.sqrt(b[t, :])[None, :]
        o[...] = jt.fori(a.shape[0], step, jt.zeros((16, 32)))

    a, b = np.random.default_rng(0).random((5, 16), np.float32), np.random.default_rng(1).random((5, 32), np.float32)
    out = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    want = np.zeros((16, 32))
    for left, right in zip(a.astype(float), b.astype(float), strict=True):
        want = want * 0.5 + left[:, None] * np.sqrt(right)[None, :]
    np.testing.assert_allclose(jt.call(kernel, out_type=out, grid=1)(a, b), want, 1e-6, 1e-6)
    traced = trace.trace(kernel, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (a, b)], [out], grid=(1,))
    lowered = trace.to_tile_ir(traced, name="outer", n_in=2, n_out=1, grid=(1,))
    text, _ = emit_kernel(run_pipeline(lowered, TILE), ISAS["avx512"])
    blocks = [block for block in text.split("\nbody") if "fadd contract <16 x float>" in block]
    assert len(blocks) == 1 and blocks[0].count("fadd contract <16 x float>") == 2, "one loop, and two vectors in it"
    loop = blocks[0].partition("\ndone")[0]
    assert loop.count("load <16 x float>") == 2, "the carried tile alone"


@pytest.mark.parametrize("flat", [False, True])
def test_a_row_shorter_than_a_vector_is_written_once(flat: bool):
    """Not in a loop without turns, too, whose text is thrown away with what it would have computed."""
    isa, written = ISAS["avx512"], []
    em = SimpleNamespace(isa=isa, code=Code(Module(isa.triple), "row", []))
    nest._vector_loop(em, 5, 32, None, lambda _, lanes: written.append(lanes.count), flat)
    assert written == [8]
