"""Tools for people who write kernels: a check of every transform, how far two results are apart, and how fast several
functions are, fairly."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jtile._parts import is_complex
from jtile.testing.report import Check as Check
from jtile.testing.report import Report as Report


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median and the smallest of the samples."""

    median_us: float
    min_us: float


def widest(x: Any) -> np.ndarray:
    """An array in the widest dtype of its kind.

    Args:
      x: numbers.
    Returns:
      The same numbers in float64 or complex128.
    """
    x = np.asarray(x)
    return np.asarray(x, np.complex128 if is_complex(x.dtype) else np.float64)


def relative_error(got: Any, expected: Any) -> float:
    """The norm of a difference over the norm of `expected`, in float64 or complex128, over all leaves of two pytrees.

    Equal infinities and NaN at the same places count as no difference; anywhere else they make the error infinite.

    Args:
      got, expected: pytrees of arrays, of one structure.
    Returns:
      The relative error.
    Raises:
      ValueError: another number of leaves, or other shapes.
    """
    leaves, reference = jax.tree.leaves(got), jax.tree.leaves(expected)
    if len(leaves) != len(reference):
        raise ValueError(f"{len(leaves)} results against {len(reference)} expected ones")
    difference = norm = 0.0
    for a, b in zip(leaves, reference):
        x, y = widest(a), widest(b)
        if x.shape != y.shape:
            raise ValueError(f"a result of shape {x.shape} where {y.shape} is expected")
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        if not np.isfinite(x[~same]).all() or not np.isfinite(y[~same]).all():
            return float("inf")
        difference += float(np.sum(np.abs(x[~same] - y[~same]) ** 2))
        norm += float(np.sum(np.abs(y[np.isfinite(y)]) ** 2))
    if difference == 0:
        return 0.0
    return float("inf") if norm == 0 else (difference / norm) ** 0.5


# Relative norms that a kernel of this result dtype may differ by from a reference of the same or a wider dtype.
TOLERANCES = {
    "float64": 1e-13, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2, "float8_e4m3fn": 8e-2, "float8_e5m2": 2e-1,
    "float8_e4m3": 8e-2, "float8_e3m4": 4e-2, "float8_e4m3fnuz": 8e-2, "float8_e5m2fnuz": 2e-1,
    "float8_e4m3b11fnuz": 8e-2, "complex64": 2e-6,
}  # fmt: skip


