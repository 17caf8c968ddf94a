from __future__ import annotations

import jax
import numpy as np
import pytest

from jtile import language as jt
from jtile.errors import KernelValueError
from jtile.language.swizzle import PATTERNS


def order(run, n_i, n_j, pattern, group):
    def kernel(o):
        i, j = jt.program_id(0), jt.program_id(1)
        r, c = jt.swizzle(i, j, pattern=pattern, group=group)
        o[i, j, 0], o[i, j, 1] = r, c

    (got,) = run(kernel, [], [((n_i, n_j, 2), np.dtype("i4"))], grid=(n_i, n_j))
    return [tuple(t) for t in got.reshape(-1, 2).tolist()]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("n_i", "n_j"), [(1, 1), (4, 4), (5, 3), (3, 9), (9, 6), (1, 7), (7, 1)])
def test_every_tile_once(run, pattern, n_i, n_j):
    for group in (4, 1) if pattern in ("morton", "hilbert") else (4, 3):
        got = order(run, n_i, n_j, pattern, group)
        assert sorted(got) == [(i, j) for i in range(n_i) for j in range(n_j)]


def test_orders(run):
    assert order(run, 2, 3, "row", 8) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert order(run, 2, 3, "column", 8) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert order(run, 3, 2, "grouped", 2) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert order(run, 2, 3, "diagonal", 8) == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 0)]
    assert order(run, 2, 2, "morton", 2) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert order(run, 2, 2, "hilbert", 2) == [(0, 0), (1, 0), (1, 1), (0, 1)]


def test_hilbert_moves_one_step_at_a_time(run):
    got = np.array(order(run, 8, 8, "hilbert", 8))
    assert (np.abs(np.diff(got, axis=0)).sum(1) == 1).all()


def test_sizes_can_be_given(lower):
    def kernel(o):
        i, j = jt.swizzle(jt.program_id(0), 0, 4, 1, pattern="grouped")
        o[i] = j

    lower(kernel, [], [jax.ShapeDtypeStruct((4,), np.int32)], grid=(4,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "spiral"}, "expected one of"),
        ({"group": 0}, "positive"),
        ({"pattern": "morton", "group": 3}, "power of two"),
    ],
)
def test_refused(lower, options, message):
    def kernel(o):
        o[...] = jt.swizzle(0, 0, **options)[0]

    with pytest.raises(KernelValueError, match=message):
        lower(kernel, [], [jax.ShapeDtypeStruct((), np.int32)], grid=(1, 1))
