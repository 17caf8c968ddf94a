"""`jt.view`: a kernel as one page for a browser: its source beside every level that it passes through, and the kernels
of its gradient."""

from .document import View, view

__all__ = ["View", "view"]
