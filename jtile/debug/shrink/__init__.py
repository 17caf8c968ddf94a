"""`jtile shrink`: a Python file that fails is cut down, as long as it fails in the same way."""

from .search import Shrunk, shrink

__all__ = ["Shrunk", "shrink"]
