"""The record of NVIDIA's platform."""

from __future__ import annotations

from typing import Any

from ..targets import Target
from ..triton.features import Features
from ..triton.platform import Gpus


def _features() -> dict[str, Features]:
    from .features import FEATURES

    return FEATURES


def _target(arch: str) -> Target:
    from .targets import nvidia_target

    return nvidia_target(arch)


def _device_target(arch: str, device: Any) -> Target:
    from .targets import device_target

    return device_target(arch, device)


def _owns(device: Any) -> bool:
    return device.platform in ("gpu", "cuda") and "rocm" not in device.client.platform_version.lower()


CARDS = Gpus(
    "cuda",
    example="sm_90",
    owns=_owns,
    arch_of=lambda device: f"sm_{str(device.compute_capability).replace('.', '')}",
    features=_features,
    target=_target,
    device_target=_device_target,
)
CUDA = CARDS.platform(block_level=True, peers=True, graphs=True, exchanges=True)
