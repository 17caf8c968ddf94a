"""`jt.bench`: how long a function takes on this device, beside others that do the same."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtile._errors import KernelTypeError, KernelValueError
from jtile._parts import is_key
from jtile.testing import relative_error
from jtile.tune import device, measure, prune
from jtile.tune.totals import Counts, cost


@dataclasses.dataclass(frozen=True)
class BenchTiming:
    """The times of one of the functions.

    Attributes:
      name: the function's name, or what it was called among the peers.
      samples_us: microseconds of one call, a number for each round.
      error: the largest relative error of a result (the norm of the difference over the norm) against those of the
        first function; None for that one.
    """

    name: str
    samples_us: tuple[float, ...]
    error: float | None = None

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def min_us(self) -> float:
        return min(self.samples_us)

    @property
    def spread(self) -> float:
        """The distance of the quartiles over the median."""
        if len(self.samples_us) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples_us, n=4)
        return (high - low) / self.median_us


@dataclasses.dataclass(frozen=True)
class Bench:
    """Times of a function and of its peers; prints as a table.

    Attributes:
      device: the device on which the functions ran.
      timings: those of the function, and of its peers in the order in which they were given.
      work: operations and bytes of one call of the function, as `jt.cost` counts them.
    """

    device: str
    timings: tuple[BenchTiming, ...]
    work: Counts

    @property
    def ratio(self) -> float | None:
        """The time of the fastest peer over that of the function, above 1 where that is faster; None without peers."""
        ours, *others = (t.median_us for t in self.timings)
        return min(others) / ours if others else None

    @property
    def bytes_per_second(self) -> float:
        """Bytes that the function moves in a second."""
        return self.work.bytes / self.timings[0].median_us * 1e6

    @property
    def flops_per_second(self) -> float:
        """Operations that the function computes in a second, such as exponentials included."""
        return (self.work.flops + self.work.transcendentals) / self.timings[0].median_us * 1e6

    def __str__(self) -> str:
        head = ("function", "median", "min", "spread", "GB/s", "GFLOP/s", "speed", "error")
        rows = [head, *map(self._row, self.timings)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join([r[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(r[1:], widths[1:], strict=True))])
            for r in rows
        )
        return "\n".join([f"on {self.device}", *lines])

    def _row(self, t: BenchTiming) -> tuple[str, ...]:
        per_ns = 1e-3 / t.median_us
        operations = self.work.flops + self.work.transcendentals
        return (
            t.name, f"{t.median_us:,.1f} us", f"{t.min_us:,.1f} us", f"{t.spread:.1%}",
            f"{self.work.bytes * per_ns:,.1f}", f"{operations * per_ns:,.1f}",
            f"{self.timings[0].median_us / t.median_us:.2f}", "-" if t.error is None else f"{t.error:.1e}",
        )  # fmt: skip


def bench(
    f: Callable[..., Any], *args: Any, peers: Mapping[str, Callable[..., Any]] | None = None, rounds: int = 15
) -> Bench:
    """Times `f(*args)` on this device, and other functions of the same arguments in turns with it.

    One compiled XLA program contains many calls, so that the time of a call contains no Python; on a GPU calls take
    turns on copies of the arguments, so that no call finds its data in the cache. Bytes and operations a second are
    those of `f` for every function, as `jt.cost` counts them: bytes are exact for kernels, and for XLA's part an
    upper bound, as XLA counts before it fuses.

    Args:
      f: a JAX function, jitted or not.
      args: its arguments: arrays, numbers and trees of them; a `jax.ShapeDtypeStruct` stands for random data (normal
        floats, integers from 0 to 7).
      peers: name -> a function of the same arguments whose results have the same structure and shapes.
      rounds: samples of each function.

    Returns:
      A `Bench`, which prints as a table: median, minimum, spread, GB/s, GFLOP/s, relative speed and error.

    Raises:
      KernelTypeError: called inside of a trace, `f` or a peer is no function, or an argument is no array.
      KernelValueError: results of a peer have other shapes than those of `f`, or `rounds` is below 1.
    """
    functions = _functions(f, {} if peers is None else peers, rounds)
    _check_arrays(args)
    total = cost(f, *args).total
    leaves, tree = jax.tree.flatten(args)
    types = [jax.eval_shape(lambda x: x, x) if not isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves]
    results = _results(functions, types, tree)
    target = device.target()
    cache = prune.cache_bytes(target)
    sets = _sets(leaves, types, results, cache)
    runs = {name: _Flat(function, tree) for name, function in functions.items()}
    speed = prune.bandwidth(target, {}) if cache else None
    count = measure.rounds_of(sets, results, cache, total.bytes / speed * 1e6 if speed else 1.0)
    programs = {name: measure.program_of(run, sets, count) for name, run in runs.items()}
    runner = measure.Runner(sets, count)
    found = {name: runner.warm(name, program) for name, program in programs.items()}
    order = list(programs)
    for turn in range(rounds):
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            runner.round(name, programs[name])
    ours, *_ = order
    errors = {name: None if name == ours else _error(found[name], found[ours]) for name in order}
    timings = tuple(BenchTiming(name, tuple(runner.samples[name]), errors[name]) for name in order)
    return Bench(device.kind(), timings, total)


def _functions(f: Any, peers: Mapping[str, Any], rounds: Any) -> dict[str, Callable[..., Any]]:
    if not isinstance(rounds, int) or rounds < 1:
        raise KernelValueError(f"jt.bench: rounds is {rounds!r}; expected the number of samples of each function")
    if not isinstance(peers, Mapping) or not all(isinstance(label, str) for label in peers):
        raise KernelTypeError(f"jt.bench: peers is {peers!r}; expected a mapping from names to functions")
    name = getattr(f, "__name__", None) or getattr(f, "name", None) or type(f).__name__
    name = name if name not in peers else f"{name} (given)"
    for label, function in {name: f, **peers}.items():
        if not callable(function):
            raise KernelTypeError(f"jt.bench: {label} is {function!r}; expected a function of the arguments")
    return {name: f, **peers}


def _check_arrays(args: Sequence[Any]) -> None:
    for path, x in jax.tree.leaves_with_path(args):
        if not isinstance(x, jax.ShapeDtypeStruct | jax.Array | np.ndarray | np.generic | int | float | complex):
            (which, *rest) = path
            where = f"argument {which.idx}{jax.tree_util.keystr(tuple(rest))}"
            raise KernelTypeError(
                f"jt.bench: {where} is {x!r}; expected an array, a number or a jax.ShapeDtypeStruct. What is no array "
                "stands in the function: lambda x: f(x, option=...)"
            )


def _results(functions: Mapping[str, Callable[..., Any]], types: Sequence[Any], tree: Any) -> list[Any]:
    """Types of the results, which are the same for each function."""
    want: Any = None
    for name, function in functions.items():
        got = jax.eval_shape(function, *jax.tree.unflatten(tree, types))
        shapes = jax.tree.map(lambda x: tuple(x.shape), got)
        if want is None:
            first, want, results = name, shapes, jax.tree.leaves(got)
        elif shapes != want:
            raise KernelValueError(f"jt.bench: {name} gives results of shapes {shapes}, and {first} of {want}")
    return results


def _sets(leaves: Sequence[Any], types: Sequence[Any], results: Sequence[Any], cache: int) -> list[list[Any]]:
    given = [
        measure.random_array(x, k) if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x)
        for k, x in enumerate(leaves)
    ]
    return measure.argument_sets(types, results, cache, given)


class _Flat:
    """A function of a list of arrays that gives a list of arrays."""

    def __init__(self, function: Callable[..., Any], tree: Any):
        self._function, self._tree = function, tree

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        return jax.tree.leaves(self._function(*jax.tree.unflatten(self._tree, arrays)))


def _error(got: Sequence[Any], want: Sequence[Any]) -> float:
    return max((relative_error(_numbers(a), _numbers(b)) for a, b in zip(got, want, strict=True)), default=0.0)


def _numbers(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if is_key(x.dtype) else x
