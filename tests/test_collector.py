"""The collector of reference cycles while the compiler works."""

import gc

import jax
import jax.numpy as jnp
import pytest

import jtile as jt
from jtile._collector import paused
from jtile.errors import KernelTypeError

# Switched on, the collector walks through all that the tests before have left: 11 CPU seconds in the middle of a run.
pytestmark = pytest.mark.early


@pytest.fixture(autouse=True)
def collecting():
    """As in a user's program; the suite itself runs without."""
    was = gc.isenabled()
    gc.enable()
    yield
    if not was:
        gc.disable()


def test_it_goes_on_afterwards():
    assert gc.isenabled()
    with paused():
        with paused():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer one ends the pause"
    assert gc.isenabled()


def test_it_stays_off_for_those_who_have_switched_it_off():
    gc.disable()
    with paused():
        pass
    assert not gc.isenabled()


def test_kernels_are_made_without_collections():
    """And a kernel with a fault leaves the collector as it was."""
    seen = []

    @jt.kernel(out_type=lambda x: jt.like(x), grid=1)
    def twice(x, o):
        seen.append(gc.isenabled())
        o[...] = x[...] * 2

    @jt.kernel(out_type=lambda x: jt.like(x), grid=1)
    def wrong(x, o):
        return x[...]

    jax.make_jaxpr(twice)(jnp.ones(8))
    assert seen
    assert not any(seen)
    with pytest.raises(KernelTypeError, match="returns a value"):
        jax.make_jaxpr(wrong)(jnp.ones(8))
    assert gc.isenabled()
