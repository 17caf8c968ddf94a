"""The parts that are common to the records of all platforms whose code `lowering/triton` makes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
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


@dataclasses.dataclass(frozen=True)
class Gpus:
    """The properties by which GPUs of one vendor differ from others.

    Attributes:
      name: name of the platform, here and in XLA.
      example: an architecture, for messages.
      owns: whether a device of JAX is one of them; arch_of: the architecture of such a device.
      features: the features of each architecture.
      target: gives the target of an architecture; device_target: the target with the numbers of a device of JAX.
    """

    name: str
    example: str
    owns: Callable[[Any], bool]
    arch_of: Callable[[Any], str]
    features: Callable[[], Mapping[str, Features]]
    target: Callable[[str], Target]
    device_target: Callable[[str, Any], Target]

    def platform(
        self, *, block_level: bool = False, peers: bool = False, graphs: bool = False, exchanges: bool = False,
        status: str = "",
    ) -> Platform:  # fmt: skip
        """The record of the platform; see `jtile.lowering.platforms.Platform` for the arguments."""
        return Platform(
            name=self.name,
            hosts=(self.name,),
            call=f"jtile_{self.name}",
            io_call=f"jtile_{self.name}_io",
            graph_call=f"jtile_{self.name}" if graphs else None,
            compile_graph=_compile_graph if graphs else None,
            graph_refusal=_graph_refusal,
            exchange_calls=(f"jtile_{self.name}_exchange", f"jtile_{self.name}_exchanged") if exchanges else None,
            compile=_compile,
            attributes=_attributes,
            resolve=self._resolve,
            names=self._names,
            here=self._here,
            owns=self.owns,
            kind=self._kind,
            is_here=self._is_here,
            register=self._register,
            claims=self._claims,
            features=self.features,
            tools=lambda: (_cache.version("triton"),),
            fuses_slices=True,
            block_level=block_level,
            peers=peers,
            reach=self._reach,
            status=status,
        )

    def _device(self) -> Any:
        try:
            return jax.devices(self.name)[0]
        except RuntimeError:
            return None

    @functools.cached_property  # the devices of a process do not change
    def _own(self) -> Target | None:
        """The target of the device at hand; None where there is none, or one that jtile has no code for."""
        device = self._device()
        arch = "" if device is None else self._plain(self.arch_of(device))
        return self.device_target(arch, device) if arch in self.features() else None

    def _plain(self, arch: str) -> str:
        from .features import plain

        return plain(arch, self.features())

    def _known(self, arch: str) -> str:
        """The name of an architecture without suffixes; KernelValueError where there is none."""
        plain = self._plain(arch)
        if plain not in self.features():
            others = ", ".join(a for p in platforms.every() for a in p.features())
            raise KernelValueError(
                f"unknown GPU architecture {arch!r}: jtile compiles for {others}; on another GPU, run kernels on the "
                "CPU (JAX_PLATFORMS=cpu)"
            )
        return plain

    def _here(self) -> Target:
        asked = platforms.asked_of(self._claims)
        if asked is not None:  # the same on every machine, whatever GPU this one has, and without asking JAX
            return self.target(self._plain(asked))
        if self._own is not None:
            return self._own
        device, option = self._device(), current().arch
        if device is not None:
            self._known(self.arch_of(device))
        raise UnsupportedError(
            f"this machine has no GPU of platform {self.name!r}, and "
            + (f"the option arch={option!r} names none" if option else "the option arch is not set")
            + f": set JTILE_ARCH={self.example}, or write `with jt.config(arch={self.example!r}):` around the export"
        )

    def _resolve(self, text: str) -> Target:
        arch = text.partition(":")[2]
        if not arch:
            raise UnsupportedError(
                f"target {text!r} names no architecture: write {f'{self.name}:{self.example}'!r}, or another of "
                f"{self._names()}"
            )
        other = next((p for p in platforms.every() if p.name != self.name and arch in p.features()), None)
        if other is not None:
            raise KernelValueError(f"target {text!r}: {arch} is an architecture of platform {other.name!r}")
        return self.target(self._known(arch))

    def _names(self) -> list[str]:
        return [f"{self.name}:{arch}" for arch in self.features()]

    def _claims(self, arch: str) -> bool:
        return self._plain(arch) in self.features()

    def _is_here(self) -> bool:
        return self._own is not None and self._here().arch == self._own.arch

    def _kind(self) -> str:
        return slug(self._device().device_kind) if self._is_here() else self._here().arch

    def _reach(self, device: Any, other: Any) -> str:
        from jtile import ffi

        return ffi.reach(self.name, device.local_hardware_id, other.local_hardware_id)

    def _register(self) -> None:
        from jtile import ffi

        ffi.register(self.name)


def _compile(kernel: ir.Kernel, target: Target, options: Options, texts: bool) -> Artifact:
    from .compile import compile_kernel

    return compile_kernel(kernel, target, options, texts=texts)


def _compile_graph(kernels: Sequence[ir.Kernel], target: Target, options: Sequence[Options], shape: Any) -> Artifact:
    from .tasks import compile_tasks

    return compile_tasks(kernels, target, options, shape)


def _graph_refusal(kernel: ir.Kernel, target: Target) -> str | None:
    from .tasks import refusal

    return refusal(kernel, target)


def _attributes(artifact: Artifact, kernel: ir.Kernel, values: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of the custom calls, as the handlers in ffi/csrc/gpu_handlers.h declare them."""
    return {"image": artifact.image, "record": artifact.launch["record"]}
