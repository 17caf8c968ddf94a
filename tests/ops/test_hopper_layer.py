"""A layer of a decoder in one kernel, in the interpreter beside the same layer in NumPy; and its machine code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtile.ops import QuantizedTensor, hopper_layer
from jtile.ops.operands import Weight

HIDDEN, FEATURES, HEADS, KVS, D, SLOTS = 64, 96, 2, 1, 64, 130
EPS, SCALE = 1e-5, 0.125


def _layer(kind: str):
    """Operands, and the matrices as they are."""
    rng = np.random.default_rng(len(kind))
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    rounded = lambda *shape: jnp.asarray(draw(*shape), jnp.bfloat16)
    shapes = ((HEADS + 2 * KVS) * D, HIDDEN), (HIDDEN, HEADS * D), *[(FEATURES, HIDDEN)] * 2, (HIDDEN, FEATURES)
    weights, dense = [], []
    for shape in shapes:
        w = jnp.asarray(draw(*shape) / shape[1] ** 0.5)
        if kind == "bfloat16":
            weights.append(Weight(w.astype(jnp.bfloat16)))
            dense.append(np.asarray(weights[-1].codes, np.float32))
            continue
        q = QuantizedTensor.quantize(w, kind).packed()
        weights.append(Weight(q.codes, q.scale, q.minimum))
        dense.append(np.asarray(q.dequantize(), np.float32))
    norms = tuple(jnp.asarray(1 + 0.1 * draw(HIDDEN)) for _ in range(2))
    angles = draw(1, D // 2)
    turns = jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))
    cache = rounded(1, SLOTS, KVS, D), rounded(1, SLOTS, KVS, D)
    return (rounded(1, HIDDEN), rounded(1, HIDDEN), norms, tuple(weights), *turns, *cache), dense


def _rounded(a):
    return np.asarray(jnp.asarray(a, jnp.bfloat16), np.float32)


def _reference(operands, dense, length: int):
    """(the sum in front of the MLP, the MLP's output, the new key, the new value)."""
    x, delta, norms, _, cos, sin, keys, values = (
        jax.tree.map(lambda a: np.asarray(a, np.float32), o) for o in operands
    )
    normed = lambda v, w: v / np.sqrt((v * v).mean() + EPS) * w
    total = (x + delta)[0]
    qkv = _rounded(dense[0] @ normed(total, norms[0])).reshape(-1, D)
    low, high = qkv[: HEADS + KVS, : D // 2], qkv[: HEADS + KVS, D // 2 :]
    turned = _rounded(np.concatenate([low * cos - high * sin, high * cos + low * sin], 1))
    k, v = (
        np.concatenate([a[0, :length], new[None]]) for a, new in ((keys, turned[HEADS:]), (values, qkv[HEADS + KVS :]))
    )
    mixed = []
    for h in range(HEADS):
        p = np.exp(k[:, h // (HEADS // KVS)] @ turned[h] * SCALE)
        mixed.append((p @ v[:, h // (HEADS // KVS)]) / p.sum())
    total = _rounded(total) + _rounded(dense[1] @ np.concatenate(mixed))
    gate, up = (w @ normed(total, norms[1]) for w in dense[2:4])
    return total, dense[4] @ _rounded(gate / (1 + np.exp(-gate)) * up), k[length], v[length]


def _run(operands, length: int, kind: str, seed: int):
    n = 128 // (16 if kind == "bfloat16" else 4)
    lines = lambda a: a.reshape(*a.shape[:-1], a.shape[-1] // n, n)
    x, delta, norms, weights, cos, sin, keys, values = operands
    sizes = hopper_layer.Sizes(HEADS, KVS, D, parts=2, units=2, programs=32)
    return hopper_layer.hopper_layer.interpret(
        lines(x), lines(delta), tuple(map(lines, norms)), weights, cos, sin, jnp.asarray([length], jnp.int32), keys,
        values, kind=kind, activation="silu", eps=EPS, scale=SCALE, sizes=sizes, seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "length"), [("bfloat16", 129), ("q4_1", 70)])
def test_results(kind, length):
    operands, dense = _layer(kind)
    total, y, keys, values = (np.asarray(a, np.float32) for a in _run(operands, length, kind, length))
    want = _reference(operands, dense, length)
    for got, expected in zip((total.reshape(-1), y[0], keys[0, length], values[0, length]), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=0.02 * np.abs(expected).max())
    for got, old in ((keys, operands[6]), (values, operands[7])):
        kept = np.arange(SLOTS) != length
        np.testing.assert_array_equal(got[0, kept], np.asarray(old, np.float32)[0, kept])
