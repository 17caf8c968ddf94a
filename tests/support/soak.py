"""Soak of the block level: random shapes, each against float32 sums by XLA and against itself, many times.

`soak_families.py` says which ops and shapes; `tests/ops/test_soak.py` runs them on a GPU, and `one_of_each.py` one
small shape of each under a checker of memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from machines import machine

from jtile import passes
from jtile.lowering import targets
from jtile.lowering.triton.block.passes import NoPlan, steps
from jtile.primitive.lowering import compile_piece, pieces_of

TIMES = 20  # calls whose results have the bits of the first one's
FAR = 16  # how much farther off one element may be, by its own size and that of its row, than all are by their norms
ROUNDED = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 3e-5, "int32": 0.0}  # sums of a tensor core
LARGEST = 1 << 25  # elements of what a reference holds besides, such as a matrix of scores
POOL = (1 << 22) + 15  # random numbers of a dtype, which arrays begin in somewhere


@functools.cache
def _pool(dtype: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    if dtype == "uint32":
        return rng.integers(0, 1 << 32, POOL, np.uint32)
    if dtype == "int8":
        return rng.integers(-128, 128, POOL, np.int8)
    return rng.standard_normal(POOL, np.float32).astype(jnp.dtype(dtype))


class Draw:
    """Random choices, the same for the same seed; `small`: shapes that a CPU computes in no time."""

    def __init__(self, *seed: int, small: bool = False):
        self.rng, self.small = np.random.default_rng(seed), small

    def of(self, *choices: Any) -> Any:
        """One of them; the first where shapes are small."""
        return choices[0 if self.small else self.rng.integers(len(choices))]

    def chance(self, share: float) -> bool:
        return not self.small and bool(self.rng.random() < share)

    def size(self, low: int, high: int, step: int = 1, small: int | None = None) -> int:
        """A multiple of `step` from low to high; as many of one magnitude as of another. `small`, or the lowest, where
        shapes are small."""
        if self.small:
            return -(-low // step) * step if small is None else small
        n = math.exp(self.rng.uniform(math.log(low), math.log(high + 1)))
        return min(max(round(n / step), -(-low // step)), high // step) * step

    def numbers(self, *shape: int, dtype: str = "float32") -> jax.Array:
        """Normal ones; integers of any size for integer dtypes."""
        at = int(self.rng.integers(POOL))
        count, pool = math.prod(shape), _pool(dtype)
        turned = pool[at : at + count]
        while turned.size < count:
            turned = np.concatenate([turned, pool[: count - turned.size]])
        return jax.device_put(turned.reshape(shape))


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
      run, reference: functions of the same arrays; the reference computes in float32.
      arrays: makes them.
      text: the shape, for messages.
      tolerance: the relative norm by which the results may differ.
      kernels: names of the kernels that do the work.
      level: where they run on Hopper: "block" or "tile"; None where both are right.
      unordered: numbers of the results that are added up in any order.
    """

    run: Callable[..., Any]
    reference: Callable[..., Any]
    arrays: Callable[[], tuple[Any, ...]]
    text: str
    tolerance: float
    kernels: tuple[str, ...]
    level: str | None = "block"
    unordered: tuple[int, ...] = ()


