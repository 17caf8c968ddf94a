"""The place of the largest number of each row."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelValueError
from jtile.ops import dispatch
from jtile.ops._shapes import as_rows, check_float, fit, machine
from jtile.ops.dispatch import WARPS, Implementation, Op, first_unmet

_LAST = 2**31 - 1  # the largest int32: the key of NaN, and a place behind all others
HOST = ("host",)  # the feature of processors that run programs as vectors
_VECTORS = 256  # numbers that a program holds at a time there: registers hold these, their keys and their places
TILE = 1024  # numbers that a program holds at a time on GPUs: each thread loads 16 bytes twice


def keys_of(x):
    """Integers, int32, in the order of the floats x: NaN is the largest, and both zeros are equal."""
    x = x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(x != x, jnp.int32(_LAST), jnp.where(bits < 0, bits ^ jnp.int32(_LAST), bits))


def first_of(keys, places):
    """(the largest of the keys, the first place that has it)."""
    top = keys.max()
    return top, jnp.where(keys == top, places, jnp.int32(_LAST)).min()


@jt.function
def first_in_part(x, i, p, parts: int, bn: int, none: int):
    """`first_of` the keys of part p of row i of x [rows, n], `bn` at a time; none: the place if no key is larger than
    the least."""
    X = x.tiles(None, bn, pad=-jnp.inf)
    each = jt.cdiv(X.shape[1], parts)
    best, at = jt.full((bn,), -(2**31), jnp.int32), jt.full((bn,), none, jnp.int32)
    for k in jt.range(p * each, jnp.minimum(p * each + each, X.shape[1])):
        keys = keys_of(X[i, k])
        more = keys > best
        best, at = jnp.where(more, keys, best), jnp.where(more, k * bn + jt.arange(bn), at)
    return first_of(best, at)


def _types(x, *, parts: int, **_):
    of = lambda *shape: jax.ShapeDtypeStruct((x.shape[0], *shape), jnp.int32)
    return of(), of(parts), of(parts)


@jt.kernel(out_type=_types, grid=lambda x, *, parts, **_: (x.shape[0], parts))
def argmax_rows(x, y, tops, places, *, parts: int, bn: int):
    """y int32 [rows] of x [rows, n]; tops, places [rows, parts]: what the programs of a row have found."""
    # y_i: the first j with x_ij = max_j x_ij
    i, p = jt.program_id(0), jt.program_id(1)
    top, place = first_in_part(x, i, p, parts, bn, _LAST)
    if parts == 1:
        y[i] = place
    else:
        tops[i, p], places[i, p] = top, place
        if jt.arrive(jt.counters("rows", y.shape[0]), i, parts):
            y[i] = first_of(tops[i, :], places[i, :])[1]


def parts_of(rows: int, n: int) -> int:
    """How many programs share a row: a power of two, so that there are enough of them for the machine."""
    tiles, wanted = jt.cdiv(n, TILE), jt.cdiv(machine().programs, rows)
    return 1 << max(min(tiles, wanted).bit_length() - 1, 0)


def _by_programs(x):
    n = x.shape[1]
    return argmax_rows(x, parts=parts_of(*x.shape), bn=fit(n, TILE))[0]


def _in_vectors(x):
    """The places by programs that each hold a few vectors: XLA writes and reads numbers as long as x, twice."""
    return argmax_rows(x, parts=parts_of(*x.shape), bn=fit(x.shape[1], _VECTORS))[0]


def _not_by_programs(x) -> str | None:
    return first_unmet(
        (all(isinstance(n, int) for n in x.shape), "sizes are not known"),
        (x.dtype.itemsize <= 4, f"keys of {x.dtype.name} are longer than 32 bits"),
        (not dispatch.vector_cores(), "programs have no counters to arrive at"),
    )


def _by_sums(x):
    """The places by two reductions, which XLA vectorises: the largest number, then the first place of it or of NaN."""
    top = x.max(-1, keepdims=True)
    columns = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where((x >= top) | (x != x), columns, jnp.int32(_LAST)).min(-1)


# The place of the largest number of each row of x [rows, n], int32 [rows].
_argmax = Op(
    "argmax",
    Implementation("programs that share rows", _by_programs, _not_by_programs, WARPS),
    Implementation("programs that share rows, in vectors", _in_vectors, _not_by_programs, HOST),
    Implementation("two reductions of XLA", _by_sums),
)


@functools.partial(jax.jit, inline=True)
def argmax(x: jax.Array) -> jax.Array:
    """`jnp.argmax(x, -1)` as int32: the place of the first of the largest numbers of each row, or of its first NaN.

    On GPUs and CPUs it is one kernel, in which several programs share a row where rows are few. Not differentiable: the
    result holds integers.

    Args:
      x: float array [..., n].
    Returns:
      int32 [...].
    Raises:
      KernelTypeError: no floats. KernelValueError: a row has no numbers.
    """
    check_float("argmax", x=x)
    if x.ndim < 1 or x.shape[-1] == 0:
        raise KernelValueError(f"argmax: x is [..., n] of at least one number, got shape {tuple(x.shape)}")
    if x.size == 0:
        return jnp.zeros(x.shape[:-1], jnp.int32)
    return _argmax(as_rows(jax.lax.stop_gradient(x))).reshape(x.shape[:-1])


def argmax_reference(x):
    """`argmax` in jnp."""
    return jnp.argmax(x, axis=-1).astype(jnp.int32)
