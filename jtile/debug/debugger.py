"""`kernel.debug(...)`: a kernel in the reference interpreter, step by step."""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jtile._errors import KernelValueError
from jtile.debug.expressions import evaluate, parsed
from jtile.debug.session import Breakpoint, Frame, Session
from jtile.interpret import AccessPicture
from jtile.ir import For, While

KINDS = ("read", "write", "atomic")


class Debugger:
    """A run of a kernel in the interpreter, which stands before an op. `kernel.debug(*args)` makes one.

    It goes on by `step`, `next`, `round`, `program` and `cont`, each of which gives the reason why it stopped again.
    `d["acc"]` is the value that a name of the kernel's source has now: a NumPy array, of a Ref the whole one. Names
    that helper functions assign are not known. What runs is what `kernel.interpret` runs, in the same order of
    programs, and every check is on. An error of the kernel ends the run; names, `where` and `access` tell of the moment
    before.

    It is a context manager, which ends the run.

    Attributes:
      state: `"stopped"`, `"done"`, or `"failed"`.
      reason: why it stopped.
    """

    def __init__(self, run: Callable[[], Any], name: str, constants: Mapping[str, Any]):
        self.name = name
        self._session = Session(run, constants)
        self._count = 0
        self._finalizer = weakref.finalize(self, self._session.close)
        self._session.advance(lambda frame: "the run begins")

    # -- the state of the run ------------------------------------------------------------------------------------------
    @property
    def state(self) -> str:
        return self._session.outcome[0] if self._session.outcome else "stopped"

    @property
    def reason(self) -> str:
        return self._session.reason

    @property
    def result(self) -> Any:
        """What the kernel gives, as `kernel.interpret` does; raises its error where it failed, and KernelValueError
        where it has not ended."""
        if self.state == "stopped":
            raise KernelValueError(f"kernel {self.name} has not ended: go on with cont()")
        if self.error is not None:
            raise self.error
        return self._session.outcome[1]  # type: ignore[index]

    @property
    def error(self) -> Exception | None:
        """The error with which the kernel failed."""
        outcome = self._session.outcome
        return outcome[1] if outcome is not None and outcome[0] == "failed" else None

    @property
    def access(self) -> AccessPicture | None:
        """A picture of the access that failed, if that is the error."""
        return getattr(self.error, "access", None)

    @property
    def program_id(self) -> tuple[int, ...]:
        """The id of the program that runs."""
        return self._frame.program

    @property
    def line(self) -> int:
        """The line of the source at which the run stands."""
        return self._frame.line

    @property
    def rounds(self) -> tuple[int, ...]:
        """The number of its round, from 0, of each loop around, from outside."""
        return tuple(k for _, k, _ in self._frame.rounds)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that have a value now."""
        return tuple(self._frame.names())

    def __getitem__(self, name: str) -> Any:
        return self._session.look(self._frame, name)

    def value(self, expression: str) -> Any:
        """The value of an expression: names, numbers, arithmetic, comparisons, slices, and `max`, `sum`, `any`, `isnan`
        and the like, as functions and methods. `pid` is the id of the program."""
        return evaluate(expression, self.__getitem__)

    def where(self) -> str:
        """Program, loops and source line at which the run stands, and the op that is next."""
        frame = self._frame
        rounds = ["".join(f", round {k}" + (f" of {n}" if n is not None else "")) for _, k, n in frame.rounds]
        lines = [f"kernel {self.name}, {frame.who}{''.join(rounds)}"]
        lines += [f"  {frame.op.loc}", f"  > {self._source(frame.line)}"] if frame.op.loc.file else []
        return "\n".join([*lines, f"  next: {frame.text()}"])

    def list(self, around: int = 5) -> str:
        """The source around the line at which the run stands."""
        line, marks = self._frame.line, {b.line for b in self._session.breakpoints.values()}
        rows = []
        for n in range(max(line - around, 1), line + around + 1):
            text = linecache.getline(self._frame.op.loc.file, n).rstrip()
            if text or n == line:
                rows.append(f"{'*' if n in marks else ' '}{n:5} {'>' if n == line else ' '} {text}".rstrip())
        return "\n".join(rows)

    def __repr__(self) -> str:
        place = f" at line {self.line}, program {self.program_id}" if self._session.frame is not None else ""
        return f"<jtile.debug.Debugger of {self.name}, {self.state}{place}: {self.reason}>"

    def _repr_html_(self) -> str:
        import html

        text = str(self.error) if self.error is not None else self.where() if self._session.frame else self.reason
        return f"<pre>{html.escape(text)}</pre>" + (self.access.svg() if self.access is not None else "")

    # -- going on -----------------------------------------------------------------------------------------------------
    def step(self) -> str:
        """Run one op."""
        return self._go(lambda frame: "step")

    def next(self) -> str:
        """Run to the next line of the source in this program, or to what runs when it has ended."""
        start = self._frame
        alone = not start.walker[1] and not start.walker[2]

        def stop(frame: Frame) -> str | None:
            if frame.key != start.key:
                return "another program" if alone and frame.linear != start.linear else None
            return "line" if frame.entered else None

        return self._go(stop)

    def round(self) -> str:
        """Run to the next round of the innermost loop around, or to what follows when it has ended."""
        start = self._frame
        loops = [(op, block) for op, block in start.scopes.around[start.op] if isinstance(op, For | While)]
        if not loops:
            raise KernelValueError(f"no loop is around line {start.line} of kernel {self.name}")
        loop, block = loops[-1]
        body = loop.body if isinstance(loop, For | While) else block
        counts = [k for _, k, _ in start.rounds]

        def stop(frame: Frame) -> str | None:
            if frame.key != start.key:
                return None if start.walker[1] or start.walker[2] else "another program"
            if not frame.inside(loop):
                return "behind the loop"
            new = [k for _, k, _ in frame.rounds][: len(counts)] != counts
            return "round" if new and frame.scopes.around[frame.op][len(counts) - 1 :] and _in(frame, body) else None

        return self._go(stop)

    def program(self, *pid: int) -> str:
        """Run to the beginning of the next program, or of that with this id."""
        frame = self._session.frame
        if pid and frame is not None:
            grid = frame.machine.kernel.grid
            if len(pid) != len(grid) or not all(0 <= i < n for i, n in zip(pid, grid)):
                raise KernelValueError(f"kernel {self.name} has no program {pid}: its grid is {grid}")
        return self._go(lambda f: "program" if f.first and (not pid or f.program == pid) else None)

    def cont(self) -> str:
        """Run to a breakpoint or to the end."""
        return self._go(lambda frame: None)

    def close(self) -> None:
        """End the run."""
        self._finalizer()

    def __enter__(self) -> Debugger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prompt(self, commands: Any = ()) -> None:
        """Ask on the terminal what to do, until `quit`; `commands` are done first."""
        from jtile.debug.prompt import Prompt

        Prompt(self).run(commands)

    # -- breakpoints --------------------------------------------------------------------------------------------------
    def break_at(
        self,
        line: int | None = None,
        *,
        file: str = "",
        program: int | tuple[int, ...] | None = None,
        when: str | Callable[[Mapping[str, Any]], Any] | None = None,
    ) -> int:
        """Stop where a line of the source begins, in one program or in any, if a condition holds.

        Args:
          line: a line of the kernel's file, or of one whose name ends in `file`; None: where a program begins, or with
            `when` wherever that comes to hold.
          program: the id of a program; default: any.
          when: an expression (see `value`) or a function of the names, `lambda s: s["acc"].max() > 3`. A name that has
            no value yet makes an expression false.
        Returns:
          The number of the breakpoint.
        """
        if line is None and program is None and when is None:
            raise KernelValueError("a breakpoint has a line, a program or a condition")
        if isinstance(when, str):
            parsed(when)
        if line is not None and (isinstance(line, bool) or not isinstance(line, int) or line < 1):
            raise KernelValueError(f"line={line!r}: a line of the source is an int of at least 1")
        pid = (int(program),) if isinstance(program, int | np.integer) else program
        return self._add(Breakpoint(0, line, file, None if pid is None else tuple(pid), when))

    def watch(
        self, ref: str, part: Any = None, *, kinds: Any = ("write", "atomic"), when: Any = None, program: Any = None
    ) -> int:
        """Stop before accesses to a Ref.

        Args:
          ref: the name of the Ref.
          part: an index of NumPy's, such as `(3, slice(0, 8))`: accesses to these elements only.
          kinds: the kinds of accesses: "read", "write", "atomic", or several of them.
          when, program: as for `break_at`.
        Returns:
          The number of the breakpoint.
        """
        kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        if not kinds or not set(kinds) <= set(KINDS):
            raise KernelValueError(f"kinds={kinds!r}: accesses are of the kinds {', '.join(KINDS)}")
        refs = {v.name: v for v in self._frame.machine.kernel.params}
        if ref not in refs:
            raise KernelValueError(f"kernel {self.name} has no Ref {ref!r}: it has {', '.join(refs)}")
        if part is not None:
            try:
                np.zeros(refs[ref].shape, np.bool_)[part]
            except IndexError as error:
                raise KernelValueError(f"{ref}{list(refs[ref].shape)} has no part {part!r}: {error}") from None
        if isinstance(when, str):
            parsed(when)
        pid = (int(program),) if isinstance(program, int | np.integer) else program
        return self._add(Breakpoint(0, program=pid, when=when, ref=ref, part=part, kinds=kinds))

    @property
    def breakpoints(self) -> Mapping[int, Breakpoint]:
        """The breakpoints by their numbers."""
        return dict(self._session.breakpoints)

    def delete(self, number: int) -> None:
        """Take a breakpoint away."""
        if self._session.breakpoints.pop(number, None) is None:
            raise KernelValueError(
                f"there is no breakpoint {number}: {list(self._session.breakpoints) or 'none is set'}"
            )

    # -- pieces -------------------------------------------------------------------------------------------------------
    def _add(self, b: Breakpoint) -> int:
        self._count += 1
        b.number = self._count
        self._session.breakpoints[b.number] = b
        return b.number

    def _go(self, stop: Callable[[Frame], str | None]) -> str:
        if not self._finalizer.alive:
            raise KernelValueError(f"the run of kernel {self.name} was ended: kernel.debug(...) begins a new one")
        self._session.advance(stop)
        return self.reason

    @property
    def _frame(self) -> Frame:
        if self._session.frame is None:
            raise KernelValueError(f"kernel {self.name} ran no program: its grid is empty")
        return self._session.frame

    def _source(self, line: int) -> str:
        return linecache.getline(self._frame.op.loc.file, line).strip()


def _in(frame: Frame, block: Any) -> bool:
    return any(b is block for _, b in frame.scopes.around[frame.op])
