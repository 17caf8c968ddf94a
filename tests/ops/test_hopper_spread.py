"""Attention of a new token with heads of 128 numbers in parts, and the product that puts them together."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sass import unwritten

import jtile as jt
from jtile.ops import QuantizedTensor, gpu_tiles, hopper_gemv, hopper_spread
from jtile.ops.operands import Weight
from jtile.ops.step_attention import attention_product, step_attention_reference

D, SCALE = 128, 128**-0.5
MODULE = sys.modules[attention_product.__module__]  # the package has a function of its name


def operands_of(heads: int, kvs: int, slots: int, out: int, kind: str, length: int):
    rng = np.random.default_rng(length)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    rounded = lambda *shape: jnp.asarray(draw(*shape), jnp.bfloat16)
    keys, values = (rounded(1, slots, kvs, D).at[:, length:].set(jnp.nan) for _ in range(2))  # nobody wrote these
    angles = draw(1, D // 2)
    w = jnp.asarray(draw(out, heads * D) / 8)
    grouped = {"group": D} if kind == "q4_0" else {}
    w = w.astype(jnp.bfloat16) if kind == "bfloat16" else QuantizedTensor.quantize(w, kind, **grouped).packed()
    turns = jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))
    return rounded(1, heads + 2 * kvs, D), *turns, jnp.asarray([length], jnp.int32), keys, values, w


def check(found, operands, heads: int, residual=0.0):
    qkv, cos, sin, lengths, keys, values, w = operands
    clean = jnp.nan_to_num(keys), jnp.nan_to_num(values)
    mixed, keys, values = step_attention_reference(qkv, cos, sin, lengths, *clean, heads=heads, scale=SCALE)
    matrix = np.asarray(w.dequantize() if isinstance(w, QuantizedTensor) else w, np.float32)
    want = np.asarray(mixed, np.float32).reshape(1, -1) @ matrix.T + residual
    np.testing.assert_allclose(np.asarray(found[0], np.float32), want, atol=0.02 * np.abs(want).max())
    for got, of in zip(found[1:], (keys, values), strict=True):
        np.testing.assert_array_equal(np.nan_to_num(np.asarray(got, np.float32)), np.asarray(of, np.float32))


@pytest.mark.parametrize(
    ("heads", "kvs", "slots", "length"),
    [
        (4, 1, 200, 0),  # only the new token
        (4, 1, 200, 128),  # a part begins with it
        (4, 2, 320, 319),
        (8, 2, 256, 63),  # two parts of four have nothing
        (2, 1, 100, 100),  # there is no slot for the new token
    ],
)
def test_parts(heads, kvs, slots, length):
    *given, w = operands_of(heads, kvs, slots, 8, "bfloat16", length)
    parts = jt.cdiv(slots, 64 * hopper_spread.UNITS)
    options = dict(heads=heads, scale=SCALE, parts=parts, seed=length)
    o, lse, keys, values = hopper_spread.hopper_spread.interpret(*given, **options)
    o, lse = np.asarray(o, np.float64).reshape(parts, heads, D), np.asarray(lse, np.float64).reshape(parts, heads)
    share = np.exp2(lse - lse.max(0))
    mixed = ((share / share.sum(0))[..., None] * o).sum(0).reshape(1, -1)
    check((mixed @ np.asarray(w, np.float64).T, keys, values), (*given, w), heads)


@pytest.mark.parametrize("kind", ["bfloat16", "q4_0", "fp8"])
def test_the_product_puts_them_together(kind, monkeypatch):
    """Parts that count almost nothing, and one that counts nothing at all."""
    monkeypatch.setattr(gpu_tiles, "processors", lambda: 2)
    heads, out = 8, 40
    *_, w = operands_of(heads, 1, 64, out, kind, 5)
    rng = np.random.default_rng(1)
    o, lse = rng.normal(size=(3, heads * D)).astype(jnp.bfloat16), np.float32(8 * rng.normal(size=(3, heads)))
    lse[1] = -(2.0**120)
    stored = Weight(w.codes, w.scale, w.minimum) if isinstance(w, QuantizedTensor) else Weight(w)
    share = np.exp2(lse - lse.max(0)).astype(np.float64)
    row = ((share / share.sum(0))[..., None] * o.astype(np.float64).reshape(3, heads, D)).sum(0).reshape(1, -1)
    matrix = np.asarray(w.dequantize() if isinstance(w, QuantizedTensor) else w, np.float64)
    residual = np.float32(rng.normal(size=(1, out)))
    with jt.config(arch="sm_90", overlap=True, interpret=True):
        y = hopper_gemv.joined_product(o, lse, stored, residual, kind=kind, out_dtype="float32")
    want = row @ matrix.T + residual
    np.testing.assert_allclose(y, want, atol=1e-4 * np.abs(want).max())


def test_which_calls_it_takes(monkeypatch):
    *operands, w = operands_of(32, 8, 704, 4096, "bfloat16", 5)
    monkeypatch.setattr(MODULE, "PRODUCTS", True)
    run = functools.partial(attention_product, heads=32)
    for arch in ("sm_80", "sm_100", "gfx942"):  # which have no block level of Hopper's
        with jt.config(arch=arch, overlap=True):
            assert run(*operands, w) is None
    with jt.config(overlap=True):
        assert jax.default_backend() == "gpu" or run(*operands, w) is None
    with jt.config(arch="sm_90"):
        assert run(*operands, w) is None  # kernels do not overlap
        with jt.config(overlap=True):
            if jax.device_count() > 1:
                return
            text = str(jax.make_jaxpr(run)(*operands, w))
            assert "hopper_spread" in text and "hopper_joined_gemv" in text
            assert run(*operands, w.astype(jnp.float32)) is None
            long = [jnp.repeat(x, 2, 1) for x in operands[4:]]
            assert run(*operands[:4], *long, w) is None
            several = jax.vmap(run, (0, None, None, None, None, None, None))
            y, keys, _ = jax.eval_shape(several, jnp.stack([operands[0]] * 2), *operands[1:], w)
            assert y.shape == (2, 1, 4096) and keys.shape == (2, 1, 704, 8, D)


@pytest.mark.slow
def test_what_it_compiles_to():
    """A block finds room beside those of the products in front and behind."""
    pytest.importorskip("triton")
    *operands, _ = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands_of(32, 8, 704, 8, "bfloat16", 5))
    found = hopper_spread.hopper_spread.lower(*operands, heads=32, scale=SCALE, parts=6, target="cuda:sm_90")
    resources = found.launch["resources"]
    assert resources["spills"] == 0 and resources["shared"] <= 72 << 10 and not unwritten(found.texts["sass"])


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "length"), [("bfloat16", 0), ("bfloat16", 130), ("q4_0", 511), ("fp8", 703)])
def test_on_the_gpu(kind, length, monkeypatch):
    operands = operands_of(32, 8, 704, 4096, kind, length)
    monkeypatch.setattr(MODULE, "PRODUCTS", True)
    with jt.config(overlap=True):
        run = jax.jit(functools.partial(attention_product, heads=32))
        found = run(*operands)
        assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip(run(*operands), found, strict=True))
    check(found, operands, 32)
