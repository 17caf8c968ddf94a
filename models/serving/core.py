"""The core of an engine, for one thread: requests become sequences, plans run on the device, tokens become answers.

The device never waits for the host: a step is dispatched before the tokens of the one before it are read. What stops a
sequence is seen one step late; the token too many is dropped. Where all sequences decode, tokens that end no answer are
taken behind the next dispatch, so that it comes sooner.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from jtile._errors import JtileError, ModelError

from ..generate import LanguageModel
from .decoding import Rows
from .device import LEVELS, Device, Parts, Rates, Result
from .pace import Pace
from .request import Completion, Request, Token
from .scheduler import Plan, Scheduler, Segment, Sequence
from .settings import Settings
from .text import StopText

Deliver = Callable[[list[Token], JtileError | None], None]


@dataclasses.dataclass(eq=False)
class Job:
    """A request under way. `deliver(tokens, error)` is called with the tokens that have come, and with none when
    `completion` has its finish_reason; the error is None unless that reason is "error"."""

    request: Request
    completion: Completion
    deliver: Deliver
    sequence: Sequence
    text: StopText


@dataclasses.dataclass
class Totals:
    """Totals since the start: requests that came, requests that ended, by finish reason, tokens of prompts and of
    answers, and steps."""

    requests: int = 0
    finished: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0


class Needs(NamedTuple):
    """What sequences that all decode need of a launch: `level` and `logprobs` as in `Device.run`; most: the most tokens
    of each answer, int32 [k]; watched: which have stop strings, bool [k]; ends: the ids that end some of them."""

    level: int
    logprobs: bool
    most: np.ndarray
    watched: np.ndarray
    ends: np.ndarray

    def ending(self, rows: Rows, found: np.ndarray) -> np.ndarray:
        """Which answers may end with the tokens of a launch, int32 [steps, k]: bool [k]."""
        ending = self.watched | (rows.made + rows.chosen >= self.most)
        return ending | np.isin(found, self.ends).any(axis=0) if len(self.ends) else ending


class Flying(NamedTuple):
    """A launch whose tokens have not been read. needs: those of its rows, if all of its sequences decode."""

    plan: Plan
    result: Result
    needs: Needs | None


class Core:
    """The core for a model, with the sizes of `settings`; only one thread at a time may call it."""

    def __init__(self, lm: LanguageModel, settings: Settings, adapters: list[Parts] | None = None):
        self.lm, self.settings = lm, settings
        sizes = settings.pages, settings.page, settings.rows, settings.shapes[-1]
        steps = settings.launch_steps[0] if settings.launch_steps and not settings.if_late else 1
        tiles = {"tile": settings.tile, "singles": settings.singles, "steps": steps}
        self.scheduler = Scheduler(*sizes, prefixes=settings.prefixes, mixed=settings.mixed, **tiles)
        self.device = Device(lm, settings, adapters or ())
        self._weights = lm._weights  # the weights that the cache was computed with
        self.totals = Totals()
        self._jobs: dict[Sequence, Job] = {}
        self._flying: collections.deque[Flying] = collections.deque()
        self._later: tuple[Rows, np.ndarray, np.ndarray] | None = None  # arguments of `_take_rows`
        self._pace = Pace((1, *settings.launch_steps)) if settings.if_late else None
        self._clock = time.perf_counter
        self._launched = (0, 0.0)  # of the launch before: how many steps if all decoded, else 0, and when it was sent

    @property
    def idle(self) -> bool:
        return not self._jobs and not self._flying and self._later is None

    @property
    def jobs(self) -> list[Job]:
        """The requests under way."""
        return list(self._jobs.values())

    def submit(self, request: Request, deliver: Deliver) -> Job:
        """Begins a request."""
        guided, adapter, row = request.guide is not None, request.adapter, request.row
        single = LEVELS[row.level].counts or row.logprobs is not None  # launches of several steps know neither
        sequence = self.scheduler.add(request.prompt, request.max_tokens, guided, adapter, single)
        stream = self.lm.tokenizer.stream() if self.lm.tokenizer else None
        completion = Completion(prompt_tokens=len(request.prompt))
        text = StopText(stream, request.stops)
        job = self._jobs[sequence] = Job(request, completion, deliver, sequence, text)
        self.totals.requests += 1
        self.totals.prompt_tokens += len(request.prompt)
        return job

    def cancel(self, job: Job) -> None:
        """Ends a request whose client has gone; does nothing if it has ended."""
        if job.sequence in self._jobs:
            self._end(job, "cancelled")

    def fail(self, error: JtileError) -> None:
        """Ends all requests with an error."""
        self._flying.clear()
        self._later = None
        for job in self.jobs:
            with contextlib.suppress(Exception):  # `deliver` may be what has failed
                self.scheduler.finish(job.sequence)
            self._end(job, "error", error)

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Dispatches a step, if there is something to do, and reads the one before it. `meanwhile()` is called between
        the two: the threads that it wakes run while the device works, not before it has work."""
        if self.lm._weights is not self._weights:  # this engine or another one of the same model has changed them
            self._weights = self.lm._weights
            self.scheduler.reset()
        plan = self.scheduler.plan()
        if not plan.empty:
            for sequence in plan.seats:
                assert sequence.slot is not None
                self.device.seat(sequence.slot, self._jobs[sequence].request.row, sequence.tokens)
            level, logprobs, masks, needs = self._needs(plan)
            self._flying.append(Flying(plan, self.device.run(plan, level, logprobs, masks), needs))
            self.totals.steps += plan.steps
            self._keep_pace(plan)
        if self._later is not None:
            later, self._later = self._later, None
            self._take_rows(*later)
        meanwhile()
        if self._flying and (len(self._flying) > 1 or plan.empty):
            before = self._flying.popleft()
            self._read(before, *before.result.read())

    def _keep_pace(self, plan: Plan) -> None:
        """Chooses how many steps the next launches have, behind one of sequences that all decode. A program that is not
        compiled yet would hold up all requests."""
        before, at = self._launched
        now = self._clock()
        self._launched = 0 if plan.rows is None or len(self._flying) < 2 else plan.steps, now
        if self._pace is None or not self.device.ahead or not self._launched[0]:
            return
        if plan.steps == self._pace.steps:
            self._pace.note(self._flying[-2].result.ended, now - at if before == plan.steps else None)
        self.scheduler.steps = self._pace.steps

    def _needs(self, plan: Plan) -> tuple[int, bool, dict[int, np.ndarray], Needs | None]:
        """The arguments `level`, `logprobs` and `masks` of `Device.run` for a plan; and all that its rows need."""
        if plan.rows is not None:
            group = plan.rows.group
            needs = group.needs = group.needs or self._needs_of(group.sequences)
            return needs.level, needs.logprobs, {}, needs
        level, logprobs, masks = 0, False, {}
        for i, segment in enumerate(plan.samples):
            request = self._jobs[segment.sequence].request
            level = max(level, request.row.level)
            logprobs |= request.row.logprobs is not None
            if request.guide is not None:
                masks[i] = request.guide.allowed()
        return level, logprobs, masks, None

    def _needs_of(self, sequences: list[Sequence]) -> Needs:
        """What sequences that all decode need, in their order."""
        requests = [self._jobs[sequence].request for sequence in sequences]
        level, logprobs = max(r.row.level for r in requests), any(r.row.logprobs is not None for r in requests)
        most, watched = (
            np.array([r.max_tokens for r in requests], np.int32),
            np.array([bool(r.stops) for r in requests]),
        )
        return Needs(
            level, logprobs, most, watched, np.array(sorted(set().union(*(r.ends for r in requests))), np.int32)
        )

    def update_weights(self, weights: list) -> None:
        """Replaces the weights as `Engine.update_weights` says; weights: the result of `checked_weights`."""
        self.lm._weights = weights

    def _read(self, launch: Flying, tokens: np.ndarray, rates: Rates | None) -> None:
        """Takes the tokens of a launch. Those of sequences that all decode, without grammars and log-probabilities, are
        taken one answer after the other, which is quicker than one step after the other: first of the answers that may
        end, so that the next launch is without them; the others wait until it is under way."""
        plan, rows, vocab = launch.plan, launch.plan.rows, self.lm.config.vocab_size
        if rows is not None and launch.needs is not None and rates is None and int(tokens.max()) < vocab:
            found = tokens[:, : len(rows.sequences)]
            ending = launch.needs.ending(rows, found)
            self._take_rows(rows, found, np.flatnonzero(ending))
            self._later = rows, found, np.flatnonzero(~ending)
            return
        samples = plan.samples
        of = None if rates is None else {segment.sequence: i for i, segment in enumerate(samples)}
        for step, row in enumerate(tokens[:, : len(samples)].tolist()):
            for segment in self.scheduler.commit(plan, row, step):
                self._take(segment, segment.made + step, rates, 0 if of is None else of[segment.sequence])

    def _take_rows(self, rows: Rows, found: np.ndarray, which: np.ndarray) -> None:
        """Takes tokens, int32 [steps, k], of those of the rows that `which`, int [n], has the numbers of."""
        columns = found.T[which].tolist(), rows.made[which].tolist(), rows.chosen[which].tolist()
        for i, ids, made, count in zip(which.tolist(), *columns, strict=True):
            sequence = rows.sequences[i]
            if sequence.finished:
                continue
            job, ids = self._jobs[sequence], ids if count == len(ids) else ids[:count]
            request, stops = job.request, job.text
            if not request.stops and made + count < request.max_tokens and request.ends.isdisjoint(ids):
                sequence.tokens += ids
                sequence.pending -= count
                self._add_all(job, [Token(token, stops.push(token)) for token in ids])
                continue
            for token in ids:
                sequence.tokens.append(token)
                sequence.pending -= 1
                if self._add(job, token, made):
                    break
                made += 1

    def _take(self, segment: Segment, made: int, rates: Rates | None, i: int) -> None:
        """Takes token number `made` of an answer; `rates`, if given, hold its log-probabilities at number i."""
        sequence = segment.sequence
        job = self._jobs[sequence]
        token, request = sequence.tokens[-1], job.request
        if token >= self.lm.config.vocab_size:  # see `sampling.choose`
            source = self.lm.source or "the model"
            error = ModelError(
                f"the logits of {source} are no numbers (NaN) at token {made} of an answer; check its weights"
            )
            self._end(job, "error", error)
            return
        guide = request.guide
        verdict = "taken" if guide is None else guide.take(token)
        if verdict == "again":
            self._choose_again(job)
            return
        if verdict == "wrong":
            self._end(job, "error", ModelError(f"no token goes on with the grammar at token {made} of an answer"))
            return
        logprob, best = None, ()
        if rates is not None and request.row.logprobs is not None:
            logprob, n = float(rates.chosen[i]), request.row.logprobs
            best = tuple(zip(rates.ids[i, :n].tolist(), rates.best[i, :n].tolist(), strict=True))
        self._add(job, token, made, guide is not None and guide.ended, logprob, best)

    def _add(self, job: Job, token: int, made: int, whole: bool = False, logprob=None, best=()) -> bool:
        """Adds token number `made` to an answer; `whole`: its grammar lets nothing come behind. Returns whether it is
        the last one."""
        completion, request, stops = job.completion, job.request, job.text
        ended = token in request.ends
        text = "" if ended else stops.push(token)
        last = ended or whole or stops.stop is not None or made + 1 == request.max_tokens
        if last and stops.stop is None:
            text += stops.finish()
        completion.cached_tokens = job.sequence.cached or 0
        self._add_all(job, [Token(token, text, logprob, best)])
        if last:
            completion.stop = stops.stop
            self._end(job, "stop" if ended or whole or stops.stop is not None else "length")
        return last

    def _add_all(self, job: Job, tokens: list[Token]) -> None:
        completion = job.completion
        completion.tokens += tokens
        if text := "".join([token.text for token in tokens]):
            completion.text += text
        self.totals.new_tokens += len(tokens)
        job.deliver(tokens, None)

    def _choose_again(self, job: Job) -> None:
        """Drops the newest token of an answer; its next step chooses another one. The sequence takes no part in the
        step under way, since the host has to know its tokens first."""
        sequence, row = job.sequence, job.request.row
        self.scheduler.drop(sequence)
        if sequence.slot is not None:
            self.device.seat(sequence.slot, row, sequence.tokens)  # what penalties count is without the token, too

    def _end(self, job: Job, reason, error: JtileError | None = None) -> None:
        self.scheduler.finish(job.sequence)
        del self._jobs[job.sequence]
        job.completion.finish_reason = reason
        self.totals.finished[reason] += 1
        job.deliver([], error)


