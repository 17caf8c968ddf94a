"""Products of two digits on tile registers of bytes: every source of columns against integers in NumPy, and what is
left to products of floats."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fenced import Fenced

import jtile as jt
from jtile import ops
from jtile.ffi import run_image
from jtile.lowering.cpu import byte_digits, digit_products
from jtile.lowering.cpu.isa import host_isa
from jtile.ops import digit_rows
from jtile.ops.operands import NO_EPILOGUE, Epilogue, Weight
from jtile.testing import relative_error

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("by_numpy")]
there = pytest.mark.skipif(not byte_digits.fits(host_isa()), reason="this machine has no tile registers of bytes")
rng = np.random.default_rng


def digits_of(x):
    """(h, l) of integers 256 h + l."""
    high = (x + 128) >> 8
    return high, x - 256 * high


def product(a, b):
    """The sums of products of integers [m, k] and [n, k] without those of both low digits."""
    (ah, al), (bh, bl) = (tuple(x.astype(np.float64) for x in digits_of(x)) for x in (a, b))
    return 256.0 * (256.0 * (ah @ bh.T) + ah @ bl.T + al @ bh.T)


def integers(kind: str, codes, scale, low):
    """The weights [n, k] as integers, and what these are to be multiplied with [n], as `byte_columns` says."""
    f = np.float32
    d, m = scale.astype(f), np.zeros_like(scale, f) if low is None else low.astype(f)
    if kind == "q4_1":
        largest, parts, most = np.maximum(abs(m), abs(np.float32(15) * d + m)).max(1), 8, f(30000)
    else:
        largest = abs(d * f(8 if kind == "q4_0" else 128)).max(1)
        parts, most = (8, f(30000)) if kind == "q4_0" else (128, f(32512))
    inverse = (most / largest).astype(f)[:, None]
    factor = np.rint(d * inverse * f(parts)).astype(np.int64)
    added = np.rint((d * f(8) + m) * inverse).astype(np.int64) if kind == "q4_1" else np.zeros_like(factor)
    group = codes.shape[1] // d.shape[1]
    wide = lambda x: np.repeat(x, group, axis=1)
    c = codes.astype(np.int64) - (0 if kind == "q8_0" else 8)
    shift = c * (256 if kind == "q8_0" else 4096)
    return ((shift * wide(factor) + 0x4000) >> 15) + wide(added), largest / most


def weight_of(kind: str, n: int, k: int, group: int, seed: int = 0):
    w = ops.quantize(jnp.asarray(rng(seed).normal(size=(n, k)) * 3, jnp.float32), kind, group)
    codes = np.asarray(w.codes)
    if kind != "q8_0":
        halves = codes.reshape(n, -1, 16)
        codes = np.concatenate([halves & 15, halves >> 4], axis=-1).reshape(n, -1)
    numbers = [None if x is None else np.asarray(x) for x in (w.scale, w.minimum)]
    panels = w.in_panels()
    return Weight(panels.codes, panels.scale, panels.minimum), (codes, *numbers)


def rows_of(m: int, k: int, seed: int = 1):
    q = rng(seed).integers(-32512, 32513, (m, k))
    high, low = digits_of(q)
    scale = rng(seed + 1).random((m, 1)).astype(np.float32)
    return q, (high.astype(np.int8), low.astype(np.int8), scale)


@there
@pytest.mark.parametrize(("kind", "m", "n", "k", "group", "bm", "rows"), [
    ("q4_1", 16, 32, 64, 32, 16, 32), ("q4_1", 64, 48, 192, 64, 32, 48), ("q4_0", 48, 80, 832, 32, 48, 32),
    ("q4_0", 32, 16, 256, 128, 32, 16), ("q8_0", 32, 64, 128, 32, 16, 64), ("q8_0", 16, 48, 1600, 64, 16, 48),
])  # fmt: skip
def test_weights_in_panels(kind, m, n, k, group, bm, rows):
    """832 and 1600 terms are multiplied in parts; of 80 rows in programs of 32 the last one hangs over."""
    weight, stored = weight_of(kind, n, k, group)
    q, of_x = rows_of(m, k)
    options = dict(kind=kind, activation=None, m=m, bm=bm, rows=rows)
    got = np.asarray(digit_rows._kernel(*of_x, (weight,), NO_EPILOGUE, **options))
    numbers, scale = integers(kind, *stored)
    want = product(q, numbers) * of_x[2] * scale
    assert relative_error(got, want) < 3e-7
    exact = digit_rows._kernel.interpret(*of_x, (weight,), NO_EPILOGUE, **options)
    assert 1e-6 < relative_error(got, exact) < 1e-4
    text = digit_rows._kernel.lower(*of_x, (weight,), NO_EPILOGUE, **options).texts["llvm"]
    assert "@byte_digits_" in text and "fptosi" not in text.split("@jtile_entry")[1]  # nothing unpacks the weights


@there
def test_two_products_of_the_same_rows():
    (gate, a), (up, b) = (weight_of("q4_1", 32, 128, 32, seed) for seed in (3, 4))
    q, of_x = rows_of(32, 128)
    of_x = *of_x[:2], of_x[2] * np.float32(1e-6)
    y = rng(5).normal(size=(32, 32)).astype(np.float32)
    epilogue = Epilogue(residual=jnp.asarray(y))
    got = digit_rows._kernel(*of_x, (gate, up), epilogue, kind="q4_1", activation="silu", m=32, bm=32, rows=32)
    numbers = [(product(q, x) * of_x[2] * s) for x, s in (integers("q4_1", *w) for w in (a, b))]
    assert relative_error(got, numbers[0] / (1 + np.exp(-numbers[0])) * numbers[1] + y) < 1e-6


@jt.kernel(
    out_type=lambda ah, al, s, bh, bl, t, c, **_: jt.like(c), grid=lambda *_, **__: 1,
)  # fmt: skip
def of_digits(ah, al, s, bh, bl, t, c, y, *, turned: bool, form: str):
    """c + the product of rows and of columns in digits; form: "rows" and "row" have scales for each, "one" for all."""
    A = digit_rows.numbers(ah[...], al[...]) * (jnp.max(s[...]) if form == "one" else s[...])
    B = digit_rows.numbers(bh[...], bl[...])
    if turned:
        B = B * (t[...] if form == "rows" else t[:, 0][:, None])
    start = None if form == "rows" else c[...]
    y[...] = jt.dot(A, B.T if turned else B, start, precision="fast")


@there
@pytest.mark.parametrize(("turned", "form", "m", "n", "k"), [
    (True, "rows", 16, 48, 128), (True, "row", 48, 80, 64), (False, "row", 32, 64, 192), (False, "one", 16, 16, 896),
])  # fmt: skip
def test_columns_in_digits(turned, form, m, n, k):
    (q, (ah, al, s)), (p, (bh, bl, t)) = rows_of(m, k), rows_of(n, k, 7)
    c = 1e5 * rng(9).normal(size=(m, n)).astype(np.float32)
    columns = (bh, bl) if turned else (np.ascontiguousarray(bh.T), np.ascontiguousarray(bl.T))
    given = ah, al, s, *columns, t, c
    got = of_digits(*given, turned=turned, form=form)
    want = product(q, p) * (s.max() if form == "one" else s) * (t.T if turned else 1) + (0 if form == "rows" else c)
    assert relative_error(got, want) < 3e-7
    assert "@byte_digits_" in of_digits.lower(*given, turned=turned, form=form).texts["llvm"]
    assert relative_error(got, of_digits.interpret(*given, turned=turned, form=form)) < 1e-4


@there
@pytest.mark.parametrize("more", [0, 64])
def test_the_longest_sums(more):
    """The least bytes reach the largest sum of both mixed products. One tile of terms more would not fit an int32."""
    k = digit_products.MOST + more
    a, b = (np.full((16, k), -128, np.int8) for _ in range(2))
    s, t, c = np.ones((16, 1), np.float32), np.ones((16, 1), np.float32), np.zeros((16, 16), np.float32)
    given, options = (a, a, s, b, b, t, c), dict(turned=True, form="row")
    assert ("@byte_digits_" in of_digits.lower(*given, **options).texts["llvm"]) == (more == 0)
    parts = 256.0**2 + 2 * 256 + (more > 0)  # the product of both low digits is left out of bytes
    assert relative_error(of_digits(*given, **options), np.full((16, 16), parts * 128.0**2 * k)) < 1e-4


@jt.kernel(out_type=lambda ah, al, s, bh, bl, f, c, **_: (jt.like(c), jt.like(c)), grid=lambda *_, **__: 1)
def fading(ah, al, s, bh, bl, f, c, y, z, *, again: bool):
    """c, four times multiplied with f and added to a product; `again`: others read c times f as well."""
    A, B = digit_rows.numbers(ah[...], al[...]) * s[...], digit_rows.numbers(bh[...], bl[...])
    acc, faded = c[...], jnp.zeros_like(c[...])
    for _ in jt.range(4):
        faded = acc * f[...][:, None]
        acc = jt.dot(A, B, faded, precision="fast")
        faded = faded if again else acc
    y[...], z[...] = acc, faded


@there
@pytest.mark.parametrize("again", [False, True])
def test_an_accumulator_that_fades(again):
    (q, (ah, al, s)), (p, (bh, bl, _)) = rows_of(32, 64), rows_of(48, 64, 7)
    s = s * np.float32(1e-9)
    f, c = rng(8).random(32).astype(np.float32), rng(9).normal(size=(32, 48)).astype(np.float32)
    given = ah, al, s, np.ascontiguousarray(bh.T), np.ascontiguousarray(bl.T), f, c
    y, z = fading(*given, again=again)
    assert ("_fade" in fading.lower(*given, again=again).texts["llvm"]) != again
    want, faded = c.astype(np.float64), None
    for _ in range(4):
        faded = want * f[:, None]
        want = faded + s * product(q, p)
    assert relative_error(y, want) < 1e-6 and relative_error(z, faded if again else want) < 1e-6


@pytest.mark.parametrize("isa", ["avx512", "avx2"])
def test_other_machines_multiply_floats(isa):
    weight, _ = weight_of("q4_1", 32, 128, 32)
    _, of_x = rows_of(16, 128)
    options = dict(kind="q4_1", activation=None, m=16, bm=16, rows=32)
    with jt.config(isa=isa):
        got = jax.jit(lambda *x: digit_rows._kernel(*x, (weight,), NO_EPILOGUE, **options))(*of_x)
    assert relative_error(got, digit_rows._kernel.interpret(*of_x, (weight,), NO_EPILOGUE, **options)) < 1e-6


@jt.kernel(out_type=lambda h, l, s, w, g, **_: (jax.ShapeDtypeStruct((16, 32), jnp.float32), jt.like(s)),
           grid=lambda *_, **__: 1)  # fmt: skip
def read_twice(h, l, s, w: Weight, g, y, z, *, exact: bool):
    """The product, and a number of the weights that it is of; `exact`: nothing is left to the target."""
    W = digit_rows._weights(w, 0, 32, "q4_1")
    X = digit_rows.numbers(h[...], l[...]) * s[...]
    y[...] = jt.dot(X, W.T, precision=None if exact else "fast")
    z[...] = (W * g[...]).sum(1)[:16, None]


@pytest.mark.parametrize("exact", [False, True])
def test_weights_that_others_read(exact):
    """They are floats in memory then, for the product, too."""
    weight, (codes, d, low) = weight_of("q4_1", 32, 128, 32)
    q, (h, l, s) = rows_of(16, 128)
    g = jnp.ones((32, 128), jnp.float32)
    y, z = read_twice(h, l, s, weight, g, exact=exact)
    W = codes * np.repeat(d.astype(np.float64), 32, 1) + np.repeat(low.astype(np.float64), 32, 1)
    assert relative_error(y, (q * s) @ W.T) < 1e-6 and relative_error(z[:, 0], W.sum(1)[:16]) < 1e-6


@there
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("kind", ["q4_1", "q8_0"])
def test_arrays_are_read_inside(kind, at_end):
    weight, stored = weight_of(kind, 48, 192, 64)
    q, of_x = rows_of(16, 192)
    given = [np.asarray(x) for x in (*of_x, *weight) if x is not None]
    with jt.config(poison=False):  # that would be one more operand
        options = dict(kind=kind, activation=None, m=16, bm=16, rows=48)
        art = digit_rows._kernel.lower(*of_x, (weight,), NO_EPILOGUE, **options).artifact
    fenced = Fenced()
    *inputs, y = (fenced.copy(x, at_end) for x in (*given, np.full((16, 48), 7, np.float32)))
    run_image(art.image, [*inputs, y], **{k: art.launch[k] for k in ("programs", "workspace", "isa", "sites", "name")})
    numbers, scale = integers(kind, *stored)
    assert relative_error(y, product(q, numbers) * of_x[2] * scale) < 3e-7
