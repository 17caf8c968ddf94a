"""NumPy's universal functions over recorded arrays; NumPy itself says which dtypes a call takes and gives."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy

from jtile._memo import memo
from jtile.numpy import _array, _device
from jtile.numpy._array import asarray, asnode, functions, hosted, made_of, ndarray, wrap
from jtile.numpy._calls import Function, at_once, given_back, picked, written
from jtile.numpy._casts import cast, text
from jtile.numpy._graph import DEVICE_DTYPES, Constant, Node, Op, Shape, interned
from jtile.numpy._now import SMALL, Later, changed, memory, now, small_result
from jtile.numpy._record import record

_PLAIN = (bool, int, float, complex)
_NUMBERS = frozenset(_PLAIN)
_GENERICS = frozenset(d.type for d in DEVICE_DTYPES)
_NAMED = frozenset(("dtype", "casting", "order", "subok"))
_STRICT = frozenset(("raise", "call", "print", "log"))
_COMPARISONS = frozenset(("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"))
_SLOW = """sin cos tan arcsin arccos arctan sinh cosh tanh arcsinh arccosh arctanh exp exp2 expm1 log log2 log10 log1p
power float_power arctan2 hypot cbrt logaddexp logaddexp2 floor_divide remainder fmod divmod gcd lcm"""
_REDUCTIONS = {
    "add": ("sum", "cumsum"),
    "multiply": ("prod", "cumprod"),
    "maximum": ("max", None),
    "minimum": ("min", None),
    "logical_and": ("all", None),
    "logical_or": ("any", None),
}


class ufunc:  # noqa: N801
    """A universal function: NumPy's of the same name, over arrays that are computed when they are looked at.

    Attributes:
      numpy: NumPy's own function; nin, nout, nargs, ntypes, types, identity, signature: its attributes.
    """

    def __init__(self, of: numpy.ufunc):
        self.numpy = of
        self.device = _device.UFUNCS.get(of.__name__, getattr(jnp, of.__name__, None))
        self.cost = 10.0 if of.__name__ in _SLOW.split() else 1.0
        self._known: dict[tuple, tuple[Op, tuple, tuple, Any]] = {}
        self.nin, self.nout, self.nargs, self.ntypes = of.nin, of.nout, of.nargs, of.ntypes
        self.types, self.identity, self.signature = of.types, of.identity, of.signature
        self.__name__ = self.__qualname__ = of.__name__
        self.__doc__ = of.__doc__

    def __repr__(self) -> str:
        return f"<ufunc '{self.__name__}'>"

    def __call__(self, *args: Any, out: Any = None, where: Any = True, **kwargs: Any) -> Any:
        if out is None and where is True and not kwargs:
            quickly = self._recorded(args)
            if quickly is not None:
                return quickly
        if len(args) > self.nin:  # an output is given by position
            args, out = args[: self.nin], args[self.nin :] if out is None else out
        try:
            return self._now(args, out, where, kwargs)
        except Later:
            pass
        if isinstance(out, tuple) and all(o is None for o in out):
            out = None
        if self._numpys(args, out, kwargs):
            return self._at_once(args, out, where, kwargs)
        operands = [a if a.__class__ in _NUMBERS else asnode(a) for a in args]
        types = tuple([a.__class__ if a.__class__ in _NUMBERS else a.dtype for a in operands])
        dtypes = _resolved(self.numpy, types, kwargs.get("dtype"))
        try:
            nodes = [_operand(o, d) for o, d in zip(operands, dtypes)]
        except OverflowError:
            if self.__name__ not in _COMPARISONS:
                raise
            return self(*[numpy.asarray(a) if type(a) is int else a for a in args], out=out, where=where, **kwargs)
        if self.__name__ == "power":
            _check_power(nodes)
        shape = self._shape(nodes)
        results = self._results(nodes, shape, dtypes)
        if not kwargs:
            self._remember(types, dtypes, results[0]._cell.node.op)
        if where is not True or out is not None:
            return self._into(results, nodes, out, where, shape)
        return results if self.nout > 1 else results[0]

    def _recorded(self, args: tuple) -> ndarray | None:
        """The result of arrays of ours and numbers, of which one is large or pending, where a call like this one was
        recorded before; None otherwise: the other methods then do all that has to be asked."""
        late, types = False, []
        for a in args:
            kind = a.__class__
            if kind is ndarray:
                types.append(a._dtype)
                if not late:
                    node = a._cell.node
                    late = node.value.__class__ is not numpy.ndarray or a.size > SMALL
            elif kind in _NUMBERS:
                types.append(kind)
            elif kind in _GENERICS:
                types.append(a.dtype)
            else:
                return None
        known = self._known.get(tuple(types)) if late else None
        if known is None or not _lenient():
            return None
        op, kinds, dtypes, result = known
        nodes: Any = []
        try:
            for a, kind, dtype in zip(args, kinds, dtypes):
                if a.__class__ is ndarray:
                    node = a._node()
                    nodes.append(node if node.dtype is dtype else cast(node, dtype))
                else:
                    nodes.append(Constant(kind(a)))
        except OverflowError:
            return None
        nodes = tuple(nodes)
        shape = nodes[0].shape or nodes[-1].shape
        for n in nodes:
            if n.shape is not shape and n.shape and (n.shape != shape or len(nodes) > 2):
                shape = self._shape(nodes)
                break
        return made_of(record(op, nodes, shape, result), shape, result)

    def _remember(self, types: tuple, dtypes: tuple, op: Op) -> None:
        """A call of arrays and numbers of these types needs nothing but its op, and operands of these dtypes."""
        if self.__name__ == "power" and dtypes[0].kind == "i":  # whose exponents are looked at
            return
        if self.nout == 1 and op.device is not None:
            given = dtypes[: self.nin]
            self._known[types] = op, tuple(d.type for d in given), given, dtypes[self.nin]

    def _now(self, args: tuple, out: Any, where: Any, kwargs: dict[str, Any]) -> Any:
        """The result, computed at once by NumPy.

        Raises:
          Later: something is large, or pending.
        """
        values = [now(a) for a in args]
        if where is not True:
            kwargs = {**kwargs, "where": now(where)}
        if out is None:
            if not small_result(values):
                raise Later
            return given_back(self.numpy(*values, **kwargs), values)
        if isinstance(out, tuple) and len(out) == 1:
            (out,) = out
        target = memory(out, values) if isinstance(out, ndarray) else None
        if target is None:
            raise Later
        self.numpy(*values, out=target, **kwargs)
        changed(out)
        return out

    def _numpys(self, args: tuple, out: Any, kwargs: dict[str, Any]) -> bool:
        """Whether NumPy does the call: of numbers alone, of what JAX has no dtype for, or under a strict errstate."""
        if self.device is None or len(args) != self.nin:
            return True
        if kwargs and (kwargs.keys() - _NAMED or kwargs.get("casting", "same_kind") != "same_kind"):
            return True
        arrays = isinstance(out, ndarray | numpy.ndarray | tuple)
        for a in args:
            kind = a.__class__
            if kind in _NUMBERS:
                continue
            if kind is ndarray or kind is numpy.ndarray:
                arrays = True
                if a.dtype not in DEVICE_DTYPES:
                    return True
            elif isinstance(a, list | tuple | jax.Array):
                arrays = True
            elif a is None or isinstance(a, str | bytes | numpy.ndarray):  # matrices and the like
                return True
        return not arrays or not _lenient()

    def _at_once(self, args: tuple, out: Any, where: Any, kwargs: dict[str, Any]) -> Any:
        if where is not True:
            kwargs = {**kwargs, "where": hosted(where)}
            if isinstance(out, ndarray):
                kwargs["out"] = numpy.array(out)
                return written(out, asnode(self.numpy(*hosted(args), **hosted(kwargs))))
        if isinstance(out, tuple) and len(out) > 1:
            results = at_once(self.numpy, *args, **kwargs)
            return tuple(r if o is None else written(o, asnode(r)) for o, r in zip(out, results))
        return at_once(self.numpy, *args, out=out, **kwargs)

    def _shape(self, nodes: Sequence[Node]) -> Shape:
        first, last = nodes[0].shape, nodes[-1].shape
        if len(nodes) < 3 and (first == last or not last):
            return first
        if len(nodes) == 2 and not first:
            return last
        try:
            return numpy.broadcast_shapes(*[n.shape for n in nodes])
        except ValueError:
            shapes = " ".join(text(n.shape) for n in nodes)
            raise ValueError(f"operands could not be broadcast together with shapes {shapes} ") from None

    def _results(self, nodes: list[Node], shape: Shape, dtypes: tuple) -> tuple[ndarray, ...]:
        given = dtypes[self.nin :]
        device = self.device if all(d in DEVICE_DTYPES for d in given) else None
        op = interned("ufunc", (self.numpy, dtypes), lambda: Op(self.__name__, self.numpy, device, self.cost))
        scalar = not shape
        if self.nout == 1:
            return (wrap(record(op, tuple(nodes), shape, given[0]), scalar=scalar),)
        return tuple(picked(op, tuple(nodes), tuple((shape, d) for d in given), scalar))

    def _into(self, results: tuple[ndarray, ...], nodes: list[Node], out: Any, where: Any, shape: Shape) -> Any:
        """Write the results into `out` where `where` is true."""
        outs = out if isinstance(out, tuple) else (out,) * (self.nout if out is None else 1)
        if len(outs) != self.nout:
            raise ValueError(f"out= of {self.__name__} takes {self.nout} arrays, got {len(outs)}")
        final = []
        for result, into in zip(results, outs):
            if where is not True:
                into = functions["empty"](shape, result.dtype) if into is None else into
                mask = asarray(where)
                result = functions["where"](mask, result.astype(into.dtype), into)
            if into is None:
                final.append(result)
                continue
            if not numpy.can_cast(result.dtype, into.dtype, "same_kind"):
                self._refuse(results, nodes, into)
            if isinstance(into, ndarray) and into.shape != shape:
                result = functions["broadcast_to"](result, self._out_shape(into.shape, nodes, shape))
            final.append(written(into, result._node()))
        return tuple(final) if self.nout > 1 else final[0]

    def _refuse(self, results: tuple[ndarray, ...], nodes: list[Node], into: Any) -> None:
        """Raise NumPy's own error for an output that cannot take a result of its dtype."""
        outs = tuple(numpy.empty(1, into.dtype) for _ in results)
        with numpy.errstate(all="ignore"):
            self.numpy(*[numpy.ones(1, n.dtype) for n in nodes], out=outs)

    def _out_shape(self, out: Shape, nodes: list[Node], shape: Shape) -> Shape:
        """The shape of an output that a result is broadcast into."""
        try:
            full = numpy.broadcast_shapes(out, shape)
        except ValueError:
            shapes = " ".join(text(s) for s in (*[n.shape for n in nodes], out))
            raise ValueError(f"operands could not be broadcast together with shapes {shapes} ") from None
        if full != out:
            raise ValueError(
                f"non-broadcastable output operand with shape {text(out)} doesn't match the broadcast shape "
                f"{text(full)}"
            )
        return full

    # Methods

    def reduce(
        self, array: Any, axis: Any = 0, dtype: Any = None, out: Any = None, keepdims: bool = False, **rest: Any
    ):
        name = _REDUCTIONS.get(self.__name__, (None,))[0]
        if name is None or (name in ("max", "min", "all", "any") and dtype is not None):
            return at_once(self.numpy.reduce, array, axis, dtype, out=out, keepdims=keepdims, **rest)
        named = rest if dtype is None else {"dtype": dtype, **rest}
        return functions[name](array, axis=axis, out=out, keepdims=keepdims, **named)

    def accumulate(self, array: Any, axis: int = 0, dtype: Any = None, out: Any = None):
        name = _REDUCTIONS.get(self.__name__, (None, None))[1]
        if name is None or numpy.ndim(hosted(array) if isinstance(array, list | tuple) else array) == 0:
            return at_once(self.numpy.accumulate, array, axis, dtype, out=out)
        return functions[name](array, axis=axis, dtype=dtype, out=out)

    def reduceat(self, array: Any, indices: Any, axis: int = 0, dtype: Any = None, out: Any = None):
        return at_once(self.numpy.reduceat, array, indices, axis, dtype, out=out)

    def outer(self, a: Any, b: Any, **kwargs: Any):
        left, right = asarray(a), asarray(b)
        return self(left.reshape(left.shape + (1,) * right.ndim), right, **kwargs)

    def at(self, a: Any, indices: Any, *b: Any) -> None:
        """Apply the function at some indices, unbuffered as NumPy's `at`: an index that comes twice counts twice."""
        if not isinstance(a, ndarray):
            self.numpy.at(a, hosted(indices), *hosted(b))
            return
        value = numpy.array(a)
        self.numpy.at(value, hosted(indices), *hosted(b))
        a[...] = asnode_owned(value)

    def resolve_dtypes(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy.resolve_dtypes(*args, **kwargs)


_LENIENT: list[Any] = [None]  # the state of NumPy's errors that was last found to be lenient
_ERRORS = getattr(numpy._core.umath, "_extobj_contextvar", None)


def _lenient() -> bool:
    """Whether NumPy raises no errors of its own for values. NumPy keeps its state in a variable of the context, whose
    value is another object after each change: to ask for its contents takes a third of the time of a recorded call."""
    state = None if _ERRORS is None else _ERRORS.get()
    if state is not None and state is _LENIENT[0]:
        return True
    if not _STRICT.isdisjoint(numpy.geterr().values()):
        return False
    _LENIENT[0] = state
    return True


def asnode_owned(value: numpy.ndarray) -> ndarray:
    return wrap(_array.leaf(value) if value.shape else Constant(value))


@memo(entries=4096)
def _resolved(function: numpy.ufunc, types: tuple, dtype: Any) -> tuple:
    """The dtypes of operands and results, by NumPy's promotion.

    Raises:
      TypeError: NumPy's, where it has no such loop.
    """
    wanted = [*types, *[None] * function.nout]
    signature = None if dtype is None else (*[None] * function.nin, *[numpy.dtype(dtype)] * function.nout)
    if all(isinstance(t, type) for t in types):
        wanted[0] = numpy.asarray(types[0](0)).dtype
    wanted = [numpy.dtype(bool) if w is bool else w for w in wanted]
    if dtype is None:
        samples = [w(1) if isinstance(w, type) else numpy.ones(1, w) for w in wanted[: function.nin]]
        with numpy.errstate(all="ignore"):
            function(*samples)  # some loops refuse when they run: - of bools
    named: dict[str, Any] = {} if signature is None else {"signature": signature}
    return function.resolve_dtypes(tuple(wanted), **named)


def _operand(operand: Any, dtype: Any) -> Node:
    if operand.__class__ not in _NUMBERS:
        return operand if operand.dtype == dtype else cast(operand, dtype)
    return Constant(numpy.asarray(operand, dtype))


def _check_power(nodes: list[Node]) -> None:
    base, exponent = nodes
    if base.dtype.kind != "i" or exponent.dtype.kind != "i":
        return
    if (numpy.asarray(wrap(exponent)) < 0).any():
        raise ValueError("Integers to negative integer powers are not allowed.")


def _recorded(function: Any, *args: Any) -> ndarray | None:
    """The result of a call like one that was recorded before, or None: nothing else has to be asked then."""
    return function._recorded(args) if function.__class__ is ufunc else None


def _forward(function: Callable) -> Callable:
    """The operator of an array on the left."""

    def apply(self: ndarray, other: Any) -> Any:
        quickly = _recorded(function, self, other)
        if quickly is not None:
            return quickly
        return function(self, other) if _operable(other) else NotImplemented

    return apply


def _backward(function: Callable) -> Callable:
    """The operator of an array on the right."""

    def apply(self: ndarray, other: Any) -> Any:
        quickly = _recorded(function, other, self)
        if quickly is not None:
            return quickly
        return function(other, self) if _operable(other) else NotImplemented

    return apply


def _compare(function: Callable, plain: Callable) -> Callable:
    """A comparison; `plain` is the operator of Python."""
    compared = _forward(function)

    def apply(self: ndarray, other: Any) -> Any:
        if isinstance(other, str | bytes | None):  # NumPy's operator knows what its function refuses
            return at_once(plain, self, other)
        return compared(self, other)

    return apply


def _in_place(function: Callable, plain: Callable) -> Callable:
    """The operator of a statement in place; `plain` is that of a scalar."""

    def apply(self: ndarray, other: Any) -> Any:
        if self._scalar:
            return plain(self, other)
        result = _recorded(function, self, other)
        if result is None or result._shape != self._shape or result._dtype is not self._dtype:
            function(self, other, out=self)
        else:
            self._write(result._cell.node, "same_kind")
        return self

    return apply


def _operators() -> None:
    """Give arrays Python's operators."""
    for short, name in (
        ("add", "add"), ("sub", "subtract"), ("mul", "multiply"), ("truediv", "divide"), ("floordiv", "floor_divide"),
        ("mod", "remainder"), ("pow", "power"), ("and", "bitwise_and"), ("or", "bitwise_or"), ("xor", "bitwise_xor"),
        ("lshift", "left_shift"), ("rshift", "right_shift"), ("matmul", "matmul"),
    ):  # fmt: skip
        function = functions[name]
        plain = getattr(operator, short + "_" if short in ("and", "or") else short)
        setattr(ndarray, f"__{short}__", _forward(function))
        setattr(ndarray, f"__r{short}__", _backward(function))
        setattr(ndarray, f"__i{short}__", _in_place(function, plain))
    for short, name in (
        ("lt", "less"), ("le", "less_equal"), ("gt", "greater"), ("ge", "greater_equal"), ("eq", "equal"),
        ("ne", "not_equal"),
    ):  # fmt: skip
        setattr(ndarray, f"__{short}__", _compare(functions[name], getattr(operator, short)))
    ndarray.__divmod__ = _forward(functions["divmod"])  # type: ignore[attr-defined]
    ndarray.__rdivmod__ = _backward(functions["divmod"])  # type: ignore[attr-defined]
    for short, name in (("neg", "negative"), ("pos", "positive"), ("abs", "absolute"), ("invert", "invert")):
        setattr(ndarray, f"__{short}__", lambda self, function=functions[name]: function(self))


def _operable(other: Any) -> bool:
    """Whether the other operand leaves the operation to arrays."""
    kind = other.__class__
    return kind is ndarray or kind in _NUMBERS or getattr(other, "__array_ufunc__", other) is not None or other is None


def install() -> dict[str, Any]:
    """All universal functions by name, the operators of arrays among their users."""
    found: dict[str, Any] = {}
    gufuncs = {"matmul": "x1 x2", "vecdot": "x1 x2", "matvec": "x1 x2", "vecmat": "x1 x2"}
    for name in dir(numpy):
        of = getattr(numpy, name)
        if not isinstance(of, numpy.ufunc):
            continue
        if of.__name__ in gufuncs:
            found[name] = functions.get(name) or _Product(of, gufuncs[of.__name__])
        else:
            found[name] = functions.get(of.__name__) or ufunc(of)
        functions.setdefault(of.__name__, found[name])
    _operators()
    return found


class _Product(Function):
    """A universal function of whole rows: it is recorded as a function."""

    def __init__(self, of: numpy.ufunc, parameters: str):
        self.numpy = of
        super().__init__(of.__name__, parameters, device=getattr(jnp, of.__name__), cost=100.0)

    def _parameters(self) -> tuple[list[str], str | None]:
        return ["x1", "x2", "out"], None

    def __repr__(self) -> str:
        return f"<ufunc '{self.name}'>"
