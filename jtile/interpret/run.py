"""Runs Tile IR in NumPy, one program after the other in a seeded random order."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jtile._errors import KernelTypeError, KernelValueError
from jtile.ir import Kernel, bind_sizes, concrete, is_dynamic
from jtile.ir.types import DTYPES

from . import block, block_ops, control, effects, world  # noqa: F401  (the modules register their rules)
from .machine import Machine


@dataclasses.dataclass(frozen=True)
class Accesses:
    """Which elements of a Ref (one entry per kernel parameter, scratch included) were read and written by any program:
    bool arrays of the Ref's shape. An atomic does both."""

    read: tuple[np.ndarray, ...]
    written: tuple[np.ndarray, ...]


def interpret(
    kernel: Kernel,
    inputs: Sequence[np.ndarray],
    *,
    seed: int = 0,
    check: bool = True,
    trace_accesses: bool = False,
    first: int | None = None,
) -> Any:
    """Run a kernel on NumPy arrays.

    Args:
      kernel: Tile IR at tile level or at block level.
      inputs: one array per input Ref, of its shape and dtype; they are not changed. They say what the dynamic sizes
        of the kernel are.
      seed: order of the programs, and at block level how the roles of a program and their asynchronous copies and
        products take turns. A kernel without races gives the same for every seed.
      check: raise on what the language forbids. Without, such lanes read the pad (or poison) and are not written.
      trace_accesses: return `(outputs, Accesses)`.
      first: run so many programs alone, the first ones of the grid: to look at them, for outputs are not whole then.

    Returns:
      One array per output Ref.

    Raises:
      KernelTypeError, KernelValueError: the inputs do not fit the kernel.
      OutOfBoundsError, RaceError, UninitializedReadError, KernelAssertionError: see there.
      ProtocolError: programs that arrive at a counter name other counts, or too few of them come.
      SharedRaceError, ProtocolError, DeadlockError: at block level, see there.
      InterpreterError: an op failed in NumPy.
    """
    if kernel.devices:
        axes = ", ".join(f"{axis!r}: {n}" for axis, n in kernel.devices)
        raise KernelTypeError(f"kernel {kernel.name} talks to other devices: interpret it on a mesh, mesh={{{axes}}}")
    _check_seed(kernel, seed)
    kernel = _at_sizes(kernel, inputs)
    m = Machine(kernel, _checked_inputs(kernel, inputs), check, seed)
    programs = math.prod(kernel.grid)
    order = np.random.default_rng(seed).permutation(programs if first is None else min(first, programs))
    with np.errstate(all="ignore"):
        for linear in order.tolist():
            m.program(linear)
    if m.arrivals is not None and check and first is None:
        m.arrivals.end()
    outputs = [m.env[v].array.copy() for v in kernel.outputs]
    if not trace_accesses:
        return outputs
    shaped = [[a.reshape(v.shape) for a, v in zip(flags, kernel.params, strict=True)] for flags in (m.read, m.written)]
    return outputs, Accesses(tuple(shaped[0]), tuple(shaped[1]))


def interpret_devices(
    kernel: Kernel, inputs: Sequence[np.ndarray], *, seed: int = 0, check: bool = True, calls: int = 3
) -> list[np.ndarray]:
    """Run a kernel that talks to other devices, on all devices of a call.

    Args:
      inputs: one array per input Ref, with one more leading axis for each axis of `kernel.devices`: what is at
        `[i, j]` is the input of device (i, j).
      seed: how the programs of all devices take turns.
      check: as for `interpret`.
      calls: how many calls each device makes, one after another. What one does to the next shows up in the third:
        two sets of symmetric memory take turns.
    Returns:
      One array per output Ref, with the same leading axes: what the last call gave.

    Raises:
      As `interpret`; RaceError also where two devices, or two calls, touch an element and no signal orders them.
      DeadlockError: every program waits. ProtocolError: a signal for which nobody waits.
    """
    _check_seed(kernel, seed)
    sizes = tuple(n for _, n in kernel.devices)
    arrays = [np.asarray(x) for x in inputs]
    for v, x in zip(kernel.inputs, arrays):
        if x.shape[: len(sizes)] != sizes:
            axes = ", ".join(f"{axis}={n}" for axis, n in kernel.devices)
            raise KernelValueError(
                f"input {v.name} of kernel {kernel.name} has shape {list(x.shape)}: its first axes are those of the "
                f"devices ({axes})"
            )
    parts = [_checked_inputs(kernel, [x[at] for x in arrays]) for at in np.ndindex(*sizes)]
    with np.errstate(all="ignore"):
        found = world.World(kernel, parts, check=check, seed=seed, calls=calls).run()
    return [np.stack(outs).reshape(*sizes, *outs[0].shape) for outs in zip(*found, strict=True)]


def _check_seed(kernel: Kernel, seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise KernelValueError(f"kernel {kernel.name}: seed is an int of at least 0, got {seed!r}")


def _at_sizes(kernel: Kernel, inputs: Sequence[np.ndarray]) -> Kernel:
    """The kernel for the sizes of these arrays, where it leaves sizes open."""
    ranks = [len(v.shape) for v in kernel.inputs]
    if not is_dynamic(kernel) or ranks != [np.ndim(x) for x in inputs]:
        return kernel
    return concrete(kernel, bind_sizes(kernel, [np.shape(x) for x in inputs]))


def _checked_inputs(kernel: Kernel, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    if len(inputs) != len(kernel.inputs):
        raise KernelTypeError(f"kernel {kernel.name} takes {len(kernel.inputs)} inputs, got {len(inputs)}")
    out = []
    for v, x in zip(kernel.inputs, inputs, strict=True):
        x = np.asarray(x)
        if x.shape != v.shape or x.dtype != DTYPES[v.dtype].numpy:
            got = f"{x.dtype.name}{list(x.shape)}"
            raise KernelValueError(f"input {v.name} of kernel {kernel.name} is {v.type}, got {got}")
        out.append(x)
    return out
