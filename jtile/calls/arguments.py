"""Arguments of a kernel call: what becomes an array, what is refused, and the types that a call is cached by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.tree_util import keystr

from jtile._errors import KernelTypeError, KernelValueError
from jtile._parts import is_complex
from jtile.calls.signature import Signature, check_dtype


def as_operand(sig: Signature, path: tuple[Any, ...], x: Any) -> Any:
    """One leaf of a call's arguments as something that JAX binds: an array, a tracer, a NumPy array.

    Python scalars become rank 0 of JAX's default dtype; objects with `__dlpack__` are imported without a copy.
    """
    if isinstance(x, jax.Array | Tracer):
        return _checked(sig, path, x)
    if isinstance(x, np.ma.MaskedArray):
        raise KernelTypeError(
            f"{_argument(sig, path)} of kernel {sig.name} is a masked array, and a kernel would not see its mask: pass "
            "x.data and x.mask, or x.filled(...)",
            sig.where,
        )
    if isinstance(x, np.ndarray | np.generic):
        check_dtype(sig, _argument(sig, path), _complex_of(x.dtype))
        return np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype.newbyteorder("=")))
    if isinstance(x, bool | int | float | complex):
        return _scalar(sig, path, x)
    if isinstance(x, jax.ShapeDtypeStruct):
        raise KernelTypeError(
            f"{_argument(sig, path)} of kernel {sig.name} is a ShapeDtypeStruct, which holds no values: "
            "only .lower takes it",
            sig.where,
        )
    from jtile.language import Ref

    if isinstance(x, jax.Ref | Ref):
        raise _ref_error(sig, path, x)
    if hasattr(x, "__jax_array__"):
        return _checked(sig, path, x.__jax_array__())
    if hasattr(x, "__dlpack__"):
        return _from_dlpack(sig, path, x)
    raise KernelTypeError(
        f"{_argument(sig, path)} of kernel {sig.name} is a {type(x).__name__}: expected an array, a number, "
        "or a pytree of those",
        sig.where,
    )


def as_type(sig: Signature, path: tuple[Any, ...], x: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of one leaf, which may be a ShapeDtypeStruct itself."""
    if isinstance(x, jax.ShapeDtypeStruct):
        check_dtype(sig, _argument(sig, path), _complex_of(x.dtype))
        return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True))
    x = as_operand(sig, path, x)
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _complex_of(dtype: Any) -> Any:
    """The dtype that JAX gives an array of this dtype: complex128 becomes complex64 without x64."""
    return jax.dtypes.canonicalize_dtype(dtype) if is_complex(dtype) else dtype


def key_of(meta: dict[str, Any]) -> tuple[Any, ...]:
    """Meta-parameters as a dict key that tells 1, 1.0, True, 0.0 and -0.0 apart."""
    return tuple([(k, type(v), _exact(v)) for k, v in meta.items()]) if meta else ()


def _exact(v: Any) -> Any:
    if type(v) is float:
        return v.hex() if math.isfinite(v) else str(v)
    if type(v) is complex:
        return _exact(v.real), _exact(v.imag)
    return tuple((type(x), _exact(x)) for x in v) if type(v) is tuple else v


def _argument(sig: Signature, path: Sequence[Any]) -> str:
    """The name of a leaf in errors, such as `argument a['w'][0]`; the path's first key is the argument's position."""
    return f"argument {sig.ref_name(path[0].idx)}{keystr(tuple(path[1:]))}"


def _checked(sig: Signature, path: tuple[Any, ...], x: Any) -> Any:
    aval = jax.typeof(x)
    if not isinstance(aval, ShapedArray):
        raise _ref_error(sig, path, aval)
    check_dtype(sig, _argument(sig, path), aval.dtype)
    return x


def _ref_error(sig: Signature, path: tuple[Any, ...], x: Any) -> KernelTypeError:
    return KernelTypeError(
        f"{_argument(sig, path)} of kernel {sig.name} is a Ref ({x}), not an array: pass x[...]; "
        "inside a kernel, call a function decorated with @jt.function instead of a kernel",
        sig.where,
    )


def _scalar(sig: Signature, path: tuple[Any, ...], x: bool | int | float | complex) -> np.ndarray:
    dtype = np.dtype(bool) if isinstance(x, bool) else jnp.result_type(type(x))
    if is_complex(dtype):
        check_dtype(sig, _argument(sig, path), dtype)
        return np.asarray(x, dtype)
    assert not isinstance(x, complex)
    if dtype.kind == "i" and not -(2 ** (8 * dtype.itemsize - 1)) <= x < 2 ** (8 * dtype.itemsize - 1):
        raise KernelValueError(
            f"{_argument(sig, path)} of kernel {sig.name} is {x}, which does not fit {dtype.name}: "
            "give a NumPy scalar of the dtype that you want",
            sig.where,
        )
    return np.asarray(x, dtype)


def _from_dlpack(sig: Signature, path: tuple[Any, ...], x: Any) -> jax.Array:
    try:
        return _checked(sig, path, jax.dlpack.from_dlpack(x))
    except KernelTypeError:
        raise
    except Exception as e:  # what from_dlpack raises is up to the exporter
        raise KernelTypeError(
            f"{_argument(sig, path)} of kernel {sig.name} is a {type(x).__name__} that DLPack cannot import: {e}",
            sig.where,
        ) from e


class ArrayType:
    """The concrete class of JAX's arrays, learned from the first one: it has no public name."""

    type: type | None = None

    def learn(self, x: Any) -> None:
        if self.type is None and isinstance(x, jax.Array) and not isinstance(x, Tracer):
            self.type = type(x)


ARRAY = ArrayType()
