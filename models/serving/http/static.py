"""The page to chat on: plain files, sent as they lie in the package."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parent / "page"
# The text of a model is never used as HTML here, and would do no harm if it were: scripts, styles and requests of the
# page may only go to this server, and a script cannot turn text into elements.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src "
    "'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # browsers ask each time (and get 304), so that a new version is seen at once
}


class Files(StaticFiles):
    """Files of the page, sent with the headers above."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def page_routes() -> list[BaseRoute]:
    """The routes of the page: `/`, and the files that it names, below `/page`."""
    files = Files(directory=FOLDER)

    async def index(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    return [Route("/", index), Mount("/page", files)]
