"""Attention with functions for scores and masks: documents, windows, ALiBi, relative positions, caps, sinks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import agree, gradients_agree, normal
from ttir import run_ttir

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.interpret import interpret
from jtile.ops import flex_attention, flex_lists
from jtile.ops.flash_attention import attention_reference
from jtile.testing import relative_error
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


def far(b, h, i, j):
    return (j < 5) | ((i - j < 70) & (j <= i))


@pytest.mark.parametrize("options", [{"mask": checkerboard}, {"mask": far, "softcap": 3.0}, {"dropout": 0.3}])
def test_lists_of_blocks_on_a_gpu(options):
    """With what `documents` says besides; gradients, too, which are those of ranges."""
    segments = np.sort(np.random.default_rng(0).integers(0, 3, (2, 300), np.int32), axis=1)
    mask = options.get("mask", lambda b, h, i, j: j <= i)
    both = lambda b, h, i, j, x: mask(b, h, i, j) & ((j < 5) | documents(b, h, i, j, x))
    more = {n: x for n, x in options.items() if n != "mask"}
    more |= {"key": np.array([3, 7], np.uint32)} if "dropout" in more else {}
    of = lambda f: lambda q, k, v, x: f(q, k, v, mask=both, extras=(x,), **more)
    args = *operands(dtype="bfloat16", d=64, t=300), segments
    with jt.config(arch="sm_90"):
        text = str(jax.make_jaxpr(of(ops.attention))(*args))
        agree(of(ops.attention), of(attention_reference), *args, tolerance=6e-3)
        pulled = lambda f: lambda *x: jax.vjp(lambda *y: of(f)(*y, x[3]), *x[:3])[1](x[0])
        got = evaluated(pulled(ops.attention))(*args)
    assert "listed_attention" in text
    for ours, exact in zip(got, evaluated(pulled(attention_reference))(*args), strict=True):
        assert relative_error(ours, exact) < 1.5e-2


def test_layers_share_lists():
    """The mask of a step is evaluated once: XLA finds that the calls are one."""

    def layers(q, k, v, x):
        for _ in range(3):
            q = ops.attention(q, k, v, mask=documents, extras=(x,))
        return q

    with jt.config(arch="sm_90"):
        text = jax.jit(layers).lower(*operands(dtype="bfloat16", d=64), SEGMENTS).compile().as_text()
    assert text.count(" custom-call(") == 4


@pytest.mark.usefixtures("by_numpy")
def test_lists_name_whole_blocks_first():
    """Causal documents of 4 and 12 positions, of two heads; the second sees all of its document. 15 queries."""
    segments = (np.arange(16, dtype=np.int32) >= 4).astype(np.int32)[None]
    mask = lambda b, h, i, j, x: documents(b, h, i, j, x) & ((h == 1) | (j <= i))
    run = lambda x: flex_lists.mask_lists(
        (x,), by=(True, True), sizes=(1, 2, 15, 16), bq=4, bk=2, mask=mask, window=(None, None), chunk=3
    )
    kinds, lists, counts, ranges = evaluated(run)(segments)
    assert kinds[0, 0].tolist() == [
        [1, 1, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 2, 2, 1, 1, 0, 0], [0, 0, 2, 2, 2, 2, 1, 1]
    ]  # fmt: skip
    assert counts[0, 0].tolist() == [[0, 2], [0, 2], [2, 4], [4, 6]]
    assert counts[0, 1].tolist() == [[2, 2], [6, 6], [6, 6], [6, 6]]
    assert lists[0, 0, 2].tolist() == [2, 3, 4, 5, 0, 1, 6, 7]
    assert ranges[0, 0].tolist() == [[0, 2], [2, 4], [2, 6], [2, 8]]


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


def test_lists_as_a_gpu_makes_them():
    """The text for GPUs, evaluated: blocks and tiles that hang over, parts of four blocks, the last program to come."""
    segments = np.sort(np.random.default_rng(0).integers(0, 4, (2, 148), np.int32), axis=1)
    mask = lambda b, h, i, j, x: documents(b, h, i, j, x) & ((h == 1) | (j <= i))
    kernel = flex_lists.mask_lists.lower(
        (segments,), by=(True, True), sizes=(2, 2, 148, 148), bq=32, bk=16, mask=mask, window=(None, 60)
    ).kernel
    for got, want in zip(run_ttir(kernel, [segments]), interpret(kernel, [segments]), strict=True):
        assert np.array_equal(got, want)
