"""Attention that `jnp` spells out becomes the library's, whatever the order of its axes and its scores' change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from benchmarks.fuse import attention_with_bias, causal_attention, masked_attention
from jtile.fusion.chains import Chain
from jtile.testing.evaluate import evaluated

rng = np.random.default_rng(0)
Q, K, V = (jnp.asarray(rng.standard_normal((2, 12, 4, 8)), jnp.float32) for _ in range(3))
BIAS = jnp.asarray(rng.standard_normal((4, 12, 12)), jnp.float32)


pytestmark = pytest.mark.usefixtures("any_size", "by_numpy")


def grouped(q, k, v):
    """Two heads of queries for each head of keys."""
    q = q.reshape(2, 12, 2, 2, 8)
    weights = jax.nn.softmax(jnp.einsum("bqhgd,bkhd->bhgqk", q, k[:, :, :2]) * 0.3)
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights, v[:, :, :2])


def one_head(q, k, v):
    return jax.nn.softmax(q[0, :, 0] @ k[0, :, 0].T / 4) @ v[0, :, 0]


def spelled_out(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.25
    powers = jnp.exp(scores - scores.max(-1, keepdims=True))
    return jnp.einsum("bhqk,bkhd->bhqd", powers / powers.sum(-1, keepdims=True), v)


def capped_with_slopes(q, k, v):
    """A cap, and a slope for each head by how far a key is behind, under a mask of keys that are at most 5 behind."""
    n = jnp.arange(12)
    behind = n[:, None] - n[None, :]
    scores = 3 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 3)
    scores = scores - 0.1 * (1 + jnp.arange(4.0))[None, :, None, None] * behind
    scores = jnp.where((behind >= 0) & (behind < 5), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def strictly_later(q, k, v):
    """Queries see keys behind the diagonal; the last one sees none, and has zeros in `jt.fuse`."""
    n = jnp.arange(12)
    scores = jnp.where(n[:, None] < n[None, :], jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def two_masks(q, k, v):
    n = jnp.arange(12)
    scores = jnp.where(n[None, :] > n[:, None], -jnp.inf, jnp.einsum("bqhd,bkhd->bhqk", q, k))
    scores = jnp.where(n[None, :] <= n[:, None], scores * 0.5, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


# {name: (function, more arguments, what is known of its scores: (scale, causal, whether a function is left))}
FORMS = {
    "causal": (causal_attention, (), (8**-0.5, True, False)),
    "bias": (attention_with_bias, (BIAS,), (1.0, False, True)),
    "mask": (masked_attention, (jnp.arange(12) % 3 > 0,), (1.0, False, True)),
    "grouped": (grouped, (), (0.3, False, False)),
    "one head": (one_head, (), (0.25, False, False)),
    "spelled out": (spelled_out, (), (0.25, False, False)),
    "jax.nn": (lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), (), (1.0, False, True)),
    "capped": (capped_with_slopes, (), (1.0, False, True)),
    "strictly later": (strictly_later, (), (1.0, False, True)),
    "two masks": (two_masks, (), (1.0, False, True)),
}


def chains(f, *args):
    return [unit for unit in jt.fuse(f).explain(*args).plan.units if isinstance(unit, Chain)]


@pytest.mark.parametrize("name", FORMS)
def test_what_is_known_of_the_scores(name):
    f, more, (scale, causal, function) = FORMS[name]
    (chain,) = chains(f, Q, K, V, *more)
    assert (chain.scale, chain.causal, bool(chain.score)) == (pytest.approx(scale), causal, function)


def test_all_forms_are_what_they_say():
    run = lambda change: evaluated(lambda q, k, v: {n: change(f)(q, k, v, *more) for n, (f, more, _) in FORMS.items()})
    got, want = run(jt.fuse)(Q, K, V), run(lambda f: f)(Q, K, V)
    np.testing.assert_array_equal(got["strictly later"][:, -1], 0)
    got["strictly later"], want["strictly later"] = (x["strictly later"][:, :-1] for x in (got, want))
    for name in FORMS:
        np.testing.assert_allclose(got[name], want[name], 1e-5, 1e-5, err_msg=name)


def test_the_gradient_is_that_of_the_library():
    loss = lambda f: lambda q: (f(q, K, V) ** 2).sum()
    got, want = (evaluated(jax.grad(loss(f)))(Q) for f in (jt.fuse(causal_attention), causal_attention))
    np.testing.assert_allclose(got, want, 1e-4, 1e-4)


def test_scores_are_in_no_memory_and_it_grows_with_the_tokens():
    def temporary(f, tokens):
        x = jax.ShapeDtypeStruct((1, tokens, 2, 16), jnp.float32)
        return jax.jit(f).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    ours = [temporary(jt.fuse(causal_attention), n) for n in (512, 2048)]
    assert ours[0] < 512 * 512 <= temporary(causal_attention, 512)
    assert ours[1] <= 4 * ours[0] + 4096


@pytest.mark.parametrize("reduce", [jnp.sum, jnp.max])
def test_a_bias_that_is_a_sum_stays_outside(reduce):
    def biased(q, k, v, parts):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + reduce(parts, 0)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    tokens = Q.shape[1]
    parts = jnp.asarray(np.random.default_rng(0).standard_normal((4, tokens, tokens)), jnp.float32)
    assert len(chains(biased, Q, K, V, parts)) == 1
    np.testing.assert_allclose(jt.fuse(biased)(Q, K, V, parts), jax.jit(biased)(Q, K, V, parts), 1e-4, 1e-5)


def test_what_is_no_attention():
    """Weights that are given, too; scores that are; another sum; a mask that depends on an element of the head."""

    def with_weights(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return weights, jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    def with_scores(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        return scores, jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    def over_queries(q, k, v):
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=2), v)

    def squared(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) ** 2
        return jnp.einsum("bhqk,bkhd->bqhd", scores / scores.sum(-1, keepdims=True), v)

    def half(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(jnp.bfloat16), v.astype(jnp.bfloat16))

    for f in (with_weights, with_scores, over_queries, squared, half):
        assert chains(f, Q, K, V) == []


def test_an_explanation_says_so():
    text = str(jt.fuse(causal_attention).explain(Q, K, V))
    assert "jt.ops.attention: scores times 0.353553, causal; the scores are in no memory" in text
    assert "reads float32[2, 12, 4, 8], float32[2, 12, 4, 8], float32[2, 12, 4, 8]" in text


@pytest.mark.parametrize("fun", [causal_attention, masked_attention])
def test_products_of_float32_are_as_exact_as_the_program_asks(fun):
    """A GPU's products of float32 are of tf32 where nothing is said, as XLA's are."""

    def precision(arch, asked, *args):
        with jt.config(arch=arch), jax.default_matmul_precision(asked):
            (chain,) = jt.fuse(fun).explain(*args, *extra).plan.units
            return chain.precision

    extra = () if fun is causal_attention else (jnp.arange(12) % 3 > 0,)
    assert precision("sm_90", None, Q, K, V) == "fast"
    assert precision("sm_90", "highest", Q, K, V) is None
    assert precision("sm_90", None, *(x.astype(jnp.bfloat16) for x in (Q, K, V))) is None
    if "warps" not in jt.target().features:
        assert precision(None, None, Q, K, V) is None
