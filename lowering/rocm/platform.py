"""The record of AMD's platform."""

from __future__ import annotations

from typing import Any

from ..targets import Target
from ..triton.features import Features
from ..triton.platform import Gpus


def _features() -> dict[str, Features]:
    from .features import FEATURES

    return FEATURES


def _target(arch: str) -> Target:
    from .targets import amd_target

    return amd_target(arch)


def _device_target(arch: str, device: Any) -> Target:
    from .targets import device_target

    return device_target(arch, device)


def _owns(device: Any) -> bool:
    return device.platform in ("gpu", "rocm") and "rocm" in device.client.platform_version.lower()


CARDS = Gpus(
    "rocm",
    example="gfx942",
    owns=_owns,
    arch_of=lambda device: str(device.compute_capability).split(":")[0],
    features=_features,
    target=_target,
    device_target=_device_target,
)
ROCM = CARDS.platform(status="compiled only")
