"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import itertools

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from jtile._errors import ContextError, EngineError, JtileError, PromptError, QueueFullError

INVALID, DENIED, MISSING, BUSY, SERVER = (
    "invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "server_error"
)  # fmt: skip


FORMS = {  # names of types, as pydantic's places have them
    "str": "a text", "list[int]": "a list of ints", "list[str]": "a list of texts",
    "list[list[int]]": "a list of lists of ints", "list[Part]": 'a list of parts, {"type": "text", "text": ...}',
    "literal['none','auto','required']": "'none', 'auto', 'required'",
    "Choice": 'a function, {"type": "function", "function": {"name": ...}}',
}  # fmt: skip


class ApiError(Exception):
    """An answer of the HTTP status `status` that says what is wrong; retry: seconds after which another attempt may
    succeed."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry: int = 1,
    ):
        super().__init__(message)
        self.status, self.content, self._retry = status, content(message, kind, param, code), retry

    def response(self) -> JSONResponse:
        headers = {"Retry-After": str(self._retry)} if self.status in (429, 503) else None
        return JSONResponse(self.content, self.status, headers)


def content(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def api_error(error: Exception) -> ApiError:
    """The answer that a client gets for an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return _of_body(error)
    if isinstance(error, ContextError):
        return ApiError(400, error.message, code="context_length_exceeded")
    if isinstance(error, PromptError):
        return ApiError(400, error.message)
    if isinstance(error, QueueFullError):
        return ApiError(429, error.message, BUSY, code="queue_full")
    if isinstance(error, EngineError):
        return ApiError(503, error.message, SERVER, code="engine_unavailable")
    if isinstance(error, JtileError):
        return ApiError(500, error.message, SERVER)
    if isinstance(error, ClientDisconnect):
        return ApiError(499, "the client has gone")
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), MISSING if error.status_code == 404 else INVALID)
    return ApiError(500, "the server failed at this request; its log says more", SERVER)


def _of_body(error: ValidationError) -> ApiError:
    """The answer that names the first thing that is wrong with a body, and its place."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    first = next((one for one in found if one["type"] == "too_long"), found[0])  # it is of a right form
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['msg']}")
    place = ".".join(str(part) for part in itertools.takewhile(lambda part: not _is_form(part), first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] != "too_long" and (forms := _forms(error, first["loc"])):
        message = f"should be {' or '.join(FORMS.get(f, f) for f in forms)}"
    if not place and first["type"] == "model_type":
        message = "the body should be an object, {...}"
    return ApiError(400, f"{place}: {message}" if place else message, param=place or None)


def _forms(error: ValidationError, loc: tuple) -> list[str]:
    """The forms that a value may have, if it has none of several: pydantic reports an error for each form, whose name
    is a part of the place."""
    at = next((i for i, part in enumerate(loc) if _is_form(part)), None)
    if at is None:
        return []
    alike = [other["loc"][at] for other in error.errors() if other["loc"][:at] == loc[:at] and len(other["loc"]) > at]
    return list(dict.fromkeys(str(form) for form in alike if _is_form(form)))


def _is_form(part: int | str) -> bool:
    return part in FORMS or (isinstance(part, str) and "[" in part)


async def respond(request: Request, error: Exception) -> JSONResponse:
    """Starlette's handler of exceptions."""
    return api_error(error).response()
