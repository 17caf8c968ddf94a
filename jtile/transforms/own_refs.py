"""JAX's own Refs (`jax.new_ref`, `jax.ref.*`) said in the language's primitives, the only ones that differentiation
knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jtile.language._index import At, Span, Take
from jtile.language._primitives import load_p, store_p


def whole(ref: Any) -> tuple[tuple[Span, ...], list[Any]]:
    """The index of all of a Ref."""
    return tuple(Span(n) for n in ref.shape), [np.int32(0)] * len(ref.shape)


def own(eqn: Any, args: Sequence[Any], used: bool) -> list[Any] | None:
    """The results of an equation on a JAX Ref; `used`: somebody reads them. None: it is no such equation."""
    rule = _RULES.get(eqn.primitive.name)
    return rule(eqn, args, used) if rule else None


def _access(eqn: Any, ref: Any, leaves: Sequence[Any]) -> tuple[Any, Any, list[int]]:
    """The access of an equation: dims, values, and for axis k of JAX's tile which axis of the language's it is."""
    transforms = jax.tree.unflatten(eqn.params["tree"], list(leaves))
    if not transforms:
        return (*whole(ref), list(range(len(ref.shape))))
    (indexer,) = transforms  # more, or views, have no Tile IR: such a kernel was refused when it was first traced
    dims: list[Any] = []
    values: list[Any] = []
    for e in indexer.indices:
        sliced = all(hasattr(e, a) for a in ("start", "size", "stride"))
        value = jnp.asarray(e.start if sliced else e)
        value = value if jnp.issubdtype(value.dtype, np.integer) and not value.weak_type else value.astype(np.int32)
        dims.append(Span(e.size, e.stride) if sliced else Take() if value.ndim else At())
        values.append(value)
    return tuple(dims), values, _order(dims, values)


def _order(dims: Sequence[Any], values: Sequence[Any]) -> list[int]:
    """The order of axes: JAX puts gathered ones that stand apart in front, the language leaves them at the first."""
    rank = sum(isinstance(d, Span) for d in dims)
    takes = [k for k, d in enumerate(dims) if isinstance(d, Take)]
    advanced = [k for k, d in enumerate(dims) if not isinstance(d, Span)]
    if not takes:
        return list(range(rank))
    width = values[takes[0]].ndim
    lead = sum(isinstance(d, Span) for d in dims[: takes[0]])
    if advanced[-1] - advanced[0] == len(advanced) - 1:
        return list(range(rank + width))
    return [*range(lead, lead + width), *range(lead), *range(lead + width, rank + width)]


def _read(ref: Any, dims: Any, values: Any, order: list[int]) -> Any:
    return lax.transpose(load_p.bind(ref, *values, dims=dims, pad=0, masked=False), order)


def _write(ref: Any, dims: Any, values: Any, order: list[int], x: Any) -> None:
    store_p.bind(ref, *values, lax.transpose(x, np.argsort(order)), dims=dims, masked=False)


def _get(eqn: Any, args: Sequence[Any], used: bool) -> list[Any]:
    ref, *leaves = args
    return [_read(ref, *_access(eqn, ref, leaves))]


def _swap(eqn: Any, args: Sequence[Any], used: bool) -> list[Any]:
    ref, x, *leaves = args
    at = _access(eqn, ref, leaves)
    old = _read(ref, *at) if used else None
    _write(ref, *at, x)
    return [old]


def _addupdate(eqn: Any, args: Sequence[Any], used: bool) -> list[Any]:
    ref, x, *leaves = args
    at = _access(eqn, ref, leaves)
    _write(ref, *at, lax.add(_read(ref, *at), jnp.asarray(x)))
    return []


def _new(eqn: Any, args: Sequence[Any], used: bool) -> list[Any]:
    x = jnp.asarray(args[0])
    ref = jax.empty_ref(jax.ShapeDtypeStruct(x.shape, x.dtype))
    _write(ref, *whole(ref), list(range(x.ndim)), x)
    return [ref]


def _freeze(eqn: Any, args: Sequence[Any], used: bool) -> list[Any]:
    (ref,) = args
    return [_read(ref, *whole(ref), list(range(len(ref.shape))))]


def _free(eqn: Any, args: Sequence[Any], used: bool) -> list[Any]:
    return []


_RULES: dict[str, Callable[[Any, Sequence[Any], bool], list[Any]]] = {
    "get": _get,
    "swap": _swap,
    "addupdate": _addupdate,
    "new_ref": _new,
    "ref": _new,
    "mutable_array": _new,
    "freeze": _freeze,
    "free_ref": _free,
}
