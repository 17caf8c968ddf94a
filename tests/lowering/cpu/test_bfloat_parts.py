"""`precision="high"` of float32 products on CPUs: on tile registers, of numbers in two parts, and elsewhere exact."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.lowering.cpu import bfloat_parts
from jtile.lowering.cpu.isa import host_isa
from jtile.testing import relative_error

pytestmark = pytest.mark.cpu
TILES = bfloat_parts.fits(host_isa())


@jt.kernel(out_type=lambda a, b, c, **_: jt.like(c), grid=lambda *_, **__: 1)
def product(a, b, c, y, *, turned: bool, add: bool):
    y[...] = jt.dot(
        a[...], jnp.swapaxes(b[...], -1, -2) if turned else b[...], c[...] if add else None, precision="high"
    )


def operands(m: int, n: int, k: int, a: str, b: str, turned: bool, batch: tuple[int, ...] = ()):
    rng = np.random.default_rng(m + n + k)
    of = lambda dtype, *shape: jnp.asarray(rng.normal(size=(*batch, *shape)), dtype)
    return of(a, m, k), of(b, *((n, k) if turned else (k, n))), of("float32", m, n)


def expected(a, b, c, turned: bool, add: bool):
    a, b, c = (np.asarray(x.astype(jnp.float32)).astype(np.float64) for x in (a, b, c))
    return a @ (b.swapaxes(-1, -2) if turned else b) + c * add


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("m", "n", "k", "a", "b", "add", "batch"), [
    (32, 32, 64, "float32", "float32", False, ()), (48, 80, 96, "float32", "float32", True, ()),
    (16, 16, 32, "float32", "bfloat16", True, ()), (64, 48, 64, "bfloat16", "float32", False, ()),
    (16, 32, 32, "float32", "float32", True, (2, 3)),
])  # fmt: skip
def test_product(m, n, k, a, b, add, batch, turned):
    given, meta = operands(m, n, k, a, b, turned, batch), dict(turned=turned, add=add)
    found = relative_error(product(*given, **meta), expected(*given, **meta))
    assert (1e-7 < found < 1e-5) if TILES else found < 1e-6
    assert relative_error(product.interpret(*given, **meta), expected(*given, **meta)) < 1e-6
    assert ("@bfloat_parts_" in product.lower(*given, **meta).texts["llvm"]) == TILES


@pytest.mark.parametrize(("m", "n", "k", "a", "b"), [
    (15, 32, 64, "float32", "float32"), (16, 40, 64, "float32", "float32"), (16, 16, 48, "float32", "float32"),
    (16, 16, 32, "float16", "float32"),
])  # fmt: skip
def test_other_sizes_and_dtypes_are_exact(m, n, k, a, b):
    given, meta = operands(m, n, k, a, b, True), dict(turned=True, add=False)
    assert relative_error(product(*given, **meta), expected(*given, **meta)) < 1e-6


@pytest.mark.skipif(not TILES, reason="this machine has no tile registers of bfloat16")
def test_numbers_in_one_part():
    """What bfloat16 holds is multiplied without error, of any magnitude that has no subnormal parts."""
    rng = np.random.default_rng(0)
    a = jnp.asarray(rng.integers(-100, 100, (16, 64)) * 2.0**60, jnp.float32)
    b = jnp.asarray(rng.integers(-100, 100, (64, 32)) * 2.0**-90, jnp.float32)
    c = jnp.zeros((16, 32), jnp.float32)
    got = product(a, b, c, turned=False, add=False)
    np.testing.assert_array_equal(got, expected(a, b, c, False, False))
