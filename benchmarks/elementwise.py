"""A fused elementwise chain, and exp on its own: what a kernel costs beside XLA's own fusion."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

import jtile as jt
from benchmarks.data import TOLERANCE, normal, size
from benchmarks.harness import Case


@jt.kernel(out_type=lambda x, *_: jt.like(x), grid=lambda x, *_, block: (jt.cdiv(x.shape[0], block),))
def chain(x, y, z, o, *, block=8192):
    i = jt.program_id(0)
    X, Y, Z, O = (ref.tiles(block) for ref in (x, y, z, o))
    O[i] = silu_gate(X[i], Y[i]) + Z[i]


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x, *, block: (jt.cdiv(x.shape[0], block),))
def exp(x, o, *, block=8192):
    i = jt.program_id(0)
    o.tiles(block)[i] = jnp.exp(x.tiles(block)[i])


def silu_gate(x, y):
    return x * y * jax.nn.sigmoid(x)


def cases() -> Iterator[Case]:
    for n in (1 << 16, 1 << 20, 1 << 22):
        x, y, z = (normal(i, n) for i in range(3))
        peer = {"xla": lambda x, y, z: silu_gate(x, y) + z}
        yield Case("chain", f"{n}", "float32", chain, peer, (x, y, z), size(x, y, z, z), tolerance=TOLERANCE["float32"])
        yield Case("exp", f"{n}", "float32", exp, {"xla": jnp.exp}, (x,), size(x, x), tolerance=TOLERANCE["float32"])
