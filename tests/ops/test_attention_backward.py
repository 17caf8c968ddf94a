"""Reverse mode of attention: against the form with the whole matrix of scores, in every mode; memory; differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_modes import OPTIONS, of_batch, operands
from draws import thorough
from library import differences_agree, gradients_agree, normal

import jtile as jt
from jtile import ops
from jtile.ops.attention_backward import in_one_kernel
from jtile.ops.flash_attention import attention_reference, flash_attention, window_of
from jtile.ops.split_attention import decode_attention_reference
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

DECODE = [{"window": 20}, {"softcap": 4.0, "splits": 3, "scale": 0.2}]


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    q, k, v = operands(2, 300, 300, 2, 1, 24)
    gradients_agree(ops.attention, attention_reference, q, k, v, **of_batch(OPTIONS[name], 2))


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((1, 257, 190, 4, 2, 64), "bfloat16"),
        ((1, 257, 190, 4, 2, 64), "float16"),
        ((2, 1, 5, 1, 1, 8), "float32"),
        ((1, 137, 300, 6, 3, 1), "float32"),
    ],
)
def test_sizes_and_dtypes(sizes, dtype):
    q, k, v = operands(*sizes, dtype=dtype)
    gradients_agree(ops.attention, attention_reference, q, k, v, causal=sizes[1] > 1)


@pytest.mark.parametrize("name", ["two-sided", "all"] if thorough() else ["all"])
def test_finite_differences(name):
    q, k, v = operands(2, 21, 24, 4, 2, 8)
    options = dict(OPTIONS[name])
    options |= {n: s for n, s in {"lengths": (17, 0), "offsets": (6, 3), "window": 5}.items() if n in options}
    with jax.enable_x64(True):
        differences_agree(ops.attention, q, k, v, **of_batch(options, 2))


@pytest.mark.parametrize("name", ["full", "all"])
def test_in_the_interpreter(name):
    q, k, v = operands(2, 20, 26, 2, 1, 8)
    options = of_batch(OPTIONS[name], 2)
    per_row = [options.get(n) for n in ("lengths", "offsets")]
    meta = {"scale": options.get("scale", 8**-0.5), "softcap": options.get("softcap")}
    meta["window"] = window_of("attention", options.get("window"), options.get("causal", False))
    g = normal(9, *q.shape)
    expected = evaluated(lambda *qkv: jax.vjp(lambda *x: attention_reference(*x, **options), *qkv)[1](g))(q, k, v)
    with jt.config(interpret=True):
        o, lse = flash_attention(q, k, v, *per_row, None, bq=12, bk=16, save=True, **meta)
        got = in_one_kernel(q, k, v, o, lse, g, None, *per_row, bq=12, bk=16, **meta)
    assert relative_error(got, expected) < 3e-6


def test_the_log_sum_exp_has_a_cotangent():
    q, k, v = operands(1, 40, 50, 2, 2, 8)
    meta = {"bq": 16, "bk": 16, "scale": 0.3, "softcap": None, "window": (None, None), "save": True}
    ours = lambda q, k, v: flash_attention(q, k, v, None, None, None, **meta)[1]
    scores = lambda q, k, v: 0.3 * jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") + 0 * v.sum()
    gradients_agree(ours, lambda *qkv: jax.nn.logsumexp(scores(*qkv), -1) / jnp.log(2.0), q, k, v)


def test_what_stands_behind_the_length_does_not_matter():
    q, k, v = operands(1, 20, 300, 2, 1, 16)
    lengths = np.array([170], np.int32)
    gradients = evaluated(jax.grad(lambda *qkv: ops.attention(*qkv, lengths=lengths).sum(), (0, 1, 2)))
    behind = np.arange(300)[:, None, None] >= 170
    spoiled = gradients(q, *(np.where(behind, np.float32(np.nan), x) for x in (k, v)))
    for ours, theirs in zip(spoiled, gradients(q, k, v)):
        np.testing.assert_array_equal(ours, theirs)
    assert not np.asarray(spoiled[1])[:, 170:].any()
    assert not np.asarray(spoiled[2])[:, 170:].any()


@pytest.mark.parametrize("sizes", [(0, 3, 3, 1, 1, 8), (1, 0, 3, 1, 1, 8), (1, 3, 0, 1, 1, 8)])
def test_nothing(sizes):
    q, k, v = operands(*sizes)
    for x, gradient in zip((q, k, v), evaluated(jax.grad(lambda *qkv: ops.attention(*qkv).sum(), (0, 1, 2)))(q, k, v)):
        np.testing.assert_array_equal(gradient, np.zeros(x.shape))


def test_under_vmap_and_twice():
    q, k, v = (normal(s, 2, 1, 20, 2, 8) for s in range(3))
    loss = lambda op: lambda q, k, v: (op(q, k, v, causal=True) ** 2).sum()
    of_each = lambda op: evaluated(jax.vmap(jax.grad(loss(op), (0, 1, 2)), (0, None, 0)))(q, k[0], v)
    assert relative_error(of_each(ops.attention), of_each(attention_reference)) < 3e-6
    whole = lambda op: lambda k: sum(jax.vmap(loss(op), (0, None, 0))(q, k, v))
    gradient = lambda op: evaluated(jax.grad(whole(op)))(k[0])
    assert relative_error(gradient(ops.attention), gradient(attention_reference)) < 3e-6
    second = lambda op: evaluated(jax.grad(lambda q: (jax.grad(loss(op))(q, k[0], v[0]) ** 2).sum()))(q[0])
    assert relative_error(second(ops.attention), second(attention_reference)) < 1e-5


def test_memory_is_linear_in_the_sequence():
    def temporary(t: int) -> int:
        x = jax.ShapeDtypeStruct((1, t, 2, 32), jnp.float32)
        step = jax.grad(lambda *qkv: ops.attention(*qkv, causal=True).sum(), (0, 1, 2))
        with jt.config(poison=False):  # of short arrays it is a constant, which is no temporary
            return jax.jit(step).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary(512), temporary(4096)
    assert short < long <= 8.5 * short
    assert long < 8 * (4096 * 2 * 32 * 4)  # a few arrays of q's size; the scores would be 64 times q


@pytest.mark.parametrize("options", DECODE, ids=str)
def test_decode(options):
    q, k, v = normal(0, 2, 3, 4, 16), *(normal(s, 2, 300, 2, 16) for s in (1, 2))
    lengths = np.array([300, 111], np.int32)
    gradients_agree(ops.decode_attention, decode_attention_reference, q, k, v, lengths, of=3, **options)


def test_decode_of_one_token_and_rows_of_no_length():
    q, k, v = normal(0, 3, 4, 8), *(normal(s, 3, 50, 2, 8) for s in (1, 2))
    lengths = np.array([50, 0, 99], np.int32)
    gradients_agree(ops.decode_attention, decode_attention_reference, q, k, v, lengths, of=3)
    with jax.enable_x64(True):
        differences_agree(ops.decode_attention, q, k, v, lengths, of=3)
    pushed = [
        evaluated(lambda q, dq, op=op: jax.jvp(lambda q: op(q, k, v, lengths), (q,), (dq,))[1])(q, normal(9, *q.shape))
        for op in (ops.decode_attention, decode_attention_reference)
    ]
    assert relative_error(*pushed) < 3e-6
