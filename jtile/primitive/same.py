"""`jt.same_along`: what a kernel has made equal on all devices of an axis, for JAX's types of values in `shard_map`."""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from jtile import _compat

same_p = jexc.Primitive("jtile_same_along")


def same_along(x: Any, axis: str) -> jax.Array:
    """`x`, with the promise that all devices along an axis of the mesh hold the same: inside of `jax.shard_map`.

    Kernels that talk to each other along an axis give results that vary along it, as far as JAX can know
    (`check_vma=True`). With the promise a result may leave `shard_map` as replicated, as that of `jax.lax.psum` may.
    A broken promise is not detected: each device goes on with its own array.

    Args:
      x: an array.
      axis: the name of an axis of the mesh.

    Returns:
      The array.
    """
    return same_p.bind(jnp.asarray(x), axis=axis) if varies(axis) else jnp.asarray(x)


def varies(axis: str) -> bool:
    """Whether JAX keeps book of what varies along an axis here."""
    return axis in jax.typeof(jax.lax.axis_index(axis)).manual_axis_type.varying


same_p.def_impl(lambda x, *, axis: x)
same_p.def_abstract_eval(lambda x, *, axis: _compat.without_axis(x, axis))
mlir.register_lowering(same_p, lambda ctx, x, *, axis: [x])
batching.primitive_batchers[same_p] = lambda args, dims, *, axis: (same_p.bind(*args, axis=axis), dims[0])


def _transpose(cotangent: Any, x: Any, *, axis: str) -> list[Any]:
    """The transpose: all devices have the same value, so it may as well be that of the first one."""
    if type(cotangent) is ad.Zero:
        return [ad.Zero(x.aval)]
    here = jax.lax.pcast(cotangent, axis, to="varying")
    return [jnp.where(jax.lax.axis_index(axis) == np.int32(0), here, jnp.zeros_like(here))]


ad.deflinear2(same_p, _transpose)
