"""Dots, user reductions and scans."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import partial_eval

from jtile._errors import KernelTypeError, KernelValueError
from jtile._parts import is_complex
from jtile.language._numbers import tile_of
from jtile.language._place import user_place
from jtile.language._primitives import dot_p, dot_scaled_p, reduce_p, scan_p, sum_dtype
from jtile.language.refs import Ref

PRECISIONS = {
    None: "default",
    lax.Precision.DEFAULT: "default",
    lax.Precision.HIGH: "high",
    lax.Precision.HIGHEST: "highest",
}


_KINDS = {"f": np.floating, "i": np.integer, "c": np.complexfloating}


LEVELS = ("fast", "default", "high", "highest")


def precision_name(p) -> str:
    """One of `LEVELS` for what JAX calls a precision (a pair: the stricter of the two)."""
    if isinstance(p, tuple):
        return max(map(precision_name, p), key=LEVELS.index)
    p = p.lower() if isinstance(p, str) else p
    if p in LEVELS:
        return p
    if p not in PRECISIONS:
        raise KernelValueError(f"unknown precision {p!r}: expected {', '.join(LEVELS)}", user_place())
    return PRECISIONS[p]


def _tile(x, what: str):
    if isinstance(x, Ref):
        raise KernelTypeError(f"{what} is the Ref {x.name}; load it first: {x.name}[...]", user_place())
    return tile_of(x, what)


def dot(a, b, acc=None, *, precision=None) -> jax.Array:
    """The product of two tiles, added to an accumulator: `acc + a @ b`.

    Args:
      a: tile [..., m, k].
      b: tile [..., k, n]; leading axes broadcast against those of `a`.
      acc: tile [..., m, n] of the accumulation dtype, or None for zeros.
      precision: None or "default"; "high" or "highest", for targets that have a choice for float32: on CPUs with tile
        registers of bfloat16 "high" takes three products of such numbers, two for each float32 (errors of 2^-17).
        "fast" takes the fastest units: of a GPU one tf32 product (errors of 2^-11) for float32, and for 8-bit floats
        the sums of NVIDIA's tensor cores themselves (about 14 bits below the largest term; else every 128 terms go to
        float32); of a CPU with tile registers of bytes three products of these, where `a` is `(256 h + l) s` with bytes
        h and l, and `b` such, too, or codes of weights in panels (errors of 1e-4 of the product's norm).
    Returns:
      A tile [..., m, n]: float32 for floats (float64 if an operand is), int32 for ints (int64 if an operand is),
      complex64 for complex numbers.
    """
    a, b = _tile(a, "a"), _tile(b, "b")
    if a.ndim < 2 or b.ndim < 2:
        raise KernelTypeError(f"jt.dot takes tiles of rank 2 or more, got shapes {a.shape} and {b.shape}", user_place())
    kinds = {next((name for name, kind in _KINDS.items() if jnp.issubdtype(x.dtype, kind)), "?") for x in (a, b)}
    if "?" in kinds or len(kinds) > 1:
        raise KernelTypeError(
            f"jt.dot takes two tiles of floats, of ints or of complex numbers, got {a.dtype} and {b.dtype}; convert "
            "one: b.astype(a.dtype)",
            user_place(),
        )
    if a.shape[-1] != b.shape[-2]:
        raise KernelTypeError(
            f"jt.dot cannot contract {a.shape} with {b.shape}: {a.shape[-1]} != {b.shape[-2]}", user_place()
        )
    try:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise KernelTypeError(f"the leading axes of {a.shape} and {b.shape} do not match", user_place()) from None
    a, b = jnp.broadcast_to(a, (*batch, *a.shape[-2:])), jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
    shape, dtype = (*batch, a.shape[-2], b.shape[-1]), sum_dtype(a, b)
    return dot_p.bind(a, b, *_accumulator(acc, shape, dtype), precision=precision_name(precision))


def _accumulator(acc, shape, dtype: Any) -> list:
    if acc is None:
        return []
    dtype = np.dtype(dtype)
    acc = _tile(acc, "acc")
    if acc.dtype != dtype and acc.weak_type:
        acc = lax.convert_element_type(acc, dtype)
    if acc.shape == () and shape:
        acc = lax.broadcast(acc, shape)
    if acc.shape != tuple(shape) or acc.dtype != dtype:
        raise KernelTypeError(
            f"the accumulator of this dot is {dtype}{list(shape)}, got {acc.dtype}{list(acc.shape)}; start it with "
            f"jt.zeros({tuple(shape)}, jnp.{dtype})",
            user_place(),
        )
    return [acc]


def dot_scaled(a, sa, b, sb, acc=None) -> jax.Array:
    """Block-scaled product: each element counts as its value times its block's scale, accumulated in float32.

    Args:
      a: tile [m, k]; b: tile [k, n]; of any float or int dtype.
      sa: scales [m, k / block] or None; sb: scales [k / block, n] or None; of a float dtype (float8_e8m0fnu too).
      acc: float32 tile [m, n] or None.
    Returns:
      float32 tile [m, n].
    """
    a, b = _tile(a, "a"), _tile(b, "b")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise KernelTypeError(f"jt.dot_scaled takes [m, k] and [k, n], got {a.shape} and {b.shape}", user_place())
    (m, k), n = a.shape, b.shape[1]
    args = [a]
    if sa is not None:
        args.append(_scales(sa, "sa", lambda s: s[0] == m and s[1] and k % s[1] == 0, f"[{m}, {k} / block]"))
    args.append(b)
    if sb is not None:
        args.append(_scales(sb, "sb", lambda s: s[1] == n and s[0] and k % s[0] == 0, f"[{k} / block, {n}]"))
    args += _accumulator(acc, (m, n), "float32")
    return dot_scaled_p.bind(*args, has=(sa is not None, sb is not None, acc is not None))


def _scales(s, name: str, fits, want: str):
    s = _tile(s, name)
    if s.ndim != 2 or not fits(s.shape) or not jnp.issubdtype(s.dtype, np.floating):
        raise KernelTypeError(f"the scales {name} are floats {want}, got {s.dtype}{list(s.shape)}", user_place())
    return s


def _combiner(fn, xs, treedef, what: str):
    """`fn` traced on scalars: `(jaxpr with its consts as leading inputs, consts)`."""
    scalars = [jax.ShapeDtypeStruct((), x.dtype) for x in xs]
    place = user_place()

    def flat(*args):
        n = len(args) // 2
        out = fn(treedef.unflatten(args[:n]), treedef.unflatten(args[n:]))
        leaves, got = jax.tree.flatten(out)
        if got != treedef:
            raise KernelTypeError(f"the function of {what} gives {got}, but its operands are {treedef}", place)
        out = [jnp.asarray(v) for v in leaves]
        out = [lax.convert_element_type(v, s.dtype) if v.weak_type else v for v, s in zip(out, scalars, strict=True)]
        for v, s in zip(out, scalars, strict=True):
            if v.shape or v.dtype != s.dtype:
                raise KernelTypeError(f"the function of {what} maps scalars to a {s.dtype} scalar, got {v.aval}", place)
        return out

    closed = jax.make_jaxpr(flat)(*scalars, *scalars)
    consts = [jnp.asarray(c) for c in closed.consts]
    if any(c.ndim for c in consts):
        raise KernelTypeError(f"the function of {what} works on scalars and cannot use a tile from outside", place)
    return partial_eval.convert_constvars_jaxpr(closed.jaxpr), consts


def reduce(x, axis, fn, init):
    """Reduce a tile, or a pytree of tiles of one shape, by an associative function of scalars.

    Args:
      x: tile or pytree of tiles.
      axis: int, tuple of ints, or None for all axes.
      fn: `(acc, x) -> acc` on scalars (pytrees of scalars like `x`).
      init: a number (a pytree of numbers) that does not change a reduction, or a start for it.
    Returns:
      `x` without the axes.
    """
    xs, treedef = jax.tree.flatten(x)
    xs = _tiles(xs, "jt.reduce")
    inits = treedef.flatten_up_to(init)
    inits = [_scalar(i, v.dtype) for i, v in zip(inits, xs, strict=True)]
    axes = range(xs[0].ndim) if axis is None else axis if isinstance(axis, tuple | list) else (axis,)
    axes = tuple(sorted({_norm_axis(a, xs[0].ndim, "jt.reduce") for a in axes}))
    jaxpr, consts = _combiner(fn, xs, treedef, "jt.reduce")
    return treedef.unflatten(reduce_p.bind(*consts, *xs, *inits, jaxpr=jaxpr, consts=len(consts), axes=axes))


def associative_scan(fn, x, axis: int = 0, reverse: bool = False):
    """Inclusive scan along an axis by a function of yours: element k becomes `fn(... fn(x0, x1) ..., xk)`.

    Args:
      fn: an associative function of two scalars (or pytrees of scalars like `x`).
      x: a tile, or a pytree of tiles of one shape.
      axis: the axis to go along.
      reverse: begin at the end of the axis.

    Returns:
      A tile, or a pytree of tiles, like `x`.
    """
    xs, treedef = jax.tree.flatten(x)
    xs = _tiles(xs, "jt.associative_scan")
    axis = _norm_axis(axis, xs[0].ndim, "jt.associative_scan")
    jaxpr, consts = _combiner(fn, xs, treedef, "jt.associative_scan")
    out = scan_p.bind(*consts, *xs, jaxpr=jaxpr, consts=len(consts), axis=axis, reverse=bool(reverse))
    return treedef.unflatten(out)


def _tiles(xs, what: str) -> list:
    xs = [_tile(x, what) for x in xs]
    if not xs or any(x.shape != xs[0].shape for x in xs):
        raise KernelTypeError(f"{what} takes tiles of one shape, got {[x.shape for x in xs]}", user_place())
    return xs


# The types of Python numbers that a start may have, by whether its dtype is complex.
_NUMBERS = {False: bool | int | float, True: bool | int | float | complex}


def _scalar(v, dtype):
    v = jnp.asarray(v, dtype) if isinstance(v, _NUMBERS[is_complex(dtype)]) else jnp.asarray(v)
    if v.ndim or v.dtype != dtype:
        raise KernelTypeError(
            f"the start of this reduction is a {dtype} scalar, got {v.dtype}{list(v.shape)}", user_place()
        )
    return v


def _norm_axis(axis, rank: int, what: str) -> int:
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise KernelValueError(f"{what}: axis {axis} is not an axis of a tile of rank {rank}", user_place())
    return axis % rank
