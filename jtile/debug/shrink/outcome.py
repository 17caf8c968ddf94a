"""How a run of a file ends, and when two runs have failed in the same way."""

from __future__ import annotations

import ast
import dataclasses
import re
import traceback
from pathlib import Path

_NUMBER = re.compile(r"(?<![A-Za-z_])-?\d+(\.\d+)?([eE][-+]?\d+)?")
_LIST = re.compile(r"[(\[]\s*N(\s*,\s*N)*\s*,?\s*[)\]]")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
      kind: `passes`, `error` (an exception), `exit` (a status other than 0), `signal` (the process was killed), or
        `time` (it did not end in time).
      name: the name of the exception's type, of the status or of the signal.
      text: the first line of the exception's message.
      function: the innermost function of the file that the exception came through.
      claim: the statement of the file that raised an AssertionError: it says what is wrong, and may not change.
    """

    kind: str
    name: str = ""
    text: str = ""
    function: str = ""
    claim: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for runs that have failed in the same way: all of it, but numbers and sizes are one number."""
        return self.kind, self.name, _LIST.sub("N", _NUMBER.sub("N", self.text)), self.function, self.claim

    @property
    def passes(self) -> bool:
        return self.kind == "passes"

    def __str__(self) -> str:
        match self.kind:
            case "error":
                return f"{self.name.rpartition('.')[2]}: {self.text}".removesuffix(": ")
            case "exit":
                return f"exit status {self.name}"
            case "signal":
                return f"it is killed by {self.name}"
            case "time":
                return "it does not end in time"
        return "it passes"


def of_exception(error: BaseException, path: str, source: str) -> Outcome:
    """The outcome of a run of `source`, under the name `path`, that raised an exception."""
    if isinstance(error, SystemExit):
        passed = error.code in (None, 0)
        return Outcome("passes") if passed else Outcome("exit", str(error.code).partition("\n")[0])
    kind = type(error)
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    function = own[-1].name if own else ""
    plain = isinstance(error, AssertionError) and kind.__module__.partition(".")[0] != "jtile"
    claim = _statement(source, own[-1].lineno or 0) if plain and own else ""
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Outcome("error", name, (lines or [""])[0].replace(path, Path(path).name), function, claim)


def _statement(source: str, line: int) -> str:
    """The innermost statement of a text that a line belongs to, without the blocks inside of it."""
    around = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    innermost = min(around, key=lambda node: (node.end_lineno or 0) - node.lineno, default=None)
    return ast.unparse(innermost) if innermost is not None and not hasattr(innermost, "body") else ""
