"""Launches of several steps: tokens are, bit for bit, those of launches of one."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
from serving_checks import idle, numbers, run, until

from jtile._errors import ModelError
from jtile.models import Engine, Grammar
from jtile.models.serving import settings as serving_settings
from jtile.models.serving.core import Core
from jtile.models.serving.pace import BEGIN, SMOOTH, TRIAL, Pace
from jtile.models.serving.request import read_request
from jtile.models.serving.settings import settings_of

SIZES = dict(rows=4, shapes=(24,), cache_tokens=96, max_length=64)
KINDS = [{}, {}, {"temperature": 0.9}, {"temperature": 1.1, "top_k": 20, "top_p": 0.9}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def one(lm):
    return Core(lm, settings_of(lm, **SIZES))


@pytest.fixture(scope="module")
def many(lm, one):
    """many(steps): a core with so many steps a launch, and the compiled programs of `one`."""

    @functools.cache
    def make(steps: int) -> Core:
        core = Core(lm, settings_of(lm, **SIZES, launch_steps=steps))
        core.device._compiled = one.device._compiled
        return core

    return make


@pytest.fixture(scope="module")
def four(many):
    return many(4)


def launches_of(core: Core, monkeypatch) -> list[int]:
    """A list that gets the number of steps of every launch of a core."""
    steps, device_run = [], core.device.run
    monkeypatch.setattr(core.device, "run", lambda plan, *needs: steps.append(plan.steps) or device_run(plan, *needs))
    return steps


@pytest.mark.parametrize("count", [2, 4])
def test_tokens_are_those_of_single_steps(lm, one, many, monkeypatch, count):
    """Greedy and drawn ones, of requests that come at any time, share pages, end by tokens at any place, and are
    preempted."""
    rng, requests = np.random.default_rng(3), []
    common = rng.integers(0, 256, 21)
    for i in range(16):
        prompt = [*common[: rng.integers(0, 22)], *rng.integers(0, 256, rng.integers(1, 20))]
        ends = rng.integers(0, 256, 40).tolist() if i % 2 else None
        most, sampling = int(rng.integers(1, 24)), {**KINDS[i % 4], "seed": int(rng.integers(0, 2**31))}
        requests.append(read_request(lm, 64, prompt, most, None, ends, False, sampling))
    core = many(count)
    steps = launches_of(core, monkeypatch)
    arrivals = rng.integers(0, 40, len(requests))
    for when in (arrivals, [0] * len(requests)):
        found = run(core, requests, when)
        want = run(one, requests, when)
        assert [c.ids for c in found] == [c.ids for c in want]
        assert [c.finish_reason for c in found] == [c.finish_reason for c in want]
    assert {"stop", "length"} <= set(core.totals.finished) and core.scheduler.counts.preemptions > 0
    assert set(steps) == {1, count} and steps.count(count) > 12
    assert core.scheduler.pool.available == core.settings.pages


def test_the_cache_is_that_of_single_steps(lm, one, four):
    """Log-probabilities behind tokens that a launch of several steps has put into pages have the same bits."""
    rates = []
    for core in (one, four):
        core.scheduler.reset()
        (made,) = run(core, [read_request(lm, 64, [5, 6, 7], 30, None, None)], [0])
        (behind,) = run(core, [read_request(lm, 64, [5, 6, 7, *made.ids], 2, None, None, True)], [0])
        assert behind.cached_tokens >= 24
        rates.append(numbers(behind))
    assert rates[0] == rates[1]


def test_what_several_steps_do_not_know(lm, one, four, monkeypatch):
    """Beside a request that asks for it all launches have one step, and behind it several again."""
    requests = [read_request(lm, 64, [5, 6, i], 12 + 12 * i, None, None, i == 0) for i in (0, 1)]
    steps = launches_of(four, monkeypatch)
    four.scheduler.reset()
    assert [c.ids for c in run(four, requests, [0, 0])] == [c.ids for c in run(one, requests, [0, 0])]
    assert steps == [1] * 12 + [4] * 3
    kinds = ((False, {"temperature": 1.0}), (True, {"presence_penalty": 0.5}), (True, {"logit_bias": {3: 1.0}}))
    for single, sampling in kinds:
        job = four.submit(read_request(lm, 64, [5], 9, None, None, False, sampling), lambda tokens, error: None)
        assert job.sequence.single == single
        four.cancel(job)


def test_stops_and_grammars(engine, monkeypatch):
    """Texts with stop strings that several tokens make, schemas and penalties, greedy and drawn, at any time; what ends
    in the middle of a launch has no token more."""
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'jtile[serve]'")
    lm, cores = engine.lm, []
    for steps in (1, 2):
        cores.append(Core(lm, dataclasses.replace(engine.settings, launch_steps=() if steps == 1 else (steps,))))
        cores[-1].device._compiled = engine._core.device._compiled
    steps = launches_of(cores[1], monkeypatch)
    free = engine.generate([[7, i] for i in range(4)], max_tokens=24, eos=None)
    stops = [answer.text[at : at + 2] for at, answer in zip((3, 6, 9, 12), free, strict=True)]
    found = []
    for core in cores:
        requests, rng = [], np.random.default_rng(0)
        for i in range(24):
            sampling = {**KINDS[i % 4], "seed": i} | ({"frequency_penalty": 0.7} if i % 12 == 5 else {})
            grammar = Grammar.json(SCHEMA) if i % 12 == 7 else None
            requests.append(read_request(lm, 96, [7, i % 4], 24, stops[i % 4] or None, None, False, sampling, grammar))
        done = run(core, requests, rng.integers(0, 60, 24))
        found.append([(c.ids, c.text, c.stop, c.finish_reason) for c in done])
    assert found[0] == found[1]
    assert {reason for *_, reason in found[0]} == {"stop", "length"} and any(stop for *_, stop, _ in found[0])
    assert all(json.loads(found[1][i][1]).keys() == {"a"} for i in (7, 19))
    assert steps.count(2) > 8 and steps.count(1) > 8


def test_cancelled_in_the_middle(lm, one, four):
    """At any step, of a launch under way, too: what came was right, in its order, and all pages come back."""
    rng = np.random.default_rng(4)
    requests = [read_request(lm, 64, [7, 9, i], 30, None, None, False, {**KINDS[i % 4], "seed": i}) for i in range(12)]
    whole = run(one, requests, [0] * 12)
    for core in (one, four):
        core.scheduler.reset()
        got = [[] for _ in requests]
        note = lambda ids: lambda tokens, error: ids.extend(token.id for token in tokens)
        jobs = [core.submit(request, note(ids)) for request, ids in zip(requests, got, strict=True)]
        gone = {int(i): int(rng.integers(0, 30)) for i in rng.choice(12, 7, replace=False)}
        for step in range(400):
            for i in (i for i, at in gone.items() if at == step):
                core.cancel(jobs[i])
            core.step()
            if core.idle:
                break
        reasons = [job.completion.finish_reason for job in jobs]
        assert core.idle and reasons.count("cancelled") > 2 and reasons.count("length") >= 5
        for ids, job, want in zip(got, jobs, whole, strict=True):
            assert ids == job.completion.ids == want.ids[: len(ids)]
        assert core.scheduler.pool.available == core.settings.pages


def test_weights_change_in_the_middle(lm, one, four, monkeypatch):
    """Of a launch, too: its tokens count, and all sequences are computed again once the host knows them."""
    requests = [read_request(lm, 64, [7, 9, i], 20, None, None, False, {**KINDS[i], "seed": i}) for i in range(4)]
    want = [c.ids for c in run(one, requests, [0] * 4)]
    steps, under_way = launches_of(four, monkeypatch), []
    jobs = [four.submit(request, lambda tokens, error: None) for request in requests]
    for step in range(200):
        if step % 4 == 3:
            under_way += [job.sequence.pending for job in jobs]
            monkeypatch.setattr(lm, "_weights", list(lm._weights))  # an update, of the same numbers
        four.step()
        if four.idle:
            break
    assert four.idle and [job.completion.ids for job in jobs] == want
    assert steps.count(4) > 1 and max(under_way) >= 4
    assert four.scheduler.pool.available == four.settings.pages


def test_while_requests_wait(lm, four, monkeypatch):
    """For a row: launches have several steps, until one is known to become free within them."""
    steps = launches_of(four, monkeypatch)
    four.scheduler.reset()
    run(four, [read_request(lm, 64, [7, i], 14, None, None) for i in range(5)], [0] * 5)
    assert steps == [1, 4, 4, 4, 1, 1, 4, 4, 4, 1]


def test_streams_that_leave_in_the_middle(lm, four):
    """Of a launch, too: the others get their tokens, and no page stays behind."""
    with Engine(lm, **SIZES, launch_steps=4) as engine:
        engine._core.device._compiled = four.device._compiled
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


def paced(pace: Pace, host, launches: int, rng=None) -> tuple[list[int], float]:
    """(the numbers of steps of so many launches, the mean time of a step) with a device that takes 1.0 for a step, and
    a host that takes host(steps) for a launch, once the launch before the last has ended; with `rng` each varies by a
    tenth, and one launch in ten comes 2 later. A server's clock, which is not the machine's."""
    seen, ends, before, at = [], [0.0, 0.0], (0, 0.0), 0.0
    for _ in range(launches):
        steps = pace.steps
        spread = 1.0 if rng is None else rng.uniform(0.9, 1.1)
        at = max(at, ends[-2]) + host(steps) * spread + (2.0 if rng is not None and rng.random() < 0.1 else 0.0)
        late = ends[-1] <= at
        ends.append(max(at, ends[-1]) + steps)
        pace.note(late, at - before[1] if before[0] == steps else None)
        before = steps, at
        seen.append(steps)
    return seen, ends[-1] / sum(seen)


def test_a_host_in_time_has_launches_of_one_step():
    """Whatever pauses it makes, and also if it is late in more than half of its launches, but by little: then longer
    launches are tried from time to time, and given up."""
    assert set(paced(Pace((1, 2, 4)), lambda steps: 0.7 + 0.1 * steps, 5000, np.random.default_rng(1))[0]) == {1}
    seen, _ = paced(Pace((1, 2, 4)), lambda steps: 0.95 + 0.1 * steps, 5000)
    trials = sum(a == 1 and b == 2 for a, b in itertools.pairwise(seen))
    assert set(seen) == {1, 2} and 3 <= trials <= 5, "a trial is tried again, less and less often"
    assert sum(steps == 2 for steps in seen) <= (TRIAL + 2) * trials


def test_a_late_host_has_longer_launches():
    pace = Pace((1, 2, 4))
    seen, step = paced(pace, lambda steps: 1.4 + 0.1 * steps, 1000)
    assert seen.count(2) > 700 and set(seen) == {1, 2} and step < 1.1
    assert set(paced(pace, lambda steps: 0.5, 1000)[0][-500:]) == {1}, "the host is in time again"
    seen, step = paced(pace, lambda steps: 3.0 + 0.1 * steps, 1000)
    assert pace.steps == 4 and seen.count(4) > 700 and step < 1.2
    assert set(paced(pace, lambda steps: 0.5, 1000)[0][-500:]) == {1}
    seen, step = paced(pace, lambda steps: 1.4 + 0.1 * steps, 2000, np.random.default_rng(2))
    assert seen.count(2) > 1000 and step < 1.4


def test_the_first_launches_are_no_measure():
    """Those right behind prompts are late and take longer than those that follow, of whatever number of steps."""
    pace = Pace((1, 2, 4))
    for i in range(BEGIN + 1):
        pace.note(True, 1.2 if i < SMOOTH else 1.0)
    assert pace.steps == 2
    for _ in range(TRIAL):
        pace.note(False, 1.0 * pace.steps)
    assert pace.steps == 1


def test_longer_launches_that_save_nothing_are_given_up():
    """Where a launch costs the host as much for each of its steps, and where no two launches follow each other, so that
    nothing can be measured."""
    seen, _ = paced(Pace((1, 2, 4)), lambda steps: 1.5 * steps, 3000)
    assert set(seen) == {1, 2} and sum(steps == 2 for steps in seen) < 200
    pace = Pace((1, 2))
    for _ in range(BEGIN + 1):
        assert pace.steps == 1
        pace.note(True, 1.0)
    assert pace.steps == 2
    for _ in range(4 * TRIAL):
        pace.note(True, None)
    assert pace.steps == 1


def test_what_the_core_notes(lm, one, monkeypatch):
    """Launches of sequences that all decode, behind others of that kind, on a GPU, where programs of several steps are
    compiled: they would hold up all."""
    monkeypatch.setattr(serving_settings, "on_host", lambda: False)
    monkeypatch.setattr(serving_settings, "tile_of", lambda lm, cpu: 1)
    core, clock = Core(lm, settings_of(lm, **SIZES)), iter(range(1000))
    core._clock = lambda: 0.5 * next(clock)
    core.device._compiled = one.device._compiled
    assert (core.scheduler.steps, core.settings.launch_steps, core.settings.if_late) == (1, (2, 4), True)
    notes, note = [], core._pace.note
    monkeypatch.setattr(core._pace, "note", lambda *given: notes.append(given) or note(*given))
    for ahead, ended, kind, steps in (
        (False, True, "rows", 1), (True, False, "rows", 1), (True, True, "prompts", 1), (True, True, "rows", 2)
    ):  # fmt: skip
        core.device.ahead = ahead
        plan = SimpleNamespace(rows=None if kind == "prompts" else (), steps=1)
        notes.clear()
        for _ in range(BEGIN + 1):
            core._flying.clear()
            core._flying.extend(SimpleNamespace(result=SimpleNamespace(ended=done)) for done in (ended, False))
            core._keep_pace(plan)
        assert core.scheduler.steps == steps
        assert {late for late, _ in notes} == ({ended} if ahead and kind == "rows" else set())
        first = None if kind == "rows" and (ahead, ended) == (True, True) else 0.5  # the launch before had prompts
        assert [seconds for _, seconds in notes[:2]] == ([first, 0.5] if notes else [])


def test_the_next_launch_comes_before_tokens_that_end_nothing(lm, one, monkeypatch):
    """The device gets the next launch as soon as the one before the last has ended: its tokens are taken behind that,
    but for those of answers that may end, which the next launch leaves out."""
    done, device_run = [], one.device.run

    def dispatch(plan, *needs):
        done.append(("launch", len(plan.segments)))
        return device_run(plan, *needs)

    monkeypatch.setattr(one.device, "run", dispatch)
    counts = {}

    def submit(name, tokens, **stop):
        def deliver(found, error):
            counts[name] = counts.get(name, 0) + len(found)
            done.append((name, counts[name]) if found else (name, "end"))

        request = read_request(lm, 64, [5, 6, 7 + len(name)], tokens, stop.get("stop"), (), False, {})
        one.submit(request, deliver)

    submit("long", 12)
    submit("short", 5)
    while not one.idle:
        one.step()
    launches = [i for i, (what, _) in enumerate(done) if what == "launch"]
    at = lambda name, number: sum(i < done.index((name, number)) for i in launches)
    assert [at("long", n) for n in range(3, 11)] == [n + 2 for n in range(3, 11)], "behind the launch two later"
    assert at("short", "end") == 6 and [rows for what, rows in done if what == "launch"][5:7] == [1, 1]


@pytest.mark.parametrize("steps", [0, 9, 1.5, True])
def test_numbers_of_steps(lm, steps):
    with pytest.raises(ModelError, match="launch_steps of an engine is an int from 1 to 8"):
        settings_of(lm, **SIZES, launch_steps=steps)
