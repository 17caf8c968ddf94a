"""From a Python function to Tile IR: rewrite the source's loops, trace to a jaxpr over Refs, map its equations to
cards."""

from jtile.trace.lower import RULES, to_tile_ir
from jtile.trace.rewrite import function, rewrite_loops
from jtile.trace.tracing import trace

__all__ = ["RULES", "function", "rewrite_loops", "to_tile_ir", "trace"]
