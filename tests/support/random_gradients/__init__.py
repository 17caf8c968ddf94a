"""Random differentiable kernels, as source text, for hypothesis.

`gradient_kernels()` draws a `Case`: the source of a small legal kernel, its specification and its arguments. Values
stay bounded by about 8 and functions are smooth, so that float32 gradients of two right implementations agree
closely. What decides something (a comparison, max, min) only sees elements as they were loaded: no rounding flips it.
"""

from __future__ import annotations

from hypothesis import strategies as st

from .actions import ACTIONS
from .gen import Case, Gen
from .memory import store
from .regions import REGIONS


def kernel(choices: bytes, actions: int = 4) -> Case:
    """The legal kernel that these choices make; smaller numbers make simpler kernels."""
    g = Gen(choices)
    g.steps = (*ACTIONS, *REGIONS)
    g.load(g.shape())
    for _ in range(g.number(1, actions)):
        g.choose(g.steps)(g)
    for v in g.last(g.number(1, 2)):
        store(g, v)
    return g.case()


def gradient_kernels() -> st.SearchStrategy[Case]:
    """Random differentiable kernels; one string of bytes holds all choices and shrinks towards zeros."""
    return st.binary(min_size=160, max_size=160).map(kernel)


__all__ = ["Case", "gradient_kernels", "kernel"]
