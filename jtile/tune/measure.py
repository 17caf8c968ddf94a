"""Running candidates: random arguments, comparison with the default's results, and times with a cold cache."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtile import ir
from jtile._cores import cores_here
from jtile._parts import is_complex, is_key
from jtile.lowering.here import target
from jtile.testing import TOLERANCES

SETS = 64  # argument sets in one program at most
MEMORY = 8 << 30  # bytes that all argument sets take at most
SAMPLE_S = 4e-3  # seconds of one sample at least: many times what waiting for the device costs
PROGRAM_US = 2000.0  # microseconds of one program on a GPU: the host needs up to 0.5 ms to start one
CALLS = 128  # calls in one program, at most
SLACK = 8  # how many times `TOLERANCES` two candidates may be apart: they add in different orders


def argument_sets(types: Sequence[Any], outputs: Sequence[Any], cache: int, given: Any = None) -> list[list[Any]]:
    """So many sets of arguments that a kernel finds none of its data in a cache of `cache` bytes when its turn comes
    again; `given`: arrays to copy, instead of random ones."""
    size = max(sum(_bytes(x) for x in (*types, *outputs)), 1)
    count = min(max(-(-2 * cache // size) + 1, 2) if cache else 1, SETS, max(MEMORY // size, 1))
    if given is not None:
        return [[jnp.array(x, copy=True) for x in given] for _ in range(count)]
    return [[random_array(x, 1000 * s + k) for k, x in enumerate(types)] for s in range(count)]


def random_array(x: Any, seed: int) -> jax.Array:
    """Floats of a normal distribution, integers from 0 to 7: as indices they lie inside of most arrays."""
    if is_key(x.dtype):
        return jax.random.split(jax.random.key(seed), x.shape)
    if "warps" not in target().features:
        return jax.device_put(_by_numpy(x, np.random.default_rng(seed)))
    return _by_jax(jax.random.key(seed), x.shape, x.dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _by_jax(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Made where it is to be. One program serves all sets of arguments: XLA takes longer for it than it runs."""
    if is_complex(dtype):
        return jax.random.normal(key, shape, dtype)
    info = ir.dtype_info(dtype)
    if info.kind == "f":
        return jax.random.normal(key, shape, jnp.float64 if info.bits == 64 else jnp.float32).astype(dtype)
    if info.kind == "b":
        return jax.random.bernoulli(key, 0.5, shape)
    return jax.random.randint(key, shape, 0, 8, jnp.int32).astype(dtype)


def _by_numpy(x: Any, rng: np.random.Generator) -> np.ndarray:
    """A random array that NumPy draws on the host: XLA takes 0.1 s to compile random numbers of one shape."""
    if is_complex(x.dtype):
        return (rng.standard_normal((*x.shape, 2)) @ np.array([1, 1j]) * 0.5**0.5).astype(x.dtype)
    info = ir.dtype_info(x.dtype)
    if info.kind == "f":
        return rng.standard_normal(x.shape, np.float64 if info.bits == 64 else np.float32).astype(x.dtype)
    if info.kind == "b":
        return rng.random(x.shape, np.float32) < 0.5
    return rng.integers(0, 8, x.shape, np.int32).astype(x.dtype)


