"""The debugger of kernels: the reference interpreter, held where somebody wants to look; and `shrink`, which cuts a
failing file down."""

from .debugger import Debugger
from .shrink import Shrunk, shrink

__all__ = ["Debugger", "Shrunk", "shrink"]
