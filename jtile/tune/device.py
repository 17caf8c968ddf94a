"""Which device choices are made for, and whether it is here to measure on."""

from __future__ import annotations

from jtile.lowering import here, platforms
from jtile.lowering.here import target as target
from jtile.lowering.platforms import slug as slug


def kind() -> str:
    """The name that records of this device are filed under: `nvidia-h200`, `cpu-znver5-2t`; the architecture where
    there is no such device here, as when a program is exported for it."""
    platform = platforms.named(here.platform())
    return platform.kind() if platform.kind else platform.here().name


def is_here() -> bool:
    """Whether the device is one of this machine's, so that it can measure."""
    return platforms.named(here.platform()).is_here()
