"""The collector of reference cycles while the compiler works."""

import gc
import threading

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


def collects() -> bool:
    return gc.isenabled() and gc.get_threshold()[0] > 0


def test_it_goes_on_afterwards():
    assert collects()
    before = gc.get_threshold()
    with paused():
        with paused():
            assert not collects()
        assert not collects(), "the outer one ends the pause"
    assert collects() and gc.get_threshold() == before


def test_it_stays_off_for_those_who_have_switched_it_off():
    with paused():
        gc.disable()  # as another thread may
    assert not gc.isenabled()
    gc.enable()
    assert collects()


def test_thresholds_that_are_set_meanwhile_stay():
    before = gc.get_threshold()
    with paused():
        gc.set_threshold(1234)
    assert gc.get_threshold()[0] == 1234
    gc.set_threshold(*before)


def test_threads_share_a_pause():
    outer, inner = paused(), paused()
    outer.__enter__()
    started = threading.Thread(target=inner.__enter__)
    started.start()
    started.join()
    outer.__exit__(None, None, None)
    assert not collects()
    inner.__exit__(None, None, None)
    assert collects()


def test_kernels_are_made_without_collections():
    """And a kernel with a fault leaves the collector as it was."""
    seen = []

    @jt.kernel(out_type=lambda x: jt.like(x), grid=1)
    def twice(x, o):
        seen.append(collects())
        o[...] = x[...] * 2

    @jt.kernel(out_type=lambda x: jt.like(x), grid=1)
    def wrong(x, o):
        return x[...]

    jax.make_jaxpr(twice)(jnp.ones(8))
    assert seen
    assert not any(seen)
    with pytest.raises(KernelTypeError, match="returns a value"):
        jax.make_jaxpr(wrong)(jnp.ones(8))
    assert collects()
