"""Evaluates the TTIR text that jtile emits, in NumPy: GPU emission against the interpreter where there is no GPU.

`run_ttir(kernel, inputs)` beside `native.run_native`. The text is parsed (`parse`), typed as triton's verifier would
(`check`), and every block of the grid runs over fake memory (`machine`, `memory`), in a random order. What the hardware
leaves undefined is garbage here: lanes that a mask turns off, division by zero, shifts over the width; accesses out of
bounds, and accesses to one element without a barrier between, are errors. Ops stand in `ops_*.py`, one table (`table`).
"""

from .devices import Fault, Site, run_on_mesh
from .launch import Launch, evaluate, launch_ttir, run_ttir, value_of
from .types import TtirError

__all__ = [
    "Fault",
    "Launch",
    "Site",
    "TtirError",
    "evaluate",
    "launch_ttir",
    "run_on_mesh",
    "run_ttir",
    "value_of",
]
