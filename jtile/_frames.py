"""Tracebacks that show the user's frames: those of jtile and JAX between them are left out, as JAX leaves out its own.
JAX's option `JAX_TRACEBACK_FILTERING=off` keeps all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import jax

from jtile._errors import CompileError, JtileError, VerificationError

_DEFECTS = CompileError, VerificationError  # errors of jtile itself, whose frames help whoever mends them
_INNER = ("jtile", "jax", "jaxlib", "contextlib")  # packages to leave out; context managers stand around a trace


def leave_out(error: BaseException) -> None:
    """Take the frames of jtile and JAX out of the traceback of an error and of what it was raised from.

    What stands below the user's last frame is left out of typed errors only, whose messages name the place: of any
    other error it says where the error is.

    Args:
      error: the error that is being handled; a `raise` without an operand then goes on with what is left.
    """
    if jax.config.jax_traceback_filtering == "off":
        return
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        if not isinstance(each, _DEFECTS):
            each.__traceback__ = _shortened(each.__traceback__, whole=isinstance(each, JtileError))
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def shows_users_frames[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Decorate an entry of jtile so that errors leave it with the user's frames."""

    @functools.wraps(function)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            leave_out(error)
            raise

    return entry


def _shortened(trace: TracebackType | None, *, whole: bool) -> TracebackType | None:
    """The traceback without inner frames; if not `whole`, with those below the user's last frame."""
    links: list[TracebackType] = []
    while trace is not None:
        links.append(trace)
        trace = trace.tb_next
    last = max((k for k, link in enumerate(links) if not _is_inner(link.tb_frame)), default=-1)
    out: Any = None
    for k, link in reversed(list(enumerate(links))):
        if not _is_inner(link.tb_frame) or (k > last and not whole):
            out = TracebackType(out, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return out


def _is_inner(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__")
    return isinstance(name, str) and name.partition(".")[0] in _INNER
