"""Peers in Pallas Mosaic GPU, as shipped with JAX for Hopper: `jax.experimental.pallas.ops.gpu`."""

from __future__ import annotations

from collections.abc import Callable


def attention(d: int, causal: bool) -> Callable:
    """Attention of heads of d; key blocks are as large as shared memory takes. It does not scale the scores: its
    queries come from `scaled`."""

    def run(q, k, v):
        from jax.experimental.pallas.ops.gpu import attention_mgpu

        block = min(256, 128 * 128 // d, k.shape[1])
        config = attention_mgpu.TuningConfig(block_q=64, block_kv=block, max_concurrent_steps=2, causal=causal)
        return attention_mgpu.attention(q, k, v, config)

    return run


def scaled(q, k, v):
    """Operands whose plain products are the scores of attention with the usual scale."""
    return q * q.shape[3] ** -0.5, k, v


def matmul(tall: bool) -> Callable:
    """The product a @ b by blocks of 256x128 (`tall`) or 128x256."""

    def run(a, b):
        from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as hopper

        side = hopper.MatmulDimension.M if tall else hopper.MatmulDimension.N
        config = hopper.TuningConfig(
            tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4, grid_minor_dim=hopper.MatmulDimension.M,
            grid_tile_width=8, wg_dimension=side,
        )  # fmt: skip
        return hopper.matmul(a, b, None, config)

    return run
