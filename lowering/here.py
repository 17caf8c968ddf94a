"""Which platform and which target the kernels of a call are made for, as far as it is known before they are lowered."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jtile._config import current

from . import platforms
from .targets import Target


def platform() -> str:
    """The platform on which a kernel called here will most likely run.

    Library kernels choose their tiles by it; a wrong guess costs speed only. The option `arch` says it, or else JAX's
    default device.

    Returns:
      `"cpu"`, `"cuda"`, `"rocm"`, `"ascend"`, or the name of a platform of another package.
    """
    asked = current().arch
    if asked:
        return platforms.claiming(asked.split(",")[0]).name
    return _platform(jax.config.jax_default_device)


def architecture() -> str | None:
    """The architecture that a kernel called here will most likely be compiled for.

    Returns:
      Its name, such as `"sm_90"` or `"gfx942"`; None on a CPU.
    """
    found = target()
    return found.arch if platforms.named(found.platform).claims(found.arch) else None


def target() -> Target:
    """The `Target` that a kernel called here will most likely be compiled for.

    Implementations and tiles are chosen by what it has: `"warpgroup products" in jt.target().features`.

    Returns:
      A `Target`; on a GPU with the numbers that the device tells.
    """
    return platforms.named(platform()).here()


@functools.lru_cache(maxsize=64)
def _platform(device: Any) -> str:
    if isinstance(device, str):
        device = jax.devices(device)[0]
    if device is None:
        device = jax.devices()[0]
    return next((p.name for p in platforms.every() if p.owns(device)), "cpu")
