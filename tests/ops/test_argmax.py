"""Places of the largest numbers of rows against jnp.argmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import agree, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops.argmax import argmax_reference, argmax_rows

EDGES = np.array(
    [
        [1, 3, 3, -1, 3],
        [-np.inf] * 5,
        [0, -0.0, -1, 0, -0.0],
        [-0.0, 0, -1, 0, 0],
        [1, np.nan, np.inf, -np.nan, 2],
        [np.inf, -np.inf, np.inf, 0, 0],
        [-3, -2, -5, -2, -9],
        [1e-45, -1e-45, 0, 0, 1e-45],
    ],
    np.float32,
)


def levelled(*shape, dtype="float32"):
    """Numbers of which many are equal, the largest ones too."""
    return np.round(np.asarray(normal(0, *shape)) * 2).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("arch", [None, "sm_90"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1, 5000), (2, 3, 1300), (70, 130), (33,), (3000, 3), (4, 1)])
def test_rows(shape, dtype, arch):
    with jt.config(arch=arch):
        agree(ops.argmax, argmax_reference, levelled(*shape, dtype=dtype), tolerance=0)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_edges_in_the_interpreter(parts):
    """Whatever parts rows are in, in whichever order these come: some have no numbers."""
    for x in (EDGES, EDGES.astype(jnp.bfloat16)):
        for seed in range(3):
            found = argmax_rows.interpret(x, parts=parts, bn=2, seed=seed)[0]
            np.testing.assert_array_equal(found, np.argmax(np.asarray(x, np.float32), -1))


@pytest.mark.parametrize("arch", [None, "sm_90"])
def test_edges(arch):
    wide = np.concatenate([np.full((8, 2100), -np.inf, np.float32), EDGES], 1)
    with jt.config(arch=arch):
        for x in (EDGES, wide, EDGES.astype(np.float16), EDGES.astype(np.float64)):
            np.testing.assert_array_equal(ops.argmax(x), jnp.argmax(x, -1))
    assert ops.argmax(np.zeros((0, 3), np.float32)).shape == (0,)


@pytest.mark.usefixtures("on_the_cpu")
def test_what_computes_it():
    x = jax.ShapeDtypeStruct((64, 128256), jnp.float32)
    assert ops.choices(ops.argmax, x)[0].implementation == "programs that share rows, in vectors"
    wide = jax.ShapeDtypeStruct((4, 9), jnp.float64)
    with jax.enable_x64(True):
        assert ops.choices(ops.argmax, wide)[0].implementation == "two reductions of XLA"
    with jt.config(arch="sm_90"):
        assert ops.choices(ops.argmax, x)[0].implementation == "programs that share rows"
    for arch in ("sm_80", "sm_90", "gfx942"):
        with jt.config(arch=arch):
            assert argmax_rows.lower(jax.ShapeDtypeStruct((2, 4000), jnp.float32), parts=4, bn=1024)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 64, 2000])
def test_on_the_gpu(rows):
    x = levelled(rows, 20011)
    np.testing.assert_array_equal(jax.jit(ops.argmax)(x), np.argmax(x, -1))
    np.testing.assert_array_equal(jax.jit(ops.argmax)(EDGES), np.argmax(EDGES, -1))


def test_errors():
    with pytest.raises(KernelTypeError, match="float array"):
        ops.argmax(np.zeros((2, 3), np.int32))
    for x in (np.zeros((2, 0), np.float32), np.float32(1)):
        with pytest.raises(KernelValueError, match="at least one number"):
            ops.argmax(x)
