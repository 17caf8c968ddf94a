"""Typed random keys (`jax.random.key`): a kernel holds them as their words, uint32 along a last axis of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

NAME = "key<fry>"  # of the dtype: keys of the generator that the language has
WORDS = 2


def is_key(dtype: Any) -> bool:
    """Whether a dtype is one of random keys, of any generator."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def stored(x: Any) -> Any:
    """The type of the memory behind an array of this type (anything with shape and dtype)."""
    return jax.ShapeDtypeStruct((*x.shape, WORDS), "uint32") if is_key(x.dtype) else x


def words(x: Any) -> Any:
    """An array as it is in memory."""
    return jax.random.key_data(x) if is_key(x.dtype) else x


def keys(x: Any) -> Any:
    """Keys of their words [..., 2]."""
    return jax.random.wrap_key_data(x, impl="threefry2x32")


def typed(arrays: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    """Arrays in memory as arrays of these types."""
    return [keys(x) if is_key(t.dtype) else x for x, t in zip(arrays, types, strict=True)]


def around(run: Callable[..., Sequence[Any]], inputs: Any, outputs: Any) -> Callable[..., Sequence[Any]]:
    """A function of arrays in memory as one of arrays of the types `inputs`, with results of the types `outputs` (both
    are pytrees of them); further arguments are passed on."""
    types, results = jax.tree.leaves(inputs), jax.tree.leaves(outputs)
    if not any(is_key(t.dtype) for t in (*types, *results)):
        return run
    return lambda arrays, *more: typed(run([words(x) for x in arrays], *more), results)
