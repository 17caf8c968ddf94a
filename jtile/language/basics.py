"""Programs of the grid, constants, and small integer helpers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from jtile._compat import is_symbolic
from jtile._errors import KernelTypeError, KernelValueError
from jtile._parts import is_key
from jtile.language._axes import axis_number
from jtile.language._numbers import tile_of
from jtile.language._place import user_place
from jtile.language._primitives import assert_p, num_programs_p, print_p, program_id_p
from jtile.language._sizes import is_dynamic, static
from jtile.language.refs import Ref


def program_id(axis: int | str) -> jax.Array:
    """The number of this program along an axis of the grid.

    Args:
      axis: the axis: a number from 0, or a name, if `grid` is a dict.

    Returns:
      An int32 scalar that is computed on the device, never a Python int.

    Raises:
      KernelValueError: the grid has no such axis.
    """
    return program_id_p.bind(axis=axis_number(axis))


def num_programs(axis: int | str) -> jax.Array:
    """The number of programs along an axis of the grid.

    Args:
      axis: the axis: a number from 0, or a name, if `grid` is a dict.

    Returns:
      An int32 scalar that is computed on the device, never a Python int.

    Raises:
      KernelValueError: the grid has no such axis.
    """
    return num_programs_p.bind(axis=axis_number(axis))


def cdiv(a, b) -> Any:
    """The quotient `a / b`, rounded up: how many tiles of `b` elements cover `a` elements.

    Args:
      a, b: non-negative ints: Python's, traced ones, or dynamic sizes.

    Returns:
      An int of the same kind.

    Raises:
      KernelTypeError: one of them is no whole number.
    """
    if isinstance(a, int | np.integer) and isinstance(b, int | np.integer):
        return -(-int(a) // int(b))
    if (is_dynamic(a) or is_dynamic(b)) and not (hasattr(a, "dtype") or hasattr(b, "dtype")):
        return -(-a // b)
    for x in (a, b):
        whole = jnp.issubdtype(x.dtype, jnp.integer) if hasattr(x, "dtype") else isinstance(x, int) or is_dynamic(x)
        if not whole:
            got = f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else repr(x)
            raise KernelTypeError(f"cdiv takes whole numbers, got {got}", user_place())
    a, b = _same_int(a, b)
    return jax.lax.div(a + b - jnp.ones((), b.dtype), b)


def _same_int(a, b):
    """Two ints as values of one dtype: that of the traced one."""
    like = a if hasattr(a, "dtype") and not getattr(a, "weak_type", False) else b
    dtype = like.dtype if hasattr(like, "dtype") else np.dtype(np.int32)
    return _as(a, dtype), _as(b, dtype)


def _as(v, dtype):
    if isinstance(v, int | np.integer) and not jnp.iinfo(dtype).min <= v <= jnp.iinfo(dtype).max:
        raise KernelValueError(f"{v} does not fit {dtype}, the dtype of the other number of jt.cdiv", user_place())
    return jnp.asarray(v, dtype)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`.

    Args:
      n: a Python int of at least 0.

    Returns:
      A Python int.

    Raises:
      KernelTypeError: `n` is no Python int.
    """
    if isinstance(n, bool) or not isinstance(n, int | np.integer):
        raise KernelTypeError(f"next_power_of_2 takes a Python int, got {n!r}", user_place())
    return 1 << max(int(n) - 1, 0).bit_length()


def arange(start, stop=None, step=1, dtype=None) -> jax.Array:
    """A tile of evenly spaced numbers, as `jnp.arange` makes it.

    Args:
      start, stop, step: Python numbers; `jt.arange(n)` goes from 0 to n - 1.
      dtype: the dtype of the tile; by default int32 for ints.

    Returns:
      A tile of rank 1, whose side need not be a power of two.
    """
    if stop is None:
        start, stop = 0, start
    for v in (start, stop, step):
        static(v, "a bound of jt.arange")
    if _any_traced((start, stop, step)):
        raise KernelTypeError("the bounds of jt.arange are Python numbers; write start + jt.arange(n)", user_place())
    if dtype is None and all(isinstance(v, int | np.integer) for v in (start, stop, step)):
        dtype = np.int32
        for v in (start, stop - step):
            _fits_int32(v, "jt.arange")
    if (start, step) == (0, 1) and dtype is not None and isinstance(stop, int | np.integer) and stop > 0:
        return jax.lax.iota(dtype, stop)  # jnp's function computes 0 + 1 * it: seven equations
    return jnp.arange(start, stop, step, dtype)


def _fits_int32(v, what: str) -> None:
    if isinstance(v, int | np.integer) and not -(2**31) <= v < 2**31:
        raise KernelValueError(f"{what}: {v} does not fit int32, the dtype of ints: give dtype=jnp.int64", user_place())


def zeros(shape, dtype: Any = np.float32) -> jax.Array:
    """A tile of zeros.

    Args:
      shape: an int or a tuple of ints, known when the kernel is traced.
      dtype: the dtype of the tile.

    Returns:
      The tile.
    """
    return jnp.zeros(_known(shape, "jt.zeros"), dtype)


