"""Small, awkward arguments for ops of the library that `library_cases` does not have: for numbers on NPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from library_cases import POSITIVE, LibraryCase, case, f, n

from jtile import ops
from jtile.ops import (
    convolutions,
    filters,
    flash_attention,
    latent_prefill,
    linear_losses,
    normed_products,
    optimizers,
    rwkv,
    segments,
    sparse_attention,
    state_space,
)
from jtile.ops.linear_attention import linear_attention_reference
from jtile.ops.routed_matmul import routed_matmul_reference
from jtile.ops.scaled_matmul import scaled_matmul_reference


def decayed(run):
    return lambda q, k, v, g, b: run(q, k, v, log_decay=g, beta=b, chunk=4)


def sums(run):
    return lambda x, a, b: run(x, (a, b))


def normed(run):
    return lambda x, weight, b, residual: run(x, weight, b, residual=residual)


def shifted(run):
    return lambda q, k, v, slopes: run(
        q, k, v, score=lambda x, b, h, i, j, s: x + s[h] * (j - i).astype(x.dtype), extras=(slopes,)
    )


HEADS = (f(1, 7, 2, 6), f(1, 7, 2, 6, seed=1), f(1, 7, 2, 6, seed=2))
LOW = {"low": -1.0, "high": -0.1}

CASES: dict[str, LibraryCase] = {
    "convolution, depthwise": case(
        ops.convolution, convolutions.convolution_reference, f(1, 5, 6, 4), f(3, 2, 1, 4), meta={"groups": 4}
    ),
    "convolution_transpose": case(
        ops.convolution_transpose, convolutions.convolution_transpose_reference, f(1, 4, 5, 3), f(3, 2, 4, 3),
        meta={"stride": 2},
    ),
    "stencil, two steps": case(ops.stencil, filters.stencil_reference, f(5, 7), f(3, 3), meta={"steps": 2}),
    "stencil, three axes": case(ops.stencil, filters.stencil_reference, f(3, 4, 5), f(3, 3, 3)),
    "separable_filter": case(
        sums(ops.separable_filter), sums(filters.separable_filter_reference), f(5, 7), f(3), f(5, seed=1)
    ),
    "segment_sum": case(
        ops.segment_sum, segments.segment_sum_reference, f(9, 5), n(4, 9), meta={"num_segments": 4}
    ),
    "segment_max": case(
        ops.segment_max, segments.segment_max_reference, f(9, 5), n(4, 9), meta={"num_segments": 4}
    ),
    "linear_attention, delta rule": case(
        decayed(ops.linear_attention), decayed(linear_attention_reference),
        f(1, 6, 1, 3), f(1, 6, 1, 3, seed=1), f(1, 6, 2, 4, seed=2), f(1, 6, 2, **LOW), f(1, 6, 2, seed=3),
    ),
    "rwkv7": case(
        ops.rwkv7, rwkv.rwkv7_reference, f(1, 6, 2, 3), f(1, 6, 2, 3, seed=1, **LOW),
        *(f(1, 6, 2, 3, seed=s) for s in range(2, 6)),
    ),
    "selective_scan": case(
        ops.selective_scan, state_space.selective_scan_reference,
        f(1, 6, 5), f(1, 6, 5, **POSITIVE), f(5, 3, **LOW), f(1, 6, 3), f(1, 6, 3, seed=1),
    ),
    "mla_attention": case(
        ops.mla_attention, latent_prefill.mla_attention_reference,
        f(1, 5, 2, 6), f(1, 5, 2, 4, seed=1), f(1, 5, 2), f(1, 5, 2, 4, seed=2),
    ),
    "attention with a score": case(
        shifted(ops.attention), shifted(flash_attention.attention_reference), *HEADS, f(2)
    ),
    "block_sparse_attention": case(
        ops.block_sparse_attention, sparse_attention.block_sparse_attention_reference,
        f(1, 8, 2, 6), f(1, 8, 1, 6, seed=1), f(1, 8, 1, 6, seed=2),
        lambda: jnp.asarray([[[[0, -1]] * 4 + [[1, 0]] * 4]], jnp.int32), meta={"keys": 4, "causal": True},
    ),
    "linear_cross_entropy": case(
        ops.linear_cross_entropy, linear_losses.linear_cross_entropy_reference, f(5, 7), f(11, 7), n(11, 5)
    ),
    "rms_norm_matmul": case(
        normed(ops.rms_norm_matmul), normed(normed_products.rms_norm_matmul_reference),
        f(3, 9), f(9, **POSITIVE), f(5, 9), f(3, 9, seed=1),
    ),
    "newton_schulz": case(ops.newton_schulz, optimizers.newton_schulz_reference, f(5, 7), meta={"steps": 2}),
    "routed_matmul": case(
        ops.routed_matmul, routed_matmul_reference, f(5, 7), f(3, 4, 7), n(3, 5, 2)
    ),
    "scaled_matmul": case(
        ops.scaled_matmul, scaled_matmul_reference, f(5, 7), f(7, 6), f(5, 2), f(2, 2),
        meta={"block": 4, "out_dtype": jax.dtypes.canonicalize_dtype("float32")},
    ),
}  # fmt: skip
