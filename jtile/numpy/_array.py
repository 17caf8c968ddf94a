"""The array of `jtile.numpy`: NumPy's, whose elements are computed when somebody looks at them."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy

from jtile.numpy import _now
from jtile.numpy._casts import broadcast, cast, full_shape, sizes
from jtile.numpy._evaluate import refuse_traced
from jtile.numpy._graph import Constant, Node, Shape
from jtile.numpy._record import device_value_of, leaf, value_of
from jtile.numpy._views import Bits, Part, Reshape, Step, Transpose, basic_index, geometry, put, same_steps, viewed

# Functions by NumPy's name, for the operators and methods; the modules that define them put them here.
functions: dict[str, Callable] = {}


class Cell:
    """The memory that an array and its views share: the value of their base."""

    __slots__ = ("node",)

    def __init__(self, node: Node):
        self.node = node


class ndarray:  # noqa: N801
    """An array of NumPy's semantics that is computed when it is looked at; made by the functions of `jtile.numpy`.

    Assignments and views behave as NumPy's do: an array that is a view of another one sees what is written through
    either. Looking at values (`print`, `float`, `if`, iteration, `numpy.asarray`) computes what is pending.
    """

    __slots__ = ("__weakref__", "_cell", "_dtype", "_locked", "_scalar", "_seen", "_shape", "_steps")
    __array_priority__ = 1000.0

    def __init__(self, *_: Any, **__: Any):
        raise TypeError("jtile.numpy.ndarray has no constructor; make arrays by jtile.numpy.array, zeros, empty, ...")

    # -- attributes ---------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> Shape:
        return self._shape

    @shape.setter
    def shape(self, shape: Any) -> None:
        step = Reshape(self._shape, full_shape(shape, self._shape))
        if viewed(self._geometry(), step.shape) is None:
            raise AttributeError(
                "Incompatible shape for in-place modification. Use `.reshape()` to make a copy with the desired shape."
            )
        self._steps, self._shape, self._seen = (*self._steps, step), step.shape, None

    @property
    def dtype(self) -> numpy.dtype:
        return self._dtype

    @property
    def ndim(self) -> int:
        return len(self._shape)

    @property
    def size(self) -> int:
        return math.prod(self._shape)

    @property
    def itemsize(self) -> int:
        return self._dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides that NumPy would give, in bytes; new arrays are in C order."""
        return self._geometry().strides

    @property
    def flags(self) -> Any:
        """The flags of a NumPy array with the same strides; `writeable` is ours, and `owndata` always False."""
        at = self._geometry()
        if self._locked or self._scalar:
            at.flags.writeable = False
        return at.flags

    @property
    def base(self) -> ndarray | None:
        """The array that owns the memory of a view; None for an array that owns its memory."""
        return made(self._cell, (), self._cell.node.shape, self._cell.node.dtype) if self._steps else None

    @property
    def device(self) -> str:
        return "cpu"

    def _geometry(self) -> numpy.ndarray:
        return geometry(self._cell.node.shape, self._cell.node.dtype, self._steps)

    # -- the value ----------------------------------------------------------------------------------------------------

    def _node(self) -> Node:
        """The value, as a node."""
        base = self._cell.node
        if not self._steps:
            return base
        if self._seen is not None:
            of, known = self._seen[0](), self._seen[1]()
            if of is base and known is not None:
                return known
        node = base
        for step in self._steps:
            node = step.read(node)
        self._seen = (weakref.ref(base), weakref.ref(node))
        return node

    def _write(self, value: Node, casting: Any = None) -> None:
        """Assign a value, which is broadcast and cast."""
        if self._locked or self._scalar:
            raise ValueError(f"{'assignment destination' if casting is None else 'output array'} is read-only")
        if value.dtype != self._dtype:
            if casting is not None and not numpy.can_cast(value.dtype, self._dtype, casting):
                numpy.positive(numpy.ones(1, value.dtype), out=numpy.ones(1, self._dtype), casting=casting)
            value = cast(value, self._dtype)
        if value.shape != self._shape:
            value = broadcast(value, self._shape)
        self._cell.node = put(self._cell.node, self._steps, value)

    def _view(self, *steps: Step) -> ndarray:
        dtype, locked = self._dtype, self._locked or self._scalar
        for step in steps:
            dtype = step.dtype or dtype
            locked = locked or not step.writable
        return made(self._cell, (*self._steps, *steps), steps[-1].shape, dtype, locked=locked)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> numpy.ndarray:
        value = _now.at_hand(self)
        if value is None:
            value = value_of(self._node())
        if dtype is not None and value.dtype != dtype:
            if copy is False:
                raise ValueError("Unable to avoid copy while creating an array as requested.")
            return value.astype(dtype)
        if copy:
            return numpy.array(value)
        view = numpy.asarray(value).view()
        view.flags.writeable = False
        return view

    def __jax_array__(self) -> jax.Array:
        return self._for_jax()

    def _for_jax(self) -> Any:
        value = device_value_of(self._node())
        if not isinstance(value, jax.Array | numpy.ndarray | numpy.generic):
            return value
        dtype = jax.dtypes.canonicalize_dtype(value.dtype)
        return jax.numpy.asarray(value if value.dtype == dtype else numpy.asarray(value).astype(dtype))

    def __array_ufunc__(self, ufunc: numpy.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        ours = functions.get(ufunc.__name__)
        if ours is not None and getattr(ours, "numpy", None) is ufunc:
            return (ours if method == "__call__" else getattr(ours, method))(*inputs, **kwargs)
        return functions["at_once"](getattr(ufunc, method), *inputs, **kwargs)

    def __array_function__(self, function: Callable, types: Any, args: Any, kwargs: Any) -> Any:
        ours = functions["by_numpys"](function)
        return functions["at_once"](function, *args, **kwargs) if ours is None else ours(*args, **kwargs)

    def item(self, *index: Any) -> Any:
        return numpy.asarray(self).item(*index)

    def tolist(self) -> Any:
        return numpy.asarray(self).tolist()

    def tobytes(self, order: Any = "C") -> bytes:
        return numpy.asarray(self).tobytes(order)

    def _number(self) -> Any:
        return numpy.asarray(self)

    def __bool__(self) -> bool:
        return bool(self._number())

    def __int__(self) -> int:
        return int(self._number())

    def __float__(self) -> float:
        return float(self._number())

    def __complex__(self) -> complex:
        return complex(self._number())

    def __index__(self) -> int:
        return self._number().__index__()

    def __round__(self, digits: int | None = None) -> Any:
        return round(self._number()[()], digits)

    def __trunc__(self) -> int:
        return int(self)

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError("len() of unsized object")
        return self._shape[0]

    def __iter__(self) -> Iterator[Any]:
        if not self._shape:
            raise TypeError("iteration over a 0-d array")
        if self.ndim == 1:
            return iter(numpy.asarray(self))
        return (self[i] for i in range(self._shape[0]))

    def __contains__(self, value: Any) -> bool:
        return bool((self == value).any())

    def __hash__(self) -> int:
        if not self._scalar:
            raise TypeError("unhashable type: 'jtile.numpy.ndarray'")
        return hash(self._number()[()])

    def __repr__(self) -> str:
        value = numpy.asarray(self)
        return repr(value[()] if self._scalar else value)

    def __str__(self) -> str:
        value = numpy.asarray(self)
        return str(value[()] if self._scalar else value)

    def __format__(self, spec: str) -> str:
        value = numpy.asarray(self)
        return format(value[()] if not self._shape else value, spec)

    def __copy__(self) -> ndarray:
        return wrap(self._node())

    def __deepcopy__(self, memory: Any) -> ndarray:
        return wrap(self._node())

    def __reduce__(self) -> Any:
        return _unpickled, (numpy.asarray(self),)

    # -- indexing -----------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        step = basic_index(index, self._shape)
        if step is None:
            return functions["take_by"](self, index)
        if not step.shape and Ellipsis not in index:
            return self._element(step)
        return self._view(step)

    def _element(self, step: Step) -> Any:
        node = self._node()
        if isinstance(node.value, numpy.ndarray):  # the value is at hand: NumPy itself gives the number
            return node.value[tuple(step.numbers)] if len(step.numbers) == node.value.ndim else node.value.flat[0]
        return wrap(step.read(node), scalar=True)

    def __setitem__(self, index: Any, value: Any) -> None:
        if self._set_now(index, value):
            return
        index = index if isinstance(index, tuple) else (index,)
        step = basic_index(index, self._shape)
        if step is None:
            functions["put_by"](self, index, value)
            return
        view = self._view(step)
        if isinstance(value, ndarray) and value._cell is self._cell and same_steps(value._steps, view._steps):
            return  # a[i] += b has written already
        if self._scalar:
            raise TypeError(f"'{self._dtype}' object does not support item assignment")
        node = asnode(value, view._dtype)
        extra = len(node.shape) - view.ndim
        if extra > 0 and all(n == 1 for n in node.shape[:extra]):
            node = Reshape(node.shape, node.shape[extra:]).read(node)
        view._write(node)

    def _set_now(self, index: Any, value: Any) -> bool:
        """Assign by NumPy, if the value is at hand and nobody else sees the memory."""
        if self._cell.node.value.__class__ is not numpy.ndarray:
            return False
        if isinstance(value, ndarray) and value._cell is self._cell:
            return False
        try:
            index, value = _now.now(index), _now.now(value)
        except _now.Later:
            return False
        target = _now.memory(self)
        if target is None:
            return False
        target[index] = value
        _now.changed(self)
        return True

    # -- views --------------------------------------------------------------------------------------------------------

    @property
    def T(self) -> ndarray:
        return self.transpose()

    @property
    def mT(self) -> ndarray:
        if self.ndim < 2:
            raise ValueError("matrix transpose with ndim < 2 is undefined")
        return self.swapaxes(-1, -2)

    def transpose(self, *axes: Any) -> ndarray:
        if len(axes) == 1 and (axes[0] is None or isinstance(axes[0], tuple | list)):
            axes = tuple(axes[0] or ())
        order = tuple(range(self.ndim))[::-1] if not axes else tuple(int(a) for a in axes)
        if len(order) != self.ndim:
            raise ValueError("axes don't match array")
        order = tuple(numpy.lib.array_utils.normalize_axis_index(a, self.ndim) for a in order)
        if len(set(order)) != self.ndim:
            raise ValueError("repeated axis in transpose")
        return self._view(Transpose(self._shape, order))

    def swapaxes(self, axis1: int, axis2: int) -> ndarray:
        normal = numpy.lib.array_utils.normalize_axis_index
        first, second = normal(axis1, self.ndim), normal(axis2, self.ndim)
        order = list(range(self.ndim))
        order[first], order[second] = second, first
        return self._view(Transpose(self._shape, tuple(order)))

    def reshape(self, *shape: Any, order: str = "C", copy: bool | None = None) -> ndarray:
        full = full_shape(shape[0] if len(shape) == 1 else shape, self._shape)
        if order == "F" or (order == "A" and self._geometry().flags.fnc):
            back = tuple(range(len(full)))[::-1]
            return self.T.reshape(full[::-1], copy=copy).transpose(back)
        step = Reshape(self._shape, full)
        shared = copy is not True and (not self._steps or viewed(self._geometry(), full) is not None)
        if shared:
            return self._view(step)
        if copy is False:
            raise ValueError("Unable to avoid creating a copy while reshaping.")
        return wrap(step.read(self._node()))

    def ravel(self, order: str = "C") -> ndarray:
        at = self._geometry()
        if order == "F" or (order in "AK" and at.flags.fnc):
            return self.T.ravel()
        if order == "K" and not at.flags.c_contiguous:  # take the elements in the order in which they lie in memory
            return self.transpose(sorted(range(self.ndim), key=lambda k: -abs(at.strides[k]))).reshape(-1).copy()
        return self.reshape(-1, copy=None if at.flags.c_contiguous else True)  # a copy even where NumPy could view it

    def flatten(self, order: str = "C") -> ndarray:
        return self.ravel(order).copy()

    def squeeze(self, axis: Any = None) -> ndarray:
        at = self._geometry().squeeze() if axis is None else numpy.squeeze(self._geometry(), axis)
        return self._view(Reshape(self._shape, at.shape))

    def view(self, dtype: Any = None, type: Any = None) -> ndarray:
        if dtype is None or dtype is ndarray or numpy.dtype(dtype) == self._dtype:
            return self._view(Reshape(self._shape, self._shape))
        new = numpy.dtype(dtype)
        if new.itemsize != self.itemsize or "c" in (new.kind, self._dtype.kind):
            return functions["at_once"](numpy.ndarray.view, self, new)
        return self._view(Bits(self._shape, self._dtype, new))

    @property
    def real(self) -> ndarray:
        return self._view(Part(self._shape, "real", self._dtype)) if self._dtype.kind == "c" else self

    @real.setter
    def real(self, value: Any) -> None:
        self.real[...] = value

    @property
    def imag(self) -> ndarray:
        if self._dtype.kind == "c":
            return self._view(Part(self._shape, "imag", self._dtype))
        zeros = functions["zeros_like"](self)
        zeros._locked = True
        return zeros

    @imag.setter
    def imag(self, value: Any) -> None:
        if self._dtype.kind != "c":
            raise TypeError("array does not have imaginary part to set")
        self.imag[...] = value

    @property
    def flat(self) -> ndarray:
        """All elements in C order, as an array of one dimension; a view, where NumPy's reshape is one."""
        return self.reshape(-1)

    @flat.setter
    def flat(self, value: Any) -> None:
        self[...] = functions["resize"](asarray(value), self._shape)

    # -- copies -------------------------------------------------------------------------------------------------------

    def copy(self, order: Any = "C") -> ndarray:
        return wrap(self._node())

    def astype(self, dtype: Any, order: Any = "K", casting: Any = "unsafe", subok: bool = True, copy: bool = True):
        new = numpy.dtype(dtype)
        if not numpy.can_cast(self._dtype, new, casting):
            raise TypeError(f"Cannot cast array data from {self._dtype!r} to {new!r} according to the rule '{casting}'")
        if new == self._dtype:
            return self.copy() if copy else self
        return wrap(cast(self._node(), new), scalar=self._scalar)

    def resize(self, *shape: Any, refcheck: bool = True) -> None:
        """Another shape of the same array: the first elements stay, and those that are new are zero."""
        full = sizes(shape[0] if len(shape) == 1 else shape)
        if self._steps or (refcheck and sys.getrefcount(self._cell) != 2):
            owner = numpy.empty(self._shape, self._dtype)
            view = owner[...]
            (view if self._steps else owner).resize(full)  # raises NumPy's error
        value = numpy.array(self)
        value.resize(full, refcheck=False)
        self._cell, self._shape = Cell(leaf(value) if full else Constant(value)), full

    def fill(self, value: Any) -> None:
        self[...] = value

    def __bytes__(self) -> bytes:
        return self.tobytes()

    def block_until_ready(self) -> ndarray:
        """Compute what is pending of the array, and wait for it."""
        jax.block_until_ready(device_value_of(self._node()))
        return self


def made(cell: Cell, steps: tuple[Step, ...], shape: Shape, dtype: Any, *, scalar: bool = False, locked: bool = False):
    array: Any = object.__new__(ndarray)
    array._cell, array._steps, array._shape, array._dtype = cell, steps, shape, dtype
    array._scalar, array._locked, array._seen = scalar, locked, None
    return array


def made_of(node: Node, shape: Shape, dtype: Any) -> Any:
    """An array of its own with the value of a node of a universal function, which gives a number for no dimensions."""
    array: Any = object.__new__(ndarray)
    array._cell, array._steps, array._shape, array._dtype = Cell(node), (), shape, dtype
    array._scalar, array._locked, array._seen = not shape, False, None
    return array


def wrap(node: Node, *, scalar: bool = False) -> ndarray:
    """An array of its own with the value of a node; `scalar`: NumPy gives a number there, not an array."""
    return made(Cell(node), (), node.shape, node.dtype, scalar=scalar)


def asnode(value: Any, dtype: Any = None) -> Node:
    """The value of anything that NumPy makes an array of. `dtype` is that of numbers of Python's, and of lists."""
    if isinstance(value, ndarray):
        return value._node()
    if isinstance(value, jax.Array):
        refuse_traced(value)
        return leaf(value)
    if isinstance(value, numpy.generic):
        return Constant(value)
    if type(value) in (bool, int, float, complex):
        return Constant(numpy.asarray(value, dtype))
    if isinstance(value, numpy.ndarray):
        return Constant(value) if not value.shape else leaf(numpy.array(value, order="C", subok=False))
    array = numpy.array(hosted(value))
    if dtype is not None and array.dtype != dtype:
        array = array.astype(dtype)
    return leaf(array) if array.shape else Constant(array)


def asarray(value: Any) -> ndarray:
    return value if isinstance(value, ndarray) else wrap(asnode(value))


def hosted(value: Any) -> Any:
    """A value with NumPy's arrays in the place of ours, also inside of lists, tuples and dicts."""
    if isinstance(value, ndarray):
        array = numpy.asarray(value)
        return array[()] if value._scalar else array
    if isinstance(value, jax.Array):
        refuse_traced(value)
        return numpy.asarray(value)
    if type(value) in (list, tuple):
        return type(value)(hosted(v) for v in value)
    if type(value) is dict:
        return {k: hosted(v) for k, v in value.items()}
    if type(value) is slice:
        return slice(hosted(value.start), hosted(value.stop), hosted(value.step))
    return value


def _unpickled(value: numpy.ndarray) -> ndarray:
    return wrap(asnode(value))
