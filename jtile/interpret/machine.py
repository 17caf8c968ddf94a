"""The machine that runs one kernel call: its memory, the values of the running program, and the rules of the ops."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jtile._errors import (
    InterpreterError,
    KernelAssertionError,
    OutOfBoundsError,
    RaceError,
    UninitializedReadError,
)
from jtile.ir import AsyncLoad, AsyncStore, Kernel, Op, Value
from jtile.ir.shapes import full_array
from jtile.ir.types import DTYPES

from .arrivals import arrivals
from .memory import SEVERAL, Buffer, Handle, Lanes, index_values, poison, resolve, violation
from .picture import picture

if TYPE_CHECKING:
    from .block import Crew
    from .order import Order
    from .world import Part

RULES: dict[type[Op], Callable[[Machine, Any], Sequence[np.ndarray]]] = {}


def rule(*cards: type[Op]):
    """Registers how the interpreter runs a card that has no `reference`."""

    def register(fn):
        RULES.update(dict.fromkeys(cards, fn))
        return fn

    return register


class Watcher(Protocol):
    """An object that looks on while a kernel runs, such as the debugger; its methods may wait, or raise to end it."""

    def op(self, m: Machine, op: Op) -> None:
        """Called when an op is about to run."""

    def touch(self, m: Machine, op: Op, buffer: Buffer, lanes: Lanes, kind: str) -> None:
        """Called when an op, or its copy, is about to "read", "write" or update ("atomic") these elements."""


_WATCHER: contextvars.ContextVar[Watcher | None] = contextvars.ContextVar("jtile_watcher", default=None)


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """A block in which the watcher looks on at every kernel that is interpreted."""
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)


class Machine:
    """One call: the memory, the values of the program that runs, and its roles while they run."""

    def __init__(self, kernel: Kernel, inputs: list[np.ndarray], check: bool, seed: int = 0):
        self.kernel, self.check, self.seed, self.watch = kernel, check, seed, _WATCHER.get()
        self.crew: Crew | None = None
        self.part: Part | None = None  # on a mesh: this program among those of all devices
        self.where = ""  # the name of its device in messages
        self.silent = False  # whether prints of the kernel are left out
        self.env: dict[Value, Any] = {}
        self.pid: tuple[int, ...] = ()
        self.linear = 0
        aliased = {i: kernel.outputs[o] for i, o in kernel.aliases}
        for k, (v, x) in enumerate(zip(kernel.inputs, inputs, strict=True)):
            self.env[v] = Buffer(x, defined=True, shared=k in aliased)
            if k in aliased:
                self.env[aliased[k]] = self.env[v]
        inits = dict(zip(kernel.outputs, kernel.inits or [None] * len(kernel.outputs), strict=True))
        for v in kernel.outputs:
            if v not in self.env:
                start = poison(v.shape, v.dtype) if inits[v] is None else full_array(inits[v], v.shape, v.dtype)
                self.env[v] = Buffer(start, defined=inits[v] is not None, shared=True)
        self.read = [np.zeros(math.prod(v.shape), np.bool_) for v in kernel.params]
        self.written = [np.zeros(math.prod(v.shape), np.bool_) for v in kernel.params]
        self.position = {v: k for k, v in enumerate(kernel.params)}
        self.arrivals = arrivals(self)
        self.order: Order[Any] | None = self.arrivals

    def program(self, linear: int) -> None:
        """Run one program; the caller has NumPy's warnings of overflow, division and the like off."""
        self.enter(linear)
        self.block(self.kernel.body.ops)

    def enter(self, linear: int) -> None:
        """Become a program, with scratch of its own."""
        grid = self.kernel.grid
        self.linear, self.pid = linear, tuple(int(i) for i in np.unravel_index(linear, grid)) if grid else ()
        for v in self.kernel.scratch:
            self.env[v] = Buffer(poison(v.shape, v.dtype), defined=False)

    # -- ops ----------------------------------------------------------------------------------------------------
    def block(self, ops: Sequence[Op]) -> None:
        for op in ops:
            self.op(op)

    def op(self, op: Op) -> None:
        if self.watch is not None:
            self.watch.op(self, op)
        try:
            run = RULES.get(type(op))
            out = run(self, op) if run else op.reference(*(self.env[v] for v in op.operands()))
        except InterpreterError:
            raise
        except (ValueError, TypeError, IndexError, KeyError, ArithmeticError, MemoryError) as e:
            raise self.error(InterpreterError, op, f"{op.mnemonic} failed: {e}") from e
        out = out if isinstance(out, tuple | list) else (out,)
        for v, x in zip(op.results, out, strict=True):
            if not isinstance(x, Handle):
                x = np.asarray(x)
                if x.shape != v.shape or x.dtype != DTYPES[v.dtype].numpy:
                    got = f"{x.dtype.name}{list(x.shape)}"
                    raise self.error(InterpreterError, op, f"{op.mnemonic} gave {got} where the IR says {v.type}")
            self.env[v] = x

    def error(self, kind: type[InterpreterError], op: Op, message: str, ref: Value | None = None) -> InterpreterError:
        about = f", Ref {ref.name or '_'}" if ref is not None else ""
        about = (f", role {self.crew.role.name}" if self.crew and self.crew.role else "") + about
        where = (op.loc.file, op.loc.line) if op.loc.file else None
        who = (f"{self.where}, " if self.where else "") + f"program {self.kernel.program_text(self.pid)}"
        return kind(f"kernel {self.kernel.name}, {who}{about}: {message}", where)

    # -- memory -------------------------------------------------------------------------------------------------
    def lanes(self, op: Any) -> tuple[Buffer, Lanes]:
        """The memory that a load, store or atomic touches; raises OutOfBoundsError."""
        buffer: Buffer = self.env[op.ref]
        values = index_values(op.index, self.env)
        mask = None if getattr(op, "mask", None) is None else self.env[op.mask]
        lanes = resolve(op.index, values, buffer.shape, mask)
        if self.check and (mask.any() if mask is not None else math.prod(lanes.shape)):
            copied, inside = isinstance(op, AsyncLoad | AsyncStore), bool(self.crew and self.crew.role)
            why = violation(op.index, values, buffer.shape, beyond=inside, before=copied)
            if why:
                error = self.error(OutOfBoundsError, op, f"{op.mnemonic} out of bounds: {why}", op.ref)
                raise self._seen(error, op, buffer, mask)
        if (
            self.check
            and not getattr(op, "checked", True)
            and not resolve(op.index, values, buffer.shape, None).active.all()
        ):
            why = f"{op.mnemonic} leaves the array, but is marked unchecked"
            raise self._seen(self.error(OutOfBoundsError, op, why, op.ref), op, buffer, mask)
        return buffer, lanes

    def touch(self, op: Any, buffer: Buffer, lanes: Lanes, kind: str) -> None:
        """Record an access; raises RaceError and UninitializedReadError."""
        at = lanes.elements
        if self.watch is not None:
            self.watch.touch(self, op, buffer, lanes, kind)
        if kind != "write":
            self._flag(self.read, op.ref, at)
        if kind != "read":
            self._flag(self.written, op.ref, at)
        if not self.check:
            return
        if self.crew:
            self.crew.touch(op, at, kind)
        conflict = buffer.access(at, self.linear, kind, self.order)
        if conflict:
            element, other, did = conflict
            who = self.other_text(other) if self.order is None else self.order.name(other)
            verb = {"read": "reads", "write": "writes", "atomic": "updates atomically"}[kind]
            why = f"race: it {verb} element {buffer.unravel(element)}, which {who} {did}"
            raise self._seen(self.error(RaceError, op, why, op.ref), op, buffer, lanes, kind)
        if kind != "write" and not buffer.defined[at].all():
            element = buffer.unravel(int(at[np.argmin(buffer.defined[at])]))
            why = f"{op.mnemonic} reads element {element}, which nobody wrote"
            raise self._seen(self.error(UninitializedReadError, op, why, op.ref), op, buffer, lanes, kind)

    def _seen(
        self, error: InterpreterError, op: Any, buffer: Buffer, lanes: Lanes | np.ndarray | None, kind: str = ""
    ) -> InterpreterError:
        """The error with a picture of the access that it is about; before it is resolved, there is a mask, or None."""
        error.access = picture(self, op, buffer, lanes, kind)
        return error

    def _flag(self, flags: list[np.ndarray], ref: Value, at: np.ndarray) -> None:
        if ref in self.position:
            flags[self.position[ref]][at] = True

    def other_text(self, linear: int) -> str:
        """The name in messages of another program that touched an element; the number may stand for several."""
        return "several other programs" if linear == SEVERAL else f"program {self.named(linear)}"

    def named(self, linear: int) -> str:
        return self.kernel.program_text(self._pid_of(linear))

    def _pid_of(self, linear: int) -> tuple[int, ...]:
        return tuple(int(i) for i in np.unravel_index(linear, self.kernel.grid)) if self.kernel.grid else ()

    def failed(self, op: Any) -> InterpreterError:
        return self.error(KernelAssertionError, op, f"assertion failed: {op.message}")