def rounds_of(sets: Sequence[Any], outputs: Sequence[Any], cache: int, predicted_us: float) -> int:
    """How often a program goes over its sets: on a GPU (`cache` is not 0) so often that its start is hidden behind the
    program before, as far as memory holds the results."""
    if not cache:
        return 1
    room = MEMORY // max(len(sets) * sum(map(_bytes, outputs)), 1)
    wanted = math.ceil(PROGRAM_US / max(len(sets) * predicted_us, 1e-3))
    return max(1, min(room, wanted, CALLS // len(sets)))


def program_of(bound: Any, sets: Sequence[Any], rounds: int = 1) -> Callable[[Any], Any]:
    """One compiled XLA program that calls a kernel on every set, `rounds` times: times hold no launches from Python."""

    run = jax.jit(bound.run)  # one copy of the kernel in the program's text

    def calls(sets: Sequence[Any]) -> list[Any]:
        out: list[Any] = []
        for k in range(rounds * len(sets)):
            arrays = sets[k % len(sets)]
            if k >= len(sets):  # the same arguments as before: without the barrier XLA takes the result that it has
                arrays, _ = jax.lax.optimization_barrier((arrays, jax.tree.leaves(out[-1])[0]))
            out.append(run(arrays))
        return out

    return jax.jit(calls).lower(sets).compile()


def difference(got: Any, expected: Any) -> float:
    """The relative norm of the difference of two lists of results, over what their dtypes allow: at most 1 is equal."""
    worst = 0.0
    for a, b in zip(got, expected, strict=True):
        limit = SLACK * TOLERANCES.get(b.dtype.name, 0.0)
        error = float(_error(a, b))
        worst = max(worst, error / limit if limit else (math.inf if error else 0.0))
    return worst


@jax.jit
def _error(a: jax.Array, b: jax.Array) -> jax.Array:
    wide = jnp.float64 if b.dtype == jnp.float64 else jnp.float32
    if is_complex(b.dtype):
        a, b = (jnp.stack([x.real, x.imag]) for x in (a, b))
    if not jnp.issubdtype(b.dtype, jnp.floating):
        return (a != b).sum().astype(jnp.float32)
    a, b = a.astype(wide), b.astype(wide)
    same = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    square = lambda x: jnp.sum(jnp.where(same, 0, x) ** 2)
    norm = jnp.sum(jnp.where(jnp.isfinite(b), b, 0) ** 2)
    off = jnp.sqrt(square(a - b) / jnp.maximum(norm, jnp.finfo(wide).tiny))
    return jnp.where(jnp.isnan(off), jnp.inf, off).astype(jnp.float32)


class Runner:
    """Times programs of one shape against each other.

    Attributes:
      sets: the arguments that each program takes; it calls the kernel `rounds` times on each.
    """

    def __init__(self, sets: list[list[Any]], rounds: int = 1):
        self.sets, self._rounds = sets, rounds
        self.samples: dict[Any, list[float]] = {}
        self._calls: dict[Any, int] = {}

    def warm(self, name: Any, run: Callable[[Any], Any]) -> Any:
        """Run a program some times, and note how many calls make a sample; gives its results for the first set."""
        first = jax.block_until_ready(run(self.sets))
        # The first calls wait for much that has nothing to do with the kernel, and one call mostly for its launch.
        for calls in (1, 1, 4):
            seconds = self._seconds(run, calls) / calls
        self._calls[name] = min(max(1, math.ceil(SAMPLE_S / max(seconds, 1e-7))), 1000)
        return first[0]

    def round(self, name: Any, run: Callable[[Any], Any]) -> None:
        """One more sample of a program."""
        programs = self._calls[name]
        calls = programs * self._rounds * len(self.sets)
        self.samples.setdefault(name, []).append(self._seconds(run, programs) / calls * 1e6)

    def time_us(self, name: Any) -> float:
        """Microseconds of one kernel call: the median of the samples."""
        return statistics.median(self.samples.get(name, [math.inf]))

    def _seconds(self, run: Callable[[Any], Any], calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            out = run(self.sets)  # older results are freed here: memory holds those of two calls
        jax.block_until_ready(out)
        return time.perf_counter() - start


def compile_all(jobs: dict[Any, Callable[[], Any]], deadline: float, tick: Callable[[], None]) -> dict[Any, Any]:
    """What the jobs give, run in parallel in their order: the result, or the exception; those that have not begun at
    the deadline are left out, and the others waited for: they would disturb whatever is timed next."""
    workers = max(1, min(cores_here(), 16, len(jobs)))
    pool = ThreadPoolExecutor(workers, thread_name_prefix="jtile-tune")
    try:
        futures: dict[Any, Future[Any]] = {k: pool.submit(here(job)) for k, job in jobs.items()}
        for future in futures.values():
            with contextlib.suppress(TimeoutError):
                future.exception(None if math.isinf(deadline) else max(deadline - time.monotonic(), 0.0))
                tick()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return {k: future.exception() or future.result() for k, future in futures.items() if not future.cancelled()}


def in_thread(job: Callable[[], Any]) -> Any:
    """What a job gives in a thread of its own: outside of every trace, with the options of this one."""
    job = here(job)
    if threading.current_thread().name.startswith("jtile-tune"):
        return job()
    with ThreadPoolExecutor(1, thread_name_prefix="jtile-tune-search") as pool:
        return pool.submit(job).result()


def here(job: Callable[[], Any]) -> Callable[[], Any]:
    """A job that runs under the options of this thread, jtile's and JAX's, in whatever thread it is called."""
    context = contextvars.copy_context()
    config = jax.config
    x64, precision = config.jax_enable_x64, config.jax_default_matmul_precision
    promotion, device = config.jax_numpy_dtype_promotion, config.jax_default_device

    def run() -> Any:
        with (
            jax.enable_x64(x64), jax.default_matmul_precision(precision), jax.numpy_dtype_promotion(promotion),
            jax.default_device(device),
        ):  # fmt: skip
            return job()

    return lambda: context.copy().run(run)


def _bytes(x: Any) -> int:
    return math.prod(x.shape) * x.dtype.itemsize
