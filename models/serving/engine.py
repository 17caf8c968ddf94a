"""`Engine`: a language model that answers many requests at a time, from any thread or event loop."""

from __future__ import annotations

import asyncio
import collections
import os
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

from jtile._errors import ModelError, PromptError, QueueFullError

from ..adapters import Adapter, read_adapter
from ..generate import LanguageModel
from ..sampling import Sampling, SamplingOptions
from .core import Core, checked_weights
from .device import WHOLE, Parts
from .grammar import Grammar
from .request import Completion, Request, Token, read_request
from .settings import settings_of
from .worker import Mail, Worker

REASONS = ("stop", "length", "cancelled", "error")


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
      shapes: numbers of tokens, ascending, that a step may have; a step takes the smallest that holds its tokens, with
        padding, and a program is compiled for each. The largest is the most that a step computes of prompts. On GPUs,
        where tokens of prompts come in tiles, a shape grows to whole tiles.
      cache_tokens: tokens that the cache holds, for all requests together, and for earlier ones where there is room. By
        default as many as 1 GiB holds on a CPU, and 80 % of the free memory on a GPU, or fewer if rows do not need
        them.
      max_length: the most tokens of a request, prompt and answer together; by default the context of the model.
      max_waiting: requests that may wait.
      prefix_cache: whether requests share the cache of equal beginnings, also with earlier requests.
      chunked_prefill: whether prompts are computed in chunks beside the tokens of answers. Otherwise each is
        computed at once, as far as a step holds it, and the answers of others wait meanwhile.
      invariant: use only shapes and kernels whose sums do not depend on the number of rows. Otherwise few requests are
        answered sooner on a CPU, and a request's tokens may differ with the load where two logits are nearly equal.
      launch_steps: how many steps of the model one launch has while all requests decode and none of them asks for
        log-probabilities, penalties, biases or a grammar. The host then works once for so many tokens of each answer,
        which come together; they are the same with any number, but for caches of 8 bits on GPUs, where they depend on
        the load. By default 1 on CPUs, and on GPUs 2 or 4 while that saves a tenth of the time of a step, else 1.
      adapters: low-rank adapters (LoRA) that requests may ask for by these names, as folders that `peft` or
        `jtile.models.save_adapter` wrote. Requests of different adapters run in the same steps.
      compile_ahead: compile all programs now, not when each is needed first.
      progress: a function that is called meanwhile with (how many programs are compiled, of how many).

    Raises:
      ModelError: an argument is not the number that it should be, or arguments do not fit each other.
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
        launch_steps: int | None = None,
        adapters: Mapping[str, str | os.PathLike | Adapter] | None = None,
        compile_ahead: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ):
        sizes = rows, shapes, cache_tokens, max_length, max_waiting
        named = _adapters_of(lm, adapters or {})
        switches = prefix_cache, invariant, chunked_prefill
        self.settings = settings_of(lm, *sizes, *switches, tuple(named), launch_steps)
        self.lm = lm
        self._core = Core(lm, self.settings, list(named.values()))
        if compile_ahead:
            self._core.device.compile(progress or (lambda done, total: None))
        self._worker = Worker(self._core)
        weakref.finalize(self, self._worker.stop).atexit = False  # stops the thread when the engine is collected

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
        adapter: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Stream:
        """The tokens that continue a prompt, as they come, for `async for` or `for`.

        Args:
          prompt: text, or token ids.
          max_tokens: the largest number of new tokens, by default as many as there is room for.
          stop: strings, before the first of which the text ends.
          eos: tokens that end the answer: "model" for the model's own, ids, or None to go on.
          logprobs: report the log-probability of each token; a number n reports those of the n most likely tokens, too.
          grammar: the form of the answer, say `Grammar.json(schema)`; `max_tokens` may cut off what is no JSON.
          adapter: the name of the engine's adapter that answers; None for the model itself.
          sampling: `temperature`, `top_p`, `seed` and the other options of `LanguageModel.generate`, one value each.
        Returns:
          A `Stream` of `Token`s.
        Raises:
          PromptError: the prompt is empty, too long, or no prompt; an option is out of its range.
          QueueFullError: too many requests wait. EngineError: the engine is closed.
        """
        number, length = self.adapter(adapter), self.settings.length
        return self.submit(
            read_request(self.lm, length, prompt, max_tokens, stop, eos, logprobs, sampling, grammar, number)
        )

    def adapter(self, name: str | None) -> int:
        """The number of an adapter, for `request.read_request`.

        Args:
          name: the name of the adapter; None for the model without one.
        Returns:
          Its number; 0 for None.
        Raises:
          PromptError: the engine has none of this name.
        """
        known = self.settings.adapters
        if name is not None and name not in known:
            raise PromptError(f"this engine has no adapter {name!r}; it has {', '.join(map(repr, known)) or 'none'}")
        return 0 if name is None else 1 + known.index(name)

    def submit(self, request: Request) -> Stream:
        """Takes a request, as `stream` does.

        Args:
          request: a request that `request.read_request` has checked.
        Returns:
          Its `Stream`.
        """
        return Stream(self, self._worker.submit(request, self.settings.rows + self.settings.waiting))

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        eos: str | int | Sequence[int] | None = "model",
        logprobs: bool | int = False,
        grammar: Grammar | None = None,
        adapter: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> list[Completion]:
        """Answers several prompts, and waits for all answers.

        Args:
          prompts: texts, or token ids of each prompt. There may be more than `max_waiting`.
          max_tokens, stop, eos, logprobs, grammar, adapter, sampling: as in `stream`, for all prompts. An int s as
            `seed` stands for s, s + 1, ...

        Returns:
          A `Completion` for each prompt, in their order.

        Raises:
          PromptError: as in `stream`; no request is begun then. EngineError, ModelError: an answer failed.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            raise PromptError(f"generate takes a list of prompts, got {prompts!r}")
        prompts, number, length = list(prompts), self.adapter(adapter), self.settings.length
        seeds = Sampling(**sampling).rows(len(prompts))["seed"].tolist()
        options = [{**sampling, "seed": seed} for seed in seeds]
        requests = collections.deque(
            read_request(self.lm, length, prompt, max_tokens, stop, eos, logprobs, of, grammar, number)
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
                if ended == len(streams):  # the queue is full, and only of other callers' requests
                    self._worker.wait(0.1)
                    continue
            streams[ended].result()
            ended += 1
        return [stream.completion for stream in streams]

    # -- the engine itself ---------------------------------------------------------------------------------------------

    def update_weights(self, weights: Any) -> None:
        """Replaces the weights of the model between two steps.

        Running requests continue with the new weights: their caches are computed again, and all other cached tokens are
        dropped. The arrays are copied, so that a trainer may change or donate its own ones afterwards.

        Args:
          weights: a tree like `nnx.state(lm.model)`.

        Raises:
          ModelError: the tree, a shape or a dtype is another one, or the model is cut over a mesh.
        """
        leaves, core = checked_weights(self.lm, weights), self._core
        self._worker.finish(lambda: core.update_weights(leaves), "took the new weights")

    def stats(self) -> dict[str, int | float]:
        """Numbers of this moment and totals since the start.

        Returns:
          Numbers by name; totals end in `_total`.
        """
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
        """Why the engine takes no more requests; None while it takes them."""
        return self._worker.closed

    def close(self, drain: bool = False) -> None:
        """Closes the engine, which takes no new requests from now on.

        Args:
          drain: wait until all requests have their answers; otherwise running requests end as "cancelled".
        """
        self._worker.close(drain)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _adapters_of(lm: LanguageModel, given: Mapping[str, str | os.PathLike | Adapter]) -> dict[str, Parts]:
    """The parts of each adapter by name; adapters that are given as folders are read.

    Raises:
      ModelError: a folder holds no adapter, or that of another model; a name is empty; or the model is cut over a mesh,
        where adapters must be folders.
    """
    if not isinstance(lm, LanguageModel) or not given:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name for name in given):
        raise ModelError(f"adapters of an engine are a dict of names and folders, got {given!r}")
    model, found = lm.part, {}
    for name, x in given.items():
        if lm.shares and isinstance(x, Adapter):
            raise ModelError(f"give the folder of the adapter {name!r}: each device of the mesh reads its part of it")
        elif lm.shares:
            found[name] = {at: read_adapter(x, model, share) for at, share in lm.shares.items()}
        else:
            found[name] = {WHOLE: x if isinstance(x, Adapter) else read_adapter(x, model)}
    return found


class Stream(AsyncIterator[Token], Iterator[Token]):
    """The answer to a request: an iterator over its tokens, asynchronous or not, for one reader.
    `completion` is what the engine has made so far. A stream that is dropped is cancelled."""

    def __init__(self, engine: Engine, mail: Mail):
        self._engine, self._worker, self._mail = engine, engine._worker, mail  # the engine lives as long as its streams

    @property
    def completion(self) -> Completion:
        return self._mail.completion

    @property
    def more(self) -> bool:
        """Whether a token is here that has not been read."""
        return bool(self._mail.items)

    def cancel(self) -> None:
        """Ends the request, unless it has ended; what it has made so far can still be read."""
        mail, core = self._mail, self._engine._core
        if not mail.ended:
            self._worker.do(lambda: mail.cancel(core))

    def result(self) -> Completion:
        """Waits for the end of the answer.

        Raises:
          EngineError, ModelError: the answer failed.
        """
        with self._worker.changed:
            while not self._mail.ended:
                self._worker.changed.wait()
        if self._mail.error is not None:
            raise self._mail.error
        return self.completion

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Token:
        mail = self._mail
        while not mail.items:
            waiter = mail.wait(asyncio.get_running_loop())
            if mail.ended:  # before `items`: no token comes behind it
                return self._next(StopAsyncIteration)
            if not mail.items:
                await waiter
        return mail.items.popleft()  # nobody else takes items out

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Token:
        with self._worker.changed:
            while not (self._mail.items or self._mail.ended):
                self._worker.changed.wait()
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
