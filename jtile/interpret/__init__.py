"""The reference interpreter: the meaning of a kernel, with bounds, race and uninitialised-read checks."""

from .machine import Machine, Watcher, watching
from .memory import Buffer, Lanes, poison
from .picture import AccessPicture
from .run import Accesses, interpret, interpret_devices

__all__ = [
    "AccessPicture",
    "Accesses",
    "Buffer",
    "Lanes",
    "Machine",
    "Watcher",
    "interpret",
    "interpret_devices",
    "poison",
    "watching",
]
