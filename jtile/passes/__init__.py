"""Target-independent passes over Tile IR. A pass is a named value, a pipeline is a tuple of passes."""

from .bounds import bounds
from .canonicalise import canonicalise
from .cse import cse
from .dce import dce
from .early_exit import early_exit
from .hoist import hoist
from .pipeline import Pass, Pipeline, dump, dump_folder, run_pipeline
from .ref_forwarding import ref_forwarding

# The second round works on what forwarding has turned into values, and on what bounds has turned into constants.
TILE: Pipeline = (canonicalise, cse, ref_forwarding, canonicalise, cse, hoist, bounds, canonicalise, dce, early_exit)
PIPELINES: dict[str, Pipeline] = {"tile": TILE}

__all__ = [
    "PIPELINES", "TILE", "Pass", "Pipeline", "bounds", "canonicalise", "cse", "dce", "dump", "dump_folder",
    "early_exit", "hoist", "ref_forwarding", "run_pipeline",
]  # fmt: skip
