"""The reference interpreter: the meaning of a kernel, with bounds, race and uninitialised-read checks."""

from .memory import poison
from .run import Accesses, interpret

__all__ = ["Accesses", "interpret", "poison"]
