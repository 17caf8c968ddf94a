"""The caches of what was traced: bounded, and emptied with JAX's own."""

import gc
import threading
import weakref

import jax
import pytest

from jtile._memo import Recent, memo

pytestmark = pytest.mark.early


def test_results_used_last_are_kept():
    calls = []

    @memo(entries=2)
    def double(n: int) -> int:
        calls.append(n)
        return 2 * n

    assert [double(n) for n in (1, 2, 1, 3, 1, 2)] == [2, 4, 2, 6, 2, 4]
    assert calls == [1, 2, 3, 2]
    jax.clear_caches()
    double(2)
    assert calls == [1, 2, 3, 2, 2]


def test_entries_made_last_are_kept():
    recent = Recent(2)
    for k in "abc":
        assert recent.put(k, k.upper()) == k.upper()
    assert [recent.get(k) for k in "abc"] == [None, "B", "C"]
    assert recent.put("c", "other") == "C"
    jax.clear_caches()
    assert len(recent) == 0
    assert recent.get("b") is None


def test_a_key_that_is_there_takes_no_others_place():
    recent = Recent(2)
    for k in "ab":
        recent.put(k, k.upper())
    for k in "ba":  # the newest and the oldest
        assert recent.put(k, "other") == k.upper()
    assert [recent.get(k) for k in "ab"] == ["A", "B"]


def test_a_cache_that_nobody_has_any_more_is_not_kept():
    recent = Recent(2)
    recent.put(1, 2)
    gone = weakref.ref(recent)
    del recent
    gc.collect()
    assert gone() is None
    jax.clear_caches()


def test_several_threads_may_put():
    recent = Recent(5)
    threads = [threading.Thread(target=lambda k=k: [recent.put((k, n), n) for n in range(500)]) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(recent) == 5
