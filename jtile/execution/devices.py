"""Graphs that talk to other devices: sums over the devices of `shard_map` as tasks, and the graph of all devices.

Every device runs the same graph. A sum over an axis is an ordinary kernel, whose inputs are the arrays of all devices:
a band of it waits for what writes its part of each of them, here and elsewhere. So the graph of all devices together is
an execution graph like any other (`joint`), and says what the graph of one device must wait for (`of_one`); the
interpreter runs the joint one, and finds edges that miss between devices as it finds others.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jtile import ir
from jtile.fusion.steps import Step, Value
from jtile.lowering import registry
from jtile.lowering.targets import Target

from .tasks import Band, Memory, Task, TaskGraph

SUMS = ("psum", "psum_invariant")  # primitives of `jax.lax.psum`, by how `shard_map` follows types
PROGRAM = 4096  # elements that a program of a sum adds up
OF_GPU = 2048  # on a GPU, whose blocks each load at their own rate
READ = 16 << 20  # bytes that a GPU reads of others for a sum, where these are more than one
MOST = 32  # devices that a sum is over, at most: a GPU's blocks look at all of them at once


def is_sum(step: Step) -> bool:
    """Whether a step adds up arrays over named axes."""
    return step.name in SUMS and step.params.get("axis_index_groups") is None and bool(axes_of(step))


def axes_of(step: Step) -> tuple[str, ...]:
    axes = step.params.get("axes", ())
    return tuple(axes) if all(isinstance(a, str) for a in axes) else ()


def refusal(step: Step, sizes: Mapping[str, int], own: bool) -> str | None:
    """Why a sum is no task, or None. `sizes`: devices along each axis; `own`: each device reads memory of its own, as
    host devices do."""
    if any(axis not in sizes for axis in axes_of(step)):
        return "the number of devices along its axes is not known here"
    others = math.prod(sizes[axis] for axis in axes_of(step)) - 1
    if others >= MOST:
        return f"it adds up over more than {MOST} devices"
    for x in step.ins:
        if not isinstance(x, Value) or not all(isinstance(n, int) for n in x.shape) or 0 in x.shape:
            return "it has no elements, or their number is known only when it runs"
        if ir.dtype_info(x.dtype).kind not in "iuf" or ir.dtype_info(x.dtype).bits < 16:
            return f"it adds up {x.dtype}, and tasks add up numbers of 16 bits and more"
        read = others * math.prod(x.shape) * ir.dtype_info(x.dtype).bits // 8
        if not own and others > 1 and read > READ:
            return f"each device would read {read >> 20} MiB of others, and XLA's sum takes turns"
    return None


@dataclasses.dataclass(frozen=True)
class Sum:
    """What a task that adds up arrays of all devices is made of, `program` elements at a time; of one device, a task
    that copies an array."""

    elements: int
    dtype: str
    devices: int
    target: Target
    program: int = PROGRAM

    @property
    def kernel(self) -> ir.Kernel:
        return _kernel(self.elements, self.dtype, self.devices, self.program)

    @property
    def artifact(self) -> Any:
        return registry.compile(self.kernel, self.target, options={"bands": True})


@functools.cache
def _kernel(elements: int, dtype: str, devices: int, program: int) -> ir.Kernel:
    """A block of elements a program; the devices in their order, so that all of them get the same bits."""
    size, short = min(program, elements), lambda d: ir.DTYPES[d].short
    own, wide = (f"tile<{size}x{short(d)}>" for d in (dtype, _wide(dtype) if devices > 1 else dtype))
    ref = f"ref<{elements}x{short(dtype)}"
    lines, first = ["%i = program_id 0"], ""
    for k in range(devices):
        lines.append(f"%a{k} = load %x{k}[tile(%i, {size})] : {own}")
        lines += [f"%b{k} = cast %a{k} : {wide}"] if own != wide else []
        part = f"%{'a' if own == wide else 'b'}{k}"
        lines.append(f"%s{k} = add {f'%s{k - 1}' if k > 1 else first}, {part} : {wide}" if k else "")
        first = part if k == 0 else first
    last = f"%s{devices - 1}" if devices > 1 else first
    lines += [f"%r = cast {last} : {own}"] if own != wide else []
    lines.append(f"store %o[tile(%i, {size})], {'%r' if own != wide else last}")
    refs = ", ".join(f"%x{k}: {ref}>" for k in range(devices))
    body = "\n".join(filter(None, lines))
    name = "all_reduce" if devices > 1 else "copied"
    return ir.parse_kernel(f"kernel @{name}({refs}, %o: {ref}, out>) grid({-(-elements // size)}) {{\n{body}\n}}")


def _wide(dtype: str) -> str:
    """The dtype in which elements are added up."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


# -- the graph of all devices -----------------------------------------------------------------------------------------


def joint(tasks: Sequence[Task], memories: Sequence[Memory], devices: int) -> tuple[list[Task], list[Memory]]:
    """The tasks and memories of all devices: each task on one device after the other."""
    many = len(memories)
    operands = sum(m.operand is not None for m in memories)
    results = sum(m.result is not None for m in memories)
    moved = lambda n, by: None if n is None else n + by
    all_memories = [
        dataclasses.replace(m, operand=moved(m.operand, d * operands), result=moved(m.result, d * results))
        for d in range(devices)
        for m in memories
    ]
    all_tasks = []
    for task in tasks:
        where = task.peers or (-1,) * len(task.memories)
        for d in range(devices):
            own = tuple(m + many * (d if peer < 0 else peer) for m, peer in zip(task.memories, where, strict=True))
            all_tasks.append(dataclasses.replace(task, memories=own, peers=(), device=d))
    return all_tasks, all_memories


def of_one(whole: TaskGraph, tasks: Sequence[Task], memories: Sequence[Memory], devices: int) -> TaskGraph:
    """The graph of one device, from that of all: a band waits for bands of its own device, and for bands of all of
    them, if another device's is among those that it needs."""
    count = collections.Counter(b.task // devices for b in whole.bands if b.task % devices == 0)
    first = np.cumsum([0, *(count[t] for t in range(len(tasks)))])
    local: list[int] = []  # for each band of all devices its number on its own
    seen: collections.Counter[int] = collections.Counter()
    for band in whole.bands:
        local.append(int(first[band.task // devices]) + seen[band.task])
        seen[band.task] += 1
    bands: list[Band] = []
    for band in whole.bands:
        if band.task % devices:
            continue
        far = {local[n] for n in band.needs if whole.bands[n].task % devices}
        near = {local[n] for n in band.needs} - far
        bands.append(
            dataclasses.replace(
                band, task=band.task // devices, needs=tuple(sorted(near)), everywhere=tuple(sorted(far))
            )
        )
    return TaskGraph(tuple(tasks), tuple(memories), tuple(bands), whole.cores, devices)


def number_of(axes: Sequence[tuple[str, int]]) -> int:
    return math.prod(n for _, n in axes)
