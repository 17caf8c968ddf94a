"""Functions of `shard_map` as execution graphs of several GPUs, evaluated on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import graph_programs as programs
import jax
import numpy as np
from ttir.task_devices import GraphWorld

import jtile as jt
from jtile.execution import primitive
from jtile.execution.build import Wired, array_of
from jtile.execution.graphed import Cut, _cut
from jtile.execution.schedule import Schedule


class World:
    """The only launch of a function, on devices along axes of a mesh.

    Args:
      args: those of all devices, one behind the other along the first axis.
    """

    def __init__(self, f: Callable, args: Sequence[np.ndarray], devices: Mapping[str, int], cores: int):
        self.cut = cut_of(f, args, devices)
        (self.region,) = self.cut.regions
        self.wired: Wired
        self.schedule: Schedule
        self.wired, self.schedule = primitive.scheduled(self.region, primitive.Options(cores=cores))
        self.site, self.count = GraphWorld(self.schedule), math.prod(devices.values())

    def run(self, calls: Sequence[Sequence[np.ndarray]], seed: int = 0, **options) -> list[list[np.ndarray]]:
        """The results of calls in a row."""
        given = []
        for args in calls:
            have = [dict(zip(self.cut.inputs, (a[d] for a in args), strict=True)) for d in range(self.count)]
            given.append([[array_of(x, of) for x in self.wired.operands] for of in have])
        number = [self.wired.results[self.region.outputs.index(v)] for v in self.cut.outputs]
        return [
            [np.stack([of[k].reshape(v.shape) for of in found]) for k, v in zip(number, self.cut.outputs, strict=True)]
            for found in self.site.launches(given, seed, **options)
        ]


def cut_of(f: Callable, args: Sequence[np.ndarray], devices: Mapping[str, int]) -> Cut:
    own = tuple(jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in args)
    return _cut(jt.graph(f)._traced(own, {}, devices)[0], devices)


def random_program(seed: int) -> tuple[Callable, Callable]:
    """A function of two arrays with kernels, sums over "x" and updates in place, and what it gives for the arrays of
    all devices by NumPy."""
    rng = np.random.default_rng(seed)
    steps = [(str(rng.choice(["sum", "sum", "double", "add", "append"])), *rng.integers(0, 1000, 2)) for _ in range(5)]
    steps = [*steps, ("sum", 0, 1), ("add", 999, 998)]

    def apply(x, y, total, doubled, added, appended):
        have = [x, y]
        make = {"sum": lambda a, b: total(a), "double": lambda a, b: doubled(a), "add": added}
        make["append"] = lambda a, b: appended(added(a, b), b)
        for kind, i, j in steps:
            have.append(make[kind](have[i % len(have)], have[j % len(have)]))
        return have[-3:]

    add = lambda a, b: a + b
    return (
        lambda x, y: apply(x, y, lambda a: jax.lax.psum(a, "x"), programs.doubled, programs.added, programs.appended),
        lambda x, y: apply(x, y, lambda a: np.broadcast_to(a.sum(0), a.shape), lambda a: 2 * a, add, add),
    )
