"""Launches of several steps: tokens are, bit for bit, those of launches of one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from serving_checks import idle, numbers, run, until

from jtile._errors import ModelError
from jtile.models import Engine
from jtile.models.serving import settings as serving_settings
from jtile.models.serving.core import HURRY, Core
from jtile.models.serving.request import read_request
from jtile.models.serving.settings import settings_of

SIZES = dict(rows=4, shapes=(24,), cache_tokens=96, max_length=64)
KINDS = [{}, {}, {"temperature": 0.9}, {"temperature": 1.1, "top_k": 20, "top_p": 0.9}]


@pytest.fixture(scope="module")
def lm(short):
    lm = short("llama", 1, noise=0.3)
    lm.page_size = 8
    return lm


@pytest.fixture(scope="module")
def one(lm):
    return Core(lm, settings_of(lm, **SIZES))


@pytest.fixture(scope="module")
def two(lm, one):
    core = Core(lm, settings_of(lm, **SIZES, launch_steps=2))
    core.device._compiled = one.device._compiled
    return core


def launches_of(core: Core, monkeypatch) -> list[int]:
    """A list that gets the number of steps of every launch of a core."""
    steps, device_run = [], core.device.run
    monkeypatch.setattr(core.device, "run", lambda plan, *needs: steps.append(plan.steps) or device_run(plan, *needs))
    return steps


def test_tokens_are_those_of_single_steps(lm, one, two, monkeypatch):
    """Greedy and drawn ones, of requests that come at any time, share pages, end by tokens at any place, and are
    preempted."""
    rng, requests = np.random.default_rng(3), []
    common = rng.integers(0, 256, 21)
    for i in range(16):
        prompt = [*common[: rng.integers(0, 22)], *rng.integers(0, 256, rng.integers(1, 20))]
        ends = rng.integers(0, 256, 40).tolist() if i % 2 else None
        most, sampling = int(rng.integers(1, 24)), {**KINDS[i % 4], "seed": int(rng.integers(0, 2**31))}
        requests.append(read_request(lm, 64, prompt, most, None, ends, False, sampling))
    steps = launches_of(two, monkeypatch)
    arrivals = rng.integers(0, 40, len(requests))
    for when in (arrivals, [0] * len(requests)):
        found = run(two, requests, when)
        want = run(one, requests, when)
        assert [c.ids for c in found] == [c.ids for c in want]
        assert [c.finish_reason for c in found] == [c.finish_reason for c in want]
    assert {"stop", "length"} <= set(two.totals.finished) and two.scheduler.counts.preemptions > 0
    assert set(steps) == {1, 2} and steps.count(2) > 12
    assert two.scheduler.pool.available == two.settings.pages


def test_the_cache_is_that_of_single_steps(lm, one, two):
    """Log-probabilities behind tokens that a launch of several steps has put into pages have the same bits."""
    rates = []
    for core in (one, two):
        core.scheduler.reset()
        (made,) = run(core, [read_request(lm, 64, [5, 6, 7], 30, None, None)], [0])
        (behind,) = run(core, [read_request(lm, 64, [5, 6, 7, *made.ids], 2, None, None, True)], [0])
        assert behind.cached_tokens >= 24
        rates.append(numbers(behind))
    assert rates[0] == rates[1]


def test_what_several_steps_do_not_know(lm, one, two, monkeypatch):
    """Beside a request that asks for it all launches have one step, and behind it several again."""
    requests = [read_request(lm, 64, [5, 6, i], 12 + 12 * i, None, None, i == 0) for i in (0, 1)]
    steps = launches_of(two, monkeypatch)
    two.scheduler.reset()
    assert [c.ids for c in run(two, requests, [0, 0])] == [c.ids for c in run(one, requests, [0, 0])]
    assert steps == [1] * 12 + [2] * 6
    kinds = ((False, {"temperature": 1.0}), (True, {"presence_penalty": 0.5}), (True, {"logit_bias": {3: 1.0}}))
    for single, sampling in kinds:
        job = two.submit(read_request(lm, 64, [5], 9, None, None, False, sampling), lambda token, error: None)
        assert job.sequence.single == single
        two.cancel(job)


def test_no_launch_of_several_steps_while_a_request_waits(lm, two, monkeypatch):
    """Its place may become free behind any step."""
    steps = launches_of(two, monkeypatch)
    run(two, [read_request(lm, 64, [7, i], 10, None, None) for i in range(5)], [0] * 5)
    assert steps == [1] * 10 + [2] * 5


def test_streams_that_leave_in_the_middle(lm, two):
    """Of a launch, too: the others get their tokens, and no page stays behind."""
    with Engine(lm, **SIZES, launch_steps=2) as engine:
        engine._core.device._compiled = two.device._compiled
        alone = engine.generate([[7, i] for i in range(3)], max_tokens=20, eos=None)

        async def read(i, most):
            ids = []
            async for token in engine.stream([7, i], max_tokens=20, eos=None):
                ids.append(token.id)
                if len(ids) == most:
                    break
            return ids

        async def main():
            return await asyncio.gather(*(read(i, most) for i, most in enumerate((20, 5, 20))))

        whole, left, other = asyncio.run(main())
        assert (whole, left, other) == (alone[0].ids, alone[1].ids[:5], alone[2].ids)
        until(lambda: idle(engine))


def test_a_host_in_time_makes_launches_of_one_step(lm, one, monkeypatch):
    """On a GPU: several steps behind a launch that came when the device had ended the one before it."""
    monkeypatch.setattr(serving_settings, "GPU_STEPS", 2)
    monkeypatch.setattr(serving_settings, "on_host", lambda: False)
    monkeypatch.setattr(serving_settings, "tile_of", lambda lm, cpu: 1)
    core = Core(lm, settings_of(lm, **SIZES))
    core.device._compiled = one.device._compiled
    assert (core.scheduler.steps, core.settings.launch_steps, core.settings.if_late) == (1, 2, True)
    for ended, steps in ((False, 1), (True, 2), *[(False, 2)] * (HURRY - 1), (False, 1)):
        core._flying.clear()
        core._flying.extend((None, SimpleNamespace(ended=done)) for done in (ended, False))
        core._keep_pace()
        assert core.scheduler.steps == steps


@pytest.mark.parametrize("steps", [0, 9, 1.5, True])
def test_numbers_of_steps(lm, steps):
    with pytest.raises(ModelError, match="launch_steps of an engine is an int from 1 to 8"):
        settings_of(lm, **SIZES, launch_steps=steps)


def test_operands_of_steps_stay_where_they_are(lm, one, two):
    """Else XLA writes its graph of their kernels anew for each launch."""
    for core in (one, two):
        core.scheduler.reset()
        places = []
        core.submit(read_request(lm, 64, [5, 6, 7], 30, None, None), lambda token, error: None)
        while not core.idle:
            core.step()
            device = core.device
            kept = jax.tree.leaves((device._kept, device._last, device._entries))
            places.append([x.unsafe_buffer_pointer() for x in kept if not x.is_deleted()])
        assert places[3:-2] and all(place == places[3] for place in places[3:-2])
