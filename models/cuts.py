"""Parts of weights, by indices of rows and columns; the index `NONE` stands for zeros."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jtile._errors import ModelError
from jtile.ops import QuantizedTensor
from jtile.ops.quantized_tensor import BLOCKS
from jtile.ops.super_blocks import SUPER
from jtile.ops.weight_codes import BLOCK

NONE = -1


def cut(weight: jax.Array | QuantizedTensor, cuts: dict[int, np.ndarray], name: str, turned: bool = False):
    """The part of a weight at an index along each of some dimensions.

    turned: a stack of quantised matrices lies as [experts, out, in], and `cuts` speaks of [experts, in, out].

    Raises:
      ModelError: the columns of a quantised matrix cannot be cut there.
    """
    if not isinstance(weight, QuantizedTensor):
        for dim, index in cuts.items():
            weight = take(jnp, weight, index, dim)
        return weight
    last = weight.ndim - 1
    for dim, index in cuts.items():
        at = {last: last - 1, last - 1: last}.get(dim, dim) if turned and weight.ndim == 3 else dim
        weight = _columns(weight, index, name) if at == last else _rows(weight, index, at)
    return weight


def take(xp, x, index: np.ndarray, dim: int):
    """x at an index along a dimension; `xp` is NumPy or `jax.numpy`, whose functions are called."""
    start, size = int(index[0]), index.size
    if start >= 0 and np.array_equal(index, np.arange(start, start + size)):
        return x[(slice(None),) * dim + (slice(start, start + size),)]
    found = xp.take(x, np.maximum(index, 0), axis=dim)
    real = (index != NONE).reshape((-1,) + (1,) * (x.ndim - dim - 1))
    return found if real.all() else xp.where(real, found, xp.zeros((), x.dtype))


def _rows(weight: QuantizedTensor, index: np.ndarray, dim: int) -> QuantizedTensor:
    found = jax.tree.map(lambda leaf: _bits(leaf, lambda x: take(jnp, x, index, dim)), weight)
    together = dim != weight.ndim - 2 or (index.size % BLOCKS == 0 and _in_runs(index, BLOCKS))
    return found if together or weight.activations != "blocks" else dataclasses.replace(found, activations=None)


def _bits(leaf, f):
    """f(leaf); an array of float8_e8m0fnu goes through f as bytes, since this dtype of powers of two has no zero."""
    if leaf.dtype != jnp.float8_e8m0fnu:
        return f(leaf)
    return jax.lax.bitcast_convert_type(f(jax.lax.bitcast_convert_type(leaf, jnp.uint8)), leaf.dtype)


def border(weight: QuantizedTensor) -> int:
    """The smallest number of columns that stay together where a quantised matrix is cut."""
    alone = weight.kind in ("int8", "fp8") and weight.scale.shape[-1] == 1
    return SUPER if weight.is_super else 1 if alone else BLOCK


def _columns(weight: QuantizedTensor, index: np.ndarray, name: str) -> QuantizedTensor:
    """The columns of a quantised matrix at an index, in whole groups; groups of other kinds than K-quants are made
    smaller where that is needed."""
    inner, smallest = weight.shape[-1], border(weight)
    of_rows = not weight.is_super and weight.scale.shape[-1] == 1
    size = smallest if weight.is_super or of_rows else weight.group
    while size > smallest and not _in_runs(index, size):
        size //= 2
    if inner % size or not _in_runs(index, size):
        raise ModelError(
            f"the tensor {name} of the kind {weight.kind} is cut over devices in groups of {size} columns, and their "
            f"parts of {index.size} of its {inner} columns are no such groups; take another number of devices, or a "
            "checkpoint with smaller groups"
        )
    if not weight.is_super and not of_rows and size < weight.group:
        weight = weight.regrouped(size)
    blocks = index.reshape(-1, size)[:, 0]
    blocks = np.where(blocks == NONE, NONE, blocks // size)

    def part(leaf):
        if leaf.shape[-1] == 1 and of_rows:
            return leaf  # it has one scale for a whole row
        units = leaf.reshape(*leaf.shape[:-1], inner // size, -1)
        return take(jnp, units, blocks, leaf.ndim - 1).reshape(*leaf.shape[:-1], -1)

    found = jax.tree.map(lambda leaf: _bits(leaf, part), weight)
    ways = {"blocks": found.group == BLOCKS, "rows": True, "int16": True, None: True}
    return found if ways[weight.activations] else dataclasses.replace(found, activations=None)


def _in_runs(index: np.ndarray, size: int) -> bool:
    """Whether an index is made of whole, aligned runs of `size` numbers."""
    if index.size % size:
        return False
    runs = index.reshape(-1, size)
    starts = runs[:, :1]
    aligned = ((starts % size == 0) | (starts == NONE)).all()
    return bool(aligned and (runs == np.where(starts == NONE, NONE, starts + np.arange(size))).all())
