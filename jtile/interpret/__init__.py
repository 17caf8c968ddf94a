"""The reference interpreter: the meaning of a kernel, with bounds, race and uninitialised-read checks."""

from .memory import poison
from .run import Accesses, interpret, interpret_devices

__all__ = ["Accesses", "interpret", "interpret_devices", "poison"]
