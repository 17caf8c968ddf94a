"""`jt.cost`: operations and bytes of a function with kernels, those of its kernels beside those that XLA counts.

XLA's own count, `jax.jit(f).lower(...).cost_analysis()`, knows nothing of kernels: for a custom call it notes -1
operations and bytes, whatever its attributes say (but see the option `cost_analysis`), and it takes the body of a loop
once. So the kernels are counted from
Tile IR, and XLA is asked for what is between them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jtile import passes
from jtile._config import config
from jtile.language._equations import bind
from jtile.tune.cost import Work, together, work
from jtile.tune.programs import Sized, chosen_branch, counted_calls, traced

if TYPE_CHECKING:
    from jtile.primitive.program import Program

_XLA = {"flops": "flops", "transcendentals": "transcendentals", "bytes accessed": "bytes"}
_LOOPS = ("scan", "while", "cond")


@dataclasses.dataclass(frozen=True)
class Counts:
    """Operations and bytes.

    Attributes:
      flops: operations on numbers, a multiply-add of a matrix product counting as two, without the following.
      transcendentals: exponentials, logarithms, roots, trigonometric functions and the like.
      bytes: read and written. Of a kernel: each element of its arrays that is touched, once. Of XLA: what each of its
        operations reads and writes, before they are fused.
    """

    flops: float = 0
    transcendentals: float = 0
    bytes: float = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def times(self, n: int) -> Counts:
        return Counts(*(n * a for a in dataclasses.astuple(self)))

    def most(self, other: Counts) -> Counts:
        return Counts(*map(max, dataclasses.astuple(self), dataclasses.astuple(other)))


@dataclasses.dataclass(frozen=True)
class KernelCounts:
    """One kernel of a function.

    Attributes:
      name: the kernel's name, and `calls` how often the function calls it with arrays of these shapes.
      counts: the counts of one call.
      exact: False where a loop's length or a condition depends on loaded values, and was guessed.
      work: more of what one call does; see `jtile.tune.cost.Work`.
    """

    name: str
    calls: int
    counts: Counts
    exact: bool
    work: Work


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a function computes and moves; prints as a table.

    Attributes:
      kernels: the function's kernels, in the order of their first calls.
      xla: what XLA counts of everything else.
    """

    kernels: tuple[KernelCounts, ...]
    xla: Counts

    @property
    def total(self) -> Counts:
        """Everything together; a kernel counts as often as it is called."""
        return sum((k.counts.times(k.calls) for k in self.kernels), self.xla)

    @property
    def flops(self) -> float:
        return self.total.flops

    @property
    def transcendentals(self) -> float:
        return self.total.transcendentals

    @property
    def bytes(self) -> float:
        return self.total.bytes

    @property
    def exact(self) -> bool:
        """False where the numbers of a kernel were guessed."""
        return all(k.exact for k in self.kernels)

    def __str__(self) -> str:
        rows = [("", "calls", "flops", "transcendentals", "bytes")]
        rows += [(k.name, str(k.calls), *_texts(k.counts, "" if k.exact else "~")) for k in self.kernels]
        rows += [("XLA", "", *_texts(self.xla)), ("total", "", *_texts(self.total, "" if self.exact else "~"))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join([r[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(r[1:], widths[1:], strict=True))])
            for r in rows
        )


def _texts(c: Counts, guess: str = "") -> tuple[str, ...]:
    return tuple(f"{guess}{n:,.0f}" for n in (c.flops, c.transcendentals, c.bytes))


