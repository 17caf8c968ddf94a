"""Random kernels of Tile IR for hypothesis: small, legal (no race, undefined read or index outside), well conditioned.

`kernels()` draws a `Case`: a kernel, its inputs, and how far the elements of each output may be from the interpreter's.
Every value carries a bound of its magnitude, of its error, and a power of two that divides it: sums of such numbers are
exact in any order, so most results must agree bit for bit, and a value with an error never decides anything.
"""

from __future__ import annotations

from hypothesis import strategies as st

from . import layouts, regions
from .actions import ACTIONS, load
from .gen import Case, Gen


def kernel(choices: bytes, actions: int = 12) -> Case:
    """The legal kernel, with inputs, that these choices make; smaller numbers make simpler kernels."""
    g = Gen(choices)
    count, outputs = g.number(0, actions), g.number(1, 6)
    load(g)
    for _ in range(count):
        g.choose(ACTIONS)(g)
    for v in g.pool[: -1 - outputs : -1]:
        g.store(v)
    return g.case()


def kernels() -> st.SearchStrategy[Case]:
    """Random kernels. One string of bytes holds all choices: hypothesis draws such strings evenly, where small draws
    would mostly repeat each other, and shrinks them towards zeros."""
    return st.binary(min_size=300, max_size=300).map(kernel)


__all__ = ["Case", "kernel", "kernels"]
