"""The application: its paths, and the layers that every request goes through."""

from __future__ import annotations

import hmac
import json
import logging
import math
import time
from collections.abc import Sequence

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jtile._errors import JtileError

from ..engine import Engine
from .endpoints import Server
from .errors import BUSY, DENIED, SERVER, ApiError, respond
from .metrics import Metrics
from .rates import Rates
from .static import page_routes

HANDLED = (Exception, ApiError, JtileError, ValidationError, HTTPException, ClientDisconnect)
OPEN = ("/", "/health")  # paths that take no key, beside those below `/page`
LOG = logging.getLogger("jtile.serve")


def make_app(
    engine: Engine,
    name: str,
    api_keys: Sequence[str] = (),
    origins: Sequence[str] = (),
    body_limit: int = 8 << 20,
    requests_per_minute: int | None = None,
) -> Starlette:
    """OpenAI's interface to an engine.

    Args:
      name: the name of the model in requests.
      api_keys: a request takes one of them as `Authorization: Bearer KEY`; none: no key is asked for.
      origins: the origins of web pages that may use the server (CORS); "*" for all.
      body_limit: the most bytes of the body of a request.
      requests_per_minute: the most of each key, or of each address if there are no keys; further requests get 429.
        None: any number.

    `app.state.server` is the `Server`: while its `stopping` is true new requests get 503.
    """
    server = Server(engine, name, Metrics(engine), body_limit)
    post = lambda path, endpoint: Route(path, endpoint, methods=["POST"])
    routes = [
        *page_routes(),
        Route("/health", server.health),
        Route("/metrics", server.metrics_page),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        post("/v1/completions", server.completions),
        post("/v1/chat/completions", server.chat),
        post("/v1/embeddings", server.embeddings),
        post("/tokenize", server.tokenize),
        post("/detokenize", server.detokenize),
    ]
    middleware = [Middleware(Watched, server=server)]
    if origins:
        allowed = {"allow_origins": list(origins), "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        middleware.append(Middleware(CORSMiddleware, **allowed))
    rates = None if requests_per_minute is None else Rates(requests_per_minute)
    middleware.append(Middleware(Guarded, server=server, keys=tuple(api_keys), rates=rates))
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=dict.fromkeys(HANDLED, respond))
    app.state.server = server
    return app


class Watched:
    """Counts and logs every request, as one line of JSON."""

    def __init__(self, app: ASGIApp, server: Server):
        self._app, self._server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, start, server = 500, time.perf_counter(), self._server

        async def noted(message: Message) -> None:
            nonlocal status
            status = message["status"] if message["type"] == "http.response.start" else status
            server.sending += 1
            try:
                await send(message)
            finally:
                server.sending, server.sent = server.sending - 1, time.monotonic()

        server.open, server.came = server.open + 1, server.came + 1
        try:
            await self._app(scope, receive, noted)
        finally:
            server.open -= 1
            path = getattr(scope.get("route"), "path", "other")  # so that there are few names, whatever clients ask for
            server.metrics.responded(path, status)
            line = {"method": scope["method"], "path": scope["path"], "status": status}
            LOG.info(json.dumps(line | {"seconds": round(time.perf_counter() - start, 4)}))


class Guarded:
    """Asks for a key, and refuses requests that come while the server stops, or too often."""

    def __init__(self, app: ASGIApp, server: Server, keys: tuple[str, ...], rates: Rates | None):
        self._app, self._server, self._rates = app, server, rates
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        free = scope["type"] != "http" or scope["path"] in OPEN or scope["path"].startswith("/page/")
        if free:
            await self._app(scope, receive, send)
            return
        error = self._refusal(scope)
        if error or self._rates is None or scope["method"] != "POST":
            await (error.response() if error else self._app)(scope, receive, send)
            return
        client, rates = self._client(scope), self._rates
        wait = rates.take(client)

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name.encode(), value.encode()) for name, value in rates.headers(client).items()]
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        await (_too_often(rates.limit, wait).response() if wait else self._app)(scope, receive, told)

    def _client(self, scope: Scope) -> str:
        """The client whose requests are counted together: a key, or an address."""
        if self._keys:
            return dict(scope["headers"])[b"authorization"].partition(b" ")[2].strip().decode("latin1")
        return (scope.get("client") or ("",))[0]

    def _refusal(self, scope: Scope) -> ApiError | None:
        if self._server.stopping:
            return ApiError(503, "the server is stopping", SERVER, code="stopping")
        if not self._keys:
            return None
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        if scheme.lower() == b"bearer" and any(hmac.compare_digest(key.strip(), known) for known in self._keys):
            return None
        why = "a wrong API key" if given else "no API key"
        return ApiError(401, f"{why}: send the header 'Authorization: Bearer KEY'", DENIED, code="invalid_api_key")


def _too_often(limit: int, wait: float) -> ApiError:
    message = f"more than {limit} requests a minute; the next one in {wait:.1f} s"
    return ApiError(429, message, BUSY, code="rate_limit_exceeded", retry=math.ceil(wait))
