"""`jt.partitioned`: a function of arrays that automatic partitioning cuts by a rule given for the whole of it."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir

from jtile._compat import is_partitioned, need_devices
from jtile._errors import KernelTypeError, KernelValueError
from jtile._memo import JITTED, memo
from jtile.calls.signature import place_of
from jtile.primitive import shards
from jtile.primitive.jtile_call import joint_varying, typed
from jtile.primitive.sharding import Names, check_ranks, parse
from jtile.primitive.shards import Axes, Rule


def partitioned(fn: Callable[..., Any], rule: str) -> Callable[..., Any]:
    """`fn`, which under automatic partitioning runs once for each shard of its arrays.

    Under `jit` with arrays that are sharded over several devices, XLA cuts kernels one by one. Where the programs of a
    kernel share out all the work, or several kernels have to be cut together, `fn` says for all of them along what: the
    arrays are moved to fit the rule, and `fn` runs on what a device holds. On one device, inside of `shard_map` and for
    `jax.export` it is `fn` itself. Under `vmap` the new axis can be cut, too; derivatives are those of `fn`, cut kernel
    by kernel.

    Args:
      fn: a function of arrays, or of pytrees of them; gives an array or a pytree of them. Its kernels are chosen anew
        for the shapes of a shard. One function object has one meaning, since results of tracing it are kept.
      rule: names of the dimensions of all arrays, `"b _ h, b -> b h"`: arrays are separated by commas, dimensions by
        spaces; `_` is never cut. `fn` of the slices along a name must be the slice of `fn`: nothing is summed over
        shards, so that a name of an input stands in an output.
    Returns:
      A function of the same arguments and results.
    Raises:
      KernelTypeError: `fn` is no function, or `rule` no text. KernelValueError: text that is no rule; at a call, one
        that does not fit the arrays, or `fn` prints or asserts.
    """
    if not callable(fn):
        raise KernelTypeError(f"jt.partitioned takes a function and a rule, got {fn!r}")
    name, where = getattr(fn, "__name__", "fn"), place_of(fn)
    pattern = parse(rule, name, where)
    kept = {n for dims in pattern.outputs for n in dims}
    lost = [n for dims in pattern.inputs for n in dims if n and n not in kept]
    if lost:
        raise KernelValueError(
            f"sharding={rule!r} of {name}: axis {lost[0]!r} is an axis of no output, and shards are not summed here; "
            "write _ for it",
            where,
        )

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        leaves = [jnp.asarray(x) for x in leaves]
        flat = _flat(fn, tree)
        jaxpr, out = _traced(flat.whole, leaves)
        if jaxpr.effects:
            raise KernelValueError(
                f"{name} prints, asserts or has other effects ({', '.join(map(str, jaxpr.effects))}), and "
                "jt.partitioned takes functions of their arrays alone: call those kernels outside of it",
                where,
            )
        outs = jaxpr.out_avals
        names = [f"argument {k}" for k in range(len(leaves))] + [f"result {k}" for k in range(len(outs))]
        check_ranks(pattern, name, [*leaves, *outs], len(leaves), names, where)
        cut = Rule(pattern.inputs, pattern.outputs, (frozenset(),) * len(outs))
        results = partitioned_p.bind(*joint_varying(leaves), flat=flat, rule=cut, jaxpr=jaxpr)
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return call


class _Flat:
    """`fn` over the leaves of its arguments: `whole` gives its result, and a call gives the leaves of the result."""

    def __init__(self, fn: Callable[..., Any], tree: Any):
        self.whole = lambda *leaves: fn(*jax.tree.unflatten(tree, leaves))

    def __call__(self, *leaves: Any) -> list[Any]:
        return jax.tree.leaves(self.whole(*leaves))


@memo(entries=JITTED)
def _flat(fn: Callable[..., Any], tree: Any) -> _Flat:
    return _Flat(fn, tree)


def _traced(f: Callable[..., Any], leaves: Sequence[Any]) -> tuple[Any, Any]:
    """The closed jaxpr of `f` for leaves of these shapes, as on one device, and the tree of types that `f` gives."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return jax.make_jaxpr(f, return_shape=True)(*[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])


