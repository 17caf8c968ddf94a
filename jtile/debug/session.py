"""A run of the interpreter that is held: it runs in a thread of its own, and stands still whenever somebody looks."""

from __future__ import annotations

import contextvars
import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jtile._errors import JtileError, KernelValueError
from jtile.debug.expressions import evaluate
from jtile.debug.scopes import Scopes, is_mark
from jtile.interpret import Buffer, Lanes, Machine, watching
from jtile.ir import Block, For, Kernel, Op, Value, While, print_op

Walker = tuple[int, str, str]  # whatever runs by itself: a machine, a device on it, a role


class _Closed(BaseException):
    """Ends the thread of a run that nobody looks at any more."""


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """An op that is about to run, and who runs it.

    Attributes:
      entered: whether its line of source begins, or begins again.
      first: whether it is the first op of its program.
      rounds: for each loop around it, from outside: the loop, the number of its round from 0, and how many rounds there
        are (None for a `while`).
    """

    machine: Machine
    op: Op
    scopes: Scopes
    walker: Walker
    linear: int
    program: tuple[int, ...]
    entered: bool
    first: bool
    rounds: tuple[tuple[Op, int, int | None], ...]

    @property
    def line(self) -> int:
        return self.op.loc.line

    @property
    def key(self) -> tuple[Walker, int]:
        return self.walker, self.linear

    @property
    def who(self) -> str:
        """The program, and where there are several, its device and its role."""
        _, device, role = self.walker
        text = (f"{device}, " if device else "") + f"program {self.machine.kernel.program_text(self.program)}"
        return text + (f", role {role}" if role else "")

    def inside(self, op: Op) -> bool:
        """Whether the op stands in the regions of this one."""
        return any(outer is op for outer, _ in self.scopes.around[self.op])

    def names(self) -> Mapping[str, Value]:
        return {n: v for n, v in self.scopes.names[self.op].items() if v in self.machine.env}

    def value(self, v: Value) -> Any:
        """The value as an array, for a Ref the whole one, as it is now; words where the interpreter has no array."""
        x = self.machine.env[v]
        if isinstance(x, Buffer):
            return x.array.copy()
        return x if isinstance(x, np.ndarray) else f"<{type(x).__name__}>"

    def text(self) -> str:
        return print_op(self.op).splitlines()[0]


@dataclasses.dataclass(eq=False)
class Breakpoint:
    """Where a run stops: all of what is given must hold.

    Attributes:
      line: the line of the source, and `file`, the end of the file's name; None for any.
      program: the id of a program; None for any. Without a line, the run stops where the program begins.
      when: a condition, as text or as a function of the names; None for none.
      ref: stop at accesses to this Ref; `part`, which of its elements; `kinds`: "read", "write", "atomic".
      hits: how often it has stopped the run.
    """

    number: int
    line: int | None = None
    file: str = ""
    program: tuple[int, ...] | None = None
    when: str | Callable[[Mapping[str, Any]], Any] | None = None
    ref: str = ""
    part: Any = None
    kinds: tuple[str, ...] = ()
    hits: int = 0
    held: set[tuple[Walker, int]] = dataclasses.field(default_factory=set)  # walkers for which the condition just held

    def __str__(self) -> str:
        what = f"watch {self.ref} ({', '.join(self.kinds)})" if self.ref else "breakpoint"
        what += f" at {f'{self.file}:' if self.file else 'line '}{self.line}" if self.line is not None else ""
        what += f" in program {self.program}" if self.program is not None else ""
        return what + (f" if {self.when if isinstance(self.when, str) else 'a function holds'}" if self.when else "")

    def place(self, frame: Frame) -> bool:
        """Whether a frame stands where this breakpoint stops, whatever the condition says."""
        if self.program is not None and frame.program != self.program:
            return False
        if self.line is not None:
            return frame.entered and frame.line == self.line and frame.op.loc.file.endswith(self.file)
        return frame.first or self.when is not None

    def holds(self, frame: Frame, look: Callable[[Frame, str], Any]) -> bool:
        """Whether the condition holds. A name without a value here makes it false; without a line, a condition that
        goes on holding stops the run once."""
        if self.when is None:
            return True
        try:
            if isinstance(self.when, str):
                found = bool(np.all(evaluate(self.when, lambda name: look(frame, name))))
            else:
                found = bool(self.when({n: frame.value(v) for n, v in frame.names().items()}))
        except _NoValueError:
            found = False
        before = frame.key in self.held
        (self.held.add if found else self.held.discard)(frame.key)
        return found and (self.line is not None or bool(self.ref) or not before)


class _NoValueError(KernelValueError):
    """A name that has no value here."""


