"""Attention of a new token in parts and the product that puts them together, in the interpreter and as a program."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.ops import QuantizedTensor, hopper_parts
from jtile.ops.operands import Weight
from jtile.ops.step_attention import attention_product, step_attention_reference

D, SCALE = 64, 0.125
MODULE = sys.modules[attention_product.__module__]  # the package has a function of its name


def _operands(heads: int, kvs: int, slots: int, out: int, kind: str, length: int):
    rng = np.random.default_rng(length)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    rounded = lambda *shape: jnp.asarray(draw(*shape), jnp.bfloat16)
    keys, values = (rounded(1, slots, kvs, D).at[:, length + 1 :].set(jnp.nan) for _ in range(2))  # nobody wrote these
    angles = draw(1, D // 2)
    w = jnp.asarray(draw(out, heads * D) / 8)
    w = w.astype(jnp.bfloat16) if kind == "bfloat16" else QuantizedTensor.quantize(w, kind).packed()
    turns = jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))
    return rounded(1, heads + 2 * kvs, D), *turns, jnp.asarray([length], jnp.int32), keys, values, w


def _check(found, operands, heads: int, residual=0.0):
    qkv, cos, sin, lengths, keys, values, w = operands
    clean = jnp.nan_to_num(keys), jnp.nan_to_num(values)
    mixed, keys, values = step_attention_reference(qkv, cos, sin, lengths, *clean, heads=heads, scale=SCALE)
    matrix = np.asarray(w.dequantize() if isinstance(w, QuantizedTensor) else w, np.float32)
    want = np.asarray(mixed, np.float32).reshape(1, -1) @ matrix.T + residual
    np.testing.assert_allclose(np.asarray(found[0], np.float32), want, atol=0.02 * np.abs(want).max())
    for got, of in zip(found[1:], (keys, values), strict=True):
        np.testing.assert_allclose(np.nan_to_num(np.asarray(got, np.float32)), np.asarray(of, np.float32), atol=0.02)


@pytest.mark.parametrize(
    ("sizes", "kind", "length", "parts"),
    [
        ((3, 1, 130, 24), "bfloat16", 0, 2),
        ((3, 1, 130, 24), "bfloat16", 129, 2),
        ((4, 2, 64, 16), "q4_1", 40, 1),
        ((4, 2, 256, 16), "q8_0", 128, 4),
        ((2, 2, 100, 16), "bfloat16", 100, 2),  # there is no slot for the new token
    ],
)
def test_results(sizes, kind, length, parts):
    heads, _, slots, _ = sizes
    operands, rng = _operands(*sizes, kind, length), np.random.default_rng(7)
    *given, w = operands
    units = jt.cdiv(jt.cdiv(slots, 64), parts)
    options = dict(heads=heads, scale=SCALE, units=units, parts=parts, seed=length)
    o, lse, keys, values = hopper_parts.hopper_parts.interpret(*given, **options)
    n = {"bfloat16": 8, "q4_1": 32, "q8_0": 16}[kind]
    stored = Weight(w.codes, w.scale, w.minimum) if isinstance(w, QuantizedTensor) else Weight(w)
    parts_of = o.reshape(parts, heads * D // n, n), lse.reshape(parts, heads)
    options = dict(kind=kind, d=D, rows=8, out_dtype="bfloat16")
    for residual in (None, rng.normal(size=(1, w.shape[0])).astype(np.float32)):
        y = hopper_parts.hopper_joined.interpret(*parts_of, stored, residual, **options)
        _check((y, keys, values), operands, heads, 0.0 if residual is None else residual)


def test_which_calls_it_takes(monkeypatch):
    *operands, w = _operands(3, 1, 130, 24, "bfloat16", 5)
    monkeypatch.setattr(MODULE, "PRODUCTS", True)
    run = functools.partial(attention_product, heads=3)
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
            assert "hopper_joined" in str(jax.make_jaxpr(run)(*operands, w))
            assert run(*operands, w.astype(jnp.float32)) is None
            long = [jnp.repeat(x, 16, 1) for x in operands[4:]]
            assert run(*operands[:4], *long, w) is None
            added = jax.eval_shape(functools.partial(run, residual=jnp.zeros((1, 24), jnp.bfloat16)), *operands, w)
            assert added[0].shape == (1, 24) and added[0].dtype == jnp.bfloat16
            several = jax.vmap(run, (0, None, None, None, None, None, None))
            y, keys, _ = jax.eval_shape(several, jnp.stack([operands[0]] * 2), *operands[1:], w)
            assert y.shape == (2, 1, 24) and keys.shape == (2, 1, 130, 1, D)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "length"), [("bfloat16", 0), ("bfloat16", 70), ("q4_1", 127), ("q8_0", 639)])
def test_on_the_gpu(kind, length, monkeypatch):
    operands = _operands(9, 3, 640, 576, kind, length)
    monkeypatch.setattr(MODULE, "PRODUCTS", True)
    with jt.config(overlap=True):
        run = jax.jit(functools.partial(attention_product, heads=9))
        found, more = run(*operands), jnp.ones((1, 576), jnp.bfloat16)
        assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip(run(*operands), found, strict=True))
        _check(jax.jit(functools.partial(attention_product, heads=9, residual=more))(*operands), operands, 9, 1.0)
    _check(found, operands, 9)
