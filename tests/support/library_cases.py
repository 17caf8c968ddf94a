"""Every op of the kernel library with small, awkward arguments: what `check_kernel` runs on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtile import ops
from jtile.ops import (
    activations,
    convolutions,
    elementwise,
    embeddings,
    flash_attention,
    histograms,
    layout,
    losses,
    norms,
    quantized,
    rotary,
    scans,
    softmaxes,
    sorting,
    split_attention,
    stencils,
)
from jtile.ops.gated_mlp import gated_mlp_reference
from jtile.ops.grouped_matmul import grouped_matmul_reference
from jtile.ops.latent_attention import mla_decode_reference
from jtile.ops.linear_attention import linear_attention_reference
from jtile.ops.matmul import matmul_reference

FROZEN = "quantised weights are frozen"
STEP = 2.0**-7  # elements stay in order


@dataclasses.dataclass(frozen=True)
class LibraryCase:
    """One op with arguments.

    Attributes:
      op, reference: functions of the same arguments.
      args: makes the arguments.
      options: further arguments of `check_kernel`.
    """

    op: Callable[..., Any]
    reference: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def floats(*shape: int, low: float = -1, high: float = 1, seed: int = 0) -> Any:
    """Numbers that all differ by much more than a step of the differences, in random order."""
    n = int(np.prod(shape))
    steps = np.random.default_rng([seed, *shape]).permutation(n)
    return jax.device_put((low + (high - low) * (steps + 0.5) / max(n, 1)).reshape(shape).astype(np.float32))


def ints(high: int, *shape: int, seed: int = 0) -> Any:
    return jax.device_put(np.random.default_rng([seed, high, *shape]).integers(0, high, shape).astype(np.int32))


def case(op: Any, reference: Any, *args: Callable[[], Any], meta: Mapping[str, Any] | None = None, **options: Any):
    """`args` make one argument each; `meta` goes to both functions."""
    meta = dict(meta or {})
    bind = lambda f: functools.wraps(f)(functools.partial(f, **meta)) if meta else f
    return LibraryCase(bind(op), bind(reference), lambda: tuple(a() for a in args), {"order": 2, **options})


f = lambda *shape, **more: lambda: floats(*shape, **more)
n = lambda high, *shape: lambda: ints(high, *shape)
weights = lambda kind, *shape: lambda: ops.quantize(floats(*shape), kind)
POSITIVE = {"low": 0.5, "high": 1.5}
ATTENTION = (f(2, 5, 4, 6), f(2, 7, 2, 6, seed=1), f(2, 7, 2, 6, seed=2))
LATENT = (f(2, 4, 8), f(2, 9, 8, seed=1), lambda: jnp.asarray([9, 4], jnp.int32))
CACHE = (f(2, 4, 6), f(2, 9, 2, 6, seed=1), f(2, 9, 2, 6, seed=2), lambda: jnp.asarray([9, 4], jnp.int32))


def rms_norm_residual(x, weight, residual):
    return ops.rms_norm(x, weight, residual=residual)


def rms_norm_residual_reference(x, weight, residual):
    return norms.rms_norm_reference(x, weight, residual=residual)


def rope_at(x, positions):
    return ops.rope(x, positions=positions)


def rope_at_reference(x, positions):
    return rotary.rope_reference(x, positions=positions)


def with_bias(run):
    return lambda a, b, bias: run(a, b, bias=bias, activation="gelu_tanh")


def with_lengths(run):
    return lambda q, k, v, lengths: run(q, k, v, causal=True, lengths=lengths, offsets=lengths - q.shape[1])


def with_decay(run):
    return lambda q, k, v, log_decay: run(q, k, v, log_decay=log_decay, chunk=4)


def quantized_bias(run):
    return lambda x, weight, bias: run(x, weight, bias=bias, activation="silu")


CASES: dict[str, LibraryCase] = {
    "swiglu": case(ops.swiglu, activations.swiglu_reference, f(3, 9), f(3, 9, seed=1)),
    "geglu": case(ops.geglu, activations.geglu_reference, f(2, 10)),
    "bias_gelu_residual": case(
        ops.bias_gelu_residual, elementwise.bias_gelu_residual_reference, f(3, 7), f(7), f(3, 7, seed=1)
    ),
    "softmax": case(ops.softmax, softmaxes.softmax_reference, f(3, 11)),
    "softmax of columns": case(ops.softmax, softmaxes.softmax_reference, f(7, 5), meta={"axis": 0}),
    "log_softmax": case(ops.log_softmax, softmaxes.log_softmax_reference, f(3, 11)),
    "cross_entropy": case(ops.cross_entropy, losses.cross_entropy_reference, f(5, 11), n(11, 5)),
    "cross_entropy, smoothed": case(
        ops.cross_entropy, losses.cross_entropy_reference, f(5, 11), n(11, 5),
        meta={"label_smoothing": 0.1, "ignore": 3},
    ),
    "rms_norm": case(ops.rms_norm, norms.rms_norm_reference, f(5, 9), f(9, **POSITIVE)),
    "rms_norm with residual": case(
        rms_norm_residual, rms_norm_residual_reference, f(5, 9), f(9, **POSITIVE), f(5, 9, seed=1)
    ),
    "layer_norm": case(ops.layer_norm, norms.layer_norm_reference, f(5, 9), f(9, **POSITIVE), f(9, seed=1)),
    "matmul": case(ops.matmul, matmul_reference, f(5, 7), f(7, 6)),
    "matmul, batched, transposed": case(
        ops.matmul, matmul_reference, f(2, 5, 7), f(2, 6, 7), meta={"transpose_b": True}
    ),
    "matmul with bias and activation": case(
        with_bias(ops.matmul), with_bias(matmul_reference), f(5, 7), f(7, 6), f(6)
    ),
    "gated_mlp": case(ops.gated_mlp, gated_mlp_reference, f(3, 7), f(7, 5), f(7, 5, seed=1)),
    "grouped_matmul": case(
        ops.grouped_matmul, grouped_matmul_reference, f(7, 5), f(3, 5, 4), lambda: jnp.asarray([3, 0, 2], jnp.int32)
    ),
    "quantized_matmul": case(
        ops.quantized_matmul, quantized.quantized_matmul_reference, f(3, 32), weights("q8_0", 5, 32),
        constant={"weight": FROZEN}, tolerance=1e-5, derivative_tolerance=1e-5,
    ),
    "quantized_matmul with bias and activation": case(
        quantized_bias(ops.quantized_matmul), quantized_bias(quantized.quantized_matmul_reference),
        f(3, 32), weights("q4_0", 5, 32), f(5), constant={"weight": FROZEN}, tolerance=1e-5, derivative_tolerance=1e-5,
    ),
    "embedding": case(ops.embedding, embeddings.embedding_reference, f(7, 5), n(7, 2, 3)),
    "rope": case(ops.rope, rotary.rope_reference, f(2, 3, 2, 6), f(3, 3), f(3, 3, seed=1)),
    "rope by positions": case(rope_at, rope_at_reference, f(2, 3, 2, 6), n(9, 2, 3)),
    "attention": case(ops.attention, flash_attention.attention_reference, *ATTENTION),
    "attention, causal": case(
        ops.attention, flash_attention.attention_reference, f(1, 7, 2, 6), f(1, 7, 2, 6, seed=1), f(1, 7, 2, 6, seed=2),
        meta={"causal": True, "window": 3, "softcap": 2.0},
    ),
    "attention with lengths": case(
        with_lengths(ops.attention), with_lengths(flash_attention.attention_reference), *ATTENTION,
        lambda: jnp.asarray([7, 6], jnp.int32),
    ),
    "linear_attention": case(
        with_decay(ops.linear_attention), with_decay(linear_attention_reference),
        f(1, 6, 1, 3), f(1, 6, 1, 3, seed=1), f(1, 6, 2, 4, seed=2), f(1, 6, 2, low=-1, high=-0.1),
    ),
    "decode_attention": case(ops.decode_attention, split_attention.decode_attention_reference, *CACHE),
    "mla_decode": case(ops.mla_decode, mla_decode_reference, *LATENT, meta={"rank": 6}),
    "convolution": case(ops.convolution, convolutions.convolution_reference, f(2, 5, 6, 3), f(3, 2, 3, 4)),
    "convolution, strided, grouped": case(
        ops.convolution, convolutions.convolution_reference, f(1, 7, 6, 4), f(3, 3, 2, 4),
        meta={"stride": 2, "groups": 2, "padding": "VALID", "dilation": (1, 2)},
    ),
    "stencil_2d": case(ops.stencil_2d, stencils.stencil_2d_reference, f(2, 5, 7), f(3, 3)),
    "stencil_2d, wrapped": case(
        ops.stencil_2d, stencils.stencil_2d_reference, f(5, 7), f(3, 5), meta={"boundary": "wrap"}
    ),
    "cumsum": case(ops.cumsum, scans.cumsum_reference, f(3, 7)),
    "cumsum of columns, reversed": case(
        ops.cumsum, scans.cumsum_reference, f(7, 3), meta={"axis": 0, "reverse": True}
    ),
    "transpose": case(ops.transpose, layout.transpose_reference, f(5, 7)),
    "sort": case(ops.sort, sorting.sort_reference, f(3, 7), step=STEP),
    "argsort": case(ops.argsort, sorting.argsort_reference, f(3, 7)),
    "top_k": case(ops.top_k, sorting.top_k_reference, f(3, 9), meta={"k": 4}, step=STEP),
    "histogram": case(
        ops.histogram, histograms.histogram_reference, f(23), meta={"bins": 5, "range": (-1.0, 1.0)}
    ),
}  # fmt: skip
