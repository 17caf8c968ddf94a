"""Calls of NumPy's functions as nodes. NumPy itself is asked which dtype a call gives, on an array of a few ones; JAX
is asked for the shape. What JAX refuses NumPy does at once, or raises its own error for."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy

from jtile._memo import Recent, memo
from jtile.numpy._array import asnode, hosted, ndarray, wrap
from jtile.numpy._evaluate import as_numpy_counts
from jtile.numpy._graph import DEVICE_DTYPES, Constant, Node, Op, interned
from jtile.numpy._now import SMALL, Later, now
from jtile.numpy._record import leaf, record

# Signatures of functions in C, which older releases of NumPy do not tell.
_SIGNATURES = {
    "concatenate": "arrays axis out dtype casting",
    "concat": "arrays axis out dtype casting",
    "where": "condition x y",
    "dot": "a b out",
    "inner": "a b",
    "vdot": "a b",
    "lexsort": "keys axis",
    "bincount": "x weights minlength",
    "ravel_multi_index": "multi_index dims mode order",
    "unravel_index": "indices shape order",
    "packbits": "a axis bitorder",
    "unpackbits": "a axis count bitorder",
}
_MISSING = object()
_NUMBERS = frozenset((bool, int, float, complex))


class Function:
    """A function of NumPy that is recorded.

    Args:
      name: NumPy's name, with dots for its modules.
      values: parameters that are arrays whose numbers take part, which are promoted together; `others` are arrays
        besides: conditions, indices.
      device: the same function of JAX; `jax.numpy`'s of that name where it is not given.
      cost: nanoseconds for an element.
    """

    def __init__(self, name: str, values: str, others: str = "", device: Callable | None = None, cost: float = 1.0):
        self.name, self.cost = name, cost
        self.values, self.others = frozenset(values.split()), frozenset(others.split())
        self.host: Any = functools.reduce(getattr, name.split("."), numpy)
        self.device: Any = device or functools.reduce(getattr, name.split("."), jnp)
        functools.update_wrapper(self, self.host, updated=())
        self.parameters, self.rest = self._parameters()
        self._known: Recent[tuple, tuple[Op, Inferred, Any]] = Recent(256)

    def _parameters(self) -> tuple[list[str], str | None]:
        if self.name in _SIGNATURES:
            return _SIGNATURES[self.name].split(), None
        found = inspect.signature(self.host).parameters
        rest = [p.name for p in found.values() if p.kind is p.VAR_POSITIONAL]
        return [p.name for p in found.values() if p.kind is not p.VAR_POSITIONAL], rest[0] if rest else None

    def __repr__(self) -> str:
        return f"<function jtile.numpy.{self.name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        known = self._key(args, kwargs)
        if known is not None:
            key, arrays, numbers = known
            found = self._known.get(key)
            if found is not None:
                with contextlib.suppress(OverflowError):
                    return self._again(found, arrays, numbers)
        if kwargs.get("out") is None:
            with contextlib.suppress(Later):
                values = now(args)
                return given_back(self.host(*values, **now(kwargs)), values)
        given = self._bound(args, kwargs)
        if given is None or any(_python(v) for k, v in given.items() if k in self.values):
            return at_once(self.host, *args, **kwargs)
        out = given.pop("out", None)
        nodes: list[Any] = []
        template = []
        for name, value in given.items():
            if name in self.values or name in self.others:
                described = _described(value, nodes)
            else:
                described = _fixed(value)
            if described is None:
                return at_once(self.host, *args, **kwargs)
            template.append((name, name in self.values, described))
        nodes = _numbers_too(nodes)
        found = _inferred(self, tuple(template), tuple((n.shape, n.dtype) for n in nodes))
        if found is None:
            return at_once(self.host, *args, **kwargs)
        op = self._op(tuple(template), nodes, found)
        if known is not None and len(nodes) == len(known[1]):
            self._known.put(known[0], (op, found, tuple(n.dtype.type for n in nodes)))
        return _results(op, nodes, found, out)

    def _key(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, list[Any], bool] | None:
        """What a call with large or pending arrays of ours is known by, its arrays and numbers, and whether there are
        numbers; None for other calls."""
        late, numbers, key, arrays = False, False, [], []
        names = itertools.chain(zip(self.parameters, args), kwargs.items())
        if self.rest is not None or len(args) > len(self.parameters):
            return None
        for name, a in names:
            kind = a.__class__
            if kind is ndarray:
                late = late or a._cell.node.value.__class__ is not numpy.ndarray or a.size > SMALL
                key += (name, a._shape, a._dtype)
                arrays.append(a)
            elif name in self.values and kind in _NUMBERS:
                numbers = True
                key += (name, kind)
                arrays.append(a)
            elif kind in _NUMBERS or kind is str or a is None or (kind is tuple and self._fixes(name, a)):
                key += (name, kind, _known_by(a))
            else:
                return None
        return (tuple(key), arrays, numbers) if late and "out" not in kwargs else None

    def _fixes(self, name: str, value: tuple) -> bool:
        """Whether a tuple is an argument of numbers that are no operands: axes, shifts."""
        return name not in self.values | self.others and all(v.__class__ is int for v in value)

    def _again(self, known: tuple[Op, Inferred, Any], arrays: list[Any], numbers: bool) -> Any:
        """The result of a call like one that was recorded before."""
        op, found, kinds = known
        if numbers:
            nodes = [a._node() if a.__class__ is ndarray else Constant(k(a)) for a, k in zip(arrays, kinds)]
        else:
            nodes = [a._node() for a in arrays]
        return _results(op, nodes, found, None)

    def _bound(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Arguments by the names of their parameters; None where NumPy would raise a TypeError."""
        if self.rest is not None:
            return {self.rest: args, **kwargs}
        if len(args) > len(self.parameters) or not kwargs.keys() <= set(self.parameters):
            return None
        given = dict(zip(self.parameters, args))
        if given.keys() & kwargs.keys():
            return None
        given |= {k: v for k, v in kwargs.items() if v is not numpy._NoValue}
        return given if given and (self.parameters[0] in given) else None

    def _op(self, template: tuple, nodes: list[Node], found: Inferred) -> Op:
        dtypes = tuple(n.dtype for n in nodes)

        def make() -> Op:
            common = _common(template, dtypes, found)
            device = lambda *arrays: self._call(self.device, template, _cast(arrays, common), jnp)
            host = lambda *arrays: self._call(self.host, template, arrays, numpy)
            return Op(self.name, host, device if found.device else None, self.cost)

        return interned(self.name, (template, dtypes, found.types), make)

    def _call(self, function: Callable, template: tuple, arrays: Iterable[Any], module: Any) -> Any:
        arrays = iter(arrays)
        positional: list[Any] = []
        named: dict[str, Any] = {}
        expected = iter(self.parameters)
        for name, _, described in template:
            value = _rebuilt(described, arrays)
            if name == self.rest:
                positional += value
            elif self.rest is None and not named and next(expected, None) == name:
                positional.append(value)
            else:
                named[name] = value
        return function(*positional, **named)


