"""Collectives along an axis of a mesh, inside of `jax.shard_map`: kernels whose programs push into the memory of their
peers and signal them. Each waits for all peers in each call, so that no barrier is needed between calls.

Sums are in float32 (integers in their own dtype), in the order of the devices: the same bits on all of them, in every
run. What is only moved keeps its bits, but for the NaN whose bits are all ones: it may come as another NaN. The
transpose of one collective is another.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops.collective_decode import decode_attention as decode_attention
from jtile.ops.collective_decode import decode_attention_reference as decode_attention_reference
from jtile.ops.collective_decode import mla_decode as mla_decode
from jtile.ops.collective_decode import mla_decode_reference as mla_decode_reference
from jtile.ops.collective_experts import Routes as Routes
from jtile.ops.collective_experts import combine as combine
from jtile.ops.collective_experts import combine_reference as combine_reference
from jtile.ops.collective_experts import dispatch as dispatch
from jtile.ops.collective_experts import dispatch_reference as dispatch_reference
from jtile.ops.collective_flows import POSTED_ONCE, not_in_flows
from jtile.ops.collective_norms import all_reduce_rms_norm as all_reduce_rms_norm
from jtile.ops.collective_norms import all_reduce_rms_norm_reference as all_reduce_rms_norm_reference
from jtile.ops.collective_parts import ONE_SHOT, summed_cotangent, varying_together
from jtile.ops.collective_products import all_gather_matmul as all_gather_matmul
from jtile.ops.collective_products import all_gather_matmul_reference as all_gather_matmul_reference
from jtile.ops.collective_products import matmul_all_reduce as matmul_all_reduce
from jtile.ops.collective_products import matmul_all_reduce_reference as matmul_all_reduce_reference
from jtile.ops.collective_products import matmul_reduce_scatter as matmul_reduce_scatter
from jtile.ops.collective_products import matmul_reduce_scatter_reference as matmul_reduce_scatter_reference
from jtile.ops.collective_rows import all_gather_rms_norm as all_gather_rms_norm
from jtile.ops.collective_rows import all_gather_rms_norm_reference as all_gather_rms_norm_reference
from jtile.ops.collective_rows import chosen_sums as chosen_sums
from jtile.ops.collective_rows import chosen_sums_reference as chosen_sums_reference
from jtile.ops.dispatch import BLOCK_LEVEL, has
from jtile.ops.exchanged_parts import add, add_everywhere, add_once, gather, swap
from jtile.ops.ring_attention import ring_attention as ring_attention
from jtile.ops.ring_attention import ring_attention_reference as ring_attention_reference
from jtile.ops.ring_attention import zigzag_order as zigzag_order


def all_reduce(x: jax.Array, axis: str, *, two_shot: bool | None = None) -> jax.Array:
    """The sum of `x` over the devices along an axis, as `jax.lax.psum`; the same bits on all of them. Differentiable.

    Args:
      x: real array of any shape.
      axis: an axis of the mesh.
      two_shot: sum a share on each device and gather the shares, instead of everything everywhere; default: where `x`
        times the number of devices less two has more than 1 MiB, or 384 KiB where tiles are posted (on NVIDIA's GPUs):
        never on two, which send as much either way.
    Returns:
      An array like `x`; the same on all devices along the axis.
    Raises:
      KernelValueError: no such axis, or outside of `shard_map`. KernelTypeError: no real numbers.
    """
    x = jnp.asarray(x)
    _check_sums("all_reduce", x)
    n = jt.axis_size(axis)
    if n == 1 or x.size == 0:
        return jax.lax.psum(x, axis)
    return _all_reduce(axis, _in_two(x, axis) if two_shot is None else bool(two_shot), x)


def _in_two(x: jax.Array, axis: str) -> bool:
    """Whether a sum over the devices along an axis is made in two turns."""
    flat = jax.ShapeDtypeStruct((x.size,), x.dtype)
    posted = has(jt.target(), *BLOCK_LEVEL) and not_in_flows(flat, axis=axis) is None
    return (jt.axis_size(axis) - 2) * x.size * x.dtype.itemsize > (POSTED_ONCE if posted else ONE_SHOT)


def sum_of(x: jax.Array, axis: str) -> jax.Array:
    """`all_reduce` of x, in as many turns as suit it, as a value that varies along the axis; not differentiable."""
    return _sums(axis, _in_two(x, axis), x)


def all_reduce_reference(x, axis, *, two_shot=None):
    """`all_reduce` by XLA's collectives. Arguments and result are those of `all_reduce`."""
    del two_shot
    return jax.lax.psum(x, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _all_reduce(axis: str, two_shot: bool, x: jax.Array) -> jax.Array:
    return jt.same_along(_sums(axis, two_shot, x), axis)


def _sums(axis: str, two_shot: bool, x: jax.Array) -> jax.Array:
    flat = x.reshape(-1)
    if two_shot:
        n = jt.axis_size(axis)
        padded = jnp.pad(flat, (0, -flat.size % n)).reshape(n, -1)
        total = add_everywhere(padded, axis)
    else:
        total = add_once(flat, axis)
    return total.reshape(-1)[: flat.size].reshape(x.shape)


_all_reduce.defvjp(
    lambda axis, two_shot, x: (_all_reduce(axis, two_shot, x), None),
    lambda axis, two_shot, _, ct: (summed_cotangent(ct, axis, functools.partial(_all_reduce, axis, two_shot)),),
)


def all_gather(x: jax.Array, axis: str, *, dim: int = 0) -> jax.Array:
    """The arrays of all devices along an axis, one behind the other along a dimension, as
    `jax.lax.all_gather(x, axis, axis=dim, tiled=True)`. Differentiable: its transpose is `reduce_scatter`.

    Args:
      x: array of at least one dimension.
      axis: an axis of the mesh.
      dim: the dimension that grows, by as many times as there are devices.
    Returns:
      An array like `x`, whose dimension `dim` is as many times as long as there are devices; the same on all of them.
    Raises:
      KernelTypeError: a dimension that is no whole number.
      KernelValueError: no such axis or dimension, or outside of `shard_map`.
    """
    x, dim = _along("all_gather", x, dim)
    n = jt.axis_size(axis)
    if n == 1 or x.size == 0:
        return x.reshape(*x.shape[:dim], n * x.shape[dim], *x.shape[dim + 1 :])
    front = jnp.moveaxis(x, dim, 0)
    parts = gather(*varying_together(axis, front.reshape(-1)), axis)
    return jnp.moveaxis(parts.reshape(n * front.shape[0], *front.shape[1:]), 0, dim)


def all_gather_reference(x, axis, *, dim=0):
    """`all_gather` by XLA's collectives. Arguments and result are those of `all_gather`."""
    return jax.lax.all_gather(x, axis, axis=dim, tiled=True)


def reduce_scatter(x: jax.Array, axis: str, *, dim: int = 0) -> jax.Array:
    """The sum over the devices along an axis, of which each keeps its share along a dimension, as
    `jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)`. Differentiable: its transpose is `all_gather`.

    Args:
      x: real array of at least one dimension.
      axis: an axis of the mesh.
      dim: the dimension that is shared out; its size is a multiple of the number of devices.
    Returns:
      An array like `x`, whose dimension `dim` is shorter by the number of devices: this device's share of the sum.
    Raises:
      KernelValueError: no such axis or dimension, a size that is no multiple, or outside of `shard_map`.
      KernelTypeError: no real numbers.
    """
    x, dim = _along("reduce_scatter", x, dim)
    _check_sums("reduce_scatter", x)
    n = jt.axis_size(axis)
    share = _share("reduce_scatter", x, dim, n)
    if n == 1 or x.size == 0:
        return x.reshape(*x.shape[:dim], share, *x.shape[dim + 1 :])
    front = jnp.moveaxis(x, dim, 0)
    total = add(*varying_together(axis, front.reshape(n, -1)), axis)
    return jnp.moveaxis(total.reshape(share, *front.shape[1:]), 0, dim)


def reduce_scatter_reference(x, axis, *, dim=0):
    """`reduce_scatter` by XLA's collectives. Arguments and result are those of `reduce_scatter`."""
    return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def all_to_all(x: jax.Array, axis: str, *, split: int = 0, concat: int = 0) -> jax.Array:
    """Shares of `x` along one dimension, one for each device along an axis; those that all devices have for this one
    come back behind each other along another, as `jax.lax.all_to_all(..., tiled=True)`. Differentiable: its transpose
    is the same with the dimensions in each other's place.

    Args:
      x: array of at least one dimension.
      axis: an axis of the mesh.
      split: the dimension that is shared out; its size is a multiple of the number of devices.
      concat: the dimension along which the received shares stand.
    Returns:
      An array of the dtype of `x`: dimension `split` is shorter by the number of devices, `concat` longer by it.
    Raises:
      KernelValueError: no such axis or dimension, a size that is no multiple, or outside of `shard_map`.
    """
    x, split = _along("all_to_all", x, split)
    x, concat = _along("all_to_all", x, concat)
    n = jt.axis_size(axis)
    share = _share("all_to_all", x, split, n)
    if n == 1:
        return x
    shares = jnp.moveaxis(x.reshape(*x.shape[:split], n, share, *x.shape[split + 1 :]), split, 0)
    shape = list(shares.shape[1:])
    shape[concat] *= n
    if x.size == 0:
        return x.reshape(shape)
    got = swap(*varying_together(axis, shares.reshape(n, -1)), axis).reshape(shares.shape)
    return jnp.moveaxis(got, 0, concat).reshape(shape)


def all_to_all_reference(x, axis, *, split=0, concat=0):
    """`all_to_all` by XLA's collectives. Arguments and result are those of `all_to_all`."""
    return jax.lax.all_to_all(x, axis, split, concat, tiled=True)


def _along(name: str, x, dim: int) -> tuple[jax.Array, int]:
    x = jnp.asarray(x)
    if not isinstance(dim, int | np.integer):
        raise KernelTypeError(f"{name}: a dimension is a whole number, got {dim!r}")
    if not -x.ndim <= dim < x.ndim:
        raise KernelValueError(f"{name}: there is no dimension {dim} of an array of shape {tuple(x.shape)}")
    return x, dim % x.ndim


def _share(name: str, x: jax.Array, dim: int, n: int) -> int:
    share, rest = divmod(x.shape[dim], n)
    if rest:
        raise KernelValueError(
            f"{name}: dimension {dim} of {tuple(x.shape)} is shared out to {n} devices, and {x.shape[dim]} is no "
            f"multiple of that; pad it to {math.ceil(x.shape[dim] / n) * n}"
        )
    return share


def _check_sums(name: str, x: jax.Array) -> None:
    if not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
        raise KernelTypeError(f"{name} sums real numbers, got {x.dtype.name}; cast it, or sum its parts")
