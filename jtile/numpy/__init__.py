"""NumPy's names over arrays that are computed when they are looked at: `import jtile.numpy as np`.

Calls are recorded; what a script looks at (`print`, `float`, `if`, iteration, `numpy.asarray`) is computed, small or
rare programs by NumPy, and what comes often by one compiled program. Names that are not here are NumPy's own, which
compute what they are given at once. docs/numpy.md says which are which.
"""

from __future__ import annotations

import types
import warnings
from typing import Any

import jax
import numpy

from jtile.numpy import _functions
from jtile.numpy._array import ndarray as ndarray
from jtile.numpy._mode import execution as execution
from jtile.numpy._modules import Grid as _Grid
from jtile.numpy._modules import Module as _Module
from jtile.numpy._modules import Random as _Random
from jtile.numpy._ufuncs import ufunc as ufunc


class FallbackWarning(UserWarning):
    """A name that NumPy does not have was taken from `jax.numpy`, with what that means for dtypes and views."""


_FOUND = _functions.install()
globals().update(_FOUND)
linalg = _Module("linalg", {"norm": _functions.functions["linalg.norm"]})
fft = _Module("fft", {})
random = _Random()
mgrid, ogrid, r_, c_ = map(_Grid, ("mgrid", "ogrid", "r_", "c_"))


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if hasattr(numpy, name):
        value = getattr(numpy, name)
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType) or type(value).__name__ == (
            "_ArrayFunctionDispatcher"
        ):
            value = _functions.at_once_of(value)
    elif hasattr(jax.numpy, name):
        value = getattr(jax.numpy, name)
        if callable(value) and not isinstance(value, type) and not hasattr(value, "dtype"):
            warnings.warn(
                f"numpy has no {name}: this is jax.numpy's, which computes at once", FallbackWarning, stacklevel=2
            )
            value = _of_jax(value)
    else:
        raise AttributeError(f"module 'jtile.numpy' has no attribute {name!r}: neither numpy nor jax.numpy has it")
    globals()[name] = value
    return value


def _of_jax(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        ours = lambda x: isinstance(x, ndarray)
        args, kwargs = jax.tree.map(lambda x: x.__jax_array__() if ours(x) else x, (args, kwargs), is_leaf=ours)
        result = function(*args, **kwargs)
        return jax.tree.map(lambda x: _functions.asarray(x) if isinstance(x, jax.Array) else x, result)

    return call


def coverage() -> dict[str, str]:
    """How each public name of NumPy is done: `"recorded"` (computed when it is looked at), `"view"`, `"at once"` (by
    NumPy, of the values that the arguments have), or `"NumPy's"` (types, constants, modules)."""
    out = {}
    for name in (*dir(numpy), *dir(jax.numpy)):
        if name.startswith("_") or name in out:
            continue
        ours = _FOUND.get(name)
        if ours is None:
            plain = not callable(getattr(numpy, name, None)) or isinstance(getattr(numpy, name, None), type)
            out[name] = "jax.numpy's" if not hasattr(numpy, name) else "NumPy's" if plain else "at once"
        else:
            out[name] = _functions.kind_of(name)
    return out


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(numpy)})


def _flatten(array: ndarray) -> Any:
    return (array._for_jax(),), None


def _unflatten(_: Any, children: Any) -> Any:
    """The array that functions see when JAX transforms them: JAX's own, in the place of ours."""
    return children[0]


jax.tree_util.register_pytree_node(ndarray, _flatten, _unflatten)
