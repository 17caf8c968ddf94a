"""Which function of NumPy is recorded, which is a view, and which NumPy does at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy

import jtile as jt
from jtile.numpy import _device, _ufuncs
from jtile.numpy import _indexing as _indexing
from jtile.numpy._array import asarray, asnode, functions, hosted, ndarray, wrap
from jtile.numpy._calls import Function, at_once, given_back
from jtile.numpy._casts import broadcast, sizes
from jtile.numpy._graph import Constant, Op, interned
from jtile.numpy._mode import MODE
from jtile.numpy._now import SMALL
from jtile.numpy._record import leaf, record
from jtile.numpy._views import Broadcast, Diagonal, Reshape, Transpose

# Parameters whose numbers take part, behind a bar parameters that are arrays besides, and the functions that have them.
_RECORDED = """
a|where: sum prod mean max min amax amin std var all any nansum nanprod nanmax nanmin nanmean nanstd nanvar
a: argmax argmin nanargmax nanargmin cumsum cumprod nancumsum nancumprod median nanmedian ptp sort argsort round around
a: diff roll repeat trace count_nonzero
m x z p: tril triu sinc unwrap angle nan_to_num isreal iscomplex isposinf isneginf vander polyval linalg.norm gradient
arrays tup: concatenate concat stack vstack hstack dstack column_stack
a b v arr values: dot vdot inner outer kron tensordot cross convolve correlate append diag
a b a1 a2: isclose allclose array_equal array_equiv
x y|condition: where
a a_min a_max min max: clip
A: tile
array: pad
a|indices: take
arr|indices: take_along_axis
a v: searchsorted
x xp fp: interp
f: gradient
ary: ediff1d
a q: percentile quantile
y x: trapezoid
m y x: cov corrcoef
a|weights: average
operands: einsum
choicelist default|condlist: select
p x: polyval
"""
_DEVICE = {"roll": _device.roll, "argmin": _device.argmin, "argmax": _device.argmax, "ptp": _device.ptp}
_DEVICE |= dict.fromkeys(("max", "amax"), _device.amax) | dict.fromkeys(("min", "amin"), _device.amin)
_COSTS = {"sort": 30.0, "argsort": 60.0, "median": 20.0, "dot": 100.0, "tensordot": 100.0, "einsum": 100.0}
# What NumPy makes itself: the same numbers, to the last bit.
_MADE = """arange linspace logspace geomspace eye identity tri indices fromfunction frombuffer fromiter fromstring
loadtxt genfromtxt fromfile bartlett blackman hamming hanning kaiser diag_indices tril_indices triu_indices
mask_indices"""


def _indexed_checks(name: str) -> Callable:
    """A function whose arguments are indices: their values are computed, so that bounds are checked as NumPy does."""
    recorded = functions[name]

    def call(a: Any, indices: Any, axis: Any = None, out: Any = None, mode: str = "raise") -> Any:
        if mode != "raise" or out is not None or axis is None:
            of = getattr(numpy, name)
            return at_once(of, a, indices, axis, out=out, **({"mode": mode} if name == "take" else {}))
        array, index = asarray(a), numpy.asarray(indices)
        size = array.shape[numpy.lib.array_utils.normalize_axis_index(axis, array.ndim)]
        if index.dtype.kind not in "iu" or (index.size and (index.min() < -size or index.max() >= size)):
            return at_once(getattr(numpy, name), array, index, axis)
        return recorded(array, index, axis=axis)

    call.__name__ = name
    return call


def _by_numpy_on_cpus(name: str) -> Callable:
    """A function that NumPy computes sooner than XLA's code for CPUs does: it sorts a million float64 in 54 ms, XLA in
    242. On GPUs, and where a mode asks for programs, it is recorded."""
    recorded, own = functions[name], getattr(numpy, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        at_host = MODE.get() == "auto" and "warps" not in jt.target().features
        return at_once(own, *args, **kwargs) if at_host else recorded(*args, **kwargs)

    call.__name__ = name
    return call


# Arrays of one number, which programs compute anew instead of reading them.


def _filled(shape: Any, value: Any, dtype: Any) -> ndarray:
    shape = sizes(shape)
    if any(n < 0 for n in shape):
        raise ValueError("negative dimensions are not allowed")
    dtype = numpy.dtype(dtype)
    number = Constant(numpy.asarray(hosted(value)).astype(dtype)) if not isinstance(value, ndarray) else None
    if number is None or number.shape or dtype.kind not in "biufc":
        return wrap(leaf(numpy.full(shape, hosted(value), dtype)))
    if math.prod(shape) <= SMALL:
        return wrap(leaf(numpy.full(shape, number.value, dtype)))
    host, device = lambda x: numpy.full(shape, x), lambda x: jax.numpy.full(shape, x)
    return wrap(record(interned("full", shape, lambda: Op("full", host, device)), (number,), shape, dtype))


def zeros(shape, dtype=float, order="C", *, device=None, like=None):
    return _filled(shape, 0, dtype or float)


def ones(shape, dtype=float, order="C", *, device=None, like=None):
    return _filled(shape, 1, dtype or float)


def full(shape, fill_value, dtype=None, order="C", *, device=None, like=None):
    value = hosted(fill_value)
    dtype = numpy.asarray(value).dtype if dtype is None else dtype
    if numpy.ndim(value):
        return wrap(leaf(numpy.full(hosted(shape), value, dtype)))
    return _filled(shape, value, dtype)


def zeros_like(a, dtype=None, order="K", subok=True, shape=None, *, device=None):
    of = asarray(a)
    return _filled(of.shape if shape is None else shape, 0, dtype or of.dtype)


def ones_like(a, dtype=None, order="K", subok=True, shape=None, *, device=None):
    of = asarray(a)
    return _filled(of.shape if shape is None else shape, 1, dtype or of.dtype)


def full_like(a, fill_value, dtype=None, order="K", subok=True, shape=None, *, device=None):
    of = asarray(a)
    return full(of.shape if shape is None else shape, fill_value, dtype or of.dtype)


def array(object, dtype=None, *, copy=True, order="K", subok=False, ndmin=0, like=None):
    out = asanyarray(object, dtype)
    out = out.copy() if copy and out is object else out
    return out if out.ndim >= ndmin else out.reshape((1,) * (ndmin - out.ndim) + out.shape)


def asanyarray(a, dtype=None, order=None, *, device=None, copy=None, like=None):
    if isinstance(a, ndarray):
        out = a if dtype is None else a.astype(dtype, copy=False)
        return out.copy() if copy and out is a else out
    if isinstance(a, jax.Array):
        out = asarray(a)
        return out if dtype is None else out.astype(dtype, copy=False)
    value = numpy.array(hosted(a), dtype)
    return wrap(leaf(value) if value.shape else Constant(value))


def copyto(dst, src, casting="same_kind", where=True):
    if where is not True:
        src = functions["where"](where, asarray(src).astype(dst.dtype, casting=casting), dst)
    dst._write(asnode(src, dst.dtype), casting)


# Views


def broadcast_to(array, shape, subok=False):
    of = asarray(array)
    shape = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
    numpy.broadcast_to(numpy.empty(of.shape, "V0"), shape)  # NumPy's error
    return of._view(Broadcast(of.shape, shape))


def broadcast_arrays(*args, subok=False):
    arrays = [asarray(a) for a in args]
    shape = numpy.broadcast_shapes(*[a.shape for a in arrays])
    return tuple(a if a.shape == shape else broadcast_to(a, shape) for a in arrays)


def diagonal(a, offset=0, axis1=0, axis2=1):
    of = asarray(a)
    if of.ndim < 2:
        raise ValueError("diag requires an array of at least two dimensions")
    return of._view(Diagonal(of.shape, int(offset), axis1, axis2))


def expand_dims(a, axis):
    of = asarray(a)
    shape = numpy.expand_dims(numpy.empty(of.shape, "V0"), axis).shape
    return of._view(Reshape(of.shape, shape))


def _permuted(name: str) -> Callable:
    """A function of NumPy that permutes axes: NumPy is asked how, with an array whose sizes number its axes."""

    def call(a, *args, **kwargs):
        of = asarray(a)
        numbered = numpy.broadcast_to(numpy.zeros((), "int8"), tuple(range(1, of.ndim + 1)))
        order = tuple(n - 1 for n in getattr(numpy, name)(numbered, *args, **kwargs).shape)
        return of._view(Transpose(of.shape, order))

    call.__name__ = name
    return call


def flip(m, axis=None):
    of = asarray(m)
    axes = range(of.ndim) if axis is None else numpy.lib.array_utils.normalize_axis_tuple(axis, of.ndim)
    return of[tuple(slice(None, None, -1 if k in axes else None) for k in range(of.ndim)) or Ellipsis]


def atleast_1d(*arys):
    out = tuple(a if a.ndim else a.reshape(1) for a in map(asarray, arys))
    return out[0] if len(out) == 1 else out


def atleast_2d(*arys):
    out = tuple(a if a.ndim > 1 else a.reshape(1, a.size) for a in map(asarray, arys))
    return out[0] if len(out) == 1 else out


def split(ary, indices_or_sections, axis=0):
    of = asarray(ary)
    if isinstance(indices_or_sections, int) and of.shape[axis] % indices_or_sections:
        raise ValueError("array split does not result in an equal division")
    return array_split(of, indices_or_sections, axis)


def array_split(ary, indices_or_sections, axis=0):
    of = asarray(ary)
    parts = numpy.array_split(numpy.arange(of.shape[axis]), hosted(indices_or_sections))
    front = (slice(None),) * (axis % of.ndim)
    starts = [int(p[0]) if len(p) else 0 for p in parts]
    return [of[(*front, slice(s, s + len(p)))] for s, p in zip(starts, parts)]


def meshgrid(*xi, copy=True, sparse=False, indexing: Any = "xy"):
    lines = [asarray(x).reshape(-1) for x in xi]
    sides = [x.size for x in lines]
    if indexing in ("xy", "ij") and not sparse and math.prod(sides) > SMALL:
        if indexing == "xy" and len(sides) > 1:
            sides[:2] = sides[1::-1]
        places = [1, 0, *range(2, len(sides))] if indexing == "xy" and len(sides) > 1 else range(len(sides))
        bent = [x.reshape([-1 if k == at else 1 for k in range(len(sides))]) for x, at in zip(lines, places)]
        return tuple(wrap(broadcast(x._node(), tuple(sides))) for x in bent)
    grids: Any = numpy.meshgrid(*hosted(xi), copy=True, sparse=bool(sparse), indexing=indexing)
    return tuple(wrap(leaf(g)) for g in grids)


def _method(name: str) -> Callable:
    def call(a, *args, **kwargs):
        return getattr(asarray(a), name)(*args, **kwargs)

    call.__name__ = name
    return call


_OWN = (
    zeros, ones, full, zeros_like, ones_like, full_like, array, asanyarray, copyto, broadcast_to, broadcast_arrays,
    diagonal, expand_dims, flip, atleast_1d, atleast_2d, split, array_split, meshgrid,
)  # fmt: skip
_METHODS = ("reshape", "ravel", "squeeze", "swapaxes", "transpose", "astype", "copy")
_ARRAY_METHODS = """sum prod mean max min std var all any argmax argmin cumsum cumprod ptp argsort round dot diagonal
trace take repeat clip nonzero searchsorted compress choose argpartition"""


def install() -> dict[str, Any]:
    """All functions by name."""
    functions["at_once"] = at_once
    functions["by_numpys"] = _by_numpys
    found = _ufuncs.install()
    for line in _RECORDED.strip().splitlines():
        parameters, _, names = line.partition(": ")
        values, _, others = parameters.partition("|")
        for name in names.split():
            cost, device = _COSTS.get(name, 1.0), _DEVICE.get(name)
            functions[name] = found[name] = Function(name, values, others, device, cost)
    for name in ("take", "take_along_axis"):
        functions[name] = found[name] = _indexed_checks(name)
    for name in ("sort", "argsort"):
        functions[name] = found[name] = _by_numpy_on_cpus(name)
    for function in _OWN:
        found[function.__name__] = function
    for name in _METHODS:
        found[name] = _method(name)
    for name in ("moveaxis", "rollaxis", "matrix_transpose"):
        found[name] = _permuted(name)
    found |= {"asarray": asanyarray, "ascontiguousarray": asanyarray, "asfortranarray": asanyarray}
    found |= {"empty": zeros, "empty_like": zeros_like, "permute_dims": found["transpose"]}
    found |= {"real": lambda val: asarray(val).real, "imag": lambda val: asarray(val).imag}
    found |= {"fliplr": lambda m: flip(m, 1), "flipud": lambda m: flip(m, 0)}
    for name in _MADE.split():
        found[name] = at_once_of(getattr(numpy, name))
    functions.update(found)
    for name in _ARRAY_METHODS.split():
        setattr(ndarray, name, _as_method(found.get(name) or at_once_of(getattr(numpy, name))))
    for name in _WRITERS:
        found[name] = functions[name] = _writing(name, getattr(numpy, name))
    for name in ("partition", "put", "byteswap", "setfield"):
        setattr(ndarray, name, _writing(name, getattr(numpy.ndarray, name)))
    ndarray.sort = _sort  # type: ignore[attr-defined]
    ndarray.conj = ndarray.conjugate = _as_method(found["conjugate"])  # type: ignore[attr-defined]
    del found["linalg.norm"]
    return found


_VIEWS = """array_split atleast_1d atleast_2d broadcast_arrays broadcast_to diagonal expand_dims flip fliplr flipud
imag matrix_transpose moveaxis permute_dims ravel real reshape rollaxis split squeeze swapaxes transpose"""
_WRITERS = ("fill_diagonal", "place", "put", "put_along_axis", "putmask")


def kind_of(name: str) -> str:
    """How a function is done (see `coverage`), for the functions of `install`."""
    if name in _WRITERS or name in _MADE.split():
        return "at once"
    return "view" if name in _VIEWS.split() else "recorded"


def _writing(name: str, of: Callable) -> Callable:
    """A function of NumPy that writes into its first argument."""

    def call(a: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(a, ndarray):
            return of(a, *hosted(args), **hosted(kwargs))
        value = numpy.array(a)
        result = of(value, *hosted(args), **hosted(kwargs))
        a[...] = wrap(leaf(value) if value.shape else Constant(value))
        return given_back(result)

    call.__name__ = name
    return call


def at_once_of(function: Callable) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        return at_once(function, *args, **kwargs)

    call.__name__ = call.__qualname__ = function.__name__
    call.__doc__ = function.__doc__
    return call


def _as_method(function: Any) -> Callable:
    return lambda self, *args, **kwargs: function(self, *args, **kwargs)


def _sort(self: ndarray, axis: int = -1, kind: Any = None, order: Any = None) -> None:
    if not self.flags.writeable:
        raise ValueError("sort array is read-only")
    self[...] = functions["sort"](self, axis=axis)


def _by_numpys(function: Callable) -> Callable | None:
    """Our function that stands for one of NumPy's, which was called with an array of ours; None if there is none."""
    ours = functions.get(function.__name__)
    return ours if getattr(numpy, function.__name__, None) is function else None
