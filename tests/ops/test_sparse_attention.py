"""Attention to the blocks of keys that lists name, against all scores with the others masked."""

import numpy as np
import pytest
from library import agree, gradients_agree, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops.sparse_attention import block_sparse_attention_reference

OF = {"keys": 8}


def operands(queries, t=21, s=27, dtype="float32"):
    """Four heads over two of keys; lists of three of four blocks, some of them none, the first list empty."""
    q, k, v = normal(0, 2, t, 4, 6, dtype=dtype), *(normal(x, 2, s, 2, 6, dtype=dtype) for x in (1, 2))
    lists = np.argsort(np.random.default_rng(0).random((2, 2, -(-t // queries), 4)), axis=-1)[..., :3]
    lists = np.where(np.random.default_rng(1).random(lists.shape) < 0.2, -1, lists).astype(np.int32)
    lists[0, 0, 0] = -1
    return q, k, v, lists


@pytest.mark.parametrize(("queries", "causal"), [(1, False), (8, True)])
def test_blocks_of_lists(queries, causal):
    options = {"queries": queries, "causal": causal, **OF}
    args = operands(queries)
    agree(ops.block_sparse_attention, block_sparse_attention_reference, *args, interpret=causal, **options)
    gradients_agree(ops.block_sparse_attention, block_sparse_attention_reference, *args, of=3, **options)


def test_a_block_that_is_named_twice_counts_twice():
    q, k, v, lists = operands(4, t=8)
    twice = np.broadcast_to(np.array([1, 0, 1], np.int32), lists.shape)
    agree(ops.block_sparse_attention, block_sparse_attention_reference, q, k, v, twice, queries=4, **OF)


def test_short_floats_in_tiles_of_a_gpu():
    with jt.config(arch="sm_90"):
        args = operands(8, dtype="bfloat16")
        agree(ops.block_sparse_attention, block_sparse_attention_reference, *args, queries=8, tolerance=5e-3, **OF)


def test_errors():
    q, k, v, lists = operands(1)
    with pytest.raises(KernelTypeError, match="keys is an int"):
        ops.block_sparse_attention(q, k, v, lists, keys=2.0)
    with pytest.raises(KernelTypeError, match="integer array"):
        ops.block_sparse_attention(q, k, v, lists.astype(np.float32))
    with pytest.raises(KernelValueError, match="blocks has shape"):
        ops.block_sparse_attention(q, k, v, lists, queries=2)
    with pytest.raises(KernelValueError, match="power of two"):
        ops.block_sparse_attention(q, k, v, lists, keys=6)
    assert not ops.block_sparse_attention(q, k, v, lists[..., :0]).any()
