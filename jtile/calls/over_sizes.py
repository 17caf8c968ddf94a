"""Functions of arrays that take marks of dynamic dimensions, `jt.ops.softmax(jt.dynamic(x, 0))`.

The function is traced once with symbols in the place of the marked sizes, as `jax.export` would: every kernel in it has
dynamic sizes then, so that one image serves all of them, and what the function chooses by a size it chooses by the
bounds of the mark. The traced program is run with the numbers of a call, by `primitive/sized.py`, so that
transformations of JAX see ordinary arrays.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves, tree_structure, tree_unflatten

from jtile._compat import closed_over, resized
from jtile._errors import JtileError, KernelTypeError, UnsupportedError
from jtile._frames import shows_users_frames
from jtile.calls.arguments import ARRAY, key_of
from jtile.calls.dynamic import Callee, Marked, dimensions, marked
from jtile.calls.marks import Dynamic

_is_mark = lambda x: isinstance(x, Dynamic)
# NumPy's numbers, such as 1 / np.sqrt(64), are fixed as Python's are; its classes of dtypes have a shape, too.
_is_array = lambda x: hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, np.generic | type)


def takes_marks[**P, R](fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of arrays so that it takes arrays with marks of `jt.dynamic`, as those of `jtile.ops` do.

    A call with marks traces the function with JAX's symbolic dimensions in the place of the marked sizes, once for all
    sizes: all kernels in it have dynamic sizes, and what it chooses by a size it chooses by the mark's bounds
    (`jt.bounds_of`). Calls without marks are what they were.

    Args:
      fn: a function of arrays, of pytrees of arrays, and of other values, which are fixed.

    Returns:
      The function; its calls with marks are ordinary ones for `jit`, `vmap` and derivatives.
    Raises:
      UnsupportedError: at a call with marks, where the function has to know a size that they leave open.
    """

    # What is traced goes with the function, whose closure may hold arrays.
    programs = functools.lru_cache(maxsize=1024)(functools.partial(_over_arrays, fn))

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _has_mark(args) and not (kwargs and _has_mark(kwargs.values())):
            return fn(*args, **kwargs)
        return _call(fn, programs, args, kwargs)

    return call


_PLAIN = (np.ndarray, int, float, bool, str, type(None))


def _has_mark(values: Iterable[Any]) -> bool:
    """Whether there is a mark in these arguments; every call asks this, so the usual types have no tree to look at."""
    for x in values:
        kind = type(x)
        if kind is not ARRAY.type and kind not in _PLAIN and any(map(_is_mark, tree_leaves(x, is_leaf=_is_mark))):
            return True
    return False


