"""Engines of models whose matrices are quantised: on CPUs a step may have one token, with the bits that it has among
others."""

from __future__ import annotations

import numpy as np
import pytest
from serving_checks import numbers, requests_of, run

import jtile as jt
import jtile.models
from jtile.models.serving.core import Core
from jtile.models.serving.settings import default_shapes, settings_of


def test_shapes(write_gguf, tmp_path):
    for kind in ("Q4_1", "Q8_0"):
        lm = jtile.models.load(write_gguf(tmp_path / f"{kind}.gguf", kind), dtype="float32")
        assert default_shapes(lm, 16, True, True) == (1, 4, 16, 32, 64, 128, 256)


@pytest.mark.usefixtures("optimized")  # as on a server: LLVM fuses products and sums
def test_tokens_do_not_depend_on_what_else_is_in_the_batch(write_gguf, tmp_path):
    if jt.platform() != "cpu":
        pytest.skip("on GPUs steps have 64 tokens and more")
    lm = jtile.models.load(write_gguf(tmp_path / "model.gguf", "Q4_1"), dtype="float32", page_size=8)
    core = Core(lm, settings_of(lm, rows=4, shapes=(1, 4, 24), cache_tokens=128, max_length=64))
    rng = np.random.default_rng(1)
    requests = [request for request in requests_of(lm, rng, 8) if request.row.level == 0]
    together = run(core, requests, rng.integers(0, 9, len(requests)))
    for request, completion in zip(requests, together, strict=True):
        core.scheduler.reset()
        (found,) = run(core, [request], [0])
        assert numbers(completion) == numbers(found)
