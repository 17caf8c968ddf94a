"""Rows in the order of the groups that an index names: what stands in front of the products of a mixture of experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelValueError
from jtile.ops import dispatch
from jtile.ops._shapes import check_float, check_int, check_rank, fit, machine
from jtile.ops.dispatch import Implementation, Op, first_unmet
from jtile.ops.row_groups import as_int32, within

MOST, MOST_ON_CPUS = 4096, 512  # copies of rows, at most, whose places are found by comparing each with each
_BLOCK = 512  # copies that a program compares at a time
_COLUMNS = 2048  # numbers of a row that a program copies at a time


def route(
    x: jax.Array, index: jax.Array, groups: int, first: jax.Array | int | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Copies of the rows of x, one for each group that the index names for a row, sorted by group.

    Copies of one group stand in the order of their rows, so that the result is the same in every run. Those whose index
    names none of the groups come last. Differentiable in x.

    Args:
      x: float [tokens, n].
      index: int [tokens, k], the groups of each row.
      groups: how many groups there are.
      first: the index of the first group, an int32 scalar; None: 0.

    Returns:
      The copies [tokens k, n] of x's dtype; int32 [tokens, k], where each copy stands, so that `y[places]` brings what
      is computed from the copies back into the order of the rows; int32 [groups], how many copies each group has, as
      `grouped_matmul` takes it.

    Raises:
      KernelTypeError: x is no float array, or the index no integer one. KernelValueError: shapes that do not fit, or no
        group.
    """
    x, index = jnp.asarray(x), jnp.asarray(index)
    check_float("route", x=x)
    check_int("route", index=index)
    check_rank("route", "x", x, 2, "[tokens, n]")
    check_rank("route", "index", index, 2, "[tokens, k]")
    if x.shape[0] != index.shape[0] or groups < 1:
        raise KernelValueError(
            f"route: x {x.shape} and index {index.shape} with {groups} groups do not fit: an index is "
            f"[{x.shape[0]}, k], and there is at least one group"
        )
    if first is not None and dispatch.small_tiles() and index.dtype == jnp.int32:  # the kernel takes it off
        begin = jnp.asarray(first, jnp.int32).reshape(1)
    else:
        index, begin = index if first is None else index - jnp.asarray(first, index.dtype), None
    index = as_int32(index, groups) if begin is None else index
    if index.size == 0 or x.shape[1] == 0:
        return _sorted(x, index, begin, groups=groups)
    return _route(x, index, begin, groups=groups)


def route_reference(x, index, groups: int, first=0):
    """`route` in jnp."""
    index = jnp.asarray(index)
    return _sorted(jnp.asarray(x), as_int32(index - jnp.asarray(first, index.dtype), groups), None, groups=groups)


def _sorted(x, index, first, *, groups: int):
    index = index if first is None else index - first
    chosen = within(index.reshape(index.size), groups)
    order = jnp.argsort(chosen, stable=True).astype(jnp.int32)  # the copy at r is one of row order[r] // k
    places = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    sizes = jnp.zeros((groups,), jnp.int32).at[chosen].add(1, mode="drop")
    return x[order // max(index.shape[1], 1)], places.reshape(index.shape), sizes


def _types(x, index, chosen, first, *, groups: int, **_):
    counts = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    return jt.like(x, shape=(chosen.shape[0], x.shape[1])), counts(*index.shape), counts(groups)


def _routed(x, index, chosen, first, y, places, sizes, *, groups: int, bc: int, bn: int):
    """y [tokens k, n] of x [tokens, n], index int32 [tokens, k] and `chosen`, the same as [tokens k]; first: [1], the
    index of the first group, or None; see `route`.

    A program has a row, and compares its k groups with all others, `bc` at a time; and it counts a few groups."""
    # place_c = |{d : g_d < g_c or (g_d = g_c and d < c)}|     size_g = |{d : g_d = g}|
    t, k, n = jt.program_id(0), index.shape[1], chosen.shape[0]
    each = jt.next_power_of_2(jt.cdiv(groups, x.shape[0]))
    begin = 0 if first is None else first[0]
    mine, number = within(index[t, :] - begin, groups), t * k + jt.arange(k)
    group = t * each + jt.arange(each)
    others = chosen.tiles(bc)
    place, size = jnp.zeros((k,), jnp.int32), jnp.zeros((each,), jnp.int32)
    for c in jt.range(jt.cdiv(n, bc)):
        g = within(others[c] - begin, groups)[None, :]
        inside = (c * bc + jt.arange(bc))[None, :] < n
        ahead = (c * bc + jt.arange(bc))[None, :] < number[:, None]
        place = place + (inside & (g < mine[:, None]) | ((g == mine[:, None]) & ahead)).sum(1, dtype=jnp.int32)
        size = size + (inside & (g == group[:, None])).sum(1, dtype=jnp.int32)
    places[t, :] = place
    if t * each < groups:
        sizes.tiles(each)[t] = size
    X, Y = x.tiles(None, bn), y.tiles(None, bn)
    at = [jnp.where(jt.arange(k) == j, place, 0).sum(dtype=jnp.int32) for j in range(k)]
    for p in range(X.shape[1]):
        row = X[t, p]
        for r in at:
            Y[r, p] = row


def _kernel(specs: str) -> jt.Kernel:
    make = jt.kernel(out_type=_types, grid=lambda x, *_, **__: x.shape[0], sharding=specs, name="routed_rows")
    return make(_routed)


routed_rows, routed_rows_from = _kernel("_ n, _ _, _ -> _ n, _ _, _"), _kernel("_ n, _ _, _, _ -> _ n, _ _, _")


def _forward(x, index, chosen, first, **meta):
    out = (routed_rows if first is None else routed_rows_from)(x, index, chosen, first, **meta)
    return out, (out[1], x)


def _backward(residuals, cts, **_):
    places, x = residuals
    return cts[0][places].astype(jnp.float32).sum(1).astype(x.dtype), None, None, None


routed_rows.defvjp(_forward, _backward)
routed_rows_from.defvjp(_forward, _backward)


def _by_programs(x, index, first, *, groups: int):
    n = index.size
    sizes = dict(bc=min(jt.next_power_of_2(n), _BLOCK), bn=fit(x.shape[1], _COLUMNS))
    kernel = routed_rows if first is None else routed_rows_from
    return kernel(x, index, index.reshape(n), first, groups=groups, **sizes)


def _not_by_programs(x, index, first, **_) -> str | None:
    known, most = all(isinstance(n, int) for n in (*x.shape, *index.shape)), MOST_ON_CPUS if machine().whole else MOST
    return first_unmet(
        (known, "sizes are not known"),
        (known and index.size <= most, f"{index.size} copies are more than {most}"),
        (not dispatch.vector_cores(), "no kernel was tried on NPUs"),
    )


# From x [tokens, n], index int32 [tokens, k] and the first group's, int32 [1] or None: what `route` returns.
_route = Op(
    "route",
    Implementation("programs of rows", _by_programs, _not_by_programs),
    Implementation("XLA's sort", _sorted),
)
