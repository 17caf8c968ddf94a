"""Up to 64 rows of x times a matrix in wide tiles: in the interpreter, as the ops choose it, and as machine code."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal
from sass import spills_of_products

import jtile as jt
from jtile import ops
from jtile.ops import gpu_tiles, hopper_wide
from jtile.ops.gated_mlp import gated_mlp_reference
from jtile.ops.hopper_wide import Form
from jtile.testing import relative_error

CASES = {  # rows, n, k, weights; form, dtype
    "tiles of several pieces, parts of unequal length": (64, 200, 520, 1, Form(24, 3, 2), "bfloat16"),
    "few rows, two weights, a tile over the edge": (20, 200, 192, 2, Form(112, 1, 2), "float16"),
    "a part without rounds": (5, 128, 136, 1, Form(128, 4, 3), "bfloat16"),
}


def arguments(m, n, k, count, dtype):
    x, *weights = (np.asarray(normal(i, rows, k, dtype=dtype)) for i, rows in enumerate((m, *[n] * count)))
    return x, tuple(weights)


def reference(x, weights):
    one, *other = (np.asarray(x, np.float32) @ np.asarray(w, np.float32).T for w in weights)
    return one / (1 + np.exp(-one)) * other[0] if other else one


def options(form, weights, dtype):
    gated = len(weights) > 1
    return dict(form=form, activation="silu" if gated else None, out_dtype=dtype if gated else "float32")


@pytest.mark.parametrize("name", CASES)
def test_in_the_interpreter(name):
    *sizes, form, dtype = CASES[name]
    x, weights = arguments(*sizes, dtype)
    y = hopper_wide.hopper_wide.interpret(x, weights, seed=len(name), **options(form, weights, dtype))
    assert y.shape == (form.parts, x.shape[0], sizes[1])
    assert relative_error(np.asarray(y, np.float32).sum(0), reference(x, weights)) < (
        1e-3 if len(weights) > 1 else 1e-6
    )


def test_forms(monkeypatch):
    """One round of the multiprocessors: of wide tiles for the projections of a decoder, in parts where rows are few."""
    monkeypatch.setattr(gpu_tiles, "processors", lambda: 132)
    assert hopper_wide.choice(14336, 4096, 2) == Form(112, 1, 2)
    assert hopper_wide.choice(4096, 14336, 1) == hopper_wide.choice(4096, 4096, 1) == Form(128, 4, 4)
    assert hopper_wide.choice(6144, 4096, 1) == Form(96, 2, 4)
    assert hopper_wide.choice(128256, 4096, 1) is None and hopper_wide.choice(64, 4096, 1) is None


def test_where_it_is_taken():
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    x, w = of(40, 4096), of(14336, 4096)
    gated = lambda x: ops.choices(lambda *args: ops.gated_mlp(*args, transpose=True), x, w, w)[0]
    with jt.config(arch="sm_90", overlap=True):
        assert gated(of(65, 4096)).implementation == gated(of(16, 4096)).implementation == "tiles"
        with jt.config(overlap=False):
            assert gated(x).implementation == "tiles" and hopper_wide.parts_of(x, of(4096, 4096)) == 1
        if jax.device_count() > 1:
            return
        assert gated(x).implementation == "rows against it, in wide tiles"
        assert hopper_wide.parts_of(x, of(4096, 4096)) == 4 and hopper_wide.parts_of(x, w) == 1


def test_what_stands_in():
    """Where no kernel makes parts, the first is the sum."""
    x, (w,) = arguments(5, 24, 64, 1, "bfloat16")
    y = hopper_wide.in_parts(x, w, parts=3)
    assert y.shape == (3, 5, 24) and relative_error(y.sum(0), reference(x, (w,))) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(name):
    *sizes, form, dtype = CASES[name]
    x, weights = arguments(*sizes, dtype)
    for early in (False, True):
        made = functools.partial(hopper_wide.hopper_wide, early=early, **options(form, weights, dtype))
        with jt.config(overlap=early):
            run = jax.jit(made)
            y = np.asarray(run(x, weights), np.float32)
            assert all(np.array_equal(np.asarray(run(x, weights), np.float32), y) for _ in range(3))
        assert relative_error(y.sum(0), reference(x, weights)) < (2e-3 if len(weights) > 1 else 2e-6)


@pytest.mark.gpu
def test_gated_on_the_gpu():
    x, (gate, up) = arguments(33, 14336, 512, 2, "bfloat16")
    with jt.config(overlap=True):
        assert ops.choices(lambda *a: ops.gated_mlp(*a, transpose=True), x, gate, up)[0].implementation.endswith(
            "wide tiles"
        )
        got = ops.gated_mlp(x, gate, up, transpose=True)
    assert relative_error(got, gated_mlp_reference(x, gate, up, transpose=True)) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k", "count"), [(14336, 4096, 2), (4096, 14336, 1), (6144, 4096, 1)])
def test_what_it_compiles_to(n, k, count):
    pytest.importorskip("triton")
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with jt.config(arch="sm_90"):
        form = hopper_wide.choice(n, k, count)
    weights = (of(n, k),) * count
    found = hopper_wide.hopper_wide.lower(of(64, k), weights, **options(form, weights, "bfloat16"), target="cuda:sm_90")
    assert not spills_of_products(found.texts["sass"])
    assert f"HGMMA.64x{form.columns}x16" in found.texts["sass"]
