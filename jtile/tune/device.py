"""Which device choices are made for, and whether it is here to measure on."""

from __future__ import annotations

import functools
import os
import re
from typing import TYPE_CHECKING

import jax

from jtile._config import current
from jtile._platform import gpu_arch, platform

if TYPE_CHECKING:
    from jtile.lowering.targets import Target


def target() -> Target:
    """The `Target` that a kernel called here will most likely be compiled for: that of `jt.platform()` and
    `jt.architecture()`.

    Implementations and tiles are chosen by what it has: `"warpgroup products" in jt.target().features`.
    """
    where = platform()
    isa = current().isa if where == "cpu" else gpu_arch(where)
    return _resolved(f"{where}:{isa}" if isa else where)


@functools.cache
def _resolved(name: str) -> Target:
    from jtile.lowering import targets

    return targets.resolve(name)


def kind() -> str:
    """The name that records of this device are filed under: `nvidia-h200`, `cpu-znver5-2t`; the architecture where
    there is no such device here, as when a program is exported for it."""
    name, options = platform(), current()
    if name == "cpu":
        return _cpu_kind(options.isa)
    return _gpu_kind(name) if is_here() else gpu_arch(name)


def is_here() -> bool:
    """Whether the device is one of this machine's, so that it can measure."""
    name = platform()
    return name == "cpu" or not current().arch or _arch_here(name) == gpu_arch(name).removesuffix("a")


def slug(name: str) -> str:
    """A device's name as the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@functools.cache
def _cpu_kind(isa: str | None) -> str:
    from jtile.lowering import targets

    arch = targets.resolve(isa and f"cpu:{isa}").arch.split(":")
    return slug(f"cpu-{arch[1] or arch[0]}-{len(os.sched_getaffinity(0))}t")


@functools.cache
def _gpu_kind(name: str) -> str:
    return slug(jax.devices(name)[0].device_kind)


@functools.cache
def _arch_here(name: str) -> str | None:
    try:
        found = str(jax.devices(name)[0].compute_capability)
    except RuntimeError:
        return None
    return found.split(":")[0] if name == "rocm" else f"sm_{found.replace('.', '')}"
