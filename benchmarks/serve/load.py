"""The load of a server: which requests come when, and what their clients see."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal

import numpy as np

Arrivals = Literal["together", "fixed", "poisson"]


@dataclasses.dataclass(frozen=True)
class Lengths:
    """The numbers of tokens of prompts or answers: their median, and the standard deviation of their logarithm, 0 if
    all are equal; none is above `most`."""

    median: int
    spread: float = 0.0
    most: int = 1 << 30

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """int [count], each at least 1."""
        drawn = self.median * np.exp(self.spread * rng.standard_normal(count))
        return np.clip(np.round(drawn), 1, self.most).astype(int)


@dataclasses.dataclass(frozen=True)
class Load:
    """requests: how many. arrivals: all at once, or `rate` of them a second, evenly or as a Poisson process. clients:
    how many clients there are, each of which waits for its answer before it asks again; None: one for each request.
    shared: how many tokens all prompts begin with. beside: another load that runs meanwhile and is not counted."""

    name: str
    requests: int
    prompt: Lengths
    answer: Lengths
    arrivals: Arrivals = "together"
    rate: float = 0.0
    clients: int | None = None
    shared: int = 0
    beside: Load | None = None

    def calls(self, vocab: int, seed: int = 0) -> list[Call]:
        """The requests of the load, in the order in which they come; equal seeds give equal requests."""
        rng = np.random.default_rng(seed)
        prompts, answers = self.prompt.draw(rng, self.requests), self.answer.draw(rng, self.requests)
        gaps = {
            "together": np.zeros(self.requests),
            "fixed": np.full(self.requests, 1 / self.rate if self.rate else 0),
            "poisson": rng.exponential(1 / self.rate if self.rate else 0, self.requests),
        }[self.arrivals]
        times = np.cumsum(gaps) - gaps[0]
        low = min(100, vocab // 2)  # the first ones are often control tokens
        common = rng.integers(low, vocab, self.shared).tolist()
        calls = []
        for at, length, count in zip(times, prompts, answers, strict=True):
            own = rng.integers(low, vocab, max(int(length) - self.shared, 1)).tolist()
            calls.append(Call(float(at), [*common, *own], int(count)))
        return calls


@dataclasses.dataclass(frozen=True)
class Call:
    """A request: the seconds after which it comes, the ids of its prompt, and how many tokens it asks for."""

    at: float
    prompt: list[int]
    count: int


@dataclasses.dataclass
class Seen:
    """What the client of a call saw: when it asked (0.0: never), and when each of its tokens came, in seconds; when it
    was cut off, if it was; or why it failed."""

    call: Call
    asked: float = 0.0
    times: list[float] = dataclasses.field(default_factory=list)
    cut: float | None = None
    error: str | None = None

    @property
    def first(self) -> float:
        """Seconds to the first token; those waited, if it had not come when the call was cut off."""
        return (self.times[0] if self.times else self.cut or self.asked) - self.asked

    @property
    def between(self) -> float:
        """The mean time from token to token."""
        return (self.times[-1] - self.times[0]) / max(len(self.times) - 1, 1)


Answer = Callable[[Call], AsyncIterator[int]]  # gives how many tokens came, each time that some come


async def drive(
    calls: Sequence[Call], answer: Answer, clients: int | None = None, seconds: float | None = None
) -> list[Seen]:
    """Sends the calls when they are due, and follows their answers, which are cut off after so many seconds."""
    gate, start = asyncio.Semaphore(clients or len(calls)), time.perf_counter()

    async def follow(seen: Seen) -> None:
        await asyncio.sleep(max(0.0, start + seen.call.at - time.perf_counter()))
        async with gate:
            seen.asked = time.perf_counter()
            async for count in answer(seen.call):
                seen.times += [time.perf_counter()] * count

    async def one(call: Call) -> Seen:
        seen, limit = Seen(call), asyncio.timeout(seconds)
        try:
            async with limit:
                await follow(seen)
        except Exception as error:
            if limit.expired():
                seen.cut = time.perf_counter()
            else:
                seen.error = f"{type(error).__name__}: {error}"[:200]
        return seen

    return await asyncio.gather(*map(one, calls))


async def run(load: Load, answer: Answer, vocab: int, seconds: float | None = None) -> list[Seen]:
    """What the clients of a load saw; their answers are cut off after so many seconds."""
    background = None
    if load.beside is not None:
        others = load.beside.calls(vocab, seed=1)
        background = asyncio.ensure_future(drive(others, answer, load.beside.clients))
        await asyncio.sleep(1.0)  # until the other load is under way
    try:
        return await drive(load.calls(vocab), answer, load.clients, seconds)
    finally:
        if background is not None:
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)


@dataclasses.dataclass(frozen=True)
class Goal:
    """The longest times that a client accepts: milliseconds to the first token, and from token to token on average."""

    first_ms: float
    between_ms: float

    def met(self, seen: Seen) -> bool:
        return (
            bool(seen.times)
            and seen.cut is None
            and 1e3 * seen.first <= self.first_ms
            and 1e3 * seen.between <= self.between_ms
        )


def summary(seen: Sequence[Seen], goal: Goal) -> dict[str, float | int | str | None]:
    """The numbers of a load: rates are over the time from the first request to the last token; times are in
    milliseconds, those between tokens of all tokens of all answers. goodput: requests a second that met the goal.
    unfinished: answers that were cut off or not even begun; where no token of one had come, the time to the first is
    what its client had waited."""
    cut = [one for one in seen if one.cut is not None]
    good = [one for one in seen if one.error is None and (one.times or (one.cut is not None and one.asked))]
    failed = next((one.error or "no token" for one in seen if one not in good and one not in cut), None)
    if not any(one.times for one in good):
        return {"requests": len(seen), "failed": len(seen), "error": failed or "no token in time"}
    ends = [one.cut or one.times[-1] for one in good]
    seconds = max(ends) - min(one.asked for one in good)
    tokens, firsts = sum(len(one.times) for one in good), [1e3 * one.first for one in good]
    gaps = np.concatenate([1e3 * np.diff(one.times) for one in good])
    gaps = gaps if len(gaps) else np.zeros(1)
    of = lambda values, q: round(float(np.percentile(values, q)), 3)
    numbers: dict[str, float | int | str | None] = {
        "requests": len(seen), "failed": sum(one.error is not None or not (one.times or one.cut) for one in seen),
        "seconds": round(seconds, 3), "new_tokens": tokens,
        "prompt_tokens": sum(len(one.call.prompt) for one in good), "tokens_per_s": round(tokens / seconds, 2),
        "requests_per_s": round((len(seen) - len(cut)) / seconds, 3),
        "first_ms_p50": of(firsts, 50), "first_ms_p99": of(firsts, 99),
        "between_ms_p50": of(gaps, 50), "between_ms_p99": of(gaps, 99),
        "goal_ms": f"{goal.first_ms:g} to the first, {goal.between_ms:g} between",
        "goodput_per_s": round(sum(map(goal.met, good)) / seconds, 3),
    }  # fmt: skip
    return numbers | ({"error": failed} if failed else {}) | ({"unfinished": len(cut)} if cut else {})


def all_decode(seen: Sequence[Seen]) -> float | None:
    """Seconds of a step while all of them decode: from the last first token to the first last one; None where there is
    no such time."""
    start, end = max(one.times[0] for one in seen), min(one.times[-1] for one in seen)
    steps = [sum(start <= t <= end for t in one.times) - 1 for one in seen]
    return (end - start) / float(np.median(steps)) if end > start and min(steps) > 4 else None
