"""Automatic partitioning: a `Program` under `jit` on several devices runs as one smaller kernel on each of them.

What can be cut is a `Rule`: a name (a factor) for each dimension of each array, derived from the index maps of the Tile
IR. Shardy gets it with the call and decides who holds what; XLA then asks `partition` for the program of one shard.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jtile import ir
from jtile._compat import is_partitioned
from jtile._errors import KernelValueError
from jtile._memo import memo
from jtile.primitive import shards
from jtile.primitive.program import Program, fingerprint_of, lane_name
from jtile.primitive.sharding import Hand
from jtile.primitive.shards import Axes, Rule
from jtile.transforms.factors import Factors, factors
from jtile.transforms.localise import localise

# -- rules and the programs of shards ---------------------------------------------------------------------------------


@memo()
def _factors(program: Program) -> Factors | None:
    """The factors; None if the program must run whole (it prints, asserts, is at block level, or has sizes not known
    yet)."""
    if program.effect or program.block or ir.is_dynamic(program.kernel) or not program.programs:
        return None
    return factors(program.kernel)


@memo()
def rule_of(program: Program) -> Rule:
    """The sharding rule of a program."""
    if program.hand is not None and not program.effect and not ir.is_dynamic(program.kernel):
        return _hand_rule(program, program.hand)
    found = _factors(program)
    n_in, n_out = len(program.kernel.inputs), len(program.kernel.outputs)
    if found is None:
        dims = [(None,) * len(v.shape) for v in (*program.kernel.inputs, *program.kernel.outputs)]
        return Rule(tuple(dims[:n_in]), tuple(dims[n_in:]), (frozenset(),) * n_out)
    arrays = [tuple(f and f.name for f in found.of(k)) for k in range(n_in + n_out)]
    partial = tuple(frozenset(f.name for f in found.factors if o in f.partial) for o in range(n_out))
    return Rule(tuple(arrays[:n_in]), tuple(arrays[n_in:]), partial)


def describe(program: Program) -> str:
    """The rule as text, with a line for every dimension of more than one element that is gathered."""
    rule, found = rule_of(program), _factors(program)
    if program.hand is not None or found is None:
        return f"{rule}\n"
    arrays = [*found.kernel.inputs, *found.kernel.outputs]
    lines = [f"{arrays[k].name}, dimension {d}: {why}" for (k, d), why in sorted(found.reasons.items())]
    return "\n".join([str(rule), *lines, ""])


def _hand_rule(program: Program, hand: Hand) -> Rule:
    """The rule that the user gave, with a name for each vmap; an axis that an output lacks is summed over."""
    order = [(lane_name(j), level.batched) for j, level in reversed([*enumerate(program.levels)])]
    lanes = lambda k: tuple(name for name, batched in order if batched[k])
    arrays = [(*lanes(k), *dims) for k, dims in enumerate((*hand.inputs, *hand.outputs))]
    n_in, kernel = len(hand.inputs), program.kernel
    names = {n for dims in arrays[:n_in] for n in dims if n}
    partial = [frozenset(names - set(dims)) for dims in arrays[n_in:]]
    shared = {o for _, o in kernel.aliases} | {o for o, start in enumerate(kernel.inits) if start not in (None, 0)}
    whole = frozenset().union(*[partial[o] for o in shared])  # a sum that starts from something is no sum of shards'
    keep = lambda dims: tuple(None if n in whole else n for n in dims)
    return Rule(
        tuple(keep(dims) for dims in arrays[:n_in]),
        tuple(keep(dims) for dims in arrays[n_in:]),
        tuple(p - whole for p in partial),
    )


def can_cut(program: Program, name: str, parts: int) -> bool:
    """Whether the program can run on `parts` shards along one factor, as one whole kernel each."""
    if program.hand is not None:
        arrays = zip(rule_of(program).arrays, (*program.kernel.inputs, *program.kernel.outputs), strict=True)
        return all(n % parts == 0 for dims, v in arrays for d, n in zip(dims, v.shape, strict=True) if d == name)
    found = _factors(program)
    return found is not None and found.named(name).cuts(parts) is not None


@memo()
def shard_program(program: Program, parts: tuple[tuple[str, int], ...]) -> Program:
    """The program of one shard. Outputs that are summed over the shards are not rounded yet."""
    rule = rule_of(program)
    cut = {name for name, _ in parts}
    summed = [bool(names & cut) for names in rule.partial]
    if program.hand is not None:
        kernel = program.hand.shard(dict(parts)).kernel
        _check_shard(program, kernel, dict(parts))
    else:
        wide = [k for k, s in enumerate(summed) if s and program.narrow[k] is None]
        found = _factors(program)
        kernel = found and localise(found, dict(parts), wide)
    if kernel is None:
        raise KernelValueError(f"kernel {program.name} cannot be cut into shards of {dict(parts)}", program.where)
    narrow = tuple(None if s else n for s, n in zip(summed, program.narrow, strict=True))
    fingerprint = fingerprint_of(kernel, narrow, program.options)
    own = dict(kernel=kernel, narrow=narrow, fingerprint=fingerprint)
    return dataclasses.replace(program, **own, vjp=None, hand=None, choice=None)


def _check_shard(program: Program, kernel: ir.Kernel, parts: Mapping[str, int]) -> None:
    """Check that a rule given by hand is true of the shapes that the kernel computes."""
    for dims, whole, local in zip(rule_of(program).outputs, program.kernel.outputs, kernel.outputs, strict=True):
        want = tuple(n // parts.get(d or "", 1) for d, n in zip(dims, whole.shape, strict=True))
        if want != local.shape:
            text = ", ".join(f"{n} shards along {d}" for d, n in parts.items())
            raise KernelValueError(
                f"sharding rule {rule_of(program)} of kernel {program.name}: with {text}, output {whole.name} should "
                f"have shape {want}, but the kernel gives {local.shape}; correct the rule or out_type",
                program.where,
            )


# -- from the shardings of arrays to those of factors -----------------------------------------------------------------


def assign(program: Program, mesh: Mapping[str, int], specs: Sequence[Any]) -> dict[str, Axes]:
    """The mesh axes that each factor of a program is cut along; see `shards.assign`."""
    return shards.assign(rule_of(program), functools.partial(can_cut, program), mesh, specs)


def result_specs(program: Program, shardings: Sequence[NamedSharding]) -> list[PartitionSpec]:
    """How the results are sharded, given how the operands are (in their types: on axes of an explicit mesh)."""
    if not shards.sharded(shardings):  # no rule is needed, and to find one takes as long as to trace the kernel
        return [PartitionSpec(*[None] * len(v.shape)) for v in program.kernel.outputs]
    return shards.result_specs(rule_of(program), functools.partial(can_cut, program), shardings)


# -- lowering ---------------------------------------------------------------------------------------------------------


def lower(ctx: mlir.LoweringRuleContext, operands: Sequence[Any], program: Program) -> Sequence[Any] | None:
    """The call as a custom_partitioning call; None where it is lowered as it is: on one device, inside of shard_map, or
    because nothing of it can be cut (XLA gathers its operands). A kernel that prints or asserts runs as a whole on
    every device: XLA's partitioner takes no other call with effects."""
    if not is_partitioned(ctx) or not (rule_of(program).names or program.io):
        return None
    _try_hand(program)
    primitive = ctx.primitive  # `shard` must not hold `ctx`: it would be in a key of a cache of ctx, and both stay
    assert primitive is not None
    call = functools.partial(primitive.bind, program=program)

    def shard(cut: Mapping[str, Axes], parts: Mapping[str, int]) -> shards.Shard:
        local = shard_program(program, tuple(sorted(parts.items()))) if parts else program
        sums = [tuple(a for name in sorted(names & set(cut)) for a in cut[name]) for names in rule_of(program).partial]
        types = [jax.ShapeDtypeStruct(v.shape, o.dtype) for v, o in zip(local.kernel.outputs, program.out_avals)]
        return shards.Shard(functools.partial(_summed, primitive, local, sums, program), tuple(types))

    cutting = shards.Cutting(rule_of(program), functools.partial(can_cut, program), call, shard)
    read = lambda *xs: cutting(*_read(program, xs))
    return shards.lower(ctx, read, operands, program.fingerprint, effect=program.io)


