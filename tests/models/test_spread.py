"""Models cut over a mesh: the checks of spread_checks.py on eight host devices, in one child process; and the cuts."""

from pathlib import Path

import devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtile._errors import ModelError
from jtile.models.cuts import NONE, cut
from jtile.models.shards import Heads, Place
from jtile.ops import QuantizedTensor, quantize
from jtile.ops.super_blocks import GGUF_BYTES

CHECKS = Path(__file__).with_name("spread_checks.py")


@pytest.mark.long
@pytest.mark.parametrize("name", devices.names(CHECKS))
def test_on_devices(name, tmp_path_factory):
    failed = devices.outcome(CHECKS, name, tmp_path_factory)
    assert not failed, failed


def test_shares():
    found = [Place(i, 3).share(160, 32).tolist() for i in range(3)]
    assert found[0] == list(range(64)) and found[1] == list(range(64, 128))
    assert found[2] == [*range(128, 160), *[NONE] * 32]
    assert Place(3, 4).share(3).tolist() == [NONE]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "count", "queries", "keys"),
    [
        (4, 2, 2, [[0, 1], [2, 3]], [[0], [1]]),
        (4, 2, 4, [[0], [1], [2], [3]], [[0], [0], [1], [1]]),  # two devices have the same keys
        (9, 3, 2, [[0, 1, 2, 3, 4, 5], [6, 7, 8, NONE, NONE, NONE]], [[0, 1], [2, NONE]]),
        (6, 2, 4, [[0, 1], [2, NONE], [3, 4], [5, NONE]], [[0], [0], [1], [1]]),
        (4, 1, 3, [[0, 1], [2, 3], [NONE, NONE]], [[0], [0], [0]]),
        (3, 3, 4, [[0], [1], [2], [NONE]], [[0], [1], [2], [NONE]]),
        (6, 3, 4, [[0, 1], [2, 3], [4, 5], [NONE, NONE]], [[0], [1], [2], [NONE]]),
    ],
)
def test_heads(heads, kv_heads, count, queries, keys):
    found = [Heads.at(heads, kv_heads, Place(i, count)) for i in range(count)]
    assert [list(of.queries) for of in found] == queries
    assert [list(of.keys) for of in found] == keys


ROWS, COLUMNS = np.array([3, 4, 5, NONE]), np.concatenate([np.arange(32, 64), np.full(32, NONE), np.arange(32)])


def taken(x, rows, columns):
    """The part of a matrix, by NumPy."""
    x = np.pad(np.asarray(x), ((0, 1), (0, 1)))  # NONE is the last place
    return x[rows][:, columns]


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("kind", ["int8", "fp8", "q4_0", "q4_1", "q8_0", "mxfp4"])
def test_parts_of_quantised_matrices(kind, group):
    """Groups of 64 are halved where a cut goes through them."""
    x = np.random.default_rng(0).standard_normal((8, 128)).astype(np.float32)
    weight = quantize(x, kind, group if kind not in ("int8", "fp8") else 32)
    found = cut(weight, {0: ROWS, 1: COLUMNS}, "w")
    np.testing.assert_array_equal(found.dequantize(), taken(weight.dequantize(), ROWS, COLUMNS))
    stack = cut(QuantizedTensor.stack([weight, weight]), {0: np.array([1]), 1: COLUMNS, 2: ROWS}, "w", turned=True)
    np.testing.assert_array_equal(stack.codes[0], found.codes)
    if kind in ("int8", "fp8"):  # any columns: a row has one scale
        odd = np.array([5, 6, 7])
        np.testing.assert_array_equal(cut(weight, {1: odd}, "w").dequantize(), weight.dequantize()[:, 5:8])


@pytest.mark.parametrize("kind", sorted(GGUF_BYTES))
def test_parts_of_k_quants(kind):
    raw = np.random.default_rng(0).integers(0, 60, (2, 3, GGUF_BYTES[kind]), np.uint8)
    weight = QuantizedTensor.from_gguf_blocks(raw.reshape(2, -1), kind, (2, 768))
    columns = np.concatenate([np.arange(512, 768), np.full(256, NONE)])
    found = cut(weight, {1: columns}, "w")
    np.testing.assert_array_equal(found.dequantize(), taken(weight.dequantize(), np.arange(2), columns))
    with pytest.raises(ModelError, match=rf"w of the kind {kind} is cut over devices in groups of 256 columns"):
        cut(weight, {1: np.arange(384)}, "w")


def test_a_cut_through_a_block_is_refused():
    weight = quantize(np.ones((2, 64), np.float32), "q4_0")
    with pytest.raises(ModelError, match="parts of 16 of its 64 columns are no such groups"):
        cut(weight, {1: np.arange(16)}, "w")


def test_parts_of_floats_keep_their_dtype():
    x = jnp.arange(12, dtype=jnp.bfloat16).reshape(3, 4)
    found = cut(x, {0: np.array([2, NONE]), 1: np.arange(1, 3)}, "w")
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(jax.device_get(found).astype(np.float32), [[9, 10], [0, 0]])