# -- the primitive: its parameters are a `_Flat`, the `jaxpr` of that, which tools look into, and the `rule` ---------

partitioned_p = jexc.Primitive("jtile_partitioned")
partitioned_p.multiple_results = True
need_devices(partitioned_p)


def _bind(flat: Any, rule: Rule, operands: Sequence[Any]) -> list[Any]:
    return partitioned_p.bind(*joint_varying(operands), flat=flat, rule=rule, jaxpr=_traced(flat, operands)[0])


@partitioned_p.def_abstract_eval
def _abstract_eval(*avals: Any, flat: Any, rule: Rule, jaxpr: Any) -> list[ShapedArray]:
    can_cut = _can_cut(rule, [*avals, *jaxpr.out_avals])
    return typed(avals, jaxpr.out_avals, shards.result_specs(rule, can_cut, [a.sharding for a in avals]))


def _can_cut(rule: Rule, arrays: Sequence[Any]) -> Callable[[str, int], bool]:
    sizes = [(d, n) for dims, x in zip(rule.arrays, arrays, strict=True) for d, n in zip(dims, x.shape, strict=True)]
    return lambda name, parts: all(n % parts == 0 for d, n in sizes if d == name)


@partitioned_p.def_impl
def _impl(*operands: Any, flat: Any, rule: Rule, jaxpr: Any) -> Sequence[Any]:
    return _jitted(flat, rule)(*operands)


@memo(entries=JITTED)
def _jitted(flat: Any, rule: Rule) -> Callable[..., Sequence[Any]]:
    return jax.jit(lambda *operands: _bind(flat, rule, operands))


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, flat: Any, rule: Rule, jaxpr: Any) -> Sequence[Any]:
    if not is_partitioned(ctx) or not rule.names:
        return shards.lower_alone(ctx, jexc.jaxpr_as_fun(jaxpr), operands)
    arrays = [*ctx.avals_in, *ctx.avals_out]

    def shard(_: Mapping[str, Axes], parts: Mapping[str, int]) -> shards.Shard:
        local = lambda dims, x: tuple(n // parts.get(d or "", 1) for d, n in zip(dims, x.shape, strict=True))
        types = [jax.ShapeDtypeStruct(local(d, x), x.dtype) for d, x in zip(rule.arrays, arrays, strict=True)]
        return shards.Shard(flat, tuple(types[len(rule.inputs) :]))

    whole = functools.partial(partitioned_p.bind, flat=flat, rule=rule, jaxpr=jaxpr)
    cutting = shards.Cutting(rule, _can_cut(rule, arrays), whole, shard)
    text = re.sub(r"0x[0-9a-f]+", "", str(jaxpr))  # addresses of functions say nothing to another process
    return shards.lower(ctx, cutting, operands, hashlib.sha256(f"{rule}\n{text}".encode()).hexdigest())


mlir.register_lowering(partitioned_p, _lower)


# -- transforms -------------------------------------------------------------------------------------------------------


def _batch(operands: Sequence[Any], dims: Sequence[int | None], *, flat: Any, rule: Rule, jaxpr: Any):
    """The partitioned function under one more vmap, whose axis gets a name in the rule, and stands first in results."""
    axes = tuple(dims)
    name = f"vmap{sum(n.startswith('vmap') for n in rule.names)}"
    insert = lambda names, d: names if d is None else (*names[:d], name, *names[d:])
    inputs: Names = tuple(insert(names, d) for names, d in zip(rule.inputs, axes, strict=True))
    wide = Rule(inputs, tuple(insert(names, 0) for names in rule.outputs), rule.partial)
    outs = _bind(_mapped(flat, axes), wide, operands)
    return outs, [0] * len(outs)


@memo(entries=JITTED)
def _mapped(flat: Any, axes: tuple[int | None, ...]) -> Callable[..., Sequence[Any]]:
    return jax.vmap(flat, in_axes=axes)


batching.primitive_batchers[partitioned_p] = _batch


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, flat: Any, rule: Rule, jaxpr: Any):
    given = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(flat, tuple(primals), tuple(given))


ad.primitive_jvps[partitioned_p] = _jvp
