"""The kernel that chooses experts in groups, against the choice by sorts."""

import jax
import numpy as np
import pytest
from library import normal

import jtile as jt
from jtile.models import grouped_choice
from jtile.models.deepseek import MixtureConfig, Router
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

OF = {"groups": 4, "best": 2, "k": 5, "normalised": True, "scale": 2.5}


@pytest.mark.parametrize("arch", [None, "sm_90"])
@pytest.mark.parametrize("normalised", [False, True])
def test_the_same_choice(normalised, arch):
    """Of equal scores the first one counts, in groups and among them; the scores come in two parts."""
    s, options = np.array(normal(2, 6, 32)), OF | {"normalised": normalised}
    s[1], s[2, 8:], s[3, ::3] = 0.5, -np.inf, 0.25
    bias = np.where(np.arange(32) % 5 == 0, np.float32(0.3), np.float32(0))
    bias[:2] = 0
    parts = np.stack([s, np.zeros_like(s)])
    with jt.config(arch=arch):
        got, weights = evaluated(lambda s, b: grouped_choice.best_of_groups(s, b, **options))(parts, bias)
    chosen, share = jax.jit(lambda s, b: grouped_choice.choose(s, b, **options))(s, bias)
    assert np.array_equal(got, chosen) and relative_error(weights, share) < 1e-6
    assert all(len(set(row)) == 5 for row in np.asarray(got).tolist())


def test_gradients_and_what_calls_it(monkeypatch):
    config = MixtureConfig(
        experts=32, chosen=5, groups=4, chosen_groups=2, normalised=True, scale=2.5, shared=0, features=8
    )
    values = {"gate.weight": normal(1, 32, 16), "gate.e_score_correction_bias": normal(3, 32) * 0.1}
    router, x = Router(config, 16, lambda name, shape: values[name], "gate."), normal(5, 4, 16)
    run = lambda x: router(x)
    slope = lambda x: jax.grad(lambda x: (router(x)[1] * normal(7, 4, 5)).sum())(x)
    want = evaluated(run)(x), evaluated(slope)(x)
    monkeypatch.setattr(grouped_choice, "fits", lambda *_: True)
    run, slope = (lambda x, f=f: f(x) for f in (run, slope))  # JAX knows what the functions of before are
    assert "best_of_groups" in str(jax.make_jaxpr(run)(x))
    got = evaluated(run)(x), evaluated(slope)(x)
    assert np.array_equal(got[0][0], want[0][0]) and relative_error(got[0][1], want[0][1]) < 1e-6
    assert relative_error(got[1], want[1]) < 1e-5


def test_what_fits():
    assert not grouped_choice.fits(256, 8, 4, 8)  # on a CPU
    with jt.config(arch="sm_90"):
        assert grouped_choice.fits(256, 8, 4, 8) and grouped_choice.fits(64, 1, 1, 6)
        assert not grouped_choice.fits(160, 8, 3, 6) and not grouped_choice.fits(256, 8, 4, 17)