@shows_users_frames
def _call(fn: Callable[..., Any], programs: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`fn(*args, **kwargs)`, some of whose arrays are marked."""
    name = getattr(fn, "__name__", repr(fn))
    given = inspect.signature(fn).bind(*args, **kwargs)
    flat, tree = tree_flatten_with_path((given.args, given.kwargs), is_leaf=_is_mark)
    plain = [x.array if _is_mark(x) else x for _, x in flat]
    held = tuple(_is_array(x) for x in plain)
    arrays = [x for x, array in zip(plain, held, strict=True) if array]
    of = list(given.signature.parameters.values())
    parameters = {(0, k): p.name for k, p in enumerate(of) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)}
    parameters |= {(0, k): f"{p.name}_{k - j}" for j, p in enumerate(of) if p.kind is p.VAR_POSITIONAL
                   for k in range(j, len(given.args))}  # fmt: skip
    names = [_name(path, parameters) for (path, _), array in zip(flat, held, strict=True) if array]
    marks = [x.axes if _is_mark(x) else () for (_, x), array in zip(flat, held, strict=True) if array]
    types = [jax.typeof(x) for x in arrays]
    found = None if any(0 in t.shape for t in types) else marked(Callee(name), names, types, marks)
    if found is None:
        args, kwargs = tree_unflatten(tree, plain)
        return fn(*args, **kwargs)
    static = tuple(_Static(x) for x, array in zip(plain, held, strict=True) if not array)
    for x in static:
        _check_hashable(name, x.value)
    return programs(tree, held, static)(_Sizes(found), *arrays)


def _check_hashable(name: str, value: Any) -> None:
    try:
        hash(value)
    except TypeError as error:
        raise KernelTypeError(
            f"{name} with marks of dynamic sizes is traced once for each value of an argument that is no array, and "
            f"one of type {type(value).__name__} has no hash: give a tuple, a frozen dataclass, or a pytree of arrays"
        ) from error


def _name(path: Sequence[Any], parameters: Mapping[tuple[int, int], str]) -> str:
    """What symbols of an argument's dimensions are called after: the parameter, and the place in it."""
    top, place, *rest = path
    first = parameters.get((top.idx, getattr(place, "idx", -1)), "") or keystr((place,))
    return re.sub(r"\W+", "_", first + keystr(tuple(rest)), flags=re.ASCII).strip("_")


class _Sizes:
    """The dynamic dimensions of a call without their sizes: by these, calls share what was traced."""

    def __init__(self, found: Marked):
        self.key = found.places, tuple(found.bounds.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Sizes) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def symbolic(self, types: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Types with symbols in the place of the sizes that are dynamic, and the sizes of these."""
        places, bounds = self.key
        made = dimensions(tuple((name, 1, *ends) for name, ends in bounds))
        symbols, sizes, out = dict(zip(dict(bounds), made, strict=True)), {}, []
        for t, row in zip(types, places, strict=True):
            sizes |= {s: n for s, n in zip(row, t.shape, strict=True) if s is not None}
            out.append(resized(t, tuple(n if s is None else symbols[s] for n, s in zip(t.shape, row, strict=True))))
        return out, sizes

    def __str__(self) -> str:
        return ", ".join(name for name, _ in self.key[1])


class _Static:
    """An argument that is no array, as part of a key: 1, 1.0 and True, 0.0 and -0.0 are different ones."""

    def __init__(self, value: Any):
        self.value, self.key = value, key_of({"": value})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _over_arrays(fn: Callable[..., Any], tree: Any, held: tuple[bool, ...], static: tuple[_Static, ...]) -> Any:
    """`fn` as a function of the sizes that are dynamic and of its arrays alone, under `jax.jit`, whose caches hold what
    was traced."""

    def call(*arrays: Any) -> Any:
        more, others = iter(arrays), iter(static)
        args, kwargs = tree_unflatten(tree, [next(more) if array else next(others).value for array in held])
        return fn(*args, **kwargs)

    call.__name__ = call.__qualname__ = getattr(fn, "__name__", "call")
    own = jax.jit(call)
    return jax.jit(lambda over, *arrays: _run(own, over, *arrays), static_argnums=0)


def _run(fn: Any, over: _Sizes, *arrays: Any) -> Any:
    """The program of `fn` over symbols, with the sizes of these arrays."""
    from jtile.primitive.sized import run

    types = [jax.typeof(x) for x in arrays]
    symbolic, sizes = over.symbolic(types)
    refuse = functools.partial(refusal, fn.__name__, str(over))
    try:
        traced = fn.trace(*symbolic)
    except Exception as error:
        jax.eval_shape(fn, *types)  # what is wrong for these sizes too has an error of its own
        raise refuse(error) from error
    tree = tree_structure(traced.out_info)
    return tree_unflatten(tree, run(traced.jaxpr, (*closed_over(traced), *arrays), sizes, refuse))


def refusal(name: str, symbols: str, error: Exception) -> UnsupportedError:
    """What a caller is told whose marks a function cannot take."""
    said = error.message if isinstance(error, JtileError) else str(error)
    why = said.strip().split("\n")[0].split(" This error arises")[0]
    return UnsupportedError(
        f"{name} is not made for these dynamic sizes ({symbols}): {why.rstrip('.:')}. Mark all arrays that have these "
        "sizes, give the marks bounds by which it can choose (jt.dynamic(x, axes, least=1, most=2048)), pad the arrays "
        "to one size, or call it without marks: it is then compiled for each size"
    )
