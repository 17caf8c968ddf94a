"""Accumulation keeps what random kernels compute, whatever their grids, loops, branches, masks and index maps."""

from __future__ import annotations

import random

import pytest
from accumulation import check
from draws import draws
from hypothesis import given
from hypothesis import strategies as st
from random_accumulations import text as random_text

from jtile.passes import partials


@draws(40, quick=10)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3, 64]), st.sampled_from([1, 100, 1 << 20]))
def test_random_kernels(seed, programs, nbytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partials, "PROGRAMS", programs)
        patch.setattr(partials, "PARTIAL_BYTES", nbytes)
        check(random_text(random.Random(seed)))
