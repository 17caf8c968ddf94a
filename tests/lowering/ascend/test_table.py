"""The tables of docs/ascend.md are what the tools say: what compiles, and what gives the interpreter's numbers."""

from __future__ import annotations

import ascend_table
import pytest
from ascend_tools import needs_tools

REFUSED = {"`block_sparse_tiles_vjp`"}  # of blocks of queries


def rows(name: str) -> list[list[str]]:
    return [[c.strip() for c in line.strip("|").split("|")] for line in ascend_table.on_page(name).splitlines()[2:]]


def test_the_page_shows_enough():
    """At least 160 kernels of every kind of core compile; those that do not are known, and have a reason; all of
    the library is asked for its numbers, which are equal."""
    kinds = [kind for _, _, kind, _ in rows("compiled")]
    assert len(kinds) - kinds.count("no") >= 160 and {"aiv", "aic", "mix"} <= set(kinds)
    refused = {kernel: said for _, kernel, kind, said in rows("compiled") if kind == "no"}
    assert set(refused) <= REFUSED and all(": " in said for said in refused.values())
    numbers = rows("numbers")
    assert [case for case, _, _ in numbers] == list(ascend_table.NUMBERS)
    assert not [r for r in numbers if r[2]]


@needs_tools
@pytest.mark.parametrize("name", ["softmax", "embedding", "top_k"])
def test_numbers_of_some(name):
    assert {said for _, said in ascend_table.numbers(name)} == {"equal"}


@needs_tools
@pytest.mark.slow
def test_numbers():
    assert ascend_table.numbers_table() == ascend_table.on_page("numbers")


@needs_tools
@pytest.mark.slow
def test_compiled():
    assert ascend_table.compiled_table() == ascend_table.on_page("compiled")
