"""How the kernel library is tested: an op against its `jnp` reference, as native code and in the interpreter."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.testing import relative_error

FLOATS = ("float32", "bfloat16", "float16")
TOLERANCE = {"float64": 1e-13, "float32": 1e-6, "bfloat16": 1e-3, "float16": 1e-4}


def shapes_and_dtypes(shapes):
    """Every shape in float32, the first one in the other dtypes too."""
    return [(shape, "float32") for shape in shapes] + [(shapes[0], dtype) for dtype in FLOATS[1:]]


def normal(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def integers(seed: int, low: int, high: int, *shape: int) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), shape, low, high, jnp.int32)


def agree(op, reference, *args, tolerance: float | None = None, interpret: bool = False, **options) -> None:
    """`op` gives what `reference` gives: the same pytree of shapes and dtypes, and values within the tolerance of the
    dtype of the first argument. `interpret`: the reference interpreter does too."""
    expected = jax.jit(lambda *operands: reference(*operands, **options))(*args)  # one compilation instead of many
    results = [op(*args, **options)]
    if interpret:
        with jt.config(interpret=True):
            results.append(op(*args, **options))
    for got in results:
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        error = relative_error(got, expected)
        limit = TOLERANCE.get(jax.tree.leaves(args)[0].dtype.name, 0) if tolerance is None else tolerance
        assert error <= limit, f"relative error {error:.2g}, allowed {limit:.2g}"
