"""Marks of dynamic dimensions: `jt.dynamic(x, 0)` at a call, `dynamic={"x": 0}` at a kernel."""

from __future__ import annotations

import dataclasses
import keyword
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.tree_util import GetAttrKey, register_pytree_with_keys_class, tree_flatten, tree_map, tree_unflatten

from jtile._errors import KernelTypeError, KernelValueError
from jtile.calls.signature import Signature, nearest

Axes = Any  # an int, a tuple of ints, or a dict from axes to names
_TAKEN = ("max", "min", "mod", "floordiv")  # functions in JAX's text of a symbolic dimension


class Mark(NamedTuple):
    """One dynamic dimension of an array.

    Attributes:
      axis: which one; negative ones count from the end.
      name: dimensions of one name have one size; None: those of one size count as one dimension.
      least, most: the sizes that it may have; None: as many as an int32 counts.
    """

    axis: int
    name: str | None = None
    least: int = 1
    most: int | None = None


@register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Dynamic:
    """An array some of whose dimensions are dynamic, those of `axes`. See `dynamic`."""

    array: Any
    axes: tuple[Mark, ...]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"an array that jt.dynamic marks is for kernels and functions of jtile.ops, and has no .{name}: mark it at "
            "the call of one of these, or give the kernel dynamic={...}"
        )

    def tree_flatten_with_keys(self) -> Any:
        return ((GetAttrKey("array"), self.array),), self.axes

    @classmethod
    def tree_unflatten(cls, axes: Any, children: Any) -> Dynamic:
        return cls(children[0], axes)


def dynamic(x: Any, axes: Axes = 0, *, least: int = 1, most: int | None = None) -> Any:
    """Mark dimensions of an argument of a kernel, or of a function of `jtile.ops`, as dynamic.

    One compiled image then serves every size of them, and one more those sizes that the kernel's tile steps divide. In
    the kernel such a size computes and compares like an int where the answer is the same for all sizes, and is an int32
    scalar elsewhere; tiles keep static shapes. Two dynamic dimensions of one size count as the same dimension, unless
    they have names. A function of the library chooses its kernels and their tiles by the bounds, not by the size.

    Args:
      x: an array, or a pytree of arrays, all of them with these axes.
      axes: an int, a tuple of ints, or a dict from axis to name: `{0: "rows"}`. Dimensions of one name have one size.
        An array that is marked already keeps its marks: axes with bounds of their own are marked one after the other.
      least, most: the sizes that these dimensions may have; None: as many as an int32 counts. A call with another size
        is refused.

    Returns:
      `x` with its arrays marked: `kernel(jt.dynamic(x, 0), w)`, `jt.ops.softmax(jt.dynamic(x, 0))`.
    Raises:
      KernelTypeError, KernelValueError: axes, a name or bounds that are none.
    """
    marks = tuple(m._replace(least=least, most=most) for m in marks_of(axes))
    whole = lambda n: hasattr(n, "__index__") and not isinstance(n, bool)
    if not whole(least) or not (most is None or whole(most)):
        raise KernelTypeError(f"least and most of a dynamic dimension are ints, got {least!r} and {most!r}")
    if not 1 <= least <= (least if most is None else most):
        raise KernelValueError(
            f"a dynamic dimension has between {least} and {most} elements: expected 1 <= least <= most"
        )
    of = lambda a: Dynamic(a.array, (*a.axes, *marks)) if isinstance(a, Dynamic) else Dynamic(a, marks)
    return tree_map(of, x, is_leaf=lambda a: isinstance(a, Dynamic))


def marks_of(axes: Axes) -> tuple[Mark, ...]:
    if isinstance(axes, Mapping):
        pairs = list(axes.items())
    else:
        pairs = [(a, None) for a in (axes if isinstance(axes, tuple | list) else (axes,))]
    for a, name in pairs:
        if isinstance(a, bool) or not hasattr(a, "__index__"):
            raise KernelTypeError(f"a dynamic axis is an int, got {a!r}")
        if name is not None and not (isinstance(name, str) and name.isidentifier() and name.isascii()):
            raise KernelTypeError(f"the name of a dynamic dimension is an identifier, got {name!r}")
        if name in _TAKEN or (name is not None and keyword.iskeyword(name)):
            raise KernelValueError(f"the name {name!r} of a dynamic dimension has a meaning in sizes: take {name}_")
    return tuple(Mark(operator.index(a), name) for a, name in pairs)


def strip(args: Any) -> tuple[Any, list[tuple[Mark, ...]]]:
    """Arguments without their marks, and the marks of every array."""
    is_marked = lambda x: isinstance(x, Dynamic)
    leaves, tree = tree_flatten(args, is_leaf=is_marked)
    plain = [x.array if is_marked(x) else x for x in leaves]
    return tree_unflatten(tree, plain), [x.axes if is_marked(x) else () for x in leaves]


def declared(sig: Signature, dynamic: Mapping[Any, Axes] | None, args: Sequence[Any]) -> Iterator[Any]:
    """The marks that the decorator gives, one for each array of the arguments."""
    if dynamic is not None and not isinstance(dynamic, Mapping):
        raise KernelTypeError(f'dynamic={dynamic!r}: expected a dict such as {{"x": 0}}', sig.where)
    names = [sig.ref_name(k) for k in range(len(args))]
    found: dict[int, Any] = {}
    for key, axes in (dynamic or {}).items():
        k = key if isinstance(key, int) and not isinstance(key, bool) else names.index(key) if key in names else -1
        if not 0 <= k < len(names):
            raise KernelValueError(
                f"dynamic= of kernel {sig.name} names {key!r}, which is no input{nearest(key, names)}", sig.where
            )
        found[k] = marks_of(axes)
    for k, arg in enumerate(args):
        yield from [found.get(k, ())] * len(tree_flatten(arg)[0])
