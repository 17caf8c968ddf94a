"""Loads, stores and atomic adds of complex numbers; prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jtile._parts import PARTS, is_complex, part_dtype
from jtile.language._index import At, Span
from jtile.language._primitives import atomic_p, load_p, print_p, store_p
from jtile.trace.pairs.walk import Pair, Stored, Value, Walk, bind_parts, refuse, rule

_FIRST = np.int32(0)


def _parts(pad: Any) -> tuple[float, float]:
    """The parts of a number; NaN is the one `math.nan`, so that equal kernels compare equal."""
    return tuple(math.nan if math.isnan(p) else p for p in (complex(pad).real, complex(pad).imag))


def _twice(mask: Any) -> Any:
    """The mask of the parts of elements, made from that of the elements."""
    return lax.broadcast_in_dim(mask, (*mask.shape, PARTS), range(mask.ndim))


def _joined(x: Pair) -> Any:
    """A complex tile as the tile of parts that memory holds."""
    return lax.concatenate([lax.expand_dims(p, (np.ndim(p),)) for p in (x.re, x.im)], np.ndim(x.re))


def _cut(x: Any) -> Pair:
    """The inverse of `_joined`."""
    return Pair(*[lax.index_in_dim(x, k, -1, keepdims=False) for k in range(PARTS)])


@rule("jtile_load")
def _(walk: Walk, eqn: Any, args: list[Value]) -> Sequence[Value]:
    ref, *rest = args
    dims, masked, pad = eqn.params["dims"], eqn.params["masked"], _parts(eqn.params["pad"])
    at, mask = rest[: len(dims)], rest[len(dims) :]
    if isinstance(ref, Pair):
        load = lambda r, p: load_p.bind(r, *rest, dims=dims, pad=p, masked=masked)
        return [Pair(load(ref.re, pad[0]), load(ref.im, pad[1]))]
    if pad[0] is pad[1] or pad[0] == pad[1]:
        pairs = (*dims, Span(PARTS))
        return [_cut(load_p.bind(ref.ref, *at, _FIRST, *map(_twice, mask), dims=pairs, pad=pad[0], masked=masked))]
    parts = [
        load_p.bind(ref.ref, *at, np.int32(k), *mask, dims=(*dims, At()), pad=p, masked=masked)
        for k, p in enumerate(pad)
    ]
    return [Pair(*parts)]


def _of_update(eqn: Any, args: list[Value]) -> tuple[Value, list[Value], Value, list[Value]]:
    """(the Ref, the indices, the value, the mask if there is one) of a store or an atomic."""
    ref, *rest = args
    n = len(eqn.params["dims"])
    return ref, rest[:n], rest[n], rest[n + 1 :]


def _of_parts(eqn: Any) -> dict[str, Any]:
    """The parameters of a store or an atomic that goes to the parts of the elements."""
    return eqn.params | {"dims": (*eqn.params["dims"], Span(PARTS))}


@rule("jtile_store")
def _(walk: Walk, eqn: Any, args: list[Value]) -> Sequence[Value]:
    ref, at, value, mask = _of_update(eqn, args)
    if isinstance(ref, Pair):
        for r, v in ((ref.re, value.re), (ref.im, value.im)):
            store_p.bind(r, *at, v, *mask, **eqn.params)
    else:
        store_p.bind(ref.ref, *at, _FIRST, _joined(value), *map(_twice, mask), **_of_parts(eqn))
    return []


@rule("jtile_atomic")
def _(walk: Walk, eqn: Any, args: list[Value]) -> Sequence[Value]:
    """Atomic additions: the language lets no other atomic through."""
    ref, at, value, mask = _of_update(eqn, args)
    if isinstance(ref, Pair):
        add = lambda r, v: atomic_p.bind(r, *at, v, *mask, **eqn.params)
        return [Pair(add(ref.re, value.re), add(ref.im, value.im))]
    return [_cut(atomic_p.bind(ref.ref, *at, _FIRST, _joined(value), *map(_twice, mask), **_of_parts(eqn)))]


@rule("empty_ref")
def _(walk: Walk, eqn: Any, args: list[Value]) -> Sequence[Value]:
    aval = eqn.outvars[0].aval
    part = jax.ShapeDtypeStruct(aval.shape, part_dtype(aval.dtype))
    return [Pair(jax.empty_ref(part), jax.empty_ref(part))]


@rule("new_ref", "ref", "mutable_array", "freeze", "free_ref", "get", "swap", "addupdate")
def _(walk: Walk, eqn: Any, args: list[Value]) -> Sequence[Value]:
    """Memory that the body makes itself is that of the real and that of the imaginary parts."""
    if any(isinstance(x, Stored) for x in args):
        raise refuse(walk, eqn, "a Ref of complex numbers is loaded and stored by x[...], jt.load and jt.store")
    return both(eqn, args)


def both(eqn: Any, args: Sequence[Value]) -> list[Value]:
    """An equation that does the same to both parts of its complex operands."""
    pairs = [x for x in args if isinstance(x, Pair)]
    of = lambda k: [(x.im if k else x.re) if isinstance(x, Pair) else x for x in args]
    outs = zip(bind_parts(eqn, of(0), 0), bind_parts(eqn, of(1), 1), strict=True)
    real = bool(pairs) and all(x.real for x in pairs)
    return [Pair(a, b, real) if is_complex(v.aval.dtype) else a for v, (a, b) in zip(eqn.outvars, outs, strict=True)]


@rule("jtile_print")
def _(walk: Walk, eqn: Any, args: list[Value]) -> Sequence[Value]:
    """A complex value is shown as an expression of its parts."""
    text, *rest = eqn.params["format"].replace("{{", "\0").split("{}")
    shown: list[Any] = []
    for x, more in zip(args, rest, strict=True):
        text += ("({} + 1j * {})" if isinstance(x, Pair) else "{}") + more
        shown += [x.re, x.im] if isinstance(x, Pair) else [x]
    print_p.bind(*shown, format=text.replace("\0", "{{"))
    return []
