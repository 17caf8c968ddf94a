"""Which platform and which GPU architecture kernels are made for."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jtile._config import current
from jtile._errors import UnsupportedError


def platform() -> str:
    """`"cpu"`, `"cuda"` or `"rocm"`: where a kernel that is called here will most likely run.

    Library kernels choose their tiles by it; a wrong guess costs speed only. The option `arch` says it, or else JAX's
    default device.
    """
    asked = current().arch
    if asked:
        return "cuda" if asked.startswith("sm_") else "rocm"
    return _platform(jax.config.jax_default_device)


def architecture() -> str | None:
    """The GPU architecture, `"sm_90"` or `"gfx942"`, that a kernel called here will most likely be compiled for; None
    on a CPU. Library kernels choose smaller tiles by it where shared memory is small."""
    where = platform()
    return None if where == "cpu" else gpu_arch(where)


@functools.lru_cache(maxsize=64)
def _platform(device: Any) -> str:
    if isinstance(device, str):
        device = jax.devices(device)[0]
    if device is None:
        device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda", "rocm"):
        return "cpu"
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def gpu_arch(platform: str) -> str:
    """The architecture to compile for on `"cuda"` or `"rocm"`: the option `arch`, or that of the first GPU here.

    Raises:
      UnsupportedError: there is none of that platform, as where a program is exported for it.
    """
    asked = current().arch
    for arch in asked.split(",") if asked else ():
        if arch.startswith("sm_") == (platform == "cuda"):
            return arch
    try:
        return _arch(platform)
    except RuntimeError as e:
        some = "sm_90" if platform == "cuda" else "gfx942"
        raise UnsupportedError(
            f"this machine has no GPU of platform {platform!r}, and "
            + (f"the option arch={asked!r} names none" if asked else "the option arch is not set")
            + f": set JTILE_ARCH={some}, or write `with jt.config(arch={some!r}):` around the export"
        ) from e


@functools.lru_cache(maxsize=8)
def _arch(platform: str) -> str:
    found = str(jax.devices(platform)[0].compute_capability)
    return found.split(":")[0] if platform == "rocm" else f"sm_{found.replace('.', '')}"