def assert_close(got: Any, expected: Any, *, tolerance: float | None = None) -> None:
    """Assert that two pytrees of arrays agree: leaf by leaf in structure, shape and dtype, and in the relative norm.

    Args:
      tolerance: largest relative norm of the difference; default: that of `TOLERANCES` for the leaf's dtype, and 0
        (every element equal) for integers and bool.
    Raises:
      AssertionError: names the leaf, the error and the tolerance.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(got)
    reference, wanted = jax.tree_util.tree_flatten(expected)
    assert tree == wanted, f"results have the structure {tree}, expected {wanted}"
    for (path, a), b in zip(leaves, reference):
        where = jax.tree_util.keystr(path) or "the result"
        x, y = np.asarray(a), np.asarray(b)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), (
            f"{where} is {x.dtype.name}{list(x.shape)}, expected {y.dtype.name}{list(y.shape)}"
        )
        limit = TOLERANCES.get(x.dtype.name, 0.0) if tolerance is None else tolerance
        error = relative_error(x, y)
        assert error <= limit, f"{where} ({x.dtype.name}{list(x.shape)}): relative error {error:.2e} > {limit:.0e}"


def time_alternating(
    functions: Mapping[str, Callable[[], Any]], *, repeats: int = 20, warmup: int = 3, sample_us: float = 300.0
) -> dict[str, Timing]:
    """Time functions of no argument against each other in one process.

    Every round takes one sample of each function, in an order that rotates, so that a change of the machine's speed
    meets all of them. A sample is as many calls as fill `sample_us` microseconds; each call waits for its result.

    Args:
      functions: by name.
      repeats: how many samples are taken of each.
      warmup: calls of each before the first sample.
      sample_us: microseconds that the calls of a sample fill.
    Returns:
      A `Timing` for each name.
    """
    calls = {}
    for name, function in functions.items():
        for _ in range(warmup):
            jax.block_until_ready(function())
        calls[name] = max(1, int(sample_us / max(_sample(function, 1), 0.01)))
    samples: dict[str, list[float]] = {name: [] for name in functions}
    names = list(functions)
    for turn in range(repeats):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(_sample(functions[name], calls[name]))
    return {name: Timing(statistics.median(s), min(s)) for name, s in samples.items()}


def _sample(function: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(calls):
        jax.block_until_ready(function())
    return (time.perf_counter_ns() - start) / calls / 1e3


def check_kernel(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    args: Sequence[Any],
    *,
    name: str | None = None,
    dtypes: Sequence[str] = (),
    order: int = 1,
    constant: Mapping[str, str] | None = None,
    skip: Mapping[str, str] | None = None,
    only: Sequence[str] = (),
    tolerance: float | Mapping[str, float] | None = None,
    derivative_tolerance: float | Mapping[str, float] | None = None,
    step: float = 2.0**-5,
    seed: int = 0,
) -> Report:
    """Check a kernel, or any function that calls kernels, against a function of `jnp`, under every transform.

    The checks: `value` (called eagerly), `jit`, `interpreter` (which also finds accesses out of bounds, races and reads
    of what nobody wrote), `poison` (outputs start as NaN: a forgotten tile shows), `dtype D`, `jvp`, `vjp x` (the
    cotangent of each float argument), `vjp of integers` (float0), `numeric` (the vjp against differences of the kernel
    itself), `checkpoint`, `vmap x` (each argument alone), `vmap all`, `grad of vmap`, `vmap of grad`, `second order`
    (forward over reverse), `export` (value and vjp of the serialised program) and, where there are several devices,
    `shard_map` and `partitioned jit` (a batch sharded over them: right, and without a gather).

    Args:
      kernel: from arrays (or pytrees of them) to arrays.
      reference: the same function without kernels; the names of its parameters are those that reports use.
      args: arguments for both; small and awkward shapes find most.
      name: what the report calls the kernel; default: its `__name__`.
      dtypes: names of dtypes that the float arguments are cast to for a comparison of values; float64 runs under x64.
      order: 2 adds the second order.
      constant: argument (or leaf, such as `"w.scales"`) -> why it has no derivative; it is held fixed.
      skip: check, or its first word -> why it is left out.
      only: first words of the checks to run; default: all.
      tolerance: largest relative error of a result, one number or by dtype; default: `TOLERANCES`.
      derivative_tolerance: largest relative error of a derivative; default: four times `TOLERANCES`.
      step: the step of the differences, along one random direction of elements in [-1, 1].
      seed: the seed of the random directions.
    Returns:
      A `Report`: for each check whether it passed, its largest relative error, or why it was skipped. It prints as a
      table.
    Raises:
      AssertionError: at least one check failed. The message names each check and argument, its error and the limit,
        and ends with the table; the exception's `report` is the report.
    """
    from jtile.testing.checker import Checker, Settings

    settings = Settings(
        tolerance, derivative_tolerance, tuple(dtypes), constant or {}, skip or {}, tuple(only), order, step, seed
    )
    report = Checker(kernel, reference, args, settings).run(name or getattr(kernel, "__name__", repr(kernel)))
    if report.failed:
        lines = [f"{c.name}: {c.detail}" for c in report.failed]
        error = AssertionError("\n".join([f"{report.kernel} fails {len(lines)} checks", *lines, "", str(report)]))
        error.report = report  # pyright: ignore[reportAttributeAccessIssue]
        raise error
    return report
