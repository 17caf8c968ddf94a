"""Products of float32 on CPUs whose tile registers multiply bfloat16: in three parts with bfloat16 numbers, without any
loss, and in two parts with float32 where `precision="high"` allows it. Elsewhere they are those of vectors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fenced import Fenced

import jtile as jt
from jtile import ops
from jtile.ffi import run_image
from jtile.lowering.cpu import bfloat_parts
from jtile.lowering.cpu.isa import host_isa
from jtile.testing import relative_error

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("by_numpy")]
TILES = bfloat_parts.fits(host_isa())


@jt.kernel(out_type=lambda a, b, c, **_: jt.like(c), grid=lambda *_, **__: 1)
def product(a, b, c, y, *, turned: bool, add: bool, precision: str | None = "high"):
    B = jnp.swapaxes(b[...], -1, -2) if turned else b[...]
    y[...] = jt.dot(a[...], B, c[...] if add else None, precision=precision)


def operands(m: int, n: int, k: int, a: str, b: str, turned: bool, batch: tuple[int, ...] = ()):
    rng = np.random.default_rng(m + n + k)
    of = lambda dtype, *shape: jnp.asarray(rng.normal(size=(*batch, *shape)), dtype)
    return of(a, m, k), of(b, *((n, k) if turned else (k, n))), of("float32", m, n)


def expected(a, b, c, turned: bool, add: bool, precision: str | None = None):
    a, b, c = (np.asarray(jnp.asarray(x, jnp.float32)).astype(np.float64) for x in (a, b, c))
    return a @ (b.swapaxes(-1, -2) if turned else b) + c * add


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("m", "n", "k", "a", "b", "add", "batch"), [
    (32, 32, 64, "float32", "float32", False, ()), (53, 80, 96, "float32", "float32", True, ()),
    (16, 16, 32, "float32", "bfloat16", True, ()), (68, 48, 64, "bfloat16", "float32", False, ()),
    (16, 32, 32, "float32", "float32", True, (2, 3)), (24, 16, 1600, "float32", "float32", True, ()),
])  # fmt: skip
def test_two_parts(m, n, k, a, b, add, batch, turned):
    given, meta = operands(m, n, k, a, b, turned, batch), dict(turned=turned, add=add)
    found = relative_error(product(*given, **meta), expected(*given, **meta))
    assert (2e-7 < found < 1e-5) if TILES else found < 1e-6
    assert relative_error(product.interpret(*given, **meta), expected(*given, **meta)) < 1e-6
    assert ("@bfloat_parts_" in product.lower(*given, **meta).texts["llvm"]) == TILES


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("m", "n", "k", "a", "b", "add"), [
    (12, 16, 32, "float32", "bfloat16", False), (47, 48, 96, "bfloat16", "float32", True),
    (33, 80, 64, "float32", "bfloat16", True), (20, 32, 1632, "bfloat16", "float32", False),
])  # fmt: skip
def test_three_parts_are_all_of_a_float32(m, n, k, a, b, add, turned):
    given, meta = operands(m, n, k, a, b, turned), dict(turned=turned, add=add, precision=None)
    assert relative_error(product(*given, **meta), expected(*given, **meta)) < 5e-7
    assert ("@bfloat_parts_" in product.lower(*given, **meta).texts["llvm"]) == TILES
    assert "@bfloat_parts_" not in product.lower(*given, target="cpu:avx512", **meta).texts["llvm"]


@jt.kernel(out_type=lambda a, b: jax.ShapeDtypeStruct((16, 32), jnp.float32), grid=lambda *_: 1)
def of_casts(a, b, y):
    y[...] = jt.dot(a[...], b[...].astype(jnp.float32).T)


def test_a_matrix_that_was_cast_is_one_part():
    a, b, _ = operands(16, 32, 64, "float32", "bfloat16", True)
    text = of_casts.lower(a, b).texts["llvm"]
    assert ("@bfloat_parts_16x32x64_float32_bfloat16_3_1_t" in text) == TILES
    assert relative_error(of_casts(a, b), expected(a, b, 0 * a[:, :32], True, False)) < 5e-7


@pytest.mark.parametrize("op", [ops.matmul, ops.gated_mlp])
def test_ops(op):
    """Rows of 700 numbers have programs of their own, and no tiles; of 704 they have wide programs."""
    for m, n, k in ((300, 208, 704), (12, 64, 64), (70, 96, 700)):
        x, w, _ = operands(m, n, k, "float32", "bfloat16", True)
        if op is ops.matmul:
            got, want = ops.matmul(x, w, transpose_b=True, out_dtype=jnp.float32), expected(x, w, 0, True, False)
        else:
            got = ops.gated_mlp(x, w, w, activation="relu", transpose=True, out_dtype=jnp.float32)
            want = expected(x, w, 0, True, False)
            want = np.maximum(want, 0) * want
        assert relative_error(got, want) < 1e-6


@pytest.mark.parametrize(("m", "n", "k", "a", "b"), [
    (8, 32, 64, "float32", "float32"), (16, 40, 64, "float32", "float32"), (16, 16, 48, "float32", "float32"),
    (16, 16, 32, "float16", "float32"),
])  # fmt: skip
def test_other_sizes_and_dtypes_are_those_of_vectors(m, n, k, a, b):
    given, meta = operands(m, n, k, a, b, True), dict(turned=True, add=False)
    assert relative_error(product(*given, **meta), expected(*given, **meta)) < 1e-6


def test_numbers_that_are_not_finite():
    """They stay in their row, and their signs are those of the product."""
    a, b, c = operands(32, 16, 32, "float32", "bfloat16", False)
    a = a.at[0, 3].set(jnp.inf).at[1, 4].set(jnp.nan).at[2].set(0.0)
    y = np.asarray(product(a, b, c, turned=False, add=False, precision=None))
    np.testing.assert_array_equal(y[0], np.inf * np.sign(np.asarray(b[3].astype(jnp.float32))))
    assert np.isnan(y[1]).all() and (y[2] == 0).all() and np.isfinite(y[3:]).all()


@pytest.mark.parametrize("precision", [None, "high"])
@pytest.mark.parametrize("turned", [False, True])
def test_numbers_that_bfloat16_would_round_to_infinite_ones(precision, turned):
    """The largest float32 numbers are multiplied as what they are, also those that stand for nothing."""
    a, b, c = operands(32, 16, 32, "float32", "bfloat16" if precision is None else "float32", turned)
    most = float(np.finfo(np.float32).max)
    a, b = a.at[0].set(0.0).at[0, 3].set(most).at[1, 4].set(-most).at[1, 5].set(most), b * 1e-3
    b = b.at[:, 4:6].set(0.0) if turned else b.at[4:6].set(0.0)
    got = product(a, b, c, turned=turned, add=False, precision=precision)
    assert relative_error(got, expected(a, b, c, turned, False)) < 1e-5
    assert relative_error(got[1:], expected(a, b, c, turned, False)[1:]) < 1e-5


@pytest.mark.parametrize("side", ["a", "b"])
def test_infinite_numbers_in_two_parts(side):
    """An infinite float32 meets a number whose second part is zero."""
    a, b, c = (jnp.ones(shape, jnp.float32) for shape in ((16, 32), (32, 16), (16, 16)))
    a, b = (a.at[0, 3].set(jnp.inf), b) if side == "a" else (a, b.at[3, 0].set(-jnp.inf))
    y = np.asarray(product(a, b, c, turned=False, add=False))
    np.testing.assert_array_equal(y, product.interpret(a, b, c, turned=False, add=False))


@pytest.mark.parametrize("precision", [None, "high"])
def test_integers_are_exact(precision):
    """What the parts hold is multiplied without error, of any magnitude that has no subnormal parts."""
    rng = np.random.default_rng(0)
    few = 100 if precision else 1 << 17
    a = jnp.asarray(rng.integers(-few, few, (16, 64)) * 2.0**60, jnp.float32)
    b = jnp.asarray(rng.integers(-1, 2, (64, 32)) * 2.0**-90, jnp.float32)
    b = b if precision else b.astype(jnp.bfloat16)
    got = product(a, b, jnp.zeros((16, 32), jnp.float32), turned=False, add=False, precision=precision)
    np.testing.assert_array_equal(got, expected(a, b, got, False, False))


@pytest.mark.parametrize("at_end", [False, True])
def test_arrays_are_read_inside(at_end):
    a, b, c = operands(35, 48, 800, "float32", "bfloat16", True)
    meta = dict(turned=True, add=True, precision=None)
    with jt.config(poison=False):  # that would be one more operand
        art = product.lower(a, b, c, **meta).artifact
    fenced = Fenced()
    *inputs, y = (fenced.copy(np.asarray(x), at_end) for x in (a, b, c, np.full((35, 48), 7, np.float32)))
    run_image(art.image, [*inputs, y], **{k: art.launch[k] for k in ("programs", "workspace", "isa", "sites", "name")})
    assert relative_error(y, expected(a, b, c, True, True)) < 5e-7
