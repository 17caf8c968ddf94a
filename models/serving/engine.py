"""`Engine`: a language model that answers many requests at a time, from any thread or event loop."""

from __future__ import annotations

import asyncio
import atexit
import collections
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, Unpack

from jtile._errors import EngineError, JtileError, PromptError, QueueFullError

from ..generate import LanguageModel
from ..sampling import Sampling, SamplingOptions
from .core import Core, Job, checked_weights
from .grammar import Grammar
from .request import Completion, Request, Token, read_request
from .settings import settings_of

REASONS = ("stop", "length", "cancelled", "error")
Wake = dict[asyncio.AbstractEventLoop, list[asyncio.Future]]


class Engine:
    """Answers requests as they come: all that run at a time share the steps of the model, and pages of the cache where
    they begin alike. One thread of its own drives the device; every method may be called from any thread.

    ```python
    with jtile.models.Engine(lm) as engine:
        answers = engine.generate(["Why is the sky blue?", "What is a tile?"], max_tokens=64)
        async for token in engine.stream("Once upon a time", temperature=0.8, seed=1):
            print(token.text, end="")
    ```

    What a request gets depends on its prompt, its options and its seed, not on the requests beside it; see `invariant`.

    Args:
      lm: the model; its `page_size` and `cache_dtype` are those of the cache.
      rows: requests that run at a time; others wait, first come, first served. Default 16 on CPUs, 128 on GPUs.
      shapes: numbers of tokens, ascending, that a step may have; it takes the smallest that holds its tokens, those of
        padding included, and a program is compiled for each. The largest is what a step computes of prompts at most.
      cache_tokens: tokens that the cache holds, of all requests together, and of earlier ones where there is room. By
        default what 1 GiB holds on a CPU, and 80 % of the free memory on a GPU, or less where rows do not need it.
      max_length: of prompt and answer of a request together, in tokens; by default the context of the model.
      max_waiting: requests that may wait.
      prefix_cache: whether requests share what they have in common, with earlier ones too.
      chunked_prefill: whether prompts are computed in chunks beside the tokens of answers. Without, each is computed
        at once, as far as a step holds it, and the answers of others wait meanwhile.
      invariant: only shapes and kernels whose sums do not depend on the number of rows. Without, few requests are
        answered sooner on a CPU, and a request's tokens may differ with the load where two logits are nearly equal.
      compile_ahead: compile all programs now, not when they are needed first.
      progress: is called with (programs compiled, of how many) meanwhile.

    Raises:
      ModelError: numbers that are none, or that do not fit each other.
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        rows: int | None = None,
        shapes: Sequence[int] | None = None,
        cache_tokens: int | None = None,
        max_length: int | None = None,
        max_waiting: int = 1024,
        prefix_cache: bool = True,
        invariant: bool = True,
        chunked_prefill: bool = True,
        compile_ahead: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ):
        sizes = rows, shapes, cache_tokens, max_length, max_waiting
        self.settings = settings_of(lm, *sizes, prefix_cache, invariant, chunked_prefill)
        self.lm = lm
        self._core = Core(lm, self.settings)
        if compile_ahead:
            self._core.device.compile(progress or (lambda done, total: None))
        self._changed = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._open = 0  # requests that have not ended
        self._closed: str | None = None  # why it takes no more requests
        self._wake: Wake = {}
        self._thread = threading.Thread(target=self._run, name="jtile engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that is in XLA when Python ends would abort the process

    # -- requests ------------------------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        eos: str | int | Sequence[int] | None = "model",
        logprobs: bool | int = False,
        grammar: Grammar | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Stream:
        """The tokens that continue a prompt, as they come: to be iterated by `async for` or `for`.

        Args:
          prompt: text, or token ids.
          max_tokens: at most so many, by default as many as there is room for.
          stop: strings, before the first of which the text ends.
          eos: tokens that end the answer: "model" for the model's own, ids, or None to go on.
          logprobs: whether each token has its log-probability, or for how many of the likeliest to report it, too.
          grammar: what the answer has to be, `Grammar.json(schema)` for instance; ended by max_tokens it is cut off.
          sampling: of `sampling.Sampling`, one value each.

        Raises:
          PromptError: the prompt is empty, too long, or no prompt; an option is out of its range.
          QueueFullError: too many requests wait. EngineError: the engine is closed.
        """
        request = read_request(
            self.lm, self.settings.length, prompt, max_tokens, stop, eos, logprobs, sampling, grammar
        )
        return self.submit(request)

    def submit(self, request: Request) -> Stream:
        """As `stream`, of a request that `request.read_request` has checked."""
        mail = Mail(self)
        with self._changed:
            self._check_open()
            limit = self.settings.rows + self.settings.waiting
            if self._open >= limit:
                raise QueueFullError(
                    f"{self._open} requests run and wait, and no more than {limit} may; try again later"
                )
            self._open += 1
            self._do(lambda: mail.begin(self._core, request))
        return Stream(self, mail)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        eos: str | int | Sequence[int] | None = "model",
        logprobs: bool | int = False,
        grammar: Grammar | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> list[Completion]:
        """The answers to several prompts, in their order; waits for them. Options as in `stream`, for all of them; the
        int s as seed stands for s, s + 1, ... of the prompts. More prompts than may wait are handed in by and by.

        Raises:
          PromptError: as in `stream`; no request is begun then. EngineError, ModelError: an answer failed.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            raise PromptError(f"generate takes a list of prompts, got {prompts!r}")
        prompts = list(prompts)
        seeds = Sampling(**sampling).rows(len(prompts))["seed"].tolist()
        options = [{**sampling, "seed": seed} for seed in seeds]
        requests = collections.deque(
            read_request(self.lm, self.settings.length, prompt, max_tokens, stop, eos, logprobs, of, grammar)
            for prompt, of in zip(prompts, options, strict=True)
        )
        streams: list[Stream] = []
        ended = 0
        while requests or ended < len(streams):
            try:
                while requests:
                    streams.append(self.submit(requests[0]))
                    requests.popleft()
            except QueueFullError:
                if ended == len(streams):  # of others
                    with self._changed:
                        self._changed.wait(0.1)
                    continue
            streams[ended].result()
            ended += 1
        return [stream.completion for stream in streams]

    # -- the engine itself ---------------------------------------------------------------------------------------------

    def update_weights(self, weights: Any) -> None:
        """Replaces the weights of the model between two steps: a tree like `nnx.state(lm.model)`. Requests under way go
        on with the new ones: what the cache holds of them is computed again, and what it holds of others is dropped.
        Arrays that are on the device already are not copied: who donates them later has to hand in copies.

        Raises:
          ModelError: another tree, or other shapes or dtypes.
        """
        leaves, done = checked_weights(self.lm, weights), threading.Event()

        def update():
            self._core.update_weights(leaves)
            done.set()

        with self._changed:
            self._check_open()
            self._do(update)
        while not done.wait(1):
            if not self._thread.is_alive():
                raise EngineError("the engine ended before it took the new weights")

    def stats(self) -> dict[str, int | float]:
        """Numbers of this moment and totals since the start."""
        core, scheduler = self._core, self._core.scheduler
        totals, counts, pool = core.totals, scheduler.counts, scheduler.pool
        return {
            "requests_running": len(scheduler.running),
            "requests_waiting": len(scheduler.waiting),
            "requests_total": totals.requests,
            **{f"requests_{reason}_total": totals.finished[reason] for reason in REASONS},
            "prompt_tokens_total": totals.prompt_tokens,
            "prefilled_tokens_total": counts.prefilled,
            "cached_tokens_total": counts.cached,
            "new_tokens_total": totals.new_tokens,
            "preemptions_total": counts.preemptions,
            "steps_total": totals.steps,
            "pages": pool.count,
            "pages_in_use": pool.count - pool.available,
            "pages_of_prefixes": pool.idle,
        }  # fmt: skip

    @property
    def closed(self) -> str | None:
        """Why it takes no more requests; None while it does."""
        return self._closed

    def close(self, drain: bool = False) -> None:
        """Ends the engine: with `drain` once all requests have their answers, else at once; those under way end
        "cancelled" then. It takes no new ones from now on."""
        with self._changed:
            self._closed = self._closed or "the engine is closed"
            if not drain:
                self._do(lambda: [self._core.cancel(job) for job in self._core.jobs])
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed is not None:
            raise EngineError(self._closed)

    def _do(self, command: Callable[[], None]) -> None:
        """Runs a command on the thread of the engine."""
        with self._changed:
            self._commands.append(command)
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while self._next_commands():
                self._core.step()
                self._woken()
        except Exception as error:  # of XLA or of ours: nobody else would hear of it
            with self._changed:
                self._closed = f"a step of the engine failed: {type(error).__name__}: {error}"
            failure = EngineError(self._closed)
            failure.__cause__ = error
            for command in self._take_commands():
                command()
            self._core.fail(failure)
        self._woken()

    def _next_commands(self) -> bool:
        """Runs commands, and waits for some where there is nothing to do; False at the end."""
        with self._changed:
            while self._core.idle and not self._commands and self._closed is None:
                self._changed.wait()
        for command in self._take_commands():
            command()
        with self._changed:
            return not (self._closed is not None and self._core.idle and not self._commands)

    def _take_commands(self) -> list[Callable[[], None]]:
        with self._changed:
            commands, self._commands = self._commands, []
        return commands

    def _woken(self) -> None:
        """Tells those who wait that something has come, once a step for each event loop."""
        with self._changed:
            wake, self._wake = self._wake, {}
            self._changed.notify_all()
        for loop, waiters in wake.items():
            try:
                loop.call_soon_threadsafe(_resolve, waiters)
            except RuntimeError:  # the loop is closed, and nobody waits in it
                continue


