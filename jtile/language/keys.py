"""Refs of random keys: an element is a key; the memory behind it has its words along one more axis."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax

from jtile import _parts
from jtile.language._index import Access, Span
from jtile.language.refs import Ref


class KeyRef(Ref):
    """A Ref of typed random keys, which loads give and stores take. Lanes outside of the array, and masked ones, read
    the key whose words are 0."""

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tracer.shape)[:-1]

    @property
    def dtype(self) -> Any:
        return jax.eval_shape(_parts.keys, jax.ShapeDtypeStruct((_parts.WORDS,), np.uint32)).dtype

    def stored(self, a: Access) -> Access:
        last = len(a.raw_shape)
        zero = np.int32(0)
        return _Words((*a.dims, Span(_parts.WORDS)), (*a.values, zero), a.reverse, (*a.perm, last), a.new)


class _Words(Access):
    """The access to the words of keys."""

    def after(self, x):
        return _parts.keys(super().after(x))

    def before(self, x):
        """Keys that are stored, or the mask of an access."""
        return super().before(_parts.words(x) if _parts.is_key(x.dtype) else lax.expand_dims(x, (x.ndim,)))
