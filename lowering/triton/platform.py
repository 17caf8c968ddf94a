"""What the records of platforms share whose code `lowering/triton` makes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from jtile import _cache, ir
from jtile._config import current
from jtile._errors import KernelValueError, UnsupportedError

from .. import platforms
from ..platforms import Options, Platform, slug

if TYPE_CHECKING:
    from ..artifact import Artifact
    from ..targets import Target
    from .features import Features


def gpu_platform(
    name: str,
    *,
    example: str,
    prefix: str,
    owns: Callable[[Any], bool],
    arch_of: Callable[[Any], str],
    features: Callable[[], Mapping[str, Features]],
    target: Callable[[str], Target],
    device_target: Callable[[str, Any], Target],
    block_level: bool = False,
    status: str = "",
) -> Platform:
    """The record of a platform of GPUs.

    Args:
      name: of the platform, here and in XLA.
      example: an architecture for messages.
      prefix: what the names of its architectures begin with.
      arch_of: the architecture of a device of JAX.
      target: that of an architecture; device_target: that of an architecture with the numbers of a device.
    """

    def device() -> Any:
        try:
            return jax.devices(name)[0]
        except RuntimeError:
            return None

    @functools.cache  # per process: a device does not change
    def own() -> Target | None:
        found = device()
        return None if found is None else resolved(arch_of(found), found)

    def resolved(arch: str, found: Any = None) -> Target:
        plain = _plain(arch)
        if plain not in features():
            others = ", ".join(a for p in platforms.every() for a in p.features())
            raise KernelValueError(
                f"unknown GPU architecture {arch!r}: jtile compiles for {others}; on another GPU, run kernels on the "
                "CPU (JAX_PLATFORMS=cpu)"
            )
        return target(plain) if found is None else device_target(plain, found)

    def here() -> Target:
        asked = platforms.asked_of(record)
        found = own() if asked is None or device() is not None else None
        if found is not None and (asked is None or _plain(asked) == found.arch):
            return found
        if asked is not None:
            return resolved(asked)
        option = current().arch
        raise UnsupportedError(
            f"this machine has no GPU of platform {name!r}, and "
            + (f"the option arch={option!r} names none" if option else "the option arch is not set")
            + f": set JTILE_ARCH={example}, or write `with jt.config(arch={example!r}):` around the export"
        )

    def resolve(text: str) -> Target:
        arch = text.partition(":")[2]
        if not arch:
            raise UnsupportedError(
                f"target {text!r} names no architecture: write {f'{name}:{example}'!r}, or another of {names()}"
            )
        other = next((p for p in platforms.every() if p.name != name and arch in p.features()), None)
        if other is not None:
            raise KernelValueError(f"target {text!r}: {arch} is an architecture of platform {other.name!r}")
        return resolved(arch)

    def names() -> list[str]:
        return [f"{name}:{arch}" for arch in features()]

    def is_here() -> bool:
        found = own()
        return found is not None and here().arch == found.arch

    def register() -> None:
        from jtile import ffi

        ffi.register(name)

    record = Platform(
        name=name,
        hosts=(name,),
        call=f"jtile_{name}",
        io_call=f"jtile_{name}_io",
        compile=_compile,
        attributes=_attributes,
        resolve=resolve,
        names=names,
        here=here,
        owns=owns,
        kind=lambda: slug(device().device_kind) if is_here() else here().arch,
        is_here=is_here,
        register=register,
        claims=lambda arch: arch.startswith(prefix),
        features=features,
        tools=lambda: (_cache.version("triton"),),
        fuses_slices=True,
        block_level=block_level,
        status=status,
    )
    return record


def _plain(arch: str) -> str:
    """`sm_90` of `sm_90a`: code for an architecture may use all that it has."""
    return arch.rstrip("a") if arch.startswith("sm_") else arch


def _compile(kernel: ir.Kernel, target: Target, options: Options, texts: bool) -> Artifact:
    from .compile import compile_kernel

    return compile_kernel(kernel, target, options, texts=texts)


def _attributes(artifact: Artifact, kernel: ir.Kernel, values: Mapping[str, Any]) -> dict[str, Any]:
    """As the handlers in ffi/csrc/gpu_handlers.h declare them."""
    return {"image": artifact.image, "record": artifact.launch["record"]}
