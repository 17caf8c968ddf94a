"""Projections of a step in parts: what reads them adds them up, with the tokens of the models' other steps."""

import jax.numpy as jnp
import numpy as np
import pytest

from jtile.models import layers, programs, sums
from jtile.ops import hopper_normed, hopper_wide
from jtile.ops.hopper_wide import Form
from jtile.ops.norms import rms_norm_reference
from jtile.testing import relative_error


def normal(*shape, seed, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def test_the_norm_behind_them():
    z, x, w = normal(3, 5, 96, seed=0), normal(5, 96, seed=1, dtype="bfloat16"), normal(96, seed=2)
    total, normed = sums.Parts(z, "bfloat16").add_norm(x, w, 1e-5)
    want, exact = rms_norm_reference(x.astype(jnp.float32), w, eps=1e-5, residual=z.sum(0))
    assert total.dtype == normed.dtype == jnp.bfloat16
    assert relative_error(total, exact) < 4e-3 and relative_error(normed, want) < 4e-3


def test_which_steps_overlap():
    """Those of a few rows; with long 16-bit matrices, and mixtures, those of some more; with long matrices those of
    many that wide tiles take, also where devices share the rows of the matrices."""
    of = lambda *shape: jnp.zeros(shape, "bfloat16")
    long, short = [of(8, 4096), of(8)], [of(8, 4096), of(8, 2048)]
    most = programs._most_that_overlap
    assert most(64, long) == 64 and most(17, long) == 17 and most(12, long) == 16 and most(64, long, devices=0) == 16
    assert most(64, short, devices=2) == 64
    experts, router, codes = of(2, 8, 2048), jnp.zeros((2, 2048), "float32"), jnp.zeros((2, 8, 1024), "int8")
    assert most(64, [experts, router, *short]) == most(16, [experts, router], devices=0) == 16
    assert most(64, short) == most(64, [codes, router]) == 8


@pytest.mark.parametrize(("name", "options"), [("llama", {}), ("qwen3", {"page_size": 16})])
def test_generation(short, outputs, monkeypatch, name, options):
    """The kernels for parts stand in a model where products make some."""
    ids = outputs(name)["input_ids"][:2]
    lm = short(name, 1, **options)
    whole = lm.generate(ids, 6, eos=None)
    lm._executables.clear()
    asked = []
    monkeypatch.setattr(hopper_wide, "parts_of", lambda x, w: asked.append(w.shape) or 3)
    programs.decode.clear_cache()
    assert np.array_equal(lm.generate(ids, 6, eos=None), whole)
    programs.decode.clear_cache()
    assert len(set(asked)) > 1


def test_products_that_norms_join(short, outputs, monkeypatch):
    """Products before and behind a norm stand in a model where they fit: the same tokens."""
    ids = outputs("llama")["input_ids"][:2]
    lm = short("llama", 2)
    whole = lm.generate(ids, 6, eos=None)
    lm._executables.clear()
    asked = []
    monkeypatch.setattr(layers, "unmade", sums.Product)
    monkeypatch.setattr(hopper_wide, "parts_of", lambda x, w: 3)
    monkeypatch.setattr(hopper_normed, "misfit", lambda x, w, weights: asked.append(len(weights)))
    monkeypatch.setattr(hopper_normed, "choice", lambda n, k: Form(64, 2, 2))
    monkeypatch.setattr(hopper_wide, "choice", lambda n, k, weights: Form(64, 3 if weights == 1 else 1, 2))
    programs.decode.clear_cache()
    assert np.array_equal(lm.generate(ids, 6, eos=None), whole)
    programs.decode.clear_cache()
    assert set(asked) == {1, 2}
