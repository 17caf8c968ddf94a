"""Embedding lookup in float and quantised tables against jnp."""

import jax.numpy as jnp
import numpy as np
import pytest
from library import FLOATS, agree, integers, normal

from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops.embeddings import embedding_reference
from jtile.ops.quantized_tensor import KINDS, QuantizedTensor


@pytest.mark.parametrize("dtype", [*FLOATS, "int32"])
def test_float_tables(dtype):
    table = (np.asarray(normal(0, 50, 72)) * 10).astype(jnp.dtype(dtype))
    ids = integers(1, -3, 55, 3, 9)  # some outside
    agree(ops.embedding, embedding_reference, table, ids, tolerance=0, interpret=True)
    agree(ops.embedding, embedding_reference, table, ids[0, 0], dtype=jnp.float32, tolerance=0)
    assert not np.asarray(ops.embedding(table, jnp.array([-1, 50]))).any()


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_tables(kind):
    table = QuantizedTensor.quantize(normal(0, 50, 96), kind)
    ids = integers(1, -3, 55, 40)
    agree(ops.embedding, embedding_reference, table, ids, tolerance=1e-7, interpret=True)  # may fuse multiply and add
    agree(ops.embedding, embedding_reference, table, ids, dtype=jnp.bfloat16, tolerance=1e-3)


def test_nothing():
    assert ops.embedding(jnp.zeros((5, 4)), jnp.zeros((0, 2), jnp.int32)).shape == (0, 2, 4)
    assert ops.embedding(jnp.zeros((0, 4)), jnp.zeros(2, jnp.int32)).shape == (2, 4)


def test_errors():
    with pytest.raises(KernelTypeError, match=r"ids is an integer array, got float32; convert it: ids\.astype"):
        ops.embedding(jnp.zeros((5, 4)), jnp.zeros(2))
    with pytest.raises(KernelValueError, match=r"table is \[vocab, features\]"):
        ops.embedding(jnp.zeros(5), jnp.zeros(2, jnp.int32))
    with pytest.raises(KernelTypeError, match="gives floats"):
        ops.embedding(QuantizedTensor.quantize(normal(0, 5, 32), "q4_0"), jnp.zeros(2, jnp.int32), dtype=jnp.int32)
