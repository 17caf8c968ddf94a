"""How each JAX primitive becomes Tile IR; one file per family."""

from jtile.trace.rules import (
    block,
    calls,
    control,
    devices,
    dots,
    elementwise,
    indexing,
    keys,
    memory,
    reductions,
    shapes,
    special,
    windows,
)

__all__ = [
    "block",
    "calls",
    "control",
    "devices",
    "dots",
    "elementwise",
    "indexing",
    "keys",
    "memory",
    "reductions",
    "shapes",
    "special",
    "windows",
]
