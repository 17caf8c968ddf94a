"""Which platform and which target the kernels of a call are made for, as far as it is known before they are lowered."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax

from jtile._config import current, jit_key

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
    found = platforms.named(platform()).here()
    missing = _without.get()
    return (
        dataclasses.replace(found, features=tuple(f for f in found.features if f not in missing)) if missing else found
    )


_without: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("jtile_without", default=frozenset())
BLOCK_LEVEL = frozenset(["warpgroup products"])  # what kernels at the block level need


@contextlib.contextmanager
def tile_level() -> Iterator[None]:
    """A block in which library functions choose implementations as for a target without a block level."""
    token = _without.set(BLOCK_LEVEL)
    try:
        with jit_key("tile level"):
            yield
    finally:
        _without.reset(token)


@functools.lru_cache(maxsize=64)
def _platform(device: Any) -> str:
    if isinstance(device, str):
        device = jax.devices(device)[0]
    if device is None:
        device = jax.devices()[0]
    return next((p.name for p in platforms.every() if p.owns(device)), "cpu")
