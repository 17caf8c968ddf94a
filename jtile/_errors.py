"""The typed errors of jtile. Each message is a sentence with a place: what was got, what was expected, and a way
out."""

from __future__ import annotations

import linecache
from typing import Any

Place = tuple[str, int] | None  # file and line of the user's source


class JtileError(Exception):
    """Base of every error that jtile raises.

    Args:
      message: one sentence: what was got, what was expected, and a way out when there is one.
      where: `(file, line)` of the user's source, shown with the line's text and a caret.
    """

    def __init__(self, message: str, where: tuple[str, int] | None = None, column: int | None = None):
        self.message, self.where, self.column = message, where, column
        super().__init__(message + _place(where, column))


class KernelTypeError(JtileError, TypeError):
    """An argument, dtype or return value has the wrong kind."""


class KernelValueError(JtileError, ValueError):
    """A value does not fit: a shape, a grid, an index, an option."""


class KernelSyntaxError(JtileError, SyntaxError):
    """The kernel's source says something that a tile loop cannot: `raise` under a traced condition, a name bound in
    one branch only."""

    def __str__(self) -> str:
        return self.args[0] if self.args else self.message


class UnsupportedError(JtileError):
    """The language can say it, but this target (or this release) cannot run it; the message names the nearest way."""


class TransformError(UnsupportedError, TypeError):
    """A JAX transformation that has no rule for this kernel."""


class VerificationError(JtileError):
    """Tile IR that breaks its own rules: a defect of jtile, or of hand-written IR."""


class ParseError(JtileError, ValueError):
    """Tile IR text that cannot be read."""


class CompileError(JtileError, RuntimeError):
    """An internal failure of jtile's compiler; the message names the file that keeps the failing IR."""


class CacheError(JtileError):
    """A cache folder that cannot be used."""


class CacheWarning(UserWarning):
    """The disk cache cannot do its work, or held a damaged file; kernels are compiled anew."""


class DefectWarning(UserWarning):
    """A defect of jtile's compiler for which a kernel has another, slower form; names the file that keeps its IR."""


class InterpreterError(JtileError, RuntimeError):
    """Base of what the interpreter finds wrong while it runs a kernel; names program id, kernel line and Ref.

    Attributes:
      access: of an access that is out of bounds, races or reads what nobody wrote, a picture of it: prints as text,
        and shows as a drawing in a notebook (`jtile.interpret.AccessPicture`). None for other errors.
    """

    access: Any = None


class OutOfBoundsError(InterpreterError, IndexError):
    """An element access that the bounds rule forbids."""


class RaceError(InterpreterError):
    """Two programs, of one device or of two, touched one element, one of them wrote, and nothing orders them."""


class SharedRaceError(RaceError):
    """Two roles, or a role and an asynchronous copy or product, touch one buffer or element of an array, one of them
    writes, and nothing orders them."""


class ProtocolError(InterpreterError):
    """A barrier, a copy or a product used against its rules: more arrivals than a phase takes, bytes that nobody
    announced, a result used before it was waited for, a role that ends before its copies have; a counter at which
    fewer programs arrive than they say, or at which they say different numbers; a signal for which nobody waits."""


class DeadlockError(InterpreterError):
    """Every role waits for a barrier whose phase cannot end; or every program of all devices for a signal.

    Attributes:
      stuck: one `(role, barrier, slot, parity, where)` for each role that waits; `where` is `(file, line)` or None. Of
        devices one `(program, what it waits for, 0, 0, where)` for each program that waits.
    """

    stuck: tuple[tuple[str, str, int, int, tuple[str, int] | None], ...] = ()


class UninitializedReadError(InterpreterError):
    """A read of an element that nobody wrote."""


class KernelAssertionError(InterpreterError, AssertionError):
    """A failed `jt.assert_`."""


class ModelError(JtileError):
    """A model file that is missing, truncated or of an unknown architecture."""


class PromptError(JtileError, ValueError):
    """Token ids, text or sampling options that a model cannot take."""


class ContextError(PromptError):
    """A prompt leaves no room for an answer: it has as many tokens as the context of the model, or more."""


class EngineError(JtileError, RuntimeError):
    """A serving engine cannot take a request, or could not finish it: it is closed, or a step of it has failed."""


class QueueFullError(EngineError):
    """So many requests wait for a serving engine that it takes no more of them now."""


def _place(where: tuple[str, int] | None, column: int | None) -> str:
    if where is None:
        return ""
    file, line = where
    text = linecache.getline(file, line).rstrip()
    out = f"\n  at {file}:{line}"
    if not text:
        return out
    start = column if column is not None else len(text) - len(text.lstrip())
    return f"{out}\n    {text}\n    {' ' * start}^"
