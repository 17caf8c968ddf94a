"""The largest products of up to 64 rows with the rows of a matrix: in the interpreter, and as machine code."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal
from sass import spills_of_products

import jtile as jt
from jtile.ops import gpu_tiles, hopper_largest
from jtile.ops.argmax import keys_of
from jtile.ops.hopper_wide import Form

CASES = {  # rows, n, k, programs, form
    "tiles of several pieces, the last over the edge": (64, 200, 200, 3, Form(24, 1, 2, 64)),
    "few rows, programs with one tile and with two": (20, 384, 128, 2, Form(128, 1, 3, 64)),
    "a program without tiles": (7, 100, 64, 3, Form(64, 1, 2, 64)),
}


def arguments(m, n, k):
    """Whole numbers, so that products are exact; the largest of row 1 is there twice, and row 2 is NaN somewhere."""
    x, w = (np.round(4 * np.asarray(normal(i, rows, k, dtype="float32"))) for i, rows in enumerate((m, n)))
    best = (x[1] @ w.T).argmax()
    w[(best + n // 2) % n] = w[best]
    x[2, 3] = np.nan
    return x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)


def check(x, w, tops, places):
    """One place of each row, of the first of its largest products, and the key of that product."""
    products = np.asarray(x, np.float32) @ np.asarray(w, np.float32).T
    want = np.argmax(products, 1)  # the first NaN, if there is one
    tops, places = np.asarray(tops), np.asarray(places)
    top = tops.max(1)
    assert np.array_equal(np.where(tops == top[:, None], places, w.shape[0]).min(1), want)
    assert np.array_equal(top, keys_of(products[np.arange(len(x)), want]))


@pytest.mark.parametrize("name", CASES)
def test_in_the_interpreter(name):
    *sizes, programs, form = CASES[name]
    x, w = arguments(*sizes)
    check(x, w, *hopper_largest.hopper_largest.interpret(x, w, programs=programs, form=form, seed=len(name)))


def test_where_it_is_taken():
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    x, w = of(64, 4096), of(128256, 4096)
    with jt.config(overlap=True):
        with jt.config(arch="sm_100"):
            assert hopper_largest.misfit(x, w) is not None
        with jt.config(arch="sm_90"):
            for other in ((of(65, 4096), w), (x, of(512, 4096)), (x, jax.ShapeDtypeStruct(w.shape, jnp.float16))):
                assert hopper_largest.misfit(*other) is not None
            assert (hopper_largest.misfit(x, w) is None) == (jax.device_count() == 1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(name):
    *sizes, programs, form = CASES[name]
    x, w = arguments(*sizes)
    for early in (False, True):
        with jt.config(overlap=early):
            run = jax.jit(functools.partial(hopper_largest.hopper_largest, programs=programs, form=form, early=early))
            found = [np.asarray(a) for a in run(x, w)]
            assert all(np.array_equal(a, b) for _ in range(3) for a, b in zip(run(x, w), found))
        check(x, w, *found)


@pytest.mark.gpu
def test_a_head_on_the_gpu():
    x, w = arguments(64, 40000, 512)
    with jt.config(overlap=True):
        assert hopper_largest.misfit(x, w) is None
        check(x, w, *jax.jit(hopper_largest.largest)(x, w))


@pytest.mark.slow
def test_what_it_compiles_to():
    pytest.importorskip("triton")
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with jt.config(arch="sm_90"):
        programs = gpu_tiles.processors()
    found = hopper_largest.hopper_largest.lower(of(64, 4096), of(128256, 4096), programs=programs, target="cuda:sm_90")
    assert not spills_of_products(found.texts["sass"])
    assert f"HGMMA.64x{hopper_largest.FORM.columns}x16" in found.texts["sass"]
