"""Every kernel of the library under jax.vmap: over all operands, over each alone, equal to a loop; no more launches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from custom_calls import calls
from library import integers, normal

from jtile import ops
from jtile.testing import assert_close

LANES = 3


def weight(kind, seed=9, shape=(8, 64)):
    return ops.quantize(normal(seed, *shape), kind)


LENGTHS = jnp.array([20, 7], jnp.int32)
HEADS = [normal(k, 2, 20, heads, 8) for k, heads in enumerate((4, 2, 2))]

# name -> (function, its operands for one lane)
OPS = {
    "matmul": (ops.matmul, [normal(0, 20, 12), normal(1, 12, 17)]),
    "matmul, epilogue": (
        lambda a, b, bias: ops.matmul(a, b, bias=bias, activation="silu", transpose_b=True),
        [normal(0, 20, 12), normal(1, 17, 12), normal(2, 17)],
    ),
    "matmul, bfloat16": (ops.matmul, [normal(0, 9, 70, dtype="bfloat16"), normal(1, 70, 33, dtype="bfloat16")]),
    "matmul, one row": (ops.matmul, [normal(0, 1, 64), normal(1, 64, 40)]),
    "softmax": (ops.softmax, [normal(0, 5, 33)]),
    "softmax of columns": (functools.partial(ops.softmax, axis=0), [normal(0, 33, 5)]),
    "log_softmax": (ops.log_softmax, [normal(0, 5, 33)]),
    "layer_norm": (ops.layer_norm, [normal(0, 5, 33), normal(1, 33), normal(2, 33)]),
    "rms_norm": (ops.rms_norm, [normal(0, 5, 33), normal(1, 33)]),
    "rms_norm, residual": (
        lambda x, w, r: ops.rms_norm(x, w, residual=r),
        [normal(0, 5, 33), normal(1, 33), normal(2, 5, 33)],
    ),
    "swiglu": (ops.swiglu, [normal(0, 5, 33), normal(1, 5, 33)]),
    "geglu": (ops.geglu, [normal(0, 5, 66)]),
    "gated_mlp": (ops.gated_mlp, [normal(0, 6, 16), normal(1, 16, 24), normal(2, 16, 24)]),
    "bias_gelu_residual": (ops.bias_gelu_residual, [normal(0, 5, 33), normal(1, 33), normal(2, 5, 33)]),
    "attention": (functools.partial(ops.attention, causal=True, window=6), HEADS),
    "attention, lengths": (lambda q, k, v, n: ops.attention(q, k, v, lengths=n), [*HEADS, LENGTHS]),
    "decode_attention": (ops.decode_attention, [HEADS[0][:, :1], *HEADS[1:], LENGTHS]),
    "rope": (ops.rope, [HEADS[0]]),
    "rope, positions": (lambda x, p: ops.rope(x, positions=p), [HEADS[0], integers(3, 0, 90, 2, 20)]),
    "embedding": (ops.embedding, [normal(0, 11, 6), integers(1, 0, 13, 4, 3)]),
    "cross_entropy": (ops.cross_entropy, [normal(0, 9, 41), integers(1, 0, 41, 9)]),
    "cumsum": (functools.partial(ops.cumsum, reverse=True), [normal(0, 5, 33)]),
    "sort": (ops.sort, [normal(0, 5, 33)]),
    "argsort": (ops.argsort, [normal(0, 5, 33)]),
    "argmax": (ops.argmax, [normal(0, 5, 33)]),
    "largest": (functools.partial(ops.largest, k=4), [normal(0, 5, 33)]),
    "top_k": (functools.partial(ops.top_k, k=4), [normal(0, 5, 33)]),
    "transpose": (ops.transpose, [normal(0, 5, 33)]),
    "histogram": (functools.partial(ops.histogram, bins=7, range=(-1.0, 2.0)), [normal(0, 100)]),
    "stencil_2d": (ops.stencil_2d, [normal(0, 20, 30), normal(1, 3, 3)]),
    "convolution": (ops.convolution, [normal(0, 2, 9, 8, 4), normal(1, 3, 3, 4, 5)]),
    "quantized_matmul, q8_0": (ops.quantized_matmul, [normal(0, 5, 64), weight("q8_0")]),
    "quantized_matmul, q4_0": (ops.quantized_matmul, [normal(0, 1, 64), weight("q4_0")]),
}


def lanes_of(x, k):
    """Another operand of the same kind for each lane. By NumPy, as every `jnp.roll` is a program."""
    axis = 0 if isinstance(x, ops.QuantizedTensor) else -1
    return jax.tree.map(lambda leaf: jax.device_put(np.roll(leaf, k, axis)), x)


def launches(lowered):
    text = lowered.as_text()
    assert "while" not in text.replace("while_loop_", "")
    return calls(text)


@pytest.mark.parametrize("name", OPS)
def test_equal_to_a_loop(name):
    f, operands = OPS[name]
    lanes = [[lanes_of(x, k) for x in operands] for k in range(LANES)]
    stacked = [jax.tree.map(lambda *v: jax.device_put(np.stack(v)), *column) for column in zip(*lanes)]
    subsets = {(True,) * len(operands)} | {tuple(k == n for k in range(len(operands))) for n in range(len(operands))}
    one = jax.jit(f).lower(*operands)
    run, alone = one.compile(), launches(one)
    for batched in sorted(subsets):
        args = [s if b else x for s, x, b in zip(stacked, operands, batched)]
        rows = [run(*[v if b else x for v, x, b in zip(lane, operands, batched)]) for lane in lanes]
        expected = jax.tree.map(lambda *v: np.stack(v), *rows)
        mapped = jax.jit(jax.vmap(f, in_axes=tuple(0 if b else None for b in batched))).lower(*args)
        assert_close(mapped.compile()(*args), expected)
        assert launches(mapped) == alone
