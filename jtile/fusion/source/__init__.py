"""`jt.tile`: what `jt.fuse` finds, as source text of tile kernels that a person reads, edits and keeps.

`expressions` writes steps, `names` finds what the program calls its values, `frames` writes loads, stores and steps on
tiles, `kernels` whole kernels, `glue` what runs between them, and `tiled` the module.
"""

from .tiled import Tiled, tile

__all__ = ["Tiled", "tile"]
