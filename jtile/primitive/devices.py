"""Programs that talk to other devices: where this device is, and the interpreter inside of `shard_map`.

A call knows its place: the group of devices that talk to each other, and its place among them along each axis of
`Program.devices`. Interpreted, every device gathers the operands of all and takes its part of what the world gives.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jtile._compat import mesh_of
from jtile._config import current
from jtile._errors import UnsupportedError
from jtile._memo import Recent
from jtile._mesh import mesh_axes
from jtile.primitive.program import Program

if TYPE_CHECKING:
    from jax.interpreters import mlir


def can_talk(devices: Iterable[Any] | None = None) -> bool:
    """Whether kernels on these devices can talk to each other: all are of this process, the target at hand has such
    kernels and no option forbids them, and each device reaches the memory of the others.

    Args:
      devices: JAX's devices, as in `mesh.devices.flat`; None: all of this process.
    """
    found = list(jax.local_devices() if devices is None else devices)
    if any(d.process_index != jax.process_index() for d in found):
        return False
    if current().interpret:
        return True
    from jtile.lowering import platforms, targets
    from jtile.lowering.here import target

    if not targets.talks(target()):
        return False
    reach = platforms.named(target().platform).reach
    return not any(reach(a, b) for a in found for b in found if a is not b)


def place(program: Program) -> jax.Array:
    """int32 [1 + axes]: the number of the group, and the place along each axis of `program.devices`; inside of
    `shard_map`."""
    return place_along(program.devices)


def place_along(axes: Iterable[tuple[str, int]]) -> jax.Array:
    """As `place`, for devices that talk to each other along some axes of the mesh."""
    own = [axis for axis, _ in axes]
    group = jnp.zeros((), np.int32)
    for axis, n in mesh_axes().items():
        if axis not in own:
            group = group * np.int32(n) + jax.lax.axis_index(axis)
    return jnp.stack([group, *(jax.lax.axis_index(axis) for axis in own)])


def groups(program: Program, ctx: mlir.LoweringRuleContext) -> np.ndarray:
    """The groups of devices along a program's axes, as `device_groups` gives them."""
    return device_groups([axis for axis, _ in program.devices], ctx, f"kernel {program.name}", program.where)


def device_groups(own: Sequence[str], ctx: mlir.LoweringRuleContext, what: str, where: Any) -> np.ndarray:
    """int64 [groups * devices]: the devices that talk to each other along some axes, by their numbers in this process,
    group by group, those of a group row by row over the axes.

    Args:
      own: the axes.
      what, where: the call, and its place in the source, for errors.
    Raises:
      UnsupportedError: devices of several processes, or an export, which has no devices.
    """
    mesh = mesh_of(ctx)
    found = [] if mesh is None else list(mesh.devices.flat)
    if mesh is None or len({d.process_index for d in found}) > 1:
        why = "is exported, and the devices that it talks to are not known"
        if found:
            why = "talks to devices of other processes, and its memory is reached inside of one process only"
        raise UnsupportedError(f"{what} {why}: put collectives of jax.lax around the kernel instead", where)
    names = list(mesh.axis_names)
    order = [*(k for k, name in enumerate(names) if name not in own), *(names.index(axis) for axis in own)]
    devices = np.transpose(mesh.devices, order).reshape(-1)
    return np.asarray([d.local_hardware_id for d in devices], np.int64)


def gathered(program: Program, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The operands of all devices of this group, with one leading axis for each axis of `program.devices`; and the
    place of this device."""
    out = []
    for x in operands:
        for axis, _ in reversed(program.devices):
            x = jax.lax.all_gather(x, axis)
        out.append(x)
    return [*out, place(program)]


def run_on_devices(program: Program, operands: Sequence[Any], seed: int | None = None) -> list[np.ndarray]:
    """Run a program on all of its devices in the reference interpreter: operands and results have one leading axis for
    each axis of `program.devices`."""
    from jtile.interpret import interpret_devices

    seed = current().seed if seed is None else seed
    outs = interpret_devices(program.kernel, [np.asarray(x) for x in operands], seed=seed)
    return [np.asarray(x).astype(o.dtype) for x, o in zip(outs, program.out_avals, strict=True)]


class _Worlds:
    """The last results: each device of a group asks for the same ones."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.found: Recent[Any, Any] = Recent(16)

    def run(self, program: Program, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
        digest = hashlib.sha256()
        for x in operands:
            digest.update(np.ascontiguousarray(x).tobytes())
        key = program.fingerprint, current().seed, digest.digest()
        with self.lock:
            out = self.found.get(key)
            if out is None:
                out = self.found.put(key, run_on_devices(program, operands))
        return out


@functools.cache
def _worlds() -> _Worlds:
    return _Worlds()


def own_part(program: Program, at: Any, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What the device at a place (as `place` gives it) gets, of `gathered` operands."""
    where = tuple(int(i) for i in np.asarray(at)[1:])
    return [x[where] for x in _worlds().run(program, operands)]
