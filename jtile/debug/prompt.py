"""The debugger at a terminal: a line is a command."""

from __future__ import annotations

import cmd
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jtile._errors import JtileError, KernelValueError

if TYPE_CHECKING:
    from jtile.debug.debugger import Debugger

_SHORT = {
    "s": "step", "n": "next", "r": "round", "c": "continue", "cont": "continue", "b": "break", "p": "print",
    "w": "where", "l": "list", "q": "quit", "EOF": "quit", "exit": "quit",
}  # fmt: skip
_BREAK = re.compile(r"(?:(?:(?P<file>[^\s:]+):)?(?P<line>\d+)\b)?\s*(?:program\s+(?P<program>[\d\s,()]+?))?\s*$")
_WATCH = re.compile(r"(?P<ref>[^\s\[]+)(?:\[(?P<part>.*)\])?\s*(?P<kinds>(?:(?:read|write|atomic)\s*)*)$")


class Prompt(cmd.Cmd):
    """Commands of a debugger; an empty line does the last one again."""

    prompt = "(jtile) "
    doc_header = "Commands (help NAME says more; s, n, r, c, b, p, w, l and q stand for the first letters):"

    def __init__(self, debugger: Debugger, stdin: Any = None, stdout: Any = None):
        super().__init__(stdin=stdin, stdout=stdout or sys.stdout)
        self.use_rawinput = stdin is None and sys.stdin.isatty()
        self.debugger = debugger
        if not self.use_rawinput and not (stdin or sys.stdin).isatty():
            self.prompt = ""

    def run(self, commands: Sequence[str] = ()) -> None:
        self.say(self.debugger.where() if self.debugger.state == "stopped" else self._ending())
        for command in commands:
            if self.onecmd(command):
                return
        self.cmdloop()

    def say(self, text: str) -> None:
        self.stdout.write(text + "\n")

    def onecmd(self, line: str) -> bool:
        word, _, rest = line.strip().partition(" ")
        try:
            return bool(super().onecmd(f"{_SHORT.get(word, word)} {rest}".strip()))
        except JtileError as error:
            self.say(f"{error}")
            return False

    def default(self, line: str) -> None:
        self.say(f"there is no command {line.split()[0]!r}; help lists them")

    def _went(self, reason: str) -> None:
        if self.debugger.state == "stopped":
            self.say(f"{reason}\n{self.debugger.where()}")
        else:
            self.say(self._ending())

    def _ending(self) -> str:
        d = self.debugger
        return d.reason if d.error is None else f"{d.reason}: {d.error}" + (f"\n{d.access}" if d.access else "")

    # -- going on -----------------------------------------------------------------------------------------------------
    def do_step(self, rest: str) -> None:
        """step [N]: run one op, or N of them."""
        for _ in range(max(_number(rest or "1") - 1, 0)):
            self.debugger.step()
        self._went(self.debugger.step())

    def do_next(self, _: str) -> None:
        """next: run to the next line of the source."""
        self._went(self.debugger.next())

    def do_round(self, _: str) -> None:
        """round: run to the next round of the innermost loop."""
        self._went(self.debugger.round())

    def do_program(self, rest: str) -> None:
        """program [I, J]: run to the beginning of the next program, or of that with this id."""
        self._went(self.debugger.program(*(_pid(rest) if rest else ())))

    def do_continue(self, _: str) -> None:
        """continue: run to a breakpoint or to the end."""
        self._went(self.debugger.cont())

    # -- breakpoints --------------------------------------------------------------------------------------------------
    def do_break(self, rest: str) -> None:
        """break [[FILE:]LINE] [program I, J] [if CONDITION]: stop there; alone: list what is set."""
        if not rest:
            found = self.debugger.breakpoints.values()
            self.say("\n".join(f"{b.number}: {b}, {b.hits} times" for b in found) or "none is set")
            return
        place, when = _condition(rest)
        match = _BREAK.match(place)
        if match is None:
            raise KernelValueError(
                f"cannot read {rest!r}: write break 12, break 12 program 1, 0 or break if x.max() > 3"
            )
        line = int(match["line"]) if match["line"] else None
        pid = _pid(match["program"]) if match["program"] else None
        number = self.debugger.break_at(line, file=match["file"] or "", program=pid, when=when)
        self.say(f"{number}: {self.debugger.breakpoints[number]}")

    def do_watch(self, rest: str) -> None:
        """watch REF[PART] [read] [write] [atomic] [if CONDITION]: stop before accesses (default: changes)."""
        place, when = _condition(rest)
        match = _WATCH.match(place)
        if match is None:
            raise KernelValueError(f"cannot read {rest!r}: write watch o, or watch o[3, :8] read write")
        part = None if match["part"] is None else _part(match["part"])
        kinds = match["kinds"].split() or ("write", "atomic")
        number = self.debugger.watch(match["ref"], part, kinds=kinds, when=when)
        self.say(f"{number}: {self.debugger.breakpoints[number]}")

    def do_delete(self, rest: str) -> None:
        """delete N: take a breakpoint away."""
        self.debugger.delete(_number(rest))

    # -- looking ------------------------------------------------------------------------------------------------------
    def do_where(self, _: str) -> None:
        """where: program, loops and line, and the op that is next."""
        self.say(self.debugger.where())

    def do_list(self, _: str) -> None:
        """list: the source around the line."""
        self.say(self.debugger.list())

    def do_names(self, _: str) -> None:
        """names: what has a value here."""
        for name in self.debugger.names:
            value = self.debugger[name]
            kind = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else value
            self.say(f"{name}: {kind}" if getattr(value, "ndim", 0) else f"{name}: {kind} {value}")

    def do_print(self, rest: str) -> None:
        """print EXPRESSION: its value, such as acc, x[0, :4] or (acc - x).max()."""
        self.say(np.array2string(np.asarray(self.debugger.value(rest)), precision=4, threshold=400))

    def do_picture(self, _: str) -> None:
        """picture: of the access that failed."""
        self.say(str(self.debugger.access) if self.debugger.access else "no access has failed")

    def do_quit(self, _: str) -> bool:
        """quit: end the run."""
        self.debugger.close()
        return True


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise KernelValueError(f"{text!r} is no number") from None


def _pid(text: str) -> tuple[int, ...]:
    return tuple(_number(part) for part in re.split(r"[\s,]+", text.strip("() \t,")))


def _condition(text: str) -> tuple[str, str | None]:
    """The part of a command before `if`, and the condition behind it."""
    place, found, when = f" {text}".partition(" if ")
    return place.strip(), when.strip() if found else None


def _part(text: str) -> Any:
    """A text such as `3, :8` as an index of NumPy's."""

    def one(piece: str) -> int | slice:
        ends = [None if not e.strip() else _number(e) for e in piece.split(":")]
        return slice(*ends) if len(ends) > 1 else _number(piece)

    return tuple(one(piece) for piece in text.split(","))