class Session:
    """The thread, what it runs, and where it stops. It keeps no debugger alive."""

    def __init__(self, run: Callable[[], Any], constants: Mapping[str, Any]):
        self.run, self.constants = run, constants
        self.breakpoints: dict[int, Breakpoint] = {}
        self.frame: Frame | None = None
        self.reason = ""
        self.outcome: tuple[str, Any] | None = None  # "done" and the result, or "failed" and the error
        self.stop: Callable[[Frame], str | None] = lambda frame: None
        self._scopes: dict[Kernel, Scopes] = {}
        self._last: dict[Walker, tuple[int, tuple[str, int], Block | None, int]] = {}
        self._whiles: dict[tuple[Walker, Op], int] = {}
        self._begun: set[tuple[str, int]] = set()
        self._go, self._held = threading.Semaphore(0), threading.Semaphore(0)
        self._closed = self._interrupted = False
        self._thread: threading.Thread | None = None

    # -- from outside -----------------------------------------------------------------------------------------------
    def advance(self, stop: Callable[[Frame], str | None]) -> None:
        """Go on until `stop` gives a reason, a breakpoint does, or the run ends."""
        if self.outcome is not None:
            return
        self.stop = stop
        if self._thread is None:
            context = contextvars.copy_context()
            self._thread = threading.Thread(target=context.run, args=(self._body,), name="jtile debug", daemon=True)
            self._thread.start()
        else:
            self._go.release()
        try:
            self._held.acquire()
        except KeyboardInterrupt:
            self._interrupted = True
            self._held.acquire()

    def close(self) -> None:
        self._closed = True
        self._go.release()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)

    # -- in the thread ----------------------------------------------------------------------------------------------
    def _body(self) -> None:
        try:
            with watching(self):
                self.outcome = "done", self.run()
            self.reason = "the kernel has ended"
        except _Closed:
            self.outcome = "failed", KernelValueError("the debugger was closed")
        except Exception as error:
            self.outcome, self.reason = ("failed", error), f"{type(error).__name__}"
        self._held.release()

    def op(self, m: Machine, op: Op) -> None:
        """An op is about to run."""
        if self._closed:
            raise _Closed
        if is_mark(op):
            return
        self.frame = frame = self._enter(m, op)
        self._hold(self._why(frame))

    def touch(self, m: Machine, op: Op, buffer: Buffer, lanes: Lanes, kind: str) -> None:
        """An access is about to happen: watched Refs stop the run."""
        for b in [b for b in self.breakpoints.values() if kind in b.kinds]:
            v = next((v for v in m.kernel.params if v.name == b.ref), None)
            at = lanes.elements
            if v is None or m.env.get(v) is not buffer or self.frame is None:
                continue
            if b.part is not None:
                chosen = np.zeros(buffer.shape, np.bool_)
                chosen[b.part] = True
                at = at[chosen.reshape(-1)[at]]
            program = b.program is None or b.program == self.frame.program
            if at.size and program and self._holds(b, self.frame):
                b.hits += 1
                verb = {"read": "reads", "write": "writes", "atomic": "updates"}[kind]
                first = buffer.unravel(int(at[0]))
                more = f" and {at.size - 1} more" if at.size > 1 else ""
                self._hold(f"watch {b.number}: it {verb} {b.ref}[{', '.join(map(str, first))}]{more}")

    def _enter(self, m: Machine, op: Op) -> Frame:
        if m.kernel not in self._scopes:
            self._scopes[m.kernel] = Scopes(m.kernel)
        scopes = self._scopes[m.kernel]
        role = m.crew.role.name if m.crew and m.crew.role else ""
        walker = (id(m) if m.part else 0, m.where, role)
        around = scopes.around[op]
        for outer, block in around[-1:]:
            if isinstance(outer, While) and block is outer.body and scopes.index[op] == 0:
                self._whiles[walker, outer] = self._whiles.get((walker, outer), -1) + 1
        if isinstance(op, While):
            self._whiles.pop((walker, op), None)
        place, block, index = (op.loc.file, op.loc.line), around[-1][1] if around else None, scopes.index[op]
        last = self._last.get(walker)
        begins = last is None or last[:2] != (m.linear, place)
        again = last is not None and last[2] is block and index <= last[3]
        self._last[walker] = (m.linear, place, block, index)
        program = (m.where, m.linear)
        first = program not in self._begun
        self._begun.add(program)
        rounds = tuple(self._round(m, walker, outer) for outer, _ in around if isinstance(outer, For | While))
        return Frame(m, op, scopes, walker, m.linear, m.pid, begins or again, first, rounds)

    def _round(self, m: Machine, walker: Walker, op: For | While) -> tuple[Op, int, int | None]:
        if isinstance(op, While):
            return op, max(self._whiles.get((walker, op), 0), 0), None
        lo, hi, step = (int(m.env[v]) for v in (op.lo, op.hi, op.step))
        k = int(m.env.get(op.body.params[0], lo))
        return op, (k - lo) // step, len(range(lo, hi, step))

    def _why(self, frame: Frame) -> str | None:
        """Why the run stops here, or None."""
        if self._interrupted:
            self._interrupted = False
            return "interrupted"
        for b in self.breakpoints.values():
            if not b.ref and b.place(frame) and self._holds(b, frame):
                b.hits += 1
                return f"breakpoint {b.number}"
        return self.stop(frame)

    def _holds(self, b: Breakpoint, frame: Frame) -> bool:
        try:
            return b.holds(frame, self.look)
        except JtileError as error:
            self._hold(f"the condition of breakpoint {b.number} fails: {error.message}")
        except Exception as error:  # the condition is a function of the user's, which may raise anything
            self._hold(f"the condition of breakpoint {b.number} fails: {type(error).__name__}: {error}")
        return False

    def look(self, frame: Frame, name: str) -> Any:
        """The value of a name at a frame; KernelValueError where it has none."""
        names = frame.names()
        if name in names:
            return frame.value(names[name])
        own = {"pid": frame.program} | dict(self.constants)
        if name in own:
            return own[name]
        raise _NoValueError(f"{name!r} has no value here; these have: {', '.join([*names, *own]) or 'none'}")

    def _hold(self, reason: str | None) -> None:
        if reason is None:
            return
        self.reason = reason
        self._held.release()
        self._go.acquire()
        if self._closed:
            raise _Closed
