"""Scripts of NumPy with their import changed, computed on a GPU; beside NumPy itself, on the processor of its machine,
and `jax.numpy` under `jax.jit` on the GPU, whose arguments and results stay there. Records: `--json
benchmarks/records/h200/numpy.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks import numpy as scripts
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import Options
from benchmarks.harness import Result


def results(machine: Machine, options: Options, say: Callable[[str], None], tiny: bool = False) -> Iterator[Result]:
    """A result for each script that is asked for, of arrays of a million elements of float64."""
    takes = lambda name: options.takes(name, "float64")
    elements = 10_000 if tiny else scripts.ELEMENTS
    for got in scripts.results(machine, options.repeats, unit="bf16", elements=elements, takes=takes):
        record = got.record
        say(f"numpy {record.config}: {record.ours_us:.0f} us, {record.peers['numpy'] / record.ours_us:.1f} of NumPy")
        yield got
