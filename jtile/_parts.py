"""Elements that are several numbers in memory, along a last axis of their own: random keys (`jax.random.key`) their
words, complex numbers their real and imaginary parts."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax

# -- random keys ------------------------------------------------------------------------------------------------------

KEY = "key<fry>"  # the dtype of keys of the generator that the language has
WORDS = 2


def is_key(dtype: Any) -> bool:
    """Whether a dtype is one of random keys, of any generator."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def stored(x: Any) -> Any:
    """The type of the memory behind an array of keys; other types stay."""
    return jax.ShapeDtypeStruct((*x.shape, WORDS), "uint32") if is_key(x.dtype) else x


def words(x: Any) -> Any:
    """An array of keys as the array of words that memory holds; other arrays stay as they are."""
    return jax.random.key_data(x) if is_key(x.dtype) else x


def keys(x: Any) -> Any:
    """The array of keys that has these words [..., 2]."""
    return jax.random.wrap_key_data(x, impl="threefry2x32")


# -- complex numbers --------------------------------------------------------------------------------------------------

COMPLEX = np.dtype(np.complex64)  # the complex dtype of the language
PARTS = 2  # the real and the imaginary part


def is_complex(dtype: Any) -> bool:
    """Whether a dtype is one of complex numbers, of any width."""
    kind = getattr(dtype, "kind", None)
    if isinstance(dtype, type):  # a scalar type, such as jnp.complex64
        return jax.dtypes.issubdtype(dtype, np.complexfloating)
    return kind == "c"


def part_dtype(dtype: Any) -> np.dtype:
    """The dtype of the real and imaginary parts of a complex dtype."""
    return np.dtype(np.float32 if dtype == COMPLEX else np.float64)


def parts(x: Any) -> Any:
    """A complex array as its parts in memory; no copy for a NumPy array whose elements lie side by side."""
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(x).reshape(x.shape).view(np.dtype([("parts", part_dtype(x.dtype), PARTS)]))["parts"]
    return lax.concatenate([lax.expand_dims(p, (x.ndim,)) for p in (lax.real(x), lax.imag(x))], x.ndim)


def whole(x: Any) -> Any:
    """The complex array that has these parts [..., 2]."""
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(x).view(np.result_type(x.dtype, np.complex64))[..., 0]
    return lax.complex(*[lax.index_in_dim(x, k, -1, keepdims=False) for k in range(PARTS)])


# JAX's cotangent of a complex number is the conjugate of that of its parts, taken for a complex number.


def cotangent(x: Any) -> Any:
    """JAX's complex cotangent, made from the cotangent of the parts [..., 2]."""
    return lax.conj(whole(x))


def of_parts(ct: Any) -> Any:
    """The cotangent of the parts [..., 2], made from JAX's complex cotangent: the inverse of `cotangent`."""
    return parts(lax.conj(ct))
