"""Scripts of NumPy (`numpy_scripts/`) as they are, and with their import changed to `jtile.numpy`."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy

from benchmarks import harness
from benchmarks.data import size
from jtile.testing import time_alternating

FOLDER = Path(__file__).parent / "numpy_scripts"
ELEMENTS = 1_000_000  # elements of the largest arrays
CHAOTIC = {"logistic_map": 1e-6}  # larger errors that count as right: of a map that doubles differences in each round
ROUNDS = 8  # rounds before the clock runs: a program is compiled when that pays, so that the first rounds run in NumPy
# The scripts that jax.numpy runs unchanged, under `jax.jit`: nothing is assigned to elements, and no result is looked
# at.
FUNCTIONAL = """bessel black_scholes collatz day_of_week eigenvalues epidemic gray_scott haversine julia_set kepler
logistic_map lorenz n_body newton_fractal pendulums simpson sun"""


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py"))


class _Changed(importlib.machinery.SourceFileLoader):
    """A loader of a script whose first import is replaced."""

    module = "jtile.numpy"

    def get_code(self, fullname: str) -> Any:
        text = self.get_data(self.path).decode()
        before, after = "import numpy as np\n", f"import {self.module} as np\n"
        if text.count(before) != 1:
            raise ValueError(f"{self.path}: {before.strip()!r} must be there once")
        return self.source_to_code(text.replace(before, after).encode(), self.path)


class _Jax(_Changed):
    module = "jax.numpy"


def script(name: str, module: str = "numpy") -> ModuleType:
    """A script over `numpy`, or with its import changed to `jtile.numpy` or `jax.numpy`. `data(n)` makes the arguments
    of `run`, arrays of which the largest have n elements; `run` gives arrays and numbers."""
    loaders = {"numpy": importlib.machinery.SourceFileLoader, "jtile.numpy": _Changed, "jax.numpy": _Jax}
    loader = loaders[module](f"{name}_over_{module.replace('.', '_')}", str(FOLDER / f"{name}.py"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    found = importlib.util.module_from_spec(spec)
    loader.exec_module(found)
    return found


def looked_at(results: Any) -> list[numpy.ndarray]:
    """All results of a script as arrays of NumPy."""
    return [numpy.asarray(value) for value in (results if isinstance(results, tuple) else (results,))]


def error(got: list[numpy.ndarray], want: list[numpy.ndarray]) -> float:
    """The largest difference, relative to the largest element; infinite where dtypes, shapes or integers differ."""
    worst = 0.0
    for ours, theirs in zip(got, want, strict=True):
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            return float("inf")
        if theirs.dtype.kind not in "fc":
            worst = worst if (ours == theirs).all() else float("inf")
            continue
        away = numpy.abs(ours - theirs).max(initial=0.0) / max(numpy.abs(theirs).max(initial=0.0), 1e-300)
        worst = max(worst, float(away))
    return worst


def results(
    roofline: Any, repeats: int, *, unit: str = "f32", elements: int = ELEMENTS, takes: Callable[[str], bool] = bool
) -> Iterator[harness.Result]:
    """A result for each script; `unit`: of the peak rate of `roofline` that counts; `takes(name)`: whether it runs."""
    for name in filter(takes, names()):
        theirs, ours = script(name), script(name, "jtile.numpy")
        data, same = theirs.data(elements), ours.data(elements)
        calls = {
            "ours": lambda run=ours.run, data=same: looked_at(run(*data)),
            "numpy": lambda run=theirs.run, data=data: looked_at(run(*data)),
        }
        if name in FUNCTIONAL.split():
            calls["jax.jit"] = _jitted(name, data)
        for _ in range(ROUNDS):
            got = calls["ours"]()
        far = error(got, calls["numpy"]())
        if not far <= CHAOTIC.get(name, 1e-9):
            raise harness.WrongResultError(f"numpy {name}: relative error {far:.2g}")
        times = time_alternating(calls, repeats=min(repeats, 9))
        bound = roofline.bound_us(size(*data), 0, unit)
        yield harness.result("numpy", name, "float64", roofline.device, times, bound_us=bound, error=far)


def _jitted(name: str, data: tuple) -> Any:
    with jax.enable_x64(True):
        run, arrays = jax.jit(script(name, "jax.numpy").run), jax.tree.map(jax.numpy.asarray, data)

    @functools.wraps(run)
    def call():
        with jax.enable_x64(True):
            return jax.block_until_ready(run(*arrays))

    return call
