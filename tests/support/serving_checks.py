"""What tests of engines and servers wait for."""

from __future__ import annotations

import time
from collections.abc import Callable

from jtile.models import Engine
from jtile.models.serving.core import Core
from jtile.models.serving.request import Completion, read_request


def until(true: Callable[[], object], seconds: float = 600) -> None:
    """Waits until something is true. The limit only ends a hang: a busy machine takes what it takes.

    Raises:
      AssertionError: it is not in time.
    """
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def idle(engine: Engine) -> bool:
    """Whether an engine has nothing to do, and no page of a request."""
    stats = engine.stats()
    return not (stats["requests_running"] or stats["requests_waiting"] or stats["pages_in_use"])


def requests_of(lm, rng, count: int) -> list:
    """Prompts of which some begin alike; greedy ones and drawn ones, with penalties and without."""
    common, made = rng.integers(0, 256, 21), []
    kinds = [{}, {}, {"temperature": 0.9}, {"temperature": 1.1, "top_k": 20, "top_p": 0.9}, {"repetition_penalty": 1.3}]
    for i in range(count):
        own = rng.integers(0, 256, rng.integers(1, 24))
        prompt = [*common[: rng.integers(0, 22)], *own]
        sampling = {**kinds[i % len(kinds)], "seed": int(rng.integers(0, 2**31))}
        made.append(read_request(lm, 64, prompt, int(rng.integers(1, 24)), None, None, True, sampling))
    return made


def run(core: Core, requests, arrivals) -> list[Completion]:
    """The answers to requests that come before the steps of these numbers."""
    jobs = {}
    for step in range(1000):
        for i, request in enumerate(requests):
            if arrivals[i] == step:
                jobs[i] = core.submit(request, lambda tokens, error: None)
        core.step()
        if core.idle and len(jobs) == len(requests):
            return [jobs[i].completion for i in range(len(requests))]
    raise AssertionError("some request starves")


def numbers(completion: Completion):
    """Ids and log-probabilities."""
    return [(token.id, token.logprob) for token in completion.tokens]
