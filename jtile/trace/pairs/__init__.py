"""Complex numbers in a kernel body: a step from its jaxpr to one without any.

A complex tile becomes a pair of float32 tiles, a Ref of complex numbers one of float32 with a last axis of 2. Behind
this step there are real numbers only, so that derivatives, Tile IR and the back ends need no complex dtype.
"""

from jtile.trace.pairs import functions, memory, moves, numbers
from jtile.trace.pairs.walk import without_complex

__all__ = ["functions", "memory", "moves", "numbers", "without_complex"]
