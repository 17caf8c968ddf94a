"""`Program`: a kernel whose shapes, grid and meta-parameters are fixed; every rule of `jtile_call` maps it to another.

The jaxpr over Refs is what differentiation works on; the Tile IR is what batching, partition and the compiler work on.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jtile import ir
from jtile._compat import held_weakly, is_symbolic
from jtile._sizes import bounds_of
from jtile.ir.block import level_of
from jtile.primitive.options import Options
from jtile.primitive.sharding import Hand
from jtile.primitive.sizes import sized, values_of

Number = int | float | bool
_SPEAKING = ir.Print | ir.Assert  # ops whose effect is seen beside the results


@dataclasses.dataclass(frozen=True)
class Spec:
    """What stands around a kernel's body, before any vmap.

    Attributes:
      name: what profilers show.
      n_in, n_out: how many of the body's Refs are inputs and outputs, in this order; the rest is scratch.
      grid: number of programs per axis.
      aliases: (input, output) pairs that share a buffer.
      inits: per output, the number it starts from or None.
      ref_names: the name of each Ref.
      loc: the `def` of the kernel.
      complexes: per input and output, whether it is the real and imaginary parts of a complex array, along its last
        axis; () where none is. XLA hands such a one over as complex, without a copy.
      derived: nobody wrote the kernel, so that its tiles are nobody's wish: it may run in others.
      linear: the kernel computes tangents or cotangents, whose sums have no terms from lanes beyond an edge.
      shared: the Refs among the scratch that every device of the call has, each with its role in Tile IR.
    """

    name: str
    n_in: int
    n_out: int
    grid: tuple[int, ...]
    aliases: tuple[tuple[int, int], ...] = ()
    inits: tuple[Number | None, ...] = ()
    ref_names: tuple[str, ...] = ()
    loc: ir.Loc = ir.NOWHERE
    complexes: tuple[bool, ...] = ()
    derived: bool = False
    linear: bool = False
    shared: tuple[tuple[int, str], ...] = ()

    def complex_inputs(self) -> tuple[bool, ...]:
        """`complexes` of the inputs, one for each."""
        return self.complexes[: self.n_in] or (False,) * self.n_in

    def complex_outputs(self) -> tuple[bool, ...]:
        """`complexes` of the outputs, one for each."""
        return self.complexes[self.n_in :] or (False,) * self.n_out


@dataclasses.dataclass(frozen=True)
class Level:
    """One `vmap` of a kernel: a leading grid axis.

    Attributes:
      size: programs along the new axis; while a program is exported, it may be a symbolic dimension of JAX's.
      batched: per input and output Ref, whether it has a leading dimension of that size. Programs along the axis share
        what has not.
    """

    size: int
    batched: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class CustomVjp:
    """A reverse rule given by the user, over flat arrays.

    Attributes:
      fwd: `(*operands) -> (*outputs, *residuals)`.
      bwd: `(*residuals, *output cotangents) -> (one cotangent or None per operand)`; the cotangent of an output that is
        not of floats is None.
      key: what equality goes by: the functions mean the same where this is equal.
    """

    fwd: Callable[..., Sequence[Any]] = dataclasses.field(compare=False)
    bwd: Callable[..., Sequence[Any]] = dataclasses.field(compare=False)
    key: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """How the meta-parameters of a program were chosen that its call gave as `jt.auto`.

    Attributes:
      target: the `Target` that they were chosen for.
      why: which they are and how they were found, in a sentence.
      key: what is chosen again, and from what: programs of which it differs are not equal.
      again: `(target, levels)` to the program that is chosen for that target, under these vmaps.
      derived: `(target, levels, make)` to the program whose `make(program)`, a derivative, is best there; None where
        the tiles of the program itself are as good.
    """

    target: Any
    why: str
    key: str
    again: Callable[[Any, tuple[Level, ...]], Program]
    derived: Callable[[Any, tuple[Level, ...], Callable[[Program], Program]], Program | None] = lambda *_: None


@held_weakly
@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A kernel with everything fixed: the one parameter of `jtile_call`.

    Attributes:
      jaxpr: the kernel's body over flat Refs (inputs, outputs, scratch), without the dimensions of vmap.
      spec: what stands around the body.
      levels: the vmaps of the kernel, innermost first.
      narrow: per output, the dtype that its accumulator is rounded to in the end, or None: the dtype of its Ref stays.
      vjp: the reverse rule that the user gave, or None: automatic.
      base: Tile IR of the body, before the levels and before any pass.
      kernel: Tile IR with the levels applied: what the compiler works on.
      meta: the meta-parameters, sorted by name.
      options: see `Options`.
      fingerprint: sha256 of the Tile IR text, the options and the names of `hand`; equality and hashing go by it, by
        `vjp`, by `rules` and by `options.overlap`.
      hand: the sharding rule that the user gave, or None: derived. Of a kernel at block level: one that cuts no
        dimension of its own.
      choice: how meta-parameters were chosen that are `jt.auto`, or None: the call gave them all.
    """

    jaxpr: Any
    spec: Spec
    levels: tuple[Level, ...]
    narrow: tuple[str | None, ...]
    vjp: CustomVjp | None
    base: ir.Kernel
    kernel: ir.Kernel
    meta: tuple[tuple[str, Any], ...]
    options: Options
    fingerprint: str
    hand: Hand | None = None
    choice: Choice | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @functools.cached_property
    def _identity(self) -> tuple[Any, ...]:
        return self.fingerprint, self.vjp, self.rules, self.spec.derived, self.options.overlap

    def __repr__(self) -> str:
        return f"{self.name}{self.kernel.grid}#{self.fingerprint[:8]}"

    @property
    def name(self) -> str:
        return self.spec.name

    @functools.cached_property
    def rules(self) -> Any:
        """What the body says about its derivative, which Tile IR does not show: two kernels that compute the same may
        have others. None where it says nothing."""
        from jtile.trace.tracing import derivative_rules

        return derivative_rules(self.jaxpr.jaxpr)

    @functools.cached_property
    def dynamic(self) -> bool:
        """Whether sizes are known only from the operands of a call."""
        return ir.is_dynamic(self.kernel)

    def sizes(self, shapes: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """The values of the symbols for operands of these shapes, with any number of vmaps."""
        if not self.dynamic:
            return {}
        lanes = {lane_symbol(k): w.size for k, w in enumerate(self.levels)}
        return values_of(self.base, shapes) | lanes

    def results(self, shapes: Sequence[Sequence[Any]]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of each result for operands of these shapes."""
        if not self.dynamic:
            return self.out_avals
        values = self.sizes(shapes)
        return tuple(jax.ShapeDtypeStruct([sized(n, values) for n in o.shape], o.dtype) for o in self.out_avals)

    @functools.cached_property
    def out_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of each result; sizes that are known only from the operands are those of Tile IR."""
        dtypes = [ir.DTYPES[n].numpy if n else ref_dtype(v) for v, n in zip(self.kernel.outputs, self.narrow)]
        return tuple(jax.ShapeDtypeStruct(v.shape, d) for v, d in zip(self.kernel.outputs, dtypes))

    @functools.cached_property
    def io(self) -> bool:
        """Whether the kernel prints or asserts, so that its call may not be removed."""
        return any(isinstance(op, _SPEAKING) for op in self.kernel.body.walk())

    @property
    def devices(self) -> tuple[tuple[str, int], ...]:
        """The axes of the mesh whose devices the kernel talks to, with their sizes; () if it talks to none."""
        return () if self.alone else self.base.devices

    @property
    def alone(self) -> bool:
        """Whether its programs wait for each other on one device, so that all of them run at once there."""
        return ir.alone(self.base)

    @property
    def effect(self) -> bool:
        """Whether its call must stay where it is, as often as it stands there."""
        return self.io or bool(self.devices)

    @functools.cached_property
    def block(self) -> bool:
        """Whether it is at block level: with roles, and compiled for the architectures that have what these use."""
        return level_of(self.base) == "block"

    @property
    def where(self) -> tuple[str, int] | None:
        loc = self.kernel.loc
        return (loc.file, loc.line) if loc.file else None

    @property
    def programs(self) -> int:
        """Number of programs of the grid, where it does not depend on the sizes of the operands."""
        return math.prod(self.kernel.grid)


def make_program(
    jaxpr: Any,
    spec: Spec,
    *,
    meta: tuple[tuple[str, Any], ...],
    options: Options,
    levels: tuple[Level, ...] = (),
    narrow: tuple[str | None, ...] | None = None,
    vjp: CustomVjp | None = None,
    hand: Hand | None = None,
    choice: Choice | None = None,
) -> Program:
    """A `Program` from a traced body; raises what the body cannot be expressed by in Tile IR."""
    from jtile import trace

    base = trace.to_tile_ir(
        jaxpr, name=spec.name, n_in=spec.n_in, n_out=spec.n_out, grid=spec.grid, aliases=spec.aliases,
        inits=spec.inits, ref_names=spec.ref_names, loc=spec.loc, shared=spec.shared,
    )  # fmt: skip
    return _program(jaxpr, spec, levels, narrow or (None,) * spec.n_out, vjp, base, meta, options, hand, choice)


def batched(program: Program, level: Level, vjp: CustomVjp | None) -> Program:
    """The program under one more vmap; what is `jt.auto` is chosen again for all lanes together."""
    if program.choice is None:
        return under(program, level, vjp)
    again = program.choice.again(program.choice.target, (*program.levels, level))
    return dataclasses.replace(again, vjp=vjp)


def under(program: Program, level: Level, vjp: CustomVjp | None) -> Program:
    """The program under one more vmap, with the meta-parameters that it has."""
    p, levels = program, (*program.levels, level)
    hand = p.hand and dataclasses.replace(p.hand, shard=functools.partial(_batched_shard, p, level))
    return _program(p.jaxpr, p.spec, levels, p.narrow, vjp, p.base, p.meta, p.options, hand, p.choice)


def with_choice(program: Program, choice: Choice) -> Program:
    """The program, with how its meta-parameters were chosen."""
    p = program
    return _program(p.jaxpr, p.spec, p.levels, p.narrow, p.vjp, p.base, p.meta, p.options, p.hand, choice)


def for_target(program: Program, target: Any) -> Program:
    """The program with what is `jt.auto` chosen for a target: where the call was traced, it was not known for certain.

    One whose inputs or outputs would be others (memory that only a derivative needs, by tiles) stays as it is.
    """
    choice = program.choice
    if choice is None or choice.target == target:
        return program
    again = choice.again(target, program.levels)
    shapes = lambda p: [(v.shape, v.dtype) for v in (*p.kernel.inputs, *p.kernel.outputs)]
    return dataclasses.replace(again, vjp=program.vjp) if shapes(again) == shapes(program) else program


def derived_choice(source: Program, make: Callable[[Program], Program]) -> Choice | None:
    """The choice of a program that is `make(source)`, a derivative say: it takes what is chosen for its source."""
    choice = source.choice
    if choice is None:
        return None

    def again(target: Any, levels: tuple[Level, ...]) -> Program:
        made = make(for_target(source, target))
        for level in levels[len(made.levels) :]:
            made = under(made, level, None)
        return made

    why = choice.why if choice.why.startswith("as ") else f"as {source.name}: {choice.why}"
    return dataclasses.replace(choice, again=again, why=why)


def _batched_shard(program: Program, level: Level, parts: Mapping[str, int]) -> Program:
    """The shard of a program under one more vmap, for a sharding rule given by hand."""
    assert program.hand is not None
    size = level.size // parts.get(lane_name(len(program.levels)), 1)
    return under(program.hand.shard(parts), dataclasses.replace(level, size=size), None)


def lane_name(level: int) -> str:
    """The name of the dimension of a vmap in sharding rules."""
    return f"vmap{level}"


def _program(jaxpr, spec, levels, narrow, vjp, base, meta, options, hand, choice) -> Program:
    from jtile.transforms.batch import batch

    kernel = base
    for k, level in enumerate(levels):
        kernel = batch(kernel, _lanes(k, level.size), level.batched)
    symbolic = [str(level.size) for level in levels if is_symbolic(level.size)]
    rule = [f"{hand.inputs} -> {hand.outputs}"] if hand else []
    key = [choice.key] if choice else []
    pairs = [f"complex {spec.complexes}"] if any(spec.complexes) else []
    fingerprint = fingerprint_of(kernel, narrow, options, *symbolic, *_bounds(jaxpr), *rule, *key, *pairs)
    made = Program(jaxpr, spec, levels, narrow, vjp, base, kernel, meta, options, fingerprint, hand, choice)
    if hand is None and not levels and made.block:  # nobody looks into a schedule: it is cut along vmaps only
        rows = lambda refs: tuple((None,) * len(v.shape) for v in refs)
        return dataclasses.replace(made, hand=Hand(rows(base.inputs), rows(base.outputs), lambda _: made))
    return made


def _bounds(jaxpr: Any) -> list[str]:
    """What is known of the sizes of a body's Refs, which Tile IR does not show and derivatives of the body go by."""
    sizes = dict.fromkeys(n for v in jaxpr.jaxpr.invars for n in v.aval.shape if is_symbolic(n))
    return [f"{n} in {bounds}" for n in sizes if (bounds := bounds_of(n)) != (1, None)]


def fingerprint_of(kernel: ir.Kernel, narrow: tuple[str | None, ...], options: Options, *more: str) -> str:
    """The digest of a kernel and of what it is compiled with; see `Program.fingerprint`."""
    text = "\n".join([_canonical_text(kernel), str(narrow), str(options), *more])
    return hashlib.sha256(text.encode()).hexdigest()


def _lanes(k: int, size: Any) -> ir.Size:
    return ir.symbol(lane_symbol(k)) if is_symbolic(size) else size


def lane_symbol(k: int) -> str:
    """The symbol of the size of vmap k, where it is not a number."""
    return f"lanes{k}"


def ref_dtype(v: ir.Value) -> np.dtype:
    return v.type.info.numpy


def _canonical_text(kernel: ir.Kernel) -> str:
    """Text that is equal for equal kernels: source places stand in it only where compiled code shows them."""
    sites = [f"; {op.mnemonic} {op.loc}" for op in kernel.body.walk() if isinstance(op, _SPEAKING)]
    return "\n".join([ir.print_kernel(kernel), *sites])
