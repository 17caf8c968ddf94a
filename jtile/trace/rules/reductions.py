"""Reductions, scans along an axis, sorts."""

from __future__ import annotations

import functools

from jtile import ir
from jtile.language._recurrences import affine_scan
from jtile.trace.lower import Lowering, rule
from jtile.trace.rules.shapes import slice_

REDUCTIONS = {
    "reduce_sum": "sum",
    "reduce_prod": "prod",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
}
CUMULATIVE = {"cumsum": "sum", "cumprod": "prod", "cummax": "max", "cummin": "min", "cumlogsumexp": "logsumexp"}


def _reduction(fn: str):
    def run(c: Lowering, x, *, axes, **_):
        if not axes:
            return x
        on_bool = {"max": "or", "min": "and"}.get(fn, fn) if x.type.dtype == "bool" else fn
        return c.add(ir.Reduce(x, on_bool, tuple(sorted(axes))))

    return run


for _jax, _ours in REDUCTIONS.items():
    rule(_jax)(_reduction(_ours))


def _cumulative(fn: str):
    return lambda c, x, *, axis, reverse, **_: c.add(ir.Cumulative(x, fn, axis, bool(reverse)))


for _jax, _ours in CUMULATIVE.items():
    rule(_jax)(_cumulative(_ours))


@rule("argmax", "argmin")
def _(c: Lowering, x, *, axes, index_dtype, **_):
    x = c.b.cast(x, "int32") if x.type.dtype == "bool" else x
    return c.add(ir.ArgReduce(x, c.eqn.primitive.name[3:], axes[0], c.dtype(index_dtype)))


def combiner(c: Lowering, run, dtypes) -> ir.Block:
    """The region of a user reduction: `run` maps the `(acc..., x...)` scalars to the new `acc`."""
    types = [ir.TileType((), d) for d in dtypes]
    names = tuple([f"a{k}" for k in range(len(types))] + [f"b{k}" for k in range(len(types))])
    with c.b.region([*types, *types], names) as block:
        block.yields = tuple(run(list(block.params)))
    return block


@rule("reduce")
def _(c: Lowering, *args, jaxpr, dimensions, **_):
    """A `lax.reduce` with a function that is none of the usual ones."""
    n = len(args) // 2
    xs, inits = args[:n], args[n:]
    body = combiner(c, lambda ps: c.closed(jaxpr, ps), [x.type.dtype for x in xs])
    return c.b.add(ir.UserReduce(tuple(xs), tuple(inits), tuple(dimensions), body)).results


@rule("jtile_reduce")
def _(c: Lowering, *args, jaxpr, consts, axes):
    n = (len(args) - consts) // 2
    outer, xs, inits = args[:consts], args[consts : consts + n], args[consts + n :]
    body = combiner(c, lambda ps: c.closed(jaxpr, [*outer, *ps]), [x.type.dtype for x in xs])
    return c.b.add(ir.UserReduce(tuple(xs), tuple(inits), axes, body)).results


@rule("jtile_associative_scan")
def _(c: Lowering, *args, jaxpr, consts, axis, reverse):
    outer, xs = args[:consts], args[consts:]
    body = combiner(c, lambda ps: c.closed(jaxpr, [*outer, *ps]), [x.type.dtype for x in xs])
    return c.b.add(ir.UserScan(tuple(xs), axis, reverse, body)).results


@rule("jtile_linear_scan")
def _(c: Lowering, *args, n, reverse):
    return c.call(functools.partial(affine_scan, n=n, reverse=reverse), *args)


@rule("sort")
def _(c: Lowering, *xs, dimension, num_keys, **_):
    # The sort is always stable: an order that the caller left open is then the same on every target.
    return c.b.add(ir.Sort(tuple(xs), dimension, num_keys)).results


@rule("top_k")
def _(c: Lowering, x, *, k, axis=-1, **_):
    axis %= x.type.rank
    index = c.add(ir.Iota(x.type.shape, axis, c.outs[1].dtype))
    values, index = c.b.add(ir.Sort((x, index), axis, 1, descending=True)).results
    stops = list(x.type.shape)
    stops[axis] = k
    return [slice_(c, v, [0] * x.type.rank, stops) for v in (values, index)]


@rule("approx_top_k")
def _(c: Lowering, *_, **__):
    raise c.unsupported("an approximate top-k is a TPU operation; use jax.lax.top_k")
