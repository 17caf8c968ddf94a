"""Tile sizes for the GPU at hand where it has warpgroup products (sm_90); the model of time that chooses them, and what
it knows of a GPU, are in `jtile.tune.warpgroups`. None: what other GPUs take is as good.
"""

from __future__ import annotations

from jtile.tune import columns as any_columns
from jtile.tune import pairs as of_pairs
from jtile.tune import small as of_one_round
from jtile.tune import warpgroups
from jtile.tune.warpgroups import (
    ALWAYS,
    FEW,
    HANGING,
    LINE,
    NEAR,
    READ,
    TILES,
    Form,
    Product,
    attention,
    candidates,
    head,
)

__all__ = [
    "ALWAYS", "FEW", "HANGING", "LINE", "NEAR", "READ", "TILES", "Form", "Product", "attention",
    "candidates", "columns", "extended", "forms", "head", "near", "neighbours", "pairs", "parts_of_product",
    "predicted_us", "processors", "small", "tiles",
]  # fmt: skip


def processors() -> int:
    """Multiprocessors of the GPU that the model of time is about: see `warpgroups.at_hand`."""
    return warpgroups.at_hand().processors


def tiles(p: Product) -> dict[str, int] | None:
    """`warpgroups.tiles` for the GPU at hand."""
    return warpgroups.tiles(p, warpgroups.at_hand())


def predicted_us(p: Product, form: Form) -> float:
    """`warpgroups.predicted_us` for the GPU at hand."""
    return warpgroups.predicted_us(p, form, warpgroups.at_hand())


def neighbours(p: Product, bm: int, bn: int) -> int:
    """`warpgroups.neighbours` for the GPU at hand."""
    return warpgroups.neighbours(p, bm, bn, warpgroups.at_hand())


def parts_of_product(p: Product) -> tuple[int, dict[str, int]] | None:
    """`warpgroups.parts_of_product` for the GPU at hand."""
    return warpgroups.parts_of_product(p, warpgroups.at_hand())


def columns(p: Product) -> any_columns.Form | None:
    """`jtile.tune.columns.choice` for the GPU at hand."""
    return any_columns.choice(p, warpgroups.at_hand())


def small(p: Product) -> of_one_round.Form | None:
    """`jtile.tune.small.choice` for the GPU at hand."""
    return of_one_round.choice(p, warpgroups.at_hand())


def pairs(m: int, n: int, k: int, itemsize: int) -> of_pairs.Form:
    """`jtile.tune.pairs.choice` for the GPU at hand."""
    return of_pairs.choice(m, n, k, itemsize, warpgroups.at_hand())


def forms(p: Product) -> dict[Form, float]:
    """`warpgroups.forms` for the GPU at hand."""
    return warpgroups.forms(p, warpgroups.at_hand())


def extended(p: Product) -> tuple[int, int, int]:
    """`warpgroups.extended` for the GPU at hand."""
    return warpgroups.extended(p, warpgroups.at_hand())


def near(p: Product, *, whole: bool) -> list[Form]:
    """`warpgroups.near` for the GPU at hand."""
    return warpgroups.near(p, warpgroups.at_hand(), whole=whole)
