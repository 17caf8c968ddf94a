"""The products of a layer in one kernel, whose programs wait for each other: see `hopper_chain`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import models
from jtile.ops import QuantizedTensor, chained_products, hopper_chain

PROJECTED = 96  # rows of the last weight
SIZES = {"q4_1": (256, 256), "fp8": (64, 160)}  # hidden, features: scales of groups are in lines of 16 bytes


def _weight(key, out, inner, kind):
    if kind == "fp8":
        return models.float8(key, out, inner).packed()
    return QuantizedTensor.quantize(jax.random.normal(jax.random.key(key), (out, inner)) * inner**-0.5, kind).packed()


def _operands(kind, products):
    hidden, features = SIZES[kind]
    shapes = ((hidden, hidden),), ((features, hidden),) * 2, ((hidden, features),), ((PROJECTED, hidden),)
    weights = [tuple(_weight(7 * s + k, *w, kind) for k, w in enumerate(of)) for s, of in enumerate(shapes)]
    x, residual, *norms = (jax.random.normal(jax.random.key(90 + k), (1, hidden)) for k in range(products))
    return x.astype(jnp.bfloat16), residual.astype(jnp.bfloat16), tuple(1 + n[0] / 4 for n in norms), (
        tuple(weights[:products])
    )  # fmt: skip


def _distance(a, b):
    a, b = (np.asarray(x, np.float32).ravel() for x in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize(("kind", "products", "rows"), [("q4_1", 4, 8), ("fp8", 3, 4)])
def test_results(kind, products, rows):
    """Of two programs, which have unlike numbers of tiles; rows that are shorter than what roles take in a round."""
    x, residual, norms, weights = _operands(kind, products)
    n = 128 // hopper_chain.bits_of(kind)
    cut = lambda a: a.reshape(*a.shape[:-1], -1, n)
    ys, totals = hopper_chain.hopper_chain.interpret(
        cut(x), cut(residual), tuple(map(cut, norms)), chained_products._stored(weights), kind=kind, activation="silu",
        eps=1e-5, rows=rows, slots=2, pairs=1, programs=2, seed=products,
    )  # fmt: skip
    want, total = chained_products.chained_products(x, residual, norms, weights, eps=1e-5)
    assert want.shape == (1, PROJECTED if products == 4 else SIZES[kind][0])
    assert _distance(ys[-1], want) < 6e-3
    assert _distance(totals[-1], total) < 4e-3