def _summed(call: Any, local: Program, sums: Sequence[Axes], whole: Program, *operands: Any) -> list[Any]:
    """The results of one shard, in the types of those of the whole."""
    outs = call.bind(*operands, program=local)
    summed = [jax.lax.psum(y, axes) if axes else y for y, axes in zip(outs, sums, strict=True)]
    return [y.astype(o.dtype) for y, o in zip(summed, whole.out_avals, strict=True)]


def _read(program: Program, operands: Sequence[Any]) -> list[Any]:
    """Zeros for operands that the kernel never looks at (those of results that were dropped): a dimension that nothing
    walks is in no factor, and the operand would be gathered."""
    kernel = program.kernel
    seen = {v for op in kernel.body.walk() for v in op.operands()} | {kernel.inputs[i] for i, _ in kernel.aliases}
    return [x if v in seen else jnp.zeros(x.shape, x.dtype) for v, x in zip(kernel.inputs, operands, strict=True)]


def _try_hand(program: Program) -> None:
    """Find a rule that is wrong while the error can still be raised: XLA wraps those of its callbacks."""
    for name in rule_of(program).names if program.hand is not None else ():
        parts = next((p for p in (2, 3, 5, 7) if can_cut(program, name, p)), None)
        if parts:
            shard_program(program, ((name, parts),))
