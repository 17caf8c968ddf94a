"""Products and attention of rows in two bytes a number, on CPUs with tile registers, against their references."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal

import jtile as jt
from jtile import ops
from jtile.ops import digit_rows, normed_products, rounded_rows
from jtile.ops.quantized import quantized_matmul_reference
from jtile.testing import relative_error

pytestmark = pytest.mark.cpu
ERROR = 1.5e-4


@pytest.fixture(autouse=True)
def there():
    if "byte tiles" not in jt.target().features:
        pytest.skip("this machine has no tile registers of bytes")


def in_panels(w):
    """A weight as models hold it."""
    return dataclasses.replace(w.in_panels(), activations=rounded_rows.INTEGERS)


@pytest.mark.parametrize(("kind", "group", "m", "out", "inner"), [
    ("q4_1", 32, 48, 96, 576), ("q4_0", 32, 100, 112, 64), ("q8_0", 64, 520, 48, 128), ("q4_1", 64, 65, 1040, 128),
])  # fmt: skip
def test_product(kind, group, m, out, inner):
    weight, x = ops.quantize(normal(0, out, inner), kind, group), normal(1, m, inner)
    options = {"bias": normal(2, out), "activation": "silu", "residual": normal(3, m, out)}
    product = lambda x: ops.quantized_matmul(x, in_panels(weight), **options)
    exact = lambda x: quantized_matmul_reference(x, weight, **options)
    want, slope = jax.jit(lambda x: (exact(x), jax.grad(lambda x: (exact(x) ** 2).sum())(x)))(x)
    got, gradient = jax.jit(lambda x: (product(x), jax.grad(lambda x: (product(x) ** 2).sum())(x)))(x)
    assert 1e-5 < relative_error(got, want) < ERROR and relative_error(gradient, slope) < 2 * ERROR


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_norm_and_product(gated, residual):
    weights = [ops.quantize(normal(seed, 80, 192), "q4_1") for seed in range(1 + gated)]
    x, w, more = normal(2, 60, 192), normal(3, 192), {"residual": normal(4, 60, 192) if residual else None}
    op = ops.rms_norm_gated_mlp if gated else ops.rms_norm_matmul
    run = lambda held: jax.jit(lambda x: op(x, w, *map(held, weights), **more))
    (got, total), (want, wanted) = run(in_panels)(x), run(lambda w: w)(x)
    assert 1e-5 < relative_error(got, want) < (1 + gated) * ERROR
    np.testing.assert_array_equal(total, wanted)
    names = [c.implementation for c in ops.choices(lambda x: op(x, w, *map(in_panels, weights), **more), x)]
    assert "norm in bytes, then product" in names
    slope = lambda held: jax.grad(lambda x: (op(x, w, *map(held, weights), **more)[0] ** 2).sum())(x)
    assert relative_error(slope(in_panels), slope(lambda w: w)) < 2 * ERROR


def test_what_has_no_norm_in_bytes():
    weight, x, w = in_panels(ops.quantize(normal(0, 32, 64), "q4_1")), normal(1, 64, 64), normal(2, 64)
    refused = lambda x, *weights: normed_products._not_in_bytes(x, None, w, weights)
    assert refused(x, weight) is None and "so few rows" in refused(x[:40], weight)
    assert "of one kind" in refused(x, weight, in_panels(ops.quantize(normal(0, 32, 64), "q4_0")))
    assert "not float32" in refused(x.astype(jnp.bfloat16), weight)
    with jt.config(steady=True):
        assert "in any company" in refused(x, weight)


def test_what_it_does_not_take():
    weight = ops.quantize(normal(0, 32, 96), "q4_1")
    refused = lambda m, w: digit_rows.misfit(normal(1, m, w.shape[1]), (w,), kind="q4_1")
    rows = dataclasses.replace(weight, activations=rounded_rows.INTEGERS)
    assert "no whole tiles" in refused(64, in_panels(weight))
    assert "not in panels" in refused(64, ops.quantize(normal(0, 32, 64), "q4_1"))
    x = normal(1, 64, 96)
    assert relative_error(ops.quantized_matmul(x, rows), ops.quantized_matmul(x, weight)) < 4e-5


@pytest.mark.parametrize("kind", ["q4_1", "q8_0"])
def test_a_row_has_the_same_bits_among_others(kind):
    weight, x = in_panels(ops.quantize(normal(0, 48, 128), kind)), normal(1, 600, 128)
    run = jax.jit(lambda x: ops.quantized_matmul(x, weight))
    want = np.asarray(run(x))
    for m in (48, 77):
        np.testing.assert_array_equal(run(x[:m]), want[:m])


def test_numbers_that_are_none():
    """NaN and what is infinite give NaN in their rows; small and large rows keep their digits."""
    weight, x = ops.quantize(normal(0, 32, 64), "q4_1"), normal(1, 48, 64)
    x = x.at[0, 3].set(jnp.nan).at[1, 40].set(jnp.inf).at[2].multiply(1e30).at[3].multiply(1e-30).at[4].set(0.0)
    x = x.at[5].multiply(1e-36).at[6].set(0.0).at[6, 7].set(1e-35).at[7].multiply(1e36)
    y, want = ops.quantized_matmul(x, in_panels(weight)), ops.quantized_matmul(x, weight)
    assert jnp.isnan(y[:2]).all() and (y[4] == 0).all() and not jnp.isnan(y[2:]).any()
    for row in (2, 3, 7, 8):
        assert relative_error(y[row], want[row]) < 2 * ERROR
    assert (abs(y[5:7]) < 1e-32).all()


def test_weights_of_nothing():
    """Columns of zeros, and of numbers so small that their scale is one of the least."""
    w = np.asarray(normal(0, 32, 64)) * np.where(np.arange(32) < 16, 0.0, 1e-30)[:, None]
    weight, x = ops.quantize(jnp.asarray(w, jnp.float32), "q8_0"), normal(1, 48, 64)
    np.testing.assert_array_equal(ops.quantized_matmul(x, in_panels(weight)) == 0, ops.quantized_matmul(x, weight) == 0)


def test_digits_of_rows():
    x = normal(0, 20, 96)
    high, low, scale = digit_rows.of_rows(x, 32)
    numbers = (256.0 * np.asarray(high) + np.asarray(low)) * np.asarray(scale)
    assert (numbers[20:] == 0).all() and abs(numbers[:20] - x).max() <= abs(np.asarray(x)).max() / digit_rows.TOP
    for got, want in zip((high, low, scale), digit_rows._digits.interpret(x, rows=32, bm=16), strict=True):
        assert abs(got.astype(jnp.float32) - want.astype(jnp.float32)).max() <= 1


def test_tiles():
    """Programs have whole tiles of rows, and are enough for the cores."""
    for m, out, inner, matrices in itertools.product((48, 100, 513, 4096), (64, 576, 49152), (64, 576, 8192), (1, 2)):
        found = digit_rows.tiles(m, out, inner, matrices)
        assert found["bm"] % 16 == 0 and found["rows"] % 32 == 0 and found["rows"] <= max(out, 32)
        assert found["bm"] * found["rows"] <= 2 * digit_rows._RESULTS


ATTENTION = [  # queries, keys, heads, heads of keys, features, options
    (128, 128, 3, 1, 64, {"causal": True}), (100, 100, 4, 4, 64, {"causal": True}), (70, 200, 5, 1, 64, {}),
    (300, 300, 8, 1, 128, {"causal": True, "window": 70}), (1100, 1100, 2, 1, 64, {"causal": True, "window": 300}),
    (90, 90, 2, 2, 64, {"window": (5, 9)}), (64, 64, 1, 1, 64, {"causal": True, "scale": 3.0}),
]  # fmt: skip


@pytest.mark.parametrize(("t", "s", "heads", "kv_heads", "d", "options"), ATTENTION)
def test_attention(t, s, heads, kv_heads, d, options):
    q, k, v = normal(0, 2, t, heads, d), normal(1, 2, s, kv_heads, d), normal(2, 2, s, kv_heads, d)
    v = v * jnp.exp(2 * normal(3, 2, s, kv_heads, 1))  # rows of other magnitudes
    run = lambda precision: jax.jit(lambda q, k, v: ops.attention(q, k, v, precision=precision, **options))
    want = run(None)(q, k, v)
    assert 1e-6 < relative_error(run("fast")(q, k, v), want) < 1e-3 * options.get("scale", 1)
    loss = lambda precision: jax.jit(jax.grad(lambda *x: (run(precision)(*x) ** 2).sum(), (0, 1, 2)))
    for got, exact in zip(loss("fast")(q, k, v), loss(None)(q, k, v), strict=True):
        assert relative_error(got, exact) < 1e-3 * options.get("scale", 1)


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window": 70}, {}])
def test_rows_of_a_tile_change_no_bits(monkeypatch, options):
    """How many queries share a tile depends on how many programs there are: a prompt keeps its bits in a batch."""
    from jtile.ops import digit_attention

    q, k, v = normal(0, 1, 300, 6, 64), normal(1, 1, 300, 2, 64), normal(2, 1, 300, 2, 64)
    found, sizes = [], []
    for programs in (0, 1 << 20):
        monkeypatch.setattr(digit_attention, "_PROGRAMS", programs)
        sizes.append(digit_attention._queries(q.shape, 2))
        found.append(jax.jit(lambda *x: ops.attention(*x, precision="fast", **options))(q, k, v))
    assert sizes == [64, 32]
    np.testing.assert_array_equal(*found)


def test_attention_is_that_of_the_interpreter():
    from jtile.ops import digit_attention

    q, k, v = normal(0, 1, 64, 2, 64), normal(1, 1, 64, 1, 64), normal(2, 1, 64, 1, 64)
    of = dict(bk=64, keys=64)
    given = q, *digit_attention._digits(k, v, **of)
    options = dict(bq=16, bk=64, scale=0.125, window=(None, 0))
    want = digit_attention.digit_attention.interpret(*given, **options)
    assert relative_error(digit_attention.digit_attention(*given, **options), want) < 3e-4


def test_attention_that_is_not_in_bytes():
    q, k = normal(0, 1, 64, 2, 64), normal(1, 1, 64, 1, 64)
    of = lambda q, k, **options: ops.choices(
        lambda q, k: ops.attention(q, k, k, precision="fast", **options), q, k
    )[0].implementation  # fmt: skip
    assert of(q, k) == "rows in bytes"
    assert of(q[:, :20], k) == of(q[..., :32], k[..., :32]) == of(q, k, softcap=3.0) == "rows as they are"
    assert of(q.astype(jnp.bfloat16), k.astype(jnp.bfloat16)) == "rows as they are"
    assert of(q, k, lengths=jnp.asarray([7])) == "rows as they are"
    with jt.config(steady=True):
        assert of(q, k) == "rows as they are"
    sinks = jax.jit(lambda q, k: ops.attention(q, k, k, precision="fast", sinks=jnp.ones(2)))(q, k)
    assert relative_error(sinks, ops.attention(q, k, k, sinks=jnp.ones(2))) < 1e-6


def _digits_of(k, keys: int):
    """The numbers of the first keys, of their digits."""
    from jtile.ops import digit_attention

    high, low, scale = (np.asarray(x, np.float64) for x in digit_attention._digits(k, k, bk=64, keys=keys)[:3])
    return (256 * high + low) * scale[..., None]


@pytest.mark.parametrize("what", ["product", "norm and product", "attention"])
def test_sizes_that_are_not_known(what):
    """Programs are exported for any number of rows, which are then multiplied in another way."""
    weight, w = in_panels(ops.quantize(normal(0, 32, 64), "q4_1")), normal(1, 64)
    run, x = {
        "product": (lambda x: ops.quantized_matmul(x, weight), normal(2, 70, 64)),
        "norm and product": (lambda x: ops.rms_norm_matmul(x, w, weight)[0], normal(2, 70, 64)),
        "attention": (lambda x: ops.attention(x, x, x, causal=True, precision="fast"), normal(2, 1, 70, 1, 64)),
    }[what]
    shape = jax.export.symbolic_shape("1, t, 1, 64" if x.ndim == 4 else "t, 64")
    exported = jax.export.export(jax.jit(run), platforms=["cpu"], disabled_checks=jt.export_checks())(
        jax.ShapeDtypeStruct(shape, x.dtype)
    )
    assert relative_error(exported.call(x), run(x)) < 5e-4


def test_attention_over_values_of_nothing():
    """Keys and values of zeros, as those behind a prompt are, and a query beside NaN that it does not see."""
    q, k = normal(0, 1, 64, 1, 64), normal(1, 1, 128, 1, 64).at[:, 64:].set(0.0)
    v = k.at[:, 100].set(jnp.nan)
    y = ops.attention(q, k, v, causal=True, precision="fast")
    assert relative_error(y, ops.attention(q, k[:, :64], k[:, :64], causal=True)) < 5e-4
    for keys in (_digits_of(k, 70), _digits_of(k[:, :70], 70)):
        np.testing.assert_array_equal(keys, _digits_of(k, 128)[:, :70])
    zero = ops.attention(q, k, 0 * k, causal=True, precision="fast")
    assert (zero == 0).all()
