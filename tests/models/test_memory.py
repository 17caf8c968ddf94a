"""What many requests leave in the host's memory."""

import gc
from pathlib import Path

import numpy as np
import pytest
from draws import thorough


def resident() -> int:
    """Bytes of this process that are in memory."""
    gc.collect()  # it is off while tests run
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.cpu
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="/proc is Linux's")
def test_memory_does_not_grow_with_requests(short):
    """Requests of several lengths, a thousand under --runslow: what they take grows by less than 2 KB a
    request, where their logits alone are 3 KB."""
    lm, rng = short("llama", 1), np.random.default_rng(0)
    count = 1000 if thorough() else 150

    def ask(n: int) -> None:
        for _ in range(n):
            ids = rng.integers(3, 256, int(rng.integers(2, 15)))
            for _token in lm.stream(ids, 3, eos=None, temperature=0.8, logprobs=True):
                pass

    ask(60)
    before = resident()
    ask(count)
    assert resident() - before < max(2048 * count, 4 << 20)
