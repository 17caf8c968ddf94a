"""What automatic partitioning needs of anything that it can cut: a rule with a name (a factor) for each dimension, how
the axes of a mesh are given to factors, and the call that XLA asks about its shards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jtile._compat import held_weakly

Axes = tuple[str, ...]  # the names of some axes of a mesh


@dataclasses.dataclass(frozen=True)
class Rule:
    """Along what a computation can be cut.

    Attributes:
      inputs, outputs: per array, the factor of each dimension, or None: it is gathered.
      partial: per output, the factors over whose shards it must be summed.
    """

    inputs: tuple[tuple[str | None, ...], ...]
    outputs: tuple[tuple[str | None, ...], ...]
    partial: tuple[frozenset[str], ...]

    @property
    def arrays(self) -> tuple[tuple[str | None, ...], ...]:
        return (*self.inputs, *self.outputs)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(n for dims in self.arrays for n in dims if n))

    def __str__(self) -> str:
        """The rule as text, `a b, b c -> a c; sum over b`; `_` is a dimension that is gathered, `()` a scalar."""
        spell = lambda arrays: ", ".join(" ".join(n or "_" for n in dims) or "()" for dims in arrays)
        sums = sorted(frozenset().union(*self.partial))
        end = f"; sum over {', '.join(sums)}" if sums else ""
        return f"{spell(self.inputs)} -> {spell(self.outputs)}{end}".strip()


CanCut = Callable[[str, int], bool]  # whether a factor can be cut into so many parts


# -- from the shardings of arrays to those of factors -----------------------------------------------------------------


def assign(rule: Rule, can_cut: CanCut, mesh: Mapping[str, int], specs: Sequence[Any]) -> dict[str, Axes]:
    """The mesh axes that each factor is cut along.

    Args:
      mesh: sizes of the mesh axes.
      specs: a `PartitionSpec` per array, outputs first; the first array that says something about a factor decides.
    """
    out: dict[str, Axes] = {}
    taken: set[str] = set()
    wanted = {n for dims in rule.outputs for n in dims}.union(*rule.partial)
    entries = [
        (name, (entry,) if isinstance(entry, str) else tuple(entry or ()))
        for dims, spec in zip((*rule.outputs, *rule.inputs), specs)
        for name, entry in zip(dims, tuple(spec))
        if name
    ]
    for name, axes in sorted(entries, key=lambda e: e[0] not in wanted):  # factors on which no result depends come last
        if name in out:
            continue
        axes = tuple(a for a in axes if a not in taken and mesh[a] > 1)
        while axes and not can_cut(name, math.prod(mesh[a] for a in axes)):
            axes = axes[:-1]
        if axes:
            out[name] = axes
            taken.update(axes)
    return out


def spec_of(dims: Sequence[str | None], cut: Mapping[str, Axes]) -> PartitionSpec:
    """The sharding of an array with these factors."""
    axes = [cut.get(name or "", ()) for name in dims]
    return PartitionSpec(*[a[0] if len(a) == 1 else a or None for a in axes])


def result_specs(rule: Rule, can_cut: CanCut, shardings: Sequence[NamedSharding]) -> list[PartitionSpec]:
    """How the results are sharded, given how the operands are (in their types: on axes of an explicit mesh)."""
    specs = [_entries(s) for s in shardings]
    if not sharded(shardings):
        return [PartitionSpec(*[None] * len(dims)) for dims in rule.outputs]
    mesh = next(s.mesh for s in shardings if any(s.spec))
    cut = assign(rule, can_cut, dict(mesh.shape), [*[()] * len(rule.outputs), *specs])
    return [spec_of(dims, cut) for dims in rule.outputs]


def sharded(shardings: Sequence[NamedSharding]) -> bool:
    """Whether the type of any operand says that it lies on several devices of an explicit mesh."""
    return any(entry for s in shardings for entry in _entries(s))


def _entries(sharding: Any) -> PartitionSpec | tuple:
    return sharding.spec if isinstance(sharding, NamedSharding) else ()


def shardy_rule(rule: Rule) -> SdyShardingRule:
    """The rule as Shardy takes it: dimensions that cannot be cut are factors that need replication."""
    fixed = lambda k, d: f"fixed{k}_{d}"
    arrays = [ArrayMapping(*[n or fixed(k, d) for d, n in enumerate(dims)]) for k, dims in enumerate(rule.arrays)]
    gathered = tuple(fixed(k, d) for k, dims in enumerate(rule.arrays) for d, n in enumerate(dims) if n is None)
    kept = {n for dims in rule.outputs for n in dims}
    summed = frozenset().union(*rule.partial) - kept
    n_in = len(rule.inputs)
    return SdyShardingRule(
        tuple(arrays[:n_in]),
        tuple(arrays[n_in:]),
        reduction_factors=tuple(n for n in rule.names if n in summed),
        need_replication_factors=gathered,
    )


# -- the call that XLA cuts -------------------------------------------------------------------------------------------


@held_weakly
@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """What one shard runs, `(*arrays) -> list of arrays`, and the types of its results."""

    run: Callable[..., Sequence[Any]]
    types: tuple[jax.ShapeDtypeStruct, ...]


class Cutting:
    """A function of arrays that XLA's partitioner cuts.

    Args:
      whole: what it computes, traced for the types of its results.
      shard: `(the mesh axes of each factor, its parts) -> Shard`.
    """

    def __init__(self, rule: Rule, can_cut: CanCut, whole: Callable, shard: Callable[[Any, Any], Shard]):
        self.rule, self.can_cut, self.shard = rule, can_cut, shard
        self._call = custom_partitioning(lambda *xs: whole(*xs))
        self._call.def_partition(self._partition, self._infer, sharding_rule=shardy_rule(rule))

    def __call__(self, *operands: Any) -> Any:
        return self._call(*operands)

    def _partition(self, mesh: Any, args: Sequence[Any], results: Sequence[Any]):
        """What one shard runs, and the shardings that it wants: `custom_partitioning` moves the arrays there."""
        cut = assign(self.rule, self.can_cut, dict(mesh.shape), [*map(_spec, results), *map(_spec, args)])
        shardings = lambda arrays: tuple(NamedSharding(mesh, spec_of(d, cut)) for d in arrays)
        parts = {name: math.prod(mesh.shape[a] for a in axes) for name, axes in cut.items()}
        shard = self.shard(cut, parts)
        run = lambda *xs: jtile_shard_p.bind(*xs, shard=shard)
        return mesh, run, [*shardings(self.rule.outputs)], shardings(self.rule.inputs)

    def _infer(self, mesh: Any, args: Sequence[Any], results: Sequence[Any]) -> list[NamedSharding]:
        """Shardings of the results, for XLA's older propagation, which reads no rule."""
        specs = result_specs(self.rule, self.can_cut, [x.sharding for x in args])
        return [NamedSharding(mesh, s) for s in specs]


