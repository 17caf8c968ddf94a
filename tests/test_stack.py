"""Room for the frames of deep calls: the system is not asked for the memory of frames again and again."""

import resource
import threading

import pytest

from jtile._stack import roomy


def leaf():
    return None


leaf.__code__ = leaf.__code__.replace(co_stacksize=200)  # more than its caller: no end of a chunk is missed


def descend(depth: int) -> None:
    """Somewhere on the way down stands a frame right at the end of a chunk, and calls what needs the next one."""
    for _ in range(50):
        leaf()
    if depth:
        descend(depth - 1)


def faults(function) -> int:
    """Pages that a thread of its own, with no room yet, gets from the system while it runs a function."""
    found = []

    def run():
        function(300)  # what is made at the first calls
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        function(300)
        found.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_frames_have_room():
    assert faults(roomy(descend)) * 4 < faults(descend)


def test_a_function_stays_what_it_is():
    @roomy
    def divided(a: int, *, by: int) -> float:
        """A quotient."""
        return a / by

    assert (divided.__name__, divided.__doc__, divided(3, by=2)) == ("divided", "A quotient.", 1.5)
    with pytest.raises(ZeroDivisionError):
        divided(1, by=0)
