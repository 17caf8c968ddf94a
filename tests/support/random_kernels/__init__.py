"""Random kernels of Tile IR for hypothesis: small, legal (no race, undefined read or index outside), well conditioned.

`kernels()` draws a `Case`: a kernel, its inputs, and how far the elements of each output may be from the interpreter's.
Every value carries a bound of its magnitude, of its error, and a power of two that divides it: sums of such numbers are
exact in any order, so most results must agree bit for bit, and a value with an error never decides anything.
"""

from __future__ import annotations

from hypothesis import strategies as st

from . import regions
from .actions import ACTIONS, load
from .gen import Case, Gen


@st.composite
def kernels(draw, actions: int = 12) -> Case:
    """A legal kernel with inputs; a case of the same draws is the same in every process."""
    g = Gen(draw)
    load(g)
    for _ in range(draw(st.integers(0, actions))):
        g.choose(ACTIONS)(g)
    for v in g.pool[: -1 - draw(st.integers(1, 6)) : -1]:
        g.store(v)
    return g.case()


__all__ = ["Case", "kernels"]
