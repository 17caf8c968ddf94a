"""The endpoints: what the server does for each path."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import anyio
import numpy as np
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from jtile._errors import ContextError, PromptError

from ...tokenizer import Tokenizer
from ..engine import Engine, Stream
from ..request import Request as Prepared
from ..request import Token, read_request
from .answers import Answer, usage_of
from .compiling import Compilers
from .errors import MISSING, SERVER, ApiError, api_error
from .metrics import Metrics
from .schema import CHOICES, ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, Generated, Message, TokenizeBody

Prompt = str | Sequence[int]
PATIENCE = (
    30.0  # seconds without a part of a body, or, when the server stops, with all answers held up by their readers
)
TICK = 0.5  # seconds after which a server that waits for a body sees that it is to stop


@dataclasses.dataclass
class Server:
    """What the endpoints share. name: the name of the model; limit: the most bytes of a body; stopping: whether new
    requests are refused because the server ends; came: how many requests have come; open: those that are being
    answered; sending: those of them that wait for a client to read; sent: when something was last sent; embedding: lets
    one request for embeddings run; compilers: prepare requests whose answers have a form."""

    engine: Engine
    name: str
    metrics: Metrics
    limit: int = 8 << 20
    stopping: bool = False
    came: int = 0
    open: int = 0
    sending: int = 0
    sent: float = dataclasses.field(default_factory=time.monotonic)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    embedding: anyio.CapacityLimiter = dataclasses.field(default_factory=lambda: anyio.CapacityLimiter(1))
    compilers: Compilers = dataclasses.field(default_factory=Compilers)

    @property
    def stuck(self) -> bool:
        """Whether all clients that are left have stopped reading."""
        return self.open == self.sending and time.monotonic() - self.sent > PATIENCE

    # -- small ones ----------------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        closed = self.engine.closed
        if self.stopping or closed:
            return JSONResponse({"status": "stopping" if self.stopping else closed}, 503)
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._names()]})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._model(self._named(request.path_params["name"])))

    def _names(self) -> list[str]:
        """The names that requests may give as their model: that of the model, and those of its adapters."""
        return [self.name, *self.engine.settings.adapters]

    def _model(self, name: str) -> dict:
        sizes = {"max_length": self.engine.settings.length, "parent": None if name == self.name else self.name}
        return {"id": name, "object": "model", "created": self.created, "owned_by": "jtile", **sizes}

    async def metrics_page(self, request: Request) -> Response:
        return Response(*self.metrics.page())

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request, TokenizeBody)
        tokenizer = self._tokenizer()

        def encode() -> list[int]:  # in a thread: some megabytes take seconds, in which others want their tokens
            if body.messages is not None:
                return self._chat(body.messages)
            return tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)

        ids = await anyio.to_thread.run_sync(encode)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_length": self.engine.settings.length})

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request, DetokenizeBody)
        text = await anyio.to_thread.run_sync(self._decoded, body.tokens, "tokens")
        return JSONResponse({"prompt": text})

    def _decoded(self, ids: Sequence[int], param: str) -> str:
        vocab = self.engine.lm.config.vocab_size
        if not all(0 <= i < vocab for i in ids):
            raise ApiError(400, f"{param}: token ids are from 0 to {vocab - 1}", param=param)
        return self._tokenizer().decode(ids)

    async def embeddings(self, request: Request) -> Response:
        body = await self._body(request, EmbeddingBody)
        if self._named(body.model) != self.name:
            raise ApiError(400, f"embeddings are those of {self.name!r}; its adapters have none", param="model")
        gone, found = threading.Event(), []

        async def embed() -> None:
            found.extend(await anyio.to_thread.run_sync(self._embed, body, gone, limiter=self.embedding))

        try:
            await unless_gone(request.receive, embed())
        finally:
            gone.set()
        rows, count = found
        data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return JSONResponse({"object": "list", "model": self.name, "data": data, "usage": usage})

    def _embed(self, body: EmbeddingBody, gone: threading.Event) -> tuple[list, int]:
        """(the embeddings in the form that is asked for, how many tokens the inputs have); it runs in a thread, which
        computes no further ones when the client is `gone`."""
        lm = self.engine.lm
        size = lm.config.hidden_size if body.dimensions is None else body.dimensions
        if not 1 <= size <= lm.config.hidden_size:
            raise ApiError(400, f"dimensions are 1 to {lm.config.hidden_size}", param="dimensions")
        inputs = [self._tokenizer().encode(x) if isinstance(x, str) else x for x in body.inputs()]
        most, rows = self.engine.settings.length, []
        if (longest := max(map(len, inputs), default=0)) > most:
            raise ContextError(f"an input has {longest} tokens; a text has at most {most} here")
        for ids in inputs:
            if gone.is_set():
                break
            row = np.asarray(lm.embed(ids))[:size]
            row = row / max(float(np.linalg.norm(row)), 1e-30)
            packed = body.encoding_format == "base64"
            rows.append(base64.b64encode(row.astype("<f4").tobytes()).decode() if packed else row.tolist())
        return rows, sum(len(ids) for ids in inputs)

    # -- answers -------------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        body = await self._body(request, CompletionBody)
        prompts = body.prompts()
        if body.echo:
            texts = [p if isinstance(p, str) else self._decoded(p, "prompt") for p in prompts]
        else:
            texts = []
        logprobs = False if body.logprobs is None else body.logprobs
        answer = self._answer(
            body, "text_completion", body.logprobs is not None, [t for t in texts for _ in range(body.n)]
        )
        return await self._generate(request, body, lambda: prompts, body.max_tokens, logprobs, answer)

    async def chat(self, request: Request) -> Response:
        body = await self._body(request, ChatBody)
        most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        logprobs = (body.top_logprobs or True) if body.logprobs else False
        tools = body.functions()
        answer = self._answer(
            body, "chat.completion", body.logprobs, tools=[tool["function"]["name"] for tool in tools]
        )
        return await self._generate(request, body, lambda: [self._chat(body.messages, tools)], most, logprobs, answer)

    def _answer(
        self, body: Generated, form, logprobs: bool, echo: Sequence[str] = (), tools: Sequence[str] = ()
    ) -> Answer:
        tokenizer = self.engine.lm.tokenizer
        spell = lambda i: tokenizer.decode([i]) if tokenizer else str(i)
        return Answer(form, self._named(body.model), spell, logprobs, echo, tools)

    def _chat(self, messages: Sequence[Message], tools: Sequence[dict] = ()) -> list[int]:
        return self._tokenizer().apply_chat_template([message.plain() for message in messages], tools=tools or None)

    def _tokenizer(self) -> Tokenizer:
        if self.engine.lm.tokenizer is None:
            raise PromptError(f"{self.name} has no tokenizer: give token ids to /v1/completions")
        return self.engine.lm.tokenizer

    async def _generate(
        self, request: Request, body: Generated, prompts: Callable[[], list], max_tokens, logprobs, answer: Answer
    ) -> Response:
        name = self._named(body.model)
        adapter = self.engine.adapter(None if name == self.name else name)

        def prepare() -> list[Prepared]:  # runs in a thread, since long texts take a while
            found, options = prompts(), body.sampling()
            if len(found) * body.n > CHOICES:
                raise PromptError(f"one request has at most {CHOICES} answers, this one {len(found)} times {body.n}")
            at_most = self.engine.settings.rows + self.engine.settings.waiting
            if len(found) * body.n > at_most:
                raise PromptError(
                    f"this server has room for {at_most} answers, and the request is for {len(found)} times {body.n}"
                )
            eos, limit, made = None if body.ignore_eos else "model", self.engine.settings.length, []
            for prompt in found:
                for i in range(body.n):
                    of = {**options, "seed": (options["seed"] + i) & 0xFFFFFFFF}
                    choice = eos, logprobs, of, grammar, adapter
                    made.append(read_request(self.engine.lm, limit, prompt, max_tokens, body.stop, *choice))
            return made

        grammar = await anyio.to_thread.run_sync(body.grammar) if body.formed() else None
        if grammar is None:
            prepared = await anyio.to_thread.run_sync(prepare)
        else:
            prepared = await self.compilers.run(prepare, grammar.text)
        streams = self._submit(prepared)
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return EventStream(self._events(streams, answer, usage, body.n), streams)
        return await self._whole(request, streams, answer, body.n)

    def _submit(self, requests: Sequence[Prepared]) -> list[Stream]:
        """Submits all requests, or none of them if one is refused."""
        streams: list[Stream] = []
        try:
            for prepared in requests:
                streams.append(self.engine.submit(prepared))
        except Exception:
            cancel(streams)
            raise
        return streams

    async def _whole(self, request: Request, streams: Sequence[Stream], answer: Answer, n: int) -> Response:
        async def read():
            async for _ in self.metrics.timed(merged(streams)):
                pass

        try:
            await unless_gone(request.receive, read())
        finally:
            cancel(streams)
        completions = [stream.completion for stream in streams]
        if any(completion.finish_reason == "cancelled" for completion in completions):
            raise ApiError(503, "the server stopped before the answer was whole", SERVER, code="stopping")
        return JSONResponse(answer.whole(completions, usage_of(completions, n)))

    async def _events(self, streams: Sequence[Stream], answer: Answer, usage: bool, n: int) -> AsyncIterator[dict]:
        begun: set[int] = set()
        held: dict[int, str] = {}
        async for i, token in self.metrics.timed(merged(streams)):
            if i not in begun:
                begun.add(i)
                yield answer.first(i)
            if token is None:
                for event in answer.last(i, streams[i].completion.finish_reason):
                    yield event
            else:
                text = held.pop(i, "") + token.text
                if streams[i].more and not answer.logprobs:  # what has come together is sent together
                    held[i] = text
                elif (event := answer.piece(i, token._replace(text=text))) is not None:
                    yield event
        if usage:
            yield answer.usage(usage_of([stream.completion for stream in streams], n))

    # -- requests ------------------------------------------------------------------------------------------------------

    def _named(self, name: str | None) -> str:
        """The model or adapter that a request names; the model if it names none.

        Raises:
          ApiError: there is none of this name.
        """
        if name in (None, ""):
            return self.name
        if name not in self._names():
            here = ", ".join(map(repr, self._names()))
            raise ApiError(
                404, f"there is no model {name!r} here; this server has {here}", MISSING, "model", "model_not_found"
            )
        return name

    async def _body[T: BaseModel](self, request: Request, form: type[T]) -> T:
        data, more = bytearray(), True
        while more:
            part, more = await self._part(request)
            data += part
            if len(data) > self.limit:
                raise ApiError(413, f"the body has more than {self.limit} bytes", code="body_too_large")
        return form.model_validate_json(bytes(data))

    async def _part(self, request: Request) -> tuple[bytes, bool]:
        """The next part of a body, and whether there are more.

        Raises:
          ApiError: none comes, or the server stops, which waits for no request that is not there.
          ClientDisconnect: the client has gone.
        """
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            with anyio.move_on_after(TICK):
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                return message.get("body", b""), message.get("more_body", False)
            if self.stopping:
                raise ApiError(503, "the server is stopping", SERVER, code="stopping")
        raise ApiError(408, f"no part of the body came for {PATIENCE:.0f} s", code="request_timeout")


def cancel(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.cancel()


async def merged(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, Token | None]]:
    """Yields (number of a stream, its next token, or None at its end) as tokens come."""
    if len(streams) == 1:  # without a task for each token
        async for token in streams[0]:
            yield 0, token
        yield 0, None
        return
    following = {asyncio.ensure_future(anext(stream, None)): i for i, stream in enumerate(streams)}
    try:
        while following:
            done, _ = await asyncio.wait(following, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i, token = following.pop(task), task.result()
                yield i, token
                while streams[i].more:  # at once: a busy event loop would fall behind, and `more` stay true
                    yield i, await anext(streams[i])
                if token is not None:
                    following[asyncio.ensure_future(anext(streams[i], None))] = i
    finally:
        for task in following:
            task.cancel()


async def unless_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Does the work while the client is there.

    Raises:
      ClientDisconnect: the client went away first; the work is cancelled.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, each a JSON document, and `[DONE]`. The streams that they come from end with the
    connection."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[dict], streams: Sequence[Stream]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._streams = events, streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except (ClientDisconnect, OSError):  # the client has gone
            pass
        finally:
            cancel(self._streams)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await send(_event(json.dumps(event, ensure_ascii=False, separators=(",", ":"))))
            await send(_event("[DONE]"))
        except OSError:
            raise
        except Exception as error:  # the status has been sent already
            await send(_event(json.dumps(api_error(error).content)))
        await send({"type": "http.response.body", "body": b""})


def _event(data: str) -> dict:
    return {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}
