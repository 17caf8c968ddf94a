"""On a GPU: an engine with random weights of Llama-3.1-8B's shape, and what it adds to the device's own time."""

from __future__ import annotations

import argparse
import asyncio
import collections
import gc
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

from benchmarks.gpu import models
from benchmarks.serve import bound
from benchmarks.serve.load import Goal, Lengths, Load, all_decode, run, summary
from benchmarks.serve.targets import of_batches, of_engine
from jtile.models import Engine, LanguageModel
from jtile.models.serving.settings import budget_of
from jtile.models.serving.worker import responsive

GOAL = Goal(first_ms=10_000, between_ms=100)
STORED = ("fp8", models.DENSE)  # what can be left out for want of time comes last


def _loads(tiny: bool) -> dict[str, Load]:
    rows, long, short = (4, 32, 24) if tiny else (256, 1024, 256)
    return {
        "all": Load(f"{rows} at once, {long} in {short} out", rows, Lengths(long), Lengths(short)),
        "decode": Load(f"{rows} decode, {long // 8} in", rows, Lengths(long // 8), Lengths(short * 5 // 8)),
        "shared": Load(
            f"{rows // 2} at once, {long * 3 // 4} of {long} shared",
            rows // 2,
            Lengths(long),
            Lengths(8),
            shared=long * 3 // 4,
        ),
        "poisson": Load(
            f"poisson, {long} in {short // 4} out", rows * 3 // 8, Lengths(long), Lengths(short // 4), "poisson", 16.0
        ),
        "batches": Load(f"{rows} at once, {long} in {short // 4} out", rows, Lengths(long), Lengths(short // 4)),
    }


def records(options: argparse.Namespace, deadline: float, say: Callable[[str], None]) -> Iterator[dict]:
    """The records: for each dtype all requests at once, and the overhead of a step; with bf16 also the gain by the
    prefix cache and by chunks."""
    name = "tiny" if options.tiny else "Llama-3.1-8B"
    config = (models.TINY if options.tiny else models.SHAPES)[name]
    loads = _loads(options.tiny)
    for stored in STORED:
        if options.only and not any(text in stored for text in options.only):
            continue
        began = time.monotonic()
        if began > deadline:
            say(f"left out, no time: {name} {stored}")
            continue
        lm = models.make(config, stored)
        lm.cache_dtype = options.cache_dtype
        jax.block_until_ready(lm._weights)
        say(f"{name} {stored}: weights made in {time.monotonic() - began:.0f} s")
        rows = loads["all"].requests
        shapes = (24, 64) if options.tiny else (rows, options.chunk or budget_of(rows))
        with responsive():  # a server does so, too
            for kind, runs in _measured(lm, loads, stored, shapes, deadline, say):
                cache = f", cache {options.cache_dtype}" if options.cache_dtype else ""
                yield {"config": f"{name}, {loads[kind].name}{cache}", "dtype": stored, "runs": runs}
        del lm
        gc.collect()


def _measured(
    lm: LanguageModel, loads: dict[str, Load], stored: str, shapes: tuple[int, ...], deadline: float, say: Callable
) -> Iterator[tuple[str, dict]]:
    engines = _Engines(lm, loads["all"], shapes, say)
    numbers, _ = engines.run(loads["all"])
    yield "all", {"ours": numbers, "bound": bound.of_load(lm, loads["all"], shapes[-1])}
    runs = {f"ours, launch_steps={n}": engines.overhead(loads["decode"], launch_steps=n) for n in (1, 4)}
    yield "decode", {"ours": engines.overhead(loads["decode"])} | runs
    compared = (("shared", {"prefix_cache": False}), ("poisson", {"chunked_prefill": False}))
    for kind, without in compared if stored == models.DENSE else ():
        if time.monotonic() > deadline:
            say(f"left out, no time: {loads[kind].name}")
            continue
        runs = {"ours": engines.run(loads[kind])[0]}
        runs |= {f"ours, {option}={value}": engines.run(loads[kind], **without)[0] for option, value in without.items()}
        yield kind, runs
    if stored == models.DENSE and time.monotonic() < deadline - 30:
        ours, _ = engines.run(loads["batches"])
        engines.close()
        peer = of_batches(lm, loads["all"].requests // 4, loads["batches"])
        batches = summary(asyncio.run(run(loads["batches"], peer, lm.config.vocab_size)), GOAL)
        yield "batches", {"ours": ours, "static batch": batches}
    engines.close()


class _Engines:
    """Engines of one model, one at a time, since each has most of the memory; they share their compiled programs."""

    def __init__(self, lm: LanguageModel, largest: Load, shapes: tuple[int, ...], say: Callable):
        length = largest.prompt.median + largest.answer.median
        self._lm, self._rows, self._say = lm, largest.requests, say
        self._sizes = dict(rows=self._rows, max_length=length, cache_tokens=self._rows * (length + 64), shapes=shapes)
        self._compiled: dict = {}
        self._engine: Engine | None = None
        self._options: dict | None = None

    def _of(self, **options) -> Engine:
        if self._engine is None or options != self._options:
            self.close()
            self._engine, self._options = Engine(self._lm, **self._sizes, **options), options
            self._engine._core.device._compiled = self._compiled
            self._warm(self._engine)
        return self._engine

    def _warm(self, engine: Engine) -> None:
        """Compiles what there is to compile."""
        began, device = time.monotonic(), engine._core.device
        for n in engine.settings.shapes:
            for seen in {None, engine.settings.seen(n)}:
                device._step(n, seen)
        for count in engine.settings.launch_steps:
            device._several(engine.settings.shape(self._rows), 0, count)
        device.ahead = True
        asyncio.run(run(Load("", 2, Lengths(4), Lengths(4)), of_engine(engine), self._lm.config.vocab_size))
        gc.collect()
        gc.freeze()  # as at the start of a server, which has its programs; going through them takes 100 ms each time
        self._say(f"    {len(self._compiled)} programs in {time.monotonic() - began:.0f} s")

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        gc.unfreeze()
        gc.collect()

    def run(self, load: Load, **options) -> tuple[dict, float | None]:
        """(the summary of what clients saw, seconds of a step while all of them decode)."""
        engine = self._of(**options)
        engine._core.scheduler.reset()  # the engine is idle; the cache must not hold tokens of earlier loads
        before = engine.stats()
        seen = asyncio.run(run(load, of_engine(engine), self._lm.config.vocab_size))
        after = engine.stats()
        numbers = summary(seen, GOAL)
        numbers |= {
            name: after[f"{name}_total"] - before[f"{name}_total"]
            for name in ("steps", "prefilled_tokens", "preemptions")
        }
        return numbers, all_decode(seen) if not numbers["failed"] else None

    def overhead(self, load: Load, **options) -> dict:
        """The time of a step of the engine while all decode, and that of a bare loop over the same programs and
        lengths, behind as many tokens of prompts, one step a launch."""
        numbers, step = self.run(load, **options)
        bare = self._bare(load)
        if step is None:
            return numbers | {"error": "there was no time in which all of them decoded"}
        share = 1 - bare / step
        rate = self._rows / step
        more = {"step_ms": 1e3 * step, "bare_step_ms": 1e3 * bare, "overhead": share, "decode_tokens_per_s": rate}
        return numbers | {name: round(value, 4) for name, value in more.items()}

    def _bare(self, load: Load) -> float:
        """Seconds of a step of all rows while they decode, its programs called one after the other without a scheduler.
        Behind prompts a card has a lower clock than behind a pause, so these come first, as in the load."""
        engine = self._of(**(self._options or {}))
        device, settings, rows, weights = engine._core.device, engine.settings, self._rows, self._lm._weights
        n, most = settings.shape(rows), settings.shapes[-1]
        k, pages = settings.samples(n), settings.pages // rows
        table = np.full((settings.rows + 1, settings.width), -1, np.int32)
        wide = min(pages, settings.width)
        table[:rows, :wide] = np.arange(rows * wide, dtype=np.int32).reshape(rows, wide)
        step, whole = device._step(n), device._step(most, settings.seen(most))
        choose = device._choose(k, 0, False, False)
        of, which = np.zeros((k,), np.int32), np.zeros((2, k), np.int32)
        of[:rows], which[0], which[0, :rows] = np.arange(rows), settings.rows, np.arange(rows)

        def prompts() -> jax.Array:
            size, batch = load.prompt.median, _padding(most, settings.rows)
            for i, at in enumerate(range(settings.singles, most - size + 1, size)):
                batch[1, at : at + size], batch[2, at : at + size] = np.arange(size), i % rows
            none = np.zeros((settings.samples(most),), np.int32)
            logits, device._entries = whole(weights, device._entries, device._last, table.copy(), batch, none, None)
            return logits

        def decode(position: int) -> jax.Array:
            batch = _padding(n, settings.rows)
            batch[1, :rows], batch[2, :rows], batch[3, :rows] = position, np.arange(rows), 1
            logits, device._entries = step(weights, device._entries, device._last, table.copy(), batch, of, None)
            tokens, _, device._last, _ = choose(logits, device._last, {}, device._options, which, None)
            return tokens

        jax.block_until_ready(decode(load.prompt.median))  # once, so that everything has its place
        behind = [prompts() for _ in range(-(-rows * load.prompt.median // (most - settings.singles)))]
        jax.block_until_ready(behind)
        del behind
        start, flying = time.perf_counter(), collections.deque[jax.Array]()
        for i in range(load.answer.median - 1):
            flying.append(decode(load.prompt.median + i))
            if len(flying) > 2:  # as many are under way as in an engine
                jax.block_until_ready(flying.popleft())
        jax.block_until_ready(list(flying))
        seconds = time.perf_counter() - start
        engine._core.scheduler.reset()  # the pages hold other tokens now
        return seconds / (load.answer.median - 1)


def _padding(n: int, slot: int) -> np.ndarray:
    """A batch of n tokens of `programs.step` that are all padding, int32 [5, n]."""
    batch = np.zeros((5, n), np.int32)
    batch[1], batch[2] = -1, slot
    return batch
