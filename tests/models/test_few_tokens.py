"""The mixture of a few tokens on GPUs: its kernels against `jnp` and against what sorts the tokens, on any target."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile.models
from jtile.models import cache as kv
from jtile.models import experts, few_tokens
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated


def normal(*shape, seed, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("parts", [None, 1, 2, 4])
def test_scores(parts):
    """In parts of which the last has fewer terms, or none; and by programs that have all terms."""
    x, w = normal(11, 60, seed=0), normal(10, 60, seed=1)
    of = dict(bt=4, bn=4, bk=16, parts=parts)
    kernel = (
        functools.partial(few_tokens.router_scores, **of) if parts else functools.partial(few_tokens.score_rows, bn=4)
    )
    run = lambda x, w: kernel(x, w).sum(0)
    assert relative_error(run(x, w), x @ w.T) < 1e-6
    total = lambda run: evaluated(jax.grad(lambda x, w: (run(x, w) ** 2).sum(), (0, 1)))(x, w)
    for a, b in zip(total(run), total(lambda x, w: x @ w.T)):
        assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_scores_of_routers_of_any_dtype(monkeypatch, dtype):
    """As GPUs take them, which is what `layers.linear` gives; also for rows of 16 bits."""
    x, w = normal(6, 264, seed=0), normal(12, 264, seed=1, dtype=dtype)
    half = x.astype(jnp.bfloat16)
    expected = few_tokens.scores(x, w), few_tokens.scores(half, w)
    monkeypatch.setattr(few_tokens, "_threads", lambda: True)
    for got, want in zip((few_tokens.scores(x, w), few_tokens.scores(half, w)), expected, strict=True):
        assert got.dtype == jnp.float32 and relative_error(got, want) < 1e-5


@pytest.mark.parametrize("normalised", [False, True])
def test_the_most_probable_experts(normalised):
    """Of equal scores the first one counts, as elsewhere. The scores come in two parts."""
    s = normal(5, 12, seed=2).at[1].set(0.5).at[2, 3:].set(-jnp.inf)
    parts = jnp.stack([s, jnp.zeros_like(s)])
    got, weights = few_tokens.most_probable(parts, k=3, normalised=normalised)
    share, chosen = jax.lax.top_k(jax.nn.softmax(s), 3)
    share = share / share.sum(1, keepdims=True) if normalised else share
    assert np.array_equal(got, chosen) and relative_error(weights, share) < 1e-6
    of = lambda run: evaluated(jax.grad(lambda s: (run(s) * normal(1, 3, seed=3)).sum()))(parts[:, :1])
    ours = of(lambda s: few_tokens.most_probable(s, k=3, normalised=normalised)[1])
    assert relative_error(ours, of(lambda s: few_tokens._shares(s, chosen[:1], normalised))) < 1e-5


@pytest.mark.parametrize("normalised", [False, True])
def test_choices_on_any_target(monkeypatch, normalised):
    x, w = normal(3, 264, seed=0), normal(12, 264, seed=1)
    expected = few_tokens.choose(x, w, 4, normalised)
    monkeypatch.setattr(few_tokens, "_threads", lambda: True)
    got = few_tokens.choose(x, w, 4, normalised)
    assert np.array_equal(got[0], expected[0]) and relative_error(got[1], expected[1]) < 1e-5


def test_products_and_their_gradients():
    """Also of a token that chooses an expert twice."""
    gate_up, down = normal(16, 2 * 24, 40, seed=4, dtype="bfloat16"), normal(16, 40, 24, seed=5, dtype="bfloat16")
    x, share = normal(2, 40, seed=6, dtype="bfloat16"), normal(2, 2, seed=7)
    chosen = jnp.asarray([[3, 15], [3, 3]], jnp.int32)
    of = lambda run: evaluated(jax.grad(lambda x, *rest: run(x, chosen, *rest).astype(jnp.float32).sum(), range(4)))(
        x, share, gate_up, down
    )
    ours, expected = (of(run) for run in (few_tokens.mixture, experts.mixture))
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == b.dtype and relative_error(a, b) < 2e-2
    y = few_tokens.mixture(x, chosen, share, gate_up, down)
    assert relative_error(y, experts.mixture(x, chosen, share, gate_up, down)) < 1e-2


@pytest.mark.parametrize("x_dtype", ["float16", "float32"])
def test_products_in_float16(x_dtype):
    """Rows are rounded to the dtype of the experts, and the sum has that of the rows."""
    gate_up, down = (normal(16, *of, seed=4, dtype="float16") for of in ((2 * 24, 40), (40, 24)))
    x, share, chosen = normal(2, 40, seed=6, dtype=x_dtype), normal(2, 2, seed=7), jnp.asarray([[3, 15], [0, 3]])
    run = jax.jit(lambda of, *args: of(*args), static_argnums=0)
    args = x, chosen.astype(jnp.int32), share, 0.2 * gate_up, 0.2 * down
    got, wide = run(few_tokens.mixture, *args), lambda a: np.asarray(a, np.float64)
    y = np.einsum("td,tkfd->tkf", wide(x.astype("float16")), wide(args[3])[np.asarray(chosen)])
    h = y[..., :24] / (1 + np.exp(-y[..., :24])) * y[..., 24:]
    expected = np.einsum("tkf,tkdf,tk->td", h, wide(args[4])[np.asarray(chosen)], wide(share))
    assert got.dtype == x.dtype and relative_error(got, expected) < 2e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_step_of_a_model(data, monkeypatch, dtype):
    """By the kernels of GPUs for scores, choices and products as by those that sort."""
    lm = jtile.models.load(data / "qwen3_moe", dtype=dtype)
    ids, calls = np.arange(3, 12, dtype=np.int32)[None], []
    _, entries = lm.model.prefill(jnp.asarray(ids))
    cache = kv.from_prefill(entries, jnp.array([9], jnp.int32), kv.Layout(16))
    step = lambda: lm.model.step(jnp.array([7], jnp.int32), cache)[0]
    expected, run = step(), few_tokens.mixture
    monkeypatch.setattr(few_tokens, "_threads", lambda: True)
    monkeypatch.setattr(few_tokens, "mixture", lambda *args: calls.append(0) or run(*args))
    assert relative_error(step(), expected) < {"bfloat16": 2e-2, "float16": 3e-3}[dtype]
    assert len(calls) == len(lm.config.mixture.layers)


def test_which_tokens_it_takes(monkeypatch):
    stack = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, dtype)
    gate_up, down = stack(128, 1536, 2048), stack(128, 2048, 768)
    monkeypatch.setattr(few_tokens, "_threads", lambda: False)
    assert not few_tokens.takes(1, 8, gate_up, down)
    monkeypatch.setattr(few_tokens, "_threads", lambda: True)
    assert few_tokens.takes(1, 8, gate_up, down) and few_tokens.takes(4, 8, gate_up, down)
    assert not few_tokens.takes(5, 8, gate_up, down) and not few_tokens.takes(0, 8, gate_up, down)
    assert not few_tokens.takes(1, 8, stack(128, 1536, 2048, dtype="float32"), stack(128, 2048, 768, dtype="float32"))
    assert not few_tokens.takes(1, 8, (gate_up, gate_up), down)