def _resolve(waiters: list[asyncio.Future]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


class Mail:
    """What the engine has for one client. The engine holds it, and not the client's `Stream`, so that a stream that
    nobody reads any more is cancelled."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.items: collections.deque[Token] = collections.deque()
        self.completion, self.error = Completion(), None
        self.ended = False
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future] | None = None
        self._job: Job | None = None
        self._gone = False

    def begin(self, core: Core, request: Request) -> None:
        """On the thread of the engine."""
        self._job = core.submit(request, self._deliver)
        self.completion = self._job.completion
        if self._gone:
            core.cancel(self._job)

    def cancel(self, core: Core) -> None:
        """On the thread of the engine."""
        self._gone = True
        if self._job is not None:
            core.cancel(self._job)

    def wait(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future:
        """What is set when something comes."""
        waiter = loop.create_future()
        self._waiter = loop, waiter
        return waiter

    def _deliver(self, token: Token | None, error: JtileError | None) -> None:
        engine = self._engine
        with engine._changed:
            if token is not None:
                self.items.append(token)
            else:
                self.ended, self.error = True, error
                engine._open -= 1
            if self._waiter is not None:
                loop, waiter = self._waiter
                engine._wake.setdefault(loop, []).append(waiter)
                self._waiter = None


class Stream(AsyncIterator[Token], Iterator[Token]):
    """The answer to a request: an iterator over its tokens, asynchronous or not, to be read by one reader.
    `completion` is what the engine has made so far. A stream that is dropped is cancelled."""

    def __init__(self, engine: Engine, mail: Mail):
        self._engine, self._mail = engine, mail

    @property
    def completion(self) -> Completion:
        return self._mail.completion

    def cancel(self) -> None:
        """Ends the request, unless it has ended; what it has made so far can still be read."""
        mail, core = self._mail, self._engine._core
        if not mail.ended:
            self._engine._do(lambda: mail.cancel(core))

    def result(self) -> Completion:
        """Waits for the end; the whole answer.

        Raises:
          EngineError, ModelError: it failed.
        """
        with self._engine._changed:
            while not self._mail.ended:
                self._engine._changed.wait()
        if self._mail.error is not None:
            raise self._mail.error
        return self.completion

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Token:
        loop = asyncio.get_running_loop()
        while True:
            with self._engine._changed:
                if self._mail.items or self._mail.ended:
                    return self._next(StopAsyncIteration)
                waiter = self._mail.wait(loop)
            await waiter

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Token:
        with self._engine._changed:
            while not (self._mail.items or self._mail.ended):
                self._engine._changed.wait()
            return self._next(StopIteration)

    def _next(self, end: type[Exception]) -> Token:
        if self._mail.items:
            return self._mail.items.popleft()
        if self._mail.error is not None:
            raise self._mail.error
        raise end

    def __del__(self) -> None:
        if not self._mail.ended:
            self.cancel()
