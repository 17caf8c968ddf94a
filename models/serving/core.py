"""The core of an engine, for one thread: requests become sequences, plans run on the device, tokens become answers.

The device never waits for the host: a step is dispatched before the tokens of the one before it are read. What stops a
sequence is seen one step late; the token too many is dropped.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable

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
        self._flying: collections.deque[tuple[Plan, Result]] = collections.deque()
        self._pace = Pace((1, *settings.launch_steps)) if settings.if_late else None

    @property
    def idle(self) -> bool:
        return not self._jobs and not self._flying

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
            self._flying.append((plan, self.device.run(plan, *self._needs(plan))))
            self.totals.steps += plan.steps
            self._keep_pace(plan)
        meanwhile()
        if self._flying and (len(self._flying) > 1 or plan.empty):
            plan, result = self._flying.popleft()
            self._read(plan, *result.read())

    def _keep_pace(self, plan: Plan) -> None:
        """Chooses how many steps the next launches have, behind one of sequences that all decode. A program that is not
        compiled yet would hold up all requests."""
        if self._pace is None or not self.device.ahead or plan.rows is None or len(self._flying) < 2:
            return
        if plan.steps == self._pace.steps:
            self._pace.note(self._flying[-2][1].ended)
        self.scheduler.steps = self._pace.steps

    def _needs(self, plan: Plan) -> tuple[int, bool, dict[int, np.ndarray]]:
        """The arguments `level`, `logprobs` and `masks` of `Device.run` for a plan."""
        if plan.rows is not None:
            group, jobs = plan.rows.group, self._jobs
            if group.needs is None:
                rows = [jobs[sequence].request.row for sequence in group.sequences]
                group.needs = max(row.level for row in rows), any(row.logprobs is not None for row in rows)
            return *group.needs, {}
        level, logprobs, masks = 0, False, {}
        for i, segment in enumerate(plan.samples):
            request = self._jobs[segment.sequence].request
            level = max(level, request.row.level)
            logprobs |= request.row.logprobs is not None
            if request.guide is not None:
                masks[i] = request.guide.allowed()
        return level, logprobs, masks

    def update_weights(self, weights: list) -> None:
        """Replaces the weights as `Engine.update_weights` says; weights: the result of `checked_weights`."""
        self.lm._weights = weights

    def _read(self, plan: Plan, tokens: np.ndarray, rates: Rates | None) -> None:
        rows, vocab = plan.rows, self.lm.config.vocab_size
        if rows is not None and rates is None and int(tokens.max()) < vocab:
            self._read_rows(rows, tokens)
            return
        samples = plan.samples
        of = None if rates is None else {segment.sequence: i for i, segment in enumerate(samples)}
        for step, row in enumerate(tokens[:, : len(samples)].tolist()):
            for segment in self.scheduler.commit(plan, row, step):
                self._take(segment, segment.made + step, rates, 0 if of is None else of[segment.sequence])

    def _read_rows(self, rows: Rows, tokens: np.ndarray) -> None:
        """Takes tokens of sequences that all decode, without grammars and log-probabilities: those of one answer after
        the other, which is quicker than one step after the other."""
        found = tokens[:, : len(rows.sequences)].T.tolist()
        numbers = zip(rows.sequences, found, rows.made.tolist(), rows.chosen.tolist(), strict=True)
        for sequence, ids, made, count in numbers:
            if sequence.finished:
                continue
            job, ids = self._jobs[sequence], ids if count == len(ids) else ids[:count]
            request, stops = job.request, job.text
            if not stops.stops and made + count < request.max_tokens and request.ends.isdisjoint(ids):
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
