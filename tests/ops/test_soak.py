"""Every block-level kernel at 50 random shapes: right, at the level it is meant for, and the same bits in 21 calls."""

from __future__ import annotations

import jax
import pytest
from soak import Draw, check, check_levels, compiled, planned
from soak_families import FAMILIES

import jtile as jt
from jtile.testing.evaluate import evaluated

SHAPES, CHUNK = 50, 5


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", range(SHAPES // CHUNK))
@pytest.mark.parametrize("family", FAMILIES)
def test_soak(family, chunk):
    number = list(FAMILIES).index(family)
    for k in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        case = FAMILIES[family](Draw(number, k))
        check(case, level_of=compiled if jt.architecture() == "sm_90" else None)


SLOW = ("attention_gradients", "latent_gradients")  # what they have of their own is planned below


@pytest.mark.parametrize("family", [pytest.param(f, marks=[pytest.mark.slow] * (f in SLOW)) for f in FAMILIES])
def test_small(family):
    """The families themselves: a small shape of each on this machine."""
    with jt.config(verify=False):  # other tests look at every step of the compiler
        check(FAMILIES[family](Draw(0, small=True)), times=1, through=evaluated)


@pytest.mark.parametrize("family", FAMILIES)
def test_plan_of_small(family):
    """And at the level where Hopper runs it, also where sums of int32 are 64 bits wide (`jax_enable_x64`)."""
    case = FAMILIES[family](Draw(0, small=True))
    for x64 in (False, True):
        with jax.enable_x64(x64), jt.config(arch="sm_90", verify=False):
            check_levels(case, case.arrays(), planned)
