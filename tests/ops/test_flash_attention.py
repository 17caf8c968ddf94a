"""Attention against the form with the whole matrix of scores, and against jax.nn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_modes import OPTIONS, of_batch, operands
from library import agree, normal, shapes_and_dtypes
from machines import machine

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.lowering.triton.block.passes import NoPlan, block_level
from jtile.ops.attention_windows import LOG2_E, lacking, scores
from jtile.ops.flash_attention import attention_reference, flash_attention, window_of
from jtile.passes import TILE, run_pipeline
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated
from jtile.tune import warpgroups
from jtile.tune.programs import trace

TOLERANCE = {
    "float32": 2e-6,
    "bfloat16": 8e-3,
    "float16": 1e-3,
}  # 16 bits: the weights are rounded before the second product
SIZES = [(1, 257, 257, 4, 2, 64), (2, 1, 5, 1, 1, 8), (1, 37, 500, 3, 3, 1), (1, 130, 3, 2, 1, 40)]


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    q, k, v = operands(2, 300, 300, 2, 1, 24)
    agree(ops.attention, attention_reference, q, k, v, tolerance=TOLERANCE["float32"], **of_batch(OPTIONS[name], 2))


def test_sinks():
    """Scores of no key: values, gradients of all operands, and what does not fit."""
    (q, k, v), sinks = operands(2, 20, 30, 4, 2, 8), np.asarray(normal(5, 4))
    masked = {"causal": True, "window": 7, "lengths": np.array([30, 5], np.int32)}
    agree(ops.attention, attention_reference, q, k, v, tolerance=2e-6, sinks=sinks, **masked)
    gradients = (
        evaluated(jax.grad(lambda *a, f=f: (f(*a[:3], sinks=a[3], causal=True) ** 2).sum(), (0, 1, 2, 3)))(
            q, k, v, sinks
        )
        for f in (ops.attention, attention_reference)
    )
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(*gradients, strict=True))
    with pytest.raises(KernelValueError, match="sinks"):
        ops.attention(q, k, v, sinks=sinks[:3])
    with pytest.raises(KernelTypeError, match="sinks"):
        ops.attention(q, k, v, sinks=np.ones(4, np.int32))


@pytest.mark.parametrize("name", OPTIONS)
def test_in_the_interpreter(name):
    q, k, v = operands(2, 40, 52, 2, 1, 8)
    options = of_batch(OPTIONS[name], 2)
    expected = evaluated(lambda *qkv: attention_reference(*qkv, **options))(q, k, v)
    per_row = [options.get(n) for n in ("lengths", "offsets")]
    meta = {"scale": options.get("scale", 8**-0.5), "softcap": options.get("softcap"), "bq": 12, "bk": 16}
    meta["window"] = window_of("attention", options.get("window"), options.get("causal", False))
    assert relative_error(flash_attention.interpret(q, k, v, *per_row, None, **meta), expected) < 2e-6


@pytest.mark.parametrize(("sizes", "dtype"), shapes_and_dtypes(SIZES))
def test_sizes_and_dtypes(sizes, dtype):
    q, k, v = operands(*sizes, dtype=dtype)
    agree(ops.attention, attention_reference, q, k, v, causal=sizes[1] > 1, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("sizes", [(0, 3, 3, 1, 1, 8), (1, 0, 3, 1, 1, 8), (1, 3, 0, 1, 1, 8)])
def test_nothing(sizes):
    q, k, v = operands(*sizes)
    y = ops.attention(q, k, v)
    assert y.shape == q.shape
    assert not np.asarray(y).any()


def test_as_jax_nn():
    q, k, v = operands(2, 130, 130, 4, 2, 32)
    for causal in (False, True):
        reference = functools.partial(jax.nn.dot_product_attention, is_causal=causal)
        expected = evaluated(reference)(q, k, v)
        assert relative_error(ops.attention(q, k, v, causal=causal), expected) < 2e-6
    expected = evaluated(lambda *qkv: jax.nn.dot_product_attention(*qkv, local_window_size=(20, 5)))(q, k, v)
    assert relative_error(ops.attention(q, k, v, window=(20, 5)), expected) < 2e-6


def test_what_stands_behind_the_length_does_not_matter():
    q, k, v = operands(1, 20, 300, 1, 1, 16)
    k, v, lengths = np.array(k), np.array(v), np.array([170], np.int32)
    expected = ops.attention(q, k[:, :170], v[:, :170])
    k[:, 170:], v[:, 170:] = np.nan, np.nan
    np.testing.assert_allclose(ops.attention(q, k, v, lengths=lengths), expected, rtol=1e-5, atol=1e-6)


def test_heads_between_powers_of_two_on_hopper():
    """Tiles of the next power of two, with zeros behind the features."""
    q, k, v = (normal(i, 1, n, 1, 40, dtype="bfloat16") for i, n in enumerate((70, 300, 300)))
    with jt.config(arch="sm_90", interpret=True):
        (program,), _ = trace(ops.attention, q, k, v)
        y = ops.attention(q, k, v)
    assert not isinstance(block_level(run_pipeline(program.kernel, TILE), machine(), {}), NoPlan)
    assert relative_error(y, evaluated(attention_reference)(q, k, v)) < 5e-3


def test_scores_of_any_size():
    q, k, v = operands(1, 64, 64, 1, 1, 16)
    agree(ops.attention, attention_reference, 300 * np.asarray(q), k, v, causal=True, tolerance=1e-4)


def test_errors():
    q, k, v = operands(1, 4, 4, 2, 2, 8)
    for problem, args, kw in [
        ("2 query heads do not divide", (q, *(jnp.zeros((1, 4, 3, 8)),) * 2), {}),
        (r"v has shape", (q, k, v[:, :2]), {}),
        (r"k has shape", (q, k[..., :4], v[..., :4]), {}),
        ("window holds at least .*, got window=0", (q, k, v), {"window": 0}),
        ("softcap is a positive number, got 0", (q, k, v), {"softcap": 0.0}),
        (r"lengths has shape \(2,\)", (q, k, v), {"lengths": jnp.zeros(2, jnp.int32)}),
        (r"\[batch, t, heads, d\]", (q[0], k, v), {}),
    ]:
        with pytest.raises(KernelValueError, match=problem):
            ops.attention(*args, **kw)
    with pytest.raises(KernelTypeError, match="one dtype"):
        ops.attention(q, k.astype(jnp.bfloat16), v)
    for window in (2.5, True, (1, 2, 3), (1, 2.0)):
        with pytest.raises(KernelTypeError, match="a window is an int, or a pair"):
            ops.attention(q, k, v, window=window)
    with pytest.raises(KernelTypeError, match="lengths is an integer array"):
        ops.attention(q, k, v, lengths=jnp.zeros(1))


def test_a_cap_in_few_instructions():
    s = np.concatenate([np.linspace(-80, 80, 999), [-1e30, -3e3, 0, 1e-6, 3e3, 1e30]]).astype(np.float32)
    short, long = (evaluated(lambda s, short=short: scores(s, 0.7, 20.0, short=short))(s) for short in (True, False))
    np.testing.assert_allclose(short + lacking(20.0, True), long, atol=1e-6 * 20 * LOG2_E, rtol=0)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sums_of_capped_scores(dtype):
    """Scores of 16-bit operands lack a constant inside of the kernel, sums of their exponentials do not."""
    q, k, v = (normal(s, 1, 40, 2, 32, dtype=dtype) for s in range(3))
    lengths = np.array([30], np.int32)
    options = {"scale": 0.4, "softcap": 3.0, "window": (None, 0)}
    o, lse = flash_attention.interpret(q, k, v, lengths, None, None, bq=16, bk=16, save=True, **options)
    s = 3.0 * jnp.tanh(0.4 * jnp.einsum("bihd,bjhd->bhij", *(x.astype(jnp.float32) for x in (q, k))) / 3.0)
    i, j = np.ogrid[:40, :40]
    s = jnp.where((j <= i) & (j < 30), s, -jnp.inf)
    np.testing.assert_allclose(lse, jax.nn.logsumexp(s, axis=-1) / np.log(2), rtol=1e-4, atol=1e-4)
    want = attention_reference(q, k, v, causal=True, lengths=lengths, scale=0.4, softcap=3.0)
    np.testing.assert_allclose(np.float32(o), np.float32(want), atol=2e-3)


def test_lengths_take_smaller_blocks_only_of_long_heads():
    """Beside two rounds of keys and values of 256 features, consumers have no room for values of their own."""
    for d in (64, 128, 256):
        for causal in (False, True):
            plain, counted = (warpgroups.attention(4096, 4096, d, 2, causal, lengths) for lengths in (False, True))
            assert counted == (plain if d < 256 else {"bq": plain["bq"], "bk": 32})