def _spec(x: Any) -> Any:
    sharding = x.sharding
    return sharding.spec if isinstance(sharding, NamedSharding) else ()


def lower(ctx: Any, call: Callable, operands: Sequence[Any], mark: str, *, effect: bool = False) -> Sequence[Any]:
    """Lower a call of a `Cutting`.

    Args:
      mark: a hash of what it computes: JAX may be told to leave the callback out of the key of its compilation cache.
    """
    results = mlir.lower_fun(call, multiple_results=True)(ctx, *operands)
    owner = results[0].owner
    if effect:
        owner.attributes["has_side_effect"] = mlir.ir.BoolAttr.get(True)
    name = mlir.ir.StringAttr.get(mark)
    owner.attributes["mhlo.frontend_attributes"] = mlir.ir.DictAttr.get({"jtile_program": name})
    return results


# What one shard runs, as a primitive: XLA asks for it while the mesh of the user's program is still set, and with
# explicit axes JAX would then annotate the shard's own values, and the sum inside of a psum, with shardings.
jtile_shard_p = jexc.Primitive("jtile_shard")
jtile_shard_p.multiple_results = True


@jtile_shard_p.def_abstract_eval
def _(*avals: Any, shard: Shard) -> list[ShapedArray]:
    return [ShapedArray(t.shape, t.dtype) for t in shard.types]


def _lower_shard(ctx: mlir.LoweringRuleContext, *operands: Any, shard: Shard) -> Sequence[Any]:
    return lower_alone(ctx, shard.run, operands)


mlir.register_lowering(jtile_shard_p, _lower_shard)


def lower_alone(ctx: mlir.LoweringRuleContext, run: Callable, operands: Sequence[Any]) -> Sequence[Any]:
    """Lower a function as it is on one device, whatever the mesh around it."""
    plain = lambda avals: [ShapedArray(a.shape, a.dtype) for a in avals]
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        inner = ctx.replace(avals_in=plain(ctx.avals_in), avals_out=plain(ctx.avals_out))
        return mlir.lower_fun(run, multiple_results=True)(inner, *operands)