def cost(f: Callable[..., Any], *args: Any) -> Cost:
    """Operations and bytes of `f(*args)`, of its kernels and of everything else, without running or compiling it.

    The body of a `scan` counts as often as it runs, that of a `while` once, and of the branches of a `cond` the most of
    each number (of kernels, all); of what is different on each platform, that of the platform at hand
    (`jt.platform()`). Under `shard_map` everything counts for one device.

    Args:
      f: a JAX function, jitted or not, of kernels and other operations, or a derivative of one.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`.

    Returns:
      A `Cost`: `flops`, `transcendentals` and `bytes` of everything, and the parts `kernels` and `xla`.

    Raises:
      KernelTypeError: called inside of a trace, or `f` is no function.
    """
    jaxpr = traced(f, args)[0].jaxpr
    return Cost(tuple(_kernel(called, n) for called, n in counted_calls(jaxpr).items()), _rest(jaxpr))


def _kernel(called: Sized, calls: int) -> KernelCounts:
    done = together([work(passes.run_pipeline(piece, passes.TILE)) for piece in called.pieces()])
    plain = done.flops + done.elements - done.special
    return KernelCounts(called.program.name, calls, Counts(plain, done.special, done.bytes), done.exact, done)


def counts_of(program: Program, shapes: Sequence[tuple[int, ...]]) -> Counts:
    """The counts of one call of a program with operands of these shapes."""
    return _kernel(Sized(program, tuple(shapes)), 1).counts


# -- walking the function ---------------------------------------------------------------------------------------------


def _inside(eqn: Any) -> list[Any]:
    """The jaxprs of an equation that run here."""
    from jax.extend.core import jaxprs_in_params

    here = chosen_branch(eqn.params)
    return [here.jaxpr] if here else list(jaxprs_in_params(eqn.params))


def _rounds(eqn: Any) -> int:
    return eqn.params["length"] if eqn.primitive.name == "scan" else 1


def _rest(jaxpr: Any) -> Counts:
    """What XLA counts of a jaxpr without its kernels, loops as often as they run."""
    apart = [eqn for eqn in jaxpr.eqns if _apart(eqn)]
    total = _analysed(jaxpr, [eqn for eqn in jaxpr.eqns if not _apart(eqn)])
    for eqn in apart:
        # Collectives mean nothing outside of a shard_map, so XLA gets it whole: kernels in it count -1.
        if eqn.primitive.name == "shard_map":
            total += _analysed(jaxpr, [eqn])
            continue
        parts = [_rest(inner).times(_rounds(eqn)) for inner in _inside(eqn)]
        if eqn.primitive.name == "cond":
            most = Counts()
            for part in parts:
                most = most.most(part)
            parts = [most]
        total = sum(parts, total)
    return total


def _apart(eqn: Any) -> bool:
    """Whether XLA cannot be asked for an equation as it is: for a kernel, a loop, or a call of what has one."""
    if eqn.primitive.name in ("jtile_call", *_LOOPS):
        return True
    return any(_apart(e) for inner in _inside(eqn) for e in inner.eqns)


def _analysed(jaxpr: Any, eqns: Sequence[Any]) -> Counts:
    """What XLA counts of some equations of a jaxpr, whose other values are arguments."""
    if not eqns:
        return Counts()
    made = {v for eqn in eqns for v in eqn.outvars}
    used = {v for eqn in jaxpr.eqns if _apart(eqn) for v in eqn.invars if not hasattr(v, "val")}
    given = list(dict.fromkeys(v for e in eqns for v in e.invars if not hasattr(v, "val") and v not in made))
    kept = [v for v in made if v in used or any(v is o for o in jaxpr.outvars)]

    def run(*values: Any) -> list[Any]:
        env = dict(zip(given, values, strict=True))
        for eqn in eqns:
            env |= zip(
                eqn.outvars, bind(eqn, [v.val if hasattr(v, "val") else env[v] for v in eqn.invars]), strict=True
            )
        return [env[v] for v in kept]

    types = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False)) for v in given
    ]
    with config(cost_analysis=False):  # kernels in a shard_map count once
        found: Mapping[str, float] = jax.jit(run).lower(*types).cost_analysis() or {}
    return Counts(**{name: max(found.get(key, 0.0), 0.0) for key, name in _XLA.items()})
