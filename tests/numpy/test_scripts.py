"""The scripts of `python -m benchmarks cpu --only numpy` give NumPy's results with the changed import."""

from __future__ import annotations

import numpy
import pytest

import jtile.numpy
from benchmarks import numpy as scripts

ELEMENTS = 400


def test_there_are_twenty():
    assert len(scripts.names()) >= 20


@pytest.mark.parametrize("name", scripts.names())
def test_a_script_gives_what_it_gives_under_numpy(name):
    theirs, ours = scripts.script(name), scripts.script(name, "jtile.numpy")
    want = scripts.looked_at(theirs.run(*theirs.data(ELEMENTS)))
    assert any(w.size > 1 and w.std() > 0 for w in want) or name == "simpson"
    for mode in ("auto", "numpy"):
        with jtile.numpy.execution(mode):
            got = ours.run(*ours.data(ELEMENTS))
            assert scripts.error(scripts.looked_at(got), want) < 1e-12


@pytest.mark.parametrize("name", ["heat", "julia_set"])
def test_a_compiled_script_gives_what_it_gives_under_numpy(name):
    theirs, ours = scripts.script(name), scripts.script(name, "jtile.numpy")
    want = scripts.looked_at(theirs.run(*theirs.data(ELEMENTS)))
    with jtile.numpy.execution("compiled"):
        data = ours.data(ELEMENTS)
        for _ in range(2):
            assert scripts.error(scripts.looked_at(ours.run(*data)), want) < 1e-9


def test_what_counts_as_wrong():
    x = numpy.arange(3.0)
    assert scripts.error([x], [x + 1e-12]) < 1e-11
    assert scripts.error([x.astype("float32")], [x]) == scripts.error([x[:2]], [x]) == float("inf")
    assert scripts.error([numpy.array([1, 2])], [numpy.array([1, 3])]) == float("inf")