def programs(jaxpr: Any) -> Iterator[Any]:
    """The programs of all kernels of a jaxpr."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "jtile_call":
            yield eqn.params["program"]
        for inner in core.jaxprs_in_params(eqn.params):
            yield from programs(inner)


def watched(case: Case, arrays: tuple[Any, ...]) -> list[tuple[Any, int]]:
    """(program, number of the piece) of each kernel of a call that does its work."""
    found = dict.fromkeys(programs(jax.make_jaxpr(case.run)(*arrays).jaxpr))
    mine = [p for p in found if p.name in case.kernels]
    assert mine, f"{case.text}: none of {case.kernels}, but {sorted({p.name for p in found})}"
    return [(p, k) for p in mine for k in range(len(pieces_of(p).kernels))]


def planned(program: Any, piece: int) -> str:
    """The level at which a kernel would run on Hopper, without compiling it; behind that of the tiles the reason."""
    if program.block:
        return "block"
    options = {k: v for k, v in program.options.compiler.items() if v is not None}
    found = steps(passes.run_pipeline(pieces_of(program).kernels[piece], passes.TILE), machine(), options)
    return f"tile: {found}" if isinstance(found, NoPlan) else "block"


def compiled(program: Any, piece: int) -> str:
    """The level of the code that runs on the GPU at hand; it has been compiled already."""
    return compile_piece(program, piece, targets.resolve("cuda:sm_90")).launch["level"]


def check_levels(case: Case, arrays: tuple[Any, ...], level_of: Callable[[Any, int], str]) -> None:
    for program, piece in watched(case, arrays):
        level = level_of(program, piece)
        assert case.level in (None, level.partition(":")[0]), f"{case.text}: {program.name}: {level}"


def _errors(got: Any, arrays: tuple[Any, ...], case: Case) -> list[jax.Array]:
    """Of each result: the norm of its error over its own, and the farthest element, in shares of what is allowed."""
    out = []
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(case.reference(*arrays)), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), case.text
        want, wide = theirs.astype(jnp.float32), jnp.issubdtype(ours.dtype, jnp.floating)
        off = jnp.abs(ours.astype(jnp.float32) - want if wide else (ours - theirs).astype(jnp.float32))
        mean, rows = (jnp.sqrt((want**2).mean(axis, keepdims=True)) for axis in (None, -1))
        mean = jnp.where(mean == 0, 1.0, mean)  # gradients of weights that cannot change
        norm = jnp.sqrt((off**2).mean()) / mean.reshape(())
        allowed = FAR * case.tolerance * (jnp.abs(want) + jnp.maximum(rows, mean))
        out.append(jnp.stack([norm, jnp.where(off == 0, 0.0, off / allowed).max()]))
    return out


def _differing(first: Any, again: Any, before: Any) -> list[jax.Array]:
    """How many elements have other bits, added to those before."""

    def bits(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")

    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(again), before, strict=True)
    return [n + (bits(x) != bits(y)).sum(dtype=jnp.int32) for x, y, n in pairs]


def check(
    case: Case, *, times: int = TIMES, level_of: Callable[[Any, int], str] | None = None, through: Callable = jax.jit
) -> None:
    """Compare a call with its reference, call it `times` times more, and look where its kernels run; each `through`
    XLA, or through `evaluated` where shapes are small.

    Raises:
      AssertionError: says which shape, and what is wrong.
    """
    arrays = case.arrays()
    run, differing = through(case.run), through(_differing)
    first = run(*arrays)
    if level_of is not None:
        check_levels(case, arrays, level_of)
    for k, x in enumerate(through(functools.partial(_errors, case=case))(first, arrays)):
        norm, far = map(float, x)
        where = f"{case.text}: result {k}: error {norm:.2g} (allowed {case.tolerance:g}), farthest element {far:.2g}"
        assert norm <= case.tolerance and far <= 1, where  # both false for NaN
    changed: Any = [jnp.int32(0) for _ in jax.tree.leaves(first)]
    for _ in range(times):
        changed = differing(first, run(*arrays), changed)
    for k, n in enumerate(changed):
        assert k in case.unordered or not n, f"{case.text}: result {k}: {n} other elements in {times} calls"


def text(op: str, **of: Any) -> str:
    return f"{op} " + ", ".join(f"{k} {v}" for k, v in of.items())


def both(op: Callable, reference: Callable, **options: Any) -> tuple[Callable, Callable]:
    return functools.partial(op, **options), functools.partial(reference, **options)


def gradients_of(f: Callable, moved: int) -> Callable:
    """The result of `f` and its gradients by the first arguments, for a cotangent that stands in front of them."""

    def run(ct, *args):
        y, back = jax.vjp(lambda *x: f(*x, *args[moved:]), *args[:moved])
        return y, *back(ct)

    return run
