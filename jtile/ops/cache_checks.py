"""Typed errors for caches of one vector a token, which all heads share."""

from __future__ import annotations

import jax.numpy as jnp

from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops._shapes import check_float, check_rank, check_shape
from jtile.ops.split_attention import CACHE_DTYPES


def check_vectors(op: str, name: str, features: str, cache, scales, pages, q) -> None:
    """Check the cache beside queries of rank 4.

    Args:
      op, name: the op, and its argument for the cache.
      features: what the last axis of q and of the cache is called.
      cache: [batch, slots, width], with `pages` [pages, slots of a page, width].
      scales: float32 [rows, slots] of a cache of 8 bits; None: it has the dtype of q.
      pages: int [batch, pages of a row], or None.
      q: float [batch, t, heads, width].
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes that do not fit.
    """
    check_rank(op, name, cache, 3, f"[batch, slots, {features}], or with pages [pages, slots of a page, {features}]")
    _check_storage(op, name, cache, scales, q.dtype)
    if pages is None:
        check_shape(op, name, cache, (q.shape[0], cache.shape[1], q.shape[3]))
    else:
        check_rank(op, "pages", pages, 2, "[batch, pages of a row]")
        check_shape(op, "pages", pages, (q.shape[0], pages.shape[1]))
        check_shape(op, name, cache, (*cache.shape[:2], q.shape[3]))


def _check_storage(op: str, name: str, cache, scales, dtype) -> None:
    if scales is None:
        check_float(op, **{name: cache})
        if cache.dtype != dtype:
            raise KernelTypeError(f"{op}: q and {name} have one dtype, got {dtype.name} and {cache.dtype.name}")
        return
    if cache.dtype not in CACHE_DTYPES:
        verb = "are" if name.endswith("s") else "is"
        raise KernelTypeError(f"{op}: with scales the {name} {verb} int8 or float8_e4m3fn, got {cache.dtype.name}")
    check_shape(op, "scales", scales, cache.shape[:2])
    if scales.dtype != jnp.float32:
        raise KernelTypeError(f"{op}: the scales are float32, got {scales.dtype.name}")


def check_values(op: str, width: int, rank: int, splits: int | None) -> None:
    """Check how many of the `width` elements of an entry are values, and the number of programs that share a row.

    Raises:
      KernelValueError: all or none are values, or there is less than one program.
    """
    if not 1 <= rank < width:
        raise KernelValueError(f"{op}: of an entry of {width} elements 1 to {width - 1} are values, got rank={rank}")
    if splits is not None and splits < 1:
        raise KernelValueError(f"{op}: splits is at least 1, got {splits}")