class Inferred:
    """The types of a call's results, and how they come about.

    Attributes:
      types: (shape, dtype) of each result; several: there is a tuple (or list) of them, made by `make`.
      device: whether JAX can compute it.
      python: the class of Python's that NumPy gives instead of an array, or None; scalar: it gives a number of its own.
    """

    def __init__(self, types: tuple, make: Callable | None, python: type | None, scalar: bool):
        self.types, self.make, self.python, self.scalar = types, make, python, scalar
        self.device = all(dtype in DEVICE_DTYPES for _, dtype in types)


@memo(entries=8192)
def _inferred(function: Function, template: tuple, types: tuple) -> Inferred | None:
    if any(dtype not in DEVICE_DTYPES for _, dtype in types):
        return None
    dtypes = tuple(dtype for _, dtype in types)
    try:
        common = _common(template, dtypes, None)
        call = lambda *arrays: function._call(function.device, template, _cast(arrays, common), jnp)
        with as_numpy_counts(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shapes = jax.eval_shape(call, *[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types])
    except Exception:  # whatever JAX thinks of it: NumPy has the last word
        return None
    several = isinstance(shapes, tuple | list)
    flat = list(shapes) if several else [shapes]
    small = _asked(function, template, types)
    if small is None:
        small = [numpy.empty((0,), s.dtype) for s in flat] if several else numpy.empty((0,), flat[0].dtype)
    answers = list(small) if several else [small]
    if len(answers) != len(flat) or (isinstance(small, tuple | list) and not several):
        return None
    result = tuple((tuple(s.shape), numpy.asarray(a).dtype) for s, a in zip(flat, answers))
    make = (getattr(type(small), "_make", None) or type(small)) if several else None
    python = type(small) if type(small) in (bool, int, float) else None
    return Inferred(result, make, python, isinstance(answers[0], numpy.generic))


def _asked(function: Function, template: tuple, types: tuple) -> Any:
    """What NumPy gives for arrays of ones, of at most three elements along each axis."""
    with warnings.catch_warnings(), numpy.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            ones = [numpy.ones([min(n, 3) for n in shape], dtype) for shape, dtype in types]
            return function._call(function.host, template, ones, numpy)
        except Exception:  # a size that the call names does not fit; the dtype is JAX's then
            return None


def _common(template: tuple, dtypes: tuple, found: Inferred | None) -> list[Any]:
    """The dtype in which the device takes each array; None: as it is."""
    is_value: list[bool] = []
    for _, value, described in template:
        is_value += [value] * _count(described)
    values = [d for d, v in zip(dtypes, is_value) if v]
    if not values:
        return [None] * len(dtypes)
    try:
        common = numpy.result_type(*values)
    except TypeError:
        return [None] * len(dtypes)
    if found is not None and len(found.types) == 1 and numpy.can_cast(common, found.types[0][1], "same_kind"):
        common = found.types[0][1]
    return [common if v and common != d else None for d, v in zip(dtypes, is_value)]


def _cast(arrays: Iterable[Any], common: list[Any]) -> list[Any]:
    return [a if c is None else jnp.asarray(a).astype(c) for a, c in zip(arrays, common)]


def _numbers_too(found: list[Any]) -> list[Node]:
    """The nodes, where Python's numbers have the dtype that NumPy gives them beside the arrays."""
    dtypes = [n.dtype for n in found if isinstance(n, Node)]
    numbers = [n for n in found if not isinstance(n, Node)]
    if not numbers:
        return found
    dtype = numpy.result_type(*dtypes, *numbers)
    return [n if isinstance(n, Node) else Constant(numpy.asarray(n, dtype)) for n in found]


def _described(value: Any, nodes: list[Any]) -> Any:
    """What an argument with arrays looks like, whose nodes are appended; None where NumPy has to look at it itself."""
    if type(value) in (bool, int, float, complex):
        nodes.append(value)
        return "array"
    if isinstance(value, ndarray | numpy.ndarray | numpy.generic | jax.Array):
        nodes.append(asnode(value))
        return "array"
    if value is None:
        return ("fixed", None)
    if isinstance(value, list | tuple):
        if not any(isinstance(v, ndarray | numpy.ndarray | jax.Array) for v in value):
            array = _plain(value)
            if array is None:
                return None
            nodes.append(asnode(array))
            return "array"
        parts = [_described(v, nodes) for v in value]
        return None if any(p is None for p in parts) else (type(value).__name__, tuple(parts))
    return None


def _plain(value: Any) -> numpy.ndarray | None:
    """A list of numbers, or of lists of them, as an array; None where it is none of numbers."""
    try:
        array = numpy.array(hosted(value))
    except (TypeError, ValueError):
        return None
    return array if array.dtype.kind in "biufc" else None


def _fixed(value: Any) -> Any:
    value = hosted(value)
    if isinstance(value, numpy.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        value = _tuples(value)
    if isinstance(value, type | numpy.dtype):
        return ("fixed", value)
    try:
        hash(value)
    except TypeError:
        return None
    return ("fixed", value, type(value), _known_by(value))  # True and 1 are equal, and no two calls are mixed up


def _known_by(value: Any) -> Any:
    """What a cache knows a value by: 0.0 and -0.0 are equal, too, and give other results."""
    return repr(value) if isinstance(value, float | complex | numpy.inexact) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list | tuple) else value


def _count(described: Any) -> int:
    if described == "array":
        return 1
    return sum(map(_count, described[1])) if described[0] in ("list", "tuple") else 0


def _rebuilt(described: Any, arrays: Any) -> Any:
    if described == "array":
        return next(arrays)
    if described[0] == "fixed":
        return described[1]
    parts = [_rebuilt(p, arrays) for p in described[1]]
    return parts if described[0] == "list" else tuple(parts)


def _python(value: Any) -> bool:
    """Whether NumPy has to do the call: for an array of objects, texts or dates, or for something that is no array."""
    return isinstance(value, str | bytes | numpy.matrix) or (
        isinstance(value, numpy.ndarray) and value.dtype not in DEVICE_DTYPES
    )


def _results(op: Op, nodes: list[Node], found: Inferred, out: Any) -> Any:
    inputs = tuple(nodes)
    if found.make is None:
        ((shape, dtype),) = found.types
        result = record(op, inputs, shape, dtype)
        if out is not None:
            return written(out, result)
        if found.python is not None:
            return found.python(wrap(result).item())
        return wrap(result, scalar=found.scalar and not shape)
    return found.make(picked(op, inputs, found.types, found.scalar))


def picked(op: Op, inputs: tuple[Node, ...], types: tuple, scalar: bool) -> list[ndarray]:
    """The results of an op that has several."""
    all_of = record(op, inputs, (), None)
    out = []
    for k, (shape, dtype) in enumerate(types):
        pick = interned("result", (k, shape, dtype), lambda k=k: Op(f"result {k}", lambda t: t[k], lambda t: t[k], 0.0))
        out.append(wrap(record(pick, (all_of,), shape, dtype), scalar=scalar and not shape))
    return out


def written(out: Any, result: Node) -> Any:
    """Write the result into `out` as NumPy's `out=` does, and return `out`."""
    if isinstance(out, tuple) and len(out) == 1:
        (out,) = out
    if isinstance(out, numpy.ndarray):
        numpy.copyto(out, wrap(result).__array__(), casting="same_kind")
        return out
    if not isinstance(out, ndarray):
        raise TypeError("return arrays must be of ArrayType")
    if out.shape != result.shape:
        raise ValueError(f"output array has shape {out.shape}, and the result has {result.shape}")
    out._write(result, "same_kind")
    return out


def at_once(function: Callable, *args: Any, out: Any = None, **kwargs: Any) -> Any:
    """The result of a function of NumPy, run at once on the values that its arguments have now."""
    args = hosted(args)
    result = function(*args, **hosted(kwargs))
    if out is not None:
        return written(out, asnode(result))
    return given_back(result, args)


def given_back(result: Any, args: Iterable[Any] = ()) -> Any:
    """NumPy's results as arrays of ours, in whatever lists they come. An array of its own is taken as it is, unless it
    is one of the arguments."""
    kind = result.__class__
    if kind is numpy.ndarray:
        flags = result.flags
        if not (flags.owndata and flags.writeable and flags.c_contiguous and result.shape) or any(
            result is a for a in args
        ):
            return wrap(asnode(result))
        return wrap(leaf(result))
    if isinstance(result, numpy.generic):
        return result
    if kind is tuple or kind is list:
        return kind([given_back(r, args) for r in result])
    if isinstance(result, tuple) and hasattr(result, "_make"):
        return kind._make(given_back(r, args) for r in result)
    return result
