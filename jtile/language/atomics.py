"""Atomic updates of elements of Refs, and the accesses `x.at[index]`, which offer them as methods."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtile._errors import KernelTypeError
from jtile._parts import is_complex, is_key
from jtile.language._place import user_place
from jtile.language._primitives import atomic_p
from jtile.language.refs import Ref, TileView, _mask, _operands, _tracer, _value, _writable, as_ref, load, store


def _atomic(fn: str, x, index, value, mask, compare=None):
    x = as_ref(x)
    _writable(x, f"use atomic_{fn} on")
    if is_key(x.dtype):
        raise KernelTypeError(f"atomic_{fn} is for numbers, and {x.name} holds random keys", user_place())
    if is_complex(x.dtype) and fn != "add":
        raise KernelTypeError(
            f"atomic_{fn} is not defined for complex numbers, and {x.name} has dtype {x.dtype.name}: atomic_add adds "
            "both parts; for another one keep real and imaginary parts in two float32 arrays",
            user_place(),
        )
    if fn in ("and", "or", "xor") and jnp.issubdtype(x.dtype, np.inexact):
        raise KernelTypeError(f"atomic_{fn} is for integers, and {x.name} has dtype {x.dtype.name}", user_place())
    a = x.access(index)
    masked = _mask(a, mask)
    values = [_value(x, a, v, f"atomic_{fn}") for v in ([value] if compare is None else [value, compare])]
    return a.after(atomic_p.bind(_tracer(x), *_operands(a), *values, *masked, fn=fn, dims=a.dims, masked=bool(masked)))


def atomic_add(x, index, value, mask=None) -> jax.Array:
    """`x[index] += value`, atomically: several programs, and lanes of one tile, may add to the same element.

    Args:
      x, index: a Ref, and an index as in `x[index]`.
      value: the numbers to add, broadcast to the shape of the access.
      mask: bool; lanes where it is false add nothing.

    Returns:
      The old values; 0 in lanes that were not written.
    """
    return _atomic("add", x, index, value, mask)


def atomic_max(x, index, value, mask=None) -> jax.Array:
    """`x[index] = max(x[index], value)`, atomically: several programs, and lanes of one tile, may meet at an element.

    Args:
      x, index: a Ref, and an index as in `x[index]`.
      value: the numbers to compare with, broadcast to the shape of the access.
      mask: bool; lanes where it is false change nothing.

    Returns:
      The old values; 0 in lanes where `mask` is false or that are outside of the array.
    """
    return _atomic("max", x, index, value, mask)


def atomic_min(x, index, value, mask=None) -> jax.Array:
    """`x[index] = min(x[index], value)`, atomically: several programs, and lanes of one tile, may meet at an element.

    Args:
      x, index: a Ref, and an index as in `x[index]`.
      value: the numbers to compare with, broadcast to the shape of the access.
      mask: bool; lanes where it is false change nothing.

    Returns:
      The old values; 0 in lanes where `mask` is false or that are outside of the array.
    """
    return _atomic("min", x, index, value, mask)


def atomic_and(x, index, value, mask=None) -> jax.Array:
    """`x[index] &= value`, atomically: several programs, and lanes of one tile, may meet at an element.

    Args:
      x, index: a Ref of integers or bools, and an index as in `x[index]`.
      value: the bits to keep, broadcast to the shape of the access.
      mask: bool; lanes where it is false change nothing.

    Returns:
      The old values; 0 in lanes where `mask` is false or that are outside of the array.
    """
    return _atomic("and", x, index, value, mask)


def atomic_or(x, index, value, mask=None) -> jax.Array:
    """`x[index] |= value`, atomically: several programs, and lanes of one tile, may meet at an element.

    Args:
      x, index: a Ref of integers or bools, and an index as in `x[index]`.
      value: the bits to set, broadcast to the shape of the access.
      mask: bool; lanes where it is false change nothing.

    Returns:
      The old values; 0 in lanes where `mask` is false or that are outside of the array.
    """
    return _atomic("or", x, index, value, mask)


def atomic_xor(x, index, value, mask=None) -> jax.Array:
    """`x[index] ^= value`, atomically: several programs, and lanes of one tile, may meet at an element.

    Args:
      x, index: a Ref of integers or bools, and an index as in `x[index]`.
      value: the bits to turn, broadcast to the shape of the access.
      mask: bool; lanes where it is false change nothing.

    Returns:
      The old values; 0 in lanes where `mask` is false or that are outside of the array.
    """
    return _atomic("xor", x, index, value, mask)


def atomic_xchg(x, index, value, mask=None) -> jax.Array:
    """`x[index] = value`, atomically: each of several programs that meet at an element gets what was there before it.

    Args:
      x, index: a Ref, and an index as in `x[index]`.
      value: what is written, broadcast to the shape of the access.
      mask: bool; lanes where it is false write nothing.

    Returns:
      The old values; 0 in lanes where `mask` is false or that are outside of the array.
    """
    return _atomic("xchg", x, index, value, mask)


def atomic_cas(x, index, compare, value, mask=None) -> jax.Array:
    """`x[index] = value` where the element has the bits of `compare`, atomically (compare and swap).

    Args:
      x, index: a Ref, and an index as in `x[index]`.
      compare: what the element has to be, broadcast to the shape of the access.
      value: what is then written, broadcast likewise.
      mask: bool; lanes where it is false write nothing.

    Returns:
      The old values; 0 in lanes where `mask` is false or that are outside of the array.
    """
    return _atomic("cas", x, index, value, mask, compare)


@dataclasses.dataclass(frozen=True)
class Indexer:
    """`x.at`: indexed by an index, it offers the atomics of that access."""

    x: Ref | TileView

    def __getitem__(self, index: Any) -> Place:
        return Place(self.x, index)


@dataclasses.dataclass(frozen=True)
class Place:
    """`x.at[index]`: read-modify-write of one access; every method gives the old values."""

    x: Ref | TileView
    index: Any

    def add(self, value, mask=None) -> jax.Array:
        return atomic_add(self.x, self.index, value, mask)

    def max(self, value, mask=None) -> jax.Array:
        return atomic_max(self.x, self.index, value, mask)

    def min(self, value, mask=None) -> jax.Array:
        return atomic_min(self.x, self.index, value, mask)

    def and_(self, value, mask=None) -> jax.Array:
        return atomic_and(self.x, self.index, value, mask)

    def or_(self, value, mask=None) -> jax.Array:
        return atomic_or(self.x, self.index, value, mask)

    def xor(self, value, mask=None) -> jax.Array:
        return atomic_xor(self.x, self.index, value, mask)

    def xchg(self, value, mask=None) -> jax.Array:
        return atomic_xchg(self.x, self.index, value, mask)

    def cas(self, compare, value, mask=None) -> jax.Array:
        return atomic_cas(self.x, self.index, compare, value, mask)

    def get(self, mask=None, other=None):
        return load(self.x, self.index, mask, other)

    def set(self, value, mask=None) -> None:
        store(self.x, self.index, value, mask)
