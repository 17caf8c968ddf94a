"""Products with quantised weights on CPUs by integers, where the weights allow it, against their reference."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal

import jtile as jt
from jtile import ops
from jtile.ops import normed_products, rounded_rows
from jtile.ops.quantized import quantized_matmul_reference
from jtile.testing import relative_error

pytestmark = pytest.mark.cpu
ERROR = 4e-5  # of integers of 16 bits


@pytest.fixture(autouse=True)
def there():
    if "int16 products" not in jt.target().features:
        pytest.skip("this machine has no instructions for products of int16")


def rounding(w):
    """A weight that allows rows to be rounded."""
    return dataclasses.replace(w, activations=rounded_rows.INTEGERS)


@pytest.mark.parametrize(("kind", "group", "m", "out", "inner"), [
    ("q4_1", 32, 1, 96, 576), ("q4_0", 128, 3, 101, 256), ("q8_0", 32, 5, 40, 96), ("q8_0", 64, 1, 33, 64),
    ("q4_1", 64, 40, 60, 320), ("q4_0", 32, 300, 16, 1600),
    ("q4_1", 32, 3, 1009, 64), ("q8_0", 32, 20, 1009, 64),
])  # fmt: skip
def test_product(kind, group, m, out, inner):
    weight, x = ops.quantize(normal(0, out, inner), kind, group), normal(1, m, inner)
    options = {"bias": normal(2, out), "activation": "silu", "residual": normal(3, m, out)}
    product = lambda x: ops.quantized_matmul(x, rounding(weight), **options)
    exact = lambda x: quantized_matmul_reference(x, weight, **options)
    want, slope = jax.jit(lambda x: (exact(x), jax.grad(lambda x: (exact(x) ** 2).sum())(x)))(x)
    got, gradient = jax.jit(lambda x: (product(x), jax.grad(lambda x: (product(x) ** 2).sum())(x)))(x)
    assert relative_error(got, want) < ERROR and relative_error(gradient, slope) < 2 * ERROR


def test_gated_product():
    gate, up = (ops.quantize(normal(seed, 48, 160), "q4_1") for seed in (0, 1))
    x = normal(2, 2, 3, 160)
    run = jax.jit(jax.vmap(lambda x, gate, up: ops.gated_mlp(x, gate, up, transpose=True), (0, None, None)))
    assert 1e-6 < relative_error(run(x, rounding(gate), rounding(up)), run(x, gate, up)) < ERROR
    assert relative_error(run(x, rounding(gate), up), run(x, gate, up)) < 1e-6  # both have to allow it


@pytest.mark.parametrize(("kind", "group", "m", "out", "inner"), [
    ("q4_1", 32, 1, 4112, 64), ("q4_0", 32, 3, 96, 576), ("q8_0", 64, 8, 48, 192), ("q4_1", 64, 40, 64, 320),
    ("q8_0", 32, 20, 1024, 64),
])  # fmt: skip
def test_panels_have_the_bits_of_rows(kind, group, m, out, inner):
    """4112 rows are not divided into equal programs: the last one hangs over."""
    weight, x = rounding(ops.quantize(normal(0, out, inner), kind, group)), normal(1, m, inner)
    product = lambda weight: lambda x: ops.quantized_matmul(x, weight, residual=x[:, :1] + jnp.zeros((m, out)))
    both = lambda weight: jax.jit(lambda x: (product(weight)(x), jax.grad(lambda x: product(weight)(x).sum())(x)))(x)
    for got, want in zip(both(weight.in_panels()), both(weight), strict=True):
        np.testing.assert_array_equal(got, want)
    gated = jax.jit(lambda gate, up: ops.gated_mlp(x, gate, up, transpose=True))
    np.testing.assert_array_equal(gated(weight.in_panels(), weight.in_panels()), gated(weight, weight))
    np.testing.assert_array_equal(gated(weight.in_panels(), weight), gated(weight, weight))


def test_panels_without_rounding():
    """Whatever does not take panels brings them to rows."""
    weight, x = ops.quantize(normal(0, 48, 128), "q4_1", 128), normal(1, 4, 128)
    run = jax.jit(lambda w: (ops.quantized_matmul(x, w), ops.embedding(w, jnp.asarray([3, 47, 90, -1]))))
    for got, want in zip(run(weight.in_panels()), run(weight), strict=True):
        np.testing.assert_array_equal(got, want)
    with jt.config(steady=True):  # refuses weights in such groups
        got, want = (jax.jit(ops.quantized_matmul)(x, rounding(w)) for w in (weight.in_panels(), weight))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("panels", [False, True])
def test_the_kernel_is_that_of_the_interpreter(panels):
    """The same integers: what differs is the order of float32 sums alone."""
    weight, x = ops.quantize(normal(0, 32, 128), "q4_1"), normal(1, 5, 128)
    weight = weight.in_panels() if panels else weight
    weights = (rounded_rows.Weight(weight.codes, weight.scale, weight.minimum),)
    options = dict(kind="q4_1", activation=None, rows=16, bm=5)
    operands = x, weights, rounded_rows.Epilogue()
    want = rounded_rows._kernel.interpret(*operands, **options)
    assert relative_error(rounded_rows._kernel(*operands, **options), want) < 3e-7


@pytest.mark.parametrize("panels", [False, True])
@pytest.mark.parametrize("m", [1, 20])
def test_the_lows_of_q4_0_are_its_scales(m, panels):
    """They are brought to vectors once, or read as they are, and no product of floats is beside that of integers."""
    weight = ops.quantize(normal(0, 32, 128), "q4_0")
    weight = weight.in_panels() if panels else weight
    operands = normal(1, m, 128), (rounded_rows.Weight(weight.codes, weight.scale, None),), rounded_rows.Epilogue()
    options = dict(kind="q4_0", activation=None, rows=32, bm=m)
    text = rounded_rows._kernel.lower(*operands, target="cpu:amx", **options).texts["llvm"]
    gemms = [line for line in text.splitlines() if line.startswith("define") and "@gemm_" in line]
    packs = [line for line in text.splitlines() if "call void @pack_scales" in line]
    assert ("_panels_nibbles_panels_" in gemms[0]) == panels
    packed = (0 if panels else 1) if m == 1 else 2  # tiles: two vectors
    assert len(gemms) == 1 and "_scales" in gemms[0] and len(packs) == packed
    assert relative_error(rounded_rows._kernel(*operands, **options), operands[0] @ weight.dequantize().T) < ERROR


def test_what_it_does_not_take():
    weight = ops.quantize(normal(0, 32, 128), "q8_0", 64)
    weights = (rounded_rows.Weight(weight.codes, weight.scale, weight.minimum),)
    given = normal(1, 2, 128), weights, rounded_rows.Epilogue()
    refused = lambda kind="q8_0", ways="int16": rounded_rows.misfit(*given, kind=kind, activations=ways)
    assert refused() is None and "not to be rounded" in refused("fp8") and "not to be rounded" in refused(ways="rows")
    with jt.config(steady=True):  # sums of lows of wider groups have no one order
        assert refused() is None and "in any company" in refused("q4_0")


@pytest.mark.parametrize("kind", ["q4_0", "q8_0"])
def test_a_row_has_the_same_bits_among_others(kind):
    weight, x = rounding(ops.quantize(normal(0, 37, 160), kind)), normal(1, 40, 160)
    both = jax.jit(lambda x: (ops.quantized_matmul(x, weight), ops.gated_mlp(x, weight, weight, transpose=True)))
    with jt.config(steady=True):
        for m in (1, 9):
            for got, want in zip(both(x[:m]), both(x), strict=True):
                np.testing.assert_array_equal(got, want[:m])


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize(("kind", "m", "gated", "added"), [
    ("q4_1", 1, False, True), ("q4_0", 3, True, True), ("q8_0", 4, False, False), ("q4_1", 5, False, True),
])  # fmt: skip
def test_a_norm_in_front(kind, m, gated, added, steady):
    """Few rows meet the norm in the kernel of the product: the same bits, and the same derivative, as one by one."""
    weights = [rounding(ops.quantize(normal(seed, 96, 576), kind)).in_panels() for seed in range(1 + gated)]
    x, residual, norm = normal(3, m, 576), normal(4, m, 576) if added else None, 1 + normal(5, 576) / 4
    activation = "silu" if gated else None
    options = dict(eps=1e-5, activation=activation, out_dtype="float32")

    def both(run):
        def total(x, residual):
            y, s = run(x, residual)
            return (y * y).sum() + (s * s * s).sum()

        return jax.jit(lambda x, residual: (run(x, residual), jax.grad(total)(x, residual)))(x, residual)

    op = ops.rms_norm_gated_mlp if gated else ops.rms_norm_matmul
    gate = {"activation": activation} if gated else {}
    alone = lambda x, residual: normed_products._one_by_one(x, residual, norm, weights, **options)
    with jt.config(steady=steady):
        got = both(lambda x, residual: op(x, norm, *weights, residual=residual, eps=1e-5, **gate))
        want = both(alone)
        chosen = normed_products._product.choice(x, residual, norm, tuple(weights), **options)
    assert (chosen.implementation == "norm in a product of integers") == (m < 5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_norm_in_front_by_the_interpreter():
    weight, (x, residual) = ops.quantize(normal(0, 64, 128), "q4_1"), (normal(seed, 2, 128) for seed in (1, 2))
    weights = (rounded_rows.Weight(weight.codes, weight.scale, weight.minimum),)
    options = dict(kind="q4_1", activation=None, rows=16, bm=2, eps=1e-5)
    operands = x, residual, 1 + normal(3, 128) / 4, weights
    want, got = rounded_rows._normed.interpret(*operands, **options), rounded_rows._normed(*operands, **options)
    np.testing.assert_array_equal(got[0], x + residual)
    np.testing.assert_array_equal(want[0], x + residual)
    assert relative_error(got[1], want[1]) < 3e-7


def test_numbers_that_are_none():
    """NaN stays in its row, and what is infinite becomes NaN there; small and large rows keep their digits, and tiny
    ones are next to nothing."""
    weight, x = ops.quantize(normal(0, 20, 64), "q4_1"), normal(1, 7, 64)
    x = x.at[0, 3].set(jnp.nan).at[1, 40].set(jnp.inf).at[2].multiply(1e30).at[3].multiply(1e-30).at[4].set(0.0)
    x = x.at[5].multiply(1e-36).at[6].set(0.0).at[6, 7].set(1e-35)
    x = jnp.concatenate([x, 1e36 * normal(3, 1, 64)])
    y, want = ops.quantized_matmul(x, rounding(weight)), ops.quantized_matmul(x, weight)
    assert jnp.isnan(y[:2]).all() and (y[4] == 0).all()
    for row in (2, 3, 7):
        assert relative_error(y[row], want[row]) < ERROR
    assert (abs(y[5:7]) < 1e-32).all()


def test_rows_that_no_large_number_divides():
    """A vocabulary with a few more tokens has no programs of a few rows, and others have no rows to spare."""
    for m, out in ((1, 32001), (1, 32003), (8, 50257), (64, 32003)):
        rows = rounded_rows.tiles(m, out, 2048, 1)["rows"]
        assert rows % 16 == 0 and rows >= 64 and -(-out // rows) * rows < out + rows
    assert 49152 % rounded_rows.tiles(1, 49152, 576, 1)["rows"] == 0


def test_rows_that_are_cut_by_their_type():
    """They are left to the product without rounding, whose result is cut as well."""
    weight, x = ops.quantize(normal(0, 32, 64), "q8_0"), normal(1, 4, 64)
    rows = jax.NamedSharding(jax.make_mesh((1,), ("x",)), jax.P("x", None))
    got = jax.jit(lambda x: ops.quantized_matmul(x, rounding(weight)))(jax.device_put(x, rows))
    np.testing.assert_array_equal(got, jax.jit(lambda x: ops.quantized_matmul(x, weight))(x))
