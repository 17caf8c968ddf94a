"""`jt.profile`: what the roles of the block-level kernels of a function do when."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jtile import passes
from jtile._config import config
from jtile._errors import KernelValueError, UnsupportedError
from jtile.ir import Kernel
from jtile.ir.block import level_of
from jtile.lowering import platforms, targets
from jtile.lowering.targets import Target
from jtile.lowering.triton.block.passes import NoPlan, block_level
from jtile.lowering.triton.block.passes.plan import Machine
from jtile.lowering.triton.block.passes.stamps import stamped
from jtile.primitive import lowering
from jtile.tune import device, measure
from jtile.tune.programs import operands, trace
from jtile.tune.timeline import Timeline, timeline


@dataclasses.dataclass(frozen=True)
class Profile:
    """What `jt.profile` found; prints as a table.

    Attributes:
      timelines: those of the block-level kernels, in the order of their first calls.
      without: (kernel, reason) of the kernels that have none, since they stay at tile level.
    """

    timelines: tuple[Timeline, ...]
    without: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [str(t) for t in self.timelines]
        return "\n".join([*lines, *(f"{name}: no timeline: {reason}" for name, reason in self.without)])

    def __getitem__(self, name: str) -> Timeline:
        """The timeline of the kernel of a name."""
        found = [t for t in self.timelines if t.kernel == name]
        if not found:
            known = ", ".join(t.kernel for t in self.timelines) or "none"
            raise KernelValueError(f"no kernel {name!r} has a timeline here; those that have: {known}\n{self}")
        return found[0]


def profile(
    f: Callable[..., Any], *args: Any, programs: int = 4, capacity: int = 4096, interpret: bool = False, seed: int = 0
) -> Profile:
    """Run every kernel of `f(*args)` that has roles once, with a clock in each role, and give their timelines.

    A role records the times when it begins and ends to wait, and when it starts a copy or a product, which costs some
    tens of nanoseconds each time. Kernels run one after the other. If all arguments are arrays, kernels get the
    operands that the function computes (with zeros for the results of other kernels), otherwise random ones: normal
    floats and integers from 0 to 7.

    Args:
      f: a JAX function, jitted or not.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`. Give arrays if lengths or sizes in them decide how much
        work there is.
      programs: how many blocks are recorded, the first ones of the grid.
      capacity: the largest number of records of a role in a block.
      interpret: run the schedule for sm_90 in the interpreter, without a GPU. Times are then steps, which show what
        waits for what, but nothing about speed.
      seed: the seed of the interpreter's order of steps.

    Returns:
      A `Profile`: `p["matmul"]` has the timeline of a kernel.

    Raises:
      KernelTypeError: called inside of a trace. UnsupportedError: there is no GPU with warpgroup products here.
      KernelValueError: `programs` or `capacity` is none of 1, 2, ...
    """
    for name, n in {"programs": programs, "capacity": capacity}.items():
        if not isinstance(n, int) or n < 1:
            raise KernelValueError(f"jt.profile: {name} is a Python int of at least 1, got {n!r}")
    target = _target(interpret)
    with config(arch=target.arch) if interpret else contextlib.nullcontext():  # tiles are chosen for this architecture
        found, calls = trace(f, *args)
        given = operands(f, *args)
    data = {call.bound({}).program: call.data for call in calls}
    lines: list[Timeline] = []
    without: list[tuple[str, str]] = []
    for program in found:
        for piece in lowering.pieces_of(program, target).kernels:
            made = lowering.complete(piece, platforms.named(target.platform))
            plan = block_kernel(made.kernel, target, program.options.compiler)
            if isinstance(plan, NoPlan):
                without.append((program.name, str(plan)))
                continue
            arrays = inputs_of(piece, given.get(program) or data.get(program, lambda: None)())
            arrays += [*lowering.filled(made.starts), *made.tables]
            lines.append(watch(plan, target, arrays, program.name, programs, capacity, interpret=interpret, seed=seed))
    return Profile(tuple(lines), tuple(without))


def _target(interpret: bool) -> Target:
    """The target at hand, if kernels have roles there; for the interpreter also the common one that has them."""
    found = device.target()
    able = "warpgroup products" in found.features
    if able and (interpret or device.is_here()):
        return found
    if interpret:
        return targets.resolve("cuda:sm_90")
    raise UnsupportedError(
        "jt.profile watches kernels on a GPU with warpgroup products (sm_90), which this machine does not have; "
        "interpret=True (`jtile profile --interpret`) runs their schedules in the interpreter, and "
        "jt.profile_program (`jtile profile --program`) watches whole programs on any machine"
    )


def inputs_of(kernel: Kernel, given: Sequence[Any] | None) -> list[Any]:
    if given is not None and [tuple(x.shape) for x in given] == [v.shape for v in kernel.inputs]:
        return list(given)
    types = [jax.ShapeDtypeStruct(v.shape, v.type.info.numpy) for v in kernel.inputs]
    return [measure.random_array(x, k) for k, x in enumerate(types)]


def watch(
    kernel: Kernel,
    target: Target,
    arrays: Sequence[Any],
    name: str,
    programs: int,
    capacity: int,
    *,
    interpret: bool,
    seed: int = 0,
    alone: bool = False,
) -> Timeline:
    """The timeline of one kernel at the block level; see `profile`.

    Args:
      arrays: the inputs of the kernel.
      alone: in the interpreter, run the programs that are watched and no others.
    """
    count = min(programs, math.prod(kernel.grid))
    watched, sites = stamped(kernel, count, capacity)
    if interpret:
        stamps = _interpreted(watched, arrays, seed, count if alone else None)
    else:
        stamps = _measured(watched, target, arrays)
    return timeline(name, stamps, sites, "steps" if interpret else "ns")


def block_kernel(kernel: Kernel, target: Target, options: Mapping[str, Any]) -> Kernel | NoPlan:
    """The kernel at the block level, of the same inputs; outputs start from those that are aliased to them."""
    from jtile.lowering import starts

    plain = passes.run_pipeline(starts.without_idle_aliases(kernel), passes.TILE)
    plan = plain if level_of(plain) == "block" else block_level(plain, Machine.of(target), options)
    return plan if isinstance(plan, NoPlan) else dataclasses.replace(plan, aliases=kernel.aliases, inits=())


def _interpreted(kernel: Kernel, arrays: Sequence[Any], seed: int, first: int | None) -> np.ndarray:
    from jtile.interpret import interpret

    return interpret(kernel, [np.asarray(x) for x in arrays], seed=seed, first=first)[-1]


def _measured(kernel: Kernel, target: Target, arrays: Sequence[Any]) -> np.ndarray:
    """The stamps of the second of two runs: the first one loads the kernel."""
    from jtile.lowering.triton.block.compile import compile_block_kernel

    artifact = compile_block_kernel(kernel, target)
    call = jax.jit(lambda *arrays: lowering.call_as_is(platforms.named(target.platform), kernel, artifact, arrays)[-1])
    with jax.enable_x64(True):
        call(*arrays).block_until_ready()
        return np.asarray(call(*arrays))
