"""The debugger of kernels: the reference interpreter, held where somebody wants to look."""

from .debugger import Debugger

__all__ = ["Debugger"]