def ones(shape, dtype: Any = np.float32) -> jax.Array:
    """A tile of ones.

    Args:
      shape: an int or a tuple of ints, known when the kernel is traced.
      dtype: the dtype of the tile.

    Returns:
      The tile.
    """
    return jnp.ones(_known(shape, "jt.ones"), dtype)


def full(shape, value, dtype=None) -> jax.Array:
    """A tile that is filled with one number.

    Args:
      shape: an int or a tuple of ints.
      value: the number, Python's or a traced scalar.
      dtype: the dtype of the tile; by default float32, int32, bool or complex64, by the kind of the number.

    Returns:
      The tile.
    """
    if dtype is None and isinstance(value, bool | int | float | complex):
        kinds = {bool: np.bool_, int: np.int32, float: np.float32}
        dtype = next((d for kind, d in kinds.items() if isinstance(value, kind)), np.complex64)
        _fits_int32(value, "jt.full")
    value = value if isinstance(value, bool | int | float | complex) else tile_of(value, "the number of jt.full")
    return jnp.full(_known(shape, "jt.full"), value, dtype)


def _known(shape, what: str):
    """`shape`, whose sizes the kernel does not compute."""
    if isinstance(shape, core.Tracer) or (isinstance(shape, tuple | list) and _any_traced(shape)):
        raise KernelTypeError(
            f"the shape of {what} is known when the kernel is traced, and this one has a number that the kernel "
            "computes: take a meta-parameter or a size of an argument, and a mask for what is shorter",
            user_place(),
        )
    return shape


def _any_traced(values) -> bool:
    return any(isinstance(v, core.Tracer) for v in values)


def like(x, shape=None, dtype=None) -> Any:
    """The shape and dtype of an output, as `out_type` has to state them: those of an array, or others.

    Args:
      x: an array, or a `jax.ShapeDtypeStruct`, or a pytree of these, such as the parameters of a model.
      shape, dtype: those of the result; by default those of `x`. A pytree has shapes of its own.

    Returns:
      A `jax.ShapeDtypeStruct`; of a pytree, the same pytree of these.

    Raises:
      KernelTypeError: `x` is no array, `shape` no shape, or `dtype` no dtype.
    """
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        if shape is None and any(leaf is not x for leaf in jax.tree.leaves(x)):
            return jax.tree.map(lambda leaf: like(leaf, None, dtype), x)
        raise KernelTypeError(f"jt.like takes an array or the type of one, got {x!r}; {_TYPE}", user_place())
    sizes = x.shape if shape is None else tuple(shape) if np.iterable(shape) else (shape,)
    if bad := [n for n in sizes if not (is_symbolic(n) or _is_size(n))]:
        raise KernelTypeError(f"jt.like: shape={shape!r}: {bad[0]!r} is no size of a dimension; {_TYPE}", user_place())
    dtype = x.dtype if dtype is None else dtype
    try:
        return jax.ShapeDtypeStruct(sizes, dtype if is_key(dtype) else np.dtype(dtype))
    except TypeError:
        raise KernelTypeError(f"jt.like: {dtype!r} is no dtype of arrays; write jnp.float32", user_place()) from None


def _is_size(n: Any) -> bool:
    return isinstance(n, int | np.integer) and not isinstance(n, bool) and bool(n >= 0)


_TYPE = "a type is made from nothing by jax.ShapeDtypeStruct((4, 8), jnp.float32)"


def print_(format, *args) -> None:
    """Print values when the program runs, with the name of the kernel and the program id in front.

    Args:
      format: a text with `{}` for each value, as in `jt.print("acc {}", acc)`; or the first value, and no text.
      args: tiles and scalars.
    """
    if not isinstance(format, str):
        format, args = " ".join(["{}"] * (1 + len(args))), (format, *args)
    holes = format.replace("{{", "").replace("}}", "").count("{}")
    if holes != len(args):
        raise KernelValueError(f"{format!r} has {holes} {{}}, but jt.print got {len(args)} values", user_place())
    print_p.bind(*[jnp.asarray(a) for a in _no_refs(args)], format=format)


def _no_refs(args):
    for a in args:
        if isinstance(a, Ref):
            a.__jax_array__()
    return args


def assert_(cond, message: str = "") -> None:
    """Let the call of the kernel fail if a condition does not hold.

    Args:
      cond: a bool, or a tile of them, all of which have to be true.
      message: the text of the error, a `KernelAssertionError` that also names the program and the line.
    """
    if isinstance(cond, bool | np.bool_):
        if not cond:
            raise KernelValueError(f"jt.assert_ failed while the kernel was traced: {message}", user_place())
        return
    cond = tile_of(cond, "what jt.assert_ asks")
    if cond.dtype != np.bool_:
        raise KernelTypeError(f"jt.assert_ takes a bool, got {cond.dtype}", user_place())
    assert_p.bind(cond, message=str(message))
