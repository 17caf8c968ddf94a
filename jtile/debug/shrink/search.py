"""`shrink`: cuts a file down by edits that it still fails alike after, until no edit is left."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jtile._cores import cores_here
from jtile._errors import KernelValueError
from jtile.debug.shrink import edits
from jtile.debug.shrink.outcome import Outcome
from jtile.debug.shrink.runs import Runs

_SHORT = 20.0  # seconds that a version may take in any case, if the file itself may
_LONGER = 10  # how many times as long as the file a version of it may take


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """A file that was cut down.

    Attributes:
      text: what is left of it.
      lines, before: the number of lines that are left, and of those that there were, without empty ones and comments.
      failure: how it fails; `interpreted`: how it ends where kernels run in the interpreter, None if that is not known.
      runs: how many versions were tried; `finished`: whether none is left to try.
    """

    text: str
    lines: int
    before: int
    failure: Outcome
    interpreted: Outcome | None
    runs: int
    finished: bool

    def __str__(self) -> str:
        why = "" if self.finished else " (there was no time for more)"
        lines = [f"{self.lines} of {self.before} lines are left after {self.runs} runs{why}"]
        return "\n".join([*lines, *_said(self.failure, self.interpreted)])


def shrink(
    path: str | os.PathLike[str],
    *,
    timeout: float = 60.0,
    time_limit: float = 600.0,
    jobs: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Shrunk:
    """Cut a Python file that fails down to what it needs to fail in the same way.

    The file is run as Python runs it, natively and with its kernels in the reference interpreter. Versions of it with
    fewer statements, loops, parameters, operands and smaller sizes are run after it, each in a process of its own; what
    ends in both runs as the file does is kept. Two failures are the same if the exception has the same type, the same
    message up to numbers, and comes through the same function of the file; a signal and a run without an end are
    failures, too. A wrong result is one where the file asserts what it expects: the statement that does stays as it is,
    and where the interpreter fails with it, formulas stay, too, so that only sizes, inputs and what is not needed go.

    Args:
      path: the file. It is not changed.
      timeout: seconds after which a run has no end.
      time_limit: seconds for all of the search.
      jobs: runs at a time; by default one for each core, 4 at most.
      progress: gets a sentence each time that the file has become smaller.

    Raises:
      KernelValueError: there is no such file, it is no Python, it does not fail, or in another way each time.
    """
    source = _read(path)
    name = os.path.abspath(path)
    count = jobs or min(cores_here(), 4)
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(contextlib.closing(Runs(name))) for _ in range(count)]
        search = _Search(runs, timeout, time.monotonic() + time_limit, progress)
        search.begin(os.fspath(path), source)
        with contextlib.suppress(KeyboardInterrupt):
            search.run()
    before, lines = (len(ast.unparse(t).splitlines()) for t in (ast.parse(source), search.tree))
    return Shrunk(
        search.text, lines, before, search.failure, search.interpreted, search.count, search.finished
    )  # fmt: skip


def headed(found: Shrunk, name: str) -> str:
    """The text that is left, below a comment that says what it is."""
    about = [f"Cut down from {name} by `jtile shrink`: {found.lines} of {found.before} lines."]
    return "".join(f"# {line}\n" for line in [*about, *_said(found.failure, found.interpreted)]) + found.text


def _said(failure: Outcome, interpreted: Outcome | None) -> list[str]:
    lines = [str(failure)]
    if interpreted is not None:
        same = interpreted.key == failure.key
        lines.append(f"With kernels in the interpreter: {'the same' if same else interpreted}.")
    return lines


def _read(path: str | os.PathLike[str]) -> str:
    try:
        source = Path(path).read_text()
        ast.parse(source)
    except OSError as e:
        raise KernelValueError(f"{os.fspath(path)} cannot be read: {e.strerror}") from None
    except (SyntaxError, ValueError) as e:
        raise KernelValueError(f"{os.fspath(path)} is no Python: {e}") from None
    return source


class _Search:
    """A tree, and how much smaller it becomes.

    Attributes:
      tree, text: the smallest that fails alike. failure, interpreted: as in `Shrunk`.
      count: how many versions were run. finished: whether no edit is left.
    """

    def __init__(self, runs: Sequence[Runs], timeout: float, deadline: float, progress: Callable[[str], None]):
        self._runs, self._timeout, self._deadline, self._progress = runs, timeout, deadline, progress
        self._pool = ThreadPoolExecutor(len(runs))
        self._tried: set[str] = set()
        self.count, self.finished = 0, False

    def begin(self, name: str, source: str) -> None:
        """Run the file as it is, twice, and in the interpreter."""
        first, again, inside = self._pool.map(
            lambda job: self._runs[job[0] % len(self._runs)].run(source, self._timeout, interpret=job[1]),
            [(0, False), (1, False), (2, True)],
        )
        self.failure, self.interpreted = first[0], inside[0]
        if self.failure.passes:
            also = "" if self.interpreted.passes else f"; with kernels in the interpreter: {self.interpreted}"
            raise KernelValueError(f"{name} does not fail{also}. Let it assert what it expects of a result")
        if again[0].key != self.failure.key:
            raise KernelValueError(f"{name} fails in another way each time: {self.failure}; {again[0]}")
        if self.interpreted.kind == "time" and self.failure.kind != "time":
            self.interpreted = None  # the file is too large for the interpreter as yet: a smaller version will tell
        self._limit = min(self._timeout, max(_SHORT, _LONGER * max(first[1], again[1], inside[1])))
        self.text, self.tree = source, ast.parse(source)
        plain = ast.unparse(self.tree) + "\n"
        if self._holds(plain):
            self.text = plain
        self._tried.add(plain)

    @property
    def passes(self) -> tuple[edits.Pass, ...]:
        """The passes to try; without those on formulas for a wrong result that the interpreter gives, too."""
        shared = self.interpreted is not None and self.interpreted.key == self.failure.key
        return edits.SIZES if self.failure.claim and shared else edits.EVERYTHING

    def run(self) -> None:
        """Go over the passes until none makes the tree smaller, or the time is over."""
        changed = True
        while changed and not self._late():
            before = self.text
            for one in self.passes:
                self._pass(one)
            changed = self.text != before
        self.finished = not changed

    def _pass(self, one: edits.Pass) -> None:
        """The edits of a pass in their order; after one that is kept the next ones are those of the new tree."""
        at, found = 0, one(self.tree)
        while at < len(found) and not self._late():
            batch: list[tuple[int, ast.Module, str]] = []
            while at < len(found) and len(batch) < len(self._runs):
                batch += self._candidate(at, found[at])
                at += 1
            held = list(self._pool.map(self._tries, enumerate(batch)))
            good = next((b for b, ok in zip(batch, held, strict=True) if ok), None)
            if good is None:
                continue
            at, self.tree, self.text = good
            self._tried -= {text for (_, _, text), ok in zip(batch, held, strict=True) if ok}
            found = one(self.tree)
            self._progress(f"{self.count} runs: {len(self.text.splitlines())} lines, {len(self.text)} characters")

    def _candidate(self, at: int, edit: edits.Edit) -> list[tuple[int, ast.Module, str]]:
        tree = edit()
        if edits.weight(tree) >= edits.weight(self.tree):
            return []
        try:
            text = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
            tree = ast.parse(text)
            compile(text, "candidate", "exec")
        except (SyntaxError, ValueError, AttributeError, TypeError):  # what the edit leaves is no Python
            return []
        if text in self._tried:
            return []
        self._tried.add(text)
        return [(at, tree, text)]

    def _tries(self, job: tuple[int, tuple[int, ast.Module, str]]) -> bool:
        number, (_, _, text) = job
        return self._holds(text, self._runs[number])

    def _holds(self, text: str, runs: Runs | None = None) -> bool:
        """Whether a version ends as the file does, natively and in the interpreter."""
        runs = runs or self._runs[0]
        self.count += 1
        if runs.run(text, self._limit)[0].key != self.failure.key:
            return False
        known = self.interpreted
        if known is not None and known.key == self.failure.key:  # one run answers for both
            return True
        inside = runs.run(text, self._limit, interpret=True)[0]
        if known is None:
            self.interpreted = None if inside.kind == "time" else inside
            return True
        return inside.key == known.key

    def _late(self) -> bool:
        return time.monotonic() > self._deadline
