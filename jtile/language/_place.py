"""The line of the user's source that is being traced, which errors of language functions name."""

from __future__ import annotations

import functools
import os
import re
import sys

import jax
from jax.extend import source_info_util

_SUMMARY = re.compile(r"^(.*?):(\d+)(?::\d+)?(?: \(.*\))?$")


@functools.cache
def hide_own_frames() -> None:
    """Tell JAX once that frames of the language and of the tracer are not the user's, so that a line of a kernel is
    what source locations and tracebacks show."""
    jtile = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for folder in ("language", "trace"):
        source_info_util.register_exclusion(os.path.join(jtile, folder) + os.sep)


@functools.lru_cache(maxsize=64)  # one equation becomes several ops, each of which asks
def place_of(source_info) -> tuple[str, int] | None:
    """`(file, line)` of a JAX source info; None where it names no user frame."""
    m = _SUMMARY.match(source_info_util.summarize(source_info))
    return (m[1], int(m[2])) if m else None


def user_place() -> tuple[str, int] | None:
    """`(file, line)` of the innermost frame that is the user's; None outside of any."""
    hide_own_frames()
    return place_of(source_info_util.current()) or _outer_frame()


def _outer_frame() -> tuple[str, int] | None:
    """The innermost Python frame outside of JAX and the language: JAX names none while it prepares a call of its
    own."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(hidden()):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else None


@functools.cache
def hidden() -> tuple[str, ...]:
    jtile = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return (os.path.dirname(jax.__file__) + os.sep, *(os.path.join(jtile, n) + os.sep for n in ("language", "trace")))
