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


def route(x: jax.Array, index: jax.Array, groups: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Copies of the rows of x, one for each group that the index names for a row, sorted by group.

    Copies of one group stand in the order of their rows, so that the result is the same in every run. Those whose index
    is outside of [0, groups) come last. Differentiable in x.

    Args:
      x: float [tokens, n].
      index: int [tokens, k], the groups of each row.
      groups: how many groups there are.

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
    index = as_int32(index, groups)
    if index.size == 0 or x.shape[1] == 0:
        return _sorted(x, index, groups=groups)
    return _route(x, index, groups=groups)


def route_reference(x, index, groups: int):
    """`route` in jnp."""
    return _sorted(jnp.asarray(x), as_int32(jnp.asarray(index), groups), groups=groups)


def _sorted(x, index, *, groups: int):
    chosen = within(index.reshape(index.size), groups)
    order = jnp.argsort(chosen, stable=True).astype(jnp.int32)  # the copy at r is one of row order[r] // k
    places = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    sizes = jnp.zeros((groups,), jnp.int32).at[chosen].add(1, mode="drop")
    return x[order // max(index.shape[1], 1)], places.reshape(index.shape), sizes


def _types(x, index, chosen, *, groups: int, **_):
    counts = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    return jt.like(x, shape=(chosen.shape[0], x.shape[1])), counts(*index.shape), counts(groups)


@jt.kernel(out_type=_types, grid=lambda x, *_, **__: x.shape[0], sharding="_ n, _ _, _ -> _ n, _ _, _")
def routed_rows(x, index, chosen, y, places, sizes, *, groups: int, bc: int, bn: int):
    """y [tokens k, n] of x [tokens, n], index int32 [tokens, k] and `chosen`, the same as [tokens k]; see `route`.

    A program has a row, and compares its k groups with all others, `bc` at a time; and it counts a few groups."""
    # place_c = |{d : g_d < g_c or (g_d = g_c and d < c)}|     size_g = |{d : g_d = g}|
    t, k, n = jt.program_id(0), index.shape[1], chosen.shape[0]
    each = jt.next_power_of_2(jt.cdiv(groups, x.shape[0]))
    mine, number = within(index[t, :], groups), t * k + jt.arange(k)
    group = t * each + jt.arange(each)
    others = chosen.tiles(bc)
    place, size = jnp.zeros((k,), jnp.int32), jnp.zeros((each,), jnp.int32)
    for c in jt.range(jt.cdiv(n, bc)):
        g = within(others[c], groups)[None, :]
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


def _forward(x, index, chosen, **meta):
    out = routed_rows(x, index, chosen, **meta)
    return out, (out[1], x)


def _backward(residuals, cts, **_):
    places, x = residuals
    return cts[0][places].astype(jnp.float32).sum(1).astype(x.dtype), None, None


routed_rows.defvjp(_forward, _backward)


def _by_programs(x, index, *, groups: int):
    n = index.size
    sizes = dict(bc=min(jt.next_power_of_2(n), _BLOCK), bn=fit(x.shape[1], _COLUMNS))
    return routed_rows(x, index, index.reshape(n), groups=groups, **sizes)


def _not_by_programs(x, index, **_) -> str | None:
    known, most = all(isinstance(n, int) for n in (*x.shape, *index.shape)), MOST_ON_CPUS if machine().whole else MOST
    return first_unmet(
        (known, "sizes are not known"),
        (known and index.size <= most, f"{index.size} copies are more than {most}"),
        (not dispatch.vector_cores(), "no kernel was tried on NPUs"),
    )


# From x [tokens, n] and index int32 [tokens, k]: what `route` returns.
_route = Op(
    "route",
    Implementation("programs of rows", _by_programs, _not_by_programs),
    Implementation("XLA's sort", _sorted),
)
