"""Products of uneven groups of rows, the experts of a mixture; their sizes lie on the device."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.data import normal
from benchmarks.gpu.case import Case, Torch
from jtile import ops


class Size(NamedTuple):
    """One shape: x [rows, k] times the transposed w [groups, n, k]."""

    rows: int
    k: int
    n: int
    groups: int

    @property
    def config(self) -> str:
        return f"{self.rows}x{self.k} to {self.n}, {self.groups} experts"

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows of each expert: uneven, as a router makes them, the same in every run."""
        rng = np.random.default_rng(self.groups)
        share = rng.gamma(2.0, size=self.groups)
        ends = np.floor(np.cumsum(share) / share.sum() * self.rows).astype(int)
        ends[-1] = self.rows
        return tuple(int(n) for n in np.diff(ends, prepend=0))


SIZES = (Size(8192, 4096, 14336, 8), Size(4096, 2048, 1408, 64), Size(4096, 2048, 1408, 256))
TINY = (Size(64, 32, 48, 3),)


def cases(tiny: bool = False) -> Iterator[Case]:
    for size in TINY if tiny else SIZES:
        rows, k, n, groups = size
        yield Case(
            workload="grouped", config=size.config, dtype="bfloat16", make=functools.partial(_make, size, False),
            ours=_ours,
            peers={
                "xla": lambda x, w, sizes: lax.ragged_dot(x, w.swapaxes(1, 2), sizes),
                "torch grouped": Torch(_torch_grouped),
                "cublas loop": Torch(functools.partial(_loop, size.sizes)),
            },
            reference=_reference, bytes=2 * (rows * k + groups * n * k + rows * n), flops=2 * rows * n * k,
        )  # fmt: skip
        yield Case(
            workload="grouped_gradient", config=size.config, dtype="bfloat16",
            make=functools.partial(_make, size, True),
            ours=lambda x, w, sizes, dy: jax.vjp(lambda x, w: _ours(x, w, sizes), x, w)[1](dy),
            peers={"torch grouped": Torch(_torch_gradient)}, reference=_reference_gradient,
            bytes=2 * (2 * rows * k + 2 * groups * n * k + rows * n), flops=4 * rows * n * k,
        )  # fmt: skip


def _make(size: Size, gradient, seed):
    x = normal(3 * seed, size.rows, size.k, dtype="bfloat16")
    w = normal(3 * seed + 1, size.groups, size.n, size.k, dtype="bfloat16")
    dy = (normal(3 * seed + 2, size.rows, size.n, dtype="bfloat16"),) if gradient else ()
    return x, w, jnp.asarray(size.sizes, jnp.int32), *dy


def _ours(x, w, sizes):
    return ops.grouped_matmul(x, w, sizes, transpose_w=True)


def _torch_grouped(torch, x, w, sizes):
    return torch._grouped_mm(x, w.transpose(1, 2), offs=torch.cumsum(sizes, 0, dtype=torch.int32))


def _torch_gradient(torch, x, w, sizes, dy):
    ends = torch.cumsum(sizes, 0, dtype=torch.int32)
    return torch._grouped_mm(dy, w, offs=ends), torch._grouped_mm(dy.t(), x, offs=ends)


def _loop(counts: tuple[int, ...], torch, x, w, sizes):
    """The loop that somebody writes who has the sizes on the host."""
    out = torch.empty((x.shape[0], w.shape[1]), dtype=x.dtype, device=x.device)
    start = 0
    for expert, count in enumerate(counts):
        torch.mm(x[start : start + count], w[expert].t(), out=out[start : start + count])
        start += count
    return out


def _reference(x, w, sizes):
    """The products in float32, expert by expert over all rows."""
    ends = jnp.cumsum(sizes)
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]

    def add(y, group):
        matrix, end, count = group
        mine = (rows < end) & (rows >= end - count)
        z = jnp.matmul(x.astype(jnp.float32), matrix.T.astype(jnp.float32), precision="highest")
        return jnp.where(mine, z, y), None

    start = jnp.zeros((x.shape[0], w.shape[1]), jnp.float32)
    return jax.lax.scan(add, start, (w, ends, sizes))[0]


def _reference_gradient(x, w, sizes, dy):
    """The gradients in bfloat16 from float32 products, expert by expert over all rows."""
    ends = jnp.cumsum(sizes)
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    product = functools.partial(jnp.matmul, precision="highest", preferred_element_type=jnp.float32)

    def add(dx, group):
        matrix, end, count = group
        own = jnp.where((rows < end) & (rows >= end - count), dy, 0).astype(jnp.float32)
        return dx + product(own, matrix.astype(jnp.float32)), product(own.T, x.astype(jnp.float32)).astype(w.dtype)

    return jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), (w, ends, sizes))