def checked_weights(lm: LanguageModel, weights) -> list:
    """Copies of the leaves of a tree of weights that has the structure of the model's own.

    Raises:
      ModelError: the tree, or the shape or dtype of an array, is another one, or the model is cut over a mesh.
    """
    if lm.devices is not None:
        raise ModelError(
            f"{lm.source or 'the model'} is cut over the devices of a mesh, whose weights are parts of a checkpoint's; "
            "write the new ones to a folder, and load it"
        )
    tree = lm._structure[1]
    try:
        leaves, found = jax.tree.flatten(weights)
    except (TypeError, ValueError):  # the keys of the tree have no order
        leaves, found = [], None
    if found is None or found != tree:
        raise ModelError(
            "the new weights are another tree than those of the model; give nnx.state(model) of a model like lm.model"
        )
    for old, new in zip(lm._weights, leaves, strict=True):
        is_array = isinstance(new, jax.Array | np.ndarray)
        if not is_array or (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ModelError(
                f"a new weight is {f'{new.dtype}{new.shape}' if is_array else type(new).__name__}, where the "
                f"model has {old.dtype}{old.shape}"
            )
    # NumPy's arrays first: JAX's own copy of them may come later than the caller's next change.
    leaves = [np.array(new) if isinstance(new, np.ndarray) else new for new in leaves]
    return [jax.device_put(new, old.sharding, may_alias=False) for old, new in zip(lm._weights, leaves, strict=True)]
