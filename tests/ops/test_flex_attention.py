"""Attention with functions for scores and masks: documents, windows, ALiBi, relative positions, caps, sinks."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from library import agree, gradients_agree, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import flex_attention
from jtile.ops.flash_attention import attention_reference
from jtile.testing.evaluate import evaluated

T = 37


def operands(heads=4, kv=2, d=8, t=T, dtype="float32"):
    return tuple(normal(s, 2, t, n, d, dtype=dtype) for s, n in enumerate((heads, kv, kv)))


def alibi(s, b, h, i, j, slopes):
    return s + slopes[h] * (j - i).astype(jnp.float32)


def relative(s, b, h, i, j, table):
    return s + table[h, i - j + T - 1]


def documents(b, h, i, j, segments):
    return segments[b, i] == segments[b, j]


def checkerboard(b, h, i, j):
    return (i + j + h) % 3 != 0


SEGMENTS = np.sort(np.random.default_rng(0).integers(0, 4, (2, T), np.int32), axis=1)


def test_a_score_with_arrays():
    """ALiBi, causal; its slopes have a gradient of their own."""
    of = lambda f: lambda q, k, v, slopes: f(q, k, v, score=alibi, extras=(slopes,), causal=True)
    args = *operands(), np.asarray(normal(4, 4))
    agree(of(ops.attention), of(attention_reference), *args, interpret=True)
    gradients_agree(of(ops.attention), of(attention_reference), *args)


def test_a_table_of_relative_positions():
    of = lambda f: lambda q, k, v, table: f(q, k, v, score=relative, extras=(table,))
    args = *operands(), np.asarray(normal(4, 4, 2 * T - 1))
    gradients_agree(of(ops.attention), of(attention_reference), *args)


def test_documents_with_windows_caps_and_sinks():
    of = lambda f: (
        lambda q, k, v, sinks, segments: f(
            q, k, v, mask=documents, extras=(segments,), window=9, softcap=3.0, sinks=sinks
        )
    )
    args = *operands(), np.asarray(normal(4, 4)), SEGMENTS
    agree(of(ops.attention), of(attention_reference), *args)
    gradients_agree(of(ops.attention), of(attention_reference), *args, of=4)


def test_dropout():
    """By the bits of threefry at the place of a weight; as often as asked for; with equal bits backwards."""
    key = np.array([3, 7], np.uint32)
    of = lambda f: lambda q, k, v: f(q, k, v, causal=True, dropout=0.25, key=key)
    gradients_agree(of(ops.attention), of(attention_reference), *operands())
    counter = np.arange(1000, dtype=np.uint32)
    drawn = evaluated(lambda x, y: flex_attention.threefry(key, x, y))(counter, counter[::-1].copy())
    assert np.array_equal(drawn, threefry_2x32(key, np.concatenate([counter, counter[::-1]]))[:1000])
    assert abs((drawn < 2**30).mean() - 0.25) < 0.03
    for wrong, match in (({"dropout": 1.0}, "less than 1"), ({"dropout": 0.1}, "takes a key"),
                         ({"dropout": 0.1, "key": key[:1]}, "two words")):  # fmt: skip
        with pytest.raises(KernelValueError, match=match):
            ops.attention(*operands(), **wrong)
    for wrong in ({"dropout": "0.1"}, {"dropout": 0.1, "key": [3, 7]}):
        with pytest.raises(KernelTypeError, match=r"is a number|array of two words"):
            ops.attention(*operands(), **wrong)
    place = np.zeros((1, 1), np.int32)
    assert evaluated(lambda i: flex_attention.kept(key, i, i, i, i, 1, 1, 1 - 1e-12))(place).shape == (1, 1)


def test_short_floats_in_tiles_of_a_gpu():
    of = lambda f: lambda q, k, v: f(q, k, v, mask=checkerboard)
    with jt.config(arch="sm_90"):
        agree(of(ops.attention), of(attention_reference), *operands(dtype="bfloat16", t=150), tolerance=4e-3)


@pytest.mark.usefixtures("by_numpy")
def test_blocks_that_a_mask_empties():
    """Causal documents of 4 and 12 positions: of the second, no tile of queries needs the first's keys."""
    segments = (np.arange(16, dtype=np.int32) >= 4).astype(np.int32)[None]
    heads = lambda t, s: (np.zeros((1, t, 1, 8), "f"), np.zeros((1, s, 1, 8), "f"))
    ranges = evaluated(lambda x: flex_attention.mask_ranges(
        (x,), *heads(16, 16), by=(True, False), bq=4, bk=2, mask=documents, window=(None, 0)
    ))(segments)  # fmt: skip
    assert ranges[0, 0].tolist() == [[0, 2], [2, 4], [2, 6], [2, 8]]
    nothing = evaluated(lambda x: flex_attention.mask_ranges(
        (x,), *heads(8, 4), by=(False, False), bq=4, bk=4, mask=lambda b, h, i, j, x: (i < 0) & (j < 0),
        window=(None, None),
    ))(segments)  # fmt: skip
    assert nothing[0, 0].tolist() == [[1, 0], [1, 0]]


def test_ranges_only_for_what_a_mask_reads():
    reads = lambda mask, *extras: flex_attention._depends("attention", mask, extras, 4, 8)
    assert reads(documents, SEGMENTS) == (True, False)
    assert reads(checkerboard) == (False, True)
    assert reads(lambda b, h, i, j: i >= j) == reads(None) == (False, False)


def test_errors():
    q, k, v = operands()
    with pytest.raises(KernelTypeError, match="mask gives bools"):
        ops.attention(q, k, v, mask=lambda b, h, i, j: i - j)
    with pytest.raises(KernelValueError, match="mask gives bools"):
        ops.attention(q, k, v, mask=lambda b, h, i, j: (i >= j)[None])
    table = normal(5, 4)
    for options, match in (
        ({"mask": lambda b, h, i, j: table[h] > 0}, "mask closes over an array .*give it as one of extras"),
        ({"score": lambda s, b, h, i, j: s * np.ones(4, np.float32)[h]}, "elements of a NumPy array .*one of extras"),
        ({"mask": lambda b, h: b > h}, "called as mask.* with 0 extras: too many"),
        ({"score": lambda s, b, h, i, j: i - j}, "floats, got int32"),
        ({"score": 3}, "score is a function of tiles, got int"),
        ({"mask": documents, "extras": SEGMENTS}, "extras is a tuple of arrays"),
        ({"extras": (SEGMENTS,)}, "read by score and mask"),
    ):
        with pytest.raises(KernelTypeError, match=match):
            ops.attention(q, k, v, **options)
    with pytest.raises(KernelValueError, match="mask gives bools"):
        ops.attention(q, k, v, mask=lambda b, h, i, j: jnp.ones(3, bool))
    with pytest.raises(KernelValueError, match="what score gives has shape"):
        ops.attention(q, k, v, score=lambda s, b, h, i, j: s.sum(1))
    with pytest.raises(KernelValueError, match="write what they mean"):
        ops.attention(q, k, v, mask=checkerboard, lengths=np.array([3, 4], np.int32))
