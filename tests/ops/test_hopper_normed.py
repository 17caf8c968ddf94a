"""Products before and behind a norm: in the interpreter, and as machine code."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal
from sass import spills_of_products

import jtile as jt
from jtile.ops import gpu_tiles, hopper_normed, hopper_wide
from jtile.ops.hopper_wide import Form
from jtile.testing import relative_error

CASES = {  # rows; n, k of the first product; its form; n of the second, its weights and form
    "parts": (64, 200, 520, Form(24, 3, 2), 96, 1, Form(40, 2, 2)),
    "few rows, whole sums, a gated product": (20, 136, 192, Form(112, 1, 2), 72, 2, Form(40, 1, 2)),
}
EPS = 1e-5


def arguments(m, n, k, _, n_behind, count, __):
    x, w, r = (np.asarray(normal(i, *shape, dtype="bfloat16")) for i, shape in enumerate(((m, k), (n, k), (m, n))))
    weights = tuple(np.asarray(normal(5 + i, n_behind, n, dtype="bfloat16")) for i in range(count))
    return (x, w, r, np.asarray(normal(3, n, dtype="float32"))), weights


def reference(x, w, r, norm, weights):
    y = np.asarray(r, np.float32) + np.asarray(x, np.float32) @ np.asarray(w, np.float32).T
    normed = y / np.sqrt((y**2).mean(1, keepdims=True) + EPS) * norm
    one, *other = (normed @ np.asarray(w, np.float32).T for w in weights)
    return y, one / (1 + np.exp(-one)) * other[0] if other else one


def runs(name):
    form, count, behind = CASES[name][3], *CASES[name][5:]
    options = dict(form=behind, activation="silu" if count > 1 else None, out_dtype="float32", eps=EPS)
    return functools.partial(hopper_normed.into_norm, form=form), functools.partial(
        hopper_normed.behind_norm, **options
    )


@pytest.mark.parametrize("name", CASES)
def test_in_the_interpreter(name):
    first, weights = arguments(*CASES[name])
    into, behind = runs(name)
    y, scaled, squares, _ = into.func.interpret(*first, seed=len(name), **into.keywords)
    out = behind.func.interpret(np.asarray(scaled), np.asarray(squares), weights, seed=len(name), **behind.keywords)
    want, exact = reference(*first, weights)
    assert relative_error(np.asarray(y, np.float32), want) < 4e-3
    assert relative_error(np.asarray(out).sum(0), exact) < 1e-2


def test_which_products(monkeypatch):
    """Those of a decoder with long rows, in bfloat16: a row without its norm may overflow float16."""
    monkeypatch.setattr(gpu_tiles, "processors", lambda: 132)
    monkeypatch.setattr(hopper_wide, "misfit", lambda x, weights: None)
    assert hopper_normed.choice(4096, 14336) == hopper_normed.choice(4096, 4096) == Form(64, 2, 6)
    assert hopper_normed.choice(512, 4096) is None and hopper_normed.choice(128256, 4096) is None
    of = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    assert hopper_normed.misfit(of(64, 4096), of(4096, 4096), (of(6144, 4096),)) is None
    half = [of(n, 4096, dtype="float16") for n in (64, 4096, 6144)]
    assert "overflow" in str(hopper_normed.misfit(*half[:2], (half[2],)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(name):
    first, weights = arguments(*CASES[name])
    into, behind = runs(name)
    want, exact = reference(*first, weights)
    for early in (False, True):
        with jt.config(overlap=early):

            @jax.jit
            def run(first, weights, early=early):
                y, scaled, squares, _ = into(*first, early=early)
                return y, behind(scaled, squares, weights, early=early)

            y, out = map(np.asarray, run(first, weights))
            for _ in range(3):
                assert all(map(np.array_equal, map(np.asarray, run(first, weights)), (y, out)))
        assert relative_error(np.asarray(y, np.float32), want) < 4e-3
        assert relative_error(out.sum(0), exact) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k", "count"), [(14336, 4096, 2), (6144, 4096, 1)])
def test_what_it_compiles_to(n, k, count):
    pytest.importorskip("triton")
    of = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
    with jt.config(arch="sm_90"):
        forms = hopper_normed.choice(k, n), hopper_wide.choice(n, k, count)
    x, squares = of(64, k), of(64, 64, dtype=jnp.float32)
    options = dict(form=forms[1], activation="silu" if count > 1 else None, out_dtype="bfloat16", eps=EPS)
    behind = hopper_normed.behind_norm.lower(x, squares, (of(n, k),) * count, target="cuda:sm_90", **options)
    operands = of(64, n), of(k, n), x, of(k, dtype=jnp.float32)
    into = hopper_normed.into_norm.lower(*operands, form=forms[0], target="cuda:sm_90")
    for found in (behind, into):
        assert not spills_of_products(found.texts["sass"])
